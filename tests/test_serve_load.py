"""The bench of many conversations, small: it passes on the server as it is and sees one that mixes them up."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest

from bench.load import Sample, Size, checks, cross_talk, load, measure, memory, outcome
from bench.talks import Told, write_talks
from kvlingo.serve import decoding
from kvlingo.serve.protocol import Begun, Done
from kvlingo.serve.sessions import Sessions
from kvlingo.serve.settings import Settings
from tests.fake_engine import FakeEngine, serving
from tests.serving import letters_model, twin_engine


def held(talks: int = 4, turns: int = 24, seed: int = 0) -> list[Told]:
    """Hold a few talks with a server in this process."""
    with twin_engine(letters_model()) as (engine, _), serving(engine, Settings()) as running:
        told, _, left = asyncio.run(load(running.url, write_talks(seed, talks, turns), os.getpid()))
    assert not any(left.values())
    return told


def test_a_small_run_in_processes_of_its_own() -> None:
    record = measure(Size(conversations=6, turns=48, rounds=1, round_turns=12, cache_bytes=1_000_000))
    found = checks(record)
    assert {name for name, holds in found.items() if not holds} <= {"memory_flat"}  # so short a run says nothing of it
    assert record["turns"]["all"] == 48
    assert record["turns"]["gone_away"] >= 4
    assert record["turns"]["translated"] >= 4
    assert record["cross_talk"]["checked"] >= record["turns"]["answered"] >= 24
    assert record["cross_talk"]["told_apart"] > 0.9
    assert all(sample["rss_bytes"] > 1e7 and sample["cache_bytes"] > 0 for sample in record["memory"]["samples"])
    assert 0 <= record["queue_ms"]["p50"] <= record["queue_ms"]["p99"] <= record["queue_ms"]["largest"]
    assert record["ttft_ms"]["p50"] >= record["queue_ms"]["p50"] > 0
    assert record["throughput"]["ratio"] > 0


def test_the_same_seed_holds_the_same_talks() -> None:
    talks = write_talks(3, 8, 99)
    assert talks == write_talks(3, 8, 99) != write_talks(4, 8, 99)
    assert sum(len(talk.turns) for talk in talks) == 99
    assert len({talk.opening.split()[1] for talk in talks}) == 8
    deeds = [turn.deed for talk in talks for turn in talk.turns]
    assert set(deeds) == {"answer", "cancel", "leave"}
    assert {turn.deed for talk in write_talks(3, 8, 99, leaving=0.0) for turn in talk.turns} == {"answer"}


def test_rows_that_hear_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoding.append_row

    def swapped(cache: Any, stacked: Any, row: int, tokens: int, geometry: Any) -> None:
        real(cache, stacked, 0, tokens, geometry)

    monkeypatch.setattr(decoding, "append_row", swapped)
    found = cross_talk(held(), letters_model())
    assert found["wrong"] > 0
    assert found["first_wrong"][0]["text"] != found["first_wrong"][0]["right"]


def test_a_conversation_that_finds_anothers_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sessions.find

    def mixed_up(self: Sessions, place: Any, ids: Any) -> Any:
        """Give the right ids with the cache of another conversation."""
        others = [kept for kept in self.all() if kept.place == place and kept.ids[:30] != tuple(ids[:30])]
        found = real(self, place, ids)
        if not found or not others:
            return found
        tokens = min(found[0].tokens, len(others[0].ids)) - 1
        state = replace(found[0].snapshot.state, cache=others[0].state.cache)
        return [replace(found[0], tokens=tokens, snapshot=replace(found[0].snapshot, state=state))]

    monkeypatch.setattr(Sessions, "find", mixed_up)
    assert cross_talk(held(), letters_model())["wrong"] > 0


def test_what_goes_wrong_is_counted_and_fails_the_run() -> None:
    good = Told("a", (("user", "x"),), "", whole=True)
    told = [good, replace(good, whole=False, error="429 queue_full"), replace(good, whole=False)]
    assert outcome(told) == {
        "all": 3,
        "answered": 1,
        "gone_away": 1,
        "errors": {"429 queue_full": 1},
        "translated": 0,
        "fallbacks": {},
    }
    right: dict[str, Any] = {
        "cross_talk": {"checked": 1, "wrong": 0},
        "turns": {"errors": {}},
        "left": {"queued": 0.0, "running": 0.0},
        "memory": {"rss_off": 0.01, "cache_off": 0.05},
        "throughput": {"rounds": [{"same_texts": True}]},
    }
    assert all(checks(right).values())
    for name, wrong in {
        "cross_talk": {"checked": 0, "wrong": 0},
        "turns": {"errors": {"500 internal": 1}},
        "left": {"queued": 0.0, "running": 1.0},
        "memory": {"rss_off": 0.06, "cache_off": 0.0},
        "throughput": {"rounds": [{"same_texts": False}]},
    }.items():
        assert not all(checks(right | {name: wrong}).values()), name


def test_memory_that_grows_is_not_flat() -> None:
    flat = [Sample(i, 1000 + 10 * (i % 2), 500) for i in range(40)]
    growing = [Sample(i, 1000 + 20 * i, 500) for i in range(40)]
    assert memory(flat)["rss_off"] < 0.05 < memory(growing)["rss_off"]
    assert memory([*growing[:20], *flat[20:]])["rss_off"] < 0.05  # filling up is no leak


def test_the_time_in_the_queue_is_told_and_counted() -> None:
    import httpx

    class Waiting(FakeEngine):
        async def events(self, request: Any) -> Any:
            async for event in super().events(request):
                yield replace(event, queue_ms=7.5) if isinstance(event, Done) else event

    with serving(Waiting(), Settings()) as running, httpx.Client(base_url=running.url, timeout=20) as http:
        body = {"model": "small", "messages": [{"role": "user", "content": "x"}]}
        assert http.post("/v1/chat/completions", json=body).json()["kvlingo"]["queue_ms"] == 7.5
        figures = http.get("/metrics").text
    assert "kvlingo_queue_seconds_count 1.0" in figures
    assert "kvlingo_queue_seconds_sum 0.0075" in figures


def test_a_request_that_waits_says_so() -> None:
    """One row at a time: the second waits for the first."""
    from tests.serving import ask, request_for

    with twin_engine(max_rows=1) as (engine, lm):
        answers = ask(engine, *(request_for(lm, "a", f"prompt {number}", count=20) for number in range(3)))
    assert all(isinstance(a.begun, Begun) and 0 <= a.done.queue_ms <= a.done.ttft_ms for a in answers)
    waits = sorted(a.done.queue_ms for a in answers)
    assert waits[2] > waits[1] > waits[0]
    slowest = max(answers, key=lambda a: a.done.queue_ms)
    assert slowest.done.queue_ms > 0.5 * slowest.done.ttft_ms
