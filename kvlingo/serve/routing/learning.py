"""Fit the `learned` router, and say what it is worth on prompts that it was not fitted on: `kvlingo route fit`.

The only module that knows scikit-learn. Rows of one prompt always lie on one side of a split. The curve is made of predictions
for rows left out (cross-validation); the classifier that is saved is fitted on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlingo.errors import BadInput, MissingExtra
from kvlingo.metrics import Estimate, as_estimate, cluster_bootstrap, estimates
from kvlingo.serve.routing.choosing import Pair, Prompt
from kvlingo.serve.routing.features import NAMES, features
from kvlingo.serve.routing.learned import FILE, Classifier, Learned, Saved, save_router
from kvlingo.serve.routing.rows import digest, prompt_of, read_rows, see_no_other

if TYPE_CHECKING:
    import numpy as np

LABELS = ("small", "big")
FOLDS = 5
FEWEST = 20
"""So many different prompts of each label at least: with fewer, no fold says anything."""

NO_SCORE = 2.0
"""A cut that no probability reaches."""

GRID = 11
MOST_DRAWN = 20_000_000


@dataclass(frozen=True)
class Labelled:
    """A prompt, and whether the big model is needed for it."""

    prompt: Prompt
    big: bool


def labelled(values: dict[str, Any]) -> Labelled:
    """Read one row. Raises `ValueError`."""
    see_no_other(values, {"prompt", "messages", "label"})
    prompt = prompt_of(values)
    if values.get("label") not in LABELS:
        raise ValueError("label is neither small nor big: which of the two is to answer")
    return Labelled(prompt, values["label"] == "big")


def fit_router(data: Path, out: Path, *, big_share: float | None, seed: int, overwrite: bool) -> dict[str, Any]:
    """Read rows, fit, save; return the report that was saved."""
    if (out / FILE).exists() and not overwrite:
        raise BadInput(f"{out} holds a router already; choose another place with --out, or give --overwrite")
    saved = fit(read_rows(data, labelled), big_share=big_share, seed=seed)
    save_router(out, saved)
    return dict(saved.report)


def fit(rows: Sequence[Labelled], *, big_share: float | None = None, seed: int = 0) -> Saved:
    """Fit a router.

    Args:
        big_share: the largest share of requests that is to go to the big model; None: as many as the rows say need it.
    """
    groups = [digest(row.prompt) for row in rows]
    see_enough(rows, groups)
    share = sum(row.big for row in rows) / len(rows) if big_share is None else big_share
    scores = left_out_scores(rows, groups, seed)
    cut = cut_for(scores, share)
    report = judged(scores, [row.big for row in rows], groups, cut, seed)
    return Saved(fitted(rows, seed, cut), report, tuple(sorted(set(groups))))


def see_enough(rows: Sequence[Labelled], groups: Sequence[str]) -> None:
    """Raise `BadInput` where there is too little to learn from."""
    for label in LABELS:
        prompts = {group for row, group in zip(rows, groups, strict=True) if row.big == (label == "big")}
        if len(prompts) < FEWEST:
            raise BadInput(f"{len(prompts)} different prompts are labelled {label}; give at least {FEWEST} of each")


# --- fitting ---------------------------------------------------------------------------------------------------------


def left_out_scores(rows: Sequence[Labelled], groups: Sequence[str], seed: int) -> list[float]:
    """Return for each row the probability that a classifier gives it which was fitted without its prompt."""
    folds = sklearn("model_selection").StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    scores = [0.0] * len(rows)
    for inside, outside in folds.split(rows, [row.big for row in rows], groups):
        classifier = fitted([rows[i] for i in inside], seed)
        for i in outside:
            scores[i] = classifier.probability(rows[i].prompt)
    return scores


def fitted(rows: Sequence[Labelled], seed: int, cut: float = 0.5) -> Classifier:
    """Fit logistic regression with scikit-learn; return its numbers."""
    model = sklearn("linear_model").LogisticRegression(max_iter=2_000, random_state=seed)
    import numpy as np  # comes with scikit-learn

    values = np.array([features(row.prompt) for row in rows])
    mean, scale = scaling(values[:, : len(NAMES)])
    values[:, : len(NAMES)] = (values[:, : len(NAMES)] - mean) / scale
    model.fit(values, np.array([row.big for row in rows]))
    means, scales, weights = (tuple(map(float, numbers)) for numbers in (mean, scale, model.coef_[0]))
    return Classifier(means, scales, weights, float(model.intercept_[0]), cut)


def scaling(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the spread of each column; a column that never changes has spread 1."""
    scale = values.std(axis=0)
    scale[scale < 1e-9] = 1.0
    return values.mean(axis=0), scale


