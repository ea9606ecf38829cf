"""What the target minds: gradients against differences, and errors where it does not mind."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor

from kvlingo.compression import Compressed, CompressOptions, compress
from kvlingo.corpus import Example, random_examples
from kvlingo.fitting import Fit, fit
from kvlingo.judging import translated_logits
from kvlingo.language_model import LanguageModel, read
from kvlingo.metrics import kl_nats
from kvlingo.models import wrap
from kvlingo.sensitivity import SensitivityOptions, measure_sensitivity, of_example, options_for
from kvlingo.shapes import FitOptions
from kvlingo.translator import LayerMap, Translator
from tests import tiny
from tests.tiny import unrelated_pair as pair

FIT = FitOptions(
    reach=0,
    shift=0,
    tokens=700,
    context_tokens=(48,),
    chat_share=0.0,
    held_out_share=0.2,
    held_out_examples=1,
    dampings=(1e-2,),
)


@cache
def fitted() -> Fit:
    return fit(*pair(), tiny.documents(), FIT)


@cache
def blind() -> tuple[LanguageModel, LanguageModel]:
    """Return a pair whose target never looks at half of each head's values."""
    source, target = pair()
    model = tiny.clone(target.model)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.o_proj.weight
            weight.view(weight.shape[0], -1, 16)[:, :, 8:] = 0
    return source, wrap(model, target.tokenizer, name="blind")


@cache
def example() -> Example:
    source, target = pair()
    return random_examples(
        tiny.documents(),
        source.tokenizer,
        target.tokenizer,
        context_tokens=(40,),
        continuation_tokens=16,
        chat_share=0.0,
        seed="one",
        count=1,
    )[0]


def logits_of(translator: Translator, models: tuple[LanguageModel, LanguageModel] | None = None) -> Tensor:
    """Return what the target predicts, the maps computed the plain way: hooks are seen."""
    source, target = models or pair()
    with torch.no_grad():
        source_kv = read(source, source.ids(example().source.ids))
    with torch.enable_grad():
        return translated_logits(translator, target, example(), source_kv, tail=1).detach().double()


def disturbed(layer: int, covariance: Tensor, seed: int) -> Translator:
    """Return the translator with an error of this covariance in one layer's outputs, drawn anew for each token."""
    translator = copy.deepcopy(fitted().translator).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(len(covariance), dtype=covariance.dtype))

    def noisy(_module: object, _inputs: object, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, dtype=torch.float64, generator=generator)
        return output + (noise @ root.T).to(output)

    layer_map = translator.maps[str(layer)]
    assert isinstance(layer_map, LayerMap)
    layer_map.linear.register_forward_hook(noisy)
    return translator


@pytest.mark.parametrize("layer", [1, 3])
def test_it_foretells_what_an_error_costs(layer: int) -> None:
    """½ tr(F Σ) against the KL that errors of covariance Σ really cause, in a direction that is minded and in one that is not."""
    # Directions from one estimate, their cost from another: the largest of an estimate's own values is too large.
    translator = fitted().translator
    seen, found = (
        of_example(translator, *pair(), example(), 120, torch.Generator().manual_seed(seed))[layer] for seed in range(2)
    )
    values, vectors = torch.linalg.eigh(seen)
    before = logits_of(disturbed(layer, torch.zeros_like(found), 0))
    for which, size in ((-1, 1e-3), (len(values) // 2, 1e-4)):
        direction = vectors[:, which]
        scale = (2 * size / (direction @ found @ direction)).sqrt()
        covariance = scale.square() * torch.outer(direction, direction)
        foretold = 0.5 * float((found * covariance).sum())
        real = torch.stack(
            [kl_nats(before, logits_of(disturbed(layer, covariance, seed))).mean() for seed in range(24)]
        ).mean()
        assert foretold == pytest.approx(size, rel=1e-6)
        assert 0.5 * foretold < float(real) < 2 * foretold


def test_what_the_target_does_not_mind_is_left_out_first() -> None:
    """Values that are never looked at get no dims: at the same ranks the target says more nearly the same."""
    fitted_blind = fit(*blind(), tiny.documents(), FIT)
    translator, stats = fitted_blind.translator, fitted_blind.stats
    options = SensitivityOptions(examples=4, context_tokens=(40,), continuation_tokens=16, draws=8, chat_share=0.0)
    minds = measure_sensitivity(translator, *blind(), tiny.documents(), options)
    unseen = torch.tensor([32 + 16 * head + dim for head in range(2) for dim in range(8, 16)])
    for layer, matrix in minds.items():
        assert float(matrix.diagonal()[unseen].sum()) < 1e-12 * float(matrix.trace()), layer
    whole = logits_of(translator, blind())

    def distance(small: Compressed) -> float:
        return float(kl_nats(whole, logits_of(small.translator, blind())).mean())

    for rank in (16, 24):
        one = compress(translator, stats, CompressOptions(rank=rank))
        other = compress(translator, stats, CompressOptions(rank=rank), minds)
        assert distance(other) < 0.8 * distance(one)
        assert other.to_json()["lost_share"] > one.to_json()["lost_share"]


def test_nothing_of_it_is_left_behind() -> None:
    translator = copy.deepcopy(fitted().translator).requires_grad_(True)
    before = logits_of(translator)
    options = SensitivityOptions(examples=1, context_tokens=(40,), continuation_tokens=8, draws=1)
    first, second = (measure_sensitivity(translator, *pair(), tiny.documents(), options) for _ in range(2))
    assert all(torch.equal(first[i], second[i]) for i in first)
    assert all(p.requires_grad and p.grad is None for p in translator.parameters())
    assert not any(m._forward_hooks for m in translator.modules())
    assert torch.equal(logits_of(translator), before)


def test_contexts_are_those_that_were_fitted_on() -> None:
    assert options_for(FIT).context_tokens == (48,)
    assert options_for(FIT).continuation_tokens == 24
    assert options_for(FitOptions()).context_tokens == (192, 512, 768)
    assert options_for(FitOptions()).continuation_tokens == 48
