"""What was answered is translated before anybody asks; a switch then reads what is new, and waits for one piece at most."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvlingo.serve.ahead as ahead
from kvlingo.language_model import LanguageModel
from kvlingo.serve.ahead import AGAIN_S, Ahead, answered
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.protocol import Dial
from kvlingo.serve.switching import Link, Rule, prompt_of
from kvlingo.translator import identity_translator
from tests import families, tiny
from tests.serving import ask, assistant, closing, cold_ids, request_for, twin_engine, user

LM = tiny.language_model("llama")
FIRST = [user(tiny.text(16, seed=1))]
ALWAYS = Rule(reprefill_up_to=0, translate_from=1)
QUESTION = user("and then?")


def wait_for(engine: LocalEngine, figure: str, least: int, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while engine.stats()[figure] < least:
        assert time.monotonic() < until, f"{figure} stays at {engine.stats()[figure]}"
        time.sleep(0.01)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_switch_reads_only_what_is_new_and_answers_as_cold(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through an identity pair the answer is token for token that of a model that has read everything itself."""
    monkeypatch.setattr(ahead, "PIECE_TOKENS", 20)
    monkeypatch.setattr(ahead, "LEAST_TOKENS", 12)
    with twin_engine(family, ahead=True, rule=ALWAYS) as (engine, lm):
        (said,) = ask(engine, request_for(lm, "a", FIRST))
        wait_for(engine, "ahead_done", 1)
        assert engine.stats()["ahead_pieces"] > 3
        messages = [*FIRST, assistant(said.text), QUESTION]
        (found,) = ask(engine, request_for(lm, "b", messages))
        new = found.begun.prompt_tokens - found.begun.native_tokens
        assert found.begun.translated_tokens == 0
        assert 0 < new < 40
        assert found.begun.hops == 1, "what was translated ahead never passes for exact"
        assert found.ids == cold_ids(lm, messages)


def test_a_re_prefill_that_is_asked_for_takes_nothing_of_it() -> None:
    with twin_engine("llama", ahead=True, rule=ALWAYS) as (engine, lm):
        (said,) = ask(engine, request_for(lm, "a", FIRST))
        wait_for(engine, "ahead_done", 1)
        messages = [*FIRST, assistant(said.text), QUESTION]
        (found,) = ask(engine, request_for(lm, "b", messages, dial=Dial("reprefill")))
        assert found.begun.hops == 0
        assert found.begun.native_tokens <= 2


def test_later_turns_are_translated_on_from_there() -> None:
    with twin_engine("llama", ahead=True, rule=replace(ALWAYS, reprefill_up_to=50, translate_from=60)) as (engine, lm):
        (said,) = ask(engine, request_for(lm, "a", FIRST))
        wait_for(engine, "ahead_done", 1)
        first = engine.stats()["ahead_tokens"]
        messages = [*FIRST, assistant(said.text), QUESTION]
        (more,) = ask(engine, request_for(lm, "a", messages))
        wait_for(engine, "ahead_done", 2)
        assert engine.stats()["ahead_tokens"] - first < 50, "only what is new is translated"
        messages += [assistant(more.text), QUESTION]
        (found,) = ask(engine, request_for(lm, "b", messages))
        assert found.begun.prompt_tokens - found.begun.native_tokens < 40
        assert found.ids == cold_ids(lm, messages)


def test_what_would_be_read_again_is_not_translated_ahead() -> None:
    """Below the rule's limit a switch reads natively, exactly; so nothing approximate is put in its way."""
    with twin_engine("llama", ahead=True, rule=Rule(reprefill_up_to=10_000, translate_from=20_000)) as (engine, lm):
        ask(engine, request_for(lm, "a", FIRST))
        time.sleep(0.3)
        assert engine.stats()["ahead_done"] == engine.stats()["ahead_pieces"] == 0


def test_without_it_nothing_is_done() -> None:
    with twin_engine("llama", rule=ALWAYS) as (engine, lm):
        ask(engine, request_for(lm, "a", FIRST))
        assert not [name for name in engine.stats() if name.startswith("ahead")]


def test_tenants_and_pinned_conversations_stay_apart() -> None:
    with twin_engine("llama", ahead=True, rule=ALWAYS) as (engine, lm):
        first = replace(request_for(lm, "a", FIRST), tenant="one", conversation="mine")
        (said,) = ask(engine, first)
        wait_for(engine, "ahead_done", 1)
        messages = (*FIRST, assistant(said.text), QUESTION)
        for other in ({"tenant": "two", "conversation": "mine"}, {"tenant": "one", "conversation": None}):
            (found,) = ask(engine, replace(request_for(lm, "b", list(messages)), **other))
            assert found.begun.native_tokens == 0
        (found,) = ask(engine, replace(request_for(lm, "b", list(messages)), tenant="one", conversation="mine"))
        assert found.begun.native_tokens > 50


