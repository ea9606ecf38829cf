"""Sufficient statistics of a linear regression, block by block.

Knows named blocks of columns and which products of them are needed. Does not know what the columns mean. All sums are
float64; memory depends on the blocks only, never on the number of tokens. Statistics of disjoint data add up. A product is made
once: of two blocks, and of a block with itself, only a·b is kept, never b·a.
"""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.files import whole_file

FLUSH_TOKENS = 4096


def save_tensors(file: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write tensors and a note to a safetensors file, whole or not at all.

    Raises `BadInput` when the place can't be written or the disk is full.
    """
    text = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
    separate = {name: x.contiguous() for name, x in tensors.items()}
    with whole_file(file, sum(x.numel() * x.element_size() for x in separate.values())) as partial:
        try:
            save_file({**separate, "note": text}, partial)
        except SafetensorError as error:  # the system's own error is only in its words
            full = f"os error {errno.ENOSPC}" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error


def load_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read what `save_tensors` wrote; None where there is no such file, or a damaged one."""
    try:
        tensors = load_file(file)
        return tensors, json.loads(bytes(tensors.pop("note").tolist()))
    except (FileNotFoundError, SafetensorError, KeyError, ValueError):
        return None


@dataclass(frozen=True)
class Moments:
    """Centred and standardised second moments of some feature blocks and one output block, per token.

    Fields:
        gram: [features, features] correlation matrix of the features.
        cross: [features, outputs] covariance of standardised features and outputs.
        feature_mean, feature_scale: [features]; output_mean: [outputs]; output_variance: [outputs].
        weighed_variance: [outputs], the variance as gram and cross weigh it; None where all tokens count alike.
    """

    gram: Tensor
    cross: Tensor
    feature_mean: Tensor
    feature_scale: Tensor
    output_mean: Tensor
    output_variance: Tensor
    tokens: int
    weighed_variance: Tensor | None = None

    @property
    def judged_variance(self) -> Tensor:
        """Return the outputs' variance that errors are shares of: [outputs]."""
        return self.output_variance if self.weighed_variance is None else self.weighed_variance

    def without_products(self) -> Moments:
        """Return the means, scales and variances alone."""
        return replace(self, gram=self.gram[:0, :0].clone(), cross=self.cross[:0].clone())


def partners_in_order(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return, for each block that is first of a pair in the order of `names`, the second ones in that order."""
    place = {name: i for i, name in enumerate(names)}
    ordered = sorted({(min(place[a], place[b]), max(place[a], place[b])) for a, b in pairs})
    partners: dict[str, list[str]] = {}
    for a, b in ordered:
        partners.setdefault(names[a], []).append(names[b])
    return partners


def column_ranges(dims: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return where each block's columns stand when all blocks stand side by side: [first, last)."""
    ends = list(itertools.accumulate(dims.values()))
    return {name: (end - width, end) for (name, width), end in zip(dims.items(), ends, strict=True)}


def runs(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that follow each other without a gap."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


class GramStats:
    """n, sums, XᵀX and XᵀY of named column blocks, accumulated over a stream of tokens.

    Args:
        dims: columns of each block.
        pairs: the block pairs (a, b), in either order, whose product aᵀb is kept.
        squares: blocks whose per-column sum of squares is kept (outputs).
        shared: sums over the means of pieces of neighbouring tokens, of some of the blocks (`moments` with a `shared_weight`).

    Fields:
        multiplied_in: dtype of the products of some thousand tokens, which are summed in float64 whatever it is. With float32
            they are made of columns less their means, so that what is far from 0 loses nothing: good for columns that are
            themselves known to fewer digits than float32 has.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        pairs: Iterable[tuple[str, str]],
        squares: Sequence[str],
        shared: GramStats | None = None,
    ) -> None:
        self.dims, self.multiplied_in, self.shared = dict(dims), torch.float64, shared
        self.partners = partners_in_order(tuple(self.dims), pairs)
        self.columns = column_ranges(self.dims)
        self._waiting: list[dict[str, Tensor]] = []
        self.summed_tokens = 0
        self.is_whole = True
        self.sums = {name: torch.zeros(d, dtype=torch.float64) for name, d in self.dims.items()}
        self.squares = {name: torch.zeros(self.dims[name], dtype=torch.float64) for name in squares}
        self.products = {
            a: torch.zeros(self.dims[a], sum(self.dims[b] for b in bs), dtype=torch.float64)
            for a, bs in self.partners.items()
        }

    def multiply_in(self, dtype: torch.dtype) -> None:
        """Set the dtype of products (`multiplied_in`)."""
        self.multiplied_in = dtype
        if self.shared is not None:
            self.shared.multiply_in(dtype)

    def add(self, blocks: Mapping[str, Tensor], pieces: Sequence[int] = ()) -> None:
        """Add tokens: every block is [tokens, columns]; `pieces`: how they are cut for `shared`, lengths in order.

        Tokens are kept back until there are enough for one large product: the sums are far larger than a text's columns,
        and touching them for every text would cost more than the arithmetic. Ctrl-C in the middle leaves `is_whole` False:
        such sums count some tokens in part and are good for nothing.
        """
        self.is_whole = False
        self._waiting.append({name: blocks[name].detach().to("cpu") for name in self.dims})
        if self.shared is not None:
            self.shared.add({name: piece_sums(blocks[name].detach(), pieces) for name in self.shared.dims})
        if sum(next(iter(b.values())).shape[0] for b in self._waiting) >= FLUSH_TOKENS:
            self._flush_own()
        self.is_whole = True

    def flush(self) -> None:
        """Add what was kept back. Everything that reads the sums calls this first."""
        self._flush_own()
        if self.shared is not None:
            self.shared.flush()

    def _flush_own(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        tokens = sum(next(iter(b.values())).shape[0] for b in waiting)
        # One matrix of all columns: partners that lie side by side in it are multiplied at once, without a copy.
        columns = torch.empty(tokens, sum(self.dims.values()), dtype=self.multiplied_in)
        for name, (first, last) in self.columns.items():
            torch.cat([b[name].to(self.multiplied_in) for b in waiting], out=columns[:, first:last])
        self.summed_tokens += tokens
        total = columns.sum(0, dtype=torch.float64)
        for name, (first, last) in self.columns.items():
            self.sums[name] += total[first:last]
        for name in self.squares:
            first, last = self.columns[name]
            self.squares[name] += columns[:, first:last].to(torch.float64).square().sum(0)
        if self.multiplied_in == torch.float64:
            self._add_products(columns)
        else:
            self._add_centred_products(columns, total)

    def _add_products(self, columns: Tensor) -> None:
        for a, start, first, last in self._factors():
            left = columns[:, slice(*self.columns[a])].T
            self.products[a][:, start : start + last - first].addmm_(left, columns[:, first:last])

    def _add_centred_products(self, columns: Tensor, total: Tensor) -> None:
        """Add products of columns less their means, and what that leaves out; changes the columns.

        Σ x yᵀ = Σ (x - c)(y - d)ᵀ + c (Σ y)ᵀ + (Σ x - n c) dᵀ, where the first product is rounded and the others are not.
        """
        centre = (total / len(columns)).to(columns.dtype)
        columns -= centre
        exact = centre.to(torch.float64)
        rest = total - len(columns) * exact
        for a, start, first, last in self._factors():
            mine = slice(*self.columns[a])
            product = columns[:, mine].T @ columns[:, first:last]
            left = torch.stack((exact[mine], rest[mine]), dim=1)
            right = torch.stack((total[first:last], exact[first:last]))
            self.products[a][:, start : start + last - first].add_(product).addmm_(left, right)

    def _factors(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield each product's left block, its place among that block's products, and its right columns [first, last)."""
        for a, bs in self.partners.items():
            start = 0
            for first, last in runs([self.columns[b] for b in bs]):
                yield a, start, first, last
                start += last - first

    @property
    def tokens(self) -> int:
        """Return the number of tokens added."""
        return self.summed_tokens + sum(next(iter(b.values())).shape[0] for b in self._waiting)

    def __iadd__(self, other: GramStats) -> GramStats:
        """Merge the statistics of other tokens."""
        if self.dims != other.dims or self.partners != other.partners:
            raise ValueError("statistics of different blocks can't be added")
        self.flush()
        other.flush()
        self.summed_tokens += other.summed_tokens
        for mine, theirs in zip(self._tensors().values(), other._tensors().values(), strict=True):
            mine += theirs
        return self

    def share(self, each: Callable[[Tensor], None]) -> None:
        """Let `each` change every sum in place, the number of tokens too: what sums over processes, or copies from one."""
        self.flush()
        tokens = torch.tensor([self.summed_tokens])
        for x in (tokens, *self._tensors().values()):
            each(x)
        self.summed_tokens = int(tokens)

    def _tensors(self) -> dict[str, Tensor]:
        # Named for the order of their columns: sums of another order must not be taken for these.
        groups = {"sum": self.sums, "square": self.squares, "product-in-order": self.products}
        found = {f"{group}:{name}": x for group, named in groups.items() for name, x in named.items()}
        if self.shared is not None:
            found |= {f"shared:{name}": x for name, x in self.shared._tensors().items()}
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Return all sums by name, for safetensors."""
        self.flush()
        return {**self._tensors(), "tokens": torch.tensor([self.summed_tokens])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        mine = self._tensors()
        if set(state) != {*mine, "tokens"} or any(state[k].shape != x.shape for k, x in mine.items()):
            raise BadInput(
                "saved statistics belong to another pair or other options; delete them, or use another folder"
            )
        self._waiting, self.summed_tokens, self.is_whole = [], int(state["tokens"]), True
        if self.shared is not None:
            self.shared._waiting = []
        for name, x in mine.items():
            x.copy_(state[name])

    def product(self, a: str, b: str) -> Tensor:
        """Return aᵀb, uncentred: [columns of a, columns of b]."""
        if b not in self.partners.get(a, ()):
            return self._slice(b, a).T
        return self._slice(a, b)

    def _slice(self, a: str, b: str) -> Tensor:
        start = 0
        for name in self.partners[a]:
            if name == b:
                return self.products[a][:, start : start + self.dims[b]]
            start += self.dims[name]
        raise KeyError(f"the product of {a} and {b} was not accumulated")

    def _beside(self, features: Sequence[str]) -> Tensor:
        """Return the products of all features with each other as one matrix: what is kept of them, and its mirror image."""
        places = column_ranges({name: self.dims[name] for name in features})
        whole = torch.empty(places[features[-1]][1], places[features[-1]][1], dtype=torch.float64)
        for i, a in enumerate(features):
            for b in features[i:]:
                part = self.product(a, b)
                whole[slice(*places[a]), slice(*places[b])] = part
                if a != b:
                    whole[slice(*places[b]), slice(*places[a])] = part.T
        return whole

    def moments(
        self, features: Sequence[str], output: str, *, like: Moments | None = None, shared_weight: float = 0.0
    ) -> Moments:
        """Return the second moments of some blocks.

        Args:
            like: centre and scale as those other moments do (held-out data in the training data's coordinates).
            shared_weight: how much more the means of pieces count, where there are sums over these: gram and cross are the
                weighted sums, so scaled that features have a mean square of 1. Means, scales and variances stay the tokens'.
        """
        self.flush()
        n = max(self.summed_tokens, 1)
        mean, out_mean = torch.cat([self.sums[a] for a in features]) / n, self.sums[output] / n
        mu, nu = (mean, out_mean) if like is None else (like.feature_mean, like.output_mean)
        middle = (mean, mu, out_mean, nu)
        gram, cross, variance = self._about(features, output, n, *middle)
        if like is None:
            scale = gram.diagonal().clamp(min=0).sqrt()
            # A column that never moves carries nothing: scale 1 leaves it at 0 after centring.
            scale = torch.where(scale > 1e-12 * scale.max().clamp(min=1e-300), scale, torch.ones_like(scale))
        else:
            scale = like.feature_scale
        weighed = None
        if self.shared is not None and shared_weight and output in self.shared.dims:
            more_gram, more_cross, more_variance = self.shared._about(features, output, n, *middle)
            gram.add_(more_gram, alpha=shared_weight)
            cross.add_(more_cross, alpha=shared_weight)
            weighed = variance + shared_weight * more_variance
        gram.div_(scale[:, None]).div_(scale)
        cross.div_(scale[:, None])
        if weighed is not None:
            size = gram.diagonal().mean()
            gram.div_(size)
            cross.div_(size)
            weighed = weighed / size
        return Moments(gram, cross, mu, scale, nu, variance, self.tokens, weighed)

    def _about(
        self,
        features: Sequence[str],
        output: str,
        tokens: int,
        mean: Tensor,
        mu: Tensor,
        out_mean: Tensor,
        nu: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gram, cross and the outputs' variance per token about mu and nu, for blocks with these means.

        In place: these are the largest matrices of a fit, and made anew for every layer and window.
        """
        gram = self._beside(features).div_(tokens)
        gram.addr_(mean, mu, alpha=-1).addr_(mu, mean, alpha=-1).addr_(mu, mu)
        cross = torch.cat([self.product(a, output) for a in features], 0).div_(tokens)
        cross.addr_(mean, nu, alpha=-1).addr_(mu, out_mean, alpha=-1).addr_(mu, nu)
        return gram, cross, self.squares[output] / tokens - 2 * nu * out_mean + nu.square()


def pieces_of(tokens: int, size: int) -> list[int]:
    """Cut some tokens into pieces of `size` or, to leave no rest, a little more; return the length of each."""
    if not tokens:
        return []
    count = max(1, tokens // size)
    ends = [tokens * number // count for number in range(count + 1)]
    return [last - first for first, last in itertools.pairwise(ends)]


def piece_sums(rows: Tensor, pieces: Sequence[int]) -> Tensor:
    """Return the sum of each piece's rows over the root of its length m: products of two such are m times those of means."""
    if not pieces:
        return rows[:0]
    return torch.stack([part.sum(0) / len(part) ** 0.5 for part in rows.split(list(pieces))])
