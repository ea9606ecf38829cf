"""`OpenCache`: a cache with room for a whole conversation, of which the middle is written piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvlingo.cache import Held, held_states, native_cache
from kvlingo.cache_writing import RecordingLayer, recording
from kvlingo.errors import UnsupportedCache
from kvlingo.geometry import Geometry, LayerGeometry
from kvlingo.rope import Rotary


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
        self._layers = [recording(self.cache, place) for place in geometry.cache_layers]
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
