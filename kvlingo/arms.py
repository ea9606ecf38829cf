"""The ways to a target's first token that the benchmark times, each from what is held before to the logits.

Knows models, caches and hand-overs; no clock. `stage` makes what is there before a switch, each arm is one way from there: what
its `prepare` does is not timed, everything in `run` is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlingo.alignment import align
from kvlingo.cache import full_cache, native_cache, owning_layers
from kvlingo.cache_writing import fork, truncate
from kvlingo.errors import BadInput
from kvlingo.execution import carry_out
from kvlingo.handoff import HandOff, hand_off
from kvlingo.language_model import LanguageModel, prefill, read_in_pieces
from kvlingo.plan import plan_handoff, reprefill_plan
from kvlingo.reading import Reading, first_tokens
from kvlingo.states import WHY_READ, Conversation, ModelState, common_prefix, read_conversation
from kvlingo.timing import cut
from kvlingo.translator import Translator

SHORTEST = 8


@dataclass(frozen=True, eq=False)
class Pair:
    """Two models and the maps between them.

    Fields:
        load_maps: loads the maps from disk, as a service does that has not used them yet.
        text: a long text to cut conversations from; None for random ids, the same for both models.
    """

    source: LanguageModel
    target: LanguageModel
    translator: Translator
    load_maps: Callable[[], Translator]
    text: str | None = None


@dataclass(frozen=True)
class Dial:
    """How a hand-over is made, and how much is new to a target that holds an older prefix."""

    sink: int = 1
    tail: int = 1
    delta: int = 256


@dataclass(frozen=True, eq=False)
class Case:
    """What is there before a switch at one length.

    Fields:
        conversation, reading: the text, which every run tokenises; or none, and the random ids.
        source_state: what the source has read.
        older: the target's cache of all but the last `new` tokens.
        nearly: the target's cache of all but the last token.
        ahead: what the target holds where everything but the tail was translated before it was asked for.
        was_read: whether the caches were read; they are filled at random otherwise, which takes as long to go on from.
    """

    pair: Pair
    dial: Dial
    conversation: Conversation
    reading: Reading | None
    ids: Tensor
    source_state: ModelState
    older: Any
    nearly: Any
    ahead: ModelState | None
    new: int
    was_read: bool

    @property
    def tokens(self) -> int:
        """Return the number of the target's tokens."""
        return len(self.ids)

    def read_again(self) -> Tensor:
        """Return the target's ids, from the text where there is one."""
        target = self.pair.target
        reading = self.reading or read_conversation(self.conversation, target, add_generation_prompt=True)
        return target.ids(reading.ids)

    def hand(
        self, translator: Translator, state: ModelState | None, *, target_state: ModelState | None = None
    ) -> HandOff:
        """Hand the conversation over; without a state the source reads it first."""
        if state is None and self.reading is not None:
            state = state_of(self.reading, read_whole(self.pair.source, self.reading))
        return hand_off(
            self.conversation,
            self.pair.source,
            self.pair.target,
            translator,
            sink=self.dial.sink,
            tail=self.dial.tail,
            source_state=state,
            target_state=target_state,
            reading=self.reading,
        )


# --- what is there before --------------------------------------------------------------------------------------------


