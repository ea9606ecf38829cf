"""Every kind of cache a user may hold: read exactly, or refused with what to do; cut; written so that the model goes on."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    QuantizedCache,
    StaticCache,
    cache_utils,
)
from transformers.cache_utils import Cache, QuantizedLayer

from kvlingo.cache import full_cache, native_cache, read_cache
from kvlingo.cache_writing import truncate, write_cache
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.handoff import hand_off
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.plan import SpanKind
from kvlingo.states import ModelState, read_native
from kvlingo.translator import identity_translator
from tests import tiny

EXACT = 1e-8  # float64
ROOM = 48
FAMILIES = ("llama", "gemma3", "mistral")
LENGTHS = (tiny.WINDOW - 1, tiny.WINDOW, tiny.WINDOW + 1, 30)


def cache_name(lm: LanguageModel) -> str:
    return "cache" if "cache" in inspect.signature(lm.model.forward).parameters else "past_key_values"


def tensors_of(thing: Any) -> list[Tensor]:
    """Return every tensor inside a cache or a KV, however deep."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, KV):
        return [*thing.keys, *thing.values]
    if isinstance(thing, Cache):
        return [x for layer in thing.layers for x in tensors_of(vars(layer))]
    if isinstance(thing, dict):
        return [x for value in thing.values() for x in tensors_of(value)]
    if isinstance(thing, (list, tuple)):
        return [x for value in thing for x in tensors_of(value)]
    return []


def digest(thing: Any) -> str:
    found = hashlib.sha256()
    for x in tensors_of(thing):
        found.update(f"{tuple(x.shape)}{x.dtype}".encode() + x.detach().float().numpy().tobytes())
    return found.hexdigest()


def storages(thing: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors_of(thing) if x.numel()}


def parts(lm: LanguageModel) -> tuple[Any, ...]:
    return lm.rotary, lm.geometry, lm.model.config


def read_alone(lm: LanguageModel, cache: Any, **options: Any) -> KV:
    """Read a cache; check that it was left alone and shares nothing with what came out."""
    before, length = digest(cache), int(cache.get_seq_length())
    kv = read_cache(cache, lm.rotary, lm.geometry, **options)
    assert digest(cache) == before
    assert int(cache.get_seq_length()) == length
    assert not storages(kv) & storages(cache)
    return kv


def assert_close(kv: KV, other: KV, atol: float = EXACT) -> None:
    assert kv.tokens == other.tokens
    for x, y in zip(tensors_of(kv), tensors_of(other), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=0)


def assert_goes_on(lm: LanguageModel, cache: Any, ids: Tensor, *, steps: int = 6) -> None:
    """From a cache of the first tokens of `ids` the model goes on as if it had read them now: several tokens, then one each."""
    held = int(cache.get_seq_length())
    cold = tiny.cold_logits(lm, ids)
    chunk = len(ids) - held - steps
    assert chunk > 1
    got = [prefill(lm, ids[held : held + chunk], cache=cache, logits_to_keep=0).logits]
    got += [prefill(lm, ids[i : i + 1], cache=cache).logits for i in range(held + chunk, len(ids))]
    torch.testing.assert_close(torch.cat(got), cold[held:], atol=EXACT, rtol=0)


# --- in: read, or refused --------------------------------------------------------------------------------------------


def static(lm: LanguageModel) -> StaticCache:
    return StaticCache(config=lm.model.config, max_cache_len=ROOM)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_length_cache_is_read_whole(family: str, tokens: int) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, tokens)
    cache = prefill(lm, ids, cache=full_cache(lm.model.config)).cache
    assert_close(read_alone(lm, cache), read(lm, ids))


@pytest.mark.parametrize("make", [static, lambda lm: native_cache(lm.model.config)], ids=["static", "sliding"])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_static_and_sliding_caches_are_read_or_refused(
    family: str, tokens: int, make: Callable[[LanguageModel], Any]
) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, tokens)
    cache = make(lm)
    prefill(lm, ids[:5], cache=cache)
    prefill(lm, ids[5:], cache=cache)
    whole = read(lm, ids)
    room = tiny.WINDOW if make is static else tiny.WINDOW - 1  # a static layer keeps one token that no query sees
    if family == "llama" or tokens <= room:
        assert_close(read_alone(lm, cache), whole)
    else:
        with pytest.raises(
            UnsupportedCache, match=rf"layer 0 of the cache holds {room} of {tokens} tokens.*re-prefill"
        ):
            read_cache(cache, lm.rotary, lm.geometry)
    # What every layer still holds, the model can go on from, and it is exact.
    last = read_alone(lm, cache, partial=True)
    assert [last.held(i) for i in range(len(last))] == [
        tokens if shape.window is None else min(tokens, room) for shape in lm.geometry.layers
    ]
    more = tiny.ids_of(lm, tokens + 10)
    read_more = torch.cat((ids, more[tokens:]))
    assert_goes_on(lm, write_cache(last, *parts(lm)), read_more)


