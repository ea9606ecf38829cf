"""Work in bounded steps: a generator that gives way between two of them and returns what it comes to.

Whoever runs it decides what happens in between, and may close it there. Knows nothing of what is done.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
WAITED = "waited"
"""What a step gives that has done nothing: something else has to be done before."""
Steps = Generator[str | None, None, T]


def finished(steps: Steps[T]) -> T:
    """Take all steps; return what they come to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def parts(start: int, stop: int, most: int | None) -> list[tuple[int, int]]:
    """Cut [start, stop) into ranges of at most `most`; None: one."""
    if most is None:
        return [(start, stop)] if start < stop else []
    return [(at, min(at + most, stop)) for at in range(start, stop, most)]
