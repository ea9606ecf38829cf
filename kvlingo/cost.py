"""Arithmetic of a hand-over against a re-prefill, before anything runs.

Knows numbers of weights, widths and windows, and plans; no models. Counts multiply-adds twice, as FLOPs. In FLOPs a first
estimate; in seconds with rates that were measured on a machine (`calibration`); between two machines with a link's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlingo.plan import HandoffPlan, SpanKind

# A pass over a few tokens takes as long as one over this many: reading the weights bounds it, not arithmetic.
SHORT_PASS_TOKENS = 16
# A long text is read in pieces of so many tokens: what slides is then compared with little more than its window.
PIECE_TOKENS = 1024
LONGEST = 1 << 20


@dataclass(frozen=True)
class TargetCost:
    """What one token costs the target.

    Fields:
        layer_weights: weights of all decoder layers.
        query_widths: query features of each layer.
        windows: tokens each layer attends to; None for all.
        active_weights: those of `layer_weights` that one token passes through, where there are experts; None for all.
        head_weights: of the output head, which reads one token a pass.
        cache_widths: key and value features of each layer; what only seconds and bytes need may be left out.
        bytes_per_value: of weights and caches.
    """

    layer_weights: int
    query_widths: Sequence[int]
    windows: Sequence[int | None]
    active_weights: int | None = None
    head_weights: int = 0
    cache_widths: Sequence[int] = ()
    bytes_per_value: int = 4

    @property
    def token_weights(self) -> int:
        """Return the weights of the decoder layers that one token passes through."""
        return self.layer_weights if self.active_weights is None else self.active_weights


def pass_flops(target: TargetCost, tokens: int, *, after: int = 0) -> float:
    """Return the FLOPs of the target reading `tokens` tokens after `after` cached ones, a short pass counted as it lasts.

    2 · weights of a token · tokens + Σ_layers 4 · query width · (query, key) pairs
    """
    return 2.0 * target.token_weights * max(tokens, SHORT_PASS_TOKENS) + attention_flops(target, tokens, after=after)


def attention_flops(target: TargetCost, tokens: int, *, after: int = 0) -> float:
    """Return the FLOPs of attention alone: Σ_layers 4 · query width · (query, key) pairs."""
    return sum(
        4.0 * width * (pairs(after + tokens, window) - pairs(after, window))
        for width, window in zip(target.query_widths, target.windows, strict=True)
    )


def compared(tokens: int, window: int | None, *, after: int = 0) -> int:
    """Return the (query, key) pairs that attention works through when `tokens` tokens are read in pieces after `after` others.

    More than `pairs` counts: every query of a piece is compared with every key that the layer then holds, `window` - 1 and the
    piece itself, and what it may not see is masked. Only a first piece that fits a window is worked through as a triangle.
    """
    held = LONGEST if window is None else window - 1
    total = 0
    if not after and tokens:
        first = min(tokens, PIECE_TOKENS)
        total = first * (first + 1) // 2 if window is None or first <= window else first * first
        tokens, after = tokens - first, first
    whole, rest = divmod(tokens, PIECE_TOKENS)
    growing = min(whole, max(0, -(-(held - after) // PIECE_TOKENS)))  # pieces that find less than `held` keys
    total += growing * PIECE_TOKENS * after + PIECE_TOKENS**2 * (growing * (growing - 1) // 2)
    total += (whole - growing) * PIECE_TOKENS * held + whole * PIECE_TOKENS**2
    return total + rest * (min(after + whole * PIECE_TOKENS, held) + rest)


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
    mapped = mapped_flops(target, map_weights, max(tokens - sink - tail, 0))
    return mapped + pass_flops(target, sink) + pass_flops(target, tail, after=max(tokens - tail, 0))


def plan_flops(
    target: TargetCost, map_weights: Sequence[int], plan: HandoffPlan, *, is_chosen_by_signal: bool = False
) -> float:
    """Return the FLOPs of carrying a plan out: first tokens, native layers, maps, anchors, tail.

    Anchors are read in one pass, and make sliding layers translate what the first of them looks back to. Each of the first native
    layers counts as its share of all layers' weights over all tokens before the tail, but for layer 0 alone, which depends on the
    token and costs no context. What the target holds already costs nothing; a re-prefill costs one pass.

    `is_chosen_by_signal`: anchors were chosen when every layer had translated the whole middle.
    """
    held = sum(len(span) for span in plan.spans if span.kind is SpanKind.NATIVE)
    start, stop = plan.translated
    if start == stop:
        return pass_flops(target, plan.tokens - held, after=held)
    reader = min((first for first, _ in plan.anchors), default=stop)
    native = plan.native_layers if plan.native_layers > 1 else 0
    total = pass_flops(target, plan.tail, after=stop)
    if start > held:
        total += pass_flops(target, start - held, after=held)
    for weights, window in list(zip(map_weights, target.windows, strict=True))[native:]:
        reach = reader if window is None or is_chosen_by_signal else window - 1
        middle = stop - max(start, reader - reach)
        total += 2.0 * weights * max(middle, min(SHORT_PASS_TOKENS, middle))
    if native:
        first = replace(target, query_widths=target.query_widths[:native], windows=target.windows[:native])
        share = native / len(target.windows)
        total += 2.0 * share * target.token_weights * stop + attention_flops(first, stop)
    read = sum(b - a for a, b in plan.anchors)
    if read:
        total += 2.0 * target.token_weights * max(read, SHORT_PASS_TOKENS)
        total += sum(attention_flops(target, b - a, after=a) for a, b in plan.anchors)
    return total


def mapped_flops(target: TargetCost, map_weights: Sequence[int], middle: int) -> float:
    """Return the FLOPs of the maps for `middle` tokens; a few cost what reading the maps' weights costs."""
    return sum(
        2.0 * weights * max(middle if window is None else min(middle, window), min(SHORT_PASS_TOKENS, middle))
        for weights, window in zip(map_weights, target.windows, strict=True)
    )


