"""Every family: exact as source and target, read as a source only, or refused in one sentence before anything is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvlingo.batches import join, prefill_batch, read_batch
from kvlingo.errors import BadInput, UnsupportedCache, UnsupportedModel
from kvlingo.facts import describe_pair
from kvlingo.fitting import fit
from kvlingo.generation import generate, generate_batch
from kvlingo.geometry import LayerRope
from kvlingo.handoff import hand_off, hand_off_batch
from kvlingo.kv import KV
from kvlingo.language_model import prefill, read, read_padded
from kvlingo.models import load_model, wrap
from kvlingo.outline import outline
from kvlingo.plan import Provenance, SpanKind
from kvlingo.reading import read_more
from kvlingo.shapes import FitOptions
from kvlingo.states import read_native, read_native_batch
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


@pytest.mark.parametrize("tokens", [13, 16])
@pytest.mark.parametrize("family", [*families.EXACT, *families.SOURCE_ONLY])
def test_reading_on_changes_nothing_of_what_was_before(family: str, tokens: int) -> None:
    lm = families.language_model(family)
    ids = tiny.ids_of(lm, tokens)
    alone, padded = read(lm, ids), read_padded(lm, ids, multiple=8)
    within = 1e-5 if family in families.SOURCE_ONLY else families.allowed(family)
    assert padded.tokens == tokens
    for a, b in zip((*alone.keys, *alone.values), (*padded.keys, *padded.values), strict=True):
        torch.testing.assert_close(a, b, atol=within, rtol=within)


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


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_generating_across_the_limit_reads_anew(family: str) -> None:
    """The tokens up to the first one after the switch are those of a cold run; longrope's also from there on."""
    lm = families.language_model(family)
    n, own = LIMITS[family] - 3, identity_translator(lm.geometry, torch.float64)
    same = 10 if family == "phi3-longrope" else 5  # dynamic NTK turns its angles again with every token
    text, cold = tiny.text_of_tokens(n), tiny.cold_greedy(lm, tiny.ids_of(lm, n), same)
    done = hand_off(text, lm, lm, own)
    assert done.plan.count(SpanKind.TRANSLATED) == n - 2
    assert done.logits is not None
    together = generate_batch(lm, [done.state] * 2, [done.logits] * 2, max_new_tokens=same, stop_at_eos=False)
    assert [list(row.ids) for row in together] == [cold, cold]
    stream = generate(lm, done.state, done.logits, max_new_tokens=same, stop_at_eos=False)
    stream.text()
    assert stream.ids == cold
    for state in (stream.state, together[0].state):
        assert len(state.reading) == state.cache.get_seq_length() == n + same - 1
        assert {span.provenance for span in state.spans} == {Provenance.EXACT}
        assert state.spans[0].reason == "re-prefill"


def test_without_its_text_a_conversation_ends_at_the_limit() -> None:
    lm = families.language_model("phi3-longrope")
    done = hand_off(tiny.text_of_tokens(62), lm, lm, identity_translator(lm.geometry, torch.float64), no_text=True)
    first = prefill(lm, lm.ids([50]), cache=done.state.cache)
    state = replace(done.state, reading=read_more(lm.tokenizer, done.state.reading, [50]))
    with pytest.raises(UnsupportedCache, match="stop at 64 tokens"):
        generate(lm, state, first.logits[-1], max_new_tokens=5, stop_at_eos=False).text()


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_an_earlier_cache_that_is_beyond_the_limit_is_read_anew(family: str) -> None:
    """The user edited the conversation shorter: what it has in common with the cache was read with other angles."""
    lm = families.language_model(family)
    text = tiny.text_of_tokens(40)
    held = read_native(text + tiny.text_of_tokens(60, seed=1), lm)
    done = hand_off(text, lm, lm, identity_translator(lm.geometry, torch.float64), target_state=held)
    assert done.plan.fallback is not None
    assert done.plan.count(SpanKind.NATIVE) == 0
    assert done.logits is not None
    cold = tiny.cold_logits(lm, tiny.ids_of(lm, 40))[-1]
    torch.testing.assert_close(done.logits, cold, atol=1e-8, rtol=0)


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_rows_beside_one_beyond_the_limit_are_read_alone(family: str) -> None:
    lm = families.language_model(family)
    texts = [tiny.text_of_tokens(n, seed=n) for n in (90, 20)]
    ids = [tiny.ids_of(lm, n, seed=n) for n in (90, 20)]
    assert_same(read_batch(lm, ids)[1], read(lm, ids[1]))
    with pytest.raises(BadInput, match=f"beyond {LIMITS[family]} tokens.*one by one"):
        prefill_batch(lm, ids)
    done = hand_off_batch(texts, lm, lm, identity_translator(lm.geometry, torch.float64))
    assert [one.plan.fallback is None for one in done] == [False, True]
    for row, one in zip(ids, done, strict=True):
        assert one.logits is not None
        torch.testing.assert_close(one.logits, tiny.cold_logits(lm, row)[-1], atol=1e-8, rtol=0)


