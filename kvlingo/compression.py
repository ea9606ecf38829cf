"""Smaller maps from fitted ones: low rank where it costs least, and one reduced reading of the text for all layers.

Knows maps, the statistics of what they read, and how much each direction of their outputs matters; no models. With C the
features' covariance, W a layer's map and G = L Lᵀ what an error in its outputs costs, the map of rank r that costs least is

    Ŵ = W L V Vᵀ L⁻¹,   Lᵀ Wᵀ C W L = V Λ Vᵀ   (the leading r eigenvectors)

and it costs Σ_{i>r} Λ_i (reduced-rank regression, Izenman 1975). G is what the target minds (`sensitivity`), or, where no model
is asked, each output in units of its own deviation. Ranks of all layers are chosen under one budget: the next dim goes where it
saves most per byte, or per FLOP.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.ridge import factor
from kvlingo.stats import GramStats, Moments
from kvlingo.translator import LayerMap, LinearMap, LowRankMap, Translator, TranslatorConfig, without_residual
from kvlingo.whitening import output_scale, reduced, text_through

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
STEADY = 1e-9
"""Damping of covariances, relative to their mean diagonal: features that never move have none."""
STILL = 1e-4
"""Outputs that move less than this share of the median one count as if they moved so much: a norm's weight may be 0."""
SURE = 0.2
"""So much of the mean of what the target minds is added in every direction: what a few hand-overs did not show may matter."""
TEXT_SHARES = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05)
"""Shares of the embedding's features that are tried for the text."""


@dataclass(frozen=True)
class CompressOptions:
    """How small.

    Fields:
        budget_bytes: what the weights may take when stored; chosen are the ranks that lose least within it.
        flops_share: the same as a share of the products that the whole maps take for a token, each target layer's counted for
            the tokens inside its window of a conversation of `tokens`; None for no such bound.
        rank: the same rank for all layers instead; None where a budget chooses.
        text_rank: features that a token's embedding is reduced to for all layers; 0 for none, None where the budget chooses.
        storage: how weights are stored, and so what a weight takes.
    """

    budget_bytes: int | None = None
    flops_share: float | None = None
    rank: int | None = None
    text_rank: int | None = None
    tokens: int = 2048
    storage: str = "bfloat16"

    @property
    def is_unbounded(self) -> bool:
        """Tell whether nothing says how small: the maps stay as they are, and are stored in fewer bytes alone."""
        return self == CompressOptions(tokens=self.tokens, storage=self.storage)


@dataclass(frozen=True)
class Compressed:
    """A smaller translator, and what was chosen for each layer."""

    translator: Translator
    layers: tuple[dict[str, Any], ...]
    text_rank: int

    def to_json(self) -> dict[str, Any]:
        """Return what was chosen, as plain JSON."""
        lost = [layer["lost_share"] for layer in self.layers]
        return {"text_rank": self.text_rank, "lost_share": sum(lost) / len(lost), "layers": list(self.layers)}


@dataclass(frozen=True)
class Spectrum:
    """What one layer's predictions are made of, in units of the outputs' deviations.

    Fields:
        moments: of its features and outputs, as the smaller map will read them.
        weight: [features, outputs] the map in the moments' standardised coordinates.
        bias: [outputs] for features centred at the moments' means.
        predicted: [outputs, outputs] the covariance of what it gives; whole: the same before the text was reduced, its diagonal.
        scale: [outputs] the outputs' deviations.
        metric: [outputs, outputs] L, with G = L Lᵀ what an error costs.
        gains: [outputs] what each further dim saves, falling.
        directions: [outputs, outputs] the dims, as columns.
        lost: what the reduced reading of the text has cost.
    """

    moments: Moments
    weight: Tensor
    bias: Tensor
    predicted: Tensor
    whole: Tensor
    scale: Tensor
    metric: Tensor
    gains: Tensor
    directions: Tensor
    lost: float

    @property
    def size(self) -> tuple[int, int]:
        """Return the numbers of features and outputs."""
        return self.weight.shape[0], self.weight.shape[1]

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return what the map's outputs go through: [outputs, rank], [rank, outputs]."""
        leading = self.directions[:, :rank]
        return self.metric @ leading, torch.linalg.solve(self.metric.T, leading).T

    def cost(self, rank: int) -> float:
        """Return what a rank costs in all; 0: the whole matrix."""
        return self.lost + (float(self.gains[rank:].sum()) if rank else 0.0)

    def lost_share(self, rank: int) -> float:
        """Return the mean share of the outputs' variance that a rank loses."""
        lost = self.whole - self.predicted.diagonal()
        if rank:
            enter, leave = self.factors(rank)
            dropped = torch.eye(len(self.scale), dtype=leave.dtype) - enter @ leave
            lost = lost + (dropped * (self.predicted @ dropped)).sum(0)
        return max(float((lost / self.scale.square()).mean()), 0.0)


