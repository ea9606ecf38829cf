"""Arithmetic of a hand-over against a re-prefill, beside counting one by one."""

from dataclasses import replace

import pytest

from kvlingo.cost import SHORT_PASS_TOKENS, TargetCost, break_even_tokens, handoff_flops, pairs, pass_flops

TARGET = TargetCost(layer_weights=1_000_000, query_widths=(64, 64), windows=(None, 100))


@pytest.mark.parametrize("window", [None, 1, 7, 50, 1000])
@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 8, 60])
def test_pairs_counts_what_each_query_sees(tokens: int, window: int | None) -> None:
    seen = sum(1 for q in range(tokens) for k in range(q + 1) if window is None or q - k < window)
    assert pairs(tokens, window) == seen


def test_a_pass_costs_weights_and_attention() -> None:
    attention = 4 * 64 * (200 * 201 // 2) + 4 * 64 * pairs(200, 100)
    assert pass_flops(TARGET, 200) == 2 * 1_000_000 * 200 + attention


def test_reading_in_two_parts_costs_the_same() -> None:
    assert pass_flops(TARGET, 100) + pass_flops(TARGET, 100, after=100) == pass_flops(TARGET, 200)


def test_a_short_pass_is_bound_by_reading_weights() -> None:
    assert pass_flops(TARGET, 1) >= 2 * 1_000_000 * SHORT_PASS_TOKENS


def test_a_sliding_layer_is_translated_inside_its_window_only() -> None:
    only_full = handoff_flops(TARGET, (10_000, 0), 1000)
    both = handoff_flops(TARGET, (10_000, 10_000), 1000)
    assert both - only_full == 2 * 10_000 * 100


def test_break_even_is_the_first_length_that_pays() -> None:
    maps = (100_000, 100_000)
    tokens = break_even_tokens(TARGET, maps)
    assert tokens is not None
    assert handoff_flops(TARGET, maps, tokens) < pass_flops(TARGET, tokens)
    assert handoff_flops(TARGET, maps, tokens - 1) >= pass_flops(TARGET, tokens - 1)


def test_a_longer_tail_breaks_even_later() -> None:
    maps = (100_000, 100_000)
    short, long = (break_even_tokens(TARGET, maps, tail=tail) for tail in (1, 256))
    assert short is not None
    assert long is not None
    assert short < long


def test_maps_larger_than_the_target_never_pay() -> None:
    windowed = replace(TARGET, windows=(100, 100))
    assert break_even_tokens(windowed, (10**12, 10**12)) is None
