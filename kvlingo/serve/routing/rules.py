"""The file of rules: when a switch translates, and the limits of the routers.

Knows TOML. `kvlingo calibrate` writes the part about switches; the rest is written by hand. A table or a name that nobody reads
is an error.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvlingo.cost import MapRates, Rates, ReadingRates
from kvlingo.errors import BadInput
from kvlingo.serve.routing.cascade import CascadeRule
from kvlingo.serve.routing.threshold import ThresholdRule
from kvlingo.serve.routing.token import TokenRule

NEVER = 2**31 - 1
"""A length that no conversation has: from there on translating always pays, so it never does without the cost model."""


@dataclass(frozen=True)
class Measured:
    """Times of one length: `tokens` of the target."""

    tokens: int
    handoff_ms: float
    reprefill_ms: float


@dataclass(frozen=True)
class Calibrated:
    """When a switch from one model to another translates, as measured between two sets of weights.

    Fields:
        source, target: the names they were served by.
        source_fingerprint, target_fingerprint: of their weights.
        reprefill_up_to, translate_from: see `switching.Rule`.
        measured: what it was concluded from.
        rates: what reading and translating cost, by which lengths between the two limits are decided; None: by FLOPs.
    """

    source: str
    target: str
    source_fingerprint: str
    target_fingerprint: str
    reprefill_up_to: int
    translate_from: int
    measured: tuple[Measured, ...] = ()
    rates: Rates | None = None


@dataclass(frozen=True)
class Rules:
    """A whole file; what it does not hold is None or empty."""

    switches: tuple[Calibrated, ...] = ()
    threshold: ThresholdRule | None = None
    cascade: CascadeRule | None = None
    token: TokenRule | None = None


def read_rules(file: Path) -> Rules:
    """Read a file of rules, or raise `BadInput`."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"can't read the rules in {file}: {error.strerror}; `kvlingo calibrate` writes such a file"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{file} is not TOML: {error}") from error
    unknown = sorted(set(table) - {"switch", "threshold", "cascade", "token"})
    if unknown:
        raise BadInput(f"{file} has {unknown[0]!r}; there are: [[switch]], [threshold], [cascade], [token]")
    try:
        switches = table.get("switch", [])
        if not isinstance(switches, list):
            raise ValueError("switch is not a list; write [[switch]]")
        return Rules(
            tuple(calibrated(each) for each in switches),
            threshold(table["threshold"]) if "threshold" in table else None,
            cascade(table["cascade"]) if "cascade" in table else None,
            token(table["token"]) if "token" in table else None,
        )
    except ValueError as error:
        raise BadInput(f"{file}: {error}") from error


# --- one table -------------------------------------------------------------------------------------------------------


def threshold(table: Any) -> ThresholdRule:
    """Read [threshold]; what is left out keeps its default."""
    return ThresholdRule(**values(table, "threshold", {f.name: positive for f in fields(ThresholdRule)}))


def cascade(table: Any) -> CascadeRule:
    """Read [cascade]."""
    readers: dict[str, Callable[[Any], Any]] = {
        "escalate_below": not_positive,
        "escalate_repeating": share,
        "escalate_shorter_than": count,
        "escalate_matching": expressions,
        "escalate_cut": flag,
    }
    return CascadeRule(**values(table, "cascade", readers))


def token(table: Any) -> TokenRule:
    """Read [token]."""
    return TokenRule(**values(table, "token", {"from_nats": entropy}))


def calibrated(table: Any) -> Calibrated:
    """Read one [[switch]]."""
    readers: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("source", "target", "source_fingerprint", "target_fingerprint"), text),
        **dict.fromkeys(("reprefill_up_to", "translate_from"), count),
        "measured": measured,
        "rates": rates,
    }
    found = values(table, "switch", readers)
    missing = sorted(set(readers) - {"measured", "rates"} - set(found))
    if missing:
        raise ValueError(f"a [[switch]] has no {missing[0]}; write it with kvlingo calibrate")
    if found["translate_from"] <= found["reprefill_up_to"]:
        raise ValueError("a [[switch]] translates from a length up to which it does not")
    return Calibrated(**found)