def break_even_tokens(target: TargetCost, map_weights: Sequence[int], *, sink: int = 1, tail: int = 1) -> int | None:
    """Return the shortest context from which a hand-over costs fewer FLOPs than a re-prefill; None if there is none."""

    def pays(tokens: int) -> bool:
        return handoff_flops(target, map_weights, tokens, sink=sink, tail=tail) < pass_flops(target, tokens)

    return first_that_pays(pays, sink + tail)


def first_that_pays(pays: Callable[[int], bool], shortest: int) -> int | None:
    """Return the first length from `shortest` on at which `pays` holds, and holds from there on; None if there is none."""
    if not pays(LONGEST):
        return None
    low, high = shortest, LONGEST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle + 1, high)
    return low


# --- between machines ------------------------------------------------------------------------------------------------


def sent_s(num_bytes: float, gbit_per_s: float) -> float:
    """Return the seconds that bytes take over a link that is used in full, its latency apart."""
    return 8.0 * num_bytes / (1e9 * gbit_per_s)


def remote_break_even_tokens(
    target: TargetCost,
    map_weights: Sequence[int],
    wire_bytes: float,
    *,
    flops_per_s: float,
    gbit_per_s: float,
    sink: int = 1,
    tail: int = 1,
) -> int | None:
    """Return from which length on it takes less time to send a cache and translate it than to read again; None if never.

    Args:
        wire_bytes: of one token of the source's cache.
        flops_per_s: the rate at which the target reads, and translates.
    """

    def pays(tokens: int) -> bool:
        translated = handoff_flops(target, map_weights, tokens, sink=sink, tail=tail) / flops_per_s
        return sent_s(wire_bytes * tokens, gbit_per_s) + translated < pass_flops(target, tokens) / flops_per_s

    return first_that_pays(pays, sink + tail)


def least_gbit_per_s(
    target: TargetCost, map_weights: Sequence[int], wire_bytes: float, tokens: int, *, flops_per_s: float
) -> float | None:
    """Return the slowest link over which handing `tokens` tokens over takes less time than reading them; None if none is.

    Arguments as for `remote_break_even_tokens`.
    """
    saved_s = (pass_flops(target, tokens) - handoff_flops(target, map_weights, tokens)) / flops_per_s
    return None if saved_s <= 0 else 8.0 * wire_bytes * tokens / saved_s / 1e9


# --- seconds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadingRates:
    """What reading costs one model on one machine; 0 for what could not be told from nothing.

    Fields:
        s_per_flop: of its products, with all that grows with tokens like them (norms, rotations, activations).
        s_per_attention_flop: of attention, over all that is compared.
        s_per_byte: of weights and caches that a pass reads.
        s_per_layer: of a layer's call, however few its tokens.
        s_per_pass: of a pass, however few its layers.
        s_per_weight_byte: of weights that are laid out anew for products of many tokens; 0 where that hides behind the products.
    """

    s_per_flop: float
    s_per_attention_flop: float
    s_per_byte: float
    s_per_layer: float
    s_per_pass: float = 0.0
    s_per_weight_byte: float = 0.0


@dataclass(frozen=True)
class MapRates:
    """What a hand-over costs one pair on one machine, its two short passes apart.

    Fields:
        s_per_flop: of the maps' products alone, at their own shapes.
        s_per_byte: of the caches that are read, un-rotated, rotated and written, with all that grows with tokens like them.
        s_per_handoff: of the rest.
    """

    s_per_flop: float
    s_per_byte: float
    s_per_handoff: float


