"""The fast way through all maps of a translator, where nothing is to be learnt.

The features' scale is folded into the weights, each source layer is gathered and centred once for the target layers around it
that read it, a window of source layers is one product, heads that see each other only are a batch of small ones, and the text's
features are multiplied once for each distinct token. Tokens go through in chunks, so that what is held beside the result is
bounded. Equals the plain way to rounding (`tests/test_folding.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor, nn

from kvlingo.errors import IncompatiblePair
from kvlingo.features import Block, Repeated, TranslatorConfig
from kvlingo.geometry import Geometry
from kvlingo.kv import KV
from kvlingo.maps import LayerMap, LowRankMap, Product, Side, head_columns, is_fast_in_bfloat16, paired_head
from kvlingo.stats import column_ranges, runs

CHUNK_BYTES = 8 << 20
"""So much do the gathered features of one chunk take, or those of `LEAST_ROWS` tokens: a shorter product would be slow.

What a hand-over takes above the target's cache grows with it: a group's products wait beside its features, and the C library
keeps as much again of what was freed. Chunks of 32 MiB were no faster (docs/log.md, "Time of a hand-over").
"""
LEAST_ROWS = 512
GOOD_ROWS = 1024
"""Target layers are mapped group by group, so that a chunk can have so many tokens: the weights are read anew for each."""

SPARSE = 2
"""So many times as many source tokens as are read may lie between the first and the last that is: taking them all is faster."""

Mapped = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """One of a layer's first products, for features that are centred but not scaled.

    Fields:
        layers: the source layers it reads.
        side: of each, keys or values alone; None for both.
        heads: for a product by head, which head of each source layer a target head reads: [layers][heads].
        source: [features, lags * columns], or by head [heads, features of a head, lags * columns]; None where it reads no source.
        text: [hidden, lags * all columns] for the token embeddings; None where it reads no text.
        added: [all columns], with the difference between the map's means and those that features were centred at.
    """

    layers: tuple[int, ...]
    side: Side | None
    heads: tuple[tuple[int, ...], ...] | None
    source: Tensor | None
    text: Tensor | None
    added: Tensor

    def room(self, tokens: int) -> Tensor:
        """Return room for the products of some tokens."""
        if self.heads is None or self.source is None:
            return self.added.new_empty(tokens, len(self.added))
        return self.added.new_empty(len(self.source), tokens, len(self.added) // len(self.source))

    def products(self, panel: Panel | None, text: Repeated | None, out: Tensor) -> None:
        """Write the products of some rows with all that is added to them: [tokens, columns], or [heads, tokens, columns].

        What is added is there first, and products are summed onto it: one pass less over the result.
        """
        if self.text is None or text is None:
            out.copy_(self.added if self.source is None or out.ndim == 2 else self.added.view(len(out), 1, -1))
        else:
            table = text.rows @ self.text
            table[:, : len(self.added)] += self.added  # to the token's own row: every row reads one of each lag
            term = summed(table, text.index)
            out.copy_(term if out.ndim == 2 else term.unflatten(-1, (len(out), -1)).transpose(0, 1))
        if self.source is None or panel is None:
            return
        if self.heads is None:
            panel.across_heads(self, out)
        else:
            panel.by_head(self, out)


@dataclass(frozen=True)
class FoldedMap:
    """One layer's map, its first products, and what follows them: the second factor of a low-rank map, and its bias."""

    layer_map: LayerMap
    parts: tuple[Part, ...]
    second: tuple[Tensor, Tensor] | None

    def room(self, tokens: int) -> list[Tensor]:
        """Return room for the first products of some tokens."""
        return [part.room(tokens) for part in self.parts]

    def final_room(self, tokens: int) -> list[Tensor]:
        """Return room for what all chunks give in the end, before heads are told apart and keys normed."""
        if self.second is None:
            return self.room(tokens)
        factor, _ = self.second
        return [factor.new_empty(tokens, factor.shape[1])]

    def put(self, panel: Panel | None, text: Repeated | None, rows: slice, final: Sequence[Tensor]) -> None:
        """Map some rows into the room that is theirs."""
        here = [x[..., rows, :] for x in final]
        first = here if self.second is None else self.room(rows.stop - rows.start)
        for part, out in zip(self.parts, first, strict=True):
            part.products(panel, text, out)
        if self.second is not None:
            factor, bias = self.second
            torch.addmm(bias, first[0], factor, out=here[0])

    def finished(self, final: Sequence[Tensor]) -> Mapped:
        """Return the keys and values of all rows."""
        outputs = final if self.second is not None else self.layer_map.after(final)
        return self.layer_map.keys_and_values(outputs)


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

    @cached_property
    def is_by_head(self) -> bool:
        """Tell whether nothing is read across heads: features can stay as caches hold them."""
        return all(part.source is None or part.heads is not None for one in self.maps.values() for part in one.parts)

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
        made = self.pieces(source, alignment, embeddings, start, skip, exact)
        return [mapped for _, mapped in sorted(made, key=lambda pair: pair[0])]

    def pieces(
        self,
        source: KV | None,
        alignment: Tensor,
        embeddings: Block | None,
        start: int,
        skip: Sequence[int],
        exact: int,
    ) -> Iterator[tuple[int, Mapped]]:
        """Yield what `apply` returns, each with its layer, as it is made: what is used at once need not be kept."""
        wanted = sorted((skip[layer], layer) for layer in self.maps if layer >= exact)
        for first, same in groupby(wanted, key=lambda pair: pair[0]):
            for layers in self._groups([layer for _, layer in same], len(alignment) - first):
                room = {layer: self.maps[layer].final_room(len(alignment) - first) for layer in layers}
                for rows in self._chunks(layers, first, len(alignment)):
                    panel = self._source_features(layers, source, alignment[rows])
                    text = self._text_features(embeddings, start + rows.start, rows.stop - rows.start)
                    here = slice(rows.start - first, rows.stop - first)
                    for layer in layers:
                        self.maps[layer].put(panel, text, here, room[layer])
                panel = text = None
                for layer in layers:
                    yield layer, self.maps[layer].finished(room.pop(layer))

    def _groups(self, layers: Sequence[int], tokens: int) -> Iterable[list[int]]:
        """Cut layers into neighbours that are mapped together: as many as leave a chunk `GOOD_ROWS` tokens."""
        group: list[int] = []
        for layer in layers:
            if group and min(tokens, GOOD_ROWS) * self._row_bytes([*group, layer]) > CHUNK_BYTES:
                yield group
                group = []
            group.append(layer)
        yield group

    def _chunks(self, layers: Sequence[int], first: int, stop: int) -> Iterable[slice]:
        """Cut the rows [first, stop) so that the features of a chunk take about `CHUNK_BYTES`."""
        rows = max(LEAST_ROWS, CHUNK_BYTES // max(1, self._row_bytes(layers)))
        if first == stop:
            return [slice(first, stop)]
        return [slice(at, min(at + rows, stop)) for at in range(first, stop, rows)]

    def _row_bytes(self, layers: Sequence[int]) -> int:
        """Return what one token's features take that some target layers read."""
        return self.dtype.itemsize * sum(self.config.source.layers[layer].width for layer in self._sources(layers))

    def _sources(self, layers: Sequence[int]) -> list[int]:
        """Return the source layers that some target layers read, in the order in which they stand side by side."""
        return sorted({source for layer in layers for source in self.config.source_layers[layer]})

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
        device, count = source.keys[0].device, last - first if taken is None else len(taken)
        heads: dict[tuple[int, Side], Tensor] = {}
        rows = (
            None if self.is_by_head else torch.empty(count, columns[str(names[-1])][1], dtype=self.dtype, device=device)
        )
        for name in names:
            lost, at = source.tokens - source.held(name), columns[str(name)][0]
            here = slice(first - lost, last - lost) if taken is None else taken - lost
            centre = self.centres[f"source/{name}"]
            sides: tuple[tuple[Side, Tensor], ...] = (("keys", source.keys[name]), ("values", source.values[name]))
            for side, x in sides:
                size = x.shape[1] * x.shape[3]
                if rows is None:
                    heads[name, side] = (x[0, :, here] - centre[:size].view(x.shape[1], 1, -1)).to(self.dtype)
                else:
                    put_centred(x[0, :, here], centre[:size], rows[:, at : at + size])
                centre, at = centre[size:], at + size
        return Panel(self.config.source, rows, columns, index.to(device), heads)

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
        rows: [source tokens, all columns]; None where every product is by head. columns: where each source layer stands.
        index: [target tokens, lags] which row each reads.
        heads: for products by head the keys and the values of each source layer: [heads, source tokens, dim].
    """

    geometry: Geometry
    rows: Tensor | None
    columns: dict[str, tuple[int, int]]
    index: Tensor
    heads: dict[tuple[int, Side], Tensor]

    def across_heads(self, part: Part, out: Tensor) -> None:
        """Add the products [target tokens, columns] of some source layers; those that lie side by side are one product."""
        assert part.source is not None
        assert self.rows is not None
        row, pieces = 0, []
        for first, last in runs([self._range(layer, part.side) for layer in part.layers]):
            pieces.append((self.rows[:, first:last], part.source[row : row + last - first]))
            row += last - first
        rows = self._own_rows()
        if rows is not None:
            for x, weight in pieces:
                out.addmm_(x[rows], weight)
            return
        (x, weight), *others = pieces
        total = x @ weight
        for x, weight in others:
            total.addmm_(x, weight)
        out += summed(total, self.index)

    def by_head(self, part: Part, out: Tensor) -> None:
        """Add the products [heads, target tokens, columns] of single heads of some source layers."""
        assert part.source is not None
        assert part.heads is not None
        rows, row = self._own_rows(), 0
        total = out if rows is not None else None
        for layer, heads in zip(part.layers, part.heads, strict=True):
            x = self._heads_of(layer, part.side)
            x = x if heads == tuple(range(len(x))) else x[list(heads)]
            x = x if rows is None else x[:, rows]
            weight = part.source[:, row : row + x.shape[2]]
            total, row = torch.bmm(x, weight) if total is None else total.baddbmm_(x, weight), row + x.shape[2]
        assert total is not None
        if rows is None:
            out += summed(total, self.index)

    def _heads_of(self, layer: int, side: Side | None) -> Tensor:
        """Return a source layer's keys or values, [heads, source tokens, dim]."""
        assert side is not None
        if self.rows is None:
            return self.heads[layer, side]
        first, last = self._range(layer, side)
        return self.rows[:, first:last].unflatten(1, (self.geometry.layers[layer].kv_heads, -1)).transpose(0, 1)

    def _own_rows(self) -> slice | None:
        """Return the rows that target tokens read where each reads one, the next the next; None otherwise."""
        if self.index.shape[1] > 1 or not is_in_a_row(self.index[:, 0]):
            return None
        start = int(self.index[0, 0])
        return slice(start, start + len(self.index))

    def _range(self, layer: int, side: Side | None) -> tuple[int, int]:
        """Return the columns of a source layer's keys, of its values, or of both."""
        first, last = self.columns[str(layer)]
        middle = first + self.geometry.layers[layer].key_width
        return {"keys": (first, middle), "values": (middle, last), None: (first, last)}[side]


# --- products ----------------------------------------------------------------------------------------------------------


def put_centred(x: Tensor, centre: Tensor, out: Tensor) -> None:
    """Write x [heads, tokens, dim] less a mean into out [tokens, heads * dim]."""
    heads, tokens, dim = x.shape
    if out.shape != (
        tokens,
        heads * dim,
    ):  # `out=` would be resized, with a warning, and what it was to fill left as it is
        raise ValueError(f"{tokens} tokens of {heads} x {dim} do not fill {tuple(out.shape)}")
    torch.sub(x.transpose(0, 1), centre.view(heads, dim), out=out.unflatten(1, (heads, dim)))


def summed(products: Tensor, index: Tensor) -> Tensor:
    """Return, for each row of index [tokens, lags], the sum over lags of products [..., rows, lags * columns]."""
    lags = index.shape[1]
    if products.ndim == 3:
        parts = products.unflatten(-1, (lags, -1))
        return sum((parts[:, index[:, lag], lag] for lag in range(1, lags)), start=parts[:, index[:, 0], 0])
    table = products.view(len(products) * lags, products.shape[1] // lags)
    return nn.functional.embedding_bag(index * lags + torch.arange(lags, device=index.device), table, mode="sum")


def is_in_a_row(places: Tensor) -> bool:
    """Tell whether places follow each other without a gap or a repetition."""
    count = len(places)
    return bool(count) and int(places[-1]) - int(places[0]) == count - 1 and bool((places.diff() == 1).all())


# --- folding -----------------------------------------------------------------------------------------------------------


def parts_of(maps: nn.ModuleDict) -> tuple[Tensor, ...]:
    """Return every tensor that products depend on."""
    return tuple(x for layer_map in maps.values() for x in (*layer_map.parameters(), *layer_map.buffers()))


def states_of(parts: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return address and version of each tensor."""
    return tuple((part.data_ptr(), part._version) for part in parts)


def product_dtype(maps: nn.ModuleDict, rounded: torch.dtype | None) -> torch.dtype:
    """Return the dtype that products are made in: bfloat16 where that is asked for and fast, or the result is read so anyway."""
    asked = all(isinstance(m, LayerMap) and m.multiplies_in_bfloat16 for m in maps.values())
    first = next(iter(maps.parameters()))
    own: torch.dtype = first.dtype
    narrow = rounded == torch.bfloat16 or (asked and is_fast_in_bfloat16(first.device.type))
    return torch.bfloat16 if narrow and own == torch.float32 else own


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
    products = layer_map.first_products()
    if products is None:
        return None
    names = config.blocks(layer)
    widths = [config.width(name) for name in names]
    means, scales = (
        dict(zip(names, x.split(widths), strict=True)) for x in (layer_map.feature_mean, layer_map.feature_scale)
    )
    for name in names:
        # What is subtracted is a number of the products' dtype, so that it costs one pass without a copy in another.
        centres.setdefault(without_lag(name), means[name].to(dtype))
    offsets = {name: centres[without_lag(name)] - means[name] for name in names}
    linear, second = layer_map.linear, None
    if isinstance(linear, LowRankMap) and layer_map.residual is None:
        second = linear.up.to(dtype), layer_map.bias.to(dtype)
    parts = tuple(fold_product(config, layer, product, scales, offsets, dtype) for product in products)
    return FoldedMap(layer_map, parts, second)


def fold_product(
    config: TranslatorConfig,
    layer: int,
    product: Product,
    scales: Mapping[str, Tensor],
    offsets: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Part:
    """Fold the features' scales, and how far their means are from where they are centred, into one product."""
    names, layers = config.blocks(layer), config.source_layers[layer]
    count = config.target.layers[layer].kv_heads if product.weight.ndim == 3 else None
    heads = None
    if count is not None:
        heads = tuple(tuple(paired_head(config.source.layers[s], h, count) for h in range(count)) for s in layers)
    reads = {name: columns_read(config, layer, name, product) for name in names}
    weights = product.weight.split([next(iter(reads[name].values())).numel() for name in names], dim=-2)
    added = product.added.clone()
    by_lag: dict[str, list[Tensor]] = {}
    for name, weight in zip(names, weights, strict=True):
        kind, *_, lag = name.split("/")
        rows = torch.stack([*reads[name].values()])  # [heads or 1, features]
        scaled = weight / (scales[name][rows][..., None] if count is not None else scales[name][rows[0], None])
        offset = offsets[name][rows]
        added += (offset[:, None] @ scaled).flatten() if count is not None else offset[0] @ scaled
        if kind == "embedding" and count is not None:  # every head reads the text: one product for all
            scaled = scaled.transpose(0, 1).flatten(1)
        by_lag.setdefault(f"{kind}/{lag}", []).append(scaled)
    source, text = (
        [torch.cat(by_lag[f"{kind}/{lag}"], dim=-2) for lag in lags if f"{kind}/{lag}" in by_lag]
        for kind, lags in (("source", config.source_lags), ("embedding", config.embedding_lags))
    )
    return Part(
        layers,
        product.side,
        heads,
        torch.cat(source, dim=-1).to(dtype) if source else None,
        torch.cat(text, dim=-1).to(dtype) if text else None,
        added.to(dtype),
    )


def without_lag(name: str) -> str:
    """Return a feature block's name without its lag."""
    return name.rpartition("/")[0]


def columns_read(config: TranslatorConfig, layer: int, name: str, product: Product) -> dict[int, Tensor]:
    """Return which of a block's columns a product reads, for each target head or, across heads, for head 0."""
    kind, index, *_ = name.split("/")
    if kind == "embedding":
        whole = torch.arange(config.text_width)
        return dict.fromkeys(range(product.weight.shape[0] if product.weight.ndim == 3 else 1), whole)
    source, heads = config.source.layers[int(index)], config.target.layers[layer].kv_heads
    if product.weight.ndim == 3:
        values = product.side == "values"
        return {h: torch.tensor(head_columns(source, h, heads, values)) for h in range(heads)}
    first = source.key_width if product.side == "values" else 0
    last = source.key_width if product.side == "keys" else source.width
    return {0: torch.arange(first, last)}
