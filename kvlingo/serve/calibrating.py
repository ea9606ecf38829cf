"""Measure where translating begins to pay: `kvlingo calibrate`.

Knows models, translators and times. Both ways are timed in one process, in turn, from the same text (`timing`); what is concluded
holds for this machine and these weights, and the file says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvlingo.calibration import measure_rates, read_cost
from kvlingo.cost import HandoffCost, Rates, TargetCost, handoff_s, pass_s
from kvlingo.environment import environment_card
from kvlingo.errors import BadInput
from kvlingo.files import write_file
from kvlingo.handoff import hand_off
from kvlingo.jobs import Where, gather
from kvlingo.language_model import LanguageModel
from kvlingo.serve.loading import links_between, load_models
from kvlingo.serve.routing.rules import NEVER, Calibrated, Measured, read_rules, written
from kvlingo.serve.switching import Link, Rule, moving
from kvlingo.states import read_native
from kvlingo.timing import CHARS_PER_TOKEN, FirstToken, cut, joined, time_to_first_token

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Predicted:
    """How far the calibrated cost model is from what was measured at one length, as a share of it."""

    tokens: int
    handoff_error: float
    reprefill_error: float


@dataclass(frozen=True)
class Found:
    """What one way's measuring found: what a server goes by, and how well the cost model in it foretells what was measured."""

    rule: Calibrated
    errors: tuple[Predicted, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return {**asdict(self.rule), "errors": [asdict(each) for each in self.errors]}


def calibrate(
    models: Mapping[str, str],
    translators: Sequence[Path],
    out: Path,
    *,
    lengths: Sequence[int],
    repeats: int,
    texts: Sequence[Path],
    where: Where,
    overwrite: bool,
    tell: Tell,
) -> list[Found]:
    """Load what is to be served, measure every way that has a translator, write the rules."""
    if not translators:
        raise BadInput("no translator to measure; give at least one: --translator DIR")
    if out.exists() and not overwrite:
        raise BadInput(f"{out} is there already; choose another place with --out, or give --overwrite")
    text = joined(gather(texts), max(lengths) * CHARS_PER_TOKEN)
    loaded = load_models(models, where, tell)
    links = usable(links_between(loaded, translators, tell), loaded, tell)
    found = [measure(link, loaded, text, lengths, repeats, tell) for link in links]
    card = environment_card()
    notes = [
        "Written by kvlingo calibrate, for kvlingo serve --rules. Times are medians; below reprefill_up_to spared tokens",
        "a switch reads again, from translate_from on it translates, between them the cost in seconds decides, by the rates:",
        "seconds for a FLOP, a byte, a layer's call, as measured here on these models' own shapes.",
        f"{card['cpu']}, {card['threads']} threads, {card['accelerator'] or 'no accelerator'}, torch {card['torch']}",
    ]
    write_file(out, written([each.rule for each in found], notes).encode())
    read_rules(out)  # what was written can be read, or it is seen here and not when the server starts
    return found


def usable(links: Sequence[Link], models: Mapping[str, LanguageModel], tell: Tell) -> list[Link]:
    """Return the ways that a server would use; say why not of the others. Raises `BadInput` when none is left."""
    found = []
    for link in links:
        refusal = link.refusal or models[link.target].target_refusal or moving(models[link.source])
        if refusal:
            tell(f"{link.source} → {link.target} is not measured: {refusal}")
        else:
            found.append(link)
    if not found:
        raise BadInput("no translator that a server would use; see the lines above")
    return found


@torch.no_grad()
def measure(
    link: Link,
    models: Mapping[str, LanguageModel],
    text: str,
    lengths: Sequence[int],
    repeats: int,
    tell: Tell,
) -> Found:
    """Time one way at every length that both models read."""
    source, target = models[link.source], models[link.target]
    rooms = [lm.geometry.max_positions for lm in (source, target)]
    room = min((r for r in rooms if r is not None), default=None)
    fitting = [length for length in sorted(set(lengths)) if room is None or length < room]
    if not fitting:
        raise BadInput(f"{link.source} → {link.target}: no length below the {room} tokens that both models read")
    measured = []
    for length in fitting:
        times = timed(cut(text, source, target, length), source, target, link, repeats)
        measured.append(Measured(times.tokens, times.handoff_ms, times.reprefill_ms))
        tell(
            f"{link.source} → {link.target}, {times.tokens} tokens: hand-over {times.handoff_ms:.1f} ms, "
            f"re-prefill {times.reprefill_ms:.1f} ms"
        )
    rule = concluded(measured)
    rates = measure_rates(target, link.translator, [(row.tokens, row.handoff_ms / 1e3) for row in measured])
    errors = compared(measured, read_cost(target), link.cost, rates)
    for each in errors:
        tell(
            f"{link.source} → {link.target}, {each.tokens} tokens: the cost model says hand-over {each.handoff_error:+.0%}, "
            f"re-prefill {each.reprefill_error:+.0%}"
        )
    known = Calibrated(
        link.source,
        link.target,
        source.fingerprint,
        target.fingerprint,
        rule.reprefill_up_to,
        rule.translate_from,
        tuple(measured),
        rates,
    )
    return Found(known, tuple(errors))


def compared(measured: Sequence[Measured], cost: TargetCost, handoff: HandoffCost, rates: Rates) -> list[Predicted]:
    """Return what the calibrated cost model says of each length; re-prefills were no part of what it was made from."""
    return [
        Predicted(
            row.tokens,
            1e3 * handoff_s(cost, handoff, rates, row.tokens) / row.handoff_ms - 1,
            1e3 * pass_s(cost, rates.reading, row.tokens) / row.reprefill_ms - 1,
        )
        for row in measured
    ]


def timed(text: str, source: LanguageModel, target: LanguageModel, link: Link, repeats: int) -> FirstToken:
    """Time one text. Raises `BadInput` where the hand-over is a re-prefill: its time would say nothing."""
    state = read_native(text, source)
    fallback = hand_off(text, source, target, link.translator, source_state=state).plan.fallback
    if fallback:
        raise BadInput(f"{link.source} → {link.target} can't be measured: {' '.join(fallback.split())}")
    return time_to_first_token(text, source, target, link.translator, source_state=state, repeats=repeats)


def concluded(measured: Sequence[Measured]) -> Rule:
    """Return the rule: translate from the first length at which it was faster, there and at every longer one.

    Where it was faster at none, it is not done up to the longest, and beyond by cost only.
    """
    slow = [row.tokens for row in measured if row.handoff_ms >= row.reprefill_ms]
    if not slow:
        return Rule(0, measured[0].tokens)
    after = [row.tokens for row in measured if row.tokens > max(slow)]
    return Rule(max(slow), min(after, default=NEVER))
