"""Closed-form ridge regression from second moments.

    W = (C + λI)⁻¹ C_xy,  C the features' correlation matrix, λ relative to its mean diagonal (which is 1).

Knows moments only. Float64 throughout; the bias is not penalised, because everything is centred.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.stats import Moments

DAMPINGS = (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def factor(gram: Tensor, damping: float, *, warned: bool = True) -> tuple[Tensor, float]:
    """Return the Cholesky factor L of gram + damping * I, and the damping used.

    A matrix that is not positive definite gets ten times the damping until it is, with a warning unless told otherwise.
    """
    used = damping
    while True:
        damped = gram.clone()
        damped.diagonal().add_(used)
        lower, failed = torch.linalg.cholesky_ex(damped)
        # A factor that succeeded by luck on a singular matrix shows in its smallest pivot. What is not finite anywhere shows
        # in the pivot of its row.
        pivots = lower.diagonal()
        if not failed and bool(torch.isfinite(pivots).all()) and float(pivots.min()) > 1e-8:
            break
        used *= 10
    if used > damping and warned:
        warnings.warn(f"the features are collinear: damping raised from {damping:g} to {used:g}", stacklevel=2)
    return lower, used


def solve(moments: Moments, damping: float) -> Tensor:
    """Return the map [features, outputs] in standardised coordinates."""
    lower, _ = factor(moments.gram, damping)
    return torch.cholesky_solve(moments.cross, lower)


def unexplained(weight: Tensor, held_out: Moments) -> Tensor:
    """Return each output's mean squared error on other data, given as moments in the same coordinates: [outputs]."""
    fit = (weight * (held_out.gram @ weight)).sum(0) - 2 * (weight * held_out.cross).sum(0)
    return (held_out.judged_variance + fit).clamp(min=0)


def choose_damping(
    moments: Moments, held_out: Moments, dampings: Sequence[float] = DAMPINGS
) -> tuple[float, Tensor, float]:
    """Return the damping with the least held-out error, its map, and that error as a share of the outputs' variance."""
    tried: list[tuple[float, float, Tensor]] = []
    previous = float("inf")
    for damping in sorted(dampings, reverse=True):
        lower, used = factor(moments.gram, damping, warned=not tried)
        if used > damping and tried:  # less than the products' digits bear: collinear features, or products in float32
            break
        weight = torch.cholesky_solve(moments.cross, lower)
        error = relative_error(weight, held_out)
        tried.append((error, damping, weight))
        if error > previous * 1.02:  # past the minimum: less damping only fits noise
            break
        previous = error
    error, damping, weight = min(tried, key=lambda t: t[0])
    return damping, weight, error


def relative_error(weight: Tensor, held_out: Moments) -> float:
    """Return the held-out error averaged over outputs, each as a share of its variance."""
    variance = held_out.judged_variance
    moving = variance > 1e-12 * variance.max().clamp(min=1e-300)
    if not bool(moving.any()):
        return 0.0
    return float((unexplained(weight, held_out)[moving] / variance[moving]).mean())


def require_enough(tokens: int, features: int) -> None:
    """Refuse a regression with fewer tokens than features."""
    if tokens < features:
        raise BadInput(
            f"{tokens} tokens are too few to fit {features} features per layer; give at least {2 * features} tokens of "
            "text, or use fewer features (--reach 0, or no text conditioning)"
        )
