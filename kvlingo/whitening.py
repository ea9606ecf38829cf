"""Better coordinates to train maps in: inputs made white, outputs of unit variance.

Knows maps and the statistics of their features. Without this, small learning rates make the maps worse before they help.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvlingo.ridge import factor
from kvlingo.stats import GramStats, Moments
from kvlingo.translator import LayerMap, LinearMap, LowRankMap, Translator


@dataclass
class Coordinate:
    """One trained parameter in better coordinates: parameter = base + left @ delta * right.

    `left` may be in bfloat16, where processors multiply several times as fast: base and delta keep float32, so its rounding
    changes the size of a step a little and never adds up.
    """

    parameter: nn.Parameter
    base: Tensor
    delta: nn.Parameter
    left: Tensor | None
    right: Tensor | None

    def pull_gradient(self) -> None:
        """Carry the gradient from the parameter to delta."""
        gradient = self.parameter.grad
        if gradient is None:
            raise RuntimeError("a map got no gradient: the translated cache does not reach the loss")
        if self.right is not None:
            gradient = gradient * self.right
        self.delta.grad = gradient if self.left is None else product(self.left.T, gradient)
        self.parameter.grad = None

    @torch.no_grad()
    def push_value(self) -> None:
        """Set the parameter from delta."""
        moved = self.delta if self.left is None else product(self.left, self.delta)
        self.parameter.copy_(self.base + (moved if self.right is None else moved * self.right))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply in the left matrix' dtype; return the right one's."""
    return (left @ right.to(left.dtype)).to(right.dtype)


def coordinates(
    translator: Translator, stats: GramStats, damping: float, *, dtype: torch.dtype | None = None
) -> list[Coordinate]:
    """Whiten every map's inputs and scale its outputs to unit variance, multiplying in `dtype` (the maps' own by default).

    With the features' correlation matrix C = L Lᵀ, left = L⁻ᵀ makes the inputs white; right is the outputs' standard
    deviation. Both are merged into the weights at every step: nothing of this is left after training.
    """
    found: list[Coordinate] = []
    for layer, layer_map in translator.maps.items():
        assert isinstance(layer_map, LayerMap)
        moments = stats.moments(translator.config.blocks(int(layer)), f"target/{layer}")
        scale = output_scale(layer_map, moments)
        whitened = [p for p in (layer_map.linear,) if isinstance(p, LinearMap | LowRankMap)]
        left = None
        if whitened:
            lower, _ = factor(moments.gram, damping)
            eye = torch.eye(len(lower), dtype=lower.dtype)
            left = torch.linalg.solve_triangular(lower.T, eye, upper=True)
            left = left.to(layer_map.bias.device, dtype or layer_map.bias.dtype)
        for name, parameter in layer_map.named_parameters():
            takes_left = name in ("linear.weight", "linear.down")
            ends_in_outputs = parameter.shape[-1] == len(scale) and name != "residual.leave.weight"
            found.append(
                Coordinate(
                    parameter,
                    parameter.detach().clone(),
                    nn.Parameter(torch.zeros_like(parameter)),
                    left if takes_left else None,
                    scale if ends_in_outputs else None,
                )
            )
    return found


def output_scale(layer_map: LayerMap, moments: Moments) -> Tensor:
    """Return the standard deviation of what the map's last weight matrix has to give: [outputs].

    Where keys end in the target's norm, that is a key divided by the norm's weight.
    """
    scale = moments.output_variance.clamp(min=0).sqrt().to(layer_map.bias)
    if layer_map.norm_kind is None:
        return scale
    shape, weight = layer_map.shape, layer_map.key_norm_weight.abs()
    weight = weight.repeat(shape.kv_heads) if layer_map.norm_kind == "head" else weight
    keys = torch.where(weight == 0, torch.zeros_like(weight), scale[: shape.key_width] / weight)
    return torch.cat((keys, scale[shape.key_width :]))
