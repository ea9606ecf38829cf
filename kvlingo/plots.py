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
