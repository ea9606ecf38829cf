"""Caches that a model goes on from: written from a `KV`, cut, forked, and stacked to rows of a batch.

Keys are rotated when they are written. The cache that something is made from stays as it is, but for `append_row`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvlingo.cache import Held, held_states, is_in_place, native_cache, owning_layers
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.geometry import Geometry
from kvlingo.kv import KV
from kvlingo.rope import Rotary

CacheKind = Literal["dynamic", "static", "offloaded"]


class RecordingLayer(DynamicSlidingWindowLayer):
    """A sliding layer that keeps what leaves its window, and shows the model no more than the mask is made for.

    Older releases (5.16) show all that was recorded from the second pass on, which is longer than their mask.
    """

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.activate_past_recording()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to what is kept; return what the new tokens may see: [batch, kv_heads, visible, dim] each."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


def write_cache(
    kv: KV,
    rotary: Rotary,
    geometry: Geometry,
    config: Any,
    *,
    kind: CacheKind = "dynamic",
    max_length: int | None = None,
) -> Any:
    """Make a cache ready for the model's next token from a `KV` of its first `kv.tokens` tokens.

    Sliding layers get only their window, and keep what comes after it (not in a static cache): the model's own words stay
    readable when it hands over in its turn. Keeps the graph, so that distillation can differentiate through it.

    Args:
        kind: static: of fixed size, for `torch.compile`; offloaded: on the CPU between uses (needs a GPU).
        max_length: tokens that a static cache has room for, those to come included.
    """
    return _written(_empty_cache(config, kind, kv.tokens, max_length), [kv], rotary, geometry)


def write_rows(rows: Sequence[KV], rotary: Rotary, geometry: Geometry, config: Any) -> DynamicCache:
    """Make one cache of several rows of their own lengths, padded on the left with zeros.

    The model needs an attention mask that hides the padding, and each row's own positions (`kvlingo.batches` gives both).
    """
    return _written(native_cache(config), rows, rotary, geometry)


def _written(cache: Any, rows: Sequence[KV], rotary: Rotary, geometry: Geometry) -> Any:
    """Fill an empty cache with rows, and return it."""
    tokens = max(row.tokens for row in rows)
    rotary, positions = rotary.for_one_pass(), dict[tuple[int, int, torch.device], Tensor]()
    for index, (place, shape) in enumerate(zip(geometry.cache_layers, geometry.layers, strict=True)):
        slots = tokens - shape.first_held(tokens)
        states = [_last_states(row, rotary, index, shape.first_held(row.tokens), positions) for row in rows]
        if slots:
            keys, values = (_stacked(side, slots) for side in zip(*states, strict=True))
            _fill(recording(cache, place), keys, values, tokens)
        if getattr(cache, "offloading", False):
            cache.layers[place].offload()
    return cache


def _last_states(
    kv: KV, rotary: Rotary, index: int, first: int, positions: dict[tuple[int, int, torch.device], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the rotated keys and the values of a layer's tokens from `first` on."""
    count = kv.tokens - first
    if kv.held(index) < count:
        raise UnsupportedCache(
            f"layer {index} needs tokens from {first} on, got {kv.held(index)} of {kv.tokens}; re-prefill"
        )
    held, device = slice(kv.held(index) - count, None), kv.keys[index].device
    at = positions.setdefault((first, kv.tokens, device), torch.arange(first, kv.tokens, device=device))
    return rotary.apply(kv.keys[index][:, :, held], kv.values[index][:, :, held], index, at)


def _stacked(rows: Sequence[Tensor], slots: int) -> Tensor:
    """Stack rows of their own lengths, padded on the left with zeros; one row alone needs no copy."""
    padded = [pad(x, (0, 0, slots - x.shape[2], 0)) if x.shape[2] < slots else x for x in rows]
    return padded[0] if len(padded) == 1 else torch.cat(padded)


def _empty_cache(config: Any, kind: CacheKind, tokens: int, max_length: int | None) -> Any:
    if kind == "static":
        if max_length is None or max_length <= tokens:
            raise BadInput(
                f"a static cache of {tokens} tokens needs room for at least one more, got max_length={max_length}; give it"
            )
        return StaticCache(config=config, max_cache_len=max_length)
    if kind == "offloaded":
        if not torch.cuda.is_available():
            raise BadInput('an offloaded cache needs a GPU to come back to; there is none: use kind="dynamic"')
        return DynamicCache(config=config, offloading=True)
    if kind != "dynamic":
        raise BadInput(f"unknown cache kind {kind!r}; use dynamic, static or offloaded")
    return native_cache(config)


def recording(cache: Any, index: int) -> Any:
    """Return a layer of an empty cache; a sliding one is put in its place that keeps what leaves its window."""
    layer = cache.layers[index]
    if type(layer) is DynamicSlidingWindowLayer:
        layer = cache.layers[index] = RecordingLayer(layer.sliding_window)
    elif hasattr(layer, "activate_past_recording"):
        layer.activate_past_recording()
    return layer


def _fill(layer: Any, keys: Tensor, values: Tensor, tokens: int) -> None:
    """Put the last of `tokens` tokens into an empty layer, as if it had read them all."""
    static = hasattr(layer, "max_cache_len")
    if static and layer.is_sliding and tokens >= layer.max_cache_len:
        layer.lazy_initialization(keys, values)
        layer.keys[:, :, -keys.shape[2] :] = keys
        layer.values[:, :, -values.shape[2] :] = values
        layer.cumulative_length_int = tokens
        # A query sees one token fewer than there are slots: the first is dropped before the next one, and not needed here.
        layer.kvlingo_first_slot_empty_at = tokens
        return
    layer.update(keys, values)
    if layer.is_sliding and not static:
        layer.cumulative_length = tokens


