"""What a model holds of a context when it is to go on: its own reading, a translation of another's, or hardly anything.

Knows contexts, hand-overs and batches of both. Where contexts come from, and what is made of the answers, it does not know.
Hand-overs are the product's own (`handoff.hand_off`): one that can't be made is a re-prefill here too, and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlingo.batches import FILLER, Batch, join, prefill_batch, side_by_side
from kvlingo.cache import read_cache, take_row
from kvlingo.cache_writing import fork
from kvlingo.errors import KVLingoError
from kvlingo.generation import Incremental, choose, end_ids, seeded
from kvlingo.handoff import hand_off
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.metrics import nll_nats
from kvlingo.plan import SpanKind, reprefill_plan
from kvlingo.reading import Reading, first_tokens
from kvlingo.states import WHY_READ, Conversation, ModelState, read_conversation
from kvlingo.translator import Translator

NOTHING_TO_HAND_OVER = "there is nothing but special tokens"


@dataclass(frozen=True)
class Context:
    """What comes before an answer.

    Fields:
        reading: as the model that answers reads it.
        conversation: what another model reads of it; None where there is nothing that it could be given.
        why_native: the reason for that.
    """

    reading: Reading
    conversation: Conversation | None = None
    why_native: str | None = None


@dataclass(frozen=True)
class Held:
    """What a model holds of a context: `cache` has every token of it, `logits` [vocabulary] are those of the next one."""

    cache: Any
    logits: Tensor

    @property
    def tokens(self) -> int:
        """Return how many tokens the cache holds."""
        return int(self.cache.get_seq_length())


@dataclass
class Tally:
    """How contexts came to be held: what an arm's figures stand on.

    Fields:
        translated: how many of the tokens were translated.
        read_again: how many contexts the model had to read itself, by reason.
    """

    contexts: int = 0
    tokens: int = 0
    translated: int = 0
    read_again: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return {
            "contexts": self.contexts,
            "tokens": self.tokens,
            "translated_tokens": self.translated,
            "read_again": dict(self.read_again.most_common()),
        }


@dataclass(frozen=True)
class Handing:
    """How contexts get from another model to the one that answers; `sink`, `tail`, `native_layers`: the dial of `hand_off`."""

    source: LanguageModel
    translator: Translator
    sink: int = 1
    tail: int = 1
    native_layers: int = 0


class Holder:
    """Gives one model what it holds of contexts.

    Args:
        handing: contexts are read by a source and handed over; the model reads them itself without it.
        first_only: the model reads so many first tokens and nothing else (a control).
    """

    def __init__(self, lm: LanguageModel, *, handing: Handing | None = None, first_only: int | None = None) -> None:
        self.lm, self.handing, self.first_only, self.tally = lm, handing, first_only, Tally()

    @torch.no_grad()
    def hold(self, contexts: Sequence[Context]) -> list[Held]:
        """Return what the model holds of each context, in their order."""
        readings = [context.reading for context in contexts]
        if self.first_only is not None:
            readings = [first_tokens(reading, max(self.first_only, 1)) for reading in readings]
        self.tally.contexts += len(contexts)
        self.tally.tokens += sum(map(len, readings))
        if self.handing is None:
            return read_rows(self.lm, readings)
        return self._handed_over(contexts, self.handing)

    def _handed_over(self, contexts: Sequence[Context], handing: Handing) -> list[Held]:
        states = self._source_states(contexts, handing.source)
        return [self._one(context, state, handing) for context, state in zip(contexts, states, strict=True)]

    def _source_states(self, contexts: Sequence[Context], source: LanguageModel) -> list[ModelState | str]:
        """Let the source read what it can, in one batch; a reason in the place of what it can't."""
        read: list[Reading | str] = []
        for context in contexts:
            if context.conversation is None:
                read.append(context.why_native or NOTHING_TO_HAND_OVER)
                continue
            try:
                read.append(read_conversation(context.conversation, source, add_generation_prompt=False))
            except KVLingoError as error:
                read.append(f"the source can't read it: {error}")
        readings = [r for r in read if isinstance(r, Reading)]
        rows = iter(read_rows(source, readings))
        return [
            r if isinstance(r, str) else ModelState(r, next(rows).cache, reprefill_plan(len(r), WHY_READ).spans)
            for r in read
        ]

    def _one(self, context: Context, state: ModelState | str, handing: Handing) -> Held:
        if isinstance(state, str):
            return self._read_again(context, state)
        assert context.conversation is not None
        try:
            handed = hand_off(
                context.conversation,
                handing.source,
                self.lm,
                handing.translator,
                sink=handing.sink,
                tail=handing.tail,
                native_layers=handing.native_layers,
                source_state=state,
                reading=context.reading,
            )
        except KVLingoError as error:
            return self._read_again(context, str(error))
        assert handed.logits is not None
        if handed.plan.fallback is not None:
            self.tally.read_again[handed.plan.fallback] += 1
        self.tally.translated += handed.plan.count(SpanKind.TRANSLATED)
        return Held(handed.state.cache, handed.logits)

    def _read_again(self, context: Context, reason: str) -> Held:
        self.tally.read_again[reason] += 1
        return read_rows(self.lm, [context.reading])[0]


