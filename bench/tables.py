"""Write the tables of README.md from results/*.json; with --check, fail if they differ from what is written.

    python -m bench.tables [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is that of a function below.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {"smollm2-gemma": "SmolLM2 → Gemma", "gemma-smollm2": "Gemma → SmolLM2"}
ARMS = {
    "native": "its own cache (re-prefill)",
    "translated": "**translated, distilled**",
    "ridge": "translated, ridge only",
    "no_text": "ridge, no text features",
    "token_only_distilled": "token only, distilled alike",
    "token_only": "token only, ridge (no source cache)",
    "tail_only": "sinks and tail only",
    "no_context": "no context",
    "wrong_document": "another document's cache",
    "random_map": "random map",
    "source_alone": "the source model alone",
}


def load(name: str) -> dict[str, Any] | None:
    """Read one result; None where it was not measured."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def interval(metric: dict[str, Any] | None, digits: int = 3) -> str:
    """Format a mean with its interval."""
    if metric is None or metric["mean"] is None:
        return "–"
    if metric["low"] is None or metric["low"] == metric["high"]:
        return f"{metric['mean']:.{digits}f}"
    return f"{metric['mean']:.{digits}f} [{metric['low']:.{digits}f}, {metric['high']:.{digits}f}]"


def arms_table(name: str) -> str:
    """Return one evaluation as a table."""
    report = load(name)
    if report is None:
        return "Not measured yet.\n"
    passkey = report.get("passkey") or {}
    lines = [
        "| cache that the target reads | KL to native, nats | top-1 | share of the context's gain | bits per byte | passkey |",
        "|---|---|---|---|---|---|",
    ]
    for arm, label in ARMS.items():
        if arm not in report["arms"]:
            continue
        values = report["arms"][arm]
        cells = [interval(values["kl_nats"]), interval(values["top1_agreement"])]
        cells += [interval(values["share_kept"], 2), interval(values["bits_per_byte"], 2)]
        cells.append(f"{passkey[arm]:.2f}" if arm in passkey else "–")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    cosine = report.get("attention_output_cosine") or {}
    beside = (
        f"Attention-output cosine {cosine['mean']:.3f}, worst layer {cosine['worst_layer']:.3f}. " if cosine else ""
    )
    lines.append("")
    lines.append(
        f"{report['num_documents']} held-out documents of {len(report['by_kind'])} kinds, {report['num_clusters']} books "
        f"or sites; 95 % bootstrap intervals over these. {beside}Verdict {report['verdict']}."
    )
    return "\n".join(lines) + "\n"


