"""How long fitting and distilling take beside the models' own passes over the same tokens, written to results/fitting.json.

    python -m bench.fitting [--tokens 50000] [--rounds 3] [--steps 8] [--out results/fitting.json]

Two ratios, each from runs in turn in one process (SmolLM2-135M-Instruct → Gemma-3-270M):

- `fit`, from texts to a translator that is chosen and judged, beside two bare passes: both models' decoders over the very pieces
  that it reads, without a cache and without an output head, which would only make them longer.
- a step of `distill` beside the target's own training step on the same hand-overs: its forward pass over context and
  continuation (the same small output head, a loss on the continuation), and its backward pass into the weights of its layers.
  `own_frozen_s` is the same with the gradient of its input alone, as a frozen model has it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.corpora import held_out_and_training
from bench.quality import FIT
from kvlingo.assets import fetch_demo_models
from kvlingo.collecting import Collector
from kvlingo.corpus import Example
from kvlingo.distillation import DistillOptions, Run
from kvlingo.environment import environment_card
from kvlingo.fitting import Fit, fit
from kvlingo.language_model import LanguageModel
from kvlingo.models import default_cache_dir, load_model
from kvlingo.probing import decoder_of
from kvlingo.shapes import FitOptions, base_config
from kvlingo.texts import Document, Split, split_documents
from kvlingo.timing import give_back_memory

SIDES = ("source", "target")
FIT_AIM, STEP_AIM = 3.0, 2.2


def main() -> None:
    """Measure both ratios and write the record."""
    arguments = parse()
    paths = (arguments.smollm2, arguments.gemma)
    if not all(paths):
        fetched = fetch_demo_models(arguments.cache / "demo")
        paths = (fetched["smollm2-135m-instruct"], fetched["gemma-3-270m"])
    source, target = (load_model(path, dtype=arguments.dtype) for path in paths)
    documents = held_out_and_training(arguments.cache / "corpora").training
    options = replace(FIT if arguments.like == "tables" else FitOptions(), tokens=arguments.tokens)
    fitting, fitted = time_fits(source, target, documents, options, arguments.rounds)
    split = split_documents(documents, held_out_share=options.held_out_share, seed=options.seed)
    record = {
        "benchmark": "fitting and distilling beside the models' own passes over the same tokens, in turn",
        "pair": {"source": "smollm2-135m-instruct", "target": "gemma-3-270m"},
        "dtype": arguments.dtype,
        "options_like": arguments.like,
        "fit": fitting,
        "distill": time_steps(source, target, split, fitted, arguments.steps),
        "environment": environment_card(),
    }
    line = json.dumps(record)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000, help="target tokens of training text")
    parser.add_argument("--rounds", type=int, default=3, help="fits, each beside two bare passes")
    parser.add_argument("--steps", type=int, default=8, help="steps of distilling; one more is not counted")
    parser.add_argument("--like", choices=("command", "tables"), default="command", help="whose features to fit")
    parser.add_argument("--dtype", default="bfloat16" if torch.cpu._is_amx_tile_supported() else "float32")
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--gemma", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def timed_s(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a call takes, and what it returns."""
    gc.collect()
    give_back_memory()
    started = time.perf_counter()
    found = run()
    return time.perf_counter() - started, found


def tell(line: str) -> None:
    """Tell a line on stderr."""
    print(line, file=sys.stderr, flush=True)


# --- fit -------------------------------------------------------------------------------------------------------------


def time_fits(
    source: LanguageModel, target: LanguageModel, documents: Sequence[Document], options: FitOptions, rounds: int
) -> tuple[dict[str, Any], Fit]:
    """Time fits and bare passes in turn; return the figures, and the last fit."""
    tell("cutting texts")
    pieces = pieces_read(source, target, documents, options)
    tell(f"{len(pieces)} pieces")
    bare_passes(source, target, pieces[:4])
    bare, whole, stages = [], [], []
    for _ in range(rounds):
        bare.append(timed_s(lambda: bare_passes(source, target, pieces))[0])
        tell(f"two bare passes {bare[-1]:.1f} s; processor time {time.process_time():.1f} s")
        watch = Stages()
        seconds, fitted = timed_s(lambda watch=watch: fit(source, target, documents, options, progress=watch))
        whole.append(seconds)
        stages.append(watch.seconds)
        tell(f"fit {seconds:.1f} s: {watch.seconds}; processor time {time.process_time():.1f} s")
    ratios = [a / b for a, b in zip(whole, bare, strict=True)]
    figures = {
        "tokens": fitted.stats.tokens,
        "tokens_read": {side: sum(len(getattr(e, side).ids) for e in pieces) for side in SIDES},
        "two_bare_passes_s": bare,
        "fit_s": whole,
        "stages_s": stages,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "aim": FIT_AIM,
        "held_out_kl_nats": fitted.held_out_kl_nats,
    }
    return figures, fitted


