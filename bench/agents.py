"""Hand-overs between agents: the target has a system prompt of its own, and takes over what another one has read under another.

The target's system part is read by the target itself: nothing before the first shared message is translated. What comes after it
is shared and translated, though the source read it under its own prompt. Beside every arm of `evaluation` stand two controls: the
same hand-over from a source that has read the target's prompt (`same_prompt`), and the target on its own cache under the source's
prompt (`native_other_prompt`), which says how much a prompt matters at all.

Run as `python -m bench.quality agents`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from kvlingo.alignment import align, last_at_source_start
from kvlingo.corpus import Example, as_chat
from kvlingo.environment import environment_card
from kvlingo.errors import BadInput
from kvlingo.evaluation import Arms, Controls, EvaluationOptions, in_turn, judge, plan_of, wrong_document
from kvlingo.language_model import LanguageModel
from kvlingo.metrics import ArmScores, cluster_bootstrap, estimates
from kvlingo.reading import Reading, read_chat
from kvlingo.texts import Document
from kvlingo.translator import Translator

SOURCE_PROMPT = "You are the first of two clerks. Read what comes in, in order, and keep every name and number in mind."
TARGET_PROMPT = (
    "You are an editor. Go on with the text in the style in which it is written, without comments of your own, and never "
    "mention that you are a program."
)
CHARS_PER_TOKEN = 8
Progress = Callable[[str, int, int], None]


def shared_part(reading: Reading) -> Reading:
    """Take the system message as part of the template: each side has its own, and they need not correspond."""
    return replace(reading, contents=reading.contents[1:])


def agent_example(
    document: Document,
    source: LanguageModel,
    target: LanguageModel,
    options: EvaluationOptions,
    prompts: tuple[str, str],
) -> Example | None:
    """Make one hand-over under two prompts of a document's beginning; None where it is too short."""
    tokens = options.context_tokens + options.continuation_tokens
    text = document.text[: CHARS_PER_TOKEN * tokens]
    offsets = target.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    if len(offsets) < tokens:
        return None
    cut = offsets[options.context_tokens - 1][1]
    shared = as_chat(text[:cut])
    read = [
        read_chat(lm.tokenizer, [{"role": "system", "content": prompt}, *shared], add_generation_prompt=is_target)
        for lm, prompt, is_target in ((source, prompts[0], False), (target, prompts[1], True))
    ]
    source_reading, target_reading = (shared_part(reading) for reading in read)
    alignment = align(source_reading, target_reading)
    follow = tuple(target.tokenizer(text[cut:].lstrip(), add_special_tokens=False)["input_ids"])
    follow = follow[: options.continuation_tokens]
    if len(follow) < options.continuation_tokens:
        return None
    return Example(
        source_reading,
        target_reading,
        follow,
        alignment,
        max(last_at_source_start(alignment), first_shared(target_reading)),
        target.tokenizer.decode(follow),
        document.cluster,
        document.kind,
    )


def first_shared(reading: Reading) -> int:
    """Return how many first tokens hold nothing of any shared message: the target reads them itself."""
    return reading.opening


@torch.no_grad()
def evaluate_agents(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    documents: Sequence[Document],
    controls: Controls,
    options: EvaluationOptions,
    *,
    prompts: tuple[str, str] = (SOURCE_PROMPT, TARGET_PROMPT),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score every arm on hand-overs between two prompts; return plain values."""
    made = [agent_example(document, source, target, options, prompts) for document in documents]
    chosen = in_turn([example for example in made if example is not None], options.seed)[: options.documents]
    if not chosen:
        raise BadInput(
            f"no text has {options.context_tokens + options.continuation_tokens} tokens; give longer ones or a smaller --context"
        )
    by_text = {example.target.ids: place for place, example in enumerate(made) if example is not None}
    arms, rows = Arms(source, target, translator, controls, options), []
    for number, example in enumerate(chosen):
        document = documents[by_text[example.target.ids]]
        rows.append(score_agents(arms, example, wrong_document(chosen, number), document, prompts))
        if progress is not None:
            progress("scoring hand-overs between prompts", number + 1, len(chosen))
    plan = plan_of(chosen[0], options)
    return {
        "pair": {"source": source.name, "target": target.name},
        "prompts": {"source": prompts[0], "target": prompts[1]},
        "options": asdict(options),
        "num_documents": len(chosen),
        "first_plan": plan.to_json(),
        **summed_up(rows, [example.cluster for example in chosen], options.seed),
        "environment": environment_card(),
    }


def score_agents(
    arms: Arms, example: Example, other: Example | None, document: Document, prompts: tuple[str, str]
) -> dict[str, ArmScores]:
    """Score one hand-over by every arm and both controls, all against the target's own cache under its own prompt."""
    follow, native = arms.target.ids(example.continuation), arms.native(example)
    scores = {"native": judge(native, native, follow)}
    for name, logits in arms.logits(example, other):
        scores[name] = judge(native, logits, follow)
    for name, pair, wanted in (
        ("same_prompt", (prompts[1], prompts[1]), "translated"),
        ("native_other_prompt", (prompts[0], prompts[0]), "native"),
    ):
        again = agent_example(document, arms.source, arms.target, arms.options, pair)
        assert again is not None
        if wanted == "native":
            scores[name] = judge(native, arms.native(again), follow)
        else:
            (logits,) = (found for _, found in arms.logits(again, None, {"translated"}))
            scores[name] = judge(native, logits, follow)
    return scores


def summed_up(rows: Sequence[dict[str, ArmScores]], clusters: Sequence[str], seed: int) -> dict[str, Any]:
    """Return KL and agreement of every arm, and how much worse `translated` is than under the same prompt, paired."""
    weights = cluster_bootstrap(clusters, seed=seed)
    names = [name for name in rows[0] if all(name in row for row in rows)]

    def column(name: str, field: str) -> torch.Tensor:
        return torch.stack([getattr(row[name], field).double().sum() for row in rows])

    tokens = torch.tensor([float(len(row["native"].kl_nats)) for row in rows], dtype=torch.float64)
    figures = {
        name: estimates({f: (column(name, f), tokens) for f in ("kl_nats", "top1", "nll_nats")}, weights)
        for name in names
    }
    harm = column("translated", "kl_nats") - column("same_prompt", "kl_nats")
    return {"arms": figures, "other_prompt_costs_kl_nats": estimates({"kl": (harm, tokens)}, weights)["kl"]}