def summary() -> str:
    """Return KL over directions, contexts and tails."""
    lines = [
        "| direction | context | tail | ridge | distilled | token only | distilled − ridge (paired) | share kept, distilled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for direction, label in NAMES.items():
        for context, tail in ((192, 1), (192, 16), (1024, 1)):
            report = load(f"{direction}-{context}-tail{tail}")
            if report is None:
                continue
            arms, paired = report["arms"], report["paired"]
            difference = paired.get("ridge", {}).get("kl_difference_nats")
            gain = (
                f"−{difference['mean']:.3f} [−{difference['high']:.3f}, −{difference['low']:.3f}]"
                if difference
                else "–"
            )
            ridge = interval(arms["ridge"]["kl_nats"]) if "ridge" in arms else "–"
            lines.append(
                f"| {label} | {context} | {tail} | {ridge} | {interval(arms['translated']['kl_nats'])} | "
                f"{interval(arms['token_only']['kl_nats'])} | {gain} | {interval(arms['translated']['share_kept'], 2)} |"
            )
    return "\n".join(lines) + "\n"


def quality() -> str:
    """Return all arms, SmolLM2 → Gemma at 192 tokens."""
    return arms_table("smollm2-gemma-192-tail1")


def long_context() -> str:
    """Return all arms, SmolLM2 → Gemma at 1,024 tokens."""
    return arms_table("smollm2-gemma-1024-tail1")


def reverse() -> str:
    """Return all arms, Gemma → SmolLM2 at 192 tokens."""
    return arms_table("gemma-smollm2-192-tail1")


def demo_times() -> str:
    """Return the demo's times to first token."""
    demo = load("demo") or load("demo-quick")
    if demo is None:
        return "Not measured yet.\n"
    lines = ["| direction | tokens | hand-over, ms | re-prefill, ms | ratio |", "|---|---|---|---|---|"]
    for row in demo["time_to_first_token"]:
        lines.append(
            f"| {row['pair']} | {row['tokens']} | {row['handoff_ms']:.0f} | {row['reprefill_ms']:.0f} | {row['ratio']:.1f}× |"
        )
    return "\n".join(lines) + "\n"


def memory() -> str:
    """Return the peak memory of `fit`."""
    record = load("memory")
    if record is None:
        return "Not measured yet.\n"
    lines = ["| tokens of text | peak memory of `fit` |", "|---|---|"]
    lines += [f"| {row['tokens']:,} | {row['peak_bytes'] / 2**20:,.0f} MiB |" for row in record["runs"]]
    return "\n".join(lines) + "\n"


def gateway() -> str:
    """Return the times to first token of a switch through the HTTP API."""
    record = load("gateway")
    if record is None:
        return "Not measured yet.\n"
    times, repeats = record["first_token_ms"], sum(turn["mode"] == "translate" for turn in record["turns"])
    tokens = next(turn["translated_tokens"] for turn in record["turns"] if turn["mode"] == "translate")
    lines = [
        "| the large model answers after | first token, ms | shorter than a re-prefill by (lowest … highest) |",
        "|---|---|---|",
    ]
    names = {"reprefill": "a re-prefill", "translate": "a translation", "ahead": "a translation made ahead (`--ahead`)"}
    for mode, name in names.items():
        ratio = record["ratios"].get(mode)
        told = f"{ratio['median']:.1f}× ({ratio['lowest']:.1f}× … {ratio['highest']:.1f}×)" if ratio else ""
        lines.append(f"| {name} | {times[mode]:.0f} | {told} |")
    maps = f", maps stored as {record['maps_stored_as']}" if "maps_stored_as" in record else ""
    lines += [
        "",
        (
            f"Medians of {repeats} conversations of {tokens:,} translated tokens, {record['dtype']}{maps}, "
            f"{record['environment']['cores']} cores. Translated ahead {record['ready_ms']:.0f} ms after the answer."
        ),
    ]
    return "\n".join(lines) + "\n"


ENGINES = {"hybrid_off": "`KVLingoConnector`", "hybrid_on": "`KVLingoHybridConnector`"}


def vllm_servers() -> str:
    """Return what real weights through two vLLM servers cost, and how far they are from the in-process path."""
    record = load("vllm")
    if record is None:
        return "Not measured yet.\n"
    lines = [
        "| target's connector | tokens | own prefill, ms (p90) | handed over, ms (p90) | shorter by | KL off in-process |",
        "|---|---|---|---|---|---|",
    ]
    for engine, found in record["engines"].items():
        for tokens, times in found["times"].items():
            own, handed, faster = times["own_ms"], times["handed_ms"], times["times_faster"]["median"]
            lines.append(
                f"| {ENGINES[engine]} | {int(tokens):,} | {own['median']:,.0f} ({own['p90']:,.0f}) | {handed['median']:,.0f} "
                f"({handed['p90']:,.0f}) | {faster:.1f}× | {found['largest_gap_nats']:.1e} at most |"
            )
    lines += [
        "",
        "| source, tokens | first token, ms | kept after, ms | bytes |",
        "|---|---|---|---|",
    ]
    for tokens, times in record["source"].items():
        plain, after, size = (times[n]["median"] for n in ("plain_ms", "kept_after_ms", "kept_bytes"))
        lines.append(f"| {int(tokens):,} | {plain:,.0f} | {after:,.0f} | {size:,.0f} |")
    here, mean = record["in_process"], lambda values: sum(values) / len(values)
    lines += [
        "",
        (
            f"Medians of {len(next(iter(record['source'].values()))['plain_ms']['all'])} rounds; {record['dtype']}, "
            f"{record['environment']['cores']} cores. KL on {record['texts']} texts of {record['text_tokens']:,} tokens, "
            f"{record['continuation_tokens']} further tokens each: {mean(here['kl_nats']):.3f} in process as vLLM's figures "
            f"allow to tell (of {record['top']:,} tokens), {mean(here['full_kl_nats']):.3f} in full."
        ),
    ]
    return "\n".join(lines) + "\n"


def load_test() -> str:
    """Return what came of many conversations at once."""
    record = load("load")
    if record is None:
        return "Not measured yet.\n"
    turns, talk, memory, throughput = (record[key] for key in ("turns", "cross_talk", "memory", "throughput"))
    rows = {
        "turns, of which the client left in the middle of": f"{turns['all']:,}, {turns['gone_away']:,}",
        "answers checked against a model that read anew, wrong": f"{talk['checked']:,}, {talk['wrong']}",
        "requests refused or failed": f"{sum(turns['errors'].values())}",
        "left running or waiting at the end": f"{sum(record['left'].values()):.0f}",
        "memory over the last half, furthest from its median": f"{memory['rss_off']:.1%}",
        "throughput, HTTP over the bare engine (lowest … highest round)": (
            f"{throughput['ratio']:.2f} ({throughput['ratio_lowest']:.2f} … {throughput['ratio_highest']:.2f})"
        ),
        "waiting for a place, median and 99th percentile": (
            f"{record['queue_ms']['p50']:,.0f} ms, {record['queue_ms']['p99']:,.0f} ms"
        ),
    }
    note = f"{record['conversations']} conversations held at once, tiny models, {record['environment']['cores']} cores."
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items()), "", note]) + "\n"