def test_it_waits_while_anything_is_asked_for_and_gives_up_what_fails(caplog: pytest.LogCaptureFixture) -> None:
    busy, kept = True, list[Any]()

    class Broken:
        def worth_translating(self, prompt: Any) -> Any:
            raise RuntimeError("no")

    work = Ahead("b", Broken(), lambda r: prompt_of(r, LM), lambda *a: kept.append(a), lambda: busy)  # type: ignore[arg-type]
    assert work.do_a_piece() is None
    work.put(request_for(LM, "b", FIRST))
    assert work.do_a_piece() == AGAIN_S
    busy = False
    assert work.do_a_piece() == 0.0
    assert work.counts["ahead_failed"] == 1
    assert "translating ahead failed" in caplog.text
    assert work.do_a_piece() is None
    assert not kept


def test_of_one_conversation_only_the_latest_waits_and_there_is_an_end_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MOST_WAITING", 2)
    work = Ahead("b", None, lambda r: prompt_of(r, LM), lambda *_: None, lambda: False)  # type: ignore[arg-type]
    for name in ("1", "2", "1", "3"):
        work.put(replace(request_for(LM, "b", FIRST), conversation=name))
    assert [place.conversation for place, _ in work._waiting] == ["1", "3"]
    assert work.counts["ahead_abandoned"] == 2, "one was overtaken by its next turn, one had no place"


def test_a_busy_tenant_pushes_out_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MOST_WAITING", 3)
    work = Ahead("b", None, lambda r: prompt_of(r, LM), lambda *_: None, lambda: False)  # type: ignore[arg-type]
    for tenant, name in (("one", "1"), ("two", "2"), ("two", "3"), ("two", "4"), ("two", "5")):
        work.put(replace(request_for(LM, "b", FIRST), tenant=tenant, conversation=name))
    assert [place.conversation for place, _ in work._waiting] == ["1", "4", "5"]


def test_who_has_answered_itself_needs_nothing_made_ready() -> None:
    work = Ahead("b", None, lambda r: prompt_of(r, LM), lambda *_: None, lambda: False)  # type: ignore[arg-type]
    work.put(request_for(LM, "b", [*FIRST, assistant("a draft")]))
    work.forget(request_for(LM, "b", [user("something else")]))
    assert len(work._waiting) == 1
    work.forget(request_for(LM, "b", FIRST))
    assert not len(work._waiting)
    assert work.do_a_piece() is None


