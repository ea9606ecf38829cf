"""`KV`: a key-value cache free of position; the only place that touches the insides of transformers' caches.

Keys are un-rotated when they are read and rotated when they are written, always, so a `KV` with rotated keys can't be
built by this package. Nothing here shares storage with the cache it was read from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.geometry import Geometry, LayerGeometry
from kvlingo.rope import Rotary

CacheKind = Literal["dynamic", "static", "offloaded"]


@dataclass(frozen=True)
class KV:
    """Position-free keys and values of `tokens` consecutive tokens.

    Each layer's tensors are [batch, kv_heads, held, dim] and hold the last `held` ≤ `tokens` of them: all, or what a
    sliding window needs.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
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

    def place(self, devices: Sequence[torch.device]) -> KV:
        """Return a copy with each layer on its own device: where a model that is spread over several keeps it."""
        return KV(
            tuple(k.to(d) for k, d in zip(self.keys, devices, strict=True)),
            tuple(v.to(d) for v, d in zip(self.values, devices, strict=True)),
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


# --- reading ---------------------------------------------------------------------------------------------------------


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
                "re-prefill, and cut with kvlingo.cache.truncate"
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


# --- writing ---------------------------------------------------------------------------------------------------------


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
            _fill(_recording(cache, place), keys, values, tokens)
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


def _recording(cache: Any, index: int) -> Any:
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


# --- cutting ---------------------------------------------------------------------------------------------------------


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
        _fill(_recording(new, place), keys, values, tokens)
    return new


# --- in the making -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Room:
    """One layer's storage, [1, kv_heads, slots, dim] each: its last slots are those of a cache's last tokens.

    Fields:
        front: the slots before those of the middle; lost: how many first tokens of the middle it has none for.
    """

    keys: Tensor
    values: Tensor
    front: int
    lost: int


class OpenCache:
    """A cache of one row with room for a whole conversation, of which the middle is written piece by piece.

    Fields:
        cache: what the model goes on from, once nothing is left to read.
        start, stop: the middle; tokens: of the conversation.
        reads_first: whether what stands before the middle is left to read too.

    The rest, the tokens after the middle and, where there is no cache of what stands before it, those before it too, the model
    reads in one pass (`being_read`). Every token is written once, to where it stays: a cache that grows copies all that it
    holds for each part that is added. Sliding layers keep what comes after their window, as those of `write_cache` do.
    """

    def __init__(
        self,
        rotary: Rotary,
        geometry: Geometry,
        config: Any,
        *,
        middle: tuple[int, int],
        tokens: int,
        lost: Sequence[int],
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        before: Any = None,
    ) -> None:
        """Make room.

        Args:
            middle: the range of tokens that is written; tokens: of the conversation, up to where the cache is to go.
            lost: per layer how many first tokens of the middle nothing looks back to: neither they nor what stands before them
                is kept.
            devices: where each layer of the model computes.
            before: a cache of what stands before the middle.

        Raises `UnsupportedCache` where `before` can't be gone on from, or a layer of this model is of another kind.
        """
        self.start, self.stop = middle
        self.tokens, self.reads_first = tokens, before is None and middle[0] > 0
        self._rotary, self.cache = rotary, native_cache(config)
        held = held_states(before, geometry) if before is not None and self.start else None
        self._rooms = [
            _room(shape, n, device, dtype, self, None if held is None else held[index])
            for index, (shape, n, device) in enumerate(zip(geometry.layers, lost, devices, strict=True))
        ]
        self._layers = [_recording(self.cache, place) for place in geometry.cache_layers]
        for index, (layer, room) in enumerate(zip(self._layers, self._rooms, strict=True)):
            if type(layer) not in (DynamicLayer, RecordingLayer):
                raise UnsupportedCache(
                    f"layer {index} of this model's cache is a {type(layer).__name__}, which can't be made; re-prefill"
                )
            layer.lazy_initialization(room.keys, room.values)
            self._show(layer, room, room.front if self.reads_first else 0, room.keys.shape[2] - (tokens - self.stop))

    def write(self, pieces: Iterable[tuple[int, int, Tensor, Tensor]]) -> None:
        """Write position-free keys and values [1, kv_heads, tokens, dim] of some tokens of the middle.

        Args:
            pieces: layer, first token, keys, values; of tokens that stand close together, as cos and sin are kept till the end.
        """
        rotary, places = self._rotary.for_one_pass(), dict[tuple[int, int, torch.device], Tensor]()
        for index, first, keys, values in pieces:
            room = self._rooms[index]
            span = (first, first + keys.shape[2], room.keys.device)
            at = places.setdefault(span, torch.arange(*span[:2], device=span[2]))
            slot = room.front + first - self.start - room.lost
            here = slice(slot, slot + keys.shape[2])
            there = room.keys[:, :, here], room.values[:, :, here]
            rotary.put((keys.to(room.keys.device), values.to(room.values.device)), index, at, there)

    @property
    def left(self) -> list[int]:
        """Return the places of the tokens that are left to read."""
        return [*range(self.start if self.reads_first else 0), *range(self.stop, self.tokens)]

    def slots(self, layer: int) -> list[int]:
        """Return the place of the token in each slot that a layer shows when all is read."""
        room = self._rooms[layer]
        held = self.tokens - self.start - room.lost
        return [*range(self.start - room.front, self.start), *range(self.tokens - held, self.tokens)]

    @contextmanager
    def being_read(self) -> Iterator[Any]:
        """Give the cache to the one pass that reads what is left; what it makes goes to its place."""
        for index, layer in enumerate(self._layers):
            layer.update = partial(self._take, index)
        try:
            yield self.cache
        finally:
            for layer in self._layers:
                del layer.update  # the class's own again

    def _take(self, index: int, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put a pass's keys and values of one layer where they stay; return all that it may see."""
        layer, room = self._layers[index], self._rooms[index]
        first = self.start if self.reads_first else 0
        last = self.tokens - self.stop
        if keys.shape[2] != first + last:
            raise UnsupportedCache(f"{first + last} tokens are left to read, got {keys.shape[2]}; read them at once")
        for mine, new in ((room.keys, keys), (room.values, values)):
            mine[:, :, :first] = new[:, :, :first]
            mine[:, :, mine.shape[2] - last :] = new[:, :, first:]
        self._show(layer, room, room.front if room.lost else 0, room.keys.shape[2])
        if self.reads_first or not layer.is_sliding:
            return room.keys, room.values
        visible = layer.sliding_window - 1 + last
        return room.keys[:, :, -visible:], room.values[:, :, -visible:]

    def _show(self, layer: Any, room: _Room, start: int, stop: int) -> None:
        """Let a layer hold some of its slots."""
        layer.keys, layer.values = room.keys[:, :, start:stop], room.values[:, :, start:stop]
        if layer.is_sliding:
            layer.cumulative_length = self.tokens if stop == room.keys.shape[2] else self.stop


def _room(
    shape: LayerGeometry, lost: int, device: torch.device, dtype: torch.dtype, cache: OpenCache, before: Held | None
) -> _Room:
    """Make a layer's room, with what is there before the middle."""
    front = 0
    if cache.reads_first:
        front = cache.start
    elif before is not None and not lost:
        front = before.keys.shape[2]
    slots = front + cache.tokens - cache.start - lost
    keys, values = (
        torch.empty(1, shape.kv_heads, slots, dim, dtype=dtype, device=device)
        for dim in (shape.key_dim, shape.value_dim)
    )
    if before is not None and front:
        keys[:, :, :front], values[:, :, :front] = before.keys, before.values
    return _Room(keys, values, front, lost)


# --- sharing ---------------------------------------------------------------------------------------------------------

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


def is_in_place(held: Sequence[Held], dtype: torch.dtype, devices: Sequence[torch.device]) -> bool:
    """Tell whether layers hold numbers of a model's dtype where it computes them."""
    return all(
        (x.dtype, x.device) == (dtype, d) for h, d in zip(held, devices, strict=True) for x in (h.keys, h.values)
    )


def fork(cache: Any) -> Any:
    """Return a cache that goes on by itself from the same tokens; the old one stays as it is.

    Layers that only ever bind new tensors share theirs. All others (recurrent states are written in place) are copied.
    """
    new = copy.copy(cache)
    new.layers = [copy.copy(x) if type(x) in REBINDING_LAYERS else copy.deepcopy(x) for x in cache.layers]
    return new


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
        _fill(_recording(stacked, place), keys, values, tokens)
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


# --- at rest ---------------------------------------------------------------------------------------------------------

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


def cut_from(cache: Any, geometry: Geometry) -> int:
    """Return the least number of first tokens that a cache can be cut to, as `can_cut` tells."""
    held = held_states(cache, geometry)
    lost = [layer.tokens - layer.keys.shape[2] for layer in held]
    windows = [shape.window for shape in geometry.layers]
    return max((n + (w or held[0].tokens) - 1 for n, w in zip(lost, windows, strict=True) if n), default=0)
