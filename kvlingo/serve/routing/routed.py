"""An engine that also takes `auto`: it asks a router who answers and lets that model answer.

Knows the protocol of engines and that of routers. Does not know models or HTTP. What a router chose but a model can't serve goes
to the other model, with both reasons; what is being said is never taken back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from kvlingo.errors import BadInput
from kvlingo.serve.protocol import (
    AUTO,
    Away,
    Begun,
    Busy,
    Done,
    Engine,
    Event,
    ModelInfo,
    NoHelp,
    Piece,
    Request,
    Route,
    TooLong,
    Unavailable,
    Unsupported,
)
from kvlingo.serve.routing.choosing import Choice, Heard, Router

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

CANT = (TooLong, Unsupported, Away)
"""What one model can't serve and another may."""

COUNTED = ("routed", "routed_to_the_other", "routed_tokens_discarded")


@dataclass
class Answer:
    """One whole answer that is held back."""

    choice: Choice
    events: list[Event] = field(default_factory=list)

    def heard(self) -> Heard:
        """Return what a router judges by."""
        pieces = [event for event in self.events if isinstance(event, Piece)]
        logprobs = [token.logprob for piece in pieces for token in piece.tokens]
        mean = sum(logprobs) / len(logprobs) if logprobs else None
        cut = any(isinstance(event, Done) and event.finish_reason == "length" for event in self.events)
        return Heard(self.tokens, mean, "".join(piece.text for piece in pieces), cut)

    @property
    def tokens(self) -> int:
        """Return how many tokens it has."""
        return next((event.completion_tokens for event in self.events if isinstance(event, Done)), 0)


@dataclass(frozen=True)
class Asked:
    """A request whose model is open, and when it came."""

    request: Request
    router: str
    at: float = field(default_factory=time.perf_counter)

    def told(self, event: Event, choice: Choice, began: float, discarded: int) -> Event:
        """Return an event of the model that answers as the asker is told it: with the reason, and all the time that passed."""
        if isinstance(event, Begun):
            model = self.request.model if choice.help else event.model  # what two models say is neither's alone
            return replace(event, model=model, route=Route(self.request.model, self.router, choice.reason, discarded))
        if isinstance(event, Done):
            return replace(event, ttft_ms=event.ttft_ms + 1e3 * (began - self.at))
        return event


