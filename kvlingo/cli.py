"""The command line: options in, one line of error or one result out.

Knows Typer and the names of the jobs; everything heavy is imported inside a command, so that `--help` answers at once. Results
go to stdout, progress and errors to stderr. Exit codes: 0 done, 2 the input is at fault, 3 an evaluation's verdict is FAIL,
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlingo import __version__
from kvlingo.errors import BadInput, KVLingoError, MissingExtra, UnsupportedModel

BAD_INPUT, FAILED, STOPPED = 2, 3, 130

app = typer.Typer(
    name="kvlingo",
    help="Hand a conversation from one language model to another by translating its key-value cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
route = typer.Typer(no_args_is_help=True, help="Fit and compare routers: who answers a request for the model auto.")
app.add_typer(route, name="route")


class Map(StrEnum):
    """How keys and values are mapped."""

    auto = "auto"
    linear = "linear"
    headwise = "headwise"
    lowrank = "lowrank"


class Storage(StrEnum):
    """How weights are stored."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


class CheckedType(StrEnum):
    """What the models of a self-test compute in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class ShapeMap(StrEnum):
    """Which random maps to time."""

    layer = "layer"
    low_rank = "low-rank"
    head_wise = "head-wise"
    full = "full"


class BenchEngine(StrEnum):
    """Which runtime to time."""

    torch = "torch"
    mlx = "mlx"


class MapperFormat(StrEnum):
    """Whose folders of maps to write and read."""

    semantic_router = "semantic-router"


class Routing(StrEnum):
    """Who decides which model answers `auto`."""

    explicit = "explicit"
    threshold = "threshold"
    cascade = "cascade"
    learned = "learned"
    token = "token"


class Control(StrEnum):
    """A control that can be distilled like the translator it stands beside."""

    token_only = "token_only"
    no_text = "no_text"


# What a model may be named by.
MODEL = "hub id, local folder or .gguf file"
Model = Annotated[str, typer.Argument(help=f"{MODEL}.", show_default=False)]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="What `kvlingo fit` wrote.", show_default=False)]
Source = Annotated[str | None, typer.Option(help=f"The source model, if it moved: {MODEL}.", show_default=False)]
Target = Annotated[str | None, typer.Option(help=f"The target model, if it moved: {MODEL}.", show_default=False)]
Texts = Annotated[
    list[Path] | None,
    typer.Option("--text", help="File or folder of text; repeatable. Default: the prose that comes with Python."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, … Default: the GPU if there is one.", show_default=False)]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32 on a CPU.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, on the last line of stdout.")]
Sink = Annotated[int, typer.Option(min=0, help="First tokens that the target reads itself.")]
Tail = Annotated[int, typer.Option(min=1, help="Last tokens that the target reads itself.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of all that is drawn at random.")]
Served = Annotated[
    list[str] | None, typer.Option("--model", metavar="NAME=MODEL", help=f"Serve a {MODEL} by a name; repeatable.")
]
Translators = Annotated[
    list[Path] | None,
    typer.Option("--translator", metavar="DIR", help="What `kvlingo fit` wrote for two of them; repeatable."),
]
NativeLayers = Annotated[int, typer.Option(min=0, help="First layers that the target computes itself.")]


def version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(f"kvlingo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def fit(
    source: Model,
    target: Model,
    out: Annotated[Path, typer.Option(help="Folder to save the translator to.", show_default=False)],
    text: Texts = None,
    map_kind: Annotated[
        Map, typer.Option("--map", help="auto: linear, with an MLP residual to try from small to large.")
    ] = Map.auto,
    rank: Annotated[int, typer.Option(min=1, help="Dims of a low-rank map.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Target tokens to read.")] = 150_000,
    reach: Annotated[int, typer.Option(min=0, help="Source layers read on each side of the paired one.")] = 1,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Leave the text out: the target gets a cache alone.")
    ] = False,
    key_norm: Annotated[
        bool | None,
        typer.Option(
            help="Whether keys end in the target's key norm. Default: as held-out text says.", show_default=False
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option("--lambda", min=0, help="Ridge damping. Default: chosen on held-out text.", show_default=False),
    ] = None,
    context: Annotated[str, typer.Option(help="Lengths of the pieces to read, in target tokens.")] = "192,512,1024",
    chat_share: Annotated[float, typer.Option(min=0, max=1, help="Share of pieces rendered in chat templates.")] = 0.15,
    dtype: Dtype = None,
    device: Device = None,
    store: Annotated[Storage, typer.Option(help="How to store the weights.")] = Storage.float32,
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the translator that is there.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print what was chosen for each layer.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit a translator from SOURCE to TARGET by ridge regression on text."""
    changes = {
        "rank": rank,
        "tokens": tokens,
        "reach": reach,
        "context_tokens": numbers(context, "--context"),
        "chat_share": chat_share,
        "seed": seed,
        **({} if map_kind is Map.auto else {"map_kind": map_kind.value}),
        **({} if damping is None else {"dampings": (damping,)}),
        **({} if key_norm is None else {"key_norm": key_norm}),
    }
    with stoppable(f"the statistics so far are kept in {out / 'work'}; the same command goes on from there"):
        from kvlingo import jobs

        result = jobs.fit_pair(
            source,
            target,
            out,
            texts=text or [],
            changes=changes,
            auto_map=map_kind is Map.auto,
            no_text=no_text,
            where=jobs.Where(device, dtype),
            storage=store.value,
            overwrite=overwrite,
            say=typer.echo,
            tell=tell,
        )
    if verbose:
        print_layers(result["layers"])
    emit(result, as_json)


