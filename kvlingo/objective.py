"""What distillation minimises: KL between what the frozen target predicts from its own and from a translated cache.

    loss = KL(p_native ‖ p_translated) + λ · CE, at every continuation token (arXiv 2609.32610, stage 2)

Knows examples and translators. Does not know optimisers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlingo.corpus import Example
from kvlingo.judging import native_logits, translated_logits
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, read, with_vocabulary
from kvlingo.metrics import kl_nats, masked_mean, nll_nats
from kvlingo.predictions import KeptPredictions, Likeliest, kl_to_likeliest_nats
from kvlingo.texts import Document
from kvlingo.translator import Translator

VOCABULARY_SAMPLE_CHARS = 20_000


@dataclass(frozen=True)
class VocabularyView:
    """The target with a smaller output head, and where each token id stands in it (-1: nowhere)."""

    lm: LanguageModel
    place: Tensor


def small_vocabulary(target: LanguageModel, documents: Sequence[Document], size: int | None) -> VocabularyView | None:
    """Keep the `size` most frequent tokens of a sample of the training text; None where that would keep all anyway."""
    if size is None or size >= target.geometry.vocab_size:
        return None
    counts: Counter[int] = Counter()
    for document in documents:
        counts.update(target.tokenizer(document.text[:VOCABULARY_SAMPLE_CHARS], add_special_tokens=False)["input_ids"])
    kept = sorted({i for i, _ in counts.most_common(size)} | set(target.tokenizer.all_special_ids))
    ids = target.ids(kept)
    place = torch.full((target.geometry.vocab_size,), -1, dtype=torch.long, device=target.device)
    place[ids] = torch.arange(len(kept), device=target.device)
    return VocabularyView(with_vocabulary(target, ids), place)


def example_loss(
    translator: Translator,
    source: LanguageModel,
    target: LanguageModel,
    example: Example,
    tail: int,
    ce_weight: float,
    *,
    view: VocabularyView | None = None,
) -> Tensor:
    """Return the loss of one hand-over, with its graph into the maps."""
    return loss_beside(
        translator, target, frozen_side(translator, source, target, example, view), tail, ce_weight, view=view
    )


@dataclass(frozen=True)
class Frozen:
    """What no map changes of a hand-over: the same whatever its tail is.

    Fields:
        native: [continuation, vocabulary] what the target predicts from its own cache, or the likeliest of it.
        source_kv: what the source has read; None where no map reads it.
    """

    example: Example
    native: Tensor | Likeliest
    source_kv: KV | None


@torch.no_grad()
def frozen_side(
    translator: Translator,
    source: LanguageModel,
    target: LanguageModel,
    example: Example,
    view: VocabularyView | None = None,
    kept: KeptPredictions | None = None,
) -> Frozen:
    """Run both models over what is frozen of a hand-over; with `kept` the target only where its predictions are not there yet."""
    source_kv = read(source, source.ids(example.source.ids)) if translator.config.reads_source else None
    reader = target if view is None else view.lm
    if kept is None:
        return Frozen(example, native_logits(reader, example), source_kv)
    native = kept.of(example.target.ids, example.continuation, lambda: native_logits(reader, example))
    return Frozen(example, native, source_kv)


def divergence(native: Tensor | Likeliest, logits: Tensor) -> Tensor:
    """Return KL(native ‖ translated) in nats at each position."""
    if not isinstance(native, Likeliest):
        return kl_nats(native, logits)
    there = (x.to(logits.device) for x in (native.ids, native.log_p, native.log_rest))
    return kl_to_likeliest_nats(Likeliest(*there), logits)


def loss_beside(
    translator: Translator,
    target: LanguageModel,
    frozen: Frozen,
    tail: int,
    ce_weight: float,
    *,
    view: VocabularyView | None = None,
) -> Tensor:
    """Return what `example_loss` does, where the frozen side has run."""
    reader, example = target if view is None else view.lm, frozen.example
    translated = translated_logits(translator, target, example, frozen.source_kv, tail=tail, reader=reader)
    loss = masked_mean(divergence(frozen.native, translated))
    if not ce_weight:
        return loss
    follow = target.ids(example.continuation)
    next_ids = follow if view is None else view.place[follow]
    known = next_ids >= 0
    return loss + ce_weight * masked_mean(nll_nats(translated, next_ids.clamp(min=0), mask=known), known)
