"""Who leaves is let go at once, and what is just beginning ends with the server."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from kvlingo.serve.answering import Answering
from kvlingo.serve.decoding import Job, Lane, Started
from kvlingo.serve.protocol import Begun, Event, Piece, Sampling, Unavailable
from kvlingo.states import read_native
from kvlingo.steps import Steps
from tests import tiny
from tests.fake_engine import FakeEngine


@pytest.mark.parametrize("turns", range(7))
def test_a_cancel_that_comes_with_an_event_is_not_swallowed(turns: int) -> None:
    """`asyncio.wait_for` did so before Python 3.12: an answer then ran to its end for nobody."""

    async def listen(answering: Answering) -> None:
        while True:
            await answering.next(5.0)

    async def leave() -> bool:
        answering = Answering(FakeEngine(), [])
        listener = asyncio.create_task(listen(answering))
        for _ in range(3):
            await asyncio.sleep(0)
        answering.events.put_nowait((0, Piece("x", ())))
        for _ in range(turns):
            await asyncio.sleep(0)
        listener.cancel()
        await asyncio.wait([listener], timeout=1.0)
        gone = listener.done()
        listener.cancel()
        return gone

    assert asyncio.run(leave())


def test_a_job_that_is_just_beginning_is_told_and_ends_with_its_lane() -> None:
    lm, at_it, may_go_on = tiny.language_model("llama"), threading.Event(), threading.Event()
    told = list[Event | Exception]()

    def begin() -> Started:
        at_it.set()
        may_go_on.wait(30)
        raise AssertionError("what it comes to is told to nobody")

    lane = Lane(lm, max_rows=2, max_queue=2)
    job = Job("", Sampling(5), begin, told.append, lambda _: None)
    lane.submit(job)
    assert at_it.wait(30)
    lane.stop(0.05)
    assert job.cancelled.is_set()
    assert [type(each) for each in told] == [Unavailable]
    may_go_on.set()
    lane.stop(30)
    assert lane.load == {"queued": 0, "running": 0}


@pytest.mark.parametrize("early", [True, False])
def test_who_leaves_runs_until_its_end_is_counted(early: bool) -> None:
    """Figures are asked for from other threads, at any time: one who neither runs nor has ended would be lost to them."""
    lm, at_it, may_go_on, speaks = tiny.language_model("llama"), threading.Event(), threading.Event(), threading.Event()
    state = read_native("Who goes there?", lm)

    def hold() -> None:
        at_it.set()
        may_go_on.wait(30)

    def begin() -> Steps[Started]:
        try:
            while early:
                speaks.set()
                yield "step"
        except GeneratorExit:
            hold()
            raise
        return Started(state, torch.zeros(lm.geometry.vocab_size), Begun(lm.name, 5, 0, 0, 5, 0, None, None))

    lane = Lane(lm, max_rows=2, max_queue=2)
    try:
        job = Job("", Sampling(1000, temperature=0.0), begin, lambda _: speaks.set(), lambda _: hold())
        lane.submit(job)
        assert speaks.wait(30)
        lane.cancel(job)
        assert at_it.wait(30)
        held = dict(lane.load), lane.counts["cancelled"]
        may_go_on.set()
        while lane.load["running"]:
            pass
        assert (*held, lane.counts["cancelled"]) == ({"queued": 0, "running": 1}, 0, 1)
    finally:
        may_go_on.set()
        lane.stop(30)
