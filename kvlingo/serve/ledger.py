"""Which server has read what of a conversation, and under which id it is kept there.

Knows texts, names and ids of kept caches. Does not know servers, tokenizers or HTTP. What is found is where to look: the engine
that goes on from a kept cache compares token by token itself, so that a wrong guess here costs time and never an answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvlingo.serve.protocol import Message

Kind = Literal["own", "kept", "handed"]
"""What a record is good for: all of it is the model's own reading; that, and it is kept under an id; it lives on a hand-over."""
FIRST_MARKS, MARK = (16, 32), 64
"""Texts are compared by hashes of their first 16, 32, 64, 128, 192, … characters."""
TOKEN_BYTES, TEXT_BYTES, RECORD_BYTES = 4, 2, 2048
"""About what a record takes: of a token, of a character, and besides."""


@dataclass(frozen=True)
class Owner:
    """Whose conversations these are; nothing is ever found from another. `conversation`: the name that they are pinned to."""

    tenant: str
    conversation: str | None


@dataclass(frozen=True, eq=False)
class Record:
    """What one model has read and said.

    Fields:
        text: what was read and said, as text that does not depend on the model (`plain_text`).
        key: under which id its server keeps it, or None.
        of: the record whose kept cache the server went on from. None: all is the model's own reading.
        ids: the prompt's tokens and the answer's.
        prompt_tokens: how many of them are the prompt's.
        prompt, tools: what was asked.
        until: when the server forgets what it keeps (monotonic).
    """

    owner: Owner
    model: str
    text: str
    key: str | None
    of: Record | None
    ids: array[int]
    prompt_tokens: int
    prompt: str | tuple[Message, ...]
    tools: tuple[Message, ...]
    until: float

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return what it is good for."""
        if self.of is not None:
            return ("handed",)
        return ("own", "kept") if self.key is not None else ("own",)

    @property
    def num_bytes(self) -> int:
        """Return about what it takes."""
        return TEXT_BYTES * len(self.text) + TOKEN_BYTES * len(self.ids) + RECORD_BYTES


@dataclass(frozen=True)
class Found:
    """A record, and how much of a text it covers, in characters."""

    record: Record
    covered: int


class Ledger:
    """All records, bounded. Where they are too many, the tenant that holds the most gives up the one it used longest ago."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._records: dict[str, OrderedDict[Record, None]] = {}
        self._bytes: dict[str, int] = {}
        self._marks: dict[tuple[Owner, str, Kind, bytes], Record] = {}

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    @property
    def num_bytes(self) -> int:
        """Return about what all records take."""
        return sum(self._bytes.values())

    def put(self, record: Record) -> None:
        """Take in a record; those of which it is a continuation, and that are good for nothing more, go."""
        tenant, before = record.owner.tenant, self._begun_by(record)
        self._records.setdefault(tenant, OrderedDict())[record] = None
        self._bytes[tenant] = self._bytes.get(tenant, 0) + record.num_bytes
        for place in places(record):
            self._marks[place] = record
        for each in before:
            self.drop(each)
        while self.num_bytes > self.max_bytes:
            most = max(self._bytes, key=lambda name: self._bytes[name])
            self.drop(next(iter(self._records[most])))

    def _begun_by(self, record: Record) -> set[Record]:
        found = {self._marks.get(place) for place in places(record)}
        return {
            each
            for each in found
            if each is not None and set(each.kinds) <= set(record.kinds) and record.text.startswith(each.text)
        }

    def drop(self, record: Record) -> None:
        """Forget a record."""
        tenant = record.owner.tenant
        if record not in self._records.get(tenant, ()):
            return
        del self._records[tenant][record]
        self._bytes[tenant] -= record.num_bytes
        for place in places(record):
            if self._marks.get(place) is record:
                del self._marks[place]
        if not self._records[tenant]:
            del self._records[tenant], self._bytes[tenant]

    def find(self, owner: Owner, model: str, kind: Kind, text: str, now: float) -> Found | None:
        """Return the latest record of a model that shares the most with a text; only what its server still has."""
        best: Record | None = None
        for mark in marks(text):
            record = self._marks.get((owner, model, kind, mark))
            if record is None:
                break
            if record.until > now or kind == "own":
                best = record
        if best is None:
            return None
        self._records[owner.tenant].move_to_end(best)
        return Found(best, common(best.text, text))


def places(record: Record) -> list[tuple[Owner, str, Kind, bytes]]:
    """Return all that a record is found under."""
    return [(record.owner, record.model, kind, mark) for mark in marks(record.text) for kind in record.kinds]


def marks(text: str) -> Iterator[bytes]:
    """Yield hashes of longer and longer beginnings of a text; each depends on all before it."""
    digest, start = hashlib.sha256(), 0
    for stop in (*FIRST_MARKS, *range(MARK, len(text) + 1, MARK)):
        if stop > len(text):
            return
        digest.update(text[start:stop].encode("utf-8", "surrogatepass"))
        start = stop
        yield digest.digest()[:16]


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many first characters two texts share, or two rows of one kind how many first ids."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def plain_text(prompt: str | Sequence[Message], said: str | None = None, tools: Sequence[Message] = ()) -> str:
    """Return a prompt, and an answer where there is one, as text in which equal conversations are equal beginnings."""
    if isinstance(prompt, str):
        return "text\0" + prompt + (said or "")
    parts = ["chat", *(repr(dict(tool)) for tool in tools), *map(spoken, prompt)]
    if said is not None:
        parts.append(spoken({"role": "assistant", "content": said}))
    return "\0".join(parts)


def spoken(message: Message) -> str:
    """Return one message as text. White space at the ends of contents is left out: templates differ in it."""
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    return f"{message['role']}\1{str(message.get('content') or '').strip()}{repr(rest) if rest else ''}"
