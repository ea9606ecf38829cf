"""The command that times a hand-over: bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlingo.commands.console import emit, stoppable, tell
from kvlingo.commands.options import (
    MODEL,
    AsJson,
    BenchEngine,
    Device,
    Dtype,
    Seed,
    ShapeMap,
    Sink,
    Tail,
    Texts,
    numbers,
    two_names,
)
from kvlingo.errors import BadInput


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
