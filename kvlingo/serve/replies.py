"""What goes back: answers, chunks of answers and errors in OpenAI's shapes, with our own `kvlingo` object beside them.

Knows the shape of OpenAI's replies. Does not know HTTP, and does not wait for anything: a `Tally` takes in what the engine tells
and a `Shape` says how it is written. Whole answers and chunks are made from the same pieces, so that both say the same.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from kvlingo.errors import BadInput
from kvlingo.serve.calls import Call, Calls, Said
from kvlingo.serve.protocol import (
    Away,
    Begun,
    Broken,
    Busy,
    Done,
    Event,
    NoRouter,
    Piece,
    TokenInfo,
    TooLong,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from kvlingo.serve.schema import Refused

Json = dict[str, Any]


# --- errors ----------------------------------------------------------------------------------------------------------


class BadBody(Exception):
    """A body that is not read, whatever it says."""

    status: ClassVar[int]
    code: ClassVar[str]


class TooLarge(BadBody):
    """A body beyond the limit."""

    status, code = 413, "request_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is larger than {limit} bytes; send less")


class TooSlow(BadBody):
    """A body that takes too long to come."""

    status, code = 408, "request_timeout"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the body did not come within {limit_s:g} s; send it again")


class WrongType(BadBody):
    """A body that does not say that it is JSON. A page can send a form anywhere without asking; JSON it can't."""

    status, code = 415, "unsupported_media_type"

    def __init__(self, kind: str) -> None:
        super().__init__(f"Content-Type is {kind[:80] or 'missing'}; send application/json")


@dataclass(frozen=True)
class Fault:
    """One error as a client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> Json:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that tell when to come back; whole seconds, at least one."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, int(-(-self.retry_after_s // 1))))}


def fault_of(error: BaseException, prompt_field: str = "messages") -> Fault:
    """Return what a client is told of an error. Of one that nobody foresaw only that it happened: its text may hold a prompt."""
    bad = "invalid_request_error"
    match error:
        case Unavailable() | Broken() | Busy():
            return fault_of_server(error)
        case Refused():
            return Fault(400, bad, str(error), error.param, error.code)
        case BadBody():
            return Fault(error.status, bad, str(error), None, error.code)
        case UnknownModel():
            return Fault(404, bad, str(error), "model", "model_not_found")
        case NoRouter():
            return Fault(400, bad, str(error), "model", "no_router")
        case TooLong():
            return Fault(400, bad, str(error), prompt_field, "context_length_exceeded")
        case Unsupported():
            return Fault(400, bad, str(error), error.param, "unsupported_parameter")
        case BadInput():
            return Fault(400, bad, str(error), prompt_field, "invalid_value")
    return Fault(
        500, "server_error", "something went wrong in the server; its log has the request's id", None, "internal"
    )


def fault_of_server(error: Busy | Unavailable | Broken) -> Fault:
    """Return what a client is told of a server, this one or a model's, that can't answer now."""
    match error:
        case Busy():
            return Fault(429, "rate_limit_error", str(error), None, "queue_full", error.retry_after_s)
        case Broken():
            return Fault(502, "server_error", str(error), None, "model_broken")
    code = "model_unavailable" if isinstance(error, Away) else "shutting_down"
    return Fault(503, "server_error", str(error), None, code, error.retry_after_s)


# --- what the engine told --------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What has been told so far of the choices of one request. `leaders`: the first choice of each prompt."""

    leaders: frozenset[int]
    begun: dict[int, Begun] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    said: dict[int, list[Said]] = field(default_factory=dict)
    readers: dict[int, Calls] = field(default_factory=dict)

    def take(self, index: int, event: Event) -> list[Said]:
        """Take one event of a choice in; return the text and the calls of tools that are certain by it."""
        found: list[Said] = []
        match event:
            case Begun():
                self.begun[index] = event
                if event.calls:
                    self.readers[index] = Calls()
            case Piece():
                self.pieces.setdefault(index, []).append(event)
                reader = self.readers.get(index)
                found = reader.add(event.text) if reader else [event.text] if event.text else []
            case Done():
                self.done[index] = event
                reader = self.readers.get(index)
                found = reader.flush() if reader else []
        self.said.setdefault(index, []).extend(found)
        return found

    def text(self, index: int) -> str:
        """Return what a choice has said, calls of tools left out."""
        return "".join(each for each in self.said.get(index, ()) if isinstance(each, str))

    def calls(self, index: int) -> list[Call]:
        """Return the tools that a choice has called."""
        return [each for each in self.said.get(index, ()) if isinstance(each, Call)]

    def finish(self, index: int) -> str:
        """Return why a choice ended, as a client is told it."""
        reason = self.done[index].finish_reason
        return "tool_calls" if reason == "stop" and self.calls(index) else reason

    def tokens(self, index: int) -> list[TokenInfo]:
        """Return the tokens told of a choice."""
        return [token for piece in self.pieces.get(index, ()) for token in piece.tokens]

    def firsts(self) -> list[Begun]:
        """Return how each prompt was read: the other choices of a prompt go on from there."""
        return [begun for index, begun in sorted(self.begun.items()) if index in self.leaders]

    def first_ends(self) -> list[Done]:
        """Return the ends of the first choices, as far as they have come: the others find the prompt read."""
        return [done for index, done in self.done.items() if index in self.leaders]

    def model(self) -> str:
        """Return the model that answers; where a router chose several, the name that was asked for."""
        first = self.firsts()[0]
        mixed = any(begun.model != first.model for begun in self.begun.values())
        return first.route.asked if mixed and first.route else first.model

    def usage(self) -> Json:
        """Return OpenAI's count of tokens; a prompt counts once however many choices it has."""
        prompt = sum(begun.prompt_tokens for begun in self.firsts())
        completion = sum(done.completion_tokens for done in self.done.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(begun.native_tokens for begun in self.firsts())},
        }

    def handover(self) -> Json:
        """Return who answered and how it came to know the prompt; of several prompts the sum, and the first reason."""
        firsts = self.firsts()
        return {
            "model": self.model(),
            "native_tokens": sum(begun.native_tokens for begun in firsts),
            "translated_tokens": sum(begun.translated_tokens for begun in firsts),
            "recomputed_tokens": sum(begun.recomputed_tokens for begun in firsts),
            "hops": max([*(b.hops for b in firsts), *(part.hops for done in self.first_ends() for part in done.parts)]),
            "source": next((begun.source for begun in firsts if begun.source), None),
            "fallback": next((begun.fallback for begun in firsts if begun.fallback), None),
            "switched_from": next((begun.switched_from for begun in firsts if begun.switched_from), None),
            "reread": next((begun.reread for begun in firsts if begun.reread), None),
            "ttft_ms": round(min((done.ttft_ms for done in self.first_ends()), default=0.0), 3),
            "queue_ms": round(min((done.queue_ms for done in self.first_ends()), default=0.0), 3),
            **self.parts(),
            **self.routes(),
        }

    def parts(self) -> Json:
        """Return what each model did for a choice that several said."""
        parts = [{"index": index, **asdict(part)} for index, done in sorted(self.done.items()) for part in done.parts]
        return {"parts": parts} if parts else {}

    def routes(self) -> Json:
        """Return why who answers which choice, where that was a router's to decide."""
        routes = [
            {"index": index, "model": begun.model, **asdict(begun.route)}
            for index, begun in sorted(self.begun.items())
            if begun.route
        ]
        return {"routes": routes} if routes else {}


