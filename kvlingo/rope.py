"""Rotate and un-rotate keys: exact inverses of each other.

Knows the arithmetic of rotary position embedding (RoPE, arXiv 2104.09864). The angles come from the model's own rotary
module, so scaling (linear, llama3, yarn) and several frequency sets need no code here. Does not know caches or models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from kvlingo.geometry import LayerRope, Repeat

AngleSource = Callable[[Tensor, str | None], tuple[Tensor, Tensor]]


class Rotary:
    """The rotation of every layer of one model.

    Args:
        angles: (positions [tokens], layer type) -> cos, sin, each [tokens, dims] in float32: the model's own rotary module.
        layers: how each layer rotates; None for a layer without positions.
    """

    def __init__(self, angles: AngleSource, layers: Sequence[LayerRope | None]) -> None:
        self._angles = angles
        self.layers = tuple(layers)
        self._known: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] | None = None

    def for_one_pass(self) -> Self:
        """Return a copy that works out cos and sin once for all layers that share their frequencies and positions.

        For one pass over the layers: it holds on to what it has worked out. Layers share them if they are given the same tensor
        of positions.
        """
        mine = copy.copy(self)
        mine._known = {}
        return mine

    def rotate(self, keys: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Give position-free `keys` [batch, heads, tokens, dim] their `positions` [tokens].

        In the plane (x, y): x' = x cos - y sin, y' = y cos + x sin.
        """
        rope = self.layers[layer]
        if rope is None or not len(positions):  # some rotary modules fail when they are asked for no position
            return keys
        out = torch.empty_like(keys, memory_format=torch.contiguous_format)
        turn(keys, *self._planes(rope, positions, keys), 1, rope, out)
        return out

    def unrotate(self, keys: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Undo `rotate`, exactly.

        The inverse of the plane's map is its transpose over cos² + sin², which also takes out the attention scaling that
        yarn and longrope hide in cos and sin.
        """
        rope = self.layers[layer]
        if rope is None or not len(positions):
            return keys.clone()
        out = torch.empty_like(keys, memory_format=torch.contiguous_format)
        turn(keys, *self._planes(rope, positions, keys, inverse=True), -1, rope, out)
        return out

    def apply(self, keys: Tensor, values: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate whichever of a layer's two cached tensors holds the rotated dims."""
        if _rotates_values(self.layers[layer]):
            return keys, self.rotate(values, layer, positions)
        return self.rotate(keys, layer, positions), values

    def put(self, states: tuple[Tensor, Tensor], layer: int, positions: Tensor, room: tuple[Tensor, Tensor]) -> None:
        """Write what `apply` returns of a layer's keys and values into tensors of theirs, which may be narrower numbers."""
        rope = self.layers[layer]
        turned = None if rope is None or not len(positions) else int(_rotates_values(rope))
        for side, (x, out) in enumerate(zip(states, room, strict=True)):
            if side == turned and rope is not None:
                turn(x, *self._planes(rope, positions, x), 1, rope, out)
            else:
                out.copy_(x)

    def strip(self, keys: Tensor, values: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `apply`, exactly; both results have storage of their own."""
        if _rotates_values(self.layers[layer]):
            return keys.clone(), self.unrotate(values, layer, positions)
        return self.unrotate(keys, layer, positions), values.clone()

    def seen(self, keys: Tensor, values: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `strip` does; what was not rotated is not copied."""
        if _rotates_values(self.layers[layer]):
            return keys, self.unrotate(values, layer, positions)
        return self.unrotate(keys, layer, positions), values

    def _planes(
        self, rope: LayerRope, positions: Tensor, keys: Tensor, *, inverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [tokens, planes], at least float32, on the device of `keys`; `inverse`: over cos² + sin²."""
        dtype = torch.promote_types(keys.dtype, torch.float32)
        name = (id(positions), rope.layer_type, rope.repeat, dtype, keys.device, inverse)
        if self._known is not None and name in self._known:
            return self._known[name][1:]
        cos, sin = self._angles(positions, rope.layer_type)
        cos, sin = (one_per_plane(a, rope.repeat).to(keys.device, dtype) for a in (cos, sin))
        if inverse:
            norm = cos.square() + sin.square()
            cos, sin = cos / norm, sin / norm
        if self._known is not None:
            self._known[name] = positions, cos, sin  # with the positions: while they live, nothing else has their id
        return cos, sin


def _rotates_values(rope: LayerRope | None) -> bool:
    return rope is not None and rope.part == "values"


def one_per_plane(angles: Tensor, repeat: Repeat) -> Tensor:
    """Keep one of the two equal columns of each rotary plane: [tokens, dims] -> [tokens, dims / 2]."""
    if repeat == "once":
        return angles
    return angles[..., ::2] if repeat == "interleaved" else angles[..., : angles.shape[-1] // 2]


def turn(keys: Tensor, cos: Tensor, sin: Tensor, way: Literal[1, -1], rope: LayerRope, out: Tensor) -> None:
    """Write heads [..., tokens, dim] with every rotary plane turned by an angle, or back, into `out`; cos, sin: [tokens, planes].

    Products are summed where they end: what memory moves is what this costs.
    """
    if keys.shape[-2] != len(cos):  # `out=` would be resized, with a warning, and what it was to fill left as it is
        raise ValueError(f"{keys.shape[-2]} tokens can't be turned at {len(cos)} positions")
    start, stop = rope.offset, rope.offset + rope.dims
    wide, there = keys[..., start:stop].to(cos.dtype), out[..., start:stop]
    room = there if there.dtype == wide.dtype else torch.empty_like(wide, memory_format=torch.contiguous_format)
    (x, y), (new_x, new_y) = planes(wide, rope), planes(room, rope)
    if wide.requires_grad and torch.is_grad_enabled():  # `out=` is closed to gradients
        both = x * cos - way * y * sin, y * cos + way * x * sin
        room.copy_(torch.stack(both, dim=-1).flatten(-2) if rope.layout == "interleaved" else torch.cat(both, dim=-1))
    else:
        torch.mul(x, cos, out=new_x).addcmul_(y, sin, value=-way)
        torch.mul(y, cos, out=new_y).addcmul_(x, sin, value=way)
    if room is not there:
        there.copy_(room)
    for rest in (slice(0, start), slice(stop, None)):
        if keys[..., rest].shape[-1]:
            out[..., rest] = keys[..., rest]


def planes(rotated: Tensor, rope: LayerRope) -> tuple[Tensor, Tensor]:
    """View the two coordinates of the rotary planes."""
    if rope.layout == "interleaved":
        return rotated[..., ::2], rotated[..., 1::2]
    return rotated[..., : rope.dims // 2], rotated[..., rope.dims // 2 :]
