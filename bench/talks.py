"""Conversations written down beforehand, and what holds them: an HTTP client, or the engine itself.

A talk is made of its seed alone: what is asked, of which model, streamed or not, and where its client goes away. What a server
answers becomes part of the messages, so that a wrong answer is seen in all that follow.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

import httpx

from kvlingo.serve.protocol import Begun, Done, Engine, Event, Piece, Request, Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

MODELS = ("a", "b")
ANSWER_TOKENS = 8
MOST_MESSAGES = 21
"""A talk that has grown so long goes back to its beginning and on from there: another branch."""
SECONDS = 300.0

Message = tuple[str, str]
"""Role and content."""
Deed = Literal["answer", "cancel", "leave"]


@dataclass(frozen=True)
class Turn:
    """One thing that a client does.

    Fields:
        follow_up: what it says after the answer.
        deed: wait for all of it; go away after `pieces` pieces of a stream; go away after `seconds`, whatever came.
        back_to: first messages that it keeps; the rest is taken back before it asks. None: all.
    """

    model: str
    follow_up: str
    deed: Deed = "answer"
    stream: bool = False
    pieces: int = 0
    seconds: float = 0.0
    back_to: int | None = None


@dataclass(frozen=True)
class Talk:
    """One conversation. `opening` holds a word that no other has."""

    opening: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Told:
    """What one turn was told.

    Fields:
        text: the answer, or as much of it as came before its client went away.
        whole: whether it came to its end.
        error: status and code of a refusal.
        queue_ms, ttft_ms: the server's own figures.
    """

    model: str
    messages: tuple[Message, ...]
    text: str
    whole: bool
    error: str | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    translated_tokens: int = 0
    fallback: str | None = None


def write_talks(seed: int, count: int, turns: int, *, leaving: float = 0.25) -> list[Talk]:
    """Write `count` talks of `turns` turns in all; `leaving` is the share of turns whose client goes away."""
    rng = random.Random(seed)
    words = rng.sample(range(10**6, 10**7), count)
    lengths = [turns // count + (number < turns % count) for number in range(count)]
    return [
        Talk(f"codeword {word}: {sentence(rng)}", tuple(write_turn(rng, leaving) for _ in range(length)))
        for word, length in zip(words, lengths, strict=True)
    ]


def write_turn(rng: random.Random, leaving: float) -> Turn:
    """Draw one turn."""
    deed: Deed = rng.choice(("cancel", "leave")) if rng.random() < leaving else "answer"
    return Turn(
        model=rng.choice(MODELS),
        follow_up=sentence(rng),
        deed=deed,
        stream=deed == "cancel" or rng.random() < 0.5,
        pieces=rng.randint(0, ANSWER_TOKENS - 2),
        seconds=rng.uniform(0.0, 0.2),
        back_to=1 + 2 * rng.randint(0, 3) if rng.random() < 0.1 else None,
    )


def sentence(rng: random.Random) -> str:
    """Draw a few made-up words."""
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 6))) for _ in range(3))


class Asker(Protocol):
    """Whoever puts a question and hears the answer."""

    async def ask(self, turn: Turn, messages: tuple[Message, ...]) -> Told:
        """Do one turn."""
        ...


async def converse(talk: Talk, asker: Asker, after_each: Callable[[], None] = lambda: None) -> list[Told]:
    """Hold one talk."""
    messages: tuple[Message, ...] = (("user", talk.opening),)
    told: list[Told] = []
    for turn in talk.turns:
        keep = 1 if len(messages) >= MOST_MESSAGES else turn.back_to
        messages = messages[:keep]
        heard = await asker.ask(turn, messages)
        told.append(heard)
        if heard.whole:
            messages = (*messages, ("assistant", heard.text), ("user", turn.follow_up))
        after_each()
    return told


async def converse_all(
    talks: Sequence[Talk], asker: Asker, after_each: Callable[[], None] = lambda: None
) -> tuple[list[Told], float]:
    """Hold all talks at once; return what was told, talk by talk, and the seconds that passed."""
    began = time.perf_counter()
    told = await asyncio.gather(*(converse(talk, asker, after_each) for talk in talks))
    return [each for one in told for each in one], time.perf_counter() - began


# --- through HTTP ----------------------------------------------------------------------------------------------------


class HttpAsker:
    """Asks over HTTP, as any client would."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def ask(self, turn: Turn, messages: tuple[Message, ...]) -> Told:
        """Do one turn."""
        body = {
            "model": turn.model,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": turn.stream,
        }
        try:
            async with asyncio.timeout(turn.seconds if turn.deed == "leave" else SECONDS):
                return await (self.streamed if turn.stream else self.whole)(turn, messages, body)
        except TimeoutError:
            if turn.deed != "leave":
                raise
            return Told(turn.model, messages, "", whole=False)

    async def whole(self, turn: Turn, messages: tuple[Message, ...], body: dict[str, object]) -> Told:
        """Ask for the answer in one piece."""
        response = await self.client.post("/v1/chat/completions", json=body)
        answer = response.json()
        if response.status_code != 200:
            return refused(turn, messages, response.status_code, answer)
        return told(turn, messages, answer["choices"][0]["message"]["content"], answer["kvlingo"])

    async def streamed(self, turn: Turn, messages: tuple[Message, ...], body: dict[str, object]) -> Told:
        """Ask for the answer as a stream; leaving the block closes the connection."""
        text, pieces, facts = "", 0, None
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return refused(turn, messages, response.status_code, json.loads(await response.aread()))
            async for line in response.aiter_lines():
                if turn.deed == "cancel" and pieces >= turn.pieces:
                    return Told(turn.model, messages, text, whole=False)
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return refused(turn, messages, 200, chunk)
                piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                text, pieces = text + piece, pieces + bool(piece)
                facts = chunk.get("kvlingo") or facts
        if facts is None:
            return Told(turn.model, messages, text, whole=False, error="the stream has no end")
        return told(turn, messages, text, facts)


def told(turn: Turn, messages: tuple[Message, ...], text: str, facts: dict[str, object]) -> Told:
    """Return a whole answer with what the server says of it."""
    names = ("queue_ms", "ttft_ms", "translated_tokens", "fallback")
    return Told(turn.model, messages, text, whole=True, **{name: facts[name] for name in names})  # type: ignore[arg-type]


def refused(turn: Turn, messages: tuple[Message, ...], status: int, answer: dict[str, dict[str, object]]) -> Told:
    """Return a refusal."""
    return Told(turn.model, messages, "", whole=False, error=f"{status} {answer['error']['code']}")


# --- without HTTP ----------------------------------------------------------------------------------------------------


class EngineAsker:
    """Asks the engine itself. Nobody goes away: this is the bound that HTTP is held against."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def ask(self, turn: Turn, messages: tuple[Message, ...]) -> Told:
        """Do one turn."""
        prompt = tuple({"role": role, "content": content} for role, content in messages)
        request = Request(turn.model, prompt, Sampling(ANSWER_TOKENS, temperature=0.0))
        events = cast("AsyncGenerator[Event, None]", self.engine.run(request))
        text, begun, done = "", None, None
        async with aclosing(events):
            async for event in events:
                match event:
                    case Begun():
                        begun = event
                    case Piece():
                        text += event.text
                    case Done():
                        done = event
        assert begun is not None
        assert done is not None
        facts: dict[str, object] = {"queue_ms": done.queue_ms, "ttft_ms": done.ttft_ms}
        facts |= {"translated_tokens": begun.translated_tokens, "fallback": begun.fallback}
        return told(turn, messages, text, facts)
