"""Carry a plan out: from the source's cache to a target that can go on.

Knows models, plans and translators. `assemble` is the one path from a source cache to a target cache; fitting's held-out
check, distillation, evaluation and serving all go through it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlingo.alignment import align
from kvlingo.batches import prefill_batch, side_by_side
from kvlingo.cache import KV, concat, read_cache, take_row, write_cache
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.language_model import LanguageModel, cache_devices, native_layers, prefill, read, read_sinks
from kvlingo.plan import HandoffPlan, Provenance, Span, SpanKind, plan_handoff, reprefill_plan
from kvlingo.reading import Reading, read_chat, read_text
from kvlingo.translator import Translator, TranslatorConfig, check_geometry, embedded, first_read

Message = dict[str, Any]


def assemble(
    plan: HandoffPlan,
    target: LanguageModel,
    translator: Translator,
    source_kv: KV | None,
    alignment: Tensor,
    ids: Tensor,
    *,
    prefix: KV | None = None,
    first_layers: KV | None = None,
) -> KV:
    """Make the target's KV of all tokens before the tail.

    Args:
        source_kv: the source's KV, full length; None for a translator that reads only text.
        alignment: [tokens] source token of each target token.
        ids: [tokens] the target's token ids of the whole conversation.
        prefix: exact KV of the first tokens where the caller has it (an earlier cache); the sinks are read otherwise.
        first_layers: exact KV of the first target layers for all tokens, where the caller has it.
    """
    start, stop = plan.translated
    if prefix is None and start:
        prefix = read(target, ids[:start])
    if start == stop:
        return prefix if prefix is not None else empty_kv(target)
    device, dtype = _place_of(translator)
    embeddings = None
    if translator.config.reads_text:
        embeddings = embedded(lambda distinct: target.embed(distinct).to(device, dtype), ids)
    exact = exact_layers(plan, translator)
    if first_layers is None and exact:
        with torch.no_grad():
            first_layers = native_layers(target, ids[:stop], exact)
    native = None if first_layers is None or not exact else _first(first_layers, exact).narrow(start, stop)
    middle = translator(
        source_kv.to(device, dtype) if source_kv is not None else None,
        alignment[start:stop],
        embeddings,
        start=start,
        skip=not_held(plan, target),
        native=native.to(device, dtype) if native is not None else None,
        rounded=target.dtype,
    ).to(target.device, target.dtype)
    if prefix is None or not start:
        return middle
    before = prefix if prefix.tokens == start else prefix.narrow(0, start)
    return concat([before.to(target.device, target.dtype), middle])


def exact_layers(plan: HandoffPlan, translator: Translator) -> int:
    """Return how many first target layers are computed by the target itself."""
    return max(plan.native_layers, translator.config.first_layer)


def not_held(plan: HandoffPlan, target: LanguageModel) -> list[int]:
    """Return per target layer how many first translated tokens its window no longer reaches."""
    start, stop = plan.translated
    return [max(0, min(layer.first_held(stop), stop) - start) for layer in target.geometry.layers]


def _place_of(translator: Translator) -> tuple[torch.device, torch.dtype]:
    buffer = next(translator.buffers())
    return buffer.device, buffer.dtype


def _first(kv: KV, layers: int) -> KV:
    return KV(kv.keys[:layers], kv.values[:layers], kv.tokens)


def empty_kv(lm: LanguageModel) -> KV:
    """Return a KV of no tokens."""

    def none(heads: int, dim: int) -> Tensor:
        return torch.zeros(1, heads, 0, dim, device=lm.device, dtype=lm.dtype)

    layers = lm.geometry.layers
    return KV(
        tuple(none(x.kv_heads, x.key_dim) for x in layers), tuple(none(x.kv_heads, x.value_dim) for x in layers), 0
    )


def target_cache(target: LanguageModel, kv: KV) -> Any:
    """Write a KV into a cache that the target can go on from, each layer where the model keeps that layer."""
    placed = kv.place(cache_devices(target))
    return write_cache(placed, target.rotary, target.geometry, target.model.config)


def continuation_logits(target: LanguageModel, kv: KV | None, tail: Tensor, continuation: Tensor) -> Tensor:
    """Let the target read its tail and then the given continuation; return what it predicted for each of its tokens.

    Returns logits [continuation, vocabulary]: row 0 is the prediction made from the last tail token. With `kv` None the
    target reads `tail` from nothing.
    """
    ids = torch.cat((tail, continuation[:-1]))
    cache = None if kv is None or not kv.tokens else target_cache(target, kv)
    return prefill(target, ids, cache=cache, logits_to_keep=len(continuation)).logits


# --- the hand-over of a conversation ---------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class HandOff:
    """A target that can go on.

    Fields:
        state: the target's reading and cache; the cache holds every token of the reading.
        logits: [vocabulary] of the next token; None when the target has read nothing yet (`no_text`).
        timings_ms: source_prefill (0 when the source had read before), translate, tail.
    """

    state: ModelState
    plan: HandoffPlan
    logits: Tensor | None
    timings_ms: dict[str, float]


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
    return _read_alone(read_conversation(conversation, lm, add_generation_prompt=False), lm)


def _read_alone(reading: Reading, lm: LanguageModel) -> ModelState:
    cache = prefill(lm, lm.ids(reading.ids), full_length=True).cache
    return ModelState(reading, cache, reprefill_plan(len(reading.ids), WHY_READ).spans)


@torch.no_grad()
def read_native_batch(conversations: Sequence[Conversation], lm: LanguageModel) -> list[ModelState]:
    """Let a model read several conversations at once, padded on the left; each comes out as if it had been read alone.

    Where a batch can't give that (`side_by_side`), they are read one after another.
    """
    readings = [read_conversation(c, lm, add_generation_prompt=False) for c in conversations]
    if not side_by_side(lm, max(map(len, readings), default=0)):
        return [_read_alone(reading, lm) for reading in readings]
    batch = prefill_batch(lm, [lm.ids(r.ids) for r in readings], full_length=True).batch
    return [
        ModelState(
            reading,
            take_row(batch.cache, row, start, lm.geometry, lm.model.config),
            reprefill_plan(len(reading), WHY_READ).spans,
        )
        for row, (reading, start) in enumerate(zip(readings, batch.padding, strict=True))
    ]


def hand_off_batch(
    conversations: Sequence[Conversation],
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    *,
    source_states: Sequence[ModelState] | None = None,
    target_states: Sequence[ModelState | None] | None = None,
    **dial: Any,
) -> list[HandOff]:
    """Hand several conversations over; go on from all of them at once with `generation.generate_batch`.

    Without `source_states` the source reads them in one batch. Translating and the short passes over sinks and tail run row by
    row: their lengths differ, and a map's cost grows with the tokens alone. `dial` (sink, tail, native_layers, no_text) is the
    same for every row.
    """
    source_states = source_states or read_native_batch(conversations, source)
    target_states = target_states or [None] * len(conversations)
    return [
        hand_off(conversation, source, target, translator, source_state=mine, target_state=earlier, **dial)
        for conversation, mine, earlier in zip(conversations, source_states, target_states, strict=True)
    ]


@torch.no_grad()
def hand_off(
    conversation: Conversation,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    *,
    sink: int = 1,
    tail: int = 1,
    native_layers: int = 0,
    source_state: ModelState | None = None,
    target_state: ModelState | None = None,
    reading: Reading | None = None,
    no_text: bool = False,
    distrust: str | None = None,
) -> HandOff:
    """Hand a conversation over to the target without re-prefill.

    Args:
        sink, tail, native_layers: the quality-latency dial: first and last tokens, and first layers, that the target computes
            itself. At least one token is always left for it to read.
        source_state: what the source holds (with its answers); without it the source reads the conversation first.
        target_state: what the target holds from an earlier turn; the common prefix stays native, with the provenance that it
            has there: what was translated once for this target is not made again.
        reading: the conversation as the target reads it, where the caller has rendered it (with tool definitions, say).
        no_text: the target sees no text: every token after the constant sinks is translated, and it starts at the next new
            token. Needs a translator fitted without text. Not anonymous: a cache can be read back.
        distrust: why this translator is not to be used (a failed report, say): the target re-prefills, with this as the reason.

    A hand-over that can't be made exactly as planned becomes a re-prefill; `plan.fallback` says why. With `no_text` it raises
    `UnsupportedCache` instead: a re-prefill would read the text.
    """
    if target.target_refusal is None:
        check_geometry(translator.config, source.geometry, target.geometry)
    if no_text and translator.config.reads_text:
        raise BadInput("this translator reads the text; fit one with --no-text to hand over a cache alone")
    started = time.perf_counter()
    if source_state is None:
        source_state = read_native(conversation, source)
    source_read = time.perf_counter()
    if reading is None:
        reading = read_conversation(conversation, target, add_generation_prompt=True)
    ids = target.ids(reading.ids)
    source_reading = as_one_text(source_state.reading) if isinstance(conversation, str) else source_state.reading
    alignment = align(source_reading, reading)
    native = common_prefix(target_state, reading)
    plan = plan_handoff(
        alignment.tolist(),
        sink=sink,
        tail=tail,
        native=native,
        earlier=target_state.spans if target_state is not None else (),
        native_layers=native_layers,
        no_text=no_text,
        untrusted=source_state.translated_until,
        fitted_tokens=translator.config.fitted_tokens,
    )
    if distrust is not None:
        earlier = target_state.spans if target_state is not None else ()
        plan = reprefill_plan(len(ids), distrust, native=native, earlier=earlier)
    if no_text:
        refuse_to_read(plan, sink)
    plan, cache = carry_out(
        plan, source, target, translator, source_state, target_state, alignment, ids, opening=reading.opening
    )
    if no_text:
        refuse_to_read(plan, sink)
    translated = time.perf_counter()
    rest = ids[cache.get_seq_length() if cache is not None else 0 :]
    logits = None
    if len(rest):
        done = prefill(target, rest, cache=cache, full_length=True)
        cache, logits = done.cache, done.logits[-1]
    finished = time.perf_counter()
    timings = {
        "source_prefill": 1e3 * (source_read - started),
        "translate": 1e3 * (translated - source_read),
        "tail": 1e3 * (finished - translated),
    }
    return HandOff(ModelState(reading, cache, plan.spans, no_text), plan, logits, timings)


def as_one_text(reading: Reading) -> Reading:
    """Take all contents as one: a text and what a model said after it are one text to the next model."""
    (start, _), (_, stop) = reading.contents[0], reading.contents[-1]
    return replace(reading, contents=((start, stop),))


def refuse_to_read(plan: HandoffPlan, sink: int) -> None:
    """Raise `UnsupportedCache` where a plan lets the target read text that the source has read, beyond the sinks."""
    start, _ = plan.translated
    read_again = [s for s in plan.spans if s.kind is SpanKind.RECOMPUTED and s.stop <= start]
    if plan.fallback or sum(map(len, read_again)) > sink:
        reason = plan.fallback or read_again[-1].reason
        raise UnsupportedCache(f"this can't be handed over without its text ({reason}); hand it over with its text")


def carry_out(
    plan: HandoffPlan,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    source_state: ModelState,
    target_state: ModelState | None,
    alignment: Tensor,
    ids: Tensor,
    *,
    opening: int = 0,
) -> tuple[HandoffPlan, Any]:
    """Return the plan as it was really carried out, and the cache of all tokens before the tail (None for no token).

    `opening`: how many first tokens are those of many conversations (`Reading.opening`).
    """
    tokens, start, stop = plan.tokens, *plan.translated
    prefix = None
    try:
        refuse_target(target, tokens)
        prefix = native_prefix(plan, target, target_state)
        if start == stop:
            return plan, None if prefix is None else target_cache(target, prefix)
        if start and (prefix is None or prefix.tokens < start):
            prefix = extend(target, prefix, ids[:start], opening=opening)
        source_kv, offset = None, 0
        if translator.config.reads_source:
            refuse_changed_angles(source, source_state.cache.get_seq_length())
            offset = first_source_token(translator.config, int(alignment[start]), source_state.translated_until)
            source_kv = read_cache(
                source_state.cache,
                source.rotary,
                source.geometry,
                start=offset,
                first_wanted=first_read(
                    translator.config,
                    not_held(plan, target),
                    exact_layers(plan, translator),
                    alignment[start:stop],
                    source_state.cache.get_seq_length(),
                ),
            )
        kv = assemble(plan, target, translator, source_kv, alignment - offset, ids, prefix=prefix)
        return plan, target_cache(target, kv)
    except UnsupportedCache as error:
        # Whatever could not be read is read again by the target: slower, never wrong, and the plan says so.
        return reprefill_plan(tokens, str(error)), None


def first_source_token(config: TranslatorConfig, aligned: int, translated_until: int) -> int:
    """Return where to begin reading the source for a translation that begins at the source token `aligned`.

    A map that also reads the token before sees no translated one: the first token to be trusted is repeated.
    """
    return max(translated_until, aligned - max(config.source_lags), 0)


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


def native_prefix(plan: HandoffPlan, target: LanguageModel, state: ModelState | None) -> KV | None:
    """Return the target's own KV of the plan's native span."""
    native = sum(len(s) for s in plan.spans if s.kind == "native")
    if state is None or not native:
        return None
    refuse_changed_angles(target, int(state.cache.get_seq_length()))
    return read_cache(state.cache, target.rotary, target.geometry, stop=native, partial=True)


def extend(target: LanguageModel, prefix: KV | None, ids: Tensor, *, opening: int = 0) -> KV:
    """Return exact KV of `ids`, of which `prefix` holds the first tokens; `opening` as for `read_sinks`."""
    if prefix is None:
        return read_sinks(target, ids, opening=opening)
    cache = target_cache(target, prefix)
    prefill(target, ids[prefix.tokens :], cache=cache)
    return read_cache(cache, target.rotary, target.geometry, partial=True)