@torch.no_grad()
def compress(
    translator: Translator,
    stats: GramStats,
    options: CompressOptions,
    sensitivity: Mapping[int, Tensor] | None = None,
) -> Compressed:
    """Return a smaller translator that gives nearly the same on text like that of the statistics.

    `sensitivity`: what the target minds of each layer's outputs, as `measure_sensitivity` gives it; None: every output alike, in
    units of its deviation.

    Raises `BadInput` for maps that have no matrix to factor, and for a budget that not even one dim a layer fits into.
    """
    refuse(translator, options)
    if translator.config.residual_width:  # untrained, it gives nothing
        translator = without_residual(translator)
    config = translator.config
    layers = [int(name) for name in translator.maps]
    minds = {layer: None if sensitivity is None else sensitivity[layer] for layer in layers}
    plain = {layer: spectrum(translator, stats, layer, minds[layer], None) for layer in layers}
    basis, text_losses = text_directions(translator, stats, plain) if config.reads_text else (None, [])
    text_rank = choose_text_rank(config, plain, text_losses, options)
    if text_rank and basis is not None:
        basis = basis[:, :text_rank]
        plain = {layer: spectrum(translator, stats, layer, minds[layer], basis) for layer in layers}
    small = replace(config, text_rank=text_rank)
    ranks = choose_ranks(small, plain, options)
    return assembled(translator, small, plain, ranks, basis if text_rank else None)


def refuse(translator: Translator, options: CompressOptions) -> None:
    """Raise `BadInput` where there is nothing to compress, or nothing says how far."""
    if sum(x is not None for x in (options.budget_bytes, options.flops_share, options.rank)) != 1:
        raise BadInput(
            "one thing must say how small the maps may become; give one of --budget-mb, --flops and --rank, or only --store"
        )
    if translator.text_basis is not None:
        raise BadInput("this translator is compressed already; give the one that it was made of")
    for layer, layer_map in translator.maps.items():
        assert isinstance(layer_map, LayerMap)
        if layer_map.residual is not None and bool(layer_map.residual.leave.weight.any()):
            raise BadInput(
                "a translator with a trained MLP residual can't be compressed; fit one without: kvlingo fit --map linear"
            )
        if not isinstance(layer_map.linear, LinearMap | LowRankMap):
            raise BadInput(
                f"the map of layer {layer} has no matrix that could be factored (it is {translator.config.map_kind}); "
                "compress a linear one, or give only --store int8"
            )


# --- what there is to save -------------------------------------------------------------------------------------------


def spectrum(
    translator: Translator, stats: GramStats, layer: int, minds: Tensor | None, basis: Tensor | None
) -> Spectrum:
    """Return what one layer's predictions are made of; with `basis` [hidden, features] of the text as reduced by it."""
    layer_map = translator.maps[str(layer)]
    assert isinstance(layer_map, LayerMap)
    moments = stats.moments(translator.config.blocks(layer), f"target/{layer}")
    scale = output_scale(layer_map, moments).to(moments.gram)
    scale = scale.clamp(min=max(STILL * float(scale.median()), 1e-30))
    metric = metric_of(scale, minds)
    weight, bias = in_coordinates(layer_map, moments)
    products = moments.gram @ weight
    predicted = weight.T @ products
    whole, costs = predicted.diagonal().clone(), cost_of(predicted, metric)
    if basis is not None:
        # The reduced map that comes closest to the whole one: what the text lost, other features take over where they can.
        through = text_through(products * moments.feature_scale[:, None], translator.config, layer, basis)
        moments = reduced(moments, translator.config, layer, basis)
        products = through / moments.feature_scale[:, None]
        weight = torch.cholesky_solve(products, factor(moments.gram, STEADY)[0])
        predicted = weight.T @ products
    gains, directions = torch.linalg.eigh(metric.T @ predicted @ metric)
    gains = gains.flip(0).clamp(min=0)
    lost = max(costs - cost_of(predicted, metric), 0.0)
    kept = moments.without_products()  # those of all layers would be gigabytes
    return Spectrum(kept, weight, bias, predicted, whole, scale, metric, gains, directions.flip(1), lost)


