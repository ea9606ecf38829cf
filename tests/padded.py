"""Rows of their own lengths in one padded batch, held against each row alone: for every suite that needs `padded batch 3`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlingo.batches import Batch, join, prefill_batch, read_batch
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel
from tests import tiny

Change = Callable[[KV], KV]


def rows_of(lm: LanguageModel, lengths: Sequence[int]) -> list[Tensor]:
    """Return the ids of different texts of these lengths."""
    return [tiny.ids_of(lm, length, seed=seed) for seed, length in enumerate(lengths)]


@torch.no_grad()
def padded_error(
    lm: LanguageModel, prefixes: Sequence[int], new: int, change: Change = lambda kv: kv, *, step: int | None = None
) -> float:
    """Return how far logits after a padded batch of prefixes are from each row read alone, without any cache.

    The prefixes are read in one batch, taken out as rows, passed through `change` (what a test breaks), joined again;
    then each row reads `new` tokens, `step` at a time.
    """
    rows = rows_of(lm, [prefix + new for prefix in prefixes])
    kvs = read_batch(lm, [row[:prefix] for row, prefix in zip(rows, prefixes, strict=True)])
    batch = join(lm, [change(kv) for kv in kvs])
    tails = [row[prefix:] for row, prefix in zip(rows, prefixes, strict=True)]
    got = go_on(lm, batch, tails, step or new)
    cold = torch.stack([tiny.cold_logits(lm, row)[-new:] for row in rows])
    return float((got - cold).abs().max())


def go_on(lm: LanguageModel, batch: Batch, tails: Sequence[Tensor], step: int) -> Tensor:
    """Let every row read its tail, `step` tokens at a time; return logits [rows, tokens, vocabulary]."""
    found = [
        prefill_batch(lm, [tail[at : at + step] for tail in tails], batch=batch, logits_to_keep=0).logits
        for at in range(0, len(tails[0]), step)
    ]
    return torch.cat(found, dim=1)
