"""From logits to text: one request's choice of tokens, its stop strings, and what is told of each token.

Knows one row at a time, so nothing here depends on who decodes beside it. Does not know caches or threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.generation import check_sampling, end_ids, seeded
from kvlingo.language_model import LanguageModel
from kvlingo.serve.forms import Form
from kvlingo.serve.protocol import Finish, Piece, Sampling, TokenInfo, Unsupported
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
        raise Unsupported("logit_bias", f"it names token {unknown}, the model has {vocabulary}")


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


class Picker:
    """Chooses one model's tokens for one request.

    Args:
        generator: where a request's chance comes from; two models that answer together share one.
        form: what the answer must keep to, or None.

    Fields:
        ends: the ids that end an answer.
        said: how often each token was said, for the penalties.
    """

    def __init__(
        self, lm: LanguageModel, sampling: Sampling, generator: torch.Generator, form: Form | None = None
    ) -> None:
        self.ends, self.said = end_ids(lm), Counter[int]()
        self._sampling, self._generator, self._form = sampling, generator, form
        self._tokenizer, self._known = lm.tokenizer, len(lm.tokenizer)

    def readied(self, logits: Tensor) -> Tensor:
        """Return logits [vocabulary] as all below take them: on the CPU, without tokens that the tokenizer does not know."""
        logits = logits.to(CPU, torch.promote_types(logits.dtype, torch.float32)).clone()
        logits[self._known :] = -torch.inf  # rows that only pad the embedding: the tokenizer has no token for them
        return logits

    def doubt_nats(self, logits: Tensor) -> float:
        """Return the entropy of the next token after bias and penalties; temperature and cuts are no matter of doubt."""
        return entropy_nats(adjust(logits, self._sampling, self.said))

    def pick(self, logits: Tensor) -> int:
        """Choose the next token, and count it."""
        adjusted = adjust(logits, self._sampling, self.said)
        if self._form is not None:
            adjusted[: self._known].masked_fill_(~self._form.allowed(), -torch.inf)
        if self._sampling.temperature == 0:
            token = int(adjusted.argmax())
        else:
            token = int(torch.multinomial(distribution(adjusted, self._sampling), 1, generator=self._generator))
        self.said[token] += 1
        if self._form is not None:
            self._form.take(token)
        return token

    def inform(self, logits: Tensor, token: int) -> TokenInfo | None:
        """Say what the model thought of a token, before bias, penalties and temperature; None where nobody asked."""
        if self._sampling.top_logprobs is None:
            return None
        logprobs = logits.log_softmax(-1)
        count = min(self._sampling.top_logprobs, self._known)
        values, tokens = logprobs.topk(count)
        top = tuple((_text_of(self._tokenizer, i), v) for i, v in zip(tokens.tolist(), values.tolist(), strict=True))
        spelled = spelling_of(self._tokenizer).spell([token])[0]
        return TokenInfo(token, spelled.decode(errors="replace"), tuple(spelled), float(logprobs[token]), top)


def entropy_nats(logits: Tensor) -> float:
    """Return the entropy of softmax(logits [vocabulary]) in nats: -Σ p · ln p, never below 0."""
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp()
    return max(0.0, -float((probabilities * logprobs.where(probabilities > 0, 0.0)).sum()))


class Telling:
    """What can be told of an answer's text by now: cut at a stop string, each token with the text that it added.

    Fields:
        stopped: whether a stop string has come.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = StopText(stop)
        self._read, self._emitted = 0, 0
        self._waiting: list[_Told] = []

    @property
    def stopped(self) -> bool:
        """Tell whether a stop string has come."""
        return self._stop.stopped

    def tell(self, text: str, info: TokenInfo | None, *, last: bool) -> Piece:
        """Take in the text that a token completed; return what can be told now, maybe nothing. `last`: no more comes."""
        if info is not None:
            self._waiting.append(_Told(info, self._read, self._read + len(text)))
        self._read += len(text)
        told = self._stop.add(text)
        if last and not self.stopped:
            told += self._stop.flush()
        self._emitted += len(told)
        if self.stopped:
            ready = [t for t in self._waiting if t.start < self._emitted]
        elif last:
            ready = self._waiting
        else:
            ready = [t for t in self._waiting if t.stop <= self._emitted]
        self._waiting = [] if last or self.stopped else self._waiting[len(ready) :]
        return Piece(told, tuple(t.info for t in ready))


class Speech:
    """What one request says: takes logits, chooses, and gives pieces of text until it is finished.

    Fields:
        ids: every chosen token, the one that ended it included.
        finish_reason: None while it goes on.
    """

    def __init__(self, lm: LanguageModel, sampling: Sampling, form: Form | None = None) -> None:
        self.ids: list[int] = []
        self.finish_reason: Finish | None = None
        self._sampling = sampling
        self._picker = Picker(lm, sampling, seeded(CPU, sampling.seed), form)
        self._text = TextStream(lambda ids: str(lm.tokenizer.decode(ids, skip_special_tokens=True)))
        self._telling = Telling(sampling.stop)

    def next(self, logits: Tensor) -> Piece:
        """Choose the next token from logits [vocabulary]; return what can be told now, maybe nothing."""
        logits = self._picker.readied(logits)
        token = self._picker.pick(logits)
        self.ids.append(token)
        ended = token in self._picker.ends
        text = "" if ended else self._text.add(token)
        if ended:
            self.finish_reason = "stop"
        elif len(self.ids) >= self._sampling.max_new_tokens:
            self.finish_reason = "length"
        last = self.finish_reason is not None
        if last:
            text += self._text.flush()
        piece = self._telling.tell(text, None if ended else self._picker.inform(logits, token), last=last)
        if self._telling.stopped:
            self.finish_reason = "stop"
        return piece


def _text_of(tokenizer: Any, token: int) -> str:
    return spelling_of(tokenizer).spell([token])[0].decode(errors="replace")
