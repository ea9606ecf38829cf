"""A kept cache as two strings of bytes: what it is (JSON), and its keys and values (safetensors).

Knows formats, checksums, whose a cache is and until when it may be used. Does not know places. Keys are position-free:
one entry serves any target. With several ranks each writes the heads that it has; an entry is whole when all parts are there.
Nothing in it is ever executed, and nothing in it is trusted before its checksums are right.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from kvlingo.geometry import Geometry
from kvlingo.kv import KV
from kvlingo.manifest import content_hash, sealed
from kvlingo.serve.external.refusals import Refused

FORMAT = 1
ID = re.compile(r"[0-9a-f]{32}")
MOST_TOKENS = 1 << 24


def new_id() -> str:
    """Return a name that nobody can guess and that says nothing."""
    return secrets.token_hex(16)


def checked_id(given: object) -> str:
    """Return an id that a client gave, which is never a path. Raises `Refused`."""
    if not isinstance(given, str) or ID.fullmatch(given) is None:
        raise Refused(
            "bad_id",
            "what was given is no cache id: 32 hexadecimal digits, as an engine answers with or drawn at random",
        )
    return given


def tenant_of(salt: str | None) -> str:
    """Return whose a request is, as a hash of its cache salt; without a salt it is everybody's."""
    return "" if salt is None else hashlib.sha256(b"kvlingo tenant\0" + salt.encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """What one part of a kept cache says of itself.

    Fields:
        id, rank, world: which cache, which part of how many.
        fingerprint, tokenizer_hash, geometry: the model that read the tokens (`ModelCard`).
        dtype: of keys and values.
        ids: the tokens that were read, in order.
        tenant: whose it is (`tenant_of`).
        lora: the adapter that was in use, or None.
        translated_until: tokens before this one are themselves translated.
        created, expires: seconds since 1970.
        sha256, num_bytes: of the part's bytes; of what all parts agree on (`check_parts`) of all parts' bytes.
    """

    id: str
    rank: int
    world: int
    fingerprint: str
    tokenizer_hash: str
    geometry: dict[str, Any]
    dtype: str
    ids: tuple[int, ...]
    tenant: str
    lora: str | None
    translated_until: int
    created: float
    expires: float
    sha256: str = ""
    num_bytes: int = 0
    keys: str = "position-free"
    format: int = FORMAT


def pack(kv: KV) -> bytes:
    """Return the bytes of a part: `k.0`, `v.0`, `k.1` … each [heads, tokens, dim]."""
    tensors: dict[str, Tensor] = {}
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        tensors[f"k.{layer}"], tensors[f"v.{layer}"] = (x[0].detach().cpu().contiguous() for x in (keys, values))
    return save(tensors)


def describe(entry: Entry) -> bytes:
    """Return what an entry says of itself, with a hash of its own."""
    return json.dumps(sealed({"entry": asdict(entry)}), separators=(",", ":")).encode()


def parse(data: bytes, asked: str) -> Entry:
    """Return what an entry says of itself. Raises `Refused` for anything but what `describe` gave for this id."""
    try:
        document = json.loads(data)
        if document["sha256"] != content_hash(document):
            raise ValueError("its hash is not its own")
        fields = dict(document["entry"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("corrupt", f"the manifest of the kept cache is damaged ({type(error).__name__})") from error
    if fields.get("format") != FORMAT:
        raise Refused("format", f"the kept cache has format {fields.get('format')}, this version reads {FORMAT}")
    return _entry(fields, asked)


def _entry(fields: Mapping[str, Any], asked: str) -> Entry:
    try:
        entry = Entry(**{**fields, "ids": tuple(map(int, fields["ids"]))})
        whole = entry.id == asked and 0 <= entry.rank < entry.world and 0 < len(entry.ids) <= MOST_TOKENS
        if not whole or entry.keys != "position-free":
            raise ValueError("its fields contradict each other")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise Refused("corrupt", f"the manifest of the kept cache is damaged ({type(error).__name__})") from error
    return entry


def check_parts(parts: Sequence[Entry]) -> Entry:
    """Return what all parts agree on, which tells by its hash whether it is still the same cache.

    Raises `Refused` where one is missing or is of another cache.
    """
    first = parts[0]
    common = [{**asdict(p), "rank": 0, "sha256": "", "num_bytes": 0, "created": 0, "expires": 0} for p in parts]
    if any(other != common[0] for other in common):
        raise Refused("corrupt", "the parts of the kept cache are not of one cache")
    if sorted(p.rank for p in parts) != list(range(first.world)):
        raise Refused("incomplete", f"{len(parts)} of {first.world} parts of the kept cache are there")
    sums = [part.sha256 for part in sorted(parts, key=lambda part: part.rank)]
    return replace(
        first,
        rank=0,
        sha256=hashlib.sha256("".join(sums).encode()).hexdigest(),
        num_bytes=sum(part.num_bytes for part in parts),
    )


def unpack(entry: Entry, data: bytes) -> KV:
    """Return the keys and values of one part, whose bytes are checked first. Raises `Refused`."""
    if len(data) != entry.num_bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise Refused("corrupt", "the kept cache is not what was written")
    try:
        tensors = load(data)
        geometry = Geometry.from_json(entry.geometry)
        keys = tuple(tensors[f"k.{layer}"][None] for layer in range(len(geometry)))
        values = tuple(tensors[f"v.{layer}"][None] for layer in range(len(geometry)))
        for layer, shape in enumerate(geometry.layers):
            held = keys[layer].shape[2], keys[layer].shape[3], values[layer].shape[3]
            if held != (len(entry.ids), shape.key_dim, shape.value_dim):
                raise ValueError("a layer has another shape")
        return KV(keys, values, len(entry.ids))
    except Exception as error:  # bytes that someone made may raise anything
        raise Refused("corrupt", f"the kept cache can't be read ({type(error).__name__})") from error


def merge(entry: Entry, parts: Sequence[KV]) -> KV:
    """Put the heads of all ranks together, in order; heads that several ranks hold are taken once. Raises `Refused`."""
    geometry = Geometry.from_json(entry.geometry)
    keys, values = [], []
    for layer, shape in enumerate(geometry.layers):
        copies = max(1, len(parts) * parts[0].keys[layer].shape[1] // shape.kv_heads)
        chosen = parts[::copies]
        keys.append(torch.cat([p.keys[layer] for p in chosen], dim=1))
        values.append(torch.cat([p.values[layer] for p in chosen], dim=1))
        if keys[-1].shape[1] != shape.kv_heads:
            raise Refused(
                "corrupt", f"layer {layer} of the kept cache has {keys[-1].shape[1]} of {shape.kv_heads} heads"
            )
    return KV(tuple(keys), tuple(values), len(entry.ids))
