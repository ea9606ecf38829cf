"""Arithmetic of a hand-over against a re-prefill, before anything runs.

Knows numbers of weights, widths and windows; no models. Counts multiply-adds twice, as FLOPs; takes no bandwidth between
machines into account. A first estimate: `kvlingo demo` and `kvlingo handoff` measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A pass over a few tokens takes as long as one over this many: reading the weights bounds it, not arithmetic.
SHORT_PASS_TOKENS = 16
LONGEST = 1 << 20


@dataclass(frozen=True)
class TargetCost:
    """What one token costs the target.

    Fields:
        layer_weights: weights of all decoder layers.
        query_widths: query features of each layer.
        windows: tokens each layer attends to; None for all.
    """

    layer_weights: int
    query_widths: Sequence[int]
    windows: Sequence[int | None]


def pass_flops(target: TargetCost, tokens: int, *, after: int = 0) -> float:
    """Return the FLOPs of the target reading `tokens` tokens after `after` cached ones.

    2 · weights · tokens + Σ_layers 4 · query width · (query, key) pairs
    """
    counted = max(tokens, SHORT_PASS_TOKENS)
    attention = sum(
        4.0 * width * (pairs(after + tokens, window) - pairs(after, window))
        for width, window in zip(target.query_widths, target.windows, strict=True)
    )
    return 2.0 * target.layer_weights * counted + attention


def pairs(tokens: int, window: int | None) -> int:
    """Return the (query, key) pairs of causal attention over `tokens` tokens, each query seeing at most `window` keys."""
    full = tokens if window is None else min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * full


def handoff_flops(
    target: TargetCost, map_weights: Sequence[int], tokens: int, *, sink: int = 1, tail: int = 1
) -> float:
    """Return the FLOPs of handing `tokens` tokens over: maps for the middle, two short passes for sinks and tail.

    Args:
        map_weights: weights of each layer's map; 0 where a layer has none. A sliding layer's map runs inside its window.
    """
    middle = max(tokens - sink - tail, 0)
    mapped = sum(
        2.0 * weights * max(middle if window is None else min(middle, window), min(SHORT_PASS_TOKENS, middle))
        for weights, window in zip(map_weights, target.windows, strict=True)
    )
    return mapped + pass_flops(target, sink) + pass_flops(target, tail, after=max(tokens - tail, 0))


def break_even_tokens(target: TargetCost, map_weights: Sequence[int], *, sink: int = 1, tail: int = 1) -> int | None:
    """Return the shortest context from which a hand-over costs less than a re-prefill; None if there is none."""

    def pays(tokens: int) -> bool:
        return handoff_flops(target, map_weights, tokens, sink=sink, tail=tail) < pass_flops(target, tokens)

    if not pays(LONGEST):
        return None
    low, high = sink + tail, LONGEST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle + 1, high)
    return low
