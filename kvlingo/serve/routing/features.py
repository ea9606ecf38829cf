"""A conversation as a few numbers that cost nothing to compute: lengths, shares of kinds of characters, hashed words.

Knows text. Numbers mean the same in every process and release: words are hashed by CRC-32, not by Python's own hash. `VERSION`
changes with the meaning of any of them, and what was fitted on another version is refused.
"""

from __future__ import annotations

import math
import re
import zlib

from kvlingo.serve.routing.choosing import Prompt, contents, last_of_user, turns

VERSION = 1
BUCKETS = 256
MOST_CHARS = 8_000
"""So much of the last question is looked at, half from each end: what a choice costs is bounded."""

WORD = re.compile(r"\w+")
NAMES = (
    "question_chars",
    "question_words",
    "question_lines",
    "total_chars",
    "turns",
    "digits",
    "capitals",
    "symbols",
    "not_ascii",
    "question_marks",
    "code_fences",
    "word_chars",
)
WIDTH = len(NAMES) + BUCKETS


def features(prompt: Prompt) -> list[float]:
    """Return `WIDTH` numbers: those of `NAMES`, then the words of the last question in `BUCKETS`, of length 1 together."""
    whole = last_of_user(prompt)
    question = whole if len(whole) <= MOST_CHARS else f"{whole[: MOST_CHARS // 2]} {whole[-MOST_CHARS // 2 :]}"
    words = WORD.findall(question.lower())
    total = sum(len(text) for _, text in contents(prompt))

    def share(count: int) -> float:
        return count / max(1, len(question))

    shape = [
        math.log1p(len(whole)),
        math.log1p(len(words)),
        math.log1p(question.count("\n")),
        math.log1p(total),
        math.log1p(turns(prompt)),
        share(sum(c.isdigit() for c in question)),
        share(sum(c.isupper() for c in question)),
        share(sum(not c.isalnum() and not c.isspace() for c in question)),
        share(sum(not c.isascii() for c in question)),
        math.log1p(question.count("?")),
        math.log1p(question.count("```")),
        sum(map(len, words)) / max(1, len(words)),
    ]
    return shape + hashed(words)


def hashed(words: list[str]) -> list[float]:
    """Return signed counts of words in buckets, scaled to length 1: words that share a bucket cancel as often as they add."""
    buckets = [0.0] * BUCKETS
    for word in words:
        code = zlib.crc32(word.encode("utf-8", "surrogatepass"))
        buckets[code % BUCKETS] += 1.0 if code & 0x8000_0000 else -1.0
    length = math.sqrt(sum(value * value for value in buckets))
    return [value / length for value in buckets] if length else buckets
