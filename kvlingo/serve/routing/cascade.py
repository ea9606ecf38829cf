"""The `cascade` router: the small model answers, and the big one where the small one was not sure.

After FrugalGPT (Chen et al. 2023), with the answer's own mean log-probability as its score. The answer is held back until it has
been judged, so nobody ever sees two beginnings; the price is that even a kept answer comes in one piece. The default limit is a
guess that nothing was measured for: `kvlingo route eval` shows what another one costs and brings.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo.serve.routing.choosing import Choice, Heard, Pair, Prompt


@dataclass(frozen=True)
class CascadeRule:
    """`escalate_below`: the mean log-probability of a token, in nats, under which the big model takes over."""

    escalate_below: float = -1.0


@dataclass(frozen=True)
class Cascade:
    """Lets the small model try."""

    pair: Pair
    rule: CascadeRule = CascadeRule()
    name: str = "cascade"
    listens: bool = True

    def choose(self, prompt: Prompt) -> Choice:
        """Say that the small model tries first, whatever is asked."""
        return Choice(self.pair.small, f"{self.pair.small} tries first")

    def judge(self, heard: Heard) -> Choice:
        """Keep the answer, or give it to the big model; an answer without a token says nothing for itself."""
        limit, small, big = self.rule.escalate_below, self.pair.small, self.pair.big
        if heard.mean_logprob is None:
            return Choice(big, f"{small} said nothing")
        if not heard.mean_logprob >= limit:
            return Choice(big, f"mean log-probability of {small} {heard.mean_logprob:.3f} < {limit:g}")
        return Choice(small, f"mean log-probability {heard.mean_logprob:.3f} ≥ {limit:g}")
