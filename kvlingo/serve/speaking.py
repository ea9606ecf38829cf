"""The reply to one request: in one piece or as a stream of events, for as long as the client is there.

Knows ASGI messages and Server-Sent Events. Does not know routes or bodies of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvlingo.serve.answering import Answering, End
from kvlingo.serve.doors import Note, describe, fault_response, json_bytes, note_of
from kvlingo.serve.metrics import Figures, kind_of
from kvlingo.serve.protocol import Begun, Done, Engine, Event
from kvlingo.serve.replies import Chunks, Fault, Json, Shape, Tally, fault_of, whole
from kvlingo.serve.schema import Order

FIRST_BYTE_S = 0.25
"""A stream whose choice has not begun by then sends its headers; an error that comes sooner still has a status of its own."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
KEEPALIVE = b": keepalive\n\n"


@dataclass(frozen=True)
class Setting:
    """Where a reply is made: the engine, the figures, how long it waits for either side, and which replies are under way."""

    engine: Engine
    figures: Figures
    keepalive_s: float
    stall_s: float
    replies: set[Reply] = field(default_factory=set)


class Stalled(Exception):
    """A client that has not read for too long."""


class Reply(Response):
    """The answer to one request. It ends, and with it its choices, when the client goes away."""

    def __init__(self, setting: Setting, asked: Order, shape: Shape, prompt_field: str) -> None:
        super().__init__()
        self.setting, self.asked, self.prompt_field = setting, asked, prompt_field
        starts = [sum(map(len, asked.groups[:i])) for i in range(len(asked.groups))]
        self.tally = Tally(frozenset(starts))
        self.shape = shape
        self.lanes = len(asked.lanes)
        self.with_logprobs = asked.lanes[0].sampling.top_logprobs is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply, and write down how it went."""
        self.setting.replies.add(self)
        try:
            await self.reply(scope, receive, send)
        finally:
            self.setting.replies.discard(self)

    async def reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply as long as the client is there."""
        note = note_of(scope)
        note.facts |= {"stream": self.asked.stream, "choices": self.lanes}
        speak = self.stream if self.asked.stream else self.whole
        try:
            stayed = await unless_gone(speak(scope, receive, send), receive)
        except Stalled:
            stayed = False
        if not stayed:
            self.setting.figures.cancelled.inc()
            note.facts["cancelled"] = True
        if self.tally.firsts():
            note.facts |= self.tally.handover() | {"completion_tokens": self.tally.usage()["completion_tokens"]}

    async def whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for all, then send it in one piece."""
        try:
            async with Answering(self.setting.engine, self.asked.groups) as answering:
                while not isinstance(item := await answering.next(), End):
                    if item is not None:
                        self.tally.take(*item)
                        self.count(*item)
            self.see_that_all_ended()
            body = json_bytes(whole(self.shape, self.tally, self.with_logprobs))
            response = Response(body, media_type="application/json")
        except Exception as error:
            response = fault_response(noted_fault(error, self.prompt_field, note_of(scope)))
        await response(scope, receive, send)

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send chunks as they come.

        The headers wait for the first event, but not for long: until then an error can still have a status of its own.
        """
        line = Line(send, self.setting.stall_s)
        async with Answering(self.setting.engine, self.asked.groups) as answering:
            try:
                first = await answering.next(FIRST_BYTE_S)
            except Exception as error:
                fault = noted_fault(error, self.prompt_field, note_of(scope))
                await fault_response(fault)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            try:
                await self.say_all(first, answering, line)
            except Stalled:
                raise
            except Exception as error:  # no [DONE] after it: the answer is not whole
                note_of(scope).facts["broken"] = True
                await line.data(noted_fault(error, self.prompt_field, note_of(scope)).body())
        await line.end()

    async def say_all(self, item: tuple[int, Event] | End | None, answering: Answering, line: Line) -> None:
        """Send chunks until all choices have ended, and a comment whenever nothing comes for a while."""
        chunks = Chunks(
            self.shape,
            self.tally,
            self.lanes,
            with_logprobs=self.with_logprobs,
            include_usage=self.asked.include_usage,
        )
        while not isinstance(item, End):
            if item is None:
                await line.send(KEEPALIVE)
            else:
                made = list(chunks.take(*item))
                self.count(*item)
                for chunk in made:
                    await line.data(chunk)
            item = await answering.next(self.setting.keepalive_s)
        self.see_that_all_ended()
        await line.send(b"data: [DONE]\n\n")

    def count(self, index: int, event: Event) -> None:
        """Count one event of a choice."""
        figures = self.setting.figures
        leads = index in self.tally.leaders
        if isinstance(event, Begun) and leads:
            figures.begun(event)
        if isinstance(event, Done):
            figures.completion.inc(event.completion_tokens)
            if leads:
                figures.ttft.labels(kind_of(self.tally.begun[index])).observe(event.ttft_ms / 1000)
                figures.queue.observe(event.queue_ms / 1000)

    def see_that_all_ended(self) -> None:
        """Raise where the engine left a choice without an end: half an answer must not pass for a whole one."""
        if len(self.tally.done) != self.lanes:
            raise RuntimeError("the engine left a choice without an end")


class Line:
    """The way to the client. One that does not read for `stall_s` counts as gone."""

    def __init__(self, out: Send, stall_s: float) -> None:
        self.out, self.stall_s = out, stall_s

    async def data(self, value: Json) -> None:
        """Send one event."""
        await self.send(b"data: " + json_bytes(value) + b"\n\n")

    async def send(self, body: bytes, *, more: bool = True) -> None:
        """Send bytes."""
        try:
            async with asyncio.timeout(self.stall_s):
                await self.out({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as error:
            raise Stalled from error

    async def end(self) -> None:
        """Say that nothing more comes."""
        await self.send(b"", more=False)


def noted_fault(error: Exception, prompt_field: str, note: Note) -> Fault:
    """Return what a client is told of an error; one that nobody foresaw goes into the log with its place."""
    fault = fault_of(error, prompt_field)
    note.facts |= describe(error) if fault.status == 500 else {"code": fault.code}
    return fault


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Do the work, or drop it when the client goes away; tell whether it was done. The request's body has been read before."""
    doing, watching = asyncio.create_task(work), asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
            return True
        return False
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
