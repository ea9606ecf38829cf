"""The target's own predictions of a continuation, kept on disk: the likeliest tokens of each position, and what all others have.

For texts that are distilled on more than once: another rate, a control, other maps. Knows logits and files. The KL to what is
kept is that of two coarser distributions, in which all other tokens are one: never more than the whole one, and the same where
all are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvlingo.metrics import log_probabilities
from kvlingo.stats import load_tensors, save_tensors


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens of each position.

    Fields:
        ids, log_p: [positions, kept].
        log_rest: [positions] of all other tokens together; -inf where there are none.
    """

    ids: Tensor
    log_p: Tensor
    log_rest: Tensor


def likeliest(logits: Tensor, count: int) -> Likeliest:
    """Return the `count` likeliest tokens of each row of logits [positions, vocabulary]."""
    log_p = log_probabilities(logits)
    kept = log_p.topk(min(count, log_p.shape[-1]), dim=-1)
    return Likeliest(kept.indices.to(torch.int32), kept.values, rest_of(log_p, kept.indices))


def rest_of(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of all tokens but `ids` [positions, kept]: [positions]."""
    return log_p.scatter(-1, ids, -torch.inf).logsumexp(-1)


def kl_to_likeliest_nats(native: Likeliest, logits: Tensor) -> Tensor:
    """Return KL(native ‖ other) at each position, all tokens that are not kept taken as one: [positions]."""
    log_q, ids = log_probabilities(logits), native.ids.long()
    kl = (native.log_p.exp() * (native.log_p - log_q.gather(-1, ids))).sum(-1)
    if ids.shape[-1] < log_q.shape[-1]:
        kl = kl + native.log_rest.exp() * (native.log_rest - rest_of(log_q, ids))
    return kl.clamp_min(0.0)


class KeptPredictions:
    """Predictions in a folder, one file a hand-over, written whole or not at all; what is damaged is made anew.

    Args:
        facts: what all predictions depend on: the target, its output head.
    """

    def __init__(self, folder: Path, count: int, facts: Sequence[str]) -> None:
        self.folder, self.count, self.facts = folder, count, list(facts)

    def of(self, ids: Sequence[int], continuation: Sequence[int], make: Callable[[], Tensor]) -> Likeliest:
        """Return the predictions of one hand-over; `make` gives the logits where they are not kept yet."""
        said = json.dumps([self.facts, self.count, list(ids), list(continuation)])
        file = self.folder / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.safetensors"
        loaded = load_tensors(file)
        if loaded is not None:
            return Likeliest(**loaded[0])
        found = likeliest(make(), self.count)
        save_tensors(file, {"ids": found.ids, "log_p": found.log_p, "log_rest": found.log_rest}, {})
        return found
