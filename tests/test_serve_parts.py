"""A long prompt is taken in parts: others' answers go on between two of them, and what comes out is what it was at once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

import kvlingo.language_model as language_model
import kvlingo.serve.switching as switching
from kvlingo.confidence import Confidence
from kvlingo.handoff import hand_off, hand_off_in_parts
from kvlingo.language_model import LanguageModel, prefill, prefill_in_parts
from kvlingo.serve.decoding import Job, Lane, Started
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.protocol import Begun, Dial, Request, Sampling
from kvlingo.serve.switching import Link
from kvlingo.states import read_native
from kvlingo.steps import Steps, finished, parts
from kvlingo.translator import LayerMap, Translator, TranslatorConfig, identity_translator
from tests import tiny
from tests.families import language_model as family_model
from tests.serving import (
    ALWAYS,
    Answer,
    answer,
    ask,
    assistant,
    closing,
    cold_ids,
    request_for,
    settled,
    twin_engine,
    user,
    within,
)
from tests.test_serve_engine import play

LM = tiny.language_model("llama")
PART = 16
LONG = tiny.text(60, seed=7)
OTHER = tiny.text(60, seed=8)
Log = list[tuple[str, int]]


def random_translator(source: LanguageModel, target: LanguageModel, **changes: Any) -> Translator:
    """Return maps that read several layers, tokens before and text, and are near nothing in particular."""
    layers = tuple((i % len(source.geometry), 0) for i in range(len(target.geometry)))
    of = TranslatorConfig(source.geometry, target.geometry, **{"source_layers": layers, **changes})
    translator = Translator(of)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.normal_(std=0.2)
        for each in translator.maps.values():
            assert isinstance(each, LayerMap)
            each.feature_mean.normal_()
    return translator.to(torch.float64).eval()


# --- what comes out --------------------------------------------------------------------------------------------------


def test_ranges_cover_all_and_are_bounded() -> None:
    assert parts(3, 10, 3) == [(3, 6), (6, 9), (9, 10)]
    assert parts(3, 10, None) == [(3, 10)]
    assert parts(3, 3, None) == parts(3, 3, 2) == []


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("most", [1, 5, 64])
def test_reading_in_parts_is_reading_at_once(family: str, rows: int, most: int) -> None:
    lm = tiny.language_model(family)
    ids = lm.ids(read_native(LONG[:40], lm).reading.ids)
    with torch.no_grad():
        whole = prefill(lm, ids, full_length=True, logits_to_keep=rows)
        done = finished(prefill_in_parts(lm, ids, most=most, full_length=True, logits_to_keep=rows))
    torch.testing.assert_close(done.logits, whole.logits, atol=1e-9, rtol=0)
    assert done.cache.get_seq_length() == len(ids)


DIALS: dict[str, dict[str, Any]] = {
    "plain": {},
    "long ends": {"sink": 9, "tail": 11},
    "a tail longer than a window": {"tail": 30},
    "watched": {"tail": 12, "watched": True},
}
MAPS: dict[str, dict[str, Any]] = {
    "tokens before, text": {"source_lags": (0, 2), "embedding_lags": (0, 1, 2)},
    "no text": {"embedding_lags": ()},
}


@pytest.mark.parametrize("dial", DIALS)
@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize(("source", "target"), [("llama", "gemma3"), ("gemma3", "llama"), ("gemma3", "gemma3")])
def test_a_hand_over_in_parts_is_the_one_at_once(source: str, target: str, maps: str, dial: str) -> None:
    """Also where the target holds something, where two tokenizers differ, and where windows leave first tokens out."""
    tokenizer = tiny.merging_tokenizer() if source != target else None
    one, other = tiny.language_model(source, tokenizer=tokenizer), tiny.language_model(target)
    translator = random_translator(one, other, **MAPS[maps])
    for earlier in (None, read_native(LONG[:50], other)):
        given: dict[str, Any] = {"source_state": read_native(LONG[:130], one), "target_state": earlier, **DIALS[dial]}
        whole = hand_off(LONG[:150], one, other, translator, **given)
        with torch.no_grad():
            steps = hand_off_in_parts(LONG[:150], one, other, translator, most=PART, **given)
            taken = 0
            while True:
                try:
                    next(steps)
                    taken += 1
                except StopIteration as end:
                    done = end.value
                    break
        assert taken >= (4 if earlier is None else 2)
        assert done.plan == whole.plan
        assert whole.plan.fallback is None
        torch.testing.assert_close(done.logits, whole.logits, atol=1e-8, rtol=0)
        assert done.signs == (None if whole.signs is None else pytest.approx(whole.signs, abs=1e-6))


def test_a_state_in_the_middle_of_a_hand_over_changes_nothing_that_was_given() -> None:
    state, earlier = read_native(LONG, LM), read_native(LONG[:40], LM)
    translator = identity_translator(LM.geometry, torch.float64)
    steps = hand_off_in_parts(LONG, LM, LM, translator, most=PART, source_state=state, target_state=earlier)
    with torch.no_grad():
        next(steps)
        next(steps)
    steps.close()
    assert state.cache.get_seq_length() == len(state.reading)
    assert earlier.cache.get_seq_length() == len(earlier.reading)


@pytest.mark.parametrize(("family", "edits"), [("llama", 60), ("gemma3", 24)])
def test_random_edits_in_parts_answer_as_a_cold_model(family: str, edits: int) -> None:
    with twin_engine(family, part_tokens=5) as (engine, lm):
        wrong, tokens = play(engine, edits, seed=3, lm=lm)
        assert wrong == 0
        assert min(tokens["native"], tokens["translated"], tokens["recomputed"]) > 5 * edits


def test_random_edits_see_a_part_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = language_model.parts

    def lossy(start: int, stop: int, most: int | None) -> list[tuple[int, int]]:
        found = real(start, stop, most)
        return [*found[:1], *found[2:]] if len(found) > 2 else found

    monkeypatch.setattr(language_model, "parts", lossy)
    with twin_engine(part_tokens=5) as (engine, _):
        assert play(engine, 6, seed=3)[0] > 0


# --- who waits for whom ----------------------------------------------------------------------------------------------


@contextmanager
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Note in order: tokens read of a prompt, tokens translated, and rows of each decode step."""
    log: Log = []
    read, translate, step = language_model.prefill, Translator.stream, Lane._read

    def reads(lm: LanguageModel, ids: torch.Tensor, **options: Any) -> Any:
        log.append(("read", len(ids)))
        return read(lm, ids, **options)

    def translates(self: Translator, source: Any, alignment: torch.Tensor, *args: Any, **options: Any) -> Any:
        log.append(("translate", len(alignment)))
        return translate(self, source, alignment, *args, **options)

    def steps(self: Lane, tokens: list[int]) -> Any:
        log.append(("step", len(tokens)))
        return step(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(language_model, "prefill", reads)
        patch.setattr(Translator, "stream", translates)
        patch.setattr(Lane, "_read", steps)
        yield log


async def beside(engine: LocalEngine, request: Request, *others: Request) -> list[Answer]:
    """Ask the others once the first one decodes; return what they were answered, and let the first go."""
    events = engine.run(request)
    for _ in range(4):
        await anext(events)
    found = await asyncio.gather(*(answer(engine, other) for other in others))
    await events.aclose()
    return found


@pytest.mark.parametrize("mode", ["reprefill", "translate"])
def test_rows_get_a_token_between_two_parts_of_a_long_prompt(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with twin_engine(part_tokens=PART) as (engine, lm):
        ask(engine, request_for(lm, "b", LONG))
        decoding = request_for(lm, "a", "hi", count=900)
        with logged(monkeypatch) as log:
            (found,) = within(beside(engine, decoding, request_for(lm, "a", LONG, dial=Dial(mode))))
        assert found.ids == cold_ids(lm, LONG)
        assert (found.begun.translated_tokens > 200) == (mode == "translate")
    kind = "translate" if mode == "translate" else "read"
    places = [i for i, (what, tokens) in enumerate(log) if what == kind and tokens > 4]
    assert sum(log[i][1] for i in places) > 0.9 * found.begun.prompt_tokens - PART
    assert len(places) >= found.begun.prompt_tokens // PART
    assert max(tokens for what, tokens in log if what != "step") <= PART
    for one, next_one in pairwise(places):
        assert ("step", 1) in log[one:next_one]


def test_a_whole_prompt_at_once_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with twin_engine(part_tokens=1 << 20) as (engine, lm), logged(monkeypatch) as log:
        within(beside(engine, request_for(lm, "a", "hi", count=900), request_for(lm, "a", LONG)))
    assert max(tokens for what, tokens in log if what == "read") > 200


def test_what_the_source_has_not_read_is_read_in_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone pastes a long text in the very turn in which they switch."""
    with twin_engine(part_tokens=PART) as (engine, lm):
        (said,) = ask(engine, request_for(lm, "a", LONG))
        text = LONG + said.text + OTHER
        with logged(monkeypatch) as log:
            (found,) = ask(engine, request_for(lm, "b", text, dial=Dial("translate")))
        assert found.begun.translated_tokens > 200
        assert found.ids == cold_ids(lm, text)
    assert max(tokens for what, tokens in log) <= PART
    assert sum(tokens for what, tokens in log if what == "read") > 200


def test_a_short_prompt_does_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def told(engine: LocalEngine, request: Request) -> None:
        async for event in engine.run(request):
            if isinstance(event, Begun):
                order.append(f"{event.prompt_tokens > PART}")

    async def both(engine: LocalEngine, lm: LanguageModel) -> None:
        long = asyncio.create_task(told(engine, request_for(lm, "a", LONG)))
        while not engine.stats()["running"]:
            await asyncio.sleep(0)
        await told(engine, request_for(lm, "a", "hi"))
        await long

    slow = threading.Event()
    real = language_model.prefill

    def waits(lm: LanguageModel, ids: torch.Tensor, **options: Any) -> Any:
        slow.wait(0.02)
        return real(lm, ids, **options)

    monkeypatch.setattr(language_model, "prefill", waits)
    with twin_engine(part_tokens=PART) as (engine, lm):
        within(both(engine, lm))
    assert order == ["False", "True"]


def slices(log: list[str], name: str, count: int) -> Callable[[], Steps[Started]]:
    """Return a beginning that takes so many steps, notes each, and then fails: no row joins."""

    def begin() -> Steps[Started]:
        for _ in range(count):
            log.append(name)
            yield
        raise ValueError("enough")

    return begin


def test_several_long_prompts_take_turns_by_tenant() -> None:
    log: list[str] = []
    gate, told = threading.Event(), threading.Semaphore(0)

    def first() -> Steps[Started]:
        gate.wait(30)
        raise ValueError("enough")
        yield

    lane = Lane(LM, max_rows=8, max_queue=8)
    try:
        jobs = [("z", first)] + [(name[0], slices(log, name, 6)) for name in ("a1", "a2", "a3", "b1")]
        for tenant, begin in jobs:
            lane.submit(Job(tenant, Sampling(1), begin, lambda _: told.release(), lambda _: None))
        gate.set()
        for _ in jobs:
            assert told.acquire(timeout=30)
    finally:
        lane.stop(30)
    # As long as b has something to read it gets every other step; a's three share the rest.
    assert [name for name in log[:12] if name == "b1"] == ["b1"] * 6
    assert log[:12].count("a1") == log[:12].count("a2") == log[:12].count("a3") == 2
    assert sorted(log) == sorted(["a1", "a2", "a3", "b1"] * 6)


# --- what is begun and left, or asked for twice ----------------------------------------------------------------------


def test_a_long_prompt_that_is_left_stops_within_a_part_and_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    read, may_read = list[int](), threading.Semaphore(0)
    real = language_model.prefill

    def one_by_one(lm: LanguageModel, ids: torch.Tensor, **options: Any) -> Any:
        may_read.acquire(timeout=30)
        read.append(len(ids))
        return real(lm, ids, **options)

    async def leave(engine: LocalEngine, lm: LanguageModel) -> Answer:
        asking = asyncio.create_task(answer(engine, request_for(lm, "a", LONG)))
        may_read.release(3)
        while len(read) < 3:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait([asking])
        may_read.release(1000)
        while engine.stats()["running"]:
            await asyncio.sleep(0.001)
        assert 3 <= len(read) <= 4
        return await answer(engine, request_for(lm, "a", LONG))

    monkeypatch.setattr(language_model, "prefill", one_by_one)
    with twin_engine(part_tokens=PART) as (engine, lm):
        found = within(leave(engine, lm))
        assert found.begun.native_tokens >= 3 * PART
        assert found.ids == cold_ids(lm, LONG)
        assert engine.stats()["cancelled"] == 1


def test_a_hand_over_that_is_left_leaves_nothing_behind() -> None:
    with twin_engine(part_tokens=4) as (engine, lm):
        ask(engine, request_for(lm, "b", LONG))
        kept = engine.stats()["cache_snapshots"]

        async def leave() -> None:
            asking = asyncio.create_task(answer(engine, request_for(lm, "a", LONG, dial=Dial("translate"))))
            while not engine.stats()["running"]:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            while engine.stats()["running"]:
                await asyncio.sleep(0.001)

        within(leave())
        assert engine.stats()["cache_snapshots"] == kept
        (found,) = ask(engine, request_for(lm, "a", LONG, dial=Dial("translate")))
        assert found.ids == cold_ids(lm, LONG)


@pytest.mark.parametrize("tenants", [("t", "t", "t"), ("t", "u", "v")])
def test_the_same_beginning_is_read_once_for_one_tenant_and_never_shared(
    tenants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{LONG} {tail}" for tail in ("one", "two", "three")]
    with twin_engine(part_tokens=PART) as (engine, lm):
        with logged(monkeypatch) as log:
            found = ask(engine, *(request_for(lm, "a", text, tenant=t) for text, t in zip(texts, tenants, strict=True)))
        assert [f.ids for f in found] == [cold_ids(lm, text) for text in texts]
    read, once = sum(tokens for what, tokens in log if what == "read"), found[0].begun.prompt_tokens
    assert read < 1.5 * once if len(set(tenants)) == 1 else read > 2.9 * once


def test_whoever_waits_for_another_reader_goes_on_when_that_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    real = language_model.prefill
    slow = threading.Event()

    def slowly(lm: LanguageModel, ids: torch.Tensor, **options: Any) -> Any:
        slow.wait(0.01)
        return real(lm, ids, **options)

    async def both(engine: LocalEngine, lm: LanguageModel) -> Answer:
        first = asyncio.create_task(answer(engine, request_for(lm, "a", LONG)))
        while not engine.stats()["running"]:
            await asyncio.sleep(0)
        second = asyncio.create_task(answer(engine, request_for(lm, "a", LONG)))
        await asyncio.sleep(0.03)
        first.cancel()
        return await second

    monkeypatch.setattr(language_model, "prefill", slowly)
    with twin_engine(part_tokens=PART) as (engine, lm):
        assert within(both(engine, lm)).ids == cold_ids(lm, LONG)


def after(engine: LocalEngine, log: Log, reads: int, first: Request, second: Request) -> list[Answer]:
    """Ask the first; once it has read some parts, the second too. Return what both were told."""
    before = len(log)

    async def both() -> list[Answer]:
        one = asyncio.create_task(answer(engine, first))
        while [what for what, _ in log[before:]].count("read") < reads:
            await asyncio.sleep(0)
        return await asyncio.gather(one, answer(engine, second))

    return within(both())


@contextmanager
def slowly_logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Note what is read and translated; reading takes long enough to be seen under way."""
    slow = threading.Event()
    with logged(monkeypatch) as log, monkeypatch.context() as patch:
        noting = language_model.prefill

        def slowly(lm: LanguageModel, ids: torch.Tensor, **options: Any) -> Any:
            slow.wait(0.01)
            return noting(lm, ids, **options)

        patch.setattr(language_model, "prefill", slowly)
        yield log


def test_a_translation_does_not_wait_for_a_reader_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what the reader has read by then, translates the rest and answers first."""
    with twin_engine(part_tokens=PART) as (engine, lm):
        ask(engine, request_for(lm, "b", LONG))
        requests = [request_for(lm, "a", LONG, dial=Dial(mode)) for mode in ("reprefill", "translate")]
        with slowly_logged(monkeypatch) as log:
            reading, translating = after(engine, log, 3, *requests)
    assert reading.ids == translating.ids == cold_ids(lm, LONG)
    assert reading.begun.translated_tokens == 0
    assert translating.begun.translated_tokens > 100
    assert translating.begun.native_tokens >= 3 * PART
    first = next(i for i, (what, _) in enumerate(log) if what == "translate")
    reads = [what for what, _ in log[first:]].count("read")
    assert reads > reading.begun.prompt_tokens // PART // 2, "the reader was still reading"


def test_a_reprefill_does_not_wait_for_a_reader_of_what_was_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read after a translation is not exact: nothing of it could be gone on from."""
    with twin_engine(part_tokens=PART) as (engine, lm):
        ask(engine, request_for(lm, "b", LONG))
        (found,) = ask(engine, request_for(lm, "a", LONG, dial=Dial("translate")))
        assert found.begun.translated_tokens > 200
        text = LONG + found.text + OTHER
        requests = [request_for(lm, "a", text, dial=Dial(mode)) for mode in ("auto", "reprefill")]
        with slowly_logged(monkeypatch) as log:
            reading, anew = after(engine, log, 2, *requests)
    assert reading.ids == anew.ids == cold_ids(lm, text)
    assert reading.begun.native_tokens + reading.begun.translated_tokens > 200
    assert (anew.begun.native_tokens, anew.begun.translated_tokens) == (1, 0), "the sink alone was exact"
    new = reading.begun.recomputed_tokens
    ended = next(i for i, (what, _) in enumerate(log) if what == "step")
    assert sum(tokens for what, tokens in log[:ended] if what == "read") > 1.5 * new, "both read in turn"


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_shorter_prompt_waits_for_a_reader_whose_window_slides(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that its last token is read, the window may have slid past what it needs."""
    lm = family_model(family)
    with closing(LocalEngine({"a": lm}, limits=Limits(part_tokens=PART))) as engine:
        cut = LONG[: len(LONG) // 2]
        with slowly_logged(monkeypatch) as log:
            long, short = after(engine, log, 2, request_for(lm, "a", LONG), request_for(lm, "a", cut))
    assert long.ids == cold_ids(lm, LONG)
    assert short.ids == cold_ids(lm, cut)
    assert short.begun.native_tokens >= short.begun.prompt_tokens - 2 * PART


# --- what can't be taken in parts ------------------------------------------------------------------------------------


def test_angles_that_change_on_the_way_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = family_model("phi3-longrope")
    with closing(LocalEngine({"m": lm}, limits=Limits(part_tokens=PART))) as engine, logged(monkeypatch) as log:
        (found,) = ask(engine, request_for(lm, "m", LONG[:100]))
        (short,) = ask(engine, request_for(lm, "m", LONG[:40]))
    assert found.ids == cold_ids(lm, LONG[:100])
    assert short.ids == cold_ids(lm, LONG[:40])
    read = [tokens for what, tokens in log if what == "read"]
    assert read[0] == found.begun.prompt_tokens
    assert max(read[1:]) <= PART


def test_a_cache_of_other_angles_is_not_gone_on_from() -> None:
    """Cut short, grown past the length at which all angles change, and past it within an answer."""
    lm = family_model("phi3-longrope")
    limit = lm.geometry.angle_limit
    assert limit is not None
    with closing(LocalEngine({"m": lm}, limits=Limits(part_tokens=PART))) as engine:
        for text, native in (
            (LONG[:100], 0),
            (LONG[:40], 0),
            (LONG[:110], 101),
            (LONG[:48], 0),
            (OTHER[: limit - 4], 1),  # the first token, which both begin with
        ):
            (found,) = ask(engine, request_for(lm, "m", text, count=9))
            assert found.ids[:3] == cold_ids(lm, text, 3)
            assert found.begun.native_tokens == native
        (grown,) = ask(engine, request_for(lm, "m", OTHER[: limit - 4] + found.text + " and"))
        assert grown.begun.native_tokens == 0
        assert grown.ids == cold_ids(lm, OTHER[: limit - 4] + found.text + " and")


@pytest.mark.parametrize(("family", "in_parts"), [("qwen3-next", True), ("jamba", False)])
def test_a_recurrent_state_is_gone_on_from_only_where_that_is_right(
    family: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jamba forgets its state where several tokens follow (transformers 5.24): in parts, and at each later turn."""
    lm = family_model(family)
    assert lm.goes_on == in_parts
    with closing(LocalEngine({"m": lm}, limits=Limits(part_tokens=PART))) as engine:
        with logged(monkeypatch) as log:
            (first,) = ask(engine, request_for(lm, "m", LONG[:60]))
        assert first.ids == cold_ids(lm, LONG[:60])
        assert (max(tokens for what, tokens in log if what == "read") <= PART) == in_parts
        text = LONG[:60] + first.text + " and more of that"
        (second,) = ask(engine, request_for(lm, "m", text))
        assert second.ids == cold_ids(lm, text)
        assert (second.begun.native_tokens > 0) == in_parts


# --- what goes wrong in the middle -----------------------------------------------------------------------------------


def test_a_translation_that_fails_in_a_later_part_is_a_reprefill(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Translator.stream, list[int]()

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the map is on fire")
        return real(*args, **options)

    monkeypatch.setattr(Translator, "stream", fails)
    with twin_engine(part_tokens=PART) as (engine, lm):
        ask(engine, request_for(lm, "b", LONG))
        (found,) = ask(engine, request_for(lm, "a", LONG, dial=Dial("translate")))
        assert "RuntimeError" in str(found.begun.fallback)
        assert found.begun.translated_tokens == 0
        assert found.ids == cold_ids(lm, LONG)
    assert len(calls) == 3


def test_a_reading_that_fails_in_a_later_part_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = language_model.prefill

    def fails(lm: LanguageModel, ids: torch.Tensor, *, cache: Any = None, **options: Any) -> Any:
        if cache is not None and int(cache.get_seq_length()) > 2 * PART:
            raise RuntimeError("out of memory")
        return real(lm, ids, cache=cache, **options)

    async def both(engine: LocalEngine, lm: LanguageModel) -> list[Any]:
        requests = [request_for(lm, "a", "hi", count=30), request_for(lm, "a", LONG)]
        return await asyncio.gather(*(answer(engine, r) for r in requests), return_exceptions=True)

    monkeypatch.setattr(language_model, "prefill", fails)
    with twin_engine(part_tokens=PART) as (engine, lm):
        well, failed = within(both(engine, lm))
        assert well.ids == cold_ids(lm, "hi", 30)
        assert isinstance(failed, RuntimeError)
        settled(engine)
        assert not engine._switch._underway["a"]


def test_a_doubted_hand_over_is_read_again_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    confidence = Confidence(("entropy_nats",), (0.0,), (1.0,), (1.0,), 0.0, 0.0, 0.5, 4, {})
    link = Link("a", "b", identity_translator(LM.geometry, torch.float64), confidence=confidence)
    with closing(LocalEngine({"a": LM, "b": LM}, [link], Limits(rule=ALWAYS, part_tokens=PART))) as engine:
        ask(engine, request_for(LM, "a", LONG))
        with logged(monkeypatch) as log:
            (found,) = ask(engine, request_for(LM, "b", LONG))
        assert "looks bad" in str(found.begun.fallback)
        assert found.ids == cold_ids(LM, LONG)
    assert max(tokens for what, tokens in log if what == "read") <= PART


def test_conversations_in_parts_with_cancels_never_mix() -> None:
    with twin_engine(max_rows=4, part_tokens=8) as (engine, lm):

        async def converse(number: int) -> int:
            rng = random.Random(number)
            messages = [user(f"codeword {number * 7919} {tiny.text(12, seed=number)}")]
            answered = 0
            for _ in range(5):
                request = request_for(lm, rng.choice("ab"), messages, tenant=f"t{number % 3}", count=5)
                if rng.random() < 0.3:
                    asking = asyncio.create_task(answer(engine, request))
                    await asyncio.sleep(rng.random() / 20)
                    asking.cancel()
                    await asyncio.wait([asking])
                    continue
                found = await answer(engine, request)
                assert found.ids == cold_ids(lm, messages, 5)
                answered += 1
                messages = [*messages, assistant(found.text), user("next")]
            return answered

        async def all_of_them() -> list[int]:
            return await asyncio.gather(*map(converse, range(5)))

        assert sum(within(all_of_them(), 240)) > 10
        stats = settled(engine)
        assert stats["failed"] == stats["not_kept"] == 0


def test_the_setting_is_the_engines() -> None:
    assert Limits().part_tokens == switching.PART_TOKENS == 512