def truncate(cache: Any, tokens: int, geometry: Geometry, config: Any) -> DynamicCache:
    """Return a new dynamic cache of the first `tokens` tokens; the old one stays as it is.

    `crop` of transformers means something else for each kind of layer and in each version. Here sliding layers keep all
    that they hold, and a layer that can't go on from there raises `UnsupportedCache`: what slid out of its window, or
    what a recurrent state has swallowed, can't be had back.
    """
    new = native_cache(config)
    if tokens == 0:
        return new
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if hasattr(layer, "recurrent_states"):
            raise UnsupportedCache(
                f"layer {index} of the cache keeps a recurrent state, which can't be cut; re-prefill"
            )
    held = held_states(cache, geometry)
    if not 0 <= tokens <= held[0].tokens:
        raise UnsupportedCache(f"the cache holds {held[0].tokens} tokens, got {tokens}; cut to that many at most")
    for index, (old, place, shape) in enumerate(zip(held, geometry.cache_layers, geometry.layers, strict=True)):
        lost = old.tokens - old.keys.shape[2]
        if lost > shape.first_held(tokens):
            raise UnsupportedCache(
                f"the first {lost} of {old.tokens} tokens of layer {index} slid out of its window, and those from "
                f"{shape.first_held(tokens)} on are needed to go back to {tokens}; re-prefill"
            )
        keys, values = (x[:, :, : tokens - lost].clone() for x in (old.keys, old.values))
        _fill(recording(new, place), keys, values, tokens)
    return new


# Their `update` makes new tensors and never writes into those it had, so a copy of the layer object is a copy of what it holds.
REBINDING_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, RecordingLayer)


def can_fork(cache: Any, tokens: int, geometry: Geometry, dtype: torch.dtype, devices: Sequence[torch.device]) -> bool:
    """Tell whether a model can go on from a fork of a cache: it is whole, in place, and keeps what leaves a window.

    Args:
        devices: where each layer of the model computes.

    Raises `UnsupportedCache` for a cache that this model did not fill, or that was damaged.
    """
    held = held_states(cache, geometry)
    for index, (layer, shape) in enumerate(zip(held, geometry.layers, strict=True)):
        got = [(x.shape[0], x.shape[1], x.shape[3]) for x in (layer.keys, layer.values)]
        wanted = [(1, shape.kv_heads, shape.key_dim), (1, shape.kv_heads, shape.value_dim)]
        if got != wanted:
            raise UnsupportedCache(
                f"layer {index} of the cache is {got} (rows, heads, dim), the model needs {wanted}; re-prefill"
            )
    if held[0].tokens != tokens:
        return False
    if any(type(layer) not in (DynamicLayer, RecordingLayer) for layer in cache.layers):
        return False
    whole = (
        h.keys.shape[2] >= tokens - shape.first_held(tokens) for h, shape in zip(held, geometry.layers, strict=True)
    )
    return not getattr(cache, "offloading", False) and is_in_place(held, dtype, devices) and all(whole)


def fork(cache: Any) -> Any:
    """Return a cache that goes on by itself from the same tokens; the old one stays as it is.

    Layers that only ever bind new tensors share theirs. All others (recurrent states are written in place) are copied.
    """
    new = copy.copy(cache)
    new.layers = [copy.copy(x) if type(x) in REBINDING_LAYERS else copy.deepcopy(x) for x in cache.layers]
    return new


def stack_rows(caches: Sequence[Any], geometry: Geometry, config: Any) -> Any:
    """Make one cache of several single-row ones, padded on the left with zeros: `write_rows` without leaving their rotation.

    Sliding layers get their window only, and keep what comes after it.
    """
    held = [held_states(cache, geometry) for cache in caches]
    tokens = max(layers[0].tokens for layers in held)
    stacked = native_cache(config)
    for index, (place, shape) in enumerate(zip(geometry.cache_layers, geometry.layers, strict=True)):
        slots = tokens - shape.first_held(tokens)
        if not slots:
            continue
        rows = [_last_held(layers[index], shape.first_held(layers[index].tokens), index) for layers in held]
        keys, values = (_stacked(side, slots) for side in zip(*rows, strict=True))
        _fill(recording(stacked, place), keys, values, tokens)
    return stacked


def _last_held(layer: Held, first: int, index: int) -> tuple[Tensor, Tensor]:
    count = layer.tokens - first
    if layer.keys.shape[2] < count:
        raise UnsupportedCache(
            f"layer {index} needs tokens from {first} on, got {layer.keys.shape[2]} of {layer.tokens}; re-prefill"
        )
    start = layer.keys.shape[2] - count
    return layer.keys[:, :, start:], layer.values[:, :, start:]


def append_row(cache: Any, stacked: Any, row: int, tokens: int, geometry: Geometry) -> None:
    """Append the last `tokens` tokens of one row of a stacked cache to a single-row cache, which grows in place."""
    for layer, alone in zip(held_states(stacked, geometry), owning_layers(cache, geometry), strict=True):
        start = layer.keys.shape[2] - tokens
        alone.update(layer.keys[row : row + 1, :, start:], layer.values[row : row + 1, :, start:])
