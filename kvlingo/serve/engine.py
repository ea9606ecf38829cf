"""The in-process engine: models and translators in this process, one worker thread a model.

Knows asyncio and how the parts belong together. Does not know HTTP. Two models share nothing that changes but `Sessions`,
which locks; what a worker reads of another model are snapshots, which nobody changes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from kvlingo.chat import ignored, writes_tool_call_tags
from kvlingo.errors import BadInput
from kvlingo.language_model import LanguageModel
from kvlingo.serve.ahead import Ahead, answered
from kvlingo.serve.decoding import Job, Lane, Started, clipped
from kvlingo.serve.disk import Disk
from kvlingo.serve.duet import Duet, Singer, same_vocabulary, vocabulary_of
from kvlingo.serve.forms import Form, form_of
from kvlingo.serve.healing import Healer
from kvlingo.serve.protocol import (
    Begun,
    Done,
    Event,
    Help,
    ModelInfo,
    NoHelp,
    Piece,
    Request,
    TooLong,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from kvlingo.serve.relay import Relay, Tell, heard
from kvlingo.serve.sampling import Speech, check
from kvlingo.serve.sessions import Sessions
from kvlingo.serve.shelf import Shelf
from kvlingo.serve.switching import PART_TOKENS, Link, Prompt, Rule, Side, Switch, of_one_angle, prompt_of
from kvlingo.states import ModelState
from kvlingo.steps import Steps
from kvlingo.translator import check_geometry

POLL_S = 0.01
STOP_S = 5.0
SAVE_S = 20.0
"""So long may writing what is worth it take, once all requests have ended."""
KINDS = ("native", "translated", "recomputed")
COUNTED = ("requests", "fallbacks", "switches_translated", "helped_tokens", *(f"{kind}_tokens" for kind in KINDS))


@dataclass(frozen=True)
class Limits:
    """What one engine may use.

    Fields:
        max_rows: requests that decode together, for each model.
        max_queue: requests of one tenant that wait, for each model.
        cache_bytes: of all snapshots.
        part_tokens: of a prompt, read or translated at once: others' answers wait for no more.
        heal: read approximate snapshots again, exactly, while no model has anything to do.
        ahead: translate what one model has answered for those that a translator leads to, while no model has anything to do.
    """

    max_rows: int = 8
    max_queue: int = 64
    cache_bytes: int = 2 << 30
    part_tokens: int = PART_TOKENS
    rule: Rule = field(default_factory=Rule)
    heal: bool = False
    ahead: bool = False


class LocalEngine:
    """Serves models that are loaded in this process.

    Args:
        models: by the names they are asked for.
        links: the translators between them. Raises `IncompatiblePair` for one that does not fit its models.
        disk: where snapshots go that memory has no room for, and all that are worth it in the end; None: nowhere.
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        links: Sequence[Link] = (),
        limits: Limits | None = None,
        disk: Disk | None = None,
    ) -> None:
        limits = limits or Limits()
        if not models:
            raise BadInput("no model to serve; give at least one")
        _check_links(models, links)
        self._created = int(time.time())
        self._sides = {name: Side(name, lm) for name, lm in models.items()}
        self._vocabularies = {name: vocabulary_of(lm.tokenizer) for name, lm in models.items()}
        self._shelf = Shelf(disk, models, max(limits.cache_bytes // 4, 1)) if disk is not None else None
        self._sessions = Sessions(limits.cache_bytes, self._shelf.put) if self._shelf else Sessions(limits.cache_bytes)
        self._switch = Switch(self._sides, links, self._sessions, limits.rule, self._shelf, limits.part_tokens)
        self._counts, self._counting = Counter[str](dict.fromkeys(COUNTED, 0)), threading.Lock()
        self._draining, self._relays = False, 0
        self._forming_ended = False
        self._forming = ThreadPoolExecutor(1, thread_name_prefix="kvlingo-forms")
        self._healers = [Healer(name, lm, self._sessions, self._is_busy) for name, lm in models.items() if limits.heal]
        self._ways = [(link.source, link.target) for link in links if not link.refusal]
        self._ahead = {name: self._ahead_of(name) for _, name in self._ways if limits.ahead}
        self._lanes: dict[str, Lane] = {}
        for name, lm in models.items():
            self._lanes[name] = Lane(
                lm, max_rows=limits.max_rows, max_queue=limits.max_queue, when_idle=self._in_pauses(name)
            )

    def _ahead_of(self, name: str) -> Ahead:
        lm = self._sides[name].lm

        def prepare(request: Request) -> Prompt:
            _check_tools(request, lm)
            return prompt_of(request, lm, add_generation_prompt=False)

        def has_room(tokens: int) -> bool:
            size = tokens * lm.geometry.features_per_token * lm.dtype.itemsize
            return self._sessions.num_bytes + size <= self._sessions.max_bytes

        return Ahead(name, self._switch, prepare, partial(self._keep, ahead=True), self._is_busy, has_room)

    def _in_pauses(self, name: str) -> Callable[[], float | None] | None:
        """Return what one model's worker does in pauses: first what makes the next switch cheap, then what makes it exact."""
        pieces = [h.do_a_piece for h in self._healers if h.name == name]
        if name in self._ahead:
            pieces.insert(0, self._ahead[name].do_a_piece)
        return partial(_first_of, pieces) if pieces else None

    def _is_busy(self) -> bool:
        """Tell whether any model has something to do: all share the same cores or the same accelerator."""
        return any(sum(lane.load.values()) for lane in list(self._lanes.values()))

    def models(self) -> Sequence[ModelInfo]:
        """List the models."""
        return [
            ModelInfo(
                name,
                side.lm.geometry.max_positions,
                self._created,
                side.lm.target_refusal is None,
                self._vocabularies[name],
            )
            for name, side in self._sides.items()
        ]

    async def run(self, request: Request) -> AsyncIterator[Event]:
        """Answer one request; closing the iterator cancels it.

        Raises before the first event: `UnknownModel`, `Unavailable`, `Busy`, `TooLong`, `Unsupported`, or `BadInput` for what
        the model's template or the sampler refuses.
        """
        self._side(request.model)
        if self._draining:
            raise Unavailable(1.0)
        asked = time.perf_counter()
        self._lanes[request.model].see_room_for(request.tenant)
        events = self._alone(request, asked) if request.help is None else self._together(request, request.help, asked)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Begun) and request.tools:
                    event = replace(event, calls=writes_tool_call_tags(self._sides[request.model].lm.tokenizer))
                yield event

    async def _alone(self, request: Request, asked: float) -> AsyncGenerator[Event, None]:
        """Let one model answer."""
        side = self._sides[request.model]
        prompt = await asyncio.to_thread(self._read, request, side.lm)
        sampling = clipped(request.sampling, len(prompt.reading), side.lm.geometry.max_positions)
        schema = sampling.json_schema
        form = None if schema is None else await self._form(schema, side.lm)

        def job(tell: Tell) -> Job:
            return Job(
                tenant=request.tenant,
                sampling=sampling,
                begin=partial(self._start, prompt),
                tell=tell,
                keep=partial(self._keep, prompt),
                voice=Speech(side.lm, sampling, form),
                submitted=asked,
            )

        said = ""
        async with aclosing(heard(self._lanes[request.model], job)) as events:
            async for event in events:
                said += event.text if isinstance(event, Piece) else ""
                if isinstance(event, Done):
                    self._look_ahead(request, said)
                yield event

    async def _form(self, schema: str, lm: LanguageModel) -> Form:
        """Prepare a schema, one at a time: some take seconds, and nobody else's request shall wait for a thread.

        Raises `Unavailable` where the drain's time has passed before it was its turn.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._forming, form_of, schema, lm)
        except (asyncio.CancelledError, RuntimeError) as error:
            task = asyncio.current_task()
            if not self._forming_ended or (task is not None and task.cancelling()):
                raise
            raise Unavailable(1.0) from error

    async def _together(self, request: Request, help_: Help, asked: float) -> AsyncGenerator[Event, None]:
        """Let one model answer with single tokens of another. Raises `NoHelp` where that one can't read the prompt."""
        relay = await asyncio.to_thread(self._relay, request, help_, asked)
        self._relays += 1
        try:
            async with aclosing(relay.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._relays -= 1
            with self._counting:
                self._counts["helped_tokens"] += relay.duet.big.part.completion_tokens

    def _relay(self, request: Request, help_: Help, asked: float) -> Relay:
        sides = (self._sides[request.model], self._side(help_.model))
        prompts = {sides[0].name: self._read(request, sides[0].lm)}
        try:
            if request.sampling.json_schema is not None:
                raise Unsupported("response_format", "two models can't keep to one form")
            if request.sampling.logit_bias and not same_vocabulary(*(side.lm.tokenizer for side in sides)):
                raise Unsupported("logit_bias", "its token ids mean something else to each of two models")
            prompts[help_.model] = self._read(replace(request, model=help_.model), sides[1].lm)
        except (TooLong, Unsupported) as error:
            raise NoHelp(help_.model, error) from error
        sampling, singers = request.sampling, list[Singer]()
        for side in sides:
            tokens = len(prompts[side.name].reading)
            singers.append(Singer(side.name, side.lm, tokens))
            sampling = clipped(sampling, tokens, side.lm.geometry.max_positions)
        duet = Duet(singers[0], singers[1], sampling, help_.from_nats)
        return Relay(duet, prompts, self._lanes, self._switch, self._keep, self._counted, asked)

    def _side(self, name: str) -> Side:
        if name not in self._sides:
            raise UnknownModel(f"no model {name!r} here; there are: {', '.join(self._sides)}")
        return self._sides[name]

    def _look_ahead(self, request: Request, said: str) -> None:
        """Let the models that may be asked next be made ready for this conversation with its answer.

        The one that has answered needs nothing made ready: not what another one answered here first, and a cascade discarded.
        """
        if request.model in self._ahead:
            self._ahead[request.model].forget(request)
        for source, target in self._ways:
            if source == request.model and target in self._ahead:
                self._ahead[target].put(answered(request, said, target))
                self._lanes[target].look_again()

    def _read(self, request: Request, lm: LanguageModel) -> Prompt:
        """Check a request, tokenise it and bring back from disk what helps; neither on the event loop nor where models run."""
        check(request.sampling, lm.geometry.vocab_size)
        _check_dial(request)
        _check_tools(request, lm)
        prompt = prompt_of(request, lm)
        limit = lm.geometry.max_positions
        if limit is not None and len(prompt.reading) >= limit:
            raise TooLong(len(prompt.reading), limit)
        prompt = self._switch.as_others_read(prompt)
        self._switch.recall(prompt)
        return prompt

    def _start(self, prompt: Prompt) -> Steps[Started]:
        started = yield from self._switch.start(prompt)
        # Kept now too, for those who ask the same before the answer is finished.
        self._keep(prompt, started.state)
        self._counted(started.begun, first=True)
        return started

    def _counted(self, begun: Begun, *, first: bool) -> None:
        """Count how a model came to know what it goes on from; `first`: of a request."""
        with self._counting:
            self._counts["requests"] += first
            self._counts["fallbacks"] += begun.fallback is not None
            self._counts["switches_translated"] += begun.translated_tokens > 0
            for kind in KINDS:
                self._counts[f"{kind}_tokens"] += getattr(begun, f"{kind}_tokens")

    def _keep(self, prompt: Prompt, state: ModelState, *, ahead: bool = False) -> None:
        name, lm = prompt.request.model, self._sides[prompt.request.model].lm
        self._sessions.keep(prompt.place(name), of_one_angle(lm, len(prompt.reading), state), lm.geometry, ahead=ahead)

    def stats(self) -> Mapping[str, float]:
        """Return counters since the start, and gauges: `queued`, `running`, `cache_bytes`, `cache_snapshots`.

        They count what models did: every choice of a request, and both models of an answer of two. `requests` are those that have
        begun, `left_queue` those whose client left before, `translations_failed` includes those where another source did it.
        With a disk `spill_…` too, with healing `heal_…`, with translating ahead `ahead_…`.
        """
        total = Counter[str]()
        for lane in self._lanes.values():
            total.update(lane.load)
            total.update(dict(lane.counts))
        with self._counting:
            total.update(self._counts)
        total["translations_failed"] = self._switch.failed_translations
        total.update(self._shelf.stats() if self._shelf else {})
        for healer in self._healers:
            total.update(healer.counts)
        for ahead in self._ahead.values():
            total.update(ahead.counts)
        gauges = {"cache_bytes": self._sessions.num_bytes, "cache_snapshots": len(self._sessions)}
        return {name: float(value) for name, value in {**total, **gauges}.items()}

    async def away(self) -> Sequence[str]:
        """Return nothing: all models are here."""
        return ()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, wait for those that run, cancel what is left; the workers end before their next token."""
        self._draining = True
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and (self._relays or self._is_busy()):
            await asyncio.sleep(POLL_S)
        self._forming_ended = True
        self._forming.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(asyncio.to_thread(lane.stop, STOP_S) for lane in self._lanes.values()))
        if self._shelf:
            await asyncio.to_thread(self._shelf.close, self._sessions.all(), SAVE_S)


def _first_of(pieces: Sequence[Callable[[], float | None]]) -> float | None:
    """Do a piece of the first work that there is; return when to ask again."""
    for piece in pieces:
        again_s = piece()
        if again_s is not None:
            return again_s
    return None


def _check_links(models: Mapping[str, LanguageModel], links: Sequence[Link]) -> None:
    for link in links:
        missing = next((name for name in (link.source, link.target) if name not in models), None)
        if missing is not None:
            raise BadInput(f"a translator names the model {missing!r}, which is not served; give it with --model")
        if models[link.target].target_refusal is None:
            check_geometry(link.translator.config, models[link.source].geometry, models[link.target].geometry)


def _check_tools(request: Request, lm: LanguageModel) -> None:
    """Raise `Unsupported` where the model would not see the tools or their calls."""
    if isinstance(request.prompt, str):
        if request.tools:
            raise Unsupported("tools", "a text has no place for tools")
        return
    what = ignored(lm.tokenizer, request.prompt, request.tools)
    if what is not None:
        told = "the name of a message" if what == "name" else what
        param = "tools" if what == "tools" else "messages"
        raise Unsupported(param, f"the chat template of {request.model} has no place for {told}")


def _check_dial(request: Request) -> None:
    dial = request.dial
    if dial.mode not in ("auto", "translate", "reprefill") or dial.sink < 0 or dial.tail < 1:
        raise BadInput(
            f"mode {dial.mode!r}, sink {dial.sink}, tail {dial.tail}; give auto, translate or reprefill, at least 0 and 1"
        )