@dataclass(frozen=True)
class Rates:
    """Both, for one pair: what `kvlingo calibrate` measures and the planner reads."""

    reading: ReadingRates
    maps: MapRates

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return asdict(self)


@dataclass(frozen=True)
class HandoffCost:
    """What one token costs a hand-over.

    Fields:
        map_weights: weights of each target layer's map; 0 where a layer has none.
        source_features: key and value features of one token that are read from the source's cache.
    """

    map_weights: Sequence[int]
    source_features: int = 0


def pass_bytes(target: TargetCost, tokens: int, *, after: int = 0) -> float:
    """Return the bytes of weights and caches that a pass over `tokens` tokens reads, each once."""
    beside = target.head_weights + cached_features(target, after + tokens)
    return weight_bytes(target, tokens) + float(target.bytes_per_value * beside)


def weight_bytes(target: TargetCost, tokens: int) -> float:
    """Return the bytes of the decoder layers' weights that a pass reads, each once, no more experts than the tokens ask for."""
    return float(target.bytes_per_value * min(target.layer_weights, target.token_weights * tokens))


def cached_features(target: TargetCost, tokens: int) -> int:
    """Return the features of a whole cache of `tokens` tokens; 0 where widths are not known."""
    if not target.cache_widths:
        return 0
    return sum(
        width * (tokens if window is None else min(tokens, window))
        for width, window in zip(target.cache_widths, target.windows, strict=True)
    )


def moved_bytes(target: TargetCost, handoff: HandoffCost, middle: int) -> float:
    """Return the bytes of caches that a hand-over of `middle` tokens reads and writes, each once."""
    return float(target.bytes_per_value * (handoff.source_features * middle + cached_features(target, middle)))


def pass_s(target: TargetCost, rates: ReadingRates, tokens: int, *, after: int = 0, logits: bool = True) -> float:
    """Return the seconds of reading in pieces: calls, then whichever takes longer, products or reading weights.

    calls + max(products + weights laid out, weights) + max(attention, cache) + head; without `logits` no head.
    """
    if not tokens:
        return 0.0
    pieces = -(-tokens // PIECE_TOKENS)
    weights = pieces * weight_bytes(target, min(tokens, PIECE_TOKENS))
    products = 2.0 * target.token_weights * tokens * rates.s_per_flop
    cached = cached_features(target, after) * target.bytes_per_value
    return (
        pieces * (rates.s_per_pass + len(target.windows) * rates.s_per_layer)
        + max(products + laid_out_bytes(target, tokens) * rates.s_per_weight_byte, weights * rates.s_per_byte)
        + max(compared_flops(target, tokens, after=after) * rates.s_per_attention_flop, cached * rates.s_per_byte)
        + (target.head_weights * target.bytes_per_value * rates.s_per_byte if logits else 0.0)
    )


def compared_flops(target: TargetCost, tokens: int, *, after: int = 0) -> float:
    """Return the FLOPs that attention takes, with what is masked: Σ_layers 4 · query width · pairs compared."""
    return sum(
        4.0 * width * compared(tokens, window, after=after)
        for width, window in zip(target.query_widths, target.windows, strict=True)
    )


def laid_out_bytes(target: TargetCost, tokens: int) -> float:
    """Return the bytes of weights that reading in pieces lays out for products: none for one token, all for a short pass on."""
    whole, rest = divmod(tokens, PIECE_TOKENS)
    share = min(1.0, (rest - 1) / (SHORT_PASS_TOKENS - 1)) if rest else 0.0
    return whole * weight_bytes(target, PIECE_TOKENS) + share * weight_bytes(target, rest)


def handoff_s(
    target: TargetCost, handoff: HandoffCost, rates: Rates, tokens: int, *, sink: int = 1, tail: int = 1
) -> float:
    """Return the seconds of handing `tokens` tokens over: products, moved caches, and the two short passes."""
    middle = max(tokens - sink - tail, 0)
    return (
        rates.maps.s_per_handoff
        + mapped_flops(target, handoff.map_weights, middle) * rates.maps.s_per_flop
        + moved_bytes(target, handoff, middle) * rates.maps.s_per_byte
        + pass_s(target, rates.reading, min(sink, tokens), logits=False)
        + pass_s(target, rates.reading, tail, after=max(tokens - tail, 0))
    )


def break_even_s(target: TargetCost, handoff: HandoffCost, rates: Rates, *, sink: int = 1, tail: int = 1) -> int | None:
    """Return the shortest context from which a hand-over takes less time than a re-prefill; None if there is none."""

    def pays(tokens: int) -> bool:
        return handoff_s(target, handoff, rates, tokens, sink=sink, tail=tail) < pass_s(target, rates.reading, tokens)

    return first_that_pays(pays, sink + tail)
