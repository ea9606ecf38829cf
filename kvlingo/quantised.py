"""What the target's own cache costs in quality when it is stored in few bits: a yardstick for translated ones.

Knows caches and the rotation of their keys. Values are rounded and given back as they are read; nothing is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel

By = Literal["token", "channel"]


@dataclass(frozen=True)
class Quantisation:
    """How a cache is rounded.

    Fields:
        bits: of each number, from 1 to 8.
        group: numbers that share a smallest and a largest value: dims of one token of one head.
        keys_by: "token": keys like values; "channel": keys in groups of as many tokens of one dim (KIVI, arXiv 2402.02750).
    """

    bits: int
    group: int = 32
    keys_by: By = "token"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8 or self.group < 2:
            raise BadInput(
                f"{self.bits} bits in groups of {self.group} can't be; give 1 to 8 bits and groups of 2 at least"
            )

    @property
    def name(self) -> str:
        """Name the line."""
        return f"{self.bits}-bit KV" + ("" if self.keys_by == "token" else ", keys by channel")


def quantise(lm: LanguageModel, kv: KV, how: Quantisation, *, keep_first: int = 1) -> KV:
    """Return a KV of a model's tokens from 0 on as its cache would give it back, its first tokens (the sinks) untouched.

    Keys are rounded with their positions, as a cache holds them. Asymmetric: x ≈ low + step · n, with
    step = (high - low) / (2^bits - 1).
    """
    rotary = lm.rotary.for_one_pass()
    keys, values = [], []
    for layer in range(len(kv)):
        lost = kv.tokens - kv.held(layer)
        at = torch.arange(lost, kv.tokens, device=kv.keys[layer].device)
        k, v = rotary.apply(kv.keys[layer], kv.values[layer], layer, at)
        kept = max(0, keep_first - lost)
        rounded = [
            torch.cat((x[:, :, :kept], rounded_groups(x[:, :, kept:], how.bits, how.group, by)), dim=2)
            for x, by in ((k, how.keys_by), (v, "token"))
        ]
        free_keys, free_values = rotary.strip(rounded[0], rounded[1], layer, at)
        keys.append(free_keys)
        values.append(free_values)
    return KV(tuple(keys), tuple(values), kv.tokens)


def rounded_groups(x: Tensor, bits: int, group: int, by: By | str) -> Tensor:
    """Round [batch, heads, tokens, dim] in groups of dims of a token, or of tokens of a dim; a last group may be shorter."""
    if by == "channel":
        return rounded_groups(x.transpose(2, 3), bits, group, "token").transpose(2, 3)
    return torch.cat([rounded(part, bits) for part in x.split(group, dim=-1)], dim=-1)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Round to 2^bits evenly spaced values from the smallest to the largest of the last dim."""
    if not x.numel():
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    places = ((wide - low) / torch.where(step > 0, step, torch.ones_like(step))).round()
    return (low + step * places).to(x.dtype)
