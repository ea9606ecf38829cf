"""Two tiny models with the same outputs and different caches, and the exact translator: what an engine is checked with.

The second one is the first with its key-value heads swapped, its values in another basis and its keys and queries turned inside
their rotary planes. Its tokenizer may spell the same pieces with other ids. Weights are written as files. Kinds of models with
sliding windows are twins in the same way: a norm of keys whose weights are all alike doesn't mind the turning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, ModelCard
from kvlingo.models import load_model
from kvlingo.store import save_translator
from kvlingo.translator import LayerMap, LinearMap, Translator, TranslatorConfig

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM = 64, 128, 3, 4, 2, 32
PIECES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ("<s>", "</s>")
VOCABULARY = 288
GAIN = 1.6  # of queries and keys: enough for the context to matter, little enough for rounding not to
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}
WINDOW = 160  # more than one block of the CPU backend's 128 tokens, and no multiple of them
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "query_pre_attn_scalar": DIM,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


@dataclass(frozen=True)
class Change:
    """How the second model's cache differs from the first one's.

    Fields:
        order: which of the first one's key-value heads each head is.
        basis: per layer and head, what values are multiplied by: [layers, heads, dim, dim], orthogonal.
        angles: per layer, head and rotary plane, how far keys are turned: [layers, heads, dim / 2].
    """

    order: Tensor
    basis: Tensor
    angles: Tensor


def draw_change(seed: int) -> Change:
    """Draw one at random."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(LAYERS, KV_HEADS, DIM, DIM, generator=generator, dtype=torch.float64)
    angles = 6.28 * torch.rand(LAYERS, KV_HEADS, DIM // 2, generator=generator, dtype=torch.float64)
    return Change(torch.arange(KV_HEADS).flip(0), torch.linalg.qr(noise).Q, angles)


def no_change() -> Change:
    """Return the one that changes nothing."""
    basis = torch.eye(DIM, dtype=torch.float64).expand(LAYERS, KV_HEADS, DIM, DIM)
    return Change(torch.arange(KV_HEADS), basis, torch.zeros(LAYERS, KV_HEADS, DIM // 2, dtype=torch.float64))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Turn rows [heads, dim, columns] inside the planes (i, i + dim / 2) by angles [heads, dim / 2]."""
    first, second = x.chunk(2, dim=1)
    cos, sin = angles.cos()[..., None], angles.sin()[..., None]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=1)


def draw_weights(seed: int, kind: str = "llama") -> dict[str, Tensor]:
    """Draw the first model's weights, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return gain * torch.randn(rows, columns, generator=generator, dtype=torch.float64) / columns**0.5

    ones = torch.ones(HIDDEN, dtype=torch.float64)
    weights = {
        "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": draw(VOCABULARY, HIDDEN, 2.0),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": ones.clone(),
            f"{at}post_attention_layernorm.weight": ones.clone(),
            f"{at}self_attn.q_proj.weight": draw(HEADS * DIM, HIDDEN, GAIN),
            f"{at}self_attn.k_proj.weight": draw(KV_HEADS * DIM, HIDDEN, GAIN),
            f"{at}self_attn.v_proj.weight": draw(KV_HEADS * DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": draw(HIDDEN, HEADS * DIM),
            f"{at}mlp.gate_proj.weight": draw(INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": draw(INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": draw(HIDDEN, INNER),
        }
    return with_gemma_norms(weights) if kind == "gemma3" else weights


def with_gemma_norms(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the norms of Gemma 3, which multiply by one more than they say and stand behind each part too."""
    own = {name: torch.zeros_like(weight) if "norm" in name else weight for name, weight in weights.items()}
    own["model.embed_tokens.weight"] = (
        weights["model.embed_tokens.weight"] / HIDDEN**0.5
    )  # its model multiplies by the root
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        own |= {f"{at}{part}_feedforward_layernorm.weight": torch.zeros(HIDDEN) for part in ("pre", "post")}
        # Products of normed queries and keys are as large as it takes for the context to matter.
        own |= {f"{at}self_attn.{part}_norm.weight": torch.full((DIM,), GAIN - 1) for part in "qk"}
    return own


def changed(weights: Mapping[str, Tensor], change: Change) -> dict[str, Tensor]:
    """Return the second model's weights: another cache, the same outputs."""
    twin = dict(weights)
    group = HEADS // KV_HEADS
    queries = torch.cat([torch.arange(group) + group * head for head in change.order.tolist()])
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.self_attn."
        basis, angles = change.basis[layer], change.angles[layer]
        keys = weights[f"{at}k_proj.weight"].unflatten(0, (KV_HEADS, DIM))[change.order]
        values = weights[f"{at}v_proj.weight"].unflatten(0, (KV_HEADS, DIM))[change.order]
        asked = weights[f"{at}q_proj.weight"].unflatten(0, (HEADS, DIM))[queries]
        said = weights[f"{at}o_proj.weight"].unflatten(1, (HEADS, DIM))[:, queries]
        twin[f"{at}k_proj.weight"] = turned(keys, angles).flatten(0, 1)
        twin[f"{at}q_proj.weight"] = turned(asked, angles.repeat_interleave(group, 0)).flatten(0, 1)
        twin[f"{at}v_proj.weight"] = (basis @ values).flatten(0, 1)
        spread = basis.repeat_interleave(group, 0)  # orthogonal: its inverse is its transpose
        twin[f"{at}o_proj.weight"] = torch.einsum("ohd,hed->ohe", said, spread).flatten(1)
    return twin


def exact_maps(change: Change) -> list[Tensor]:
    """Return per layer the matrix [features, features] that turns the first model's keys and values into the second one's."""
    maps = []
    for layer in range(LAYERS):
        whole = torch.zeros(2, KV_HEADS, DIM, KV_HEADS, DIM, dtype=torch.float64)
        for head, old in enumerate(change.order.tolist()):
            unit = torch.eye(DIM, dtype=torch.float64)
            whole[0, old, :, head] = turned(unit[None], change.angles[layer, head][None])[0].T
            whole[1, old, :, head] = change.basis[layer, head].T
        width = KV_HEADS * DIM
        maps.append(torch.block_diag(*(part.reshape(width, width) for part in whole)))
    return maps


def byte_tokenizer(order: list[int] | None = None) -> Tokenizer:
    """Return a tokenizer of one token a byte; `order` says which id each piece has (specials first by default)."""
    pieces = [*SPECIALS, *PIECES]
    ids = order or list(range(len(pieces)))
    tokenizer = Tokenizer(models.BPE(vocab=dict(zip(pieces, ids, strict=True)), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def write_model(folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write a checkpoint as any engine reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    dtype = getattr(torch, config["dtype"])
    whole = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, tokenizer)


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer beside a checkpoint."""
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"clean_up_tokenization_spaces": False}))


@torch.no_grad()
def exact_translator(source: LanguageModel, target: LanguageModel, change: Change, *, text: bool) -> Translator:
    """Return the translator that is known to be exact; with `text` it has text features too, of no weight."""
    layers = tuple((layer,) for layer in range(LAYERS))
    lags = (0, 1) if text else ()
    translator = Translator(TranslatorConfig(source.geometry, target.geometry, layers, embedding_lags=lags))
    for name, layer_map in translator.maps.items():
        assert isinstance(layer_map, LayerMap)
        assert isinstance(layer_map.linear, LinearMap)
        exact = exact_maps(change)[int(name)]
        layer_map.linear.weight.zero_()
        layer_map.linear.weight[: len(exact)] = exact.to(layer_map.linear.weight.dtype)
    return translator.eval()


def make_twins(
    folder: Path,
    *,
    dtype: str = "float32",
    text: bool = True,
    other_ids: bool = False,
    seed: int = 0,
    kind: str = "llama",
) -> None:
    """Write `source/`, `target/`, `translator/` and, as a control that must fail, `wrong/` into a folder.

    Args:
        kind: of both models, a name in `KINDS`.
        text: the translator has text features, and the target's first layer is its own.
        other_ids: the target's tokenizer spells the same pieces with other ids.
    """
    change, weights = draw_change(seed + 1), draw_weights(seed, kind)
    twin, count = changed(weights, change), len(SPECIALS) + len(PIECES)
    order = list(range(count))
    if other_ids:
        order = [*order[: len(SPECIALS)], *order[len(SPECIALS) :][::-1]]
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            moved = twin[name].clone()
            moved[order] = twin[name][:count]
            twin[name] = moved
    config = {**CONFIG, **KINDS[kind], "dtype": dtype}
    write_model(folder / "source", weights, config, byte_tokenizer())
    write_model(folder / "target", twin, config, byte_tokenizer(order))
    width = getattr(torch, dtype)
    source, target = (load_model(folder / name, device="cpu", dtype=width) for name in ("source", "target"))
    manifest = Manifest(ModelCard.of(source), ModelCard.of(target), {"exact": True}, held_out={"verdict": "PASS"})
    save_translator(folder / "translator", exact_translator(source, target, change, text=text), manifest)
    wrong = exact_translator(source, target, draw_change(seed + 2), text=text)
    save_translator(folder / "wrong", wrong, manifest)
