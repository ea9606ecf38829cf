"""What distillation minimises: KL between what the frozen target predicts from its own and from a translated cache.

    loss = KL(p_native ‖ p_translated) + λ · CE,  at every continuation token (arXiv 2609.32610, stage 2)

Knows examples, plans and translators. One text gives several hand-overs: what the source has read at a later place begins with
what it had read at an earlier one, so its cache, the target's own predictions and the translation are computed once for all.
Does not know optimisers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlingo.corpus import MIN_CONTEXT, Example, common_ends
from kvlingo.handoff import assemble, continuation_logits
from kvlingo.metrics import kl_nats, masked_mean, nll_nats
from kvlingo.models import LanguageModel, read, with_vocabulary
from kvlingo.plan import HandoffPlan, plan_handoff
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


@dataclass(frozen=True)
class Cut:
    """One hand-over inside a text: after `tokens` target tokens, the last `tail` of which the target reads itself."""

    tokens: int
    tail: int


def draw_cuts(example: Example, count: int, tails: Sequence[int], rng: random.Random) -> tuple[Cut, ...]:
    """Choose up to `count` places to hand over: the end of the context, the others spread over it at random.

    Only places where a token of both models ends: nothing that the source has read there spells a byte of what follows.
    """
    least = max(MIN_CONTEXT, example.at_source_start + 2)
    places = [c for c in common_ends(example) if least <= c < example.context_tokens]
    earlier = sorted(rng.sample(places, min(count - 1, len(places))))
    return tuple(Cut(c, rng.choice(tails)) for c in (*earlier, example.context_tokens))


def training_plan(example: Example, cut: Cut | None = None, *, tail: int = 1) -> HandoffPlan:
    """Plan one hand-over; a tail that would leave nothing to translate, and so nothing to learn, is cut."""
    cut = cut or Cut(example.context_tokens, tail)
    sink = max(1, example.at_source_start)
    return plan_handoff(
        example.alignment[: cut.tokens].tolist(), sink=sink, tail=max(1, min(cut.tail, cut.tokens - sink - 1))
    )


def example_loss(
    translator: Translator,
    source: LanguageModel,
    target: LanguageModel,
    example: Example,
    cuts: Sequence[Cut],
    ce_weight: float,
    *,
    view: VocabularyView | None = None,
) -> Tensor:
    """Return the mean loss of one text's hand-overs, with its graph into the maps."""
    reader = target if view is None else view.lm
    ids = target.ids((*example.target.ids, *example.continuation))
    count, first = len(example.continuation), min(cut.tokens for cut in cuts)
    with torch.no_grad():
        native = continuation_logits(reader, None, ids[:first], ids[first:])
        source_kv = read(source, source.ids(example.source.ids)) if translator.config.reads_source else None
    plans = [training_plan(example, cut) for cut in cuts]
    longest = max(plans, key=lambda plan: plan.translated[1])
    context = ids[: example.context_tokens]
    kv = assemble(longest, target, translator, source_kv, example.alignment, context, in_full=True)
    losses = []
    for cut, plan in zip(cuts, plans, strict=True):
        stop, follow = plan.translated[1], ids[cut.tokens : cut.tokens + count]
        translated = continuation_logits(reader, kv.narrow(0, stop), ids[stop : cut.tokens], follow)
        rows = native[cut.tokens - first :][:count]
        losses.append(continuation_loss(rows, translated, follow, ce_weight, view))
    return torch.stack(losses).mean()


def continuation_loss(
    native: Tensor, translated: Tensor, follow: Tensor, ce_weight: float, view: VocabularyView | None
) -> Tensor:
    """Return KL + λ · CE over one continuation; logits are [continuation, vocabulary]."""
    loss = masked_mean(kl_nats(native, translated))
    if not ce_weight:
        return loss
    next_ids = follow if view is None else view.place[follow]
    known = next_ids >= 0
    return loss + ce_weight * masked_mean(nll_nats(translated, next_ids.clamp(min=0), mask=known), known)
