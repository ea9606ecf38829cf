"""How far a model on a translated cache is from itself on its own cache, in numbers with intervals.

Knows logits, per-position scores and the bootstrap over clusters. Does not know models, caches, or
which arms have to win: `report` decides that.

Every figure is a ratio of sums over documents, sum(numerators) / sum(denominators): KL per
position, bits per byte, share of the context's gain. So one function gives them all their
intervals, and paired comparisons come free: the same resampled weights for every arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvlingo.errors import BadInput

CHUNK = 64
FEW_CLUSTERS = 6
RESAMPLES = 2000
CONFIDENCE = 0.95
POSITION_BANDS = {"1": slice(0, 1), "2-8": slice(1, 8), "rest": slice(8, None)}

Ratio = tuple[Tensor, Tensor]
Key = TypeVar("Key", bound=Hashable)


class Estimate(TypedDict):
    """A figure and its 95 % interval; `low` and `high` are None where there can be no interval."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ArmScores:
    """One arm on one document; every tensor is [positions], one entry for each scored prediction.

    Fields:
        nll_nats: negative log-likelihood of the token that really came next.
        kl_nats: KL(native ‖ arm); None where the arm has another vocabulary (`source_alone`).
        top1: whether the arm's likeliest token is native's; None where `kl_nats` is.
        num_bytes: bytes the arm scored, where they are not the document's.
    """

    nll_nats: Tensor
    kl_nats: Tensor | None = None
    top1: Tensor | None = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class DocumentScores:
    """All arms on one held-out document.

    Fields:
        cluster: the book or site the document is from: what is drawn in the bootstrap.
        kind: what sort of text it is, e.g. "novel".
        num_bytes: UTF-8 bytes of the scored continuation.
        arms: name of the arm -> its scores.
    """

    cluster: str
    kind: str
    num_bytes: int
    arms: dict[str, ArmScores]


def kl_nats(native_logits: Tensor, logits: Tensor, *, mask: Tensor | None = None, chunk: int = CHUNK) -> Tensor:
    """Return KL(native ‖ other) at each position, in nats.

    KL = sum_v p_v (log p_v - log q_v), in log space and at least float32 whatever the dtype of the
    logits: bfloat16 sums over a vocabulary of 150,000 leave an error of 1e-2. A token that native
    rules out (p = 0, logit -inf) adds nothing. Where only the other rules it out, KL is infinite,
    as it should be. Rounding below zero is cut off. Positions go through in chunks, recomputed in
    the backward pass, so no float32 copy is larger than chunk x vocabulary.

    Args:
        native_logits: [..., vocabulary].
        logits: the other side's, of the same shape.
        mask: [...], True where a position counts; the others give 0 and no gradient.
        chunk: positions at a time; changes memory only.

    Raises:
        BadInput: the shapes differ.
    """
    if native_logits.shape != logits.shape:
        raise BadInput(
            f"logits of the two sides differ in shape: native {list(native_logits.shape)}, other"
            f" {list(logits.shape)}; score the same positions with the same model"
        )
    return by_chunks(kl_of_rows, (native_logits, logits), logits.shape[:-1], mask, chunk)


def nll_nats(logits: Tensor, next_ids: Tensor, *, mask: Tensor | None = None, chunk: int = CHUNK) -> Tensor:
    """Return the negative log-likelihood of `next_ids` [...] under `logits` [..., vocabulary].

    `next_ids[i]` is the token that follows the position of `logits[i]`: the caller has done the
    shift. Chunks and mask as in `kl_nats`.
    """
    if next_ids.shape != logits.shape[:-1]:
        raise BadInput(
            f"each row of logits needs one next token: got {list(next_ids.shape)} ids for logits"
            f" {list(logits.shape)}; shift the ids by one and cut both to the scored positions"
        )
    return by_chunks(nll_of_rows, (logits, next_ids), logits.shape[:-1], mask, chunk)


def top1_agreement(native_logits: Tensor, logits: Tensor) -> Tensor:
    """Return whether both sides' likeliest token is the same: [..., vocabulary] -> bool [...]."""
    return native_logits.argmax(dim=-1) == logits.argmax(dim=-1)


