"""How well the calibrated cost model foretells re-prefill and hand-over, written to results/calibration.json.

    python -m bench.calibration --translator DIR --source FOLDER --target FOLDER [--out results/calibration.json]

The rates are measured first, as `kvlingo bench` does: reading from the target's first layers alone, translating
from hand-overs of 256 and 1,024 tokens. Then both ways and a decode step are timed, in turn. An error is what the model said,
as a share of the measured median, less 1; re-prefills, decode steps and the other lengths had no part in the rates.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvlingo.arms import Pair
from kvlingo.benchmark import BenchOptions, run_benchmark
from kvlingo.commands.options import numbers
from kvlingo.jobs import Where, gather, load_pair
from kvlingo.store import load_translator
from kvlingo.timing import CHARS_PER_TOKEN, joined

ARMS = ("reprefill", "translate_warm", "decode_step")
JUDGED = ("reprefill", "translate_warm")
AIM = 0.25


def main() -> None:
    """Calibrate, measure, compare; write the record."""
    arguments = parse()
    lengths = numbers(arguments.lengths, "--lengths")
    source, target = load_pair(arguments.source, arguments.target, Where("cpu", arguments.dtype))
    text = joined(gather([]), max(lengths) * CHARS_PER_TOKEN)
    translator, _ = load_translator(arguments.translator, source=source, target=target)
    options = BenchOptions(lengths=lengths, repeats=arguments.repeats, arms=ARMS)
    whole = run_benchmark(Pair(source, target, translator, lambda: translator, text), options, tell)
    record = {"benchmark": "what the calibrated cost model says beside what was measured", **compared(whole)}
    line = json.dumps(record | {"environment": whole["environment"]})
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--translator", type=Path, required=True, help="what `kvlingo fit` wrote")
    parser.add_argument("--source", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def compared(whole: dict[str, Any]) -> dict[str, Any]:
    """Return each arm's measured and predicted times by length, and its largest error."""
    arms = {}
    for name in ARMS:
        rows = [
            {
                "tokens": row["tokens"],
                "measured_ms": row["arms"][name]["median_ms"],
                "p90_ms": row["arms"][name]["p90_ms"],
                "predicted_ms": row["arms"][name]["predicted"]["ms"],
                "error": row["arms"][name]["predicted_error"],
            }
            for row in whole["lengths"]
        ]
        arms[name] = {"lengths": rows, "largest_error": max(abs(row["error"]) for row in rows)}
    return {
        **{name: whole[name] for name in ("pair", "dtype", "repeats", "rates")},
        "arms": arms,
        "aim": AIM,
        "is_within_aim": all(arms[name]["largest_error"] <= AIM for name in JUDGED),
    }


def tell(line: str) -> None:
    """Tell a line on stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
