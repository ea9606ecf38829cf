"""Random configs of five families: the laws of a cache hold, or the model is refused. No crash, nothing silently wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvlingo.cache import full_cache, owning_layers
from kvlingo.cache_writing import write_cache
from kvlingo.errors import UnsupportedModel
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.models import wrap
from kvlingo.probing import run
from kvlingo.rope import Rotary
from tests import families, tiny

EXAMPLES = 200
EXACT = 1e-8
SMALL = {"hidden_size": 16, "intermediate_size": 16}
KINDS = {
    "llama": ("llama", ("default", "linear", "llama3", "yarn", "dynamic", "longrope")),
    "qwen": ("qwen3", ("default", "linear", "yarn", "dynamic")),
    "gemma3": ("gemma3", ("default", "linear", "llama3", "yarn")),
    "phi3": ("phi3", ("default", "longrope")),
    "glm": ("glm4", ("default", "linear", "yarn")),
}
PARTIAL = {"phi3": (0.5, 1.0), "glm": (0.25, 0.5, 1.0)}


@st.composite
def models(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a family and what its config has instead of the tiny one's."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    family, scalings = KINDS[kind]
    kv_heads = draw(st.sampled_from((1, 2, 4)))
    head_dim = draw(st.sampled_from((4, 8, 12)))
    layers = draw(st.integers(1, 3))
    changes: dict[str, Any] = {
        **SMALL,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
    }
    if kind == "phi3":  # its heads are as wide as hidden_size says
        changes["hidden_size"] = 4 * head_dim
    else:
        changes["head_dim"] = head_dim
    partial = draw(st.sampled_from(PARTIAL.get(kind, (1.0,))))
    theta = draw(st.sampled_from((100.0, 10_000.0, 5e6)))
    rope = scaled_rope(draw(st.sampled_from(scalings)), theta, partial, head_dim)
    changes["rope_parameters"] = rope
    if rope["rope_type"] == "dynamic":
        changes["max_position_embeddings"] = 64
    if kind == "gemma3":
        types = draw(st.lists(st.sampled_from((families.SLIDE, families.FULL)), min_size=layers, max_size=layers))
        changes |= {"layer_types": types, "sliding_window": draw(st.integers(2, 12)), "query_pre_attn_scalar": head_dim}
        changes["rope_parameters"] = {
            families.SLIDE: {"rope_type": "default", "rope_theta": 100.0},
            families.FULL: rope,
        }
    return family, changes


def scaled_rope(kind: str, theta: float, partial: float, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if partial != 1.0:
        rope["partial_rotary_factor"] = partial
    if kind != "default":
        rope["factor"] = 4.0
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = 64
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        planes = int(head_dim * partial) // 2
        rope |= {
            "short_factor": [1.0 + 0.1 * i for i in range(planes)],
            "long_factor": [2.0 + i for i in range(planes)],
        }
    return rope


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(models(), st.integers(1, 30), st.integers(0, 3))
def test_identity_of_random_configs(drawn: tuple[str, dict[str, Any]], prefix: int, seed: int) -> None:
    family, changes = drawn
    model = tiny.scaled(families.FAMILIES[family].make(**changes), seed=seed)
    lm = wrapped(model)
    if isinstance(lm, str):
        assert "\n" not in lm
        event("refused")
        return
    event(f"exact: {family}")
    ids = torch.randint(2, 250, (35,), generator=torch.Generator().manual_seed(seed))
    shapes_are_those_of_the_config(lm)
    positions_come_off(lm, ids)
    any_part_goes_on_as_the_whole(lm, ids, prefix)


def test_identity_laws_of_random_configs_can_fail() -> None:
    """Positions off by one, and a window one too narrow, break them."""
    lm = tiny.language_model("gemma3")
    ids = tiny.ids_of(lm, 35)
    positions_come_off(lm, ids)
    any_part_goes_on_as_the_whole(lm, ids, 20)

    class Late(Rotary):
        def rotate(self, keys: torch.Tensor, layer: int, positions: torch.Tensor) -> torch.Tensor:
            return super().rotate(keys, layer, positions + 1)

    late = replace(lm, rotary=Late(lm.rotary._angles, lm.rotary.layers))
    narrow = tuple(x if x.window is None else replace(x, window=x.window - 1) for x in lm.geometry.layers)
    narrower = replace(lm, geometry=replace(lm.geometry, layers=narrow))
    with pytest.raises(AssertionError):
        positions_come_off(late, ids)
    for broken in (late, narrower):  # a layer that lacks a token may also trip the model's own mask
        with pytest.raises((AssertionError, RuntimeError)):
            any_part_goes_on_as_the_whole(broken, ids, 20)
    with pytest.raises(AssertionError):
        shapes_are_those_of_the_config(narrower)


def wrapped(model: Any) -> LanguageModel | str:
    """Return the model as it is used, or the sentence that refuses it."""
    try:
        return wrap(model, tiny.byte_tokenizer())
    except UnsupportedModel as refused:
        return str(refused)


def shapes_are_those_of_the_config(lm: LanguageModel) -> None:
    config = lm.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or [families.FULL] * config.num_hidden_layers
    assert [(x.kv_heads, x.key_dim, x.value_dim) for x in lm.geometry.layers] == [
        (config.num_key_value_heads, head_dim, head_dim)
    ] * config.num_hidden_layers
    windows = [config.sliding_window if kind == families.SLIDE else None for kind in types]
    assert [layer.window for layer in lm.geometry.layers] == windows


def positions_come_off(lm: LanguageModel, ids: torch.Tensor) -> None:
    """A text read at another place has the same position-free keys; rotated again they are those of the cache."""
    free = read(lm, ids[:8])
    cache = full_cache(lm.model.config)
    places = torch.arange(20, 28)
    with torch.no_grad():
        run(lm.model, input_ids=ids[None, :8], position_ids=places[None], cache=cache)
    for index, layer in enumerate(owning_layers(cache, lm.geometry)):
        keys, values = lm.rotary.strip(layer.keys, layer.values, index, places)
        torch.testing.assert_close(keys, free.keys[index], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(values, free.values[index], atol=1e-5, rtol=1e-4)
        again, _ = lm.rotary.apply(keys, values, index, places)
        torch.testing.assert_close(again, layer.keys, atol=1e-12, rtol=1e-12)


def any_part_goes_on_as_the_whole(lm: LanguageModel, ids: torch.Tensor, prefix: int) -> None:
    """A KV cut anywhere is the KV of the shorter text; a sliding layer is given its window only; both go on exactly."""
    kv = read(lm, ids[:30]).narrow(0, prefix)
    cache = write_cache(kv, lm.rotary, lm.geometry, lm.model.config)
    for layer, shape in zip(cache.layers, lm.geometry.layers, strict=True):
        assert layer.get_seq_length() == prefix
        assert layer.keys is None or layer.keys.shape[2] == prefix - shape.first_held(prefix)
    got = prefill(lm, ids[prefix:], cache=cache, logits_to_keep=0).logits
    assert float((got - tiny.cold_logits(lm, ids)[prefix:]).abs().max()) < EXACT
