"""Let a model read some tokens in the middle of a cache that it did not make.

Knows caches and models. Each token is read on everything before it: the given cache, and those of the tokens read here that stand
earlier. So order matters: from left to right. Does not know why these tokens are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvlingo.anchors import Range
from kvlingo.attention import heads_that_share
from kvlingo.cache import full_cache, owning_layers, read_cache
from kvlingo.cache_writing import write_cache
from kvlingo.errors import UnsupportedModel
from kvlingo.geometry import LayerGeometry
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, cache_devices, prefill, read
from kvlingo.open_cache import OpenCache
from kvlingo.probing import decoder_of, run

PROBED_TOKENS = 16
PROBED_RANGES = ((3, 5), (9, 10), (12, 13))
PROBED_ERROR = 0.05
_TAKES_MASKS: WeakKeyDictionary[LanguageModel, bool] = WeakKeyDictionary()


def recompute(lm: LanguageModel, kv: KV, ids: Tensor, ranges: Sequence[Range]) -> KV:
    """Return `kv` with the tokens of `ranges` read by the model itself.

    Args:
        kv: of the first tokens of `ids`, position-free; sliding layers hold what the first range looks back to.
        ids: [tokens] of the conversation.
        ranges: in order, apart from each other.
    """
    if not ranges:
        return kv
    return at_once(lm, kv, ids, ranges) if takes_masks(lm) else in_turn(lm, kv, ids, ranges)


def in_turn(lm: LanguageModel, kv: KV, ids: Tensor, ranges: Sequence[Range]) -> KV:
    """Read range after range, each in a pass of its own: what any model can do."""
    for start, stop in ranges:
        before = first_of(kv, start).place(cache_devices(lm))
        cache = write_cache(before, lm.rotary, lm.geometry, lm.model.config)
        prefill(lm, ids[start:stop], cache=cache)
        mine = read_cache(cache, lm.rotary, lm.geometry, start=start, stop=stop)
        kv = replaced(kv, mine, torch.arange(start, stop))
    return kv


def at_once(lm: LanguageModel, kv: KV, ids: Tensor, ranges: Sequence[Range]) -> KV:
    """Read all ranges in one pass, under a mask that shows each token what stands before it and hides what it replaces.

    Many short passes cost what reading the weights as often costs; one pass costs its tokens.
    """
    places = torch.cat([torch.arange(start, stop, device=ids.device) for start, stop in ranges])
    cache = whole_cache(lm, kv)
    run(
        decoder_of(lm.model),
        input_ids=ids[places][None],
        position_ids=places[None],
        cache=cache,
        attention_mask=masks(lm, kv.tokens, places),
    )
    rotary, keys, values = lm.rotary.for_one_pass(), [], []
    for index, layer in enumerate(owning_layers(cache, lm.geometry)):
        new_keys, new_values = (x[:, :, -len(places) :] for x in (layer.keys, layer.values))
        free_keys, free_values = rotary.strip(new_keys, new_values, index, places.to(layer.keys.device))
        keys.append(free_keys)
        values.append(free_values)
    return replaced(kv, KV(tuple(keys), tuple(values), len(places)), places)


def first_of(kv: KV, tokens: int) -> KV:
    """Return what a KV holds of its first tokens."""

    def cut(x: Tensor) -> Tensor:
        return x[:, :, : max(0, tokens - (kv.tokens - x.shape[2]))]

    return KV(tuple(map(cut, kv.keys)), tuple(map(cut, kv.values)), tokens)


def replaced(kv: KV, mine: KV, places: Tensor) -> KV:
    """Return `kv` with the tokens at `places` taken from `mine`, which holds these alone."""

    def put(x: Tensor, new: Tensor) -> Tensor:
        at = (places - (kv.tokens - x.shape[2])).to(x.device)
        return x.index_copy(2, at, new.to(x))

    return KV(
        tuple(put(x, new) for x, new in zip(kv.keys, mine.keys, strict=True)),
        tuple(put(x, new) for x, new in zip(kv.values, mine.values, strict=True)),
        kv.tokens,
    )


def whole_cache(lm: LanguageModel, kv: KV) -> object:
    """Write a KV into a cache with a slot for each token in every layer; slots that nobody looks at are zeros."""
    cache, rotary = full_cache(lm.model.config), lm.rotary.for_one_pass()
    places: dict[tuple[int, torch.device], Tensor] = {}
    placed = kv.place(cache_devices(lm))
    for index, layer in enumerate(owning_layers(cache, lm.geometry)):
        lost, device = kv.tokens - placed.held(index), placed.keys[index].device
        at = places.setdefault((lost, device), torch.arange(lost, kv.tokens, device=device))
        keys, values = rotary.apply(placed.keys[index], placed.values[index], index, at)
        layer.update(pad(keys, (0, 0, lost, 0)), pad(values, (0, 0, lost, 0)))
    return cache


def masks(lm: LanguageModel, tokens: int, places: Tensor) -> Tensor | dict[str, Tensor]:
    """Return what is added to attention scores, [1, 1, places, tokens + places]: one for all layers, or one a kind of layer.

    A token sees the slots before it that are not read here, and of those read here itself and the earlier ones.
    """
    windows = {kind: shape.window for kind, shape in kinds_of_layers(lm)}
    slots = torch.cat((torch.arange(tokens, device=places.device), places))
    is_replaced = torch.zeros(tokens, dtype=torch.bool, device=places.device).index_fill(0, places, True)
    is_stale = torch.cat((is_replaced, torch.zeros_like(places, dtype=torch.bool)))
    back = places[:, None] - slots[None]

    def mask(window: int | None) -> Tensor:
        is_seen = (back >= 0) & ~is_stale
        if window is not None:
            is_seen &= back < window
        hidden = torch.zeros(back.shape, dtype=lm.dtype, device=places.device)
        return hidden.masked_fill(~is_seen, torch.finfo(lm.dtype).min)[None, None]

    if len(set(windows.values())) == 1:
        return mask(next(iter(windows.values())))
    return {kind: mask(window) for kind, window in windows.items()}


KINDS = ("", "full_attention", "sliding_attention")
"""Kinds of layers, as configurations name them, whose masks are known here."""


def kinds_of_layers(lm: LanguageModel) -> list[tuple[str, LayerGeometry]]:
    """Return the kind of each layer that owns keys and values. Raises `UnsupportedModel` where one looks back in another way."""
    kinds = getattr(lm.model.config.get_text_config(decoder=True), "layer_types", None)
    owners = zip(lm.geometry.cache_layers, lm.geometry.layers, strict=True)
    found = [(str(kinds[place]) if kinds else "", shape) for place, shape in owners]
    for kind, _ in found:
        if kind not in KINDS:
            raise UnsupportedModel(
                f"{lm.name} has layers of kind {kind}, whose masks are not known; it reads without one"
            )
    return found


def takes_masks(lm: LanguageModel) -> bool:
    """Tell whether a model reads under a mask of ours as it reads by itself; tried once, on what it must not look at."""
    if lm not in _TAKES_MASKS:
        _TAKES_MASKS[lm] = _tries_masks(lm)
    return _TAKES_MASKS[lm]


@torch.no_grad()
def _tries_masks(lm: LanguageModel) -> bool:
    ids = torch.arange(PROBED_TOKENS, device=lm.device) % lm.geometry.vocab_size
    native = read(lm, ids)
    places = torch.cat([torch.arange(start, stop, device=lm.device) for start, stop in PROBED_RANGES])
    generator = torch.Generator().manual_seed(0)

    def spoil(x: Tensor) -> Tensor:
        noise = 4 * torch.randn(x[:, :, places].shape, generator=generator) * x.float().std().cpu()
        return x.index_copy(2, places.to(x.device), noise.to(x))

    spoilt = KV(tuple(map(spoil, native.keys)), tuple(map(spoil, native.values)), native.tokens)
    try:
        found = at_once(lm, spoilt, ids, PROBED_RANGES)
    except Exception:  # whatever a model says to masks that it does not know: it reads range after range then
        return False
    sides = zip((*found.keys, *found.values), (*native.keys, *native.values), strict=True)
    return all(float((x - y).float().norm()) <= PROBED_ERROR * float(y.float().norm()) for x, y in sides)


# --- first tokens and tail ---------------------------------------------------------------------------------------------

ENDS_ERRORS = {torch.float64: 1e-6, torch.float32: 1e-3}
PROBED_MIDDLE = (3, 12)
_READS_ENDS: WeakKeyDictionary[LanguageModel, bool] = WeakKeyDictionary()


def read_both_ends(lm: LanguageModel, opened: OpenCache, ids: Tensor, rows: int) -> Tensor:
    """Read what is left of a conversation, first tokens and tail, in one pass; return the last `rows` tokens' logits.

    A first token sees those before it alone, as it does in a pass of its own: it stays exact. The tail sees everything.
    """
    places = torch.tensor(opened.left, device=ids.device)
    with opened.being_read() as cache, heads_that_share(lm.device):
        return run(
            lm.model,
            input_ids=ids[places][None],
            position_ids=places[None],
            cache=cache,
            attention_mask=end_masks(lm, opened, places),
            logits_to_keep=rows,
        ).logits[0]


def end_masks(lm: LanguageModel, opened: OpenCache, places: Tensor) -> Tensor | dict[str, Tensor]:
    """Return what is added to attention scores, [1, 1, places, slots]: one for all layers, or one a kind of layer."""
    found: dict[str, Tensor] = {}
    for index, (kind, shape) in enumerate(kinds_of_layers(lm)):
        if kind in found:
            continue
        back = places[:, None] - torch.tensor(opened.slots(index), device=places.device)
        is_seen = (back >= 0) & (back < (shape.window or opened.tokens))
        hidden = torch.zeros(back.shape, dtype=lm.dtype, device=places.device)
        found[kind] = hidden.masked_fill(~is_seen, torch.finfo(lm.dtype).min)[None, None]
    return next(iter(found.values())) if len(found) == 1 else found


def reads_both_ends(lm: LanguageModel) -> bool:
    """Tell whether a model reads first tokens and tail in one pass as it reads them in two; tried once."""
    if lm not in _READS_ENDS:
        _READS_ENDS[lm] = _tries_ends(lm)
    return _READS_ENDS[lm]


@torch.no_grad()
def _tries_ends(lm: LanguageModel) -> bool:
    ids = torch.arange(PROBED_TOKENS, device=lm.device) % lm.geometry.vocab_size
    start, stop = PROBED_MIDDLE
    native = read(lm, ids)
    logits = prefill(lm, ids).logits[-1]
    try:
        opened = opened_around(lm, native.narrow(start, stop), start, PROBED_TOKENS)
        found = read_both_ends(lm, opened, ids, 1)[-1]
        ends = read_cache(opened.cache, lm.rotary, lm.geometry, partial=True)
    except Exception:  # whatever a model says to masks that it does not know: it reads in two passes then
        return False
    within = ENDS_ERRORS.get(lm.dtype, PROBED_ERROR)
    pairs = [(found, logits)]
    for mine, wanted in zip((*ends.keys, *ends.values), (*native.keys, *native.values), strict=True):
        pairs.append((mine, wanted[:, :, wanted.shape[2] - mine.shape[2] :]))
    return all(float((x - y).float().norm()) <= within * float(y.float().norm()) for x, y in pairs)


def opened_around(lm: LanguageModel, middle: KV, start: int, tokens: int) -> OpenCache:
    """Return a cache of a middle that begins at `start`, with room for what is read around it, up to `tokens`."""
    stop = start + middle.tokens
    lost = [min(max(0, shape.first_held(stop) - start), middle.tokens) for shape in lm.geometry.layers]
    opened = OpenCache(
        lm.rotary,
        lm.geometry,
        lm.model.config,
        middle=(start, stop),
        tokens=tokens,
        lost=lost,
        dtype=lm.dtype,
        devices=cache_devices(lm),
    )
    opened.write((i, start + n, middle.keys[i][:, :, n:], middle.values[i][:, :, n:]) for i, n in enumerate(lost))
    return opened
