"""Hand a conversation over between two models of mlx-lm, with the translators that PyTorch fitted.

Knows mlx-lm's models and prompt caches, and does with MLX what `cache`, `rope`, `translator` and `handoff` do with PyTorch: the
same plan, the same alignment, the same arithmetic. Keys are un-rotated when they are read and rotated when they are written, with
the angles of the model's own rotary module. Deliberately does not know training, weights on a hub, or servers.

A translator knows its models by PyTorch's weights, which MLX's (quantised, renamed) are not: here only what a cache looks like is
checked. That the weights are those it was fitted on is for the caller to see to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from kvlingo.alignment import align
from kvlingo.errors import BadInput, IncompatiblePair, KVLingoError, MissingExtra, UnsupportedCache, UnsupportedModel
from kvlingo.geometry import Geometry, LayerGeometry, LayerRope, RopeLayout
from kvlingo.handoff import WHY_READ, Conversation, ModelState, as_one_text, read_conversation
from kvlingo.outline import embedding_scale
from kvlingo.plan import HandoffPlan, Provenance, Span, SpanKind, plan_handoff, reprefill_plan
from kvlingo.reading import Reading, first_tokens, read_more
from kvlingo.translator import (
    HeadwiseMap,
    LayerMap,
    LinearMap,
    LowRankMap,
    Translator,
    TranslatorConfig,
    first_needed,
    first_read,
)

try:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from mlx_lm.utils import load as load_both
    from mlx_lm.utils import load_config
except ImportError as missing:
    raise MissingExtra("models of mlx-lm need mlx and mlx-lm: pip install 'kvlingo[mlx]'") from missing

if TYPE_CHECKING:
    from kvlingo.language_model import LanguageModel

NEAR, FAR = 1, 777
CHUNK = 2048
PROBED_ID = 5
ROUNDING = {"float32": 1e-3}
ROUNDING_ELSE = 5e-2
ROPE_NAMES = ("rope", "rotary_emb")
Array = Any  # an mx.array
core: Any = mx  # for who imports it from here, so that a missing MLX is told in one line


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rotation:
    """How one layer rotates its keys: the model's own module, and which dims it turns.

    Fields:
        name: what the module does to a unit of each dim; equal for modules that rotate alike.
    """

    module: Any
    rope: LayerRope
    name: bytes

    def table(self, first: int, tokens: int, width: int) -> tuple[Array, Array]:
        """Return cos and sin [tokens, planes] in float32, as the module turns a unit along the first dim of each plane."""
        x, y = planes(self.rope)
        units = np.zeros((1, 1, tokens, width), dtype=np.float32)
        units[..., x] = 1.0
        turned = self.module(mx.array(units), offset=first)[0, 0]
        return turned[:, x], turned[:, y]


@dataclass(frozen=True, eq=False)
class MlxModel:
    """A model of mlx-lm with its tokenizer and the facts probed from it.

    Fields:
        tokenizer: the one of transformers, out of mlx-lm's wrapper.
        embedding: the module that makes embeddings of ids; `embedding_scale` is what PyTorch's multiplies them with.
        rotations: of each layer; None for a layer without positions.
    """

    name: str
    model: Any
    tokenizer: Any
    geometry: Geometry
    rotations: tuple[Rotation | None, ...]
    embedding: Any
    embedding_scale: float
    dtype: Any

    def embed(self, ids: Sequence[int]) -> Array:
        """Return the input embeddings of ids as the translator was fitted on them: [ids, hidden], float32."""
        return self.embedding(mx.array(list(ids))).astype(mx.float32) * self.embedding_scale


def load(name: str | Path) -> MlxModel:
    """Load a model by folder or hub id with mlx-lm.

    Folders that transformers 5 saved name their rotary base where not all of mlx-lm's models look for it; they would read with
    another one, without a word. It is put where they look.

    Raises:
        BadInput: there is no such model.
        UnsupportedModel: mlx-lm can't load it, or its cache can't be read and written here.
    """
    folder = Path(name).expanduser()
    with clear_mlx_errors(str(name)):
        changes = hoisted(load_config(folder)) if folder.is_dir() else {}
        model, tokenizer, config = load_both(
            str(folder if folder.is_dir() else name), model_config=changes, return_config=True
        )
        if not folder.is_dir() and hoisted(config):
            model, tokenizer, config = load_both(str(name), model_config=hoisted(config), return_config=True)
        scale = embedding_scale(config)
    return wrap(model, tokenizer, name=folder.name if folder.is_dir() else str(name), embedding_scale=scale)


@contextmanager
def clear_mlx_errors(name: str) -> Iterator[None]:
    """Turn what mlx-lm raises while loading into one line."""
    try:
        yield
    except KVLingoError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:240]
        if not Path(name).expanduser().exists():
            raise BadInput(
                f"{name} is no folder, and can't be had from the model hub; check the name ({reason})"
            ) from error
        raise UnsupportedModel(f"mlx-lm can't load {name}: {reason}") from error


def hoisted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings and the order of layers under the older names that mlx-lm's models read; none that are there."""
    given = config.get("rope_parameters") or {}
    full = given.get("full_attention", given)
    sliding = given.get("sliding_attention", {})
    found = {
        "sliding_window_pattern": pattern_of(config.get("layer_types")) or config.get("_sliding_window_pattern"),
        "rope_theta": full.get("rope_theta"),
        "rope_scaling": full if full.get("rope_type", "default") != "default" else None,
        "partial_rotary_factor": full.get("partial_rotary_factor"),
        "rope_local_base_freq": sliding.get("rope_theta"),
    }
    return {name: value for name, value in found.items() if value is not None and config.get(name) is None}


