"""The `token` router: the small model answers, and single tokens of which it is unsure come from the big one.

Sends what it says as it comes. Nothing is decided here but the limit; how two models say one answer is `serve/duet.py`. The
default limit is a guess that nothing was measured for: at it, e^1 ≈ 2.7 equally likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo.serve.protocol import Help
from kvlingo.serve.routing.choosing import Choice, Heard, Pair, Prompt


@dataclass(frozen=True)
class TokenRule:
    """`from_nats`: the entropy of the small model's next token from which the big model chooses it."""

    from_nats: float = 1.0


@dataclass(frozen=True)
class Token:
    """Lets the big model choose single tokens."""

    pair: Pair
    rule: TokenRule = TokenRule()
    name: str = "token"
    listens: bool = False

    def choose(self, prompt: Prompt) -> Choice:
        """Say that the small model answers with the big one's help, whatever is asked."""
        limit, big = self.rule.from_nats, self.pair.big
        return Choice(self.pair.small, f"tokens of {limit:g} nats or more from {big}", Help(big, limit))

    def judge(self, heard: Heard) -> Choice:
        """Never asked."""
        raise NotImplementedError
