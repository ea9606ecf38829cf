"""Better coordinates to train maps in: inputs made white, outputs of unit variance.

Knows maps and the statistics of their features. Without this, small learning rates make the maps worse before they help.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kvlingo.ridge import factor
from kvlingo.stats import GramStats, Moments
from kvlingo.translator import LayerMap, LinearMap, LowRankMap, Translator, TranslatorConfig


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
        moments = map_moments(translator, stats, int(layer))
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


def map_moments(translator: Translator, stats: GramStats, layer: int) -> Moments:
    """Return the second moments of one layer's features, as its map reads them, and of its outputs."""
    config = translator.config
    moments = stats.moments(config.blocks(layer), f"target/{layer}")
    if translator.text_basis is None:
        return moments
    return reduced(moments, config, layer, translator.text_basis.detach().to(moments.gram))


def reduced(moments: Moments, config: TranslatorConfig, layer: int, basis: Tensor) -> Moments:
    """Return moments of whole embeddings as those of what a basis [hidden, features] leaves of them, standardised anew."""

    def through(x: Tensor) -> Tensor:
        return text_through(x, config, layer, basis)

    raw = moments.gram * torch.outer(moments.feature_scale, moments.feature_scale)
    gram = through(through(raw).T)
    scale = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(scale > 1e-12 * scale.max().clamp(min=1e-300), scale, torch.ones_like(scale))
    cross = through(moments.cross * moments.feature_scale[:, None])
    return replace(
        moments,
        gram=gram / torch.outer(scale, scale),
        cross=cross / scale[:, None],
        feature_mean=through(moments.feature_mean[:, None])[:, 0],
        feature_scale=scale,
    )


def text_through(x: Tensor, config: TranslatorConfig, layer: int, basis: Tensor) -> Tensor:
    """Multiply the rows of x [features, columns] that are a token's embedding, lag by lag, with basis.T; keep the others."""
    hidden = basis.shape[0]
    text = hidden * len(config.embedding_lags)
    kept, rest = x[: len(x) - text], x[len(x) - text :]
    return torch.cat((kept, *(basis.T @ part for part in rest.split(hidden)))) if text else x


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
