"""The maps: a source's position-free keys and values (and the text) in, the target's out.

One class for every use. Ridge initialises it, distillation trains the same object, inference calls it. Its inputs are named
feature blocks, each optional: the token-only control has no source blocks, the privacy split no embedding blocks. Knows
tensors and geometry; does not know models, tokenizers or caches' insides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvlingo.cache import KV, flatten_heads, split_heads
from kvlingo.errors import IncompatiblePair
from kvlingo.geometry import Geometry, LayerGeometry

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
        return self.target.hidden_size if kind == "embedding" else self.source.layers[int(index)].width

    def feature_width(self, layer: int) -> int:
        """Return the number of features of a target layer's map."""
        return sum(self.width(block) for block in self.blocks(layer))

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` restores."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TranslatorConfig:
        """Restore what `to_json` gave."""
        tuples = {k: tuple(data[k]) for k in ("source_lags", "embedding_lags", "key_norms")}
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
        embeddings: [all target tokens, hidden]: the target's own input embeddings of the whole conversation.

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


@dataclass(frozen=True)
class Folded:
    """A linear map's weights [features, outputs] with the features' scale in them, and what they were made from.

    The tensors themselves are kept: an address alone may be another's by now.
    """

    parts: tuple[Tensor, ...]
    states: tuple[tuple[int, int], ...]
    weight: Tensor

    def is_of(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> bool:
        """Tell whether these parts, as they are now, give this weight in this dtype. An edit through `.data` is not seen."""
        same = all(mine is theirs for mine, theirs in zip(self.parts, parts, strict=True))
        return same and self.states == _states(parts) and self.weight.dtype == dtype


def _states(parts: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((part.data_ptr(), part._version) for part in parts)


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
    _folded: Folded | None = None

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

    def from_blocks(self, blocks: Sequence[Block], rounded: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Do what `forward` does with the features [tokens, columns] in pieces, without putting them side by side.

        `rounded` is a dtype that products may be made in: that of a target which reads the result in it anyway.

        Where nothing is to be learnt, a linear map is multiplied block by block with the features' scale folded into its weights,
        and rows that are alike are multiplied once. Means are subtracted first: folded in as well, a mean far above its feature's
        spread would cancel to nothing but rounding.
        """
        dtypes = {_parts(block)[0].dtype for block in blocks}
        folded = self._fold(dtypes.pop(), rounded) if len(dtypes) == 1 else None
        if folded is None:
            return self(torch.cat([dense(block) for block in blocks], dim=-1))
        y = self.bias.detach().expand(len(blocks[0]), -1).clone()
        widths = [_parts(block)[0].shape[-1] for block in blocks]
        for block, mean, weight in zip(
            blocks, self.feature_mean.split(widths), folded.weight.split(widths), strict=True
        ):
            rows, index = _parts(block)
            product = (rows - mean).to(weight.dtype) @ weight
            y += product if index is None else product[index]
        return self.finish(y)

    def _fold(self, dtype: torch.dtype, rounded: torch.dtype | None) -> Folded | None:
        """Return weights with the features' scale in them, made anew when they have changed; None where they can't be used."""
        linear = self.linear
        if torch.is_grad_enabled() or not isinstance(linear, LinearMap) or self.residual is not None:
            return None
        parts = (linear.weight, self.feature_scale)
        if self.bias.dtype != dtype:
            return None
        if any(part.is_inference() or part.dtype != dtype for part in parts):
            return None
        is_short = self.multiplies_in_bfloat16 or rounded == torch.bfloat16
        wanted = torch.bfloat16 if is_short else dtype
        if self._folded is None or not self._folded.is_of(parts, wanted):
            weight = (linear.weight / self.feature_scale[:, None]).detach().to(wanted)
            self._folded = Folded(parts, _states(parts), weight)
        return self._folded

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert the map; what was folded from where it stood is forgotten."""
        self._folded = None
        return super()._apply(fn, recurse)

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


class Translator(nn.Module):
    """All maps of one direction of one pair."""

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        self.maps = nn.ModuleDict(
            {str(layer): LayerMap(config, layer) for layer in range(config.first_layer, len(config.target))}
        )

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
            rounded: the dtype that the result will be read in; a linear map multiplies in bfloat16 for one that is read so.

        Returns the target's position-free KV of these tokens, without the skipped ones.
        """
        config, tokens = self.config, len(alignment)
        exact = 0 if native is None else len(native)
        if exact < config.first_layer:
            raise IncompatiblePair(
                "a translator that reads the text has no map for layer 0; give its exact KV as `native`"
            )
        skip = [min(s, tokens) for s in skip or [0] * len(config.target)]
        first = first_needed(config, skip, exact)
        blocks: dict[str, Block] = {}
        for at in sorted(set(first.values())):
            names = [name for name in first if first[name] == at]
            blocks |= feature_blocks(
                names, source=source, alignment=alignment[at:], embeddings=embeddings, start=start + at
            )
        cut = _Cuts(blocks)
        keys, values = [], []
        for layer in range(len(config.target)):
            if native is not None and layer < exact:
                k, v = (x[:, :, skip[layer] :] for x in (native.keys[layer], native.values[layer]))
            else:
                layer_map = self.maps[str(layer)]
                assert isinstance(layer_map, LayerMap)
                read = [cut.after(b, skip[layer] - first[b]) for b in config.blocks(layer)]
                k, v = layer_map.from_blocks(read, rounded)
            keys.append(k)
            values.append(v)
        return KV(tuple(keys), tuple(values), tokens)

    def multiply_in_bfloat16(self, on: bool) -> None:
        """Round the maps' matrix products to bfloat16, or stop doing so: a fast mode for training, never saved.

        Using a translator asks for it by `rounded`, where the target reads in bfloat16.
        """
        for layer_map in self.maps.values():
            assert isinstance(layer_map, LayerMap)
            layer_map.multiplies_in_bfloat16 = on

    def num_bytes(self, bytes_per_weight: float = 4) -> int:
        """Return the size of all maps when stored with so many bytes a weight."""
        return int(sum(p.numel() for p in self.parameters()) * bytes_per_weight)


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


class _Cuts:
    """Feature blocks without their first rows, made once for all layers that read them from the same row on."""

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        self._blocks = blocks
        self._repeated: dict[tuple[str, int], Repeated] = {}

    def after(self, name: str, rows: int) -> Block:
        block = self._blocks[name]
        if isinstance(block, Tensor):
            return block[rows:]
        if not rows:
            return block
        if (name, rows) not in self._repeated:
            self._repeated[name, rows] = block.take(torch.arange(rows, len(block), device=block.index.device))
        return self._repeated[name, rows]


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
