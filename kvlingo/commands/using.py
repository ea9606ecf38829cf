"""Commands that use maps, or tell of them: handoff, info, plan, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlingo.commands.console import FAILED, describe, emit, stoppable, tell, write
from kvlingo.commands.options import (
    AsJson,
    Device,
    Dtype,
    Folder,
    Model,
    NativeLayers,
    Sink,
    Source,
    Tail,
    Target,
    lengths,
)
from kvlingo.errors import BadInput


def handoff(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="A text, or a .json list of messages.", show_default=False)],
    source: Source = None,
    target: Target = None,
    sink: Sink = 1,
    tail: Tail = 1,
    native_layers: NativeLayers = 0,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Give the target a cache and no text; not anonymous.")
    ] = False,
    following: Annotated[
        str, typer.Option("--next", help="With --no-text: what the target reads first.", show_default="a line break")
    ] = "\n",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to go on for.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this probability.")
    ] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs to take the times' medians of.")] = 3,
    anchors: Annotated[float, typer.Option(min=0, max=1, help="Share of the middle that the target reads too.")] = 0.0,
    anchors_by: Annotated[
        str, typer.Option(help="Which: spread, random, or the least trusted by distance, key_norm or deviation.")
    ] = "spread",
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Hand over even where the translator's report failed or its confidence doubts."),
    ] = False,
    dtype: Dtype = None,
    device: Device = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**32 - 1, help="Of sampling. Default: another each time.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let the source read FILE, hand it over, print how the target goes on, with the plan and the times."""
    with stoppable("nothing was written"):
        from kvlingo import jobs, trials
        from kvlingo.anchors import Anchors

        result = trials.hand_off_file(
            folder,
            file,
            source_name=source,
            target_name=target,
            dial={
                "sink": sink,
                "tail": tail,
                "native_layers": native_layers,
                "no_text": no_text,
                "anchors": Anchors(anchors_by, anchors) if anchors else None,
            },
            following=following,
            sampling=trials.Sampling(max_new_tokens, temperature, top_p, seed),
            repeats=repeats,
            anyway=anyway,
            where=jobs.Where(device, dtype),
            write=write,
            say=typer.echo,
        )
    emit(result, as_json)


def info(
    what: Annotated[
        str, typer.Argument(metavar="SOURCE|DIR", help="A model, or a saved translator.", show_default=False)
    ],
    target: Annotated[str | None, typer.Argument(help="The target model.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether and how two models go together, without loading weights; or what a saved translator is."""
    with stoppable("nothing was written"):
        from kvlingo import facts, sheets

        if target is None:
            refuse_one_model(what)
            result = facts.describe_folder(Path(what))
            sheets.print_folder(result, sheets.to_stdout())
        else:
            result = describe(facts.describe_pair, what, target, as_json)
            sheets.print_pair(result, sheets.to_stdout())
    emit(result, as_json)


def refuse_one_model(what: str) -> None:
    """Raise `BadInput` for what is no translator but may be a model: a pair is told about, never one alone."""
    folder = Path(what)
    instead = "give a saved translator's, or two models: kvlingo info SOURCE TARGET"
    if not folder.exists():
        raise BadInput(f"there is no folder {what}; {instead}")
    if folder.suffix == ".gguf" or ((folder / "config.json").is_file() and not (folder / "translator.json").exists()):
        raise BadInput(f"{what} is one model; {instead}")


def plan(
    source: Model,
    target: Model,
    context: Annotated[
        str, typer.Option(help="Tokens of conversations before a switch, or a file with one number a line.")
    ] = "1000,4000,16000",
    switch_share: Annotated[float, typer.Option(help="Share of the target's turns that come with a switch.")] = 0.2,
    message: Annotated[int, typer.Option(help="Tokens of a message.")] = 100,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 300,
    turns: Annotated[float, typer.Option(help="Turns of a user in an hour.")] = 20.0,
    tflops: Annotated[
        float, typer.Option(help="Peak of an accelerator. Default: an H100's data sheet, bfloat16.")
    ] = 989.0,
    bandwidth: Annotated[float, typer.Option(help="Peak of its memory, GB/s.")] = 3350.0,
    flops_share: Annotated[float, typer.Option(help="Share of the peak that reading reaches.")] = 0.4,
    bandwidth_share: Annotated[float, typer.Option(help="Share of the peak that answering reaches.")] = 0.6,
    batch: Annotated[int, typer.Option(help="Answers written at once.")] = 32,
    occupancy: Annotated[float, typer.Option(help="Share of the time in which it may work.")] = 0.7,
    price: Annotated[float | None, typer.Option(help="Of an accelerator's hour, in any currency.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what hand-overs are worth to a service: prefill saved, users gained, cost; no weights are loaded."""
    with stoppable("nothing was written"):
        from kvlingo import facts, sheets
        from kvlingo.traffic import Accelerator, Traffic

        traffic = Traffic(lengths(context), switch_share, message, answer, turns)
        accelerator = Accelerator(
            tflops, bandwidth, flops_share, bandwidth_share, batch, occupancy, price_per_hour=price
        )
        result = facts.plan_traffic(source, target, traffic, accelerator)
        sheets.print_traffic(result, sheets.to_stdout())
    emit(result, as_json)


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="One direction, ridge and a minute of distilling.")] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Minutes of distilling a direction.", show_default=False)
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Where models are kept. Default: $KVLINGO_CACHE or ~/.cache/kvlingo.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch two small models, fit, distil, hand a conversation over and back, and show what was kept."""
    with stoppable("fetched models and finished stages are kept; the same command goes on from there"):
        from kvlingo import sheets
        from kvlingo.demo import run_demo

        report = run_demo(quick=quick, minutes=minutes, cache_dir=cache_dir, console=sheets.to_stdout(), tell=tell)
    emit(report, as_json)
    if report["verdict"] != "PASS":
        raise typer.Exit(FAILED)
