"""Files of snapshots: found by token ids after a restart, bounded in bytes, never another tenant's.

Knows names, checksums and room. A file's name is whose it is, which model's, and the checksum of all its bytes; who that is
can't be read from it: names are keyed hashes, and the key stays in the folder. Does not know models or threads that write.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvlingo.errors import BadInput
from kvlingo.files import write_file
from kvlingo.serve.freezing import Label, Unusable, read_label
from kvlingo.serve.sessions import Match, Radix, stands_in

if sys.platform != "win32":
    import fcntl

FOLDER = "conversations"
NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{64})-([0-9a-f]{64})\.safetensors")
PARTIAL = re.compile(r"\.[0-9a-f-]{162}\.safetensors\.\d+-[0-9a-f]{8}\.partial")
SECRET_BYTES = 32


@dataclass(frozen=True, eq=False)
class Stored:
    """One file. `owner`: whose, as a hash; `digest`: of all its bytes."""

    owner: str
    label: Label
    digest: str
    num_bytes: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the token ids that it holds."""
        return self.label.ids

    @property
    def exact(self) -> int:
        """Return the end of the first exact tokens."""
        return self.label.exact

    @property
    def translated_until(self) -> int:
        """Return the end of the last translated ones."""
        return self.label.translated_until

    @property
    def name(self) -> str:
        """Return the file's name."""
        return f"{self.owner}-{self.label.key}-{self.digest}.safetensors"


