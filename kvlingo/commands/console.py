"""What commands print, and how they end: one line of error, one exit code.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 2 the input is at fault, 3 an evaluation's verdict
is FAIL, 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from kvlingo.errors import KVLingoError, UnsupportedModel

BAD_INPUT, FAILED, STOPPED = 2, 3, 130


def emit(result: dict[str, Any], as_json: bool) -> None:
    """Print the result as the last line of stdout, if asked."""
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False, allow_nan=False))


def describe(pair: Callable[[str, str], dict[str, Any]], source: str, target: str, as_json: bool) -> dict[str, Any]:
    """Return a pair's facts; one that can't be translated is an answer too, for a program that asks."""
    try:
        return pair(source, target)
    except UnsupportedModel as error:
        emit({"supported": False, "reason": str(error)}, as_json)
        raise


def write(piece: str) -> None:
    """Print a piece of text at once."""
    typer.echo(piece, nl=False)
    sys.stdout.flush()


def tell(line: str) -> None:
    """Print a line about progress."""
    typer.echo(line, err=True)


class Stopped(Exception):
    """Ctrl-C, with what was kept and how to go on."""


@contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Turn Ctrl-C, and a request to end, into one line that says what was kept."""
    try:
        with ended_like_ctrl_c():
            yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped: {kept}") from None


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does; a server sets its own way to end after this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def guarded(run: Callable[[], Any]) -> int:
    """Run and return the exit code."""
    try:
        code = run()
    except KVLingoError as error:
        return complain(str(error), BAD_INPUT)
    except Stopped as error:
        return complain(str(error), STOPPED)
    except KeyboardInterrupt:
        return complain("stopped", STOPPED)
    except Exception as error:
        return known_fault(error)
    return code if isinstance(code, int) else 0


def known_fault(error: Exception) -> int:
    """Return the exit code of an error from below that is not a bug of ours; raise any other.

    Typer brings its own copy of click or not, by version: its errors are told by what they can do.
    """
    if hasattr(error, "format_message"):
        if not error.format_message():  # no arguments at all: the help has been printed
            return BAD_INPUT
        advice = "" if "--help" in error.format_message() else "; see --help"
        return complain(f"{error.format_message().rstrip('.?')}{advice}", BAD_INPUT)
    if type(error).__name__ == "Abort":
        return complain("stopped", STOPPED)
    if type(error).__name__ == "Exit":
        return int(getattr(error, "exit_code", 1))
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
    if full:
        return complain("no space left on the disk: free some and run the same command again", BAD_INPUT)
    if isinstance(error, PermissionError):
        return complain(f"can't write {error.filename}: {error.strerror}; choose another place", BAD_INPUT)
    raise error


def complain(message: str, code: int) -> int:
    """Print one line on stderr; return the code."""
    typer.echo(f"kvlingo: {' '.join(message.split())}", err=True)
    return code
