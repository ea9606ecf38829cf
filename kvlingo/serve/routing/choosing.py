"""What a router is asked and what it answers, as values.

Knows prompts and names of models. Does not know engines: a router decides, `routed` carries out, `comparing` replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlingo.serve.protocol import Help, Message

Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class Pair:
    """The two models that a router chooses between, by the names they are served by."""

    small: str
    big: str

    def other(self, name: str) -> str:
        """Return the one that is not `name`."""
        return self.small if name == self.big else self.big


@dataclass(frozen=True)
class Choice:
    """Who answers, and why in a few words. A reason holds numbers and names, never a word of the prompt.

    `help`: another model for single tokens of the answer; then both say it.
    """

    model: str
    reason: str
    help: Help | None = None


@dataclass(frozen=True)
class Heard:
    """A whole answer that nobody has seen yet.

    Fields:
        mean_logprob: of its tokens, in nats; None where it has none.
        text: None where it was not recorded.
        cut: whether its limit of tokens ended it; None where that was not recorded.
    """

    tokens: int
    mean_logprob: float | None
    text: str | None = None
    cut: bool | None = None


class Router(Protocol):
    """Decides who answers. Keeps nothing between requests, so that no request can learn of another by it."""

    @property
    def name(self) -> str:
        """Return the name it is chosen by."""
        ...

    @property
    def pair(self) -> Pair:
        """Return the models it chooses between."""
        ...

    @property
    def listens(self) -> bool:
        """Tell whether a first answer is held back and judged before anything is sent."""
        ...

    def choose(self, prompt: Prompt) -> Choice:
        """Say who answers first."""
        ...

    def judge(self, heard: Heard) -> Choice:
        """Say whose answer is sent once the first has been heard: the first's, or the other's."""
        ...


def contents(prompt: Prompt) -> list[tuple[str, str]]:
    """Return role and text of each message; a text alone is a user's."""
    if isinstance(prompt, str):
        return [("user", prompt)]
    return [(str(message["role"]), str(message.get("content") or "")) for message in prompt]


def last_of_user(prompt: Prompt) -> str:
    """Return what the user said last; empty where no user has spoken."""
    return next((text for role, text in reversed(contents(prompt)) if role == "user"), "")


def turns(prompt: Prompt) -> int:
    """Return how often the user has spoken."""
    return sum(role == "user" for role, _ in contents(prompt))
