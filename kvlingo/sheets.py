"""What commands show: a report, facts and times as short tables on the screen.

Knows rich, the report and the plain values that `facts` and `demo` return; computes nothing.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlingo.compacting import told_made
from kvlingo.metrics import POSITION_BANDS, Estimate
from kvlingo.report import CONTROLS, Report, figure, number, with_interval

COLUMNS = (
    "KL to native,\nnats",
    "worse than\ntranslated by",
    "\ntop-1",
    "NLL,\nnats",
    "bits/\nbyte",
    "share kept",
)
WIDE = 104
WIDTH_OF_A_FILE = 200
MOST_LENGTHS = 12


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
    say(console, f"shapes that can be translated; tokenizers: {facts['tokenizers']}")
    say(console, f"checked once weights are loaded, by `fit` and all that follow it: {facts['checked_at_load']}")
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


def print_traffic(plan: Mapping[str, Any], console: Console) -> None:
    """Print what hand-overs are worth, and everything that the estimate rests on."""
    say(console, f"{plan['source']} → {plan['target']}, by arithmetic alone")
    lengths = empty("context, tokens", "re-prefill, ms", "hand-over, ms", "taken")
    shown = plan["contexts"]
    for row in shown if len(shown) <= MOST_LENGTHS else shown[:: -(-len(shown) // MOST_LENGTHS)]:
        taken = "hand-over" if row["taken"] == "handoff" else "re-prefill"
        lengths.add_row(f"{row['tokens']:,}", f"{row['reprefill_ms']:,.1f}", f"{row['handoff_ms']:,.1f}", taken)
    console.print(lengths)
    users, hours, cost = (
        plan[key] for key in ("users_per_accelerator", "accelerator_hours_per_million_turns", "cost_per_million_turns")
    )
    table = empty("", "by re-prefill", "by hand-over")
    rows = {
        "a switch, ms": plan["switch_ms"],
        "a turn, answer included, ms": plan["turn_ms"],
        "users an accelerator": users,
        "accelerator hours, million turns": hours,
        **({"cost, million turns": cost} if cost else {}),
    }
    for name, row in rows.items():
        table.add_row(name, f"{row['reprefill']:,.1f}", f"{row['handoff']:,.1f}")
    console.print(table)
    say(
        console,
        f"prefill saved: {plan['prefill_saved_share']:.1%}; users gained for each accelerator: {users['gained_share']:.1%}",
    )
    for line in plan["assumptions"]:
        say(console, f"assumed: {line}")


def print_frontier(record: Mapping[str, Any], console: Console) -> None:
    """Print what nothing is nearer to native for less, beside the controls and the quantised caches, for each length."""
    pair = record["pair"]
    for length in record["contexts"]:
        say(
            console,
            f"{pair['source']} → {pair['target']}, {length['context_tokens']:,} tokens, {length['num_documents']} held-out texts",
        )
        table = empty("", "share of a\nre-prefill", "KL to native,\nnats", "\ntop-1", "\nshare kept")
        best = sorted((p for p in length["points"] if p["on_frontier"]), key=lambda row: row["share_of_reprefill"])
        quantised = [row for row in length["quantised"] if row["keys_by"] == "token"]
        for row in (*length["controls"], *best, *quantised, {"name": "re-prefill", **length["reprefill"]}):
            share = row.get("share_of_reprefill")
            table.add_row(
                row["name"].replace("_", " "),
                "–" if share is None else f"{share:.1%}",
                with_interval(row["kl_nats"]),
                number(row["top1_agreement"]),
                number(row["share_kept"]),
            )
        console.print(table)
        for row in length["selection"]:
            if row["is_signal"]:
                gain = with_interval(row["nearer_than_random_nats"], sign="+")
                say(
                    console,
                    f"{row['share']:.0%} by {row['by']}, blocks of {row['block']}: nearer than random ones by {gain} nats",
                )


def print_benchmark(record: Mapping[str, Any], console: Console) -> None:
    """Print times to first token by arm and length, and what they rest on. A time after ~ was predicted, not measured."""
    maps, pair, card = record["maps"], record["pair"], record["environment"]
    rank = f", rank {maps['rank']}" if maps["rank"] else ""
    say(console, f"{pair['source']} → {pair['target']}, {maps['kind']} maps{rank}, {maps['bytes'] / 1e6:,.1f} MB")
    if record["note"]:
        say(console, record["note"])
    where = card["accelerator"] if record["device"] == "cuda" else f"{card['cpu']}, {card['threads']} threads"
    runtime = f"mlx {card['mlx']}" if record.get("engine") == "mlx" else f"torch {card['torch']}"
    say(console, f"{where}, {record['dtype']}, attention {record['attention']}, {runtime}")
    names = list(record["lengths"][0]["arms"])
    times = empty("tokens", *(f"{name.replace('_', ' ')}, ms" for name in names))
    ratios = empty("tokens", "warm", "cold", "ahead", "beside", "apply, share of the machine's GEMM rate")
    for row in record["lengths"]:
        times.add_row(f"{row['tokens']:,}", *(time_cell(row["arms"][name]) for name in names))
        again = row["speedup_from"] or "–"
        ratios.add_row(
            f"{row['tokens']:,}",
            *(times_cell(row[name]) for name in ("speedup_warm", "speedup_cold", "speedup_ahead")),
            again if again == "predicted re-prefill" else "measured re-prefill" if again == "measured" else again,
            share_cell(row["apply"]),
        )
    console.print(times)
    say(console, f"medians of {record['repeats']} interleaved runs (90 % of them below); ~ predicted, not measured")
    console.print(ratios)
    found, expected = record["crossing_tokens"], (record["rates"] or {}).get("break_even_tokens")
    if found is not None:
        say(console, f"translating is faster than a re-prefill from about {found:,.0f} tokens on")
    if expected is not None:
        say(console, f"by the calibrated cost model from {expected:,} tokens on")


def time_cell(arm: Mapping[str, Any]) -> str:
    """Return a measured time with its 90th percentile and what was predicted, or a prediction marked as one."""
    if not arm["measured"]:
        return f"~{arm['median_ms']:,.1f}"
    return f"{arm['median_ms']:,.1f} ({arm['p90_ms']:,.1f})"


def share_cell(apply: Mapping[str, Any] | None) -> str:
    """Return the apply's share of the machine's own rate; – where it was not measured."""
    return "–" if apply is None else f"{apply['share_of_gemm_rate']:.0%}"


def times_cell(ratio: float | None) -> str:
    """Return how many times faster."""
    return "–" if ratio is None else f"{ratio:.1f}×"


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
    if "compress" in options:
        say(console, f"compressed: {told_made(options['compress'])}")
    say(console, f"controls beside it: {', '.join(facts['controls']) or 'none'}")
    report = facts["held_out"]
    if report is None:
        say(console, "not judged yet: kvlingo eval")
    elif "verdict" in report:
        kl = report["arms"]["translated"]["kl_nats"]["mean"]
        say(console, f"{report['verdict']} on {report['num_documents']} held-out documents, KL to native {kl:.4f} nats")
    else:
        plain = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in report.items() if not isinstance(v, dict)}
        shown = ", ".join(f"{k} {v}" for k, v in plain.items())
        say(console, f"held out: {shown}; the whole comparison: kvlingo eval {facts['folder']}")


def to_stdout() -> Console:
    """Return where results go; a file or a pipe, which have no width, get lines as long as the tables need."""
    is_narrow = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return Console() if is_narrow else Console(width=WIDTH_OF_A_FILE)


def empty(*headers: str, padding: int = 1) -> Table:
    """Return an empty table with these columns, with so many spaces around each cell."""
    table = Table(box=SIMPLE_HEAD, padding=(0, padding), pad_edge=False, show_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print one line as it is."""
    console.print(escape(line), style=style, highlight=False, soft_wrap=True)


