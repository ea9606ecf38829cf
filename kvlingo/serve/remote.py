"""The engine whose models are vLLM servers: the same answers and figures, and a switch says which kept cache to go on from.

Knows which server has which model, and what came of each request. Does not know HTTP on either side: `upstream` speaks to
servers, the gateway to clients. A client names no cache: ids are drawn here, tenants are told to servers as salts that no client
sees.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from kvlingo.errors import BadInput
from kvlingo.serve.ledger import Ledger, Owner, Record, plain_text
from kvlingo.serve.passing import Json, Way, are_alike, body_of, choose_way, contents_for, salt_of
from kvlingo.serve.protocol import (
    Away,
    Begun,
    Broken,
    Busy,
    Done,
    Event,
    Finish,
    Message,
    ModelInfo,
    Piece,
    Request,
    Sampling,
    TokenInfo,
    TooLong,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from kvlingo.serve.upstream import About, Chunk, Served, Upstream

START_S, START_LOOK_S, START_TOLD_S = 1800.0, 1.0, 30.0
"""How long servers may take to come up, how often they are asked, and how often it is said that they are waited for."""
REFUSED_S = 600.0
"""So long a hand-over that can't be is not tried again: the server may have been started anew by then, with other translators."""
POLL_S = 0.02
KINDS = ("native", "translated", "recomputed")
FINISHES: Mapping[str, Finish] = {"end": "stop", "stop": "stop", "length": "length"}
LASTING = {"no_translator", "other_model", "tokenizer", "bad_request"}
"""Reasons of a connector that hold for all hand-overs between two models."""
UNQUOTED = {"text": "what the two models have read can't be aligned"}
"""Said in place of a connector's own sentence, where that may quote the conversation: what is told goes into logs too."""
UNTOLD = "untold: the server did not say what it made of the kept cache"
NO_WAY = (
    "no_connector: the server of {} goes on from no kept cache, or can't tell what came of it (docs/vllm.md: translators, "
    "and --middleware kvlingo.serve.external.headers.RouterHeaders)"
)


@dataclass
class Place:
    """A model and its server. `tags`: whether its template writes calls of tools between tags that are read here."""

    served: Served
    server: Upstream
    about: About = field(default_factory=About)
    tags: bool | None = None
    open: Counter[str] = field(default_factory=Counter)


@dataclass
class Hearing:
    """What has come of one answer so far.

    Fields:
        asked: when the request came.
        key: under which id its server keeps it, or None.
    """

    request: Request
    prompt_ids: Sequence[int]
    way: Way
    key: str | None
    asked: float
    told: Json | None = None
    begun: Begun | None = None
    said: list[str] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("q"))
    first_at: float | None = None
    finish: str | None = None
    completion_tokens: int | None = None

    @property
    def applied(self) -> bool:
        """Tell whether the server went on from the kept cache; where it did not say, it is taken to have done so."""
        return self.way.record is not None and (self.told is None or self.told.get("status") == "applied")