@pytest.mark.parametrize("family", ["falcon-h1", "lfm2"])
def test_several_hybrids_go_on_as_each_alone(family: str) -> None:
    """A recurrent state is not taken out of a batch, nor put into one."""
    lm = families.language_model(family)
    lengths = (20, 12)
    texts = [tiny.text_of_tokens(n, seed=n) for n in lengths]
    cold = [tiny.cold_greedy(lm, tiny.ids_of(lm, n, seed=n), 5) for n in lengths]
    states = read_native_batch(texts, lm)
    for state, n, words in zip(states, lengths, cold, strict=True):
        following = prefill(lm, lm.ids(words[:1]), cache=state.cache).logits[-1]
        whole = torch.cat((tiny.ids_of(lm, n, seed=n), lm.ids(words[:1])))
        torch.testing.assert_close(following, tiny.cold_logits(lm, whole)[-1], atol=1e-5, rtol=1e-5)
    own = identity_translator(lm.geometry, torch.float64)
    done = [hand_off(text, lm, lm, own) for text in texts]
    logits = [one.logits for one in done if one.logits is not None]
    said = generate_batch(lm, [one.state for one in done], logits, max_new_tokens=5, stop_at_eos=False)
    assert [list(row.ids) for row in said] == cold
    assert [one.state.cache.get_seq_length() for one in done] == list(lengths)
    with pytest.raises(UnsupportedCache, match="recurrent state"):
        join(lm, [read(lm, tiny.ids_of(lm, n)) for n in lengths])


def assert_same(a: KV, b: KV) -> None:
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        torch.testing.assert_close(x, y, atol=1e-8, rtol=0)


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


@pytest.mark.parametrize("family", [*families.EXACT, *families.SOURCE_ONLY])
def test_what_is_known_without_weights(family: str, tmp_path: Path) -> None:
    row, lm = families.FAMILIES[family], families.language_model(family)
    row.config().save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    found = outline(tmp_path)
    bare = tuple(replace(layer, rope=None) for layer in lm.geometry.layers)
    assert found.geometry == replace(lm.geometry, layers=bare, angle_limit=None)
    assert found.target_refusal == lm.target_refusal
    assert 0 < found.layer_weights < found.total_weights


@pytest.mark.parametrize("family", ["deepseek-v3", "gemma4", "lfm2", "phi3-longrope"])
def test_what_info_says_of_a_pair(family: str, tmp_path: Path) -> None:
    families.FAMILIES[family].config().save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    if family in families.EXACT:
        assert describe_pair(str(tmp_path), str(tmp_path))["supported"]
    else:
        with pytest.raises(UnsupportedModel, match="can't be a target: layer 0"):
            describe_pair(str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("family", families.REFUSED)
def test_refused_without_weights_too(family: str, tmp_path: Path) -> None:
    families.FAMILIES[family].config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"positions|encoder-decoder|keys and values") as error:
        outline(tmp_path)
    sentence(error)


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_in_the_documents_is_this_one() -> None:
    page = Path(__file__).parents[1] / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == families.table(), "run python -m tests.families > docs/models.md"
