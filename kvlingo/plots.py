"""Pictures of what training did, and of times to first token.

Knows matplotlib, which is an extra, and plain lists of numbers. Draws off screen; nothing is shown.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo.errors import MissingExtra
from kvlingo.files import write_file

LOSS_COLOUR, HELD_OUT_COLOUR = "#9ab7d3", "#b3372f"


def draw_curve(curve: dict[str, Any], file: Path, *, title: str) -> None:
    """Draw a distillation's training loss and held-out KL over its steps; write a PNG.

    Args:
        curve: `Curve.to_json()`: steps, loss_nats, judged_steps, held_out_kl_nats.
        file: where to; written whole or not at all.
        title: names the pair.

    Raises:
        MissingExtra: matplotlib is not installed.
        BadInput: the file can't be written.
    """
    figure, axes = empty_figure()
    axes.plot(
        curve["steps"],
        curve["loss_nats"],
        color=LOSS_COLOUR,
        linewidth=1,
        label="training loss (KL + λ · CE), each step",
    )
    smooth = running_mean(curve["loss_nats"])
    if len(smooth) > 1:
        axes.plot(curve["steps"], smooth, color="#2f5d8a", linewidth=1.6, label="training loss, running mean")
    judged, kl = curve["judged_steps"], curve["held_out_kl_nats"]
    axes.plot(judged, kl, "o-", color=HELD_OUT_COLOUR, linewidth=1.6, markersize=4, label="KL to native, held-out text")
    best = min(range(len(kl)), key=kl.__getitem__)
    axes.annotate(
        f"best: {kl[best]:.3f} nats",
        (judged[best], kl[best]),
        xytext=(0, -18),
        textcoords="offset points",
        ha="right" if judged[best] > max(judged) / 2 else "left",
        color=HELD_OUT_COLOUR,
    )
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("nats per token")
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save_figure(figure, file)


def draw_times(record: dict[str, Any], file: Path) -> None:
    """Draw times to first token against lengths, both logarithmic, with the crossing marked; write a PNG.

    Args:
        record: what `kvlingo bench` gives as JSON. What was predicted and not measured is drawn hollow.
        file: where to; written whole or not at all.

    Raises:
        MissingExtra: matplotlib is not installed.
        BadInput: the file can't be written.
    """
    figure, axes = empty_figure()
    for place, name in enumerate(record["lengths"][0]["arms"]):
        rows = [(row["tokens"], row["arms"][name]) for row in record["lengths"]]
        colour = f"C{place}"
        axes.plot([n for n, _ in rows], [a["median_ms"] for _, a in rows], color=colour, linewidth=1.6)
        for is_measured in (True, False):
            points = [(n, a["median_ms"]) for n, a in rows if a["measured"] is is_measured]
            if points:
                label = f"{name.replace('_', ' ')}{'' if is_measured else ', predicted'}"
                fill = colour if is_measured else "none"
                axes.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor=fill, label=label)
    if record["crossing_tokens"]:
        axes.axvline(record["crossing_tokens"], color="#555555", linestyle=":", linewidth=1.2)
        axes.annotate(
            f"translating pays from {record['crossing_tokens']:,.0f} tokens",
            (record["crossing_tokens"], 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the conversation")
    axes.set_ylabel("ms to first token")
    axes.set_title(f"{record['pair']['source']} → {record['pair']['target']}, {record['maps']['kind']} maps")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    save_figure(figure, file)


LEAST_KL = 1e-4
BELOW = {"tail_only": -11, "token_only": -11}
MARKS, DASHES = "osD^v", ("-", "--", "-.", ":")


def draw_frontier(record: dict[str, Any], file: Path) -> None:
    """Draw KL to native against cost, one panel a length: lines of the dial, controls, quantised caches, a re-prefill at the end.

    Args:
        record: what `frontier.frontier` gives. KL is logarithmic; what has none is drawn at the bottom.
        file: where to; written whole or not at all.

    Raises:
        MissingExtra: matplotlib is not installed.
        BadInput: the file can't be written.
    """
    figure, panels = empty_panels(len(record["contexts"]))
    for axes, length in zip(panels, record["contexts"], strict=True):
        draw_length(axes, length)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    figure.suptitle(f"{record['pair']['source']} → {record['pair']['target']}: quality against compute")
    save_figure(figure, file)


def draw_length(axes: Any, length: dict[str, Any]) -> None:
    """Draw one length of context."""
    points = length["points"]
    drawn = [float(row["kl_nats"]["mean"]) for row in (*points, *length["quantised"])]
    floor = 0.4 * max(min((kl for kl in drawn if kl > 0), default=LEAST_KL), LEAST_KL)

    def shown_kl(row: dict[str, Any]) -> float:
        return max(float(row["kl_nats"]["mean"]), floor)

    start = next((point for point in points if point["sweep"] == "tail"), None)
    for name, style in line_styles(points).items():
        rows = [point for point in points if point["sweep"] == name]
        # Every line starts at the shortest dial: with no anchors and no native layers.
        rows += [start] if start is not None and name != "tail" and not name.startswith("native") else []
        rows = sorted(rows, key=lambda row: row["share_of_reprefill"])
        xs, ys = [row["share_of_reprefill"] for row in rows], [shown_kl(row) for row in rows]
        axes.plot(xs, ys, linewidth=1.2, markersize=4, label=name, **style)
    best = sorted((p for p in points if p["on_frontier"]), key=lambda row: row["share_of_reprefill"])
    xs, ys = [row["share_of_reprefill"] for row in best], [shown_kl(row) for row in best]
    axes.step(xs, ys, where="post", color="#999999", linewidth=6, alpha=0.3, zorder=0, label="nothing nearer for less")
    for row in length["controls"]:
        place = row["share_of_reprefill"], shown_kl(row)
        axes.plot(*place, "v", color="#555555", markersize=6)
        beside(axes, row["name"].replace("_", " "), place, up=BELOW.get(row["name"], 4))
    for row in length["quantised"]:
        if row["keys_by"] == "token":
            axes.axhline(shown_kl(row), color="#b3372f", linestyle=":", linewidth=1)
            axes.annotate(
                row["name"],
                (1, shown_kl(row)),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                color="#b3372f",
                fontsize="small",
            )
    end = length["reprefill"]
    axes.plot(end["share_of_reprefill"], floor, "*", color="black", markersize=11)
    beside(axes, "re-prefill: KL 0", (end["share_of_reprefill"], floor), ha="right")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7 * floor)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.3g}")
    axes.xaxis.set_minor_formatter(lambda share, _: f"{share:.3g}" if f"{share:e}"[0] in "25" else "")
    axes.set_xlabel("share of a re-prefill's compute")
    axes.set_ylabel("KL to native, nats per token")
    axes.set_title(f"{length['context_tokens']:,} tokens, {length['num_documents']} held-out texts")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)


def line_styles(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each line's colour, marks and dashes: a choice of anchors has one colour, its blocks have dashes of their own."""
    families: dict[str, list[str]] = {}
    for point in points:
        anchors = point["dial"]["anchors"]
        family = point["sweep"] if anchors is None else anchors["by"]
        if point["sweep"] not in families.setdefault(family, []):
            families[family].append(point["sweep"])
    return {
        name: {
            "color": "black" if family == "oracle" else f"C{number % 10}",
            "marker": MARKS[place % len(MARKS)],
            "linestyle": DASHES[place % len(DASHES)],
        }
        for number, (family, names) in enumerate(families.items())
        for place, name in enumerate(names)
    }


