"""Carry a plan out: from the source's cache to a target that can go on.

Knows models, plans and translators. `assemble` is the one path from a source cache to a target cache; fitting's held-out
check, distillation, evaluation and serving all go through it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlingo.alignment import Reading, align, read_chat, read_text
from kvlingo.cache import KV, concat, read_cache, write_cache
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.models import LanguageModel, native_layers, prefill, read
from kvlingo.plan import HandoffPlan, SpanKind, plan_handoff, reprefill_plan
from kvlingo.translator import Translator, check_geometry

Message = dict[str, Any]


def assemble(
    plan: HandoffPlan,
    target: LanguageModel,
    translator: Translator,
    source_kv: KV | None,
    alignment: Tensor,
    ids: Tensor,
    *,
    prefix: KV | None = None,
    first_layers: KV | None = None,
) -> KV:
    """Make the target's KV of all tokens before the tail.

    Args:
        source_kv: the source's KV, full length; None for a translator that reads only text.
        alignment: [tokens] source token of each target token.
        ids: [tokens] the target's token ids of the whole conversation.
        prefix: exact KV of the first tokens where the caller has it (an earlier cache); the sinks are read otherwise.
        first_layers: exact KV of the first target layers for all tokens, where the caller has it.
    """
    start, stop = plan.translated
    if prefix is None and start:
        prefix = read(target, ids[:start])
    if start == stop:
        return prefix if prefix is not None else empty_kv(target)
    dtype = _translator_dtype(translator)
    embeddings = target.embed(ids).to(dtype) if translator.config.reads_text else None
    exact = max(plan.native_layers, translator.config.first_layer)
    if first_layers is None and exact:
        with torch.no_grad():
            first_layers = native_layers(target, ids[:stop], exact)
    native = None if first_layers is None or not exact else _first(first_layers, exact).narrow(start, stop)
    middle = translator(
        source_kv.to(dtype=dtype) if source_kv is not None else None,
        alignment[start:stop],
        embeddings,
        start=start,
        skip=[max(0, min(layer.first_held(stop), stop) - start) for layer in target.geometry.layers],
        native=native.to(dtype=dtype) if native is not None else None,
    ).to(target.device, target.dtype)
    return middle if prefix is None or not start else concat([prefix.narrow(0, start), middle])


def _translator_dtype(translator: Translator) -> torch.dtype:
    return next(translator.buffers()).dtype


def _first(kv: KV, layers: int) -> KV:
    return KV(kv.keys[:layers], kv.values[:layers], kv.tokens)


def empty_kv(lm: LanguageModel) -> KV:
    """Return a KV of no tokens."""

    def none(heads: int, dim: int) -> Tensor:
        return torch.zeros(1, heads, 0, dim, device=lm.device, dtype=lm.dtype)

    layers = lm.geometry.layers
    return KV(
        tuple(none(x.kv_heads, x.key_dim) for x in layers), tuple(none(x.kv_heads, x.value_dim) for x in layers), 0
    )


def target_cache(target: LanguageModel, kv: KV) -> Any:
    """Write a KV into a cache that the target can go on from."""
    return write_cache(kv, target.rotary, target.geometry, target.model.config)


def continuation_logits(target: LanguageModel, kv: KV | None, tail: Tensor, continuation: Tensor) -> Tensor:
    """Let the target read its tail and then the given continuation; return what it predicted for each of its tokens.

    Returns logits [continuation, vocabulary]: row 0 is the prediction made from the last tail token. With `kv` None the
    target reads `tail` from nothing.
    """
    ids = torch.cat((tail, continuation[:-1]))
    cache = None if kv is None or not kv.tokens else target_cache(target, kv)
    return prefill(target, ids, cache=cache, logits_to_keep=len(continuation)).logits