def pattern_of(layer_types: Sequence[str] | None) -> int | None:
    """Return every how many layers one attends to all tokens, where the others slide; None for any other order."""
    kinds = list(layer_types or ())
    if "full_attention" not in kinds:
        return None
    every = kinds.index("full_attention") + 1
    return (
        every
        if [kind == "full_attention" for kind in kinds] == [not (i + 1) % every for i in range(len(kinds))]
        else None
    )


def wrap(model: Any, tokenizer: Any, *, name: str = "model", embedding_scale: float = 1.0) -> MlxModel:
    """Probe a model that is already in memory. Raises `UnsupportedModel` where its cache can't be read and written here."""
    caches = make_prompt_cache(model)
    read = {position: one_token(model, position) for position in (0, NEAR, FAR)}
    rotations, layers = [], []
    for index, cache in enumerate(caches):
        keys, values = read[0][index]
        window = window_of(cache, index, name)
        rotation = probe_rotation(model.layers[index], keys.shape[-1])
        refuse_other_rotation(rotation, index, name, {p: found[index][0] for p, found in read.items()})
        rotations.append(rotation)
        rope = None if rotation is None else rotation.rope
        layers.append(LayerGeometry(keys.shape[1], keys.shape[3], values.shape[3], window, rope))
    embedding = embedding_of(model, name)
    rows = int(getattr(model.args, "vocab_size", 0))
    geometry = Geometry(tuple(layers), embedding(mx.array([0])).shape[-1], rows, None)
    plain = tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer
    return MlxModel(name, model, plain, geometry, tuple(rotations), embedding, embedding_scale, read[0][0][0].dtype)


class _Filled(Exception):
    """The cache that was waited for holds its keys and values."""


class _Caught:
    """A cache of one layer that stands at some position, keeps what it is given, and can stop the pass there."""

    def __init__(self, offset: int = 0, *, stops: bool = False) -> None:
        self.offset, self.stops = offset, stops
        self.keys: Array | None = None
        self.values: Array | None = None

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Keep a layer's keys and values."""
        self.keys, self.values = keys, values
        if self.stops:
            raise _Filled
        return keys, values

    def make_mask(self, tokens: int, *, window_size: int | None = None, return_array: bool = False) -> Any:
        """Return the mask of a pass from nothing, whatever the position."""
        if tokens == 1:
            return None
        if window_size is None and not return_array:
            return "causal"
        rows, columns = mx.arange(tokens)[:, None], mx.arange(tokens)[None]
        seen = rows >= columns
        return seen if window_size is None else seen & (rows < columns + window_size)


