"""Hand a conversation over: plan, carry out, let the target read what is left, look whether it can be trusted.

Knows models, plans and translators. Does not know how maps are made, nor who serves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvlingo.anchors import Anchors
from kvlingo.confidence import Confidence
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.execution import (
    carry_out_in_parts,
)
from kvlingo.language_model import (
    LanguageModel,
    prefill,
    prefill_in_parts,
)
from kvlingo.open_cache import OpenCache
from kvlingo.plan import HandoffPlan, Span, SpanKind, plan_handoff, reprefill_plan, with_anchors
from kvlingo.reading import Reading
from kvlingo.recompute import read_both_ends
from kvlingo.signs import Seen, signs_of
from kvlingo.states import (
    Conversation,
    ModelState,
    common_prefix,
    feed,
    read_conversation,
    read_native,
    read_native_batch,
)
from kvlingo.steps import Steps, finished
from kvlingo.translator import Translator, check_geometry


@dataclass(frozen=True)
class HandOff:
    """A target that can go on.

    Fields:
        state: the target's reading and cache; the cache holds every token of the reading.
        logits: [vocabulary] of the next token; None when the target has read nothing yet (`no_text`).
        timings_ms: source_prefill (0 when the source had read before), translate, tail.
        signs: what was seen of how good it is (`signs`), where that was asked for and something was translated.
        doubt: the probability that it was bad, by these signs; a bad one is a re-prefill by now.
    """

    state: ModelState
    plan: HandoffPlan
    logits: Tensor | None
    timings_ms: dict[str, float]
    signs: dict[str, float | None] | None = None
    doubt: float | None = None


def hand_off_batch(
    conversations: Sequence[Conversation],
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    *,
    source_states: Sequence[ModelState] | None = None,
    target_states: Sequence[ModelState | None] | None = None,
    **dial: Any,
) -> list[HandOff]:
    """Hand several conversations over; go on from all of them at once with `generation.generate_batch`.

    Without `source_states` the source reads them in one batch. Translating and the short passes over sinks and tail run row by
    row: their lengths differ, and a map's cost grows with the tokens alone. `dial` (sink, tail, native_layers, no_text) is the
    same for every row.
    """
    source_states = source_states or read_native_batch(conversations, source)
    target_states = target_states or [None] * len(conversations)
    return [
        hand_off(conversation, source, target, translator, source_state=mine, target_state=earlier, **dial)
        for conversation, mine, earlier in zip(conversations, source_states, target_states, strict=True)
    ]


@torch.no_grad()
def hand_off(
    conversation: Conversation,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    *,
    sink: int = 1,
    tail: int = 1,
    native_layers: int = 0,
    source_state: ModelState | None = None,
    target_state: ModelState | None = None,
    reading: Reading | None = None,
    no_text: bool = False,
    distrust: str | None = None,
    anchors: Anchors | None = None,
    confidence: Confidence | None = None,
    watched: bool = False,
) -> HandOff:
    """Hand a conversation over to the target without re-prefill.

    Args:
        sink, tail, native_layers: the quality-latency dial: first and last tokens, and first layers, that the target computes
            itself. At least one token is always left for it to read.
        source_state: what the source holds (with its answers); without it the source reads the conversation first.
        target_state: what the target holds from an earlier turn; the common prefix stays native, with the provenance that it
            has there: what was translated once for this target is not made again.
        reading: the conversation as the target reads it, where the caller has rendered it (with tool definitions, say).
        no_text: the target sees no text: every token after the constant sinks is translated, and it starts at the next new
            token. Needs a translator fitted without text. Not anonymous: a cache can be read back.
        distrust: why this translator is not to be used (a failed report, say): the target re-prefills, with this as the reason.
        anchors: tokens in the middle that the target reads too, evenly or where the translation is least trusted.
        confidence: judges the hand-over once the tail is read, and needs the tail that it was fitted with; what it takes for a
            bad one becomes a re-prefill.
        watched: look at the signs of a bad hand-over even without `confidence`.

    A hand-over that can't be made exactly as planned becomes a re-prefill; `plan.fallback` says why. With `no_text` it raises
    `UnsupportedCache` instead: a re-prefill would read the text.
    """
    return finished(
        hand_off_in_parts(
            conversation,
            source,
            target,
            translator,
            most=None,
            sink=sink,
            tail=tail,
            native_layers=native_layers,
            source_state=source_state,
            target_state=target_state,
            reading=reading,
            no_text=no_text,
            distrust=distrust,
            anchors=anchors,
            confidence=confidence,
            watched=watched,
        )
    )


def hand_off_in_parts(
    conversation: Conversation,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    *,
    most: int | None,
    sink: int = 1,
    tail: int = 1,
    native_layers: int = 0,
    source_state: ModelState | None = None,
    target_state: ModelState | None = None,
    reading: Reading | None = None,
    no_text: bool = False,
    distrust: str | None = None,
    anchors: Anchors | None = None,
    confidence: Confidence | None = None,
    watched: bool = False,
    reads_again: bool = True,
) -> Steps[HandOff]:
    """Do what `hand_off` does, reading or translating at most `most` tokens a step; None: all at once.

    Without `reads_again` a hand-over that falls back ends there, without a cache: for who reads the text by other means.
    Whoever takes the steps sees that no gradients are made. Nothing that was given changes, also where it is left in the middle.
    """
    _refuse_dial(source, target, translator, no_text=no_text, anchors=anchors)
    started = time.perf_counter()
    if source_state is None:
        source_state = read_native(conversation, source)
    source_read = time.perf_counter()
    if reading is None:
        reading = read_conversation(conversation, target, add_generation_prompt=True)
    alignment = feed(conversation, source_state, reading, int(source_state.cache.get_seq_length()))
    crossing = _Crossing(source, target, translator, source_state, target_state, reading, alignment, anchors)
    plan = crossing.plan(
        sink=sink,
        tail=tail if confidence is None else max(tail, confidence.tail),
        native_layers=native_layers,
        no_text=no_text,
    )
    if distrust is not None:
        plan = crossing.reprefill(distrust)
    if no_text:
        refuse_to_read(plan, sink)
    plan, cache = yield from crossing.carry_out(plan, most, leave_open=not no_text)
    if no_text:
        refuse_to_read(plan, sink)
    if plan.fallback is not None and not reads_again:
        return HandOff(ModelState(reading, None, plan.spans), plan, None, {})
    if plan.fallback is not None and cache is None and crossing.native:  # what the target holds itself is still good
        plan, cache = yield from crossing.carry_out(crossing.reprefill(plan.fallback), most)
    translated = time.perf_counter()
    is_watched = (watched or confidence is not None) and plan.fallback is None and not no_text
    cache, logits = yield from _read_rest(target, crossing.ids, cache, plan.tail if is_watched else 1, most)
    signs = crossing.signs(plan, cache, logits) if is_watched and logits is not None else None
    doubt = None if signs is None or confidence is None else confidence.doubt(signs)
    if confidence is not None and doubt is not None and doubt > confidence.threshold:
        plan = crossing.reprefill(confidence.reason(doubt))
        if not reads_again:
            return HandOff(ModelState(reading, None, plan.spans), plan, None, {}, signs, doubt)
        plan, cache = yield from crossing.carry_out(plan, most)
        cache, logits = yield from _read_rest(target, crossing.ids, cache, 1, most)
    ended = time.perf_counter()
    timings = {
        "source_prefill": 1e3 * (source_read - started),
        "translate": 1e3 * (translated - source_read),
        "tail": 1e3 * (ended - translated),
    }
    last = None if logits is None else logits[-1]
    return HandOff(ModelState(reading, cache, plan.spans, no_text), plan, last, timings, signs, doubt)


def _refuse_dial(
    source: LanguageModel, target: LanguageModel, translator: Translator, *, no_text: bool, anchors: Anchors | None
) -> None:
    """Raise where these models, this translator and this dial can't go together."""
    if target.target_refusal is None:
        check_geometry(translator.config, source.geometry, target.geometry)
    if no_text and translator.config.reads_text:
        raise BadInput("this translator reads the text; fit one with --no-text to hand over a cache alone")
    if no_text and anchors is not None:
        raise BadInput("anchors are text that the target reads, and it gets none; leave out one of the two")


