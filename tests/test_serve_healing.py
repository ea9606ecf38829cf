"""What was translated is read again, exactly, while nobody waits; and nobody waits for it longer than one piece."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvlingo.serve.healing as healing
from kvlingo.cache import tensors_of
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.plan import Provenance, Span, SpanKind
from kvlingo.serve.decoding import Job, Lane
from kvlingo.serve.engine import LocalEngine
from kvlingo.serve.healing import AGAIN_S, Healer
from kvlingo.serve.protocol import Dial, Message
from kvlingo.serve.sessions import Place, Sessions
from kvlingo.states import ModelState, read_conversation
from kvlingo.translator import Translator, identity_translator
from tests import tiny
from tests.serving import ask, assistant, cold_ids, greedy, request_for, twin_engine, user, within
from tests.test_serve_sessions import state_of

LM = tiny.language_model("llama")
FIRST = [user(tiny.text(16, seed=1))]
PLACE = Place("t", None, "a")
TRANSLATE, REREAD = Dial("translate"), Dial("reprefill")


def wrong_translator(lm: LanguageModel) -> Translator:
    """Return a translator whose caches change answers."""
    translator = identity_translator(lm.geometry, torch.float64)
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.mul_(-0.5)
    return translator


def switched(engine: LocalEngine, lm: LanguageModel) -> list[Message]:
    """Let one model read and the other go on from a translation; return the next turn's messages."""
    ask(engine, request_for(lm, "a", FIRST))
    (found,) = ask(engine, request_for(lm, "b", FIRST, dial=TRANSLATE))
    assert found.begun.translated_tokens > 50
    return [*FIRST, assistant(found.text), user("and then?")]


