"""Compute a translator's maps with MLX: what `translator` does with PyTorch.

Knows every kind of map, and the features that it reads. Deliberately does not know prompt caches or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvlingo.errors import IncompatiblePair
from kvlingo.mlx_caches import FreeKV
from kvlingo.mlx_library import Array, mx, nn
from kvlingo.mlx_models import Caught, Filled, MlxModel
from kvlingo.mlx_rotation import unrotated
from kvlingo.translator import HeadwiseMap, LayerMap, LinearMap, LowRankMap, Translator, first_needed


@dataclass(frozen=True)
class Block:
    """Feature rows of which many may be alike: `rows[index]`; `index` is None where all are there."""

    rows: Array
    index: Array | None = None

    def whole(self) -> Array:
        """Return all rows."""
        return self.rows if self.index is None else self.rows[self.index]


class MlxMap:
    """One target layer's map, as MLX computes it; see `translator.LayerMap`."""

    def __init__(self, layer_map: LayerMap, widths: Sequence[int], *, short: bool) -> None:
        self.shape, self.norm_kind = layer_map.shape, layer_map.norm_kind
        self.norm_weight = array(layer_map.key_norm_weight) if self.norm_kind else None
        self.mean, self.scale, self.bias = (
            array(x) for x in (layer_map.feature_mean, layer_map.feature_scale, layer_map.bias)
        )
        self.edges = np.cumsum([0, *widths]).tolist()
        self.linear, self.residual = layer_map.linear, residual_of(layer_map)
        self.parts: list[Array] = []
        self.up: Array | None = None
        if isinstance(self.linear, LinearMap | LowRankMap) and self.residual is None:
            whole = self.linear.weight if isinstance(self.linear, LinearMap) else self.linear.down
            folded = array(whole / layer_map.feature_scale[:, None])
            # As in PyTorch: a linear map's products are rounded for a target that reads in bfloat16, others' are not.
            folded = folded.astype(mx.bfloat16) if short and isinstance(self.linear, LinearMap) else folded
            self.parts = [folded[a:b] for a, b in zip(self.edges, self.edges[1:], strict=False)]
            self.up = array(self.linear.up) if isinstance(self.linear, LowRankMap) else None
        elif isinstance(self.linear, HeadwiseMap):
            of_heads = ("key_index", "key_weight", "value_index", "value_weight")
            self.heads = tuple(array(getattr(self.linear, name)) for name in of_heads)
        elif isinstance(self.linear, LinearMap):
            self.matrices = [array(self.linear.weight)]
        elif isinstance(self.linear, LowRankMap):
            self.matrices = [array(self.linear.down), array(self.linear.up)]
        else:
            raise IncompatiblePair(f"a map of kind {type(self.linear).__name__} can't be computed with MLX")

    def __call__(self, blocks: Sequence[Block]) -> tuple[Array, Array]:
        """Return position-free keys and values, each [1, kv_heads, tokens, dim], float32."""
        y = self.folded(blocks) if self.parts else self.plain(mx.concatenate([b.whole() for b in blocks], axis=-1))
        return self.finish(y + self.bias)

    def folded(self, blocks: Sequence[Block]) -> Array:
        """Multiply block by block, rows that are alike once."""
        total: Array = 0.0
        for at, (block, weight) in enumerate(zip(blocks, self.parts, strict=True)):
            centred = block.rows - self.mean[self.edges[at] : self.edges[at + 1]]
            product = (centred.astype(weight.dtype) @ weight).astype(mx.float32)
            total = total + (product if block.index is None else product[block.index])
        return total if self.up is None else total @ self.up

    def plain(self, features: Array) -> Array:
        """Multiply features [tokens, columns] that stand side by side."""
        x = (features - self.mean) / self.scale
        if isinstance(self.linear, HeadwiseMap):
            key_index, key_weight, value_index, value_weight = self.heads
            pairs = ((key_index, key_weight), (value_index, value_weight))
            y = mx.concatenate([per_head(x, index, weight) for index, weight in pairs], axis=-1)
        else:
            y = x
            for matrix in self.matrices:
                y = y @ matrix
        if self.residual is None:
            return y
        enter, bias, leave = self.residual
        return y + nn.gelu(x @ enter + bias) @ leave

    def finish(self, y: Array) -> tuple[Array, Array]:
        """Split outputs into heads; let the target's own key norm finish the keys."""
        keys, values = y[:, : self.shape.key_width], y[:, self.shape.key_width :]
        if self.norm_kind == "layer":
            keys = rms_normalised(keys) * self.norm_weight
        keys, values = (x.reshape(1, len(y), self.shape.kv_heads, -1).swapaxes(1, 2) for x in (keys, values))
        if self.norm_kind == "head":
            keys = rms_normalised(keys) * self.norm_weight
        return keys, values


