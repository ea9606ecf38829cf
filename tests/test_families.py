"""Every family: exact as source and target, read as a source only, or refused in one sentence before anything is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvlingo.errors import UnsupportedModel
from kvlingo.facts import describe_pair
from kvlingo.fitting import fit
from kvlingo.geometry import LayerRope
from kvlingo.handoff import hand_off
from kvlingo.models import load_model, outline, prefill, read, wrap
from kvlingo.plan import Provenance
from kvlingo.shapes import FitOptions
from kvlingo.translator import identity_translator
from tests import families, tiny

OPTIONS = FitOptions(tokens=300, context_tokens=(24, 32), held_out_examples=1)


def sentence(error: pytest.ExceptionInfo[UnsupportedModel]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


@pytest.mark.parametrize("family", families.REFUSED)
def test_refused_in_one_sentence(family: str) -> None:
    row = families.FAMILIES[family]
    assert row.reason
    with pytest.raises(UnsupportedModel, match=row.reason) as error:
        wrap(tiny.scaled(row.make()), tiny.byte_tokenizer())
    sentence(error)


@pytest.mark.parametrize("family", families.SOURCE_ONLY)
def test_a_hybrid_is_a_source_and_no_target(family: str) -> None:
    row, lm, other = families.FAMILIES[family], families.language_model(family), tiny.language_model("llama")
    assert row.reason
    assert lm.target_refusal is not None
    with pytest.raises(UnsupportedModel, match=row.reason) as error:
        fit(other, lm, tiny.documents(), OPTIONS)
    sentence(error)
    # What its attention layers hold of a token does not depend on what comes later.
    ids = tiny.ids_of(lm, 30)
    whole, part = read(lm, ids), read(lm, ids[:12])
    assert len(whole) == len(lm.geometry)
    for layer in range(len(whole)):
        torch.testing.assert_close(whole.keys[layer][:, :, :12], part.keys[layer], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(whole.values[layer][:, :, :12], part.values[layer], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["lfm2", "falcon-h1"])
def test_a_hybrid_as_a_source_is_fitted_and_hands_over(family: str) -> None:
    source, target = families.language_model(family), tiny.language_model("llama")
    fitted = fit(source, target, tiny.documents(), OPTIONS)
    done = hand_off(tiny.text_of_tokens(30), source, target, fitted.translator)
    assert done.plan.fallback is None
    assert done.plan.translated == (1, 29)


@pytest.mark.parametrize("family", families.SOURCE_ONLY)
def test_a_hybrid_as_a_target_reads_anew_and_says_why(family: str) -> None:
    lm = families.language_model(family)
    done = hand_off(tiny.text_of_tokens(20), lm, lm, identity_translator(lm.geometry, torch.float64))
    assert done.plan.fallback is not None
    assert "recurrent state" in done.plan.fallback
    assert all(span.provenance is Provenance.EXACT for span in done.plan.spans)
    assert done.logits is not None
    cold = tiny.cold_logits(lm, tiny.ids_of(lm, 20))[-1]
    torch.testing.assert_close(done.logits, cold, atol=1e-5, rtol=1e-5)


# --- what is special about a family's cache --------------------------------------------------------------------------


def test_layers_that_borrow_keys_own_nothing() -> None:
    for family in ("gemma3n", "gemma4"):
        lm = families.language_model(family)
        assert lm.geometry.owners == (0, 1, 2, 3)
        assert len(lm.geometry) == 4
    dims = [layer.key_dim for layer in families.language_model("gemma4").geometry.layers]
    assert dims == [8, 16, 8, 16]


def test_only_the_attention_layers_of_a_hybrid_are_read() -> None:
    assert families.language_model("lfm2").geometry.owners == (1, 2)
    assert families.language_model("nemotron-h").geometry.owners == (1, 3)
    assert families.language_model("falcon-h1").geometry.owners is None


@pytest.mark.parametrize(("family", "layout"), [("deepseek-v2", "interleaved"), ("deepseek-v3", "half")])
def test_the_latent_is_what_is_cached(family: str, layout: str) -> None:
    """This version of transformers caches the latent as keys, and one rotated key for all heads as values."""
    layer = families.language_model(family).geometry.layers[1]
    assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (1, 12, 8)
    assert layer.rope is not None
    assert (layer.rope.part, layer.rope.layout, layer.rope.dims) == ("values", layout, 8)


def test_layers_without_positions() -> None:
    for family, bare in (("smollm3", [3]), ("llama4", [1, 3]), ("cohere2", [1, 3]), ("bloom", [0, 1, 2])):
        layers = families.language_model(family).geometry.layers
        assert [i for i, layer in enumerate(layers) if layer.rope is None] == bare


def test_angles_that_are_given_once_a_plane() -> None:
    assert families.language_model("gpt-oss").geometry.layers[0].rope == LayerRope(
        "sliding_attention", "half", "once", 8
    )


# --- angles that change with the length ------------------------------------------------------------------------------


# Dynamic NTK goes back to its first angles only for texts shorter than 64 tokens.
LIMITS = {"llama-dynamic": 63, "phi3-longrope": 64}


@pytest.mark.parametrize("family", families.NAMES)
def test_only_length_dependent_angles_have_a_limit(family: str) -> None:
    if family in families.REFUSED:
        return
    limit = families.language_model(family).geometry.angle_limit
    assert limit == LIMITS.get(family)


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_beyond_the_limit_the_target_reads_anew(family: str) -> None:
    lm, plain = families.language_model(family), tiny.language_model("llama")
    own = identity_translator(lm.geometry, torch.float64)
    limit = LIMITS[family]
    for n in (limit, limit + 1):
        done = hand_off(tiny.text_of_tokens(n), lm, lm, own)
        assert (done.plan.fallback is None) == (n == limit)
        assert done.plan.fallback is None or f"rotary angles beyond {limit} tokens" in done.plan.fallback
        assert done.logits is not None
        cold = tiny.cold_logits(lm, tiny.ids_of(lm, n))[-1]
        torch.testing.assert_close(done.logits, cold, atol=1e-8, rtol=0)
    fitted = fit(lm, plain, tiny.documents(), OPTIONS).translator
    assert hand_off(tiny.text_of_tokens(limit), lm, plain, fitted).plan.fallback is None
    reason = hand_off(tiny.text_of_tokens(90), lm, plain, fitted).plan.fallback
    assert reason is not None
    assert f"rotary angles beyond {limit} tokens" in reason


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_the_cache_mixes_angles_beyond_the_limit(family: str) -> None:
    """Why there is a limit: beyond it the model's own cache no longer goes on as the whole text would be read."""
    lm = families.language_model(family)
    for n, exact in ((LIMITS[family], True), (80, False)):
        ids = tiny.ids_of(lm, n)
        chunked = prefill(lm, ids[50:], cache=prefill(lm, ids[:50]).cache, logits_to_keep=0).logits[-1]
        assert (float((chunked - tiny.cold_logits(lm, ids)[-1]).abs().max()) < 1e-8) == exact


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek-v3", "gemma4", "lfm2", "gpt-oss"])
def test_saved_and_loaded_is_the_same(family: str, tmp_path: Path) -> None:
    lm = wrap(families.FAMILIES[family].trained(torch.float32), tiny.byte_tokenizer())
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.geometry == lm.geometry
    assert loaded.target_refusal == lm.target_refusal
    assert loaded.fingerprint == lm.fingerprint


@pytest.mark.parametrize("family", ["deepseek-v3", "gemma4", "lfm2", "gpt-oss"])
def test_what_is_known_without_weights(family: str, tmp_path: Path) -> None:
    row, lm = families.FAMILIES[family], families.language_model(family)
    row.config().save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    found = outline(tmp_path)
    bare = tuple(replace(layer, rope=None) for layer in lm.geometry.layers)
    assert found.geometry == replace(lm.geometry, layers=bare)
    assert found.target_refusal == lm.target_refusal
    if lm.target_refusal is None:
        assert describe_pair(str(tmp_path), str(tmp_path))["supported"]
    else:
        with pytest.raises(UnsupportedModel, match="can't be a target: layer 0"):
            describe_pair(str(tmp_path), str(tmp_path))


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_in_the_documents_is_this_one() -> None:
    page = Path(__file__).parents[1] / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == families.table(), "run python -m tests.families > docs/models.md"
