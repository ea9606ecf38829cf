"""Carrying a plan out: what is held, first tokens, the translated middle piece by piece, anchors.

Knows states and maps. Does not decide what a plan says, nor whether its result is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlingo.anchors import Anchors
from kvlingo.assembling import (
    assemble,
    empty_kv,
    first_source_token,
    not_held,
    translate,
)
from kvlingo.attention import shares_heads
from kvlingo.cache import read_cache, view_cache
from kvlingo.errors import UnsupportedCache
from kvlingo.kv import KV
from kvlingo.language_model import (
    LanguageModel,
    cache_devices,
    is_remembered,
    layer_weights,
    native_layers,
)
from kvlingo.open_cache import OpenCache
from kvlingo.plan import HandoffPlan, reprefill_plan, with_anchors
from kvlingo.recompute import reads_both_ends
from kvlingo.states import (
    ModelState,
    extend,
    extend_in_parts,
    native_cache_of,
    refuse_changed_angles,
    refuse_target,
    target_cache,
)
from kvlingo.steps import Steps, finished
from kvlingo.translator import Translator, first_read
from kvlingo.trust import Evidence, doubts, embeddings_of, exact_layers, first_layers_of, place_of


def carry_out(
    plan: HandoffPlan,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    source_state: ModelState,
    target_state: ModelState | None,
    alignment: Tensor,
    ids: Tensor,
) -> tuple[HandoffPlan, Any]:
    """Return the plan as it was really carried out, and the cache of all tokens before the tail (None for no token)."""
    known = (source, target, translator, source_state, target_state, alignment, ids)
    return finished(carry_out_in_parts(plan, *known, most=None))


def carry_out_in_parts(
    plan: HandoffPlan,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    source_state: ModelState,
    target_state: ModelState | None,
    alignment: Tensor,
    ids: Tensor,
    *,
    most: int | None,
    opening: int = 0,
    anchors: Anchors | None = None,
    leave_open: bool = False,
) -> Steps[tuple[HandoffPlan, Any]]:
    """Do what `carry_out` does, reading or translating at most `most` tokens a step; None: all at once.

    Args:
        opening: how many first tokens are those of many conversations (`Reading.opening`).
        anchors: those by a signal are chosen here, when the middle has been translated; the plan that comes back has them. With
            anchors all is translated in one step.
        leave_open: give an `OpenCache` where the rest is one step: the tail is still to be read into it, and the first tokens
            with it where that is one pass less.
    """
    tokens, start, stop = plan.tokens, *plan.translated
    try:
        refuse_target(target, tokens)
        cache = native_cache_of(plan, target, target_state)
        if start == stop:
            return plan, cache
        leave_open = leave_open and (most is None or start + plan.tail < most)
        has_anchors = bool(plan.anchors) or (anchors is not None and anchors.needs_scores)
        reads_first = cache is None and leave_open and not has_anchors
        reads_first = reads_first and reads_ends_at_once(plan, target, ids[:start], opening)
        if not reads_first:
            cache = yield from extend_in_parts(target, cache, ids[:start], most=most, opening=opening)
        if translator.config.reads_source:
            refuse_changed_angles(source, source_state.cache.get_seq_length())
        known = (source, target, translator, source_state)
        if has_anchors:
            return carry_anchors(plan, *known, cache, alignment, ids, anchors=anchors)
        opened = OpenCache(
            target.rotary,
            target.geometry,
            target.model.config,
            middle=(start, stop),
            tokens=tokens if leave_open else stop,
            lost=not_held(plan, target),
            dtype=target.dtype,
            devices=cache_devices(target),
            before=cache,
        )
        for number, piece in enumerate(pieces_of_middle(plan, *known, alignment, ids, most=most)):
            if most is not None and number:
                yield None
            opened.write(piece)
        return plan, opened if leave_open else opened.cache
    except UnsupportedCache as error:
        # Whatever could not be read is read again by the target: slower, never wrong, and the plan says so.
        return reprefill_plan(tokens, str(error)), None


def carry_anchors(
    plan: HandoffPlan,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    source_state: ModelState,
    cache: Any,
    alignment: Tensor,
    ids: Tensor,
    *,
    anchors: Anchors | None,
) -> tuple[HandoffPlan, Any]:
    """Do what `carry_out` does where the target reads tokens in the middle, which is there as a whole then.

    `cache`: of what stands before the middle.
    """
    start, _ = plan.translated
    is_chosen_here = anchors is not None and anchors.needs_scores
    source_kv, offset = None, 0
    if translator.config.reads_source:
        offset = first_source_token(translator.config, int(alignment[start]), source_state.translated_until)
        wanted = wanted_of_source(plan, target, translator, source_state, alignment)
        source_kv = read_cache(
            source_state.cache,
            source.rotary,
            source.geometry,
            start=offset,
            first_wanted=None if is_chosen_here else wanted,
        )
    known, middle = (target, translator, source_kv, alignment - offset, ids), None
    if anchors is not None and is_chosen_here:
        middle = translate(plan, *known, skip=[0] * len(target.geometry))
        scores = middle_doubts(plan, anchors.by, *known, middle=middle)
        plan, middle = choose_anchors(plan, anchors, scores, middle)
    if plan.fallback:
        return plan, cache
    start = plan.translated[0]  # an anchor beside the sinks has become one of them
    cache = extend(target, cache, ids[:start])
    prefix = read_cache(cache, target.rotary, target.geometry, partial=True) if start else None
    return plan, target_cache(target, assemble(plan, *known, prefix=prefix, middle=middle))


def wanted_of_source(
    plan: HandoffPlan, target: LanguageModel, translator: Translator, source_state: ModelState, alignment: Tensor
) -> list[int]:
    """Return for each source layer the first token that a plan's middle is made from."""
    return first_read(
        translator.config,
        not_held(plan, target),
        exact_layers(plan, translator),
        alignment[slice(*plan.translated)],
        source_state.cache.get_seq_length(),
    )


