"""What `kvlingo eval`, `confidence` and `handoff` do with a saved translator, from names and paths to what came out.

Computes nothing itself, and does not know the command line: lines for a person go to `say`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvlingo.confidence import Confidence
from kvlingo.errors import BadInput, MissingExtra
from kvlingo.evaluation import Controls, EvaluationOptions, evaluate
from kvlingo.files import write_file
from kvlingo.frontier import FrontierOptions, frontier
from kvlingo.generation import generate
from kvlingo.handoff import HandOff, hand_off
from kvlingo.jobs import Say, Where, gather, load_pair
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.manifest import Manifest
from kvlingo.plots import draw_frontier
from kvlingo.progress import progress_bar
from kvlingo.reading import read_more
from kvlingo.reliability import ReliabilityOptions, judge_confidence
from kvlingo.report import Report
from kvlingo.states import read_native, refuse_changed_angles
from kvlingo.store import load_translator, read_manifest, save_confidence, save_report
from kvlingo.texts import Document, conversation_from_file
from kvlingo.timing import FirstToken, time_to_first_token
from kvlingo.translator import Translator
from kvlingo.workplace import fair_to_judge_on, load_controls, model_names, texts_seen

# --- eval ---


def evaluate_folder(
    folder: Path,
    *,
    source_name: str | None,
    target_name: str | None,
    texts: Sequence[Path],
    options: EvaluationOptions,
    where: Where,
    keep: bool,
    tell: Say,
) -> Report:
    """Score a saved translator beside its controls; with `keep`, write the report into the artifact."""
    judged = load_to_judge(folder, source_name, target_name, texts, where, tell)
    with progress_bar() as bar:
        report = evaluate(
            judged.source,
            judged.target,
            judged.translator,
            judged.documents,
            controls=judged.controls,
            options=options,
            progress=bar.count,
        )
    if keep:
        save_report(folder, report.to_dict())
    return report


@dataclass(frozen=True)
class ToJudge:
    """A saved translator with its models, its controls and texts that it has not learnt from."""

    source: LanguageModel
    target: LanguageModel
    translator: Translator
    controls: Controls
    documents: list[Document]


def load_to_judge(
    folder: Path, source_name: str | None, target_name: str | None, texts: Sequence[Path], where: Where, tell: Say
) -> ToJudge:
    """Load all that judging a translator takes."""
    names = model_names(folder, source_name, target_name)
    documents, note = fair_to_judge_on(gather(texts), texts_seen(read_manifest(folder)))
    if note:
        tell(note)
    source, target = load_pair(*names, where)
    translator, _ = load_translator(folder, source=source, target=target)
    others = load_controls(folder, source=source, target=target)
    controls = Controls(token_only=others.pop("token_only", None), no_text=others.pop("no_text", None), others=others)
    return ToJudge(source, target, translator.to(target.device), controls, documents)


# --- eval --frontier, confidence ---


def sweep_folder(
    folder: Path,
    *,
    source_name: str | None,
    target_name: str | None,
    texts: Sequence[Path],
    options: FrontierOptions,
    where: Where,
    out: Path,
    tell: Say,
) -> dict[str, Any]:
    """Sweep the dial of a saved translator; write `frontier.json` and, with matplotlib, `frontier.png` into `out`."""
    judged = load_to_judge(folder, source_name, target_name, texts, where, tell)
    with progress_bar() as bar:
        record = frontier(
            judged.source,
            judged.target,
            judged.translator,
            judged.documents,
            controls=judged.controls,
            options=options,
            progress=bar.count,
        )
    write_file(out / "frontier.json", (json.dumps(record, allow_nan=False) + "\n").encode())
    try:
        draw_frontier(record, out / "frontier.png")
    except MissingExtra as error:
        tell(f"no picture: {error}")
    return record


def judge_confidence_folder(
    folder: Path,
    *,
    source_name: str | None,
    target_name: str | None,
    texts: Sequence[Path],
    options: ReliabilityOptions,
    where: Where,
    keep: bool,
    tell: Say,
) -> dict[str, Any]:
    """Fit and judge what tells bad hand-overs of a saved translator; with `keep`, write it into the artifact."""
    judged = load_to_judge(folder, source_name, target_name, texts, where, tell)
    with progress_bar() as bar:
        found, record = judge_confidence(
            judged.source, judged.target, judged.translator, judged.documents, options=options, progress=bar.count
        )
    if keep:
        save_confidence(folder, found.to_json())
    return record


def confidence_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Return in words what a confidence is worth."""
    fitted = record["confidence"]["fitted"]
    worth, limit = fitted["left_out"], record["confidence"]["kl_nats"]
    yield (
        f"{fitted['bad']} of {fitted['hand_overs']} hand-overs are bad (KL above {limit:g} nats), from "
        f"{fitted['clusters']} books or sites"
    )
    precision = "none was flagged" if worth["precision"] is None else f"precision {worth['precision']:.2f}"
    ranked = (
        "" if worth["auc"] is None else f", a bad one is doubted more than a good one in {worth['auc']:.0%} of pairs"
    )
    yield f"on texts left out: {precision}, recall {worth['recall']:.2f}{ranked}"
    kept = "–" if worth["mean_kl_of_kept_nats"] is None else f"{worth['mean_kl_of_kept_nats']:.3f}"
    yield (
        f"mean KL {worth['mean_kl_nats']:.3f} nats; {kept} over those kept, {worth['mean_kl_with_fallback_nats']:.3f} with "
        f"{worth['flagged']} re-prefilled"
    )


