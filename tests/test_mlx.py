"""Hand-overs between models of mlx-lm: the same numbers as with PyTorch, ready for mlx-lm to go on, refused in one line else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

REASON = "mlx and mlx-lm are not installed: pip install 'kvlingo[mlx]'"
mx = pytest.importorskip("mlx.core", reason=REASON)
mlx_lm = pytest.importorskip("mlx_lm", reason=REASON)

from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

from kvlingo import benchmark, cli, mlx, mlx_bench, mlx_caches, mlx_models, mlx_rotation
from kvlingo.alignment import align
from kvlingo.assembling import assemble, not_held
from kvlingo.assets import fetch_demo_models
from kvlingo.cache import read_cache
from kvlingo.errors import BadInput, IncompatiblePair, KVLingoError, UnsupportedCache, UnsupportedModel
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, ModelCard
from kvlingo.mlx import MlxModel, MlxTranslator, hand_off
from kvlingo.models import convert_gguf, default_cache_dir, load_model
from kvlingo.outline import embedding_scale
from kvlingo.plan import plan_handoff
from kvlingo.states import ModelState, read_conversation, read_native
from kvlingo.store import save_translator
from kvlingo.translator import Translator, TranslatorConfig, identity_translator
from tests import tiny

if shutil.which("g++") is None:
    mx.disable_compile()  # on a CPU, MLX compiles with the system's compiler

FAMILIES = {
    "llama": tiny.llama,
    "llama-theta": lambda: tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}),
    "llama-llama3": lambda: tiny.llama(rope_parameters=dict(tiny.LLAMA3)),
    "qwen2": tiny.qwen2,
    "qwen3": tiny.qwen3,
    "gemma3": tiny.gemma3,
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a tiny model of a family in both frameworks, with the same weights."""
    root, known = tmp_path_factory.mktemp("models"), dict[str, SimpleNamespace]()

    def load(family: str) -> SimpleNamespace:
        if family not in known:
            lm = tiny.language_model(FAMILIES[family], tokenizer=tiny.byte_tokenizer(), dtype=torch.float32)
            lm.model.save_pretrained(root / family)
            lm.tokenizer.save_pretrained(root / family)
            known[family] = SimpleNamespace(lm=lm, mlx=mlx.load(root / family), folder=root / family)
        return known[family]

    return load


def cold(lm: MlxModel, ids: Sequence[int]) -> np.ndarray:
    """Return the model's own logits of the next token, no cache involved."""
    return np.array(lm.model(mx.array(list(ids))[None])[0, -1].astype(mx.float32))


def gap(a: Any, b: Any) -> float:
    return float(np.abs(np.array(a) - np.array(b)).max())


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_read_as_pytorch_reads_it(load: Any, family: str) -> None:
    both = load(family)
    ids = tiny.ids_of(both.lm, 40)
    theirs = tiny.cold_logits(both.lm, ids)[-1].numpy()
    # Gemma's embeddings are scaled by a number that mlx-lm rounds to bfloat16.
    assert gap(cold(both.mlx, ids.tolist()), theirs) < (1e-2 if family == "gemma3" else 1e-4)
    mine = [mlx.seen(layer) for layer in both.mlx.geometry.layers]
    assert mine == [mlx.seen(layer) for layer in both.lm.geometry.layers]
    rows = both.lm.embed(ids[:5]).numpy()
    assert gap(both.mlx.embed(ids[:5].tolist()), rows) < 1e-5


def test_mlx_lm_alone_would_take_another_rotary_base(load: Any) -> None:
    """What `hoisted` is for: should mlx-lm mend it, this fails and `hoisted` can go."""
    both = load("llama-theta")
    model, _ = mlx_lm.load(str(both.folder))
    ids = tiny.ids_of(both.lm, 40)
    theirs = np.array(model(mx.array(ids.tolist())[None])[0, -1])
    assert gap(theirs, tiny.cold_logits(both.lm, ids)[-1].numpy()) > 0.1