def one_token(model: Any, position: int) -> list[tuple[Array, Array]]:
    """Return what each layer caches of one token alone at a position: keys and values [1, heads, 1, dim]."""
    caught = [_Caught(position) for _ in model.layers]
    with clear_mlx_errors(type(model).__module__):
        model(mx.array([[PROBED_ID]]), cache=caught)
    missing = next((index for index, one in enumerate(caught) if one.keys is None), None)
    if missing is not None:
        raise UnsupportedModel(
            f"layer {missing} of this model of mlx-lm keeps no keys and values of its own; KV-Lingo can't use it"
        )
    return [(one.keys, one.values) for one in caught]


def window_of(cache: Any, index: int, name: str) -> int | None:
    """Return the window of a layer by the cache that mlx-lm makes for it. Raises `UnsupportedModel` for other caches."""
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and not cache.keep:
        return int(cache.max_size)
    raise UnsupportedModel(
        f"layer {index} of {name} keeps a {type(cache).__name__}, not keys and values per token; KV-Lingo can't use it with MLX"
    )


def embedding_of(model: Any, name: str) -> Any:
    """Return the module that makes embeddings of ids."""
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    found = next((module for _, module in model.named_modules()[::-1] if isinstance(module, kinds)), None)
    if found is None:
        raise UnsupportedModel(
            f"{name} has no module for its embeddings that is known here; KV-Lingo can't use it with MLX"
        )
    return found


def probe_rotation(layer: Any, width: int) -> Rotation | None:
    """Find out what a layer's rotary module does to each dim of a head; None where it has none, or one that turns nothing."""
    named = [(name.split(".")[-1], module) for name, module in layer.named_modules()]
    module = next((module for name, module in named if name in ROPE_NAMES), None)
    if module is None:
        return None
    turned = np.array(
        module(mx.eye(width)[None, :, None], offset=FAR)[0, :, 0]
    )  # row: which unit; column: where it went
    moved = [set(np.flatnonzero(row)) - {dim} for dim, row in enumerate(turned)]
    last = max((dim for dim, others in enumerate(moved) if others), default=-1)
    if last < 0:
        return None
    partner = min(moved[0], default=0)
    layout: RopeLayout = "interleaved" if partner == 1 and last > 1 else "half"
    dims = int(last + 1 if layout == "interleaved" else 2 * partner)
    rope = LayerRope(None, layout, "half", dims)
    return Rotation(module, rope, turned.tobytes())


def refuse_other_rotation(rotation: Rotation | None, index: int, name: str, keys: Mapping[int, Array]) -> None:
    """Raise `UnsupportedModel` unless a lone token's keys at several positions differ by the rotation alone."""
    free = {position: np.array(unrotated(rotation, x, position).astype(mx.float32)) for position, x in keys.items()}
    scale = max(float(np.abs(free[0]).max()), 1e-30)
    gap = max(float(np.abs(free[position] - free[0]).max()) for position in free) / scale
    allowed = ROUNDING.get(str(keys[0].dtype).removeprefix("mlx.core."), ROUNDING_ELSE)
    if gap > allowed:
        raise UnsupportedModel(
            f"the keys of layer {index} of {name} do not follow its rotary module: they differ by {gap:.1%} after un-rotating, "
            f"rounding explains {allowed:.1%}; KV-Lingo can't use it with MLX"
        )


# --- rotation --------------------------------------------------------------------------------------------------------