def sklearn(module: str) -> Any:
    """Import a part of scikit-learn. Raises `MissingExtra`."""
    import importlib

    try:
        return importlib.import_module(f"sklearn.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        raise MissingExtra("fitting a router needs scikit-learn: pip install 'kvlingo[route]'") from error


def cut_for(scores: Sequence[float], big_share: float) -> float:
    """Return the lowest score that at most this share of the rows reaches."""
    ordered = sorted(scores, reverse=True)
    most = int(big_share * len(ordered) + 1e-9)
    while 0 < most < len(ordered) and ordered[most] == ordered[most - 1]:
        most -= 1  # rows of equal score go the same way
    return ordered[most - 1] if most else NO_SCORE


# --- what it is worth ------------------------------------------------------------------------------------------------


def judged(
    scores: Sequence[float], big: Sequence[bool], groups: Sequence[str], cut: float, seed: int = 0
) -> dict[str, Any]:
    """Return the report of scores for rows that were left out.

    Cost is the share of requests that go to the big model; quality the share that gets an answer that is good enough: all that go
    to the big one, and of the others those labelled small. `gain_area` is the area under quality as a share of the way from
    always-small to always-big, over cost from 0 to 1 (RouteLLM's average performance gap recovered): drawing lots has 0.5. The
    verdict is PASS where its interval lies above that.
    """
    column, needed = torch.tensor(scores, dtype=torch.float64), torch.tensor(big, dtype=torch.float64)
    resamples = max(200, min(2_000, MOST_DRAWN // len(scores)))
    weights = cluster_bootstrap(groups, resamples=resamples, seed=seed)
    area = gain_area(column, needed, weights)
    passed = area is not None and area["low"] is not None and area["low"] > 0.5
    cuts = {f"{i / (GRID - 1):.1f}": cut_for(scores, i / (GRID - 1)) for i in range(GRID)}
    points = {name: point(column, needed, at, weights) for name, at in {**cuts, "chosen": cut}.items()}
    return {
        "verdict": "PASS" if passed else "FAIL",
        "reason": None if passed else "on prompts left out it is not better than drawing lots",
        "rows": len(scores),
        "prompts": len(set(groups)),
        "share_labelled_big": float(needed.mean()),
        "folds": FOLDS,
        "gain_area": area,
        "chosen": points.pop("chosen"),
        "curve": list(points.values()),
    }


def point(scores: Tensor, needed: Tensor, cut: float, weights: Tensor) -> dict[str, Any]:
    """Return cost and quality of one cut, each with its interval."""
    to_big = (scores >= cut).double()
    ones = torch.ones_like(scores)
    good = 1 - needed * (1 - to_big)
    return {"cut": cut, **estimates({"cost": (to_big, ones), "quality": (good, ones)}, weights)}


def gain_area(scores: Tensor, needed: Tensor, weights: Tensor) -> Estimate | None:
    """Return the area under the share of needed big answers given, over the share of requests that go to the big model."""
    point_value = areas(scores, needed, torch.ones(1, len(scores), dtype=torch.float64))
    drawn = areas(scores, needed, weights)
    ends = drawn.quantile(
        torch.tensor([0.025, 0.975], dtype=torch.float64)
    )  # NaN where a resample had none that is needed
    return as_estimate(float(point_value), 1.0, *map(float, ends))


def areas(scores: Tensor, needed: Tensor, weights: Tensor) -> Tensor:
    """Return one area for each row of weights [resamples, rows]; rows of equal score come in together."""
    _, group = torch.unique(-scores, return_inverse=True)  # sorted: the highest score first
    width = int(group.max()) + 1

    def cumulated(values: Tensor) -> Tensor:
        sums = torch.zeros(len(weights), width, dtype=torch.float64).index_add_(1, group, values)
        total = sums.cumsum(1)
        return torch.cat([torch.zeros(len(weights), 1, dtype=torch.float64), total / total[:, -1:]], 1)

    return torch.trapezoid(cumulated(weights * needed), cumulated(weights), dim=1)


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as lines for a person."""
    costs = [p["cost"]["mean"] for p in report["curve"]]
    start = 1 - report["share_labelled_big"]
    found = [
        f"{report['rows']} rows, {report['prompts']} prompts, {report['folds']} folds; all figures on rows left out"
    ]
    found.append("to big   good enough                 drawing lots")
    for at, p in zip(costs, report["curve"], strict=True):
        found.append(f"{at:6.2f}   {shown(p['quality']):26}  {start + at * (1 - start):.3f}")
    found.append(f"area of the gain: {shown(report['gain_area'])}; drawing lots: 0.500")
    chosen = report["chosen"]
    found.append(
        f"chosen: P(big) ≥ {chosen['cut']:.3f}: {shown(chosen['cost'])} to big, {shown(chosen['quality'])} good enough"
    )
    found.append(f"verdict: {report['verdict']}" + (f", {report['reason']}" if report["reason"] else ""))
    return found


def shown(estimate: Estimate | None, digits: int = 3) -> str:
    """Write a figure with its interval."""
    if estimate is None:
        return "–"
    low, high = estimate["low"], estimate["high"]
    interval = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{estimate['mean']:.{digits}f}{interval}"


def router_of(saved: Saved, pair: Pair) -> Learned:
    """Return a router that was read from its folder, whatever its verdict: to be compared, not to be served."""
    return Learned(pair, saved.classifier)
