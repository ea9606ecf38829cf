"""A target's cache in the making: written in pieces, read at both ends in one pass, and no copy of anything long beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvlingo.execution as execution_module
import kvlingo.recompute as recompute_module
from kvlingo import folding
from kvlingo.alignment import align
from kvlingo.assembling import assemble
from kvlingo.attention import SHARE_HEADS, heads_that_share
from kvlingo.cache import read_cache, tensors_of, view_cache
from kvlingo.cache_writing import write_cache
from kvlingo.errors import UnsupportedCache
from kvlingo.execution import cut_middle
from kvlingo.features import TranslatorConfig
from kvlingo.handoff import HandOff, hand_off
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, cache_devices, prefill, read
from kvlingo.open_cache import OpenCache
from kvlingo.plan import Provenance, plan_handoff
from kvlingo.recompute import opened_around, read_both_ends, reads_both_ends
from kvlingo.states import ModelState, read_conversation, read_native
from kvlingo.translator import LayerMap, Translator, identity_translator
from tests import families, tiny

EXACT = 1e-8
TOKENS = 40


def whole(kv: KV) -> list[Tensor]:
    return [*kv.keys, *kv.values]


def assert_same(one: KV, other: KV, within: float = EXACT) -> None:
    for x, y in zip(whole(one), whole(other), strict=True):
        torch.testing.assert_close(x, y, atol=within, rtol=0)


def opened(lm: LanguageModel, middle: tuple[int, int], tokens: int, before: Any = None) -> OpenCache:
    start, stop = middle
    lost = [min(max(0, shape.first_held(stop) - start), stop - start) for shape in lm.geometry.layers]
    config, devices = lm.model.config, cache_devices(lm)
    return OpenCache(
        lm.rotary,
        lm.geometry,
        config,
        middle=middle,
        tokens=tokens,
        lost=lost,
        dtype=lm.dtype,
        devices=devices,
        before=before,
    )


def write(cache: OpenCache, lm: LanguageModel, kv: KV, start: int, stop: int) -> None:
    """Write the tokens [start, stop) of a KV that holds everything, without those that there is no room for."""
    for index, shape in enumerate(lm.geometry.layers):
        first = min(max(start, min(cache.start + max(0, shape.first_held(cache.stop) - cache.start), stop)), stop)
        cache.write([(index, first, kv.keys[index][:, :, first:stop], kv.values[index][:, :, first:stop])])


# --- written in pieces -------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "deepseek-v3"])
@pytest.mark.parametrize("cuts", [(), (1, 2, 30), (7,), (12, 13)], ids=str)
def test_a_cache_written_in_pieces_is_one_that_was_written_at_once(family: str, cuts: tuple[int, ...]) -> None:
    lm = families.language_model(family)
    kv = read(lm, tiny.ids_of(lm, TOKENS))
    cache = opened(lm, (0, TOKENS), TOKENS)
    for start, stop in pairwise((0, *cuts, TOKENS)):
        write(cache, lm, kv, start, stop)
    assert cache.left == []
    at_once = write_cache(kv, lm.rotary, lm.geometry, lm.model.config)
    after = tiny.ids_of(lm, 9)
    for part in (after[:1], after[1:]):
        logits = [prefill(lm, part, cache=c, logits_to_keep=0).logits for c in (at_once, cache.cache)]
        torch.testing.assert_close(logits[0], logits[1], atol=EXACT, rtol=0)
    for a, b in zip(tensors_of(at_once), tensors_of(cache.cache), strict=True):
        torch.testing.assert_close(a, b, atol=EXACT, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("start", [1, 5, 33])
def test_after_an_earlier_cache_the_tail_goes_to_its_place(family: str, start: int) -> None:
    lm, stop = tiny.language_model(family), TOKENS - 3
    ids = tiny.ids_of(lm, TOKENS)
    kv = read(lm, ids)
    before = write_cache(kv.narrow(0, start), lm.rotary, lm.geometry, lm.model.config)
    kept = [x.clone() for x in tensors_of(before)]
    cache = opened(lm, (start, stop), TOKENS, before)
    write(cache, lm, kv, start, stop)
    assert cache.left == [37, 38, 39]
    assert cache.cache.get_seq_length() == stop
    with cache.being_read() as left:
        logits = prefill(lm, ids[stop:], cache=left).logits[-1]
    torch.testing.assert_close(logits, tiny.cold_logits(lm, ids)[-1], atol=EXACT, rtol=0)
    assert cache.cache.get_seq_length() == TOKENS
    again = read_cache(cache.cache, lm.rotary, lm.geometry, partial=True)
    assert_same(again, KV(*(tuple(x[:, :, -h.shape[2] :] for x, h in zip(a, b, strict=True))  # type: ignore[arg-type]
                            for a, b in ((kv.keys, again.keys), (kv.values, again.values))), TOKENS))  # fmt: skip
    longest = max(x.shape[2] for x in again.keys)
    assert longest == TOKENS or family == "mistral"
    assert tiny.same(kept, list(tensors_of(before))), "the earlier cache stays as it is"
    # And it is an ordinary cache from here on.
    more = tiny.ids_of(lm, 12)
    cold = tiny.cold_logits(lm, torch.cat((ids, more)))[-1]
    prefill(lm, more[:1], cache=cache.cache)
    torch.testing.assert_close(prefill(lm, more[1:], cache=cache.cache).logits[-1], cold, atol=EXACT, rtol=0)


def test_a_layer_that_fell_behind_is_not_gone_on_from() -> None:
    lm = tiny.language_model("llama")
    kv = read(lm, tiny.ids_of(lm, 20))
    before = write_cache(kv.narrow(0, 12), lm.rotary, lm.geometry, lm.model.config)
    before.layers[1].keys, before.layers[1].values = before.layers[1].keys[:, :, :5], before.layers[1].values[:, :, :5]
    with pytest.raises(UnsupportedCache, match="layer 1 of the cache has read 5 tokens, layer 0 12"):
        opened(lm, (12, 20), 20, before)


@torch.no_grad()
def test_what_is_left_is_read_at_once_or_not_at_all() -> None:
    lm = tiny.language_model("llama")
    ids = tiny.ids_of(lm, 20)
    cache = opened_around(lm, read(lm, ids).narrow(2, 17), 2, 20)
    assert cache.left == [0, 1, 17, 18, 19]
    with pytest.raises(UnsupportedCache, match="5 tokens are left to read, got 2"), cache.being_read() as left:
        prefill(lm, ids[17:19], cache=left)


# --- seen without a copy -----------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "glm4", "smollm3"])
def test_a_view_holds_what_a_copy_holds(family: str) -> None:
    lm = families.language_model(family)
    cache = prefill(lm, tiny.ids_of(lm, TOKENS), full_length=True).cache
    wanted = [(7 * index) % (TOKENS + 1) for index in range(len(lm.geometry))]
    for first_wanted in (None, wanted):
        copied = read_cache(cache, lm.rotary, lm.geometry, start=3, first_wanted=first_wanted)
        seen = view_cache(cache, lm.rotary, lm.geometry, start=3, first_wanted=first_wanted)
        assert (seen.tokens, len(seen)) == (37, len(copied))
        assert [seen.held(i) for i in range(len(seen))] == [copied.held(i) for i in range(len(copied))]
        assert_same(seen, copied, 0)
        held = KV(tuple(k[:, :, -17:] for k in copied.keys), tuple(v[:, :, -17:] for v in copied.values), 37)
        part = seen.narrow(20, 30)
        assert part.tokens == 10
        for layer in range(len(part)):
            n = part.held(layer)
            mine = held.keys[layer][:, :, : max(0, held.keys[layer].shape[2] - 7)]
            torch.testing.assert_close(part.keys[layer], mine[:, :, mine.shape[2] - n :], atol=0, rtol=0)
        assert seen.to(torch.device("cpu")) is seen
        assert seen.to(dtype=torch.float32).keys[0].dtype == torch.float32


@torch.no_grad()
def test_a_view_of_a_slid_cache_is_refused_at_once() -> None:
    lm = tiny.language_model("gemma3")
    cache = prefill(lm, tiny.ids_of(lm, TOKENS)).cache
    with pytest.raises(UnsupportedCache, match="slid out of its window"):
        view_cache(cache, lm.rotary, lm.geometry)


# --- both ends in one pass ---------------------------------------------------------------------------------------------

# One adds biases of its own to what it takes for a mask of two dims, the other looks back in blocks.
IN_TWO_PASSES = {"bloom", "llama4"}


@torch.no_grad()
@pytest.mark.parametrize("family", [f for f, it in families.FAMILIES.items() if it.expected == "exact"])
def test_both_ends_in_one_pass_are_what_two_passes_read(family: str) -> None:
    lm = families.language_model(family)
    ids, start, stop = tiny.ids_of(lm, TOKENS), 3, TOKENS - 4
    assert reads_both_ends(lm) is (family not in IN_TWO_PASSES)
    if family in IN_TWO_PASSES:
        return
    native = read(lm, ids)
    for seed in (0, 1):
        middle = spoilt(native, seed).narrow(start, stop)
        cache = opened_around(lm, middle, start, TOKENS)
        logits = read_both_ends(lm, cache, ids, 2)
        prefix = KV(native.keys, native.values, TOKENS).narrow(0, start)
        joined = KV(
            tuple(torch.cat(pair, dim=2) for pair in zip(prefix.keys, middle.keys, strict=True)),
            tuple(torch.cat(pair, dim=2) for pair in zip(prefix.values, middle.values, strict=True)),
            stop,
        )
        two = prefill(
            lm, ids[stop:], cache=write_cache(joined, lm.rotary, lm.geometry, lm.model.config), logits_to_keep=2
        )
        within = families.allowed(family)
        torch.testing.assert_close(logits, two.logits, atol=within, rtol=0)
        mine, theirs = (read_cache(c, lm.rotary, lm.geometry, partial=True) for c in (cache.cache, two.cache))
        for a, b in zip(whole(mine), whole(theirs), strict=True):
            held = min(a.shape[2], b.shape[2])
            torch.testing.assert_close(a[:, :, -held:], b[:, :, -held:], atol=within, rtol=0)
        for a, b in zip(whole(mine), whole(native), strict=True):  # first tokens are exact whatever the middle is
            if a.shape[2] == TOKENS:
                torch.testing.assert_close(a[:, :, :start], b[:, :, :start], atol=within, rtol=0)
    assert float((logits - tiny.cold_logits(lm, ids)[-2:]).abs().max()) > 1e-3, "the tail reads the middle"


def spoilt(kv: KV, seed: int) -> KV:
    """Return what a bad map would have made."""
    generator = torch.Generator().manual_seed(seed)

    def spoil(x: Tensor) -> Tensor:
        return x + 0.5 * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)

    return KV(tuple(map(spoil, kv.keys)), tuple(map(spoil, kv.values)), kv.tokens)


def without_masks(*_: Any) -> None:
    return None


def of_no_kind(*_: Any) -> dict[str, Tensor]:
    return {"no such kind of layer": torch.zeros(1)}


@pytest.mark.parametrize("masks", [without_masks, of_no_kind])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_that_does_not_take_the_masks_reads_in_two_passes(
    family: str, masks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = replace(tiny.language_model(family))  # another object: nothing is known of it yet
    monkeypatch.setattr(recompute_module, "end_masks", masks)
    assert not reads_both_ends(lm)
    done, passes = handed(lm, sink=3)
    assert passes == 2
    assert_cold(lm, done)


def test_a_kind_of_layer_whose_mask_is_not_known_reads_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = replace(tiny.language_model("gemma3"))
    monkeypatch.setattr(recompute_module, "KINDS", ("", "full_attention"))
    assert not reads_both_ends(lm)


def handed(lm: LanguageModel, **dial: Any) -> tuple[HandOff, int]:
    """Hand a text over to the same model; count the target's passes."""
    text, passes = tiny.text_of_tokens(TOKENS), list[int]()
    state = read_native(text, lm)
    reads_both_ends(lm)  # it is tried once, with passes of its own
    hook = lm.model.model.register_forward_hook(lambda *_: passes.append(1))
    done = hand_off(text, lm, lm, identity_translator(lm.geometry, torch.float64), source_state=state, **dial)
    hook.remove()
    return done, len(passes)


