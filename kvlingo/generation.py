"""Go on from a cache: one token at a time, greedy or sampled, as a stream of text.

Knows one model and its state. Drives its own loop, so that positions never depend on what `generate()` infers from masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.handoff import ModelState
from kvlingo.models import LanguageModel, prefill
from kvlingo.plan import Provenance, Span, SpanKind
from kvlingo.reading import read_more


class Generation:
    """A stream of text pieces; iterate it once.

    After the last piece, `ids` holds what was generated and `state` what the model then holds: everything but the last
    token, which was never fed back.
    """

    def __init__(
        self,
        lm: LanguageModel,
        state: ModelState,
        logits: Tensor,
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        stop_at_eos: bool,
    ) -> None:
        if max_new_tokens < 1:
            raise BadInput(f"max_new_tokens is {max_new_tokens}; give at least 1")
        if temperature < 0 or not 0 < top_p <= 1:
            raise BadInput(f"temperature {temperature} and top_p {top_p}; they must be >= 0 and in (0, 1]")
        self.lm, self.state, self.ids = lm, state, list[int]()
        self._logits, self._max, self._stop = logits, max_new_tokens, stop_at_eos
        self._temperature, self._top_p = temperature, top_p
        self._generator = torch.Generator(device=logits.device)
        self._generator.manual_seed(seed if seed is not None else torch.seed())

    @torch.no_grad()
    def __iter__(self) -> Iterator[str]:
        ends = end_ids(self.lm) if self._stop else frozenset()
        text = Incremental(self.lm.tokenizer)
        for number in range(self._max):
            token = choose(self._logits, self._temperature, self._top_p, self._generator)
            self.ids.append(token)
            if token in ends:
                break
            piece = text.add(token)
            if piece:
                yield piece
            if number + 1 < self._max:
                self._logits = prefill(self.lm, self.lm.ids([token]), cache=self.state.cache).logits[-1]
        rest = text.flush()
        if rest:
            yield rest
        self.state = grown(self.lm, self.state, self.ids)

    def text(self) -> str:
        """Run to the end; return all text at once."""
        return "".join(self)


def generate(
    lm: LanguageModel,
    state: ModelState,
    logits: Tensor,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_at_eos: bool = True,
) -> Generation:
    """Go on from a state and the logits [vocabulary] of its next token.

    Greedy at temperature 0; otherwise nucleus sampling (arXiv 1904.09751) from the smallest set of tokens with probability
    `top_p`. The state's cache grows in place.
    """
    return Generation(
        lm,
        state,
        logits,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_at_eos=stop_at_eos,
    )


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Pick the next token from logits [vocabulary]."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, index = probabilities.sort(descending=True)
        # The token that crosses top_p stays in: at least one always does.
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def end_ids(lm: LanguageModel) -> frozenset[int]:
    """Return every id that ends a generation, by the tokenizer and by the model's generation config."""
    configured: Any = getattr(getattr(lm.model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, Sequence) else [configured]
    return frozenset(i for i in (*listed, lm.tokenizer.eos_token_id) if i is not None)


class Incremental:
    """Decode ids to text piece by piece; characters split over tokens come out whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._ids, self._given = tokenizer, list[int](), ""

    def add(self, token: int) -> str:
        """Return the text that `token` completes, maybe none."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Return what is left, even if it is half a character."""
        return self._advance(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _advance(self, text: str) -> str:
        piece, self._given = text[len(self._given) :], text
        return piece


def grown(lm: LanguageModel, state: ModelState, ids: Sequence[int]) -> ModelState:
    """Return the state with the generated ids that are in its cache by now."""
    before = len(state.reading.ids)
    held = ids[: state.cache.get_seq_length() - before]
    if not held:
        return state
    exact = all(s.provenance is Provenance.EXACT for s in state.spans)
    provenance = Provenance.EXACT if exact else Provenance.OWN
    span = Span(before, before + len(held), SpanKind.RECOMPUTED, provenance, "generated")
    return replace(state, reading=read_more(lm.tokenizer, state.reading, held), spans=(*state.spans, span))
