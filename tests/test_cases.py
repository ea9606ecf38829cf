"""Every test that the table of public failures names is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
TABLE = REPO / "docs" / "cases.md"
NAMED = re.compile(r"`(tests/\w+\.py)::(\w+)`")
ROW = re.compile(r"^\| (?!-|failure)(.*) \|$", re.MULTILINE)


def missing(table: str) -> Iterator[str]:
    """Yield the tests that are named and not defined."""
    for file, name in NAMED.findall(table):
        path = REPO / file
        tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            yield f"{file}::{name}"


def test_every_named_test_exists() -> None:
    assert not list(missing(TABLE.read_text(encoding="utf-8")))


def test_every_failure_has_a_test_or_says_that_it_is_open() -> None:
    rows = ROW.findall(TABLE.read_text(encoding="utf-8"))
    assert len(rows) > 30
    assert not [row for row in rows if not NAMED.search(row) and "open" not in row.rsplit(" | ", 1)[-1]]


def test_a_name_that_is_gone_is_seen() -> None:
    gone = "| failure | thread | `tests/test_cases.py::test_that_nobody_wrote`, `tests/test_nothing.py::test_x` |"
    assert list(missing(gone)) == ["tests/test_cases.py::test_that_nobody_wrote", "tests/test_nothing.py::test_x"]
