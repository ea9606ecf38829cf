"""Which tokens in the middle of a hand-over the target reads itself: anchors, as data.

Knows token counts and scores. Needs no model: `trust` says how far each token can be trusted, `recompute` reads them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlingo.errors import BadInput

Range = tuple[int, int]

PLACES = ("spread", "random")
"""Choices that look at places only: what any signal has to beat at the same cost."""


@dataclass(frozen=True)
class Anchors:
    """How many tokens are read in the middle, and which.

    Fields:
        by: "spread" (evenly), "random", or a signal of `trust.SIGNALS`: the least trusted tokens.
        share: of the tokens between sinks and tail.
        block: tokens that are chosen together; a block is as trusted as its tokens are on average.
        seed: of "random".
    """

    by: str = "spread"
    share: float = 0.1
    block: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise BadInput(f"{self.share} of the middle can't be read; give a share from 0 to 1")
        if self.block < 1:
            raise BadInput(f"anchors in blocks of {self.block} tokens can't be chosen; give at least 1")

    @property
    def needs_scores(self) -> bool:
        """Whether the choice depends on what the tokens hold."""
        return self.by not in PLACES

    def pick(self, start: int, stop: int, scores: Sequence[float] | None = None) -> list[Range]:
        """Return the ranges to read among the tokens [start, stop).

        Args:
            scores: [tokens] how little each is trusted; for a choice by signal.
        """
        tokens = stop - start
        count = round(self.share * tokens / self.block)
        if not count or tokens <= 0:
            return []
        if count * self.block >= tokens:
            return [(start, stop)]
        if self.by == "spread":
            return merged(evenly(start, stop, count, self.block))
        # Whole blocks only, so that every choice reads as many tokens as any other.
        places = range(start, stop - self.block + 1, self.block)
        count = min(count, len(places))
        if self.by == "random":
            chosen = random.Random(self.seed).sample(places, count)
        else:
            chosen = least_trusted(places, start, self.block, count, self._scores(scores, tokens))
        return merged((place, place + self.block) for place in chosen)

    def _scores(self, scores: Sequence[float] | None, tokens: int) -> Sequence[float]:
        if scores is None or len(scores) != tokens:
            given = "none" if scores is None else str(len(scores))
            raise BadInput(f"anchors by {self.by} need a score for each of {tokens} tokens, got {given}")
        return scores


def evenly(start: int, stop: int, count: int, block: int) -> list[Range]:
    """Return `count` blocks with the same room on both sides of each; they don't overlap."""
    room = (stop - start) / count
    places = (start + int(room * (number + 0.5) - block / 2) for number in range(count))
    return [(place, place + block) for place in places]


def least_trusted(places: Sequence[int], start: int, block: int, count: int, scores: Sequence[float]) -> list[int]:
    """Return the places of the `count` blocks with the highest scores; the earlier one of two that are equal."""

    def doubt(place: int) -> float:
        return sum(scores[place - start : place - start + block])

    return sorted(places, key=lambda place: (-doubt(place), place))[:count]


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, those that touch or overlap as one, without empty ones."""
    done: list[Range] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if done and start <= done[-1][1]:
            done[-1] = (done[-1][0], max(stop, done[-1][1]))
        else:
            done.append((start, stop))
    return done