class RemoteEngine:
    """Answers by vLLM servers.

    Args:
        places: models by name, as `find_places` returns them.
        max_open: choices of one tenant that are asked for at once, for each model.
        max_bytes: of what is remembered of conversations.
        secret: what tenants' salts are made from.
    """

    def __init__(self, places: Mapping[str, Place], *, max_open: int, max_bytes: int, secret: bytes) -> None:
        if not places:
            raise BadInput("the servers serve no model; start them with one")
        self._places, self._max_open, self._secret = dict(places), max_open, secret
        self._ledger = Ledger(max_bytes)
        self._refused: dict[tuple[str, str], tuple[str, float]] = {}
        counted = ("requests", "fallbacks", "switches_translated", "cancelled", *(f"{kind}_tokens" for kind in KINDS))
        self._counts = Counter[str](dict.fromkeys(counted, 0))
        self._draining = self._ending = False
        self._waiting: set[asyncio.Timeout] = set()

    # --- what is served ---

    def models(self) -> Sequence[ModelInfo]:
        """List the models."""
        return [
            ModelInfo(
                name, place.served.max_tokens, place.served.created, place.about.loads and not place.served.adapter
            )
            for name, place in self._places.items()
        ]

    async def away(self) -> Sequence[str]:
        """Ask all servers what they serve; return the models that none serves now."""
        servers = list({place.server for place in self._places.values()})
        found = await asyncio.gather(*(look_at(server) for server in servers))
        here = {served.name: (served, about) for all_of_one, about in found for served in all_of_one}
        for name in here.keys() & self._places.keys():
            self._places[name].served, self._places[name].about = here[name]
        return [name for name in self._places if name not in here]

    def stats(self) -> Mapping[str, float]:
        """Return counters since the start, and gauges."""
        gauges = {
            "running": sum(sum(place.open.values()) for place in self._places.values()),
            "queued": 0,
            "cache_snapshots": len(self._ledger),
            "cache_bytes": self._ledger.num_bytes,
        }
        return {name: float(value) for name, value in {**self._counts, **gauges}.items()}

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, wait for those that run, cancel what is left."""
        self._draining = True
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and self.stats()["running"]:
            await asyncio.sleep(POLL_S)
        self._ending = True
        for each in self._waiting:
            each.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        for server in {place.server for place in self._places.values()}:
            await server.close()

    # --- one request ---

    async def run(self, request: Request) -> AsyncIterator[Event]:
        """Answer one request; closing the iterator cancels it, over there too.

        Raises before the first event: `UnknownModel`, `Unavailable`, `Away`, `Busy`, `TooLong`, `Unsupported`, `BadInput`,
        `Broken`.
        """
        place = self._places.get(request.model)
        if place is None:
            raise UnknownModel(f"no model {request.model!r} here; there are: {', '.join(self._places)}")
        if self._draining:
            raise Unavailable(1.0)
        check(request)
        if place.open[request.tenant] >= self._max_open:
            raise Busy(1.0)
        place.open[request.tenant] += 1
        try:
            async with aclosing(self._answer(request, place)) as events:
                async for event in events:
                    yield event
        finally:
            place.open[request.tenant] -= 1

    async def _answer(self, request: Request, place: Place) -> AsyncGenerator[Event, None]:
        asked = time.perf_counter()
        ids, limit = await read(request, place)
        if len(ids) >= limit:
            raise TooLong(len(ids), limit)
        calls = bool(request.tools) and await writes_tags(place)
        room = min(request.sampling.max_new_tokens, limit - len(ids))
        sampling = replace(request.sampling, max_new_tokens=room)
        hearing, wish = await self._ask_for(request, place, ids, asked)
        body = body_of(request.model, ids, sampling, wish, salt_of(self._secret, request.tenant))
        try:
            async with aclosing(place.server.say(request.model, body, wish.get("tell"))) as chunks:
                async for event in self._heard(hearing, chunks, sampling, calls=calls):
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            self._counts["cancelled"] += 1
            raise
        finally:
            self._remember(hearing)
        yield done(hearing)

    async def _ask_for(self, request: Request, place: Place, ids: Sequence[int], asked: float) -> tuple[Hearing, Json]:
        """Decide what a request asks of the connector."""
        text, owner = plain_text(request.prompt, tools=request.tools), Owner(request.tenant, request.conversation)
        sources = self._sources(request.model)
        way = choose_way(request, text, len(ids), owner, self._ledger, sources, time.monotonic())
        if not sources and request.dial.mode == "translate":
            way = Way(fallback=NO_WAY.format(request.model))
        wish: Json = {"tell": secrets.token_hex(16)} if place.about.tells else {}
        if way.record is not None:
            try:
                if not are_alike(way.record, ids, text):
                    server = self._places[way.record.model].server
                    wish |= await contents_for(way.record, server, request, ids, place.server)
                wish["load"] = way.record.key
            except BadInput as error:
                way = Way(fallback=f"text: {error}")
        key = secrets.token_hex(16) if way.record is None and self._keeps(request.model) else None
        return Hearing(request, ids, way, key, asked), wish | ({"save": key} if key else {})

    def _sources(self, target: str) -> dict[str, str | None]:
        """Return the models that may hand over to one, each with why it can't for now; none where its server takes nothing."""
        about, now = self._places[target].about, time.monotonic()
        if not (about.loads and about.tells) or self._places[target].served.adapter:
            return {}
        keeping = [name for name, place in self._places.items() if name != target and place.about.keeps]
        refused = {name: self._refused.get((name, target), ("", 0.0)) for name in keeping}
        return {name: why if until > now else None for name, (why, until) in refused.items()}

    def _keeps(self, name: str) -> bool:
        """Tell whether what a model reads is kept: its server does so, and another may go on from it."""
        others = [other for other in self._places if other != name]
        return self._places[name].about.keeps and any(self._sources(other).get(name, "no") is None for other in others)

    # --- its answer ---

    async def _heard(
        self, hearing: Hearing, chunks: AsyncGenerator[Chunk, None], sampling: Sampling, *, calls: bool
    ) -> AsyncGenerator[Event, None]:
        """Yield the events that chunks make."""
        while (chunk := await self._next(chunks)) is not None:
            hearing.told = chunk.told or hearing.told
            if hearing.begun is None:
                hearing.begun = begun_of(hearing, calls=calls)
                self._count(hearing.begun)
                self._learn(hearing)
                yield hearing.begun
            if chunk.ids and hearing.first_at is None:
                hearing.first_at = time.perf_counter()
            hearing.said.append(chunk.text)
            hearing.ids.extend(chunk.ids)
            hearing.finish = chunk.finish or hearing.finish
            if chunk.completion_tokens is not None:
                hearing.completion_tokens = chunk.completion_tokens
            tokens = token_infos(chunk, sampling)
            if chunk.text or tokens:
                yield Piece(chunk.text, tokens)

    async def _next(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
        """Return the next chunk, None after the last. Raises `Unavailable` where the server ends first."""
        if self._ending:
            raise Unavailable(1.0)
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting.add(waiting)
                try:
                    return await anext(chunks, None)
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            raise Unavailable(1.0) from None

    def _count(self, begun: Begun) -> None:
        self._counts["requests"] += 1
        self._counts["fallbacks"] += begun.fallback is not None
        self._counts["switches_translated"] += begun.translated_tokens > 0
        for kind in KINDS:
            self._counts[f"{kind}_tokens"] += getattr(begun, f"{kind}_tokens")

    def _learn(self, hearing: Hearing) -> None:
        """Remember hand-overs that can't be, whatever is said in them."""
        record, told = hearing.way.record, hearing.told or {}
        if record is not None and told.get("status") == "unsupported" and told.get("reason") in LASTING:
            why = f"{told['reason']}: {told.get('why')}"
            self._refused[record.model, hearing.request.model] = (why, time.monotonic() + REFUSED_S)

    def _remember(self, hearing: Hearing) -> None:
        """Write down what the server holds now, also of an answer that was cut off."""
        if hearing.begun is None:
            return
        request = hearing.request
        of = hearing.way.record if hearing.applied else None
        until = self._places[request.model].about.expires_s + time.monotonic() if of is None else of.until
        self._ledger.put(
            Record(
                owner=Owner(request.tenant, request.conversation),
                model=request.model,
                text=plain_text(request.prompt, "".join(hearing.said), request.tools),
                key=hearing.key,
                of=of,
                ids=array("q", hearing.prompt_ids) + hearing.ids,
                prompt_tokens=len(hearing.prompt_ids),
                prompt=request.prompt,
                tools=tuple(request.tools),
                until=until,
            )
        )


# --- what a request asks ---------------------------------------------------------------------------------------------


def check(request: Request) -> None:
    """Raise `Unsupported` for what no server is asked for by one request."""
    if request.help is not None:
        raise Unsupported("model", "single tokens of another model are for models in one process")
    if request.dial.sink != 1:
        raise Unsupported("kvlingo.sink", "the server of the model has its own (kv_connector_extra_config)")
    if request.dial.tail != 1:
        raise Unsupported("kvlingo.tail", "the server of the model has its own (kv_connector_extra_config)")


async def read(request: Request, place: Place) -> tuple[list[int], int]:
    """Return a request as its model reads it, and how many tokens it reads in all. Raises as `Upstream`, and `Unsupported`."""
    server, name, prompt = place.server, request.model, request.prompt
    if isinstance(prompt, str):
        if request.tools:
            raise Unsupported("tools", "a text has no place for tools")
        return await server.text_ids(name, prompt)
    ids, limit = await server.chat_ids(name, prompt, request.tools)
    if request.tools and ids == (await server.chat_ids(name, prompt))[0]:
        raise Unsupported("tools", f"the chat template of {name} has no place for tools")
    if any(message.get("tool_calls") for message in prompt):
        silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in prompt]
        if ids == (await server.chat_ids(name, silent, request.tools))[0]:
            raise Unsupported("messages", f"the chat template of {name} has no place for tool_calls")
    return ids, limit


