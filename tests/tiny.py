"""Tiny models of the real classes, with random weights that listen to their context, and tiny tokenizers.

Default-initialised tiny models ignore what came before, so any map would pass a test on them. The weights here are scaled
until forgetting the context costs at least `CONTEXT_NATS`; `assert_context_matters` says so.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvlingo.language_model import LanguageModel
from kvlingo.models import wrap
from kvlingo.texts import Document

WINDOW = 8
VOCAB = 320
CONTEXT_NATS = 0.5
LOUD = tuple(
    f"{name}.weight"
    for name in ("q_proj", "k_proj", "lm_head", "embed_out", "query_key_value", "Wqkv", "c_attn", "query")
)
THETA = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


# --- tokenizers ------------------------------------------------------------------------------------------------------

MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "o n", "Ġ a", "r e", "in g", "s t", "Ġ s", "e n", "a t", "l y", "o u")


def byte_tokenizer(*, bos: bool = True, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte, and BOS before a text if asked."""
    return _byte_level(sorted(pre_tokenizers.ByteLevel.alphabet()), (), bos, True, chat_template)


def merging_tokenizer(*, bos: bool = False, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return another tokenizer: other ids, a few merges, special tokens last."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True) + [m.replace(" ", "") for m in MERGES]
    merges = tuple(tuple(m.split(" ")) for m in MERGES)
    return _byte_level(pieces, merges, bos, False, chat_template)


def _byte_level(
    pieces: list[str], merges: tuple[Any, ...], bos: bool, specials_first: bool, chat_template: str | None
) -> PreTrainedTokenizerFast:
    specials = ["<s>", "</s>"]
    ordered = specials + pieces if specials_first else pieces + specials
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(ordered)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, normalized=False) for s in specials])
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


# --- models ----------------------------------------------------------------------------------------------------------


def llama(**changes: Any) -> LlamaForCausalLM:
    """Return a Llama; `rope_parameters` chooses its scaling."""
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "rope_parameters": dict(THETA), **changes}))


def qwen2(**changes: Any) -> Qwen2ForCausalLM:
    """Return a Qwen2: biases on queries, keys and values."""
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "rope_parameters": dict(THETA), **changes}))


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    """Return a Qwen3: keys and queries are normed per head."""
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "rope_parameters": dict(THETA), **changes}))


def mistral(**changes: Any) -> MistralForCausalLM:
    """Return a Mistral: every layer slides."""
    shape = {**SHAPE, "sliding_window": WINDOW, "rope_parameters": dict(THETA)}
    return MistralForCausalLM(MistralConfig(**{**shape, **changes}))


def olmo2(**changes: Any) -> Olmo2ForCausalLM:
    """Return an OLMo 2: keys are normed over all heads at once."""
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    return Olmo2ForCausalLM(Olmo2Config(**{**shape, "rope_parameters": dict(THETA), **changes}))


def gemma3(**changes: Any) -> Gemma3ForCausalLM:
    """Return a Gemma 3: sliding and full layers with a frequency set each, keys normed per head, tied embeddings."""
    shape = {
        **SHAPE,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": dict(THETA),
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
        "tie_word_embeddings": True,
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**shape, **changes}))


def glm4(**changes: Any) -> Glm4ForCausalLM:
    """Return a GLM-4: half of each head rotates, in interleaved planes."""
    rope = {**THETA, "partial_rotary_factor": 0.5}
    return Glm4ForCausalLM(Glm4Config(**{**SHAPE, "rope_parameters": rope, **changes}))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-linear": lambda: llama(rope_parameters={**THETA, "rope_type": "linear", "factor": 4.0}),
    "llama-llama3": lambda: llama(rope_parameters=dict(LLAMA3)),
    "llama-yarn": lambda: llama(rope_parameters=dict(YARN)),
    "llama-mqa": lambda: llama(num_key_value_heads=1),
    "llama-mha": lambda: llama(num_key_value_heads=4, head_dim=16),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "olmo2": olmo2,
    "gemma3": gemma3,
    "glm4": glm4,
}