@app.command()
def distill(
    folder: Folder,
    source: Source = None,
    target: Target = None,
    text: Texts = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Stop after so long. Default: 10.", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.", show_default=False)] = None,
    learning_rate: Annotated[float, typer.Option(min=0, help="Of AdamW, after warm-up.")] = 1e-4,
    batch: Annotated[int, typer.Option(min=1, help="Hand-overs in a step.")] = 8,
    context: Annotated[
        str, typer.Option(help="Context lengths to draw from, in target tokens.")
    ] = "64,128,192,256,384,512",
    continuation: Annotated[int, typer.Option(min=1, help="Tokens after each hand-over.")] = 96,
    chat_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of hand-overs rendered in chat templates.")
    ] = 0.15,
    judged: Annotated[int, typer.Option(min=1, help="Held-out hand-overs to judge on.")] = 16,
    control: Annotated[Control | None, typer.Option(help="Distil a control instead.", show_default=False)] = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train a fitted translator through the frozen target; keep the best on held-out text."""
    contexts = sorted(numbers(context, "--context"))
    changes = {
        "minutes": 10.0 if minutes is None and steps is None else minutes,
        "steps": steps,
        "learning_rate": learning_rate,
        "batch": batch,
        "context_tokens": tuple(contexts),
        "judged_context": (contexts[(len(contexts) - 1) // 2], contexts[-1]),
        "judged_examples": judged,
        "continuation_tokens": continuation,
        "chat_share": chat_share,
        "seed": seed,
    }
    with stoppable(f"{folder} is unchanged, a checkpoint is in {folder / 'work'}; the same command goes on from there"):
        from kvlingo import jobs

        result = jobs.distill_folder(
            folder,
            source_name=source,
            target_name=target,
            texts=text or [],
            changes=changes,
            control_name=None if control is None else control.value,
            where=jobs.Where(device, dtype),
            say=typer.echo,
            tell=tell,
        )
    emit(result, as_json)


@app.command("eval")
def evaluate(
    folder: Folder,
    source: Source = None,
    target: Target = None,
    text: Texts = None,
    context: Annotated[int, typer.Option(min=8, help="Target tokens before the hand-over.")] = 192,
    continuation: Annotated[int, typer.Option(min=1, help="Target tokens scored after it.")] = 48,
    documents: Annotated[int, typer.Option(min=1, help="Held-out hand-overs to score.")] = 48,
    sink: Sink = 1,
    tail: Tail = 1,
    native_layers: NativeLayers = 0,
    passkeys: Annotated[int, typer.Option(min=0, help="Codes to hide in the context and ask for.")] = 24,
    sweep: Annotated[
        bool, typer.Option("--frontier", help="Sweep the dial instead: KL against compute, as JSON and picture.")
    ] = False,
    lengths: Annotated[
        str | None, typer.Option(help="With --frontier: contexts. Default: --context.", show_default=False)
    ] = None,
    anchors_by: Annotated[
        str, typer.Option(help="With --frontier: choices of anchors; random is what the others are compared with.")
    ] = "spread,random,distance,surprise,oracle",
    shares: Annotated[
        str, typer.Option(help="With --frontier: shares of the middle read as anchors.")
    ] = "0.02,0.05,0.1,0.2",
    blocks: Annotated[str, typer.Option(help="With --frontier: tokens that are chosen together.")] = "1,16",
    out: Annotated[
        Path | None,
        typer.Option(help="With --frontier: folder to write to. Default: the translator's.", show_default=False),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Write the report into the translator's folder.")
    ] = True,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Score a translator beside its controls on text that it was not fitted on. Exit code 3 on FAIL."""
    if sweep:
        sweep_dial(
            folder,
            {
                "contexts": (context,) if lengths is None else numbers(lengths, "--lengths"),
                "continuation_tokens": continuation,
                "documents": documents,
                "by": tuple(part.strip() for part in anchors_by.split(",")),
                "shares": fractions(shares, "--shares"),
                "blocks": numbers(blocks, "--blocks"),
                "seed": seed,
            },
            (source, target, text or [], device, dtype, out or folder),
            as_json,
        )
        return
    with stoppable(f"{folder} is unchanged; run the same command again"):
        from kvlingo import jobs, sheets, trials
        from kvlingo.evaluation import EvaluationOptions

        report = trials.evaluate_folder(
            folder,
            source_name=source,
            target_name=target,
            texts=text or [],
            options=EvaluationOptions(
                context_tokens=context,
                continuation_tokens=continuation,
                documents=documents,
                sink=sink,
                tail=tail,
                native_layers=native_layers,
                passkeys=passkeys,
                seed=seed,
            ),
            where=jobs.Where(device, dtype),
            keep=keep,
            tell=tell,
        )
    sheets.print_report(report, sheets.to_stdout())
    emit(report.to_dict(), as_json)
    if not report.passed:
        raise typer.Exit(FAILED)


