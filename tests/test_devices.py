"""Floating-point types and devices: each layer's cache where that layer computes, quantised models known as such."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlingo.fingerprints import fingerprint
from kvlingo.handoff import hand_off
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, layer_devices, prefill, read
from kvlingo.states import target_cache
from kvlingo.translator import Translator, TranslatorConfig, identity_translator
from tests import tiny

CPU, META = torch.device("cpu"), torch.device("meta")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def of_dtype(family: str, dtype: torch.dtype) -> LanguageModel:
    """Return the float64 tiny model with its weights rounded to `dtype`."""
    lm = tiny.language_model(family)
    return tiny.wrap(tiny.clone(lm.model).to(dtype), lm.tokenizer, name=f"{family}-{dtype}")


# --- floating-point types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("source_dtype", "target_dtype"), list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_hand_offs_between_types(family: str, source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    """No further from the target's own reading than the coarser type's rounding; the target's cache is in its own type."""
    source, target = of_dtype(family, source_dtype), of_dtype(family, target_dtype)
    done = hand_off(tiny.text_of_tokens(30), source, target, identity_translator(target.geometry))
    assert done.plan.fallback is None
    assert done.logits is not None
    assert {x.dtype for layer in done.state.cache.layers for x in (layer.keys, layer.values)} == {target_dtype}
    cold = tiny.cold_logits(target, tiny.ids_of(target, 30))[-1]
    lost = float(tiny.kl(cold.double()[None], done.logits.double()[None]))
    exact = tiny.cold_logits(tiny.language_model(family), tiny.ids_of(target, 30))[-1]
    noise = max(
        float(tiny.kl(exact[None], tiny.cold_logits(lm, tiny.ids_of(lm, 30))[-1].double()[None]))
        for lm in (source, target)
    )
    assert lost <= max(4 * noise, 1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_the_tolerance_of_types_would_catch(dtype: torch.dtype) -> None:
    source = of_dtype("llama", dtype)
    crossed = identity_translator(source.geometry)
    crossed.config = replace(crossed.config, source_layers=((1,), (0,), (2,)))
    done = hand_off(tiny.text_of_tokens(30), source, source, crossed)
    assert done.logits is not None
    cold = tiny.cold_logits(source, tiny.ids_of(source, 30))[-1]
    assert float(tiny.kl(cold.double()[None], done.logits.double()[None])) > 0.05


# --- where layers live -----------------------------------------------------------------------------------------------


def spread(lm: LanguageModel, *away: int) -> LanguageModel:
    """Return the model with some of its layers on another device: the meta device, which has no data."""
    model = tiny.clone(lm.model)
    for index in away:
        model.model.layers[index].to(META)
    return replace(lm, model=model)


def test_layers_say_where_they_live() -> None:
    lm = tiny.language_model("llama")
    assert layer_devices(lm.model) == (CPU, CPU, CPU)
    assert layer_devices(spread(lm, 1).model) == (CPU, META, CPU)
    hooked = spread(lm, 0, 2).model
    # What `device_map` leaves behind where weights wait elsewhere for their turn.
    hooked.model.layers[2]._hf_hook = SimpleNamespace(execution_device="cpu")
    assert layer_devices(hooked) == (META, CPU, CPU)


def places(cache: Any) -> list[torch.device]:
    assert all(layer.keys.device == layer.values.device for layer in cache.layers)
    return [layer.keys.device for layer in cache.layers]


@pytest.mark.parametrize("away", [(), (1,), (0, 2)])
def test_each_layer_s_cache_is_written_where_the_layer_lives(away: tuple[int, ...]) -> None:
    lm = tiny.language_model("llama")
    target = spread(lm, *away)
    written = target_cache(target, read(lm, tiny.ids_of(lm, 20)))
    assert places(written) == [META if index in away else CPU for index in range(3)]
    assert [layer.get_seq_length() for layer in written.layers] == [20] * 3


def test_a_source_spread_over_devices_is_brought_to_the_translator() -> None:
    """Its layers are gathered on one device before maps that read several of them run."""
    lm = tiny.language_model("llama")
    kv = read(lm, tiny.ids_of(lm, 20)).place((CPU, META, CPU))
    assert [k.device for k in kv.keys] == [CPU, META, CPU]
    gathered = kv.to(META)
    translator = Translator(TranslatorConfig(lm.geometry, lm.geometry, ((0, 1), (1, 2), (0, 2)), embedding_lags=()))
    made = translator.to(META, torch.float64)(gathered, torch.arange(20), None)
    assert {k.device for k in made.keys} == {META}


def test_a_placed_kv_needs_a_device_for_each_layer() -> None:
    kv = KV((torch.zeros(1, 1, 2, 4),) * 2, (torch.zeros(1, 1, 2, 4),) * 2, 2)
    with pytest.raises(ValueError, match="zip"):
        kv.place((CPU,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device: there is no GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_on_two_devices(family: str) -> None:
    """Source on the CPU, target half on the GPU, translator beside the target's embeddings."""
    from accelerate import dispatch_model

    source = tiny.language_model(family)
    model = tiny.clone(source.model)
    names = {name: "cpu" for name, _ in model.model.named_children() if name != "layers"}
    device_map = {f"model.{name}": place for name, place in names.items()} | {"lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": 0 if i % 2 else "cpu" for i in range(len(model.model.layers))}
    target = tiny.wrap(dispatch_model(model, device_map=device_map, main_device="cpu"), source.tokenizer)
    done = hand_off(
        tiny.text_of_tokens(30), source, target, identity_translator(target.geometry, torch.float64).to(target.device)
    )
    assert done.plan.fallback is None
    assert places(done.state.cache) == list(layer_devices(target.model))
    assert len(set(places(done.state.cache))) == 2
    cold = tiny.cold_logits(source, tiny.ids_of(source, 30))[-1]
    assert done.logits is not None
    torch.testing.assert_close(done.logits.cpu(), cold, atol=1e-8, rtol=0)
    following = prefill(target, target.ids([7]), cache=done.state.cache).logits[-1]
    cold = tiny.cold_logits(source, torch.cat((tiny.ids_of(source, 30), torch.tensor([7]))))[-1]
    torch.testing.assert_close(following.cpu(), cold, atol=1e-8, rtol=0)


# --- quantised models ------------------------------------------------------------------------------------------------

QUANTISED = (
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "gguf"},
)


def test_how_a_model_was_quantised_is_part_of_its_fingerprint() -> None:
    model = tiny.clone(tiny.language_model("llama").model)
    plain = fingerprint(model)
    seen = {plain}
    for how in QUANTISED:
        model.config.quantization_config = dict(how)
        assert fingerprint(model) == fingerprint(model)
        seen.add(fingerprint(model))
    assert len(seen) == 1 + len(QUANTISED)
    del model.config.quantization_config
    assert fingerprint(model) == plain


def test_weights_rounded_to_few_bits_have_another_fingerprint() -> None:
    """What is loaded from a .gguf file is dequantised: nothing but the values tells."""
    model = tiny.clone(tiny.language_model("llama").model)
    plain = fingerprint(model)
    with torch.no_grad():
        for parameter in model.parameters():
            step = parameter.abs().max() / 7
            parameter.copy_((parameter / step).round() * step)
    assert fingerprint(model) != plain
