"""Kept caches in a Mooncake store: a master that knows places, and processes that lend it memory.

Knows Mooncake's objects, which are written once and thrown out when the memory that was lent is full. Does not know what the
bytes mean. Engines lend nothing here, so that one that ends takes nothing along: a `mooncake_client` does, and its size is the
store's.

    kvlingo/ID/RANK              when it expires, under which name how many pieces are, and then the manifest
    kvlingo/ID/RANK/NAME/NUMBER  a piece

Pieces come first. Of several writers of one part the master takes one head; the others find that it is not theirs.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvlingo.errors import BadInput
from kvlingo.serve.external.refusals import Refused
from kvlingo.serve.external.stores import gone, pieces, refuse_larger, taken

PIECE_BYTES = 4 << 20
BUFFER_BYTES = 64 << 20  # of each process, for what is under way: threads of one engine, a piece each
REACH_SECONDS = 5.0
READS = 2
OPTIONS = ("host", "protocol", "device", "metadata")
HEAD = re.compile(rb"(\d{1,16}) ([0-9a-f]{16}) (\d{1,9})\n")

# Mooncake's own settings, where nobody has set them: its default for each is half a minute, or several of them.
USUAL = {
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}

# Mooncake's answers, `mooncake-store/include/types.h`.
NO_ROOM, NOT_YET, NOT_THERE, TIMED_OUT = -200, -703, -704, -901


@dataclass(frozen=True)
class Master:
    """Where the master is, and how this machine is reached.

    Fields:
        here: this machine's name or address, as the others reach it.
        protocol, device: tcp, or rdma with its devices.
        metadata: where the machines' addresses are kept; by default they tell each other.
    """

    host: str
    port: int
    here: str
    protocol: str = "tcp"
    device: str = ""
    metadata: str = "P2PHANDSHAKE"


def read_master(url: str) -> Master:
    """Read `mooncake://HOST:PORT[?host=HERE&protocol=rdma&device=NAMES&metadata=URL]` and see that the master answers.

    Setting a client up holds all of Python's threads until the master answers: this one does not wait for one that is down.
    Raises `BadInput`.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadInput("the store's URL can't be read; give mooncake://HOST:PORT") from error
    if not parts.hostname or port is None or parts.path.strip("/") or parts.username is not None:
        raise BadInput("the store's URL names no master; give mooncake://HOST:PORT")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise BadInput(f"the store's URL has the option {unknown[0]!r}; known are {', '.join(OPTIONS)}")
    try:
        with socket.create_connection((parts.hostname, port), REACH_SECONDS) as connection:
            here = given.pop("host", None) or connection.getsockname()[0]
    except OSError as error:
        raise BadInput(
            f"no Mooncake master answers at {parts.hostname}:{port} ({error.strerror or error}); start it first"
        ) from error
    return Master(parts.hostname, port, here, **given)


def _library() -> Any:
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store
    except ImportError as error:
        raise BadInput(
            f"Mooncake's client can't be loaded ({error}): pip install 'kvlingo[mooncake]', and Debian's libibverbs1"
        ) from error
    return store


class MooncakeStore:
    """A Mooncake store, which has to be there when an engine starts. Raises `BadInput` where it is not.

    Args:
        url: see `read_master`.
        max_bytes: the most that one part may take; all together take what was lent to the master.
    """

    def __init__(self, url: str, max_bytes: int) -> None:
        self.max_bytes, library, master = max_bytes, _library(), read_master(url)
        self._store = library.MooncakeDistributedStore()
        address = f"{master.host}:{master.port}"
        code = self._store.setup(master.here, master.metadata, 0, BUFFER_BYTES, master.protocol, master.device, address)
        if code != 0:
            raise BadInput(f"Mooncake's client can't work with the master at {address} (it answered {code})")

    def put(self, key: str, rank: int, manifest: bytes, data: bytes, expires: float) -> None:
        """See `Store`."""
        refuse_larger(len(manifest) + len(data), self.max_bytes)
        head, parts = _place(key, rank), pieces(data, PIECE_BYTES)
        name = secrets.token_hex(8)
        start = b"%d %s %d\n" % (int(expires * 1000), name.encode(), len(parts))
        if self._head(key, rank) is not None:
            raise taken()
        try:
            for number, piece in enumerate(parts):
                self._write(f"{head}/{name}/{number}", piece)
            self._write(head, start + manifest)
            if not (self._read(head) or b"").startswith(start):
                raise taken()
        except Refused:
            for number in range(len(parts)):
                self._store.remove(f"{head}/{name}/{number}", True)
            raise

    def _write(self, place: str, data: bytes | memoryview) -> None:
        code = self._store.put(place, data)
        if code != 0:
            raise _refused(code)

    def _read(self, place: str) -> bytes | None:
        """Return an object, or None where there is none."""
        code = 0
        for _ in range(READS):
            data = bytes(self._store.get(place))
            if data:
                return data
            code = self._store.get_size(place)  # an object has bytes: so why was none read?
            if code in (NOT_THERE, NOT_YET):
                return None
            if code < 0:
                break  # else it came between the two questions
        raise _refused(code)

    def _head(self, key: str, rank: int) -> tuple[float, str, int, bytes] | None:
        """Return of a part when it expires, its pieces' name and number, and its manifest; None where it is not there."""
        whole = self._read(_place(key, rank))
        if whole is None:
            return None
        head = HEAD.match(whole)
        if head is None:
            raise Refused("corrupt", "the kept cache is not what was written")
        expires = int(head[1]) / 1000
        if expires <= time.time():
            self.delete(key)  # Mooncake knows no time
            return None
        return expires, head[2].decode(), int(head[3]), whole[head.end() :]

    def manifests(self, key: str) -> list[bytes]:
        """See `Store`."""
        found: list[bytes] = []
        while (head := self._head(key, len(found))) is not None:
            found.append(head[3])
        return found

    def data(self, key: str, rank: int) -> bytes:
        """See `Store`."""
        head = self._head(key, rank)
        if head is None:
            raise gone()
        _, name, count, _ = head
        read: list[bytes] = []
        for number in range(count):
            piece = self._read(f"{_place(key, rank)}/{name}/{number}")
            if piece is None:
                raise gone()
            read.append(piece)
        return b"".join(read)

    def delete(self, key: str) -> None:
        """See `Store`."""
        rank, code = 0, 0
        while code != NOT_THERE:  # heads first: what has none is not there
            code = self._store.remove(_place(key, rank), True)
            if code not in (0, NOT_THERE, NOT_YET):
                raise _refused(code)
            rank += 1
        code = self._store.remove_by_regex(f"^kvlingo/{re.escape(key)}/.*", True)
        if code < 0:
            raise _refused(code)


def _place(key: str, rank: int) -> str:
    return f"kvlingo/{key}/{rank}"


def _refused(code: int) -> Refused:
    """Return why an answer of Mooncake is no good."""
    if code == NO_ROOM:
        return Refused("store_full", "the store of kept caches has no room")
    if code == TIMED_OUT:
        return Refused("store_slow", "the store of kept caches did not answer in time")
    told = f"Mooncake answered {code}" if code < 0 else "an object of Mooncake's can't be read"
    return Refused("store_down", f"the store of kept caches: {told}")
