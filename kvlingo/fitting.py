"""Stage 1: from two frozen models and text to a translator, by ridge regression.

Knows how examples become statistics and statistics become maps. Reads the text once; choosing dampings and source layers,
and fitting the controls, needs no second pass.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlingo.corpus import Example, examples, require_examples
from kvlingo.errors import BadInput, IncompatiblePair, UnsupportedModel
from kvlingo.geometry import Geometry
from kvlingo.handoff import assemble, continuation_logits
from kvlingo.metrics import kl_nats
from kvlingo.models import LanguageModel, read
from kvlingo.pairing import proportional, window
from kvlingo.plan import plan_handoff
from kvlingo.ridge import DAMPINGS, choose_damping, factor, require_enough, solve
from kvlingo.stats import GramStats, Moments, load_tensors, save_tensors
from kvlingo.texts import Document, split_documents
from kvlingo.translator import (
    MAP_KINDS,
    HeadwiseMap,
    LayerMap,
    LinearMap,
    LowRankMap,
    MapKind,
    Translator,
    TranslatorConfig,
    embedding_block,
    feature_blocks,
    source_block,
)

Progress = Callable[[str, int, int], None]
SAVE_EVERY_SECONDS = 120.0


@dataclass(frozen=True)
class FitOptions:
    """What to fit and on how much text.

    Fields:
        reach: a target layer reads the source layers centre - reach … centre + reach.
        shift: how far the centre may move from the proportional layer, chosen on held-out documents.
        tokens: target tokens to read; the rest of the text is left.
        context_tokens: lengths of the pieces the text is read in.
        held_out_share: share of the documents' clusters kept for choosing; held_out_examples of them are judged by KL.
        key_norm: whether keys end in the target's own key norm, where it has one; None lets held-out KL choose.
    """

    reach: int = 1
    shift: int = 1
    source_lags: tuple[int, ...] = (0,)
    embedding_lags: tuple[int, ...] = (0, 1)
    map_kind: MapKind = "linear"
    rank: int = 256
    residual_width: int = 0
    tokens: int = 150_000
    context_tokens: tuple[int, ...] = (192, 512, 1024)
    chat_share: float = 0.15
    dampings: tuple[float, ...] = DAMPINGS
    held_out_share: float = 0.1
    held_out_examples: int = 8
    key_norm: bool | None = None
    seed: int = 0


@dataclass(frozen=True)
class Fit:
    """A fitted translator, the statistics it came from, and what was chosen per layer."""

    translator: Translator
    stats: GramStats
    held_out: GramStats
    held_out_documents: tuple[Document, ...]
    choices: tuple[dict[str, Any], ...]
    options: FitOptions
    held_out_kl_nats: float | None


@torch.inference_mode(False)  # a translator that was made in the caller's inference mode could never be trained
def fit(
    source: LanguageModel,
    target: LanguageModel,
    documents: Sequence[Document],
    options: FitOptions | None = None,
    *,
    work_dir: Path | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Fit one translator by ridge regression on paired caches (arXiv 2609.32610, stage 1).

    With `work_dir` the statistics are saved there every two minutes and on Ctrl-C; a second run with the same options goes
    on from there. Raises `BadInput` for too little text, `UnsupportedModel` for a target that can only be a source.
    """
    if target.target_refusal is not None:
        raise UnsupportedModel(f"{target.name} can't be a target: {target.target_refusal}")
    options = options or FitOptions()
    split = split_documents(documents, held_out_share=options.held_out_share, seed=options.seed)
    config = base_config(source, target, options)
    collector = Collector(source, target, config, options)
    held_out = collector.collect(split.held_out, "held-out", max(options.tokens // 10, 1), work_dir, progress)
    stats = collector.collect(split.training, "training", options.tokens, work_dir, progress)
    require_enough(stats.tokens, max(config.feature_width(layer) for layer in range(len(config.target))))
    judged = held_out_examples(split.held_out, source, target, options)
    solved = solve_layers(config, stats, held_out, options)
    # Held-out error picks each layer's window; held-out KL has the last word on whether moving windows, and ending in the
    # target's key norm, helped at all.
    picks = (0,) if options.shift == 0 else (0, 1)
    candidates = [build(c, solved, pick, target) for c in norm_choices(config, target, options) for pick in picks]
    scored = [(held_out_kl(source, target, t, judged), t, c) for t, c in candidates]
    kl, translator, choices = min(scored, key=lambda s: math.inf if s[0] is None else s[0])
    return Fit(translator, stats, held_out, tuple(split.held_out), choices, options, kl)


def base_config(source: LanguageModel, target: LanguageModel, options: FitOptions) -> TranslatorConfig:
    """Return the translator's shape with the proportional pairing."""
    if options.map_kind not in MAP_KINDS:
        raise BadInput(f"unknown map kind {options.map_kind!r}; use one of {', '.join(MAP_KINDS)} or auto")
    centres = proportional(len(target.geometry), len(source.geometry))
    return TranslatorConfig(
        source=source.geometry,
        target=target.geometry,
        source_layers=tuple(window(c, options.reach, len(source.geometry)) for c in centres),
        source_lags=options.source_lags,
        embedding_lags=options.embedding_lags,
        map_kind=options.map_kind,
        rank=options.rank if options.map_kind == "lowrank" else 0,
        residual_width=options.residual_width,
    )


def norm_choices(config: TranslatorConfig, target: LanguageModel, options: FitOptions) -> list[TranslatorConfig]:
    """Return the shapes to judge: keys predicted as they are, or ending in the target's own norm where it has one."""
    kinds = tuple(norm_kind(target, layer) for layer in range(len(target.geometry)))
    normed = replace(config, key_norms=kinds)
    if not any(kinds) or options.key_norm is False:
        return [config]
    return [normed] if options.key_norm else [config, normed]


def norm_kind(lm: LanguageModel, layer: int) -> str | None:
    """Say whether a layer's keys end in a norm per head or over all heads."""
    weight = lm.key_norms[layer]
    if weight is None:
        return None
    return "head" if weight.numel() == lm.geometry.layers[layer].key_dim else "layer"


def source_free(config: TranslatorConfig) -> TranslatorConfig:
    """Return the token-only control's shape: the same class, the source left out."""
    return replace(config, source_layers=tuple(() for _ in config.source_layers))


def text_free(config: TranslatorConfig) -> TranslatorConfig:
    """Return the privacy split's shape: the same class, the text left out."""
    return replace(config, embedding_lags=())


# --- collecting ------------------------------------------------------------------------------------------------------


class Collector:
    """Streams examples through both models into statistics."""

    def __init__(
        self, source: LanguageModel, target: LanguageModel, config: TranslatorConfig, options: FitOptions
    ) -> None:
        self.source, self.target, self.config, self.options = source, target, config, options
        self.features = feature_names(config, options)

    def empty(self) -> GramStats:
        """Return statistics of no tokens, with every product that any choice may need."""
        config = self.config
        per_layer = [candidate_blocks(config, layer, self.options) for layer in range(len(config.target))]
        pairs = {(a, b) for blocks in per_layer for a in blocks for b in blocks}
        outputs = {f"target/{layer}": config.target.layers[layer].width for layer in range(len(config.target))}
        pairs |= {(a, f"target/{layer}") for layer, blocks in enumerate(per_layer) for a in blocks}
        dims = {name: config.width(name) for name in self.features} | outputs
        return GramStats(dims, pairs, tuple(outputs))

    def collect(
        self, documents: Sequence[Document], what: str, tokens: int, work_dir: Path | None, progress: Progress | None
    ) -> GramStats:
        """Read up to `tokens` target tokens of the documents; resume from `work_dir` if a run was cut short there."""
        stats, saved = self.empty(), SavedStats(work_dir, what, self._key(tokens), digest_of(documents))
        done = saved.restore(stats)
        made = self._examples(documents)
        number = 0
        try:
            for number, example in enumerate(made, start=1):
                if number <= done:
                    continue
                if stats.tokens >= tokens:
                    break
                stats.add(self.blocks(example))
                done = number
                saved.maybe_save(stats, done)
                if progress is not None:
                    progress(f"reading {what} text", min(stats.tokens, tokens), tokens)
        except BaseException:
            if stats.is_whole:
                saved.save(stats, done)
            raise
        require_examples([None] * stats.tokens, f"{min(self.options.context_tokens)} tokens for {what}")  # type: ignore[list-item]
        saved.save(stats, done)
        return stats

    def _key(self, tokens: int) -> str:
        facts = [self.source.fingerprint, self.target.fingerprint, tokens, asdict(self.options)]
        return json.dumps(facts, sort_keys=True, default=str)

    def _examples(self, documents: Sequence[Document]) -> Iterable[Example]:
        options = self.options
        # Round-robin over documents, so that a token budget smaller than the text still sees all kinds.
        return interleave(
            [
                examples(
                    [document],
                    self.source.tokenizer,
                    self.target.tokenizer,
                    context_tokens=options.context_tokens,
                    chat_share=options.chat_share,
                    seed=options.seed + number,
                )
                for number, document in enumerate(documents)
            ]
        )

    def blocks(self, example: Example) -> dict[str, Tensor]:
        """Run both models over one example; return features and outputs of its ordinary tokens.

        Sinks are left out, and so is what the source has not read (the target's generation prompt): both are recomputed.
        """
        source_kv = read(self.source, self.source.ids(example.source.ids))
        ids = self.target.ids(example.target.ids)
        target_kv = read(self.target, ids)
        start, stop = max(1, example.at_source_start), int((example.alignment >= 0).sum())
        alignment = example.alignment[start:stop]
        found = feature_blocks(
            self.features,
            source=source_kv,
            alignment=alignment,
            embeddings=self.target.embed(ids) if self.config.reads_text else None,
            start=start,
        )
        for layer in range(len(self.config.target)):
            outputs = target_kv.flat(layer)[0][start : max(start, stop)]
            found[f"target/{layer}"] = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return found


def candidate_blocks(config: TranslatorConfig, layer: int, options: FitOptions) -> tuple[str, ...]:
    """Return every feature block that any choice for this layer may use."""
    count = len(config.source)
    centres = candidate_centres(config, layer, options.shift)
    layers = sorted({s for centre in centres for s in window(centre, options.reach, count)})
    source = [source_block(s, lag) for s in layers for lag in config.source_lags]
    return (*source, *(embedding_block(lag) for lag in config.embedding_lags))


def candidate_centres(config: TranslatorConfig, layer: int, shift: int) -> tuple[int, ...]:
    """Return the proportional source layer and its neighbours up to `shift` away, nearest first."""
    count = len(config.source)
    centre = proportional(len(config.target), count)[layer]
    offsets = sorted(range(-shift, shift + 1), key=lambda d: (abs(d), d))
    return tuple(centre + d for d in offsets if 0 <= centre + d < count)


def feature_names(config: TranslatorConfig, options: FitOptions) -> tuple[str, ...]:
    """Return all feature blocks of all layers, neighbours side by side: source layers in order, then embeddings."""
    names = {b for i in range(len(config.target)) for b in candidate_blocks(config, i, options)}
    return tuple(sorted(names, key=lambda name: (name.startswith("embedding"), [int(x) for x in name.split("/")[1:]])))


def interleave(streams: Sequence[Iterable[Example]]) -> Iterable[Example]:
    """Take one example of each stream in turn, until all are empty."""
    iterators = [iter(s) for s in streams]
    while iterators:
        alive = []
        for iterator in iterators:
            item = next(iterator, None)
            if item is not None:
                alive.append(iterator)
                yield item
        iterators = alive


def digest_of(documents: Sequence[Document]) -> str:
    """Identify texts, in their order, by content."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode(errors="surrogatepass")).digest())
    return digest.hexdigest()


class SavedStats:
    """Statistics on disk, written whole or not at all.

    Args:
        key: the pair and the options they belong to.
        documents: digest of the texts they were read from; None where any will do.
    """

    def __init__(self, folder: Path | None, what: str, key: str, documents: str | None = None) -> None:
        self.file = None if folder is None else folder / f"stats-{what}.safetensors"
        self.key, self.documents, self.saved_at = key, documents, time.monotonic()

    def restore(self, stats: GramStats) -> int:
        """Load into `stats`; return how many examples they hold (0 when there is nothing that fits)."""
        loaded = None if self.file is None else load_tensors(self.file)
        if loaded is None:
            return 0
        state, note = loaded
        other_texts = self.documents not in (None, note.get("documents", self.documents))
        if note["key"] != self.key or other_texts:
            return 0
        stats.load_state_dict(state)
        return int(note["examples"])

    def maybe_save(self, stats: GramStats, done: int) -> None:
        """Save when two minutes have passed."""
        if time.monotonic() - self.saved_at > SAVE_EVERY_SECONDS:
            self.save(stats, done)

    def save(self, stats: GramStats, done: int) -> None:
        """Save now."""
        if self.file is None:
            return
        note = {"key": self.key, "documents": self.documents, "examples": done}
        save_tensors(self.file, stats.state_dict(), note)
        self.saved_at = time.monotonic()


# --- from statistics to maps -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solution:
    """One layer's ridge: what it reads, its map in standardised coordinates, and its held-out error."""

    source_layers: tuple[int, ...]
    moments: Moments
    damping: float
    weight: Tensor
    error: float


Solved = dict[int, tuple[Solution, Solution]]


def solve_layers(config: TranslatorConfig, stats: GramStats, held_out: GramStats, options: FitOptions) -> Solved:
    """Solve each layer's ridge twice: over the proportional source layers, and over the best window nearby."""
    solved: Solved = {}
    for layer in range(config.first_layer, len(config.target)):
        shift = options.shift if config.source_layers[layer] else 0
        proportional_one = best = None
        for centre in candidate_centres(config, layer, shift):
            chosen = window(centre, options.reach, len(config.source)) if config.source_layers[layer] else ()
            blocks = with_layers(config, layer, chosen).blocks(layer)
            moments = stats.moments(blocks, f"target/{layer}")
            judge = held_out.moments(blocks, f"target/{layer}", like=moments)
            # Neighbouring windows want the same damping: search it once.
            dampings = options.dampings if best is None else (best.damping,)
            damping, weight, error = choose_damping(moments, judge, dampings)
            solution = Solution(chosen, moments, damping, weight, error)
            proportional_one = proportional_one or solution
            best = solution if best is None or error < best.error else best
        assert proportional_one is not None
        assert best is not None
        solved[layer] = (proportional_one, best)
    return solved


def with_layers(config: TranslatorConfig, layer: int, source_layers: tuple[int, ...]) -> TranslatorConfig:
    """Return the config with one target layer reading other source layers."""
    layers = list(config.source_layers)
    layers[layer] = source_layers
    return replace(config, source_layers=tuple(layers))


def build(
    config: TranslatorConfig, solved: Solved, pick: int, target: LanguageModel
) -> tuple[Translator, tuple[dict[str, Any], ...]]:
    """Make a translator of each layer's solution number `pick` (0: proportional layers, 1: best window)."""
    choices = []
    for layer, solutions in solved.items():
        solution = solutions[pick]
        config = with_layers(config, layer, solution.source_layers)
        choices.append(
            {
                "layer": layer,
                "source_layers": list(solution.source_layers),
                "damping": solution.damping,
                "held_out_error": solution.error,
            }
        )
    translator = Translator(config)
    for layer, solutions in solved.items():
        fill(translator.maps[str(layer)], solutions[pick], target.key_norms[layer])  # type: ignore[arg-type]
    return translator.to(target.device).eval(), tuple(choices)


def control(config: TranslatorConfig, fitted: Fit, target: LanguageModel) -> Translator:
    """Fit another shape of the same class from the same statistics: the controls, fitted alike."""
    solved = solve_layers(config, fitted.stats, fitted.held_out, replace(fitted.options, shift=0))
    config = replace(config, key_norms=fitted.translator.config.key_norms)
    return build(config, solved, 0, target)[0]


@torch.no_grad()
def fill(layer_map: LayerMap, solution: Solution, norm_weight: Tensor | None) -> None:
    """Write a ridge solution into a layer's map, whatever its kind."""
    if layer_map.norm_kind is not None and norm_weight is not None:
        solution, weight = before_norm(solution, norm_weight, layer_map)
        layer_map.key_norm_weight.copy_(weight)
    moments, damping, weight = solution.moments, solution.damping, solution.weight
    layer_map.feature_mean.copy_(moments.feature_mean)
    layer_map.feature_scale.copy_(moments.feature_scale)
    layer_map.bias.copy_(moments.output_mean)
    linear = layer_map.linear
    if isinstance(linear, LinearMap):
        linear.weight.copy_(weight)
    elif isinstance(linear, LowRankMap):
        down, up = reduced_rank(moments, damping, weight, linear.down.shape[1])
        linear.down.copy_(down)
        linear.up.copy_(up)
    elif isinstance(linear, HeadwiseMap):
        fill_headwise(linear, moments, damping, layer_map)


def before_norm(solution: Solution, norm_weight: Tensor, layer_map: LayerMap) -> tuple[Solution, Tensor]:
    """Turn a solution for keys into one for keys divided by their norm's weight; return it and the weight to end with.

    Ridge is linear in its outputs, so dividing them needs no new solution. Where the norm's weight is 0 in some dims, the visible
    rest of a key has an RMS a little below 1: the weight to end with is scaled by what was seen.
    """
    shape, moments = layer_map.shape, solution.moments
    norm_weight = norm_weight.to("cpu", torch.float64)
    weight = norm_weight.repeat(shape.kv_heads) if layer_map.norm_kind == "head" else norm_weight
    inverse = torch.where(weight == 0, torch.zeros_like(weight), 1 / weight)
    scale = torch.cat((inverse, torch.ones(shape.value_width, dtype=inverse.dtype)))
    scaled = replace(
        moments,
        cross=moments.cross * scale,
        output_mean=moments.output_mean * scale,
        output_variance=moments.output_variance * scale.square(),
    )
    square = (scaled.output_variance + scaled.output_mean.square())[: shape.key_width].mean()
    return replace(solution, moments=scaled, weight=solution.weight * scale), norm_weight * square.sqrt()


def reduced_rank(moments: Moments, damping: float, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor a ridge map so that the prediction error is least for its rank (reduced-rank regression).

    With gram = L Lᵀ, the singular vectors of Lᵀ W carry the outputs' predictable directions: W ≈ L⁻ᵀ U S · Vᵀ.
    """
    lower, _ = factor(moments.gram, damping)
    u, s, vh = torch.linalg.svd(lower.T @ weight, full_matrices=False)
    root = s[:rank].sqrt()
    down = torch.linalg.solve_triangular(lower.T, u[:, :rank], upper=True) * root
    return down, root[:, None] * vh[:rank]


def fill_headwise(linear: HeadwiseMap, moments: Moments, damping: float, layer_map: LayerMap) -> None:
    """Solve one small ridge per target head, for keys and for values."""
    shape = layer_map.shape
    for head in range(shape.kv_heads):
        for index, parameter, offset, dim in (
            (linear.key_index[head], linear.key_weight, 0, shape.key_dim),
            (linear.value_index[head], linear.value_weight, shape.key_width, shape.value_dim),
        ):
            index = index.to(moments.gram.device)
            columns = slice(offset + head * dim, offset + (head + 1) * dim)
            part = replace(moments, gram=moments.gram[index][:, index], cross=moments.cross[index, columns])
            parameter[head].copy_(solve(part, damping))


# --- names for the objects above -------------------------------------------------------------------------------------

RESIDUAL_WIDTH = 512


def choose_map(source: Geometry, target: Geometry, source_weights: int, target_weights: int) -> dict[str, Any]:
    """Return the `FitOptions` of `--map auto`: a linear map, with a residual to try where the linear one may not be enough.

    Linear where the target's cache has no more features than the source's, or where a larger model hands over to a smaller
    one; from small to large an MLP residual is tried too, and distilling drops it unless held-out KL improves.
    """
    grows = target.features_per_token > source.features_per_token and target_weights > source_weights
    return {"map_kind": "linear", "residual_width": RESIDUAL_WIDTH if grows else 0}


def options_from_json(data: Mapping[str, Any]) -> FitOptions:
    """Restore the options that `dataclasses.asdict` gave and JSON kept."""
    known = {f.name for f in fields(FitOptions)}
    restored: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
    return FitOptions(**restored)


def load_statistics(
    source: LanguageModel, target: LanguageModel, options: FitOptions, work_dir: Path
) -> GramStats | None:
    """Return the training statistics that `fit` left in `work_dir`; None where there are none of this pair and options."""
    collector = Collector(source, target, base_config(source, target, options), options)
    saved = SavedStats(work_dir, "training", collector._key(options.tokens))
    stats = collector.empty()
    return stats if saved.restore(stats) else None


# --- the target's own judgement --------------------------------------------------------------------------------------


def held_out_examples(
    documents: Sequence[Document], source: LanguageModel, target: LanguageModel, options: FitOptions
) -> list[Example]:
    """Cut a few held-out hand-overs to judge translators by."""
    found: list[Example] = []
    for context in sorted({min(options.context_tokens), 192, 96, 48}, reverse=True):
        found = list(
            examples(
                list(documents),
                source.tokenizer,
                target.tokenizer,
                context_tokens=(context,),
                continuation_tokens=min(32, context // 2),
                per_document=-(-options.held_out_examples // max(len(documents), 1)),
                seed=options.seed,
            )
        )[: options.held_out_examples]
        if found:
            break
    return found


@torch.no_grad()
def held_out_kl(
    source: LanguageModel, target: LanguageModel, translator: Translator, judged: Sequence[Example], *, tail: int = 1
) -> float | None:
    """Return the mean KL(native ‖ translated) in nats over held-out hand-overs; None when there are none."""
    scores = [example_kl(source, target, translator, example, tail=tail).mean() for example in judged]
    return float(torch.stack(scores).mean()) if scores else None


def example_kl(
    source: LanguageModel, target: LanguageModel, translator: Translator, example: Example, *, tail: int = 1
) -> Tensor:
    """Return KL(native ‖ translated) at every continuation token of one example."""
    ids, follow = target.ids(example.target.ids), target.ids(example.continuation)
    plan = plan_handoff(example.alignment.tolist(), sink=max(1, example.at_source_start), tail=tail)
    source_kv = read(source, source.ids(example.source.ids)) if translator.config.reads_source else None
    kv = assemble(plan, target, translator, source_kv, example.alignment, ids)
    translated = continuation_logits(target, kv, ids[plan.translated[1] :], follow)
    return kl_nats(continuation_logits(target, None, ids, follow), translated)


def check_pair(source: LanguageModel, target: LanguageModel) -> None:
    """Refuse a pair that has nothing to translate between."""
    if source.model is target.model:
        raise IncompatiblePair("source and target are the same model; its own cache needs no translation")