def wait_for(engine: LocalEngine, figure: str, least: int, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while engine.stats()[figure] < least:
        assert time.monotonic() < until, f"{figure} stays at {engine.stats()[figure]}"
        time.sleep(0.01)


def approximate(lm: LanguageModel, tokens: int = 40, exact: int = 1) -> ModelState:
    spans = (
        Span(0, exact, SpanKind.RECOMPUTED, Provenance.EXACT, "sink"),
        Span(exact, tokens - 1, SpanKind.TRANSLATED, Provenance.TRANSLATED, "translated"),
        Span(tokens - 1, tokens, SpanKind.RECOMPUTED, Provenance.OWN, "tail"),
    )
    state = state_of(tiny.ids_of(lm, tokens).tolist(), lm, spans)
    for layer in state.cache.layers:
        layer.values[:, :, exact:] += 1.0  # what is not exact is wrong here
    return state


def healed(lm: LanguageModel, state: ModelState, **changes: Any) -> tuple[Sessions, Healer]:
    sessions = Sessions(1 << 30)
    sessions.keep(PLACE, state, lm.geometry)
    healer = Healer("a", lm, sessions, **{"busy": lambda: False, **changes})
    while healer.do_a_piece() == 0.0:
        pass
    return sessions, healer


# --- what it comes to ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_healed_conversation_is_the_models_own_reading(family: str) -> None:
    with twin_engine(family, translator=wrong_translator(tiny.language_model(family)), heal=True) as (engine, lm):
        messages = switched(engine, lm)
        wait_for(engine, "heal_done", 1)
        (found,) = ask(engine, request_for(lm, "b", messages, dial=REREAD))
        read = len(read_conversation([dict(m) for m in FIRST], lm, add_generation_prompt=True))
        assert found.begun.native_tokens >= read  # a re-prefill goes on from exact tokens only
        assert found.ids == cold_ids(lm, messages)
        (again,) = ask(engine, request_for(lm, "b", messages))
        assert (again.begun.hops, again.ids) == (0, found.ids)


def test_without_healing_it_stays_a_translation() -> None:
    with twin_engine(translator=wrong_translator(LM)) as (engine, lm):
        messages = switched(engine, lm)
        time.sleep(0.3)
        (again,) = ask(engine, request_for(lm, "b", messages))
        assert again.begun.hops == 1
        assert again.ids != cold_ids(lm, messages)
        (found,) = ask(engine, request_for(lm, "b", messages, dial=REREAD))
        assert found.begun.native_tokens <= 1
        assert "heal_done" not in engine.stats()


@pytest.mark.parametrize("pieces", [7, 64])
@pytest.mark.parametrize("exact", [1, 20])
@torch.no_grad()
def test_reading_in_pieces_is_reading(pieces: int, exact: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "PIECE_TOKENS", pieces)
    state = approximate(LM, exact=exact)
    sessions, healer = healed(LM, state)
    (snapshot,) = sessions.all()
    whole = prefill(LM, LM.ids(state.reading.ids), full_length=True).cache
    for mine, own, before in zip(*map(tensors_of, (snapshot.state.cache, whole, state.cache)), strict=True):
        torch.testing.assert_close(mine, own, atol=1e-9, rtol=0)
        assert mine.shape == before.shape
    assert (snapshot.exact, snapshot.ids) == (40, state.reading.ids)
    counts = dict(healer.counts)
    assert counts["heal_tokens"] == 40 - exact  # what was exact is not read again
    assert counts["heal_pieces"] == -(-(40 - exact) // pieces)
    assert (counts["heal_done"], counts["heal_failed"]) == (1, 0)


def test_the_one_used_last_comes_first_and_exact_ones_are_left_alone() -> None:
    sessions = Sessions(1 << 30)
    for tokens in (30, 40):
        sessions.keep(Place("t", str(tokens), "a"), approximate(LM, tokens), LM.geometry)
    sessions.keep(Place("t", "exact", "a"), state_of([5] * 20), LM.geometry)
    sessions.keep(Place("t", "others", "b"), approximate(LM, 35), LM.geometry)
    healer = Healer("a", LM, sessions, lambda: False)
    order = [s.place.conversation for s in sessions.all()]
    done: list[str | None] = []
    while healer.do_a_piece() == 0.0:
        done += [s.place.conversation for s in sessions.all() if s.exact in (30, 40)]
        assert [s.place.conversation for s in sessions.all()] == order  # who is next to go stays next to go
    assert done[0] == "40"
    assert {s.place.conversation for s in sessions.all() if s.exact < len(s.ids)} == {"others"}
    assert healer.counts["heal_tokens"] == 30 + 40 - 2


# --- nobody waits for it ---------------------------------------------------------------------------------------------


def test_a_request_waits_for_one_piece_at_most() -> None:
    """Against a lane whose work in pauses never ends."""
    order: list[str] = []
    in_a_piece, go_on, told = threading.Event(), threading.Event(), threading.Event()

    def piece() -> float:
        order.append("piece")
        in_a_piece.set()
        assert go_on.wait(30)
        return 0.0

    def begin() -> Any:
        order.append("job")
        raise ValueError("enough")

    lane = Lane(LM, max_rows=1, max_queue=4, when_idle=piece)
    try:
        assert in_a_piece.wait(30)
        before = len(order)
        lane.submit(Job("t", greedy(LM), begin, lambda _: told.set(), lambda _: None))
        go_on.set()
        assert told.wait(30)
        assert order[before : before + 1] == ["job"]  # the piece that ran when it came was the last one before it
    finally:
        lane.stop(30)
    assert not lane._thread.is_alive()


def test_work_in_pauses_that_fails_costs_no_request() -> None:
    def piece() -> float:
        raise RuntimeError("broken")

    told: list[Any] = []
    done = threading.Event()

    def tell(event: Any) -> None:
        told.append(event)
        done.set()

    def begin() -> Any:
        raise ValueError("the job was begun")

    lane = Lane(LM, max_rows=1, max_queue=4, when_idle=piece)
    try:
        lane.submit(Job("t", greedy(LM), begin, tell, lambda _: None))
        assert done.wait(30)
        assert str(told[0]) == "the job was begun"
    finally:
        lane.stop(30)


def test_a_request_comes_between_two_pieces_and_healing_goes_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "PIECE_TOKENS", 4)
    real, lengths = healing.prefill, list[int]()
    first_piece = threading.Event()

    def slow(lm: LanguageModel, ids: torch.Tensor, **rest: Any) -> Any:
        lengths.append(len(ids))
        first_piece.set()
        time.sleep(0.1)
        return real(lm, ids, **rest)

    monkeypatch.setattr(healing, "prefill", slow)
    with twin_engine(heal=True) as (engine, lm):
        switched(engine, lm)
        assert first_piece.wait(30)
        other = [user(tiny.text(8, seed=9))]
        begun_at = engine.stats()["heal_pieces"]
        (found,) = ask(engine, request_for(lm, "b", other, count=3))
        assert engine.stats()["heal_done"] == 0  # it came in the middle
        assert found.ids == cold_ids(lm, other, 3)
        assert engine.stats()["heal_pieces"] >= begun_at
        left = [s for s in engine._sessions.all() if s.place.model == "b" and s.exact < len(s.ids)]
        wait_for(engine, "heal_done", len(left))
        assert max(lengths) <= 4
        assert sum(lengths) == engine.stats()["heal_tokens"]
        # Nothing was read twice for the interruption.
        assert engine.stats()["heal_tokens"] <= sum(len(s.ids) - s.exact for s in left)


def test_nothing_is_healed_while_another_model_works() -> None:
    sessions = Sessions(1 << 30)
    sessions.keep(PLACE, approximate(LM), LM.geometry)
    busy = [True]
    healer = Healer("a", LM, sessions, lambda: busy[0])
    assert [healer.do_a_piece() for _ in range(3)] == [AGAIN_S] * 3
    assert healer.counts["heal_pieces"] == 0
    busy[0] = False
    assert healer.do_a_piece() == 0.0
    assert healer.counts["heal_pieces"] == 1


def test_draining_does_not_wait_for_healing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "PIECE_TOKENS", 1)
    real = healing.prefill
    monkeypatch.setattr(healing, "prefill", lambda *a, **k: time.sleep(0.05) or real(*a, **k))
    with twin_engine(heal=True) as (engine, lm):
        switched(engine, lm)
        wait_for(engine, "heal_pieces", 1)
        started = time.monotonic()
        within(engine.drain(5.0))
        assert time.monotonic() - started < 3
        assert engine.stats()["heal_done"] == 0