def test_the_scale_of_embeddings_is_asked_of_the_family(load: Any) -> None:
    configs = {name: load(name).lm.model.config.to_dict() for name in ("llama", "gemma3")}
    assert embedding_scale(configs["llama"]) == 1.0
    assert embedding_scale(configs["gemma3"]) == pytest.approx(32**0.5)
    assert embedding_scale({**configs["llama"], "quantization": {"bits": 4}}) == 1.0


@pytest.mark.parametrize(
    ("layer_types", "every"),
    [
        (["sliding_attention", "full_attention"] * 2, 2),
        (["full_attention"] * 3, 1),
        (["full_attention", "sliding_attention"], None),
        (None, None),
    ],
)
def test_the_order_of_layers_is_put_as_mlx_lm_wants_it(layer_types: list[str] | None, every: int | None) -> None:
    assert mlx_models.pattern_of(layer_types) == every


def test_keys_that_follow_no_rotation_are_refused(load: Any) -> None:
    lm = load("llama").mlx
    keys = {0: mx.ones((1, 2, 1, 8)), 1: mx.ones((1, 2, 1, 8))}
    mlx_rotation.refuse_other_rotation(None, 0, "x", keys)
    with pytest.raises(UnsupportedModel, match="do not follow its rotary module"):
        mlx_rotation.refuse_other_rotation(lm.rotations[0], 0, "x", keys)


def test_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, kind in ((tmp_path / "empty", UnsupportedModel), (tmp_path / "nowhere", BadInput)):
        with pytest.raises(kind) as refused:
            mlx.load(name)
        assert "\n" not in str(refused.value)


# --- the whole path --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, 8, 9, 40])  # the sliding layers' window is 8
@pytest.mark.parametrize("family", ["llama", "llama-llama3", "gemma3"])
def test_a_model_handed_to_itself_goes_on_as_itself(load: Any, family: str, tokens: int) -> None:
    both = load(family)
    ids = tiny.ids_of(both.lm, tokens).tolist()
    handed = hand_off(tiny.text_of_tokens(tokens), both.mlx, both.mlx, identity_translator(both.lm.geometry))
    assert handed.plan.fallback is None
    assert handed.rest == ids[-1:]
    cache, read = handed.cache, list(ids)
    assert gap(mlx.read(both.mlx, handed.rest, cache), cold(both.mlx, read)) < 1e-4
    more = tiny.ids_of(both.lm, 60, seed=1)[1:21].tolist()
    for piece in (more[:1], more[1:2], more[2:7], more[7:8], more[8:20]):
        read += piece
        assert gap(mlx.read(both.mlx, piece, cache), cold(both.mlx, read)) < 1e-4