def cost_of(covariance: Tensor, metric: Tensor) -> float:
    """Return what errors of this covariance cost."""
    return float((metric * (covariance @ metric)).sum())


def metric_of(scale: Tensor, minds: Tensor | None) -> Tensor:
    """Return L, with L Lᵀ what an error in the outputs costs: in nats where it is known what the target minds."""
    if minds is None:
        return torch.diag(1 / scale)
    by_deviation = minds.to(scale) * torch.outer(scale, scale)
    mean = max(float(by_deviation.diagonal().mean()), 1e-30)
    by_deviation.diagonal().add_(SURE * mean)
    return torch.linalg.cholesky(0.5 * by_deviation) / scale[:, None]


def in_coordinates(layer_map: LayerMap, moments: Moments) -> tuple[Tensor, Tensor]:
    """Return a map's matrix and bias for features that are standardised by these moments, not by its own means and scales."""
    linear = layer_map.linear
    weight = linear.weight if isinstance(linear, LinearMap) else linear.down @ linear.up  # type: ignore[operator]
    weight = weight.to(moments.gram) / layer_map.feature_scale.to(moments.gram)[:, None]
    moved = moments.feature_mean - layer_map.feature_mean.to(moments.gram)
    return weight * moments.feature_scale[:, None], layer_map.bias.to(moments.gram) + moved @ weight


def text_directions(
    translator: Translator, stats: GramStats, spectra: Mapping[int, Spectrum]
) -> tuple[Tensor, list[float]]:
    """Return a basis [hidden, hidden] of what all maps read of a token's embedding, and what is lost beyond its first columns.

    With C the embeddings' covariance and A = Σ W G Wᵀ over layers and lags, its columns are C^-½ U for the leading
    eigenvectors U of C^½ A C^½. Losses: one for each number of columns kept, from none on.
    """
    config = translator.config
    name = f"embedding/{config.embedding_lags[0]}"
    moments = stats.moments((name,), next(iter(stats.squares)))
    covariance = moments.gram * torch.outer(moments.feature_scale, moments.feature_scale)
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=STEADY * float(values.mean()))
    root, inverse = (vectors * values.sqrt()) @ vectors.T, (vectors / values.sqrt()) @ vectors.T
    hidden = config.target.hidden_size
    energy = torch.zeros(hidden, hidden, dtype=covariance.dtype)
    for one in spectra.values():
        raw = (one.weight / one.moments.feature_scale[:, None]) @ one.metric
        for part in raw[len(raw) - hidden * len(config.embedding_lags) :].split(hidden):
            energy += part @ part.T
    gains, directions = torch.linalg.eigh(root @ energy @ root)
    gains = gains.flip(0).clamp(min=0)
    losses = (gains.sum() - torch.cat((gains.new_zeros(1), gains.cumsum(0)))).clamp(min=0).tolist()
    return inverse @ directions.flip(1), losses


# --- what is chosen --------------------------------------------------------------------------------------------------


def choose_text_rank(
    config: TranslatorConfig, spectra: Mapping[int, Spectrum], losses: Sequence[float], options: CompressOptions
) -> int:
    """Return how many features of an embedding are kept; 0: all. Tried are a few, with the ranks that each leaves room for."""
    if not config.reads_text:
        return 0
    hidden = config.target.hidden_size
    if options.text_rank is not None:
        return options.text_rank if options.text_rank < hidden else 0
    if options.rank is not None:
        return 0
    tried = {}
    for share in TEXT_SHARES:
        rank = max(1, round(share * hidden)) if share < 1 else 0
        ranks = fitting_ranks(replace(config, text_rank=rank), spectra, options)
        if ranks is not None:
            left = sum(float(one.gains[ranks[layer] :].sum()) for layer, one in spectra.items() if ranks[layer])
            tried[rank] = left + losses[rank or hidden]
    return min(tried, key=lambda rank: tried[rank]) if tried else max(1, round(TEXT_SHARES[-1] * hidden))


