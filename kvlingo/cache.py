"""What a cache of transformers holds: read into a `KV`, all at once or layer by layer, whatever kind it is.

Knows the insides of transformers' caches, as `cache_writing.py`, `open_cache.py` and `packing.py` do, and no other module. Keys
are un-rotated when they are read; what `read_cache` returns shares no storage with the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvlingo.errors import UnsupportedCache
from kvlingo.geometry import Geometry
from kvlingo.kv import KV
from kvlingo.rope import Rotary


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
    position: int = 0,
    row: int | None = None,
    partial: bool = False,
    first_wanted: Sequence[int] | None = None,
) -> KV:
    """Copy the tokens [start, stop) of a cache into a `KV`, un-rotating its keys.

    Any cache of transformers that keeps keys and values per token is read: dynamic, sliding, static, quantised (as the
    model itself would read it next), offloaded.

    Args:
        position: where the cache's first token stands; minus the padding for a row that is padded on the left.
        row: which row of a batch; None for all rows.
        partial: let a sliding layer give less than `start` asks for, as long as the model can go on from `stop`.
        first_wanted: per layer the first token that anybody will look at, `stop` for none; those before it are left out, but
            must be there.

    Raises `UnsupportedCache` where a layer does not hold what is asked for.
    """
    parts, tokens = _parts(cache, geometry, start, stop, partial, first_wanted, row)
    rotary, places = rotary.for_one_pass(), dict[tuple[int, torch.device], Tensor]()
    keys, values = [], []
    for index, part in enumerate(parts):
        device, first = part.keys.device, part.stop - part.keys.shape[2]
        at = places.setdefault((first, device), torch.arange(first, part.stop, device=device) + position)
        free_keys, free_values = rotary.strip(part.keys, part.values, index, at)
        keys.append(free_keys)
        values.append(free_values)
    return KV(tuple(keys), tuple(values), tokens)


@dataclass(frozen=True)
class Part:
    """The last tokens before `stop` that are wanted of one cache layer: rotated, and in the cache's own storage."""

    keys: Tensor
    values: Tensor
    stop: int


def _parts(
    cache: Any,
    geometry: Geometry,
    start: int,
    stop: int | None,
    partial: bool,
    first_wanted: Sequence[int] | None,
    row: int | None,
) -> tuple[list[Part], int]:
    """Return what is asked for of each layer, and of how many tokens it is; arguments as for `read_cache`."""
    held = held_states(cache, geometry)
    tokens = held[0].tokens
    stop = tokens if stop is None else stop
    if not 0 <= start <= stop <= tokens:
        raise UnsupportedCache(f"the cache holds {tokens} tokens, got the range {start} to {stop}; give one inside it")
    rows, parts = slice(None) if row is None else slice(row, row + 1), []
    for index, (layer, shape) in enumerate(zip(held, geometry.layers, strict=True)):
        lost = tokens - layer.keys.shape[2]
        if lost > start and not (partial and lost <= shape.first_held(stop)):
            raise UnsupportedCache(
                f"layer {index} of the cache holds {tokens - lost} of {tokens} tokens, the others slid out of its window; "
                "re-prefill, or let the source read into a full-length cache (kvlingo.language_model.prefill does)"
            )
        wanted = start if first_wanted is None else max(start, first_wanted[index])
        here = slice(min(max(wanted, lost), stop) - lost, stop - lost)
        parts.append(Part(layer.keys[rows, :, here], layer.values[rows, :, here], stop))
    return parts, stop - start


def view_cache(
    cache: Any, rotary: Rotary, geometry: Geometry, *, start: int = 0, first_wanted: Sequence[int] | None = None
) -> CacheView:
    """Return what `read_cache` does, each layer made when it is asked for: for one pass over a cache that stays as it is.

    Arguments and errors as for `read_cache`; the errors come now.
    """
    parts, tokens = _parts(cache, geometry, start, None, False, first_wanted, None)
    return CacheView(parts, rotary, tokens)


