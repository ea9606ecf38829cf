"""The target's own judgement of a translator, on hand-overs that were not fitted on.

Knows how to cut them from held-out documents and to score them. Fit error chooses dampings; this has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlingo.corpus import Example, examples
from kvlingo.handoff import assemble, continuation_logits
from kvlingo.metrics import kl_nats
from kvlingo.models import LanguageModel, read
from kvlingo.plan import plan_handoff
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


@torch.no_grad()
def held_out_kl(
    source: LanguageModel, target: LanguageModel, translator: Translator, judged: Sequence[Example], *, tail: int = 1
) -> float | None:
    """Return the mean KL(native ‖ translated) in nats over held-out hand-overs; None when there are none."""
    scores = [example_kl(source, target, translator, example, tail=tail).mean() for example in judged]
    return float(torch.stack(scores).mean()) if scores else None


def example_kl(
    source: LanguageModel, target: LanguageModel, translator: Translator, example: Example, *, tail: int = 1
) -> Tensor:
    """Return KL(native ‖ translated) at every continuation token of one example."""
    ids, follow = target.ids(example.target.ids), target.ids(example.continuation)
    plan = plan_handoff(example.alignment.tolist(), sink=max(1, example.at_source_start), tail=tail)
    source_kv = read(source, source.ids(example.source.ids)) if translator.config.reads_source else None
    kv = assemble(plan, target, translator, source_kv, example.alignment, ids)
    translated = continuation_logits(target, kv, ids[plan.translated[1] :], follow)
    return kl_nats(continuation_logits(target, None, ids, follow), translated)
