"""A state as the bytes of a safetensors file, and back, bit for bit.

Knows caches, readings and spans. Does not know files' places, whose they are, or when they are written. What comes out of `thaw`
is what went into `freeze`, or `Unusable` with a reason.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from kvlingo.cache import cut_from
from kvlingo.errors import UnsupportedCache
from kvlingo.language_model import LanguageModel, layer_devices
from kvlingo.packing import Packed, pack_cache, unpack_cache
from kvlingo.plan import Provenance, Span, SpanKind
from kvlingo.reading import Reading
from kvlingo.serve.sessions import exact_until
from kvlingo.states import ModelState

FORMAT = 1
MOST_HEADER_BYTES = 16 << 20


class Unusable(Exception):
    """A snapshot that can't be kept or a file that can't be used; `reason` is one of a few words that are counted."""

    def __init__(self, reason: str, why: str = "") -> None:
        super().__init__(why or reason)
        self.reason = reason


@dataclass(frozen=True)
class Label:
    """What a file says of itself: enough to find it by token ids.

    Fields:
        key: whose it is and which model's.
        cut_from: the least number of first tokens that can be had without the rest.
    """

    key: str
    ids: tuple[int, ...]
    exact: int
    translated_until: int
    cut_from: int


def freeze(state: ModelState, key: str, lm: LanguageModel) -> tuple[Label, bytes]:
    """Return a state as the bytes of a file. Raises `Unusable` for a cache that is not kept on disk."""
    reading, tokens = state.reading, int(state.cache.get_seq_length())
    try:
        packed = pack_cache(state.cache)
        least = cut_from(state.cache, lm.geometry)
    except UnsupportedCache as error:
        raise Unusable("unsupported", str(error)) from error
    label = Label(key, reading.ids[:tokens], exact_until(state.spans), state.translated_until, least)
    note = {
        "format": FORMAT,
        "key": key,
        "tokens": tokens,
        "exact": label.exact,
        "translated_until": label.translated_until,
        "cut_from": least,
        "layers": list(packed.layers),
        "spans": [asdict(span) for span in state.spans],
        "no_text": state.no_text,
    }
    tensors = {name: _alone(x) for name, x in packed.tensors.items()} | {
        "ids": torch.tensor(reading.ids, dtype=torch.int32),
        "text.spans": torch.tensor(reading.spans, dtype=torch.int64).reshape(-1, 2),
        "text.contents": torch.tensor(reading.contents, dtype=torch.int64).reshape(-1, 2),
        "text.stream": torch.frombuffer(bytearray(reading.stream or b"\0"), dtype=torch.uint8)[: len(reading.stream)],
    }
    return label, save(tensors, metadata={"kvlingo": json.dumps(note)})


def _alone(x: Tensor) -> Tensor:
    """Return a tensor on the CPU that is all of its storage: what is written shares nothing with its neighbours."""
    there = x.detach().cpu()
    return there if there.untyped_storage().nbytes() == there.numel() * there.element_size() else there.clone()


def thaw(data: bytes, key: str, lm: LanguageModel) -> ModelState:
    """Return the state in a file's bytes, whose checksum is known to be right.

    Raises `Unusable`: `foreign` for one of another place, model or format, `corrupt` for one that can't be read at all.
    """
    try:
        note, _ = _header(data[: 8 + MOST_HEADER_BYTES])
        if note.get("format") != FORMAT or note["key"] != key:
            raise Unusable("foreign", "a kept cache is of another place, model or format")
        tensors = load(data)
        reading = Reading(
            tuple(tensors["ids"].tolist()),
            tuple((a, b) for a, b in tensors["text.spans"].tolist()),
            tuple((a, b) for a, b in tensors["text.contents"].tolist()),
            tensors["text.stream"].numpy().tobytes(),
        )
        spans = tuple(
            Span(s["start"], s["stop"], SpanKind(s["kind"]), Provenance(s["provenance"]), s["reason"])
            for s in note["spans"]
        )
        packed = Packed(tensors, tuple(note["layers"]))
        cache = unpack_cache(packed, lm.geometry, lm.model.config, dtype=lm.dtype, devices=layer_devices(lm.model))
        if int(cache.get_seq_length()) != note["tokens"] or note["tokens"] > len(reading):
            raise Unusable("corrupt", "a kept cache has another length than it says")
    except Unusable:
        raise
    except UnsupportedCache as error:
        raise Unusable("foreign", str(error)) from error
    except Exception as error:  # a file that someone made may raise anything
        raise Unusable("corrupt", f"{type(error).__name__} in a kept cache") from error
    return ModelState(reading, cache, spans, bool(note["no_text"]))


def read_label(file: Path) -> Label:
    """Return what a file says of itself, reading little of it: nothing is known of its checksum yet.

    Raises `Unusable` for one that is no such file or has another length than it says.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
            (size,) = struct.unpack("<Q", start)
            if size > MOST_HEADER_BYTES:
                raise ValueError("the header is too long")
            note, header = _header(start + stream.read(size))
            if max(x["data_offsets"][1] for x in header.values()) + 8 + size != file.stat().st_size:
                raise ValueError("the file was cut")
            first, last = header["ids"]["data_offsets"]
            stream.seek(8 + size + first)
            ids = torch.frombuffer(bytearray(stream.read(last - first)), dtype=torch.int32).tolist()
            label = Label(
                str(note["key"]),
                tuple(ids[: int(note["tokens"])]),
                int(note["exact"]),
                int(note["translated_until"]),
                int(note["cut_from"]),
            )
            if not label.ids:
                raise ValueError("it holds no token")
            return label
    except OSError as error:
        raise Unusable("unreadable", str(error.strerror)) from error
    except Exception as error:
        raise Unusable("corrupt", f"{type(error).__name__} in a kept cache") from error


def _header(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the note and the places of all tensors from the beginning of a safetensors file."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return json.loads(header.pop("__metadata__")["kvlingo"]), header