def test_tokens_out_of_place_are_found(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees keys that are rotated one place off, and a filler that stays in a window."""
    both = load("gemma3")
    ids = tiny.ids_of(both.lm, 40).tolist()
    rotated = mlx.rotated
    monkeypatch.setattr(mlx, "rotated", lambda rotation, keys, first: rotated(rotation, keys, first + 1))
    handed = hand_off(tiny.text_of_tokens(40), both.mlx, both.mlx, identity_translator(both.lm.geometry))
    assert gap(mlx.read(both.mlx, handed.rest, handed.cache), cold(both.mlx, ids)) > 1e-2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_mlx_lm_generates_from_it(load: Any, family: str) -> None:
    both = load(family)
    identity = identity_translator(both.lm.geometry)
    handed = hand_off(tiny.text_of_tokens(30), both.mlx, both.mlx, identity, tail=3)
    ids = tiny.ids_of(both.lm, 30).tolist()
    assert handed.rest == ids[-3:]
    steps = generate_step(mx.array(handed.rest), both.mlx.model, prompt_cache=handed.cache, max_tokens=10)
    made = [token for token, _ in steps]
    expected = list(ids)
    for _ in made:
        expected.append(int(cold(both.mlx, expected).argmax()))
    assert made == expected[30:]
    # And back: what the model said itself may be translated, what was translated for it may not be again.
    state = mlx.went_on(both.mlx, handed.state, handed.rest + made)
    assert len(state.reading) in (39, 40)
    again = hand_off(both.lm.tokenizer.decode([*ids[1:], *made]), both.mlx, both.mlx, identity, source_state=state)
    assert again.plan.fallback is None
    assert again.plan.translated[0] == 27


def test_a_prompt_cache_goes_through_a_file(load: Any, tmp_path: Path) -> None:
    both = load("gemma3")
    handed = hand_off(tiny.text_of_tokens(30), both.mlx, both.mlx, identity_translator(both.lm.geometry))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, handed.cache)
    logits = mlx.read(both.mlx, handed.rest, load_prompt_cache(file))
    assert gap(logits, mlx.read(both.mlx, handed.rest, handed.cache)) == 0.0


# --- the same numbers as with PyTorch --------------------------------------------------------------------------------


@torch.no_grad()
def random_maps(config: TranslatorConfig) -> Translator:
    """Return a translator whose every part does something, with outputs about as large as keys are."""
    translator = Translator(config)
    generator = torch.Generator().manual_seed(0)
    for name, x in translator.state_dict().items():
        if x.is_floating_point():
            drawn = torch.randn(x.shape, generator=generator)
            positive = name.endswith(("scale", "norm_weight"))
            x.copy_(0.5 + drawn.abs() if positive else drawn * (x.shape[-2] ** -0.5 if x.ndim > 1 else 1.0))
    return translator.eval()


def in_mlx(state: ModelState) -> ModelState:
    """Return a state of PyTorch with its cache as a prompt cache of mlx-lm, to the bit."""
    caches = []
    for layer in state.cache.layers:
        cache = KVCache()
        mlx_caches.fill(cache, mx.array(layer.keys.numpy()), mx.array(layer.values.numpy()), layer.keys.shape[2])
        caches.append(cache)
    return replace(state, cache=caches)


@torch.no_grad()
def with_pytorch(text: str, source: LanguageModel, target: LanguageModel, maps: Translator) -> tuple[KV, ModelState]:
    """Return what PyTorch makes of a hand-over before the tail, free of position."""
    state = read_native(text, source)
    reading = read_conversation(text, target, add_generation_prompt=True)
    alignment = align(state.reading, reading)
    plan = plan_handoff(alignment.tolist())
    source_kv = read_cache(state.cache, source.rotary, source.geometry)
    return assemble(plan, target, maps, source_kv, alignment, target.ids(reading.ids)), state


def differences(source: Any, target: Any, maps: Translator, text: str) -> list[float]:
    """Return for each target layer how far MLX's keys and values are from PyTorch's, as a share of their norm."""
    kv, state = with_pytorch(text, source.lm, target.lm, maps)
    handed = hand_off(text, source.mlx, target.mlx, maps, source_state=in_mlx(state))
    assert handed.plan.fallback is None
    start, stop = handed.plan.translated
    skip = [start + n for n in not_held(handed.plan, target.lm)]
    free = mlx.read_prompt_cache(target.mlx, handed.cache, stop=stop, first_wanted=skip)
    found = []
    for layer, first in enumerate(skip):
        mine = [np.array(side[layer]) for side in (free.keys, free.values)]
        theirs = [x[layer][:, :, first - (kv.tokens - kv.held(layer)) :].numpy() for x in (kv.keys, kv.values)]
        assert [x.shape for x in mine] == [x.shape for x in theirs]
        found.append(max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(mine, theirs, strict=True)))
    return found


PLAIN: dict[str, Any] = {"embedding_lags": ()}
KINDS: dict[str, dict[str, Any]] = {
    "linear": PLAIN,
    "linear-text-lags": {"source_lags": (0, 1), "embedding_lags": (0, 1, 2)},
    "headwise": {**PLAIN, "map_kind": "headwise"},
    "headwise-text": {"map_kind": "headwise"},
    "lowrank": {"map_kind": "lowrank", "rank": 5},
    "residual": {"residual_width": 7},
    "norm-head": {"key_norms": ("head",) * 4},
    "norm-layer": {"key_norms": ("layer", None, "head", "layer")},
    "text-only": {"source_layers": ((),) * 4},
}


def between(source: Any, target: Any, changes: dict[str, Any]) -> Translator:
    layers = ((0, 1), (0, 1), (1, 2), (1, 2))
    config = TranslatorConfig(source.lm.geometry, target.lm.geometry, layers)
    return random_maps(replace(config, **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_maps_give_what_pytorch_gives(load: Any, kind: str) -> None:
    """From 3 layers of 2 × 8 to 4 layers of 2 × 16, of which every other one has a window of 8."""
    source, target = load("llama-theta"), load("gemma3")
    found = differences(source, target, between(source, target, KINDS[kind]), tiny.text_of_tokens(40))
    assert max(found) < 2e-5, found  # float32


def test_a_wrong_map_is_seen(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = load("llama-theta"), load("gemma3")
    maps = between(source, target, KINDS["linear-text-lags"])
    text = tiny.text_of_tokens(40)
    table = mlx_rotation.Rotation.table
    monkeypatch.setattr(mlx_rotation.Rotation, "table", lambda self, first, n, width: table(self, first + 1, n, width))
    assert max(differences(source, target, maps, text)) > 1e-2


def test_a_target_in_bfloat16_gets_bfloat16(load: Any) -> None:
    source, target = load("llama"), load("gemma3")
    short = mlx.wrap(mlx.load(target.folder).model, target.lm.tokenizer, embedding_scale=32**0.5)
    short.model.set_dtype(mx.bfloat16)
    short = mlx.wrap(short.model, short.tokenizer, embedding_scale=32**0.5)
    maps = between(source, target, KINDS["linear-text-lags"])
    text = tiny.text_of_tokens(40)
    kv, state = with_pytorch(text, source.lm, target.lm, maps)
    handed = hand_off(text, source.mlx, short, MlxTranslator(maps, short), source_state=in_mlx(state))
    assert handed.cache[1].keys.dtype == mx.bfloat16
    free = mlx.read_prompt_cache(short, handed.cache, stop=39, first_wanted=[39, 1, 39, 1])
    theirs = kv.values[1][:, :, 1:].numpy()
    assert np.linalg.norm(np.array(free.values[1]) - theirs) / np.linalg.norm(theirs) < 2e-2


# --- prompt caches of every kind -------------------------------------------------------------------------------------


def test_a_source_s_window_that_has_slid_becomes_a_reprefill(load: Any) -> None:
    both = load("gemma3")
    ids = tiny.ids_of(both.lm, 40).tolist()
    state = mlx.read_native(tiny.text_of_tokens(40), both.mlx)
    cache = mlx.native_prompt_cache(both.mlx)
    mlx.read(both.mlx, ids, cache, chunk=1)  # read at once, mlx-lm would keep all of them for the moment
    slid = replace(state, cache=cache)
    other = between(both, both, PLAIN)
    handed = hand_off(
        tiny.text_of_tokens(40), both.mlx, both.mlx, identity_translator(both.lm.geometry), source_state=slid
    )
    assert handed.plan.fallback is None  # every sliding layer is read for a sliding layer: the window is enough
    assert gap(mlx.read(both.mlx, handed.rest, handed.cache), cold(both.mlx, ids)) < 1e-4
    needy = hand_off(
        tiny.text_of_tokens(40),
        both.mlx,
        both.mlx,
        random_maps(replace(other.config, source_layers=((0,), (0,), (2,), (3,)))),
        source_state=slid,
    )
    assert needy.plan.fallback is not None
    assert "full_prompt_cache" in needy.plan.fallback
    assert "\n" not in needy.plan.fallback
    assert needy.rest == ids
    assert gap(mlx.read(both.mlx, needy.rest, needy.cache), cold(both.mlx, ids)) < 1e-4


def test_a_cache_that_dropped_its_middle_is_refused(load: Any) -> None:
    both = load("llama")
    ids = tiny.ids_of(both.lm, 40).tolist()
    cache = [RotatingKVCache(max_size=16, keep=4) for _ in both.mlx.geometry.layers]
    mlx.read(both.mlx, ids, cache, chunk=1)
    with pytest.raises(UnsupportedCache, match="dropped tokens from its middle"):
        mlx_caches.held_by(cache[0], 0)
    short = [RotatingKVCache(max_size=64, keep=4) for _ in both.mlx.geometry.layers]
    mlx.read(both.mlx, ids, short, chunk=1)
    whole = mlx.full_prompt_cache(both.mlx)
    mlx.read(both.mlx, ids, whole)
    assert gap(mlx_caches.held_by(short[1], 1).keys, mlx_caches.held_by(whole[1], 1).keys) < 1e-5


def test_a_rotating_cache_is_read_in_order(load: Any) -> None:
    both = load("gemma3")
    ids = tiny.ids_of(both.lm, 26).tolist()
    whole, native = mlx.full_prompt_cache(both.mlx), mlx.native_prompt_cache(both.mlx)
    mlx.read(both.mlx, ids, whole)
    mlx.read(both.mlx, ids[:21], native)
    mlx.read(both.mlx, ids[21:], native, chunk=1)
    held = mlx_caches.held_by(native[0], 0)
    assert held.lost == 26 - 8
    assert gap(held.keys, mlx_caches.held_by(whole[0], 0).keys[:, :, -8:]) < 1e-4


@pytest.mark.parametrize("tokens", [8, 9, 20])
def test_a_filler_is_never_read_as_a_token(load: Any, tokens: int) -> None:
    both = load("gemma3")
    keys = 1 + mx.arange(tokens * 32).reshape(1, 2, tokens, 16).astype(mx.float32)
    cache = mlx.native_prompt_cache(both.mlx)[0]
    mlx_caches.fill(cache, keys, keys, tokens)
    held = mlx_caches.held_by(cache, 0)
    assert gap(held.keys, keys[:, :, -7:]) == 0.0
    cache.update_and_fetch(-keys[:, :, :1], -keys[:, :, :1])
    held = mlx_caches.held_by(cache, 0)
    assert gap(held.keys, mx.concatenate((keys[:, :, -7:], -keys[:, :, :1]), axis=2)) == 0.0
    assert held.tokens == tokens + 1


def test_a_quantised_source_is_read(tmp_path: Path) -> None:
    lm = tiny.language_model(lambda: tiny.llama(head_dim=64), tokenizer=tiny.byte_tokenizer(), dtype=torch.float32)
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    model = mlx.load(tmp_path)
    state = mlx.read_native(tiny.text_of_tokens(40), model)
    short = replace(state, cache=[cache.to_quantized(group_size=64, bits=8) for cache in state.cache])
    maps = identity_translator(lm.geometry)
    exact, rounded = (
        hand_off(tiny.text_of_tokens(40), model, model, maps, source_state=each) for each in (state, short)
    )
    assert rounded.plan.fallback is None
    a, b = (np.array(handed.cache[1].keys[:, :, :39]) for handed in (exact, rounded))
    assert 0 < np.linalg.norm(a - b) / np.linalg.norm(b) < 2e-2  # 8 bits


def test_a_source_cache_that_ends_before_its_reading_is_used_as_far_as_it_goes(load: Any) -> None:
    both = load("llama")
    state = mlx.read_native(tiny.text_of_tokens(40), both.mlx)
    cache = mlx.full_prompt_cache(both.mlx)
    mlx.read(both.mlx, state.reading.ids[:-5], cache)
    maps, short = identity_translator(both.lm.geometry), replace(state, cache=cache)
    handed = hand_off(tiny.text_of_tokens(40), both.mlx, both.mlx, maps, source_state=short)
    assert handed.plan.fallback is None
    assert handed.plan.translated[1] == len(state.reading.ids) - 5
    assert len(handed.rest) == 5


def test_other_caches_are_refused_in_one_line(load: Any) -> None:
    both = load("llama")
    ids = tiny.ids_of(both.lm, 20).tolist()
    state = mlx.read_native(tiny.text_of_tokens(20), both.mlx)
    other = [ConcatenateKVCache() for _ in state.cache]
    mlx.read(both.mlx, ids, other)
    maps = identity_translator(both.lm.geometry)
    for cache, words in (
        (other, "ConcatenateKVCache"),
        (state.cache[:2], "2 layers"),
        (mlx.full_prompt_cache(both.mlx), "is empty"),
    ):
        handed = hand_off(tiny.text_of_tokens(20), both.mlx, both.mlx, maps, source_state=replace(state, cache=cache))
        assert handed.plan.fallback is not None
        assert words in handed.plan.fallback
        assert handed.rest == ids


def test_another_pair_s_translator_is_refused(load: Any) -> None:
    llama, gemma = load("llama"), load("gemma3")
    for maps, source, target, words in (
        (identity_translator(gemma.lm.geometry), llama, gemma, "keeps 4 layers, llama in mlx-lm 3"),
        (identity_translator(llama.lm.geometry), llama, gemma, "keeps 3 layers"),
        (identity_translator(replace(llama.lm.geometry, layers=gemma.lm.geometry.layers)), gemma, llama, "4 layers"),
    ):
        with pytest.raises(IncompatiblePair, match=words):
            hand_off("text", source.mlx, target.mlx, maps)
    wider = replace(llama.lm.geometry, layers=(replace(llama.lm.geometry.layers[0], window=8),) * 3)
    with pytest.raises(IncompatiblePair, match="a window of 8"):
        hand_off("text", llama.mlx, llama.mlx, identity_translator(wider))


def test_too_short_a_conversation_is_read(load: Any) -> None:
    both = load("llama")
    handed = hand_off("a", both.mlx, both.mlx, identity_translator(both.lm.geometry))
    assert handed.plan.fallback is not None
    assert len(handed.rest) == 2


# --- the benchmark ---------------------------------------------------------------------------------------------------


def saved(source: Any, target: Any, folder: Path) -> Path:
    maps = between(source, target, KINDS["linear-text-lags"])
    save_translator(folder, maps, Manifest(ModelCard.of(source.lm), ModelCard.of(target.lm), {}))
    return folder


def test_the_benchmark_times_every_arm(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = load("llama"), load("gemma3")
    (tmp_path / "text.txt").write_text(tiny.text(400))
    folder = saved(source, target, tmp_path / "translator")
    words = ["bench", str(source.folder), str(target.folder), str(folder), "--engine", "mlx", "--lengths", "16,48"]
    with pytest.raises(SystemExit) as stopped:
        cli.main([*words, "--repeats", "1", "--text", str(tmp_path / "text.txt"), "--json"])
    told = capsys.readouterr()
    assert stopped.value.code == 0, told.err
    assert "mlx" in told.out
    assert "decode step" in told.out
    record = json.loads(told.out.rstrip("\n").splitlines()[-1])
    assert record["engine"] == "mlx"
    assert [row["tokens"] for row in record["lengths"]] == [16, 48]
    for row in record["lengths"]:
        assert list(row["arms"]) == ["reprefill", "translate_warm", "source_and_translate", "decode_step"]
        assert all(arm["measured"] and arm["median_ms"] > 0 for arm in row["arms"].values())
        assert row["speedup_warm"] == row["arms"]["reprefill"]["median_ms"] / row["arms"]["translate_warm"]["median_ms"]
    assert record["environment"]["mlx"]


@pytest.mark.parametrize(
    ("engine", "given", "timed"),
    [("mlx", [], (64, 2048)), ("mlx", ["--lengths", "32"], (32,)), ("torch", [], (64, 512, 2048, 4096))],
)
def test_the_lengths_that_are_timed_unasked(
    monkeypatch: pytest.MonkeyPatch, engine: str, given: list[str], timed: tuple[int, ...]
) -> None:
    """With mlx-lm they are the paper's two on a Mac, so that its figures stand beside what comes out."""
    asked: list[mlx_bench.BenchOptions] = []

    def note(*words: Any, **_: Any) -> Any:
        asked.extend(word for word in words if isinstance(word, mlx_bench.BenchOptions))
        raise BadInput("this is far enough")

    for module, name in ((mlx_bench, "bench_mlx_shapes"), (benchmark, "bench_shapes")):
        monkeypatch.setattr(module, name, note)
    with pytest.raises(SystemExit):
        cli.main(["bench", "--shapes", "Qwen3-0.6B,Qwen3-1.7B", "--engine", engine, *given])
    assert [options.lengths for options in asked] == [timed]


def test_shapes_are_timed_with_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**tiny.SHAPE, "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_parameters": dict(tiny.THETA)}
    monkeypatch.setattr(mlx_bench, "shape_config", lambda name: small)
    options = mlx_bench.BenchOptions((16,), 1, arms=("reprefill", "translate_warm"))
    for kind, rank in (("layer", None), ("full", None), ("low-rank", 4), ("head-wise", None)):
        record = mlx_bench.bench_mlx_shapes(
            "a",
            "b",
            mlx_bench.MapShape(kind, rank),  # type: ignore[arg-type]
            options,
            where=mlx_bench.Where(),
            picture=None,
            tell=lambda _: None,
        )
        assert record["maps"]["kind"] == kind
        assert set(record["lengths"][0]["arms"]) == {"reprefill", "translate_warm"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": (16,), "arms": ("reprefill_delta",)}, "no arm reprefill_delta"),
        ({"lengths": (16_384,)}, "raise --reprefill-up-to"),
    ],
)
def test_what_only_pytorch_times_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        mlx_bench.refuse_options(mlx_bench.BenchOptions(**options))


