"""Measure what reading and translating cost on this machine, on the models' own shapes, for `cost` to predict from.

Knows models, maps and times. A model's rates come from its first layers alone, so that they are had in seconds; a pair's from its
maps' own products and from a few short hand-overs. What is concluded holds for this machine, these shapes and this dtype.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from kvlingo.cache import native_cache
from kvlingo.cost import (
    PIECE_TOKENS,
    HandoffCost,
    MapRates,
    Rates,
    ReadingRates,
    TargetCost,
    compared_flops,
    handoff_s,
    laid_out_bytes,
    moved_bytes,
    weight_bytes,
)
from kvlingo.folding import product_dtype
from kvlingo.language_model import LanguageModel, decoder_layers, first_layers
from kvlingo.probing import decoder_of, run
from kvlingo.timing import timed_ms
from kvlingo.translator import Translator

SAMPLED_LAYERS = 2
MOST_SAMPLED_LAYERS = 8  # a model's layers of every kind are among its first so many, or the rest is taken to be alike
CALLED_LAYERS = 6
SAMPLED_TOKENS = (64, 256, 1024, 4096)
HANDED_TOKENS = (256, 1024)
PRODUCT_TOKENS = 1024
MOST_ROWS = 4096
REPEATS = 3
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
Ready = Callable[[], Any]


# --- what one token costs --------------------------------------------------------------------------------------------


def read_cost(lm: LanguageModel, layers: int | None = None) -> TargetCost:
    """Return what one token costs a loaded model, or its first layers alone."""
    _, modules = decoder_layers(decoder_of(lm.model))
    config = lm.model.config.get_text_config(decoder=True)
    kept = modules if layers is None else modules[:layers]
    owned = [
        shape for shape, place in zip(lm.geometry.layers, lm.geometry.cache_layers, strict=True) if place < len(kept)
    ]
    head = lm.model.get_output_embeddings()
    weights = sum(p.numel() for p in kept.parameters())
    return TargetCost(
        layer_weights=weights,
        query_widths=[int(config.num_attention_heads) * shape.key_dim for shape in owned],
        windows=[shape.window for shape in owned],
        active_weights=weights - idle_weights(kept, config),
        head_weights=0 if head is None else head.weight.numel(),
        cache_widths=[shape.width for shape in owned],
        bytes_per_value=lm.dtype.itemsize,
    )


def idle_weights(layers: nn.Module, config: Any) -> int:
    """Return the weights of the experts that one token does not pass through; experts are stacked, [experts, …]."""
    experts = next((int(getattr(config, name)) for name in EXPERTS if getattr(config, name, None)), 0)
    active = int(getattr(config, "num_experts_per_tok", 0) or 0)
    if not experts or not active:
        return 0
    stacked = sum(p.numel() for p in layers.parameters() if p.ndim == 3 and p.shape[0] == experts)
    return stacked - stacked * active // experts


def handoff_cost(translator: Translator) -> HandoffCost:
    """Return what one token costs a hand-over: each map's weights, and the features of the source layers that are read."""
    config = translator.config
    read = {layer for layers in config.source_layers for layer in layers}
    return HandoffCost(map_weights(translator), sum(config.source.layers[layer].width for layer in read))


def map_weights(translator: Translator) -> list[int]:
    """Return the number of weights of each target layer's map; 0 where a layer has none."""
    maps = translator.maps
    return [
        sum(p.numel() for p in maps[str(layer)].parameters()) if str(layer) in maps else 0
        for layer in range(len(translator.config.target))
    ]


