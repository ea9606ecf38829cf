"""The target's own judgement: an error counts as much as the target's queries see of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvlingo.corpus import Example
from kvlingo.evaluation import EvaluationOptions, attention_cosine
from kvlingo.judging import held_out_examples, held_out_kl
from kvlingo.language_model import LanguageModel, read
from kvlingo.shapes import FitOptions
from kvlingo.translator import LayerMap, Translator, identity_translator
from tests import tiny

UNSEEN, SEEN = (2, 3, 6, 7), (0, 1, 4, 5)  # dims of a key, by whole rotary planes (d and d + 4)


@cache
def lm() -> LanguageModel:
    """A model whose queries never look at half of every key."""
    model = tiny.llama()

    def make() -> object:
        return model

    half_blind = tiny.language_model(make)
    with torch.no_grad():
        for layer in half_blind.model.model.layers:
            heads = layer.self_attn.q_proj.weight.unflatten(0, (-1, tiny.SHAPE["head_dim"]))
            heads[:, list(UNSEEN)] = 0
    tiny.assert_context_matters(half_blind)
    return half_blind


@cache
def judged() -> list[Example]:
    options = FitOptions(context_tokens=(48,), held_out_examples=2)
    return held_out_examples(tiny.documents(2), lm(), lm(), options)


@torch.no_grad()
def spoiled(dims: tuple[int, ...]) -> Translator:
    """Return the exact translator with the same error added to these dims of every key."""
    translator = identity_translator(lm().geometry, torch.float64)
    for layer_map in translator.maps.values():
        assert isinstance(layer_map, LayerMap)
        keys = layer_map.bias[: layer_map.shape.key_width].unflatten(0, (layer_map.shape.kv_heads, -1))
        keys[:, list(dims)] += torch.tensor([3.0, -2.0, 1.0, 2.0], dtype=torch.float64)
    return translator


def squared_error(translator: Translator) -> float:
    """Return the error that a fit would see: over all keys and values, whoever looks at them."""
    kv = read(lm(), lm().ids(judged()[0].source.ids))
    total = 0.0
    for layer, layer_map in translator.maps.items():
        native = kv.flat(int(layer))[0]
        assert isinstance(layer_map, LayerMap)
        total += float((layer_map.linear(native) + layer_map.bias - native).square().sum())
    return total


def test_an_error_counts_where_queries_look_whatever_its_size() -> None:
    unseen, seen = spoiled(UNSEEN), spoiled(SEEN)
    assert squared_error(unseen) == pytest.approx(squared_error(seen))
    kl = {name: held_out_kl(lm(), lm(), t, judged()) for name, t in (("unseen", unseen), ("seen", seen))}
    assert kl["unseen"] == pytest.approx(0, abs=1e-10)
    assert kl["seen"] is not None
    assert kl["seen"] > 0.05
    cosines = [attention_cosine(lm(), lm(), t, judged(), EvaluationOptions()) for t in (unseen, seen)]
    assert cosines[0] is not None
    assert cosines[1] is not None
    assert cosines[0]["worst_layer"] == pytest.approx(1, abs=1e-9)
    assert cosines[1]["worst_layer"] < 0.98
