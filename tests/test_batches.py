"""Rows padded on the left: reading, statistics, translating and decoding equal the rows alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlingo.batches as batches_module
import kvlingo.collecting as collecting_module
from kvlingo.batches import join, prefill_batch, read_batch, row_kv, side_by_side
from kvlingo.cache import native_cache, take_row
from kvlingo.collecting import Collector
from kvlingo.corpus import examples
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.generation import generate, generate_batch, grown
from kvlingo.handoff import hand_off, hand_off_batch
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.shapes import FitOptions, base_config
from kvlingo.states import ModelState, read_native_batch
from kvlingo.translator import identity_translator
from tests import families, tiny
from tests.padded import padded_error, rows_of

EXACT = 1e-8  # float64
BROKEN = 1e-3
FAMILY = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral"])
W = tiny.WINDOW
THREE = ((W - 2, W - 1, W - 4), (W, W + 1, 3), (30, 5, 19))


def assert_same(a: KV, b: KV) -> None:
    assert a.tokens == b.tokens
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        torch.testing.assert_close(x, y, atol=EXACT, rtol=0)


# --- reading ---------------------------------------------------------------------------------------------------------


@FAMILY
def test_rows_are_read_as_alone_and_padding_never_enters(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.language_model(family)
    for lengths in THREE:
        rows = rows_of(lm, lengths)
        found = read_batch(lm, rows)
        monkeypatch.setattr(batches_module, "FILLER", 77)
        others = read_batch(lm, rows)
        monkeypatch.undo()
        for row, kv, other in zip(rows, found, others, strict=True):
            assert [kv.held(layer) for layer in range(len(kv))] == [len(row)] * len(kv)
            assert_same(kv, read(lm, row))
            assert tiny.same((*kv.keys, *kv.values), (*other.keys, *other.values))


def test_the_padding_is_there_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.language_model("llama")
    batch = prefill_batch(lm, rows_of(lm, (9, 4)), full_length=True).batch
    assert batch.padding == (0, 5)
    with_padding = row_kv(lm, replace(batch, padding=(0, 4)), 1)
    assert with_padding.tokens == 5
    with pytest.raises(AssertionError):
        assert_same(with_padding.narrow(1, 5), read(lm, rows_of(lm, (9, 4))[1]))  # its positions are off by one


@FAMILY
def test_a_row_is_taken_out_as_a_cache_of_its_own(family: str) -> None:
    lm = tiny.language_model(family)
    rows = rows_of(lm, (20, 12))
    done = prefill_batch(lm, [row[:-2] for row in rows], full_length=True)
    for index, row in enumerate(rows):
        cold = tiny.cold_logits(lm, row)
        torch.testing.assert_close(done.logits[index, -1], cold[-3], atol=EXACT, rtol=0)
        alone = take_row(done.batch.cache, index, done.batch.padding[index], lm.geometry, lm.model.config)
        assert alone.get_seq_length() == len(row) - 2
        torch.testing.assert_close(prefill(lm, row[-2:], cache=alone).logits[-1], cold[-1], atol=EXACT, rtol=0)


def test_a_row_of_a_slid_cache_is_not_taken_out() -> None:
    lm = tiny.language_model("gemma3")
    cache = native_cache(lm.model.config)
    prefill(lm, tiny.ids_of(lm, 20), cache=cache)
    with pytest.raises(UnsupportedCache, match="layer 0 of the cache holds 7 of 20 tokens"):
        take_row(cache, 0, 0, lm.geometry, lm.model.config)


# --- identity: a padded batch of three -------------------------------------------------------------------------------


@FAMILY
@pytest.mark.parametrize("new", [1, 5])
def test_identity_of_a_padded_batch(family: str, new: int) -> None:
    lm = tiny.language_model(family)
    for prefixes in THREE:
        assert padded_error(lm, prefixes, new) < EXACT, prefixes
        assert padded_error(lm, prefixes, new, step=1) < EXACT, prefixes


def swapped(kv: KV) -> KV:
    return KV((kv.keys[1], kv.keys[0], *kv.keys[2:]), (kv.values[1], kv.values[0], *kv.values[2:]), kv.tokens)


def late(kv: KV) -> KV:
    """One token more than there is: everything after it stands one position too late."""
    return KV(
        tuple(torch.cat((k[:, :, :1], k), 2) for k in kv.keys),
        tuple(torch.cat((v[:, :, :1], v), 2) for v in kv.values),
        kv.tokens + 1,
    )


@FAMILY
@pytest.mark.parametrize("broken", [swapped, late])
def test_identity_of_a_padded_batch_fails_when_it_should(family: str, broken: Callable[[KV], KV]) -> None:
    lm = tiny.language_model(family)
    for prefixes in THREE:
        assert padded_error(lm, prefixes, 5, broken) > BROKEN, prefixes


def test_a_batch_goes_on_by_equally_many_tokens() -> None:
    lm = tiny.language_model("llama")
    rows = rows_of(lm, (9, 4))
    batch = join(lm, read_batch(lm, rows))
    for wrong in (rows, rows[:1]):
        with pytest.raises(BadInput, match="batch of 2 rows goes on by equally many tokens"):
            prefill_batch(lm, wrong, batch=batch)
    with pytest.raises(BadInput, match="nothing to read in some row"):
        prefill_batch(lm, [rows[0], rows[1][:0]])


# --- hand-overs and decoding -----------------------------------------------------------------------------------------

TEXTS = [tiny.text_of_tokens(30), tiny.text_of_tokens(W, seed=1), tiny.text_of_tokens(19, seed=2)]


@FAMILY
def test_a_batch_of_hand_offs_and_greedy_tokens_equal_the_rows_alone(family: str) -> None:
    lm = tiny.language_model(family)
    translator = identity_translator(lm.geometry, torch.float64)
    done = hand_off_batch(TEXTS, lm, lm, translator)
    lengths = [len(d.state.reading) for d in done]
    said = generate_batch(
        lm, [d.state for d in done], [logits_of(d) for d in done], max_new_tokens=10, stop_at_eos=False
    )
    for text, row, words, length in zip(TEXTS, done, said, lengths, strict=True):
        assert row.plan.fallback is None
        alone = hand_off(text, lm, lm, translator)
        assert row.plan == alone.plan
        torch.testing.assert_close(logits_of(row), logits_of(alone), atol=EXACT, rtol=0)
        assert list(words.ids) == tiny.cold_greedy(lm, tiny.ids_of(lm, length, seed=TEXTS.index(text)), 10)
        assert row.state.cache.get_seq_length() == length  # the states' own caches stay as they are
        # What each row holds afterwards is what it would hold alone, and it goes on from there.
        assert words.state.reading.ids == (*row.state.reading.ids, *words.ids[:-1])
        last = prefill(lm, lm.ids(words.ids[-1:]), cache=words.state.cache).logits[-1]
        cold = tiny.cold_logits(lm, lm.ids([*row.state.reading.ids, *words.ids]))[-1]
        torch.testing.assert_close(last, cold, atol=EXACT, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_batch_there_and_back(family: str) -> None:
    """Each row goes back to where its beginning lies: only what was said in between is translated."""
    lm = tiny.language_model(family)
    translator = identity_translator(lm.geometry, torch.float64)
    first = read_native_batch(TEXTS, lm)
    there = hand_off_batch(TEXTS, lm, lm, translator, source_states=first)
    said = [says(lm, done.state, REPLY) for done in there]
    back = hand_off_batch([text + REPLY for text in TEXTS], lm, lm, translator, source_states=said, target_states=first)
    for row, before in zip(back, first, strict=True):
        assert row.plan.fallback is None
        held = len(before.reading)
        assert row.plan.translated == (held, held + len(REPLY) - 1)
        cold = tiny.cold_logits(lm, lm.ids(row.state.reading.ids))[-1]
        torch.testing.assert_close(logits_of(row), cold, atol=EXACT, rtol=0)


REPLY = " answer to that"


def says(lm: LanguageModel, state: ModelState, text: str) -> ModelState:
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    prefill(lm, lm.ids(ids), cache=state.cache)
    return grown(lm, state, ids)


def logits_of(done: Any) -> Tensor:
    assert done.logits is not None
    return done.logits  # type: ignore[no-any-return]


def test_rows_end_by_themselves_and_sample_as_alone() -> None:
    lm = tiny.language_model("gemma3")
    translator = identity_translator(lm.geometry, torch.float64)
    done = hand_off_batch(TEXTS, lm, lm, translator)
    options = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 3}
    ends = first_end(lm, done, options)
    lm.model.generation_config.eos_token_id = ends
    try:
        said = generate_batch(lm, [d.state for d in done], [logits_of(d) for d in done], **options)  # type: ignore[arg-type]
        assert len({len(words.ids) for words in said}) > 1
        for text, words in zip(TEXTS, said, strict=True):
            alone = hand_off(text, lm, lm, translator)
            stream = generate(lm, alone.state, logits_of(alone), **options)  # type: ignore[arg-type]
            assert stream.text() == words.text
            assert stream.ids == list(words.ids)
            assert stream.state.reading.ids == words.state.reading.ids
            assert stream.state.spans == words.state.spans
            assert stream.state.cache.get_seq_length() == words.state.cache.get_seq_length()
    finally:
        lm.model.generation_config.eos_token_id = None


def first_end(lm: LanguageModel, done: list[Any], options: dict[str, Any]) -> int:
    """Return a token that the first row says before its end: as an end token it makes rows of different lengths."""
    free = generate_batch(lm, [d.state for d in done], [logits_of(d) for d in done], stop_at_eos=False, **options)
    return free[0].ids[4]


# --- statistics ------------------------------------------------------------------------------------------------------


def test_fit_statistics_of_padded_batches_equal_the_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector reads row by row; fed from padded batches, it sums the same."""
    source, target = tiny.language_model("qwen3"), tiny.language_model("gemma3")
    options = FitOptions(context_tokens=(12, 17, 30), tokens=200)
    collector = Collector(source, target, base_config(source, target, options), options)
    found = list(
        examples(
            tiny.documents(3, 60), source.tokenizer, target.tokenizer, context_tokens=options.context_tokens, seed=1
        )
    )[:6]
    assert len({len(e.target.ids) for e in found}) > 1
    alone, batched, spoiled = collector.empty(), collector.empty(), collector.empty()
    for example in found:
        alone.add(collector.blocks(example))
    kept = {
        (id(lm), side.ids): kv
        for lm, sides in ((source, [e.source for e in found]), (target, [e.target for e in found]))
        for side, kv in zip(sides, read_batch(lm, [lm.ids(s.ids) for s in sides]), strict=True)
    }
    monkeypatch.setattr(collecting_module, "read_padded", lambda lm, ids: kept[id(lm), tuple(ids.tolist())])
    for example in found:
        batched.add(collector.blocks(example))
    assert batched.tokens == alone.tokens
    assert_same_sums(batched, alone)
    monkeypatch.setattr(collecting_module, "read_padded", lambda lm, ids: late(kept[id(lm), tuple(ids.tolist())]))
    for example in found:
        spoiled.add(collector.blocks(example))
    with pytest.raises(AssertionError):
        assert_same_sums(spoiled, alone)


def assert_same_sums(a: Any, b: Any) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-7, rtol=1e-9)


def test_rows_whose_queries_depend_on_the_slot_are_read_alone() -> None:
    """Llama 4 scales queries by the slot in the cache, padding included."""
    tuned = families.FAMILIES["llama4"].config(attn_temperature_tuning=True, floor_scale=16, attn_scale=0.5)
    lm = tiny.language_model("llama")
    llama4 = replace(lm, model=SimpleNamespace(config=tuned))
    assert side_by_side(llama4, 15)
    assert not side_by_side(llama4, 16)
    assert side_by_side(lm, 10_000)
