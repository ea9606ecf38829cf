"""The whole job on two small real models, on any machine with a package index: `kvlingo demo`.

Knows which models, which text and how much of everything; the work itself is done by what the package is made of. A stage
that is done is not done again when a run was stopped.
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from kvlingo import __version__
from kvlingo.assets import fetch_demo_models
from kvlingo.distillation import Distilled, DistillOptions, distill
from kvlingo.evaluation import Controls, EvaluationOptions, evaluate
from kvlingo.fitting import control, fit
from kvlingo.generation import generate
from kvlingo.handoff import HandOff, hand_off
from kvlingo.jobs import count_weights, save_curve
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.models import convert_gguf, default_cache_dir, load_model, quiet_loading
from kvlingo.plan import reprefill_plan
from kvlingo.progress import progress_bar
from kvlingo.report import Report
from kvlingo.shapes import FitOptions, base_config, choose_map, source_free, text_free
from kvlingo.sheets import print_conversation, print_report, print_times
from kvlingo.states import Message, ModelState, read_conversation
from kvlingo.store import save_report
from kvlingo.texts import Document, Split, default_documents, split_documents
from kvlingo.timing import give_back_memory, time_to_first_token
from kvlingo.translator import Translator
from kvlingo.workplace import TextsSeen, digest, remember_models, reserve, save_fitted

Say = Callable[[str], None]
T = TypeVar("T")

SOURCE, TARGET = "smollm2-135m-instruct", "gemma-3-270m"

STORY = """\
Read this note and answer my questions.

The lighthouse at Cape Arrow was built in 1874 by the sisters Ida and Ruth Quill. Ida had studied optics in Lisbon and ground \
the lens herself over two winters; Ruth laid the stones. The tower is painted in green and white bands so that ships can tell \
it from the one at Holm Point, which is red. In 1911 a storm took the oil store, and for nine nights the sisters burned old \
furniture in the lantern room to keep the light alive. The last thing they burned was the piano. When the supply boat came at \
last, its captain brought them a violin instead, and Ruth learned to play it. Today the tower is a small museum. Visitors can \
see the lens, the violin and a single piano key that a fisherman found on the beach the following spring.

Who built the lighthouse, and what did they burn in the storm?"""
SECOND_QUESTION = "What colour is the tower, and why?"
THIRD_QUESTION = "What can visitors see today?"


@dataclass(frozen=True)
class DemoPlan:
    """How much of everything.

    Fields:
        both_ways: whether the other direction is made too, and the conversation handed back.
        timed_tokens: lengths of the conversations to time, in target tokens.
        repeats: runs to take the times' medians of.
    """

    both_ways: bool
    fit: FitOptions
    distill: DistillOptions
    evaluation: EvaluationOptions
    timed_tokens: tuple[int, ...] = (512, 1024)
    repeats: int = 5
    max_new_tokens: int = 40


FULL = DemoPlan(
    both_ways=True,
    fit=FitOptions(tokens=20_000, held_out_examples=6, dampings=(1e-1, 1e-2, 1e-3)),
    distill=DistillOptions(minutes=1.25, context_tokens=(64, 128, 192, 256), judged_examples=8, judged_context=(192,)),
    evaluation=EvaluationOptions(documents=12, passkeys=6, attention_documents=4),
    timed_tokens=(512, 1024, 2048),
    repeats=3,
)
QUICK = DemoPlan(
    both_ways=False,
    fit=FitOptions(tokens=14_000, shift=0, held_out_examples=4, dampings=(1e-1, 1e-2)),
    distill=DistillOptions(minutes=0.75, context_tokens=(64, 128, 192), judged_examples=6, judged_context=(128,)),
    evaluation=EvaluationOptions(documents=10, passkeys=0, attention_documents=2),
    timed_tokens=(512,),
)


@dataclass
class Made:
    """One direction: its translator, its controls, where they are saved."""

    translator: Translator
    controls: dict[str, Translator]
    folder: Path


@dataclass
class Clock:
    """Seconds of each stage, told as they pass."""

    tell: Say
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        started = time.monotonic()
        self.tell(f"{name} …")
        yield
        give_back_memory()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def run_demo(
    *,
    quick: bool = False,
    minutes: float | None = None,
    cache_dir: Path | None = None,
    console: Console,
    tell: Say,
    plan: DemoPlan | None = None,
    folders: tuple[Path, Path] | None = None,
    documents: Sequence[Document] | None = None,
) -> dict[str, Any]:
    """Make a translator each way, hand a conversation over and back, and judge; return the first direction's report.

    Args:
        minutes: of distilling a direction, in place of the plan's.
        plan, folders, documents: in place of the demo's own amounts, models and texts.
    """
    plan = plan or (QUICK if quick else FULL)
    if minutes is not None:
        plan = replace(plan, distill=replace(plan.distill, minutes=minutes))
    cache, clock = cache_dir or default_cache_dir(), Clock(tell)
    quiet_loading()
    with clock.stage("fetching and converting the models, where that has not been done before"):
        folders = folders or fetch(cache)
    apart = reserve(documents if documents is not None else default_documents())
    work = cache / "demo" / f"work-{__version__}-{'both' if plan.both_ways else 'one'}"
    dtype = training_dtype()
    models = load_both(folders, dtype)
    made = [
        make(*pair, plan, apart.training, work, cache / "demo", folders, clock) for pair in directions(models, plan)
    ]
    if dtype is not torch.float32:
        models = load_both(folders, torch.float32)
    with clock.stage("handing a conversation over" + " and back" * plan.both_ways):
        turns = converse(*models, made, plan)
    print_conversation(turns, console)
    judged = apart.held_out or list(apart.training)
    reports = []
    for one, (source, target) in zip(made, directions(models, plan), strict=True):
        with (
            clock.stage(f"judging {source.name} → {target.name} on text that no stage has read"),
            progress_bar() as bar,
        ):
            controls = Controls(token_only=one.controls["token_only"], no_text=one.controls["no_text"])
            reports.append(
                evaluate(
                    source,
                    target,
                    one.translator,
                    judged,
                    controls=controls,
                    options=plan.evaluation,
                    progress=bar.count,
                )
            )
        save_report(one.folder, reports[-1].to_dict())
        print_report(reports[-1], console)
    with clock.stage("timing the first token, in turn with a re-prefill"):
        times = [
            row
            for one, pair in zip(made, directions(models, plan), strict=True)
            for row in timed(*pair, one, judged, plan)
        ]
    print_times(times, console)
    shutil.rmtree(work, ignore_errors=True)
    for one in made:
        console.print(f"saved {one.folder}: try {command()} handoff {one.folder} FILE", highlight=False, soft_wrap=True)
    translators = " ".join(f"--translator {one.folder}" for one in made)
    served = f"{command()} serve --model small={folders[0]} --model big={folders[1]} {translators}"
    console.print(f"chat with both, and switch between them: {served}", highlight=False, soft_wrap=True)
    return summary(reports, times, turns, clock)


def command() -> str:
    """Return how this program is called from here."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "kvlingo" and shutil.which("kvlingo") is None else "kvlingo"


