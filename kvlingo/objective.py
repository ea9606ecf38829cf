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
from kvlingo.language_model import LanguageModel, read, with_vocabulary
from kvlingo.metrics import kl_nats, masked_mean, nll_nats
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
    reader = target if view is None else view.lm
    with torch.no_grad():
        native = native_logits(reader, example)
        source_kv = read(source, source.ids(example.source.ids)) if translator.config.reads_source else None
    translated = translated_logits(translator, target, example, source_kv, tail=tail, reader=reader)
    loss = masked_mean(kl_nats(native, translated))
    if not ce_weight:
        return loss
    follow = target.ids(example.continuation)
    next_ids = follow if view is None else view.place[follow]
    known = next_ids >= 0
    return loss + ce_weight * masked_mean(nll_nats(translated, next_ids.clamp(min=0), mask=known), known)
