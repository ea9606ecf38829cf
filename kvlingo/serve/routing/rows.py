"""Files of one JSON object a line: prompts with what is known of them.

Knows files and the shape of a prompt. Every refusal names the file and the line, and never quotes what is written there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kvlingo.errors import BadInput
from kvlingo.serve.routing.choosing import Prompt, contents

Row = TypeVar("Row")

FIGURES = ("quality", "cost", "ms")
MORE = {"small": ("mean_logprob", "answer", "cut"), "token": ("share_big",)}
RECORDED = frozenset({"prompt", "messages", "cluster", "small", "big", "token"})
"""The fields of a row of recorded answers, and what is told of each model's."""


def read_rows(file: Path, row: Callable[[dict[str, Any]], Row]) -> list[Row]:
    """Read a file line by line; empty lines don't count. Raises `BadInput` for the first line that `row` refuses."""
    return list(_rows(file, row))


def _rows(file: Path, row: Callable[[dict[str, Any]], Row]) -> Iterator[Row]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not text in UTF-8; give one JSON object a line") from error
    except OSError as error:
        raise BadInput(f"can't read {file}: {error.strerror}; give a file with one JSON object a line") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            found = row(values)
        except json.JSONDecodeError as error:
            raise BadInput(f"{file}, line {number}: not JSON ({error.msg}); give one JSON object a line") from error
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{file}, line {number}: {error}") from error
        yield found


def prompt_of(values: dict[str, Any]) -> Prompt:
    """Return a row's prompt: `prompt` as text, or `messages`. Raises `ValueError` for both, none, or another shape."""
    if ("prompt" in values) == ("messages" in values):
        raise ValueError("give either prompt or messages")
    if "prompt" in values:
        if not isinstance(values["prompt"], str) or not values["prompt"].strip():
            raise ValueError("prompt is not a text, or empty")
        return values["prompt"]
    messages = values["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError('messages is not a list of {"role": …, "content": text}')
    return tuple(messages)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def cluster_of(values: dict[str, Any], prompt: Prompt) -> str:
    """Return what a row is drawn and split together with: its `cluster`, or its prompt. Raises `ValueError`."""
    cluster = values.get("cluster", digest(prompt))
    if not isinstance(cluster, str):
        raise ValueError("cluster is not a text")
    return cluster


def quality_of(values: Any, who: str) -> float:
    """Return how good one model's answer was, from 0 to 1. Raises `ValueError`."""
    if not isinstance(values, dict):
        raise ValueError(f"{who} is missing; give its quality, cost and ms")
    see_no_other(values, {*FIGURES, *MORE.get(who, ())}, f" in {who}")
    quality = number(values.get("quality"), f"{who}.quality")
    if quality > 1:
        raise ValueError(f"{who}.quality is above 1")
    return quality


def number(value: Any, name: str) -> float:
    """Take a number that is not below 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ValueError(f"{name} is not a number, 0 or more")
    return float(value)


def see_no_other(values: dict[str, Any], known: set[str], where: str = "") -> None:
    """Raise `ValueError` for a field that nobody reads: a misspelt one would be left out in silence."""
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:40]!r}{where}; there are: {', '.join(sorted(known))}")


def digest(prompt: Prompt) -> str:
    """Return a name for a prompt that does not tell it: equal for prompts that differ in case and spaces only."""
    plain = [(role, " ".join(text.lower().split())) for role, text in contents(prompt)]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:24]
