"""Hand a conversation over between two models of mlx-lm, with the translators that PyTorch fitted.

Does with MLX what `handoff` does with PyTorch: the same plan, the same alignment, the same arithmetic. Rotations, models, prompt
caches and maps have modules of their own, `mlx_…`; what other programs need of them has its name here too. Deliberately does not
know training, weights on a hub, or servers.

A translator knows its models by PyTorch's weights, which MLX's (quantised, renamed) are not: here only what a cache looks like is
checked. That the weights are those it was fitted on is for the caller to see to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from kvlingo.errors import IncompatiblePair, UnsupportedCache
from kvlingo.geometry import LayerGeometry
from kvlingo.mlx_caches import fill, full_prompt_cache, native_prompt_cache, read, read_prompt_cache
from kvlingo.mlx_library import Array, mx
from kvlingo.mlx_maps import MlxTranslator
from kvlingo.mlx_models import Caught, MlxModel, load, wrap
from kvlingo.mlx_rotation import rotated
from kvlingo.plan import HandoffPlan, Provenance, Span, SpanKind, plan_handoff, reprefill_plan
from kvlingo.reading import Reading, first_tokens, read_more
from kvlingo.states import WHY_READ, Conversation, ModelState, feed, read_conversation
from kvlingo.translator import Translator, TranslatorConfig, first_read

if TYPE_CHECKING:
    from kvlingo.language_model import LanguageModel

__all__ = [
    "MlxHandOff",
    "MlxModel",
    "MlxTranslator",
    "check_models",
    "core",
    "full_prompt_cache",
    "hand_off",
    "load",
    "native_prompt_cache",
    "read",
    "read_native",
    "read_prompt_cache",
    "went_on",
    "wrap",
]

core: Any = mx  # for who imports it from here


# --- the hand-over ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MlxHandOff:
    """A target that can go on: `mlx_lm.generate(model, tokenizer, prompt=handed.rest, prompt_cache=handed.cache)`.

    Fields:
        state: the target's reading, its prompt cache, and how far each span can be trusted once `rest` is read.
        rest: the ids that the target has still to read, at least one.
        timings_ms: source_prefill (0 when the source had read before), translate.
    """

    state: ModelState
    rest: list[int]
    plan: HandoffPlan
    timings_ms: dict[str, float]

    @property
    def cache(self) -> list[Any]:
        """Return the prompt cache; it holds every token before `rest`."""
        return list(self.state.cache)


def read_native(conversation: Conversation, lm: MlxModel) -> ModelState:
    """Let a source read a conversation from scratch into a full-length prompt cache."""
    reading = read_conversation(conversation, cast("LanguageModel", lm), add_generation_prompt=False)
    cache = full_prompt_cache(lm)
    read(lm, reading.ids, cache)
    return ModelState(reading, cache, reprefill_plan(len(reading), WHY_READ).spans)


def went_on(lm: MlxModel, state: ModelState, ids: Sequence[int]) -> ModelState:
    """Return the state of a model that has generated `ids` after what it had read, into the same prompt cache.

    The last of them may not be in the cache yet (mlx-lm puts a token there when it makes the next one).
    """
    reading = read_more(lm.tokenizer, state.reading, list(ids))
    held = min(int(state.cache[0].offset), len(reading))
    known = state.spans[-1].stop if state.spans else 0
    own = Provenance.EXACT if all(s.provenance is Provenance.EXACT for s in state.spans) else Provenance.OWN
    more = [Span(known, held, SpanKind.RECOMPUTED, own, "its own words")] if held > known else []
    return replace(state, reading=first_tokens(reading, held), spans=(*state.spans, *more))


def hand_off(
    conversation: Conversation,
    source: MlxModel,
    target: MlxModel,
    translator: Translator | MlxTranslator,
    *,
    sink: int = 1,
    tail: int = 1,
    source_state: ModelState | None = None,
    reading: Reading | None = None,
) -> MlxHandOff:
    """Hand a conversation over to the target without re-prefill.

    Args:
        sink, tail: first and last tokens that the target reads itself; the tail is left for `mlx_lm.generate`.
        source_state: what the source holds; without it the source reads the conversation first.
        reading: the conversation as the target reads it, where the caller has rendered it.

    What can't be handed over exactly as planned becomes a re-prefill: an empty cache, and all ids in `rest`; `plan.fallback`
    says why.
    """
    maps = translator if isinstance(translator, MlxTranslator) else MlxTranslator(translator, target)
    check_models(maps.config, source, target)
    started = time.perf_counter()
    state = source_state or read_native(conversation, source)
    source_read = time.perf_counter()
    if reading is None:
        reading = read_conversation(conversation, cast("LanguageModel", target), add_generation_prompt=True)
    # An empty cache is refused by name where it is read.
    alignment = feed(conversation, state, reading, min(int(one.offset) for one in state.cache) or len(state.reading))
    plan = plan_handoff(
        alignment.tolist(),
        sink=sink,
        tail=tail,
        untrusted=state.translated_until,
        fitted_tokens=maps.config.fitted_tokens,
    )
    plan, cache = carry_out(plan, source, target, maps, state, alignment.numpy(), reading.ids)
    finished = time.perf_counter()
    timings = {"source_prefill": 1e3 * (source_read - started), "translate": 1e3 * (finished - source_read)}
    rest = list(reading.ids[plan.translated[1] if plan.fallback is None else 0 :])
    return MlxHandOff(ModelState(reading, cache, plan.spans), rest, plan, timings)


def carry_out(
    plan: HandoffPlan,
    source: MlxModel,
    target: MlxModel,
    maps: MlxTranslator,
    state: ModelState,
    alignment: np.ndarray,
    ids: Sequence[int],
) -> tuple[HandoffPlan, list[Any]]:
    """Return the plan as it was carried out, and the target's prompt cache of all tokens before the tail."""
    start, stop = plan.translated
    if start == stop:
        return replace(plan, fallback=plan.fallback or "nothing is translated"), native_prompt_cache(target)
    try:
        refuse_changed_angles(maps.config, len(state.reading), stop)
        translated = assemble(plan, source, target, maps, state, alignment, ids)
    except UnsupportedCache as error:
        # Whatever could not be read is read again by the target: slower, never wrong, and the plan says so.
        return reprefill_plan(plan.tokens, str(error)), native_prompt_cache(target)
    mx.eval([(one.keys, one.values) for one in translated])
    return plan, translated