def routes() -> str:
    """Return what each router brought and cost on recorded answers."""
    return routes_of("routes")


def routes_two_kinds() -> str:
    """Return the same for two kinds of questions, of which each model is better at one."""
    return routes_of("routes-two-kinds")


def routes_of(name: str) -> str:
    """Return the table of one record of routers."""
    record = load(name)
    if record is None:
        return "Not measured yet.\n"
    arms = {
        **record["eval"]["arms"],
        **{
            f"{k}, half to `big`": v for k, v in record["eval_halving"]["arms"].items() if k in ("threshold", "cascade")
        },
    }
    out = ["| who answers | right | GFLOPs | ms | from `big` |", "|---|---|---|---|---|"]
    for name, arm in arms.items():
        right, big = (arm[x]["mean"] for x in ("quality", "share_big"))
        low, high = arm["quality"]["low"], arm["quality"]["high"]
        told = f"{right:.1%} [{low:.1%}, {high:.1%}] | {arm['cost']['mean']:.1f} | {arm['ms']['mean']:,.0f} | {big:.0%}"
        out.append(f"| {name} | {told} |")
    kinds = ", ".join(f"{k.replace('_', ' ')} {v['small']:.0%} / {v['big']:.0%}" for k, v in record["by_kind"].items())
    won = ", ".join(f"{who} {count}" for who, count in record["outcomes"].items())
    models, fit = record["models"], record["fit"]
    learned = (
        f"`learned` was not fitted: {fit['reason']}." if fit["verdict"] is None else f"`learned`: {fit['verdict']}."
    )
    rows = sum(record["outcomes"].values())
    note = (
        f"`small`: {models['small']}, `big`: {models['big']}, {record['options']['dtype']}; compared on {record['eval']['rows']} "
        f"of {rows} questions, limits of the last two from the others. Who was right on all {rows}: {won}. "
        f"By kind, `small` / `big`: {kinds}. {learned}"
    )
    out += ["", note]
    return "\n".join(out) + "\n"


