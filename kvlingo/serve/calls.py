"""Calls of tools in the text of an answer, as it comes.

Knows the one way of writing them that is read here: JSON between `<tool_call>` and `</tool_call>`, as models of the Hermes and
Qwen families do. Whatever is not a whole call in that form stays text. Does not know engines or replies.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is JSON as text."""

    id: str
    name: str
    arguments: str


Said = str | Call


class Calls:
    """Takes an answer's text piece by piece; gives text and calls, each call when it is whole.

    However the text is cut into pieces, all texts together and all calls are the same. White space between text and calls belongs
    to neither: a template writes it anew.
    """

    def __init__(self) -> None:
        self._held, self._inside = "", False
        self._space, self._after_call = "", False

    def add(self, text: str) -> list[Said]:
        """Return what is certain by now."""
        self._held += text
        found: list[Said] = []
        while True:
            before, mark, after = self._held.partition(CLOSE if self._inside else OPEN)
            if not mark:
                break
            self._held = after
            found += self._call(before) if self._inside else self._text(before)
            self._inside = not self._inside
        if not self._inside:
            sure = len(self._held) - _begun(self._held, OPEN)
            text, self._held = self._held[:sure], self._held[sure:]
            found += self._text(text)
        return found

    def flush(self) -> list[Said]:
        """Return what is left at the end: a call that was not closed is text."""
        left = OPEN + self._held if self._inside else self._held
        found = self._text(left)
        if self._space and not self._after_call:
            found.append(self._space)
        self._held, self._inside, self._space = "", False, ""
        return found

    def _text(self, text: str) -> list[Said]:
        """Return text but for the white space at its end, which is held back."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not body:
            return []
        body = body.lstrip() if self._after_call else body
        self._after_call = False
        return [body]

    def _call(self, inside: str) -> list[Said]:
        """Return what stood between two marks: a call, or all of it as text."""
        call = call_of(inside)
        if call is None:
            return self._text(f"{OPEN}{inside}{CLOSE}")
        self._space, self._after_call = "", True
        return [call]


def call_of(text: str) -> Call | None:
    """Read one call, or None where it is none."""
    try:
        value: Any = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    if set(value) - {"name", "arguments"} or not isinstance(arguments, dict):
        return None
    return Call(f"call_{uuid.uuid4().hex[:24]}", value["name"], json.dumps(arguments, ensure_ascii=False))


def _no_json(name: str) -> Any:
    """Refuse NaN and Infinity: Python reads and writes them, nobody else does."""
    raise ValueError(name)


def _begun(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
