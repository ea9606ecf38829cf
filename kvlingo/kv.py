"""`KV`: the keys and values of some tokens, free of position.

Knows tensors alone. Keys are un-rotated when they are read (`cache.py`) and rotated when they are written (`cache_writing.py`,
`open_cache.py`), always, so a `KV` with rotated keys can't be built by this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KV:
    """Position-free keys and values of `tokens` consecutive tokens.

    Each layer's tensors are [batch, kv_heads, held, dim] and hold the last `held` ≤ `tokens` of them: all, or what a
    sliding window needs.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tokens: int

    def __post_init__(self) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            if keys.shape[:3] != values.shape[:3] or keys.shape[2] > self.tokens:
                raise ValueError(
                    f"keys {tuple(keys.shape)} and values {tuple(values.shape)} don't fit {self.tokens} tokens"
                )

    def __len__(self) -> int:
        return len(self.keys)

    def held(self, layer: int) -> int:
        """Return how many of the tokens this layer holds."""
        return self.keys[layer].shape[2]

    def narrow(self, start: int, stop: int) -> KV:
        """Return the tokens [start, stop) as a KV; layers must hold them all. Shares storage (a view)."""
        for layer in range(len(self)):
            if self.tokens - self.held(layer) > start:
                raise ValueError(f"layer {layer} holds no tokens before {self.tokens - self.held(layer)}")

        def cut(x: Tensor) -> Tensor:
            offset = self.tokens - x.shape[2]
            return x[:, :, start - offset : stop - offset]

        return KV(tuple(map(cut, self.keys)), tuple(map(cut, self.values)), stop - start)

    def flat(self, layer: int) -> Tensor:
        """Return the layer's features [batch, held, kv_heads * (key_dim + value_dim)]: all keys, then all values."""
        return torch.cat((flatten_heads(self.keys[layer]), flatten_heads(self.values[layer])), dim=-1)

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> KV:
        """Return a copy on another device or in another dtype."""
        return KV(
            tuple(k.to(device=device, dtype=dtype) for k in self.keys),
            tuple(v.to(device=device, dtype=dtype) for v in self.values),
            self.tokens,
        )

    def place(self, devices: Sequence[torch.device]) -> KV:
        """Return a copy with each layer on its own device: where a model that is spread over several keeps it."""
        return KV(
            tuple(k.to(d) for k, d in zip(self.keys, devices, strict=True)),
            tuple(v.to(d) for v, d in zip(self.values, devices, strict=True)),
            self.tokens,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))


def concat(parts: Sequence[KV]) -> KV:
    """Join consecutive spans. A part that holds only its last tokens hides what the parts before it hold."""
    tokens = sum(part.tokens for part in parts)

    def join(layer: int) -> tuple[Tensor, Tensor]:
        first = max(i for i, p in enumerate(parts) if i == 0 or p.held(layer) < p.tokens)
        return (
            torch.cat([p.keys[layer] for p in parts[first:]], dim=2),
            torch.cat([p.values[layer] for p in parts[first:]], dim=2),
        )

    joined = [join(layer) for layer in range(len(parts[0]))]
    return KV(tuple(k for k, _ in joined), tuple(v for _, v in joined), tokens)


def flatten_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] -> [batch, tokens, heads * dim]."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads * dim] -> [batch, heads, tokens, dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
