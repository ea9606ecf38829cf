"""How query heads come to their keys and values in transformers' attention.

Knows one switch of transformers. Does not know caches or masks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations import sdpa_attention

SHARE_HEADS = "TRANSFORMERS_SDPA_FORCE_GQA"
_SHARING = threading.Lock()
_SHARERS: list[str | None] = []
"""What was set before the first of the passes that go on now; one entry for each of them."""


@contextmanager
def heads_that_share(device: torch.device) -> Iterator[None]:
    """Let query heads share their keys and values under a mask too: on a CPU transformers copies them for each head otherwise.

    It looks at this variable at every call. Versions that don't know it copy, which is slower and nothing else.
    """
    if device.type != "cpu":
        yield
        return
    with _SHARING:
        _SHARERS.append(_SHARERS[0] if _SHARERS else os.environ.get(SHARE_HEADS))
        os.environ[SHARE_HEADS] = "1"
    try:
        yield
    finally:
        with _SHARING:
            before = _SHARERS.pop()
            if not _SHARERS and before is None:
                os.environ.pop(SHARE_HEADS, None)
            elif not _SHARERS:
                os.environ[SHARE_HEADS] = str(before)


def shares_heads(model: Any, device: torch.device) -> bool:
    """Tell whether a transformers model's heads share under a mask, within `heads_that_share`."""
    if model.config._attn_implementation != "sdpa":
        return False
    nothing = torch.empty(0, device=device)
    with heads_that_share(device):
        return bool(sdpa_attention.use_gqa_in_sdpa(nothing, nothing, nothing))
