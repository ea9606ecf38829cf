"""Stage 1: from two frozen models and text to a translator, by ridge regression.

Knows how statistics become maps. Reads the text once; choosing dampings and source layers, and fitting the controls, needs
no second pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlingo.collecting import Collector, Progress
from kvlingo.errors import UnsupportedModel
from kvlingo.judging import frozen_parts, held_out_examples, judged_kl
from kvlingo.language_model import LanguageModel
from kvlingo.pairing import window
from kvlingo.processes import ALONE, Processes
from kvlingo.ridge import choose_damping, factor, require_enough, solve
from kvlingo.shapes import FitOptions, base_config, candidate_centres, norm_choices, with_layers
from kvlingo.stats import GramStats, Moments
from kvlingo.texts import Document, split_documents
from kvlingo.translator import HeadwiseMap, LayerMap, LinearMap, LowRankMap, Translator, TranslatorConfig


@dataclass(frozen=True)
class Fit:
    """A fitted translator, the statistics it came from, and what was chosen per layer."""

    translator: Translator
    stats: GramStats
    held_out: GramStats
    held_out_documents: tuple[Document, ...]
    choices: tuple[dict[str, Any], ...]
    options: FitOptions
    held_out_kl_nats: float | None


@torch.inference_mode(False)  # a translator that was made in the caller's inference mode could never be trained
def fit(
    source: LanguageModel,
    target: LanguageModel,
    documents: Sequence[Document],
    options: FitOptions | None = None,
    *,
    work_dir: Path | None = None,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> Fit:
    """Fit one translator by ridge regression on paired caches (arXiv 2609.32610, stage 1).

    With `work_dir` the statistics are saved there every two minutes and on Ctrl-C; a second run with the same options goes
    on from there. Several processes share the reading, and then each solves the same sums. Raises `BadInput` for too little text,
    `UnsupportedModel` for a target that can only be a source.
    """
    if target.target_refusal is not None:
        raise UnsupportedModel(f"{target.name} can't be a target: {target.target_refusal}")
    options = options or FitOptions()
    split = split_documents(documents, held_out_share=options.held_out_share, seed=options.seed)
    config = base_config(source, target, options)
    collector = Collector(source, target, config, options)
    held_out_tokens = max(options.tokens // 10, 1)
    held_out = collector.collect(split.held_out, "held-out", held_out_tokens, work_dir, progress, processes)
    stats = collector.collect(split.training, "training", options.tokens, work_dir, progress, processes)
    require_enough(stats.tokens, max(config.feature_width(layer) for layer in range(len(config.target))))
    judged = frozen_parts(source, target, held_out_examples(split.held_out, source, target, options))
    solved = solve_layers(config, stats, held_out, options, progress)
    # Held-out error picks each layer's window; held-out KL has the last word on whether moving windows, and ending in the
    # target's key norm, helped at all.
    picks = (0,) if options.shift == 0 else (0, 1)
    candidates = [build(c, solved, pick, target) for c in norm_choices(config, target, options) for pick in picks]
    scored = []
    for number, (t, c) in enumerate(candidates, start=1):
        scored.append((judged_kl(t, target, judged) if judged else None, t, c))
        if progress is not None:
            progress("judging on held-out text", number, len(candidates))
    kl, translator, choices = min(scored, key=lambda s: math.inf if s[0] is None else s[0])
    return Fit(translator, stats, held_out, tuple(split.held_out), choices, options, kl)


@dataclass(frozen=True)
class Solution:
    """One layer's ridge: what it reads, its map in standardised coordinates, and its held-out error."""

    source_layers: tuple[int, ...]
    moments: Moments
    damping: float
    weight: Tensor
    error: float


Solved = dict[int, tuple[Solution, Solution]]


def solve_layers(
    config: TranslatorConfig,
    stats: GramStats,
    held_out: GramStats,
    options: FitOptions,
    progress: Progress | None = None,
    *,
    what: str = "solving layers",
) -> Solved:
    """Solve each layer's ridge twice: over the proportional source layers, and over the best window nearby."""
    solved: Solved = {}
    for layer in range(config.first_layer, len(config.target)):
        shift = options.shift if config.source_layers[layer] else 0
        proportional_one = best = None
        for centre in candidate_centres(config, layer, shift):
            chosen = window(centre, options.reach, len(config.source)) if config.source_layers[layer] else ()
            blocks = with_layers(config, layer, chosen).blocks(layer)
            moments = stats.moments(blocks, f"target/{layer}", shared_weight=options.shared_weight)
            judge = held_out.moments(blocks, f"target/{layer}", like=moments, shared_weight=options.shared_weight)
            # Neighbouring windows want the same damping: search it once.
            dampings = options.dampings if best is None else (best.damping,)
            damping, weight, error = choose_damping(moments, judge, dampings)
            # A linear map is made of its weight: the products, which are kept for every layer, would be gigabytes.
            kept = moments.without_products() if config.map_kind == "linear" else moments
            solution = Solution(chosen, kept, damping, weight, error)
            proportional_one = proportional_one or solution
            best = solution if best is None or error < best.error else best
        assert proportional_one is not None
        assert best is not None
        solved[layer] = (proportional_one, best)
        if progress is not None:
            progress(what, layer + 1, len(config.target))
    return solved