class Stages:
    """Takes what a fit reports; adds up the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Count the time since the last report to what is reported."""
        now = time.perf_counter()
        if what not in self.seconds:
            tell(f"{what}; before that {self.seconds}; processor time {time.process_time():.1f} s")
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._since
        self._since = now


def pieces_read(
    source: LanguageModel, target: LanguageModel, documents: Sequence[Document], options: FitOptions
) -> list[Example]:
    """Return the pieces of text that a fit reads, held-out ones included."""
    collector = Collector(source, target, base_config(source, target, options), options)
    split = split_documents(documents, held_out_share=options.held_out_share, seed=options.seed)
    found = list[Example]()
    for part, tokens in ((split.held_out, max(options.tokens // 10, 1)), (split.training, options.tokens)):
        found += collector.pieces(part, tokens)
    return found


@torch.no_grad()
def bare_passes(source: LanguageModel, target: LanguageModel, pieces: Sequence[Example]) -> None:
    """Let both decoders read every piece, and nothing else."""
    for side, lm in zip(SIDES, (source, target), strict=True):
        decoder = decoder_of(lm.model)
        for piece in pieces:
            decoder(input_ids=lm.ids(getattr(piece, side).ids)[None], use_cache=False)


# --- distill ---------------------------------------------------------------------------------------------------------


def time_steps(source: LanguageModel, target: LanguageModel, split: Split, fitted: Fit, steps: int) -> dict[str, Any]:
    """Time steps of distilling and the target's own passes over the same hand-overs in turn."""
    options = DistillOptions(steps=steps + 1, minutes=None)
    run = Run(fitted.translator.requires_grad_(True), source, target, split.training, fitted.stats, options, None, None)
    times: dict[str, list[float]] = {"step_s": [], "own_s": [], "own_frozen_s": []}
    tokens = []
    reader = target if run.view is None else run.view.lm
    for number in range(steps + 1):
        batch = run.draw()
        ways: dict[str, Callable[[], Any]] = {
            "step_s": run.one_step,
            "own_s": lambda batch=batch: own_step(reader, target, batch, trains=True),
            "own_frozen_s": lambda batch=batch: own_step(reader, target, batch, trains=False),
        }
        names = list(ways)
        for name in (*names[number % 3 :], *names[: number % 3]):
            seconds = timed_s(ways[name])[0]
            if number:
                times[name].append(seconds)
        tokens.append(sum(e.context_tokens + len(e.continuation) for e, _ in batch))
        tell(f"step {number}: { ({name: round(x[-1], 2) for name, x in times.items() if x}) }")
    ratios = [a / b for a, b in zip(times["step_s"], times["own_s"], strict=True)]
    frozen = [a / b for a, b in zip(times["step_s"], times["own_frozen_s"], strict=True)]
    return {
        "hand_overs_a_step": options.batch * options.tails_each,
        "tokens_a_step": tokens[1:],
        **times,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "ratio_to_frozen": statistics.median(frozen),
        "aim": STEP_AIM,
    }


@torch.enable_grad()
def own_step(reader: LanguageModel, target: LanguageModel, batch: Sequence[Any], *, trains: bool) -> None:
    """Let the target read every hand-over itself, and carry a loss on the continuation back.

    `trains`: to all weights of its layers; else to its input alone.
    """
    layers = [p for name, p in decoder_of(target.model).named_parameters() if "embed" not in name]
    for parameter in layers:
        parameter.requires_grad_(trains)
    try:
        for example, _ in batch:
            ids = target.ids([*example.target.ids, *example.continuation])
            embedded = target.model.get_input_embeddings()(ids[None]).detach().requires_grad_(not trains)
            kept = len(example.continuation)
            logits = reader.model(inputs_embeds=embedded, use_cache=False, logits_to_keep=kept + 1).logits[0, :-1]
            loss_of(logits, ids[-kept:]).backward()
    finally:
        for parameter in layers:
            parameter.requires_grad_(False)
            parameter.grad = None


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return a cross-entropy over a head of any size; which token is right costs the same for all."""
    return nn.functional.cross_entropy(logits.float(), ids % logits.shape[-1])


if __name__ == "__main__":
    main()
