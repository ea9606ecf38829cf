"""Smaller maps: what a rank loses is what was told, nothing loses less, budgets are kept, and what is exact stays exact."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlingo.compression import Compressed, CompressOptions, compress, fitting_ranks, refuse_budget
from kvlingo.errors import BadInput
from kvlingo.geometry import Geometry, LayerGeometry, LayerRope
from kvlingo.shapes import FitOptions, candidate_blocks
from kvlingo.stats import GramStats
from kvlingo.store import pack, packed_bytes
from kvlingo.translator import LayerMap, LinearMap, LowRankMap, Translator, TranslatorConfig
from kvlingo.whitening import coordinates, map_moments

HIDDEN, TOKENS = 8, 400


def layer(kv_heads: int, key_dim: int, value_dim: int, window: int | None = None) -> LayerGeometry:
    return LayerGeometry(kv_heads, key_dim, value_dim, window, LayerRope(None, "half", "half", key_dim))


SOURCE = Geometry((layer(2, 4, 3),) * 4, HIDDEN, 11, 64)
TARGET = Geometry((layer(1, 6, 5), layer(2, 4, 3, 17), layer(2, 5, 5)), HIDDEN, 11, 64)
CONFIG = TranslatorConfig(SOURCE, TARGET, ((0, 1), (1, 2), (2, 3)), source_lags=(0, 1), embedding_lags=(0, 1))
FIT = FitOptions(reach=1, shift=0, source_lags=(0, 1), embedding_lags=(0, 1))


def rows(config: TranslatorConfig = CONFIG) -> dict[str, Tensor]:
    """Return features that lean on each other, of very different scales, and outputs of even more different ones."""
    generator = torch.Generator().manual_seed(0)
    names = sorted({b for i in range(3) for b in candidate_blocks(config, i, FIT)})
    hidden = torch.randn(TOKENS, 30, dtype=torch.float64, generator=generator)
    found = {}
    for name in names:
        mix = torch.randn(30, config.width(name), dtype=torch.float64, generator=generator)
        scale = torch.rand(config.width(name), dtype=torch.float64, generator=generator) * 10
        found[name] = (
            5
            + (hidden @ mix + torch.randn(TOKENS, config.width(name), dtype=torch.float64, generator=generator)) * scale
        )
    for number, shape in enumerate(TARGET.layers):
        scale = 10 ** torch.linspace(-2, 2, shape.width, dtype=torch.float64)
        found[f"target/{number}"] = torch.randn(TOKENS, shape.width, dtype=torch.float64, generator=generator) * scale
    return found


ROWS = rows()


def statistics() -> GramStats:
    names = tuple(ROWS)
    stats = GramStats(
        {name: x.shape[1] for name, x in ROWS.items()},
        [(a, b) for a in names for b in names if not a.startswith("target")],
        tuple(n for n in names if n.startswith("target")),
    )
    stats.add(ROWS)
    return stats


STATS = statistics()


def fitted(config: TranslatorConfig = CONFIG, rank: int | None = None) -> Translator:
    """Return maps whose outputs' variances are as uneven as the target's; with `rank` of so few dims, means of their own."""
    torch.manual_seed(1)
    translator = Translator(config).double()
    with torch.no_grad():
        for name, layer_map in translator.maps.items():
            assert isinstance(layer_map, LayerMap)
            moments = STATS.moments(config.blocks(int(name)), f"target/{name}")
            layer_map.feature_mean.copy_(moments.feature_mean + 1)
            layer_map.feature_scale.copy_(moments.feature_scale * 2)
            layer_map.bias.normal_()
            linear = layer_map.linear
            scale = moments.output_variance.sqrt()
            if isinstance(linear, LinearMap):
                inputs, outputs = linear.weight.shape
                linear.weight.copy_(
                    torch.randn(inputs, rank or outputs) @ torch.randn(rank or outputs, outputs) * scale * 0.1
                )
            elif isinstance(linear, LowRankMap):
                linear.down.normal_()
                linear.up.copy_(torch.randn_like(linear.up) * scale * 0.1)
    return translator.eval()


def outputs(translator: Translator) -> dict[int, Tensor]:
    """Return what every map gives for the rows of the statistics: [tokens, width]."""
    found = {}
    for name, layer_map in translator.maps.items():
        assert isinstance(layer_map, LayerMap)
        blocks = [
            translator.read_text(ROWS[b]) if b.startswith("embedding") else ROWS[b]
            for b in translator.config.blocks(int(name))
        ]
        with torch.no_grad():
            keys, values = layer_map(torch.cat(blocks, dim=1))
        found[int(name)] = torch.cat((keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)), dim=-1)[0]
    return found


def lost(small: Translator, whole: Translator) -> dict[int, float]:
    """Return the mean square by which outputs differ, each in units of its variance in the text."""
    a, b = outputs(small), outputs(whole)
    return {i: float(((a[i] - b[i]).square().mean(0) / ROWS[f"target/{i}"].var(0, correction=0)).mean()) for i in a}


def told(of: Compressed) -> dict[int, float]:
    return {one["layer"]: one["lost_share"] for one in of.layers}


def compressed(translator: Translator, **options: Any) -> Compressed:
    return compress(translator, STATS, CompressOptions(**options))


# --- what is lost ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text_rank", [0, 5, 2])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_what_is_told_to_be_lost_is_lost(rank: int, text_rank: int) -> None:
    whole = fitted()
    small = compressed(whole, rank=rank, text_rank=text_rank)
    measured = lost(small.translator, whole)
    for index, share in told(small).items():
        assert share == pytest.approx(measured[index], rel=1e-6)
        assert share > 1e-4


def test_no_other_directions_lose_less() -> None:
    """Against the plain singular vectors of the matrix, and against many random changes of the ones that were chosen."""
    whole = fitted()
    small = compressed(whole, rank=3, text_rank=0).translator
    least = lost(small, whole)
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        other = compressed(whole, rank=3, text_rank=0).translator
        with torch.no_grad():
            for parameter in other.maps.parameters():
                if parameter.ndim == 2:
                    noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
                    parameter.mul_(1 + 0.02 * noise)
        assert all(lost(other, whole)[i] > least[i] for i in least)
    plain = compressed(whole, rank=3, text_rank=0).translator
    with torch.no_grad():
        for name, layer_map in plain.maps.items():
            u, s, vh = torch.linalg.svd(whole.maps[name].get_submodule("linear").get_parameter("weight") / 2)
            layer_map.get_submodule("linear").get_parameter("down").copy_(u[:, :3] * s[:3] * 2)
            layer_map.get_submodule("linear").get_parameter("up").copy_(vh[:3])
    assert all(lost(plain, whole)[i] > 1.05 * least[i] for i in least)


def test_maps_of_few_dims_lose_nothing() -> None:
    whole = fitted(rank=2)
    assert max(lost(compressed(whole, rank=2, text_rank=0).translator, whole).values()) < 1e-12
    assert min(lost(compressed(whole, rank=1, text_rank=0).translator, whole).values()) > 1e-3


def test_low_rank_maps_become_smaller_too() -> None:
    whole = fitted(replace(CONFIG, map_kind="lowrank", rank=6))
    small = compressed(whole, rank=4, text_rank=0)
    assert small.translator.config.ranks == (0, 4, 4)
    assert told(small) == pytest.approx(lost(small.translator, whole), rel=1e-6)


def test_text_that_is_read_through_few_features_loses_nothing_by_them() -> None:
    whole = fitted()
    with torch.no_grad():  # all layers and lags read the same two directions of an embedding
        directions = torch.randn(HIDDEN, 2, dtype=torch.float64)
        for name, layer_map in whole.maps.items():
            weight = layer_map.get_submodule("linear").get_parameter("weight")
            mine = torch.randn(2, 2, weight.shape[1], dtype=torch.float64) * ROWS[f"target/{name}"].std(0) * 0.01
            for lag in range(2):
                at = slice(len(weight) - (2 - lag) * HIDDEN, len(weight) - (1 - lag) * HIDDEN)
                weight[at] = layer_map.feature_scale[at, None] * (directions @ mine[lag])  # type: ignore[index, operator]
    small = compressed(whole, budget_bytes=10**9, text_rank=2)
    assert small.translator.config.map_kind == "linear"
    assert small.translator.config.text_rank == 2
    assert max(lost(small.translator, whole).values()) < 1e-12
    assert min(lost(compressed(whole, budget_bytes=10**9, text_rank=1).translator, whole).values()) > 1e-4


# --- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_a_budget_is_kept_and_used(storage: Any) -> None:
    whole = fitted()
    kept = []
    for budget in (2200, 2800, 3600, 4500) if storage == "float32" else (1400, 2000, 3000, 4500):
        small = compressed(whole, budget_bytes=budget, storage=storage)
        took = sum(x.numel() * x.element_size() for x in pack(small.translator, storage).values())
        assert packed_bytes(small.translator.config, storage) == took
        assert took <= budget
        if any(small.translator.config.ranks):
            assert took > 0.8 * budget
        kept.append(sum(told(small).values()))
    assert kept == sorted(kept, reverse=True), "more room never loses more"
    assert kept[0] > kept[-1]


def test_ranks_go_where_they_save_most() -> None:
    """Of all ranks that take no more bytes, none lose less than those chosen (but for the last dim, which may not fit)."""
    whole = fitted()
    budget = 2600
    chosen = compressed(whole, budget_bytes=budget, text_rank=0)
    least = sum(told(chosen).values())
    costs, losses = {}, {}
    for rank in range(1, 12):
        one = compressed(whole, rank=rank, text_rank=0)
        losses[rank] = {i: share * TARGET.layers[i].width for i, share in told(one).items()}
        costs[rank] = packed_bytes(one.translator.config, "bfloat16")
    mine = sum(share * TARGET.layers[i].width for i, share in told(chosen).items())
    fitting = [sum(losses[rank].values()) for rank in costs if costs[rank] <= budget]
    assert mine <= min(fitting)
    assert least > 0
    assert len({r for r in chosen.translator.config.ranks if r}) > 1, "layers differ, and so do their ranks"


def test_a_window_makes_a_layer_s_dims_cheap_in_flops() -> None:
    whole = fitted()
    all_tokens = compressed(whole, flops_share=0.5, text_rank=0, tokens=16).translator.config.ranks
    long = compressed(whole, flops_share=0.5, text_rank=0, tokens=160).translator.config.ranks
    assert long[1] == 0 or long[1] > all_tokens[1], "a layer that slides is mapped in its last 16 tokens alone"


def test_a_budget_is_refused_before_anything_is_fitted() -> None:
    refuse_budget(CONFIG, CompressOptions(budget_bytes=1400))
    with pytest.raises(BadInput, match="too small for 2 layers"):
        refuse_budget(CONFIG, CompressOptions(budget_bytes=900))


def test_a_residual_that_was_never_trained_is_left_out() -> None:
    whole = fitted(replace(CONFIG, residual_width=3))
    small = compressed(whole, rank=3, text_rank=0)
    assert small.translator.config.residual_width == 0
    assert told(small) == pytest.approx(lost(small.translator, whole), rel=1e-6)


def test_room_for_everything_changes_nothing() -> None:
    whole = fitted()
    small = compressed(whole, budget_bytes=10**9)
    assert small.translator.config == CONFIG
    assert max(lost(small.translator, whole).values()) < 1e-20


@pytest.mark.parametrize(("storage", "text_rank"), [("bfloat16", 512), ("int8", 0)])
def test_a_pair_of_32_layers_fits_into_150_mb(storage: Any, text_rank: int) -> None:
    """By arithmetic, which the tests above hold against real files: 1,024 features of keys and values a side, hidden 4,096."""
    side = Geometry((layer(4, 128, 128),) * 32, 4096, 128_000, None)
    near = tuple(tuple(range(max(0, i - 1), min(32, i + 2))) for i in range(32))
    config = TranslatorConfig(side, side, near, embedding_lags=(0, 1))
    assert packed_bytes(config, "float32") > 1.4e9
    options = CompressOptions(budget_bytes=150_000_000, storage=storage)
    alike = torch.linspace(1.0, 0.1, 1024)
    spectra: Any = {i: SimpleNamespace(gains=alike) for i in range(1, 32)}
    small = replace(config, map_kind="lowrank", text_rank=text_rank)
    ranks = fitting_ranks(small, spectra, options)
    assert ranks is not None
    assert min(ranks.values()) > 350
    took = packed_bytes(replace(small, rank=max(ranks.values()), ranks=(0, *ranks.values())), storage)
    assert 149e6 < took <= 150e6


# --- what can't be done ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({}, {}, "one of --budget-mb, --flops and --rank"),
        ({"rank": 2, "flops_share": 0.5}, {}, "one of --budget-mb, --flops and --rank"),
        ({"budget_bytes": 100}, {}, "too small for 2 layers: one dim a layer takes"),
        ({"flops_share": 0.001}, {}, "MFLOP for a token is too small"),
        ({"rank": 2}, {"residual_width": 3}, "MLP residual"),
        ({"rank": 2}, {"map_kind": "headwise"}, "it is headwise"),
        ({"rank": 2}, {"text_rank": 3}, "compressed already"),
    ],
)
def test_what_is_refused(options: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    translator = Translator(replace(CONFIG, **changes)).double()
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.fill_(1.0)
    with pytest.raises(BadInput, match=words):
        compressed(translator, **options)


# --- what others do with it ----------------------------------------------------------------------------------------------


def test_a_config_is_restored() -> None:
    small = compressed(fitted(), budget_bytes=2600).translator.config
    assert TranslatorConfig.from_json(small.to_json()) == small
    assert small.ranks
    assert {"ranks", "text_rank"}.isdisjoint(CONFIG.to_json()), "older versions read what is not compressed"


def test_moments_are_those_of_what_the_maps_read() -> None:
    """Training whitens by them: against the covariance of the reduced features themselves."""
    small = compressed(fitted(), rank=3, text_rank=4).translator
    moments = map_moments(small, STATS, 1)
    blocks = [small.read_text(ROWS[b]) if b.startswith("embedding") else ROWS[b] for b in small.config.blocks(1)]
    features = torch.cat(blocks, dim=1).detach()
    torch.testing.assert_close(moments.feature_mean, features.mean(0))
    torch.testing.assert_close(moments.feature_scale, features.std(0, correction=0))
    torch.testing.assert_close(moments.gram, torch.corrcoef(features.T))
    found = coordinates(small, STATS, 1e-3)
    assert all(c.left is not None for c in found if c.parameter.shape[-1] == 3 and c.parameter.ndim == 2)
