"""`KV`: a key-value cache free of position; the only place that touches the insides of transformers' caches.

Keys are un-rotated when they are read and rotated when they are written, always, so a `KV` with rotated keys can't be
built by this package. Nothing here shares storage with the cache it was read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvlingo.errors import UnsupportedCache
from kvlingo.geometry import Geometry
from kvlingo.rope import Rotary


@dataclass(frozen=True)
class KV:
    """Position-free keys and values of `tokens` consecutive tokens.

    Each layer's tensors are [batch, kv_heads, held, dim] and hold the last `held` ≤ `tokens` of them: all, or what a
    sliding window needs.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tokens: int

    def __post_init__(self) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            if keys.shape[:3] != values.shape[:3] or keys.shape[2] > self.tokens:
                raise ValueError(
                    f"keys {tuple(keys.shape)} and values {tuple(values.shape)} don't fit {self.tokens} tokens"
                )

    def __len__(self) -> int:
        return len(self.keys)

    def held(self, layer: int) -> int:
        """Return how many of the tokens this layer holds."""
        return self.keys[layer].shape[2]

    def narrow(self, start: int, stop: int) -> KV:
        """Return the tokens [start, stop) as a KV; layers must hold them all. Shares storage (a view)."""
        for layer in range(len(self)):
            if self.tokens - self.held(layer) > start:
                raise ValueError(f"layer {layer} holds no tokens before {self.tokens - self.held(layer)}")

        def cut(x: Tensor) -> Tensor:
            offset = self.tokens - x.shape[2]
            return x[:, :, start - offset : stop - offset]

        return KV(tuple(map(cut, self.keys)), tuple(map(cut, self.values)), stop - start)

    def flat(self, layer: int) -> Tensor:
        """Return the layer's features [batch, held, kv_heads * (key_dim + value_dim)]: all keys, then all values."""
        return torch.cat((flatten_heads(self.keys[layer]), flatten_heads(self.values[layer])), dim=-1)

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> KV:
        """Return a copy on another device or in another dtype."""
        return KV(
            tuple(k.to(device=device, dtype=dtype) for k in self.keys),
            tuple(v.to(device=device, dtype=dtype) for v in self.values),
            self.tokens,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))


def concat(parts: Sequence[KV]) -> KV:
    """Join consecutive spans. A part that holds only its last tokens hides what the parts before it hold."""
    tokens = sum(part.tokens for part in parts)

    def join(layer: int) -> tuple[Tensor, Tensor]:
        first = max(i for i, p in enumerate(parts) if i == 0 or p.held(layer) < p.tokens)
        return (
            torch.cat([p.keys[layer] for p in parts[first:]], dim=2),
            torch.cat([p.values[layer] for p in parts[first:]], dim=2),
        )

    joined = [join(layer) for layer in range(len(parts[0]))]
    return KV(tuple(k for k, _ in joined), tuple(v for _, v in joined), tokens)


def flatten_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] -> [batch, tokens, heads * dim]."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads * dim] -> [batch, heads, tokens, dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def full_cache(config: Any) -> DynamicCache:
    """Return an empty cache whose sliding layers keep every token: what a source reads into."""
    cache = native_cache(config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
        elif getattr(layer, "is_sliding", False):
            layer.activate_past_recording()
    return cache


def native_cache(config: Any) -> DynamicCache:
    """Return an empty cache as the model itself would make it: sliding layers keep their window only."""
    return DynamicCache(config=config)


def read_cache(
    cache: Any,
    rotary: Rotary,
    geometry: Geometry,
    *,
    start: int = 0,
    stop: int | None = None,
    partial: bool = False,
) -> KV:
    """Copy the tokens [start, stop) of a cache into a `KV`, un-rotating its keys.

    The cache's first token is taken to stand at position 0. A sliding layer that no longer holds them all raises
    `UnsupportedCache`; with `partial` it gives those that it holds (enough to go on from the cache's very end).
    """
    layers = owning_layers(cache, geometry)
    if len(layers) != len(geometry):
        raise UnsupportedCache(
            f"the cache has {len(layers)} layers, the model {len(geometry)}; give the cache that this model filled"
        )
    tokens = cache.get_seq_length()
    stop = tokens if stop is None else stop
    keys, values = [], []
    for index, layer in enumerate(layers):
        held = layer.keys.shape[2] if layer.is_initialized else 0
        lost = tokens - held
        if lost > start and not (partial and stop == tokens):
            raise UnsupportedCache(
                f"layer {index} of the cache holds {held} of {tokens} tokens, the others slid out of its window; "
                "re-prefill, or let the source read into a full-length cache (kvlingo.models.prefill does)"
            )
        first = max(start, lost)
        positions = torch.arange(first, stop, device=layer.keys.device)
        here = slice(first - lost, stop - lost)
        free_keys, free_values = rotary.strip(layer.keys[:, :, here], layer.values[:, :, here], index, positions)
        keys.append(free_keys)
        values.append(free_values)
    return KV(tuple(keys), tuple(values), stop - start)


def owning_layers(cache: Any, geometry: Geometry) -> list[Any]:
    """Return the layers of a cache that hold keys and values, in the order of the geometry; fewer if the cache has fewer."""
    if geometry.owners is None:
        return list(cache.layers)
    return [cache.layers[owner] for owner in geometry.owners if owner < len(cache.layers)]


def write_cache(kv: KV, rotary: Rotary, geometry: Geometry, config: Any) -> DynamicCache:
    """Make a cache ready for the model's next token from a `KV` of its first `kv.tokens` tokens.

    Sliding layers get only their window, and keep what comes after it: the model's own words stay readable when it hands
    over in its turn. Keeps the graph, so that distillation can differentiate through it.
    """
    cache = native_cache(config)
    for index, (layer, shape) in enumerate(zip(owning_layers(cache, geometry), geometry.layers, strict=True)):
        first = shape.first_held(kv.tokens)
        if kv.tokens - kv.held(index) > first:
            raise UnsupportedCache(
                f"layer {index} needs tokens from {first} on, got {kv.held(index)} of {kv.tokens}; re-prefill"
            )
        count = kv.tokens - first
        if count == 0:
            continue
        if shape.window is not None and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
        positions = torch.arange(first, kv.tokens, device=kv.keys[index].device)
        layer.update(*rotary.apply(kv.keys[index][:, :, -count:], kv.values[index][:, :, -count:], index, positions))
        if shape.window is not None:
            layer.cumulative_length = kv.tokens
    return cache
