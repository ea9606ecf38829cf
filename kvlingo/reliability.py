"""How well a bad hand-over is told from a good one: judged on held-out documents, as serving would make them.

Knows examples and hand-overs. The model of it is `confidence`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvlingo.confidence import Confidence, Judged, fit_confidence
from kvlingo.corpus import Example
from kvlingo.environment import environment_card
from kvlingo.errors import BadInput
from kvlingo.evaluation import EvaluationOptions, Progress, choose_examples
from kvlingo.handoff import hand_off
from kvlingo.judging import native_logits
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.metrics import kl_nats
from kvlingo.states import read_alone
from kvlingo.texts import Document
from kvlingo.translator import Translator


@dataclass(frozen=True)
class ReliabilityOptions:
    """What to judge.

    Fields:
        contexts: lengths of context; each gives `documents` hand-overs.
        sink, tail, native_layers: the dial in use; signs are seen on the tail, so a short one shows little.
        kl_nats: a hand-over whose mean KL is above it is bad.
    """

    contexts: tuple[int, ...] = (192, 512, 1024)
    continuation_tokens: int = 48
    documents: int = 64
    sink: int = 1
    tail: int = 16
    native_layers: int = 0
    kl_nats: float = 0.5
    seed: int = 0


@torch.no_grad()
def judge_confidence(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    documents: Sequence[Document],
    *,
    options: ReliabilityOptions | None = None,
    progress: Progress | None = None,
) -> tuple[Confidence, dict[str, Any]]:
    """Hand held-out documents over, look at the signs and at what came of it; return a confidence and its record.

    `documents` must not have been used in fitting the translator: the caller splits by document.

    Raises:
        BadInput: all hand-overs are good, or all are bad.
    """
    options = options or ReliabilityOptions()
    judged, rows = list[Judged](), list[dict[str, Any]]()
    for context in options.contexts:
        chosen = choose_examples(documents, source, target, evaluation_of(options, context))
        for number, example in enumerate(chosen):
            each = judge_one(source, target, translator, example, options)
            judged.append(each)
            rows.append({"context_tokens": context, "kind": example.kind, **asdict(each)})
            if progress is not None:
                progress(f"handing over {context} tokens", number + 1, len(chosen))
    plan = {
        name: getattr(options, name) for name in ("sink", "tail", "native_layers", "contexts", "continuation_tokens")
    }
    found = fit_confidence(judged, kl_nats=options.kl_nats, tail=options.tail, plan=plan, seed=options.seed)
    record = {
        "pair": {"source": source.name, "target": target.name},
        "options": asdict(options),
        "confidence": found.to_json(),
        "hand_overs": rows,
        "environment": environment_card(),
    }
    return found, record


def evaluation_of(options: ReliabilityOptions, context: int) -> EvaluationOptions:
    """Return which documents are cut, and how."""
    return EvaluationOptions(
        context_tokens=context,
        continuation_tokens=options.continuation_tokens,
        documents=options.documents,
        sink=options.sink,
        tail=options.tail,
        native_layers=options.native_layers,
        seed=options.seed,
    )


def judge_one(
    source: LanguageModel, target: LanguageModel, translator: Translator, example: Example, options: ReliabilityOptions
) -> Judged:
    """Hand one example over; return what was seen and what came of it."""
    done = hand_off(
        example.source.stream.decode(errors="replace"),
        source,
        target,
        translator,
        sink=options.sink,
        tail=options.tail,
        native_layers=options.native_layers,
        source_state=read_alone(example.source, source),
        reading=example.target,
        watched=True,
    )
    if done.signs is None or done.logits is None:
        raise BadInput(f"nothing to judge: {done.plan.fallback}; give a longer --context or a shorter --tail")
    follow = target.ids(example.continuation)
    logits = done.logits[None]
    if len(follow) > 1:
        logits = torch.cat((logits, prefill(target, follow[:-1], cache=done.state.cache, logits_to_keep=0).logits))
    return Judged(example.cluster, done.signs, float(kl_nats(native_logits(target, example), logits).mean()))
