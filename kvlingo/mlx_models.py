"""Load a model with mlx-lm and find out what its cache looks like.

Knows mlx-lm's models and the caches that it makes for them. Deliberately does not know what stands in a prompt cache, or
translators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo.errors import BadInput, KVLingoError, UnsupportedModel
from kvlingo.geometry import Geometry, LayerGeometry
from kvlingo.mlx_library import (
    Array,
    KVCache,
    RotatingKVCache,
    TokenizerWrapper,
    load_both,
    load_config,
    make_prompt_cache,
    mx,
    nn,
)
from kvlingo.mlx_rotation import FAR, Rotation, probe_rotation, refuse_other_rotation
from kvlingo.outline import embedding_scale

NEAR = 1
PROBED_ID = 5


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


class Filled(Exception):
    """The cache that was waited for holds its keys and values."""


class Caught:
    """A cache of one layer that stands at some position, keeps what it is given, and can stop the pass there."""

    def __init__(self, offset: int = 0, *, stops: bool = False) -> None:
        self.offset, self.stops = offset, stops
        self.keys: Array | None = None
        self.values: Array | None = None

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Keep a layer's keys and values."""
        self.keys, self.values = keys, values
        if self.stops:
            raise Filled
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
    caught = [Caught(position) for _ in model.layers]
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
