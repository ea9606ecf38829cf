"""Carry a plan out: from the source's cache to a target that can go on.

Knows models, plans and translators. `assemble` is the one path from a source cache to a target cache; fitting's held-out
check, distillation, evaluation and serving all go through it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvlingo.alignment import align
from kvlingo.anchors import Anchors
from kvlingo.batches import prefill_batch, side_by_side
from kvlingo.cache import (
    KV,
    OpenCache,
    can_fork,
    concat,
    fork,
    native_cache,
    read_cache,
    take_row,
    view_cache,
    write_cache,
)
from kvlingo.confidence import Confidence
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.language_model import (
    LanguageModel,
    cache_devices,
    is_remembered,
    layer_weights,
    native_layers,
    prefill,
    prefill_in_parts,
    read,
    read_sinks,
)
from kvlingo.plan import HandoffPlan, Provenance, Span, SpanKind, plan_handoff, reprefill_plan, with_anchors
from kvlingo.reading import Reading, read_chat, read_text
from kvlingo.recompute import read_both_ends, reads_both_ends, recompute
from kvlingo.signs import Seen, signs_of
from kvlingo.steps import Steps, finished
from kvlingo.translator import Translator, TranslatorConfig, check_geometry, first_read
from kvlingo.trust import Evidence, doubts, embeddings_of, exact_layers, first_layers_of, place_of

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
    middle: KV | None = None,
) -> KV:
    """Make the target's KV of all tokens before the tail.

    Args:
        source_kv: the source's KV, full length; None for a translator that reads only text.
        alignment: [tokens] source token of each target token.
        ids: [tokens] the target's token ids of the whole conversation.
        prefix: exact KV of the first tokens where the caller has it (an earlier cache); the sinks are read otherwise.
        first_layers: exact KV of the first target layers for all tokens, where the caller has it.
        middle: what `translate` gives for this plan, where the caller has it.
    """
    start, stop = plan.translated
    if prefix is None and start:
        prefix = read(target, ids[:start])
    elif prefix is not None and prefix.tokens < start:
        cache = extend(target, target_cache(target, prefix), ids[:start])
        prefix = read_cache(cache, target.rotary, target.geometry, partial=True)
    if start == stop:
        return prefix if prefix is not None else empty_kv(target)
    if middle is None:
        middle = translate(plan, target, translator, source_kv, alignment, ids, first_layers=first_layers)
    whole = middle
    if prefix is not None and start:
        before = prefix if prefix.tokens == start else prefix.narrow(0, start)
        whole = concat([before.to(target.device, target.dtype), middle])
    return recompute(target, whole, ids, plan.anchors)


def translate(
    plan: HandoffPlan,
    target: LanguageModel,
    translator: Translator,
    source_kv: KV | None,
    alignment: Tensor,
    ids: Tensor,
    *,
    first_layers: KV | None = None,
    skip: Sequence[int] | None = None,
) -> KV:
    """Return the target's KV of a plan's middle as the maps give it, anchors included; arguments as for `assemble`.

    `skip`: per target layer how many first tokens are left out; by default those that nothing looks back to.
    """
    start, stop = plan.translated
    device, dtype = place_of(translator)
    return translator(
        source_kv.to(device) if source_kv is not None else None,
        alignment[start:stop],
        embeddings_of(target, translator, ids[:stop]),
        start=start,
        skip=not_held(plan, target) if skip is None else skip,
        native=exact_kv(plan, target, translator, ids, first_layers, device, dtype),
        rounded=target.dtype,
    ).to(target.device)


def exact_kv(
    plan: HandoffPlan,
    target: LanguageModel,
    translator: Translator,
    ids: Tensor,
    first_layers: KV | None,
    device: torch.device,
    dtype: torch.dtype,
) -> KV | None:
    """Return the translated tokens' KV of the layers that the target computes itself; None where there are none.

    Layer 0 depends on each token alone, so that what comes before the translated tokens need not be read for it.
    """
    start, stop = plan.translated
    exact = exact_layers(plan, translator)
    if not exact:
        return None
    if first_layers is not None:
        found = first_layers_of(first_layers, exact).narrow(start, stop)
    else:
        first = start if exact == 1 else 0
        with torch.no_grad():
            found = native_layers(target, ids[first:stop], exact).narrow(start - first, stop - first)
    return found.to(device, dtype)


def not_held(plan: HandoffPlan, target: LanguageModel) -> list[int]:
    """Return per target layer how many first translated tokens its window no longer reaches: of the tail, or of an anchor."""
    start, stop = plan.translated
    reader = min((first for first, _ in plan.anchors), default=stop)
    return [max(0, min(layer.first_held(reader), stop) - start) for layer in target.geometry.layers]


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
        signs: what was seen of how good it is (`signs`), where that was asked for and something was translated.
        doubt: the probability that it was bad, by these signs; a bad one is a re-prefill by now.
    """

    state: ModelState
    plan: HandoffPlan
    logits: Tensor | None
    timings_ms: dict[str, float]
    signs: dict[str, float | None] | None = None
    doubt: float | None = None


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
    anchors: Anchors | None = None,
    confidence: Confidence | None = None,
    watched: bool = False,
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
        anchors: tokens in the middle that the target reads too, evenly or where the translation is least trusted.
        confidence: judges the hand-over once the tail is read, and needs the tail that it was fitted with; what it takes for a
            bad one becomes a re-prefill.
        watched: look at the signs of a bad hand-over even without `confidence`.

    A hand-over that can't be made exactly as planned becomes a re-prefill; `plan.fallback` says why. With `no_text` it raises
    `UnsupportedCache` instead: a re-prefill would read the text.
    """
    return finished(
        hand_off_in_parts(
            conversation,
            source,
            target,
            translator,
            most=None,
            sink=sink,
            tail=tail,
            native_layers=native_layers,
            source_state=source_state,
            target_state=target_state,
            reading=reading,
            no_text=no_text,
            distrust=distrust,
            anchors=anchors,
            confidence=confidence,
            watched=watched,
        )
    )


def hand_off_in_parts(
    conversation: Conversation,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    *,
    most: int | None,
    sink: int = 1,
    tail: int = 1,
    native_layers: int = 0,
    source_state: ModelState | None = None,
    target_state: ModelState | None = None,
    reading: Reading | None = None,
    no_text: bool = False,
    distrust: str | None = None,
    anchors: Anchors | None = None,
    confidence: Confidence | None = None,
    watched: bool = False,
) -> Steps[HandOff]:
    """Do what `hand_off` does, reading or translating at most `most` tokens a step; None: all at once.

    Whoever takes the steps sees that no gradients are made. Nothing that was given changes, also where it is left in the middle.
    """
    _refuse_dial(source, target, translator, no_text=no_text, anchors=anchors)
    started = time.perf_counter()
    if source_state is None:
        source_state = read_native(conversation, source)
    source_read = time.perf_counter()
    if reading is None:
        reading = read_conversation(conversation, target, add_generation_prompt=True)
    source_reading = as_one_text(source_state.reading) if isinstance(conversation, str) else source_state.reading
    crossing = _Crossing(
        source, target, translator, source_state, target_state, reading, align(source_reading, reading), anchors
    )
    plan = crossing.plan(
        sink=sink,
        tail=tail if confidence is None else max(tail, confidence.tail),
        native_layers=native_layers,
        no_text=no_text,
    )
    if distrust is not None:
        plan = crossing.reprefill(distrust)
    if no_text:
        refuse_to_read(plan, sink)
    plan, cache = yield from crossing.carry_out(plan, most, leave_open=not no_text)
    if no_text:
        refuse_to_read(plan, sink)
    translated = time.perf_counter()
    is_watched = (watched or confidence is not None) and plan.fallback is None and not no_text
    cache, logits = yield from _read_rest(target, crossing.ids, cache, plan.tail if is_watched else 1, most)
    signs = crossing.signs(plan, cache, logits) if is_watched and logits is not None else None
    doubt = None if signs is None or confidence is None else confidence.doubt(signs)
    if confidence is not None and doubt is not None and doubt > confidence.threshold:
        plan, cache = yield from crossing.carry_out(crossing.reprefill(confidence.reason(doubt)), most)
        cache, logits = yield from _read_rest(target, crossing.ids, cache, 1, most)
    finished = time.perf_counter()
    timings = {
        "source_prefill": 1e3 * (source_read - started),
        "translate": 1e3 * (translated - source_read),
        "tail": 1e3 * (finished - translated),
    }
    last = None if logits is None else logits[-1]
    return HandOff(ModelState(reading, cache, plan.spans, no_text), plan, last, timings, signs, doubt)


def _refuse_dial(
    source: LanguageModel, target: LanguageModel, translator: Translator, *, no_text: bool, anchors: Anchors | None
) -> None:
    """Raise where these models, this translator and this dial can't go together."""
    if target.target_refusal is None:
        check_geometry(translator.config, source.geometry, target.geometry)
    if no_text and translator.config.reads_text:
        raise BadInput("this translator reads the text; fit one with --no-text to hand over a cache alone")
    if no_text and anchors is not None:
        raise BadInput("anchors are text that the target reads, and it gets none; leave out one of the two")


