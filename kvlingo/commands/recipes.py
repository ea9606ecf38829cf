"""Commands that run benchmarks and whole recipes: lm-eval, recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlingo.commands.console import emit, stoppable, tell
from kvlingo.commands.options import (
    AsJson,
    Device,
    Dtype,
    Folder,
    NativeLayers,
    Seed,
    Sink,
    Source,
    Tail,
    Target,
    numbers,
)


def lm_eval(
    folder: Folder,
    tasks: Annotated[
        str, typer.Option(help="lm-eval's tasks, groups or tags, separated by commas.", show_default=False)
    ],
    arms: Annotated[
        str,
        typer.Option(help="Who answers: native, translated, ridge, token-only, no-text, source, no-context."),
    ] = "native,translated,token-only,source,no-context",
    include: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of further tasks (YAML).", show_default=False)
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question. Default: the task's own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task. Default: all.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Contexts read, and continuations scored, side by side.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Render contexts as chats, for each model in its own template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chats.", show_default=False)] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a context with its answer. Default: what both models read.")
    ] = None,
    ruler_lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths", help="Tokens of contexts that a task makes itself, like RULER's.", show_default=False
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record there, as JSON.")] = None,
    source: Source = None,
    target: Target = None,
    sink: Sink = 1,
    tail: Tail = 1,
    native_layers: NativeLayers = 0,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Run tasks of lm-evaluation-harness on every arm: contexts go through source, translator and target."""
    with stoppable("nothing was written"):
        from kvlingo import harness
        from kvlingo.files import write_file
        from kvlingo.harness_arms import Dial
        from kvlingo.jobs import Where

        record = harness.run_harness(
            folder,
            harness.HarnessOptions(
                tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
                arms=tuple(name.strip() for name in arms.split(",")),
                include=include,
                shots=shots,
                limit=limit,
                batch=batch,
                chat=chat,
                system=system,
                max_length=max_length,
                lengths=() if ruler_lengths is None else numbers(ruler_lengths, "--lengths"),
                dial=Dial(sink, tail, native_layers),
                seed=seed,
            ),
            source_name=source,
            target_name=target,
            where=Where(device, dtype),
            tell=tell,
        )
        if out is not None:
            write_file(out, (json.dumps(record, allow_nan=False) + "\n").encode())
    for line in harness.lines(record):
        typer.echo(line)
    emit(record, as_json)


def recipe(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="A recipe, like those in recipes/.", show_default=False)
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Rehearse every step on tiny random models of the same families.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fit, distil, evaluate and benchmark a pair as a file says; steps whose results are there are kept."""
    with stoppable("finished steps are kept; the same command goes on from there"):
        from kvlingo import recipes

        done = recipes.run_recipe(file, dry_run=dry_run, say=typer.echo, tell=tell)
    for line in recipes.lines(done):
        typer.echo(line)
    emit(done, as_json)
