"""A conversation that goes back and forth between two models: how far each is from itself after every switch.

Knows hand-overs in both directions and what is kept between them. Text is given, not generated: what is measured is what a switch
does, not what a model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from kvlingo.environment import environment_card
from kvlingo.errors import BadInput
from kvlingo.evaluation import Progress
from kvlingo.generation import grown
from kvlingo.handoff import HandOff, hand_off
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.metrics import cluster_bootstrap, estimates, kl_nats, top1_agreement
from kvlingo.plan import SpanKind, reprefill_plan
from kvlingo.states import ModelState, read_native
from kvlingo.texts import Document
from kvlingo.translator import Translator

RULES = {
    "provenance": "only what a side missed is translated, and only what the other read itself",
    "no_rule": "all of it is translated at every switch, translations of translations too",
    "one_switch": "the first switch at this length: the other has read all of it itself",
}


@dataclass(frozen=True)
class Link:
    """One direction of the pair."""

    source: LanguageModel
    target: LanguageModel
    translator: Translator


@dataclass(frozen=True)
class DriftOptions:
    """What to measure.

    Fields:
        switches: how often the conversation changes models.
        first_tokens, turn_tokens: about how many tokens it begins with, and get new at every turn. What stands outside a sliding
            window of a side that was handed it can't be handed on again, so `no_rule` falls back to a re-prefill there.
        documents: texts, one conversation each, from clusters in turn.
        sink, tail: the dial.
        rules: which of `RULES` to compare.
    """

    switches: int = 10
    first_tokens: int = 128
    turn_tokens: int = 32
    documents: int = 16
    sink: int = 1
    tail: int = 1
    rules: tuple[str, ...] = tuple(RULES)
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rules) - set(RULES))
        if unknown:
            raise BadInput(f"there is no rule {unknown[0]!r}; use {', '.join(RULES)}")


@dataclass(frozen=True)
class Switched:
    """What one switch of one conversation came to: sums over the turn's new tokens."""

    rule: str
    turn: int
    direction: str
    cluster: str
    kl_nats: float
    top1: float
    tokens: int
    translated: int
    fallback: str | None


