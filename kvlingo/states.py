"""What a model holds of a conversation: what it read, its cache, and where each token came from.

Knows reading and going on from a cache. Does not know translators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlingo.alignment import align
from kvlingo.batches import prefill_batch, side_by_side
from kvlingo.cache import can_cut, held_states, is_in_place, native_cache, read_cache, take_row
from kvlingo.cache_writing import can_fork, fork, truncate, write_cache
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.kv import KV
from kvlingo.language_model import (
    LanguageModel,
    cache_devices,
    prefill,
    prefill_in_parts,
    read_sinks,
)
from kvlingo.plan import HandoffPlan, Provenance, Span, SpanKind, reprefill_plan
from kvlingo.reading import Reading, read_chat, read_text
from kvlingo.steps import Steps, finished

Message = dict[str, Any]


def target_cache(target: LanguageModel, kv: KV) -> Any:
    """Write a KV into a cache that the target can go on from, each layer where the model keeps that layer."""
    placed = kv.place(cache_devices(target))
    return write_cache(placed, target.rotary, target.geometry, target.model.config)


Conversation = str | Sequence[Message]


WHY_READ = "the model read it"


@dataclass(frozen=True)
class ModelState:
    """What one model holds of a conversation: the ids really in its cache, and how far each span can be trusted.

    `no_text` says that the model was given the cache without the text, which it must not read later on either.
    """

    reading: Reading
    cache: Any
    spans: tuple[Span, ...]
    no_text: bool = False

    @property
    def translated_until(self) -> int:
        """Return the end of the last translated span: tokens before it are never translated again."""
        return max((s.stop for s in self.spans if s.provenance is Provenance.TRANSLATED), default=0)


def read_conversation(
    conversation: Conversation, lm: LanguageModel, *, add_generation_prompt: bool, tools: Sequence[Message] = ()
) -> Reading:
    """Render a text or a list of messages as one model reads it."""
    if isinstance(conversation, str):
        if not conversation.strip():
            raise BadInput("the text is empty; give a conversation to hand over")
        return read_text(lm.tokenizer, conversation)
    if not conversation:
        raise BadInput("the conversation has no messages; give at least one")
    return read_chat(lm.tokenizer, list(conversation), add_generation_prompt=add_generation_prompt, tools=tools)


@torch.no_grad()
def read_native(conversation: Conversation, lm: LanguageModel) -> ModelState:
    """Let a model read a conversation from scratch into a full-length cache: what a source holds before a hand-over."""
    return read_alone(read_conversation(conversation, lm, add_generation_prompt=False), lm)


def read_alone(reading: Reading, lm: LanguageModel) -> ModelState:
    """Let a model read what was tokenised for it into a full-length cache."""
    cache = prefill(lm, lm.ids(reading.ids), full_length=True).cache
    return ModelState(reading, cache, reprefill_plan(len(reading.ids), WHY_READ).spans)


@torch.no_grad()
def read_native_batch(conversations: Sequence[Conversation], lm: LanguageModel) -> list[ModelState]:
    """Let a model read several conversations at once, padded on the left; each comes out as if it had been read alone.

    Where a batch can't give that (`side_by_side`), they are read one after another.
    """
    readings = [read_conversation(c, lm, add_generation_prompt=False) for c in conversations]
    if not side_by_side(lm, max(map(len, readings), default=0)):
        return [read_alone(reading, lm) for reading in readings]
    batch = prefill_batch(lm, [lm.ids(r.ids) for r in readings], full_length=True).batch
    return [
        ModelState(
            reading,
            take_row(batch.cache, row, start, lm.geometry, lm.model.config),
            reprefill_plan(len(reading), WHY_READ).spans,
        )
        for row, (reading, start) in enumerate(zip(readings, batch.padding, strict=True))
    ]


def feed(conversation: Conversation, state: ModelState, reading: Reading, held: int) -> Tensor:
    """Return which token of a source's state feeds each target token: int64 [target tokens], -1 for none.

    `held`: tokens in the source's cache. One that was said and not fed back, or cut off, has no keys and values there: the
    target reads itself what it would have fed.
    """
    alignment = align(as_one_text(state.reading) if isinstance(conversation, str) else state.reading, reading)
    return alignment.masked_fill(alignment >= held, -1)


def as_one_text(reading: Reading) -> Reading:
    """Take all contents as one: a text and what a model said after it are one text to the next model."""
    (start, _), (_, stop) = reading.contents[0], reading.contents[-1]
    return replace(reading, contents=((start, stop),))


def refuse_target(target: LanguageModel, tokens: int) -> None:
    """Raise `UnsupportedCache` where a cache of `tokens` tokens can't be made for this target from parts."""
    if target.target_refusal is not None:
        raise UnsupportedCache(f"{target.name}: {target.target_refusal}")
    refuse_changed_angles(target, tokens)


def refuse_changed_angles(lm: LanguageModel, tokens: int) -> None:
    """Raise `UnsupportedCache` where a model's rotary angles have changed on the way to `tokens` tokens.

    Such a cache mixes keys of two frequency sets, and which token has which depends on how it was read.
    """
    limit = lm.geometry.angle_limit
    if limit is not None and tokens > limit:
        raise UnsupportedCache(
            f"{lm.name} changes its rotary angles beyond {limit} tokens, this conversation has {tokens}; "
            "keys from before and after don't fit together"
        )


def common_prefix(state: ModelState | None, reading: Reading) -> int:
    """Return how many first tokens of `reading` the state's cache holds, of whatever provenance; one is left to read."""
    if state is None:
        return 0
    known = max((s.stop for s in state.spans), default=0)
    held = min(int(state.cache.get_seq_length()), known, len(reading.ids) - 1)
    pairs = zip(state.reading.ids[:held], reading.ids, strict=False)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), held)


def native_cache_of(plan: HandoffPlan, target: LanguageModel, state: ModelState | None) -> Any:
    """Return a cache of the plan's native span, which the target goes on from; None where there is no such span."""
    native = plan.count(SpanKind.NATIVE)
    if state is None or not native:
        return None
    refuse_changed_angles(target, int(state.cache.get_seq_length()))
    if can_fork(state.cache, native, target.geometry, target.dtype, cache_devices(target)):
        return fork(state.cache)
    start, stop = plan.translated
    if start == stop and can_cut(state.cache, native, target.geometry):
        held = held_states(state.cache, target.geometry)
        if is_in_place(held, target.dtype, cache_devices(target)):  # kept with all that it can be translated from
            return truncate(state.cache, native, target.geometry, target.model.config)
    kv = read_cache(state.cache, target.rotary, target.geometry, stop=native, partial=True)
    return target_cache(target, kv.to(dtype=target.dtype))


def extend(target: LanguageModel, cache: Any, ids: Tensor) -> Any:
    """Return an exact cache of `ids`, of which `cache` holds the first tokens."""
    return finished(extend_in_parts(target, cache, ids, most=None))


def extend_in_parts(
    target: LanguageModel, cache: Any, ids: Tensor, *, most: int | None, opening: int = 0
) -> Steps[Any]:
    """Do what `extend` does, reading at most `most` tokens a step; `opening` as for `read_sinks`."""
    if not len(ids):
        return cache if cache is not None else native_cache(target.model.config)
    if cache is None:
        first = ids if most is None else ids[:most]
        cache = target_cache(target, read_sinks(target, first, opening=opening))
        if len(first) == len(ids):
            return cache
        yield None
    held = int(cache.get_seq_length())
    if held == len(ids):
        return cache
    done = yield from prefill_in_parts(target, ids[held:], most=most, cache=cache)
    return done.cache