def masked_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of `values` where `mask` is True; 0, with zero gradients, if nowhere."""
    kept = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    return values.masked_fill(~kept, 0.0).sum() / kept.sum().clamp_min(1)


def by_chunks(
    rows: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    shape: torch.Size,
    mask: Tensor | None,
    chunk: int,
) -> Tensor:
    """Apply `rows` to the leading dims of `inputs` in chunks; masked positions never enter."""
    if chunk < 1:
        raise BadInput(f"chunk is {chunk}; it must be at least 1 position")
    if mask is not None and mask.shape != shape:
        raise BadInput(f"mask is {list(mask.shape)} for positions {list(shape)}; give one entry a position")
    flat = [x.reshape(shape.numel(), *x.shape[len(shape) :]) for x in inputs]
    kept = None if mask is None else mask.reshape(-1).nonzero().squeeze(1)
    if kept is not None:
        flat = [x[kept] for x in flat]
    parts = zip(*(x.split(chunk) for x in flat), strict=True)
    values = torch.cat([recomputed(rows, *part) for part in parts])
    if kept is not None:
        values = values.new_zeros(shape.numel()).index_put((kept,), values)
    return values.reshape(shape)


def recomputed(rows: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call `rows`, keeping only its inputs for the backward pass."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return rows(*inputs)
    # Bound, not handed over: checkpoint can't save a tensor that was made in inference mode.
    bound = partial(rows, *inputs)
    result: Tensor = checkpoint(bound, use_reentrant=False, preserve_rng_state=False)
    return result


def kl_of_rows(native_logits: Tensor, logits: Tensor) -> Tensor:
    """Return KL(native ‖ other) of each row of two [rows, vocabulary] logits; see `kl_nats`."""
    log_p, log_q = log_probabilities(native_logits), log_probabilities(logits)
    p = log_p.exp()
    gap = (log_p - log_q).masked_fill(p == 0, 0.0)
    return (p * gap).sum(dim=-1).clamp_min(0.0)


def nll_of_rows(logits: Tensor, next_ids: Tensor) -> Tensor:
    """Return -log p(next id) of each row of [rows, vocabulary] logits."""
    ids = next_ids.unsqueeze(-1).clone()  # autograd can't save ids that were made in inference mode
    return -log_probabilities(logits).gather(-1, ids).squeeze(-1)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log softmax over the vocabulary in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def cluster_bootstrap(clusters: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """Draw how often each document counts in each resample: float64 [resamples, documents].

    Documents of one book or site are alike, so whole clusters are drawn with replacement, as many
    as there are. With few clusters that alone would be too sure of itself (one cluster would give
    intervals of no width): below `FEW_CLUSTERS`, the documents of each drawn cluster are drawn with
    replacement too, which errs on the wide side (two-stage bootstrap, Davison and Hinkley 1997,
    section 3.8). Use the same weights for every arm: that is what pairs them.
    """
    names = sorted(set(clusters))
    member_of = torch.tensor([names.index(cluster) for cluster in clusters])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(names), (resamples, len(names)), generator=generator)
    if len(names) < FEW_CLUSTERS:
        return document_counts(drawn, member_of, generator)
    counts = torch.zeros(resamples, len(names), dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return counts[:, member_of]


def document_counts(drawn: Tensor, member_of: Tensor, generator: torch.Generator) -> Tensor:
    """Draw, inside each of the `drawn` clusters [resamples, draws], as many documents as it has.

    `member_of` [documents] is the cluster of each document.
    """
    sizes = member_of.bincount()
    by_cluster = member_of.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    size = sizes[drawn].unsqueeze(-1)
    slots = torch.arange(int(sizes.max()))
    uniform = torch.rand(*drawn.shape, len(slots), generator=generator, dtype=torch.float64)
    documents = by_cluster[first[drawn].unsqueeze(-1) + (uniform * size).long()]
    counts = torch.zeros(len(drawn), len(member_of), dtype=torch.float64)
    counts.scatter_add_(1, documents.flatten(1), (slots < size).double().flatten(1))
    return counts


def estimates(ratios: Mapping[Key, Ratio | None], weights: Tensor) -> dict[Key, Estimate | None]:
    """Return sum(numerators) / sum(denominators) with its 95 % interval, for each ratio.

    The interval is the percentile interval of the resamples. None where the figure does not exist:
    its denominator is not positive (no scored position, no gain from the context) or it is not
    finite. No interval where that is so in some resample, or from a single document.

    Args:
        ratios: numerators and denominators, float64 [documents] each.
        weights: [resamples, documents], from `cluster_bootstrap`.
    """
    held = {key: ratio for key, ratio in ratios.items() if ratio is not None}
    if not held:
        return dict.fromkeys(ratios)
    tops, bottoms = (torch.stack(rows) for rows in zip(*held.values(), strict=True))
    totals = bottoms.sum(1)
    figures = (tops.sum(1) / totals, totals, *percentile_interval(tops, bottoms, weights))
    columns = zip(*(x.tolist() for x in figures), strict=True)
    found = {key: as_estimate(*row) for key, row in zip(held, columns, strict=True)}
    return {key: found.get(key) for key in ratios}


def percentile_interval(tops: Tensor, bottoms: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends of each row's interval, [figures, documents]; NaN where it has none."""
    below = bottoms @ weights.T
    values = (tops @ weights.T) / below
    valid = (below.amin(1) > 0) & values.sum(1).isfinite() & (tops.shape[1] > 1)
    tail = (1 - CONFIDENCE) / 2
    ends = values.quantile(torch.tensor([tail, 1 - tail], dtype=values.dtype), dim=1)
    low, high = ends.masked_fill(~valid, math.nan)
    return low, high


def as_estimate(mean: float, denominator: float, low: float, high: float) -> Estimate | None:
    """Turn a figure into an `Estimate`, None if it does not exist."""
    if not denominator > 0 or not math.isfinite(mean):
        return None
    if math.isnan(low):
        return {"mean": mean, "low": None, "high": None}
    return {"mean": mean, "low": low, "high": high}


