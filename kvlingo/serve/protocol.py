"""What the gateway asks of an engine and what an engine tells it. Values only.

Knows neither models nor HTTP: both halves of the gateway import this and not each other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Mode = Literal["auto", "translate", "reprefill"]
Message = Mapping[str, Any]
Finish = Literal["stop", "length", "turn"]
"""Why a model stops; "turn": another goes on with the same answer, which no client is told."""
AUTO = "auto"
"""The model of a request that leaves it to a router who answers."""


@dataclass(frozen=True)
class Sampling:
    """How one choice is sampled.

    Fields:
        top_logprobs: None: no log-probabilities; 0: those of the chosen tokens only.
        json_schema: what the answer must keep to, as JSON; None: nothing.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: str | None = None


@dataclass(frozen=True)
class Dial:
    """How a switch may be made, and how many first and last tokens the answering model reads itself."""

    mode: Mode = "auto"
    sink: int = 1
    tail: int = 1


@dataclass(frozen=True)
class Help:
    """Single tokens from another model, `model`: those of which the one that answers has an entropy of `from_nats` or more."""

    model: str
    from_nats: float


@dataclass(frozen=True)
class Request:
    """One choice to be answered. `conversation` pins it to what was read under the same name."""

    model: str
    prompt: str | tuple[Message, ...]
    sampling: Sampling
    dial: Dial = Dial()
    tenant: str = ""
    conversation: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    help: Help | None = None


@dataclass(frozen=True)
class Route:
    """Why this model answers a request that left it open.

    Fields:
        asked: the name that was asked for.
        discarded_tokens: what another model had said before, which nobody saw.
    """

    asked: str
    router: str
    reason: str
    discarded_tokens: int = 0


@dataclass(frozen=True)
class Begun:
    """Told before the first token.

    Fields:
        native_tokens: prompt tokens that the answering model held already; with the two others they make up the prompt.
        translated_tokens: from another model's cache, `source`.
        recomputed_tokens: the rest: sinks, tail, re-prefill.
        hops: how often the least trusted span was translated.
        fallback: why nothing was translated although it was to be, or None.
        switched_from: the model that had read most of this conversation, and more of it than this one held; None: no switch.
        reread: why a switch was read again although nothing failed, or None.
        route: how this model was chosen; None where the request named it.
        calls: whether the answer's text may hold calls of tools in a form that is known (`calls.py`).
    """

    model: str
    prompt_tokens: int
    native_tokens: int
    translated_tokens: int
    recomputed_tokens: int
    hops: int
    source: str | None
    fallback: str | None
    route: Route | None = None
    calls: bool = False
    switched_from: str | None = None
    reread: str | None = None


@dataclass(frozen=True)
class TokenInfo:
    """One chosen token, its log-probability, and the likeliest in its place. `bytes`: None where its text does not tell."""

    id: int
    text: str
    bytes: tuple[int, ...] | None
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """Text already cut at a stop string; `tokens` is empty unless log-probabilities are asked for."""

    text: str
    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True)
class Part:
    """What one of several models did for an answer.

    Fields:
        completion_tokens: of the answer, chosen by this model.
        turns: how often it took over.
        native_tokens, translated_tokens, recomputed_tokens: how it came to know the prompt and what the others said.
        fallback: why nothing was translated although it was to be, or None.
        hops: how often the least trusted of what it went on from was translated.
    """

    model: str
    completion_tokens: int = 0
    turns: int = 0
    native_tokens: int = 0
    translated_tokens: int = 0
    recomputed_tokens: int = 0
    fallback: str | None = None
    hops: int = 0


@dataclass(frozen=True)
class Done:
    """Told last.

    Fields:
        queue_ms: what passed before the model turned to the request; of an answer of several, before each turn together.
        parts: who did what, where several models said one answer.
    """

    finish_reason: Finish
    completion_tokens: int
    ttft_ms: float
    queue_ms: float = 0.0
    parts: tuple[Part, ...] = ()


Event = Begun | Piece | Done


@dataclass(frozen=True)
class ModelInfo:
    """One model of an engine.

    Fields:
        max_tokens: bounds prompt and answer together; None: unknown.
        vocabulary: the same for two models whose token ids mean the same; None: unknown.
    """

    name: str
    max_tokens: int | None
    created: int
    can_be_target: bool
    vocabulary: str | None = None


class UnknownModel(KeyError):
    """No model of this name."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoRouter(Exception):
    """`auto` where no router decides: 400 naming what there is."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"no router decides here who answers {AUTO!r}; name one of: {', '.join(names)}")


class Busy(Exception):
    """The queue is full: 429."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Unavailable(Exception):
    """The engine is shutting down: 503."""

    def __init__(self, retry_after_s: float, why: str = "the server is shutting down") -> None:
        super().__init__(f"{why}; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Away(Unavailable):
    """The server of a model, which is another one, takes no requests now: 503."""

    def __init__(self, model: str, retry_after_s: float) -> None:
        super().__init__(retry_after_s, f"the server of {model} does not answer")


class Broken(Exception):
    """The server of a model, which is another one, answered with something else than an answer: 502."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(f"the server of {model} {why}; try again, or ask another model")


class TooLong(Exception):
    """The prompt leaves no room for an answer of the model that is to answer: 400 context_length_exceeded."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, the model reads {limit} with its answer; shorten the conversation"
        )
        self.tokens, self.limit = tokens, limit


class Unsupported(Exception):
    """A field that the model can't serve, such as tools where its template has none: 400 naming it."""

    def __init__(self, param: str, reason: str = "the model that answers can't serve it") -> None:
        super().__init__(f"{param}: {reason}; leave it out")
        self.param = param


class NoHelp(Exception):
    """The model that was to help with single tokens can't read this; the other answers alone. Holds its name and why."""

    def __init__(self, model: str, why: TooLong | Unsupported) -> None:
        super().__init__(f"{model}: {why}")
        self.model, self.why = model, why


class Engine(Protocol):
    """Answers requests."""

    def models(self) -> Sequence[ModelInfo]:
        """List the models."""
        ...

    def run(self, request: Request) -> AsyncIterator[Event]:
        """Answer one request; closing the iterator cancels it. Raises the errors above, or a `KVLingoError` for bad input."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return counters and gauges."""
        ...

    async def away(self) -> Sequence[str]:
        """Return the names of models that can't answer now: where they are served elsewhere, those servers are asked."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, wait for those that run, cancel what is left."""
        ...
