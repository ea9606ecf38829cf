"""Go on from a cache: one token at a time, greedy or sampled, as a stream of text.

Knows one model and its states. Drives its own loop, so that positions never depend on what `generate()` infers from masks;
`generate_arguments` prepares what the model's own `generate()` needs to go on from a state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlingo.batches import join, prefill_batch, row_kv, side_by_side
from kvlingo.cache import read_cache
from kvlingo.cache_writing import truncate
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.plan import Provenance, Span, SpanKind, reprefill_plan
from kvlingo.probing import cache_argument
from kvlingo.reading import read_more
from kvlingo.states import ModelState, target_cache


class Generation:
    """A stream of text pieces; iterate it once.

    After the last piece, or where the caller stops asking for more, `ids` holds what was generated and `state` what the
    model then holds: everything but the last token, which was never fed back.
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
        check_sampling(max_new_tokens, temperature, top_p)
        self.lm, self.state, self.ids = lm, state, list[int]()
        self._logits, self._max, self._stop = logits, max_new_tokens, stop_at_eos
        self._temperature, self._top_p = temperature, top_p
        self._generator = seeded(logits.device, seed)

    @torch.no_grad()
    def __iter__(self) -> Iterator[str]:
        ends = end_ids(self.lm) if self._stop else frozenset()
        text = Incremental(self.lm.tokenizer)
        try:
            for number in range(self._max):
                token = choose(self._logits, self._temperature, self._top_p, self._generator)
                self.ids.append(token)
                if token in ends:
                    break
                piece = text.add(token)
                if piece:
                    yield piece
                if number + 1 < self._max:
                    self.state, self._logits = read_one_more(self.lm, self.state, self.ids)
            rest = text.flush()
            if rest:
                yield rest
        finally:  # also where the caller leaves in the middle: the cache has grown by then
            self.state = grown(self.lm, self.state, self.ids)

    def text(self) -> str:
        """Run to the end; return all text at once."""
        return "".join(self)


def read_one_more(lm: LanguageModel, state: ModelState, said: Sequence[int]) -> tuple[ModelState, Tensor]:
    """Let the model read the last id of what it has said; return the state and the logits [vocabulary] of the next.

    The cache grows in place. Only at the length beyond which the rotary angles of all tokens change (longrope, dynamic NTK)
    everything is read anew: what is cached was made with the angles of before.
    """
    cached = int(state.cache.get_seq_length())
    if cached != lm.geometry.angle_limit:
        return state, prefill(lm, lm.ids(said[-1:]), cache=state.cache).logits[-1]
    if state.no_text:
        raise UnsupportedCache(
            f"{lm.name} changes its rotary angles beyond {cached} tokens and would have to read the text again, "
            f"which it was not given; stop at {cached} tokens, or hand over with the text"
        )
    done = prefill(lm, lm.ids([*state.reading.ids, *said]), full_length=True)
    spans = reprefill_plan(len(state.reading), f"its rotary angles change beyond {cached} tokens").spans
    return replace(state, cache=done.cache, spans=spans), done.logits[-1]


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


@dataclass(frozen=True)
class Generated:
    """What one row of a batch said, and the state it then holds: everything but its last token."""

    ids: tuple[int, ...]
    text: str
    state: ModelState