# --- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How one of the two kinds of answer is written."""

    id: str
    created: int
    whole_object: str
    chunk_object: str

    def head(self, object_name: str, model: str) -> Json:
        """Return what every reply begins with."""
        return {"id": self.id, "object": object_name, "created": self.created, "model": model}

    def opening(self) -> Json | None:
        """Return the body of a choice's first chunk, where it has one of its own."""
        raise NotImplementedError

    def piece(self, text: str) -> Json:
        """Return the body of a chunk with text."""
        raise NotImplementedError

    def call(self, number: int, call: Call) -> Json:
        """Return the body of a chunk with a call of a tool, the choice's `number`-th."""
        raise NotImplementedError

    def said(self, text: str, calls: Sequence[Call]) -> Json:
        """Return the body of a choice of a whole answer."""
        raise NotImplementedError

    def logprobs(self, tokens: Sequence[TokenInfo], offset: int) -> Json:
        """Return the log-probabilities of tokens; `offset`: characters of the answer before them."""
        raise NotImplementedError


class ChatShape(Shape):
    """A chat completion."""

    def opening(self) -> Json | None:
        """Return the role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Json:
        """Return a delta; the last chunk's has no content."""
        return {"delta": {"content": text} if text else {}}

    def call(self, number: int, call: Call) -> Json:
        """Return a delta with a whole call."""
        return {"delta": {"tool_calls": [{"index": number, **chat_call(call)}]}}

    def said(self, text: str, calls: Sequence[Call]) -> Json:
        """Return the message; one that only calls has no content."""
        called = {"tool_calls": [chat_call(call) for call in calls]} if calls else {}
        content = None if calls and not text else text
        return {"message": {"role": "assistant", "content": content, "refusal": None, **called}}

    def logprobs(self, tokens: Sequence[TokenInfo], offset: int) -> Json:
        """Return one entry a token."""
        return {"content": [chat_logprob(token) for token in tokens], "refusal": None}


