"""The maps of one direction of one pair: a source's position-free keys and values (and the text) in, the target's out.

One class for every use. Ridge initialises it, distillation trains the same object, inference calls it. Its inputs are named
feature blocks, each optional: the token-only control has no source blocks, the privacy split no embedding blocks. Knows
tensors and geometry; does not know models, tokenizers or caches' insides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvlingo.errors import IncompatiblePair
from kvlingo.features import (
    MAP_KINDS,
    Block,
    MapKind,
    Repeated,
    TranslatorConfig,
    dense,
    embedded,
    embedding_block,
    feature_blocks,
    first_needed,
    first_read,
    gather,
    source_block,
)
from kvlingo.folding import Folded, fold
from kvlingo.geometry import Geometry
from kvlingo.kv import KV
from kvlingo.maps import (
    HeadwiseMap,
    LayerMap,
    LinearMap,
    LowRankMap,
    Residual,
    SplitMap,
    head_columns,
    headwise_columns,
    make_map,
    rms_normalise,
)

__all__ = [
    "MAP_KINDS",
    "Block",
    "HeadwiseMap",
    "LayerMap",
    "LinearMap",
    "LowRankMap",
    "MapKind",
    "Repeated",
    "Residual",
    "SplitMap",
    "Translator",
    "TranslatorConfig",
    "check_geometry",
    "dense",
    "embedded",
    "embedding_block",
    "feature_blocks",
    "first_needed",
    "first_read",
    "gather",
    "head_columns",
    "headwise_columns",
    "identity_translator",
    "make_map",
    "rms_normalise",
    "source_block",
    "without_residual",
]


class Translator(nn.Module):
    """All maps of one direction of one pair.

    `text_basis` [hidden, text_rank] is what all of them read a token's embedding through, where there is one. It is fixed: only
    maps are trained.
    """

    text_basis: nn.Parameter | None
    _folded: Folded | None = None

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        basis = torch.zeros(config.target.hidden_size, config.text_rank) if config.text_rank else None
        self.text_basis = None if basis is None else nn.Parameter(basis, requires_grad=False)
        self.maps = nn.ModuleDict(
            {str(layer): LayerMap(config, layer) for layer in range(config.first_layer, len(config.target))}
        )

    def read_text(self, embeddings: Tensor) -> Tensor:
        """Return the target's own embeddings [tokens, hidden] as the maps read them: [tokens, features]."""
        if self.text_basis is None:
            return embeddings
        return embeddings.to(self.text_basis.dtype) @ self.text_basis

    def forward(
        self,
        source: KV | None,
        alignment: Tensor,
        embeddings: Block | None,
        *,
        start: int = 0,
        skip: Sequence[int] | None = None,
        native: KV | None = None,
        rounded: torch.dtype | None = None,
    ) -> KV:
        """Translate the target tokens `start` … `start + len(alignment)`.

        Args:
            source, alignment, embeddings: as for `feature_blocks`.
            skip: per target layer how many of the first tokens are not needed (they lie outside a sliding window).
            native: exact KV of the first target layers for these tokens, used as they are; must cover layer 0 if the
                translator has no map for it.
            rounded: the dtype that the result will be read in, and is returned in; products are made in bfloat16 for one that is
                read so. None: the maps' own.

        Returns the target's position-free KV of these tokens, without the skipped ones. Where nothing is to be learnt, the maps'
        structure is used (`kvlingo.folding`); the result is that of the plain way, to rounding.
        """
        tokens = len(alignment)
        skip = self._skipped(tokens, skip, native)
        known, exact = _known(native, skip)
        folded = None if torch.is_grad_enabled() else self._fold(rounded)
        apply = self._plainly if folded is None else folded.apply
        mapped = apply(source, alignment, embeddings, start, skip, exact)
        if rounded is None and folded is not None:
            rounded = next(self.parameters()).dtype  # products may have been made in another
        if rounded is not None:
            known, mapped = ([(k.to(rounded), v.to(rounded)) for k, v in side] for side in (known, mapped))
        keys, values = zip(*known, *mapped, strict=True)
        return KV(keys, values, tokens)

    @torch.no_grad()
    def stream(
        self,
        source: KV | None,
        alignment: Tensor,
        embeddings: Block | None,
        *,
        start: int = 0,
        skip: Sequence[int] | None = None,
        native: KV | None = None,
        rounded: torch.dtype | None = None,
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield what `forward` returns in pieces, as they are made: layer, first row, keys, values in any dtype.

        A row is counted from `start`; arguments as for `forward`.
        """
        tokens = len(alignment)
        skip = self._skipped(tokens, skip, native)
        known, exact = _known(native, skip)
        for layer, (keys, values) in enumerate(known):
            yield layer, skip[layer], keys, values
        folded = self._fold(rounded)
        if folded is not None:
            for layer, (keys, values) in folded.pieces(source, alignment, embeddings, start, skip, exact):
                yield layer, skip[layer], keys, values
            return
        mapped = self._plainly(source, alignment, embeddings, start, skip, exact)
        for layer, (keys, values) in enumerate(mapped, start=exact):
            yield layer, skip[layer], keys, values

    def _skipped(self, tokens: int, skip: Sequence[int] | None, native: KV | None) -> list[int]:
        """Return how many first rows of each target layer are left out, none beyond the last."""
        if (0 if native is None else len(native)) < self.config.first_layer:
            raise IncompatiblePair(
                "a translator that reads the text has no map for layer 0; give its exact KV as `native`"
            )
        return [min(s, tokens) for s in skip or [0] * len(self.config.target)]

    def _plainly(
        self,
        source: KV | None,
        alignment: Tensor,
        embeddings: Block | None,
        start: int,
        skip: Sequence[int],
        exact: int,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each target layer from `exact` on, feature blocks side by side."""
        config = self.config
        first = first_needed(config, skip, exact)
        blocks: dict[str, Block] = {}
        for at in sorted(set(first.values())):
            names = [name for name in first if first[name] == at]
            blocks |= feature_blocks(
                names, source=source, alignment=alignment[at:], embeddings=embeddings, start=start + at
            )
        rows = {name: dense(block) for name, block in blocks.items()}
        found = []
        for layer in range(exact, len(config.target)):
            layer_map = self.maps[str(layer)]
            assert isinstance(layer_map, LayerMap)
            read = torch.cat([rows[name][skip[layer] - first[name] :] for name in config.blocks(layer)], dim=-1)
            found.append(layer_map(read.to(layer_map.bias.dtype)))
        return found

    def _fold(self, rounded: torch.dtype | None) -> Folded | None:
        """Return the maps made ready for products in one dtype, anew when they have changed; None where that can't be done."""
        if self._folded is None or not self._folded.is_of(self.maps, rounded):
            self._folded = fold(self.config, self.maps, rounded)
        return self._folded

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert the maps; what was folded from where they stood is forgotten."""
        self._folded = None
        return super()._apply(fn, recurse)

    def multiply_in_bfloat16(self, on: bool) -> None:
        """Round the maps' matrix products to bfloat16, or stop doing so: a fast mode, itself never saved.

        `rounded` asks for it too, where the target reads in bfloat16.
        """
        for layer_map in self.maps.values():
            assert isinstance(layer_map, LayerMap)
            layer_map.multiplies_in_bfloat16 = on

    @property
    def multiplies_in_bfloat16(self) -> bool:
        """Whether the maps' products are to be rounded so."""
        return any(isinstance(m, LayerMap) and m.multiplies_in_bfloat16 for m in self.maps.values())

    def num_bytes(self, bytes_per_weight: float = 4) -> int:
        """Return the size of all maps when stored with so many bytes a weight."""
        return int(sum(p.numel() for p in self.parameters()) * bytes_per_weight)


def _known(native: KV | None, skip: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Return the exact keys and values of the first layers without the rows that are left out, and of how many layers."""
    if native is None:
        return [], 0
    given = zip(native.keys, native.values, strict=True)
    lost = [native.tokens - native.held(layer) for layer in range(len(native))]
    cut = [(k[:, :, s - n :], v[:, :, s - n :]) for (k, v), s, n in zip(given, skip, lost, strict=False)]
    return cut, len(native)


def without_residual(translator: Translator) -> Translator:
    """Return a copy without the MLP residual; everything else as it is."""
    linear = Translator(replace(translator.config, residual_width=0))
    linear.load_state_dict({k: v for k, v in translator.state_dict().items() if ".residual." not in k})
    return linear.to(next(translator.parameters()))


def check_geometry(config: TranslatorConfig, source: Geometry, target: Geometry) -> None:
    """Raise `IncompatiblePair` unless the two models' caches look as the translator expects."""
    for side, expected, got in (("source", config.source, source), ("target", config.target, target)):
        if replace(expected, max_positions=None) != replace(got, max_positions=None):
            raise IncompatiblePair(
                f"this translator's {side} has {len(expected)} layers of {expected.layers[0].width} features, "
                f"got {len(got)} of {got.layers[0].width}; use the translator of this pair, or fit one: kvlingo fit"
            )


@torch.no_grad()
def identity_translator(geometry: Geometry, dtype: torch.dtype = torch.float32) -> Translator:
    """Return the translator of a model to itself: every layer's features come out unchanged.

    Exact by construction, so whatever a hand-over through it changes is the hand-over's own error.
    """
    layers = tuple((layer,) for layer in range(len(geometry)))
    translator = Translator(TranslatorConfig(geometry, geometry, layers, embedding_lags=())).to(dtype)
    for layer_map in translator.maps.values():
        assert isinstance(layer_map, LayerMap)
        assert isinstance(layer_map.linear, LinearMap)
        layer_map.linear.weight.copy_(torch.eye(layer_map.shape.width))
    return translator.eval()
