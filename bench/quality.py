"""The quality tables: SmolLM2-135M-Instruct and Gemma-3-270M, and relatives of SmolLM2, on the Debian corpora.

    python -m bench.quality fit        --direction smollm2-gemma --work DIR
    python -m bench.quality fit        --direction smollm2-gemma --work DIR --shared
    python -m bench.quality distill    --direction smollm2-gemma --work DIR --shared --minutes 27
    python -m bench.quality distill    --direction smollm2-gemma --work DIR --minutes 27
    python -m bench.quality distill    --direction smollm2-gemma --work DIR --control --steps N
    python -m bench.quality distill    --direction smollm2-gemma --work DIR --longer --minutes 60
    python -m bench.quality evaluate   --direction smollm2-gemma --work DIR --context 192 --out results/NAME.json
    python -m bench.quality frontier   --direction smollm2-gemma --work DIR --lengths 192,1024 --out results/NAME.json
    python -m bench.quality confidence --direction smollm2-gemma --work DIR --lengths 192,1024 --out results/NAME.json

    python -m bench.quality agents     --direction smollm2-gemma --work DIR --context 192 --out results/NAME.json

The relatives (directions sibling-full, full-sibling, base-tuned, tuned-base) are made by `bench.sibling`. `agents` scores
hand-overs to a target with a system prompt of its own (`bench.agents`). Everything else that a run depends on is written below,
so that a result names its command and nothing more. Training runs in bfloat16 where the processor multiplies it natively;
evaluation always in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.corpora import held_out_and_training
from kvlingo.assets import fetch_demo_models
from kvlingo.collecting import load_statistics
from kvlingo.distillation import DistillOptions, distill
from kvlingo.errors import BadInput
from kvlingo.evaluation import Controls, EvaluationOptions, evaluate
from kvlingo.fitting import Fit, control, fit
from kvlingo.frontier import FrontierOptions, frontier
from kvlingo.language_model import LanguageModel
from kvlingo.models import default_cache_dir, load_model
from kvlingo.plots import draw_frontier
from kvlingo.reliability import ReliabilityOptions, judge_confidence
from kvlingo.shapes import FitOptions, base_config, source_free, text_free
from kvlingo.sheets import print_frontier, print_report
from kvlingo.store import Manifest, ModelCard, load_translator, save_translator
from kvlingo.texts import Document, split_documents
from kvlingo.translator import Translator
from kvlingo.trials import confidence_lines

DISTILLED = ("distilled", "distilled_longer")  # the second goes on from the first
BESIDE = ("ridge", "ridge_shared", "distilled_shared", "token_only_distilled")
SHARED_WEIGHT = 8.0
DIRECTIONS = ("smollm2-gemma", "gemma-smollm2", "sibling-full", "full-sibling", "base-tuned", "tuned-base")
SIBLINGS = {"sibling": "healed", "tuned": "tuned"}  # of SmolLM2, which is called full or base beside them
TOKENS = {"smollm2-gemma": 200_000}
USUAL_TOKENS = 120_000
FIT = FitOptions(
    shift=0,
    source_lags=(0, 1),
    embedding_lags=(0, 1, 2),
    dampings=(1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4),
    held_out_examples=16,
)
DISTILL = DistillOptions(
    minutes=27.0,
    batch=8,
    learning_rate=1e-4,
    warmup_share=0.06,
    judge_every=20,
    judged_examples=12,
    context_tokens=(96, 192, 192, 256, 384, 768),
    continuation_tokens=96,
)
LONGER = replace(
    DISTILL,
    minutes=60.0,
    context_tokens=(128, 256, 512, 1024, 1024, 1536),
    continuation_tokens=192,
    tails=(1, 1, 1, 4, 16),
    judged_context=(192, 1024),
    seed=1,
)
"""What goes on from `DISTILL`: at lengths where errors add up, and on more of each text."""


def main() -> None:
    """Run one step of the tables."""
    arguments = parse()
    steps = {
        "fit": run_fit,
        "distill": run_distill,
        "evaluate": run_evaluate,
        "frontier": run_frontier,
        "confidence": run_confidence,
        "agents": run_agents,
    }
    steps[arguments.step](arguments)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("fit", "distill", "evaluate", "frontier", "confidence", "agents"))
    parser.add_argument("--direction", choices=DIRECTIONS, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--smollm2", type=Path, help="a folder or .gguf; fetched if not given")
    parser.add_argument("--gemma", type=Path, help="a folder or .gguf; fetched if not given")
    parser.add_argument("--sibling", type=Path, help="what `bench.sibling shrink` made; the cache's if not given")
    parser.add_argument("--tuned", type=Path, help="what `bench.sibling tune` made; the cache's if not given")
    parser.add_argument("--dtype", default="bfloat16" if torch.cpu._is_amx_tile_supported() else "float32")
    parser.add_argument(
        "--shared", action="store_true", help="fit or distil the maps for which errors that neighbours share count more"
    )
    parser.add_argument("--control", action="store_true", help="distil the token-only control instead")
    parser.add_argument("--longer", action="store_true", help="go on from the distilled translator, at greater lengths")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--tail", type=int, default=1)
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--lengths", default="192,1024", help="contexts of frontier and confidence")
    parser.add_argument("--by", help="choices of anchors; all that the target knows if not given")
    parser.add_argument("--shares", default="0.02,0.05,0.1,0.2")
    parser.add_argument("--blocks", default="1,16")
    parser.add_argument("--kl", type=float, default=0.5, help="what makes a hand-over a bad one")
    parser.add_argument("--passkeys", type=int, default=24)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def models(arguments: argparse.Namespace, dtype: str) -> tuple[LanguageModel, LanguageModel]:
    """Load source and target of the direction."""
    source, target = (
        replace(load_model(path_of(name, arguments), dtype=dtype), name=FULL_NAMES[name])
        for name in arguments.direction.split("-")
    )
    return source, target


FULL_NAMES = {
    "smollm2": "smollm2-135m-instruct",
    "full": "smollm2-135m-instruct",
    "base": "smollm2-135m-instruct",
    "sibling": "smollm2-135m-instruct, half its layers",
    "tuned": "smollm2-135m-instruct, tuned",
    "gemma": "gemma-3-270m",
}


def path_of(name: str, arguments: argparse.Namespace) -> Path:
    """Return where a model of a direction is: as given, as made by `bench.sibling`, or fetched."""
    if name in SIBLINGS:
        made = getattr(arguments, name, None) or arguments.cache / "siblings" / SIBLINGS[name]
        if not (made / "sibling.json").is_file():
            raise BadInput(f"{made} is no finished relative; make it first: python -m bench.sibling")
        return Path(made)
    own = "gemma" if name == "gemma" else "smollm2"
    given = getattr(arguments, own)
    return given or fetch_demo_models(arguments.cache / "demo")[FULL_NAMES[own]]


def training_documents(arguments: argparse.Namespace) -> list[Document]:
    """Return the training text in a fixed random order."""
    documents = list(held_out_and_training(arguments.cache / "corpora").training)
    random.Random(0).shuffle(documents)
    return documents


def fit_options(arguments: argparse.Namespace) -> FitOptions:
    """Return what to fit of a direction."""
    options = replace(FIT, tokens=TOKENS.get(arguments.direction, USUAL_TOKENS))
    return replace(options, shared_weight=SHARED_WEIGHT) if arguments.shared else options


def statistics_of(arguments: argparse.Namespace) -> Path:
    """Return where a fit keeps its statistics."""
    return Path(arguments.work) / ("statistics_shared" if arguments.shared else "statistics")


def run_fit(arguments: argparse.Namespace) -> None:
    """Fit the translator and its two controls from the same statistics; with --shared the translator alone, from its own."""
    source, target = models(arguments, arguments.dtype)
    options = fit_options(arguments)
    started = time.monotonic()
    work = statistics_of(arguments)
    fitted = fit(source, target, training_documents(arguments), options, work_dir=work, progress=tell)
    config = base_config(source, target, options)
    found = {"ridge_shared" if arguments.shared else "ridge": fitted.translator}
    if not arguments.shared:
        found["token_only"] = control(source_free(config), fitted, target)
        found["no_text"] = control(text_free(config), fitted, target)
    for name, translator in found.items():
        save(arguments.work / name, translator, source, target, {"fit": asdict(options)})
    finish(arguments, fit_record(fitted, time.monotonic() - started, arguments.dtype))


def fit_record(fitted: Fit, seconds: float, dtype: str) -> dict[str, Any]:
    """Return what a fit did, for the record."""
    return {
        "step": "fit",
        "seconds": round(seconds, 1),
        "dtype": dtype,
        "tokens": fitted.stats.tokens,
        "held_out_kl_nats": fitted.held_out_kl_nats,
        "layers": list(fitted.choices),
    }


def run_distill(arguments: argparse.Namespace) -> None:
    """Distil the translator, or with --control the token-only control, alike."""
    source, target = models(arguments, arguments.dtype)
    fitted_with = fit_options(arguments)
    split = split_documents(
        training_documents(arguments), held_out_share=fitted_with.held_out_share, seed=fitted_with.seed
    )
    stats = load_statistics(source, target, fitted_with, statistics_of(arguments))
    if stats is None:
        sys.exit("no statistics of this pair: run the fit step first")
    start, name = ("token_only", "token_only_distilled") if arguments.control else ("ridge", "distilled")
    if arguments.shared:
        if arguments.control:
            sys.exit("--shared and --control are two different maps to distil: give one of them")
        start, name = "ridge_shared", "distilled_shared"
    if arguments.longer:
        start, name = name, f"{name}_longer"
    translator, _ = load_translator(arguments.work / start)
    usual = LONGER if arguments.longer else DISTILL
    bounds = {"minutes": None if arguments.steps else arguments.minutes or usual.minutes, "steps": arguments.steps}
    options = replace(usual, **bounds)
    done = distill(
        translator.requires_grad_(True),
        source,
        target,
        split.training,
        split.held_out,
        stats,
        options,
        work_dir=arguments.work / name,
        report=lambda fact: print(json.dumps(fact), file=sys.stderr, flush=True),
    )
    save(
        arguments.work / name, done.translator, source, target, {"fit": asdict(fitted_with), "distill": asdict(options)}
    )
    record = {"step": name, "dtype": arguments.dtype, "steps": done.steps, "best_step": done.best_step}
    finish(arguments, record | {"seconds": round(done.seconds, 1), "curve": done.curve.to_json()})


def run_evaluate(arguments: argparse.Namespace) -> None:
    """Score the distilled translator, with ridge and all controls as further arms of the same run."""
    source, target = models(arguments, "float32")
    translator, controls = made(arguments.work)
    options = EvaluationOptions(
        context_tokens=arguments.context,
        tail=arguments.tail,
        documents=arguments.documents,
        passkeys=arguments.passkeys,
    )
    documents = held_out_and_training(arguments.cache / "corpora").held_out
    report = evaluate(source, target, translator, documents, controls=controls, options=options, progress=tell)
    print_report(report, Console(stderr=True, width=150))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(report.to_json() + "\n", encoding="utf-8")
    print(report.to_json())


def made(work: Path) -> tuple[Translator, Controls]:
    """Load what the steps before made: the translator distilled longest (or the ridge one), and all that stands beside it."""
    found: dict[str, Translator] = {}
    for name in (*DISTILLED, *BESIDE, "token_only", "no_text"):
        if (work / name).is_dir():
            found[name] = load_translator(work / name)[0].eval()
    best = next((name for name in reversed(DISTILLED) if name in found), "ridge")
    translator = found[best] if best == "ridge" else found.pop(best)
    return translator, Controls(found.pop("token_only", None), found.pop("no_text", None), found)


def run_frontier(arguments: argparse.Namespace) -> None:
    """Sweep the dial; a picture goes beside the JSON."""
    source, target = models(arguments, "float32")
    translator, controls = made(arguments.work)
    normed = ("key_norm",) if any(weight is not None for weight in target.key_norms) else ()
    options = FrontierOptions(
        contexts=tuple(map(int, arguments.lengths.split(","))),
        documents=arguments.documents,
        by=tuple(arguments.by.split(",")) if arguments.by else (*FrontierOptions.by, *normed),
        shares=tuple(map(float, arguments.shares.split(","))),
        blocks=tuple(map(int, arguments.blocks.split(","))),
    )
    documents = held_out_and_training(arguments.cache / "corpora").held_out
    record = frontier(source, target, translator, documents, controls=controls, options=options, progress=tell)
    print_frontier(record, Console(stderr=True, width=150))
    if arguments.out:
        draw_frontier(record, arguments.out.with_suffix(".png"))
    finish(arguments, record)


def run_confidence(arguments: argparse.Namespace) -> None:
    """Fit and judge what tells bad hand-overs; with a distilled or ridge translator as it is, nothing is written into it."""
    source, target = models(arguments, "float32")
    translator, _ = made(arguments.work)
    options = ReliabilityOptions(
        contexts=tuple(map(int, arguments.lengths.split(","))),
        documents=arguments.documents,
        tail=max(arguments.tail, 2),
        kl_nats=arguments.kl,
    )
    documents = held_out_and_training(arguments.cache / "corpora").held_out
    _, record = judge_confidence(source, target, translator, documents, options=options, progress=tell)
    for line in confidence_lines(record):
        print(line, file=sys.stderr)
    finish(arguments, record)


def run_agents(arguments: argparse.Namespace) -> None:
    """Score hand-overs to a target with a system prompt of its own."""
    from bench.agents import evaluate_agents  # which needs no more of this module than its documents

    source, target = models(arguments, "float32")
    translator, controls = made(arguments.work)
    options = EvaluationOptions(
        context_tokens=arguments.context, tail=arguments.tail, documents=arguments.documents, passkeys=0
    )
    documents = held_out_and_training(arguments.cache / "corpora").held_out
    finish(arguments, evaluate_agents(source, target, translator, documents, controls, options, progress=tell))


def save(folder: Path, translator: Translator, source: LanguageModel, target: LanguageModel, options: Any) -> None:
    """Write an artifact."""
    manifest = Manifest(ModelCard.of(source), ModelCard.of(target), options=json.loads(json.dumps(options)))
    save_translator(folder, translator, manifest, overwrite=True)


def finish(arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    """Print a record as the last line, and keep it where --out says."""
    line = json.dumps(record)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def tell(what: str, done: int, of: int) -> None:
    """Report progress on stderr."""
    print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
