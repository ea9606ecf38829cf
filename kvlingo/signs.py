"""What a hand-over shows of its quality once the target has read its tail: numbers that cost a short pass at most.

Knows both models and what they hold. What the numbers mean is `confidence`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlingo.cache import can_cut, read_cache
from kvlingo.cache_writing import truncate
from kvlingo.errors import UnsupportedCache
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.metrics import log_probabilities, nll_nats
from kvlingo.plan import HandoffPlan
from kvlingo.reading import Reading
from kvlingo.translator import Translator
from kvlingo.trust import embeddings_of, exact_layers, feature_distances, first_layers_of, place_of

LOOKED_BACK_AT = 48
"""So many translated tokens before the tail are looked at for how far they are from what the maps were fitted on."""


@dataclass(frozen=True)
class Seen:
    """A hand-over whose tail has been read.

    Fields:
        source_reading, source_cache: what the source holds.
        reading: the conversation as the target reads it; `alignment` [tokens] the source token of each, -1 for none.
        cache: the target's, tail included.
        logits: [tail, vocabulary] what the target predicted from each token of the tail.
    """

    source: LanguageModel
    target: LanguageModel
    translator: Translator
    source_reading: Reading
    source_cache: Any
    reading: Reading
    alignment: Tensor
    plan: HandoffPlan
    cache: Any
    logits: Tensor

    @property
    def tail_start(self) -> int:
        """Place of the first token of the tail."""
        return self.plan.translated[1]

    @property
    def read_by_source(self) -> int:
        """End of the tail's tokens that the source has read too; the tail's start where there are none."""
        tail = self.alignment[self.tail_start :]
        return self.tail_start + int((tail >= 0).long().cumprod(0).sum())


@torch.no_grad()
def signs_of(seen: Seen, *, untrusted: int = 0) -> dict[str, float | None]:
    """Return every sign of `confidence.SIGNS`; None for one that can't be had here.

    Args:
        untrusted: source tokens before this one are themselves translated, and not looked at.
    """
    ids = seen.target.ids(seen.reading.ids)
    logits, follow = seen.logits[:-1], ids[seen.tail_start + 1 :]
    log_p = log_probabilities(seen.logits)
    found: dict[str, float | None] = {
        "tail_nats": float(nll_nats(logits, follow).mean()) if len(follow) else None,
        "entropy_nats": float(-(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0)).sum(-1).mean()),
        "gap_nats_per_byte": gap(seen),
        "log_tokens": float(torch.tensor(float(seen.plan.tokens)).log()),
    }
    return found | from_maps(seen, ids, untrusted)


def gap(seen: Seen) -> float | None:
    """Return how much more than the source the target is surprised by the tail, in nats a byte of text."""
    start, stop = seen.tail_start, seen.read_by_source
    if stop - start < 2:
        return None
    first, last = int(seen.alignment[start]), int(seen.alignment[stop - 1])
    theirs = source_nats_per_byte(seen.source, seen.source_reading, seen.source_cache, first, last)
    num_bytes = seen.reading.spans[stop - 1][1] - seen.reading.spans[start][1]
    if theirs is None or num_bytes <= 0:
        return None
    ids = seen.target.ids(seen.reading.ids[start + 1 : stop])
    return float(nll_nats(seen.logits[: len(ids)], ids).sum()) / num_bytes - theirs


def source_nats_per_byte(source: LanguageModel, reading: Reading, cache: Any, first: int, last: int) -> float | None:
    """Let the source read its tokens [first, last) once more; return its surprise at those after `first` up to `last`.

    None where its cache can't go back so far.
    """
    num_bytes = reading.spans[last][1] - reading.spans[first][1]
    try:
        if last <= first or num_bytes <= 0 or not can_cut(cache, first, source.geometry):
            return None
        shorter = truncate(cache, first, source.geometry, source.model.config) if first else None
    except UnsupportedCache:
        return None
    ids = source.ids(reading.ids[first : last + 1])
    logits = prefill(source, ids[:-1], cache=shorter, logits_to_keep=0).logits
    return float(nll_nats(logits, ids[1:]).sum()) / num_bytes


def from_maps(seen: Seen, ids: Tensor, untrusted: int) -> dict[str, float | None]:
    """Return the signs that the maps give: how far their inputs lie from what they know, and how far off they are at the tail."""
    config, (start, stop), last = seen.translator.config, seen.plan.translated, seen.read_by_source
    first = max(start, stop - LOOKED_BACK_AT)
    device, dtype = place_of(seen.translator)
    source_kv, offset = None, 0
    if config.reads_source:
        offset = max(untrusted, int(seen.alignment[first]) - max(config.source_lags), 0)
        source_kv = read_cache(seen.source_cache, seen.source.rotary, seen.source.geometry, start=offset).to(
            device, dtype
        )
    alignment, embeddings = seen.alignment - offset, embeddings_of(seen.target, seen.translator, ids)
    exact = exact_layers(seen.plan, seen.translator)
    distances = feature_distances(
        seen.translator, source_kv, alignment[first:last], embeddings, start=first, exact=exact
    )
    found: dict[str, float | None] = {
        "distance": float(torch.stack(list(distances.values())).mean()) if distances else None,
        "mismatch": None,
    }
    if last <= stop or not distances:
        return found
    native = read_cache(seen.cache, seen.target.rotary, seen.target.geometry, start=stop, stop=last)
    mapped = seen.translator(
        source_kv,
        alignment[stop:last],
        embeddings,
        start=stop,
        native=first_layers_of(native, exact).to(device, dtype) if exact else None,
    )
    return found | {"mismatch": relative_gap(native.to(device, dtype), mapped, exact)}


def relative_gap(native: KV, other: KV, exact: int) -> float:
    """Return the squared difference as a share of the native squares, the mean over keys and values of the mapped layers."""
    sides = [*zip(native.keys, other.keys, strict=True)][exact:] + [*zip(native.values, other.values, strict=True)][
        exact:
    ]
    shares = [float((x - y).square().sum() / x.square().sum().clamp(min=1e-30)) for x, y in sides]
    return sum(shares) / len(shares)