def test_a_conversation_that_has_gone_on_is_left_and_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made of the turn before is kept, and only the rest is made for the next one."""
    monkeypatch.setattr(ahead, "PIECE_TOKENS", 20)
    monkeypatch.setattr(ahead, "LEAST_TOKENS", 12)
    with twin_engine("llama", ahead=False, rule=ALWAYS) as (engine, lm):
        (said,) = ask(engine, request_for(lm, "a", FIRST))
        work = engine._ahead_of("b")
        messages = [*FIRST, assistant(said.text)]
        work.put(request_for(lm, "b", messages))
        for _ in range(3):
            assert work.do_a_piece() == 0.0
        assert work.counts["ahead_tokens"] == 40
        messages.append(QUESTION)
        (more,) = ask(engine, request_for(lm, "a", messages))
        messages.append(assistant(more.text))
        work.put(request_for(lm, "b", messages))
        assert work.do_a_piece() == 0.0
        assert work.counts["ahead_abandoned"] == 1
        while work.do_a_piece() is not None:
            pass
        assert work.counts["ahead_done"] == 1
        whole = len(prompt_of(request_for(lm, "b", messages), lm, add_generation_prompt=False).reading)
        assert work.counts["ahead_tokens"] == whole, "no token twice"
        (found,) = ask(engine, request_for(lm, "b", [*messages, QUESTION]))
        assert found.begun.prompt_tokens - found.begun.native_tokens < 40
        assert found.ids == cold_ids(lm, [*messages, QUESTION])


def test_what_is_no_longer_wanted_is_left_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PIECE_TOKENS", 20)
    monkeypatch.setattr(ahead, "LEAST_TOKENS", 12)
    with twin_engine("llama", ahead=False, rule=ALWAYS) as (engine, lm):
        (said,) = ask(engine, request_for(lm, "a", FIRST))
        kept = list[Any]()
        work = engine._ahead_of("b")
        work._keep = lambda *a: kept.append(a)
        work.put(request_for(lm, "b", [*FIRST, assistant(said.text)]))
        assert [work.do_a_piece() for _ in range(3)] == [0.0] * 3
        work.forget(request_for(lm, "b", [user("another one")]))
        assert work.do_a_piece() == 0.0
        assert work.counts["ahead_pieces"] == 3
        work.forget(request_for(lm, "b", FIRST))
        assert work.do_a_piece() == 0.0
        assert work.do_a_piece() is None
        assert (work.counts["ahead_pieces"], work.counts["ahead_abandoned"], kept) == (3, 1, [])


def test_another_conversation_that_begins_alike_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PIECE_TOKENS", 20)
    monkeypatch.setattr(ahead, "LEAST_TOKENS", 12)
    with twin_engine("llama", ahead=False, rule=ALWAYS) as (engine, lm):
        preamble = tiny.text(60, seed=4)
        assert len(preamble) > ahead.BEGINNING_CHARS
        first = replace(request_for(lm, "a", FIRST), prompt=f"{preamble} one")
        (said,) = ask(engine, first)
        work = engine._ahead_of("b")
        work.put(answered(first, said.text, "b"))
        assert [work.do_a_piece() for _ in range(3)] == [0.0] * 3
        work.put(replace(answered(first, said.text, "b"), prompt=f"{preamble} two"))
        while work.counts["ahead_done"] < 1:
            assert work.do_a_piece() == 0.0
        assert work.counts["ahead_abandoned"] == 0


def test_the_answer_becomes_part_of_what_is_asked_next() -> None:
    chat = answered(replace(request_for(LM, "a", FIRST), dial=Dial("reprefill", tail=9)), "yes", "b")
    assert chat.model == "b"
    assert chat.dial == Dial()
    assert chat.prompt == (*FIRST, assistant("yes"))
    text = answered(replace(request_for(LM, "a", FIRST), prompt="once "), "upon", "b")
    assert text.prompt == "once upon"


def test_conversations_without_a_name_are_all_made_ready() -> None:
    chats = [[user(tiny.text(12, seed=seed))] for seed in range(2, 6)]
    with twin_engine("llama", ahead=True, rule=ALWAYS) as (engine, lm):
        said = ask(engine, *(request_for(lm, "a", chat) for chat in chats))
        wait_for(engine, "ahead_done", 4)
        for chat, answer in zip(chats, said, strict=True):
            (found,) = ask(engine, request_for(lm, "b", [*chat, assistant(answer.text), QUESTION]))
            assert found.begun.translated_tokens == 0
            assert found.begun.native_tokens > 50


@pytest.mark.parametrize("piece", range(20, 34))
def test_no_length_loses_what_was_translated(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last piece that only holds what the source has not read would have nothing to translate."""
    monkeypatch.setattr(ahead, "PIECE_TOKENS", piece)
    monkeypatch.setattr(ahead, "LEAST_TOKENS", 16)
    with twin_engine("llama", ahead=True, rule=ALWAYS) as (engine, lm):
        ask(engine, request_for(lm, "a", FIRST))
        wait_for(engine, "ahead_done", 1)
        assert engine.stats()["ahead_abandoned"] == 0


def test_what_can_not_be_taken_or_kept_is_not_begun() -> None:
    """A target that is too short for it, or whose angles would change, and a cache that has no room beside what is in use."""
    for family, changes in (("phi3-longrope", {}), ("llama", {"cache_bytes": 200_000})):
        with twin_engine_of(family, **changes) as (engine, lm):
            ask(engine, request_for(lm, "a", FIRST))
            wait_for(engine, "ahead_abandoned", 1)
            assert engine.stats()["ahead_pieces"] == 0
            assert engine.stats()["ahead_failed"] == 0


def twin_engine_of(family: str, **changes: Any) -> Any:
    lm = families.language_model(family)
    link = Link("a", "b", identity_translator(lm.geometry, torch.float64))
    return _served(LocalEngine({"a": lm, "b": lm}, [link], Limits(rule=ALWAYS, ahead=True, **changes)), lm)


@contextlib.contextmanager
def _served(engine: LocalEngine, lm: LanguageModel) -> Iterator[tuple[LocalEngine, LanguageModel]]:
    with closing(engine):
        yield engine, lm
