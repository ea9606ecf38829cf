"""The target's own judgement of a translator, on hand-overs that were not fitted on.

Knows how to cut them from held-out documents and to score them. Fit error chooses dampings; this has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlingo.assembling import assemble, continuation_logits
from kvlingo.corpus import Example, examples
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, read
from kvlingo.metrics import kl_nats
from kvlingo.plan import HandoffPlan, plan_handoff
from kvlingo.shapes import FitOptions
from kvlingo.texts import Document
from kvlingo.translator import Translator


def held_out_examples(
    documents: Sequence[Document], source: LanguageModel, target: LanguageModel, options: FitOptions
) -> list[Example]:
    """Cut a few held-out hand-overs to judge translators by."""
    found: list[Example] = []
    for context in sorted({min(options.context_tokens), 192, 96, 48}, reverse=True):
        found = list(
            examples(
                list(documents),
                source.tokenizer,
                target.tokenizer,
                context_tokens=(context,),
                continuation_tokens=min(32, context // 2),
                per_document=-(-options.held_out_examples // max(len(documents), 1)),
                seed=options.seed,
            )
        )[: options.held_out_examples]
        if found:
            break
    return found


@dataclass(frozen=True)
class Judged:
    """A held-out hand-over whose frozen parts are computed once, however many translators are judged on it.

    Fields:
        native: [continuation, vocabulary] what the target predicts from its own cache.
        source_kv: what the source has read.
    """

    example: Example
    native: Tensor
    source_kv: KV


@torch.no_grad()
def frozen_parts(
    source: LanguageModel, target: LanguageModel, examples_: Sequence[Example], *, dtype: torch.dtype | None = None
) -> list[Judged]:
    """Run what is frozen of hand-overs; keep the target's predictions in `dtype`, its own if not given."""
    return [
        Judged(example, native_logits(target, example).to(dtype), read(source, source.ids(example.source.ids)))
        for example in examples_
    ]


def held_out_kl(
    source: LanguageModel, target: LanguageModel, translator: Translator, judged: Sequence[Example], *, tail: int = 1
) -> float | None:
    """Return the mean KL(native ‖ translated) in nats over held-out hand-overs; None when there are none."""
    return judged_kl(translator, target, frozen_parts(source, target, judged), tail=tail) if judged else None


@torch.no_grad()
def judged_kl(translator: Translator, target: LanguageModel, judged: Sequence[Judged], *, tail: int = 1) -> float:
    """Return the mean KL(native ‖ translated) in nats over one or more hand-overs whose frozen parts are known."""
    return float(torch.stack([example_kl(translator, target, item, tail=tail).mean() for item in judged]).mean())


def example_kl(translator: Translator, target: LanguageModel, judged: Judged, *, tail: int = 1) -> Tensor:
    """Return KL(native ‖ translated) at every continuation token of one example."""
    source_kv = judged.source_kv if translator.config.reads_source else None
    return kl_nats(judged.native, translated_logits(translator, target, judged.example, source_kv, tail=tail))


def native_logits(target: LanguageModel, example: Example) -> Tensor:
    """Return what the target predicts of one example's continuation from its own cache: [continuation, vocabulary]."""
    return continuation_logits(target, None, target.ids(example.target.ids), target.ids(example.continuation))


def translated_logits(
    translator: Translator,
    target: LanguageModel,
    example: Example,
    source_kv: KV | None,
    *,
    tail: int,
    reader: LanguageModel | None = None,
) -> Tensor:
    """Return what the target predicts of one example's continuation from the translated cache: [continuation, vocabulary].

    Keeps the graph into the maps. `reader` is the target with another output head, where one is wanted.
    """
    ids, follow = target.ids(example.target.ids), target.ids(example.continuation)
    plan = example_plan(example, tail)
    kv = assemble(plan, target, translator, source_kv, example.alignment, ids)
    return continuation_logits(reader or target, kv, ids[plan.translated[1] :], follow)


def example_plan(example: Example, tail: int) -> HandoffPlan:
    """Plan one example's hand-over; a tail that would leave nothing to translate, and so nothing to judge or learn, is cut."""
    sink = max(1, example.at_source_start)
    longest = max(1, min(tail, example.context_tokens - sink - 1))
    return plan_handoff(example.alignment.tolist(), sink=sink, tail=longest)