@dataclass(frozen=True)
class _Crossing:
    """One conversation on its way from source to target: what `hand_off` plans, and plans anew where it is not trusted."""

    source: LanguageModel
    target: LanguageModel
    translator: Translator
    source_state: ModelState
    target_state: ModelState | None
    reading: Reading
    alignment: Tensor
    anchors: Anchors | None

    @cached_property
    def ids(self) -> Tensor:
        return self.target.ids(self.reading.ids)

    @cached_property
    def native(self) -> int:
        return common_prefix(self.target_state, self.reading)

    @property
    def earlier(self) -> tuple[Span, ...]:
        return self.target_state.spans if self.target_state is not None else ()

    def plan(self, *, sink: int, tail: int, native_layers: int, no_text: bool) -> HandoffPlan:
        plan = plan_handoff(
            self.alignment.tolist(),
            sink=sink,
            tail=tail,
            native=self.native,
            earlier=self.earlier,
            native_layers=native_layers,
            no_text=no_text,
            untrusted=self.source_state.translated_until,
            fitted_tokens=self.translator.config.fitted_tokens,
        )
        if self.anchors is None or self.anchors.needs_scores:
            return plan
        return with_anchors(plan, self.anchors.pick(*plan.translated), f"anchor: {self.anchors.by}")

    def reprefill(self, reason: str) -> HandoffPlan:
        return reprefill_plan(len(self.reading), reason, native=self.native, earlier=self.earlier)

    def carry_out(
        self, plan: HandoffPlan, most: int | None, *, leave_open: bool = False
    ) -> Steps[tuple[HandoffPlan, Any]]:
        return carry_out_in_parts(
            plan,
            self.source,
            self.target,
            self.translator,
            self.source_state,
            self.target_state,
            self.alignment,
            self.ids,
            most=most,
            opening=self.reading.opening,
            anchors=self.anchors if plan.fallback is None else None,
            leave_open=leave_open,
        )

    def signs(self, plan: HandoffPlan, cache: Any, logits: Tensor) -> dict[str, float | None]:
        seen = Seen(
            self.source,
            self.target,
            self.translator,
            self.source_state.reading,
            self.source_state.cache,
            self.reading,
            self.alignment,
            plan,
            cache,
            logits,
        )
        return signs_of(seen, untrusted=self.source_state.translated_until)


