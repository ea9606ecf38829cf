"""What `kvlingo info` and `kvlingo demo` show: facts as short tables on the screen.

Knows rich and the plain values that `jobs` and `demo` return; computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_pair(facts: Mapping[str, Any], console: Console) -> None:
    """Print both models side by side, the maps' sizes, and where a hand-over pays."""
    source, target = facts["source"], facts["target"]
    table = empty("", source["name"], target["name"])
    rows = {
        "kind": lambda side: side["kind"],
        "weights": lambda side: f"{side['weights'] / 1e6:,.1f} M",
        "cache": lambda side: f"{side['kv_features_per_token']:,} features a token",
        "layers": lambda side: "\n".join(layer_lines(side["layers"])),
        "vocabulary": lambda side: f"{side['vocabulary']:,}",
    }
    for name, cell in rows.items():
        table.add_row(name, cell(source), cell(target))
    console.print(table)
    say(console, f"can be translated; tokenizers: {facts['tokenizers']}")
    sizes = empty("map", *(f"{name}, MB" for name in facts["num_bytes"]["linear"]))
    for kind, by_storage in facts["num_bytes"].items():
        sizes.add_row(kind, *(f"{size / 1e6:,.1f}" for size in by_storage.values()))
    console.print(sizes)
    auto = facts["map_auto"]
    residual = f", MLP residual of {auto['residual_width']} tried" if auto["residual_width"] else ""
    say(console, f"--map auto: {auto['kind']}{residual}")
    costs = empty("context, tokens", "hand-over, GFLOPs", "re-prefill, GFLOPs")
    for tokens, gflops in facts["gflops"].items():
        costs.add_row(tokens, f"{gflops['handoff']:,.1f}", f"{gflops['reprefill']:,.1f}")
    console.print(costs)
    tokens = facts["break_even_tokens"]
    pays = (
        "a hand-over never costs less" if tokens is None else f"a hand-over costs less from about {tokens:,} tokens on"
    )
    say(console, f"by arithmetic alone, {pays}; `kvlingo handoff` measures it")


def layer_lines(layers: list[dict[str, Any]]) -> Iterator[str]:
    """Return runs of equal layers as lines."""
    for shape, run in groupby(layers):
        window = "" if shape["window"] is None else f", window {shape['window']}"
        dims = (
            f"{shape['key_dim']}"
            if shape["key_dim"] == shape["value_dim"]
            else f"{shape['key_dim']}/{shape['value_dim']}"
        )
        yield f"{len(list(run))} × {shape['kv_heads']} heads of {dims}{window}"


def print_folder(facts: Mapping[str, Any], console: Console) -> None:
    """Print what a saved translator is, and how it was judged."""
    say(console, f"{facts['source']['name']} → {facts['target']['name']}, format {facts['format_version']}")
    weights, options = facts["weights"], facts["options"]
    say(
        console,
        f"{weights['num_bytes'] / 1e6:.1f} MB as {weights['dtype']}, made by kvlingo {facts['kvlingo_version']}",
    )
    for name in ("fit", "distill"):
        if name in options:
            shown = ", ".join(f"{k} {v}" for k, v in options[name].items())
            say(console, f"{name}: {shown}")
    say(console, f"controls beside it: {', '.join(facts['controls']) or 'none'}")
    report = facts["held_out"]
    if report is None:
        say(console, "not judged yet: kvlingo eval")
    elif "verdict" in report:
        kl = report["arms"]["translated"]["kl_nats"]["mean"]
        say(console, f"{report['verdict']} on {report['num_documents']} held-out documents, KL to native {kl:.4f} nats")
    else:
        shown = ", ".join(f"{k} {v}" for k, v in report.items() if not isinstance(v, dict))
        say(console, f"held out: {shown}; the whole comparison: kvlingo eval {facts['folder']}")


def empty(*headers: str) -> Table:
    """Return an empty table with these columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print one line as it is."""
    console.print(escape(line), style=style, highlight=False, soft_wrap=True)


# --- the demo --------------------------------------------------------------------------------------------------------


def print_conversation(turns: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print who said what, and from which cache."""
    for turn in turns:
        how = "read the text" if turn["plan_text"] is None else f"was handed the cache: {turn['plan_text']}"
        say(console, f"{turn['model']} {how}", style="dim")
        say(console, f"  asked: {turn['question'].splitlines()[-1]}")
        say(console, f"  says:  {' '.join(turn['answer'].split())}", style="bold")


def print_times(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the time to the first token by a hand-over and by a re-prefill."""
    table = empty("time to first token", "tokens", "hand-over, ms", "re-prefill, ms", "ratio")
    for row in rows:
        times = f"{row['handoff_ms']:,.0f}", f"{row['reprefill_ms']:,.0f}", f"{row['ratio']:.1f} ×"
        table.add_row(row["pair"], f"{row['tokens']:,}", *times)
    console.print(table)