class Halved(QuantizedLayer):
    """A backend of the kind that transformers asks two libraries for: here by rounding to a grid."""

    def _quantize(self, tensor: Tensor, axis: int) -> Any:
        return (tensor * 64).round().to(torch.int32), tensor.dtype

    def _dequantize(self, q_tensor: Any) -> Tensor:
        return q_tensor[0].to(q_tensor[1]) / 64


def quantised(lm: LanguageModel, backend: str) -> Any:
    if backend == "fp8":
        if not hasattr(cache_utils, "Fp8QuantizedLayer"):
            pytest.skip("this transformers has no fp8 caches")
        return QuantizedCache("fp8", lm.model.config)
    return Cache(layers=[Halved(residual_length=6) for _ in lm.geometry.layers])


@pytest.mark.parametrize("backend", ["fp8", "rounding"])
@pytest.mark.parametrize("steps", [(12,), (5, 7), (5, 3, 1, 1, 1, 1), (5, 1, 1)])
def test_a_quantised_cache_is_read_as_the_model_would_read_it_next(backend: str, steps: tuple[int, ...]) -> None:
    """Also with some tokens still unquantised, which no public reader of `layer.keys` sees."""
    lm = tiny.language_model("llama")
    tokens = sum(steps)
    ids, cache, start = tiny.ids_of(lm, tokens + 10), quantised(lm, backend), 0
    for step in steps:
        prefill(lm, ids[start : start + step], cache=cache)
        start += step
    kv = read_alone(lm, cache)
    assert kv.tokens == tokens
    plain = write_cache(kv, *parts(lm))
    new = torch.zeros(1, 2, 1, 8, dtype=torch.float64)
    for layer, written in zip(deepcopy(cache).layers, plain.layers, strict=True):
        for seen, mine in zip(layer.update(new, new), (written.keys, written.values), strict=True):
            torch.testing.assert_close(mine, seen[:, :, :tokens], atol=EXACT, rtol=0)
    if backend != "fp8":  # there the model reads its newest token through the quantiser, too
        wanted = prefill(lm, ids[tokens : tokens + 1], cache=cache).logits
        got = prefill(lm, ids[tokens : tokens + 1], cache=plain).logits
        torch.testing.assert_close(got, wanted, atol=EXACT, rtol=0)


