"""From a lane to whoever waits: the events of one job, and an answer that goes from one model's lane to another's and back.

Knows lanes, asyncio and how a model catches up with what another has said. Does not know requests' fields or HTTP.

**How two caches are kept in step.** A model that takes over has one pass over its weights to make anyway: its next token needs
the logits after the last one. Reading what it missed in that same pass costs no second one, and up to `cost.SHORT_PASS_TOKENS`
tokens no time either; what it read is then its own, while a translation is an approximation that can't be translated again. So
what is missing is read natively, unless it is longer than what a switch reads without asking for the cost (512 tokens, or what
`kvlingo calibrate` measured): then `Switch.start` decides by `cost.py` as for any other switch. The first time, the big model
comes to know the prompt that way too: a translated prompt is what makes its first token come soon.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvlingo.language_model import prefill
from kvlingo.reading import read_more
from kvlingo.serve.decoding import Job, Lane, Started
from kvlingo.serve.duet import Duet, Singer, Turn
from kvlingo.serve.protocol import Begun, Done, Event
from kvlingo.serve.switching import Prompt, Switch
from kvlingo.states import ModelState
from kvlingo.steps import Steps

Tell = Callable[[Event | Exception], None]


async def heard(lane: Lane, make: Callable[[Tell], Job], *, goes_on: bool = False) -> AsyncGenerator[Event, None]:
    """Submit a job and yield what it tells, to its end; leaving cancels it. Raises what the lane refuses and what it tells."""
    events: asyncio.Queue[Event | Exception] = asyncio.Queue()
    job = make(partial(_put, asyncio.get_running_loop(), events))
    lane.submit(job, goes_on=goes_on)
    try:
        while True:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Done):
                return
    finally:
        lane.cancel(job)


def _put(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Any], event: Event | Exception) -> None:
    """Hand an event to the loop that waits for it; one that has closed has nobody who listens."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(events.put_nowait, event)


@dataclass(eq=False)
class Relay:
    """Carries one answer of two models through their lanes, turn by turn.

    Fields:
        prompts: each model's reading of the prompt.
        keep: takes what a model holds.
        count: takes how a model came to know what it goes on from, and whether it is the first of the request.
        asked: when the request came.

    The answer is queued anew at each turn, behind what its tenant asked before; all that waiting is told together.
    """

    duet: Duet
    prompts: Mapping[str, Prompt]
    lanes: Mapping[str, Lane]
    switch: Switch
    keep: Callable[[Prompt, ModelState], None]
    count: Callable[..., None]
    asked: float
    _at_rest: threading.Lock = field(default_factory=threading.Lock)
    _singing: Singer | None = None
    _left: bool = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the answer's beginning, its pieces, and its end with who did what."""
        duet = self.duet
        turns, queue_ms = 0, 0.0
        try:
            while duet.finish_reason is None:
                turn = Turn(duet)
                lane = self.lanes[turn.singer.name]
                since = time.perf_counter() if turns else self.asked
                async with aclosing(heard(lane, partial(self._job, turn, since), goes_on=turns > 0)) as events:
                    async for event in events:
                        if isinstance(event, Done):
                            queue_ms += event.queue_ms
                        elif turns == 0 or not isinstance(event, Begun):
                            yield event
                turns += 1
        finally:
            self._leave()
        ttft_ms = 1e3 * ((duet.first_at or time.perf_counter()) - self.asked)
        yield Done(duet.finish_reason, duet.completion_tokens, ttft_ms, queue_ms, duet.parts)

    def _job(self, turn: Turn, since: float, tell: Tell) -> Job:
        request = self.prompts[turn.singer.name].request
        return Job(
            tenant=request.tenant,
            sampling=request.sampling,
            begin=partial(self._begin, turn),
            tell=tell,
            keep=partial(self._rest, turn),
            voice=turn,
            submitted=since,
        )

    def _leave(self) -> None:
        """Keep what both hold where nobody listens to the next turn; a model that still says something keeps it at its end."""
        with self._at_rest:
            self._left = True
            if self._singing is None and self.duet.finish_reason is None:
                self._keep_all()

    # --- the worker's thread of the model whose turn it is ---

    def _begin(self, turn: Turn) -> Steps[Started]:
        """Let a model catch up with the answer."""
        with self._at_rest:
            self._singing = turn.singer
        singer, unread = turn.singer, turn.singer.unread()
        if singer.state is not None and unread and len(unread) <= self._reads_up_to(singer):
            turn.ids.extend(unread)
            logits = prefill(singer.lm, singer.lm.ids(unread), cache=singer.state.cache).logits[-1]
            started = Started(singer.state, logits, _read(singer, len(unread)))
        else:
            self._keep_all()  # a translator and the singer itself find there what each has read
            started = yield from self.switch.start(self._prompt_of(singer))
            self.keep(
                self.prompts[singer.name], started.state
            )  # for those who ask the same before the answer is finished
        first = not any(part.turns for part in self.duet.parts)
        singer.began(started.begun)
        self.count(started.begun, first=first)
        return started

    def _reads_up_to(self, singer: Singer) -> float:
        """Return how many tokens the model reads at once without asking what a translation costs; its own last one never asks."""
        other = self.duet.other(singer)
        unasked = self.switch.reads_up_to(self.prompts[singer.name].request.dial.mode, other.name, singer.name)
        return max(1, min(unasked, self.switch.part_tokens))

    def _prompt_of(self, singer: Singer) -> Prompt:
        """Return the prompt with the answer so far, and the other's reading of both."""
        other = self.duet.other(singer)
        mine, theirs = (self._with_answer(each) for each in (singer, other))
        return replace(mine, others={other.name: theirs.reading}, opened=False)  # both readings go on with the answer

    def _with_answer(self, singer: Singer) -> Prompt:
        prompt = self.prompts[singer.name]
        if not singer.ids:
            return prompt
        return replace(prompt, reading=read_more(singer.lm.tokenizer, prompt.reading, singer.ids))

    def _rest(self, turn: Turn, state: ModelState) -> None:
        """Take back what a model holds at the end of its turn; after the last, or a cancelled one, it is kept for others."""
        with self._at_rest:
            turn.singer.state, self._singing = state, None
            if self._left or turn.finish_reason != "turn":
                self._keep_all()

    def _keep_all(self) -> None:
        for singer in (self.duet.small, self.duet.big):
            if singer.state is not None:
                self.keep(self.prompts[singer.name], singer.state)


def _read(singer: Singer, tokens: int) -> Begun:
    """Say that a model read `tokens` more tokens itself."""
    return Begun(singer.name, singer.prompt_tokens, 0, 0, tokens, 0, None, None)