@torch.no_grad()
def read_rows(lm: LanguageModel, readings: Sequence[Reading]) -> list[Held]:
    """Let a model read several contexts at once where it can, each as if it were alone."""
    rows = [lm.ids(reading.ids) for reading in readings]
    if len(rows) > 1 and side_by_side(lm, max(map(len, rows))):
        done = prefill_batch(lm, rows, full_length=True)
        places = enumerate(done.batch.padding)
        return [
            Held(take_row(done.batch.cache, row, start, lm.geometry, lm.model.config), done.logits[row, -1])
            for row, start in places
        ]
    alone = (prefill(lm, row, full_length=True) for row in rows)
    return [Held(done.cache, done.logits[-1]) for done in alone]


# --- likelihood ------------------------------------------------------------------------------------------------------

Follow = tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """How much a continuation surprised, and whether each of its tokens was the likeliest one."""

    nats: float
    is_likeliest: bool


@torch.no_grad()
def score(lm: LanguageModel, pairs: Sequence[tuple[Held, Follow]]) -> list[Scored]:
    """Score continuations of at least one token, each after what is held before it; nothing that is held changes."""
    found = []
    for (_, follow), logits in zip(pairs, follow_logits(lm, pairs), strict=True):
        ids = lm.ids(follow)
        nats = float(nll_nats(logits, ids).double().sum())
        found.append(Scored(nats, bool((logits.argmax(-1) == ids).all())))
    return found


def follow_logits(lm: LanguageModel, pairs: Sequence[tuple[Held, Follow]]) -> list[Tensor]:
    """Return the predictions [continuation, vocabulary] of each continuation; padding on the right is never looked at."""
    rest = [follow[:-1] for _, follow in pairs]
    longest = max(map(len, rest), default=0)
    if longest and len(pairs) > 1 and side_by_side(lm, max(held.tokens for held, _ in pairs) + longest):
        batch = together(lm, [held for held, _ in pairs])
        rows = [lm.ids([*ids, *[FILLER] * (longest - len(ids))]) for ids in rest]
        read = list(prefill_batch(lm, rows, batch=batch, logits_to_keep=longest).logits)
    else:
        read = [
            prefill(lm, lm.ids(ids), cache=fork(held.cache), logits_to_keep=len(ids)).logits
            if ids
            else held.logits[None]
            for (held, _), ids in zip(pairs, rest, strict=True)
        ]
    return [
        torch.cat((held.logits[None], logits[: len(ids)]))
        for (held, _), ids, logits in zip(pairs, rest, read, strict=True)
    ]


def together(lm: LanguageModel, held: Sequence[Held]) -> Batch:
    """Return one cache with a row for each; what is held stays as it is."""
    return join(lm, [read_cache(one.cache, lm.rotary, lm.geometry, partial=True) for one in held])


# --- text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """How an answer is drawn and where it ends: at most `max_tokens`, an end token, or any text of `until`."""

    max_tokens: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Answer:
    """One answer as it grows."""

    def __init__(self, lm: LanguageModel, ending: Ending, number: int) -> None:
        self.lm, self.ending, self.ids, self.is_done = lm, ending, list[int](), False
        self._ends = end_ids(lm) | special_ids(lm.tokenizer, ending.until)
        self._pieces, self._text = Incremental(lm.tokenizer), ""
        self._generator = seeded(lm.device, ending.seed + number)

    def add(self, logits: Tensor) -> None:
        """Take one more token, unless the answer has ended."""
        if self.is_done:
            return
        token = choose(logits, self.ending.temperature, self.ending.top_p, self._generator)
        self.ids.append(token)
        self._text += "" if token in self._ends else self._pieces.add(token)
        met = token in self._ends or any(stop in self._text for stop in self.ending.until if stop)
        self.is_done = met or len(self.ids) == self.ending.max_tokens

    @property
    def text(self) -> str:
        """Return what was said before the ending."""
        words = self.ids[:-1] if self.ids and self.ids[-1] in self._ends else self.ids
        said = str(self.lm.tokenizer.decode(words, skip_special_tokens=True))
        for stop in self.ending.until:
            said = said.split(stop)[0] if stop else said
        return said


def special_ids(tokenizer: Any, texts: Sequence[str]) -> frozenset[int]:
    """Return the ids of those texts that are one special token each: they never show in decoded text."""
    added = tokenizer.get_added_vocab()
    return frozenset(added[text] for text in texts if text in added)


@torch.no_grad()
def go_on(lm: LanguageModel, held: Sequence[Held], ending: Ending) -> list[str]:
    """Let the model answer after each context, side by side where it can; what is held stays as it is."""
    answers = [Answer(lm, ending, number) for number in range(len(held))]
    logits = [one.logits for one in held]
    longest = max((one.tokens for one in held), default=0) + ending.max_tokens
    batch = together(lm, held) if len(held) > 1 and side_by_side(lm, longest) else None
    caches = [] if batch else [fork(one.cache) for one in held]
    while True:
        for answer, row in zip(answers, logits, strict=True):
            answer.add(row)
        if all(answer.is_done for answer in answers):
            return [answer.text for answer in answers]
        said = [lm.ids(answer.ids[-1:]) for answer in answers]
        if batch:
            logits = list(prefill_batch(lm, said, batch=batch).logits[:, -1])
            continue
        for number, (answer, cache) in enumerate(zip(answers, caches, strict=True)):
            if not answer.is_done:
                logits[number] = prefill(lm, said[number], cache=cache).logits[-1]