def summary(
    reports: Sequence[Report], times: list[dict[str, Any]], turns: list[dict[str, Any]], clock: Clock
) -> dict[str, Any]:
    """Return the first direction's report with what else was found; FAIL if either direction failed."""
    verdict = "PASS" if all(report.passed for report in reports) else "FAIL"
    return {
        **reports[0].to_dict(),
        "verdict": verdict,
        "reverse": reports[1].to_dict() if len(reports) > 1 else None,
        "time_to_first_token": times,
        "conversation": turns,
        "seconds": {**clock.seconds, "all": sum(clock.seconds.values())},
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """Return the most memory this process has held."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held


# --- models ----------------------------------------------------------------------------------------------------------


def fetch(cache: Path) -> tuple[Path, Path]:
    """Return the folders of both models, fetched and converted once."""
    files = fetch_demo_models(cache / "demo")
    source, target = (convert_gguf(files[name], cache / "models") for name in (SOURCE, TARGET))
    return source, target


def training_dtype() -> torch.dtype:
    """Return bfloat16 where the processor multiplies it in tiles (2-3 times faster there), else float32."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.bfloat16 if torch.cuda.is_available() or has_tiles() else torch.float32


def load_both(folders: tuple[Path, Path], dtype: torch.dtype) -> tuple[LanguageModel, LanguageModel]:
    """Load both models under their short names."""
    source, target = (load_model(folder, dtype=dtype) for folder in folders)
    return replace(source, name=short_name(source)), replace(target, name=short_name(target))


def short_name(lm: LanguageModel) -> str:
    """Return the name of a converted model without the digest and quantisation in its folder's name."""
    return next((name for name in (SOURCE, TARGET) if lm.name.lower().startswith(name)), lm.name)


def directions(pair: tuple[T, T], plan: DemoPlan) -> list[tuple[T, T]]:
    """Return (source, target) of each direction of the demo."""
    return [pair, (pair[1], pair[0])] if plan.both_ways else [pair]


# --- one direction ---------------------------------------------------------------------------------------------------


def make(
    source: LanguageModel,
    target: LanguageModel,
    plan: DemoPlan,
    documents: Sequence[Document],
    work: Path,
    out: Path,
    folders: tuple[Path, Path],
    clock: Clock,
) -> Made:
    """Fit and distil one direction, save it with its controls."""
    name = f"{source.name}-to-{target.name}"
    chosen = choose_map(source.geometry, target.geometry, count_weights(source), count_weights(target))
    options = replace(plan.fit, **chosen)
    with clock.stage(f"fitting {source.name} → {target.name}"), progress_bar() as bar:
        fitted = fit(source, target, documents, options, work_dir=work / name, progress=bar.count)
        config = base_config(source, target, options)
        shapes = {"token_only": source_free(config), "no_text": text_free(config)}
        controls = {control_name: control(shape, fitted, target) for control_name, shape in shapes.items()}
    split = split_documents(documents, held_out_share=options.held_out_share, seed=options.seed)
    with clock.stage(f"distilling {source.name} → {target.name}"), progress_bar() as bar:
        done = distill(
            fitted.translator,
            source,
            target,
            split.training,
            split.held_out,
            fitted.stats,
            plan.distill,
            work_dir=work / name,
            report=bar.train,
        )
    folder = out / name
    save(folder, done, controls, source, target, options, plan, split)
    remember_models(folder, *map(str, folders))
    save_curve(folder, {**done.curve.to_json(), "pair": [source.name, target.name]}, clock.tell)
    clock.tell(f"held-out KL {done.curve.held_out_kl_nats[0]:.3f} → {min(done.curve.held_out_kl_nats):.3f} nats")
    return Made(done.translator, controls, folder)


def save(
    folder: Path,
    done: Distilled,
    controls: dict[str, Translator],
    source: LanguageModel,
    target: LanguageModel,
    options: FitOptions,
    plan: DemoPlan,
    split: Split,
) -> None:
    """Save a distilled translator and its controls."""
    seen = TextsSeen(frozenset(map(digest, split.training)), frozenset(map(digest, split.held_out)))
    save_fitted(
        folder,
        done.translator,
        controls,
        source=source,
        target=target,
        options={"fit": asdict(options), "distill": asdict(plan.distill), "texts": seen.to_json()},
        held_out={"kl_nats": min(done.curve.held_out_kl_nats)},
        storage="float32",
        overwrite=True,
    )


# --- the conversation ------------------------------------------------------------------------------------------------


def converse(
    source: LanguageModel, target: LanguageModel, made: Sequence[Made], plan: DemoPlan
) -> list[dict[str, Any]]:
    """Let the source answer, hand over, let the target answer, and hand back where there is a way back."""
    messages: list[Message] = [{"role": "user", "content": STORY}]
    text, source_state = answer(source, messages, plan)
    turns = [turn(source, messages, text, None)]
    messages = [*messages, said(text), {"role": "user", "content": SECOND_QUESTION}]
    handed = hand_off(messages, source, target, made[0].translator, source_state=source_state)
    text, target_state = go_on(target, handed, plan)
    turns.append(turn(target, messages, text, handed))
    if len(made) > 1:
        messages = [*messages, said(text), {"role": "user", "content": THIRD_QUESTION}]
        back = hand_off(
            messages, target, source, made[1].translator, source_state=target_state, target_state=source_state
        )
        text, _ = go_on(source, back, plan)
        turns.append(turn(source, messages, text, back))
    return turns


@torch.no_grad()
def answer(lm: LanguageModel, messages: Sequence[Message], plan: DemoPlan) -> tuple[str, ModelState]:
    """Let a model read messages from scratch and answer; return its words and all it then holds, in full length."""
    reading = read_conversation(messages, lm, add_generation_prompt=True)
    done = prefill(lm, lm.ids(reading.ids), full_length=True)
    state = ModelState(reading, done.cache, reprefill_plan(len(reading.ids), "the model read it").spans)
    generation = generate(lm, state, done.logits[-1], max_new_tokens=plan.max_new_tokens)
    return generation.text(), generation.state


def go_on(lm: LanguageModel, handed: HandOff, plan: DemoPlan) -> tuple[str, ModelState]:
    """Let a target answer from what it was handed."""
    assert handed.logits is not None
    generation = generate(lm, handed.state, handed.logits, max_new_tokens=plan.max_new_tokens)
    return generation.text(), generation.state


def said(text: str) -> Message:
    """Return an answer as a message; an empty one would be dropped by some templates."""
    return {"role": "assistant", "content": text.strip() or "…"}


def turn(lm: LanguageModel, messages: Sequence[Message], text: str, handed: HandOff | None) -> dict[str, Any]:
    """Return one turn as plain values."""
    return {
        "model": lm.name,
        "question": messages[-1]["content"],
        "answer": text.strip(),
        "plan": None if handed is None else handed.plan.to_json(),
        "plan_text": None if handed is None else str(handed.plan),
    }


# --- times -----------------------------------------------------------------------------------------------------------


def timed(
    source: LanguageModel, target: LanguageModel, one: Made, documents: Sequence[Document], plan: DemoPlan
) -> list[dict[str, Any]]:
    """Time the first token after conversations of several lengths."""
    prose = "\n\n".join(document.text for document in documents)
    rows = []
    for tokens in plan.timed_tokens:
        text = of_length(prose, tokens, target)
        found = time_to_first_token(text, source, target, one.translator, repeats=plan.repeats)
        rows.append({"pair": f"{source.name} → {target.name}", "ratio": found.speedup, **found.to_json()})
    return rows


def of_length(prose: str, tokens: int, lm: LanguageModel) -> str:
    """Cut a text to about `tokens` tokens."""
    offsets = lm.tokenizer(prose[: 10 * tokens], return_offsets_mapping=True, add_special_tokens=False)[
        "offset_mapping"
    ]
    return prose[: offsets[min(tokens, len(offsets)) - 1][1]]
