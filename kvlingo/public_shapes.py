"""Models in the shapes of public ones, with random weights, and random maps between them: enough to time a hand-over.

Knows configs, sizes and memory. What comes out means nothing: neither models nor maps are trained, which takes as long as if they
were. A shape that does not fit the memory is refused before anything is allocated.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvlingo.errors import BadInput
from kvlingo.language_model import LanguageModel
from kvlingo.models import chosen_device, chosen_dtype, quiet_loading, wrap
from kvlingo.outline import Outline, outline
from kvlingo.shapes import FitOptions, base_config
from kvlingo.translator import LayerMap, SplitMap, Translator, TranslatorConfig

ShapeMap = Literal["layer", "low-rank", "head-wise", "full"]
SHAPE_MAPS: tuple[ShapeMap, ...] = get_args(ShapeMap)
LOW_RANK = 256
GIB = 2**30

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA2 = {
    "model_type": "gemma2",
    "vocab_size": 256_000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
EXPERTS = {**QWEN3, "model_type": "qwen3_moe", "num_experts_per_tok": 8, "norm_topk_prob": True}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


PUBLIC_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**QWEN3, **_sizes(1024, 3072, 28, 16, tied=True)},
    "Qwen3-1.7B": {**QWEN3, **_sizes(2048, 6144, 28, 16, tied=True)},
    "Qwen3-4B": {**QWEN3, **_sizes(2560, 9728, 36, 32, tied=True)},
    "Qwen3-8B": {**QWEN3, **_sizes(4096, 12_288, 36, 32, tied=False)},
    "Qwen3-30B-A3B": {
        **EXPERTS,
        **_sizes(2048, 6144, 48, 32, tied=False),
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
    },
    "Llama-3.2-3B": {
        **LLAMA3,
        **_sizes(3072, 8192, 28, 24, tied=True),
        "rope_parameters": {**LLAMA3_ROPE, "factor": 32.0},
    },
    "Llama-3.1-8B": {
        **LLAMA3,
        **_sizes(4096, 14_336, 32, 32, tied=False),
        "rope_parameters": {**LLAMA3_ROPE, "factor": 8.0},
    },
    "Gemma-2-2B": {**GEMMA2, **_sizes(2304, 9216, 26, 8, tied=True), "num_key_value_heads": 4},
    "Gemma-2-9B": {
        **GEMMA2,
        **_sizes(3584, 14_336, 42, 16, tied=True),
        "num_key_value_heads": 8,
    },
    # No public model: a mixture of experts that fits a small machine.
    "MoE-0.8B-A0.2B": {
        **EXPERTS,
        **_sizes(1024, 3072, 12, 16, tied=True),
        "num_key_value_heads": 4,
        "moe_intermediate_size": 512,
        "num_experts": 32,
    },
}
"""What a config.json of each says, as published by its makers."""


def shape_outline(name: str, config: dict[str, Any]) -> Outline:
    """Return what is known of a shape before anything is allocated, by the code that describes a model on disk."""
    quiet_loading()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return replace(outline(folder), name=name)


def place_of(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Return where and in which type a model of these options would be loaded."""
    found = chosen_device(device)
    return found, chosen_dtype(dtype, found)


def shape_config(name: str) -> dict[str, Any]:
    """Return a shape's config by its name. Raises `BadInput` for one that is not known."""
    found = {known.lower(): config for known, config in PUBLIC_SHAPES.items()}.get(name.lower())
    if found is None:
        raise BadInput(f"unknown shape {name!r}; there are {', '.join(PUBLIC_SHAPES)}")
    return found


def random_model(
    name: str, config: dict[str, Any], *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LanguageModel:
    """Make a model of a shape with random weights, where and as it will run; it has no tokenizer."""
    rest = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest), dtype=dtype)
    return wrap(model, None, name=name)


