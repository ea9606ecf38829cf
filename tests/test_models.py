"""Loading, probing and refusing models: every refusal is one sentence, before anything is computed."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvlingo.errors import BadInput, KVLingoError, MissingExtra, UnsupportedModel
from kvlingo.fingerprints import fingerprint
from kvlingo.geometry import Geometry, LayerRope
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.models import LOADER_NOTE, convert_gguf, load_model, wrap
from kvlingo.outline import outline
from kvlingo.probing import probe_geometry
from tests import families, tiny


def saved(lm: LanguageModel, folder: Path) -> Path:
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


# --- refused, with the reason ----------------------------------------------------------------------------------------


def tiny_t5() -> Any:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="t5 is an encoder-decoder") as error:
        wrap(tiny_t5(), None)
    one_line(error)


def test_encoder_decoders_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    tiny_t5().config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load_model(tmp_path)


def test_learned_positions_are_refused() -> None:
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=1024)
    with pytest.raises(UnsupportedModel, match=r"keys of layer 0 of this gpt2 model.*learned") as error:
        wrap(tiny.scaled(GPT2LMHeadModel(config)), tiny.byte_tokenizer())
    one_line(error)


def test_a_foreign_tokenizer_is_refused() -> None:
    small = tiny.llama(vocab_size=200)
    with pytest.raises(UnsupportedModel, match=r"tokenizer of mine has 258 tokens, its embedding 200 rows") as error:
        wrap(small, tiny.byte_tokenizer(), name="mine")
    one_line(error)


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3"])
def test_saved_and_loaded_is_the_same(family: str, tmp_path: Path) -> None:
    lm = tiny.language_model(tiny.FAMILIES[family], dtype=torch.float32)  # its own: saving may touch the config
    loaded = load_model(saved(lm, tmp_path))
    assert loaded.name == tmp_path.name
    assert loaded.geometry == lm.geometry
    assert loaded.dtype == torch.float32
    assert loaded.fingerprint == lm.fingerprint
    assert loaded.tokenizer_hash == lm.tokenizer_hash
    ids = tiny.ids_of(lm, 20)
    torch.testing.assert_close(tiny.cold_logits(loaded, ids), tiny.cold_logits(lm, ids), atol=1e-6, rtol=0)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    for mine, theirs in zip(loaded.key_norms, lm.key_norms, strict=True):
        assert (mine is None) == (theirs is None)


def test_dtypes(tmp_path: Path) -> None:
    folder = saved(tiny.language_model("llama", dtype=torch.float32), tmp_path)
    assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(folder, dtype=torch.float64, device="cpu").dtype == torch.float64
    with pytest.raises(BadInput, match="unknown dtype 'float31'"):
        load_model(folder, dtype="float31")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no config\.json"):
        load_model(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    saved(tiny.language_model("llama", dtype=torch.float32), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="holds no weights") as error:
        load_model(tmp_path)
    one_line(error)


def test_damaged_weights(tmp_path: Path) -> None:
    saved(tiny.language_model("llama", dtype=torch.float32), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(KVLingoError, match=tmp_path.name) as error:
        load_model(tmp_path)
    one_line(error)


def test_a_model_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "hologram"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"can't be loaded: .*hologram") as error:
        load_model(tmp_path)
    one_line(error)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"device": "toaster"}, "unknown device 'toaster'"),
        ({"device": "cuda:99"}, "no GPU for device 'cuda:99'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"dtype": "tensor"}, "unknown dtype 'tensor'"),
    ],
    ids=str,
)
def test_devices_and_dtypes_that_can_not_be(asked: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words) as error:
        load_model(tmp_path, **asked)  # type: ignore[arg-type]
    one_line(error)


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(BadInput, match=r"neither a folder nor a .gguf file") as error:
        load_model("nobody/has-this-model")
    one_line(error)


# --- GGUF ------------------------------------------------------------------------------------------------------------


def test_a_gguf_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no\.gguf does not exist"):
        load_model(tmp_path / "no.gguf")


def test_a_gguf_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "page.gguf"
    file.write_bytes(b"<html>404</html>")
    for load in (load_model, outline):
        with pytest.raises(BadInput, match="not a GGUF file"):
            load(file)


@pytest.mark.parametrize(
    "body", [b"", struct.pack("<IQQ", 3, 2**40, 2**40), b"\xff" * 64], ids=["cut", "lying", "junk"]
)
def test_a_damaged_gguf(body: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF" + body)
    with pytest.raises(KVLingoError, match=r"cut\.gguf") as error:
        convert_gguf(file, tmp_path / "models")
    one_line(error)
    assert list((tmp_path / "models").iterdir()) == []


def test_gguf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvlingo\[gguf\]'"):
        convert_gguf(file, tmp_path / "models")


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_fingerprints_tell_weights_apart() -> None:
    model = tiny.scaled(tiny.llama(), dtype=torch.float32)
    same, other, tuned = tiny.clone(model), tiny.scaled(tiny.llama(), seed=1, dtype=torch.float32), tiny.clone(model)
    with torch.no_grad():
        tuned.model.layers[1].self_attn.v_proj.weight.mul_(1.02)
    prints = [fingerprint(m) for m in (model, same, other, tuned)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_a_converted_gguf_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    """The same values under the same config, once as they are, once noted as dequantised."""
    lm = tiny.language_model("llama", dtype=torch.float32)
    for folder in (tmp_path / "plain", tmp_path / "converted"):
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
    (tmp_path / "converted" / LOADER_NOTE).write_text('{"loader": "gguf", "file": "a.gguf"}')
    plain, converted = (load_model(tmp_path / name) for name in ("plain", "converted"))
    assert (plain.loader, converted.loader) == (None, "gguf")
    assert fingerprint(plain.model) == fingerprint(converted.model) == plain.fingerprint
    assert converted.fingerprint != plain.fingerprint
    for other in ("{}", "[]", "no json"):
        (tmp_path / "converted" / LOADER_NOTE).write_text(other)
        assert load_model(tmp_path / "converted").fingerprint == plain.fingerprint


def test_fingerprints_tell_configs_apart() -> None:
    one, other = tiny.scaled(tiny.llama()), tiny.scaled(tiny.llama(rope_parameters={**tiny.THETA, "rope_theta": 5e5}))
    assert tiny.same(list(one.state_dict().values()), list(other.state_dict().values()))
    assert fingerprint(one) != fingerprint(other)


def test_fingerprints_do_not_depend_on_dtype() -> None:
    model = tiny.scaled(tiny.llama(), dtype=torch.float32)
    half = tiny.clone(model).to(torch.bfloat16)
    assert fingerprint(model) == fingerprint(half) == fingerprint(half.to(torch.float32))


def test_tokenizer_hashes() -> None:
    lm = tiny.language_model("llama")
    hashes = [
        replace(lm, tokenizer=t).tokenizer_hash
        for t in (tiny.byte_tokenizer(), tiny.merging_tokenizer(), tiny.byte_tokenizer(chat_template="{{ messages }}"))
    ]
    assert len(set(hashes)) == 3
    assert replace(lm, tokenizer=tiny.byte_tokenizer()).tokenizer_hash == hashes[0]


# --- probing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_shapes_are_those_of_the_config(family: str) -> None:
    lm = tiny.language_model(family)
    config = lm.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert len(lm.geometry) == config.num_hidden_layers
    assert lm.geometry.vocab_size == tiny.VOCAB
    assert lm.geometry.hidden_size == 32
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(lm.geometry)
    for kind, layer in zip(kinds, lm.geometry.layers, strict=True):
        assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (config.num_key_value_heads, head_dim, head_dim)
        slides = kind == "sliding_attention" or config.model_type == "mistral"
        assert layer.window == (tiny.WINDOW if slides else None)
    assert Geometry.from_json(json.loads(json.dumps(lm.geometry.to_json()))) == lm.geometry


def test_partial_and_interleaved_rotation_is_found() -> None:
    lm = tiny.language_model("glm4")
    assert lm.geometry.layers[0].rope == LayerRope(None, "interleaved", "half", 4)
    assert tiny.language_model("llama").geometry.layers[0].rope == LayerRope(None, "half", "half", 8)


def test_layers_without_positions_are_found_by_probing() -> None:
    config = SmolLM3Config(
        **{**tiny.SHAPE, "num_hidden_layers": 4},
        no_rope_layers=[1, 1, 1, 0],
        rope_parameters=dict(tiny.THETA),
    )
    geometry = probe_geometry(tiny.scaled(SmolLM3ForCausalLM(config))).geometry
    assert [layer.rope is None for layer in geometry.layers] == [False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_is_probed_alike(dtype: torch.dtype) -> None:
    for family in ("llama-yarn", "gemma3", "olmo2", "glm4"):
        lm = tiny.language_model(family, dtype=dtype)
        assert lm.geometry == tiny.language_model(family).geometry
        assert [n is None for n in lm.key_norms] == [n is None for n in tiny.language_model(family).key_norms]


def test_key_norms_are_the_effective_weights() -> None:
    gemma, qwen, olmo = (tiny.language_model(f) for f in ("gemma3", "qwen3", "olmo2"))
    for lm, plus in ((gemma, 1.0), (qwen, 0.0), (olmo, 0.0)):
        for layer, found in zip(lm.model.model.layers, lm.key_norms, strict=True):
            assert found is not None
            torch.testing.assert_close(found, layer.self_attn.k_norm.weight + plus, atol=1e-5, rtol=1e-5)
    assert tiny.language_model("llama").key_norms == (None, None, None)


def test_positions_the_model_does_not_have_are_not_probed() -> None:
    probed = probe_geometry(tiny.scaled(tiny.llama(max_position_embeddings=64)))
    assert probed.geometry.max_positions == 64
    assert len(probed.rotary.layers) == 3


# --- reading ---------------------------------------------------------------------------------------------------------


def test_nothing_to_read_is_said() -> None:
    lm = tiny.language_model("llama")
    for ids in (torch.zeros(0, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)):
        with pytest.raises(BadInput, match="nothing to read"):
            prefill(lm, ids)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prefill_in_pieces_is_prefill_at_once(family: str) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, 30)
    whole = prefill(lm, ids, logits_to_keep=0)
    assert whole.logits.shape == (30, tiny.VOCAB)
    torch.testing.assert_close(whole.logits, tiny.cold_logits(lm, ids), atol=1e-9, rtol=0)
    for full_length in (False, True):
        first = prefill(lm, ids[:13], full_length=full_length)
        assert first.logits.shape == (1, tiny.VOCAB)
        rest = prefill(lm, ids[13:], cache=first.cache, logits_to_keep=0)
        assert rest.cache is first.cache
        assert rest.cache.get_seq_length() == 30
        torch.testing.assert_close(rest.logits, whole.logits[13:], atol=1e-9, rtol=0)


def test_reading_holds_every_token_whatever_the_window() -> None:
    lm = tiny.language_model("gemma3")
    kv = read(lm, tiny.ids_of(lm, 30))
    assert kv.tokens == 30
    assert [kv.held(layer) for layer in range(4)] == [30] * 4
    assert not any(x.requires_grad for x in (*kv.keys, *kv.values))


# --- without weights -------------------------------------------------------------------------------------------------


def test_an_outline_is_what_probing_finds(tmp_path: Path) -> None:
    lm = tiny.language_model("gemma3", dtype=torch.float32)
    found = outline(saved(lm, tmp_path))
    bare = tuple(replace(layer, rope=None) for layer in lm.geometry.layers)
    assert found.geometry == replace(lm.geometry, layers=bare)
    assert found.kind == "gemma3_text"
    assert found.total_weights == sum(p.numel() for p in lm.model.parameters())
    assert found.query_widths == (64,) * 4
    assert isinstance(found.load_tokenizer(), type(AutoTokenizer.from_pretrained(tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    assert outline(tmp_path).geometry == found.geometry


@pytest.mark.parametrize(("family", "kind"), [("gemma4", int), ("llama", torch.Tensor), ("gemma3", torch.Tensor)])
def test_the_last_hidden_states_are_gathered_where_no_layer_leaves_tokens_out(family: str, kind: type) -> None:
    """A slice of them costs a copy of the output head on a CPU; a model whose layers share leaves tokens out for a number."""
    lm, seen = families.language_model(family), list[Any]()
    hook = lm.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["logits_to_keep"]), with_kwargs=True
    )
    ids = tiny.ids_of(lm, 12)
    with torch.no_grad():
        whole = prefill(lm, ids, logits_to_keep=0).logits
        some = prefill(lm, ids, logits_to_keep=3).logits
        more = prefill(lm, ids, logits_to_keep=12).logits
    hook.remove()
    assert isinstance(seen[1], kind)
    torch.testing.assert_close(some, whole[-3:], atol=1e-9, rtol=0)
    torch.testing.assert_close(more, whole, atol=1e-9, rtol=0)
