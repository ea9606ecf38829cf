"""Two tokenizers, one text: which source token feeds each target token.

Knows how ids spell bytes, where a chat template puts the contents of its messages, and how the
bytes of two readings correspond. Works on the ids that are really in a cache: they are spelled out
byte by byte, never tokenised again. Does not know models, caches or plans.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvlingo.errors import BadInput, UnsupportedModel

Span = tuple[int, int]
Message = Mapping[str, Any]

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] | capitalize + '\\n' + message['content'] + '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant\\n' }}{% endif %}"
)
"""Chat template for tokenizers without one: a heading per message, contents verbatim."""

PROBES = (
    "The quick brown fox jumps over 13 lazy dogs, isn't it? 1234567890",
    " leading, double  and trailing spaces  ",
    "def f(x):\n\treturn {'a': [1, 2.5e-3]}\n\n\n# done\r\n",
    "na\u00efve caf\u00e9 \u2013 \u201cquoted\u201d \u20ac",
    "\u6f22\u5b57\u3068\u304b\u306a \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f469\u200d\U0001f467!",
)
"""Texts on which a tokenizer's bytes are verified and two tokenizers are compared."""


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


# --- reading ---


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


def read_chat(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Reading:
    """Render messages with the tokenizer's chat template (or `PLAIN_TEMPLATE`) and tokenise them.

    One content per message, empty where the template drops it. BOS comes exactly once, from the
    template or from here. A content may be a string, None, or a list of text parts.

    Raises `BadInput` for messages the template refuses.
    """
    chat = [_plain_message(message) for message in messages]
    rendered = _render(tokenizer, chat, add_generation_prompt)
    ids, stream, spans = _tokenize(tokenizer, rendered)
    ranges = _content_ranges(tokenizer, chat, rendered, add_generation_prompt)
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
    spelling = _spelling(tokenizer)
    stream, spans = spelling.spell(ids)
    if contents is None:
        contents = (_inner(spelling, ids, spans, stream, at_start=True),)
    return Reading(ids, spans, tuple((start, stop) for start, stop in contents), stream)


def read_more(tokenizer: Any, reading: Reading, ids: Sequence[int] | Tensor) -> Reading:
    """Append ids that a model generated after `reading`, as one more content.

    Special tokens at their ends (an end of turn) are not part of it.
    """
    ids = _plain_ids(ids)
    spelling = _spelling(tokenizer)
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
    plain = _encode(tokenizer, "a")
    starts = (i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return full[: next(starts, 0)]


def _tokenize(tokenizer: Any, text: str) -> tuple[tuple[int, ...], bytes, tuple[Span, ...]]:
    """Return a text's ids, their bytes and spans: the one path on which text becomes ids.

    The leading special tokens are put first unless the text (a rendered template) has them.
    """
    spelling = _spelling(tokenizer)
    ids = _encode(tokenizer, text)
    leading = leading_ids(tokenizer)
    if ids[: len(leading)] != leading:
        ids = leading + ids
    return ids, *spelling.spell(ids)


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if not isinstance(text, str):
        raise BadInput(f"expected text, got {type(text).__name__}; decode bytes first")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"the text holds a lone surrogate at character {error.start}; decode it with errors='replace'"
        ) from error
    if not text:
        return ()
    whole = {"truncation": False, "padding": False, "verbose": False}
    return tuple(tokenizer(text, add_special_tokens=False, **whole)["input_ids"])


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


# --- chat ---


def _plain_message(message: Message) -> dict[str, Any]:
    """Return the message with its content as a string: None is empty, text parts are joined."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise BadInput("a chat message must be a mapping with 'role' and 'content'")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(map(_text_part, content))
    elif content is not None and not isinstance(content, str):
        content = _text_part(content)
    return {**message, "content": content or ""}


def _text_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise BadInput("a message holds something else than text; give text or a list of text parts")
    return text


def _render(tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    if not messages:
        raise BadInput("the conversation is empty; give at least one message")
    template = None if tokenizer.chat_template else PLAIN_TEMPLATE
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )
    except Exception as error:  # a template is a foreign program: it raises what it likes
        raise BadInput(f"the chat template refuses these messages: {_one_line(error)}") from error


def _content_ranges(
    tokenizer: Any, messages: list[dict[str, Any]], rendered: str, add_generation_prompt: bool
) -> list[Span]:
    """Find each message's content in the rendered chat.

    The template is rendered once more with marks for contents: what stands between two marks is the
    template's own text, so that a content is found by its place and not by a search that "user"
    could lead astray.
    """
    contents = [message["content"] for message in messages]
    blank = {i for i, content in enumerate(contents) if not content.strip()}
    ranges: list[Span] = []
    for unmarked in (set(), blank):  # a template may leave blank messages out
        marks = {i: f"\ue000{i}\ue001" for i in range(len(contents)) if i not in unmarked}
        marked = [{**m, "content": marks.get(i, m["content"])} for i, m in enumerate(messages)]
        try:
            skeleton = _Skeleton.cut(_render(tokenizer, marked, add_generation_prompt), marks)
        except BadInput:  # the template reads contents: search for them in order
            skeleton = _Skeleton(list(marks), [""] * (len(marks) + 1))
        ranges, exact = _walk(rendered, skeleton, contents)
        if exact:
            break
    return ranges


@dataclass(frozen=True)
class _Skeleton:
    """A rendered chat without contents: which ones it holds, and the text around them."""

    found: list[int]
    literals: list[str]

    @classmethod
    def cut(cls, marked: str, marks: Mapping[int, str]) -> _Skeleton:
        """Cut a chat rendered with marks at the marks; dropped ones are not found."""
        found: list[int] = []
        literals: list[str] = []
        cursor = 0
        for index, mark in marks.items():
            place = marked.find(mark, cursor)
            if place >= 0:
                found.append(index)
                literals.append(marked[cursor:place])
                cursor = place + len(mark)
        return cls(found, [*literals, marked[cursor:]])


def _walk(rendered: str, skeleton: _Skeleton, contents: list[str]) -> tuple[list[Span], bool]:
    """Return each content's characters in the chat, and whether the skeleton fits exactly.

    A content that is not there is empty and stands where the one before it ends.
    """
    placed: dict[int, Span] = {}
    stop, exact = 0, True
    for index, before, after in zip(skeleton.found, skeleton.literals, skeleton.literals[1:], strict=False):
        start, found = _content_start(rendered, stop, before)
        stop, fits = _content_stop(rendered, start, contents[index], after)
        exact &= found and fits
        placed[index] = _kept(rendered, start, stop, contents[index])
    ranges: list[Span] = []
    for index in range(len(contents)):
        last = ranges[-1][1] if ranges else 0
        ranges.append(placed.get(index, (last, last)))
    return ranges, exact and rendered[stop:] == skeleton.literals[-1]


def _content_start(rendered: str, stop: int, before: str) -> tuple[int, bool]:
    """Return where the template text from `stop` on ends, and whether it is as expected."""
    if rendered.startswith(before, stop):
        return stop + len(before), True
    found = _search(rendered, before, stop, tail=True)
    return found[1] if found else stop, False


def _content_stop(rendered: str, start: int, content: str, after: str) -> tuple[int, bool]:
    """Return where the content from `start` on stops, and whether it is verbatim or stripped.

    Else the template rewrote it: it stops where the template's next text begins.
    """
    for candidate in (content, content.rstrip(), content.lstrip(), content.strip()):
        stop = start + len(candidate)
        if rendered.startswith(candidate, start) and rendered.startswith(after, stop):
            return stop, True
    found = _search(rendered, after, start, tail=False)
    if found is None:
        place = rendered.find(content.strip(), start)
        return (place + len(content.strip()) if place >= 0 else start), False
    return found[0], False


def _search(rendered: str, literal: str, start: int, *, tail: bool) -> Span | None:
    """Find template text from `start` on, or the largest half, quarter, … of its tail (or head)."""
    size = len(literal)
    while size:
        piece = literal[-size:] if tail else literal[:size]
        place = rendered.find(piece, start) if piece.strip() else -1
        if place >= 0:
            return place, place + size
        size //= 2
    return None


def _kept(rendered: str, start: int, stop: int, content: str) -> Span:
    """Narrow a range to the content where template text that depends on it got in."""
    place = rendered.find(content.strip(), start, stop)
    if rendered[start:stop].strip() == content.strip() or place < 0:
        return start, stop
    return place, place + len(content.strip())


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
    matched = _correspond(stream, text, closed=True)
    moved: list[Span] = []
    for start, stop in ranges:
        first = matched.after(start) if stop > start else matched.before(start)
        first = max(first, moved[-1][1] if moved else 0)
        moved.append((first, max(first, matched.before(stop))))
    return tuple(moved)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# --- spelling ---


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of the byte-level alphabet.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in
    order (Radford et al. 2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _spell_byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTES[char] for char in piece)
    except KeyError:
        return piece.encode()


def _spell_sentencepiece(piece: str) -> bytes:
    return piece.replace(_SPACE, " ").encode()


def _spell_with_fallback(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else _spell_sentencepiece(piece)


class Spelling:
    """How one tokenizer's ids spell bytes. Spelled ids are kept: each is looked up once.

    Fields:
        dummy_space: whether the tokenizer puts a space before a text; found by `_verified`.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self._backend = _backend(tokenizer)
        self._spell_piece = _piece_speller(json.loads(self._backend.to_str()))
        self._special = {i for i, token in added.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        self._spelled = {i: (token.content or "").encode() for i, token in added.items()}
        self._unknown: set[int] = set()
        self.dummy_space = False

    def spell(self, ids: Sequence[int]) -> tuple[bytes, tuple[Span, ...]]:
        """Return the bytes of all ids together, and each one's span in them."""
        for token in set(ids) - self._spelled.keys():
            piece = self._backend.id_to_token(token)
            if piece is None:
                self._unknown.add(token)
            self._spelled[token] = b"" if piece is None else self._spell_piece(piece)
        texts = [self._spelled[token] for token in ids]
        stops = list(accumulate(map(len, texts)))
        return b"".join(texts), tuple(zip([0, *stops], stops, strict=False))

    def is_special(self, token: int) -> bool:
        """Tell whether a spelled id is a special token, or none that the tokenizer knows."""
        return token in self._special or token in self._unknown


_spellings: WeakKeyDictionary[Any, tuple[int, Spelling]] = WeakKeyDictionary()


def _spelling(tokenizer: Any) -> Spelling:
    """Return the tokenizer's spelling, verified once; anew when tokens have been added since."""
    _backend(tokenizer)
    size, spelling = _spellings.get(tokenizer, (-1, None))
    if spelling is None or size != len(tokenizer):
        spelling = _verified(tokenizer, Spelling(tokenizer))
        _spellings[tokenizer] = (len(tokenizer), spelling)
    return spelling


def _backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` behind a tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel(
            f"{type(tokenizer).__name__} has no tokenizer.json behind it, so its ids can't be "
            "spelled as bytes; convert it to a fast tokenizer"
        )
    return backend


def _parts(component: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Flatten nested sequences of decoders or pre-tokenizers."""
    if component is None:
        return
    nested = component.get("decoders") or component.get("pretokenizers")
    if nested is None:
        yield component
        return
    for part in nested:
        yield from _parts(part)


def _piece_speller(backend: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Choose how pieces spell bytes from the tokenizer's decoder, else its pre-tokenizer."""
    parts = list(_parts(backend.get("decoder") or backend.get("pre_tokenizer")))
    kinds = {part["type"] for part in parts}
    spaced = any(p["type"] == "Replace" and p["pattern"] == {"String": _SPACE} for p in parts)
    if "ByteLevel" in kinds:
        return _spell_byte_level
    if "ByteFallback" in kinds:
        return _spell_with_fallback
    if "Metaspace" in kinds or spaced:
        return _spell_sentencepiece
    raise UnsupportedModel(
        f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is neither byte-level nor "
        "sentencepiece-like, so its ids can't be spelled as bytes; use a model with another one"
    )


def _verified(tokenizer: Any, spelling: Spelling) -> Spelling:
    """Check on probe texts that ids spell the text they came from, and look for a dummy space.

    The tokenizer may normalise and change white space. Probes that need the unknown token say
    nothing, at least one must do without.
    """
    checked = 0
    for probe in PROBES:
        ids = _encode(tokenizer, probe)
        if tokenizer.unk_token_id in ids:
            continue
        wanted, got = (_canonical(text)[0] for text in (probe.encode(), spelling.spell(ids)[0]))
        spelling.dummy_space |= got[:1] == " " != wanted[:1]
        if got.split() != wanted.split():
            raise UnsupportedModel(
                f"the tokenizer's ids spell {got[:32]!r} where it read {wanted[:32]!r}, so they "
                "can't be aligned; use a model whose tokenizer keeps its text"
            )
        checked += 1
    if not checked:
        raise UnsupportedModel(
            "the tokenizer needs its unknown token for every probe text, so its ids can't be "
            "verified; use a model with another tokenizer"
        )
    return spelling


# --- correspondence ---


@dataclass
class Correspondence:
    """A monotone map from byte offsets of the target to the source's: knots and lines between them.

    Two knots at one offset are a jump (bytes that only the source has). Offsets beyond the last
    knot have no image.

    Fields:
        target, source: the knots' offsets.
        alike: whether the two texts are the same text, but for what templates and tokenizers do.
    """

    target: list[int]
    source: list[int]
    alike: bool = True

    def add(self, target: int, source: int) -> None:
        """Append a knot, held to be monotone."""
        self.target.append(max(target, self.target[-1]))
        self.source.append(max(source, self.source[-1]))

    def before(self, offset: int) -> int:
        """Return the image of the bytes before `offset`."""
        return self._between(offset, bisect_left(self.target, offset))

    def after(self, offset: int) -> int:
        """Return the image of the bytes from `offset` on."""
        last = bisect_right(self.target, offset) - 1
        at_knot = self.target[last] == offset
        return self.source[last] if at_knot else self._between(offset, last + 1)

    def _between(self, offset: int, knot: int) -> int:
        """Return the image on the line that ends at a knot, rounded up to whole bytes."""
        if self.target[knot] == offset:
            return self.source[knot]
        t0, t1 = self.target[knot - 1 : knot + 1]
        s0, s1 = self.source[knot - 1 : knot + 1]
        return s0 - (s0 - s1) * (offset - t0) // (t1 - t0)


def _correspond(source: bytes, target: bytes, *, closed: bool) -> Correspondence:
    """Find the bytes that two texts share, although templates strip and tokenizers normalise.

    Closed: all of the source is there, so what has no counterpart lies between its neighbours. Not
    closed: the source may have been cut, and the target's bytes after the last common one have no
    image.
    """
    knots = Correspondence([0], [0])
    shared = _shared_prefix(source, target, 0, 0)
    if shared == min(len(source), len(target)):
        knots.add(shared, shared)
    else:
        _match_canonical(knots, source, target)
    if closed:
        knots.add(len(target), len(source))
    return knots


def _match_canonical(knots: Correspondence, source: bytes, target: bytes) -> None:
    """Add a knot for each common character, and tell texts that have too few of them."""
    (a, a_stops), (b, b_stops) = _canonical(source), _canonical(target)
    matched = 0
    for i, j, length in _blocks(a, b):
        matched += length
        for step in range(length + 1):
            knots.add(b_stops[j + step], a_stops[i + step])
    knots.alike = 2 * matched >= min(len(a.strip()), len(b.strip())) - _FORGIVEN


_FORGIVEN = 8  # characters: what broken bytes and unknown tokens may cost in a short text
_ANCHOR = 6  # characters that must agree where two texts meet again after a difference
_NEAR = 48  # characters, of both texts together, of a difference searched thoroughly
_FAR = 24  # characters that must agree after a longer insertion, and where it may start


def _blocks(a: str, b: str) -> Iterable[tuple[int, int, int]]:
    """Yield common runs in order, as (start in a, start in b, length).

    Greedy: equal as far as it goes, then the nearest place where both go on alike.
    """
    place: tuple[int, int] | None = (0, 0)
    while place is not None:
        i, j = place
        length = _shared_prefix(a, b, i, j)
        yield i, j, length
        place = _restart(a, b, i + length, j + length)


def _restart(a: str, b: str, i: int, j: int) -> tuple[int, int] | None:
    """Return where two texts go on alike after a difference at i and j, if they do.

    White space is skipped first, then little on both sides, then much on one.
    """
    if i == len(a) or j == len(b):
        return None
    near = ((i + n, j + total - n) for total in range(1, _NEAR) for n in range(total + 1))
    for x, y in ((_indent(a, i), _indent(b, j)), *near):
        if (x, y) != (i, j) and _alike(a, b, x, y):
            return x, y
    for n in range(min(_FAR, len(b) - j)):
        place = _find(a, i, b[j + n : j + n + _FAR])
        if place is not None:
            return place, j + n
    for n in range(min(_FAR, len(a) - i)):
        place = _find(b, j, a[i + n : i + n + _FAR])
        if place is not None:
            return i + n, place
    return None


def _alike(a: str, b: str, i: int, j: int) -> bool:
    x, y = a[i : i + _ANCHOR].rstrip(), b[j : j + _ANCHOR].rstrip()
    return x == y and x != ""


def _find(text: str, start: int, anchor: str) -> int | None:
    place = text.find(anchor, start) if len(anchor.strip()) >= _ANCHOR else -1
    return place if place >= 0 else None


def _indent(text: str, start: int) -> int:
    """Return the offset of the next character that is not white space."""
    match = _WHITE.match(text, start)
    return match.end() if match else start


_WHITE = re.compile(r"\s*")


def _shared_prefix(a: Any, b: Any, i: int, j: int) -> int:
    """Return how far two strings (or bytes) agree from i and j on.

    Compares slices, doubled while they agree and halved after: no loop over characters.
    """
    length, step = 0, 64
    while step:
        x, y = a[i + length : i + length + step], b[j + length : j + length + step]
        if x == y and len(x) == step:
            length, step = length + step, step * 2
        else:
            step = min(step, 1 << max(len(x), len(y)).bit_length()) // 2
    return length


def _mark_bad(error: UnicodeError) -> tuple[str, int]:
    """Decode an invalid byte run of 1 to 3 bytes to the surrogate U+DC80 + its length."""
    assert isinstance(error, UnicodeDecodeError)
    return chr(0xDC80 + error.end - error.start), error.end


codecs.register_error("kvlingo-mark", _mark_bad)


def _canonical(data: bytes) -> tuple[str, list[int]]:
    """Return text that normalising does not change, and the byte offsets around its characters.

    Compatibility decomposition per character; sentencepiece's U+2581 is a space; runs of invalid
    bytes and of replacement characters are one replacement character.
    """
    text = data.decode(errors="kvlingo-mark")
    if text.isascii():
        return text, list(range(len(text) + 1))
    chars: list[str] = []
    stops = [0]
    for char in text:
        bad = ord(char) - 0xDC80 if "\udc80" < char < "\udc90" else 0
        stop = stops[-1] + (bad or len(char.encode()))
        if bad or char == "\ufffd":
            if chars and chars[-1] == "\ufffd":
                stops[-1] = stop
                continue
            char = "\ufffd"
        pieces = " " if char == _SPACE else unicodedata.normalize("NFKD", char)
        chars.extend(pieces)
        stops.extend([stop] * len(pieces))
    return "".join(chars), stops


# --- aligning ---


def align(source: Reading, target: Reading) -> Tensor:
    """Return the index of the source token that feeds each target token: int64 [target tokens].

    Where one reading's ids are the start of the other's, they are aligned one to one. Else the k-th
    content of one corresponds to the k-th of the other, byte by byte, and a target token takes the
    first source token that has read up to its end:

        alignment[j] = min { i : source.spans[i].stop >= image(target.spans[j].stop) }

    Template and special tokens correspond where both sides' template begins alike; else they take
    the preceding source token, that of the last content byte before them (before any content:
    source position 0). A target token that ends beyond what the source has read is -1, and so are
    all after it. Before that the alignment never falls.

    Raises `BadInput` when contents hold different texts.
    """
    shared = _same_start(source, target)
    alignment = torch.full((len(target),), -1, dtype=torch.long)
    alignment[:shared] = torch.arange(shared)
    if shared in (len(source), len(target)):
        return alignment
    image = _image(source, target)
    stops = [stop for _, stop in source.spans]
    fed: list[int] = []
    for _, stop in target.spans:
        if stop > image.target[-1]:
            break
        fed.append(bisect_left(stops, image.before(stop)))
    alignment[: len(fed)] = torch.tensor(fed, dtype=torch.long)
    return alignment


def last_at_source_start(alignment: Tensor) -> int:
    """Return the number of leading target tokens that source position 0 feeds.

    A model's first position is an outlier (an attention sink): these tokens stay out of the
    statistics and are recomputed at a hand-over.
    """
    other = (alignment != 0).nonzero()
    return int(other[0]) if len(other) else len(alignment)


def _same_start(source: Reading, target: Reading) -> int:
    """Return how many leading tokens are the same, where one reading is the start of the other."""
    tokens = min(len(source), len(target))
    same = source.ids[:tokens] == target.ids[:tokens]
    return tokens if same and source.spans[:tokens] == target.spans[:tokens] else 0


def _image(source: Reading, target: Reading) -> Correspondence:
    """Map the target's byte offsets to the source's: gap, content, gap, content, …, gap."""
    image = Correspondence([0], [0])
    s = t = 0
    for k, (t_start, t_stop) in enumerate(target.contents):
        if k < len(source.contents):
            s_start, s_stop = source.contents[k]
            _map_gap(image, source.stream[s:s_start], target.stream[t:t_start], s, t)
            s, t = s_stop, t_stop
            if not _map_content(image, source, target, k):
                return image
        else:
            _map_gap(image, source.stream[s:], target.stream[t:t_start], s, t)
            return image
    _map_gap(image, source.stream[s:], target.stream[t:], s, t)
    return image


def _map_gap(image: Correspondence, source: bytes, target: bytes, s: int, t: int) -> None:
    """Map template text at target offset t.

    It goes onto the source's template text at s as far as it begins with that, then onto what
    precedes it.
    """
    if source and target.startswith(source):
        image.add(t, s)
        image.add(t + len(source), s + len(source))
    image.add(t + len(target), image.source[-1])


def _map_content(image: Correspondence, source: Reading, target: Reading, k: int) -> bool:
    """Map the k-th content; tell whether all of the target's was read by the source.

    The last content of a source that read nothing after it may have been cut anywhere.
    """
    (s_start, s_stop), (t_start, t_stop) = source.contents[k], target.contents[k]
    closed = k + 1 < len(source.contents) or s_stop < len(source.stream)
    knots = _correspond(source.stream[s_start:s_stop], target.stream[t_start:t_stop], closed=closed)
    if not knots.alike:
        raise BadInput(
            f"content {k} differs between the two readings, near "
            f"{target.stream[t_start : t_start + 30].decode(errors='replace')!r}; "
            "give both models the same conversation"
        )
    for t, s in zip(knots.target, knots.source, strict=True):
        image.add(t_start + t, s_start + s)
    return image.target[-1] >= t_stop


# --- relation ---


@dataclass(frozen=True)
class TokenizerRelation:
    """How two tokenizers relate.

    Fields:
        kind: "same" (equal ids mean equal text), "same_base" (but for added tokens), "different".
        differing: added tokens that only one has, or that differ in id or matching rules.
    """

    kind: Literal["same", "same_base", "different"]
    differing: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "same_base":
            shown = ", ".join(self.differing[:8]) + (", …" if len(self.differing) > 8 else "")
            return f"same base, differing specials: {shown}"
        return self.kind


def tokenizer_relation(a: Any, b: Any) -> TokenizerRelation:
    """Compare two tokenizers by vocabulary, merges, normaliser, added tokens and probe texts.

    Size and name say nothing: two tokenizers of one size can disagree on every id.
    """
    if a is b:
        return TokenizerRelation("same")
    if any(_encode(a, probe) != _encode(b, probe) for probe in PROBES):
        return TokenizerRelation("different")
    (base_a, added_a), (base_b, added_b) = _identity(a), _identity(b)
    if base_a != base_b:
        return TokenizerRelation("different")
    differing = tuple(sorted({text for text, _ in added_a ^ added_b}))
    return TokenizerRelation("same_base" if differing else "same", differing)


AddedTokens = frozenset[tuple[str, tuple[int | bool, ...]]]
_identities: WeakKeyDictionary[Any, tuple[int, str, AddedTokens]] = WeakKeyDictionary()


def _identity(tokenizer: Any) -> tuple[str, AddedTokens]:
    """Return the digest of the base, and the added tokens with their ids and matching rules."""
    size, base, added = _identities.get(tokenizer, (-1, "", frozenset()))
    if size != len(tokenizer):
        backend = json.loads(_backend(tokenizer).to_str())
        rules = ("id", "special", "normalized", "single_word", "lstrip", "rstrip")
        tokens = backend["added_tokens"]
        added = frozenset((t["content"], tuple(t[rule] for rule in rules)) for t in tokens)
        base = _base_digest(backend["model"], {t["content"] for t in tokens}, backend["normalizer"])
        _identities[tokenizer] = (len(tokenizer), base, added)
    return base, added


def _base_digest(model: Mapping[str, Any], added: set[str], normalizer: Any) -> str:
    """Return a digest of vocabulary (without added tokens), merges, options and normaliser."""
    vocab = model["vocab"]  # {piece: id}, or [[piece, score], …] for a unigram model
    pieces = vocab.items() if isinstance(vocab, dict) else ((str(p), i) for i, p in enumerate(vocab))
    base = sorted(item for item in pieces if item[0] not in added)
    options = [model.get(name) for name in ("type", "byte_fallback", "ignore_merges")]
    everything = json.dumps([base, model.get("merges"), options, normalizer], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()