def choose_ranks(config: TranslatorConfig, spectra: Mapping[int, Spectrum], options: CompressOptions) -> dict[int, int]:
    """Return each layer's rank; 0: its matrix is kept whole. Raises `BadInput` for a budget that nothing fits into."""
    if options.rank is not None:
        return {layer: rank_or_whole(options.rank, *sizes(config, layer)) for layer in spectra}
    ranks = fitting_ranks(config, spectra, options)
    if ranks is None:
        raise too_small(config, options)
    return ranks


def too_small(config: TranslatorConfig, options: CompressOptions) -> BadInput:
    """Return what to say of a budget that not even one dim a layer fits into."""
    unit = "MB" if options.flops_share is None else "MFLOP for a token"
    return BadInput(
        f"a budget of {budget_of(config, options) / 1e6:.3g} {unit} is too small for {len(mapped_layers(config))} layers: "
        f"one dim a layer takes {least_cost(config, options) / 1e6:.3g}; give more"
    )


def refuse_budget(config: TranslatorConfig, options: CompressOptions) -> None:
    """Raise `BadInput` for a budget that nothing fits into, before anything is fitted."""
    least = replace(config, text_rank=max(1, round(TEXT_SHARES[-1] * config.target.hidden_size)))
    if options.rank is None and least_cost(least, options) > budget_of(config, options):
        raise too_small(least, options)


def mapped_layers(config: TranslatorConfig) -> range:
    """Return the target layers that have a map."""
    return range(config.first_layer, len(config.target))


def budget_of(config: TranslatorConfig, options: CompressOptions) -> float:
    """Return the budget, in bytes or in FLOPs for a token."""
    if options.flops_share is None:
        return float(options.budget_bytes or 0)
    plain = replace(config, text_rank=0)
    costs = ((unit_cost(plain, layer, options), sizes(plain, layer)) for layer in mapped_layers(plain))
    return options.flops_share * sum(unit * features * outputs for unit, (features, outputs) in costs)


def sizes(config: TranslatorConfig, layer: int) -> tuple[int, int]:
    """Return a layer's numbers of features and outputs."""
    return config.feature_width(layer), config.target.layers[layer].width


def rank_or_whole(rank: int, features: int, outputs: int) -> int:
    """Return the rank, or 0 where its two factors would be no smaller than the matrix."""
    return rank if rank * (features + outputs) < features * outputs else 0


def unit_cost(config: TranslatorConfig, layer: int, options: CompressOptions) -> float:
    """Return what one weight of a layer's map costs: bytes, or FLOPs for a token of the conversation."""
    if options.flops_share is None:
        return BYTES[options.storage]
    window = config.target.layers[layer].window
    return 2.0 * (1.0 if window is None else min(1.0, (window - 1) / options.tokens))


def fixed_cost(config: TranslatorConfig, options: CompressOptions) -> float:
    """Return what is paid whatever the ranks: means, scales and biases, and the basis of the text."""
    basis = config.target.hidden_size * config.text_rank
    if options.flops_share is not None:
        return 2.0 * basis
    shapes = [sizes(config, layer) for layer in mapped_layers(config)]
    vectors = sum(2 * features + outputs for features, outputs in shapes)
    if config.key_norms:
        vectors += sum(norm_width(config, layer) for layer in mapped_layers(config))
    scales = config.text_rank + sum(outputs for _, outputs in shapes) if options.storage == "int8" else 0
    return BYTES[options.storage] * basis + 4.0 * (vectors + scales)


def steps(
    config: TranslatorConfig, layer: int, gains: Tensor, options: CompressOptions
) -> Iterator[tuple[float, float]]:
    """Yield (gain, cost) of one dim of a layer after the other; the last step is the whole matrix."""
    features, outputs = sizes(config, layer)
    unit = unit_cost(config, layer, options)
    scale = 4.0 if options.storage == "int8" and options.flops_share is None else 0.0
    most = (features * outputs - 1) // (features + outputs)
    saved = gains.tolist()
    for gain in saved[:most]:
        yield gain, unit * (features + outputs) + scale
    if most < len(saved):
        yield sum(saved[most:]), max(unit * (features * outputs - most * (features + outputs)) - most * scale, 0.0)