def _read_rest(
    target: LanguageModel, ids: Tensor, cache: Any, rows: int, most: int | None
) -> Steps[tuple[Any, Tensor | None]]:
    """Let the target read what its cache lacks of `ids`; return the logits [rows, vocabulary] of the last `rows` tokens."""
    if isinstance(cache, OpenCache):
        return read_left(target, ids, cache, rows)
    rest = ids[cache.get_seq_length() if cache is not None else 0 :]
    if not len(rest):
        return cache, None
    if most is not None and len(rest) >= most:
        yield
    done = yield from prefill_in_parts(
        target, rest, most=most, cache=cache, full_length=True, logits_to_keep=min(rows, len(rest))
    )
    return done.cache, done.logits


def read_left(target: LanguageModel, ids: Tensor, opened: OpenCache, rows: int) -> tuple[Any, Tensor]:
    """Let the target read what is left of a conversation in one pass; return its cache and the last `rows` tokens' logits."""
    if opened.reads_first:
        logits = read_both_ends(target, opened, ids, rows)
    else:
        with opened.being_read() as cache:
            logits = prefill(target, ids[opened.stop :], cache=cache, logits_to_keep=rows).logits
    return opened.cache, logits


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
                yield
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
    head gets a copy of the keys and values that it looks at.
    """
    if not len(first) or is_remembered(target, first, opening=opening):
        return False
    heads = int(getattr(target.model.config.get_text_config(decoder=True), "num_attention_heads", 1))
    copied = [
        (plan.tokens - layer.first_held(plan.tokens)) * heads * (layer.key_dim + layer.value_dim)
        for layer in target.geometry.layers
    ]
    if max(copied) * target.dtype.itemsize > MOST_COPIED_BYTES or 2 * sum(copied) > layer_weights(target.model):
        return False
    return reads_both_ends(target)


PIECE_TOKENS = 1024
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


def native_cache_of(plan: HandoffPlan, target: LanguageModel, state: ModelState | None) -> Any:
    """Return a cache of the plan's native span, which the target goes on from; None where there is no such span."""
    native = plan.count(SpanKind.NATIVE)
    if state is None or not native:
        return None
    refuse_changed_angles(target, int(state.cache.get_seq_length()))
    if can_fork(state.cache, native, target.geometry, target.dtype, cache_devices(target)):
        return fork(state.cache)
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
        yield
    held = int(cache.get_seq_length())
    if held == len(ids):
        return cache
    done = yield from prefill_in_parts(target, ids[held:], most=most, cache=cache)
    return done.cache