def scaled(model: Any, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Draw weights large enough for the context to matter."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype).eval()
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "norm" in name:
                parameter.add_(0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            elif "embed" in name:
                parameter.copy_((0.5 if tied else 1.0) * noise)
            else:
                gain = 2.0 if name.endswith(LOUD) else 1.0
                parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)
    return model


def language_model(
    family: str | Callable[[], Any] = "llama",
    *,
    tokenizer: Any = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    name: str | None = None,
) -> LanguageModel:
    """Return a context-sensitive tiny model with its tokenizer (bytes with BOS unless given).

    Frozen, hence shared between tests where it is one of `FAMILIES`; `clone` it to change weights.
    """
    if isinstance(family, str) and tokenizer is None:
        return _shared(family, seed, dtype, name or family)
    make = FAMILIES[family] if isinstance(family, str) else family
    return _language_model(make, tokenizer or byte_tokenizer(), seed, dtype, name or "tiny")


@cache
def _shared(family: str, seed: int, dtype: torch.dtype, name: str) -> LanguageModel:
    return _language_model(FAMILIES[family], byte_tokenizer(), seed, dtype, name)


@cache
def unrelated_pair() -> tuple[LanguageModel, LanguageModel]:
    """Return two unrelated models with different tokenizers, single precision as in use."""
    source = language_model("llama", tokenizer=merging_tokenizer(), seed=3, dtype=torch.float32, name="source")
    return source, language_model("gemma3", dtype=torch.float32)


def _language_model(make: Callable[[], Any], tokenizer: Any, seed: int, dtype: torch.dtype, name: str) -> LanguageModel:
    lm = wrap(scaled(make(), seed=seed, dtype=dtype), tokenizer, name=name)
    assert_context_matters(lm)
    return lm


def assert_context_matters(lm: LanguageModel) -> None:
    """Raise unless forgetting all context but the first token costs at least `CONTEXT_NATS`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 250, (40,), generator=generator)
    short = torch.cat((ids[:1], ids[32:]))
    native, forgotten = cold_logits(lm, ids)[-9:], cold_logits(lm, short)[-9:]
    lost = kl(native[1:], forgotten[1:]).mean()
    assert lost >= CONTEXT_NATS, f"{lm.name} ignores its context: {lost:.3f} nats"


@torch.no_grad()
def cold_logits(lm: LanguageModel, ids: Tensor) -> Tensor:
    """Return the model's own logits [tokens, vocabulary], no cache involved."""
    return lm.model(input_ids=ids[None], use_cache=False).logits[0]


def cold_greedy(lm: LanguageModel, ids: Tensor, count: int) -> list[int]:
    """Return `count` greedy tokens, everything read anew for each."""
    found: list[int] = []
    for _ in range(count):
        found.append(int(cold_logits(lm, torch.cat((ids, torch.tensor(found, dtype=torch.long))))[-1].argmax()))
    return found


def kl(native: Tensor, other: Tensor) -> Tensor:
    """Return KL(native ‖ other) of each row, in nats: the definition, in the dtype of the logits."""
    p, q = native.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


# --- texts -----------------------------------------------------------------------------------------------------------

# fmt: off
WORDS = [
    "the", "river", "stone", "carries", "a", "quiet", "light", "over", "seven", "hills", "and", "then", "into",
    "rooms", "where", "nobody", "counts", "lamps", "bread", "salt", "maps", "engines", "letters", "winter", "glass",
    "copper", "theory", "number", "window", "answer", "north", "inner", "outer", "string", "thing", "other", "reason",
]
# fmt: on


def text(words: int, seed: int = 0) -> str:
    """Return sentences of random words."""
    rng = random.Random(seed)
    out, size = [], 0
    while size < words:
        sentence = [rng.choice(WORDS) for _ in range(rng.randint(3, 9))]
        size += len(sentence)
        out.append(" ".join(sentence).capitalize() + rng.choice(".?!"))
    return " ".join(out)


@cache
def documents(count: int = 8, words: int = 200, seed: int = 0) -> tuple[Document, ...]:
    """Return documents of two kinds, each in a cluster of its own."""
    return tuple(
        Document(
            text=text(words, seed=1000 * seed + i),
            kind=("letters", "reports")[i % 2],
            cluster=f"book-{seed}-{i}",
            name=f"text-{i}",
        )
        for i in range(count)
    )


def text_of_tokens(tokens: int, *, bos: bool = True, seed: int = 0) -> str:
    """Return a text that the byte tokenizer reads as exactly `tokens` tokens."""
    return text(tokens, seed=seed)[: tokens - bos]


def ids_of(lm: LanguageModel, tokens: int, seed: int = 0) -> Tensor:
    """Return the ids of a text of `tokens` tokens, as read by a byte tokenizer with BOS."""
    ids = lm.ids(lm.tokenizer(text_of_tokens(tokens, seed=seed))["input_ids"])
    assert len(ids) == tokens
    return ids


def clone(model: Any) -> Any:
    """Return a copy whose weights can be changed alone."""
    return copy.deepcopy(model)


def parameters(models_: Iterable[Any]) -> list[Tensor]:
    """Return copies of all parameters, to see later whether anything moved."""
    return [p.detach().clone() for m in models_ for p in m.parameters()]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Tell whether two lists of tensors are equal to the bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