def sweep_dial(folder: Path, options: dict[str, Any], places: tuple[Any, ...], as_json: bool) -> None:
    """Do what `eval --frontier` does."""
    source, target, texts, device, dtype, out = places
    with stoppable(f"{folder} is unchanged; run the same command again"):
        from kvlingo import sheets, trials
        from kvlingo.frontier import FrontierOptions
        from kvlingo.jobs import Where

        record = trials.sweep_folder(
            folder,
            source_name=source,
            target_name=target,
            texts=texts,
            options=FrontierOptions(**options),
            where=Where(device, dtype),
            out=out,
            tell=tell,
        )
    sheets.print_frontier(record, sheets.to_stdout())
    emit(record, as_json)


@app.command()
def confidence(
    folder: Folder,
    source: Source = None,
    target: Target = None,
    text: Texts = None,
    context: Annotated[str, typer.Option(help="Target tokens before the hand-overs.")] = "192,512,1024",
    continuation: Annotated[int, typer.Option(min=1, help="Target tokens scored after each.")] = 48,
    documents: Annotated[int, typer.Option(min=1, help="Held-out hand-overs of each length.")] = 64,
    sink: Sink = 1,
    tail: Annotated[int, typer.Option(min=1, help="Last tokens that the target reads itself: what is looked at.")] = 16,
    native_layers: NativeLayers = 0,
    kl: Annotated[
        float, typer.Option(min=0, help="A hand-over whose KL to native is above it, in nats, is bad.")
    ] = 0.5,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Write it into the translator's folder: hand-overs use it then.")
    ] = True,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Fit what tells a bad hand-over from a good one at run time; print its precision and recall on text left out."""
    with stoppable(f"{folder} is unchanged; run the same command again"):
        from kvlingo import trials
        from kvlingo.jobs import Where
        from kvlingo.reliability import ReliabilityOptions

        record = trials.judge_confidence_folder(
            folder,
            source_name=source,
            target_name=target,
            texts=text or [],
            options=ReliabilityOptions(
                contexts=numbers(context, "--context"),
                continuation_tokens=continuation,
                documents=documents,
                sink=sink,
                tail=tail,
                native_layers=native_layers,
                kl_nats=kl,
                seed=seed,
            ),
            where=Where(device, dtype),
            keep=keep,
            tell=tell,
        )
    for line in trials.confidence_lines(record):
        typer.echo(line)
    emit(record, as_json)


@app.command()
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


@app.command()
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
            result = facts.describe_folder(Path(what))
            sheets.print_folder(result, sheets.to_stdout())
        else:
            result = describe(facts.describe_pair, what, target, as_json)
            sheets.print_pair(result, sheets.to_stdout())
    emit(result, as_json)


@app.command()
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


Mapper = Annotated[
    MapperFormat, typer.Option("--format", help="Whose format: vllm-project/semantic-router's.", show_default=False)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


@app.command("export")
def export_maps(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="Folder to put the mapper's folder into.", show_default=False)],
    form: Mapper,
    source_revision: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Commit of the source's weights on the hub.", show_default=False),
    ] = None,
    target_revision: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Commit of the target's weights on the hub.", show_default=False),
    ] = None,
    source_model: Annotated[
        str | None, typer.Option(help="The source's hub id, if named otherwise here.", show_default=False)
    ] = None,
    target_model: Annotated[
        str | None, typer.Option(help="The target's hub id, if named otherwise here.", show_default=False)
    ] = None,
    precision: Annotated[str, typer.Option(help="Of the caches it will serve: bf16, fp16 or fp32.")] = "bf16",
    pair: Annotated[
        str | None, typer.Option(help="First words of its id. Default: both models.", show_default=False)
    ] = None,
    bundle: Annotated[int, typer.Option(min=1, help="Raise it when the same weights are fitted anew.")] = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a translator of plain linear maps as a mapper folder of semantic-router."""
    with stoppable("nothing was written"):
        from kvlingo import interchange

        naming = interchange.Naming(
            source_model, source_revision, target_model, target_revision, precision, pair, bundle
        )
        result = interchange.export_folder(folder, out, naming, overwrite=overwrite, tell=tell)
        typer.echo(f"wrote {result['folder']}")
    emit(result, as_json)


