"""Stage 2: self-distillation of the maps through the frozen target.

Knows steps, schedules, checkpoints and held-out judging; the loss is `objective`'s business. Trains under the plan that
serving uses: sinks and a random tail native, the rest translated. Works in whitened coordinates, without which small rates make
the maps worse.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvlingo.corpus import Example, random_examples
from kvlingo.errors import BadInput
from kvlingo.judging import Judged, frozen_parts, judged_kl
from kvlingo.language_model import LanguageModel
from kvlingo.objective import frozen_side, loss_beside, small_vocabulary
from kvlingo.predictions import KeptPredictions
from kvlingo.processes import ALONE, Processes
from kvlingo.stats import GramStats, load_tensors, save_tensors
from kvlingo.texts import Document
from kvlingo.translator import Translator, without_residual
from kvlingo.whitening import coordinates

CHECKPOINT_EVERY_SECONDS = 120.0
LEAST_GAIN = 1e-4  # share of the KL that a residual must take away: less is how two orders of summing round


@dataclass(frozen=True)
class DistillOptions:
    """How long and how to train.

    Fields:
        steps, minutes: stop at whichever comes first; None for no such bound.
        batch: texts per optimiser step, read one after another (gradient accumulation).
        tails: tail lengths to draw from.
        tails_each: hand-overs made of each text, which differ in their tails: the frozen models run once for all of them.
        ce_weight: λ of the cross-entropy term.
        whitening_damping: relative to the mean diagonal, as in ridge.
        vocabulary: the loss compares both distributions over this many of the text's most frequent tokens (renormalised);
            None for all. Judging on held-out text always uses all.
        kept_predictions: keep so many of the likeliest tokens of the target's own predictions on disk, and compare with those,
            all others taken as one; for texts that are distilled on more than once. None: nothing is kept.
    """

    steps: int | None = None
    minutes: float | None = 10.0
    batch: int = 8
    learning_rate: float = 1e-4
    warmup_share: float = 0.05
    clip: float = 1.0
    ce_weight: float = 0.1
    context_tokens: tuple[int, ...] = (64, 128, 192, 256, 384, 512)
    continuation_tokens: int = 96
    tails: tuple[int, ...] = (1, 1, 1, 2, 4, 8, 16)
    tails_each: int = 1
    chat_share: float = 0.15
    judge_every: int = 25
    judged_examples: int = 16
    judged_context: tuple[int, ...] = (192, 512)
    whitening_damping: float = 1e-3
    vocabulary: int | None = 8192
    kept_predictions: int | None = None
    seed: int = 0


@dataclass
class Curve:
    """What training did, step by step; saved as JSON and drawn."""

    steps: list[int] = field(default_factory=list)
    loss_nats: list[float] = field(default_factory=list)
    judged_steps: list[int] = field(default_factory=list)
    held_out_kl_nats: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return asdict(self)


@dataclass(frozen=True)
class Distilled:
    """The best translator on held-out text (the one that training started from, if none was better)."""

    translator: Translator
    curve: Curve
    best_step: int
    steps: int
    seconds: float


Report = Callable[[dict[str, Any]], None]


@torch.inference_mode(False)
@torch.enable_grad()
def distill(
    translator: Translator,
    source: LanguageModel,
    target: LanguageModel,
    training: Sequence[Document],
    held_out: Sequence[Document],
    stats: GramStats,
    options: DistillOptions | None = None,
    *,
    work_dir: Path | None = None,
    report: Report | None = None,
    processes: Processes = ALONE,
) -> Distilled:
    """Train a translator's maps through the frozen target; keep the best on held-out text.

    `translator` is trained in place and ends up holding the best weights. With `work_dir`, a checkpoint is kept there and a
    second run goes on from it. Several processes share each step's hand-overs and move the same maps by the same gradient; the
    first one judges. Raises `BadInput` for too little text, and for more processes than a step has hand-overs.
    """
    options = options or DistillOptions()
    if options.steps is None and options.minutes is None:
        raise BadInput("distilling needs an end: give --steps or --minutes")
    if not 1 <= options.tails_each <= len(set(options.tails)):
        raise BadInput(
            f"{options.tails_each} hand-overs of each text: there are {len(set(options.tails))} different tails"
        )
    processes.refuse_more_than(options.batch, "texts a step")
    run = Run(translator, source, target, list(training), stats, options, work_dir, report, processes)
    judged = judged_examples(held_out, source, target, options) if processes.is_first else []
    known = translator.config.fitted_tokens
    if known is not None:  # plans warn beyond it
        translator.config = replace(translator.config, fitted_tokens=max(known, *options.context_tokens))
    return drop_idle_residual(run.train(judged), target, judged, processes)


def drop_idle_residual(
    done: Distilled, target: LanguageModel, judged: Sequence[Judged], processes: Processes = ALONE
) -> Distilled:
    """Leave the MLP residual out where held-out KL is no better with it."""
    if not done.translator.config.residual_width:
        return done
    linear = without_residual(done.translator).eval()
    is_better = True
    if processes.is_first:
        gained = 1 - judged_kl(done.translator, target, judged) / max(judged_kl(linear, target, judged), 1e-30)
        is_better = gained > LEAST_GAIN
    return done if processes.told(is_better) else replace(done, translator=linear)


class Run:
    """One distillation: its state, its steps, its checkpoint."""

    def __init__(
        self,
        translator: Translator,
        source: LanguageModel,
        target: LanguageModel,
        training: list[Document],
        stats: GramStats,
        options: DistillOptions,
        work_dir: Path | None,
        report: Report | None,
        processes: Processes = ALONE,
    ) -> None:
        self.processes = processes
        self.translator, self.source, self.target = translator.train(), source, target
        self.training, self.options, self.report = training, options, report
        self.file = None if work_dir is None else work_dir / "distillation.safetensors"
        self.view = small_vocabulary(target, self.training, options.vocabulary)
        self.kept = self.keeper(work_dir)
        # A target in bfloat16 says that this machine is fast in it, and reads translated keys and values in it anyway.
        is_fast = target.dtype == torch.bfloat16
        self.multiplied_before = translator.multiplies_in_bfloat16
        translator.multiply_in_bfloat16(is_fast)
        self.coordinates = coordinates(
            translator, stats, options.whitening_damping, dtype=torch.bfloat16 if is_fast else None
        )
        self.optimizer = torch.optim.AdamW(
            [c.delta for c in self.coordinates], lr=options.learning_rate, weight_decay=0.0
        )
        self.curve, self.step, self.seconds = Curve(), 0, 0.0
        self.best = {k: v.clone() for k, v in translator.state_dict().items()}
        self.best_kl, self.best_step = math.inf, 0
        self.tokens_read = 0

    def train(self, judged: list[Judged]) -> Distilled:
        """Run to the end of the options' bounds."""
        self.restore()
        self.processes.require_alike({"the step of the checkpoint": self.step})
        started, saved = time.monotonic() - self.seconds, time.monotonic()
        if self.step == 0:
            self.judge(judged)
        try:
            while not self.finished():
                loss = self.one_step()
                self.seconds = self.processes.told(time.monotonic() - started)
                self.curve.steps.append(self.step)
                self.curve.loss_nats.append(loss)
                if self.step % self.options.judge_every == 0 or self.finished():
                    self.judge(judged)
                self.tell(loss)
                if time.monotonic() - saved > CHECKPOINT_EVERY_SECONDS:
                    self.checkpoint()
                    saved = time.monotonic()
        except BaseException:
            self.checkpoint()
            self.translator.multiply_in_bfloat16(self.multiplied_before)
            raise
        if self.curve.judged_steps[-1] != self.step:
            self.judge(judged)
        self.checkpoint()
        self.translator.load_state_dict(self.best)
        self.translator.multiply_in_bfloat16(self.multiplied_before)
        return Distilled(self.translator.eval(), self.curve, self.best_step, self.step, self.seconds)

    def keeper(self, work_dir: Path | None) -> KeptPredictions | None:
        """Return where predictions are kept: beside the work of all that is distilled from the same fit."""
        if work_dir is None or self.options.kept_predictions is None:
            return None
        head = (
            "whole" if self.view is None else hashlib.sha256(json.dumps(self.view.place.tolist()).encode()).hexdigest()
        )
        facts = [self.target.fingerprint, str(self.target.dtype), head]
        return KeptPredictions(work_dir.parent / "predictions", self.options.kept_predictions, facts)

    def progress(self) -> float:
        """Return how much of the run is done, 0 … 1."""
        options = self.options
        by_steps = self.step / options.steps if options.steps else 0.0
        by_time = self.seconds / (60 * options.minutes) if options.minutes else 0.0
        return max(by_steps, by_time)

    def finished(self) -> bool:
        """Say whether a bound is reached."""
        return self.progress() >= 1

    def rate(self) -> float:
        """Return the learning rate now: linear warm-up, then cosine to 0, over the run's progress."""
        done, warm = min(self.progress(), 1.0), self.options.warmup_share
        if done < warm:
            return self.options.learning_rate * (done / warm + 1e-2)
        return self.options.learning_rate * 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm)))

    def draw(self) -> list[tuple[Example, list[int]]]:
        """Return the texts of the step to come, each with its tails: the same whenever they are drawn."""
        options = self.options
        seed = f"{options.seed}-{self.step}"
        batch = random_examples(
            self.training,
            self.source.tokenizer,
            self.target.tokenizer,
            context_tokens=options.context_tokens,
            continuation_tokens=options.continuation_tokens,
            chat_share=options.chat_share,
            seed=seed,
            count=options.batch,
        )
        rng = random.Random(seed)
        if options.tails_each == 1:
            return [(example, [rng.choice(options.tails)]) for example in batch]
        return [(example, rng.sample(sorted(set(options.tails)), options.tails_each)) for example in batch]

    def one_step(self) -> float:
        """Accumulate one batch and move the maps once; return the batch's mean loss."""
        options, batch = self.options, self.draw()
        total = 0.0
        share = 1 / (len(batch) * options.tails_each)
        for example, tails in batch[self.processes.rank :: self.processes.count]:
            frozen = frozen_side(self.translator, self.source, self.target, example, self.view, self.kept)
            for tail in tails:
                loss = loss_beside(self.translator, self.target, frozen, tail, options.ce_weight, view=self.view)
                (share * loss).backward()
                total += share * float(loss.detach())
        self.tokens_read += sum(e.context_tokens + options.continuation_tokens for e, _ in batch)
        total = self.sum_over_processes(total)
        for coordinate in self.coordinates:
            coordinate.pull_gradient()
        nn.utils.clip_grad_norm_([c.delta for c in self.coordinates], options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        for coordinate in self.coordinates:
            coordinate.push_value()
        self.step += 1
        return total

    def sum_over_processes(self, loss: float) -> float:
        """Put the gradient of the whole batch into every process's maps; return the whole batch's loss."""
        for coordinate in self.coordinates:
            if coordinate.parameter.grad is not None:
                self.processes.add_up(coordinate.parameter.grad)
        whole = torch.tensor(loss, dtype=torch.float64)
        self.processes.add_up(whole)
        return float(whole)

    def judge(self, judged: list[Judged]) -> None:
        """Measure held-out KL; remember the weights if they are the best so far. The first of several processes does it."""
        mine = judged_kl(self.translator, self.target, judged) if self.processes.is_first else math.nan
        kl = self.processes.told(mine)
        self.curve.judged_steps.append(self.step)
        self.curve.held_out_kl_nats.append(kl)
        if kl < self.best_kl:
            self.best_kl, self.best_step = kl, self.step
            self.best = {k: v.clone() for k, v in self.translator.state_dict().items()}

    def tell(self, loss: float) -> None:
        """Report progress."""
        if self.report is not None and self.processes.is_first:
            self.report(
                {
                    "step": self.step,
                    "loss_nats": loss,
                    "held_out_kl_nats": self.curve.held_out_kl_nats[-1],
                    "progress": min(self.progress(), 1.0),
                    "seconds": self.seconds,
                    "tokens_per_second": self.tokens_read / max(self.seconds, 1e-9),
                }
            )

    # --- checkpoint ---

    def checkpoint(self) -> None:
        """Write all state, whole or not at all; the same in all processes, the first one writes it."""
        if self.file is None or not self.processes.is_first:
            return
        tensors = {f"best.{k}": v for k, v in self.best.items()}
        for i, c in enumerate(self.coordinates):
            tensors |= {f"delta.{i}": c.delta.data, f"base.{i}": c.base}
            state = self.optimizer.state.get(c.delta, {})
            tensors |= {f"{k}.{i}": v for k, v in state.items() if isinstance(v, Tensor)}
        note = {
            "options": json.dumps(asdict(self.options), sort_keys=True),
            "curve": self.curve.to_json(),
            "step": self.step,
            "seconds": self.seconds,
            "tokens_read": self.tokens_read,
            "best_kl": self.best_kl,
            "best_step": self.best_step,
        }
        save_tensors(self.file, {k: v.clone() for k, v in tensors.items()}, note)

    def restore(self) -> None:
        """Go on from a checkpoint that belongs to this translator; bounds (steps, minutes) may differ."""
        loaded = None if self.file is None else load_tensors(self.file)
        if loaded is None:
            return
        tensors, note = loaded
        same_start = all(
            f"base.{i}" in tensors and torch.equal(tensors[f"base.{i}"], c.base) for i, c in enumerate(self.coordinates)
        )
        if not same_start or not _same_options(note["options"], self.options):
            return
        for i, c in enumerate(self.coordinates):
            c.delta.data.copy_(tensors[f"delta.{i}"])
            self.optimizer.state[c.delta] = (
                {k: tensors[f"{k}.{i}"] for k in ("step", "exp_avg", "exp_avg_sq")} if f"step.{i}" in tensors else {}
            )
            c.push_value()
        self.curve = Curve(**note["curve"])
        self.step, self.seconds = note["step"], note["seconds"]
        self.tokens_read = note.get("tokens_read", 0)  # older checkpoints have none: their first rates are too low
        self.best_kl, self.best_step = note["best_kl"], note["best_step"]
        self.best = {k.removeprefix("best."): v for k, v in tensors.items() if k.startswith("best.")}


def _same_options(saved: str, options: DistillOptions) -> bool:
    bounds = ("steps", "minutes")
    mine, plain = (json.loads(json.dumps(asdict(each))) for each in (options, DistillOptions()))
    theirs = {**plain, **json.loads(saved)}  # an option that is younger than the checkpoint was as it is by default
    return {k: v for k, v in theirs.items() if k not in bounds} == {k: v for k, v in mine.items() if k not in bounds}


def judged_examples(
    documents: Sequence[Document], source: LanguageModel, target: LanguageModel, options: DistillOptions
) -> list[Judged]:
    """Draw held-out hand-overs and run what is frozen."""
    found = []
    for number in range(options.judged_examples):
        drawn = random_examples(
            documents,
            source.tokenizer,
            target.tokenizer,
            context_tokens=(options.judged_context[number % len(options.judged_context)],),
            continuation_tokens=48,
            chat_share=options.chat_share,
            seed=f"held-out-{options.seed}-{number}",
            count=1,
        )[0]
        found.append(drawn)
    return frozen_parts(source, target, found, dtype=torch.bfloat16)
