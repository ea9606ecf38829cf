"""What an engine's configuration says of the translation: `kv_connector_extra_config`, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvlingo.errors import BadInput


@dataclass(frozen=True)
class Options:
    """All options.

    Fields:
        store: where kept caches are: a folder that all engines see, or the URL of a server (`opening`).
        translators: folders that `kvlingo fit` wrote, to this engine's model; none for an engine that only saves.
        max_bytes, expires_seconds: how much is kept, and for how long.
        sink, tail: first and last tokens that are never translated.
        head_tokens: the most first tokens that the worker reads on its own copy of the target before it translates.
        load_async: load between steps; else within one, and all other requests wait for it.
        save_always: keep every finished request, not only those that ask for it.
        lookup_seconds, load_seconds: how long a request waits for the store, and for its cache, before it is read again.
        threads: loads, and saves, at a time.
        unproven: use translators that no report vouches for.
        source_tokenizers: tokenizers of source models that do not share the target's: folders or hub ids.
        extract: what `kvlingo extract` wrote of this engine's model; without it each worker loads the checkpoint once more.
    """

    store: str
    translators: tuple[str, ...] = ()
    max_bytes: int = 8 << 30
    expires_seconds: float = 3600.0
    sink: int = 1
    tail: int = 1
    head_tokens: int = 64
    load_async: bool = True
    save_always: bool = False
    lookup_seconds: float = 2.0
    load_seconds: float = 30.0
    threads: int = 2
    unproven: bool = False
    source_tokenizers: tuple[str, ...] = ()
    extract: str | None = None

    def __post_init__(self) -> None:
        least = {"sink": 0, "tail": 1, "threads": 1, "head_tokens": 0, "max_bytes": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise BadInput(f"{name} is {getattr(self, name)}; give at least {bound}")
        for name in ("expires_seconds", "lookup_seconds", "load_seconds"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} is {getattr(self, name)}; give a number above 0")


def read_options(given: Mapping[str, Any]) -> Options:
    """Build the options of a configuration. Raises `BadInput` for names and types that are not known."""
    kinds = {field.name: str(field.type) for field in fields(Options)}
    unknown = sorted(set(given) - set(kinds))
    if unknown:
        raise BadInput(f"unknown option {unknown[0]!r}; known are {', '.join(kinds)}")
    if "store" not in given:
        raise BadInput(
            "no store is given; name a folder that both engines see, or a server: kv_connector_extra_config.store"
        )
    return Options(**{name: _typed(name, kinds[name], value) for name, value in given.items()})


def _typed(name: str, kind: str, value: Any) -> Any:
    if kind == "tuple[str, ...]" and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return tuple(value)
    kind = kind.removesuffix(" | None")
    accepted: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
    if kind in accepted and isinstance(value, accepted[kind]) and (kind == "bool" or not isinstance(value, bool)):
        return value
    raise BadInput(f"option {name} is {value!r}; expected {kind}")
