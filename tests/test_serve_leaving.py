"""Who leaves is let go at once, and what is just beginning ends with the server."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvlingo.serve.answering import Answering
from kvlingo.serve.decoding import Job, Lane, Started
from kvlingo.serve.protocol import Event, Piece, Sampling, Unavailable
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