async def writes_tags(place: Place) -> bool:
    """Tell whether a model's template writes calls of tools as JSON between tags; it is asked once."""
    if place.tags is None:
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        chat: list[Message] = [
            {"role": "user", "content": "f"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        text = ""
        with suppress(BadInput):  # a template that refuses this has another form of calls
            ids, _ = await place.server.chat_ids(place.served.name, chat, begins=False)
            text = await place.server.text_of(place.served.name, ids)
        place.tags = "<tool_call>" in text and "</tool_call>" in text
    return place.tags


# --- what comes back -------------------------------------------------------------------------------------------------


def begun_of(hearing: Hearing, *, calls: bool) -> Begun:
    """Say how the model came to know the prompt.

    Where the server does not say, nothing counts as native; with a kept cache all counts as translated, the less trusted.
    """
    told, way, total = hearing.told, hearing.way, len(hearing.prompt_ids)
    counts = dict((told or {}).get("prompt") or {})
    fallback = way.fallback
    if way.record is not None and told is None:
        fallback, counts = UNTOLD, {"translated": total - 1}
    elif way.record is not None and told is not None and not hearing.applied:
        fallback = f"{told.get('reason')}: {UNQUOTED.get(str(told.get('reason')), told.get('why'))}"
    native, translated = int(counts.get("native", 0)), int(counts.get("translated", 0))
    record = way.record
    source = record.model if record is not None and (way.fresh or translated or fallback) else None
    return Begun(
        model=hearing.request.model,
        prompt_tokens=total,
        native_tokens=native,
        translated_tokens=translated,
        recomputed_tokens=total - native - translated,
        hops=int(hearing.applied),
        source=source,
        fallback=fallback,
        switched_from=source,
        calls=calls,
    )


def token_infos(chunk: Chunk, sampling: Sampling) -> tuple[TokenInfo, ...]:
    """Return a chunk's tokens with their log-probabilities; the special token that ends an answer is none of it."""
    told = chunk.logprobs
    if sampling.top_logprobs is None or not told:
        return ()
    count = len(told["tokens"]) - (chunk.finish == "end")
    tops = told.get("top_logprobs") or [None] * len(told["tokens"])
    found = []
    for place in range(count):
        likeliest = sorted((tops[place] or {}).items(), key=lambda each: -each[1])[: sampling.top_logprobs]
        text = str(told["tokens"][place])
        known = None if "\N{REPLACEMENT CHARACTER}" in text else tuple(text.encode())
        token = chunk.ids[place] if place < len(chunk.ids) else -1
        found.append(TokenInfo(token, text, known, float(told["token_logprobs"][place]), tuple(likeliest)))
    return tuple(found)


def done(hearing: Hearing) -> Done:
    """Say how an answer ended. Raises `Broken` for one that did not."""
    finish = FINISHES.get(hearing.finish or "")
    if finish is None or hearing.begun is None:
        raise Broken(hearing.request.model, "ended its answer without saying why")
    tokens = len(hearing.ids) if hearing.completion_tokens is None else hearing.completion_tokens
    first_at = hearing.first_at or time.perf_counter()
    return Done(finish, tokens, 1e3 * (first_at - hearing.asked))


# --- the servers -----------------------------------------------------------------------------------------------------


async def look_at(server: Upstream) -> tuple[list[Served], About]:
    """Return what a server serves now and what its connector does; nothing where it does not answer."""
    try:
        served, about = await asyncio.gather(server.served(), server.about())
    except (Away, Broken, Busy, BadInput, Unsupported):
        return [], About()
    return served, about


def find_places(
    urls: Sequence[str], key: str | None, tell: Callable[[str], None], wait_s: float = START_S
) -> dict[str, Place]:
    """Wait until all servers answer; return their models by name. Raises `BadInput` where they don't, or two serve one name."""
    return asyncio.run(_find_places(urls, key, tell, wait_s))


async def _find_places(
    urls: Sequence[str], key: str | None, tell: Callable[[str], None], wait_s: float
) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for url in urls:
        served, about = await _wait_for(url, key, tell, wait_s)
        server = Upstream(url, key)  # its connections belong to the loop that serves
        for each in served:
            if each.name in places:
                raise BadInput(
                    f"{places[each.name].server.url} and {url} both serve {each.name!r}; give each model one URL "
                    "(--served-model-name; a balancer's, where it has several servers)"
                )
            places[each.name] = Place(each, server, about)
            ways = [
                word for word, is_so in (("keeps caches", about.keeps), ("goes on from them", about.loads)) if is_so
            ]
            what = ", ".join(ways) or "no connector that says so: each switch reads again"
            tell(f"{each.name}: {url}, {what}" + ("" if about.tells or not ways else "; can't tell what comes of it"))
    return places


async def _wait_for(
    url: str, key: str | None, tell: Callable[[str], None], wait_s: float
) -> tuple[list[Served], About]:
    server, until, said_at = Upstream(url, key), time.monotonic() + wait_s, 0.0
    try:
        while True:
            try:
                return await server.served(), await server.about()
            except Away:
                now = time.monotonic()
                if now > until:
                    raise BadInput(f"{url} does not answer; is vLLM up there, and the URL right?") from None
                if now > said_at + START_TOLD_S:
                    tell(f"waiting for {url}")
                    said_at = now
            except (Broken, Busy, BadInput, Unsupported) as error:
                raise BadInput(f"{url}: {error}") from error
            await asyncio.sleep(START_LOOK_S)
    finally:
        await server.close()
