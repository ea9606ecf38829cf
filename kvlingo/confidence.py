"""Whether one hand-over can be trusted, from what the target makes of the tail that it reads itself.

Knows signs (numbers about a hand-over), a logistic model of plain numbers, and how that is fitted and judged. Does not know which
hand-overs it is fitted on: `reliability` does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvlingo.errors import BadArtifact, BadInput

SIGNS = ("tail_nats", "entropy_nats", "gap_nats_per_byte", "mismatch", "distance", "log_tokens")
RIDGE = 1.0
STEPS = 50
FOLDS = 8


@dataclass(frozen=True)
class Confidence:
    """A calibrated doubt, as plain numbers: the probability that a hand-over's KL to native is above `kl_nats`.

    Fields:
        signs: the names of what is looked at; `means`, `scales`, `weights` belong to them.
        threshold: a doubt above it makes the hand-over a re-prefill.
        tail: how many tokens the target read itself when this was fitted; it needs as many again.
        fitted: how it was fitted and what it was worth on documents left out.
    """

    signs: tuple[str, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    threshold: float
    kl_nats: float
    tail: int
    fitted: Mapping[str, Any]

    def doubt(self, found: Mapping[str, float | None]) -> float:
        """Return the probability that a hand-over is bad. A sign that could not be had counts as an average one."""
        columns = zip(self.signs, self.means, self.scales, self.weights, strict=True)
        score = self.bias
        for name, mean, scale, weight in columns:
            value = found.get(name)
            score += 0.0 if value is None else weight * (value - mean) / scale
        return sigmoid(score)

    def reason(self, doubt: float) -> str:
        """Say why a hand-over is not used."""
        return (
            f"this hand-over looks bad: KL above {self.kl_nats:g} nats with probability {doubt:.2f}, "
            f"{self.threshold:.2f} is the limit"
        )

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` restores."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Confidence:
        """Restore what `to_json` gave.

        Raises:
            BadArtifact: fields are missing or don't fit together.
        """
        try:
            rows = {name: tuple(data[name]) for name in ("signs", "means", "scales", "weights")}
            found = cls(**{**data, **rows})
        except (KeyError, TypeError) as error:
            raise BadArtifact(
                f"the artifact's confidence is not of this version ({error}); run: kvlingo confidence"
            ) from None
        if len({len(row) for row in rows.values()}) != 1 or not set(found.signs) <= set(SIGNS):
            raise BadArtifact(
                "the artifact's confidence names signs that this version doesn't know; run: kvlingo confidence"
            )
        return found


def sigmoid(score: float) -> float:
    """Return 1 / (1 + e^-score), without overflow."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


# --- fitting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """One hand-over with what was seen of it and what came of it.

    Fields:
        cluster: the book or site that its text is from: left out together.
        signs: what was seen; None for a sign that could not be had.
        kl_nats: mean KL to native over what followed.
    """

    cluster: str
    signs: Mapping[str, float | None]
    kl_nats: float


@dataclass(frozen=True)
class Logistic:
    """A logistic model in the coordinates of its own training rows."""

    means: Tensor
    scales: Tensor
    weights: Tensor
    bias: float

    def doubts(self, rows: Tensor) -> Tensor:
        """Return the probability of a bad hand-over for each row."""
        return torch.sigmoid(standardised(rows, self.means, self.scales) @ self.weights + self.bias)


def fit_confidence(
    judged: Sequence[Judged], *, kl_nats: float, tail: int, plan: Mapping[str, Any], seed: int
) -> Confidence:
    """Fit a doubt on judged hand-overs, and judge it on clusters that it was not fitted on.

    The threshold is where F1 is highest on clusters left out; what is reported was decided by models and thresholds that
    had not seen the document (two nested rounds of leaving out).

    Raises:
        BadInput: all hand-overs are good, or all are bad.
    """
    labels = torch.tensor([j.kl_nats > kl_nats for j in judged], dtype=torch.float64)
    bad = int(labels.sum())
    if min(bad, len(judged) - bad) < 2:
        half = sorted(j.kl_nats for j in judged)[len(judged) // 2]
        raise BadInput(
            f"{bad} of {len(judged)} hand-overs have a KL above {kl_nats:g} nats (half of them one of {half:.3g} or more), so "
            "there is nothing to tell apart; give more documents, a longer --context, or another limit: --kl"
        )
    names, rows = table(judged)
    folds = fold_of([j.cluster for j in judged], seed)
    left_out = doubts_left_out(rows, labels, folds)
    fitted = fit_logistic(rows, labels)
    decided, doubts = torch.zeros(len(judged), dtype=torch.bool), torch.zeros(len(judged), dtype=torch.float64)
    for fold in sorted(set(folds.tolist())):
        inside, outside = folds != fold, folds == fold
        limit = best_threshold(doubts_left_out(rows[inside], labels[inside], folds[inside]), labels[inside])
        doubts[outside] = fit_logistic(rows[inside], labels[inside]).doubts(rows[outside])
        decided[outside] = doubts[outside] > limit
    return Confidence(
        signs=names,
        means=tuple(fitted.means.tolist()),
        scales=tuple(fitted.scales.tolist()),
        weights=tuple(fitted.weights.tolist()),
        bias=fitted.bias,
        threshold=best_threshold(left_out, labels),
        kl_nats=kl_nats,
        tail=tail,
        fitted={
            "hand_overs": len(judged),
            "clusters": len({j.cluster for j in judged}),
            "bad": bad,
            "plan": dict(plan),
            "left_out": worth(decided, doubts, labels, torch.tensor([j.kl_nats for j in judged], dtype=torch.float64)),
        },
    )


def table(judged: Sequence[Judged]) -> tuple[tuple[str, ...], Tensor]:
    """Return the signs that were seen on some hand-over, and their values [hand-overs, signs]; NaN where one was missing."""
    names = tuple(name for name in SIGNS if any(j.signs.get(name) is not None for j in judged))
    rows = [[math.nan if (value := j.signs.get(name)) is None else value for name in names] for j in judged]
    return names, torch.tensor(rows, dtype=torch.float64)


def standardised(rows: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    """Return rows in standard coordinates; what is missing becomes the mean."""
    return ((rows - means) / scales).nan_to_num(0.0, posinf=0.0, neginf=0.0)


def fit_logistic(rows: Tensor, labels: Tensor, *, ridge: float = RIDGE) -> Logistic:
    """Fit by Newton's steps: -log likelihood + ridge / 2 · |weights|², the bias free."""
    means = rows.nanmean(0).nan_to_num(0.0)
    scales = (rows - means).square().nanmean(0).sqrt().nan_to_num(0.0)
    scales = torch.where(scales > 1e-9, scales, torch.ones_like(scales))
    x = torch.cat((standardised(rows, means, scales), rows.new_ones(len(rows), 1)), dim=1)
    penalty = torch.full((x.shape[1],), ridge, dtype=torch.float64)
    penalty[-1] = 1e-6
    theta = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(STEPS):
        p = torch.sigmoid(x @ theta)
        gradient = x.T @ (p - labels) + penalty * theta
        hessian = (x * (p * (1 - p))[:, None]).T @ x + penalty.diag()
        step = torch.linalg.solve(hessian, gradient)
        theta = theta - step.clamp(-2, 2)
        if float(step.abs().max()) < 1e-9:
            break
    return Logistic(means, scales, theta[:-1], float(theta[-1]))


