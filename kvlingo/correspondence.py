"""Two texts, one content: which bytes of one stand where in the other.

Knows that templates strip, tokenizers normalise and broken bytes become replacement characters. Does not know tokens.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SPACE = "\u2581"
"""How sentencepiece writes a space."""


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


def correspond(source: bytes, target: bytes, *, closed: bool) -> Correspondence:
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
    (a, a_stops), (b, b_stops) = canonical(source), canonical(target)
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


def canonical(data: bytes) -> tuple[str, list[int]]:
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
        pieces = " " if char == SPACE else unicodedata.normalize("NFKD", char)
        chars.extend(pieces)
        stops.extend([stop] * len(pieces))
    return "".join(chars), stops
