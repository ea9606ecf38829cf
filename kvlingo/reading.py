"""What a model read, as ids and as bytes.

Knows how a text or a conversation becomes ids, and which bytes each id spells. Works on the ids that are really in a
cache: they are spelled out byte by byte, never tokenised again. Does not know models, caches or a second tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from kvlingo.chat import Message, content_ranges, plain_message, render
from kvlingo.correspondence import correspond
from kvlingo.errors import BadInput
from kvlingo.spelling import Span, Spelling, encode, spelling_of


@dataclass(frozen=True)
class Reading:
    """What a model read, as ids and as bytes.

    Fields:
        ids: the token ids, in order.
        spans: the bytes [start, stop) of each id in `stream`; an id without text has an empty span.
        contents: the ranges of `stream` that hold contents (plain text: one; chat: one per
            message); all else is template or special tokens.
        stream: the literal bytes of all ids, special tokens included with their literal text.
    """

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    contents: tuple[Span, ...]
    stream: bytes = field(repr=False)

    def __post_init__(self) -> None:
        edges = [0, *(edge for content in self.contents for edge in content), len(self.stream)]
        if len(self.ids) != len(self.spans) or any(a > b for a, b in pairwise(edges)):
            raise BadInput(
                f"{len(self.ids)} ids, {len(self.spans)} spans and contents {self.contents[:8]} of "
                f"{len(self.stream)} bytes don't fit together; give ordered ranges of the stream"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def opening(self) -> int:
        """The number of first ids that hold nothing of any content: BOS, and what a chat template begins with."""
        first = self.contents[0][0] if self.contents else 0
        return next((i for i, (_, stop) in enumerate(self.spans) if stop > first), len(self.ids))


def read_text(tokenizer: Any, text: str) -> Reading:
    """Tokenise plain text as its model reads it: BOS first, once, if the tokenizer uses one.

    A closing special token (EOS) that some tokenizers append is left out: the text is to be
    continued.

    Raises `BadInput` for text that no tokenizer can read, `UnsupportedModel` for a tokenizer whose
    bytes are unknown.
    """
    ids, stream, spans = _tokenize(tokenizer, text)
    whole = (0, len(text.encode()))
    return Reading(ids, spans, _place(stream, text.encode(), (whole,)), stream)


def read_chat(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Message] = ()
) -> Reading:
    """Render messages with the tokenizer's chat template (or `PLAIN_TEMPLATE`) and tokenise them.

    One content per message, empty where the template drops it. BOS comes exactly once, from the
    template or from here. A content may be a string, None, or a list of text parts.

    Raises `BadInput` for messages the template refuses.
    """
    chat = [plain_message(message) for message in messages]
    rendered = render(tokenizer, chat, add_generation_prompt, tools)
    ids, stream, spans = _tokenize(tokenizer, rendered)
    ranges = content_ranges(tokenizer, chat, rendered, add_generation_prompt, tools)
    offsets = _byte_offsets(rendered, [edge for pair in ranges for edge in pair])
    in_bytes = tuple(zip(offsets[::2], offsets[1::2], strict=True))
    return Reading(ids, spans, _place(stream, rendered.encode(), in_bytes), stream)


def reading_of_ids(tokenizer: Any, ids: Sequence[int] | Tensor, contents: Sequence[Span] | None = None) -> Reading:
    """Spell out ids that are really in a cache.

    Without `contents` (byte ranges of the stream) there is one: everything after the leading
    special tokens and before the trailing ones. An id the tokenizer has no token for (a model's
    padded vocabulary can sample one) is masked: it counts as a special token without text.

    Raises `BadInput` for numbers that are no ids, or contents outside the stream.
    """
    ids = _plain_ids(ids)
    spelling = spelling_of(tokenizer)
    stream, spans = spelling.spell(ids)
    if contents is None:
        contents = (_inner(spelling, ids, spans, stream, at_start=True),)
    return Reading(ids, spans, tuple((start, stop) for start, stop in contents), stream)


def read_more(tokenizer: Any, reading: Reading, ids: Sequence[int] | Tensor) -> Reading:
    """Append ids that a model generated after `reading`, as one more content.

    Special tokens at their ends (an end of turn) are not part of it.
    """
    ids = _plain_ids(ids)
    spelling = spelling_of(tokenizer)
    stream, spans = spelling.spell(ids)
    start, stop = _inner(spelling, ids, spans, stream, at_start=False)
    shift = len(reading.stream)
    moved = tuple((a + shift, b + shift) for a, b in spans)
    contents = (*reading.contents, (start + shift, stop + shift))
    return Reading(reading.ids + ids, reading.spans + moved, contents, reading.stream + stream)


def first_tokens(reading: Reading, count: int) -> Reading:
    """Return the reading of the first `count` ids; contents are cut, later ones dropped."""
    spans = reading.spans[:count]
    end = spans[-1][1] if spans else 0
    contents = tuple((a, min(b, end)) for a, b in reading.contents if a <= end)
    return Reading(reading.ids[:count], spans, contents, reading.stream[:end])


def leading_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the special ids that the tokenizer puts before a text (BOS, or nothing)."""
    full = tuple(tokenizer("a")["input_ids"])
    plain = encode(tokenizer, "a")
    starts = (i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return full[: next(starts, 0)]


def _tokenize(tokenizer: Any, text: str) -> tuple[tuple[int, ...], bytes, tuple[Span, ...]]:
    """Return a text's ids, their bytes and spans: the one path on which text becomes ids.

    The leading special tokens are put first unless the text (a rendered template) has them.
    """
    spelling = spelling_of(tokenizer)
    ids = encode(tokenizer, text)
    leading = leading_ids(tokenizer)
    if ids[: len(leading)] != leading:
        ids = leading + ids
    return ids, *spelling.spell(ids)


def _plain_ids(ids: Sequence[int] | Tensor) -> tuple[int, ...]:
    values = ids.flatten().tolist() if isinstance(ids, Tensor) else ids
    plain = tuple(int(i) for i in values)
    wrong = next((i for i in plain if not 0 <= i < 2**31), None)
    if wrong is not None:
        raise BadInput(f"{wrong} is no token id; drop padding and masks before reading ids")
    return plain


def _inner(spelling: Spelling, ids: Sequence[int], spans: Sequence[Span], stream: bytes, *, at_start: bool) -> Span:
    """Return the bytes between the special tokens at both ends.

    At the start of a text the space that the tokenizer puts before it is left out.
    """
    inner = [i for i, token in enumerate(ids) if not spelling.is_special(token)]
    if not inner:
        return len(stream), len(stream)
    start, stop = spans[inner[0]][0], spans[inner[-1]][1]
    dummy = at_start and spelling.dummy_space and stream[start : start + 1] == b" "
    return start + dummy, stop


def _byte_offsets(text: str, places: list[int]) -> list[int]:
    """Return the byte offset of each of the ascending character offsets."""
    pieces = (len(text[a:b].encode()) for a, b in zip([0, *places], places, strict=False))
    return list(accumulate(pieces))


def _place(stream: bytes, text: bytes, ranges: tuple[Span, ...]) -> tuple[Span, ...]:
    """Move byte ranges of a text to where its tokens spell them.

    The stream is the text after the leading tokens, unless the tokenizer normalises or adds spaces.
    """
    shift = len(stream) - len(text)
    if shift >= 0 and stream.endswith(text):
        return tuple((start + shift, stop + shift) for start, stop in ranges)
    matched = correspond(stream, text, closed=True)
    moved: list[Span] = []
    for start, stop in ranges:
        first = matched.after(start) if stop > start else matched.before(start)
        first = max(first, moved[-1][1] if moved else 0)
        moved.append((first, max(first, matched.before(stop))))
    return tuple(moved)