MOST_COPIED_BYTES = 32 << 20
"""What one pass over first tokens and tail may copy of a layer, for its attention."""


def reads_ends_at_once(plan: HandoffPlan, target: LanguageModel, first: Tensor, opening: int) -> bool:
    """Tell whether the target reads a plan's first tokens and its tail in one pass: its weights are read once less.

    Not where the first tokens are remembered, or will be; nor where the pass moves more than the weights: under a mask each query
    head may get a copy of the keys and values that it looks at.
    """
    if not len(first) or is_remembered(target, first, opening=opening):
        return False
    if shares_heads(target.model, target.device):
        return reads_both_ends(target)
    heads = int(getattr(target.model.config.get_text_config(decoder=True), "num_attention_heads", 1))
    copied = [
        (plan.tokens - layer.first_held(plan.tokens)) * heads * (layer.key_dim + layer.value_dim)
        for layer in target.geometry.layers
    ]
    if max(copied) * target.dtype.itemsize > MOST_COPIED_BYTES or 2 * sum(copied) > layer_weights(target.model):
        return False
    return reads_both_ends(target)


PIECE_TOKENS = 512
"""So many tokens are read from the source's cache, translated and written to the target's at a time."""


SPREAD = 2
"""The source tokens of a piece lie within so many times its length at most: what a gap leaves out is not read."""


Piece = Iterator[tuple[int, int, Tensor, Tensor]]


def pieces_of_middle(
    plan: HandoffPlan,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    source_state: ModelState,
    alignment: Tensor,
    ids: Tensor,
    *,
    most: int | None = None,
) -> Iterator[Piece]:
    """Yield what `translate` gives, at most `most` tokens at a time: layer, first token, keys, values of each.

    Only what a piece is made from is in memory beside it. Nothing of it is done before it is asked for its first layer.
    """
    config, (start, stop) = translator.config, plan.translated
    skip, exact = not_held(plan, target), exact_layers(plan, translator)
    view, offset = None, 0
    if config.reads_source:
        offset = first_source_token(config, int(alignment[start]), source_state.translated_until)
        view = view_cache(
            source_state.cache,
            source.rotary,
            source.geometry,
            start=offset,
            first_wanted=wanted_of_source(plan, target, translator, source_state, alignment),
        )
    device, dtype = place_of(translator)
    below = None
    if exact > 1:  # the layers below depend on everything before: they are read once
        with torch.no_grad():
            below = native_layers(target, ids[:stop], exact)

    def piece(first: int, last: int) -> Piece:
        left_out = [max(0, min(start + n, last) - first) for n in skip]
        rows, part = alignment[first:last] - offset, None
        if view is not None:
            lowest = max(int(rows.min()) - max(config.source_lags), 0)
            part, rows = view.narrow(lowest, int(rows.max()) + 1).to(device), rows - lowest
        before = max(0, first - max(config.embedding_lags, default=0))
        made = translator.stream(
            part,
            rows,
            embeddings_of(target, translator, ids[before:last]),
            start=first - before,
            skip=left_out,
            native=exact_piece(target, ids, (first, last), exact, left_out, below, device, dtype),
            rounded=target.dtype,
        )
        for layer, row, keys, values in made:
            yield layer, first + row, keys, values

    for first, last in cut_middle(alignment, start + min(skip, default=0), stop, most):
        yield piece(first, last)