@torch.no_grad()
def stage(pair: Pair, length: int, dial: Dial, *, really_read: bool, seed: int = 0) -> Case:
    """Make what is there before a switch of a conversation of about `length` target tokens.

    Raises `BadInput` where the hand-over is a re-prefill: its time would say nothing.
    """
    source, target = pair.source, pair.target
    conversation: Conversation = () if pair.text is None else cut(pair.text, source, target, length)
    if pair.text is None:
        source_reading = target_reading = random_reading(pair, length, seed)
    else:
        source_reading = read_conversation(conversation, source, add_generation_prompt=False)
        target_reading = read_conversation(conversation, target, add_generation_prompt=True)
    ids = target.ids(target_reading.ids)
    if len(ids) < SHORTEST:
        raise BadInput(
            f"a conversation of {len(ids)} tokens is too short to time; give --lengths of {SHORTEST} or more"
        )
    new = max(2, min(dial.delta, len(ids) // 2))
    if really_read:
        source_cache = read_whole(source, source_reading)
        older = prefill(target, ids[:-new]).cache
        nearly = prefill(target, ids[-new:-1], cache=fork(older)).cache
    else:
        source_cache = filled_cache(source, len(source_reading), full_length=True, seed=seed)
        older, nearly = (filled_cache(target, len(ids) - left, full_length=False, seed=seed) for left in (new, 1))
    case = Case(
        pair,
        dial,
        conversation,
        target_reading if pair.text is None else None,
        ids,
        state_of(source_reading, source_cache),
        older,
        nearly,
        None,
        new,
        really_read,
    )
    handed = case.hand(pair.translator, case.source_state)
    if handed.plan.fallback:
        raise BadInput(f"{source.name} → {target.name} can't be timed: {' '.join(handed.plan.fallback.split())}")
    return replace(case, ahead=before_tail(target, handed))


def before_tail(target: LanguageModel, handed: HandOff) -> ModelState:
    """Return what the target held before it read its tail."""
    stop, lm = handed.plan.translated[1], target
    cache = truncate(handed.state.cache, stop, lm.geometry, lm.model.config)
    return replace(handed.state, reading=first_tokens(handed.state.reading, stop), cache=cache)


def random_reading(pair: Pair, tokens: int, seed: int) -> Reading:
    """Return random ids that both models know, as if each spelled one byte: tokenizers are taken as equal."""
    known = min(lm.geometry.vocab_size for lm in (pair.source, pair.target))
    ids = torch.randint(known, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Reading(tuple(ids), tuple((i, i + 1) for i in range(tokens)), ((0, tokens),), b"." * tokens)


def read_whole(lm: LanguageModel, reading: Reading) -> Any:
    """Let a model read everything into a cache that can be translated from."""
    return prefill(lm, lm.ids(reading.ids), full_length=True).cache


def state_of(reading: Reading, cache: Any) -> ModelState:
    """Say that a model holds its own reading."""
    return ModelState(reading, cache, reprefill_plan(len(reading), WHY_READ).spans)


def filled_cache(lm: LanguageModel, tokens: int, *, full_length: bool, seed: int = 0) -> Any:
    """Return a cache of `tokens` tokens with random keys and values: as large as one that was read, and nothing was."""
    cache = full_cache(lm.model.config) if full_length else native_cache(lm.model.config)
    generator = torch.Generator(device=lm.device).manual_seed(seed)
    for layer, shape in zip(owning_layers(cache, lm.geometry), lm.geometry.layers, strict=True):
        keys, values = (
            torch.randn(1, shape.kv_heads, tokens, dim, generator=generator, device=lm.device, dtype=lm.dtype)
            for dim in (shape.key_dim, shape.value_dim)
        )
        layer.update(keys, values)
    return cache


# --- the ways --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to the logits [vocabulary] of the next token. `prepare` makes what `run` uses up, outside the time."""

    run: Callable[[Any], Tensor]
    prepare: Callable[[], Any] = lambda: None


def reprefill(case: Case, chunk: int | None) -> Arm:
    """Read everything again: what a hand-over is compared with."""
    return Arm(lambda _: read_in_pieces(case.pair.target, case.read_again(), chunk).logits[-1])


def reprefill_delta(case: Case, chunk: int | None) -> Arm:
    """Read what is new to a target that holds an older prefix."""

    def run(cache: Any) -> Tensor:
        ids = case.read_again()
        return read_in_pieces(case.pair.target, ids[len(ids) - case.new :], chunk, cache).logits[-1]

    return Arm(run, lambda: fork(case.older))


def translate_cold(case: Case, _: int | None) -> Arm:
    """Translate with maps that are still on disk."""
    return Arm(lambda _: logits_of(case.hand(case.pair.load_maps(), case.source_state)))


def translate_warm(case: Case, _: int | None) -> Arm:
    """Translate with maps and the source's cache in memory."""
    return Arm(lambda _: logits_of(case.hand(case.pair.translator, case.source_state)))


def translate_ahead(case: Case, _: int | None) -> Arm:
    """Go on from what was translated while nobody asked for it; the tail is left to read."""
    return Arm(lambda _: logits_of(case.hand(case.pair.translator, case.source_state, target_state=case.ahead)))


def source_and_translate(case: Case, _: int | None) -> Arm:
    """Let the source read first: what a first contact costs."""
    return Arm(lambda _: logits_of(case.hand(case.pair.translator, None)))


def decode_step(case: Case, _: int | None) -> Arm:
    """Read one token after everything before it: no way to a first token is shorter."""

    def run(cache: Any) -> Tensor:
        return prefill(case.pair.target, case.ids[-1:], cache=cache).logits[-1]

    return Arm(run, lambda: fork(case.nearly))


def logits_of(handed: HandOff) -> Tensor:
    """Return a hand-over's logits; with a tail there are some."""
    assert handed.logits is not None
    return handed.logits


# A new way is a function here and a line in this table; `Forecast.arms` says what it should cost.
ARMS: dict[str, Callable[[Case, int | None], Arm]] = {
    "reprefill": reprefill,
    "reprefill_delta": reprefill_delta,
    "translate_cold": translate_cold,
    "translate_warm": translate_warm,
    "translate_ahead": translate_ahead,
    "source_and_translate": source_and_translate,
    "decode_step": decode_step,
}
# What reads a whole conversation: beyond the longest one that is read here it is predicted.
READS_ALL = frozenset({"reprefill", "source_and_translate"})


def apply_alone(case: Case) -> Callable[[], Any]:
    """Return the apply with nothing around it: from the source's cache to the target's; sinks are read before, the tail is not.

    One pass over every translated token: gather, un-rotate, map, rotate, write.
    """
    source, target, state = case.pair.source, case.pair.target, case.source_state
    reading = case.reading or read_conversation(case.conversation, target, add_generation_prompt=True)
    alignment = align(state.reading, reading)
    first = plan_handoff(alignment.tolist(), sink=case.dial.sink, tail=case.dial.tail).translated[0]
    held = None
    if first:
        sinks = first_tokens(reading, first)
        held = state_of(sinks, read_whole(target, sinks))
    plan = plan_handoff(
        alignment.tolist(), sink=case.dial.sink, tail=case.dial.tail, native=common_prefix(held, reading)
    )

    def run() -> Any:
        return carry_out(plan, source, target, case.pair.translator, state, held, alignment, case.ids)

    return run