def least_cost(config: TranslatorConfig, options: CompressOptions) -> float:
    """Return what one dim a layer costs."""
    return fixed_cost(config, options) + sum(
        next(iter(steps(config, layer, torch.ones(sizes(config, layer)[1]), options)))[1]
        for layer in mapped_layers(config)
    )


def norm_width(config: TranslatorConfig, layer: int) -> int:
    """Return the numbers that a layer's key norm takes."""
    shape, kind = config.target.layers[layer], config.key_norms[layer]
    return {"head": shape.key_dim, "layer": shape.key_width, None: 0}[kind]


def fitting_ranks(
    config: TranslatorConfig, spectra: Mapping[int, Spectrum], options: CompressOptions
) -> dict[int, int] | None:
    """Return the ranks that lose least within the budget; None where not even one dim a layer fits.

    The next dim goes where it saves most for its cost: gains fall within a layer, so that this is the best there is but for the
    last dim.
    """
    budget, spent = budget_of(config, options), least_cost(config, options)
    if spent > budget:
        return None
    taken = dict.fromkeys(spectra, 1)
    planned = {layer: list(steps(config, layer, one.gains, options)) for layer, one in spectra.items()}

    def offer(layer: int) -> tuple[float, int]:
        gain, cost = planned[layer][taken[layer]]
        return -gain / max(cost, 1e-30), layer

    waiting = [offer(layer) for layer in spectra if len(planned[layer]) > 1]
    heapq.heapify(waiting)
    while waiting:
        _, layer = heapq.heappop(waiting)
        cost = planned[layer][taken[layer]][1]
        if spent + cost > budget:
            continue  # another layer's dims may be cheaper
        spent, taken[layer] = spent + cost, taken[layer] + 1
        if taken[layer] < len(planned[layer]):
            heapq.heappush(waiting, offer(layer))
    return {layer: rank_or_whole(rank, *sizes(config, layer)) for layer, rank in taken.items()}


# --- the smaller maps ------------------------------------------------------------------------------------------------


def assembled(
    translator: Translator,
    config: TranslatorConfig,
    spectra: Mapping[int, Spectrum],
    ranks: Mapping[int, int],
    basis: Tensor | None,
) -> Compressed:
    """Write the chosen dims into a translator of the chosen shape."""
    of_all = tuple(ranks.get(layer, 0) for layer in range(len(config.target)))
    config = replace(config, map_kind="lowrank", rank=max(of_all), ranks=of_all)
    if not any(of_all):
        config = replace(config, map_kind="linear", rank=0, ranks=())
    like = next(translator.maps.parameters())
    small = Translator(config).to(like)
    if basis is not None and small.text_basis is not None:
        small.text_basis.copy_(basis)
    told = []
    for layer, one in spectra.items():
        layer_map, old = small.maps[str(layer)], translator.maps[str(layer)]
        assert isinstance(layer_map, LayerMap)
        assert isinstance(old, LayerMap)
        fill(layer_map, one, ranks[layer])
        if layer_map.norm_kind:
            layer_map.key_norm_weight.copy_(old.key_norm_weight)
        rank = ranks[layer]
        told.append({"layer": layer, "rank": rank, "lost_share": one.lost_share(rank), "cost": one.cost(rank)})
    return Compressed(small.eval(), tuple(told), config.text_rank)


def fill(layer_map: LayerMap, one: Spectrum, rank: int) -> None:
    """Write one layer's leading dims, or its whole matrix where `rank` is 0, into its map."""
    layer_map.feature_mean.copy_(one.moments.feature_mean)
    layer_map.feature_scale.copy_(one.moments.feature_scale)
    layer_map.bias.copy_(one.bias)
    linear = layer_map.linear
    if isinstance(linear, LowRankMap):
        enter, leave = one.factors(rank)
        linear.down.copy_(one.weight @ enter)
        linear.up.copy_(leave)
    else:
        assert isinstance(linear, LinearMap)
        linear.weight.copy_(one.weight)