def assert_cold(lm: LanguageModel, done: HandOff) -> None:
    assert done.plan.fallback is None
    assert done.logits is not None
    ids = lm.ids(done.state.reading.ids)
    torch.testing.assert_close(done.logits, tiny.cold_logits(lm, ids)[-1], atol=EXACT, rtol=0)
    assert done.state.cache.get_seq_length() == len(ids)


@pytest.mark.parametrize("tail", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "qwen3"])
def test_a_plain_text_is_handed_over_in_one_pass(family: str, tail: int) -> None:
    lm = tiny.language_model(family)
    done, passes = handed(lm, sink=3, tail=tail)
    assert passes == 1
    assert [s.provenance for s in done.plan.spans] == [Provenance.EXACT, Provenance.TRANSLATED, Provenance.OWN]
    assert_cold(lm, done)
    watched, _ = handed(lm, sink=3, tail=4, watched=True)
    assert watched.signs is not None


def test_first_tokens_that_are_remembered_are_not_read_again() -> None:
    lm = replace(tiny.language_model("gemma3"), sinks={})
    assert handed(lm)[1] == 2, "BOS alone: read and remembered"
    done, passes = handed(lm)
    assert passes == 1
    assert_cold(lm, done)


def test_long_texts_and_first_tokens_alone_take_a_pass_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.language_model("llama")
    done, passes = handed(lm, sink=3, no_text=True)
    assert passes == 1
    assert done.logits is None
    assert done.state.cache.get_seq_length() == TOKENS
    monkeypatch.setattr(execution_module, "MOST_COPIED_BYTES", 1000)
    assert handed(lm, sink=3)[1] == 1, "nothing is copied on a CPU"
    monkeypatch.setattr(execution_module, "shares_heads", lambda *_: False)
    done, passes = handed(lm, sink=3)
    assert passes == 2
    assert_cold(lm, done)


