"""From logits to text: one request's choice of tokens, its stop strings, and what is told of each token.

Knows one row at a time, so nothing here depends on who decodes beside it. Does not know caches or threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.generation import check_sampling, end_ids, seeded
from kvlingo.models import LanguageModel
from kvlingo.serve.protocol import Piece, Sampling, TokenInfo
from kvlingo.spelling import spelling_of

CPU = torch.device("cpu")
LEAST_TEMPERATURE = 1e-6  # below it the likeliest token is certain, and a float32 division may say 0/0
BROKEN = "\N{REPLACEMENT CHARACTER}"


def check(sampling: Sampling, vocabulary: int) -> None:
    """Raise `BadInput` for what can't be sampled with."""
    check_sampling(sampling.max_new_tokens, sampling.temperature, sampling.top_p)
    if sampling.top_k is not None and sampling.top_k < 1:
        raise BadInput(f"top_k is {sampling.top_k}; give at least 1, or leave it out")
    if not 0 <= sampling.min_p <= 1:
        raise BadInput(f"min_p is {sampling.min_p}; give a number from 0 to 1")
    if any(not text for text in sampling.stop):
        raise BadInput("a stop string is empty; leave it out")
    unknown = next((i for i in sampling.logit_bias if not 0 <= i < vocabulary), None)
    if unknown is not None:
        raise BadInput(f"logit_bias names token {unknown}, the model has {vocabulary}; leave it out")


# --- which token -----------------------------------------------------------------------------------------------------


def adjust(logits: Tensor, sampling: Sampling, said: Counter[int]) -> Tensor:
    """Return logits [vocabulary] with bias and penalties: logit + bias - [said]·presence - times said·frequency."""
    adjusted = logits.clone()
    if sampling.logit_bias:
        adjusted[list(sampling.logit_bias)] += adjusted.new_tensor(list(sampling.logit_bias.values()))
    if said and (sampling.presence_penalty or sampling.frequency_penalty):
        times = adjusted.new_tensor(list(said.values()))
        adjusted[list(said)] -= sampling.presence_penalty + times * sampling.frequency_penalty
    return adjusted


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return probabilities [vocabulary]: the temperature's, cut to `top_k`, then to `top_p`, then to `min_p`.

    Each cut reads what the one before it left, scaled to 1: nucleus sampling (arXiv 1904.09751) keeps the token that crosses
    `top_p`; `min_p` (arXiv 2407.01082) is relative to the likeliest token.
    """
    probabilities = ((logits - logits.max()) / max(sampling.temperature, LEAST_TEMPERATURE)).softmax(-1)
    ordered, index = probabilities.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k :] = 0
        ordered = ordered / ordered.sum()
    if sampling.top_p < 1:
        ordered[1:][(ordered.cumsum(-1) - ordered)[1:] >= sampling.top_p] = (
            0  # the likeliest stays, however small `top_p` is
        )
    ordered[ordered < sampling.min_p * ordered[0]] = 0
    return torch.zeros_like(probabilities).scatter(-1, index, ordered / ordered.sum())


# --- text ------------------------------------------------------------------------------------------------------------


class TextStream:
    """Decode ids to text piece by piece; characters split over tokens come out whole.

    Only the last tokens are decoded again each time: from the last place but one where no character was cut, so that a
    decoder which drops a first space does not drop others.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self._ids = decode, list[int]()
        self._start, self._given = 0, 0

    def add(self, token: int) -> str:
        """Return the text that `token` completes, maybe none."""
        self._ids.append(token)
        return self._advance(half_too=False)

    def flush(self) -> str:
        """Return what is left, even if it is half a character."""
        return self._advance(half_too=True)

    def _advance(self, *, half_too: bool) -> str:
        before = self._decode(self._ids[self._start : self._given])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or (text.endswith(BROKEN) and not half_too):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return text[len(before) :]


class StopText:
    """Cut text at the stop string that is complete first, however the text comes in pieces; hold back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held, self.stopped = tuple(stop), "", False

    def add(self, text: str) -> str:
        """Return the text that can be told; after a stop string, nothing any more."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """Return what was held back: it became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class _Told:
    """A token's information with the characters [start, stop) of all text that it added."""

    info: TokenInfo
    start: int
    stop: int


class Speech:
    """What one request says: takes logits, chooses, and gives pieces of text until it is finished.

    Fields:
        ids: every chosen token, the one that ended it included.
        finish_reason: None while it goes on.
    """

    def __init__(self, lm: LanguageModel, sampling: Sampling) -> None:
        self.ids: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._sampling, self._tokenizer = sampling, lm.tokenizer
        self._ends, self._known = end_ids(lm), len(lm.tokenizer)
        self._generator = seeded(CPU, sampling.seed)
        self._said: Counter[int] = Counter()
        self._text = TextStream(lambda ids: str(lm.tokenizer.decode(ids, skip_special_tokens=True)))
        self._stop = StopText(sampling.stop)
        self._read, self._emitted = 0, 0
        self._waiting: list[_Told] = []

    def next(self, logits: Tensor) -> Piece:
        """Choose the next token from logits [vocabulary]; return what can be told now, maybe nothing."""
        logits = logits.to(CPU, torch.promote_types(logits.dtype, torch.float32)).clone()
        logits[self._known :] = -torch.inf  # rows that only pad the embedding: the tokenizer has no token for them
        token = self._choose(logits)
        self.ids.append(token)
        self._said[token] += 1
        ended = token in self._ends
        text = "" if ended else self._text.add(token)
        if ended:
            self.finish_reason = "stop"
        elif len(self.ids) >= self._sampling.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            text += self._text.flush()
        if self._sampling.top_logprobs is not None and not ended:
            self._waiting.append(_Told(self._inform(logits, token), self._read, self._read + len(text)))
        self._read += len(text)
        return self._tell(text)

    def _tell(self, text: str) -> Piece:
        told = self._stop.add(text)
        if self._stop.stopped:
            self.finish_reason = "stop"
        elif self.finish_reason:
            told += self._stop.flush()
        self._emitted += len(told)
        if self._stop.stopped:
            ready = [t for t in self._waiting if t.start < self._emitted]
        elif self.finish_reason:
            ready = self._waiting
        else:
            ready = [t for t in self._waiting if t.stop <= self._emitted]
        self._waiting = [] if self.finish_reason else self._waiting[len(ready) :]
        return Piece(told, tuple(t.info for t in ready))

    def _choose(self, logits: Tensor) -> int:
        adjusted = adjust(logits, self._sampling, self._said)
        if self._sampling.temperature == 0:
            return int(adjusted.argmax())
        return int(torch.multinomial(distribution(adjusted, self._sampling), 1, generator=self._generator))

    def _inform(self, logits: Tensor, token: int) -> TokenInfo:
        """Say what the model thought of a token, before bias, penalties and temperature."""
        logprobs = logits.log_softmax(-1)
        count = min(self._sampling.top_logprobs or 0, self._known)
        values, tokens = logprobs.topk(count)
        top = tuple((_text_of(self._tokenizer, i), v) for i, v in zip(tokens.tolist(), values.tolist(), strict=True))
        spelled = spelling_of(self._tokenizer).spell([token])[0]
        return TokenInfo(token, spelled.decode(errors="replace"), tuple(spelled), float(logprobs[token]), top)


def _text_of(tokenizer: Any, token: int) -> str:
    return spelling_of(tokenizer).spell([token])[0].decode(errors="replace")
