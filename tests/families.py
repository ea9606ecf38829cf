"""One tiny model of the real class for every family, and what is to be expected of it.

The identity suite runs over these entries, and `docs/models.md` is written from them, so the two can't drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kvlingo.language_model import LanguageModel, prefill
from kvlingo.models import wrap
from tests import tiny

Expectation = Literal["exact", "source only", "refused"]
W = tiny.WINDOW
SLIDE, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}

EXACTLY = 1e-8
CHUNKS = (tiny.WINDOW - 1, tiny.WINDOW, tiny.WINDOW + 1, 30)


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Fields:
        covers: the models that users know under this family.
        kind: `model_type` of its config in transformers.
        changes: what its config has beyond `tiny.SHAPE`; None leaves a name out.
        expected: exact as source and as target; read as a source only; or refused.
        reason: a pattern of the sentence that refuses it, as a target or altogether.
        note: what is special about its cache.
        without: names of `tiny.SHAPE` that its config does not know.
        padded: the dtype to read padded rows in. A float32 softmax turns float64's lowest number, which masks all that a padded
            slot sees, into NaN.
        within: what float64 is exact to where rotations are rounded to float32: the same in every chunk, so no noise of its own.
        louder, quieter: gains of the output head and of the input embeddings, where the context would not matter otherwise.
    """

    covers: str
    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    expected: Expectation = "exact"
    reason: str | None = None
    note: str = ""
    without: tuple[str, ...] = ()
    louder: float = 1.0
    quieter: float = 1.0
    padded: torch.dtype = torch.float64
    within: float = EXACTLY

    def config(self, **changes: Any) -> Any:
        """Return its tiny config."""
        shape = {k: v for k, v in {**tiny.SHAPE, **self.changes, **changes}.items() if k not in self.without}
        return CONFIG_MAPPING[self.kind](**shape)

    def make(self, **changes: Any) -> Any:
        """Return an untrained model of the real class."""
        config = self.config(**changes)
        if config.is_encoder_decoder:
            return AutoModelForSeq2SeqLM.from_config(config)
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager")  # it knows float64

    def trained(self, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
        """Return a model with weights that listen to their context."""
        model = tiny.scaled(self.make(**changes), dtype=dtype)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(self.louder)
            model.get_input_embeddings().weight.mul_(self.quieter)
        return model


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**tiny.THETA, **changes}}


MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
MIXED = {"num_hidden_layers": 4, "sliding_window": W, "layer_types": [SLIDE, FULL, SLIDE, FULL]}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
TWO_THETAS = {
    "rope_parameters": {
        SLIDE: dict(tiny.THETA),
        FULL: {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
}
SHARED = {
    "num_hidden_layers": 6,
    "sliding_window": W,
    "layer_types": [SLIDE, FULL, SLIDE, FULL, SLIDE, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": tiny.VOCAB,
    "tie_word_embeddings": True,
}
MAMBA2 = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 4.0, 8.0],
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2, Llama 3, SmolLM2, TinyLlama, Yi", "llama", rope()),
    "llama-llama3": Family("Llama 3.1, 3.2, 3.3", "llama", {"rope_parameters": tiny.LLAMA3}, note="llama3 scaling"),
    "llama-linear": Family("Llama with linear scaling", "llama", rope(rope_type="linear", factor=4.0)),
    "llama-yarn": Family("Llama or Qwen with YaRN", "llama", {"rope_parameters": tiny.YARN}),
    "llama-dynamic": Family(
        "Llama with dynamic NTK scaling",
        "llama",
        {**rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 64},
        note="exact up to the length at which its angles change; beyond it, re-prefill",
    ),
    "llama-mqa": Family("Llama with one key-value head", "llama", {**rope(), "num_key_value_heads": 1}),
    "llama-mha": Family("Llama with as many key-value heads as heads", "llama", {**rope(), "num_key_value_heads": 4}),
    "llama4": Family(
        "Llama 4 (text)",
        "llama4_text",
        {
            **rope(),
            "num_hidden_layers": 4,
            "attention_chunk_size": W,
            "no_rope_layers": [1, 0, 1, 0],
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "moe_layers": [1],
        },
        note="layers without positions, chunked attention",
    ),
    "smollm3": Family(
        "SmolLM3",
        "smollm3",
        {**rope(), "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
        note="a layer without positions",
    ),
    "qwen2": Family("Qwen2, Qwen2.5", "qwen2", rope(), note="biases on keys"),
    "qwen3": Family("Qwen3", "qwen3", rope(), note="normed keys"),
    "qwen3-moe": Family("Qwen3-MoE", "qwen3_moe", {**rope(), **EXPERTS}),
    "gemma": Family("Gemma", "gemma", {**rope(), "head_dim": 16}, quieter=0.1),
    "gemma2": Family(
        "Gemma 2",
        "gemma2",
        {**GEMMA, **MIXED, **rope()},
        note="soft-capped scores, sliding window",
        padded=torch.float32,
    ),
    "gemma3": Family(
        "Gemma 3 (text)", "gemma3_text", {**GEMMA, **MIXED, **TWO_THETAS}, note="two thetas, sliding window"
    ),
    "gemma3n": Family(
        "Gemma 3n (text)",
        "gemma3n_text",
        {
            **SHARED,
            **TWO_THETAS,
            "head_dim": 16,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "intermediate_size": 48,
            "activation_sparsity_pattern": [0.0] * 6,
        },
        note="the last layers borrow keys and values from earlier ones: only owners are translated",
    ),
    "gemma4": Family(
        "Gemma 4 (text)",
        "gemma4_text",
        {
            **SHARED,
            "head_dim": 8,
            "global_head_dim": 16,
            "rope_parameters": {
                SLIDE: dict(tiny.THETA),
                FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
            },
        },
        note="head dims differ by layer, shared keys and values",
    ),
    "mistral": Family("Mistral", "mistral", {**rope(), "sliding_window": W}, note="sliding window"),
    "ministral": Family("Ministral", "ministral", {**rope(), **MIXED}, note="sliding window"),
    "ministral3": Family(
        "Ministral 3",
        "ministral3",
        {"rope_parameters": {**tiny.YARN, "original_max_position_embeddings": 1024, "llama_4_scaling_beta": 0.1}},
        note="queries scaled by their position: a cache has none of it",
    ),
    "starcoder2": Family(
        "StarCoder2", "starcoder2", {**rope(), "sliding_window": W}, note="sliding window", without=("head_dim",)
    ),
    "exaone4": Family("EXAONE 4", "exaone4", {**rope(), **MIXED}, note="sliding window, full layers without positions"),
    "glm4-moe": Family(
        "GLM-4.5",
        "glm4_moe",
        {**rope(partial_rotary_factor=0.5), **EXPERTS, "n_routed_experts": 4},
        note="partial rotation",
    ),
    "seed-oss": Family("Seed-OSS", "seed_oss", rope()),
    "ernie4.5": Family("ERNIE 4.5", "ernie4_5", rope(), note="interleaved rotation, in float32", within=1e-5),
    "mixtral": Family("Mixtral", "mixtral", {**rope(), "num_local_experts": 4}),
    "phi": Family(
        "Phi-1, Phi-2", "phi", rope(partial_rotary_factor=0.5), note="partial rotation", without=("head_dim",)
    ),
    "phi3": Family("Phi-3, Phi-4", "phi3", rope(), without=("head_dim",)),
    "phi3-longrope": Family(
        "Phi-3 128k, Phi-4-mini",
        "phi3",
        {**rope(**LONGROPE), "original_max_position_embeddings": 64, "max_position_embeddings": 256},
        note="exact up to the length at which its angles change; beyond it, re-prefill",
        without=("head_dim",),
    ),
    "gpt-oss": Family(
        "gpt-oss",
        "gpt_oss",
        {**rope(), **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
        note="attention sinks, sliding window",
    ),
    "glm": Family("GLM-4 9B chat", "glm", rope(partial_rotary_factor=0.5), note="interleaved partial rotation"),
    "glm4": Family("GLM-4 0414", "glm4", rope(partial_rotary_factor=0.5), note="interleaved partial rotation"),
    "olmo": Family("OLMo", "olmo", rope(), without=("head_dim",)),
    "olmo2": Family("OLMo 2", "olmo2", rope(), note="keys normed over all heads", without=("head_dim",)),
    "olmo3": Family("OLMo 3", "olmo3", {**rope(), **MIXED}, note="sliding window", without=("head_dim",)),
    "granite": Family("Granite", "granite", {**rope(), "attention_multiplier": 0.35}, without=("head_dim",)),
    "stablelm": Family(
        "StableLM", "stablelm", rope(partial_rotary_factor=0.25), note="partial rotation", without=("head_dim",)
    ),
    "gpt-neox": Family(
        "GPT-NeoX, Pythia",
        "gpt_neox",
        rope(partial_rotary_factor=0.25),
        note="partial rotation",
        without=("head_dim", "num_key_value_heads"),
    ),
    "gpt-j": Family(
        "GPT-J",
        "gptj",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 2048, "rotary_dim": 4},
        "refused",
        "do not follow its rotary module",
        without=(
            "head_dim",
            "num_key_value_heads",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "intermediate_size",
        ),
    ),
    "falcon": Family("Falcon", "falcon", {**rope(), "multi_query": True}, without=("head_dim", "num_key_value_heads")),
    "cohere": Family(
        "Command R", "cohere", {**rope(), "logit_scale": 1.0}, note="interleaved rotation", without=("head_dim",)
    ),
    "cohere2": Family(
        "Command R7B, Command A",
        "cohere2",
        {**rope(), **MIXED, "logit_scale": 1.0},
        note="interleaved rotation, full layers without positions",
        without=("head_dim",),
    ),
    "deepseek-v2": Family(
        "DeepSeek-V2",
        "deepseek_v2",
        {**rope(), **MLA},
        note="the compressed latent is what is cached and translated",
    ),
    "deepseek-v3": Family(
        "DeepSeek-V3, R1, Kimi K2",
        "deepseek_v3",
        {**rope(), **MLA, "num_mtp_layers": 0},
        note="the compressed latent is what is cached and translated",
    ),
    "gpt2": Family(
        "GPT-2",
        "gpt2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 2048},
        "refused",
        "learned",
        without=(
            "head_dim",
            "num_key_value_heads",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "intermediate_size",
        ),
    ),
    "opt": Family(
        "OPT",
        "opt",
        {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "refused",
        "learned",
        without=("head_dim", "num_key_value_heads", "intermediate_size"),
    ),
    "bloom": Family(
        "BLOOM",
        "bloom",
        {},
        louder=3.0,
        note="ALiBi: keys hold no position",
        padded=torch.float32,
        without=("head_dim", "num_key_value_heads", "intermediate_size", "max_position_embeddings"),
    ),
    "mpt": Family(
        "MPT",
        "mpt",
        {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 2048},
        note="ALiBi: keys hold no position",
        padded=torch.float32,
        without=(
            "head_dim",
            "num_key_value_heads",
            "intermediate_size",
            "max_position_embeddings",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
        ),
    ),
    "falcon-h1": Family(
        "Falcon-H1", "falcon_h1", {**rope(), **MAMBA2}, "source only", "recurrent state", without=("head_dim",)
    ),
    "qwen3-next": Family(
        "Qwen3-Next, Qwen3.5",
        "qwen3_next",
        {
            **rope(partial_rotary_factor=0.25),
            **EXPERTS,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "source only",
        "recurrent state",
    ),
    "nemotron-h": Family(
        "Nemotron-H",
        "nemotron_h",
        {
            "layers_block_type": [LINEAR, FULL, "mlp", FULL],
            "num_hidden_layers": 4,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "use_mamba_kernels": False,
        },
        "source only",
        "recurrent state",
    ),
    "lfm2": Family(
        "LFM2",
        "lfm2",
        {**rope(), "layer_types": ["conv", FULL, FULL]},
        "source only",
        "recurrent state",
        without=("head_dim",),
    ),
    "lfm2-moe": Family(
        "LFM2-MoE",
        "lfm2_moe",
        {**rope(), **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", FULL, FULL]},
        "source only",
        "recurrent state",
        without=("head_dim",),
        note="rotary module under another name",
    ),
    "jamba": Family(
        "Jamba",
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        "source only",
        "recurrent state",
        without=("head_dim",),
    ),
    "bamba": Family(
        "Bamba, Granite 4",
        "bamba",
        {
            **rope(partial_rotary_factor=0.5),
            **MAMBA2,
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 3],
            "rope_theta": 1e4,
        },
        "source only",
        "recurrent state",
        without=("head_dim", "mamba_d_ssm", "rope_theta"),
    ),
    "mamba": Family(
        "Mamba",
        "mamba",
        {"state_size": 8, "time_step_rank": 4},
        "refused",
        "no layer .* keys and values",
        without=(
            "head_dim",
            "num_key_value_heads",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        ),
    ),
    "t5": Family(
        "T5, T5Gemma, BART",
        "t5",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        "refused",
        "encoder-decoder",
        without=tuple(k for k in tiny.SHAPE if k not in ("vocab_size", "pad_token_id")),
    ),
}
NAMES = tuple(FAMILIES)
EXACT = tuple(n for n, f in FAMILIES.items() if f.expected == "exact")
SOURCE_ONLY = tuple(n for n, f in FAMILIES.items() if f.expected == "source only")
REFUSED = tuple(n for n, f in FAMILIES.items() if f.expected == "refused")


@cache
def language_model(name: str, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """Return a context-sensitive tiny model of a family; frozen, shared between tests."""
    lm = wrap(FAMILIES[name].trained(dtype), tiny.byte_tokenizer(), name=name)
    tiny.assert_context_matters(lm)
    return lm


@cache
def allowed(name: str) -> float:
    """Return what logits may differ by in float64: 1e-8, or 10 times the model's own noise where that is more.

    Its own noise is how far it is from itself when it reads in two chunks: families that compute scores, rotations or routing in
    float32 have some, and a rotation rounded there is undone and done again here.
    """
    return max(FAMILIES[name].within, allowed_now(language_model(name)))


def allowed_now(lm: LanguageModel) -> float:
    """Return 1e-8, or 10 times the noise that a model has as it stands: attention implementations differ in it."""
    noise = (own_noise(lm, prefix, new, seed) for prefix in (*CHUNKS, 25) for new in (1, 5, 10) for seed in range(4))
    return max(EXACTLY, 10 * max(noise))


def own_noise(lm: LanguageModel, prefix: int, new: int, seed: int) -> float:
    """Return how far the logits of `new` tokens read after a prefix are from those read in one go."""
    ids = tiny.ids_of(lm, prefix + new, seed=seed)
    chunked = prefill(lm, ids[prefix:], cache=prefill(lm, ids[:prefix]).cache, logits_to_keep=0).logits
    return float((chunked - tiny.cold_logits(lm, ids)[-new:]).abs().max())


def table() -> str:
    """Return `docs/models.md`."""
    rows = [
        f"| {f.covers} | `{f.kind}` | {ANSWERS[f.expected]} | {f.note or f.reason or ''} |".replace(".*", "…")
        for f in FAMILIES.values()
    ]
    return "\n".join([*HEAD.splitlines(), *rows, *TAIL.splitlines(), ""])


ANSWERS = {"exact": "exact", "source only": "source only; as a target it reads anew", "refused": "refused"}
HEAD = """# Model families

Written by `python -m tests.families > docs/models.md` from the entries that the identity suite runs over; a test compares.

*Exact* means: as a source and as a target, a model handed over to itself gives the logits of a cold run, in float64 to
1e-8 (where the family itself computes scores, rotations or routing in float32: to ten times what it differs from itself
when it reads in two chunks, about 1e-5), on a tiny model of the real class with random weights. Translations between two
models are approximate, whatever the family: see `docs/results.md`.
*Source only*: attention layers are read; the model keeps a recurrent state too, which needs every layer below it.
*Refused*: in one sentence, before anything is computed.

| models | `model_type` | as source and target | what is special |
|---|---|---|---|"""
TAIL = """
A family that is not listed is probed like these: `load_model` reads shapes, windows and rotations off short prefills, holds the
model to them with a self-check (`kvlingo/selfcheck.py`), and refuses it with a sentence where they don't fit."""


if __name__ == "__main__":
    print(table(), end="")
