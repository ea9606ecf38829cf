"""The `threshold` router: long questions, long conversations and late turns go to the big model.

The defaults are guesses that nothing was measured for: compare them with `kvlingo route eval` on your own conversations. Lengths
are in characters, because the two models count tokens differently.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo.serve.routing.choosing import Choice, Heard, Pair, Prompt, contents, last_of_user, turns


@dataclass(frozen=True)
class ThresholdRule:
    """From where on the big model answers; each alone is enough.

    Fields:
        question_chars: of what the user said last.
        total_chars: of the whole conversation.
        turn: the user's turn, the first being 1.
    """

    question_chars: int = 1_500
    total_chars: int = 8_000
    turn: int = 8


@dataclass(frozen=True)
class Threshold:
    """Chooses by length and turn."""

    pair: Pair
    rule: ThresholdRule = ThresholdRule()
    name: str = "threshold"
    listens: bool = False

    def choose(self, prompt: Prompt) -> Choice:
        """Say who answers: the big model from the first limit that is reached."""
        reached = (
            ("question", len(last_of_user(prompt)), self.rule.question_chars, "characters"),
            ("conversation", sum(len(text) for _, text in contents(prompt)), self.rule.total_chars, "characters"),
            ("turn", turns(prompt), self.rule.turn, ""),
        )
        for what, value, limit, unit in reached:
            if value >= limit:
                return Choice(self.pair.big, f"{what} {value} ≥ {limit} {unit}".rstrip())
        return Choice(self.pair.small, "no limit of length or turn is reached")

    def judge(self, heard: Heard) -> Choice:
        """Never asked."""
        raise NotImplementedError
