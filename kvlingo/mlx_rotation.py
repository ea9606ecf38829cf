"""Take the rotation out of a model of mlx-lm's keys, and put it on, with the angles of the model's own rotary module.

Knows what a rotary module does to each dim. Deliberately does not know models or caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo.errors import UnsupportedModel
from kvlingo.geometry import LayerRope, RopeLayout
from kvlingo.mlx_library import Array, mx

FAR = 777
ROUNDING = {"float32": 1e-3}
ROUNDING_ELSE = 5e-2
ROPE_NAMES = ("rope", "rotary_emb")


@dataclass(frozen=True, eq=False)
class Rotation:
    """How one layer rotates its keys: the model's own module, and which dims it turns.

    Fields:
        name: what the module does to a unit of each dim; equal for modules that rotate alike.
    """

    module: Any
    rope: LayerRope
    name: bytes

    def table(self, first: int, tokens: int, width: int) -> tuple[Array, Array]:
        """Return cos and sin [tokens, planes] in float32, as the module turns a unit along the first dim of each plane."""
        x, y = planes(self.rope)
        units = np.zeros((1, 1, tokens, width), dtype=np.float32)
        units[..., x] = 1.0
        turned = self.module(mx.array(units), offset=first)[0, 0]
        return turned[:, x], turned[:, y]


def planes(rope: LayerRope) -> tuple[slice, slice]:
    """Return the dims of the two coordinates of a head's rotary planes."""
    if rope.layout == "interleaved":
        return slice(0, rope.dims, 2), slice(1, rope.dims, 2)
    return slice(0, rope.dims // 2), slice(rope.dims // 2, rope.dims)


def unrotated(
    rotation: Rotation | None,
    keys: Array,
    first: int,
    known: dict[tuple[bytes, int, int], tuple[Array, Array]] | None = None,
) -> Array:
    """Take the positions `first` … out of keys [batch, heads, tokens, dim]: the transpose over cos² + sin², in float32.

    Layers that rotate alike share the angles of a pass in `known`.
    """
    if rotation is None:
        return keys.astype(mx.float32)
    tokens, width = keys.shape[2:]
    if not tokens:
        return keys.astype(mx.float32)
    known = {} if known is None else known
    name = (rotation.name, first, tokens)
    if name not in known:
        cos, sin = rotation.table(first, tokens, width)
        norm = cos.square() + sin.square()
        known[name] = cos / norm, sin / norm
    cos, sin = known[name]
    a, b = planes(rotation.rope)
    wide = keys.astype(mx.float32)
    x, y = wide[..., a], wide[..., b]
    free = (x * cos + y * sin, y * cos - x * sin)
    if rotation.rope.layout == "interleaved":
        turned = mx.stack(free, axis=-1).reshape(*keys.shape[:3], rotation.rope.dims)
    else:
        turned = mx.concatenate(free, axis=-1)
    return mx.concatenate((turned, wide[..., rotation.rope.dims :]), axis=-1)


def rotated(rotation: Rotation | None, keys: Array, first: int) -> Array:
    """Give position-free keys [batch, heads, tokens, dim] the positions `first` …, by the model's own module."""
    return keys if rotation is None or not keys.shape[2] else rotation.module(keys, offset=first)


def probe_rotation(layer: Any, width: int) -> Rotation | None:
    """Find out what a layer's rotary module does to each dim of a head; None where it has none, or one that turns nothing."""
    named = [(name.split(".")[-1], module) for name, module in layer.named_modules()]
    module = next((module for name, module in named if name in ROPE_NAMES), None)
    if module is None:
        return None
    turned = np.array(
        module(mx.eye(width)[None, :, None], offset=FAR)[0, :, 0]
    )  # row: which unit; column: where it went
    moved = [set(np.flatnonzero(row)) - {dim} for dim, row in enumerate(turned)]
    last = max((dim for dim, others in enumerate(moved) if others), default=-1)
    if last < 0:
        return None
    partner = min(moved[0], default=0)
    layout: RopeLayout = "interleaved" if partner == 1 and last > 1 else "half"
    dims = int(last + 1 if layout == "interleaved" else 2 * partner)
    rope = LayerRope(None, layout, "half", dims)
    return Rotation(module, rope, turned.tobytes())


def refuse_other_rotation(rotation: Rotation | None, index: int, name: str, keys: Mapping[int, Array]) -> None:
    """Raise `UnsupportedModel` unless a lone token's keys at several positions differ by the rotation alone."""
    free = {position: np.array(unrotated(rotation, x, position).astype(mx.float32)) for position, x in keys.items()}
    scale = max(float(np.abs(free[0]).max()), 1e-30)
    gap = max(float(np.abs(free[position] - free[0]).max()) for position in free) / scale
    allowed = ROUNDING.get(str(keys[0].dtype).removeprefix("mlx.core."), ROUNDING_ELSE)
    if gap > allowed:
        raise UnsupportedModel(
            f"the keys of layer {index} of {name} do not follow its rotary module: they differ by {gap:.1%} after un-rotating, "
            f"rounding explains {allowed:.1%}; KV-Lingo can't use it with MLX"
        )
