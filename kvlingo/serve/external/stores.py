"""Where kept caches are: a store keeps strings of bytes under random ids for a while, and forgets them.

Knows places, room and time; whole entries only ever become visible. Does not know what the bytes mean. Another store is one more
class with these four members (`redis_store`, `mooncake_store`).

A shared folder holds two files for each part, the bytes and then what they are: the second one appears when the first is whole.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from kvlingo.errors import BadInput
from kvlingo.files import write_file
from kvlingo.serve.external.refusals import Refused

if sys.platform != "win32":
    import fcntl

NAME = re.compile(r"([0-9a-f]{32})\.(\d+)\.(json|safetensors)")
PARTIAL = re.compile(r"\..*\.partial")
UNFINISHED_SECONDS = 600.0


class Store(Protocol):
    """A place for kept caches that several engines reach. All members may be called from several threads; all raise `Refused`."""

    def put(self, key: str, rank: int, manifest: bytes, data: bytes, expires: float) -> None:
        """Keep one part; it is there for others when this returns, and never in pieces. One that is there stays as it is."""
        ...

    def manifests(self, key: str) -> list[bytes]:
        """Return what is there of an id, one for each part, up to the first rank that is missing."""
        ...

    def data(self, key: str, rank: int) -> bytes:
        """Return the bytes of one part."""
        ...

    def delete(self, key: str) -> None:
        """Forget an id; to forget what is not there is no error."""
        ...


class FolderStore:
    """A folder that all engines see. Where it is full, what would expire first makes room. Raises `BadInput` for a bad folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BadInput(f"can't keep caches in {folder} ({error.strerror or error}); give another folder") from error

    def put(self, key: str, rank: int, manifest: bytes, data: bytes, expires: float) -> None:
        """See `Store`."""
        needed = len(manifest) + len(data)
        refuse_larger(needed, self.max_bytes)
        with self._reached(), self._alone():
            self.sweep()
            if self._file(key, rank, "json").exists():
                raise taken()
            self._make_room(needed)
            for kind, content in (("safetensors", data), ("json", manifest)):
                file = self._file(key, rank, kind)
                write_file(file, content)
                os.utime(file, (expires, expires))

    def manifests(self, key: str) -> list[bytes]:
        """See `Store`."""
        with self._reached():
            found: list[bytes] = []
            with suppress(FileNotFoundError):
                while True:
                    found.append(self._file(key, len(found), "json").read_bytes())
            return found

    def data(self, key: str, rank: int) -> bytes:
        """See `Store`."""
        with self._reached():
            return self._file(key, rank, "safetensors").read_bytes()

    def delete(self, key: str) -> None:
        """See `Store`."""
        with self._reached():
            for kind in ("json", "safetensors"):  # in this order: what has no manifest is not there
                for file in self.folder.glob(f"{key}.*.{kind}"):
                    file.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what has expired and what was never finished."""
        now = time.time()
        for file, facts in self._files():
            unfinished = PARTIAL.fullmatch(file.name) and facts.st_mtime < now - UNFINISHED_SECONDS
            if unfinished or (NAME.fullmatch(file.name) and facts.st_mtime < now):
                file.unlink(missing_ok=True)

    def _make_room(self, needed: int) -> None:
        """Forget what expires first until there is room; a file's time is when it expires."""
        sizes: dict[str, tuple[float, int]] = {}
        for file, facts in self._files():
            if named := NAME.fullmatch(file.name):
                before = sizes.get(named[1], (facts.st_mtime, 0))
                sizes[named[1]] = min(before[0], facts.st_mtime), before[1] + facts.st_size
        total = sum(size for _, size in sizes.values())
        for key in sorted(sizes, key=lambda k: sizes[k]):
            if total + needed <= self.max_bytes:
                return
            self.delete(key)
            total -= sizes[key][1]

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for file in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another engine may have removed it
                yield file, file.stat()

    def _file(self, key: str, rank: int, kind: str) -> Path:
        return self.folder / f"{key}.{rank}.{kind}"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one writer at a time count what is there; those who only read wait for nobody."""
        if sys.platform == "win32":
            yield
            return
        with (self.folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise gone() from error
        except (OSError, BadInput) as error:
            cause = error.__cause__ if isinstance(error, BadInput) else error
            full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
            # A client is told this: where the store is, is not its business.
            said = (cause.strerror if isinstance(cause, OSError) else None) or type(cause).__name__
            raise Refused("store_full" if full else "store_down", f"the store of kept caches: {said}") from error


def refuse_larger(needed: int, most: int) -> None:
    """Raise `Refused` for a part that no store of this size holds."""
    if needed > most:
        raise Refused("too_large", f"{needed} bytes don't fit into a store of {most}")


def taken() -> Refused:
    """Return what is said where a part is there already."""
    return Refused("taken", "a cache is kept under this id already")


def gone() -> Refused:
    """Return what is said where a part, or a piece of one, is not there."""
    return Refused("gone", "the kept cache is not there any more")


def pieces(data: bytes, size: int) -> list[memoryview]:
    """Cut a part for stores whose values are bounded; each piece has at least one byte."""
    view = memoryview(data)
    return [view[start : start + size] for start in range(0, len(view), size)]
