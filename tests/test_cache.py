"""Reading and writing caches: nothing shared, nothing mutated, windows kept, slid caches refused."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from kvlingo.cache import full_cache, native_cache, read_cache
from kvlingo.cache_writing import can_fork, fork, write_cache
from kvlingo.errors import UnsupportedCache
from kvlingo.handoff import hand_off
from kvlingo.kv import KV, concat, flatten_heads, split_heads
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.states import read_native
from kvlingo.translator import identity_translator
from tests import tiny

EXACT = 1e-8  # float64


def tensors_of(cache: Any) -> list[Tensor]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def snapshot(cache: Any) -> list[Tensor]:
    return [x.clone() for x in tensors_of(cache)]


def storages(tensors: list[Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if x.numel()}


def both(kv: KV) -> list[Tensor]:
    return [*kv.keys, *kv.values]


def random_kv(tokens: int, *, held: tuple[int, ...] | None = None, layers: int = 2) -> KV:
    each = held or (tokens,) * layers
    keys = tuple(torch.randn(1, 2, h, 4, dtype=torch.float64) for h in each)
    values = tuple(torch.randn(1, 2, h, 3, dtype=torch.float64) for h in each)
    return KV(keys, values, tokens)


def assert_same(a: KV, b: KV, atol: float = 0.0) -> None:
    assert a.tokens == b.tokens
    for x, y in zip(both(a), both(b), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=0)


# --- nothing shared, nothing mutated (a reused cache is mutated by the next call) ------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_reading_and_writing_leave_the_cache_alone_and_share_nothing(family: str) -> None:
    lm = tiny.language_model(family)
    cache = prefill(lm, tiny.ids_of(lm, 20), full_length=True).cache
    before = snapshot(cache)
    kv = read_cache(cache, lm.rotary, lm.geometry)
    written = write_cache(kv, lm.rotary, lm.geometry, lm.model.config)
    assert not storages(both(kv)) & storages(tensors_of(cache))
    assert not storages(tensors_of(written)) & storages(tensors_of(cache))
    assert not storages(tensors_of(written)) & storages(both(kv))
    kept = [x.clone() for x in both(kv)]
    prefill(lm, tiny.ids_of(lm, 10), cache=written)
    assert tiny.same(kept, both(kv))
    assert tiny.same(before, tensors_of(cache))
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_source_cache_serves_many_hand_offs(family: str) -> None:
    lm = tiny.language_model(family)
    text, translator = tiny.text_of_tokens(25), identity_translator(lm.geometry, torch.float64)
    state = read_native(text, lm)
    before = snapshot(state.cache)
    first = hand_off(text, lm, lm, translator, source_state=state)
    after = snapshot(first.state.cache)
    prefill(lm, tiny.ids_of(lm, 20), cache=first.state.cache)
    second = hand_off(text, lm, lm, translator, source_state=state)
    assert tiny.same(before, tensors_of(state.cache))
    assert state.cache.get_seq_length() == 25
    assert tiny.same(after, tensors_of(second.state.cache))
    assert first.logits is not None
    assert second.logits is not None
    assert torch.equal(first.logits, second.logits)


# --- windows ---------------------------------------------------------------------------------------------------------


def test_a_sliding_target_layer_gets_its_window_only() -> None:
    lm = tiny.language_model("gemma3")
    for tokens in (tiny.WINDOW - 1, tiny.WINDOW, 30):
        ids = tiny.ids_of(lm, tokens)
        written = write_cache(read(lm, ids), lm.rotary, lm.geometry, lm.model.config)
        own = prefill(lm, ids).cache
        for mine, theirs in zip(written.layers, own.layers, strict=True):
            assert isinstance(mine, type(theirs))
            assert mine.is_sliding == theirs.is_sliding
            assert mine.get_seq_length() == theirs.get_seq_length() == tokens
            torch.testing.assert_close(mine.keys, theirs.keys, atol=EXACT, rtol=0)
            torch.testing.assert_close(mine.values, theirs.values, atol=EXACT, rtol=0)


def test_a_window_is_enough_to_write_from() -> None:
    lm = tiny.language_model("gemma3")
    ids = tiny.ids_of(lm, 30)
    whole = read(lm, ids)
    cut = KV(
        tuple(k[:, :, s.first_held(30) :] for k, s in zip(whole.keys, lm.geometry.layers, strict=True)),
        tuple(v[:, :, s.first_held(30) :] for v, s in zip(whole.values, lm.geometry.layers, strict=True)),
        30,
    )
    assert cut.held(0) == tiny.WINDOW - 1
    a, b = (write_cache(kv, lm.rotary, lm.geometry, lm.model.config) for kv in (whole, cut))
    assert tiny.same(tensors_of(a), tensors_of(b))


def test_a_full_layer_without_its_first_tokens_is_refused() -> None:
    lm = tiny.language_model("llama")
    whole = read(lm, tiny.ids_of(lm, 30))
    cut = KV(tuple(k[:, :, 1:] for k in whole.keys), tuple(v[:, :, 1:] for v in whole.values), 30)
    with pytest.raises(UnsupportedCache, match=r"layer 0 needs tokens from 0 on, got 29 of 30; re-prefill"):
        write_cache(cut, lm.rotary, lm.geometry, lm.model.config)


def test_a_slid_cache_is_refused_as_a_source() -> None:
    lm = tiny.language_model("gemma3")
    slid = prefill(lm, tiny.ids_of(lm, 30)).cache
    with pytest.raises(UnsupportedCache, match=r"layer 0 of the cache holds 7 of 30 tokens.*re-prefill"):
        read_cache(slid, lm.rotary, lm.geometry)
    partial = read_cache(slid, lm.rotary, lm.geometry, partial=True)
    assert [partial.held(layer) for layer in range(4)] == [7, 30, 7, 30]
    short = prefill(lm, tiny.ids_of(lm, tiny.WINDOW - 1)).cache
    assert read_cache(short, lm.rotary, lm.geometry).held(0) == tiny.WINDOW - 1


def test_a_slid_cache_gives_the_tokens_it_still_holds() -> None:
    lm = tiny.language_model("gemma3")
    ids = tiny.ids_of(lm, 30)
    slid, whole = prefill(lm, ids).cache, read(lm, ids)
    part = read_cache(slid, lm.rotary, lm.geometry, start=25)
    assert_same(part, whole.narrow(25, 30), EXACT)
    with pytest.raises(UnsupportedCache):  # partial is for going on from the very end
        read_cache(slid, lm.rotary, lm.geometry, stop=20, partial=True)


def test_reading_any_range_reads_the_same_tokens() -> None:
    lm = tiny.language_model("gemma3")
    cache = prefill(lm, tiny.ids_of(lm, 20), full_length=True).cache
    whole = read_cache(cache, lm.rotary, lm.geometry)
    for start, stop in ((0, 20), (0, 7), (3, 20), (5, 6), (4, 4)):
        assert_same(read_cache(cache, lm.rotary, lm.geometry, start=start, stop=stop), whole.narrow(start, stop), 1e-12)


def test_a_cache_of_another_model_is_refused() -> None:
    llama, gemma = tiny.language_model("llama"), tiny.language_model("gemma3")
    cache = prefill(llama, tiny.ids_of(llama, 5)).cache
    with pytest.raises(UnsupportedCache, match=r"3 layers, the model 4"):
        read_cache(cache, gemma.rotary, gemma.geometry)


def test_a_cache_filled_by_generate_is_read_like_our_own() -> None:
    lm = tiny.language_model("llama")
    ids = tiny.ids_of(lm, 12)
    cache = DynamicCache()
    name = "cache" if "cache" in inspect.signature(lm.model.forward).parameters else "past_key_values"
    out = lm.model.generate(
        ids[None],
        attention_mask=torch.ones(1, 12, dtype=torch.long),
        **{name: cache},
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )[0]
    held = cache.get_seq_length()
    assert held == 17
    assert_same(read_cache(cache, lm.rotary, lm.geometry), read(lm, out[:held]), EXACT)


# --- truncating, joining ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_truncating_by_narrow_is_exact(family: str) -> None:
    """12 -> 12, 9, 1, 0: what crop() does differently in every version."""
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, 12)
    kv = read(lm, ids)
    for keep in (12, 9, 1):
        cut = kv.narrow(0, keep)
        assert_same(cut, read(lm, ids[:keep]), EXACT)
        cache = write_cache(cut, lm.rotary, lm.geometry, lm.model.config)
        assert [layer.get_seq_length() for layer in cache.layers] == [keep] * len(lm.geometry)
        following = (
            prefill(lm, ids[keep - 1 :], cache=write_cache(kv.narrow(0, keep - 1), *parts(lm))) if keep > 1 else None
        )
        if following is not None:
            torch.testing.assert_close(following.logits[-1], tiny.cold_logits(lm, ids)[-1], atol=EXACT, rtol=0)
    empty = write_cache(kv.narrow(0, 0), *parts(lm))
    assert empty.get_seq_length() == 0
    torch.testing.assert_close(
        prefill(lm, ids, cache=empty).logits[-1], tiny.cold_logits(lm, ids)[-1], atol=EXACT, rtol=0
    )


def parts(lm: LanguageModel) -> tuple[Any, ...]:
    return lm.rotary, lm.geometry, lm.model.config


def test_a_range_that_is_not_held_is_no_view() -> None:
    kv = random_kv(10, held=(10, 4))
    assert kv.narrow(6, 10).held(1) == 4
    with pytest.raises(ValueError, match="layer 1 holds no tokens before 6"):
        kv.narrow(5, 10)


@given(st.lists(st.integers(0, 9), min_size=0, max_size=4), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_concat_undoes_narrow(cuts: list[int], tokens: int) -> None:
    kv = random_kv(tokens)
    edges = [0, *sorted(min(c, tokens) for c in cuts), tokens]
    pieces = [kv.narrow(a, b) for a, b in pairwise(edges)]
    assert_same(concat(pieces), kv)
    assert_same(concat([concat(pieces[:1]), *pieces[1:]]), kv)


def test_a_part_that_has_forgotten_hides_what_came_before_it() -> None:
    kv = random_kv(10)
    last = kv.narrow(4, 10)
    forgetful = KV((last.keys[0][:, :, 2:], last.keys[1]), (last.values[0][:, :, 2:], last.values[1]), 6)
    joined = concat([kv.narrow(0, 4), forgetful])
    assert joined.tokens == 10
    assert joined.held(0) == 4
    assert joined.held(1) == 10
    assert torch.equal(joined.keys[0], kv.keys[0][:, :, 6:])
    assert torch.equal(joined.values[1], kv.values[1])


def test_kv_refuses_shapes_that_do_not_fit() -> None:
    kv = random_kv(5)
    with pytest.raises(ValueError, match="don't fit 4 tokens"):
        KV(kv.keys, kv.values, 4)
    with pytest.raises(ValueError, match="don't fit"):
        KV(kv.keys, tuple(v[:, :, 1:] for v in kv.values), 5)


def test_flat_is_all_keys_then_all_values() -> None:
    kv = random_kv(3)
    flat = kv.flat(0)
    assert flat.shape == (1, 3, 2 * 4 + 2 * 3)
    for token in range(3):
        wanted = [
            *kv.keys[0][0, 0, token],
            *kv.keys[0][0, 1, token],
            *kv.values[0][0, 0, token],
            *kv.values[0][0, 1, token],
        ]
        assert flat[0, token].tolist() == [float(x) for x in wanted]
    assert torch.equal(split_heads(flatten_heads(kv.keys[0]), 2), kv.keys[0])


def test_bytes_and_copies() -> None:
    kv = random_kv(5)
    assert kv.num_bytes == 2 * 5 * 2 * (4 + 3) * 8
    half = kv.to(dtype=torch.bfloat16)
    assert half.num_bytes * 4 == kv.num_bytes
    assert half.keys[0].dtype == torch.bfloat16


def test_kinds_of_empty_caches() -> None:
    config = tiny.language_model("gemma3").model.config
    assert [layer.is_sliding for layer in native_cache(config).layers] == [True, False, True, False]
    assert not any(layer.is_sliding for layer in full_cache(config).layers)


def test_what_comes_after_a_written_cache_stays_readable() -> None:
    """A target that answers at length is a source again: nothing that it said itself slides away."""
    lm = tiny.language_model("gemma3")
    ids = tiny.ids_of(lm, 50)
    cache = write_cache(read(lm, ids[:20]), *parts(lm))
    for start, stop in ((20, 21), (21, 33), (33, 50)):
        logits = prefill(lm, ids[start:stop], cache=cache).logits[-1]
        torch.testing.assert_close(logits, tiny.cold_logits(lm, ids[:stop])[-1], atol=EXACT, rtol=0)
    assert cache.get_seq_length() == 50
    assert_same(read_cache(cache, lm.rotary, lm.geometry, start=20), read(lm, ids).narrow(20, 50), EXACT)


def test_gradients_pass_through_writing() -> None:
    lm = tiny.language_model("gemma3")
    ids = tiny.ids_of(lm, 20)
    kv = read(lm, ids[:18])
    leaves = [x.clone().requires_grad_() for x in both(kv)]
    cache = write_cache(KV(tuple(leaves[:4]), tuple(leaves[4:]), 18), *parts(lm))
    prefill(lm, ids[18:], cache=cache).logits.square().sum().backward()
    for x, held in zip(leaves, [7, 18, 7, 18] * 2, strict=True):
        assert x.grad is not None
        moved = x.grad.abs().sum((0, 1, 3)) > 0
        assert bool(moved[18 - held :].all())
        assert not bool(moved[: 18 - held].any())


# --- sharing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_a_model_can_go_on_from_a_fork_of(family: str) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, 20)
    written = write_cache(read(lm, ids), lm.rotary, lm.geometry, lm.model.config)
    own, slides = [torch.device("cpu")] * len(lm.geometry), family == "gemma3"

    def can(cache: Any, tokens: int = 20, dtype: torch.dtype = torch.float64, devices: Any = own) -> bool:
        return can_fork(cache, tokens, lm.geometry, dtype, devices)

    assert can(written)
    assert can(prefill(lm, ids, full_length=True).cache)
    assert can(prefill(lm, ids).cache) is not slides, "a window that keeps nothing of what leaves it"
    assert not can(written, tokens=12)
    assert not can(written, dtype=torch.float32)
    assert not can(written, devices=[torch.device("meta")] * len(lm.geometry))
    before = snapshot(written)
    grown = fork(written)
    logits = prefill(lm, tiny.ids_of(lm, 5), cache=grown).logits
    assert tiny.same(before, tensors_of(written))
    cold = prefill(lm, torch.cat((ids, tiny.ids_of(lm, 5)))).logits
    torch.testing.assert_close(logits, cold, atol=EXACT, rtol=0)
