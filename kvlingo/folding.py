"""The fast way through all maps of a translator, where nothing is to be learnt.

The features' scale is folded into the weights, each source layer is gathered and centred once for all target layers that read
it, a window of source layers is one product, and the text's features are multiplied once for each distinct token. Tokens go
through in chunks, so that what is held beside the result is bounded. Equals the plain way to rounding (`tests/test_folding.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from kvlingo.cache import KV
from kvlingo.errors import IncompatiblePair
from kvlingo.features import Block, Repeated, TranslatorConfig
from kvlingo.maps import LayerMap
from kvlingo.stats import column_ranges, runs

CHUNK_BYTES = 32 << 20
"""So much do the gathered features of one chunk take, or those of `LEAST_ROWS` tokens: a shorter product would be slow."""
LEAST_ROWS = 256

SPARSE = 2
"""So many times as many source tokens as are read may lie between the first and the last that is: taking them all is faster."""

Mapped = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FoldedMap:
    """One layer's first products, for features that are centred but not scaled.

    Fields:
        source: [features of its source layers, lags * middle]; None for a map that reads no source.
        text: [hidden, lags * middle] for the token embeddings; None for one that reads no text.
        added: [middle], with the difference between the map's means and those that features were centred at.
    """

    layer_map: LayerMap
    source: Tensor | None
    text: Tensor | None
    added: Tensor


@dataclass(frozen=True)
class Folded:
    """All maps made ready for products in one dtype, and the tensors that they were made from.

    The tensors themselves are kept: an address alone may be another's by now. An edit through `.data` is not seen.
    """

    config: TranslatorConfig
    parts: tuple[Tensor, ...]
    states: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    centres: Mapping[str, Tensor]
    maps: Mapping[int, FoldedMap]

    def is_of(self, maps: nn.ModuleDict, rounded: torch.dtype | None) -> bool:
        """Tell whether these maps, as they are now, give these weights for results that are read in `rounded`."""
        parts = parts_of(maps)
        same = len(parts) == len(self.parts) and all(a is b for a, b in zip(parts, self.parts, strict=True))
        return same and states_of(parts) == self.states and product_dtype(maps, rounded) == self.dtype

    def apply(
        self,
        source: KV | None,
        alignment: Tensor,
        embeddings: Block | None,
        start: int,
        skip: Sequence[int],
        exact: int,
    ) -> list[Mapped]:
        """Return keys and values of each target layer from `exact` on; arguments as for `Translator.forward`."""
        found: dict[int, Mapped] = {}
        wanted = sorted((skip[layer], layer) for layer in self.maps if layer >= exact)
        for first, group in groupby(wanted, key=lambda pair: pair[0]):
            layers = [layer for _, layer in group]
            pieces = [
                self._chunk(layers, source, alignment[rows], embeddings, start + rows.start)
                for rows in self._chunks(layers, first, len(alignment))
            ]
            for layer, parts in zip(layers, zip(*pieces, strict=True), strict=True):
                found[layer] = joined(parts)
        return [found[layer] for layer in sorted(found)]

    def _chunks(self, layers: Sequence[int], first: int, stop: int) -> Iterable[slice]:
        """Cut the rows [first, stop) so that the features of a chunk take about `CHUNK_BYTES`."""
        width = sum(self.config.source.layers[layer].width for layer in self._sources(layers))
        rows = max(LEAST_ROWS, CHUNK_BYTES // max(1, width * self.dtype.itemsize))
        if first == stop:
            return [slice(first, stop)]
        return [slice(at, min(at + rows, stop)) for at in range(first, stop, rows)]

    def _sources(self, layers: Sequence[int]) -> list[int]:
        """Return the source layers that some target layers read, in the order in which they stand side by side."""
        return sorted({source for layer in layers for source in self.config.source_layers[layer]})

    def _chunk(
        self, layers: Sequence[int], source: KV | None, alignment: Tensor, embeddings: Block | None, start: int
    ) -> list[Mapped]:
        """Map some rows for some layers."""
        read = self._source_features(layers, source, alignment)
        text = self._text_features(embeddings, start, len(alignment))
        found = []
        for layer in layers:
            folded = self.maps[layer]
            first = folded.added.expand(len(alignment), -1)
            if folded.source is not None and read is not None:
                first = first + read.products(self.config.source_layers[layer], folded.source)
            if folded.text is not None and text is not None:
                first = first + summed(text.rows @ folded.text, text.index)
            found.append(folded.layer_map.after(first, self.dtype))
        return found

    def _source_features(self, layers: Sequence[int], source: KV | None, alignment: Tensor) -> Panel | None:
        """Return the centred features of the source tokens that some rows read, of the source layers that some layers read."""
        names = self._sources(layers)
        if not names or not len(alignment):
            return None
        if source is None:
            raise IncompatiblePair("this translator reads a source cache; give one")
        lags = torch.tensor(self.config.source_lags, device=alignment.device)
        places = (alignment[:, None] - lags).clamp(min=0)
        first, last = int(places.min()), int(places.max()) + 1
        if last - first <= SPARSE * places.numel():
            index, taken = places - first, None
        else:  # far apart: only those that are read, else a gap would cost as much as a text of its length
            taken, index = torch.unique(places, return_inverse=True)
        columns = column_ranges({str(name): self.config.source.layers[name].width for name in names})
        count = last - first if taken is None else len(taken)
        rows = torch.empty(count, columns[str(names[-1])][1], dtype=self.dtype, device=source.keys[0].device)
        for name in names:
            lost = source.tokens - source.held(name)
            here = slice(first - lost, last - lost) if taken is None else taken - lost
            centre, at = self.centres[f"source/{name}"], columns[str(name)][0]
            for x in (source.keys[name], source.values[name]):
                size = x.shape[1] * x.shape[3]
                put_centred(x[0, :, here], centre[:size], rows[:, at : at + size])
                centre, at = centre[size:], at + size
        return Panel(rows, columns, index.to(rows.device))

    def _text_features(self, embeddings: Block | None, start: int, tokens: int) -> Repeated | None:
        """Return centred embeddings of distinct tokens [distinct, hidden], and which of them each row reads [rows, lags]."""
        lags = self.config.embedding_lags
        if not lags:
            return None
        if embeddings is None:
            raise IncompatiblePair("this translator reads the text's embeddings; give the target's token ids")
        rows, index = (embeddings, None) if isinstance(embeddings, Tensor) else (embeddings.rows, embeddings.index)
        place = torch.arange(start, start + tokens, device=rows.device)
        places = torch.stack([(place - lag).clamp(min=0) for lag in lags], dim=1)
        used, read = torch.unique(places if index is None else index[places], return_inverse=True)
        return Repeated((rows[used] - self.centres["embedding"]).to(self.dtype), read)


@dataclass(frozen=True)
class Panel:
    """Centred features of consecutive source tokens, layers side by side.

    Fields:
        rows: [source tokens, all columns]; columns: where each source layer stands.
        index: [target tokens, lags] which row each reads.
    """

    rows: Tensor
    columns: dict[str, tuple[int, int]]
    index: Tensor

    def products(self, layers: Sequence[int], weight: Tensor) -> Tensor:
        """Return the products [target tokens, middle] of some source layers; those that lie side by side are one product."""
        total, row = None, 0
        for first, last in runs([self.columns[str(layer)] for layer in layers]):
            part = self.rows[:, first:last] @ weight[row : row + last - first]
            total, row = part if total is None else total + part, row + last - first
        assert total is not None
        return summed(total, self.index)


# --- products ----------------------------------------------------------------------------------------------------------


def put_centred(x: Tensor, centre: Tensor, out: Tensor) -> None:
    """Write x [heads, tokens, dim] less a mean into out [tokens, heads * dim]."""
    heads, _, dim = x.shape
    torch.sub(x.transpose(0, 1), centre.view(heads, dim), out=out.unflatten(1, (heads, dim)))


def summed(products: Tensor, index: Tensor) -> Tensor:
    """Return, for each row of index [tokens, lags], the sum over lags of products [rows, lags * middle]."""
    lags = index.shape[1]
    if lags == 1 and is_in_a_row(index[:, 0]):
        return products.narrow(0, int(index[0, 0]), len(index))
    table = products.view(len(products) * lags, products.shape[1] // lags)
    return nn.functional.embedding_bag(index * lags + torch.arange(lags, device=index.device), table, mode="sum")


def is_in_a_row(places: Tensor) -> bool:
    """Tell whether places follow each other without a gap or a repetition."""
    count = len(places)
    return bool(count) and int(places[-1]) - int(places[0]) == count - 1 and bool((places.diff() == 1).all())


def joined(parts: Sequence[Mapped]) -> Mapped:
    """Join the chunks of one layer."""
    if len(parts) == 1:
        return parts[0]
    keys, values = (torch.cat(side, dim=2) for side in zip(*parts, strict=True))
    return keys, values


# --- folding -----------------------------------------------------------------------------------------------------------


def parts_of(maps: nn.ModuleDict) -> tuple[Tensor, ...]:
    """Return every tensor that products depend on."""
    return tuple(x for layer_map in maps.values() for x in (*layer_map.parameters(), *layer_map.buffers()))


def states_of(parts: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return address and version of each tensor."""
    return tuple((part.data_ptr(), part._version) for part in parts)


