"""What happens to each span of the target's tokens at a hand-over, as data.

Knows token counts and an alignment. Needs no model: a plan can be printed, tested and reported before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

from kvlingo.anchors import Range, merged

EARLIER = "the target's own earlier cache"


class SpanKind(StrEnum):
    """Where the keys and values of a span come from."""

    NATIVE = "native"  # already in the target's own earlier cache
    RECOMPUTED = "recomputed"  # read by the target now
    TRANSLATED = "translated"  # made from the source's cache


class Provenance(StrEnum):
    """How far a span's keys and values can be trusted."""

    EXACT = "exact"  # the target's own forward over an exact prefix
    OWN = "own"  # the target's own forward over an approximate prefix
    TRANSLATED = "translated"  # one hop from the source's own cache


@dataclass(frozen=True)
class Span:
    """Target tokens [start, stop)."""

    start: int
    stop: int
    kind: SpanKind
    provenance: Provenance
    reason: str

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class HandoffPlan:
    """All spans in order; together they cover the target's `tokens` exactly once.

    Fields:
        native_layers: the first layers whose cache is exact throughout (layer 0 costs no context: it depends on the token alone).
        fallback: why nothing is translated, or None.
        hops: how often the least trusted span was translated; 0 where all is the target's own reading. Never above 1 by
            default: a translation is not translated again.
    """

    tokens: int
    spans: tuple[Span, ...]
    native_layers: int = 0
    fallback: str | None = None
    hops: int = field(default=0)

    def count(self, kind: SpanKind) -> int:
        """Return the number of tokens of one kind."""
        return sum(len(span) for span in self.spans if span.kind is kind)

    @property
    def translated(self) -> tuple[int, int]:
        """Return the range [start, stop) from the first translated token to the last; empty at the end when there is none.

        Anchors stand inside it (`anchors`); everything else in it is translated.
        """
        spans = [span for span in self.spans if span.kind is SpanKind.TRANSLATED]
        return (spans[0].start, spans[-1].stop) if spans else (self.tokens, self.tokens)

    @property
    def anchors(self) -> tuple[Range, ...]:
        """Return the ranges inside `translated` that the target reads itself, on the translated cache before them."""
        start, stop = self.translated
        return tuple(
            (s.start, s.stop) for s in self.spans if s.kind is SpanKind.RECOMPUTED and start < s.start and s.stop < stop
        )

    @property
    def tail(self) -> int:
        """Return how many tokens the target reads after the translated span."""
        return self.tokens - self.translated[1]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, with the token counts by kind."""
        return {**asdict(self), "counts": {str(kind): self.count(kind) for kind in SpanKind}}

    def __str__(self) -> str:
        parts = [f"{s.kind} {s.start}-{s.stop} ({s.provenance}: {s.reason})" for s in self.spans]
        layers = f"; first {self.native_layers} layers native" if self.native_layers else ""
        return f"{self.tokens} tokens: " + ", ".join(parts) + layers


def plan_handoff(
    alignment: Sequence[int],
    *,
    sink: int = 1,
    tail: int = 1,
    native: int = 0,
    earlier: Sequence[Span] = (),
    native_layers: int = 0,
    no_text: bool = False,
    untrusted: int = 0,
    fitted_tokens: int | None = None,
    anchors: Sequence[Range] = (),
) -> HandoffPlan:
    """Plan the hand-over of `len(alignment)` target tokens.

    Args:
        alignment: source token for each target token, -1 where the source has not read that far.
        sink: first tokens that the target reads itself, at least those aligned to source position 0 (both models' attention
            sinks are a population of their own).
        tail: last tokens that the target reads itself, at least 1 and at least what the source has not read.
        native: tokens that the target's own earlier cache holds.
        earlier: the spans of that cache: they say how far it can be trusted. Without them it counts as exact.
        no_text: the target gets no text: it reads no tail, and no sinks beyond `sink`.
        untrusted: source tokens before this one are themselves translated; a translation of a translation is never made, so
            target tokens aligned to them are native or recomputed.
        fitted_tokens: the longest context that the translator was fitted on, where it is known; beyond it the plan says so.
        anchors: ranges in the middle that the target reads itself; what lies outside the middle is read or held anyway.
    """
    tokens = len(alignment)
    unread = sum(1 for source in alignment if source < 0)
    at_start = next((i for i, source in enumerate(alignment) if source > 0 or source < 0), tokens)
    head = sink if no_text else max(sink, at_start)
    twice = 1 + max((i for i, s in enumerate(alignment) if 0 <= s < untrusted), default=-1)
    head = min(max(head, native, twice), tokens)
    least_tail = 0 if no_text else 1
    stop = tokens - max(tail if not no_text else 0, unread, least_tail)
    if stop <= head:
        reason = f"no tokens lie between {head} first and {tokens - stop} last ones"
        return _all_recomputed(tokens, native, reason, earlier)
    held = native_spans(native, earlier)
    spans = [
        *held,
        Span(native, head, SpanKind.RECOMPUTED, _own_after(held), _why_recomputed(native, twice)),
        Span(head, stop, SpanKind.TRANSLATED, Provenance.TRANSLATED, _why_translated(stop, fitted_tokens)),
        Span(stop, tokens, SpanKind.RECOMPUTED, Provenance.OWN, "tail"),
    ]
    return with_anchors(_plan(tokens, spans, native_layers, None), anchors)


def with_anchors(plan: HandoffPlan, anchors: Sequence[Range], reason: str = "anchor") -> HandoffPlan:
    """Return a plan in which the target also reads these ranges, as far as they are translated; `reason` says why.

    What touches the first tokens is read with them, hence exact where they are; what touches the tail is read with the tail.
    Where nothing is left to translate, it is a re-prefill.
    """
    spans: list[Span] = []
    for span in plan.spans:
        if span.kind is not SpanKind.TRANSLATED:
            spans.append(span)
            continue
        place = span.start
        for start, stop in merged((max(a, span.start), min(b, span.stop)) for a, b in anchors):
            if place < start:
                spans.append(Span(place, start, span.kind, span.provenance, span.reason))
            spans.append(Span(start, stop, SpanKind.RECOMPUTED, _own_after(spans), reason))
            place = stop
        if place < span.stop:
            spans.append(Span(place, span.stop, span.kind, span.provenance, span.reason))
    if plan.fallback is None and all(s.kind is not SpanKind.TRANSLATED for s in spans):
        held = [s for s in spans if s.kind is SpanKind.NATIVE]
        native = sum(map(len, held))
        return _all_recomputed(plan.tokens, native, "anchors cover everything between first and last tokens", held)
    return _plan(plan.tokens, spans, plan.native_layers, plan.fallback)


def native_spans(native: int, earlier: Sequence[Span] = ()) -> list[Span]:
    """Return the first `native` tokens of an earlier cache, each with the provenance that it has there."""
    if not earlier:
        return [Span(0, native, SpanKind.NATIVE, Provenance.EXACT, EARLIER)]
    kept = [s for s in earlier if s.start < native]
    runs = [list(run) for _, run in groupby(kept, key=lambda s: s.provenance)]
    return [Span(run[0].start, min(run[-1].stop, native), SpanKind.NATIVE, run[0].provenance, EARLIER) for run in runs]


def _own_after(held: Sequence[Span]) -> Provenance:
    """Return what the target's own reading is worth after these spans."""
    exact = all(s.provenance is Provenance.EXACT for s in held if len(s))
    return Provenance.EXACT if exact else Provenance.OWN