class CacheView(KV):
    """A `KV` that makes a layer's position-free keys when it is asked for that layer, and keeps the last one only.

    What a hand-over reads is as large as the source's cache: a copy of it would be most of a hand-over's memory.
    """

    def __init__(self, parts: Sequence[Part], rotary: Rotary, tokens: int) -> None:
        made: dict[int, tuple[Tensor, Tensor]] = {}
        rotary, places = rotary.for_one_pass(), dict[tuple[int, int, torch.device], Tensor]()

        def layer(index: int) -> tuple[Tensor, Tensor]:
            if index not in made:
                part = parts[index]
                span = (part.stop - part.keys.shape[2], part.stop, part.keys.device)
                at = places.setdefault(span, torch.arange(*span[:2], device=span[2]))
                made.clear()
                made[index] = rotary.seen(part.keys, part.values, index, at)
            return made[index]

        # Not the dataclass's own `__init__`, which would look at every layer.
        for name, value in (
            ("keys", _Layers(lambda index: layer(index)[0], len(parts))),
            ("values", _Layers(lambda index: layer(index)[1], len(parts))),
            ("tokens", tokens),
            ("_parts", parts),
            ("_rotary", rotary),
        ):
            object.__setattr__(self, name, value)

    _parts: Sequence[Part]
    _rotary: Rotary

    def held(self, layer: int) -> int:
        """Return how many of the tokens this layer holds."""
        return self._parts[layer].keys.shape[2]

    def narrow(self, start: int, stop: int) -> CacheView:
        """Return what the layers hold of the tokens [start, stop)."""
        if not 0 <= start <= stop <= self.tokens:
            raise UnsupportedCache(f"tokens {start} to {stop} of a cache of {self.tokens} were asked for")

        def cut(part: Part) -> Part:
            lost = self.tokens - part.keys.shape[2]
            here = slice(max(start - lost, 0), max(stop - lost, 0))
            return Part(part.keys[:, :, here], part.values[:, :, here], part.stop - (self.tokens - stop))

        return CacheView([cut(part) for part in self._parts], self._rotary, stop - start)

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> KV:
        """Return this view where nothing has to move, else a copy."""
        moves = any(
            (device or x.device, dtype or x.dtype) != (x.device, x.dtype)
            for p in self._parts
            for x in (p.keys, p.values)
        )
        return super().to(device, dtype) if moves else self


class _Layers(Sequence[Tensor]):
    """One tensor a layer, made when it is asked for."""

    def __init__(self, make: Callable[[int], Tensor], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        places = range(self._count)[index]
        return self._make(places) if isinstance(places, int) else [self._make(place) for place in places]


def owning_layers(cache: Any, geometry: Geometry) -> list[Any]:
    """Return the layers of a cache that hold keys and values, in the order of the geometry; fewer if the cache has fewer."""
    if geometry.owners is None:
        return list(cache.layers)
    return [cache.layers[owner] for owner in geometry.owners if owner < len(cache.layers)]


def take_row(cache: Any, row: int, start: int, geometry: Geometry, config: Any) -> DynamicCache:
    """Return one row of a full-length cache as a cache of its own, without its first `start` slots (its padding)."""
    single = full_cache(config)
    for index, (layer, alone) in enumerate(
        zip(held_states(cache, geometry), owning_layers(single, geometry), strict=True)
    ):
        if layer.keys.shape[2] < layer.tokens:
            raise UnsupportedCache(
                f"layer {index} of the cache holds {layer.keys.shape[2]} of {layer.tokens} tokens; a row is taken out of a "
                "full-length cache only"
            )
        keys, values = (x[row : row + 1, :, start:].clone() for x in (layer.keys, layer.values))
        alone.update(keys, values)
    return single


@dataclass(frozen=True)
class Held:
    """What one cache layer holds: the last tokens of those it has read. Shares the cache's storage: copy before use."""

    keys: Tensor
    values: Tensor
    tokens: int


def held_states(cache: Any, geometry: Geometry) -> list[Held]:
    """Return what each layer of a cache holds. Every layer must have read the same tokens."""
    if hasattr(cache, "cross_attention_cache"):
        raise UnsupportedCache(
            "this is the cache of an encoder-decoder: its cross-attention belongs to the encoder's input; re-prefill"
        )
    if not hasattr(cache, "layers"):
        raise UnsupportedCache(
            f"got a {type(cache).__name__}, expected a cache of transformers; wrap it: DynamicCache(data)"
        )
    layers = owning_layers(cache, geometry)
    if not layers or not layers[0].get_seq_length():
        raise UnsupportedCache("the cache is empty; let the model read the conversation first")
    if len(layers) != len(geometry):
        raise UnsupportedCache(
            f"the cache has {len(layers)} layers, the model {len(geometry)}; give the cache that this model filled"
        )
    if getattr(cache, "offloading", False) and torch.cuda.is_available():
        torch.cuda.synchronize()  # layers travel between devices on a stream of their own
    held = [_held_by(layer, index) for index, layer in enumerate(layers)]
    for index, layer in enumerate(held):
        if layer.tokens != held[0].tokens:
            raise UnsupportedCache(
                f"layer {index} of the cache has read {layer.tokens} tokens, layer 0 {held[0].tokens}; it was cut unevenly: "
                "re-prefill, and cut with kvlingo.cache_writing.truncate"
            )
    return held


def _held_by(layer: Any, index: int) -> Held:
    if getattr(layer, "keys", None) is None:
        what = "a recurrent state" if hasattr(layer, "recurrent_states") else "nothing yet"
        raise UnsupportedCache(f"layer {index} of the cache keeps {what}, not keys and values per token; re-prefill")
    if hasattr(layer, "indexer_keys"):
        raise UnsupportedCache(
            f"layer {index} of the cache keeps an index beside its keys, which can't be made; re-prefill"
        )
    if hasattr(layer, "_quantized_keys"):
        return _dequantised(layer)
    tokens = int(layer.get_seq_length())
    if not hasattr(layer, "max_cache_len"):
        return Held(layer.keys, layer.values, tokens)
    if not layer.is_sliding and tokens > layer.max_cache_len:
        raise UnsupportedCache(
            f"layer {index} of the cache has room for {layer.max_cache_len} tokens and was given {tokens}; re-prefill"
        )
    if getattr(layer, "kvlingo_first_slot_empty_at", None) == tokens:
        return Held(layer.keys[:, :, 1:], layer.values[:, :, 1:], tokens)
    return Held(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], tokens)


