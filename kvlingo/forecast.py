"""What each arm of the benchmark should cost: FLOPs, bytes and, with a machine's rates, milliseconds.

Knows arithmetic of cost and the arms' names; no models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvlingo.cost import (
    HandoffCost,
    MapRates,
    Rates,
    ReadingRates,
    TargetCost,
    attention_flops,
    break_even_s,
    handoff_s,
    mapped_flops,
    moved_bytes,
    pass_bytes,
    pass_s,
)


@dataclass(frozen=True)
class Work:
    """What something costs: arithmetic, memory that is read and written once, and time."""

    flops: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Return both together, one after the other."""
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes, self.seconds + other.seconds)

    def to_json(self) -> dict[str, float]:
        """Return a plain dict."""
        return {"flops": self.flops, "bytes": self.num_bytes, "ms": 1e3 * self.seconds}


@dataclass(frozen=True)
class Forecast:
    """Everything that a pair's arms are predicted from.

    Fields:
        maps_bytes: of the maps in memory; load_s: how long it took once to load them.
    """

    source: TargetCost
    target: TargetCost
    handoff: HandoffCost
    source_reading: ReadingRates
    target_reading: ReadingRates
    maps: MapRates
    maps_bytes: int
    load_s: float
    sink: int = 1
    tail: int = 1

    @property
    def rates(self) -> Rates:
        """Return what the planner knows of this pair."""
        return Rates(self.target_reading, self.maps)

    def arms(self, tokens: int, new: int) -> dict[str, Work]:
        """Return what every arm should cost at a length, of which `new` tokens are new to a target with an older prefix."""
        warm = self.translated(tokens)
        return {
            "reprefill": reading(self.target, self.target_reading, tokens),
            "reprefill_delta": reading(self.target, self.target_reading, new, after=tokens - new),
            "translate_cold": warm + Work(0.0, self.maps_bytes, self.load_s),
            "translate_warm": warm,
            "translate_ahead": reading(self.target, self.target_reading, self.tail, after=max(tokens - self.tail, 0)),
            "source_and_translate": reading(self.source, self.source_reading, tokens) + warm,
            "decode_step": reading(self.target, self.target_reading, 1, after=tokens - 1),
        }

    def translated(self, tokens: int) -> Work:
        """Return what a hand-over should cost: the maps, the caches it moves, and two short passes."""
        middle = max(tokens - self.sink - self.tail, 0)
        passes = reading(self.target, self.target_reading, self.tail, after=tokens - self.tail)
        if self.sink:
            passes += reading(self.target, self.target_reading, self.sink, logits=False)
        return Work(
            mapped_flops(self.target, self.handoff.map_weights, middle) + passes.flops,
            self.maps_bytes + moved_bytes(self.target, self.handoff, middle) + passes.num_bytes,
            handoff_s(self.target, self.handoff, self.rates, tokens, sink=self.sink, tail=self.tail),
        )

    @property
    def break_even_tokens(self) -> int | None:
        """Return from which length on a hand-over should be faster than a re-prefill."""
        return break_even_s(self.target, self.handoff, self.rates, sink=self.sink, tail=self.tail)

    def to_json(self) -> dict[str, Any]:
        """Return the rates as a plain dict, with the two that people compare as rates."""
        by_flop, by_byte = self.target_reading.s_per_flop, self.target_reading.s_per_byte
        return {
            "source_reading": asdict(self.source_reading),
            **self.rates.to_json(),
            "load_s": self.load_s,
            "reading_gflops_per_s": 1e-9 / by_flop if by_flop else None,
            "reading_gb_per_s": 1e-9 / by_byte if by_byte else None,
            "break_even_tokens": self.break_even_tokens,
        }


def reading(cost: TargetCost, rates: ReadingRates, tokens: int, *, after: int = 0, logits: bool = True) -> Work:
    """Return what a pass should cost."""
    head = 2.0 * cost.head_weights if logits else 0.0
    return Work(
        2.0 * cost.token_weights * tokens + attention_flops(cost, tokens, after=after) + head,
        pass_bytes(cost, tokens, after=after),
        pass_s(cost, rates, tokens, after=after, logits=logits),
    )