def _plan(tokens: int, spans: Sequence[Span], native_layers: int, fallback: str | None) -> HandoffPlan:
    kept = tuple(s for s in spans if len(s))
    hops = int(any(s.provenance is Provenance.TRANSLATED for s in kept))
    return HandoffPlan(tokens, kept, native_layers, fallback, hops)


def _why_translated(stop: int, fitted_tokens: int | None) -> str:
    if fitted_tokens is None or stop <= fitted_tokens:
        return "from the source's cache"
    return f"from the source's cache, {stop} tokens into it: fitted on contexts of up to {fitted_tokens}"


def _why_recomputed(native: int, twice: int) -> str:
    if twice > native:
        return "the source holds only a translation of these"
    return "attention sinks of both models"


def reprefill_plan(tokens: int, reason: str, *, native: int = 0, earlier: Sequence[Span] = ()) -> HandoffPlan:
    """Plan a plain re-prefill after what the target holds (`earlier`: its spans); `reason` is what the user sees."""
    return _all_recomputed(tokens, native, reason, earlier)


def _all_recomputed(tokens: int, native: int, reason: str, earlier: Sequence[Span]) -> HandoffPlan:
    # One token is always left for the target to read: its logits are what generation starts from.
    native = max(0, min(native, tokens - 1))
    held = native_spans(native, earlier)
    spans = [*held, Span(native, tokens, SpanKind.RECOMPUTED, _own_after(held), "re-prefill")]
    return _plan(tokens, spans, 0, reason)