@dataclass(frozen=True)
class _Crossing:
    """One conversation on its way from source to target: what `hand_off` plans, and plans anew where it is not trusted."""

    source: LanguageModel
    target: LanguageModel
    translator: Translator
    source_state: ModelState
    target_state: ModelState | None
    reading: Reading
    alignment: Tensor
    anchors: Anchors | None

    @cached_property
    def ids(self) -> Tensor:
        return self.target.ids(self.reading.ids)

    @cached_property
    def native(self) -> int:
        return common_prefix(self.target_state, self.reading)

    @property
    def earlier(self) -> tuple[Span, ...]:
        return self.target_state.spans if self.target_state is not None else ()

    def plan(self, *, sink: int, tail: int, native_layers: int, no_text: bool) -> HandoffPlan:
        plan = plan_handoff(
            self.alignment.tolist(),
            sink=sink,
            tail=tail,
            native=self.native,
            earlier=self.earlier,
            native_layers=native_layers,
            no_text=no_text,
            untrusted=self.source_state.translated_until,
            fitted_tokens=self.translator.config.fitted_tokens,
        )
        if self.anchors is None or self.anchors.needs_scores:
            return plan
        return with_anchors(plan, self.anchors.pick(*plan.translated), f"anchor: {self.anchors.by}")

    def reprefill(self, reason: str) -> HandoffPlan:
        return reprefill_plan(len(self.reading), reason, native=self.native, earlier=self.earlier)

    def carry_out(
        self, plan: HandoffPlan, most: int | None, *, leave_open: bool = False
    ) -> Steps[tuple[HandoffPlan, Any]]:
        return carry_out_in_parts(
            plan,
            self.source,
            self.target,
            self.translator,
            self.source_state,
            self.target_state,
            self.alignment,
            self.ids,
            most=most,
            opening=self.reading.opening,
            anchors=self.anchors if plan.fallback is None else None,
            leave_open=leave_open,
        )

    def signs(self, plan: HandoffPlan, cache: Any, logits: Tensor) -> dict[str, float | None]:
        seen = Seen(
            self.source,
            self.target,
            self.translator,
            self.source_state.reading,
            self.source_state.cache,
            self.reading,
            self.alignment,
            plan,
            cache,
            logits,
        )
        return signs_of(seen, untrusted=self.source_state.translated_until)