def cut_middle(alignment: Tensor, start: int, stop: int, most: int | None = None) -> list[tuple[int, int]]:
    """Cut the target tokens [start, stop) into pieces, from the end: what a window holds is a piece, or some whole ones.

    `most`: tokens of a piece; None for `PIECE_TOKENS`.
    """
    size, pieces = min(most or PIECE_TOKENS, PIECE_TOKENS), []
    while start < stop:
        first = max(start, stop - size)
        while stop - first > 1 and spread(alignment[first:stop]) > SPREAD * PIECE_TOKENS:
            first = (first + stop) // 2
        pieces.append((first, stop))
        stop = first
    return pieces[::-1]


def spread(places: Tensor) -> int:
    """Return how many tokens lie between the first and the last of some places, both counted."""
    return int(places.max()) - int(places.min()) + 1


def exact_piece(
    target: LanguageModel,
    ids: Tensor,
    piece: tuple[int, int],
    exact: int,
    left_out: Sequence[int],
    below: KV | None,
    device: torch.device,
    dtype: torch.dtype,
) -> KV | None:
    """Return the first layers' KV of a piece, as `exact_kv` does.

    `below`: it, for all tokens, where it depends on what stands before. `left_out`: per layer the first tokens that nobody reads.
    """
    first, last = piece
    if not exact:
        return None
    if below is not None:
        return below.narrow(first, last).to(device, dtype)
    if left_out[0] == last - first:
        nothing = first_layers_of(empty_kv(target), exact)
        return replace(nothing, tokens=last - first).to(device, dtype)
    with torch.no_grad():
        found = native_layers(target, ids[first + left_out[0] : last], exact)
    return replace(found, tokens=last - first).to(device, dtype)


def middle_doubts(
    plan: HandoffPlan,
    by: str,
    target: LanguageModel,
    translator: Translator,
    source_kv: KV | None,
    alignment: Tensor,
    ids: Tensor,
    *,
    middle: KV,
    source_nats: Tensor | None = None,
    truth: KV | None = None,
) -> Tensor:
    """Return how little each token of a plan's middle is trusted by a signal: [tokens].

    Args:
        middle: what the maps give for it, with every layer in full.
        source_nats, truth: what some signals look at (`trust.Evidence`); others as for `assemble`.
    """
    start, stop = plan.translated
    device, dtype = place_of(translator)
    evidence = Evidence(
        target,
        translator,
        middle,
        None if source_kv is None or not translator.config.reads_source else source_kv.to(device, dtype),
        alignment[start:stop],
        embeddings_of(target, translator, ids),
        start,
        exact_layers(plan, translator),
        source_nats,
        truth,
    )
    return doubts(evidence, by)


def choose_anchors(plan: HandoffPlan, anchors: Anchors, scores: Tensor, middle: KV) -> tuple[HandoffPlan, KV]:
    """Return the plan with its least trusted tokens as anchors, and its middle: what lies between sinks and tail now."""
    start, stop = plan.translated
    picked = anchors.pick(start, stop, scores.tolist())
    chosen = with_anchors(plan, picked, f"anchor: least trusted by {anchors.by}")
    first, last = chosen.translated
    return chosen, middle if chosen.fallback else middle.narrow(first - start, last - start)
