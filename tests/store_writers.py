"""A process that writes into a store when it is told to: `python -m tests.store_writers STORE MOST MARK KEYS`.

It says "ready", waits for a line, and then tells of each key what came of it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from kvlingo.serve.external.opening import open_store
from kvlingo.serve.external.refusals import Refused

LATER = 60.0


def content(mark: str, key: str) -> bytes:
    """Return what a process writes under a key: nobody else's, and of several pieces."""
    return f"{mark} {key} ".encode() * 100


def main(place: str, most: str, mark: str, *keys: str) -> None:
    """Write all keys."""
    store = open_store(place, int(most))
    say("ready")
    sys.stdin.readline()
    for key in keys:
        try:
            store.put(key, 0, mark.encode(), content(mark, key), time.time() + LATER)
            say("kept")
        except Refused as refused:
            say(refused.reason)


def say(word: str) -> None:
    """Tell the process that started this one."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def write_at_once(place: str, most: int, keys: dict[str, Sequence[str]]) -> dict[str, list[str]]:
    """Let a process for each mark write its keys, all at the same time; return by mark what came of each key."""
    running = {
        mark: subprocess.Popen(
            [sys.executable, "-m", "tests.store_writers", place, str(most), mark, *mine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for mark, mine in keys.items()
    }
    for process in running.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running.values():
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = {mark: process.communicate(timeout=60)[0].split() for mark, process in running.items()}
    assert not any(process.returncode for process in running.values())
    return said


if __name__ == "__main__":
    main(*sys.argv[1:])