# --- handoff ---


@dataclass(frozen=True)
class Sampling:
    """How the target goes on."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


def hand_off_file(
    folder: Path,
    file: Path,
    *,
    source_name: str | None,
    target_name: str | None,
    dial: Mapping[str, Any],
    following: str,
    sampling: Sampling,
    repeats: int,
    anyway: bool,
    where: Where,
    write: Say,
    say: Say,
) -> dict[str, Any]:
    """Hand the conversation in a file over and let the target go on.

    Args:
        dial: `sink`, `tail`, `native_layers`, `no_text` of `hand_off`.
        following: what the target reads first when it gets no text.
        anyway: hand over even where the translator's own report failed, or its confidence takes this hand-over for a bad one;
            otherwise the target re-prefills and says why.
        write: takes the continuation piece by piece.
    """
    manifest = read_manifest(folder)
    dial = {
        **dial,
        "distrust": None if anyway else failed_report(manifest),
        "confidence": None if anyway or dial.get("no_text") else confidence_of(manifest),
    }
    conversation = conversation_from_file(file)
    names = model_names(folder, source_name, target_name)
    source, target = load_pair(*names, where)
    translator = translator_for(folder, source, target, no_text=bool(dial.get("no_text")))
    state = read_native(conversation, source)
    handed = hand_off(conversation, source, target, translator, source_state=state, **dial)
    if handed.logits is None:
        handed = read_on(target, handed, following)
    assert handed.logits is not None
    generation = generate(target, handed.state, handed.logits, **asdict(sampling))
    pieces = []
    for piece in generation:
        pieces.append(piece)
        write(piece)
    write("\n")
    times = time_to_first_token(conversation, source, target, translator, source_state=state, repeats=repeats, **dial)
    for line in handoff_lines(handed, times):
        say(line)
    return {
        "continuation": "".join(pieces),
        "num_tokens": len(generation.ids),
        "plan": handed.plan.to_json(),
        "doubt": handed.doubt,
        "timings_ms": handed.timings_ms,
        "first_token": times.to_json(),
        "pair": {"source": source.name, "target": target.name},
    }


def failed_report(manifest: Manifest) -> str | None:
    """Say that a translator's own report on held-out text failed; None where it passed or there is none yet."""
    if manifest.verdict in (None, "PASS"):
        return None
    return f"the translator's own report says {manifest.verdict} (kvlingo eval)"


def confidence_of(manifest: Manifest) -> Confidence | None:
    """Return what judges a translator's hand-overs; None where none was fitted."""
    return None if manifest.confidence is None else Confidence.from_json(manifest.confidence)


def translator_for(folder: Path, source: LanguageModel, target: LanguageModel, *, no_text: bool) -> Translator:
    """Load a folder's translator, or with `no_text` the one beside it that was fitted without text."""
    translator, _ = load_translator(folder, source=source, target=target)
    if no_text and translator.config.reads_text:
        textless = folder / "controls" / "no_text"
        if not textless.is_dir():
            raise BadInput(f"{folder} holds no translator that does without the text; fit one: kvlingo fit … --no-text")
        translator, _ = load_translator(textless, source=source, target=target)
    return translator.to(target.device)


@torch.no_grad()
def read_on(target: LanguageModel, handed: HandOff, text: str) -> HandOff:
    """Let a target that got no text read the first new one."""
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise BadInput("without the text the target needs something new to read; give --next TEXT")
    refuse_changed_angles(target, len(handed.state.reading) + len(ids))
    done = prefill(target, target.ids(ids), cache=handed.state.cache)
    reading = read_more(target.tokenizer, handed.state.reading, ids)
    return replace(handed, state=replace(handed.state, reading=reading, cache=done.cache), logits=done.logits[-1])


def handoff_lines(handed: HandOff, times: FirstToken) -> Iterator[str]:
    """Return the plan and the times in words."""
    yield f"plan: {handed.plan}"
    if handed.plan.fallback:
        yield f"re-prefilled: {handed.plan.fallback}"
    elif handed.doubt is not None:
        yield f"doubt {handed.doubt:.2f}: the probability that this hand-over is bad, by what its tail shows"
    faster = f"{times.speedup:.1f} times as long" if times.speedup >= 1 else "less: re-prefill at this length"
    runs = f"medians of {times.repeats} runs" if times.repeats > 1 else "one run"
    yield (
        f"first token after {times.handoff_ms:.0f} ms; re-prefilling {times.tokens} tokens takes {times.reprefill_ms:.0f} ms, "
        f"{faster} ({runs})"
    )
