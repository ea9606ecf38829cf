"""Several rows in one cache: padded on the left, each at its own positions.

Knows models and caches. Padding is hidden by the attention mask and never copied out: whatever leaves a batch is a `KV`
of one row, as if the row had been read alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlingo.cache import full_cache, native_cache, read_cache
from kvlingo.cache_writing import write_rows
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, cache_devices, read
from kvlingo.probing import decoder_of, run

FILLER = 0  # any token of the vocabulary: nothing attends to it


@dataclass(frozen=True)
class Batch:
    """Rows in one cache. `padding` says how many of the first slots of each row hold nothing; it never changes."""

    cache: Any
    padding: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Return the length of the longest row."""
        return int(self.cache.get_seq_length())


@dataclass(frozen=True)
class BatchPrefill:
    """A filled batch and the logits [rows, positions, vocabulary] of the last tokens read into it."""

    batch: Batch
    logits: Tensor


def side_by_side(lm: LanguageModel, tokens: int) -> bool:
    """Return whether rows of up to `tokens` tokens come out of one batch as they would alone, ready to go on.

    Not where the longest row changes the rotary angles of all (longrope, dynamic NTK), and not where a row's recurrent state
    would have to be taken out of the batch or put into one.
    """
    limits = (lm.geometry.angle_limit, _slots_alike(lm))
    return lm.target_refusal is None and all(limit is None or tokens <= limit for limit in limits)


def _slots_alike(lm: LanguageModel) -> int | None:
    """Return up to how many slots a query is the same in all of them; None where it always is.

    Llama 4 scales queries of layers without positions by the slot of the cache, padding included, from `floor_scale` on: too far
    to be found out by reading.
    """
    config = lm.model.config.get_text_config(decoder=True)
    return int(config.floor_scale) - 1 if getattr(config, "attn_temperature_tuning", False) else None


def prefill_batch(
    lm: LanguageModel,
    rows: Sequence[Tensor],
    *,
    batch: Batch | None = None,
    full_length: bool = False,
    logits_to_keep: int = 1,
) -> BatchPrefill:
    """Let the model read one row of ids [tokens] for each row of the batch, which grows in place.

    Without a batch, the rows may have any lengths and a new cache is made (of full length as for `models.prefill`). With
    one they must be equally long: nothing may lie between a row's cached tokens and its new ones.
    """
    if not rows or any(row.ndim != 1 or not len(row) for row in rows):
        raise BadInput("nothing to read in some row; give each at least one token id, as [tokens]")
    if batch is None:
        longest = max(map(len, rows))
        cache = full_cache(lm.model.config) if full_length else native_cache(lm.model.config)
        batch = Batch(cache, tuple(longest - len(row) for row in rows))
    elif len(rows) != len(batch.padding) or len({len(row) for row in rows}) > 1:
        lengths = [len(row) for row in rows]
        raise BadInput(
            f"a batch of {len(batch.padding)} rows goes on by equally many tokens in each, got lengths {lengths}; "
            "let the rows read what differs before joining them"
        )
    _refuse_mixed_angles(lm, batch, batch.slots + max(map(len, rows)))
    logits = run(lm.model, cache=batch.cache, logits_to_keep=logits_to_keep, **_inputs(batch, rows)).logits
    return BatchPrefill(batch, logits)


def _refuse_mixed_angles(lm: LanguageModel, batch: Batch, longest: int) -> None:
    limit = lm.geometry.angle_limit
    if limit is not None and longest > limit and any(batch.padding):
        raise BadInput(
            f"{lm.name} changes its rotary angles beyond {limit} tokens, and so would a row of {longest} for the shorter rows "
            "beside it; read them one by one"
        )


def _inputs(batch: Batch, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return ids, mask and positions of the next tokens, those of the padding included where nothing is cached yet."""
    past, new, device = batch.slots, max(map(len, rows)), rows[0].device
    ids = torch.full((len(rows), new), FILLER, dtype=torch.long, device=device)
    for row, values in enumerate(rows):
        ids[row, new - len(values) :] = values
    slots = torch.arange(past + new, device=device)[None] - torch.tensor(batch.padding, device=device)[:, None]
    return {
        "input_ids": ids,
        "attention_mask": (slots >= 0).long(),
        "position_ids": slots[:, past:].clamp(min=0),
    }


@torch.no_grad()
def read_batch(lm: LanguageModel, rows: Sequence[Tensor]) -> list[KV]:
    """Return the model's own position-free `KV` of each row of ids, every layer in full: `models.read` of several at once."""
    longest = max(map(len, rows))
    if not side_by_side(lm, longest):
        return [read(lm, row) for row in rows]
    batch = Batch(full_cache(lm.model.config), tuple(longest - len(row) for row in rows))
    run(decoder_of(lm.model), cache=batch.cache, **_inputs(batch, rows))
    return [row_kv(lm, batch, row) for row in range(len(rows))]


def row_kv(lm: LanguageModel, batch: Batch, row: int, *, tokens: int | None = None, partial: bool = False) -> KV:
    """Copy the first `tokens` tokens (None: all) of one row out of a batch, without its padding."""
    start = batch.padding[row]
    stop = None if tokens is None else start + tokens
    return read_cache(
        batch.cache, lm.rotary, lm.geometry, start=start, stop=stop, position=-start, row=row, partial=partial
    )


def join(lm: LanguageModel, rows: Sequence[KV]) -> Batch:
    """Write rows of their own lengths into one cache that the model can go on from."""
    if lm.target_refusal is not None:
        raise UnsupportedCache(f"{lm.name}: {lm.target_refusal}")
    placed = [row.place(cache_devices(lm)) for row in rows]
    longest = max(row.tokens for row in rows)
    cache = write_rows(placed, lm.rotary, lm.geometry, lm.model.config)
    return Batch(cache, tuple(longest - row.tokens for row in rows))