@pytest.mark.skipif(
    not hasattr(QuantizedLayer, "_apply_pending_reorder"), reason="this transformers reorders quantised layers at once"
)
def test_a_quantised_cache_whose_beams_were_reordered() -> None:
    lm = tiny.language_model("llama")
    rows = torch.stack([tiny.ids_of(lm, 9), tiny.ids_of(lm, 9, seed=4)])
    cache = quantised(lm, "rounding")
    lm.model(input_ids=rows, **{cache_name(lm): cache})
    before = read_alone(lm, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    after = read_alone(lm, cache)
    for x, y in zip(tensors_of(before), tensors_of(after), strict=True):
        assert torch.equal(x.flip(0), y)
        assert not torch.equal(x, y)


class Offloaded(DynamicCache):
    """What an offloaded cache looks like between two calls; the streams that move its layers need a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.offloading = True


def test_an_offloaded_cache_is_read() -> None:
    lm = tiny.language_model("llama")
    ids = tiny.ids_of(lm, 20)
    plain = prefill(lm, ids).cache
    cache = Offloaded()
    cache.layers = plain.layers
    for layer in cache.layers:
        layer.offload()
    assert_close(read_alone(lm, cache), read(lm, ids))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="an offloaded cache fills itself on a GPU only")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_offloaded_cache_on_a_gpu(family: str) -> None:
    lm = tiny.language_model(family)
    lm.model.to("cuda")
    try:
        ids = tiny.ids_of(lm, 20).cuda()
        cache = prefill(lm, ids, cache=DynamicCache(offloading=True)).cache
        assert_close(read_alone(lm, cache).to(ids.device), read(lm, ids))
        written = write_cache(read(lm, ids[:10]), *parts(lm), kind="offloaded")
        cold = tiny.cold_logits(lm, ids)[-1]
        torch.testing.assert_close(prefill(lm, ids[10:], cache=written).logits[-1], cold, atol=EXACT, rtol=0)
    finally:
        lm.model.to("cpu")


def generated(lm: LanguageModel, ids: Tensor, new: int, **options: Any) -> Any:
    return lm.model.generate(
        ids[None],
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        **options,
    )


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["dynamic", "static"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_generate_gives_back(family: str, options: dict[str, Any]) -> None:
    lm = tiny.language_model(family)
    out = generated(lm, tiny.ids_of(lm, 4), 3, **options)
    cache = getattr(out, cache_name(lm))
    held = int(cache.get_seq_length())
    assert held == 6
    assert_close(read_alone(lm, cache), read(lm, out.sequences[0, :held]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_user_s_cache_is_handed_over(family: str) -> None:
    """`generate` filled it; past the window its sliding layers forgot, so that the hand-over re-prefills and says so."""
    lm = tiny.language_model(family)
    text = tiny.text_of_tokens(20)
    state = read_native(text, lm)
    out = generated(lm, lm.ids(state.reading.ids), 1)
    mine = ModelState(state.reading, getattr(out, cache_name(lm)), state.spans)
    before = digest(mine.cache)
    done = hand_off(text, lm, lm, identity_translator(lm.geometry, torch.float64), source_state=mine)
    assert digest(mine.cache) == before
    assert not storages(done.state.cache) & storages(mine.cache)
    assert (done.plan.fallback is None) == (family == "llama")
    assert done.plan.count(SpanKind.TRANSLATED) == (18 if family == "llama" else 0)
    assert done.logits is not None
    cold = tiny.cold_logits(lm, lm.ids(state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=EXACT, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cropped_cache_is_read(family: str) -> None:
    """A cropped layer is a view of a larger tensor."""
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, 20)
    cache = prefill(lm, ids, full_length=True).cache
    for layer in cache.layers:
        layer.crop(-6)
    assert_close(read_alone(lm, cache), read(lm, ids[:14]))


def test_layers_that_were_cut_unevenly_are_refused() -> None:
    """The length of layer 0 is not every layer's length."""
    lm = tiny.language_model("gemma3")
    cache = prefill(lm, tiny.ids_of(lm, 20), full_length=True).cache
    cache.layers[2].crop(-3)
    with pytest.raises(UnsupportedCache, match=r"layer 2 of the cache has read 17 tokens, layer 0 20.*truncate"):
        read_cache(cache, lm.rotary, lm.geometry)


def test_caches_built_in_three_ways_are_one() -> None:
    lm = tiny.language_model("llama")
    filled = prefill(lm, tiny.ids_of(lm, 9)).cache
    given = DynamicCache([(layer.keys, layer.values) for layer in filled.layers])
    updated = DynamicCache()
    for index, layer in enumerate(filled.layers):
        updated.update(layer.keys, layer.values, index)
    for cache in (given, updated):
        assert cache.get_seq_length() == 9
        assert_close(read_alone(lm, cache), read_alone(lm, filled), 0.0)


def test_a_static_cache_that_ran_over_is_refused() -> None:
    lm = tiny.language_model("llama")
    cache = StaticCache(config=lm.model.config, max_cache_len=10)
    prefill(lm, tiny.ids_of(lm, 10), cache=cache)
    layer = cache.layers[0]
    with pytest.raises((IndexError, RuntimeError)):
        layer.update(layer.keys[:, :, :1], layer.values[:, :, :1])
    with pytest.raises(UnsupportedCache, match="room for 10 tokens and was given 11"):
        read_cache(cache, lm.rotary, lm.geometry)


def test_what_is_no_cache_of_keys_and_values_is_refused() -> None:
    lm = tiny.language_model("llama")
    filled = prefill(lm, tiny.ids_of(lm, 9)).cache
    refused = {
        "encoder-decoder": EncoderDecoderCache(filled, DynamicCache()),
        "got a tuple, expected a cache of transformers": tuple((x.keys, x.values) for x in filled.layers),
        "the cache is empty": DynamicCache(),
        "the cache is empty; let": native_cache(lm.model.config),
    }
    for reason, cache in refused.items():
        with pytest.raises(UnsupportedCache, match=reason):
            read_cache(cache, lm.rotary, lm.geometry)
    with pytest.raises(UnsupportedCache, match="holds 9 tokens, got the range 0 to 10"):
        read_cache(filled, lm.rotary, lm.geometry, stop=10)


def test_a_cache_that_starts_at_an_offset() -> None:
    """Its first token stands at 100: read with that position it is the same KV, without it every key is turned."""
    lm = tiny.language_model("gemma3")
    ids = tiny.ids_of(lm, 12)
    cache = full_cache(lm.model.config)
    lm.model(input_ids=ids[None], position_ids=torch.arange(100, 112)[None], **{cache_name(lm): cache})
    rounded = 1e-5  # the model's own angles are float32, and differ from place to place
    assert_close(read_alone(lm, cache, position=100), read(lm, ids), rounded)
    assert_close(read_alone(lm, cache, position=100, start=3, stop=9), read(lm, ids).narrow(3, 9), rounded)
    with pytest.raises(AssertionError):
        assert_close(read_alone(lm, cache, position=99), read(lm, ids), rounded)


# --- cut -------------------------------------------------------------------------------------------------------------

CUTS = (12, 9, 1, 0)


@pytest.mark.parametrize("keep", CUTS)
@pytest.mark.parametrize("make", [static, lambda lm: full_cache(lm.model.config)], ids=["static", "dynamic"])
def test_truncating_full_layers(make: Callable[[LanguageModel], Any], keep: int) -> None:
    lm = tiny.language_model("llama")
    assert_cut(lm, prefill(lm, tiny.ids_of(lm, 12), cache=make(lm)).cache, keep)


@pytest.mark.parametrize("keep", CUTS)
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_truncating_a_full_length_cache_of_a_sliding_model(family: str, keep: int) -> None:
    lm = tiny.language_model(family)
    cut = assert_cut(lm, prefill(lm, tiny.ids_of(lm, 12), full_length=True).cache, keep)
    if keep:
        assert_close(read_cache(cut, lm.rotary, lm.geometry), read(lm, tiny.ids_of(lm, 12)[:keep]))


@pytest.mark.parametrize("make", [static, lambda lm: native_cache(lm.model.config)], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_truncating_sliding_layers(family: str, make: Callable[[LanguageModel], Any]) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, 12)
    slid = prefill(lm, ids, cache=make(lm)).cache
    for keep in (12, 0):
        assert_cut(lm, slid, keep)
    for keep in (9, 1):
        with pytest.raises(UnsupportedCache, match=r"first [45] of 12 tokens.*slid out of its window.*re-prefill"):
            truncate(slid, keep, lm.geometry, lm.model.config)
    if make is static:
        assert_cut(lm, slid, 11)
    short = prefill(lm, ids[: tiny.WINDOW - 1], cache=make(lm)).cache
    for keep in (7, 6, 1, 0):
        assert_cut(lm, short, keep)


@pytest.mark.parametrize("keep", CUTS)
@pytest.mark.parametrize("backend", ["fp8", "rounding"])
def test_truncating_a_quantised_cache(backend: str, keep: int) -> None:
    """The new cache holds what the quantised one gave back, and is plain."""
    lm = tiny.language_model("llama")
    cache = quantised(lm, backend)
    ids = tiny.ids_of(lm, 12)
    prefill(lm, ids[:9], cache=cache)
    prefill(lm, ids[9:], cache=cache)
    before = digest(cache)
    cut = truncate(cache, keep, lm.geometry, lm.model.config)
    assert digest(cache) == before
    assert cut.get_seq_length() == keep
    if keep:
        whole = read_cache(cache, lm.rotary, lm.geometry)
        assert_close(read_cache(cut, lm.rotary, lm.geometry), whole.narrow(0, keep), 0.0)


def test_a_recurrent_state_can_not_be_cut() -> None:
    config = FalconH1Config(
        **{
            **tiny.SHAPE,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "pad_token_id": 0,
        }
    )
    model = FalconH1ForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=torch.arange(12)[None], **{name: cache})
    geometry = tiny.language_model("llama").geometry
    for keep in (12, 9, 1):
        with pytest.raises(UnsupportedCache, match="layer 0 of the cache keeps a recurrent state"):
            truncate(cache, keep, geometry, config)
    assert truncate(cache, 0, geometry, config).get_seq_length() == 0


