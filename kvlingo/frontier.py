"""Quality against cost: the dial swept on held-out documents, beside controls, quantised caches and a re-prefill.

Knows examples, plans and costs. Every point reads the same documents, so that differences are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvlingo.anchors import PLACES, Anchors
from kvlingo.assembling import assemble, continuation_logits, translate
from kvlingo.calibration import map_weights, read_cost
from kvlingo.corpus import Example
from kvlingo.cost import SHORT_PASS_TOKENS, TargetCost, pass_flops, plan_flops
from kvlingo.environment import environment_card
from kvlingo.errors import BadInput
from kvlingo.evaluation import (
    Arms,
    Controls,
    EvaluationOptions,
    Progress,
    choose_examples,
    judge,
    plan_of,
    wrong_document,
)
from kvlingo.execution import choose_anchors, middle_doubts
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.metrics import DocumentScores, estimates, nll_nats, paired_kl_ratio
from kvlingo.plan import HandoffPlan, with_anchors
from kvlingo.quantised import Quantisation, quantise
from kvlingo.report import ArmMetrics, bootstrap_card, count_clusters, draw, summarise_arms
from kvlingo.texts import Document
from kvlingo.translator import Translator
from kvlingo.trust import first_layers_of

CONTROLS = ("token_only", "tail_only", "no_context", "wrong_document")
RANDOM, ORACLE, DEVIATION = "random", "oracle", "deviation"
DEVIATION_LAYERS = 2
PIECE_TOKENS = 256


@dataclass(frozen=True)
class FrontierOptions:
    """What to sweep.

    Fields:
        contexts, continuation_tokens, documents: as for an evaluation, for each length.
        sinks, tails: first and last tokens that the target reads, each beside the least of the other.
        native_layers: first layers that it computes; None: 2, and a quarter, a half and three quarters of all.
        shares, blocks: of anchors; every choice in `by` is made at each.
        by: "spread", "random" and signals of `trust.SIGNALS`. Without "random" nothing is compared with chance.
        anchored_tails: the tails under which anchors are swept.
        bits, group: of the target's own cache, quantised, by token and with keys by channel.
    """

    contexts: tuple[int, ...] = (192, 1024)
    continuation_tokens: int = 48
    documents: int = 24
    sinks: tuple[int, ...] = (1, 4, 16)
    tails: tuple[int, ...] = (1, 4, 16, 64)
    native_layers: tuple[int, ...] | None = None
    shares: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    blocks: tuple[int, ...] = (1, 16)
    by: tuple[str, ...] = ("spread", RANDOM, "distance", "surprise", ORACLE)
    anchored_tails: tuple[int, ...] = (1,)
    bits: tuple[int, ...] = (2, 3, 4)
    group: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """One setting of the dial. `sweep` names the line it belongs to."""

    sweep: str
    sink: int = 1
    tail: int = 1
    native_layers: int = 0
    anchors: Anchors | None = None

    @property
    def name(self) -> str:
        """Name the setting."""
        parts = [f"sink {self.sink}", f"tail {self.tail}"]
        parts += [f"{self.native_layers} native layers"] if self.native_layers else []
        if self.anchors is not None:
            parts.append(f"{self.anchors.share:.0%} {self.anchors.by} by {self.anchors.block}")
        return ", ".join(parts)

    def beside(self, by: str) -> Point:
        """Return the same setting with other anchors."""
        assert self.anchors is not None
        sweep = sweep_of(by, self.anchors.block, self.native_layers)
        return replace(self, sweep=sweep, anchors=replace(self.anchors, by=by))


def sweep_of(by: str, block: int, native: int) -> str:
    """Name the line of a choice of anchors."""
    return f"anchors: {by}, by {block}" + (f", {native} native layers" if native else "")


def points_of(options: FrontierOptions, target: LanguageModel) -> list[Point]:
    """Return every setting to try; the same one under two sweeps counts for the first."""
    count = len(target.geometry)
    layers = options.native_layers or tuple(sorted({2, count // 4, count // 2, 3 * count // 4} & set(range(2, count))))
    sink, tail = min(options.sinks), min(options.tails)
    found = [Point("tail", sink, t) for t in options.tails]
    found += [Point("sink", s, tail) for s in options.sinks]
    ends = sorted({tail, max(options.tails)})
    found += [Point(f"native layers, tail {t}", sink, t, m) for t in ends for m in layers]
    choices = [(by, DEVIATION_LAYERS if by == DEVIATION else 0) for by in options.by]
    if {DEVIATION, RANDOM} <= set(options.by):
        choices.append((RANDOM, DEVIATION_LAYERS))  # as many random tokens for as much: deviation needs native layers
    for under in options.anchored_tails:
        found += [
            Point(sweep_of(by, block, native), sink, under, native, Anchors(by, share, block))
            for by, native in choices
            for block in options.blocks
            for share in options.shares
        ]
    distinct: dict[str, Point] = {}
    for point in found:
        distinct.setdefault(point.name, point)
    return list(distinct.values())


@dataclass(frozen=True)
class Known:
    """What all settings share on one example: read once."""

    example: Example
    ids: Tensor
    follow: Tensor
    truth: KV
    source_kv: KV
    source_nats: Tensor | None
    whole: HandoffPlan
    middle: KV
    doubts: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)


class Sweep:
    """Carries settings out on one example after the other."""

    def __init__(
        self, source: LanguageModel, target: LanguageModel, translator: Translator, options: FrontierOptions
    ) -> None:
        self.source, self.target, self.translator, self.options = source, target, translator, options
        self.cost, self.weights = read_cost(target), map_weights(translator)

    def know(self, example: Example) -> Known:
        """Let both models read an example, and translate everything that any setting translates."""
        source, target = self.source, self.target
        ids, follow = target.ids(example.target.ids), target.ids(example.continuation)
        whole = plan_of(example, EvaluationOptions(sink=min(self.options.sinks), tail=1))
        source_ids = source.ids(example.source.ids)
        source_kv, truth = read(source, source_ids), read(target, ids)
        nats = surprises(source, source_ids) if "surprise" in self.options.by else None
        exact = max(1, self.translator.config.first_layer)
        middle = translate(
            whole,
            target,
            self.translator,
            source_kv if self.translator.config.reads_source else None,
            example.alignment,
            ids,
            first_layers=first_layers_of(truth, exact),
            skip=[0] * len(target.geometry),
        )
        return Known(example, ids, follow, truth, source_kv, nats, whole, middle)

    def plan(self, known: Known, point: Point, number: int) -> tuple[HandoffPlan, KV]:
        """Return a setting's plan on one example, and its middle; `number` makes each example's luck its own."""
        dial = EvaluationOptions(sink=point.sink, tail=point.tail, native_layers=point.native_layers)
        plan = plan_of(known.example, dial)
        middle = self._middle(known, plan)
        anchors = point.anchors
        if anchors is None:
            return plan, middle
        anchors = replace(anchors, seed=self.options.seed + number)
        if not anchors.needs_scores:
            plan = with_anchors(plan, anchors.pick(*plan.translated))
            return plan, self._middle(known, plan)
        return choose_anchors(plan, anchors, self._doubts(known, plan, middle, anchors.by), middle)

    def _doubts(self, known: Known, plan: HandoffPlan, middle: KV, by: str) -> Tensor:
        """Return a signal's scores, worked out once for all shares and blocks."""
        key = (by, *plan.translated, plan.native_layers)
        if key not in known.doubts:
            known.doubts[key] = middle_doubts(
                plan,
                by,
                self.target,
                self.translator,
                known.source_kv,
                known.example.alignment,
                known.ids,
                middle=middle,
                source_nats=known.source_nats,
                truth=known.truth.narrow(*plan.translated),
            )
        return known.doubts[key]

    def _middle(self, known: Known, plan: HandoffPlan) -> KV:
        """Cut a plan's middle out of what was translated once, its native layers from the target's own cache."""
        first, (start, stop) = known.whole.translated[0], plan.translated
        if start == stop:
            return known.middle.narrow(0, 0)
        mapped, own = known.middle.narrow(start - first, stop - first), known.truth.narrow(start, stop)
        exact = plan.native_layers
        return KV(
            (*own.keys[:exact], *mapped.keys[exact:]), (*own.values[:exact], *mapped.values[exact:]), mapped.tokens
        )

    def logits(self, known: Known, plan: HandoffPlan, middle: KV) -> Tensor:
        """Return what the target predicts of the continuation after a plan: [continuation, vocabulary]."""
        start, stop = plan.translated
        if start == stop:
            return continuation_logits(self.target, None, known.ids, known.follow)
        kv = assemble(
            plan,
            self.target,
            self.translator,
            known.source_kv,
            known.example.alignment,
            known.ids,
            prefix=known.truth.narrow(0, start),
            middle=middle,
        )
        return continuation_logits(self.target, kv, known.ids[stop:], known.follow)

    def share(self, plan: HandoffPlan, point: Point) -> float:
        """Return what a setting costs on one example, as a share of a re-prefill."""
        chosen = point.anchors is not None and point.anchors.needs_scores
        flops = plan_flops(self.cost, self.weights, plan, is_chosen_by_signal=chosen)
        if point.anchors is not None and point.anchors.by == DEVIATION:
            start, stop = plan.translated  # the maps of the native layers, run to be compared with them
            flops += 2.0 * sum(self.weights[: plan.native_layers]) * (stop - start)
        return flops / pass_flops(self.cost, plan.tokens)

    def quantised(self, known: Known, how: Quantisation) -> Tensor:
        """Return what the target predicts from its own cache in few bits, its sinks and its last token as they are."""
        keep = known.whole.translated[0]
        kv = quantise(self.target, known.truth.narrow(0, len(known.ids) - 1), how, keep_first=keep)
        return continuation_logits(self.target, kv, known.ids[-1:], known.follow)


