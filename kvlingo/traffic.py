"""What hand-overs are worth to whoever pays for the accelerators: from traffic to prefill saved, users and cost.

Knows arithmetic of cost and numbers that someone gives; no models. An estimate before anything runs: every number it rests on
is in its result, so that it can be doubted one by one. Says nothing about quality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlingo.cost import TargetCost, handoff_flops, pass_flops
from kvlingo.errors import BadInput

TERA, GIGA = 1e12, 1e9
MILLION = 1_000_000
MOST = 1e12


@dataclass(frozen=True)
class Traffic:
    """Turns that the target answers.

    Fields:
        contexts: tokens of a conversation before the new message, one number a turn; each counts the same.
        switch_share: of turns whose conversation another model had read and this one had not.
        message_tokens, answer_tokens: of one turn.
        turns_per_user_hour: of one user who is there.
    """

    contexts: tuple[int, ...]
    switch_share: float
    message_tokens: int = 100
    answer_tokens: int = 300
    turns_per_user_hour: float = 20.0

    def __post_init__(self) -> None:
        if not self.contexts or not 1 <= min(self.contexts) <= max(self.contexts) < MOST:
            raise BadInput("there are no contexts, or one without tokens; give the tokens of some conversations")
        if not 0 <= self.switch_share <= 1:
            raise BadInput(f"the share of switches is {self.switch_share}; give a number from 0 to 1")
        for name in ("message_tokens", "answer_tokens", "turns_per_user_hour"):
            _see_positive(name, getattr(self, name))


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as its data sheet and experience have it.

    Fields:
        tflops: peak of the number format that is used, 10¹² a second.
        gigabytes_per_s: peak of its memory.
        flops_share, bandwidth_share: of the peaks, as reached while reading a prompt and while answering.
        batch: answers that are written at once.
        occupancy: share of the hour in which it may work, so that nobody waits long.
        bytes_per_value: of weights and caches.
        price_per_hour: in any currency; None: no cost is told.
    """

    tflops: float = 989.0
    gigabytes_per_s: float = 3350.0
    flops_share: float = 0.4
    bandwidth_share: float = 0.6
    batch: int = 32
    occupancy: float = 0.7
    bytes_per_value: int = 2
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None:
                _see_positive(name, value)
        for name in ("flops_share", "bandwidth_share", "occupancy"):
            if getattr(self, name) > 1:
                raise BadInput(f"{name} is {getattr(self, name)}; give a share up to 1")

    def reading_s(self, flops: float) -> float:
        """Return how long it takes to read a prompt of so many FLOPs."""
        return flops / (self.tflops * TERA * self.flops_share)

    def moving_s(self, num_bytes: float) -> float:
        """Return how long it takes to move so many bytes."""
        return num_bytes / (self.gigabytes_per_s * GIGA * self.bandwidth_share)


def _see_positive(name: str, value: float) -> None:
    if not 0 < value < MOST:
        raise BadInput(f"{name.replace('_', ' ')}: {value:g} can't be; give a number above 0")


@dataclass(frozen=True)
class Target:
    """The model that answers: its cost, the maps into it, and what a token takes in each layer of its cache."""

    cost: TargetCost
    map_weights: Sequence[int]
    cache_widths: Sequence[int]


@dataclass(frozen=True)
class Turn:
    """Seconds and tokens of one turn that comes with a switch, at one length.

    `translated`: whether the hand-over is the cheaper way, which is then taken.
    """

    context_tokens: int
    reprefill_s: float
    handoff_s: float
    answer_s: float
    same_model_s: float
    translated: bool
    spared_tokens: int

    @property
    def taken_s(self) -> float:
        """Return the seconds of the way that is taken."""
        return min(self.reprefill_s, self.handoff_s)


def turn_at(context: int, target: Target, traffic: Traffic, accelerator: Accelerator) -> Turn:
    """Return what a turn costs after a context of so many tokens.

    re-prefill: all tokens and the message; hand-over: the maps for the context, a sink, the message as the tail; the same model's
    next turn: the message after its own cache. An answer is bound by memory: the weights once a batch, the cache once a token.
    """
    message, cost = traffic.message_tokens, target.cost
    tokens = context + message
    reprefill = accelerator.reading_s(pass_flops(cost, tokens))
    handoff = accelerator.reading_s(handoff_flops(cost, target.map_weights, tokens, tail=message))
    attended = [tokens if window is None else min(tokens, window) for window in cost.windows]
    cached = sum(width * held for width, held in zip(target.cache_widths, attended, strict=True))
    moved = accelerator.bytes_per_value * (cost.layer_weights / accelerator.batch + cached)
    return Turn(
        context,
        reprefill,
        handoff,
        traffic.answer_tokens * accelerator.moving_s(moved),
        accelerator.reading_s(pass_flops(cost, message, after=context)),
        handoff < reprefill,
        max(context - 1, 0) if handoff < reprefill else 0,
    )


