"""Options that several commands share, and how lists in them are read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvlingo.errors import BadInput


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


class Weighing(StrEnum):
    """What an error in a map's outputs costs."""

    sensitivity = "sensitivity"
    deviation = "deviation"


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
Mapper = Annotated[
    MapperFormat, typer.Option("--format", help="Whose format: vllm-project/semantic-router's.", show_default=False)
]
BudgetMb = Annotated[
    float | None,
    typer.Option(
        "--budget-mb", min=0, help="MB that the stored weights may take; ranks are chosen within.", show_default=False
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


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