def surprises(lm: LanguageModel, ids: Tensor) -> Tensor:
    """Return how much each token surprised a model that reads them all, [tokens], 0 for the first: a piece at a time.

    A large vocabulary's logits of a long text would not fit beside two models.
    """
    found, cache = [torch.zeros(1)], None
    for start in range(0, len(ids) - 1, PIECE_TOKENS):
        piece = ids[start : min(start + PIECE_TOKENS, len(ids) - 1)]
        done = prefill(lm, piece, cache=cache, full_length=True, logits_to_keep=0)
        cache = done.cache
        found.append(nll_nats(done.logits, ids[start + 1 : start + 1 + len(piece)]).float().cpu())
    return torch.cat(found)


@torch.no_grad()
def frontier(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    documents: Sequence[Document],
    *,
    controls: Controls | None = None,
    options: FrontierOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Sweep the dial on held-out documents; return plain values that `json` writes and `plots.draw_frontier` draws.

    `documents` must not have been used in fitting: the caller splits by document.
    """
    options, controls = options or FrontierOptions(), controls or Controls()
    sweep = Sweep(source, target, translator, options)
    lengths = [sweep_length(sweep, documents, controls, n, progress) for n in options.contexts]
    return {
        "pair": {"source": source.name, "target": target.name},
        "options": asdict(options),
        "contexts": lengths,
        "environment": environment_card(),
    }


def sweep_length(
    sweep: Sweep, documents: Sequence[Document], controls: Controls, context: int, progress: Progress | None
) -> dict[str, Any]:
    """Try every setting at one length of context."""
    options = sweep.options
    evaluation = EvaluationOptions(
        context_tokens=context,
        continuation_tokens=options.continuation_tokens,
        documents=options.documents,
        sink=min(options.sinks),
        tail=1,
        seed=options.seed,
    )
    chosen = choose_examples(documents, sweep.source, sweep.target, evaluation)
    arms = Arms(sweep.source, sweep.target, sweep.translator, controls, evaluation)
    points = [p for p in points_of(options, sweep.target) if fits(p, chosen)]
    bits = [Quantisation(b, options.group, by) for by in ("token", "channel") for b in options.bits]
    scores, shares = list[DocumentScores](), dict[str, list[float]]()
    for number, example in enumerate(chosen):
        native = arms.native(example)
        known = sweep.know(example)
        found = {"native": judge(native, native, known.follow)}
        for point in points:
            plan, middle = sweep.plan(known, point, number)
            shares.setdefault(point.name, []).append(sweep.share(plan, point))
            found[point.name] = judge(native, sweep.logits(known, plan, middle), known.follow)
        for name, logits in arms.logits(example, wrong_document(chosen, number), CONTROLS):
            found[name] = judge(native, logits, known.follow)
        for how in bits:
            found[how.name] = judge(native, sweep.quantised(known, how), known.follow)
        num_bytes = len(example.continuation_text.encode())
        scores.append(DocumentScores(example.cluster, example.kind, num_bytes, found))
        if progress is not None:
            progress(f"sweeping at {context} tokens", number + 1, len(chosen))
    return summed_up(sweep, context, chosen, points, bits, scores, shares)


def fits(point: Point, chosen: Sequence[Example]) -> bool:
    """Tell whether a setting leaves something to translate in every example."""
    try:
        for example in chosen:
            plan_of(example, EvaluationOptions(sink=point.sink, tail=point.tail))
    except BadInput:
        return False
    return True


def summed_up(
    sweep: Sweep,
    context: int,
    chosen: Sequence[Example],
    points: Sequence[Point],
    bits: Sequence[Quantisation],
    scores: Sequence[DocumentScores],
    shares: dict[str, list[float]],
) -> dict[str, Any]:
    """Return one length's figures with their intervals."""
    seed = sweep.options.seed
    weights = draw(scores, seed)
    metrics = summarise_arms(scores, weights)
    rows = [
        {
            "name": point.name,
            "sweep": point.sweep,
            "dial": dial_of(point),
            "share_of_reprefill": sum(shares[point.name]) / len(shares[point.name]),
            "knowable": point.anchors is None or point.anchors.by != ORACLE,
            **metrics[point.name],
        }
        for point in points
    ]
    for row in rows:
        row["on_frontier"] = row["knowable"] and not any(is_better(other, row) for other in rows if other["knowable"])
    return {
        "context_tokens": context,
        "num_documents": len(scores),
        "num_clusters": count_clusters(scores),
        "bootstrap": bootstrap_card(scores, seed),
        "points": rows,
        "controls": [
            {"name": name, "share_of_reprefill": share, **metrics[name]}
            for name, share in control_shares(sweep, chosen).items()
            if name in metrics
        ],
        "quantised": [{"name": how.name, **asdict(how), **metrics[how.name]} for how in bits],
        "reprefill": {"share_of_reprefill": 1.0, **metrics["native"]},
        "selection": list(against_chance(points, scores, weights, metrics)),
    }


def dial_of(point: Point) -> dict[str, Any]:
    """Return a setting as plain values."""
    dial = {"sink": point.sink, "tail": point.tail, "native_layers": point.native_layers}
    anchors = point.anchors
    return dial | {
        "anchors": None if anchors is None else {"by": anchors.by, "share": anchors.share, "block": anchors.block}
    }


def is_better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether one setting is nearer to native for less, or as near for less, or nearer for as much."""
    mine, theirs = ((row["share_of_reprefill"], row["kl_nats"]["mean"]) for row in (one, other))
    return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


def control_shares(sweep: Sweep, chosen: Sequence[Example]) -> dict[str, float]:
    """Return what the controls cost: they stand where they would stand as methods."""
    plans = [plan_of(e, EvaluationOptions(sink=min(sweep.options.sinks), tail=1)) for e in chosen]

    def mean(flops: Sequence[float]) -> float:
        return sum(f / pass_flops(sweep.cost, p.tokens) for f, p in zip(flops, plans, strict=True)) / len(plans)

    cost, none = sweep.cost, [0] * len(sweep.weights)
    translated = mean([plan_flops(cost, sweep.weights, p) for p in plans])
    passes = mean([plan_flops(cost, none, p) for p in plans])
    return {
        "token_only": translated_without_source(sweep, plans),
        "tail_only": passes,
        "no_context": mean([short_pass(cost) for _ in plans]),
        "wrong_document": translated,
    }


def translated_without_source(sweep: Sweep, plans: Sequence[HandoffPlan]) -> float:
    """Return the cost of maps that read the text alone: the share of weights that embeddings feed."""
    config = sweep.translator.config
    text = config.text_width * len(config.embedding_lags)
    weights = [w * text // max(config.feature_width(layer), 1) if w else 0 for layer, w in enumerate(sweep.weights)]
    shares = [plan_flops(sweep.cost, weights, p) / pass_flops(sweep.cost, p.tokens) for p in plans]
    return sum(shares) / len(shares)


def short_pass(cost: TargetCost) -> float:
    """Return what one short pass costs."""
    return pass_flops(cost, SHORT_PASS_TOKENS)


def against_chance(
    points: Sequence[Point], scores: Sequence[DocumentScores], weights: Tensor, metrics: ArmMetrics
) -> Iterator[dict[str, Any]]:
    """Yield how much nearer to native each choice of anchors is than as many random ones, paired: above 0 it is better."""
    names = {p.name for p in points}
    for point in points:
        anchors = point.anchors
        if anchors is None or anchors.by == RANDOM:
            continue
        chance = point.beside(RANDOM)
        if chance.name not in names:
            continue
        ratio = paired_kl_ratio(scores, chance.name, point.name)
        difference = estimates({"": ratio}, weights)[""]
        yield {
            "by": anchors.by,
            "share": anchors.share,
            "block": anchors.block,
            "tail": point.tail,
            "is_signal": anchors.by not in PLACES,
            "kl_nats": metrics[point.name]["kl_nats"],
            "kl_random_nats": metrics[chance.name]["kl_nats"],
            "nearer_than_random_nats": difference,
        }