@app.command("import")
def import_maps(
    mapper: Annotated[Path, typer.Argument(help="A mapper folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to save the translator to.", show_default=False)],
    form: Mapper,
    source: Source = None,
    target: Target = None,
    dtype: Dtype = None,
    device: Device = None,
    store: Annotated[Storage, typer.Option(help="How to store the weights.")] = Storage.float32,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Save a mapper folder of semantic-router as a translator; loads both models."""
    with stoppable("nothing was written"):
        from kvlingo import interchange
        from kvlingo.jobs import Where

        result = interchange.import_folder(
            mapper,
            out,
            source=source,
            target=target,
            where=Where(device, dtype),
            storage=store.value,
            overwrite=overwrite,
            tell=tell,
        )
        typer.echo(f"saved {out}: {result['num_bytes'] / 1e6:.1f} MB")
    emit(result, as_json)


@app.command()
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


@app.command()
def serve(
    model: Served = None,
    translator: Translators = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file of settings; the environment (KVLINGO_PORT, …) and flags go before it."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8000.")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys, lines NAME: SHA256 (printf %s KEY | sha256sum).")
    ] = None,
    anyone: Annotated[
        bool | None, typer.Option("--anyone", help="Let everyone on the network in, without keys.")
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Requests a minute for each key. Default: no limit.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Of an answer whose request names none. Default: 1024.")
    ] = None,
    router: Annotated[
        Routing | None,
        typer.Option(
            help="Who decides which model answers auto: nobody, length and turn, the small model's own doubt about its "
            "answer, what `kvlingo route fit` learned, or its doubt about each token. Default: explicit, auto is refused.",
            show_default=False,
        ),
    ] = None,
    small: Annotated[str | None, typer.Option(help="The router's small model. Default: small.")] = None,
    big: Annotated[str | None, typer.Option(help="The router's big model. Default: big.")] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="TOML file of limits; its tables: switch (`kvlingo calibrate`), threshold, cascade, token."),
    ] = None,
    learned: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What `kvlingo route fit` wrote, for the router learned.")
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep on disk what memory has no room for, and all conversations over a restart. They can be read there: "
            "choose a disk that only you read.",
            show_default=False,
        ),
    ] = None,
    cache_disk_bytes: Annotated[
        int | None, typer.Option(metavar="N", help="Bytes that they may take there. Default: 8 GiB.")
    ] = None,
    heal: Annotated[
        bool | None,
        typer.Option("--heal", help="While nothing is asked for, read translated conversations again, exactly."),
    ] = None,
    ahead: Annotated[
        bool | None,
        typer.Option("--ahead", help="While nothing is asked for, translate each answered turn for the other models."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", help="Page that may call from a browser; repeatable.")
    ] = None,
    drain: Annotated[
        float | None, typer.Option(help="Seconds that running answers may go on after SIGTERM. Default: 30.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Collector that gets an OpenTelemetry span for each request. Default: OTEL_EXPORTER_OTLP_ENDPOINT, or none.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Serve models by OpenAI's API; a conversation may go on with another of them at any turn."""
    flags = {
        "models": model,
        "translators": translator,
        "host": host,
        "port": port,
        "keys": keys,
        "anyone": anyone,
        "rate_per_minute": rate,
        "max_tokens": max_tokens,
        "router": None if router is None else router.value,
        "small": small,
        "big": big,
        "rules": rules,
        "learned": learned,
        "cache_dir": cache_dir,
        "cache_disk_bytes": cache_disk_bytes,
        "heal": heal,
        "ahead": ahead,
        "cors_origins": cors_origin,
        "drain_s": drain,
        "otlp_endpoint": otlp_endpoint,
        "dtype": dtype,
        "device": device,
    }
    with stoppable("nothing was written"):
        from kvlingo.serve.settings import read_settings

        settings, _ = read_settings(flags, os.environ, config)
        try:
            from kvlingo.serve import gateway
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in (
                "fastapi",
                "pydantic",
                "prometheus_client",
                "starlette",
                "uvicorn",
            ):
                raise
            raise MissingExtra(f"serving needs {error.name}: pip install 'kvlingo[serve]'") from error
        from kvlingo.serve.loading import build_engine

        gateway.serve(settings, partial(build_engine, settings, tell))


@app.command()
def calibrate(
    out: Annotated[
        Path, typer.Option(help="TOML file of rules to write, for `kvlingo serve --rules`.", show_default=False)
    ],
    model: Served = None,
    translator: Translators = None,
    lengths: Annotated[str, typer.Option(help="Lengths to measure, in tokens.")] = "128,256,512,1024,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, to take the medians of.")] = 3,
    text: Texts = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the rules that are there.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Time hand-overs and re-prefills of the models to be served; write from which length on a switch translates."""
    with stoppable(f"{out} is unchanged; run the same command again"):
        from dataclasses import asdict

        from kvlingo.jobs import Where
        from kvlingo.serve import calibrating, settings
        from kvlingo.serve.routing.rules import NEVER

        found = calibrating.calibrate(
            settings.read_value("models", model or [], "the command line"),
            translator or [],
            out,
            lengths=numbers(lengths, "--lengths"),
            repeats=repeats,
            texts=text or [],
            where=Where(device, dtype),
            overwrite=overwrite,
            tell=tell,
        )
    for each in found:
        typer.echo(
            f"{each.source} → {each.target}: reads again up to {each.reprefill_up_to} tokens, translates from "
            + (f"{each.translate_from}" if each.translate_from < NEVER else "no length that was measured")
        )
    emit({"switch": [asdict(each) for each in found]}, as_json)


@app.command()
def bench(
    source: Annotated[str | None, typer.Argument(help=f"{MODEL}.", show_default=False)] = None,
    target: Annotated[str | None, typer.Argument(help=f"{MODEL}.", show_default=False)] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="TRANSLATOR_DIR", help="What `kvlingo fit` wrote.", show_default=False)
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE,TARGET",
            help="Time random weights in the shapes of two public models instead: Qwen3-0.6B,Qwen3-1.7B.",
            show_default=False,
        ),
    ] = None,
    map_kind: Annotated[
        ShapeMap,
        typer.Option(
            help="With --shapes: maps of one layer, or full: of a window of layers and the text, as `fit` makes."
        ),
    ] = ShapeMap.layer,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="With --shapes: of low-rank maps (default 256), or of full ones.", show_default=False),
    ] = None,
    engine: Annotated[
        BenchEngine, typer.Option(help="mlx: models of mlx-lm, everything measured.")
    ] = BenchEngine.torch,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths of conversations, in tokens. Default: 64,512,2048,4096; with mlx 64,2048.", show_default=False
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each arm, after one that does not count.")] = 5,
    reprefill_up_to: Annotated[
        int, typer.Option(min=1, help="Beyond so many tokens a re-prefill is predicted, not measured.")
    ] = 8192,
    arms: Annotated[
        str | None, typer.Option(help="Which to time, separated by commas. Default: all.", show_default=False)
    ] = None,
    delta: Annotated[int, typer.Option(min=2, help="Tokens that are new to a target with an older prefix.")] = 256,
    sink: Sink = 1,
    tail: Tail = 1,
    text: Texts = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw time against length, as PNG.", show_default=False)
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Time the first token after a switch: translating, cold and warm, beside re-prefill and one decode step."""
    with stoppable("nothing was written"):
        from kvlingo import benchmark, sheets
        from kvlingo.arms import Dial
        from kvlingo.jobs import Where
        from kvlingo.public_shapes import MapShape

        bench_folder, bench_shapes = benchmark.bench_folder, benchmark.bench_shapes
        if engine is BenchEngine.mlx:
            from kvlingo import mlx_bench

            bench_folder, bench_shapes = mlx_bench.bench_mlx_folder, mlx_bench.bench_mlx_shapes
        usual = "64,2048" if engine is BenchEngine.mlx else "64,512,2048,4096"
        options = benchmark.BenchOptions(
            numbers(lengths or usual, "--lengths"),
            repeats,
            reprefill_up_to,
            () if arms is None else tuple(arms.split(",")),
            Dial(sink, tail, delta),
            seed,
        )
        where = Where(device, dtype)
        if shapes is not None:
            if source is not None:
                raise BadInput("--shapes takes the place of SOURCE, TARGET and TRANSLATOR_DIR; give one or the other")
            names = two_names(shapes)
            result = bench_shapes(
                *names, MapShape(map_kind.value, rank), options, where=where, picture=picture, tell=tell
            )
        elif source is None or target is None or folder is None:
            raise BadInput("give SOURCE, TARGET and TRANSLATOR_DIR, or --shapes SOURCE,TARGET")
        else:
            result = bench_folder(
                source, target, folder, options, texts=text or [], where=where, picture=picture, tell=tell
            )
        sheets.print_benchmark(result, sheets.to_stdout())
    emit(result, as_json)


