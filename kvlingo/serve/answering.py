"""Run the choices of one request side by side and tell what they say in one line of events.

Knows tasks and queues. Does not know JSON or HTTP. Leaving an `Answering` cancels what still runs: that is how a client that goes
away stops its tokens.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, cast

from kvlingo.serve.protocol import Begun, Engine, Event, Request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

WAITING_EVENTS = 256
"""So many events may wait for a client that reads slowly; then its choices wait too."""

SIDE_BY_SIDE = 8
"""So many choices of one request run at once: one of many does not fill the queue, and is not refused for its own choices."""


class End:
    """Nothing more comes."""


class Answering:
    """All choices of one request, as events by index. An error of one ends all."""

    def __init__(self, engine: Engine, groups: Sequence[Sequence[Request]]) -> None:
        self.engine, self.groups = engine, groups
        self.events: asyncio.Queue[tuple[int, Event] | End | BaseException] = asyncio.Queue(WAITING_EVENTS)
        self.places = asyncio.Semaphore(SIDE_BY_SIDE)
        self.left = False

    async def __aenter__(self) -> Answering:
        self.work = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.left = True
        self.work.cancel()
        await asyncio.wait([self.work])

    async def next(self, timeout_s: float | None = None) -> tuple[int, Event] | End | None:
        """Return the next event, `End`, or None when nothing came in time; raise what a choice raised."""
        try:
            # Not `wait_for`: before Python 3.12 it swallows a cancel that comes with an event, and who has left is not seen.
            async with asyncio.timeout(timeout_s):
                item = await self.events.get()
        except TimeoutError:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    async def _run(self) -> None:
        last: End | BaseException = End()
        try:
            async with asyncio.TaskGroup() as tasks:
                index = 0
                for group in self.groups:
                    tasks.create_task(self._answer(index, group))
                    index += len(group)
        except BaseExceptionGroup as errors:
            last = first_of(errors)
        if not self.left:  # else nobody reads, and a full queue would hold this task for ever
            await self.events.put(last)

    async def _answer(self, index: int, group: Sequence[Request]) -> None:
        """Let the first choice read the prompt; the others begin when it has, and find it read."""
        begun = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(self._choice(index, group[0], begun))
            waiting = tasks.create_task(begun.wait())
            await asyncio.wait([first, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if begun.is_set():
                for number, request in enumerate(group[1:], 1):
                    tasks.create_task(self._choice(index + number, request, asyncio.Event()))

    async def _choice(self, index: int, request: Request, begun: asyncio.Event) -> None:
        events = cast("AsyncGenerator[Event, None]", self.engine.run(request))
        async with self.places, aclosing(events):
            async for event in events:
                await self.events.put((index, event))
                if isinstance(event, Begun):
                    begun.set()


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first single error of nested groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