def refuse_changed_angles(config: TranslatorConfig, source_tokens: int, target_tokens: int) -> None:
    """Raise `UnsupportedCache` where a model's rotary angles have changed on the way to so many tokens."""
    for side, geometry, tokens in (("source", config.source, source_tokens), ("target", config.target, target_tokens)):
        if geometry.angle_limit is not None and tokens > geometry.angle_limit:
            raise UnsupportedCache(
                f"the {side} changes its rotary angles beyond {geometry.angle_limit} tokens, this conversation has {tokens}"
            )


def assemble(
    plan: HandoffPlan,
    source: MlxModel,
    target: MlxModel,
    maps: MlxTranslator,
    state: ModelState,
    alignment: np.ndarray,
    ids: Sequence[int],
) -> list[Any]:
    """Return the target's prompt cache: the sinks as it reads them itself, then what is translated, rotated."""
    config = maps.config
    start, stop = plan.translated
    here = alignment[start:stop]
    skip = [min(max(layer.first_held(stop) - start, 0), stop - start) for layer in target.geometry.layers]
    free = None
    if config.reads_source:
        held = min(len(state.reading), *(int(one.offset) for one in state.cache))
        wanted = first_read(config, skip, config.first_layer, torch.from_numpy(here), held)
        # A map that also reads the token before sees no translated one: the first token to be trusted is repeated.
        trusted = max(state.translated_until, 0)
        free = read_prompt_cache(
            source, state.cache, stop=held, first_wanted=[max(w, min(trusted, held)) for w in wanted]
        )
    made = maps(free, here, target, ids, start, skip)
    sinks = first_tokens_of(target, ids[:start])
    cache = native_prompt_cache(target)
    for index, (keys, values) in enumerate(made):
        keys = rotated(target.rotations[index], keys, start + skip[index]).astype(target.dtype)
        values = values.astype(target.dtype)
        if start and not skip[index]:
            keys, values = (
                mx.concatenate(pair, axis=2) for pair in ((sinks[index][0], keys), (sinks[index][1], values))
            )
        fill(cache[index], keys, values, stop)
    return cache


def first_tokens_of(lm: MlxModel, ids: Sequence[int]) -> list[tuple[Array, Array]]:
    """Return the keys, rotated, and values of a conversation's first tokens as the model reads them itself."""
    if not ids:
        return [(None, None) for _ in lm.geometry.layers]
    caught = [Caught() for _ in lm.geometry.layers]
    lm.model(mx.array(list(ids))[None], cache=caught)
    return [(one.keys, one.values) for one in caught]


# --- what belongs together -------------------------------------------------------------------------------------------


def check_models(config: TranslatorConfig, source: MlxModel, target: MlxModel) -> None:
    """Raise `IncompatiblePair` unless the two models' caches look as the translator expects."""
    for side, expected, lm in (("source", config.source, source), ("target", config.target, target)):
        mine, theirs = [seen(layer) for layer in expected.layers], [seen(layer) for layer in lm.geometry.layers]
        if expected.owners is not None or len(mine) != len(theirs):
            raise IncompatiblePair(
                f"this translator's {side} keeps {len(mine)} layers, {lm.name} in mlx-lm {len(theirs)}; "
                "use the translator of this pair"
            )
        at = next((index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            raise IncompatiblePair(
                f"layer {at} of this translator's {side} keeps {told(mine[at])}; {lm.name} in mlx-lm {told(theirs[at])}"
            )
    if config.reads_text and config.target.hidden_size != target.geometry.hidden_size:
        raise IncompatiblePair(
            f"this translator reads embeddings of {config.target.hidden_size} features, those of {target.name} have "
            f"{target.geometry.hidden_size}; use the translator of this pair"
        )


def seen(layer: LayerGeometry) -> tuple[Any, ...]:
    """Return what two frameworks must agree on of a layer."""
    rope = layer.rope
    turned = None if rope is None else (rope.layout, rope.dims, rope.offset, rope.part)
    return layer.kv_heads, layer.key_dim, layer.value_dim, layer.window, turned


def told(layer: tuple[Any, ...]) -> str:
    """Return a layer as words."""
    heads, key_dim, value_dim, window, turned = layer
    rope = "no rotation" if turned is None else f"{turned[1]} dims rotated ({turned[0]})"
    return f"{heads} heads of {key_dim} + {value_dim}, {f'a window of {window}' if window else 'all tokens'}, {rope}"