@torch.no_grad()
def generate_batch(
    lm: LanguageModel,
    states: Sequence[ModelState],
    logits: Sequence[Tensor],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_at_eos: bool = True,
) -> list[Generated]:
    """Go on from several states at once, each row as `generate` would alone (with the same seed, if it samples).

    The states' own caches stay as they are. A row that has ended is carried along until all have; what it is fed then is
    never looked at. Where a batch can't be as its rows alone (`batches.side_by_side`), they go on one after another.
    """
    check_sampling(max_new_tokens, temperature, top_p)
    ends = end_ids(lm) if stop_at_eos else frozenset()
    longest = max((int(s.cache.get_seq_length()) for s in states), default=0)
    if not side_by_side(lm, longest + max_new_tokens):
        streams = [
            Generation(
                lm,
                replace(state, cache=copy.deepcopy(state.cache)),
                row,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop_at_eos=stop_at_eos,
            )
            for state, row in zip(states, logits, strict=True)
        ]
        texts = [stream.text() for stream in streams]
        return [Generated(tuple(s.ids), text, s.state) for s, text in zip(streams, texts, strict=True)]
    kvs = [read_cache(s.cache, lm.rotary, lm.geometry, partial=True) for s in states]
    batch, following = join(lm, kvs), torch.stack(list(logits))
    generators = [seeded(following.device, seed) for _ in states]
    said: list[list[int]] = [[] for _ in states]
    for number in range(max_new_tokens):
        chosen = [choose(row, temperature, top_p, g) for row, g in zip(following, generators, strict=True)]
        for row, token in zip(said, chosen, strict=True):
            if not row or row[-1] not in ends:
                row.append(token)
        if number + 1 == max_new_tokens or all(row[-1] in ends for row in said):
            break
        following = prefill_batch(lm, [lm.ids([token]) for token in chosen], batch=batch).logits[:, -1]
    found = []
    for index, (state, kv, ids) in enumerate(zip(states, kvs, said, strict=True)):
        held = row_kv(lm, batch, index, tokens=kv.tokens + len(ids) - 1, partial=True)
        after = grown(lm, replace(state, cache=target_cache(lm, held)), ids)
        words = ids[:-1] if ids[-1] in ends else ids
        found.append(Generated(tuple(ids), lm.tokenizer.decode(words, skip_special_tokens=True), after))
    return found


def check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raise `BadInput` for what can't be sampled with."""
    if max_new_tokens < 1:
        raise BadInput(f"max_new_tokens is {max_new_tokens}; give at least 1")
    if temperature < 0 or not 0 < top_p <= 1:
        raise BadInput(f"temperature {temperature} and top_p {top_p}; they must be >= 0 and in (0, 1]")


def seeded(device: torch.device, seed: int | None) -> torch.Generator:
    """Return a random generator; without a seed, a new one each time."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed if seed is not None else torch.seed())
    return generator


def generate_arguments(
    lm: LanguageModel,
    state: ModelState,
    input_ids: Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
) -> dict[str, Any]:
    """Return what `lm.model.generate(**arguments)` needs to go on from a state.

    `generate` infers positions and what is left to read from the lengths of ids, mask and cache, differently in each version,
    and needs at least one token to read. So it gets all ids, a mask over all of them, and a copy of the cache that stops
    before the last id; the state stays as it is.

    Args:
        input_ids: all ids of the conversation, the cached ones first; those of the state by default.
        attention_mask: checked, where the caller has one: one row has no padding.
    """
    length = int(state.cache.get_seq_length())
    cached = state.reading.ids[:length]
    ids = tuple(state.reading.ids if input_ids is None else input_ids)
    if ids[:length] != cached:
        raise BadInput(
            f"got {len(ids)} ids that don't begin with the {length} in the cache; give all ids of the conversation, "
            "the cached ones first"
        )
    if attention_mask is not None and (attention_mask.shape[-1] != len(ids) or not bool(attention_mask.all())):
        raise BadInput(
            f"got an attention mask of {attention_mask.shape[-1]} entries, {int(attention_mask.sum())} of them 1, for "
            f"{len(ids)} ids; give one 1 for each id, cached ones included, or no mask"
        )
    cache = truncate(state.cache, min(length, len(ids) - 1), lm.geometry, lm.model.config)
    row = lm.ids(ids)[None]
    return {"input_ids": row, "attention_mask": torch.ones_like(row), cache_argument(lm.model): cache}


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
    held = ids[: int(state.cache.get_seq_length()) - before]
    if not held:
        return state
    exact = all(s.provenance is Provenance.EXACT for s in state.spans)
    provenance = Provenance.EXACT if exact else Provenance.OWN
    span = Span(before, before + len(held), SpanKind.RECOMPUTED, provenance, "generated")
    return replace(state, reading=read_more(lm.tokenizer, state.reading, held), spans=(*state.spans, span))