# --- random maps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MapShape:
    """Which maps to draw.

    Fields:
        kind: layer: keys from the keys and values from the values of one layer; low-rank and head-wise: from one layer;
            full: from a window of layers and the text, as `kvlingo fit` makes them.
        rank: dims of a low-rank map; with `full`, the maps of the quality tables made low-rank. None: `LOW_RANK`, or no rank.
    """

    kind: ShapeMap = "layer"
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in SHAPE_MAPS:
            raise BadInput(f"unknown kind of map {self.kind!r}; use one of {', '.join(SHAPE_MAPS)}")
        if self.rank is not None and self.kind not in ("low-rank", "full"):
            raise BadInput(f"a {self.kind} map has no rank; leave --rank out, or use --map-kind low-rank or full")

    def config(self, source: Any, target: Any) -> TranslatorConfig:
        """Return the translator's shape between two models, or their outlines: only geometries are read."""
        full = self.kind == "full"
        rank = self.rank or (LOW_RANK if self.kind == "low-rank" else 0)
        kind: Any = "lowrank" if rank else "headwise" if self.kind == "head-wise" else "linear"
        options = FitOptions(reach=1 if full else 0, map_kind=kind, rank=rank, key_norm=False)
        config = base_config(cast("LanguageModel", source), cast("LanguageModel", target), options)
        return config if full else replace(config, embedding_lags=())


def empty_translator(config: TranslatorConfig, kind: ShapeMap) -> Translator:
    """Return a translator of a kind, all zeros."""
    translator = Translator(config)
    if kind == "layer":
        for layer, layer_map in translator.maps.items():
            assert isinstance(layer_map, LayerMap)
            (read,) = config.source_layers[int(layer)]
            source, target = config.source.layers[read], layer_map.shape
            layer_map.linear = SplitMap((source.key_width, source.value_width), (target.key_width, target.value_width))
    return translator.eval()


@torch.no_grad()
def random_translator(config: TranslatorConfig, kind: ShapeMap, seed: int = 0) -> Translator:
    """Return a translator whose outputs are about as large as its inputs: nothing overflows or becomes subnormal."""
    translator = empty_translator(config, kind)
    generator = torch.Generator().manual_seed(seed)
    for parameter in translator.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-2] ** -0.5, generator=generator)
    return translator


def maps_bytes(config: TranslatorConfig, kind: ShapeMap) -> int:
    """Return the size of a translator's maps in float32 without making them."""
    with torch.device("meta"):
        return empty_translator(config, kind).num_bytes(4)


# --- memory ----------------------------------------------------------------------------------------------------------

CACHE_COPIES = 5
"""What is held at once of each cache at most: two that are gone on from, one free of position, one in parts, what is written."""
PASS_WIDTHS = 12
"""Values of a token that live at once in a pass, in widths of the hidden state: states, queries, keys, values, the MLP."""


@dataclass(frozen=True)
class Needed:
    """Bytes that a benchmark of two shapes needs at once, by what they are for."""

    weights: int
    maps: int
    caches: int
    activations: int

    @property
    def total(self) -> int:
        """Return their sum."""
        return self.weights + self.maps + self.caches + self.activations


def bytes_needed(
    source: Outline, target: Outline, maps: int, *, tokens: int, read_tokens: int, bytes_per_value: int
) -> Needed:
    """Return the bytes that are needed at once.

    Args:
        maps: bytes of the maps; they are there twice, as parameters and as what is multiplied with, and once more while loading.
        tokens: of the longest conversation.
        read_tokens: of the longest one that is really read in one go.
    """
    features = source.geometry.features_per_token + target.geometry.features_per_token
    widest = max(source.geometry.hidden_size, target.geometry.hidden_size)
    return Needed(
        weights=bytes_per_value * (source.total_weights + target.total_weights),
        maps=3 * maps,
        caches=CACHE_COPIES * bytes_per_value * features * tokens,
        activations=PASS_WIDTHS * bytes_per_value * widest * read_tokens,
    )


def refuse_what_does_not_fit(needed: Needed, available: int | None, names: Sequence[str]) -> None:
    """Raise `BadInput` where more is needed than there is; nothing is said where the system does not tell."""
    if available is not None and needed.total > available:
        raise BadInput(
            f"{' → '.join(names)} needs {needed.total:,} bytes "
            f"({needed.total / GIB:.1f} GiB: weights {needed.weights / GIB:.1f}, "
            f"maps {needed.maps / GIB:.1f}, caches {needed.caches / GIB:.1f}, activations {needed.activations / GIB:.1f}), "
            f"available are {available:,} ({available / GIB:.1f} GiB); choose smaller shapes, shorter --lengths, "
            "--dtype bfloat16 or another --map-kind"
        )
