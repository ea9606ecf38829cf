"""The tables of times, memory and size, by record in results/."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from bench import records


def demo_times() -> str:
    """Return the demo's times to first token."""
    demo = records.load("demo") or records.load("demo-quick")
    if demo is None:
        return records.NOT_MEASURED
    lines = ["| direction | tokens | hand-over, ms | re-prefill, ms | ratio |", "|---|---|---|---|---|"]
    for row in demo["time_to_first_token"]:
        lines.append(
            f"| {row['pair']} | {row['tokens']} | {row['handoff_ms']:.0f} | {row['reprefill_ms']:.0f} | {row['ratio']:.1f}× |"
        )
    return "\n".join(lines) + "\n"


def memory() -> str:
    """Return the peak memory of `fit`."""
    record = records.load("memory")
    if record is None:
        return records.NOT_MEASURED
    lines = ["| tokens of text | peak memory of `fit` |", "|---|---|"]
    lines += [f"| {row['tokens']:,} | {row['peak_bytes'] / 2**20:,.0f} MiB |" for row in record["runs"]]
    return "\n".join(lines) + "\n"


def speed() -> str:
    """Return times to first token of every benchmark that was run, by pair, kind of map and length."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(records.RESULTS.glob("speed-*.json"))]
    if not runs:
        return records.NOT_MEASURED
    lines = [
        (
            "| pair, maps | tokens | re-prefill, ms | warm, ms | cold, ms | ahead, ms | decode step, ms "
            "| warm | cold | ahead | apply ÷ GEMM rate |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = ("reprefill", "translate_warm", "translate_cold", "translate_ahead", "decode_step")
    ratios = ("speedup_warm", "speedup_cold", "speedup_ahead")
    for record in runs:
        maps = record["maps"]
        rank = f", rank {maps['rank']}" if maps["rank"] else ""
        engine = ", MLX" if record.get("engine") == "mlx" else ""
        label = f"{records.pair_of(record)}, {maps['kind']}{rank}{engine}{dtypes_of(record)}"
        for row in record["lengths"]:
            cells = [speed_cell(row["arms"].get(name)) for name in names]
            cells += ["–" if row[name] is None else f"{row[name]:.1f}×" for name in ratios]
            lines.append(f"| {label} | {row['tokens']:,} | {' | '.join(cells)} | {share_cell(row['apply'])} |")
    cards = sorted({f"{r['dtype']} on {r['environment']['accelerator'] or r['environment']['cpu']}" for r in runs})
    note = (
        "Medians of interleaved runs; after ~ predicted, not measured. Public shapes have random weights and maps: timing needs "
        "no trained weights."
    )
    return "\n".join([*lines, "", f"{note} {'; '.join(cards)}."]) + "\n"


def dtypes_of(record: dict[str, Any]) -> str:
    """Say in which dtype the models are, and in which maps are multiplied where that differs."""
    products = record["maps"].get("products", record["dtype"])
    return f", {record['dtype']}" + (f", maps in {products}" if products != record["dtype"] else "")


def speed_cell(arm: dict[str, Any] | None) -> str:
    """Format one time; – for an arm that was left out."""
    return "–" if arm is None else f"{'' if arm['measured'] else '~'}{arm['median_ms']:,.0f}"


def share_cell(apply: dict[str, Any] | None) -> str:
    """Format a share of the machine's rate; – where it was not measured."""
    return "–" if apply is None else f"{apply['share_of_gemm_rate']:.0%}"


def compression() -> str:
    """Return what maps lose by becoming smaller."""
    record = records.load("compression")
    if record is None:
        return records.NOT_MEASURED
    lengths = record["lengths"]
    heads = [f"KL at {int(n):,} | above the whole maps' (paired)" for n in lengths]
    lines = [f"| maps | MB | {' | '.join(heads)} |", "|---|---|" + "---|---|" * len(lengths)]
    for name, told in record["variants"].items():
        cells = []
        for rows in lengths.values():
            row = rows[name]
            above = (
                ""
                if name == "whole"
                else f"{records.interval(row['above_whole_nats'], 4)} ({row['above_whole_share']:+.1%})"
            )
            cells += [records.interval(row["kl_nats"]), above]
        lines.append(f"| {name} | {told['bytes'] / 1e6:.1f} | {' | '.join(cells)} |")
    pair = f"{records.pair_of(record)}, {record['start']}"
    note = f"{pair}; tail 1, {record['documents']} held-out documents, the same for all."
    return "\n".join([*lines, "", f"{note} Weights that are stored narrower multiply in bfloat16."]) + "\n"