def _dequantised(layer: Any) -> Held:
    """Return what a quantised layer's next query reads: the quantised tokens, then those still kept as they came."""
    keys, values = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    if getattr(layer, "_pending_beam_idx", None) is not None:
        keys, values = layer._apply_pending_reorder(keys, values)
    if layer.keys.ndim == 4:
        keys, values = torch.cat((keys, layer.keys), dim=2), torch.cat((values, layer.values), dim=2)
    return Held(keys, values, int(layer.get_seq_length()))


def is_in_place(held: Sequence[Held], dtype: torch.dtype, devices: Sequence[torch.device]) -> bool:
    """Tell whether layers hold numbers of a model's dtype where it computes them."""
    return all(
        (x.dtype, x.device) == (dtype, d) for h, d in zip(held, devices, strict=True) for x in (h.keys, h.values)
    )


def holds_all(cache: Any, geometry: Geometry) -> bool:
    """Tell whether every layer still holds every token, so that the cache can be cut anywhere."""
    try:
        return all(layer.keys.shape[2] == layer.tokens for layer in held_states(cache, geometry)) and not any(
            hasattr(layer, "recurrent_states") for layer in cache.layers
        )
    except UnsupportedCache:
        return False


def can_cut(cache: Any, tokens: int, geometry: Geometry) -> bool:
    """Tell whether a cache can go back to its first `tokens` tokens: no window has slid past what they need."""
    if tokens == int(cache.get_seq_length()):
        return True
    if any(hasattr(layer, "recurrent_states") for layer in cache.layers):
        return False
    try:
        held = held_states(cache, geometry)
    except UnsupportedCache:
        return False
    lost = (layer.tokens - layer.keys.shape[2] for layer in held)
    return all(n <= shape.first_held(tokens) for n, shape in zip(lost, geometry.layers, strict=True))


def tensors_of(cache: Any) -> Iterator[Tensor]:
    """Yield every tensor that a cache keeps."""
    for layer in cache.layers:
        for value in vars(layer).values():
            found = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            )
            yield from (x for x in found if isinstance(x, Tensor))


def cut_from(cache: Any, geometry: Geometry) -> int:
    """Return the least number of first tokens that a cache can be cut to, as `can_cut` tells."""
    held = held_states(cache, geometry)
    lost = [layer.tokens - layer.keys.shape[2] for layer in held]
    windows = [shape.window for shape in geometry.layers]
    return max((n + (w or held[0].tokens) - 1 for n, w in zip(lost, windows, strict=True) if n), default=0)
