"""The `cascade` router: the small model answers, and the big one where the small one was not sure or its answer looks bad.

After FrugalGPT (Chen et al. 2023). An answer is scored by its own mean log-probability, and by rules that read it: whether it
goes in circles, is very short, was cut by its limit of tokens, or says one of given things. It is held back until it has been
judged, so nobody ever sees two beginnings; the price is that even a kept answer comes in one piece. The default limits are
guesses that nothing was measured for: `kvlingo route eval` shows what others cost and bring.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvlingo.serve.routing.choosing import Choice, Heard, Pair, Prompt

RUN = 20
"""So many characters make a run; one that stood in the answer before is repeated. Not words: not every script has spaces."""

FEWEST_RUNS = 80
"""An answer with fewer runs is too short to be called repetitive."""

NEVER_REPEATS = 1.0
"""A share that no answer reaches: each run stands there for the first time once."""


@dataclass(frozen=True)
class CascadeRule:
    """When the big model takes over; each alone is enough.

    Fields:
        escalate_below: the mean log-probability of a token, in nats, under which it does.
        escalate_repeating: the share of repeated runs of the answer from which on it does; 1: never.
        escalate_shorter_than: so many characters an answer must have; 0: any length will do.
        escalate_matching: regular expressions; an answer in which one is found goes.
        escalate_cut: whether an answer that its limit of tokens has cut goes.
    """

    escalate_below: float = -1.0
    escalate_repeating: float = 0.6
    escalate_shorter_than: int = 0
    escalate_matching: tuple[str, ...] = ()
    escalate_cut: bool = False


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
        fault = fault_of(heard, self.rule)
        if fault is not None:
            return Choice(big, f"the answer of {small} {fault}")
        return Choice(small, f"mean log-probability {heard.mean_logprob:.3f} ≥ {limit:g}")


# --- reading an answer -----------------------------------------------------------------------------------------------


def fault_of(heard: Heard, rule: CascadeRule) -> str | None:
    """Say what is wrong with an answer, without a word of it; None: nothing, or its text is not known."""
    if rule.escalate_cut and heard.cut:
        return "was cut by its limit of tokens"
    if heard.text is None:
        return None
    length = len(heard.text.strip())
    if length < rule.escalate_shorter_than:
        return f"has {length} characters, fewer than {rule.escalate_shorter_than}"
    for number, pattern in enumerate(rule.escalate_matching, 1):
        if re.search(pattern, heard.text):
            return f"matches expression {number} of escalate_matching"
    share = repeated(heard.text) if rule.escalate_repeating < NEVER_REPEATS else 0.0
    if share >= rule.escalate_repeating:
        return f"repeats itself: {share:.2f} ≥ {rule.escalate_repeating:g}"
    return None


def repeated(text: str) -> float:
    """Return the share of an answer's runs that stand in it before, from 0 to below 1; 0 for one that is too short to tell."""
    plain = " ".join(text.split())
    count = len(plain) - RUN + 1
    if count < FEWEST_RUNS:
        return 0.0
    return 1.0 - len({plain[i : i + RUN] for i in range(count)}) / count
