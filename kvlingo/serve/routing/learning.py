"""Fit the `learned` router, and say what it is worth on prompts that it was not fitted on: `kvlingo route fit`.

The only module that knows scikit-learn. Rows of one prompt, and of one cluster, always lie on one side of a split. The curve is
made of predictions for rows left out (cross-validation); the classifier that is saved is fitted on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlingo.errors import BadInput, MissingExtra
from kvlingo.metrics import Estimate, as_estimate, cluster_bootstrap, estimates
from kvlingo.serve.routing.choosing import Pair, Prompt
from kvlingo.serve.routing.features import NAMES, features
from kvlingo.serve.routing.learned import FILE, Classifier, Learned, Saved, save_router
from kvlingo.serve.routing.rows import RECORDED, cluster_of, digest, prompt_of, quality_of, read_rows, see_no_other

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


TIE = "tie"
SAID_BY = ("label", "preferred", "quality")


@dataclass(frozen=True)
class Labelled:
    """A prompt, and whether the big model is needed for it.

    Fields:
        cluster: what lies on one side of a split with it; None: rows of the same prompt.
        said_by: what told it, one of `SAID_BY`.
    """

    prompt: Prompt
    big: bool
    cluster: str | None = None
    said_by: str = "label"


def labelled(values: dict[str, Any], tolerance: float = 0.0) -> Labelled:
    """Read one row: a label, a preference between the two answers, or how good both were. Raises `ValueError`.

    A tie of a preference is the small model's. By quality the small one is good enough where small ≥ big - tolerance, so
    also where both are wrong: the big one brings nothing there.
    """
    said_by = by_what(values)
    prompt = prompt_of(values)
    if said_by == "quality":
        small, big = (quality_of(values.get(name), name) for name in LABELS)
        needed = small < big - tolerance - 1e-9  # 0.7 is as good as 0.8 - 0.1
    else:
        needed = values[said_by] == "big"
    return Labelled(prompt, needed, cluster_of(values, prompt) if "cluster" in values else None, said_by)


def by_what(values: dict[str, Any]) -> str:
    """Return which of `SAID_BY` tells who is to answer; a row is of one kind. Raises `ValueError`."""
    if "label" in values:
        see_no_other(values, {"prompt", "messages", "cluster", "label"})
        if values["label"] not in LABELS:
            raise ValueError("label is neither small nor big: which of the two is to answer")
        return "label"
    if "preferred" in values:
        see_no_other(values, {"prompt", "messages", "cluster", "preferred"})
        if values["preferred"] not in (*LABELS, TIE):
            raise ValueError("preferred is none of small, big and tie: whose answer was liked better")
        return "preferred"
    if not {*LABELS} & set(values):
        raise ValueError("nothing says who is to answer; give label, preferred, or small and big with their quality")
    see_no_other(values, set(RECORDED))
    return "quality"


def fit_router(
    data: Path, out: Path, *, big_share: float | None, tolerance: float = 0.0, seed: int, overwrite: bool
) -> dict[str, Any]:
    """Read rows, fit, save; return the report that was saved."""
    if (out / FILE).exists() and not overwrite:
        raise BadInput(f"{out} holds a router already; choose another place with --out, or give --overwrite")
    rows = read_rows(data, lambda values: labelled(values, tolerance))
    if tolerance and not any(row.said_by == "quality" for row in rows):
        raise BadInput(f"no row of {data} has the quality of both answers, which a tolerance is about; leave it out")
    saved = fit(rows, big_share=big_share, seed=seed)
    told = {"labels_by": {name: sum(row.said_by == name for row in rows) for name in SAID_BY}, "tolerance": tolerance}
    save_router(out, replace(saved, report={**saved.report, **told}))
    return {**saved.report, **told}


def fit(rows: Sequence[Labelled], *, big_share: float | None = None, seed: int = 0) -> Saved:
    """Fit a router.

    Args:
        big_share: the largest share of requests that is to go to the big model; None: as many as the rows say need it.
    """
    prompts = [digest(row.prompt) for row in rows]
    groups = groups_of(rows, prompts)
    see_enough(rows, groups)
    share = sum(row.big for row in rows) / len(rows) if big_share is None else big_share
    scores = left_out_scores(rows, groups, seed)
    cut = cut_for(scores, share)
    report = judged(scores, [row.big for row in rows], groups, cut, seed)
    return Saved(fitted(rows, seed, cut), {**report, "prompts": len(set(prompts))}, tuple(sorted(set(prompts))))


def groups_of(rows: Sequence[Labelled], prompts: Sequence[str]) -> list[str]:
    """Return what each row is split together with. Raises `BadInput` where one prompt would lie on two sides."""
    groups = [prompt if row.cluster is None else row.cluster for row, prompt in zip(rows, prompts, strict=True)]
    first: dict[str, str] = {}
    for prompt, group in zip(prompts, groups, strict=True):
        if first.setdefault(prompt, group) != group:
            raise BadInput("one prompt stands in rows of different clusters; give all of its rows the same cluster")
    return groups


def see_enough(rows: Sequence[Labelled], groups: Sequence[str]) -> None:
    """Raise `BadInput` where there is too little to learn from."""
    for label in LABELS:
        found = {group for row, group in zip(rows, groups, strict=True) if row.big == (label == "big")}
        if len(found) < FEWEST:
            what = "prompts" if all(row.cluster is None for row in rows) else "clusters"
            raise BadInput(f"{len(found)} different {what} are labelled {label}; give at least {FEWEST} of each")


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
