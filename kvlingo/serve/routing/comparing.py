"""Compare routers on a recorded set: `kvlingo route eval`.

Knows what both models did on each prompt (quality, cost, time) and replays each router's decisions on it; runs no model. Always
small, always big and a coin stand in the same table. A router is worth something where its quality is above that of drawing lots
at the same cost; both sides of that difference see the same resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.metrics import Estimate, as_estimate, cluster_bootstrap, estimates
from kvlingo.serve.routing.cascade import NEVER_REPEATS, Cascade, CascadeRule
from kvlingo.serve.routing.choosing import Heard, Pair, Prompt, Router
from kvlingo.serve.routing.learned import load_router
from kvlingo.serve.routing.learning import router_of, shown
from kvlingo.serve.routing.rows import (
    FIGURES,
    RECORDED,
    cluster_of,
    digest,
    number,
    prompt_of,
    quality_of,
    read_rows,
    see_no_other,
)
from kvlingo.serve.routing.rules import Rules, read_rules
from kvlingo.serve.routing.threshold import Threshold, ThresholdRule
from kvlingo.serve.routing.token import Token

PAIR = Pair("small", "big")
ROOM = 3


@dataclass(frozen=True)
class Played:
    """What one model did on one prompt. `quality` from 0 to 1; `cost` in any unit; `ms` until the whole answer was there."""

    quality: float
    cost: float
    ms: float


@dataclass(frozen=True)
class Recorded:
    """Both models on one prompt. `cluster`: what is drawn together in the bootstrap. `heard`, `mixed`: None where not recorded.

    mixed: what the router token did on it, and the share of tokens that came from the big model.
    """

    prompt: Prompt
    cluster: str
    small: Played
    big: Played
    heard: Heard | None
    mixed: tuple[Played, float] | None = None


def recorded(values: dict[str, Any]) -> Recorded:
    """Read one row. Raises `ValueError`."""
    see_no_other(values, set(RECORDED))
    prompt = prompt_of(values)
    cluster = cluster_of(values, prompt)
    small, big = (values.get(name) for name in ("small", "big"))
    return Recorded(prompt, cluster, played(small, "small"), played(big, "big"), heard(small or {}), mixed(values))


def mixed(values: dict[str, Any]) -> tuple[Played, float] | None:
    """Read what the router token did: two models' single answers don't tell what they say together."""
    if "token" not in values:
        return None
    done = played(values["token"], "token")
    share = number(values["token"].get("share_big"), "token.share_big")
    if share > 1:
        raise ValueError("token.share_big is above 1")
    return done, share


def played(values: Any, who: str) -> Played:
    """Read what one model did."""
    quality = quality_of(values, who)
    return Played(quality, *(number(values.get(name), f"{who}.{name}") for name in FIGURES[1:]))


def heard(values: dict[str, Any]) -> Heard | None:
    """Read how sure the small model was, and what it said where that is there; a log-probability of null: nothing."""
    if "mean_logprob" not in values:
        return None
    value = values["mean_logprob"]
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e9 < value <= 0):
        raise ValueError("small.mean_logprob is not a log-probability, 0 or less")
    text, cut = values.get("answer"), values.get("cut")
    if not isinstance(text, str | None) or not isinstance(cut, bool | None):
        raise ValueError("small.answer is not a text, or small.cut not true or false")
    return Heard(0, None if value is None else float(value), text, cut)


def compare_file(file: Path, *, rules: Path | None, learned: Path | None, seed: int) -> dict[str, Any]:
    """Read a recorded set and compare the routers that can be replayed on it; return the report."""
    rows = read_rows(file, recorded)
    if not rows:
        raise BadInput(f"{file} has no rows; give one JSON object a line")
    limits = read_rules(rules) if rules else Rules()
    routers: list[Router] = [Threshold(PAIR, limits.threshold or ThresholdRule())]
    notes = []
    if any(row.heard is None for row in rows):
        if limits.cascade:
            raise BadInput(f"{rules} has limits of the cascade, and not every row has small.mean_logprob")
        notes.append("cascade is left out: not every row has small.mean_logprob")
    else:
        rule = limits.cascade or CascadeRule()
        see_recorded(rows, rule, rules)
        if any(row.heard.text is None for row in rows if row.heard):
            rule = replace(rule, escalate_repeating=NEVER_REPEATS)
            notes.append("cascade does not look for repetition: not every row has small.answer")
        routers.append(Cascade(PAIR, rule))
    if limits.token:
        raise BadInput(f"{rules} has a limit of the router token; what it did is recorded, not replayed: leave it out")
    if all(row.mixed for row in rows):
        routers.append(Token(PAIR))
    elif any(row.mixed for row in rows):
        notes.append("token is left out: not every row has what it did")
    if learned:
        saved = load_router(learned)
        see_unseen(rows, saved.seen, learned)
        routers.append(router_of(saved, PAIR))
    return {**compare(rows, routers, seed=seed), "notes": notes}


def see_recorded(rows: Sequence[Recorded], rule: CascadeRule, file: Path | None) -> None:
    """Raise `BadInput` where a rule of the cascade reads what not every row has; the default ones are left out instead."""
    by_text = rule.escalate_shorter_than or rule.escalate_matching
    by_text = by_text or rule.escalate_repeating not in (CascadeRule().escalate_repeating, NEVER_REPEATS)
    for name, field, read in (("answer", "text", by_text), ("cut", "cut", rule.escalate_cut)):
        if read and any(getattr(row.heard, field) is None for row in rows):
            raise BadInput(f"{file} has a rule of the cascade that reads small.{name}, and not every row has it")


def see_unseen(rows: Sequence[Recorded], seen: Sequence[str], folder: Path) -> None:
    """Raise `BadInput` where a router would be judged on what it was fitted on."""
    known = set(seen)
    found = sum(digest(row.prompt) in known for row in rows)
    if found:
        raise BadInput(f"{folder} was fitted on {found} of the {len(rows)} prompts; record others to judge it by")


# --- replaying -------------------------------------------------------------------------------------------------------


def replay(router: Router, row: Recorded) -> tuple[Played, float]:
    """Return what would have come of a router's decisions, and the share of the answer that the big model gave.

    Where the other model takes over from one that was heard, both are paid and waited for.
    """
    choice = router.choose(row.prompt)
    first = choice.model
    if choice.help is not None:
        assert row.mixed is not None
        return row.mixed
    done = {router.pair.small: row.small, router.pair.big: row.big}
    last = first
    if router.listens:
        assert row.heard is not None
        last = router.judge(row.heard).model
    final, before = done[last], done[first]
    if last != first:
        final = Played(final.quality, final.cost + before.cost, final.ms + before.ms)
    return final, float(last == router.pair.big)


def compare(rows: Sequence[Recorded], routers: Sequence[Router], *, seed: int = 0) -> dict[str, Any]:
    """Compare routers with always small, always big and a coin, in one table with one set of resamples."""
    weights = cluster_bootstrap([row.cluster for row in rows], seed=seed)
    small, big = table([row.small for row in rows]), table([row.big for row in rows])
    nobody, everybody = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.float64)
    arms = {
        "always small": (small, nobody),
        "always big": (big, everybody),
        "random": ((small + big) / 2, everybody / 2),  # what a coin gives on average: no luck of one draw
    }
    for router in routers:
        plays = [replay(router, row) for row in rows]
        arms[router.name] = (table([p for p, _ in plays]), torch.tensor([b for _, b in plays], dtype=torch.float64))
    return {
        "rows": len(rows),
        "clusters": len({row.cluster for row in rows}),
        "arms": {name: figures(*arm, weights) for name, arm in arms.items()},
        "paired": {
            router.name: {
                "quality_over_random_at_its_cost": over_random(arms[router.name][0], small, big, weights),
                "quality_over_always_small": paired(arms[router.name][0], small, weights),
                "quality_over_always_big": paired(arms[router.name][0], big, weights),
            }
            for router in routers
        },
        "cascade_curve": [point for router in routers if isinstance(router, Cascade) for point in curve(rows, router)],
    }


def table(plays: Sequence[Played]) -> Tensor:
    """Return the figures as float64 [figures, rows]."""
    return torch.tensor([[getattr(play, name) for play in plays] for name in FIGURES], dtype=torch.float64)


def figures(values: Tensor, to_big: Tensor, weights: Tensor) -> dict[str, Estimate | None]:
    """Return the means of one arm with their intervals."""
    ones = torch.ones(values.shape[1], dtype=torch.float64)
    rows = {**dict(zip(FIGURES, values, strict=True)), "share_big": to_big}
    return estimates({name: (row, ones) for name, row in rows.items()}, weights)


def paired(arm: Tensor, other: Tensor, weights: Tensor) -> Estimate | None:
    """Return how much better the quality of one arm is than that of another."""
    ones = torch.ones(arm.shape[1], dtype=torch.float64)
    return estimates({"difference": (arm[0] - other[0], ones)}, weights)["difference"]


def over_random(arm: Tensor, small: Tensor, big: Tensor, weights: Tensor) -> Estimate | None:
    """Return how much better an arm is than lots drawn so that they cost the same on average.

    Lots give quality (1 - p)·small + p·big at cost (1 - p)·small + p·big. What costs more than always big is held against always
    big. None where the big model is not dearer: then no share of it costs the same.
    """

    def difference(counts: Tensor) -> Tensor:
        """Take counts [resamples, rows]; return one difference each, NaN where there is none."""
        means = [(counts @ x.T) / counts.sum(1, keepdim=True) for x in (arm, small, big)]
        (q, c, _), (qs, cs, _), (qb, cb, _) = (mean.unbind(1) for mean in means)
        share = torch.where(cb > cs, (c - cs) / (cb - cs), torch.nan).clamp(0, 1)
        return q - qs - share * (qb - qs)

    value = float(difference(torch.ones(1, arm.shape[1], dtype=torch.float64)))
    if math.isnan(value):
        return None
    drawn = difference(weights)
    if arm.shape[1] < 2:
        drawn = drawn * torch.nan
    ends = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return as_estimate(value, 1.0, *map(float, ends))


def curve(rows: Sequence[Recorded], router: Cascade) -> list[dict[str, float]]:
    """Return what the cascade's limit costs and brings, one point for each tenth of the recorded log-probabilities.

    Its other rules stay as they are.
    """
    values = sorted(row.heard.mean_logprob for row in rows if row.heard and row.heard.mean_logprob is not None)
    limits = sorted({values[round(i * (len(values) - 1) / 10)] for i in range(11)}) if values else []
    points = []
    for limit in [*limits, 0.0]:
        cascade = replace(router, rule=replace(router.rule, escalate_below=limit))
        plays = [replay(cascade, row) for row in rows]
        means = table([play for play, _ in plays]).mean(1).tolist()
        share = sum(big for _, big in plays) / len(rows)
        points.append({"escalate_below": limit, **dict(zip(FIGURES, means, strict=True)), "share_big": share})
    return points


# --- for a person ----------------------------------------------------------------------------------------------------


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report as lines."""
    heads = ("quality", "cost", "ms", "share_big")
    rows = [["", *heads]]
    rows += [[name, *(shown(arm[head], ROOM) for head in heads)] for name, arm in report["arms"].items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    found = [f"{report['rows']} rows, {report['clusters']} clusters; 95 % bootstrap intervals over these"]
    found += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, pairs in report["paired"].items():
        found.append(f"{name}: quality above lots of the same cost {shown(pairs['quality_over_random_at_its_cost'])}")
    if report["cascade_curve"]:
        found.append("cascade, by its limit:")
        found += [
            f"  below {p['escalate_below']:8.3f}: quality {p['quality']:.3f}, cost {p['cost']:.3f}, {p['ms']:.0f} ms"
            for p in report["cascade_curve"]
        ]
    return [*found, *report.get("notes", ())]
