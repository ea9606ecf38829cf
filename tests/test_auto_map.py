"""Which map `--map auto` takes, and when the MLP residual stays."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvlingo import distillation
from kvlingo.distillation import Curve, Distilled, drop_idle_residual
from kvlingo.geometry import Geometry, LayerGeometry
from kvlingo.plots import running_mean
from kvlingo.shapes import RESIDUAL_WIDTH, FitOptions, base_config, choose_map
from kvlingo.translator import Translator, without_residual
from tests import tiny


def cache(layers: int, heads: int) -> Geometry:
    return Geometry((LayerGeometry(heads, 64, 64, None, None),) * layers, 512, 1000, None)


@pytest.mark.parametrize(
    ("source", "target", "source_weights", "target_weights", "residual"),
    [
        (cache(30, 3), cache(18, 2), 135, 270, 0),  # the target's cache is smaller
        (cache(18, 2), cache(18, 2), 100, 200, 0),  # equal
        (cache(18, 2), cache(30, 3), 270, 135, 0),  # large to small, although its cache is larger
        (cache(18, 2), cache(36, 8), 600, 4000, RESIDUAL_WIDTH),  # small to large
    ],
)
def test_auto(source: Geometry, target: Geometry, source_weights: int, target_weights: int, residual: int) -> None:
    chosen = choose_map(source, target, source_weights, target_weights)
    assert chosen == {"map_kind": "linear", "residual_width": residual}
    assert replace(FitOptions(), **chosen).residual_width == residual


@pytest.fixture
def with_residual() -> Translator:
    source, target = (
        tiny.language_model("llama", dtype=torch.float32),
        tiny.language_model("qwen3", dtype=torch.float32),
    )
    translator = Translator(base_config(source, target, FitOptions(residual_width=5)))
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.normal_()
    return translator


def test_without_residual_keeps_all_else(with_residual: Translator) -> None:
    linear = without_residual(with_residual)
    assert linear.config == replace(with_residual.config, residual_width=0)
    kept = linear.state_dict()
    assert {name for name in with_residual.state_dict() if name not in kept} == {
        name for name in with_residual.state_dict() if ".residual." in name
    }
    assert all(torch.equal(value, with_residual.state_dict()[name]) for name, value in kept.items())


@pytest.mark.parametrize(("kl_with", "kl_without", "kept"), [(0.1, 0.2, True), (0.2, 0.1, False), (0.1, 0.1, False)])
def test_the_residual_stays_only_if_it_helps(
    kl_with: float, kl_without: float, kept: bool, with_residual: Translator, monkeypatch: Any
) -> None:
    def judged_kl(translator: Translator, *_: Any) -> float:
        return kl_with if translator.config.residual_width else kl_without

    monkeypatch.setattr(distillation, "judged_kl", judged_kl)
    done = Distilled(with_residual, Curve(), best_step=3, steps=5, seconds=1.0)
    left = drop_idle_residual(done, None, [])  # type: ignore[arg-type]
    assert bool(left.translator.config.residual_width) is kept
    assert (left.best_step, left.steps) == (3, 5)


def test_a_linear_translator_is_not_judged_again(with_residual: Translator, monkeypatch: Any) -> None:
    monkeypatch.delattr(distillation, "judged_kl")
    done = Distilled(without_residual(with_residual), Curve(), 1, 1, 1.0)
    assert drop_idle_residual(done, None, []) is done  # type: ignore[arg-type]


def test_running_mean() -> None:
    assert running_mean([4.0, 2.0, 0.0, 6.0], share=0.5) == [4.0, 3.0, 1.0, 3.0]
    assert running_mean([5.0]) == [5.0]