# --- swapped whole or not at all -------------------------------------------------------------------------------------


def test_what_went_away_meanwhile_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "PIECE_TOKENS", 8)
    sessions = Sessions(1 << 30)
    sessions.keep(PLACE, approximate(LM), LM.geometry)
    healer = Healer("a", LM, sessions, lambda: False)
    assert healer.do_a_piece() == 0.0
    (old,) = sessions.all()
    sessions.max_bytes = 1
    sessions.keep(Place("t", None, "b"), state_of([5] * 9), LM.geometry)
    assert not sessions.keeps(old)
    assert healer.do_a_piece() is None
    assert healer.counts["heal_abandoned"] == 1
    assert not sessions.swap(old, old.state, LM.geometry)
    assert not sessions.all()


def test_one_that_is_read_meanwhile_stays_as_it_is() -> None:
    sessions = Sessions(1 << 30)
    sessions.keep(PLACE, approximate(LM), LM.geometry)
    (old,) = sessions.all()
    before = [x.clone() for x in tensors_of(old.state.cache)]
    healer = Healer("a", LM, sessions, lambda: False)
    while healer.do_a_piece() == 0.0:
        pass
    (new,) = sessions.all()
    assert new is not old
    assert tiny.same(before, list(tensors_of(old.state.cache)))
    assert not tiny.same(before, list(tensors_of(new.state.cache)))


def test_one_that_cannot_be_read_again_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(healing, "prefill", broken)
    sessions, healer = healed(LM, approximate(LM))
    assert (healer.counts["heal_failed"], healer.counts["heal_done"]) == (1, 0)
    assert [s.exact for s in sessions.all()] == [1]
    assert healer.do_a_piece() is None


def test_what_must_not_be_read_in_pieces_is_left_alone() -> None:
    limited = replace(LM, geometry=replace(LM.geometry, angle_limit=39))
    assert healed(limited, approximate(LM))[1].counts["heal_pieces"] == 0
    enough = replace(LM, geometry=replace(LM.geometry, angle_limit=40))
    assert healed(enough, approximate(LM))[1].counts["heal_done"] == 1
    assert healed(LM, replace(approximate(LM), no_text=True))[1].counts["heal_pieces"] == 0  # it never sees its text


def test_random_turns_with_healing_answer_as_a_cold_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "PIECE_TOKENS", 5)
    with twin_engine(heal=True) as (engine, lm):
        messages: list[Message] = []
        for turn, model in enumerate("ababba"):
            messages.append(user(tiny.text(6, seed=turn)))
            (found,) = ask(engine, request_for(lm, model, messages))
            assert found.ids == cold_ids(lm, messages)
            messages.append(assistant(found.text))
            time.sleep(0.05 * (turn % 3))
        assert engine.stats()["heal_pieces"] > 0
