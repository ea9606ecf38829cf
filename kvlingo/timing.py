"""How long until the target's first token: by a hand-over, and by reading everything again.

Knows models and hand-overs. Both ways are timed in one process, in turn, from the same text to the same kind of logits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvlingo.handoff import Conversation, ModelState, hand_off, read_conversation, read_native
from kvlingo.models import LanguageModel, prefill
from kvlingo.translator import Translator


@dataclass(frozen=True)
class FirstToken:
    """Medians over `repeats` runs after one that is not counted.

    Fields:
        tokens: of the target.
        handoff_ms, reprefill_ms: from the conversation to the logits of the next token.
        source_prefill_ms: once; in a conversation the source has already read.
    """

    tokens: int
    handoff_ms: float
    reprefill_ms: float
    source_prefill_ms: float
    repeats: int

    @property
    def speedup(self) -> float:
        """Return how many times sooner the hand-over is there."""
        return self.reprefill_ms / self.handoff_ms

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return {**asdict(self), "speedup": self.speedup}


@torch.no_grad()
def time_to_first_token(
    conversation: Conversation,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    *,
    source_state: ModelState | None = None,
    repeats: int = 5,
    **dial: Any,
) -> FirstToken:
    """Time a hand-over against the target's own re-prefill.

    Args:
        source_state: what the source has read; it reads the conversation here otherwise.
        dial: `sink`, `tail`, `native_layers`, `no_text` of `hand_off`.
    """
    started = time.perf_counter()
    state = source_state or read_native(conversation, source)
    source_ms = 1e3 * (time.perf_counter() - started)

    def translated() -> None:
        hand_off(conversation, source, target, translator, source_state=state, **dial)

    def reread() -> int:
        reading = read_conversation(conversation, target, add_generation_prompt=True)
        prefill(target, target.ids(reading.ids))
        return len(reading.ids)

    tokens = reread()
    translated()
    pairs = [(timed_ms(translated, target), timed_ms(reread, target)) for _ in range(repeats)]
    handoff_ms, reprefill_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    return FirstToken(tokens, handoff_ms, reprefill_ms, source_ms, repeats)


def timed_ms(run: Callable[[], Any], lm: LanguageModel) -> float:
    """Return how long a call takes, in milliseconds, until the device is done."""
    synchronise(lm)
    started = time.perf_counter()
    run()
    synchronise(lm)
    return 1e3 * (time.perf_counter() - started)


def synchronise(lm: LanguageModel) -> None:
    """Wait for what the device still has to do."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