class TextShape(Shape):
    """A text completion."""

    def opening(self) -> Json | None:
        """Return nothing: text has no role."""
        return None

    def piece(self, text: str) -> Json:
        """Return the text."""
        return {"text": text}

    def said(self, text: str, calls: Sequence[Call]) -> Json:
        """Return the text; a text has no tools to call."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenInfo], offset: int) -> Json:
        """Return parallel lists, as this older kind has them."""
        starts = [offset]
        for token in tokens:
            starts.append(starts[-1] + len(token.text))
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            # The likeliest last: half characters all read the same, and of those its number stays.
            "top_logprobs": [{text: finite(value) for text, value in reversed(token.top)} for token in tokens],
            "text_offset": starts[:-1],
        }


def chat_shape() -> Shape:
    """Return the shape of a new chat completion."""
    return ChatShape(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), "chat.completion", "chat.completion.chunk")


def text_shape() -> Shape:
    """Return the shape of a new text completion."""
    return TextShape(f"cmpl-{uuid.uuid4().hex}", int(time.time()), "text_completion", "text_completion")


def chat_call(call: Call) -> Json:
    """Return a call as a message has it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_logprob(token: TokenInfo) -> Json:
    """Return one token's entry."""
    top = [{"token": text, "logprob": finite(value), "bytes": bytes_of(text)} for text, value in token.top]
    told = None if token.bytes is None else list(token.bytes)
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": told, "top_logprobs": top}


def bytes_of(text: str) -> list[int] | None:
    """Return the bytes of a token by its text; None for half a character, whose bytes the text does not tell."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold: OpenAI writes -9999 for what is as good as impossible."""
    return value if value > -9999.0 else -9999.0


# --- answers ---------------------------------------------------------------------------------------------------------


def whole(shape: Shape, tally: Tally, with_logprobs: bool) -> Json:
    """Return the whole answer."""
    choices = [
        {
            "index": index,
            **shape.said(tally.text(index), tally.calls(index)),
            "logprobs": shape.logprobs(tally.tokens(index), 0) if with_logprobs else None,
            "finish_reason": tally.finish(index),
        }
        for index in sorted(tally.done)
    ]
    return {
        **shape.head(shape.whole_object, tally.model()),
        "choices": choices,
        "usage": tally.usage(),
        "kvlingo": tally.handover(),
    }


class Chunks:
    """Turns events into chunks. The last one, and with `include_usage` the one before, carry the `kvlingo` object."""

    def __init__(self, shape: Shape, tally: Tally, lanes: int, *, with_logprobs: bool, include_usage: bool) -> None:
        self.shape, self.tally, self.lanes = shape, tally, lanes
        self.with_logprobs, self.include_usage = with_logprobs, include_usage
        self.told: dict[int, int] = {}
        """Characters of tokens told so far, by choice."""

    def take(self, index: int, event: Event) -> Iterator[Json]:
        """Take an event in; yield the chunks that it makes."""
        told = self.tally.take(index, event)
        match event:
            case Begun():
                opening = self.shape.opening()
                if opening is not None:
                    yield self.chunk(index, event.model, opening, None, None)
            case Piece() if told or event.tokens:
                yield from self.say(index, told or [""], self.logprobs(index, event))
            case Done():
                yield from self.say(index, told, None)
                yield self.last(index)
                if self.include_usage and len(self.tally.done) == self.lanes:
                    yield self.usage()

    def say(self, index: int, told: Sequence[Said], logprobs: Json | None) -> Iterator[Json]:
        """Yield one chunk for each text and each call; the first has the log-probabilities."""
        before = len(self.tally.calls(index)) - sum(isinstance(each, Call) for each in told)
        for each in told:
            body = self.shape.call(before, each) if isinstance(each, Call) else self.shape.piece(each)
            before += isinstance(each, Call)
            yield self.chunk(index, self.model(index), body, logprobs, None)
            logprobs = None

    def model(self, index: int) -> str:
        """Return the model that answers this choice."""
        return self.tally.begun[index].model

    def logprobs(self, index: int, piece: Piece) -> Json | None:
        """Return the log-probabilities of one piece."""
        if not self.with_logprobs:
            return None
        offset = self.told.get(index, 0)
        self.told[index] = offset + sum(len(token.text) for token in piece.tokens)
        return self.shape.logprobs(piece.tokens, offset)

    def chunk(self, index: int, model: str, body: Mapping[str, Any], logprobs: Json | None, finish: str | None) -> Json:
        """Return one chunk."""
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.include_usage else {}
        return {**self.shape.head(self.shape.chunk_object, model), "choices": [choice], **usage}

    def last(self, index: int) -> Json:
        """Return a choice's last chunk."""
        chunk = self.chunk(index, self.model(index), self.shape.piece(""), None, self.tally.finish(index))
        return {**chunk, "kvlingo": self.tally.handover()} if len(self.tally.done) == self.lanes else chunk

    def usage(self) -> Json:
        """Return the chunk that has no choice and counts tokens."""
        head = self.shape.head(self.shape.chunk_object, self.tally.model())
        return {**head, "choices": [], "usage": self.tally.usage(), "kvlingo": self.tally.handover()}
