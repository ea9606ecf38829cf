"""Prove what a hand-over keeps: every arm on the same held-out documents, beside its controls.

Knows examples, hand-overs and the controls. The numbers are `metrics`' business, the verdict `report`'s.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvlingo.alignment import align, last_at_source_start
from kvlingo.assembling import assemble, continuation_logits
from kvlingo.corpus import Example, examples, require_examples
from kvlingo.environment import environment_card
from kvlingo.errors import BadInput
from kvlingo.kv import KV, flatten_heads, split_heads
from kvlingo.language_model import LanguageModel, native_layers, prefill, read
from kvlingo.metrics import ArmScores, DocumentScores, kl_nats, nll_nats, top1_agreement
from kvlingo.plan import HandoffPlan, plan_handoff
from kvlingo.reading import read_text
from kvlingo.report import Report
from kvlingo.states import target_cache
from kvlingo.texts import Document
from kvlingo.translator import Translator

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvaluationOptions:
    """What to score.

    Fields:
        context_tokens, continuation_tokens: of the target, per document.
        documents: held-out pieces, spread evenly over the documents given.
        sink, tail, native_layers: the plan to score under.
        passkeys, attention_documents: how many codes to ask for and texts to compare attention on; 0 for none.
    """

    context_tokens: int = 192
    continuation_tokens: int = 48
    documents: int = 48
    sink: int = 1
    tail: int = 1
    native_layers: int = 0
    passkeys: int = 24
    attention_documents: int = 8
    chat_share: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Controls:
    """What stands beside the translator.

    Fields:
        token_only, no_text: the same class, fitted alike: without the source's cache, and without the text.
        others: more translators by name, each an arm of its own (the ridge that distilling started from, say).
    """

    token_only: Translator | None = None
    no_text: Translator | None = None
    others: Mapping[str, Translator] = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    documents: Sequence[Document],
    *,
    controls: Controls | None = None,
    options: EvaluationOptions | None = None,
    progress: Progress | None = None,
) -> Report:
    """Score every arm on held-out documents; the verdict is FAIL unless `translated` beats the controls.

    `documents` must not have been used in fitting: the caller splits by document.
    """
    options, controls = options or EvaluationOptions(), controls or Controls()
    chosen = choose_examples(documents, source, target, options)
    arms = Arms(source, target, translator, controls, options)
    scored = []
    for number, example in enumerate(chosen):
        scored.append(score_example(arms, example, wrong_document(chosen, number)))
        if progress is not None:
            progress("scoring held-out text", number + 1, len(chosen))
    plan = plan_of(chosen[0], options)
    return Report.from_scores(
        scored,
        pair={"source": source.name, "target": target.name},
        plan={**asdict(options), "first_document": plan.to_json()},
        environment=environment_card(),
        attention=attention_cosine(source, target, translator, chosen, options),
        passkey=passkey_recall(arms, documents),
        seed=options.seed,
    )


def choose_examples(
    documents: Sequence[Document], source: LanguageModel, target: LanguageModel, options: EvaluationOptions
) -> list[Example]:
    """Cut `options.documents` hand-overs, one a document first, kinds and clusters in turn."""
    found: list[Example] = []
    for per_document in (1, 2, 4, 8, 16):
        cut = [
            list(
                examples(
                    [document],
                    source.tokenizer,
                    target.tokenizer,
                    context_tokens=(options.context_tokens,),
                    continuation_tokens=options.continuation_tokens,
                    chat_share=options.chat_share,
                    per_document=per_document,
                    seed=options.seed,
                )
            )
            for document in documents
        ]
        found = in_turn([e for group in cut for e in group], options.seed)[: options.documents]
        if len(found) == options.documents:
            break
    require_examples(found, f"{options.context_tokens} + {options.continuation_tokens} tokens")
    return found


def in_turn(found: Sequence[Example], seed: int) -> list[Example]:
    """Order examples so that any first part of them is balanced over kinds, and within a kind over clusters."""
    rng = random.Random(seed)
    kinds: dict[str, dict[str, list[Example]]] = {}
    for example in found:
        kinds.setdefault(example.kind, {}).setdefault(example.cluster, []).append(example)
    queues = []
    for clusters in kinds.values():
        groups = list(clusters.values())
        rng.shuffle(groups)
        queues.append([e for row in _rows(groups) for e in row])
    return [e for row in _rows(queues) for e in row]


def _rows(groups: Sequence[Sequence[Example]]) -> Iterator[list[Example]]:
    for depth in range(max(map(len, groups), default=0)):
        yield [group[depth] for group in groups if depth < len(group)]


def wrong_document(chosen: Sequence[Example], number: int) -> Example | None:
    """Return the next example from another cluster."""
    later = [*chosen[number + 1 :], *chosen[:number]]
    return next((e for e in later if e.cluster != chosen[number].cluster), None)


def plan_of(example: Example, options: EvaluationOptions) -> HandoffPlan:
    """Plan one example's hand-over.

    Raises `BadInput` where sinks and tail leave nothing to translate, and so nothing to judge.
    """
    plan = plan_handoff(
        example.alignment.tolist(),
        sink=max(options.sink, example.at_source_start),
        tail=options.tail,
        native_layers=options.native_layers,
    )
    if plan.fallback:
        raise BadInput(f"nothing to judge: {plan.fallback}; give a longer --context or a shorter --tail")
    return plan


# --- arms ------------------------------------------------------------------------------------------------------------


class Arms:
    """Every arm that reads a translated or cut cache, ready to be asked about one example after the other."""

    def __init__(
        self,
        source: LanguageModel,
        target: LanguageModel,
        translator: Translator,
        controls: Controls,
        options: EvaluationOptions,
    ) -> None:
        self.source, self.target, self.options, self.translator = source, target, options, translator
        given = {"no_text": controls.no_text, "token_only": controls.token_only, **controls.others}
        self.translators = {"translated": translator} | {name: t for name, t in given.items() if t is not None}
        self.random_one = randomised(translator, options.seed)

    def native(self, example: Example) -> Tensor:
        """Return what the target predicts from its own cache: [continuation, vocabulary]."""
        ids, follow = self.target.ids(example.target.ids), self.target.ids(example.continuation)
        return continuation_logits(self.target, None, ids, follow)

    def logits(
        self, example: Example, other: Example | None, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each arm's predictions [continuation, vocabulary] but native's and the source's own, as `caches` does."""
        follow = self.target.ids(example.continuation)
        for name, kv, rest in self.caches(example, other, only):
            yield name, continuation_logits(self.target, kv, rest, follow)

    def caches(
        self, example: Example, other: Example | None, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, KV | None, Tensor]]:
        """Yield what the target holds under each arm (None: nothing), and the ids of the context that it reads after that.

        Args:
            other: an example of another document, for `wrong_document`; that arm is left out without one.
            only: the arms asked for; all by default.
        """
        target, plan = self.target, plan_of(example, self.options)
        start, stop = plan.translated
        ids = target.ids(example.target.ids)
        sinks = read(target, ids[:start]) if start else None
        source_kv = read(self.source, self.source.ids(example.source.ids))
        # Layer 0 is exact for every arm that knows the text: computed once.
        exact = max(plan.native_layers, *(t.config.first_layer for t in self.translators.values()))
        first_layers = native_layers(target, ids[:stop], exact) if exact and stop > start else None

        def asked(name: str) -> bool:
            return only is None or name in only

        def translate(by: Translator, kv: KV | None, alignment: Tensor) -> KV:
            kv = kv if by.config.reads_source else None
            return assemble(plan, target, by, kv, alignment, ids, prefix=sinks, first_layers=first_layers)

        for name, by in self.translators.items():
            if asked(name):
                yield name, translate(by, source_kv, example.alignment), ids[stop:]
        if asked("tail_only"):
            yield "tail_only", sinks, ids[stop:]
        if asked("no_context"):
            # With no context at all, the prediction of the first scored token is made from the last sink.
            yield "no_context", None, ids[: max(start, 1)]
        if asked("wrong_document") and other is not None:
            wrong_kv = read(self.source, self.source.ids(other.source.ids))
            wrong = example.alignment.clamp(max=wrong_kv.tokens - 1)
            yield "wrong_document", translate(self.translator, wrong_kv, wrong), ids[stop:]
        if asked("random_map"):
            noise = translate(self.random_one, source_kv, example.alignment)
            like = translate(self.translator, source_kv, example.alignment)
            yield "random_map", with_moments_of(noise, like, start), ids[stop:]


