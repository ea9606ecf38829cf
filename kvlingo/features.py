"""What a translator reads: its shape, the names of its feature blocks, and how they are gathered.

Knows caches free of position and geometry; does not know weights, models or tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvlingo.errors import IncompatiblePair
from kvlingo.geometry import Geometry
from kvlingo.kv import KV, flatten_heads

MapKind = Literal["linear", "headwise", "lowrank"]
MAP_KINDS: tuple[MapKind, ...] = ("linear", "headwise", "lowrank")


@dataclass(frozen=True)
class TranslatorConfig:
    """Everything that gives a translator its shape.

    Fields:
        source, target: the two caches' geometries.
        source_layers: for each target layer the source layers it reads; empty for the token-only control.
        source_lags: how many source tokens before the aligned one are read (0 = the aligned one).
        embedding_lags: which of the target's own token embeddings are read (0 = the token, 1 = the one before).
        map_kind: linear (head-mixing), headwise (one head to one head), lowrank (head-mixing through `rank` dims).
        residual_width: hidden width of the head-mixing MLP residual; 0 for none.
        key_norms: which layers' keys end in the target's own norm: "head", "layer" (over all heads at once) or None.
        ranks: of low-rank maps, the dims of each target layer, where they differ; 0 for a layer whose matrix is whole. Empty:
            `rank` for all.
        text_rank: features that a token's embedding is reduced to before any map reads it; 0: read as it is.
        fitted_tokens: the longest context it was fitted on; None where that is not known. Longer ones work, and plans say so.
    """

    source: Geometry
    target: Geometry
    source_layers: tuple[tuple[int, ...], ...]
    source_lags: tuple[int, ...] = (0,)
    embedding_lags: tuple[int, ...] = (0, 1)
    map_kind: MapKind = "linear"
    rank: int = 0
    residual_width: int = 0
    key_norms: tuple[str | None, ...] = ()
    fitted_tokens: int | None = None
    ranks: tuple[int, ...] = ()
    text_rank: int = 0

    @property
    def reads_text(self) -> bool:
        """Whether the target's text is among the features."""
        return bool(self.embedding_lags)

    @property
    def reads_source(self) -> bool:
        """Whether the source's cache is among the features."""
        return any(self.source_layers)

    @property
    def first_layer(self) -> int:
        """The first target layer with a map: with the text known, layer 0 is exact without one."""
        return 1 if self.reads_text else 0

    def blocks(self, layer: int) -> tuple[str, ...]:
        """Return the names of the feature blocks that a target layer reads, in order."""
        source = [source_block(s, lag) for s in self.source_layers[layer] for lag in self.source_lags]
        return (*source, *(embedding_block(lag) for lag in self.embedding_lags))

    def width(self, block: str) -> int:
        """Return the number of columns of a block."""
        kind, index, *_ = block.split("/")
        return self.text_width if kind == "embedding" else self.source.layers[int(index)].width

    @property
    def text_width(self) -> int:
        """Return the number of features of a token's embedding, as maps read it."""
        return self.text_rank or self.target.hidden_size

    def rank_of(self, layer: int) -> int:
        """Return the dims that a target layer's map goes through; 0 for a whole matrix."""
        if self.map_kind != "lowrank":
            return 0
        rank = self.ranks[layer] if self.ranks else self.rank
        return min(rank, self.feature_width(layer), self.target.layers[layer].width)

    def feature_width(self, layer: int) -> int:
        """Return the number of features of a target layer's map."""
        return sum(self.width(block) for block in self.blocks(layer))

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` restores; older versions read it too where nothing was made smaller."""
        return {k: v for k, v in asdict(self).items() if v or k not in ("ranks", "text_rank")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TranslatorConfig:
        """Restore what `to_json` gave."""
        tuples = {k: tuple(data[k]) for k in ("source_lags", "embedding_lags", "key_norms", "ranks") if k in data}
        return cls(
            **{
                **data,
                **tuples,
                "source": Geometry.from_json(data["source"]),
                "target": Geometry.from_json(data["target"]),
                "source_layers": tuple(map(tuple, data["source_layers"])),
            }
        )


def source_block(layer: int, lag: int) -> str:
    """Name the keys and values of one source layer, `lag` tokens before the aligned one."""
    return f"source/{layer}/{lag}"


def embedding_block(lag: int) -> str:
    """Name the target's embedding of the token `lag` places back."""
    return f"embedding/{lag}"


@dataclass(frozen=True)
class Repeated:
    """Rows of which many are alike: `rows[index]`, [tokens, columns] in all. What is done row by row is done once for each."""

    rows: Tensor
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def take(self, places: Tensor) -> Repeated:
        """Return the rows at some places, without those that are not among them."""
        used, index = torch.unique(self.index[places], return_inverse=True)
        return Repeated(self.rows[used], index)


Block = Tensor | Repeated


def embedded(rows: Callable[[Tensor], Tensor], ids: Tensor) -> Repeated:
    """Return the embeddings of a text's token ids [tokens], those of each distinct token once."""
    distinct, index = torch.unique(ids, return_inverse=True)
    found = rows(distinct)
    return Repeated(found, index.to(found.device))


def dense(block: Block) -> Tensor:
    """Return a block's rows [tokens, columns]."""
    rows, index = _parts(block)
    return rows if index is None else rows[index]


def _parts(block: Block) -> tuple[Tensor, Tensor | None]:
    return (block, None) if isinstance(block, Tensor) else (block.rows, block.index)


def feature_blocks(
    names: Sequence[str], *, source: KV | None, alignment: Tensor, embeddings: Block | None, start: int = 0
) -> dict[str, Block]:
    """Gather feature blocks for the target tokens `start` … `start + len(alignment)` of a conversation.

    Args:
        source: the source's cache, batch 1; a layer may lack the tokens before those that are looked at.
        alignment: [tokens] source token of each target token, all >= 0.
        embeddings: [all target tokens, features]: the target's own input embeddings of the whole conversation, as maps read
            them (`Translator.read_text`).

    Returns each block as [tokens, columns], float32 at least. Before the first token, lagged blocks repeat it.
    """
    blocks: dict[str, Block] = {}
    place = torch.arange(start, start + len(alignment))
    for name in names:
        kind, *numbers = name.split("/")
        if kind == "embedding":
            if embeddings is None:
                raise IncompatiblePair("this translator reads the text's embeddings; give the target's token ids")
            blocks[name] = _rows(embeddings, (place - int(numbers[0])).clamp(min=0))
        else:
            if source is None:
                raise IncompatiblePair("this translator reads a source cache; give one")
            layer, lag = map(int, numbers)
            blocks[name] = _at_least_float(gather(source, layer, (alignment - lag).clamp(min=0)))
    return blocks


def _rows(embeddings: Block, places: Tensor) -> Block:
    if isinstance(embeddings, Tensor):
        return _at_least_float(embeddings[places.to(embeddings.device)])
    taken = embeddings.take(places.to(embeddings.index.device))
    return Repeated(_at_least_float(taken.rows), taken.index)


def _at_least_float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gather(kv: KV, layer: int, index: Tensor) -> Tensor:
    """Return the flat features [len(index), width] of some tokens of one layer, batch 1."""
    index = index.to(kv.keys[layer].device) - (kv.tokens - kv.held(layer))
    chosen = (x[:, :, index] for x in (kv.keys[layer], kv.values[layer]))
    return torch.cat([flatten_heads(x) for x in chosen], dim=-1)[0]


def first_needed(config: TranslatorConfig, skip: Sequence[int], exact: int) -> dict[str, int]:
    """Return how many first tokens of each feature block no layer reads: those that only sliding layers read are short."""
    first: dict[str, int] = {}
    for layer in range(exact, len(config.target)):
        for block in config.blocks(layer):
            first[block] = min(first.get(block, skip[layer]), skip[layer])
    return dict(sorted(first.items()))


def first_read(config: TranslatorConfig, skip: Sequence[int], exact: int, alignment: Tensor, tokens: int) -> list[int]:
    """Return for each source layer the first source token that any map reads; `tokens` where none reads the layer.

    Args:
        skip, exact: as for `Translator.forward` and `first_needed`.
        alignment: [translated tokens] source token of each.
        tokens: what the source holds.
    """
    first = [tokens] * len(config.source)
    for block, at in first_needed(config, [min(s, len(alignment)) for s in skip], exact).items():
        kind, *numbers = block.split("/")
        if kind == "source" and at < len(alignment):
            layer, lag = map(int, numbers)
            first[layer] = min(first[layer], max(0, int(alignment[at:].min()) - lag))
    return first
