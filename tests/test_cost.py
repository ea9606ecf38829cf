"""Arithmetic of a hand-over against a re-prefill, beside counting one by one."""

from dataclasses import replace

import pytest

from kvlingo.cost import (
    PIECE_TOKENS,
    SHORT_PASS_TOKENS,
    HandoffCost,
    MapRates,
    Rates,
    ReadingRates,
    TargetCost,
    attention_flops,
    break_even_s,
    break_even_tokens,
    compared,
    handoff_flops,
    handoff_s,
    laid_out_bytes,
    moved_bytes,
    pairs,
    pass_bytes,
    pass_flops,
    pass_s,
)

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


# --- seconds ---------------------------------------------------------------------------------------------------------

KNOWN = replace(TARGET, active_weights=600_000, head_weights=50_000, cache_widths=(32, 32), bytes_per_value=2)
READING = ReadingRates(s_per_flop=1e-11, s_per_attention_flop=3e-11, s_per_byte=2e-10, s_per_layer=1e-5)
RATES = Rates(READING, MapRates(s_per_flop=1e-11, s_per_byte=4e-10, s_per_handoff=1e-4))
HANDOFF = HandoffCost(map_weights=(10_000, 10_000), source_features=40)
LENGTHS = (2, 3, 8, 16, 17, 64, 100, 101, 500, 4000, 32_000)


def test_only_what_a_token_passes_through_is_counted() -> None:
    assert pass_flops(KNOWN, 200) == 2 * 600_000 * 200 + attention_flops(TARGET, 200)
    assert pass_bytes(KNOWN, 1) == 2 * (600_000 + 50_000 + 2 * 32)
    assert pass_bytes(KNOWN, 10) == 2 * (1_000_000 + 50_000 + 2 * 32 * 10)  # ten tokens ask for every expert
    assert pass_bytes(KNOWN, 10, after=190) == 2 * (1_000_000 + 50_000 + 32 * 200 + 32 * 100)


def test_seconds_are_calls_products_attention_and_head() -> None:
    products, attention = 2 * 600_000 * 500 * 1e-11, 4 * 64 * (500 * 501 // 2 + 500 * 500) * 3e-11
    assert pass_s(KNOWN, READING, 500) == pytest.approx(2e-5 + products + attention + 2 * 50_000 * 2e-10)
    assert pass_s(KNOWN, READING, 500, logits=False) == pytest.approx(2e-5 + products + attention)
    weights = 2 * 600_000 * 2e-10  # one token: reading its weights takes longer than multiplying
    assert pass_s(KNOWN, READING, 1, logits=False) == pytest.approx(2e-5 + weights, rel=1e-3)
    assert pass_s(KNOWN, READING, 0) == 0
    assert pass_s(KNOWN, replace(READING, s_per_pass=1.0), 500) == pytest.approx(1.0 + pass_s(KNOWN, READING, 500))
    apart = replace(READING, s_per_weight_byte=1e-10)  # weights are read, and then multiplied
    assert pass_s(KNOWN, apart, 500) - pass_s(KNOWN, READING, 500) == pytest.approx(2 * 1_000_000 * 1e-10)
    assert pass_s(KNOWN, apart, 1) == pytest.approx(pass_s(KNOWN, READING, 1))
    laid_out = [laid_out_bytes(KNOWN, n) for n in (1, 16, 500, PIECE_TOKENS + 1)]
    assert laid_out == [0, 2 * 1_000_000, 2 * 1_000_000, 2 * 1_000_000]


def test_a_long_text_costs_the_calls_of_every_piece() -> None:
    slow = replace(READING, s_per_pass=1.0)
    assert [round(pass_s(KNOWN, slow, n)) for n in (1, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS)] == [
        1,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("window", [None, 1, 100, 1024, 1025, 5000])
@pytest.mark.parametrize("tokens", [0, 1, 1023, 1024, 1025, 4096, 7000])
@pytest.mark.parametrize("after", [0, 1, 50, 1500])
def test_attention_works_through_all_keys_that_a_piece_finds(tokens: int, window: int | None, after: int) -> None:
    """Against piece by piece: what is masked is worked through as well, but for a first piece that nothing has slid out of."""
    expected, place = 0, after
    while place < after + tokens:
        piece = min(PIECE_TOKENS, after + tokens - place)
        is_triangle = place == 0 and (window is None or piece <= window)
        keys = (place if window is None else min(place, window - 1)) + piece
        expected += piece * (piece + 1) // 2 if is_triangle else piece * keys
        place += piece
    assert compared(tokens, window, after=after) == expected
    assert compared(tokens, window, after=after) >= pairs(after + tokens, window) - pairs(after, window)


@pytest.mark.parametrize("cost", [KNOWN, TARGET], ids=["all known", "little known"])
def test_predictions_grow_with_tokens(cost: TargetCost) -> None:
    for predict in (
        lambda n: pass_s(cost, READING, n),
        lambda n: pass_s(cost, READING, 1, after=n),
        lambda n: handoff_s(cost, HANDOFF, RATES, n),
        lambda n: pass_bytes(cost, n),
        lambda n: moved_bytes(cost, HANDOFF, n),
    ):
        values = [predict(n) for n in LENGTHS]
        assert values == sorted(values)
        assert len(set(values)) == len(LENGTHS) or cost is TARGET


@pytest.mark.parametrize("name", ["s_per_flop", "s_per_byte", "s_per_handoff"])
def test_predictions_grow_with_what_the_machine_takes(name: str) -> None:
    slower = replace(RATES, maps=replace(RATES.maps, **{name: 2 * getattr(RATES.maps, name)}))
    assert handoff_s(KNOWN, HANDOFF, slower, 1000) > handoff_s(KNOWN, HANDOFF, RATES, 1000)


@pytest.mark.parametrize("name", ["s_per_flop", "s_per_attention_flop", "s_per_layer"])
def test_reading_takes_longer_on_a_slower_machine(name: str) -> None:
    slower = replace(READING, **{name: 2 * getattr(READING, name)})
    assert pass_s(KNOWN, slower, 1000) > pass_s(KNOWN, READING, 1000)


def test_break_even_in_seconds_is_the_first_length_that_pays() -> None:
    tokens = break_even_s(KNOWN, HANDOFF, RATES)
    assert tokens is not None
    assert handoff_s(KNOWN, HANDOFF, RATES, tokens) < pass_s(KNOWN, READING, tokens)
    assert handoff_s(KNOWN, HANDOFF, RATES, tokens - 1) >= pass_s(KNOWN, READING, tokens - 1)
    dearer = replace(RATES, maps=replace(RATES.maps, s_per_handoff=1e-2))
    later = break_even_s(KNOWN, HANDOFF, dearer)
    assert later is not None
    assert later > tokens
    assert break_even_s(KNOWN, HANDOFF, replace(RATES, maps=MapRates(1.0, 1.0, 1.0))) is None
