"""What the benchmarks left in results/: read for tables, and told in one way.

Knows files and numbers. Does not know what any table shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
NAMES = {"smollm2-gemma": "SmolLM2 → Gemma", "gemma-smollm2": "Gemma → SmolLM2"}
NOT_MEASURED = "Not measured yet.\n"


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


def table(lines: list[str]) -> str:
    """Return a table of a head of two lines and rows; that nothing was measured where there are no rows."""
    return "\n".join(lines) + "\n" if len(lines) > 2 else NOT_MEASURED


def pair_of(record: dict[str, Any]) -> str:
    """Name the pair that a record is of."""
    return f"{record['pair']['source']} → {record['pair']['target']}"
