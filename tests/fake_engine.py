"""An engine without models: what it says follows from the request alone, and its faults are knobs.

With it the gateway is tested for what is the gateway's: shapes, errors, order, time. `serving` runs it behind a real server.
"""

import asyncio
import hashlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvlingo.serve.gateway import Server, make_server
from kvlingo.serve.protocol import Begun, Done, Engine, Event, ModelInfo, Piece, Request, TokenInfo, UnknownModel
from kvlingo.serve.settings import Settings
from kvlingo.serve.tracing import Spans

WORDS = (
    "red",
    " green",
    " blue",
    " grün",
    " \u05e9\u05dc\u05d5\u05dd",
    " \U0001f600",
    "\u2028",
    "\n",
    ' "quoted"',
    " end.",
)


@dataclass
class FakeEngine:
    """Answers with words drawn from a hash of model, prompt and seed; `run` keeps what it was asked."""

    prefill_s: float = 0.0
    token_s: float = 0.0
    error: Exception | None = None
    error_after: int = 0
    begun: Mapping[str, object] = field(default_factory=dict)
    silent: bool = False
    asked: list[Request] = field(default_factory=list)
    told: int = 0
    cancelled: int = 0
    running: int = 0
    drained: bool = False
    gone: Sequence[str] = ()

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("small", 512, 1_700_000_000, True), ModelInfo("org/big", None, 1_700_000_001, False)]

    def stats(self) -> Mapping[str, float]:
        return {"cache_bytes": 123.0, "queue_length": float(self.running)}

    async def away(self) -> Sequence[str]:
        return self.gone

    async def drain(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self.running and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self.drained = True

    async def run(self, request: Request) -> AsyncIterator[Event]:
        self.asked.append(request)
        self.running += 1
        try:
            async for event in self.events(request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def events(self, request: Request) -> AsyncIterator[Event]:
        if self.error and not self.error_after:
            raise self.error
        if request.model not in {info.name for info in self.models()}:
            raise UnknownModel(f"no model {request.model!r}")
        await asyncio.sleep(self.prefill_s)
        tokens = len(str(request.prompt))
        facts = {"native_tokens": tokens - 1, "translated_tokens": 0, "recomputed_tokens": 1, "hops": 0}
        yield Begun(
            **{"model": request.model, "prompt_tokens": tokens, "source": None, "fallback": None, **facts, **self.begun}  # type: ignore[arg-type]
        )
        if self.silent:
            return
        said, stopped = 0, False
        for piece in cut(words(request), request.sampling.stop):
            stopped = piece is None
            if stopped or said == request.sampling.max_new_tokens:
                break
            if self.error and said == self.error_after:
                raise self.error
            await asyncio.sleep(self.token_s)
            said, self.told = said + 1, self.told + 1
            yield Piece(str(piece), token_infos(str(piece), request.sampling.top_logprobs))
        yield Done("stop" if stopped else "length", said, 12.5)


def words(request: Request) -> Iterator[str]:
    """Yield the words of an answer; after 30 it ends."""
    sampling = request.sampling
    name = repr((request.model, request.prompt, sampling.seed if sampling.temperature else None))
    for number in range(1_000_000):
        if number == 30 and sampling.max_new_tokens < 1000:
            return
        yield WORDS[hashlib.sha256(f"{name}{number}".encode()).digest()[0] % len(WORDS)]


def cut(said: Iterator[str], stops: Sequence[str]) -> Iterator[str | None]:
    """Yield words until a stop text is in one; then, and at the end, None."""
    for word in said:
        if any(stop in word for stop in stops):
            break
        yield word
    yield None


def token_infos(text: str, top: int | None) -> tuple[TokenInfo, ...]:
    """Return what would be told of one token."""
    if top is None:
        return ()
    likeliest = tuple((f"{text}{rank}", -float(rank + 1)) for rank in range(top))
    return (TokenInfo(7, text, tuple(text.encode()), -0.5, likeliest),)


E = TypeVar("E", bound=Engine)


@dataclass
class Serving(Generic[E]):
    """A server that runs."""

    engine: E
    server: Server
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(
    engine: E, settings: Settings, spans: Spans | None = None, send_buffer_bytes: int | None = None
) -> Iterator[Serving[E]]:
    """Serve on a free port of loopback until the end of the block; a small buffer makes it feel early who does not read."""
    server = make_server(engine, settings, spans)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # its connections take it over
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < until, "the server does not start"
        time.sleep(0.01)
    try:
        yield Serving(engine, server, thread, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()
        assert not thread.is_alive(), "the server does not end"
