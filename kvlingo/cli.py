"""The command line: which commands there are.

What a command takes is in `commands`; everything heavy is imported inside a command, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from kvlingo import __version__
from kvlingo.commands import exchanging, learning, recipes, routers, serving, timing, using
from kvlingo.commands.console import guarded

app = typer.Typer(
    name="kvlingo",
    help="Hand a conversation from one language model to another by translating its key-value cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
route = typer.Typer(no_args_is_help=True, help="Fit and compare routers: who answers a request for the model auto.")


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


COMMANDS: dict[str, Callable[..., None]] = {
    "fit": learning.fit,
    "compress": learning.compress,
    "distill": learning.distill,
    "eval": learning.evaluate,
    "confidence": learning.confidence,
    "lm-eval": recipes.lm_eval,
    "recipe": recipes.recipe,
    "handoff": using.handoff,
    "info": using.info,
    "plan": using.plan,
    "export": exchanging.export_maps,
    "import": exchanging.import_maps,
    "extract": exchanging.extract,
    "demo": using.demo,
    "serve": serving.serve,
    "calibrate": serving.calibrate,
    "bench": timing.bench,
    "vllm-check": serving.vllm_check,
}
"""In the order in which `kvlingo --help` lists them."""

for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
route.command("fit")(routers.route_fit)
route.command("eval")(routers.route_eval)
app.add_typer(route, name="route")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; any error that is the input's fault is one line on stderr."""
    sys.exit(guarded(lambda: app(args=arguments, standalone_mode=False)))


if __name__ == "__main__":
    main()
