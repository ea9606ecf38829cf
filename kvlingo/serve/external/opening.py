"""From the name of a store to the store."""

from __future__ import annotations

from pathlib import Path

from kvlingo.errors import BadInput
from kvlingo.serve.external.mooncake_store import MooncakeStore
from kvlingo.serve.external.redis_store import RedisStore
from kvlingo.serve.external.stores import FolderStore, Store

SERVERS = {"redis": RedisStore, "rediss": RedisStore, "mooncake": MooncakeStore}


def open_store(place: str, max_bytes: int) -> Store:
    """Return the store at a place: a folder, with or without `file:` before it, or a server's URL.

    Raises `BadInput` for what is none, and where a server's client is not installed.
    """
    scheme, separator, rest = place.partition(":")
    if scheme in SERVERS and separator:
        return SERVERS[scheme](place, max_bytes)
    if separator and scheme != "file" and len(scheme) > 1:
        raise BadInput(
            f"there is no store of kind {scheme!r}; give a folder that both engines see, or {'://, '.join(SERVERS)}://"
        )
    return FolderStore(Path(rest if scheme == "file" and separator else place).expanduser(), max_bytes)