def test_there_is_nothing_to_cut_beyond_the_end() -> None:
    lm = tiny.language_model("llama")
    cache = prefill(lm, tiny.ids_of(lm, 12)).cache
    for tokens in (13, -1):
        with pytest.raises(UnsupportedCache, match=f"holds 12 tokens, got {tokens}"):
            truncate(cache, tokens, lm.geometry, lm.model.config)


def assert_cut(lm: LanguageModel, cache: Any, keep: int) -> Any:
    """The cut cache goes on as a cold one; the old one is untouched. All of a tiny text, whatever the length."""
    before = digest(cache)
    cut = truncate(cache, keep, lm.geometry, lm.model.config)
    assert [layer.get_seq_length() for layer in cut.layers] == [keep] * len(lm.geometry)
    assert not storages(cut) & storages(cache)
    ids = torch.cat((tiny.ids_of(lm, 12)[:keep], tiny.ids_of(lm, 20, seed=5)))
    after = truncate(cache, keep, lm.geometry, lm.model.config)
    assert_goes_on(lm, after, ids)
    assert digest(cache) == before
    return cut


# --- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_goes_on_as_cold(family: str, tokens: int) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, tokens + 12)
    for kv in (read(lm, ids[:tokens]), windows_only(lm, ids[:tokens])):
        cache = write_cache(kv, *parts(lm), kind="static", max_length=tokens + 12)
        last = read_cache(cache, lm.rotary, lm.geometry, partial=True)  # no slot that holds nothing is read
        assert_close(last, windows_only(lm, ids[:tokens]))
        assert {type(layer).__name__ for layer in cache.layers} <= {"StaticLayer", "StaticSlidingWindowLayer"}
        assert_goes_on(lm, cache, ids)


