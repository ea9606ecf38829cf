"""The tables of what serves: the gateway, its routers, and servers of vLLM, by record in results/."""

from __future__ import annotations

from bench import records


def gateway() -> str:
    """Return the times to first token of a switch through the HTTP API."""
    record = records.load("gateway")
    if record is None:
        return records.NOT_MEASURED
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
    record = records.load("vllm")
    if record is None:
        return records.NOT_MEASURED
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
    record = records.load("load")
    if record is None:
        return records.NOT_MEASURED
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
    record = records.load(name)
    if record is None:
        return records.NOT_MEASURED
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