@app.command("vllm-check")
def vllm_check(
    dtype: Annotated[CheckedType, typer.Option(help="Of the models that it is checked with.")] = CheckedType.float32,
    as_json: AsJson = False,
) -> None:
    """Check that the connector works with the vLLM that is installed here. Exit code 3 where it does not."""
    with stoppable("nothing was written"):
        from kvlingo.serve.external.checking import check_engine_pair

        result = check_engine_pair(dtype.value, tell)
    for check in result["checks"]:
        typer.echo(f"{'passed' if check['passed'] else 'FAILED'}: {check['name']} ({check['what']})")
    typer.echo(f"vLLM {result['vllm']}, {result['dtype']}: {result['verdict']}")
    emit(result, as_json)
    if result["verdict"] != "PASS":
        raise typer.Exit(FAILED)


@route.command("fit")
def route_fit(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA.jsonl",
            help='Rows {"prompt": text, "label": "small"|"big"}, or with "messages": which model is to answer.',
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to save the router to.", show_default=False)],
    big_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Largest share of requests to send to the big model. Default: that of the rows.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the router that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit the router `learned`; print its cost and quality on rows left out. Exit code 3 where it beats no lots."""
    with stoppable("nothing was written"):
        from kvlingo.serve.routing import learning

        report = learning.fit_router(data, out, big_share=big_share, seed=seed, overwrite=overwrite)
    for line in learning.lines(report):
        typer.echo(line)
    emit(report, as_json)
    if report["verdict"] != "PASS":
        raise typer.Exit(FAILED)


@route.command("eval")
def route_eval(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="RECORDED.jsonl",
            help='Rows with "prompt" or "messages", and for "small" and "big" {"quality": 0 to 1, "cost", "ms"}; '
            '"mean_logprob" of small for the cascade; "token" like small, with "share_big", for the router token; '
            '"cluster" for rows that belong together.',
            show_default=False,
        ),
    ],
    rules: Annotated[
        Path | None, typer.Option(help="The server's file of limits. Default: the routers' own.", show_default=False)
    ] = None,
    learned: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="What `kvlingo route fit` wrote, to be compared too.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write the report to, as JSON.", show_default=False)] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare routers on recorded answers with always small, always big and a coin: quality, cost, time."""
    with stoppable("nothing was written"):
        from kvlingo.files import write_file
        from kvlingo.serve.routing import comparing

        report = comparing.compare_file(file, rules=rules, learned=learned, seed=seed)
        if out:
            write_file(out, (json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    for line in comparing.lines(report):
        typer.echo(line)
    emit(report, as_json)


# --- what comes out --------------------------------------------------------------------------------------------------


def emit(result: dict[str, Any], as_json: bool) -> None:
    """Print the result as the last line of stdout, if asked."""
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False, allow_nan=False))


def describe(pair: Callable[[str, str], dict[str, Any]], source: str, target: str, as_json: bool) -> dict[str, Any]:
    """Return a pair's facts; one that can't be translated is an answer too, for a program that asks."""
    try:
        return pair(source, target)
    except UnsupportedModel as error:
        emit({"supported": False, "reason": str(error)}, as_json)
        raise


def write(piece: str) -> None:
    """Print a piece of text at once."""
    typer.echo(piece, nl=False)
    sys.stdout.flush()


def tell(line: str) -> None:
    """Print a line about progress."""
    typer.echo(line, err=True)


def print_layers(layers: Sequence[dict[str, Any]]) -> None:
    """Print what fitting chose for each target layer; errors are shares of variance, for debugging only."""
    typer.echo("layer  source layers  damping  held-out error")
    for x in layers:
        sources = ",".join(map(str, x["source_layers"]))
        typer.echo(f"{x['layer']:5}  {sources:13}  {x['damping']:7.0e}  {x['held_out_error']:.4f}")


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Read positive numbers separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BadInput(f"{option} is {text!r}; give positive numbers separated by commas, like 192,512")
    return tuple(map(int, parts))


def fractions(text: str, option: str) -> tuple[float, ...]:
    """Read shares from 0 to 1 separated by commas."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= share <= 1 for share in found):
        raise BadInput(f"{option} is {text!r}; give shares from 0 to 1 separated by commas, like 0.05,0.1")
    return found


def two_names(text: str) -> tuple[str, str]:
    """Read two names separated by a comma."""
    source, _, target = (part.strip() for part in text.partition(","))
    if not source or not target or "," in target:
        raise BadInput(f"--shapes is {text!r}; give two names separated by a comma, like Qwen3-0.6B,Qwen3-1.7B")
    return source, target


def lengths(text: str) -> tuple[int, ...]:
    """Read positive numbers separated by commas, or a file's with one number a line."""
    if not Path(text).is_file():
        return numbers(text, "--context")
    try:
        lines = Path(text).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"can't read numbers from {text}; give a file with one number a line") from error
    wrong = next((line for line in lines if not line.isdecimal() or len(line) > 12), None if lines else "nothing")
    if wrong is not None:
        raise BadInput(f"{text} holds {wrong[:40]!r}; give a file with one number of tokens a line")
    return tuple(map(int, lines))