def score_example(arms: Arms, example: Example, other: Example | None) -> DocumentScores:
    """Score every arm on one example; native's logits are computed once and every arm is judged against them."""
    follow, native = arms.target.ids(example.continuation), arms.native(example)
    scores = {"native": judge(native, native, follow)}
    for name, logits in arms.logits(example, other):
        scores[name] = judge(native, logits, follow)
    scores["source_alone"] = source_alone(arms.source, example)
    num_bytes = len(example.continuation_text.encode())
    return DocumentScores(example.cluster, example.kind, num_bytes, scores)


def judge(native: Tensor, logits: Tensor, follow: Tensor) -> ArmScores:
    """Score one arm's predictions of the continuation."""
    return ArmScores(
        nll_nats=nll_nats(logits, follow).cpu(),
        kl_nats=kl_nats(native, logits).cpu(),
        top1=top1_agreement(native, logits).cpu(),
    )


def randomised(translator: Translator, seed: int) -> Translator:
    """Return the same translator with every weight matrix drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    random_one = copy.deepcopy(translator)
    for parameter in random_one.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator) * parameter.detach().float().std().cpu()
            parameter.copy_(noise.to(parameter))
    return random_one


def with_moments_of(noise: KV, like: KV, start: int) -> KV:
    """Give the translated span of `noise` the mean and standard deviation of `like`'s, dim by dim.

    A random map must fail for what it says, not for its scale.
    """

    def match(x: Tensor, y: Tensor) -> Tensor:
        heads = x.shape[1]
        first = max(0, start - (like.tokens - x.shape[2]))
        if x.shape[2] - first < 2:
            return y
        a, b = flatten_heads(x[:, :, first:]), flatten_heads(y[:, :, first:])
        scale = b.std(1, keepdim=True) / a.std(1, keepdim=True).clamp(min=1e-12)
        matched = split_heads((a - a.mean(1, keepdim=True)) * scale + b.mean(1, keepdim=True), heads)
        return torch.cat((y[:, :, :first], matched), dim=2)

    return KV(tuple(map(match, noise.keys, like.keys)), tuple(map(match, noise.values, like.values)), like.tokens)


def source_alone(source: LanguageModel, example: Example) -> ArmScores:
    """Let the source itself go on: its likelihood of the same bytes, in its own tokens."""
    follow = source.tokenizer(example.continuation_text, add_special_tokens=False)["input_ids"]
    ids = source.ids(follow)
    logits = continuation_logits(source, None, source.ids(example.source.ids), ids)
    return ArmScores(nll_nats=nll_nats(logits, ids).cpu(), num_bytes=len(example.continuation_text.encode()))


# --- beside the arms -------------------------------------------------------------------------------------------------


def passkey_examples(
    documents: Sequence[Document], source: LanguageModel, target: LanguageModel, options: EvaluationOptions
) -> list[Example]:
    """Hide a random code in held-out text and ask for it at the end, always inside the translated span."""
    rng = random.Random(options.seed)
    found: list[Example] = []
    usable = [d for d in documents if len(d.text) > 6 * options.context_tokens]
    for number in range(options.passkeys * 4):
        if not usable or len(found) == options.passkeys:
            break
        code = "".join(rng.choice("0123456789") for _ in range(6))
        prose = usable[number % len(usable)].text.split()
        room = int(options.context_tokens * 0.6)
        begin = rng.randrange(max(1, len(prose) - room))
        words = prose[begin : begin + room]
        depth = int(len(words) * (0.1 + 0.6 * rng.random()))
        hidden = f"The secret code is {code}. Remember it: the secret code is {code}."
        text = " ".join([*words[:depth], hidden, *words[depth:], "\n\nThe secret code is"])
        example = passkey_example(text, f" {code}", source, target)
        if example is not None:
            found.append(example)
    return found


def passkey_example(text: str, answer: str, source: LanguageModel, target: LanguageModel) -> Example | None:
    """Cut right before the answer; None where the tokenizer would merge across the cut."""
    context, whole = read_text(target.tokenizer, text), read_text(target.tokenizer, text + answer)
    if whole.ids[: len(context.ids)] != context.ids:
        return None
    source_reading = read_text(source.tokenizer, text)
    alignment = align(source_reading, context)
    follow = whole.ids[len(context.ids) :]
    return Example(
        source_reading, context, follow, alignment, last_at_source_start(alignment), answer, "passkey", "passkey"
    )


def passkey_recall(arms: Arms, documents: Sequence[Document]) -> dict[str, Any] | None:
    """Return each arm's share of codes recalled, every token of a code right by greedy choice."""
    asked = passkey_examples(documents, arms.source, arms.target, arms.options)
    if not asked:
        return None
    wanted = {*arms.translators, "tail_only"}
    right: dict[str, list[float]] = {}
    for example in asked:
        follow = arms.target.ids(example.continuation)
        for name, logits in (("native", arms.native(example)), *arms.logits(example, None, wanted)):
            right.setdefault(name, []).append(float(bool((logits.argmax(-1) == follow).all())))
    return {name: sum(values) / len(values) for name, values in right.items()} | {"codes": len(asked)}