@torch.no_grad()
def drift(
    there: Link,
    back: Link,
    documents: Sequence[Document],
    *,
    options: DriftOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Let conversations change sides many times; return plain values that `json` writes and `plots.draw_drift` draws.

    After each switch the new holder's predictions of the turn's new text are held against those of the same model that has read
    everything itself. Then it reads that text on the cache it has, and hands over in its turn.
    """
    options = options or DriftOptions()
    texts = conversations(documents, there.source, options)
    found: list[Switched] = []
    for number, (cluster, pieces) in enumerate(texts):
        for rule in options.rules:
            found += switch_often(rule, there, back, cluster, pieces, options)
        if progress is not None:
            progress(f"switching {options.switches} times", number + 1, len(texts))
    return summed_up(found, there, options, len(texts))


def conversations(
    documents: Sequence[Document], lm: LanguageModel, options: DriftOptions
) -> list[tuple[str, list[str]]]:
    """Cut texts into a beginning and as many turns as there are switches: one text a cluster, kinds in turn."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for document in documents:
        of_kind = kinds.setdefault(document.kind, {})
        pieces = None if document.cluster in of_kind else cut(document.text, lm, options)
        if pieces is not None:
            of_kind[document.cluster] = pieces
    rows = zip_longest(*(of_kind.items() for of_kind in kinds.values()))
    found = [item for row in rows for item in row if item is not None][: options.documents]
    if not found:
        needed = options.first_tokens + options.switches * options.turn_tokens
        raise BadInput(f"the texts are too short: no piece of {needed} tokens; give longer texts or fewer switches")
    return found


def cut(text: str, lm: LanguageModel, options: DriftOptions) -> list[str] | None:
    """Cut a text before spaces, each piece about as many tokens as asked for; None for a text that is too short."""
    words, pieces = text.split(" "), list[str]()
    sizes = [options.first_tokens] + [options.turn_tokens] * options.switches
    place = 0
    for number, size in enumerate(sizes):
        count = piece_words(words[place:], lm, size)
        if count is None:
            return None
        pieces.append(("" if number == 0 else " ") + " ".join(words[place : place + count]))
        place += count
    return pieces


def piece_words(words: Sequence[str], lm: LanguageModel, tokens: int) -> int | None:
    """Return how many first words make at least `tokens` tokens; None if all of them don't."""
    some = list(words[: 4 * tokens])
    ids = lm.tokenizer(" ".join(some), add_special_tokens=False)["input_ids"]
    if len(ids) < tokens or not some:
        return None
    low, high = 1, len(some)
    while low < high:
        middle = (low + high) // 2
        enough = len(lm.tokenizer(" ".join(some[:middle]), add_special_tokens=False)["input_ids"]) >= tokens
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def switch_often(
    rule: str, there: Link, back: Link, cluster: str, pieces: Sequence[str], options: DriftOptions
) -> list[Switched]:
    """Hold one conversation under one rule."""
    text, found = pieces[0], list[Switched]()
    holder, other = read_native(text, there.source), None
    for turn, piece in enumerate(pieces[1:], start=1):
        link = there if turn % 2 else back
        if rule == "one_switch":
            holder, other = read_native(text, link.source), None
        elif rule == "no_rule":
            holder, other = taken_at_its_word(holder), None
        done = hand_off(
            text,
            link.source,
            link.target,
            link.translator,
            sink=options.sink,
            tail=options.tail,
            source_state=holder,
            target_state=other,
        )
        ids = link.target.ids(link.target.tokenizer(piece, add_special_tokens=False)["input_ids"])
        logits, state = reads_on(link.target, done, ids)
        native = prefill(
            link.target, torch.cat((link.target.ids(done.state.reading.ids), ids[:-1])), logits_to_keep=len(ids)
        ).logits
        found.append(
            Switched(
                rule=rule,
                turn=turn,
                direction=f"{link.source.name} → {link.target.name}",
                cluster=cluster,
                kl_nats=float(kl_nats(native, logits).double().sum()),
                top1=float(top1_agreement(native, logits).double().sum()),
                tokens=len(ids),
                translated=done.plan.count(SpanKind.TRANSLATED),
                fallback=done.plan.fallback,
            )
        )
        text, holder, other = text + piece, state, holder
    return found


def reads_on(lm: LanguageModel, done: HandOff, ids: Tensor) -> tuple[Tensor, ModelState]:
    """Let a target that was handed a conversation read what comes next; return its predictions of that, and its state."""
    assert done.logits is not None
    rest = prefill(lm, ids, cache=done.state.cache, logits_to_keep=0).logits
    return torch.cat((done.logits[None], rest[:-1])), grown(lm, done.state, ids.tolist())


def taken_at_its_word(state: ModelState) -> ModelState:
    """Return a state whose translated tokens count as its own: what the provenance rule forbids."""
    return replace(state, spans=reprefill_plan(len(state.reading), "taken at its word").spans)


def summed_up(found: Sequence[Switched], there: Link, options: DriftOptions, texts: int) -> dict[str, Any]:
    """Return the curve with its intervals, and each rule's last switches against its first."""
    keys = sorted({(s.rule, s.turn) for s in found}, key=lambda key: (options.rules.index(key[0]), key[1]))
    rows = [one_turn([s for s in found if (s.rule, s.turn) == key], options.seed) for key in keys]
    return {
        "pair": {"a": there.source.name, "b": there.target.name},
        "options": asdict(options),
        "rules": {rule: RULES[rule] for rule in options.rules},
        "turn_tokens": options.turn_tokens,
        "num_documents": texts,
        "turns": rows,
        "last_against_first": {rule: ratios(found, rule, options.seed) for rule in options.rules},
        "environment": environment_card(),
    }


def one_turn(members: Sequence[Switched], seed: int) -> dict[str, Any]:
    """Sum up one rule's switch over all conversations."""
    tokens = torch.tensor([float(s.tokens) for s in members], dtype=torch.float64)

    def column(name: str) -> Tensor:
        return torch.tensor([float(getattr(s, name)) for s in members], dtype=torch.float64)

    weights = cluster_bootstrap([s.cluster for s in members], seed=seed)
    figures = estimates({name: (column(name), tokens) for name in ("kl_nats", "top1")}, weights)
    first = members[0]
    return {
        "rule": first.rule,
        "turn": first.turn,
        "direction": first.direction,
        **figures,
        "translated_tokens": float(column("translated").mean()),
        "fallbacks": sum(s.fallback is not None for s in members),
    }


def ratios(found: Sequence[Switched], rule: str, seed: int) -> dict[str, Any]:
    """Return, for each direction, the KL of its last switch over that of its first, with the interval of paired resamples."""
    mine = [s for s in found if s.rule == rule]
    told = {}
    for direction in dict.fromkeys(s.direction for s in mine):
        turns = sorted({s.turn for s in mine if s.direction == direction})
        first, last = ([s for s in mine if s.turn == turn] for turn in (turns[0], turns[-1]))
        # KL a token of either: conversations have their own lengths of turns.
        bottom, top = (
            torch.tensor([s.kl_nats / s.tokens for s in side], dtype=torch.float64) for side in (first, last)
        )
        weights = cluster_bootstrap([s.cluster for s in first], seed=seed)
        told[direction] = {
            "turns": [turns[0], turns[-1]],
            "ratio": estimates({"ratio": (top, bottom)}, weights)["ratio"],
        }
    return told
