"""From a source's cache to a target's: the one path that all translations take.

Knows a plan as data, both models and the maps. Does not know conversations, nor who asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlingo.cache import read_cache
from kvlingo.kv import KV, concat
from kvlingo.language_model import (
    LanguageModel,
    native_layers,
    prefill,
    read,
)
from kvlingo.plan import HandoffPlan
from kvlingo.recompute import recompute
from kvlingo.states import (
    extend,
    target_cache,
)
from kvlingo.translator import Translator, TranslatorConfig
from kvlingo.trust import embeddings_of, exact_layers, first_layers_of, place_of


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


def continuation_logits(target: LanguageModel, kv: KV | None, tail: Tensor, continuation: Tensor) -> Tensor:
    """Let the target read its tail and then the given continuation; return what it predicted for each of its tokens.

    Returns logits [continuation, vocabulary]: row 0 is the prediction made from the last tail token. With `kv` None the
    target reads `tail` from nothing.
    """
    ids = torch.cat((tail, continuation[:-1]))
    cache = None if kv is None or not kv.tokens else target_cache(target, kv)
    return prefill(target, ids, cache=cache, logits_to_keep=len(continuation)).logits


def first_source_token(config: TranslatorConfig, aligned: int, translated_until: int) -> int:
    """Return where to begin reading the source for a translation that begins at the source token `aligned`.

    A map that also reads the token before sees no translated one: the first token to be trusted is repeated.
    """
    return max(translated_until, aligned - max(config.source_lags), 0)