def beside(axes: Any, text: str, place: tuple[float, float], *, ha: str = "left", up: float = 3) -> None:
    """Write beside a mark."""
    shift = 6 if ha == "left" else -8
    axes.annotate(text, place, xytext=(shift, up), textcoords="offset points", ha=ha, fontsize="small", color="#333333")


def draw_drift(record: dict[str, Any], file: Path) -> None:
    """Draw KL to native after each switch, one panel a direction, a line for each rule; write a PNG.

    Args:
        record: what `drift.drift` gives.
        file: where to; written whole or not at all.

    Raises:
        MissingExtra: matplotlib is not installed.
        BadInput: the file can't be written.
    """
    directions = list(dict.fromkeys(row["direction"] for row in record["turns"]))
    figure, panels = empty_panels(len(directions))
    for axes, direction in zip(panels, directions, strict=True):
        for number, (rule, label) in enumerate(record["rules"].items()):
            rows = [r for r in record["turns"] if r["direction"] == direction and r["rule"] == rule]
            turns, kl = [r["turn"] for r in rows], [r["kl_nats"]["mean"] for r in rows]
            axes.plot(turns, kl, "o-", color=f"C{number}", linewidth=1.6, markersize=4, label=label)
            fallen = [(r["turn"], r["kl_nats"]["mean"]) for r in rows if r["fallbacks"]]
            if fallen:
                axes.plot(*zip(*fallen, strict=True), "x", color="black", label="some were re-prefilled")
            ends = [(r["kl_nats"]["low"], r["kl_nats"]["high"]) for r in rows]
            if all(low is not None for low, _ in ends):
                axes.fill_between(
                    turns, [low for low, _ in ends], [high for _, high in ends], color=f"C{number}", alpha=0.15
                )
        axes.set_xticks(sorted({r["turn"] for r in record["turns"] if r["direction"] == direction}))
        axes.set_xlabel("switch")
        axes.set_ylabel("KL to native, nats per token")
        axes.set_ylim(bottom=0)
        axes.set_title(direction)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    named = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(named.values()), list(named), loc="outside lower center", frameon=False, fontsize="small")
    tokens = f"{record['turn_tokens']} new tokens a turn, {record['num_documents']} held-out texts"
    figure.suptitle(f"{record['pair']['a']} ⇄ {record['pair']['b']}: {tokens}")
    save_figure(figure, file)


def empty_panels(count: int) -> tuple[Any, list[Any]]:
    """Return a figure that is drawn off screen, and `count` axes side by side."""
    figure, first = empty_figure()
    first.remove()
    figure.set_size_inches(6.4 * count + 0.8, 5.6)
    axes = figure.subplots(1, count, squeeze=False)
    return figure, list(axes[0])


def empty_figure() -> tuple[Any, Any]:
    """Return a figure that is drawn off screen, and its axes. Raises `MissingExtra` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("pictures need matplotlib: pip install 'kvlingo[plot]'") from error
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def save_figure(figure: Any, file: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_file(file, picture.getvalue())


def running_mean(values: Sequence[float], share: float = 0.1) -> list[float]:
    """Return each value's mean with those before it, over a window of `share` of all."""
    width = max(1, round(share * len(values)))
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(values))]
