"""The tables of how near a translated cache is to the target's own, by record in results/."""

from __future__ import annotations

from bench import records

ARMS = {
    "native": "its own cache (re-prefill)",
    "translated": "**translated, distilled**",
    "distilled": "distilled, before it went on at greater lengths",
    "ridge": "translated, ridge only",
    "distilled_shared": "distilled, from shared errors counting more",
    "ridge_shared": "ridge, shared errors counting more",
    "no_text": "ridge, no text features",
    "token_only_distilled": "token only, distilled alike",
    "token_only": "token only, ridge (no source cache)",
    "tail_only": "sinks and tail only",
    "no_context": "no context",
    "wrong_document": "another document's cache",
    "random_map": "random map",
    "source_alone": "the source model alone",
}


def arms_table(name: str) -> str:
    """Return one evaluation as a table."""
    report = records.load(name)
    if report is None:
        return records.NOT_MEASURED
    passkey = report.get("passkey") or {}
    lines = [
        "| cache that the target reads | KL to native, nats | top-1 | share of the context's gain | bits per byte | passkey |",
        "|---|---|---|---|---|---|",
    ]
    for arm, label in ARMS.items():
        if arm not in report["arms"]:
            continue
        values = report["arms"][arm]
        cells = [records.interval(values["kl_nats"]), records.interval(values["top1_agreement"])]
        cells += [records.interval(values["share_kept"], 2), records.interval(values["bits_per_byte"], 2)]
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
    for direction, label in records.NAMES.items():
        for context, tail in ((192, 1), (192, 16), (1024, 1)):
            report = records.load(f"{direction}-{context}-tail{tail}")
            if report is None:
                continue
            arms, paired = report["arms"], report["paired"]
            difference = paired.get("ridge", {}).get("kl_difference_nats")
            gain = (
                f"−{difference['mean']:.3f} [−{difference['high']:.3f}, −{difference['low']:.3f}]"
                if difference
                else "–"
            )
            ridge = records.interval(arms["ridge"]["kl_nats"]) if "ridge" in arms else "–"
            cells = [label, str(context), str(tail), ridge]
            cells += [records.interval(arms[arm]["kl_nats"]) for arm in ("translated", "token_only")]
            cells += [gain, records.interval(arms["translated"]["share_kept"], 2)]
            lines.append(f"| {' | '.join(cells)} |")
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


def shared_errors() -> str:
    """Return what ridge gains where errors that neighbours share count more."""
    lines = [
        "| direction | context | ridge | shared errors counting more | difference (paired) | token only, ridge |",
        "|---|---|---|---|---|---|",
    ]
    for direction, label in records.NAMES.items():
        for context in (192, 1024):
            report = records.load(f"shared-{direction}-{context}-tail1")
            if report is None:
                continue
            arms, paired = report["arms"], report["paired"]["ridge_shared"]["kl_difference_nats"]
            cells = [label, f"{context:,}"]
            cells += [records.interval(arms[arm]["kl_nats"]) for arm in ("translated", "ridge_shared")]
            cells += [records.interval(paired), records.interval(arms["token_only"]["kl_nats"])]
            lines.append(f"| {' | '.join(cells)} |")
    return records.table(lines)


def frontier() -> str:
    """Return what nothing is nearer to native for less, at every length of every direction, beside the yardsticks."""
    lines = [
        "| direction | context | dial | share of a re-prefill's compute | KL to native, nats | top-1 |",
        "|---|---|---|---|---|---|",
    ]
    for direction, label in records.NAMES.items():
        record = records.load(f"frontier-{direction}")
        for length in record["contexts"] if record else ():
            best = sorted((p for p in length["points"] if p["on_frontier"]), key=lambda p: p["share_of_reprefill"])
            yardsticks = [row for row in length["quantised"] if row["keys_by"] == "token"]
            for row in (*length["controls"], *best, *yardsticks):
                share = row.get("share_of_reprefill")
                cells = [label, f"{length['context_tokens']:,}", row["name"].replace("_", " ")]
                cells += [
                    "–" if share is None else f"{share:.1%}",
                    records.interval(row["kl_nats"]),
                    records.interval(row["top1_agreement"], 2),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return records.table(lines)


def selection() -> str:
    """Return how much nearer each choice of anchors is than as many random ones."""
    lines = [
        "| direction | context | anchors by | share | blocks of | KL, nats | nearer than random ones by, nats (paired) |",
        "|---|---|---|---|---|---|---|",
    ]
    for direction, label in records.NAMES.items():
        record = records.load(f"frontier-{direction}")
        for length in record["contexts"] if record else ():
            for row in length["selection"]:
                cells = [label, f"{length['context_tokens']:,}", row["by"], f"{row['share']:.0%}", str(row["block"])]
                cells += [records.interval(row["kl_nats"]), records.interval(row["nearer_than_random_nats"])]
                lines.append(f"| {' | '.join(cells)} |")
    return records.table(lines)


def confidence() -> str:
    """Return what a confidence is worth on texts left out, by direction."""
    lines = [
        "| direction | hand-overs | bad ones | precision | recall | AUC | mean KL, nats | with re-prefills for those flagged |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for direction, label in records.NAMES.items():
        record = records.load(f"confidence-{direction}")
        if record is None:
            continue
        fitted = record["confidence"]["fitted"]
        worth = fitted["left_out"]
        precision, area = ("–" if worth[name] is None else f"{worth[name]:.2f}" for name in ("precision", "auc"))
        lines.append(
            f"| {label} | {fitted['hand_overs']} | {fitted['bad']} | {precision} | {worth['recall']:.2f} | {area} | "
            f"{worth['mean_kl_nats']:.3f} | {worth['mean_kl_with_fallback_nats']:.3f} |"
        )
    return records.table(lines)


def switches() -> str:
    """Return the drift of every rule: KL after the first and the last switch of each direction."""
    record = records.load("switches")
    if record is None:
        return records.NOT_MEASURED
    lines = [
        "| rule | direction | first switch, KL in nats | last switch | last ÷ first | re-prefilled instead |",
        "|---|---|---|---|---|---|",
    ]
    for rule, label in record["rules"].items():
        for direction, told in record["last_against_first"][rule].items():
            rows = [r for r in record["turns"] if r["rule"] == rule and r["direction"] == direction]
            ends = [next(r for r in rows if r["turn"] == turn) for turn in told["turns"]]
            cells = [
                label,
                direction,
                *(records.interval(r["kl_nats"]) for r in ends),
                records.interval(told["ratio"], 2),
            ]
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
        for direction, label in records.NAMES.items():
            for context in (192, 1024):
                report = records.load(f"{direction}-{context}-tail1")
                if report is not None and arm in report["arms"]:
                    told.append(f"{label}, {context}: {records.interval(report['arms'][arm]['share_kept'], 2)}")
        lines.append(f"| {stage} | {GUIDE[stage]:.1%} | {'; '.join(told) or 'not measured yet'} |")
    tasks = [
        f"{label}: {records.interval(record['over_counting']['arms']['translated']['retention'], 3)}"
        for direction, label in records.NAMES.items()
        if (record := records.load(f"tasks-{direction}")) is not None and record["over_counting"] is not None
    ]
    told_tasks = "; ".join(tasks) if tasks else "not measured yet"
    return (
        "\n".join(lines) + f"\n\nAccuracy kept on the local tasks that count (`python -m bench.tasks`): {told_tasks}.\n"
    )
