"""What `kvlingo fit` and `kvlingo distill` do, from names and paths to files: load, call, save, and say what came out.

Computes nothing itself, and does not know the command line: options come as values, lines for a person go to `say`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvlingo.collecting import Collector, Progress, digest_of, load_statistics
from kvlingo.compression import CompressOptions, compress, refuse_budget
from kvlingo.distillation import Distilled, DistillOptions, distill
from kvlingo.errors import BadInput, IncompatiblePair, KVLingoError, MissingExtra
from kvlingo.evaluation import EvaluationOptions, attention_cosine
from kvlingo.facts import BYTES, size_of
from kvlingo.files import write_file
from kvlingo.fitting import Fit, control, fit
from kvlingo.judging import frozen_parts, held_out_examples, judged_kl
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, StorageType
from kvlingo.models import load_model, quiet_loading
from kvlingo.plots import draw_curve
from kvlingo.processes import ALONE, Processes
from kvlingo.progress import progress_bar
from kvlingo.sensitivity import measure_sensitivity, options_for
from kvlingo.shapes import FitOptions, base_config, choose_map, options_from_json, source_free, text_free
from kvlingo.stats import GramStats
from kvlingo.store import load_translator, read_manifest
from kvlingo.texts import Document, default_documents, documents_from_paths, split_documents
from kvlingo.translator import Translator, TranslatorConfig
from kvlingo.workplace import (
    TextsSeen,
    digest,
    forget,
    model_names,
    refuse_early,
    refuse_other_pair,
    remember_models,
    reserve,
    save_distilled,
    save_fitted,
    split_as_fitted,
    texts_seen,
)

Say = Callable[[str], None]
STATISTICS_TOKENS = 40_000


@dataclass(frozen=True)
class Where:
    """Which device and floating-point type the models run in; None: the default."""

    device: str | None = None
    dtype: str | None = None


def load_pair(source: str, target: str, where: Where) -> tuple[LanguageModel, LanguageModel]:
    """Load both models."""
    quiet_loading()
    source_lm = load_model(source, device=where.device, dtype=where.dtype)
    target_lm = load_model(target, device=where.device, dtype=where.dtype)
    check_pair(source_lm, target_lm)
    return source_lm, target_lm


def check_pair(source: LanguageModel, target: LanguageModel) -> None:
    """Refuse a pair that has nothing to translate between."""
    if source.model is target.model:
        raise IncompatiblePair("source and target are the same model; its own cache needs no translation")


def gather(texts: Sequence[Path]) -> list[Document]:
    """Read the texts given, or those that every Python brings."""
    return documents_from_paths(texts) if texts else default_documents()


def count_weights(lm: LanguageModel) -> int:
    """Return the number of a model's parameters."""
    return sum(p.numel() for p in lm.model.parameters())


# --- fit ---