# --- errors ----------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """Ctrl-C, with what was kept and how to go on."""


@contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Turn Ctrl-C into one line that says what was kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped: {kept}") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; any error that is the input's fault is one line on stderr."""
    sys.exit(guarded(lambda: app(args=arguments, standalone_mode=False)))


def guarded(run: Callable[[], Any]) -> int:
    """Run and return the exit code."""
    try:
        code = run()
    except KVLingoError as error:
        return complain(str(error), BAD_INPUT)
    except Stopped as error:
        return complain(str(error), STOPPED)
    except KeyboardInterrupt:
        return complain("stopped", STOPPED)
    except Exception as error:
        return known_fault(error)
    return code if isinstance(code, int) else 0


def known_fault(error: Exception) -> int:
    """Return the exit code of an error from below that is not a bug of ours; raise any other.

    Typer brings its own copy of click or not, by version: its errors are told by what they can do.
    """
    if hasattr(error, "format_message"):
        if not error.format_message():  # no arguments at all: the help has been printed
            return BAD_INPUT
        advice = "" if "--help" in error.format_message() else "; see --help"
        return complain(f"{error.format_message().rstrip('.')}{advice}", BAD_INPUT)
    if type(error).__name__ == "Abort":
        return complain("stopped", STOPPED)
    if type(error).__name__ == "Exit":
        return int(getattr(error, "exit_code", 1))
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
    if full:
        return complain("no space left on the disk: free some and run the same command again", BAD_INPUT)
    if isinstance(error, PermissionError):
        return complain(f"can't write {error.filename}: {error.strerror}; choose another place", BAD_INPUT)
    raise error


def complain(message: str, code: int) -> int:
    """Print one line on stderr; return the code."""
    typer.echo(f"kvlingo: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    main()
