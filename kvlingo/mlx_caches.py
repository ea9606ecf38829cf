"""Read and write the prompt caches of mlx-lm: what `cache` does with PyTorch's.

Knows every kind of prompt cache that holds keys and values per token. Deliberately does not know translators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.mlx_library import Array, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache, mx
from kvlingo.mlx_models import MlxModel
from kvlingo.mlx_rotation import unrotated

CHUNK = 2048


def native_prompt_cache(lm: MlxModel) -> list[Any]:
    """Return an empty prompt cache as mlx-lm makes it: sliding layers keep their window only."""
    return list(make_prompt_cache(lm.model))


def full_prompt_cache(lm: MlxModel) -> list[Any]:
    """Return an empty prompt cache whose sliding layers keep every token: what a source reads into."""
    return [KVCache() for _ in lm.geometry.layers]


def read(lm: MlxModel, ids: Sequence[int], cache: list[Any], *, chunk: int = CHUNK) -> Array:
    """Let a model read ids after what a prompt cache holds; return the logits [vocabulary] of the next token."""
    if not ids:
        raise BadInput("nothing to read: got no token ids")
    logits = None
    for start in range(0, len(ids), chunk):
        logits = lm.model(mx.array(list(ids[start : start + chunk]))[None], cache=cache)[0, -1]
        mx.eval(logits, [(one.keys, one.values) for one in cache])
    return logits


@dataclass(frozen=True)
class Held:
    """What one layer of a prompt cache holds: the last of `tokens` tokens that it has read."""

    keys: Array
    values: Array
    tokens: int

    @property
    def lost(self) -> int:
        """Return how many first tokens are no longer there."""
        return self.tokens - int(self.keys.shape[2])


def held_by(cache: Any, index: int) -> Held:
    """Return what a layer's cache holds. Raises `UnsupportedCache` for a kind that can't be read."""
    if getattr(cache, "keys", None) is None or not cache.offset:
        raise UnsupportedCache(f"layer {index} of the prompt cache is empty or no cache of keys and values; re-prefill")
    tokens = int(cache.offset)
    if type(cache) is KVCache:
        return Held(cache.keys[:, :, :tokens], cache.values[:, :, :tokens], tokens)
    if type(cache) is QuantizedKVCache:
        pair = (
            mx.dequantize(*side, group_size=cache.group_size, bits=cache.bits) for side in (cache.keys, cache.values)
        )
        keys, values = (side[:, :, :tokens] for side in pair)
        return Held(keys, values, tokens)
    if type(cache) is not RotatingKVCache:
        raise UnsupportedCache(
            f"layer {index} of the prompt cache is a {type(cache).__name__}, which can't be read; re-prefill"
        )
    keys, values = in_order(cache)
    if keys.shape[2] < tokens and cache.keep:
        raise UnsupportedCache(
            f"layer {index} of the prompt cache dropped tokens from its middle (max_kv_size); re-prefill, or read without it"
        )
    if tokens >= cache.max_size and not bool(
        mx.any(keys[:, :, :1])
    ):  # what `fill` puts into the slot that is overwritten next
        keys, values = keys[:, :, 1:], values[:, :, 1:]
    return Held(keys, values, tokens)


def in_order(cache: Any) -> tuple[Array, Array]:
    """Return a rotating cache's keys and values from the oldest to the newest."""

    def sorted_(x: Array) -> Array:
        at = cache._idx
        if at == x.shape[2]:
            return x
        if at < cache.offset:
            return mx.concatenate((x[:, :, : cache.keep], x[:, :, at:], x[:, :, cache.keep : at]), axis=2)
        return x[:, :, :at]

    return sorted_(cache.keys), sorted_(cache.values)


@dataclass(frozen=True)
class FreeKV:
    """Position-free keys and values [1, heads, held, dim] in float32 of a prompt cache; of each layer from token `first` on."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    first: tuple[int, ...]


def read_prompt_cache(lm: MlxModel, cache: Sequence[Any], *, stop: int, first_wanted: Sequence[int]) -> FreeKV:
    """Return a prompt cache's tokens before `stop`, free of position; of each layer from the first token that is wanted on.

    Raises `UnsupportedCache` where a layer does not hold what is wanted.
    """
    if len(cache) != len(lm.geometry):
        raise UnsupportedCache(f"the prompt cache has {len(cache)} layers, {lm.name} {len(lm.geometry)}; give its own")
    held = [held_by(one, index) for index, one in enumerate(cache)]
    known: dict[tuple[bytes, int, int], tuple[Array, Array]] = {}
    keys, values, first = [], [], []
    for index, (layer, wanted) in enumerate(zip(held, first_wanted, strict=True)):
        if layer.tokens != held[0].tokens or layer.tokens < stop or layer.keys.shape[0] != 1:
            raise UnsupportedCache(
                f"layer {index} of the prompt cache holds {layer.keys.shape[0]} × {layer.tokens} tokens, 1 × {stop} or more are "
                "needed in every layer; re-prefill"
            )
        start = min(wanted, stop)
        if layer.lost > start and start < stop:
            raise UnsupportedCache(
                f"layer {index} of the prompt cache holds the last {layer.tokens - layer.lost} of {layer.tokens} tokens, "
                f"those from {start} on are needed; re-prefill, or let the source read into kvlingo.mlx.full_prompt_cache"
            )
        here = slice(max(start - layer.lost, 0), max(stop - layer.lost, 0))
        keys.append(unrotated(lm.rotations[index], layer.keys[:, :, here], start, known))
        values.append(layer.values[:, :, here].astype(mx.float32))
        first.append(start)
    return FreeKV(tuple(keys), tuple(values), tuple(first))


def fill(cache: Any, keys: Array, values: Array, tokens: int) -> None:
    """Put the last of `tokens` tokens, rotated, into an empty cache of one layer, as if it had read them all.

    A rotating cache that is full has one slot more than its next query sees: it gets a filler, which the next token takes the
    place of.
    """
    if type(cache) is RotatingKVCache:
        if tokens >= cache.max_size:
            keys, values = (
                mx.concatenate((mx.zeros_like(x[:, :, :1]), x[:, :, -(cache.max_size - 1) :]), axis=2)
                for x in (keys, values)
            )
        cache._idx = keys.shape[2]
    cache.keys, cache.values, cache.offset = keys, values, tokens
