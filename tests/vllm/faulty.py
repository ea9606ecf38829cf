"""The connector with a store that is as slow or broken as a file says, read at each access.

`{"data": "down", "put": 2.5, "between": 60}`: reading bytes fails, writing takes 2.5 s longer, and it takes a minute between the
bytes and their manifest.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

from kvlingo.files import write_file
from kvlingo.serve import vllm as connector
from kvlingo.serve.external import stores

KVLingoConnector = connector.KVLingoConnector


def suffer(what: str) -> None:
    """Wait or fail, if that is what is wrong."""
    file = Path(os.environ["KVLINGO_TEST_FAULTS"])
    fault = json.loads(file.read_text()).get(what) if file.exists() else None
    if fault == "down":
        raise OSError(errno.EIO, "Input/output error")
    time.sleep(fault or 0)


class FaultyStore(stores.FolderStore):
    """A folder on a bad day."""

    def put(self, key: str, rank: int, manifest: bytes, data: bytes, expires: float) -> None:
        with self._reached():
            suffer("put")
        super().put(key, rank, manifest, data, expires)

    def manifests(self, key: str) -> list[bytes]:
        with self._reached():
            suffer("manifests")
        return super().manifests(key)

    def data(self, key: str, rank: int) -> bytes:
        with self._reached():
            suffer("data")
        return super().data(key, rank)


def write_slowly(file: Path, data: bytes) -> None:
    """Write a file; a manifest may take its time."""
    if file.suffix == ".json":
        suffer("between")
    write_file(file, data)


stores.write_file = write_slowly
connector.open_store = lambda place, max_bytes: FaultyStore(Path(place), max_bytes)
