"""A logits processor for vLLM: a request says what is to be said, whatever the model would say (`bench.vllm`).

The log-probabilities that vLLM gives back are those from before it: teacher forcing, through one request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED = "kvlingo_forced"


class Forced(AdapterLogitsProcessor):
    """Give all weight to the next token of `vllm_xargs.kvlingo_forced`."""

    def is_argmax_invariant(self) -> bool:
        """Tell that greedy answers change."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        """Return what forces one request's tokens, or None for a request that is free."""
        forced = (params.extra_args or {}).get(FORCED)
        return None if forced is None else lambda said, logits: only(logits, int(forced[len(said)]))


def only(logits: Tensor, token: int) -> Tensor:
    """Leave one token."""
    left = torch.full_like(logits, -torch.inf)
    left[token] = logits[token]
    return left