def _read_rest(
    target: LanguageModel, ids: Tensor, cache: Any, rows: int, most: int | None
) -> Steps[tuple[Any, Tensor | None]]:
    """Let the target read what its cache lacks of `ids`; return the logits [rows, vocabulary] of the last `rows` tokens."""
    if isinstance(cache, OpenCache):
        return read_left(target, ids, cache, rows)
    rest = ids[cache.get_seq_length() if cache is not None else 0 :]
    if not len(rest):
        return cache, None
    if most is not None and len(rest) >= most:
        yield None
    done = yield from prefill_in_parts(
        target, rest, most=most, cache=cache, full_length=True, logits_to_keep=min(rows, len(rest))
    )
    return done.cache, done.logits


def read_left(target: LanguageModel, ids: Tensor, opened: OpenCache, rows: int) -> tuple[Any, Tensor]:
    """Let the target read what is left of a conversation in one pass; return its cache and the last `rows` tokens' logits."""
    if opened.reads_first:
        logits = read_both_ends(target, opened, ids, rows)
    else:
        with opened.being_read() as cache:
            logits = prefill(target, ids[opened.stop :], cache=cache, logits_to_keep=rows).logits
    return opened.cache, logits


def refuse_to_read(plan: HandoffPlan, sink: int) -> None:
    """Raise `UnsupportedCache` where a plan lets the target read text that the source has read, beyond the sinks."""
    start, _ = plan.translated
    read_again = [s for s in plan.spans if s.kind is SpanKind.RECOMPUTED and s.stop <= start]
    if plan.fallback or sum(map(len, read_again)) > sink:
        reason = plan.fallback or read_again[-1].reason
        raise UnsupportedCache(f"this can't be handed over without its text ({reason}); hand it over with its text")
