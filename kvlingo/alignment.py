"""Two tokenizers, one text: which source token feeds each target token.

Knows how the bytes of two readings correspond, and how two tokenizers relate. Does not know models, caches or plans.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvlingo.correspondence import Correspondence, correspond
from kvlingo.errors import BadInput
from kvlingo.reading import Reading
from kvlingo.spelling import PROBES, backend_of, encode


def align(source: Reading, target: Reading) -> Tensor:
    """Return the index of the source token that feeds each target token: int64 [target tokens].

    Where one reading's ids are the start of the other's, they are aligned one to one. Else the k-th
    content of one corresponds to the k-th of the other, byte by byte, and a target token takes the
    first source token that has read up to its end:

        alignment[j] = min { i : source.spans[i].stop >= image(target.spans[j].stop) }

    Template and special tokens correspond where both sides' template begins alike; else they take
    the preceding source token, that of the last content byte before them (before any content:
    source position 0). A target token that ends beyond what the source has read is -1, and so are
    all after it. Before that the alignment never falls.

    Raises `BadInput` when contents hold different texts.
    """
    shared = _same_start(source, target)
    alignment = torch.full((len(target),), -1, dtype=torch.long)
    alignment[:shared] = torch.arange(shared)
    if shared in (len(source), len(target)):
        return alignment
    image = _image(source, target)
    stops = [stop for _, stop in source.spans]
    fed: list[int] = []
    for _, stop in target.spans:
        if stop > image.target[-1]:
            break
        fed.append(bisect_left(stops, image.before(stop)))
    alignment[: len(fed)] = torch.tensor(fed, dtype=torch.long)
    return alignment


def last_at_source_start(alignment: Tensor) -> int:
    """Return the number of leading target tokens that source position 0 feeds.

    A model's first position is an outlier (an attention sink): these tokens stay out of the
    statistics and are recomputed at a hand-over.
    """
    other = (alignment != 0).nonzero()
    return int(other[0]) if len(other) else len(alignment)


def _same_start(source: Reading, target: Reading) -> int:
    """Return how many leading tokens are the same, where one reading is the start of the other."""
    tokens = min(len(source), len(target))
    same = source.ids[:tokens] == target.ids[:tokens]
    return tokens if same and source.spans[:tokens] == target.spans[:tokens] else 0


def _image(source: Reading, target: Reading) -> Correspondence:
    """Map the target's byte offsets to the source's: gap, content, gap, content, …, gap."""
    image = Correspondence([0], [0])
    s = t = 0
    for k, (t_start, t_stop) in enumerate(target.contents):
        if k < len(source.contents):
            s_start, s_stop = source.contents[k]
            _map_gap(image, source.stream[s:s_start], target.stream[t:t_start], s, t)
            s, t = s_stop, t_stop
            if not _map_content(image, source, target, k):
                return image
        else:
            _map_gap(image, source.stream[s:], target.stream[t:t_start], s, t)
            return image
    _map_gap(image, source.stream[s:], target.stream[t:], s, t)
    return image


def _map_gap(image: Correspondence, source: bytes, target: bytes, s: int, t: int) -> None:
    """Map template text at target offset t.

    It goes onto the source's template text at s as far as it begins with that, then onto what
    precedes it.
    """
    if source and target.startswith(source):
        image.add(t, s)
        image.add(t + len(source), s + len(source))
    image.add(t + len(target), image.source[-1])


def _map_content(image: Correspondence, source: Reading, target: Reading, k: int) -> bool:
    """Map the k-th content; tell whether all of the target's was read by the source.

    The last content of a source that read nothing after it may have been cut anywhere.
    """
    (s_start, s_stop), (t_start, t_stop) = source.contents[k], target.contents[k]
    closed = k + 1 < len(source.contents) or s_stop < len(source.stream)
    knots = correspond(source.stream[s_start:s_stop], target.stream[t_start:t_stop], closed=closed)
    if not knots.alike:
        raise BadInput(
            f"content {k} differs between the two readings, near "
            f"{target.stream[t_start : t_start + 30].decode(errors='replace')!r}; "
            "give both models the same conversation"
        )
    for t, s in zip(knots.target, knots.source, strict=True):
        image.add(t_start + t, s_start + s)
    return image.target[-1] >= t_stop


# --- relation ---


@dataclass(frozen=True)
class TokenizerRelation:
    """How two tokenizers relate.

    Fields:
        kind: "same" (equal ids mean equal text), "same_base" (but for added tokens), "different".
        differing: added tokens that only one has, or that differ in id or matching rules.
    """

    kind: Literal["same", "same_base", "different"]
    differing: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "same_base":
            shown = ", ".join(self.differing[:8]) + (", …" if len(self.differing) > 8 else "")
            return f"same base, differing specials: {shown}"
        return self.kind


def tokenizer_relation(a: Any, b: Any) -> TokenizerRelation:
    """Compare two tokenizers by vocabulary, merges, normaliser, added tokens and probe texts.

    Size and name say nothing: two tokenizers of one size can disagree on every id.
    """
    if a is b:
        return TokenizerRelation("same")
    if any(encode(a, probe) != encode(b, probe) for probe in PROBES):
        return TokenizerRelation("different")
    (base_a, added_a), (base_b, added_b) = _identity(a), _identity(b)
    if base_a != base_b:
        return TokenizerRelation("different")
    differing = tuple(sorted({text for text, _ in added_a ^ added_b}))
    return TokenizerRelation("same_base" if differing else "same", differing)


AddedTokens = frozenset[tuple[str, tuple[int | bool, ...]]]
_identities: WeakKeyDictionary[Any, tuple[int, str, AddedTokens]] = WeakKeyDictionary()


def _identity(tokenizer: Any) -> tuple[str, AddedTokens]:
    """Return the digest of the base, and the added tokens with their ids and matching rules."""
    size, base, added = _identities.get(tokenizer, (-1, "", frozenset()))
    if size != len(tokenizer):
        backend = json.loads(backend_of(tokenizer).to_str())
        rules = ("id", "special", "normalized", "single_word", "lstrip", "rstrip")
        tokens = backend["added_tokens"]
        added = frozenset((t["content"], tuple(t[rule] for rule in rules)) for t in tokens)
        base = _base_digest(backend["model"], {t["content"] for t in tokens}, backend["normalizer"])
        _identities[tokenizer] = (len(tokenizer), base, added)
    return base, added


def _base_digest(model: Mapping[str, Any], added: set[str], normalizer: Any) -> str:
    """Return a digest of vocabulary (without added tokens), merges, options and normaliser."""
    vocab = model["vocab"]  # {piece: id}, or [[piece, score], …] for a unigram model
    pieces = vocab.items() if isinstance(vocab, dict) else ((str(p), i) for i, p in enumerate(vocab))
    base = sorted(item for item in pieces if item[0] not in added)
    options = [model.get(name) for name in ("type", "byte_fallback", "ignore_merges")]
    everything = json.dumps([base, model.get("merges"), options, normalizer], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()
