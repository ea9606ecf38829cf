"""One target layer's map, of every kind: features in, the layer's keys and values out.

Knows weights and shapes; does not know where features come from.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from kvlingo.cache import split_heads
from kvlingo.features import TranslatorConfig
from kvlingo.geometry import LayerGeometry


class LayerMap(nn.Module):
    """Map one target layer's features [tokens, features] to its keys and values.

    Features are standardised first (their scales differ by orders of magnitude), so that weights quantise well and one
    learning rate fits all. With `multiplies_in_bfloat16` only the matrix products are rounded: standardising and the
    weights stay as they are.
    """

    feature_mean: Tensor
    feature_scale: Tensor
    key_norm_weight: Tensor
    multiplies_in_bfloat16: bool = False

    def __init__(self, config: TranslatorConfig, layer: int) -> None:
        super().__init__()
        self.shape = config.target.layers[layer]
        self.norm_kind = config.key_norms[layer] if config.key_norms else None
        width = config.feature_width(layer)
        self.register_buffer("feature_mean", torch.zeros(width))
        self.register_buffer("feature_scale", torch.ones(width))
        if self.norm_kind:
            norm_width = self.shape.key_dim if self.norm_kind == "head" else self.shape.key_width
            self.register_buffer("key_norm_weight", torch.ones(norm_width))
        self.linear = make_map(config, layer)
        self.bias = nn.Parameter(torch.zeros(self.shape.width))
        self.residual = Residual(width, config.residual_width, self.shape.width) if config.residual_width else None

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return position-free keys and values, each [1, kv_heads, tokens, dim]."""
        x = (features - self.feature_mean) / self.feature_scale
        with torch.autocast(x.device.type, torch.bfloat16) if self.multiplies_in_bfloat16 else nullcontext():
            y = self.linear(x)
            if self.residual is not None:
                y = y + self.residual(x)
        return self.finish(y.to(self.bias.dtype) + self.bias)

    def first_products(self) -> tuple[Tensor, Tensor] | None:
        """Return the weights [features, columns] that standardised features meet first, and what is added to their products.

        Side by side: the linear map, or its first factor, then the residual's hidden columns. None for another structure.
        """
        linear = self.linear
        if isinstance(linear, LinearMap):
            weights, added = list[Tensor]([linear.weight]), list[Tensor]([self.bias])
        elif isinstance(linear, LowRankMap):
            weights, added = [linear.down], [torch.zeros_like(linear.down[0])]
        else:
            return None
        if self.residual is not None:
            weights.append(self.residual.enter.weight.T)
            added.append(self.residual.enter.bias)
        return torch.cat(weights, dim=1), torch.cat(added)

    def after(self, first: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, from the first products [tokens, columns] with what is added to them.

        `dtype`: what further products are made in.
        """
        hidden = self.residual.enter.out_features if self.residual is not None else 0
        y = first[:, : first.shape[-1] - hidden]
        if isinstance(self.linear, LowRankMap):
            y = y.to(dtype) @ self.linear.up.to(dtype) + self.bias
        if self.residual is not None:
            y = y + nn.functional.gelu(first[:, -hidden:]).to(dtype) @ self.residual.leave.weight.T.to(dtype)
        return self.finish(y)

    def finish(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Split outputs [tokens, width] into heads and let the target's own key norm finish the keys."""
        keys, values = y[None].split((self.shape.key_width, self.shape.value_width), dim=-1)
        if self.norm_kind == "layer":
            keys = rms_normalise(keys) * self.key_norm_weight
        keys = split_heads(keys, self.shape.kv_heads)
        if self.norm_kind == "head":
            keys = rms_normalise(keys) * self.key_norm_weight
        return keys, split_heads(values, self.shape.kv_heads)


def rms_normalise(x: Tensor) -> Tensor:
    """Scale the last dim to RMS 1 (no epsilon beyond what keeps 0 finite: a unit vector must stay itself)."""
    return x / x.square().mean(-1, keepdim=True).clamp(min=1e-30).sqrt()


class LinearMap(nn.Module):
    """Head-mixing: every feature may reach every output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        return x @ self.weight


class LowRankMap(nn.Module):
    """Head-mixing through `rank` dims."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(inputs, rank))
        self.up = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        return (x @ self.down) @ self.up


class HeadwiseMap(nn.Module):
    """One source head to one target head, keys to keys and values to values; text features reach all.

    Target head h reads source head h * source_heads // target_heads of each paired layer.
    """

    key_index: Tensor
    value_index: Tensor

    def __init__(self, key_index: Tensor, value_index: Tensor, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.register_buffer("key_index", key_index)  # [heads, features of a head]
        self.register_buffer("value_index", value_index)
        heads, inputs = key_index.shape
        self.key_weight = nn.Parameter(torch.zeros(heads, inputs, key_dim))
        self.value_weight = nn.Parameter(torch.zeros(heads, value_index.shape[1], value_dim))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        keys = torch.einsum("thf,hfd->thd", x[:, self.key_index], self.key_weight)
        values = torch.einsum("thf,hfd->thd", x[:, self.value_index], self.value_weight)
        return torch.cat((keys.flatten(1), values.flatten(1)), dim=-1)


class Residual(nn.Module):
    """Head-mixing MLP that starts at zero, so that training starts at the ridge solution."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, hidden)
        self.leave = nn.Linear(hidden, outputs, bias=False)
        nn.init.zeros_(self.leave.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        return self.leave(nn.functional.gelu(self.enter(x)))


def make_map(config: TranslatorConfig, layer: int) -> nn.Module:
    """Build the map of one target layer as its kind asks."""
    shape, width = config.target.layers[layer], config.feature_width(layer)
    if config.map_kind == "lowrank":
        return LowRankMap(width, shape.width, min(config.rank, width, shape.width))
    if config.map_kind == "headwise":
        key_index, value_index = headwise_columns(config, layer)
        return HeadwiseMap(key_index, value_index, shape.key_dim, shape.value_dim)
    return LinearMap(width, shape.width)


def headwise_columns(config: TranslatorConfig, layer: int) -> tuple[Tensor, Tensor]:
    """Return which feature columns each target head's keys and values read: two [heads, columns]."""
    shape = config.target.layers[layer]

    def columns(head: int, values: bool) -> list[int]:
        chosen: list[int] = []
        offset = 0
        for block in config.blocks(layer):
            kind, index, *_ = block.split("/")
            if kind == "embedding":
                chosen += range(offset, offset + config.width(block))
            else:
                chosen += [
                    offset + c for c in head_columns(config.source.layers[int(index)], head, shape.kv_heads, values)
                ]
            offset += config.width(block)
        return chosen

    heads = range(shape.kv_heads)
    return torch.tensor([columns(h, False) for h in heads]), torch.tensor([columns(h, True) for h in heads])


def head_columns(source: LayerGeometry, head: int, heads: int, values: bool) -> range:
    """Return the columns of the source head that belongs to target head `head` of `heads`."""
    paired = head * source.kv_heads // heads
    dim = source.value_dim if values else source.key_dim
    first = (source.key_width if values else 0) + paired * dim
    return range(first, first + dim)