def planes(rope: LayerRope) -> tuple[slice, slice]:
    """Return the dims of the two coordinates of a head's rotary planes."""
    if rope.layout == "interleaved":
        return slice(0, rope.dims, 2), slice(1, rope.dims, 2)
    return slice(0, rope.dims // 2), slice(rope.dims // 2, rope.dims)


def unrotated(
    rotation: Rotation | None,
    keys: Array,
    first: int,
    known: dict[tuple[bytes, int, int], tuple[Array, Array]] | None = None,
) -> Array:
    """Take the positions `first` … out of keys [batch, heads, tokens, dim]: the transpose over cos² + sin², in float32.

    Layers that rotate alike share the angles of a pass in `known`.
    """
    if rotation is None:
        return keys.astype(mx.float32)
    tokens, width = keys.shape[2:]
    if not tokens:
        return keys.astype(mx.float32)
    known = {} if known is None else known
    name = (rotation.name, first, tokens)
    if name not in known:
        cos, sin = rotation.table(first, tokens, width)
        norm = cos.square() + sin.square()
        known[name] = cos / norm, sin / norm
    cos, sin = known[name]
    a, b = planes(rotation.rope)
    wide = keys.astype(mx.float32)
    x, y = wide[..., a], wide[..., b]
    free = (x * cos + y * sin, y * cos - x * sin)
    if rotation.rope.layout == "interleaved":
        turned = mx.stack(free, axis=-1).reshape(*keys.shape[:3], rotation.rope.dims)
    else:
        turned = mx.concatenate(free, axis=-1)
    return mx.concatenate((turned, wide[..., rotation.rope.dims :]), axis=-1)


def rotated(rotation: Rotation | None, keys: Array, first: int) -> Array:
    """Give position-free keys [batch, heads, tokens, dim] the positions `first` …, by the model's own module."""
    return keys if rotation is None or not keys.shape[2] else rotation.module(keys, offset=first)


# --- prompt caches ---------------------------------------------------------------------------------------------------


def native_prompt_cache(lm: MlxModel) -> list[Any]:
    """Return an empty prompt cache as mlx-lm makes it: sliding layers keep their window only."""
    return list(make_prompt_cache(lm.model))


def full_prompt_cache(lm: MlxModel) -> list[Any]:
    """Return an empty prompt cache whose sliding layers keep every token: what a source reads into."""
    return [KVCache() for _ in lm.geometry.layers]


def read(lm: MlxModel, ids: Sequence[int], cache: list[Any], *, chunk: int = CHUNK) -> Array:
    """Let a model read ids after what a prompt cache holds; return the logits [vocabulary] of the next token."""
    if not ids:
        raise BadInput("nothing to read: got no token ids")
    logits = None
    for start in range(0, len(ids), chunk):
        logits = lm.model(mx.array(list(ids[start : start + chunk]))[None], cache=cache)[0, -1]
        mx.eval(logits, [(one.keys, one.values) for one in cache])
    return logits


@dataclass(frozen=True)
class Held:
    """What one layer of a prompt cache holds: the last of `tokens` tokens that it has read."""

    keys: Array
    values: Array
    tokens: int

    @property
    def lost(self) -> int:
        """Return how many first tokens are no longer there."""
        return self.tokens - int(self.keys.shape[2])


def held_by(cache: Any, index: int) -> Held:
    """Return what a layer's cache holds. Raises `UnsupportedCache` for a kind that can't be read."""
    if getattr(cache, "keys", None) is None or not cache.offset:
        raise UnsupportedCache(f"layer {index} of the prompt cache is empty or no cache of keys and values; re-prefill")
    tokens = int(cache.offset)
    if type(cache) is KVCache:
        return Held(cache.keys[:, :, :tokens], cache.values[:, :, :tokens], tokens)
    if type(cache) is QuantizedKVCache:
        pair = (
            mx.dequantize(*side, group_size=cache.group_size, bits=cache.bits) for side in (cache.keys, cache.values)
        )
        keys, values = (side[:, :, :tokens] for side in pair)
        return Held(keys, values, tokens)
    if type(cache) is not RotatingKVCache:
        raise UnsupportedCache(
            f"layer {index} of the prompt cache is a {type(cache).__name__}, which can't be read; re-prefill"
        )
    keys, values = in_order(cache)
    if keys.shape[2] < tokens and cache.keep:
        raise UnsupportedCache(
            f"layer {index} of the prompt cache dropped tokens from its middle (max_kv_size); re-prefill, or read without it"
        )
    if tokens >= cache.max_size and not bool(
        mx.any(keys[:, :, :1])
    ):  # what `fill` puts into the slot that is overwritten next
        keys, values = keys[:, :, 1:], values[:, :, 1:]
    return Held(keys, values, tokens)


def in_order(cache: Any) -> tuple[Array, Array]:
    """Return a rotating cache's keys and values from the oldest to the newest."""

    def sorted_(x: Array) -> Array:
        at = cache._idx
        if at == x.shape[2]:
            return x
        if at < cache.offset:
            return mx.concatenate((x[:, :, : cache.keep], x[:, :, at:], x[:, :, cache.keep : at]), axis=2)
        return x[:, :, :at]

    return sorted_(cache.keys), sorted_(cache.values)


@dataclass(frozen=True)
class FreeKV:
    """Position-free keys and values [1, heads, held, dim] in float32 of a prompt cache; of each layer from token `first` on."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    first: tuple[int, ...]


def read_prompt_cache(lm: MlxModel, cache: Sequence[Any], *, stop: int, first_wanted: Sequence[int]) -> FreeKV:
    """Return a prompt cache's tokens before `stop`, free of position; of each layer from the first token that is wanted on.

    Raises `UnsupportedCache` where a layer does not hold what is wanted.
    """
    if len(cache) != len(lm.geometry):
        raise UnsupportedCache(f"the prompt cache has {len(cache)} layers, {lm.name} {len(lm.geometry)}; give its own")
    held = [held_by(one, index) for index, one in enumerate(cache)]
    known: dict[tuple[bytes, int, int], tuple[Array, Array]] = {}
    keys, values, first = [], [], []
    for index, (layer, wanted) in enumerate(zip(held, first_wanted, strict=True)):
        if layer.tokens != held[0].tokens or layer.tokens < stop or layer.keys.shape[0] != 1:
            raise UnsupportedCache(
                f"layer {index} of the prompt cache holds {layer.keys.shape[0]} × {layer.tokens} tokens, 1 × {stop} or more are "
                "needed in every layer; re-prefill"
            )
        start = min(wanted, stop)
        if layer.lost > start and start < stop:
            raise UnsupportedCache(
                f"layer {index} of the prompt cache holds the last {layer.tokens - layer.lost} of {layer.tokens} tokens, "
                f"those from {start} on are needed; re-prefill, or let the source read into kvlingo.mlx.full_prompt_cache"
            )
        here = slice(max(start - layer.lost, 0), max(stop - layer.lost, 0))
        keys.append(unrotated(lm.rotations[index], layer.keys[:, :, here], start, known))
        values.append(layer.values[:, :, here].astype(mx.float32))
        first.append(start)
    return FreeKV(tuple(keys), tuple(values), tuple(first))


def fill(cache: Any, keys: Array, values: Array, tokens: int) -> None:
    """Put the last of `tokens` tokens, rotated, into an empty cache of one layer, as if it had read them all.

    A rotating cache that is full has one slot more than its next query sees: it gets a filler, which the next token takes the
    place of.
    """
    if type(cache) is RotatingKVCache:
        if tokens >= cache.max_size:
            keys, values = (
                mx.concatenate((mx.zeros_like(x[:, :, :1]), x[:, :, -(cache.max_size - 1) :]), axis=2)
                for x in (keys, values)
            )
        cache._idx = keys.shape[2]
    cache.keys, cache.values, cache.offset = keys, values, tokens


# --- maps ------------------------------------------------------------------------------------------------------------


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
            return Block(target.embed(distinct.tolist()), mx.array(index.reshape(-1)))
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
    caught = [_Caught(stops=True), *(_Caught() for _ in lm.geometry.layers[1:])]
    with suppress(_Filled):
        lm.model(mx.array(distinct)[:, None], cache=caught)
    one = caught[0]
    assert one.keys is not None
    assert one.values is not None
    keys = unrotated(lm.rotations[0], one.keys, 0)
    places = mx.array(index.reshape(-1))
    pair = (x[:, :, 0].astype(mx.float32)[places].swapaxes(0, 1)[None] for x in (keys, one.values))
    return [(k, v) for k, v in [tuple(pair)]]


# --- the hand-over ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MlxHandOff:
    """A target that can go on: `mlx_lm.generate(model, tokenizer, prompt=handed.rest, prompt_cache=handed.cache)`.

    Fields:
        state: the target's reading, its prompt cache, and how far each span can be trusted once `rest` is read.
        rest: the ids that the target has still to read, at least one.
        timings_ms: source_prefill (0 when the source had read before), translate.
    """

    state: ModelState
    rest: list[int]
    plan: HandoffPlan
    timings_ms: dict[str, float]

    @property
    def cache(self) -> list[Any]:
        """Return the prompt cache; it holds every token before `rest`."""
        return list(self.state.cache)


def read_native(conversation: Conversation, lm: MlxModel) -> ModelState:
    """Let a source read a conversation from scratch into a full-length prompt cache."""
    reading = read_conversation(conversation, cast("LanguageModel", lm), add_generation_prompt=False)
    cache = full_prompt_cache(lm)
    read(lm, reading.ids, cache)
    return ModelState(reading, cache, reprefill_plan(len(reading), WHY_READ).spans)


def went_on(lm: MlxModel, state: ModelState, ids: Sequence[int]) -> ModelState:
    """Return the state of a model that has generated `ids` after what it had read, into the same prompt cache.

    The last of them may not be in the cache yet (mlx-lm puts a token there when it makes the next one).
    """
    reading = read_more(lm.tokenizer, state.reading, list(ids))
    held = min(int(state.cache[0].offset), len(reading))
    known = state.spans[-1].stop if state.spans else 0
    own = Provenance.EXACT if all(s.provenance is Provenance.EXACT for s in state.spans) else Provenance.OWN
    more = [Span(known, held, SpanKind.RECOMPUTED, own, "its own words")] if held > known else []
    return replace(state, reading=first_tokens(reading, held), spans=(*state.spans, *more))


def hand_off(
    conversation: Conversation,
    source: MlxModel,
    target: MlxModel,
    translator: Translator | MlxTranslator,
    *,
    sink: int = 1,
    tail: int = 1,
    source_state: ModelState | None = None,
    reading: Reading | None = None,
) -> MlxHandOff:
    """Hand a conversation over to the target without re-prefill.

    Args:
        sink, tail: first and last tokens that the target reads itself; the tail is left for `mlx_lm.generate`.
        source_state: what the source holds; without it the source reads the conversation first.
        reading: the conversation as the target reads it, where the caller has rendered it.

    What can't be handed over exactly as planned becomes a re-prefill: an empty cache, and all ids in `rest`; `plan.fallback`
    says why.
    """
    maps = translator if isinstance(translator, MlxTranslator) else MlxTranslator(translator, target)
    check_models(maps.config, source, target)
    started = time.perf_counter()
    state = source_state or read_native(conversation, source)
    source_read = time.perf_counter()
    if reading is None:
        reading = read_conversation(conversation, cast("LanguageModel", target), add_generation_prompt=True)
    source_reading = as_one_text(state.reading) if isinstance(conversation, str) else state.reading
    alignment = align(source_reading, reading)
    plan = plan_handoff(
        alignment.tolist(),
        sink=sink,
        tail=tail,
        untrusted=state.translated_until,
        fitted_tokens=maps.config.fitted_tokens,
    )
    plan, cache = carry_out(plan, source, target, maps, state, alignment.numpy(), reading.ids)
    finished = time.perf_counter()
    timings = {"source_prefill": 1e3 * (source_read - started), "translate": 1e3 * (finished - source_read)}
    rest = list(reading.ids[plan.translated[1] if plan.fallback is None else 0 :])
    return MlxHandOff(ModelState(reading, cache, plan.spans), rest, plan, timings)


def carry_out(
    plan: HandoffPlan,
    source: MlxModel,
    target: MlxModel,
    maps: MlxTranslator,
    state: ModelState,
    alignment: np.ndarray,
    ids: Sequence[int],
) -> tuple[HandoffPlan, list[Any]]:
    """Return the plan as it was carried out, and the target's prompt cache of all tokens before the tail."""
    start, stop = plan.translated
    if start == stop:
        return replace(plan, fallback=plan.fallback or "nothing is translated"), native_prompt_cache(target)
    try:
        refuse_changed_angles(maps.config, len(state.reading), stop)
        translated = assemble(plan, source, target, maps, state, alignment, ids)
    except UnsupportedCache as error:
        # Whatever could not be read is read again by the target: slower, never wrong, and the plan says so.
        return reprefill_plan(plan.tokens, str(error)), native_prompt_cache(target)
    mx.eval([(one.keys, one.values) for one in translated])
    return plan, translated


def refuse_changed_angles(config: TranslatorConfig, source_tokens: int, target_tokens: int) -> None:
    """Raise `UnsupportedCache` where a model's rotary angles have changed on the way to so many tokens."""
    for side, geometry, tokens in (("source", config.source, source_tokens), ("target", config.target, target_tokens)):
        if geometry.angle_limit is not None and tokens > geometry.angle_limit:
            raise UnsupportedCache(
                f"the {side} changes its rotary angles beyond {geometry.angle_limit} tokens, this conversation has {tokens}"
            )


def assemble(
    plan: HandoffPlan,
    source: MlxModel,
    target: MlxModel,
    maps: MlxTranslator,
    state: ModelState,
    alignment: np.ndarray,
    ids: Sequence[int],
) -> list[Any]:
    """Return the target's prompt cache: the sinks as it reads them itself, then what is translated, rotated."""
    config = maps.config
    start, stop = plan.translated
    here = alignment[start:stop]
    skip = [min(max(layer.first_held(stop) - start, 0), stop - start) for layer in target.geometry.layers]
    free = None
    if config.reads_source:
        held = min(len(state.reading), *(int(one.offset) for one in state.cache))
        wanted = first_read(config, skip, config.first_layer, torch.from_numpy(here), held)
        # A map that also reads the token before sees no translated one: the first token to be trusted is repeated.
        trusted = max(state.translated_until, 0)
        free = read_prompt_cache(
            source, state.cache, stop=held, first_wanted=[max(w, min(trusted, held)) for w in wanted]
        )
    made = maps(free, here, target, ids, start, skip)
    sinks = first_tokens_of(target, ids[:start])
    cache = native_prompt_cache(target)
    for index, (keys, values) in enumerate(made):
        keys = rotated(target.rotations[index], keys, start + skip[index]).astype(target.dtype)
        values = values.astype(target.dtype)
        if start and not skip[index]:
            keys, values = (
                mx.concatenate(pair, axis=2) for pair in ((sinks[index][0], keys), (sinks[index][1], values))
            )
        fill(cache[index], keys, values, stop)
    return cache


def first_tokens_of(lm: MlxModel, ids: Sequence[int]) -> list[tuple[Array, Array]]:
    """Return the keys, rotated, and values of a conversation's first tokens as the model reads them itself."""
    if not ids:
        return [(None, None) for _ in lm.geometry.layers]
    caught = [_Caught() for _ in lm.geometry.layers]
    lm.model(mx.array(list(ids))[None], cache=caught)
    return [(one.keys, one.values) for one in caught]


# --- what belongs together -------------------------------------------------------------------------------------------


def check_models(config: TranslatorConfig, source: MlxModel, target: MlxModel) -> None:
    """Raise `IncompatiblePair` unless the two models' caches look as the translator expects."""
    for side, expected, lm in (("source", config.source, source), ("target", config.target, target)):
        mine, theirs = [seen(layer) for layer in expected.layers], [seen(layer) for layer in lm.geometry.layers]
        if expected.owners is not None or len(mine) != len(theirs):
            raise IncompatiblePair(
                f"this translator's {side} keeps {len(mine)} layers, {lm.name} in mlx-lm {len(theirs)}; "
                "use the translator of this pair"
            )
        at = next((index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            raise IncompatiblePair(
                f"layer {at} of this translator's {side} keeps {told(mine[at])}; {lm.name} in mlx-lm {told(theirs[at])}"
            )
    if config.reads_text and config.target.hidden_size != target.geometry.hidden_size:
        raise IncompatiblePair(
            f"this translator reads embeddings of {config.target.hidden_size} features, those of {target.name} have "
            f"{target.geometry.hidden_size}; use the translator of this pair"
        )


def seen(layer: LayerGeometry) -> tuple[Any, ...]:
    """Return what two frameworks must agree on of a layer."""
    rope = layer.rope
    turned = None if rope is None else (rope.layout, rope.dims, rope.offset, rope.part)
    return layer.kv_heads, layer.key_dim, layer.value_dim, layer.window, turned


def told(layer: tuple[Any, ...]) -> str:
    """Return a layer as words."""
    heads, key_dim, value_dim, window, turned = layer
    rope = "no rotation" if turned is None else f"{turned[1]} dims rotated ({turned[0]})"
    return f"{heads} heads of {key_dim} + {value_dim}, {f'a window of {window}' if window else 'all tokens'}, {rope}"
