"""How long until the target's first token, by a hand-over and by reading everything again; and how much memory a call takes.

Knows models and hand-overs. Both ways are timed in one process, in turn, from the same text to the same kind of logits.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlingo.cost import PIECE_TOKENS
from kvlingo.errors import BadInput
from kvlingo.handoff import hand_off
from kvlingo.language_model import LanguageModel, read_in_pieces
from kvlingo.states import Conversation, ModelState, read_conversation, read_native
from kvlingo.texts import Document
from kvlingo.translator import Translator

CHARS_PER_TOKEN = 8
"""More than any tokenizer needs for prose: a text is cut from so many characters a token."""


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

    ids = target.ids(read_conversation(conversation, target, add_generation_prompt=True).ids)
    pieces = fastest_pieces(target, ids)

    def reread() -> int:
        reading = read_conversation(conversation, target, add_generation_prompt=True)
        read_in_pieces(target, target.ids(reading.ids), pieces)
        return len(reading.ids)

    tokens = reread()
    translated()
    pairs = [(timed_ms(translated, target), timed_ms(reread, target)) for _ in range(repeats)]
    handoff_ms, reprefill_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    return FirstToken(tokens, handoff_ms, reprefill_ms, source_ms, repeats)


def fastest_pieces(lm: LanguageModel, ids: Tensor) -> int | None:
    """Return the pieces in which a model reads ids fastest, None for all at once: what is compared with is the best one."""
    if len(ids) <= PIECE_TOKENS:
        return None
    return min((None, PIECE_TOKENS), key=lambda size: timed_ms(lambda: read_in_pieces(lm, ids, size), lm))


def timed_ms(run: Callable[[], Any], lm: LanguageModel) -> float:
    """Return how long a call takes, in milliseconds, until the device is done."""
    synchronise(lm)
    started = time.perf_counter()
    run()
    synchronise(lm)
    return 1e3 * (time.perf_counter() - started)


def peak_extra_bytes(run: Callable[[], Any], lm: LanguageModel) -> int | None:
    """Return how far memory rises during a call above what it was before; None where the system does not tell.

    On a GPU what PyTorch has in use; on a CPU the process's resident memory, whose peak Linux forgets when it is asked to.
    """
    if lm.device.type == "cuda":
        synchronise(lm)
        torch.cuda.reset_peak_memory_stats(lm.device)
        before = torch.cuda.memory_allocated(lm.device)
        run()
        synchronise(lm)
        return int(torch.cuda.max_memory_allocated(lm.device)) - before
    forgotten = forget_peak()
    before_resident = resident_bytes("VmRSS")
    run()
    peak = resident_bytes("VmHWM")
    return peak - before_resident if forgotten and peak is not None and before_resident is not None else None


def forget_peak() -> bool:
    """Let Linux count this process's peak anew; tell whether it does.

    What was freed and is kept for later would be taken again without a trace: it is given back first.
    """
    give_back_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def give_back_memory() -> None:
    """Let the C library give freed memory back to the system where it can be asked to (glibc).

    Between stages that need memory of other sizes, or after many texts of other lengths, it keeps gigabytes otherwise, in pieces
    that fit nothing.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if give_back is not None:
        give_back(0)


def resident_bytes(name: str) -> int | None:
    """Return one of the sizes that Linux keeps of this process."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def synchronise(lm: LanguageModel) -> None:
    """Wait for what the device still has to do."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)


def joined(documents: Sequence[Document], chars: int) -> str:
    """Return the first `chars` characters of documents, one after another. Raises `BadInput` where they are fewer."""
    text, size = list[str](), 0
    for document in documents:
        if size >= chars:
            break
        text.append(document.text)
        size += len(document.text) + 2
    whole = "\n\n".join(text)[:chars]
    if len(whole) < chars:
        raise BadInput(
            f"the texts have {len(whole)} characters, the longest length needs {chars}; give more with --text"
        )
    return whole


def cut(text: str, source: LanguageModel, target: LanguageModel, tokens: int) -> str:
    """Return the beginning of a text that the wordier of both models reads as about `tokens` tokens, and never as more."""
    part = text[: tokens * CHARS_PER_TOKEN]
    while True:
        longest = max(len(read_conversation(part, lm, add_generation_prompt=True)) for lm in (source, target))
        if longest <= tokens:
            return part
        part = part[: min(len(part) - 1, len(part) * tokens // longest)]
