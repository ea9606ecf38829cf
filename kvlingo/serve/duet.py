"""One answer that two models say: the small one token by token, the big one where the small one is in doubt.

After R2R (Fu et al. 2025, arXiv 2505.21600), with the entropy of the small model's next token in place of a trained router. Knows
one answer, its text and what each model has of it as ids. Does not know threads, caches or where a state comes from.

Who is asked changes between two characters only, never inside one, so that what one model said is text to the other. Two models
with one vocabulary exchange ids; others read each other's text, tokenised once for good: the ids are in a cache from then on.

Penalties are for the whole answer: each model counts it in its own tokens, what the other said included, as it reads them.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.generation import seeded
from kvlingo.language_model import LanguageModel
from kvlingo.serve.protocol import Begun, Finish, Part, Piece, Sampling
from kvlingo.serve.sampling import CPU, Picker, Telling
from kvlingo.spelling import encode, spelling_of
from kvlingo.states import ModelState

NOTHING = Piece("", ())
ANCHORS = ("\n", "a", ".")
"""Texts before a fragment that keep a tokenizer from putting a space before it."""


@dataclass(eq=False)
class Singer:
    """One of the two models.

    Fields:
        prompt_tokens: of its own reading of the prompt.
        ids: the answer so far in its own tokens; what the other said is there once a turn has ended.
        state: what it holds, at rest; None until it is first asked.
        part: what it did, for whoever asked.
    """

    name: str
    lm: LanguageModel
    prompt_tokens: int
    ids: list[int] = field(default_factory=list)
    state: ModelState | None = None
    part: Part = field(init=False)
    picker: Picker = field(init=False)

    def __post_init__(self) -> None:
        self.part = Part(self.name)

    def unread(self) -> list[int]:
        """Return the ids of the answer that its cache does not hold."""
        if self.state is None:
            return list(self.ids)
        return self.ids[int(self.state.cache.get_seq_length()) - self.prompt_tokens :]

    @property
    def room(self) -> int | None:
        """Return how many more tokens it can read; None: no limit."""
        limit = self.lm.geometry.max_positions
        return None if limit is None else limit - self.prompt_tokens - len(self.ids)

    def began(self, begun: Begun) -> None:
        """Count how it came to what it holds now; what it held already counts once."""
        part = self.part
        self.part = replace(
            part,
            turns=part.turns + 1,
            native_tokens=part.native_tokens if part.turns else begun.native_tokens,
            translated_tokens=part.translated_tokens + begun.translated_tokens,
            recomputed_tokens=part.recomputed_tokens + begun.recomputed_tokens,
            fallback=part.fallback or begun.fallback,
            hops=max(part.hops, begun.hops),
        )

    def reads(self, ids: Sequence[int]) -> None:
        """Take in what the other said, as this one reads it."""
        self.ids.extend(ids)
        self.picker.said.update(ids)

    def chose(self, token: int) -> None:
        """Take in a token that it chose."""
        self.ids.append(token)
        self.part = replace(self.part, completion_tokens=self.part.completion_tokens + 1)


class Duet:
    """One answer of two models.

    Args:
        from_nats: the entropy from which the big model chooses a token.

    Fields:
        turn: whose turn it is.
        finish_reason: None while the answer goes on.
        first_at: when the first token was chosen, on `time.perf_counter`.
    """

    def __init__(self, small: Singer, big: Singer, sampling: Sampling, from_nats: float) -> None:
        self.small, self.big, self._from_nats = small, big, from_nats
        self.turn = small
        self.first_at: float | None = None
        self.finish_reason: Finish | None = None
        generator = seeded(CPU, sampling.seed)
        for singer in (small, big):
            singer.picker = Picker(singer.lm, sampling, generator)
        self._most, self._telling = sampling.max_new_tokens, Telling(sampling.stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._one_vocabulary = same_vocabulary(small.lm.tokenizer, big.lm.tokenizer)
        self._begun, self._untold = False, ""

    @property
    def completion_tokens(self) -> int:
        """Return how many tokens were chosen, by whomever."""
        return self.small.part.completion_tokens + self.big.part.completion_tokens

    @property
    def parts(self) -> tuple[Part, Part]:
        """Return who did what."""
        return self.small.part, self.big.part

    def other(self, singer: Singer) -> Singer:
        """Return the one that is not `singer`."""
        return self.big if singer is self.small else self.small

    def hear(self, singer: Singer, logits: Tensor) -> tuple[int | None, Piece]:
        """Let a model choose the next token from its logits [vocabulary], or leave it to the other: None."""
        logits = singer.picker.readied(logits)
        if (
            singer is self.small
            and not self._inside_a_character
            and singer.picker.doubt_nats(logits) >= self._from_nats
        ):
            self._hand_on(singer)
            return None, self._told("", None) if self.finish_reason else NOTHING
        token = singer.picker.pick(logits)
        singer.chose(token)
        self.first_at = self.first_at or time.perf_counter()
        ended = token in singer.picker.ends
        text = "" if ended else self._text_of(singer, token)
        if ended:
            self.finish_reason = "stop"
        elif self.completion_tokens >= self._most or singer.room == 0:
            self.finish_reason = "length"
        elif singer is self.big and not self._inside_a_character:
            self._hand_on(singer)
        return token, self._told(text, None if ended else singer.picker.inform(logits, token))

    @property
    def _inside_a_character(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _text_of(self, singer: Singer, token: int) -> str:
        """Return the text that a token completes. Special tokens have none; the space that some put before a text is dropped."""
        spelling = spelling_of(singer.lm.tokenizer)
        spelled = b"" if spelling.is_special(token) else spelling.spell([token])[0]
        if spelled and not self._begun:
            self._begun = True
            spelled = spelled[1:] if spelling.dummy_space and spelled.startswith(b" ") else spelled
        text = self._utf8.decode(spelled)
        self._untold += text
        if self._one_vocabulary:
            self.other(singer).reads([token])
        return text

    def _told(self, text: str, info: Any) -> Piece:
        last = self.finish_reason is not None
        if last:
            text += self._utf8.decode(b"", final=True)
        piece = self._telling.tell(text, info, last=last)
        if self._telling.stopped:
            self.finish_reason = "stop"
        return piece

    def _hand_on(self, singer: Singer) -> None:
        """Give the turn to the other model, unless there is nothing new for it to read or no room for it."""
        other = self.other(singer)
        if not self._one_vocabulary and self._untold:
            other.reads(fragment_ids(other.lm.tokenizer, self._untold))
        self._untold = ""
        if other.room is not None and other.room <= 0:
            self.finish_reason = "length"
        elif other.state is None or other.unread():
            self.turn = other
        else:
            assert singer is self.big  # it has always a token of its own to read: the last that it chose


class Turn:
    """What one model says until the other goes on: the voice of one job.

    Fields:
        ids: the answer's ids that the model's state does not hold yet, then what it chooses.
    """

    def __init__(self, duet: Duet) -> None:
        self.duet, self.singer = duet, duet.turn
        self.ids: list[int] = []
        self.finish_reason: Finish | None = None

    def next(self, logits: Tensor) -> Piece:
        """Choose a token, or leave it to the other model."""
        token, piece = self.duet.hear(self.singer, logits)
        if token is not None:
            self.ids.append(token)
        self.finish_reason = self.duet.finish_reason or ("turn" if self.duet.turn is not self.singer else None)
        return piece


@lru_cache(maxsize=16)
def vocabulary_of(tokenizer: Any) -> str:
    """Identify what a tokenizer's ids mean: the bytes that each spells, and which are special."""
    spelled, spans = spelling_of(tokenizer).spell(range(len(tokenizer)))
    table = [sorted(tokenizer.get_vocab().items()), tokenizer.all_special_ids, spans]
    return hashlib.sha256(json.dumps(table).encode() + spelled).hexdigest()


def same_vocabulary(one: Any, other: Any) -> bool:
    """Tell whether the same ids spell the same bytes to both tokenizers."""
    return one is other or vocabulary_of(one) == vocabulary_of(other)


def fragment_ids(tokenizer: Any, text: str) -> Sequence[int]:
    """Return the ids of a text that stands inside another one: no space is put before it."""
    if not spelling_of(tokenizer).dummy_space:
        return encode(tokenizer, text)
    for anchor in ANCHORS:
        before, both = encode(tokenizer, anchor), encode(tokenizer, anchor + text)
        if both[: len(before)] == before:
            return both[len(before) :]
    raise BadInput(
        "the tokenizer puts a space before every text, so it can't go on in the middle of one; name one model"
    )