def product_dtype(maps: nn.ModuleDict, rounded: torch.dtype | None) -> torch.dtype:
    """Return the dtype that products are made in: bfloat16 where that is asked for, or the result is read so anyway."""
    asked = all(isinstance(m, LayerMap) and m.multiplies_in_bfloat16 for m in maps.values())
    own: torch.dtype = next(iter(maps.parameters())).dtype
    return torch.bfloat16 if (asked or rounded == torch.bfloat16) and own != torch.float64 else own


@torch.no_grad()
def fold(config: TranslatorConfig, maps: nn.ModuleDict, rounded: torch.dtype | None) -> Folded | None:
    """Make maps ready for products; None where one has another structure, or can't be watched for changes."""
    parts = parts_of(maps)
    if not parts or any(part.is_inference() for part in parts):
        return None
    if len({part.dtype for part in parts if part.is_floating_point()}) > 1:
        return None
    dtype, centres = product_dtype(maps, rounded), dict[str, Tensor]()
    folded = {}
    for name, layer_map in maps.items():
        assert isinstance(layer_map, LayerMap)
        one = fold_one(config, int(name), layer_map, dtype, centres)
        if one is None:
            return None
        folded[int(name)] = one
    return Folded(config, parts, states_of(parts), dtype, centres, folded)