def windows_only(lm: LanguageModel, ids: Tensor) -> KV:
    return read_cache(prefill(lm, ids).cache, lm.rotary, lm.geometry, partial=True)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("tokens", [tiny.WINDOW - 1, tiny.WINDOW, 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_goes_on_from_a_written_cache(family: str, tokens: int, kind: Any) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, tokens + 1)
    cache = write_cache(read(lm, ids[:tokens]), *parts(lm), kind=kind, max_length=tokens + 12)
    out = generated(lm, ids, 8, **{cache_name(lm): cache})
    assert out.sequences[0, tokens + 1 :].tolist() == tiny.cold_greedy(lm, ids, 8)


def test_a_static_cache_needs_room() -> None:
    lm = tiny.language_model("llama")
    kv = read(lm, tiny.ids_of(lm, 9))
    for room in (None, 9):
        with pytest.raises(BadInput, match=f"max_length={room}"):
            write_cache(kv, *parts(lm), kind="static", max_length=room)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to come back to")
def test_an_offloaded_cache_needs_a_gpu() -> None:
    lm = tiny.language_model("llama")
    with pytest.raises(BadInput, match="needs a GPU"):
        write_cache(read(lm, tiny.ids_of(lm, 9)), *parts(lm), kind="offloaded")


def test_there_is_no_other_kind() -> None:
    lm = tiny.language_model("llama")
    with pytest.raises(BadInput, match="unknown cache kind 'paged'"):
        write_cache(read(lm, tiny.ids_of(lm, 9)), *parts(lm), kind="paged")  # type: ignore[arg-type]


def test_these_checks_see_a_wrong_layer_and_a_wrong_position() -> None:
    lm = tiny.language_model("gemma3")
    ids = tiny.ids_of(lm, 30)
    kv = read(lm, ids[:20])
    swapped = KV((kv.keys[2], kv.keys[1], kv.keys[0], kv.keys[3]), kv.values, 20)
    for broken in (swapped, KV(tuple(k.roll(1, 2) for k in kv.keys), kv.values, 20)):
        for kind in ("dynamic", "static"):
            cache = write_cache(broken, *parts(lm), kind=kind, max_length=40)  # type: ignore[arg-type]
            with pytest.raises(AssertionError):
                assert_goes_on(lm, cache, ids)