def capacity() -> str:
    """Return what hand-overs between machines need, by the arithmetic of cost."""
    record = records.load("capacity")
    if record is None:
        return "Not computed yet.\n"
    links = record["links_gbit_per_s"]
    lines = [
        "| pair | bytes a token on the wire | translating, MFLOPs a token | reading, MFLOPs a token "
        f"| the target reads at, TFLOP/s | slowest link that pays at {record['tokens']:,} tokens, Gbit/s | "
        + " | ".join(f"pays from, {link:g} Gbit/s" for link in links)
        + " |",
        "|---" * (6 + len(links)) + "|",
    ]
    for pair in record["pairs"]:
        cells = [f"{pair['source']} → {pair['target']}", f"{pair['wire_bytes_per_token']:,}"]
        cells += [f"{pair[name] / 1e6:,.0f}" for name in ("translate_flops_per_token", "reprefill_flops_per_token")]
        for reading in pair["reading"]:
            least, from_tokens = reading["least_gbit_per_s"], reading["pays_from_tokens"]
            told = ["never" if n is None else f"{n:,} tokens" for n in from_tokens]
            slowest = "none" if least is None else f"{least:.2g}" if least < 10 else f"{least:,.0f}"
            rate = f"{reading['tflops_per_s']:g}"
            lines.append(f"| {' | '.join([*cells, rate, slowest, *told])} |")
            cells = ["", "", "", ""]
    return "\n".join(lines) + "\n"


def fitting_time() -> str:
    """Return how long fitting and distilling take beside the models' own passes over the same tokens."""
    record = records.load("fitting")
    if record is None:
        return records.NOT_MEASURED
    fit, distill = record["fit"], record["distill"]
    lines = ["| what | beside | seconds | beside it | ratio (lowest … highest) | aim |", "|---|---|---|---|---|---|"]
    for cells, times, others, told in (
        (f"`fit` on {fit['tokens']:,} tokens | both models' bare passes", fit["fit_s"], fit["two_bare_passes_s"], fit),
        (
            f"a step of `distill`, {distill['hand_overs_a_step']} hand-overs | the target's own training step",
            distill["step_s"],
            distill["own_s"],
            distill,
        ),
    ):
        span = f"{told['ratio']:.2f} ({min(told['ratios']):.2f} … {max(told['ratios']):.2f})"
        lines.append(f"| {cells} | {median(times):.1f} | {median(others):.1f} | {span} | {told['aim']:g} |")
    pair = f"{records.pair_of(record)}, {record['dtype']}"
    note = f"{pair}; medians of {len(fit['fit_s'])} fits and {len(distill['step_s'])} steps, each beside the other in turn."
    return "\n".join([*lines, "", f"{note} {record['environment']['cores']} cores."]) + "\n"


def calibration() -> str:
    """Return what the calibrated cost model said beside what was measured."""
    record = records.load("calibration")
    if record is None:
        return records.NOT_MEASURED
    names = {"reprefill": "re-prefill", "translate_warm": "hand-over, warm", "decode_step": "one decode step"}
    lengths = [row["tokens"] for row in record["arms"]["reprefill"]["lengths"]]
    heads = " | ".join(f"{tokens:,} tokens: predicted / measured, ms" for tokens in lengths)
    lines = [f"| | {heads} | largest error |", "|---" * (len(lengths) + 2) + "|"]
    for name, label in names.items():
        arm = record["arms"][name]
        cells = [f"{r['predicted_ms']:,.0f} / {r['measured_ms']:,.0f} ({r['error']:+.0%})" for r in arm["lengths"]]
        lines.append(f"| {label} | {' | '.join(cells)} | {arm['largest_error']:.0%} |")
    pair = f"{records.pair_of(record)}, {record['dtype']}"
    note = f"{pair}; medians of {record['repeats']} interleaved runs. Aim: {record['aim']:.0%}."
    return "\n".join([*lines, "", f"{note} {record['environment']['cores']} cores."]) + "\n"