class RoutedEngine:
    """Wraps an engine. Requests that name a model pass through untouched.

    Raises `BadInput` where the router's models are not the engine's, or one of them is called `auto`.
    """

    def __init__(self, engine: Engine, router: Router) -> None:
        names = [info.name for info in engine.models()]
        if AUTO in names:
            raise BadInput(f"a served model is called {AUTO!r}, which asks the router; give it another name")
        missing = next((name for name in (router.pair.small, router.pair.big) if name not in names), None)
        if missing is not None:
            raise BadInput(f"the router chooses {missing!r}, which is not served; there are: {', '.join(names)}")
        self._engine, self._router = engine, router
        self._counts, self._counting = Counter[str](dict.fromkeys(COUNTED, 0)), threading.Lock()

    def models(self) -> Sequence[ModelInfo]:
        """List the engine's models, and `auto`, which has the room of the roomier one."""
        infos = list(self._engine.models())
        pair = [info for info in infos if info.name in (self._router.pair.small, self._router.pair.big)]
        rooms = [info.max_tokens for info in pair]
        room = None if None in rooms else max(r for r in rooms if r is not None)
        can_be_target = all(info.can_be_target for info in pair)
        return [*infos, ModelInfo(AUTO, room, max(info.created for info in pair), can_be_target)]

    def stats(self) -> Mapping[str, float]:
        """Return the engine's figures, and how often the router chose, was overruled, and let tokens be said for nothing."""
        with self._counting:
            return {**self._engine.stats(), **{name: float(value) for name, value in self._counts.items()}}

    async def away(self) -> Sequence[str]:
        """Return the engine's; `auto` is away where both of its models are."""
        away = list(await self._engine.away())
        pair = (self._router.pair.small, self._router.pair.big)
        return [*away, *([AUTO] if all(name in away for name in pair) else [])]

    async def drain(self, timeout_s: float) -> None:
        """Drain the engine."""
        await self._engine.drain(timeout_s)

    async def run(self, request: Request) -> AsyncIterator[Event]:
        """Answer one request; closing the iterator cancels it. Raises what the engine raises."""
        events = self._pass_on(request) if request.model != AUTO else self._routed(Asked(request, self._router.name))
        async with aclosing(events):
            async for event in events:
                yield event

    def _pass_on(self, request: Request) -> AsyncGenerator[Event, None]:
        return cast("AsyncGenerator[Event, None]", self._engine.run(request))

    async def _routed(self, asked: Asked) -> AsyncGenerator[Event, None]:
        self._refuse_ids_of_either(asked.request)
        # Not on the event loop, which a long prompt would hold up.
        choice = await asyncio.to_thread(self._router.choose, asked.request.prompt)
        self._count("routed")
        answer = self._judged(asked, choice) if self._router.listens else self._one_of_both(asked, choice)
        async with aclosing(answer):
            async for event in answer:
                yield event

    async def _one_of_both(self, asked: Asked, choice: Choice) -> AsyncGenerator[Event, None]:
        """Let the chosen model answer, or the other where that one can't."""
        began = False
        try:
            async with aclosing(self._say(asked, choice)) as events:
                async for event in events:
                    began = True
                    yield event
            return
        except NoHelp as error:
            other = Choice(choice.model, f"{choice.reason}, but {self._cant(error.model, error.why)}")
        except CANT as error:
            if began or not self._has_more_room(choice.model, error):
                raise
            other = self._instead(choice, error)
        async with aclosing(self._say(asked, other)) as events:
            async for event in events:
                yield event

    async def _judged(self, asked: Asked, choice: Choice) -> AsyncGenerator[Event, None]:
        """Hear the first answer whole; send it, or let the other model answer."""
        first = Answer(choice)
        try:
            await self._hear(asked.request, first)
        except CANT as error:
            if not self._has_more_room(choice.model, error):
                raise
            verdict = self._instead(choice, error)
            first.events.clear()
        else:
            # Not on the event loop either: rules may read all of a long answer.
            verdict = await asyncio.to_thread(self._router.judge, first.heard())
        if verdict.model != choice.model:
            self._count("routed_to_the_other", bool(first.events))
            self._count("routed_tokens_discarded", first.tokens)
            began = False
            try:
                async with aclosing(self._say(asked, verdict, first.tokens)) as events:
                    async for event in events:
                        began = True
                        yield event
                return
            except (*CANT, Busy, Unavailable) as error:
                if began or not first.events:
                    raise
                # There is an answer, and no other is to be had: it is better than an error.
                self._count("routed_tokens_discarded", -first.tokens)
                verdict = Choice(choice.model, f"{verdict.reason}, but {self._cant(verdict.model, error)}")
        for event in released(first.events, asked, verdict):
            yield event

    async def _say(self, asked: Asked, choice: Choice, discarded: int = 0) -> AsyncGenerator[Event, None]:
        """Let one model answer, event by event."""
        began = time.perf_counter()
        request = replace(asked.request, model=choice.model, help=choice.help)
        async with aclosing(self._pass_on(request)) as events:
            async for event in events:
                yield asked.told(event, choice, began, discarded)

    async def _hear(self, request: Request, answer: Answer) -> None:
        """Take in a whole answer, with the log-probabilities of its tokens whether they were asked for or not."""
        told = request.sampling.top_logprobs
        sampling = replace(request.sampling, top_logprobs=0 if told is None else told)
        async with aclosing(self._pass_on(replace(request, model=answer.choice.model, sampling=sampling))) as events:
            async for event in events:
                answer.events.append(event)
        if not answer.events or not isinstance(answer.events[-1], Done):
            raise RuntimeError("the engine left a choice without an end")

    def _refuse_ids_of_either(self, request: Request) -> None:
        """Raise `Unsupported` for token ids where it is open whose they are."""
        if not request.sampling.logit_bias:
            return
        pair = self._router.pair
        known = {info.name: info.vocabulary for info in self._engine.models()}
        if known[pair.small] is None or known[pair.small] != known[pair.big]:
            reason = f"its token ids mean something else to {pair.small} than to {pair.big}, and either may answer"
            raise Unsupported("logit_bias", f"{reason}; name one of the two")

    def _instead(self, choice: Choice, error: Exception) -> Choice:
        self._count("routed_to_the_other")
        other = self._router.pair.other(choice.model)
        return Choice(other, f"{choice.reason}, but {self._cant(choice.model, error)}")

    def _cant(self, name: str, error: Exception) -> str:
        """Say in a few words why a model does not answer."""
        match error:
            case TooLong():
                return f"{name} reads {error.limit} tokens, the prompt has {error.tokens}"
            case Unsupported():
                return f"{name} can't serve {error.param}"
            case Busy():
                return f"the queue of {name} is full"
            case Away():
                return f"the server of {name} does not answer"
        return f"{name} is shutting down"

    def _has_more_room(self, name: str, error: Exception) -> bool:
        """Tell whether it is worth asking the other model: a prompt that is too long only fits a model that reads more."""
        if not isinstance(error, TooLong):
            return True
        rooms = {info.name: info.max_tokens for info in self._engine.models()}
        room = rooms[self._router.pair.other(name)]
        return room is None or room > error.limit

    def _count(self, name: str, by: int = 1) -> None:
        with self._counting:
            self._counts[name] += by


def released(events: Sequence[Event], asked: Asked, choice: Choice) -> list[Event]:
    """Return a held answer as it is sent now: its first token came when it was released, its log-probabilities as asked."""
    now = time.perf_counter()
    told: list[Event] = []
    for event in events:
        if isinstance(event, Piece) and asked.request.sampling.top_logprobs is None:
            event = replace(event, tokens=())
        if isinstance(event, Done):
            event = replace(event, ttft_ms=1e3 * (now - asked.at))
        if isinstance(event, Begun):
            event = asked.told(event, choice, now, 0)
        if not isinstance(event, Piece) or event.text or event.tokens:
            told.append(event)
    return told