def array(x: Tensor) -> Array:
    """Return a tensor's values in MLX: float32, or int32."""
    return mx.array(x.detach().float().numpy() if x.is_floating_point() else x.int().numpy())


def residual_of(layer_map: LayerMap) -> tuple[Array, Array, Array] | None:
    """Return the matrices of an MLP residual: into it, its bias, out of it."""
    if layer_map.residual is None:
        return None
    enter, leave = layer_map.residual.enter, layer_map.residual.leave
    return array(enter.weight.T.contiguous()), array(enter.bias), array(leave.weight.T.contiguous())


def per_head(x: Array, index: Array, weight: Array) -> Array:
    """Multiply each head's columns [tokens, columns] with its own matrix; heads side by side."""
    products = x[:, index].swapaxes(0, 1) @ weight  # [heads, tokens, dim]
    return products.swapaxes(0, 1).reshape(len(x), -1)


def rms_normalised(x: Array) -> Array:
    """Scale the last dim to RMS 1."""
    return x / mx.sqrt(mx.maximum(x.square().mean(-1, keepdims=True), 1e-30))


class MlxTranslator:
    """A translator's maps as MLX computes them, for a target of one dtype."""

    def __init__(self, translator: Translator, target: MlxModel) -> None:
        config = self.config = translator.config
        self.text_basis = None if translator.text_basis is None else array(translator.text_basis)
        self.maps: dict[int, MlxMap] = {}
        for layer, layer_map in translator.maps.items():
            assert isinstance(layer_map, LayerMap)
            widths = [config.width(block) for block in config.blocks(int(layer))]
            self.maps[int(layer)] = MlxMap(layer_map, widths, short=target.dtype == mx.bfloat16)

    def __call__(
        self,
        source: FreeKV | None,
        alignment: np.ndarray,
        target: MlxModel,
        ids: Sequence[int],
        start: int,
        skip: Sequence[int],
    ) -> list[tuple[Array, Array]]:
        """Return each layer's position-free keys and values of the tokens `start` + skip … `start` + len(alignment).

        Args:
            alignment: [tokens] source token of each.
            ids: the target's token ids of the whole conversation.
            skip: per layer how many of the first tokens its window no longer reaches.
        """
        config, exact = self.config, self.config.first_layer
        first = first_needed(config, skip, exact)
        blocks = {name: self.block(name, at, source, alignment, target, ids, start) for name, at in first.items()}
        made = first_layers(target, ids[start + skip[0] : start + len(alignment)]) if exact else []
        for layer in range(exact, len(config.target)):
            rows = [after(blocks[name], skip[layer] - first[name]) for name in config.blocks(layer)]
            made.append(self.maps[layer](rows))
        return made

    def block(
        self,
        name: str,
        at: int,
        source: FreeKV | None,
        alignment: np.ndarray,
        target: MlxModel,
        ids: Sequence[int],
        start: int,
    ) -> Block:
        """Return one feature block of the tokens from `start` + `at` on. Before the first token, lagged blocks repeat it."""
        kind, *numbers = name.split("/")
        if kind == "embedding":
            places = np.maximum(np.arange(start + at, start + len(alignment)) - int(numbers[0]), 0)
            distinct, index = np.unique(np.asarray(ids)[places], return_inverse=True)
            rows = target.embed(distinct.tolist())
            return Block(rows if self.text_basis is None else rows @ self.text_basis, mx.array(index.reshape(-1)))
        assert source is not None
        layer, lag = map(int, numbers)
        places = np.maximum(alignment[at:] - lag, source.first[layer]) - source.first[layer]
        chosen = (x[0][:, mx.array(places)].swapaxes(0, 1) for x in (source.keys[layer], source.values[layer]))
        return Block(mx.concatenate([x.reshape(len(places), -1) for x in chosen], axis=-1))


def after(block: Block, rows: int) -> Block:
    """Return a block without its first rows."""
    if not rows:
        return block
    return Block(block.rows[rows:]) if block.index is None else Block(block.rows, block.index[rows:])


def first_layers(lm: MlxModel, ids: Sequence[int]) -> list[tuple[Array, Array]]:
    """Return the exact position-free keys and values of a target's first layer: each depends on its token alone."""
    distinct, index = np.unique(np.asarray(ids), return_inverse=True)
    caught = [Caught(stops=True), *(Caught() for _ in lm.geometry.layers[1:])]
    with suppress(Filled):
        lm.model(mx.array(distinct)[:, None], cache=caught)
    one = caught[0]
    assert one.keys is not None
    assert one.values is not None
    keys = unrotated(lm.rotations[0], one.keys, 0)
    places = mx.array(index.reshape(-1))
    pair = (x[:, :, 0].astype(mx.float32)[places].swapaxes(0, 1)[None] for x in (keys, one.values))
    return [(k, v) for k, v in [tuple(pair)]]