def values(table: Any, where: str, readers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Read a table's values, each by its reader. Raises `ValueError` naming what is wrong."""
    if not isinstance(table, dict):
        raise ValueError(f"{where} is not a table")
    unknown = sorted(set(table) - set(readers))
    if unknown:
        raise ValueError(f"{where} has {unknown[0]!r}; there are: {', '.join(readers)}")
    found = {}
    for name, value in table.items():
        try:
            found[name] = readers[name](value)
        except ValueError as error:
            raise ValueError(f"{where}.{name} is {value!r}; {error}") from error
    return found


def positive(value: Any) -> int:
    """Take a whole number above 0."""
    if not count(value):
        raise ValueError("give a whole number above 0")
    return int(value)


def count(value: Any) -> int:
    """Take a whole number from 0 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("give a whole number, 0 or more")
    return value


def not_positive(value: Any) -> float:
    """Take a log-probability."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e6 < value <= 0:
        raise ValueError("give a log-probability, 0 or less")
    return float(value)


def share(value: Any) -> float:
    """Take a share."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError("give a share above 0, up to 1 (never)")
    return float(value)


def flag(value: Any) -> bool:
    """Take yes or no."""
    if not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


def expressions(value: Any) -> tuple[str, ...]:
    """Take regular expressions; each is tried now, so that none fails when an answer is there."""
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise ValueError("give a list of regular expressions")
    for each in value:
        try:
            re.compile(each)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{each!r} is no regular expression: {error}") from error
    return tuple(value)


def entropy(value: Any) -> float:
    """Take an entropy; infinity is one that no model reaches."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError("give an entropy in nats, 0 or more (inf: never)")
    return float(value)


def number(value: Any) -> float:
    """Take a time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise ValueError("give a number of milliseconds")
    return float(value)


def text(value: Any) -> str:
    """Take text."""
    if not isinstance(value, str) or not value:
        raise ValueError("give text")
    return value


def measured(value: Any) -> tuple[Measured, ...]:
    """Take rows of tokens and two times."""
    if not isinstance(value, list) or not all(isinstance(row, list) and len(row) == 3 for row in value):
        raise ValueError("give rows of tokens, hand-over ms, re-prefill ms")
    return tuple(Measured(count(a), number(b), number(c)) for a, b, c in value)


def rates(value: Any) -> Rates:
    """Read what reading and translating cost: two tables of seconds, none left out."""
    if not isinstance(value, dict) or set(value) != {"reading", "maps"}:
        raise ValueError("give the tables reading and maps; write them with kvlingo calibrate")
    return Rates(
        ReadingRates(**seconds_of(value, "reading", ReadingRates)), MapRates(**seconds_of(value, "maps", MapRates))
    )


def seconds_of(table: dict[str, Any], name: str, kind: type[ReadingRates] | type[MapRates]) -> dict[str, float]:
    """Read one of the tables of rates."""
    names = [f.name for f in fields(kind)]
    found = values(table[name], name, dict.fromkeys(names, seconds))
    missing = sorted(set(names) - set(found))
    if missing:
        raise ValueError(f"{name} has no {missing[0]}; write it with kvlingo calibrate")
    return found


def seconds(value: Any) -> float:
    """Take seconds of a unit's cost."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise ValueError("give seconds, 0 or more")
    return float(value)


# --- writing ---------------------------------------------------------------------------------------------------------


def written(switches: Sequence[Calibrated], notes: Sequence[str]) -> str:
    """Return the file's text. `notes`: what a reader has to know, one line each."""
    parts = ["".join(f"# {note}\n" for note in notes)]
    for each in switches:
        known = {f.name: getattr(each, f.name) for f in fields(each)}
        lines = (f"{name} = {toml(value)}\n" for name, value in known.items() if value is not None)
        parts.append("[[switch]]\n" + "".join(lines))
    return "\n".join(parts)


def toml(value: Any) -> str:
    """Write one value; a JSON text is a TOML text, but for half characters and the delete character."""
    if isinstance(value, tuple):
        rows = (f"  [{row.tokens}, {row.handoff_ms:.3f}, {row.reprefill_ms:.3f}]," for row in value)
        return "\n".join(["[ # tokens, hand-over ms, re-prefill ms", *rows, "]"])
    if isinstance(value, (Rates, ReadingRates, MapRates)):
        return "{ " + ", ".join(f"{f.name} = {toml(getattr(value, f.name))}" for f in fields(value)) + " }"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
