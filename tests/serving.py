"""What the tests of the gateway's engine share: tiny engines, whole answers, and the cold answer they must equal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from kvlingo.language_model import LanguageModel, prefill
from kvlingo.models import wrap
from kvlingo.serve.disk import Disk
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.protocol import Begun, Dial, Done, Message, Piece, Request, Sampling
from kvlingo.serve.switching import Link, Rule
from kvlingo.states import read_conversation
from kvlingo.translator import Translator, identity_translator
from tests import tiny

ALWAYS = Rule(reprefill_up_to=0, translate_from=1)
NO_MODEL_PICKS = -1e4
T = TypeVar("T")


@cache
def printable_only(lm: LanguageModel) -> dict[int, float]:
    """Return a bias that leaves letters only: what is said is then read again as the same ids."""
    letters = set(lm.tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz")))
    return {i: NO_MODEL_PICKS for i in range(len(lm.tokenizer)) if i not in letters}


@cache
def letters_model(family: str = "llama") -> LanguageModel:
    """Return a tiny model that says letters only, by a bias of its own: no request has to carry one."""
    lm = tiny.language_model(family)
    model = tiny.clone(lm.model)
    bias = torch.zeros(lm.geometry.vocab_size, dtype=lm.dtype)
    bias[list(printable_only(lm))] = NO_MODEL_PICKS
    bias[len(lm.tokenizer) :] = NO_MODEL_PICKS
    model.lm_head.register_parameter("bias", torch.nn.Parameter(bias))
    letters = wrap(model, lm.tokenizer, name=f"{family}-letters")
    tiny.assert_context_matters(letters)
    return letters


def greedy(lm: LanguageModel, count: int = 6, **changes: Any) -> Sampling:
    """Return greedy sampling of letters that tells every id."""
    return Sampling(
        **{
            "max_new_tokens": count,
            "temperature": 0.0,
            "top_logprobs": 0,
            "logit_bias": printable_only(lm),
            **changes,
        }
    )


@contextlib.contextmanager
def twin_engine(
    family: str | LanguageModel = "llama",
    *,
    translator: Translator | None = None,
    rule: Rule = ALWAYS,
    disk: Disk | None = None,
    **limits: Any,
) -> Iterator[tuple[LocalEngine, LanguageModel]]:
    """Serve one model under two names with the identity between them (or another translator)."""
    lm = tiny.language_model(family) if isinstance(family, str) else family
    translator = translator or identity_translator(lm.geometry, torch.float64)
    links = [Link("a", "b", translator), Link("b", "a", translator)]
    with closing(LocalEngine({"a": lm, "b": lm}, links, Limits(rule=rule, **limits), disk)) as engine:
        yield engine, lm


@contextlib.contextmanager
def closing(engine: LocalEngine) -> Iterator[LocalEngine]:
    """End an engine's workers when the test ends."""
    try:
        yield engine
    finally:
        asyncio.run(engine.drain(0.0))


@dataclass(frozen=True)
class Answer:
    """Everything one request was told."""

    begun: Begun
    pieces: tuple[Piece, ...]
    done: Done

    @property
    def text(self) -> str:
        """Return all text."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def ids(self) -> list[int]:
        """Return all told ids."""
        return [token.id for piece in self.pieces for token in piece.tokens]


async def answer(engine: LocalEngine, request: Request) -> Answer:
    """Run a request to its end."""
    events = [event async for event in engine.run(request)]
    begun, *pieces, done = events
    assert isinstance(begun, Begun)
    assert isinstance(done, Done)
    assert all(isinstance(piece, Piece) for piece in pieces)
    return Answer(begun, tuple(p for p in pieces if isinstance(p, Piece)), done)


def ask(engine: LocalEngine, *requests: Request) -> list[Answer]:
    """Run requests side by side to their ends."""

    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*(answer(engine, request) for request in requests))

    return within(all_of_them())


def within(work: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
    """Run to the end, or fail."""

    async def limited() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(limited())


def settled(engine: LocalEngine, seconds: float = 30.0) -> Mapping[str, float]:
    """Return the figures once nothing waits or runs: who leaves last is seen at the lane's next step."""
    until = time.monotonic() + seconds
    while (stats := engine.stats())["queued"] or stats["running"]:
        assert time.monotonic() < until, stats
        time.sleep(0.005)
    return stats


def request_for(
    lm: LanguageModel, model: str, messages: Sequence[Message] | str, *, dial: Dial | None = None, **changes: Any
) -> Request:
    """Return a greedy request."""
    prompt = messages if isinstance(messages, str) else tuple(messages)
    count = changes.pop("count", 6)
    return Request(
        **{"model": model, "prompt": prompt, "sampling": greedy(lm, count), "dial": dial or Dial(), **changes}
    )


@torch.no_grad()
def cold_ids(
    lm: LanguageModel, messages: Sequence[Message] | str, count: int = 6, *, letters_only: bool = True
) -> list[int]:
    """Return what the model says after reading everything anew: nothing of the engine is used."""
    prompt = messages if isinstance(messages, str) else [dict(m) for m in messages]
    reading = read_conversation(prompt, lm, add_generation_prompt=True)
    letters = torch.zeros(lm.geometry.vocab_size, dtype=lm.dtype)
    if letters_only:
        letters[list(printable_only(lm))] = NO_MODEL_PICKS
    letters[len(lm.tokenizer) :] = NO_MODEL_PICKS
    done = prefill(lm, lm.ids(reading.ids))
    found: list[int] = []
    logits = done.logits[-1]
    for _ in range(count):
        found.append(int((logits + letters).argmax()))
        logits = prefill(lm, lm.ids([found[-1]]), cache=done.cache).logits[-1]
    return found


def user(content: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Return a model's message."""
    return {"role": "assistant", "content": content}
