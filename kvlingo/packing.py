"""Caches at rest: as plain tensors, bit for bit, for a file that the same model reads again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvlingo.cache import held_states, native_cache
from kvlingo.cache_writing import RecordingLayer
from kvlingo.errors import UnsupportedCache
from kvlingo.geometry import Geometry

RESTING_KINDS = {"full": DynamicLayer, "sliding": DynamicSlidingWindowLayer, "recording": RecordingLayer}


@dataclass(frozen=True)
class Packed:
    """A cache as plain tensors, bit for bit: for a file that the same model reads again.

    Its keys are rotated as they were; it is no `KV` and is never translated from.

    Fields:
        tensors: keys.N and values.N of each layer that holds any.
        layers: kind, window, tokens read, and whether it records, of each layer of the cache.
    """

    tensors: Mapping[str, Tensor]
    layers: tuple[Mapping[str, Any], ...]


def pack_cache(cache: Any) -> Packed:
    """Return what a cache holds. Shares its storage where that is laid out in order.

    Raises `UnsupportedCache` for layers that keep anything else than keys and values (recurrent states, quantised ones).
    """
    kinds = {layer: name for name, layer in RESTING_KINDS.items()}
    tensors: dict[str, Tensor] = {}
    layers: list[Mapping[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        held = getattr(layer, "keys", None) is not None
        if type(layer) not in kinds and (held or hasattr(layer, "recurrent_states")):
            raise UnsupportedCache(
                f"layer {index} of the cache is a {type(layer).__name__}, which is not kept on disk; it is read again"
            )
        if held:
            tensors |= {f"keys.{index}": layer.keys.contiguous(), f"values.{index}": layer.values.contiguous()}
        layers.append(
            {
                "kind": kinds.get(type(layer), "empty"),
                "window": getattr(layer, "sliding_window", None),
                "tokens": int(layer.get_seq_length()) if held else 0,
                "records": getattr(layer, "record_past", False),
            }
        )
    return Packed(tensors, tuple(layers))


def unpack_cache(
    packed: Packed, geometry: Geometry, config: Any, *, dtype: torch.dtype, devices: Sequence[torch.device]
) -> DynamicCache:
    """Return the cache that was packed.

    Args:
        devices: where each layer of the model computes.

    Raises `UnsupportedCache` where it does not fit the model.
    """
    cache = native_cache(config)
    cache.layers = [
        cache.layers[index] if layer["kind"] == "empty" else _unpacked(packed, index, devices)
        for index, layer in enumerate(packed.layers)
    ]
    for index, (layer, shape) in enumerate(zip(held_states(cache, geometry), geometry.layers, strict=True)):
        got = (tuple(layer.keys.shape), tuple(layer.values.shape), layer.keys.dtype, layer.values.dtype)
        rows = (1, shape.kv_heads, layer.keys.shape[2])
        wanted = ((*rows, shape.key_dim), (*rows, shape.value_dim), dtype, dtype)
        if got != wanted or layer.tokens - rows[2] > shape.first_held(layer.tokens):
            raise UnsupportedCache(
                f"layer {index} of a kept cache is {got}, the model needs {wanted}; it is read again"
            )
    return cache


def _unpacked(packed: Packed, index: int, devices: Sequence[torch.device]) -> Any:
    facts = packed.layers[index]
    layer = RESTING_KINDS[facts["kind"]](*([] if facts["window"] is None else [facts["window"]]))
    if facts["records"]:
        layer.activate_past_recording()
    if f"keys.{index}" not in packed.tensors:
        return layer
    keys, values = (packed.tensors[f"{side}.{index}"].to(devices[index]) for side in ("keys", "values"))
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if layer.is_sliding:
        layer.cumulative_length = facts["tokens"]
    return layer