def fold_one(
    config: TranslatorConfig, layer: int, layer_map: LayerMap, dtype: torch.dtype, centres: dict[str, Tensor]
) -> FoldedMap | None:
    """Fold one layer's map. Features are centred at the means of the first layer that reads them (`centres`).

    Means are subtracted from features rather than folded in: a mean far above its feature's spread would cancel to nothing but
    rounding. What is folded in is the difference between two layers' means of one feature, most often none.
    """
    found = layer_map.first_products()
    if found is None:
        return None
    weight, added = found[0] / layer_map.feature_scale[:, None], found[1]
    names = config.blocks(layer)
    widths = [config.width(name) for name in names]
    by_lag: dict[str, list[Tensor]] = {}
    for name, mean, part in zip(names, layer_map.feature_mean.split(widths), weight.split(widths), strict=True):
        kind, *place, lag = name.split("/")
        centre = centres.setdefault("/".join((kind, *place)), mean.clone())
        added = added + (centre - mean) @ part
        by_lag.setdefault(f"{kind}/{lag}", []).append(part)
    source, text = (
        [torch.cat(by_lag[f"{kind}/{lag}"]) for lag in lags if f"{kind}/{lag}" in by_lag]
        for kind, lags in (("source", config.source_lags), ("embedding", config.embedding_lags))
    )
    return FoldedMap(
        layer_map,
        torch.cat(source, dim=1).to(dtype) if source else None,
        torch.cat(text, dim=1).to(dtype) if text else None,
        added,
    )