# --- a middle in pieces ------------------------------------------------------------------------------------------------


def random_maps(source: LanguageModel, target: LanguageModel, **changes: Any) -> Translator:
    """Return maps of everything that is read, that keep the size of what they map."""
    layers = tuple((min(i, len(source.geometry) - 1), 0) for i in range(len(target.geometry)))
    config = TranslatorConfig(
        source.geometry, target.geometry, layers, **{"source_lags": (0, 1), "embedding_lags": (0, 1, 2), **changes}
    )
    torch.manual_seed(0)
    translator = Translator(config)
    with torch.no_grad():
        for name, layer_map in translator.maps.items():
            assert isinstance(layer_map, LayerMap)
            for parameter in layer_map.parameters():
                parameter.normal_(std=config.feature_width(int(name)) ** -0.5)
    return translator.to(target.dtype).eval()


@pytest.mark.parametrize("piece", [3, 16])
@pytest.mark.parametrize(
    "changes", [{}, {"embedding_lags": ()}, {"map_kind": "headwise", "embedding_lags": ()}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_pieces_give_what_the_plain_way_gives(
    family: str, changes: dict[str, Any], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokenizers, two families, text and both lags: the cache is the one that `assemble` makes of all at once."""
    source = tiny.language_model("qwen3", tokenizer=tiny.merging_tokenizer(), seed=3, name="source")
    target = tiny.language_model(family)
    translator, text = random_maps(source, target, **changes), tiny.text(30)
    state = read_native(text, source)
    monkeypatch.setattr(execution_module, "PIECE_TOKENS", piece)
    for native_layers in (0, 2):
        done = hand_off(text, source, target, translator, source_state=state, tail=3, native_layers=native_layers)
        assert done.plan.fallback is None
        ids, kv = target.ids(done.state.reading.ids), read_cache(state.cache, source.rotary, source.geometry)
        wanted = assemble(done.plan, target, translator, kv, align(state.reading, done.state.reading), ids)
        found = read_cache(done.state.cache, target.rotary, target.geometry, partial=True)
        for a, b in zip(whole(found), whole(wanted), strict=True):
            got = a[:, :, : a.shape[2] - 3]
            held = min(got.shape[2], b.shape[2])
            assert held
            torch.testing.assert_close(got[:, :, -held:], b[:, :, -held:], atol=EXACT, rtol=0)


def test_the_middle_is_cut_from_its_end_and_where_the_source_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_module, "PIECE_TOKENS", 8)
    assert cut_middle(torch.arange(40), 3, 30) == [(3, 6), (6, 14), (14, 22), (22, 30)]
    assert cut_middle(torch.arange(40), 30, 30) == []
    jump = torch.cat((torch.arange(10), torch.arange(1000, 1010)))
    pieces = cut_middle(jump, 0, 20)
    assert [start for start, _ in pieces] == [0, *[stop for _, stop in pieces[:-1]]]
    assert pieces[-1][1] == 20
    assert all(int(jump[a:b].max() - jump[a:b].min()) < 16 for a, b in pieces)


# --- memory ------------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts the bytes of what operations make, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and see what it made."""
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


@contextmanager
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution_module, "PIECE_TOKENS", 16)
        patch.setattr(folding, "CHUNK_BYTES", 1)
        patch.setattr(folding, "LEAST_ROWS", 16)
        patch.setattr(folding, "GOOD_ROWS", 16)
        yield


def memory_beside_the_cache(run: Callable[[], Any]) -> tuple[int, int]:
    """Return how many bytes a call takes at most beside the cache that it returns, and the cache's own."""
    run()  # what is made once and kept
    with torch.no_grad(), Counting() as counting:
        cache = run()
    own = sum(x.untyped_storage().nbytes() for x in tensors_of(cache) if x.numel() > 1)
    return counting.peak - own, own


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_memory_beside_the_target_s_cache_does_not_grow_with_the_text(family: str, dtype: torch.dtype) -> None:
    source = tiny.language_model("qwen3", seed=3, dtype=dtype, name="source")
    target = tiny.language_model(family, dtype=dtype)
    translator = random_maps(source, target)
    taken, plainly = list[int](), list[int]()
    for tokens in (200, 800):
        text = tiny.text_of_tokens(tokens)
        state = read_native(text, source)
        kv = read_cache(state.cache, source.rotary, source.geometry)
        reading = read_conversation(text, target, add_generation_prompt=True)
        alignment, ids = align(state.reading, reading), target.ids(reading.ids)
        plan = plan_handoff(alignment.tolist(), sink=3)

        def run(text: str = text, state: ModelState = state) -> Any:
            return hand_off(text, source, target, translator, sink=3, source_state=state).state.cache

        def plain(plan: Any = plan, kv: KV = kv, alignment: Tensor = alignment, ids: Tensor = ids) -> Any:
            made = assemble(plan, target, translator, kv, alignment, ids)
            return write_cache(made, target.rotary, target.geometry, target.model.config)

        with small_pieces():
            taken.append(memory_beside_the_cache(run)[0])
        plainly.append(memory_beside_the_cache(plain)[0])
    # What grows are token ids and their places, a few numbers a token; not keys and values, some hundreds.
    per_token = (taken[1] - taken[0]) / 600
    width = source.geometry.features_per_token * dtype.itemsize
    assert per_token < 0.25 * width
    assert (plainly[1] - plainly[0]) / 600 > width


def test_the_counting_sees_what_is_held() -> None:
    with Counting() as counting:
        x = torch.zeros(1000)
        for _ in range(5):
            x = x + 1
    assert counting.peak == 8000


# --- heads that share ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, "0"])
def test_what_lets_heads_share_is_put_back_by_the_last_pass(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(SHARE_HEADS, raising=False)
    if before is not None:
        monkeypatch.setenv(SHARE_HEADS, before)
    cpu, first, second = torch.device("cpu"), ExitStack(), ExitStack()
    for stack in (first, second):  # two engines' passes, in threads of their own
        stack.enter_context(heads_that_share(cpu))
        assert os.environ[SHARE_HEADS] == "1"
    first.close()
    assert os.environ[SHARE_HEADS] == "1"
    second.close()
    assert os.environ.get(SHARE_HEADS) == before
    with pytest.raises(ValueError, match="went wrong"), heads_that_share(cpu):
        raise ValueError("went wrong")
    assert os.environ.get(SHARE_HEADS) == before
    with heads_that_share(torch.device("meta")):
        assert os.environ.get(SHARE_HEADS) == before