# --- reading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_reading(lm: LanguageModel, *, repeats: int = REPEATS) -> ReadingRates:
    """Time passes of the model's first layers over one token and over several lengths; conclude its rates."""
    whole = int(lm.model.config.get_text_config(decoder=True).num_hidden_layers)
    s_per_byte = seconds_per_byte(lm)
    s_per_pass, s_per_layer = seconds_per_call(lm, min(CALLED_LAYERS, whole), s_per_byte, 5 * repeats)
    count = sampled_layers(lm)
    cost, room = read_cost(lm, count), lm.geometry.max_positions
    lengths = [n for n in SAMPLED_TOKENS if room is None or n <= room] or [room or 1]
    rows = [(2.0 * cost.token_weights * n, compared_flops(cost, n), laid_out_bytes(cost, n)) for n in lengths]
    calls = [-(-n // PIECE_TOKENS) * (s_per_pass + count * s_per_layer) for n in lengths]
    spent = [max(pass_of_first(lm, count, n, repeats) - known, 1e-9) for n, known in zip(lengths, calls, strict=True)]
    s_per_flop, s_per_attention_flop, s_per_weight_byte = not_negative(rows, spent)
    return ReadingRates(s_per_flop, s_per_attention_flop, s_per_byte, s_per_layer, s_per_pass, s_per_weight_byte)


def sampled_layers(lm: LanguageModel) -> int:
    """Return how many first layers are timed: enough for one that slides and one that does not, where there are both."""
    _, modules = decoder_layers(decoder_of(lm.model))
    windows = [layer.window for layer in lm.geometry.layers]
    first_of_each = [lm.geometry.cache_layers[windows.index(window)] + 1 for window in set(windows)]
    wanted = max(SAMPLED_LAYERS, *first_of_each)
    return min(len(modules), wanted if wanted <= MOST_SAMPLED_LAYERS else SAMPLED_LAYERS)


def pass_of_first(lm: LanguageModel, layers: int, tokens: int, repeats: int) -> float:
    """Return the seconds in which the first layers read `tokens` tokens in pieces, without an output head.

    They read into the model's own cache, as a re-prefill does: its sliding layers hold no more than their window.
    """
    view = first_layers(lm.model, layers)
    positions = torch.arange(tokens, device=lm.device)[None]
    ids = positions % lm.geometry.vocab_size

    def read() -> None:
        cache = native_cache(lm.model.config)
        for some, places in zip(ids.split(PIECE_TOKENS, dim=1), positions.split(PIECE_TOKENS, dim=1), strict=True):
            run(view, input_ids=some, position_ids=places, cache=cache)

    return median_s(read, lm, repeats)


def seconds_per_call(lm: LanguageModel, layers: int, s_per_byte: float, repeats: int) -> tuple[float, float]:
    """Return the seconds of a pass and of a layer's call, from passes of one and of several layers over one token."""
    counts = sorted({1, layers})
    rest = [pass_of_first(lm, n, 1, repeats) - weight_bytes(read_cost(lm, n), 1) * s_per_byte for n in counts]
    if len(counts) == 1:
        return 0.0, max(rest[0], 0.0)
    s_per_layer = min(max((rest[1] - rest[0]) / (layers - 1), 0.0), max(rest[1], 0.0) / layers)
    return max(rest[0] - s_per_layer, 0.0), s_per_layer


def seconds_per_byte(lm: LanguageModel) -> float:
    """Return how long it takes to read a byte of the model's matrices, one vector multiplied with each."""
    _, layers = decoder_layers(decoder_of(lm.model))
    matrices = [p for p in layers.parameters() if p.ndim == 2 and p.device.type != "meta"]
    vectors = {m.shape[1]: torch.ones(m.shape[1], device=m.device, dtype=m.dtype) for m in matrices}

    def read() -> None:
        for matrix in matrices:
            torch.mv(matrix, vectors[matrix.shape[1]])

    return median_s(read, lm, REPEATS) / sum(m.numel() * m.element_size() for m in matrices)


def median_s(ready: Ready, lm: LanguageModel, repeats: int) -> float:
    """Return the median seconds of a call, after one that is not counted."""
    ready()
    return statistics.median(timed_ms(ready, lm) for _ in range(repeats)) / 1e3


def not_negative(
    rows: Sequence[Sequence[float]], values: Sequence[float], units: Sequence[float] | None = None
) -> list[float]:
    """Return x ≥ 0 for which rows · x comes closest to the values, each difference as a share of its unit (the value).

    A cost below nothing is no cost: of all choices of columns that give none, the best is taken. Few columns: all are tried.
    """
    unit = torch.tensor(units or values, dtype=torch.float64)
    target = torch.tensor(values, dtype=torch.float64)[:, None] / unit[:, None]
    matrix = torch.tensor(rows, dtype=torch.float64) / unit[:, None]
    scale = matrix.norm(dim=0).clamp(min=1e-300)
    columns = range(matrix.shape[1])
    best, least = [0.0] * len(columns), float("inf")
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            part = matrix[:, chosen] / scale[list(chosen)]
            solved = torch.linalg.lstsq(part, target, driver="gelsd").solution
            error = float((part @ solved - target).square().sum())
            if bool((solved >= 0).all()) and error < least:
                found = dict(zip(chosen, (solved[:, 0] / scale[list(chosen)]).tolist(), strict=True))
                best, least = [found.get(column, 0.0) for column in columns], error
    return best


# --- translating -----------------------------------------------------------------------------------------------------


def measure_rates(
    target: LanguageModel,
    translator: Translator,
    handed: Sequence[tuple[int, float]],
    *,
    sink: int = 1,
    tail: int = 1,
    reading: ReadingRates | None = None,
) -> Rates:
    """Time the target's first layers and the maps' products; conclude a pair's rates.

    Args:
        handed: hand-overs that were timed whole: the target's tokens, seconds.
        reading: what reading costs the target, where that is measured already.
    """
    reading = reading or measure_reading(target)
    flops, seconds = time_products(translator, target, PRODUCT_TOKENS)
    s_per_flop = seconds / flops if flops else 0.0
    cost, handoff = read_cost(target), handoff_cost(translator)
    return Rates(reading, conclude_maps(cost, handoff, reading, s_per_flop, handed, sink=sink, tail=tail))


def conclude_maps(
    cost: TargetCost,
    handoff: HandoffCost,
    reading: ReadingRates,
    s_per_flop: float,
    handed: Sequence[tuple[int, float]],
    *,
    sink: int = 1,
    tail: int = 1,
) -> MapRates:
    """Return what is left of timed hand-overs when products and short passes are taken off, by byte and by hand-over."""
    alone = Rates(reading, MapRates(s_per_flop, 0.0, 0.0))
    known = [handoff_s(cost, handoff, alone, tokens, sink=sink, tail=tail) for tokens, _ in handed]
    rows = [(moved_bytes(cost, handoff, max(tokens - sink - tail, 0)), 1.0) for tokens, _ in handed]
    whole = [seconds for _, seconds in handed]
    s_per_byte, s_per_handoff = not_negative(rows, [max(a - b, 0.0) for a, b in zip(whole, known, strict=True)], whole)
    return MapRates(s_per_flop, s_per_byte, s_per_handoff)


def time_products(
    translator: Translator, target: LanguageModel, tokens: int, *, repeats: int = REPEATS
) -> tuple[float, float]:
    """Return the FLOPs of all maps' products for `tokens` tokens, and the seconds they take with nothing around them.

    This is the machine's own rate at the maps' shapes, in the dtype that the apply's products are made in: what the apply is
    compared with. More than `MOST_ROWS` rows are not multiplied at once: the rate no longer changes, and they would need much
    memory.
    """
    counted = Counter(product_shapes(translator, tokens))
    weight = next(translator.parameters())
    dtype = product_dtype(translator.maps, target.dtype)
    flops = seconds = 0.0
    for (rows, shape), times in counted.items():
        batch = shape[:-2]
        taken = min(rows, MOST_ROWS)
        left = torch.randn(*batch, taken, shape[-2], device=weight.device, dtype=dtype)
        right = torch.randn(*shape, device=weight.device, dtype=dtype)
        flops += times * 2.0 * rows * right.numel()
        seconds += times * rows / taken * median_s(partial(torch.matmul, left, right), target, repeats)
    return flops, seconds


def product_shapes(translator: Translator, tokens: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield for every product of every map its rows and its weight's shape, […, inputs, outputs]; inside windows only."""
    for layer, layer_map in translator.maps.items():
        window = translator.config.target.layers[int(layer)].window
        rows = tokens if window is None else min(tokens, window - 1)
        for module in layer_map.modules():
            for weight in module.parameters(recurse=False):
                if weight.ndim > 1 and rows:
                    yield rows, tuple((weight.T if isinstance(module, nn.Linear) else weight).shape)
