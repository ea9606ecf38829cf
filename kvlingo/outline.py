"""What can be known of a model before its weights are loaded.

Knows configs, tokenizers and the headers of .gguf files. Shapes are read off a prefill of a model whose weights have no data,
by the code that a loaded model is probed with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvlingo.cache import native_cache
from kvlingo.errors import UnsupportedModel
from kvlingo.geometry import Geometry
from kvlingo.gguf_header import read_gguf_header
from kvlingo.language_model import layer_weights, layers_refusal
from kvlingo.models import clear_load_errors, refuse_by_config, refuse_other_vocabulary
from kvlingo.probing import (
    cache_owners,
    forget_length,
    layer_geometry,
    refuse_position_tables,
    rotary_module,
    run,
    whole_geometry,
)


@dataclass(frozen=True)
class Outline:
    """What can be known of a model before its weights are loaded.

    Fields:
        geometry: shapes and windows of its cache; `rope` is None throughout, rotation is probed on real keys.
        total_weights: all parameters, tied ones once.
        layer_weights: those of the decoder's layers: what one token passes through (all experts, where there are experts).
        query_widths: query features of each layer.
        load_tokenizer: gives the tokenizer, or None where the model brings none; slow for a .gguf file.
        pieces: the vocabulary as it is spelled; None without a tokenizer.
        target_refusal: why it can only be a source; None where it can be a target too.
    """

    name: str
    kind: str
    load_tokenizer: Callable[[], Any]
    pieces: frozenset[bytes] | None
    geometry: Geometry
    total_weights: int
    layer_weights: int
    query_widths: tuple[int, ...]
    target_refusal: str | None


@torch.no_grad()
def _fill_without_data(model: Any, cache: Any) -> None:
    """Let a model without weights read two tokens, for the shapes of what it keeps.

    Raises `UnsupportedModel` for one that looks at values on the way (OPT on older releases).
    """
    try:
        run(model, input_ids=torch.arange(2)[None], cache=cache)
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise UnsupportedModel(
            f"what keys and values this {model.config.model_type} model keeps can't be told without its weights; "
            "load it to know"
        ) from error


def outline(name: str | Path, *, cache_dir: Path | None = None) -> Outline:
    """Describe a model by hub id, folder or .gguf file from its config and tokenizer alone.

    Shapes are read off a prefill of a model whose weights have no data (PyTorch's meta device), by the same code that a
    loaded model is probed with. Raises `UnsupportedModel` or `BadInput` with one sentence.
    """
    with clear_load_errors(str(name), weights=False):
        config, load_tokenizer, pieces = _described(name)
        refuse_by_config(config)
        with torch.device("meta"):
            # Tensors without data can't tell which expert a token goes to; this form of the experts does not ask.
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, experts_implementation="batched_mm"
            ).eval()
            forget_length(rotary_module(model))
            cache = native_cache(model.config)
            _fill_without_data(model, cache)
        refuse_position_tables(model)
    owners, target_refusal = cache_owners(model, cache)
    text_config = model.config.get_text_config(decoder=True)
    layers = tuple(layer_geometry(cache.layers[owner], None) for owner in owners)
    if not str(name).endswith(".gguf"):  # a .gguf file keeps its embedding's rows as its vocabulary
        refuse_other_vocabulary(str(name), load_tokenizer(), model.get_input_embeddings().weight.shape[0])
    return Outline(
        name=Path(name).name if Path(name).exists() else str(name),
        kind=model.config.model_type,
        load_tokenizer=load_tokenizer,
        pieces=pieces,
        geometry=whole_geometry(model, layers, owners),
        total_weights=sum(p.numel() for p in model.parameters()),
        layer_weights=layer_weights(model),
        query_widths=tuple(text_config.num_attention_heads * layer.key_dim for layer in layers),
        target_refusal=target_refusal or layers_refusal(model),
    )


SMALL = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "pad_token_id": None}


def embedding_scale(config: Mapping[str, Any]) -> float:
    """Return what a model's embedding module multiplies its rows with: 1 for most, √hidden for Gemma 3.

    For other runtimes, which multiply elsewhere: asked of a model of one small layer that is made from a config.json.
    """
    kind = str(config["model_type"])
    whole = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k not in ("model_type", *QUANTISED)})
    facts = {**whole.get_text_config(decoder=True).to_dict(), **SMALL}
    if facts.get("layer_types"):
        facts["layer_types"] = facts["layer_types"][:1]
    kind = facts.pop("model_type")
    with clear_load_errors(kind, weights=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **facts))
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight.fill_(1.0)
        return float(embedding(torch.tensor([1]))[0, 0])


QUANTISED = ("quantization", "quantization_config")


def _described(name: str | Path) -> tuple[Any, Callable[[], Any], frozenset[bytes] | None]:
    """Return a model's config, what loads its tokenizer, and the pieces of its vocabulary."""
    if str(name).endswith(".gguf"):
        return _described_gguf(Path(name))
    config = AutoConfig.from_pretrained(name)
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        return config, lambda: None, None
    tokenizer = AutoTokenizer.from_pretrained(name)
    return config, lambda: tokenizer, frozenset(piece.encode() for piece in tokenizer.get_vocab())


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def _described_gguf(file: Path) -> tuple[Any, Callable[[], Any], frozenset[bytes] | None]:
    """As `_described`, with the config read off a copy of the file's header that has no vocabulary."""
    header = read_gguf_header(file)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).write_bytes(header.stub())
        config = AutoConfig.from_pretrained(folder, gguf_file=file.name)
    if header.pieces and not any(key.endswith(".vocab_size") for key in header.entries):
        config.get_text_config(decoder=True).vocab_size = len(header.pieces)
    load = lru_cache(maxsize=1)(lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    return config, load, frozenset(header.pieces) or None
