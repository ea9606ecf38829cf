"""One target layer's map, of every kind: features in, the layer's keys and values out.

Knows weights and shapes; does not know where features come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from kvlingo.features import TranslatorConfig
from kvlingo.geometry import LayerGeometry
from kvlingo.kv import split_heads

Side = Literal["keys", "values"]


@dataclass(frozen=True)
class Product:
    """One of a map's first products.

    Fields:
        weight: [features that it reads, columns], or one for each target head, [heads, features of a head, columns].
        added: what is added to it: [columns], or [heads * columns].
        side: of each source layer it reads keys or values alone; None for both. Text is read by every product.
    """

    weight: Tensor
    added: Tensor
    side: Side | None = None


class LayerMap(nn.Module):
    """Map one target layer's features [tokens, features] to its keys and values.

    Features are standardised first (their scales differ by orders of magnitude), so that weights quantise well and one
    learning rate fits all. With `multiplies_in_bfloat16` only the matrix products are rounded, where the machine is fast in
    them: standardising and the weights stay as they are.
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
        is_narrow = self.multiplies_in_bfloat16 and is_fast_in_bfloat16(x.device.type)
        with torch.autocast(x.device.type, torch.bfloat16) if is_narrow else nullcontext():
            y = self.linear(x)
            if self.residual is not None:
                y = y + self.residual(x)
        return self.keys_and_values([y.to(self.bias.dtype) + self.bias])

    def first_products(self) -> tuple[Product, ...] | None:
        """Return the products that standardised features meet first; None for a structure that is not known.

        A linear map is one product, a low-rank one its first factor, a head-wise one a product a head of keys and of values. The
        residual's hidden columns stand beside a dense one, or are a product of their own.
        """
        linear, hidden = self.linear, self._hidden_product()
        if isinstance(linear, LinearMap):
            dense = Product(linear.weight, self.bias)
        elif isinstance(linear, LowRankMap):
            dense = Product(linear.down, torch.zeros_like(linear.down[0]))
        elif isinstance(linear, SplitMap | HeadwiseMap):
            (keys, values), (key_bias, value_bias) = linear.sides(), self._split(self.bias)
            products = (Product(keys, key_bias, "keys"), Product(values, value_bias, "values"))
            return products if hidden is None else (*products, hidden)
        else:
            return None
        if hidden is None:
            return (dense,)
        return (Product(torch.cat((dense.weight, hidden.weight), dim=1), torch.cat((dense.added, hidden.added))),)

    def _hidden_product(self) -> Product | None:
        if self.residual is None:
            return None
        return Product(self.residual.enter.weight.T, self.residual.enter.bias)

    def after(self, first: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs, from the first products with what is added to them.

        Both are [tokens, columns], or [heads, tokens, columns] of keys and of values; multiplied in the products' dtype.
        """
        linear, residual = self.linear, self.residual
        if isinstance(linear, SplitMap | HeadwiseMap):
            if residual is None:
                return first
            *sides, hidden = first
            beside = self._split(residual.leaving(hidden))
            return [self._by_head(x)[0] + self._by_head(y)[0] for x, y in zip(sides, beside, strict=True)]
        hidden_columns = residual.enter.out_features if residual is not None else 0
        y = first[0][:, : first[0].shape[-1] - hidden_columns]
        if isinstance(linear, LowRankMap):
            y = torch.addmm(self.bias.to(y.dtype), y, linear.up.to(y.dtype))
        if residual is not None:
            y = y + residual.leaving(first[0][:, -hidden_columns:])
        return [y]

    def keys_and_values(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return position-free keys and values, each [1, kv_heads, tokens, dim], of outputs as `after` gives them."""
        sides = outputs if len(outputs) == 2 else self._split(outputs[0])
        return self.finish(*(self._by_head(side) for side in sides))

    def _split(self, y: Tensor) -> Sequence[Tensor]:
        return y.split((self.shape.key_width, self.shape.value_width), dim=-1)

    def _by_head(self, y: Tensor) -> Tensor:
        """View outputs [tokens, width], or [heads, tokens, dim], as [1, heads, tokens, dim]."""
        return y[None] if y.ndim == 3 else split_heads(y[None], self.shape.kv_heads)

    def finish(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Let the target's own key norm finish the keys; both [1, heads, tokens, dim]."""
        if self.norm_kind:
            keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        if self.norm_kind == "head":
            keys = rms_normalise(keys) * self.key_norm_weight
        elif self.norm_kind == "layer":  # one norm over all heads of a token
            square = keys.square().mean((1, 3), keepdim=True).clamp(min=1e-30)
            keys = keys / square.sqrt() * self.key_norm_weight.view(1, self.shape.kv_heads, 1, -1)
        return keys, values


def rms_normalise(x: Tensor) -> Tensor:
    """Scale the last dim to RMS 1 (no epsilon beyond what keeps 0 finite: a unit vector must stay itself)."""
    return x / x.square().mean(-1, keepdim=True).clamp(min=1e-30).sqrt()


@cache
def is_fast_in_bfloat16(device: str) -> bool:
    """Tell whether a kind of device multiplies in bfloat16 by itself; where it must widen each number, float32 is as fast."""
    if device == "cpu":
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # public nowhere in torch 2.13
        return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in names)
    return device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


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


class SplitMap(nn.Module):
    """Keys from the keys of one source layer, values from its values, each across all heads."""

    def __init__(self, inputs: tuple[int, int], outputs: tuple[int, int]) -> None:
        super().__init__()
        self.inputs = inputs
        self.key_weight = nn.Parameter(torch.zeros(inputs[0], outputs[0]))
        self.value_weight = nn.Parameter(torch.zeros(inputs[1], outputs[1]))

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return the weights of keys and of values: [features, columns] each."""
        return self.key_weight, self.value_weight

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        keys, values = x.split(self.inputs, dim=-1)
        return torch.cat((keys @ self.key_weight, values @ self.value_weight), dim=-1)


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

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return the weights of keys and of values: [heads, features of a head, columns] each."""
        return self.key_weight, self.value_weight

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

    def leaving(self, hidden: Tensor) -> Tensor:
        """Return what `forward` does, from the hidden columns before their non-linearity, multiplying in their dtype."""
        return nn.functional.gelu(hidden) @ self.leave.weight.T.to(hidden.dtype)


def make_map(config: TranslatorConfig, layer: int) -> nn.Module:
    """Build the map of one target layer as its kind asks."""
    shape, width = config.target.layers[layer], config.feature_width(layer)
    if rank := config.rank_of(layer):
        return LowRankMap(width, shape.width, rank)
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


def paired_head(source: LayerGeometry, head: int, heads: int) -> int:
    """Return the source head that belongs to target head `head` of `heads`."""
    return head * source.kv_heads // heads


def head_columns(source: LayerGeometry, head: int, heads: int, values: bool) -> range:
    """Return the columns of the source head that belongs to target head `head` of `heads`."""
    paired = paired_head(source, head, heads)
    dim = source.value_dim if values else source.key_dim
    first = (source.key_width if values else 0) + paired * dim
    return range(first, first + dim)
