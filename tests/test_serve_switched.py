"""What an answer tells of a switch: who has read the conversation before, why it was read again, how far it is trusted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from kvlingo.errors import UnsupportedCache
from kvlingo.serve import engine as engines
from kvlingo.serve.answering import Answering, End
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.metrics import kind_of
from kvlingo.serve.protocol import Begun, Dial, Help, Sampling, Unavailable
from kvlingo.serve.switching import Link, Rule
from kvlingo.translator import identity_translator
from tests import tiny
from tests.serving import (
    ALWAYS,
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
from tests.test_serve_parts import LONG, random_translator
from tests.test_serve_token import alone, helped, likely_limit, pair_engine

LM = tiny.language_model("llama")
SAME = identity_translator(LM.geometry, torch.float64)
PLAIN = (None, None, "none")


def told(begun: Begun) -> tuple[str | None, str | None, str]:
    return begun.switched_from, begun.reread, kind_of(begun)


def engine_of(names: str, links: list[Link], limits: Limits | None = None) -> LocalEngine:
    return LocalEngine(dict.fromkeys(names, LM), links, limits or Limits())


# --- who has read it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
def test_who_holds_it_all_has_not_been_switched_to(chat: bool) -> None:
    """One token is always left to read: it is no reading again."""
    prompt = [user(LONG)] if chat else LONG
    with closing(engine_of("ab", [])) as engine:
        first, second, third, fourth = (ask(engine, request_for(LM, name, prompt))[0] for name in "abab")
        assert told(first.begun) == PLAIN
        assert told(second.begun) == ("a", "there is no translator from a to b", "reprefill")
        assert told(third.begun) == told(fourth.begun) == PLAIN


def test_who_goes_on_from_what_another_request_is_reading_has_read_nothing_again() -> None:
    with closing(engine_of("ab", [], Limits(part_tokens=16))) as engine:
        ask(engine, request_for(LM, "a", LONG))
        one, two = ask(engine, request_for(LM, "b", LONG), request_for(LM, "b", LONG))
        both = sorted((one, two), key=lambda found: found.begun.native_tokens)
        assert [found.begun.switched_from for found in both] == ["a", None]
        assert both[1].begun.native_tokens == both[1].begun.prompt_tokens - 1
        assert one.ids == two.ids == cold_ids(LM, LONG)


def test_who_read_it_while_a_request_waited_is_told() -> None:
    with closing(engine_of("ab", [Link("a", "b", SAME)], Limits(rule=ALWAYS, max_rows=1))) as engine:

        async def go() -> Any:
            block = asyncio.create_task(answer(engine, request_for(LM, "b", "something else entirely", count=60)))
            while not engine.stats()["running"]:
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(answer(engine, request_for(LM, "b", LONG)))
            while not engine.stats()["queued"]:
                await asyncio.sleep(0.001)
            await answer(engine, request_for(LM, "a", LONG))
            assert engine.stats()["queued"], "too late to tell anything"
            await block
            return await waiting

        begun = within(go()).begun
        assert begun.translated_tokens > 300
        assert (begun.source, begun.switched_from) == ("a", "a")


def test_what_was_translated_ahead_was_asked_of_nobody() -> None:
    """One model answers turn after turn: no switch, whatever waits for one."""
    with closing(engine_of("ab", [Link("a", "b", SAME)], Limits(rule=ALWAYS, ahead=True))) as engine:
        messages = [user(LONG)]
        for turn in range(3):
            (found,) = ask(engine, request_for(LM, "a", messages))
            assert told(found.begun) == PLAIN, turn
            wait_for_ahead(engine, turn + 1)
            messages = [*messages, assistant(found.text), user(f"next {turn}")]
        (switched,) = ask(engine, request_for(LM, "b", messages))
        assert (switched.begun.hops, switched.begun.translated_tokens) == (1, 0)


def wait_for_ahead(engine: LocalEngine, count: int) -> None:
    until = time.monotonic() + 20
    while engine.stats()["ahead_done"] < count and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.stats()["ahead_done"] >= count


# --- why it was read again -------------------------------------------------------------------------------------------


def test_what_is_itself_translated_is_named_as_the_reason() -> None:
    links = [Link("a", "b", SAME, rule=Rule(0, 1)), Link("b", "c", SAME)]
    with closing(engine_of("abc", links, Limits(rule=Rule(64, 128)))) as engine:
        ask(engine, request_for(LM, "a", LONG))
        (b,) = ask(engine, request_for(LM, "b", LONG, count=20))
        (c,) = ask(engine, request_for(LM, "c", LONG + b.text + " and then"))
        assert c.begun.reread is not None
        assert c.begun.reread.startswith("b has read only ")


def test_little_to_spare_is_named_as_the_reason() -> None:
    with closing(engine_of("ab", [Link("a", "b", SAME)], Limits(rule=Rule(10_000, 20_000)))) as engine:
        ask(engine, request_for(LM, "a", LONG))
        (b,) = ask(engine, request_for(LM, "b", LONG))
        assert b.begun.reread == "reading so little again costs no more, and is exact"


def test_a_client_that_always_asks_for_translation_is_told_of_no_fallback_where_nobody_else_has_read() -> None:
    with twin_engine() as (engine, lm):
        ask(engine, request_for(lm, "b", "somebody else's conversation"))
        text = "a b c d e f g"
        begun = []
        for _ in range(3):
            (found,) = ask(engine, request_for(lm, "a", text, dial=Dial("translate")))
            begun.append(found.begun)
            text += found.text + " and some more to read"
        assert [b.fallback is not None for b in begun] == [True, False, False]


def test_a_way_that_fails_is_seen_even_where_another_one_works(caplog: pytest.LogCaptureFixture) -> None:
    bad = identity_translator(LM.geometry, torch.float64)
    closed = UnsupportedCache("this way is closed")
    with (
        closing(engine_of("abc", [Link("a", "c", bad), Link("b", "c", SAME)], Limits(rule=ALWAYS))) as engine,
        mock.patch.object(bad, "stream", side_effect=closed),
        caplog.at_level(logging.WARNING),
    ):
        ask(engine, request_for(LM, "b", LONG[:300]))
        ask(engine, request_for(LM, "a", LONG))
        (c,) = ask(engine, request_for(LM, "c", LONG))
        assert (c.begun.source, c.begun.fallback) == ("b", None)
        assert engine.stats()["translations_failed"] == 1
    assert "a translation from a to c was not used: this way is closed" in caplog.text


# --- how far it is trusted -------------------------------------------------------------------------------------------


def test_an_answer_of_two_tells_of_an_earlier_translation_that_one_goes_on_from() -> None:
    links = [Link("a", "b", random_translator(LM, LM))]
    with closing(engine_of("ab", links, Limits(rule=ALWAYS))) as engine:
        ask(engine, request_for(LM, "a", LONG))
        ask(engine, request_for(LM, "b", LONG, dial=Dial("translate")))
        (both,) = ask(engine, request_for(LM, "a", LONG, help=Help("b", 0.0)))
        assert [part.hops for part in both.done.parts] == [0, 1]
        (exact,) = ask(engine, request_for(LM, "a", LONG, help=Help("b", 0.0), dial=Dial("reprefill")))
        assert [part.hops for part in exact.done.parts] == [0, 0]
        assert exact.ids == cold_ids(LM, LONG)


@pytest.mark.parametrize("wait", [2, 6, 12, 20])
def test_what_is_approximate_replaces_nothing_exact(wait: int) -> None:
    """Both say the same, one on its own reading, one on a translation that comes later or earlier."""
    with twin_engine(part_tokens=16) as (engine, lm):
        ask(engine, request_for(lm, "b", LONG))

        async def go() -> None:
            one = asyncio.create_task(answer(engine, request_for(lm, "a", LONG, dial=Dial("reprefill"), count=4)))
            while not one.done():
                reading = engine._switch._underway["a"]
                if reading and reading[0].tokens >= 16 * wait:
                    break
                await asyncio.sleep(0)
            dial = Dial("translate", tail=60)
            await asyncio.gather(one, answer(engine, request_for(lm, "a", LONG, dial=dial, count=4)))

        within(go())
        settled(engine)
        (three,) = ask(engine, request_for(lm, "a", LONG, dial=Dial("reprefill"), count=1))
        assert three.begun.native_tokens == three.begun.prompt_tokens - 1


# --- what is counted -------------------------------------------------------------------------------------------------


def test_an_answer_of_many_turns_is_finished_once() -> None:
    with pair_engine() as engine:
        (found,) = ask(engine, helped(likely_limit("one vocabulary")))
        assert sum(part.turns for part in found.done.parts) > 2
        stats = settled(engine)
        assert (stats["requests"], stats["finished"]) == (1, 1)


def test_who_leaves_the_queue_is_counted() -> None:
    with pair_engine(max_rows=1) as engine:

        async def go() -> None:
            async with aclosing(engine.run(alone("small", helped(0.0, Sampling(200, temperature=0.0))))) as events:
                async for _ in events:
                    break
                waiting = asyncio.create_task(answer(engine, alone("small", helped(0.0))))
                while not engine.stats()["queued"]:
                    await asyncio.sleep(0.001)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting

        within(go())
        stats = settled(engine)
        assert (stats["requests"], stats["left_queue"], stats["finished"] + stats["cancelled"]) == (1, 1, 1)


def test_who_waits_for_a_reader_takes_no_turn_from_it() -> None:
    """Seven equal requests beside one that decodes: the reader takes as many turns as if it were alone."""
    with twin_engine(part_tokens=16) as (engine, lm):
        steps = []
        lane = engine._lanes["a"]
        begin = lane._begin

        def counted() -> str | None:
            steps.append(began := begin())
            return began

        with mock.patch.object(lane, "_begin", counted):
            ask(engine, *(request_for(lm, "a", LONG, count=1) for _ in range(7)))
        worked = [step for step in steps if step is None]
        assert len(worked) <= len(lm.tokenizer(LONG)["input_ids"]) // 16 + 3 * 7
        assert engine.stats()["recomputed_tokens"] < 2 * len(lm.tokenizer(LONG)["input_ids"])


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_schema_that_waits_at_the_end_of_a_drain_is_refused_as_a_request_is() -> None:
    """One is being prepared when the time has passed, another waits behind it: which is which is told, not timed."""
    begun, go_on = threading.Event(), threading.Event()

    def held(schema: str, lm: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        raise AssertionError("nobody waits for it any more")

    with mock.patch.object(engines, "form_of", held):
        engine = LocalEngine({"a": LM})
        waiting = engine._forming._work_queue.qsize
        requests = [replace(request_for(LM, "a", f"one {i}"), sampling=Sampling(3, json_schema="{}")) for i in range(2)]

        async def one(request: Any) -> Any:
            async with Answering(engine, [[request]]) as answering:
                while not isinstance(item := await answering.next(), End):
                    pass
                return item

        async def until(condition: Callable[[], Any]) -> None:
            while not condition():
                await asyncio.sleep(0.01)

        async def go() -> list[Any]:
            prepared = asyncio.create_task(one(requests[0]))
            await until(begun.is_set)
            waits = asyncio.create_task(one(requests[1]))
            await until(lambda: waiting() == 1)
            await engine.drain(0.0)
            (told,) = await asyncio.gather(waits, return_exceptions=True)
            go_on.set()
            return [told, *await asyncio.gather(prepared, return_exceptions=True)]

        told, late = within(go())
        assert isinstance(told, Unavailable)
        assert str(late) == "nobody waits for it any more"


@pytest.mark.parametrize("mode", ["auto", "translate"])
def test_what_a_template_begins_with_is_nobody_s_conversation(mode: Any) -> None:
    """Two conversations share a long opening and nothing else: no switch, and nothing to translate."""
    lm = replace(LM, tokenizer=tiny.byte_tokenizer())
    lm.tokenizer.chat_template = (
        "{{ 'system: answer in plain words, and say so where you do not know. ' * 3 }}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    )
    links = [Link("a", "b", SAME)]
    with closing(LocalEngine(dict.fromkeys("ab", lm), links, Limits(rule=ALWAYS))) as engine:
        ask(engine, request_for(lm, "a", [user("Hello")]))
        (found,) = ask(engine, request_for(lm, "b", [user("Why?")], dial=Dial(mode)))
        assert (found.begun.switched_from, found.begun.reread, found.begun.translated_tokens) == (None, None, 0)
        assert found.begun.fallback is None or found.begun.fallback.startswith("no model with a translator")