# --- a report --------------------------------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    """Print the arms table, the verdict in one line, and what else was measured."""
    say(console, title(report), style="italic")
    console.print(arms_table(report, wide=console.width >= WIDE))
    say(console, verdict_line(report), style="green" if report.passed else "bold red")
    console.print(position_table(report))
    for line in (*beside_lines(report), *report.notes):
        say(console, f"· {line}", style="dim")


def arms_table(report: Report, *, wide: bool) -> Table:
    """Return the table of all arms; on a narrow console every interval goes below its mean."""
    table = empty("cache the\ntarget reads", *COLUMNS, padding=0)
    for arm in report.arms:
        table.add_row(arm, *arm_cells(report, arm, wide))
    return table


def arm_cells(report: Report, arm: str, wide: bool) -> Iterable[str]:
    """Return the figures of one arm, in the order of `COLUMNS`."""
    metrics = report.arms[arm]
    yield with_interval(metrics["kl_nats"], wide=wide)
    difference = report.paired.get(arm, {}).get("kl_difference_nats")
    yield with_interval(difference, wide=wide, sign="+")
    for name in ("top1_agreement", "nll_nats", "bits_per_byte"):
        yield number(metrics[name])
    yield with_interval(metrics["share_kept"], wide=wide)


def position_table(report: Report) -> Table:
    """Return KL by continuation position."""
    table = empty("KL by position", *POSITION_BANDS, padding=0)
    for arm, bands in report.kl_by_position.items():
        if bands is not None:
            table.add_row(arm, *(with_interval(bands[name]) for name in POSITION_BANDS))
    return table


def title(report: Report) -> str:
    """Name the pair and the size of the evidence."""
    sides = " → ".join(str(report.pair[side]) for side in ("source", "target") if side in report.pair)
    size = f"{report.num_documents} documents, {report.num_clusters} clusters, means [95 % intervals]"
    return f"{sides}: {size}" if sides else size


def verdict_line(report: Report) -> str:
    """Return the verdict in one line, with its reasons."""
    if not report.passed:
        return f"FAIL: {'; '.join(report.reasons)}"
    low = min(low_end(report.paired[arm]["kl_difference_nats"]) for arm in CONTROLS)
    return (
        f"PASS: translated is closer to native than {', '.join(CONTROLS[:-1])} and {CONTROLS[-1]}"
        f" (every paired interval lies above {figure(low)} nats)"
    )


def low_end(difference: Estimate | None) -> float:
    """Return the lower end of an interval, NaN where there is none."""
    return math.nan if difference is None or difference["low"] is None else difference["low"]


def beside_lines(report: Report) -> Iterable[str]:
    """Return what was measured beside the arms."""
    if report.attention_output_cosine is not None:
        cosine = report.attention_output_cosine
        yield (
            f"attention-output cosine {number(cosine.get('mean'))}, worst layer"
            f" {cosine.get('worst_layer_index')}: {number(cosine.get('worst_layer'))}"
        )
    if report.passkey is not None:
        recalls = (f"{arm} {number(recall)}" for arm, recall in report.passkey.items())
        yield f"passkey recall: {', '.join(recalls)}"
    if report.self_check is not None:
        yield f"self-check, KL of native to itself: {report.self_check:.1e} nats"


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