def attention_cosine(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    chosen: Sequence[Example],
    options: EvaluationOptions,
) -> dict[str, Any] | None:
    """Compare what the target's own queries read from the native and from the translated cache.

    Every attention module is given its native inputs twice, once over each cache, so that errors of other layers don't mix in.
    Cosine of the two outputs, averaged over tokens and texts, per layer.
    """
    per_layer: list[Tensor] = []
    for example in chosen[: options.attention_documents]:
        plan = plan_of(example, options)
        ids, follow = target.ids(example.target.ids), target.ids(example.continuation)
        stop = plan.translated[1]
        kv = read(source, source.ids(example.source.ids)) if translator.config.reads_source else None
        translated = assemble(plan, target, translator, kv, example.alignment, ids)
        native = read(target, ids[:stop])
        queries = torch.cat((ids[stop:], follow[:-1]))
        with recorded_attention(target) as calls:
            prefill(target, queries, cache=target_cache(target, native))
        per_layer.append(torch.stack([replayed_cosine(call, target_cache(target, translated)) for call in calls]))
    if not per_layer:
        return None
    mean = torch.stack(per_layer).mean(0)
    return {
        "mean": float(mean.mean()),
        "worst_layer": float(mean.min()),
        "worst_layer_index": int(mean.argmin()),
        "layers": [round(float(x), 4) for x in mean],
    }


@dataclass(frozen=True)
class AttentionCall:
    """One attention module, what it was given, and what it gave."""

    module: nn.Module
    kwargs: Mapping[str, Any]
    output: Tensor


@contextmanager
def recorded_attention(lm: LanguageModel) -> Iterator[list[AttentionCall]]:
    """Record every attention module's inputs and output of one forward pass (diagnosis only)."""
    calls: list[AttentionCall] = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        calls.append(AttentionCall(module, named, output[0]))

    modules = [m for n, m in lm.model.get_decoder().named_modules() if n.endswith(("self_attn", ".attention", ".attn"))]
    handles = [m.register_forward_hook(record, with_kwargs=True) for m in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def replayed_cosine(call: AttentionCall, cache: Any) -> Tensor:
    """Call the module again over another cache; return the mean cosine of both outputs."""
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("cache", "past_key_values")}
    name = "cache" if "cache" in inspect.signature(call.module.forward).parameters else "past_key_values"
    again = call.module(**kwargs, **{name: cache})[0]
    return nn.functional.cosine_similarity(call.output.float(), again.float(), dim=-1).mean()
