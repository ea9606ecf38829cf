"""The arithmetic of hand-overs between machines, and the committed table of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import records, speed_tables
from bench.capacity import PAIRS, of_pair
from kvlingo.cost import (
    TargetCost,
    handoff_flops,
    least_gbit_per_s,
    pass_flops,
    remote_break_even_tokens,
    sent_s,
)

RESULT = json.loads((Path(__file__).parents[1] / "results" / "capacity.json").read_text(encoding="utf-8"))
TARGET, MAPS = TargetCost(1_000_000, [64] * 4, [None] * 4), [5_000] * 4


def test_bytes_take_as_long_as_their_bits() -> None:
    assert sent_s(125_000_000, 1.0) == 1.0
    assert sent_s(125_000_000, 10.0) == pytest.approx(0.1)


@given(
    tokens=st.integers(64, 20_000),
    wire=st.integers(1, 1 << 20),
    flops_per_s=st.floats(1e9, 1e15),
)
def test_the_slowest_link_that_pays_is_where_both_ways_take_as_long(tokens: int, wire: int, flops_per_s: float) -> None:
    link = least_gbit_per_s(TARGET, MAPS, wire, tokens, flops_per_s=flops_per_s)
    assert link is not None

    def difference_s(gbit_per_s: float) -> float:
        handed = handoff_flops(TARGET, MAPS, tokens) / flops_per_s + sent_s(wire * tokens, gbit_per_s)
        return handed - pass_flops(TARGET, tokens) / flops_per_s

    scale = pass_flops(TARGET, tokens) / flops_per_s
    assert abs(difference_s(link)) < 1e-9 * scale
    assert difference_s(1.01 * link) < 0 < difference_s(0.99 * link)


@given(link=st.floats(0.01, 1000), wire=st.integers(1, 1 << 20))
def test_break_even_agrees_with_the_slowest_link(link: float, wire: int) -> None:
    found = remote_break_even_tokens(TARGET, MAPS, wire, flops_per_s=1e12, gbit_per_s=link)
    if found is None or found <= 2:
        return
    least = [least_gbit_per_s(TARGET, MAPS, wire, n, flops_per_s=1e12) for n in (found, found - 1)]
    assert least[0] is not None
    assert least[0] < link
    assert least[1] is None or least[1] >= link


def test_maps_that_cost_more_than_reading_pay_over_no_link() -> None:
    heavy = [2_000_000] * 4
    assert least_gbit_per_s(TARGET, heavy, 1, 64, flops_per_s=1e12) is None
    assert least_gbit_per_s(TARGET, MAPS, 1, 64, flops_per_s=1e12) is not None


def test_the_committed_figures_are_those_of_the_arithmetic() -> None:
    assert RESULT["pairs"][0] == json.loads(json.dumps(of_pair("Qwen3-0.6B", "Qwen3-1.7B")))
    # 28 layers of 8 heads of 128, keys and values, two bytes each.
    assert RESULT["pairs"][0]["wire_bytes_per_token"] == 28 * 2 * 8 * 128 * 2
    assert RESULT["pairs"][0]["reprefill_flops_per_token"] > 2 * 28 * 2048 * (6144 * 3 + 2048)


def test_the_table_has_a_line_for_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    text = speed_tables.capacity()
    assert text.count("\n") == 2 + len(RESULT["pairs"]) * len(RESULT["reading_tflops_per_s"])
    assert len({line.count("|") for line in text.splitlines()}) == 1
    monkeypatch.setattr(records, "load", lambda name: None)
    assert speed_tables.capacity() == "Not computed yet.\n"


def test_all_pairs_are_there() -> None:
    assert [(p["source"], p["target"]) for p in RESULT["pairs"]] == list(PAIRS)