def build(
    config: TranslatorConfig, solved: Solved, pick: int, target: LanguageModel
) -> tuple[Translator, tuple[dict[str, Any], ...]]:
    """Make a translator of each layer's solution number `pick` (0: proportional layers, 1: best window)."""
    choices = []
    for layer, solutions in solved.items():
        solution = solutions[pick]
        config = with_layers(config, layer, solution.source_layers)
        choices.append(
            {
                "layer": layer,
                "source_layers": list(solution.source_layers),
                "damping": solution.damping,
                "held_out_error": solution.error,
            }
        )
    translator = Translator(config)
    for layer, solutions in solved.items():
        fill(translator.maps[str(layer)], solutions[pick], target.key_norms[layer])  # type: ignore[arg-type]
    return translator.to(target.device).eval(), tuple(choices)


def control(
    config: TranslatorConfig, fitted: Fit, target: LanguageModel, *, progress: Progress | None = None
) -> Translator:
    """Fit another shape of the same class from the same statistics: the controls, fitted alike."""
    options, what = replace(fitted.options, shift=0), "solving a control"
    solved = solve_layers(config, fitted.stats, fitted.held_out, options, progress, what=what)
    config = replace(config, key_norms=fitted.translator.config.key_norms)
    return build(config, solved, 0, target)[0]


# --- solutions into maps ---


@torch.no_grad()
def fill(layer_map: LayerMap, solution: Solution, norm_weight: Tensor | None) -> None:
    """Write a ridge solution into a layer's map, whatever its kind."""
    if layer_map.norm_kind is not None and norm_weight is not None:
        solution, weight = before_norm(solution, norm_weight, layer_map)
        layer_map.key_norm_weight.copy_(weight)
    moments, damping, weight = solution.moments, solution.damping, solution.weight
    layer_map.feature_mean.copy_(moments.feature_mean)
    layer_map.feature_scale.copy_(moments.feature_scale)
    layer_map.bias.copy_(moments.output_mean)
    linear = layer_map.linear
    if isinstance(linear, LinearMap):
        linear.weight.copy_(weight)
    elif isinstance(linear, LowRankMap):
        down, up = reduced_rank(moments, damping, weight, linear.down.shape[1])
        linear.down.copy_(down)
        linear.up.copy_(up)
    elif isinstance(linear, HeadwiseMap):
        fill_headwise(linear, moments, damping, layer_map)


def before_norm(solution: Solution, norm_weight: Tensor, layer_map: LayerMap) -> tuple[Solution, Tensor]:
    """Turn a solution for keys into one for keys divided by their norm's weight; return it and the weight to end with.

    Ridge is linear in its outputs, so dividing them needs no new solution. Where the norm's weight is 0 in some dims, the visible
    rest of a key has an RMS a little below 1: the weight to end with is scaled by what was seen.
    """
    shape, moments = layer_map.shape, solution.moments
    norm_weight = norm_weight.to("cpu", torch.float64)
    weight = norm_weight.repeat(shape.kv_heads) if layer_map.norm_kind == "head" else norm_weight
    inverse = torch.where(weight == 0, torch.zeros_like(weight), 1 / weight)
    scale = torch.cat((inverse, torch.ones(shape.value_width, dtype=inverse.dtype)))
    scaled = replace(
        moments,
        cross=moments.cross * scale,
        output_mean=moments.output_mean * scale,
        output_variance=moments.output_variance * scale.square(),
    )
    square = (scaled.output_variance + scaled.output_mean.square())[: shape.key_width].mean()
    return replace(solution, moments=scaled, weight=solution.weight * scale), norm_weight * square.sqrt()


def reduced_rank(moments: Moments, damping: float, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor a ridge map so that the prediction error is least for its rank (reduced-rank regression).

    With gram = L Lᵀ, the singular vectors of Lᵀ W carry the outputs' predictable directions: W ≈ L⁻ᵀ U S · Vᵀ.
    """
    lower, _ = factor(moments.gram, damping)
    u, s, vh = torch.linalg.svd(lower.T @ weight, full_matrices=False)
    root = s[:rank].sqrt()
    down = torch.linalg.solve_triangular(lower.T, u[:, :rank], upper=True) * root
    return down, root[:, None] * vh[:rank]


def fill_headwise(linear: HeadwiseMap, moments: Moments, damping: float, layer_map: LayerMap) -> None:
    """Solve one small ridge per target head, for keys and for values."""
    shape = layer_map.shape
    for head in range(shape.kv_heads):
        for index, parameter, offset, dim in (
            (linear.key_index[head], linear.key_weight, 0, shape.key_dim),
            (linear.value_index[head], linear.value_weight, shape.key_width, shape.value_dim),
        ):
            index = index.to(moments.gram.device)
            columns = slice(offset + head * dim, offset + (head + 1) * dim)
            part = replace(moments, gram=moments.gram[index][:, index], cross=moments.cross[index, columns])
            parameter[head].copy_(solve(part, damping))
