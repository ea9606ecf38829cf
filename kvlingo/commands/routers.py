"""Commands of routers: route fit, route eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlingo.commands.console import FAILED, emit, stoppable
from kvlingo.commands.options import (
    AsJson,
    Seed,
)


def route_fit(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA.jsonl",
            help='Rows with "prompt" or "messages", and which model is to answer: "label": "small"|"big"; or whose answer was '
            'liked better, "preferred": "small"|"big"|"tie"; or how good both were, "small": {"quality": 0 to 1} and "big" '
            "likewise, as `kvlingo route eval` takes them.",
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
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="How much worse than the big model's answer a small one's is still good enough, by quality.",
        ),
    ] = 0.0,
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the router that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit the router `learned`; print its cost and quality on rows left out. Exit code 3 where it beats no lots."""
    with stoppable("nothing was written"):
        from kvlingo.serve.routing import learning

        report = learning.fit_router(
            data, out, big_share=big_share, tolerance=tolerance, seed=seed, overwrite=overwrite
        )
    for line in learning.lines(report):
        typer.echo(line)
    emit(report, as_json)
    if report["verdict"] != "PASS":
        raise typer.Exit(FAILED)


def route_eval(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="RECORDED.jsonl",
            help='Rows with "prompt" or "messages", and for "small" and "big" {"quality": 0 to 1, "cost", "ms"}; '
            '"mean_logprob" of small for the cascade, and its "answer" and "cut" (by its limit) for rules that read them; '
            '"token" like small, with "share_big", for the router token; '
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