class Disk:
    """All files of one folder, which belongs to one server at a time.

    Where they are too many bytes, the owner that has the most gives up the one used longest ago. Several threads use it.

    Raises `BadInput` for a folder that can't be used.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder / FOLDER, max_bytes
        self.counts = Counter[str]()
        self._lock = threading.Lock()
        self._trees: dict[str, Radix[Stored]] = {}
        self._used: dict[Stored, float] = {}  # when
        self._held = Counter[str]()  # bytes by owner
        self._claim, self._secret = self._open()
        self._scan()

    # --- whose ---

    def owner(self, tenant: str) -> str:
        """Return a tenant's name in file names."""
        return self._hash("tenant", tenant)[:32]

    def key(self, *identity: str | None) -> str:
        """Return the name of a place in file names: tenant, conversation, and what the model is."""
        return self._hash("place", *identity)

    def _hash(self, *parts: str | None) -> str:
        return hmac.new(self._secret, json.dumps(parts).encode(), hashlib.sha256).hexdigest()

    # --- what is there ---

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._held.total()

    def __len__(self) -> int:
        return len(self._used)

    def holds(self, key: str) -> bool:
        """Tell whether anything is kept at a place."""
        with self._lock:
            return key in self._trees

    def at(self, key: str, ids: Sequence[int]) -> Stored | None:
        """Return the file of exactly these ids."""
        with self._lock:
            return self._trees[key].at(ids) if key in self._trees else None

    def find(self, key: str, ids: Sequence[int]) -> list[Match[Stored]]:
        """Return what shares a prefix with `ids`."""
        with self._lock:
            return self._trees[key].find(ids) if key in self._trees else []

    def read(self, stored: Stored) -> bytes:
        """Return the bytes of a file, checked against its name. Raises `Unusable`."""
        try:
            data = (self.folder / stored.name).read_bytes()
        except FileNotFoundError as error:
            raise Unusable("gone") from error
        except OSError as error:
            raise Unusable("unreadable", str(error.strerror)) from error
        if hashlib.sha256(data).hexdigest() != stored.digest:
            raise Unusable("corrupt", "a kept cache is not what was written")
        self.touch(stored, time.time())
        return data

    def touch(self, stored: Stored, when: float) -> None:
        """Note that a file was of use."""
        with self._lock:
            if stored in self._used:
                self._used[stored] = max(when, self._used[stored])
                with suppress(OSError):
                    os.utime(self.folder / stored.name, (self._used[stored],) * 2)

    # --- what comes and goes ---

    def write(self, owner: str, label: Label, data: bytes, when: float) -> None:
        """Write a file, making room first; what it can stand in for goes. Raises `Unusable` where it can't be written.

        Nothing that was used later makes room for it.
        """
        stored = Stored(owner, label, hashlib.sha256(data).hexdigest(), len(data))
        with self._lock:
            self._make_room(stored, when)
        try:
            write_file(self.folder / stored.name, data)
            os.utime(self.folder / stored.name, (when, when))
        except BadInput as error:
            full = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
            raise Unusable("disk_full" if full else "unwritable", str(error)) from error
        except OSError as error:
            raise Unusable("unwritable", str(error.strerror)) from error
        with self._lock:
            self._add(stored, when)
            if not label.cut_from:
                for other in self._trees[label.key].above(label.ids):
                    if stands_in(stored, other):
                        self._remove(other)

    def drop(self, stored: Stored) -> None:
        """Take out a file that is of no use."""
        with self._lock:
            if stored in self._used:
                self._remove(stored)

    def close(self) -> None:
        """Let another server have the folder."""
        self._claim.close()

    def _make_room(self, stored: Stored, when: float) -> None:
        if stored.num_bytes > self.max_bytes:
            raise Unusable("too_large", f"{stored.num_bytes} bytes don't fit into {self.max_bytes}")
        while self._held.total() + stored.num_bytes > self.max_bytes:
            most = max(self._held, key=lambda owner: self._held[owner])
            oldest = min((x for x in self._used if x.owner == most), key=lambda x: self._used[x])
            if most == stored.owner and self._used[oldest] > when:
                raise Unusable("no_room", "what is there was used later")
            self._remove(oldest)
            self.counts["evicted"] += 1

    def _add(self, stored: Stored, when: float) -> None:
        before = self._trees.setdefault(stored.label.key, Radix()).insert(stored)
        if before is not None:
            self._forget(before)
            if before.name != stored.name:
                self._unlink(before)
        self._used[stored] = when
        self._held[stored.owner] += stored.num_bytes

    def _remove(self, stored: Stored) -> None:
        tree = self._trees[stored.label.key]
        tree.remove(stored)
        if tree.empty:
            del self._trees[stored.label.key]
        self._forget(stored)
        self._unlink(stored)

    def _forget(self, stored: Stored) -> None:
        del self._used[stored]
        self._held[stored.owner] -= stored.num_bytes
        if not self._held[stored.owner]:
            del self._held[stored.owner]

    def _unlink(self, stored: Stored) -> None:
        with suppress(OSError):
            (self.folder / stored.name).unlink(missing_ok=True)

    # --- the start ---

    def _open(self) -> tuple[IO[bytes], bytes]:
        """Make the folder, for its owner's eyes only; claim it; return the claim and the key of its names."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            claim = (self.folder / "lock").open("ab")
            _claim(claim, self.folder)
            file = self.folder / "secret"
            if not file.exists() or len(file.read_bytes()) != SECRET_BYTES:
                write_file(file, secrets.token_bytes(SECRET_BYTES))
            return claim, file.read_bytes()
        except OSError as error:
            raise BadInput(
                f"can't keep caches in {self.folder.parent} ({error.strerror or error}); give a folder that can be "
                "written with --cache-dir"
            ) from error

    def _scan(self) -> None:
        """Find what an earlier server left; what one that was killed did not finish goes."""
        for file in sorted(self.folder.iterdir()):
            if PARTIAL.fullmatch(file.name):
                file.unlink(missing_ok=True)
                self.counts["dropped_unfinished"] += 1
                continue
            named = NAME.fullmatch(file.name)
            if named is None:
                continue
            try:
                label = read_label(file)
                if label.key != named[2]:
                    raise Unusable("foreign", "a kept cache is of another place than its name says")
                facts = file.stat()
            except (OSError, Unusable) as error:
                self.counts[f"dropped_{getattr(error, 'reason', 'unreadable')}"] += 1
                with suppress(OSError):
                    file.unlink()
                continue
            self._add(Stored(named[1], label, named[3], facts.st_size), facts.st_mtime)
        for stored in self._too_many():
            self._remove(stored)
            self.counts["evicted"] += 1

    def _too_many(self) -> Iterator[Stored]:
        for stored in sorted(self._used, key=lambda x: self._used[x]):
            if self._held.total() <= self.max_bytes:
                return
            yield stored


def _claim(file: IO[bytes], folder: Path) -> None:
    """Hold a folder as long as this process lives; on Windows two servers in one folder are not told apart."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise BadInput(
                f"another server keeps its caches in {folder.parent}; give each its own --cache-dir"
            ) from error
