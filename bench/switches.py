"""Many switches: one conversation that goes back and forth between two models, with the provenance rule and without.

    python -m bench.switches --there DIR --back DIR --a MODEL --b MODEL --cache DIR --out results/switches.json

`--there` translates from A to B, `--back` from B to A. Texts are the held-out ones of the quality tables. Writes the curve as
JSON, also on the last line of stdout, and a picture beside it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.corpora import held_out_and_training
from bench.quality import tell
from kvlingo.drift import RULES, DriftOptions, Link, drift
from kvlingo.files import write_file
from kvlingo.language_model import LanguageModel
from kvlingo.models import default_cache_dir, load_model
from kvlingo.plots import draw_drift
from kvlingo.store import load_translator


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--there", type=Path, required=True)
    parser.add_argument("--back", type=Path, required=True)
    parser.add_argument("--a", required=True, help="the model that has the first word: hub id, folder or .gguf")
    parser.add_argument("--b", required=True)
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--switches", type=int, default=DriftOptions.switches)
    parser.add_argument("--first", type=int, default=DriftOptions.first_tokens)
    parser.add_argument("--turn", type=int, default=DriftOptions.turn_tokens)
    parser.add_argument("--documents", type=int, default=DriftOptions.documents)
    parser.add_argument("--tail", type=int, default=DriftOptions.tail)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def links(arguments: argparse.Namespace) -> tuple[Link, Link]:
    """Load both models and both translators."""
    a, b = (load_model(name, dtype=arguments.dtype) for name in (arguments.a, arguments.b))
    return link(arguments.there, a, b), link(arguments.back, b, a)


def link(folder: Path, source: LanguageModel, target: LanguageModel) -> Link:
    """Load one direction."""
    translator, _ = load_translator(folder, source=source, target=target)
    return Link(source, target, translator.to(target.device))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, and write both files."""
    options = DriftOptions(
        switches=arguments.switches,
        first_tokens=arguments.first,
        turn_tokens=arguments.turn,
        documents=arguments.documents,
        tail=arguments.tail,
        rules=tuple(arguments.rules.split(",")),
    )
    documents = held_out_and_training(arguments.cache / "corpora").held_out
    record = drift(*links(arguments), documents, options=options, progress=tell)
    write_file(arguments.out, (json.dumps(record, allow_nan=False) + "\n").encode())
    draw_drift(record, arguments.out.with_suffix(".png"))
    return record


def main() -> None:
    """Measure and print."""
    print(json.dumps(measure(parse()), allow_nan=False))


if __name__ == "__main__":
    main()