def fold_of(clusters: Sequence[str], seed: int, folds: int = FOLDS) -> Tensor:
    """Return a fold for each hand-over; a cluster is never split."""
    names = sorted(set(clusters))
    random.Random(seed).shuffle(names)
    number = {name: place % folds for place, name in enumerate(names)}
    return torch.tensor([number[name] for name in clusters])


def doubts_left_out(rows: Tensor, labels: Tensor, folds: Tensor) -> Tensor:
    """Return each row's doubt by a model that was fitted on the other folds."""
    doubts = torch.full((len(rows),), float(labels.mean()), dtype=torch.float64)
    for fold in sorted(set(folds.tolist())):
        outside = folds == fold
        if bool((~outside).any()):
            doubts[outside] = fit_logistic(rows[~outside], labels[~outside]).doubts(rows[outside])
    return doubts


def best_threshold(doubts: Tensor, labels: Tensor) -> float:
    """Return the limit with the highest F1, in the middle between two doubts; 1 where nothing is bad."""
    if not bool(labels.any()):
        return 1.0
    ordered = sorted(set(doubts.tolist()))
    limits = [0.0, *((a + b) / 2 for a, b in pairwise(ordered))]
    return max(limits, key=lambda limit: f1(doubts > limit, labels))


def f1(decided: Tensor, labels: Tensor) -> float:
    """Return the harmonic mean of precision and recall."""
    hits = float((decided * labels).sum())
    return 2 * hits / max(float(decided.sum()) + float(labels.sum()), 1.0)


def worth(decided: Tensor, doubts: Tensor, labels: Tensor, kl: Tensor) -> dict[str, float | int | None]:
    """Return what decisions are worth: precision and recall, beside what no decision would give."""
    flagged, hits = int(decided.sum()), int((decided * labels).sum())
    kept = kl[~decided]
    return {
        "flagged": flagged,
        "precision": hits / flagged if flagged else None,
        "recall": hits / int(labels.sum()),
        "bad_share": float(labels.mean()),
        "auc": auc(doubts, labels),
        "mean_kl_nats": float(kl.mean()),
        "mean_kl_of_kept_nats": float(kept.mean()) if len(kept) else None,
        "mean_kl_with_fallback_nats": float(kl.masked_fill(decided, 0.0).mean()),
    }


def auc(doubts: Tensor, labels: Tensor) -> float | None:
    """Return how often a bad hand-over is doubted more than a good one; 0.5 for guessing."""
    bad, good = doubts[labels > 0], doubts[labels == 0]
    if not len(bad) or not len(good):
        return None
    gap = bad[:, None] - good[None]
    return float(((gap > 0).double() + 0.5 * (gap == 0).double()).mean())
