"""Check at load time that a model does what its cache is taken to mean.

`probing` says what a cache looks like; this module holds the model to it, on a few tokens: a family that nobody here has seen
passes or is refused by the same checks. Knows nothing of translators. A check that fails raises `UnsupportedModel` with one
sentence that names the layer and the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvlingo.cache import full_cache, native_cache, owning_layers
from kvlingo.cache_writing import write_cache
from kvlingo.errors import UnsupportedModel
from kvlingo.geometry import Geometry
from kvlingo.kv import KV
from kvlingo.probing import FAR, decoder_of, run
from kvlingo.rope import Rotary

SELF_CHECK_VERSION = 2  # raise it when the checks change: what has passed older ones is checked again
PREFIX, ONE, SEVERAL = 6, 1, 5
# What may differ by rounding alone, as a share of the norm. Many families compute norms, rotations or softmax in float32
# whatever their weights are.
ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-3, torch.float16: 5e-2}
ROUNDING_ELSE = 1.5e-1  # bfloat16
# What the output may differ by, in multiples of what it differs from itself by when the same text stands elsewhere: positions
# that are off by one would hide in what bfloat16 is allowed at most (9 % of the norm on SmolLM2-135M).
NOISE_MULTIPLE, NOISE_LEAST = 4.0, 5e-2
LOUD = 30.0  # a key this long gets all attention of some head, or none


@torch.no_grad()
def self_check(model: Any, geometry: Geometry, rotary: Rotary, *, writable: bool = True) -> None:
    """Hold a model to its geometry: causality, positions, windows, and going on from a cache.

    `writable` says whether caches can be written for it too. A model that can only be read goes on one token at a time: several
    after a recurrent state are not asked for (and transformers reads them wrongly in some families).
    Raises `UnsupportedModel` with one sentence.
    """
    check = _Check(model, geometry, rotary)
    check.causality()
    check.positions()
    check.windows()
    check.going_on(check.own_cache(), "its own cache", (ONE, SEVERAL) if writable else (ONE,))
    if writable:
        check.going_on(check.written_cache(), "a written cache", (ONE, SEVERAL))


class _Check:
    """The checks of one model, sharing what they read."""

    def __init__(self, model: Any, geometry: Geometry, rotary: Rotary) -> None:
        self.model, self.geometry, self.rotary = model, geometry, rotary
        self.decoder = decoder_of(model)
        weight = model.get_input_embeddings().weight
        self.allowed = ROUNDING.get(weight.dtype, ROUNDING_ELSE)
        self.allowed_output = self.allowed  # `positions` measures the model's own noise and lowers it
        self.tokens = PREFIX + ONE + SEVERAL
        # Spread over the vocabulary; the first token comes again, so that layer 0 meets it at two places.
        ids = torch.arange(1, self.tokens + 1, device=weight.device) * 7919 % weight.shape[0]
        ids[PREFIX - 1] = ids[0]
        self.ids = ids
        self.hidden = self.read(ids, None)
        self.kv = self.read_kv(ids)

    def refuse(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"this {self.model.config.model_type} model {what}; KV-Lingo can't use it")

    def read(self, ids: Tensor, cache: Any, start: int = 0) -> Tensor:
        """Return the last hidden states [tokens, hidden] of `ids` read after a cache, or with none at all."""
        positions = torch.arange(start, start + len(ids), device=ids.device)[None]
        if cache is None:
            return self.decoder(input_ids=ids[None], position_ids=positions, use_cache=False).last_hidden_state[0]
        return run(self.decoder, input_ids=ids[None], position_ids=positions, cache=cache).last_hidden_state[0]

    def read_kv(self, ids: Tensor, start: int = 0) -> KV:
        """Return the KV of `ids` read from `start` on, un-rotated by the positions that they were read at."""
        cache = full_cache(self.model.config)
        self.read(ids, cache, start)
        positions = torch.arange(start, start + len(ids), device=ids.device)
        pairs = [
            self.rotary.strip(layer.keys, layer.values, index, positions.to(layer.keys.device))
            for index, layer in enumerate(owning_layers(cache, self.geometry))
        ]
        return KV(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), len(ids))

    # --- positions

    def positions(self) -> None:
        """A text moved by many positions has the same position-free cache, and so has a token of layer 0 wherever it stands.

        The first holds for rotary and for position-free layers. The second finds a model that counts positions by itself.
        """
        bounds = [b for b in (self.geometry.max_positions, self.geometry.angle_limit) if b is not None]
        start = max(0, min([FAR, *(b - self.tokens for b in bounds)]))
        moved = self.read_kv(self.ids, start)
        if start:
            noise = _gap(self.read(self.ids, None, start), self.hidden)
            self.allowed_output = min(self.allowed, max(NOISE_LEAST, NOISE_MULTIPLE * noise))
        for index, owner in enumerate(self.geometry.cache_layers):
            gap = max(_gap(moved.keys[index], self.kv.keys[index]), _gap(moved.values[index], self.kv.values[index]))
            if gap > self.allowed:
                raise self.refuse(
                    f"caches other keys or values in layer {owner} when a text starts at position {start}: "
                    f"they differ by {gap:.1%} after un-rotating, rounding explains {self.allowed:.1%}"
                )
        if self.geometry.cache_layers[0] == 0:
            first, again = (self.kv.keys[0][:, :, at] for at in (0, PREFIX - 1))
            gap = _gap(again, first)
            if gap > self.allowed:
                raise self.refuse(
                    f"caches other keys in layer 0 for one token at positions 0 and {PREFIX - 1}: "
                    f"they differ by {gap:.1%} after un-rotating, rounding explains {self.allowed:.1%}"
                )

    # --- causality

    def causality(self) -> None:
        """What is held of a token does not depend on what comes after it."""
        later = self.ids.clone()
        later[PREFIX:] = later[PREFIX:].flip(0)
        kv = self.read_kv(later)
        for index, owner in enumerate(self.geometry.cache_layers):
            for mine, theirs in ((kv.keys, self.kv.keys), (kv.values, self.kv.values)):
                gap = _gap(mine[index][:, :, :PREFIX], theirs[index][:, :, :PREFIX])
                if gap > self.allowed:
                    raise self.refuse(
                        f"is not causal: layer {owner} caches something else for a token when later tokens change "
                        f"(by {gap:.1%}, rounding explains {self.allowed:.1%})"
                    )
        gap = _gap(self.read(later, None)[:PREFIX], self.hidden[:PREFIX])
        if gap > self.allowed:
            raise self.refuse(
                f"is not causal: its output for {PREFIX} tokens changes by {gap:.1%} with what comes after"
            )

    # --- windows

    def windows(self) -> None:
        """A sliding or chunked layer sees no token that its cache has let go, and something of what it holds.

        One token is read after a made-up cache that is longer than the window; loud keys are put outside and inside of it.
        """
        for window in sorted({layer.window for layer in self.geometry.layers if layer.window is not None}):
            layers = [i for i, layer in enumerate(self.geometry.layers) if layer.window == window]
            tokens = window + 2
            bounds = [b for b in (self.geometry.max_positions, self.geometry.angle_limit) if b is not None]
            if bounds and tokens >= min(bounds):
                continue  # no text is longer than this window
            lost, held = range(tokens - window + 1), range(tokens - window + 1, tokens)
            base = self.after(tokens, layers, ())
            if not _moved(self.after(tokens, layers, held), base):
                raise self.refuse(f"sees nothing in the window of {window} tokens that its sliding layers keep")
            if _moved(self.after(tokens, layers, lost), base):
                owner = next(i for i in layers if _moved(self.after(tokens, [i], lost), base))
                raise self.refuse(
                    f"sees more than {window} tokens in layer {self.geometry.cache_layers[owner]}, "
                    f"whose cache keeps a window of {window}"
                )

    def after(self, tokens: int, layers: Sequence[int], loud: Sequence[int]) -> Tensor:
        """Return the hidden state of one token read after `tokens` made-up ones, of which `loud` shout in some layers."""
        cache = full_cache(self.model.config)
        generator = torch.Generator().manual_seed(0)
        dtype = self.hidden.dtype
        for index, layer in enumerate(owning_layers(cache, self.geometry)):
            shape = self.geometry.layers[index]
            keys = torch.zeros(1, shape.kv_heads, tokens, shape.key_dim)
            values = torch.zeros(1, shape.kv_heads, tokens, shape.value_dim)
            if index in layers and loud:
                at = list(loud)
                keys[:, :, at] = LOUD * torch.randn(keys[:, :, at].shape, generator=generator)
                values[:, :, at] = torch.randn(values[:, :, at].shape, generator=generator)
            device = self.kv.keys[index].device  # layers may be spread over several
            layer.update(keys.to(device, dtype), values.to(device, dtype))
        return self.read(self.ids[:1], cache, tokens)[0]

    # --- going on

    def going_on(self, held: Any, whose: str, counts: Sequence[int]) -> None:
        """Some tokens and then some more, read after a cache of the first ones, are what they are without it."""
        for start, count in zip(accumulate((PREFIX, *counts)), counts, strict=False):
            got = self.read(self.ids[start : start + count], held, start)
            gap = _gap(got, self.hidden[start : start + count])
            if gap > self.allowed_output:
                raise self.refuse(
                    f"reads {count} new token{'s' * (count > 1)} after {whose} otherwise than without: "
                    f"its output differs by {gap:.1%}, rounding explains {self.allowed_output:.1%}"
                )

    def own_cache(self) -> Any:
        """Return the model's own cache of the first tokens."""
        cache = native_cache(self.model.config)
        self.read(self.ids[:PREFIX], cache)
        return cache

    def written_cache(self) -> Any:
        """Return a cache of the first tokens as this package writes it."""
        return write_cache(self.kv.narrow(0, PREFIX), self.rotary, self.geometry, self.model.config)


def _gap(a: Tensor, b: Tensor) -> float:
    """Return how far `a` [..., tokens, dim] is from `b`, as a share of the norm of `b`: the middle one of the tokens.

    Not the worst one: rounding can send a token to another expert.
    """
    a, b = (x.to(torch.promote_types(x.dtype, torch.float32)).movedim(-2, 0).flatten(1) for x in (a, b))
    return float(((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)).median())


def _moved(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a, b)
