"""Commands that make maps and judge them: fit, compress, distill, eval, confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlingo.commands.console import FAILED, emit, stoppable, tell
from kvlingo.commands.options import (
    AsJson,
    BudgetMb,
    Control,
    Device,
    Dtype,
    Folder,
    Map,
    Model,
    NativeLayers,
    Overwrite,
    Seed,
    Sink,
    Source,
    Storage,
    Tail,
    Target,
    Texts,
    Weighing,
    fractions,
    numbers,
)
from kvlingo.errors import BadInput


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
    shared_weight: Annotated[
        float,
        typer.Option(
            min=0,
            help="How much more an error counts that neighbours share, in layers without a window; 8 helps maps "
            "that are not distilled.",
        ),
    ] = 0.0,
    dtype: Dtype = None,
    device: Device = None,
    store: Annotated[Storage, typer.Option(help="How to store the weights.")] = Storage.float32,
    budget_mb: BudgetMb = None,
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
        "shared_weight": shared_weight,
        "seed": seed,
        **({} if map_kind is Map.auto else {"map_kind": map_kind.value}),
        **({} if damping is None else {"dampings": (damping,)}),
        **({} if key_norm is None else {"key_norm": key_norm}),
    }
    with stoppable(f"the statistics so far are kept in {out / 'work'}; the same command goes on from there"):
        from kvlingo import jobs
        from kvlingo.processes import joined

        with joined() as processes:
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
                budget_bytes=None if budget_mb is None else round(1e6 * budget_mb),
                overwrite=overwrite,
                say=typer.echo,
                tell=tell,
                processes=processes,
            )
    if not processes.is_first:
        return
    if verbose:
        print_layers(result["layers"])
    emit(result, as_json)


def refuse_unused(given: Mapping[str, object]) -> None:
    """Refuse options that would do nothing where, without a bound, only the numbers are stored in fewer bytes."""
    unused = [name for name, value in given.items() if value]
    if unused:
        raise BadInput(
            f"{', '.join(unused)}: of use only where maps lose rank; give --budget-mb, --flops, --rank or --text-rank too, or "
            "leave it out"
        )


def compress(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="Folder to save the smaller translator to.", show_default=False)],
    budget_mb: BudgetMb = None,
    flops: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of the maps' products that may be left.", show_default=False),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="The same rank for all layers.", show_default=False)] = None,
    text_rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Features that a token's embedding is reduced to; 0: none. Default: as the budget says.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="With --flops: tokens of a conversation. Default: 2048.", show_default=False),
    ] = None,
    weigh: Annotated[
        Weighing | None,
        typer.Option(
            help="What an error costs: what the target minds, by reading text; or all outputs alike, unread. Default: "
            "sensitivity.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[Storage, typer.Option(help="How to store the weights.")] = Storage.bfloat16,
    source: Source = None,
    target: Target = None,
    text: Texts = None,
    dtype: Dtype = None,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a translator smaller, by low rank or by how it is stored. Its quality must be measured anew."""
    with stoppable("nothing was written"):
        from kvlingo import compacting, jobs
        from kvlingo.compression import CompressOptions

        options = CompressOptions(
            budget_bytes=None if budget_mb is None else round(1e6 * budget_mb),
            flops_share=flops,
            rank=rank,
            text_rank=text_rank,
            storage=store.value,
            **({} if context is None else {"tokens": context}),
        )
        if options.is_unbounded:
            refuse_unused({"--context": context, "--weigh": weigh, "--text": text})
        result = compacting.compress_folder(
            folder,
            out,
            options,
            weigh=(weigh or Weighing.sensitivity).value,
            source_name=source,
            target_name=target,
            texts=text or [],
            where=jobs.Where(device, dtype),
            overwrite=overwrite,
            say=typer.echo,
            tell=tell,
        )
    emit(result, as_json)


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
    batch: Annotated[int, typer.Option(min=1, help="Texts in a step.")] = 8,
    tails: Annotated[
        int,
        typer.Option(min=1, help="Hand-overs made of each text, which differ in their tails and share what is frozen."),
    ] = 1,
    context: Annotated[
        str, typer.Option(help="Context lengths to draw from, in target tokens.")
    ] = "64,128,192,256,384,512",
    continuation: Annotated[int, typer.Option(min=1, help="Tokens after each hand-over.")] = 96,
    chat_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of hand-overs rendered in chat templates.")
    ] = 0.15,
    keep_predictions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep the target's own likeliest tokens, so many a position, for distilling again.",
            show_default=False,
        ),
    ] = None,
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
        "tails_each": tails,
        "kept_predictions": keep_predictions,
        "context_tokens": tuple(contexts),
        "judged_context": (contexts[(len(contexts) - 1) // 2], contexts[-1]),
        "judged_examples": judged,
        "continuation_tokens": continuation,
        "chat_share": chat_share,
        "seed": seed,
    }
    with stoppable(f"{folder} is unchanged, a checkpoint is in {folder / 'work'}; the same command goes on from there"):
        from kvlingo import jobs
        from kvlingo.processes import joined

        with joined() as processes:
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
                processes=processes,
            )
    if processes.is_first:
        emit(result, as_json)


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


def print_layers(layers: Sequence[dict[str, Any]]) -> None:
    """Print what fitting chose for each target layer; errors are shares of variance, for debugging only."""
    typer.echo("layer  source layers  damping  held-out error")
    for x in layers:
        sources = ",".join(map(str, x["source_layers"]))
        typer.echo(f"{x['layer']:5}  {sources:13}  {x['damping']:7.0e}  {x['held_out_error']:.4f}")