def arm_ratios(scores: Sequence[DocumentScores], arm: str) -> dict[str, Ratio | None]:
    """Return the five metrics of one arm as ratios; None for a metric that the arm can't have."""
    nll, counts = sums_over(scores, arm, "nll_nats"), position_counts(scores, arm)
    kl, top1 = sums_over(scores, arm, "kl_nats"), sums_over(scores, arm, "top1")
    assert nll is not None
    return {
        "kl_nats": None if kl is None else (kl, counts),
        "top1_agreement": None if top1 is None else (top1, counts),
        "nll_nats": (nll, counts),
        "bits_per_byte": (nll, math.log(2) * byte_counts(scores, arm)),
        "share_kept": share_ratio(scores, arm),
    }


def share_ratio(scores: Sequence[DocumentScores], arm: str) -> Ratio | None:
    """Return what the arm keeps of the context's gain; None without both ends or over other bytes.

    share = (ΣNLL no_context - ΣNLL arm) / (ΣNLL no_context - ΣNLL native).
    """
    if not all({"no_context", "native"} <= document.arms.keys() for document in scores):
        return None
    if not torch.equal(byte_counts(scores, arm), byte_counts(scores, "native")):
        return None
    nothing, kept, everything = (sums_over(scores, name, "nll_nats") for name in ("no_context", arm, "native"))
    assert nothing is not None
    assert kept is not None
    assert everything is not None
    return nothing - kept, nothing - everything


def paired_kl_ratio(scores: Sequence[DocumentScores], arm: str, reference: str) -> Ratio | None:
    """Return KL of `arm` minus KL of `reference`: above 0, `reference` is closer to native."""
    of_arm, of_reference = (
        sums_over(scores, arm, "kl_nats"),
        sums_over(scores, reference, "kl_nats"),
    )
    if of_arm is None or of_reference is None:
        return None
    return of_arm - of_reference, position_counts(scores, arm)


def kl_band_ratios(scores: Sequence[DocumentScores], arm: str) -> dict[str, Ratio] | None:
    """Return KL at continuation positions 1, 2-8 and the rest; None for an arm without KL."""
    kls = [kl for document in scores if (kl := document.arms[arm].kl_nats) is not None]
    if len(kls) < len(scores):
        return None
    return {name: band_ratio([kl[band] for kl in kls]) for name, band in POSITION_BANDS.items()}


def band_ratio(parts: Sequence[Tensor]) -> Ratio:
    """Return the sum and the number of each document's values."""
    return total_each(parts), column([len(part) for part in parts])


def sums_over(scores: Sequence[DocumentScores], arm: str, field: str) -> Tensor | None:
    """Return the sum of one field of one arm in each document; None if a document lacks it."""
    values = [getattr(document.arms[arm], field) for document in scores]
    return None if any(value is None for value in values) else total_each(values)


def total_each(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of each tensor in float64 on the CPU."""
    return column([float(value.detach().double().sum()) for value in values])


def position_counts(scores: Sequence[DocumentScores], arm: str) -> Tensor:
    """Return the number of positions the arm scored in each document, float64."""
    return column([len(document.arms[arm].nll_nats) for document in scores])


def byte_counts(scores: Sequence[DocumentScores], arm: str) -> Tensor:
    """Return the number of bytes the arm scored in each document, float64."""
    own = [document.arms[arm].num_bytes for document in scores]
    counts = [d.num_bytes if n is None else n for d, n in zip(scores, own, strict=True)]
    return column(counts)


def column(values: Sequence[float]) -> Tensor:
    """Return one number per document as float64 [documents]."""
    return torch.tensor(values, dtype=torch.float64)


def check_scores(scores: Sequence[DocumentScores]) -> None:
    """Refuse scores that can't be compared arm against arm.

    Raises:
        BadInput: no documents; an arm on some only; arms with KL over different positions.
    """
    if not scores:
        raise BadInput("no held-out documents were scored; give at least one that is not used in fitting")
    names = set().union(*(document.arms for document in scores))
    for name in sorted(names):
        held = sum(name in document.arms for document in scores)
        if held < len(scores):
            raise BadInput(f"arm {name} is scored on {held} of {len(scores)} documents; score it on all")
    for number, document in enumerate(scores):
        check_positions(number, document)


def check_positions(number: int, document: DocumentScores) -> None:
    """Refuse a document whose arms with KL scored different positions."""
    expected = {len(arm.nll_nats) for arm in document.arms.values() if arm.kl_nats is not None}
    for name, arm in document.arms.items():
        lengths = {len(x) for x in (arm.kl_nats, arm.top1) if x is not None} - {len(arm.nll_nats)}
        if lengths or (arm.kl_nats is not None and len(expected) > 1):
            raise BadInput(
                f"document {number}: arm {name} scored {len(arm.nll_nats)} positions, others"
                f" {sorted(expected | lengths)}; score all arms at the same positions"
            )