def speed() -> str:
    """Return times to first token of every benchmark that was run, by pair, kind of map and length."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("speed-*.json"))]
    if not records:
        return "Not measured yet.\n"
    lines = [
        (
            "| pair, maps | tokens | re-prefill, ms | warm, ms | cold, ms | ahead, ms | decode step, ms "
            "| warm | cold | ahead | apply ÷ GEMM rate |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = ("reprefill", "translate_warm", "translate_cold", "translate_ahead", "decode_step")
    ratios = ("speedup_warm", "speedup_cold", "speedup_ahead")
    for record in records:
        maps, pair = record["maps"], record["pair"]
        rank = f", rank {maps['rank']}" if maps["rank"] else ""
        engine = ", MLX" if record.get("engine") == "mlx" else ""
        label = f"{pair['source']} → {pair['target']}, {maps['kind']}{rank}{engine}{dtypes_of(record)}"
        for row in record["lengths"]:
            cells = [speed_cell(row["arms"].get(name)) for name in names]
            cells += ["–" if row[name] is None else f"{row[name]:.1f}×" for name in ratios]
            lines.append(f"| {label} | {row['tokens']:,} | {' | '.join(cells)} | {share_cell(row['apply'])} |")
    cards = sorted({f"{r['dtype']} on {r['environment']['accelerator'] or r['environment']['cpu']}" for r in records})
    note = (
        "Medians of interleaved runs; after ~ predicted, not measured. Public shapes have random weights and maps: timing needs "
        "no trained weights."
    )
    return "\n".join([*lines, "", f"{note} {'; '.join(cards)}."]) + "\n"


def dtypes_of(record: dict[str, Any]) -> str:
    """Say in which dtype the models are, and in which maps are multiplied where that differs."""
    products = record["maps"].get("products", record["dtype"])
    return f", {record['dtype']}" + (f", maps in {products}" if products != record["dtype"] else "")


def compression() -> str:
    """Return what maps lose by becoming smaller."""
    record = load("compression")
    if record is None:
        return "Not measured yet.\n"
    lengths = record["lengths"]
    heads = [f"KL at {int(n):,} | above the whole maps' (paired)" for n in lengths]
    lines = [f"| maps | MB | {' | '.join(heads)} |", "|---|---|" + "---|---|" * len(lengths)]
    for name, told in record["variants"].items():
        cells = []
        for rows in lengths.values():
            row = rows[name]
            above = (
                "" if name == "whole" else f"{interval(row['above_whole_nats'], 4)} ({row['above_whole_share']:+.1%})"
            )
            cells += [interval(row["kl_nats"]), above]
        lines.append(f"| {name} | {told['bytes'] / 1e6:.1f} | {' | '.join(cells)} |")
    pair = f"{record['pair']['source']} → {record['pair']['target']}, {record['start']}"
    note = f"{pair}; tail 1, {record['documents']} held-out documents, the same for all."
    return "\n".join([*lines, "", f"{note} Weights that are stored narrower multiply in bfloat16."]) + "\n"


def speed_cell(arm: dict[str, Any] | None) -> str:
    """Format one time; – for an arm that was left out."""
    return "–" if arm is None else f"{'' if arm['measured'] else '~'}{arm['median_ms']:,.0f}"


def capacity() -> str:
    """Return what hand-overs between machines need, by the arithmetic of cost."""
    record = load("capacity")
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


def share_cell(apply: dict[str, Any] | None) -> str:
    """Format a share of the machine's rate; – where it was not measured."""
    return "–" if apply is None else f"{apply['share_of_gemm_rate']:.0%}"