def fit_pair(
    source_name: str,
    target_name: str,
    out: Path,
    *,
    texts: Sequence[Path],
    changes: Mapping[str, Any],
    auto_map: bool,
    no_text: bool,
    where: Where,
    storage: StorageType,
    budget_bytes: int | None = None,
    overwrite: bool,
    say: Say,
    tell: Say,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Fit a translator and its controls; save them in `out`.

    Args:
        changes: what differs from `FitOptions()`.
        budget_bytes: what the translator may take when stored; it is compressed to that. The controls stay whole.
        say, tell: take a result's line, and a line about progress.
        processes: all that do this together, with the same arguments; the first one writes.
    """
    started = time.monotonic()
    say, tell = processes.heard(say), processes.heard(tell)
    with processes.agreed():
        refuse_early(out, overwrite=overwrite)
        refuse_other_pair(out, source_name, target_name)
        options = FitOptions(**changes)
        documents = gather(texts)
        apart = reserve(documents, share=options.held_out_share, seed=options.seed)
        # As `fit` will split them: texts that it would refuse are refused before models load.
        split_documents(apart.training, held_out_share=options.held_out_share, seed=options.seed)
        processes.refuse_more_than(len(documents), "texts")
    with forget_on_refusal(out) if processes.is_first else nullcontext():
        with processes.agreed():
            tell(f"loading {source_name} and {target_name}")
            source, target = load_pair(source_name, target_name, where)
        processes.require_alike(
            {
                "options": json.loads(json.dumps([asdict(options), auto_map, no_text, storage, budget_bytes])),
                "texts": digest_of(documents),
                "models": [source.fingerprint, target.fingerprint],
            }
        )
        if auto_map:
            options = replace(
                options, **choose_map(source.geometry, target.geometry, count_weights(source), count_weights(target))
            )
        small = None if budget_bytes is None else CompressOptions(budget_bytes=budget_bytes, storage=storage)
        if small is not None:
            options = without_extras(options)
        config = base_config(source, target, options)
        mine = text_free(config) if no_text else config
        if small is None:
            tell(size_line(mine, storage))
        else:
            refuse_budget(mine, small)
        torch.manual_seed(options.seed)
        if processes.is_first:
            remember_models(out, source_name, target_name)
        with progress_bar(shown=processes.is_first) as bar:
            fitted = fit(
                source,
                target,
                apart.training,
                options,
                work_dir=out / "work",
                progress=bar.count,
                processes=processes,
            )
            if not processes.is_first:
                return {}
            translator, controls = fitted_alike(fitted, config, target, no_text=no_text, progress=bar.count)
        told: dict[str, Any] = {"fit": asdict(options), "no_text": no_text}
        if small is not None:
            training = [d for d in apart.training if d not in fitted.held_out_documents]
            with progress_bar() as bar:
                seen_by = options_for(options)
                minds = measure_sensitivity(translator, source, target, training, seen_by, progress=bar.count)
            compressed = compress(translator, fitted.stats, small, minds)
            translator = compressed.translator
            told["compress"] = {**asdict(small), **compressed.to_json()}
        found = judge_fit(fitted, translator, controls, source, target)
        seen = TextsSeen(
            training=frozenset(digest(d) for d in apart.training) - frozenset(map(digest, fitted.held_out_documents)),
            held_out=frozenset(map(digest, fitted.held_out_documents)),
            reserved=frozenset(map(digest, apart.held_out)),
        )
        manifest = save_fitted(
            out,
            translator,
            controls,
            source=source,
            target=target,
            options={**told, "texts": seen.to_json()},
            held_out=found,
            storage=storage,
            overwrite=overwrite,
        )
    assert manifest.weights is not None
    for line in fit_lines(found, out, manifest.weights.num_bytes):
        say(line)
    return {
        "folder": str(out),
        "pair": {"source": source.name, "target": target.name},
        "held_out": found,
        "num_bytes": manifest.weights.num_bytes,
        "tokens": fitted.stats.tokens,
        "seconds": time.monotonic() - started,
        "map": {"kind": options.map_kind, "residual_width": options.residual_width, "reads_text": not no_text},
        "layers": list(fitted.choices),
    }


def without_extras(options: FitOptions) -> FitOptions:
    """Return options for maps that can be compressed. Raises `BadInput` where other ones were asked for."""
    if options.map_kind == "headwise":
        raise BadInput("head-wise maps have no matrix to factor; leave --budget-mb out, or fit --map linear")
    return replace(options, residual_width=0)


@contextmanager
def forget_on_refusal(out: Path) -> Iterator[None]:
    """Leave nothing behind when the input is refused; Ctrl-C and a full disk keep statistics that are whole."""
    is_new = not (out / "work").exists()
    try:
        yield
    except Exception as error:
        refused = isinstance(error, KVLingoError) and not isinstance(error.__cause__, OSError)
        if is_new and (refused or not any((out / "work").glob("stats-*.safetensors"))):
            forget(out)
        raise


def fitted_alike(
    fitted: Fit, config: TranslatorConfig, target: LanguageModel, *, no_text: bool, progress: Progress
) -> tuple[Translator, dict[str, Translator]]:
    """Return the translator to save and its controls, all from the same statistics."""
    token_only = control(source_free(config), fitted, target, progress=progress)
    textless = control(text_free(config), fitted, target, progress=progress)
    if no_text:
        return textless, {"token_only": token_only}
    return fitted.translator, {"token_only": token_only, "no_text": textless}


def judge_fit(
    fitted: Fit,
    translator: Translator,
    controls: Mapping[str, Translator],
    source: LanguageModel,
    target: LanguageModel,
) -> dict[str, Any]:
    """Let the target judge: KL on held-out hand-overs, and what its own queries read from the translated cache."""
    judged = held_out_examples(fitted.held_out_documents, source, target, fitted.options)
    with torch.no_grad():
        cosine = attention_cosine(source, target, translator, judged, EvaluationOptions())
    frozen = frozen_parts(source, target, judged)

    def kl(of: Translator) -> float | None:
        return judged_kl(of, target, frozen) if frozen else None

    return {
        "kl_nats": kl(translator),
        "controls_kl_nats": {name: kl(c) for name, c in controls.items()},
        "attention_output_cosine": cosine,
        "hand_overs": len(judged),
    }


def size_line(config: TranslatorConfig, storage: str) -> str:
    """Say how large the artifact will be before any work is done."""
    weights = size_of(config, "int8")
    kind = f"{config.map_kind} maps" + (" with MLP residual" if config.residual_width else "")
    megabytes = weights * BYTES[storage] / 1e6
    return f"{kind} of {weights / 1e6:.1f} M weights: the translator will take {megabytes:.1f} MB as {storage}"


def fit_lines(found: Mapping[str, Any], out: Path, num_bytes: int) -> Iterator[str]:
    """Return what a person is told after fitting."""
    if found["kl_nats"] is None:
        yield "the held-out text is too short to judge the translator; give longer texts before you trust it"
    else:
        controls = ", ".join(f"{name} {nats(kl)}" for name, kl in found["controls_kl_nats"].items())
        yield f"held-out KL to native: {nats(found['kl_nats'])} nats ({controls}); hand-overs: {found['hand_overs']}"
    cosine = found["attention_output_cosine"]
    if cosine is not None:
        worst = f"worst layer {cosine['worst_layer_index']}: {cosine['worst_layer']:.3f}"
        yield f"attention-output cosine: {cosine['mean']:.3f}, {worst}"
    yield f"saved {out} ({num_bytes / 1e6:.1f} MB); statistics for distilling stay in {out / 'work'}: rm -r to free them"
    yield f"next: kvlingo distill {out} --minutes 20, then kvlingo eval {out}"


def nats(value: float | None) -> str:
    """Format a KL."""
    return "–" if value is None else f"{value:.4f}"


# --- distill ---


def distill_folder(
    folder: Path,
    *,
    source_name: str | None,
    target_name: str | None,
    texts: Sequence[Path],
    changes: Mapping[str, Any],
    control_name: str | None,
    where: Where,
    say: Say,
    tell: Say,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Distil a saved translator, or one of its controls, and put the best one in its place; `processes` as for `fit_pair`."""
    say, tell = processes.heard(say), processes.heard(tell)
    place = folder if control_name is None else folder / "controls" / control_name
    work = folder / "work"
    with processes.agreed():
        names = model_names(folder, source_name, target_name)
        main = read_manifest(folder)
        documents = gather(texts)
        options = DistillOptions(**changes)
        processes.refuse_more_than(options.batch, "texts a step (--batch)")
        source, target = load_pair(*names, where)
        translator, manifest = load_translator(place, source=source, target=target)
        fitted = options_from_json(main.options.get("fit", {}))
        seen = texts_seen(main)
        split = split_as_fitted(documents, seen, share=fitted.held_out_share, seed=fitted.seed)
    processes.require_alike(
        {
            "options": json.loads(json.dumps(asdict(options))),
            "texts": digest_of(documents),
            "translator": None if manifest.weights is None else manifest.weights.sha256,
            "models": [source.fingerprint, target.fingerprint],
        }
    )
    with progress_bar(shown=processes.is_first) as bar:
        stats = statistics(source, target, fitted, split.training, work, bar.count, tell, processes)
        torch.manual_seed(options.seed)
        done = distill(
            translator.to(target.device),
            source,
            target,
            split.training,
            split.held_out,
            stats,
            options,
            work_dir=work / (control_name or "translator"),
            report=bar.train,
            processes=processes,
        )
    if not processes.is_first:
        return {}
    curve = {**done.curve.to_json(), "options": asdict(options), "pair": [source.name, target.name]}
    learnt = TextsSeen(seen.training | {digest(d) for d in split.training}, seen.held_out, seen.reserved)
    kl_before, kl_after = done.curve.held_out_kl_nats[0], min(done.curve.held_out_kl_nats)
    summary = {"steps": done.steps, "best_step": done.best_step, "seconds": done.seconds}
    new = Manifest(
        manifest.source,
        manifest.target,
        {**manifest.options, "texts": learnt.to_json(), "distill": {**asdict(options), **summary}},
        {"kl_nats_before_distilling": kl_before, "kl_nats": kl_after, "hand_overs": options.judged_examples},
    )
    save_distilled(place, done.translator, new)
    save_curve(place, curve, tell)
    (work / (control_name or "translator") / "distillation.safetensors").unlink(missing_ok=True)
    for line in distill_lines(done, place):
        say(line)
    residual = bool(done.translator.config.residual_width)
    return {"folder": str(place), **(new.held_out or {}), **summary, "residual_kept": residual}


def statistics(
    source: LanguageModel,
    target: LanguageModel,
    options: FitOptions,
    documents: Sequence[Document],
    work: Path,
    progress: Progress,
    tell: Say,
    processes: Processes = ALONE,
) -> GramStats:
    """Return the statistics that fitting left, or collect some anew: distilling needs them for its coordinates."""
    found = load_statistics(source, target, options, work, processes)
    if found is not None:
        return found
    config = base_config(source, target, options)
    widest = max(config.feature_width(layer) for layer in range(len(config.target)))
    tokens = max(STATISTICS_TOKENS, 2 * widest)
    tell(f"no statistics in {work}: reading {tokens} tokens of text anew")
    return Collector(source, target, config, options).collect(
        documents, "distilling", tokens, work, progress, processes
    )


def save_curve(place: Path, curve: Mapping[str, Any], tell: Say) -> None:
    """Save the loss curve as JSON and, where matplotlib is installed, as a picture."""
    write_file(place / "distillation.json", json.dumps(curve).encode())
    try:
        draw_curve(dict(curve), place / "distillation.png", title=f"Distilling {' → '.join(curve['pair'])}")
    except MissingExtra as error:
        tell(f"no picture of the loss curve, {place / 'distillation.json'} has it: {error}")


def distill_lines(done: Distilled, place: Path) -> Iterator[str]:
    """Return what a person is told after distilling."""
    kl = done.curve.held_out_kl_nats
    if done.best_step:
        better = f"held-out KL to native: {nats(kl[0])} → {nats(min(kl))} nats (best at step {done.best_step} of {done.steps})"
    else:
        better = f"no better than before after {done.steps} steps (held-out KL {nats(kl[0])} nats): kept as it was"
    yield f"{better}, {done.seconds / 60:.1f} minutes"
    yield f"saved {place}; the one before distilling is in {place / 'ridge'}"
