"""Questions about a context, answered by likelihood: by the target on its own cache, on translated ones, and by the source.

Knows contexts, choices and arms. Where questions come from is the benchmarks' business. A question is read by the source up to
the answer; every choice is then read by the target on the cache that an arm gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlingo.alignment import align, last_at_source_start
from kvlingo.assembling import continuation_logits
from kvlingo.corpus import Example
from kvlingo.evaluation import Arms
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, read
from kvlingo.metrics import Estimate, cluster_bootstrap, estimates, nll_nats
from kvlingo.reading import read_text

SOURCE, NATIVE, NOTHING = "source_alone", "native", "no_context"
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Question:
    """A context that ends where the answer begins, what may come next, and which of it is right.

    Fields:
        cell: what it counts for: a task, a length and a depth.
        cluster: questions that belong together are drawn together.
        choices: texts that begin with whatever separates them from the context; one alone asks whether it is what comes.
        right: the index of the right one.
    """

    cell: str
    cluster: str
    context: str
    choices: tuple[str, ...]
    right: int = 0


@dataclass(frozen=True)
class Answered:
    """One question by one arm.

    Fields:
        is_right: whether the likeliest choice (by nats a byte) is the right one; of a single choice: whether every token of it is
            the likeliest one.
        gold_nats: how much the right choice surprised.
    """

    is_right: bool
    gold_nats: float


@dataclass(frozen=True)
class Asked:
    """One question with the answers of all arms."""

    question: Question
    answers: Mapping[str, Answered]


@torch.no_grad()
def ask(arms: Arms, question: Question, only: Collection[str] | None = None) -> Asked | None:
    """Put one question to every arm; None where a tokenizer would merge across the answer's beginning.

    `only`: the arms that are asked beside native and the source; all by default.
    """
    examples = [question_example(question, choice, arms.source, arms.target) for choice in question.choices]
    cut = [example for example in examples if example is not None]
    if len(cut) < len(examples):
        return None
    asked = cut[0]  # choices differ in what comes after the context only: every cache is made once
    seen: dict[str, list[tuple[float, bool]]] = {}
    caches = [*arms.caches(asked, None, only), (NATIVE, *own_cache(arms.target, asked.target.ids))]
    source_kv, source_rest = own_cache(arms.source, asked.source.ids)
    for example in cut:
        follow = arms.target.ids(example.continuation)
        for name, kv, rest in caches:
            seen.setdefault(name, []).append(score(continuation_logits(arms.target, kv, rest, follow), follow))
        ids = arms.source.ids(arms.source.tokenizer(example.continuation_text, add_special_tokens=False)["input_ids"])
        seen.setdefault(SOURCE, []).append(score(continuation_logits(arms.source, source_kv, source_rest, ids), ids))
    return Asked(question, {name: answered(question, found) for name, found in seen.items()})


def own_cache(lm: LanguageModel, ids: Sequence[int]) -> tuple[KV | None, Tensor]:
    """Return a model's own KV of all tokens but the last, and the last; of none for a model whose cache can't be written."""
    every = lm.ids(ids)
    if lm.target_refusal is not None or len(every) < 2:
        return None, every
    return read(lm, every[:-1]), every[-1:]


def question_example(question: Question, choice: str, source: LanguageModel, target: LanguageModel) -> Example | None:
    """Cut right before the answer; None where a tokenizer would merge across the cut."""
    context, whole = (
        read_text(target.tokenizer, question.context),
        read_text(target.tokenizer, question.context + choice),
    )
    follow = whole.ids[len(context.ids) :]
    if whole.ids[: len(context.ids)] != context.ids or not follow:
        return None
    source_reading = read_text(source.tokenizer, question.context)
    alignment = align(source_reading, context)
    return Example(
        source_reading,
        context,
        follow,
        alignment,
        last_at_source_start(alignment),
        choice,
        question.cluster,
        question.cell,
    )


def score(logits: Tensor, follow: Tensor) -> tuple[float, bool]:
    """Return how much a choice surprised, and whether every token of it was the likeliest one."""
    return float(nll_nats(logits, follow).double().sum()), bool((logits.argmax(-1) == follow).all())


def answered(question: Question, found: Sequence[tuple[float, bool]]) -> Answered:
    """Return which choice an arm takes."""
    nats, is_likeliest = zip(*found, strict=True)
    if len(found) == 1:
        return Answered(is_likeliest[0], nats[0])
    a_byte = [n / max(len(choice.encode()), 1) for n, choice in zip(nats, question.choices, strict=True)]
    return Answered(a_byte.index(min(a_byte)) == question.right, nats[question.right])


# --- summing up ------------------------------------------------------------------------------------------------------


def summarise(asked: Sequence[Asked], *, seed: int = 0) -> dict[str, Any]:
    """Return accuracy and surprise of every arm by cell and over the cells that count, with paired intervals."""
    cells: dict[str, list[Asked]] = {}
    for each in asked:
        cells.setdefault(each.question.cell, []).append(each)
    rows = {name: one_cell(members, seed) for name, members in cells.items()}
    counting = [each for name, members in cells.items() if rows[name]["counts"] for each in members]
    return {
        "cells": rows,
        "counting": [name for name, row in rows.items() if row["counts"]],
        "over_counting": one_cell(counting, seed) if counting else None,
        "over_all": one_cell(asked, seed),
    }


def one_cell(members: Sequence[Asked], seed: int) -> dict[str, Any]:
    """Return one cell's figures.

    It counts where the target on its own cache beats the source alone, and itself without the context, by two standard errors of
    the paired difference: elsewhere there is nothing to keep.
    """
    weights = cluster_bootstrap([a.question.cluster for a in members], seed=seed)
    ones = torch.ones(len(members), dtype=torch.float64)
    names = list(members[0].answers)
    right = {name: column(members, name, "is_right") for name in names}
    nats = {name: column(members, name, "gold_nats") for name in names}
    native, source = right[NATIVE], right[SOURCE]
    figures = {
        name: estimates(
            {
                "accuracy": (right[name], ones),
                "gold_nats": (nats[name], ones),
                "accuracy_below_native": (native - right[name], ones),
                "retention": (right[name], native),
                # Both shares compare the arm with what the source alone would give.
                "gap_recovered": (right[name] - source, native - source),
                "gold_gap_recovered": (nats[SOURCE] - nats[name], nats[SOURCE] - nats[NATIVE]),
            },
            weights,
        )
        for name in names
    }
    return {
        "questions": len(members),
        "arms": figures,
        "counts": all(beats(native, right[name]) for name in (SOURCE, NOTHING) if name in right),
    }


def column(members: Sequence[Asked], arm: str, field: str) -> Tensor:
    """Return one field of one arm for each question."""
    return torch.tensor([float(getattr(a.answers[arm], field)) for a in members], dtype=torch.float64)


def beats(one: Tensor, other: Tensor) -> bool:
    """Tell whether one is better than the other by two standard errors of their paired difference."""
    difference = one - other
    if len(difference) < 2:
        return False
    error = float(difference.std()) / len(difference) ** 0.5
    return float(difference.mean()) > STANDARD_ERRORS * error


def table(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield accuracies by cell in words, those that don't count in brackets."""
    for name, row in summary["cells"].items():
        told = ", ".join(f"{arm} {accuracy(f['accuracy'])}" for arm, f in row["arms"].items())
        yield f"{name} ({row['questions']}): {told}" if row["counts"] else f"[{name} ({row['questions']}): {told}]"


def accuracy(found: Estimate | None) -> str:
    """Format an accuracy."""
    return "–" if found is None else f"{found['mean']:.2f}"