def frontier() -> str:
    """Return what nothing is nearer to native for less, at every length of every direction, beside the yardsticks."""
    lines = [
        "| direction | context | dial | share of a re-prefill's compute | KL to native, nats | top-1 |",
        "|---|---|---|---|---|---|",
    ]
    for direction, label in NAMES.items():
        record = load(f"frontier-{direction}")
        for length in record["contexts"] if record else ():
            best = sorted((p for p in length["points"] if p["on_frontier"]), key=lambda p: p["share_of_reprefill"])
            yardsticks = [row for row in length["quantised"] if row["keys_by"] == "token"]
            for row in (*length["controls"], *best, *yardsticks):
                share = row.get("share_of_reprefill")
                cells = [label, f"{length['context_tokens']:,}", row["name"].replace("_", " ")]
                cells += [
                    "–" if share is None else f"{share:.1%}",
                    interval(row["kl_nats"]),
                    interval(row["top1_agreement"], 2),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "Not measured yet.\n"


def selection() -> str:
    """Return how much nearer each choice of anchors is than as many random ones."""
    lines = [
        "| direction | context | anchors by | share | blocks of | KL, nats | nearer than random ones by, nats (paired) |",
        "|---|---|---|---|---|---|---|",
    ]
    for direction, label in NAMES.items():
        record = load(f"frontier-{direction}")
        for length in record["contexts"] if record else ():
            for row in length["selection"]:
                cells = [label, f"{length['context_tokens']:,}", row["by"], f"{row['share']:.0%}", str(row["block"])]
                cells += [interval(row["kl_nats"]), interval(row["nearer_than_random_nats"])]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "Not measured yet.\n"


def confidence() -> str:
    """Return what a confidence is worth on texts left out, by direction."""
    lines = [
        "| direction | hand-overs | bad ones | precision | recall | AUC | mean KL, nats | with re-prefills for those flagged |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for direction, label in NAMES.items():
        record = load(f"confidence-{direction}")
        if record is None:
            continue
        fitted = record["confidence"]["fitted"]
        worth = fitted["left_out"]
        precision, area = ("–" if worth[name] is None else f"{worth[name]:.2f}" for name in ("precision", "auc"))
        lines.append(
            f"| {label} | {fitted['hand_overs']} | {fitted['bad']} | {precision} | {worth['recall']:.2f} | {area} | "
            f"{worth['mean_kl_nats']:.3f} | {worth['mean_kl_with_fallback_nats']:.3f} |"
        )
    return "\n".join(lines) + "\n" if len(lines) > 2 else "Not measured yet.\n"


def switches() -> str:
    """Return the drift of every rule: KL after the first and the last switch of each direction."""
    record = load("switches")
    if record is None:
        return "Not measured yet.\n"
    lines = [
        "| rule | direction | first switch, KL in nats | last switch | last ÷ first | re-prefilled instead |",
        "|---|---|---|---|---|---|",
    ]
    for rule, label in record["rules"].items():
        for direction, told in record["last_against_first"][rule].items():
            rows = [r for r in record["turns"] if r["rule"] == rule and r["direction"] == direction]
            ends = [next(r for r in rows if r["turn"] == turn) for turn in told["turns"]]
            cells = [label, direction, *(interval(r["kl_nats"]) for r in ends), interval(told["ratio"], 2)]
            lines.append(f"| {' | '.join(cells)} | {sum(r['fallbacks'] for r in rows)} |")
    options = record["options"]
    lines += [
        "",
        (
            f"{options['switches']} switches, {options['first_tokens']} tokens at first and "
            f"{options['turn_tokens']} new ones a turn, {record['num_documents']} held-out texts."
        ),
    ]
    return "\n".join(lines) + "\n"


GUIDE = {"ridge": 0.889, "distilled": 0.984}
"""Accuracy kept of the target's own, Qwen3-4B → Qwen3-30B-A3B, as the widespread guide and the paper it retells say."""


def guide() -> str:
    """Return the guide's two figures beside what was measured here for the same two stages."""
    lines = [
        "| stage | the guide: accuracy kept, Qwen3-4B → 30B-A3B | here: share of the context's gain kept |",
        "|---|---|---|",
    ]
    for stage, arm in (("ridge", "ridge"), ("distilled", "translated")):
        told = []
        for direction, label in NAMES.items():
            for context in (192, 1024):
                report = load(f"{direction}-{context}-tail1")
                if report is not None and arm in report["arms"]:
                    told.append(f"{label}, {context}: {interval(report['arms'][arm]['share_kept'], 2)}")
        lines.append(f"| {stage} | {GUIDE[stage]:.1%} | {'; '.join(told) or 'not measured yet'} |")
    tasks = [
        f"{label}: {interval(record['over_counting']['arms']['translated']['retention'], 3)}"
        for direction, label in NAMES.items()
        if (record := load(f"tasks-{direction}")) is not None and record["over_counting"] is not None
    ]
    told_tasks = "; ".join(tasks) if tasks else "not measured yet"
    return (
        "\n".join(lines) + f"\n\nAccuracy kept on the local tasks that count (`python -m bench.tasks`): {told_tasks}.\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        summary,
        guide,
        quality,
        long_context,
        reverse,
        demo_times,
        memory,
        gateway,
        vllm_servers,
        load_test,
        routes,
        routes_two_kinds,
        speed,
        compression,
        capacity,
        frontier,
        selection,
        confidence,
        switches,
    )
}


def rendered(text: str) -> str:
    """Return a document with its tables made anew."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


def main() -> None:
    """Write or check every document that holds a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = document.read_text(encoding="utf-8")
        new = rendered(text)
        if new != text:
            stale.append(document.name)
            if not check:
                document.write_text(new, encoding="utf-8")
    if check and stale:
        sys.exit(f"tables differ from results/: {', '.join(stale)}; run python -m bench.tables")


if __name__ == "__main__":
    main()
