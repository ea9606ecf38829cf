"""Plans are data: laws over random alignments, and a few worked out by hand."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlingo.plan import HandoffPlan, Provenance, Span, SpanKind, plan_handoff, reprefill_plan

N, R, T = SpanKind.NATIVE, SpanKind.RECOMPUTED, SpanKind.TRANSLATED


def spans(plan: HandoffPlan) -> list[tuple[SpanKind, int, int]]:
    return [(s.kind, s.start, s.stop) for s in plan.spans]


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_sinks_first_tail_last() -> None:
    plan = plan_handoff(range(10), sink=2, tail=3)
    assert spans(plan) == [(R, 0, 2), (T, 2, 7), (R, 7, 10)]
    assert [s.provenance for s in plan.spans] == [Provenance.EXACT, Provenance.TRANSLATED, Provenance.OWN]
    assert plan.translated == (2, 7)
    assert plan.tail == 3
    assert plan.count(T) == 5
    assert plan.hops == 1
    assert plan.fallback is None


def test_tokens_fed_by_the_source_s_first_position_are_sinks() -> None:
    plan = plan_handoff([0, 0, 0, 1, 2, 3], sink=1)
    assert spans(plan) == [(R, 0, 3), (T, 3, 5), (R, 5, 6)]


def test_what_the_source_has_not_read_is_the_tail() -> None:
    plan = plan_handoff([0, 1, 2, 3, -1, -1], tail=1)
    assert spans(plan) == [(R, 0, 1), (T, 1, 4), (R, 4, 6)]


def test_at_least_one_token_is_left_to_read() -> None:
    assert plan_handoff(range(10), tail=0).tail == 1


def test_the_target_s_own_cache_stays() -> None:
    plan = plan_handoff(range(10), native=6, tail=2)
    assert spans(plan) == [(N, 0, 6), (T, 6, 8), (R, 8, 10)]


def test_few_native_tokens_do_not_replace_the_sinks() -> None:
    plan = plan_handoff([0, 0, 0, 1, 2, 3], native=1)
    assert spans(plan) == [(N, 0, 1), (R, 1, 3), (T, 3, 5), (R, 5, 6)]


def test_what_the_earlier_cache_holds_keeps_its_provenance() -> None:
    exact, own, translated = Provenance.EXACT, Provenance.OWN, Provenance.TRANSLATED
    earlier = (*plan_handoff(range(6), sink=2).spans, Span(6, 9, R, own, "generated"))
    plan = plan_handoff(range(12), native=8, earlier=earlier, untrusted=5)
    assert spans(plan) == [(N, 0, 2), (N, 2, 5), (N, 5, 8), (T, 8, 11), (R, 11, 12)]
    assert [s.provenance for s in plan.spans] == [exact, translated, own, translated, own]
    assert plan.hops == 1
    # Recomputed after an approximate prefix is no longer exact; after an exact one it is.
    between = plan_handoff(range(12), sink=6, native=4, earlier=earlier)
    assert [s.provenance for s in between.spans] == [exact, translated, own, translated, own]
    assert plan_handoff(range(12), sink=6, native=2, earlier=earlier).spans[1].provenance is exact
    again = plan_handoff(range(9), tail=9, native=8, earlier=earlier)
    assert again.fallback is not None
    assert again.hops == 1
    assert again.spans[-1].provenance is own


def test_beyond_the_fitting_length_the_plan_says_so() -> None:
    assert plan_handoff(range(10), fitted_tokens=9).spans[1].reason == "from the source's cache"
    assert "9 tokens into it: fitted on contexts of up to 8" in str(plan_handoff(range(10), fitted_tokens=8))


def test_a_translation_is_never_translated() -> None:
    plan = plan_handoff(range(10), untrusted=4)
    assert spans(plan) == [(R, 0, 4), (T, 4, 9), (R, 9, 10)]
    assert "translation" in plan.spans[0].reason
    held = plan_handoff(range(10), untrusted=4, native=5)
    assert spans(held) == [(N, 0, 5), (T, 5, 9), (R, 9, 10)]


def test_without_text_everything_after_the_sink_is_translated() -> None:
    plan = plan_handoff(range(10), sink=1, tail=4, no_text=True)
    assert spans(plan) == [(R, 0, 1), (T, 1, 10)]
    assert plan.tail == 0


@pytest.mark.parametrize("alignment", [[0], [0, 1], [0, 0, 0], [-1, -1, -1], [0, -1, -1]])
def test_too_short_is_read_by_the_target(alignment: list[int]) -> None:
    plan = plan_handoff(alignment)
    assert plan.fallback
    assert spans(plan) == [(R, 0, len(alignment))]
    assert plan.translated == (len(alignment), len(alignment))


def test_reprefill_says_why_and_leaves_a_token() -> None:
    plan = reprefill_plan(5, "because", native=9)
    assert plan.fallback == "because"
    assert spans(plan) == [(N, 0, 4), (R, 4, 5)]
    assert plan.hops == 0


def test_a_plan_prints_and_serialises() -> None:
    plan = plan_handoff(range(10), sink=2, tail=3, native_layers=2)
    assert str(plan).startswith("10 tokens: recomputed 0-2 (exact: ")
    assert "first 2 layers native" in str(plan)
    data = json.loads(json.dumps(plan.to_json()))
    assert data["counts"] == {"native": 0, "recomputed": 5, "translated": 5}
    assert data["spans"][1]["kind"] == "translated"


# --- laws ------------------------------------------------------------------------------------------------------------


@st.composite
def alignments(draw: st.DrawFn) -> list[int]:
    """Draw a monotone alignment from source position 0 on, maybe with unread tokens at its end."""
    steps = draw(st.lists(st.integers(0, 3), min_size=0, max_size=40))
    found = [0]
    for step in steps:
        found.append(found[-1] + step)
    return found + [-1] * draw(st.integers(0, 5))


@given(
    alignments(),
    st.integers(0, 6),
    st.integers(0, 12),
    st.integers(0, 30),
    st.booleans(),
    st.integers(0, 40),
    st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_plan_laws(
    alignment: list[int], sink: int, tail: int, native: int, no_text: bool, untrusted: int, native_layers: int
) -> None:
    plan = plan_handoff(
        alignment,
        sink=sink,
        tail=tail,
        native=native,
        no_text=no_text,
        untrusted=untrusted,
        native_layers=native_layers,
    )
    tokens = len(alignment)
    partition(plan, tokens)
    start, stop = plan.translated
    assert 0 <= start <= stop <= tokens
    if plan.fallback is None:
        within(plan, alignment, sink, tail, native, no_text, untrusted)
    else:
        assert plan.count(T) == 0
        assert plan.count(R) >= 1


def partition(plan: HandoffPlan, tokens: int) -> None:
    """The spans are in order, not empty, and cover every token once."""
    assert plan.tokens == tokens
    edges = [edge for span in plan.spans for edge in (span.start, span.stop)]
    assert edges[0] == 0
    assert edges[-1] == tokens
    assert all(x.stop == y.start for x, y in pairwise(plan.spans))
    assert all(len(span) > 0 for span in plan.spans)
    assert sum(plan.count(kind) for kind in SpanKind) == tokens


def within(
    plan: HandoffPlan, alignment: list[int], sink: int, tail: int, native: int, no_text: bool, untrusted: int
) -> None:
    """What is translated may be: read by the source itself, no sink, not held already, before the tail."""
    start, stop = plan.translated
    assert start < stop
    assert all(source >= max(untrusted, 0) for source in alignment[start:stop])
    assert start >= max(sink, min(native, len(alignment)))
    assert plan.count(N) == min(native, start)
    if no_text:
        assert plan.tail == sum(1 for source in alignment if source < 0)
    else:
        assert plan.tail >= max(1, tail)
        assert all(source > 0 for source in alignment[start:stop])


def test_span_length() -> None:
    assert len(Span(3, 8, T, Provenance.TRANSLATED, "x")) == 5
