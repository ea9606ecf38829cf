"""The measured tables of speed: time to first token by arm, length and kind of map, written to results/speed-*.json.

    python -m bench.speed list
    python -m bench.speed run NAME [NAME …] [--repeats 5] [--out results]
    python -m bench.speed run demo demo-bfloat16 --translator DIR --source FOLDER --target FOLDER

Each name is one call of `kvlingo bench` in a process of its own, so that no memory or warmth of one reaches the next. Run it on a
machine that does nothing else. `list` prints the calls.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

KVLINGO = [sys.executable, "-m", "kvlingo.cli"]
QWEN = ["--shapes", "Qwen3-0.6B,Qwen3-1.7B"]
LONG = ["--lengths", "64,512,2048,4096,8192", "--dtype", "bfloat16"]
FEW_ARMS = [
    "--arms",
    "reprefill,translate_warm,decode_step",
]  # what a kind of map is judged by; the rest is timed for `layer`
MEASURED = ["--lengths", "64,512,2048,8192", "--dtype", "bfloat16", *FEW_ARMS]
GPU = ["--lengths", "64,512,2048,4096,16384,32768", "--reprefill-up-to", "32768", "--dtype", "bfloat16"]
NAMES: dict[str, list[str]] = {
    # CPU, a pair of small public shapes: one layer, structured maps, the maps of the quality tables, these made low-rank.
    "qwen3-layer": [*QWEN, *LONG, "--map-kind", "layer"],
    "qwen3-low-rank": [*QWEN, *MEASURED, "--map-kind", "low-rank"],
    "qwen3-head-wise": [*QWEN, *MEASURED, "--map-kind", "head-wise"],
    "qwen3-full": [*QWEN, *MEASURED, "--map-kind", "full"],
    "qwen3-full-rank-256": [*QWEN, *MEASURED, "--map-kind", "full", "--rank", "256"],
    # Whether a hand-over's time grows as its tokens do.
    "qwen3-long": [
        *QWEN,
        *("--lengths", "4096,8192,12288", "--reprefill-up-to", "1", "--dtype", "bfloat16", "--map-kind", "layer"),
        *("--arms", "translate_warm,decode_step"),
    ],
    "experts": [
        "--shapes",
        "Qwen3-0.6B,MoE-0.8B-A0.2B",
        "--lengths",
        "64,512,2048",
        "--dtype",
        "bfloat16",
        "--map-kind",
        "layer",
    ],
    # With mlx-lm, on a Mac: the two lengths that are usually told of it.
    "mlx-qwen3": [*QWEN, "--engine", "mlx", "--lengths", "64,2048", "--map-kind", "layer"],
    "mlx-qwen3-8b": [
        "--shapes",
        "Qwen3-0.6B,Qwen3-8B",
        "--engine",
        "mlx",
        "--lengths",
        "64,2048",
        "--map-kind",
        "layer",
    ],
    # With a GPU.
    "gpu-qwen3-8b": ["--shapes", "Qwen3-0.6B,Qwen3-8B", *GPU, "--map-kind", "layer"],
    "gpu-qwen3-30b": ["--shapes", "Qwen3-0.6B,Qwen3-30B-A3B", *GPU, "--map-kind", "layer"],
}
DEMO, NARROW = "demo", "demo-bfloat16"
"""The demo's pair with its maps as they are, and with the same maps stored, and so multiplied, in bfloat16."""
DEMO_LENGTHS = ["--lengths", "64,512,2048,4096"]


def main() -> None:
    """List the calls, or make some of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run"))
    parser.add_argument("names", nargs="*", choices=[*NAMES, DEMO, NARROW, []])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--translator", type=Path, help="for demo: what `kvlingo fit` wrote")
    parser.add_argument("--source", help="for demo: the source's folder or .gguf file")
    parser.add_argument("--target", help="for demo: the target's folder or .gguf file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or [*NAMES, DEMO, NARROW]:
            words = [*call_of(name, arguments, Path(folder)), "--repeats", str(arguments.repeats)]
            if arguments.what == "list":
                print(f"{name}: kvlingo bench {shlex.join(words)}")
            else:
                measure(name, words, arguments.out)


def call_of(name: str, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Return the arguments of `kvlingo bench` for one name; in `folder` goes what is made for it."""
    if name in NAMES:
        return NAMES[name]
    given = [arguments.source, arguments.target, arguments.translator]
    if arguments.what == "run" and not all(given):
        sys.exit(f"{name} needs --source, --target and --translator: what `kvlingo demo` fetches and makes")
    if name == NARROW and arguments.what == "run":
        given[2] = folder / NARROW
        store = ["compress", str(arguments.translator), "--out", str(given[2]), "--store", "bfloat16"]
        subprocess.run([*KVLINGO, *store], check=True, stdout=sys.stderr)
    return [*(str(each or word) for each, word in zip(given, ("SOURCE", "TARGET", "DIR"), strict=True)), *DEMO_LENGTHS]


def measure(name: str, words: list[str], out: Path) -> None:
    """Run one call; write its record and its picture, and show its table."""
    out.mkdir(parents=True, exist_ok=True)
    command = [*KVLINGO, "bench", *words, "--json", "--picture", str(out / f"speed-{name}.png")]
    print(f"{name}: {shlex.join(command)}", file=sys.stderr)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    *table, line = done.stdout.splitlines()
    print("\n".join(table))
    json.loads(line)
    (out / f"speed-{name}.json").write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