# --- real weights ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "gemma-3-270m"])
def real(request: pytest.FixtureRequest) -> SimpleNamespace:
    if sys.platform != "darwin" and not os.environ.get("KVLINGO_REAL_MLX"):
        pytest.skip("MLX multiplies slowly without a Mac's GPU (about 20 minutes); set KVLINGO_REAL_MLX=1 to run")
    folder = Path(os.environ.get("KVLINGO_REAL_MODELS", "")) / request.param
    if not (folder / "config.json").is_file():
        try:
            folder = convert_gguf(fetch_demo_models(default_cache_dir() / "models", progress=False)[request.param])
        except KVLingoError as error:
            pytest.skip(str(error))
    return SimpleNamespace(lm=load_model(folder, dtype=torch.float32), mlx=mlx.load(folder), folder=folder)


@pytest.mark.real_model
def test_a_real_model_handed_to_itself_goes_on_as_itself(real: SimpleNamespace) -> None:
    text = Path(os.__file__).read_text(encoding="utf-8")[:3600]  # beyond Gemma's window of 512
    handed = hand_off(text, real.mlx, real.mlx, identity_translator(real.lm.geometry), tail=4)
    assert handed.plan.fallback is None
    ids = handed.state.reading.ids
    assert len(ids) > 600
    own = mlx.native_prompt_cache(real.mlx)
    mlx.read(real.mlx, ids[:-4], own)
    expected, chunked = cold(real.mlx, ids), mlx.read(real.mlx, ids[-4:], own)
    allowed = max(1e-3, 3 * gap(chunked, expected))
    assert gap(mlx.read(real.mlx, handed.rest, handed.cache), expected) <= allowed


@pytest.mark.real_model
def test_maps_of_a_real_model_give_what_pytorch_gives(real: SimpleNamespace) -> None:
    count = len(real.lm.geometry)
    layers = tuple((max(layer - 1, 0), layer) if layer else (0, 1) for layer in range(count))
    maps = random_maps(TranslatorConfig(real.lm.geometry, real.lm.geometry, layers, embedding_lags=(0, 1)))
    found = differences(real, real, maps, Path(os.__file__).read_text(encoding="utf-8")[:3600])
    assert max(found) < 1e-4, found
