"""Peak memory of `fit` for little and for much text: it must not grow with the tokens.

    python -m bench.memory [--tokens 20000 200000] [--out results/memory.json]

Each fit runs in a process of its own (SmolLM2-135M-Instruct → Gemma-3-270M, one source layer a target layer), which reports its
own peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.corpora import held_out_and_training
from kvlingo.assets import fetch_demo_models
from kvlingo.environment import environment_card
from kvlingo.fitting import fit
from kvlingo.models import default_cache_dir, load_model
from kvlingo.shapes import FitOptions


def main() -> None:
    """Measure every token count, or with --one just that, in this process."""
    arguments = parse()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    runs = [in_own_process(arguments, tokens) for tokens in arguments.tokens]
    peaks = [run["peak_bytes"] for run in runs]
    record = {"runs": runs, "largest_over_smallest": max(peaks) / min(peaks), "environment": environment_card()}
    line = json.dumps(record)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--one", type=int)
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--gemma", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def in_own_process(arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Run one fit in a fresh process."""
    command = [sys.executable, "-m", "bench.memory", "--one", str(tokens), "--cache", str(arguments.cache)]
    for name in ("smollm2", "gemma"):
        if getattr(arguments, name):
            command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit once; return the tokens read and this process's peak resident memory."""
    paths = (arguments.smollm2, arguments.gemma)
    if not all(paths):
        fetched = fetch_demo_models(arguments.cache / "demo")
        paths = (fetched["smollm2-135m-instruct"], fetched["gemma-3-270m"])
    dtype = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
    source, target = (load_model(path, dtype=dtype) for path in paths)
    documents = held_out_and_training(arguments.cache / "corpora").training
    fitted = fit(source, target, documents, FitOptions(reach=0, shift=0, tokens=arguments.one))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tokens": fitted.stats.tokens, "peak_bytes": peak, "dtype": dtype}


if __name__ == "__main__":
    main()