def estimate(target: Target, traffic: Traffic, accelerator: Accelerator) -> dict[str, Any]:
    """Return prefill saved, users gained for each accelerator, and cost, beside all that was assumed."""
    turns = [turn_at(context, target, traffic, accelerator) for context in traffic.contexts]
    share = traffic.switch_share

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    ordinary, answering = mean([t.same_model_s for t in turns]), mean([t.answer_s for t in turns])
    before = {"switch": mean([t.reprefill_s for t in turns])}
    after = {"switch": mean([t.taken_s for t in turns])}
    for side in (before, after):
        side["prefill"] = share * side["switch"] + (1 - share) * ordinary
        side["turn"] = side["prefill"] + answering
        side["users"] = 3600 * accelerator.occupancy / (traffic.turns_per_user_hour * side["turn"])
        side["hours"] = MILLION * side["turn"] / 3600 / accelerator.occupancy
    price = accelerator.price_per_hour
    return {
        "prefill_saved_share": 1 - after["prefill"] / before["prefill"],
        "tokens_not_read_again_per_million_turns": share * MILLION * mean([t.spared_tokens for t in turns]),
        "switch_ms": {"reprefill": 1e3 * before["switch"], "handoff": 1e3 * after["switch"]},
        "turn_ms": {"reprefill": 1e3 * before["turn"], "handoff": 1e3 * after["turn"], "answer_alone": 1e3 * answering},
        "users_per_accelerator": {
            "reprefill": before["users"],
            "handoff": after["users"],
            "gained_share": after["users"] / before["users"] - 1,
        },
        "accelerator_hours_per_million_turns": {"reprefill": before["hours"], "handoff": after["hours"]},
        "cost_per_million_turns": None
        if price is None
        else {
            "reprefill": price * before["hours"],
            "handoff": price * after["hours"],
            "saved": price * (before["hours"] - after["hours"]),
        },
        "contexts": [
            {
                "tokens": turn.context_tokens,
                "reprefill_ms": 1e3 * turn.reprefill_s,
                "handoff_ms": 1e3 * turn.handoff_s,
                "taken": "handoff" if turn.translated else "reprefill",
            }
            for turn in {turn.context_tokens: turn for turn in sorted(turns, key=lambda t: t.context_tokens)}.values()
        ],
        "assumptions": assumptions(target, traffic, accelerator),
    }


def assumptions(target: Target, traffic: Traffic, accelerator: Accelerator) -> list[str]:
    """Say everything that an estimate rests on, number by number."""
    lengths = sorted(traffic.contexts)
    return [
        (
            f"{traffic.switch_share:.1%} of the turns that the target answers come with a switch from the source; without one it "
            "holds the conversation already"
        ),
        f"{len(lengths)} contexts of {lengths[0]:,} to {lengths[-1]:,} tokens, each as frequent as any other",
        (
            f"a message of {traffic.message_tokens:,} tokens, an answer of {traffic.answer_tokens:,}, "
            f"{traffic.turns_per_user_hour:g} turns of a user in an hour"
        ),
        (
            f"reading is bound by arithmetic: {accelerator.flops_share:.0%} of {accelerator.tflops:,g} TFLOP/s; 2 FLOPs for each "
            f"of {target.cost.layer_weights / 1e6:,.1f} M decoder weights and token, and attention; no embedding, no head"
        ),
        (
            f"the translator has {sum(target.map_weights) / 1e6:,.1f} M weights in its maps, as `kvlingo fit --map auto` would "
            "choose; the target reads one first token and the message; the cheaper way is taken"
        ),
        (
            f"answering is bound by memory: {accelerator.bandwidth_share:.0%} of {accelerator.gigabytes_per_s:,g} GB/s, "
            f"{accelerator.batch} answers at once, {accelerator.bytes_per_value} bytes a value"
        ),
        (
            f"an accelerator may work {accelerator.occupancy:.0%} of the time; the source's own work, moving caches, "
            "and the room that caches take are not counted"
        ),
        "the price of an hour is "
        + ("not given" if accelerator.price_per_hour is None else f"{accelerator.price_per_hour:g}"),
        "quality is not part of this: `kvlingo eval` measures it",
    ]
