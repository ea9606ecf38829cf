"""Write the tables of README.md and docs/ from results/*.json; with --check, fail if they differ from what is written.

    python -m bench.tables [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is that of a function of one of the modules below.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from bench import quality_tables, service_tables, speed_tables
from bench.records import ROOT

BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        quality_tables.summary,
        quality_tables.guide,
        quality_tables.quality,
        quality_tables.long_context,
        quality_tables.reverse,
        quality_tables.shared_errors,
        quality_tables.frontier,
        quality_tables.selection,
        quality_tables.confidence,
        quality_tables.switches,
        service_tables.gateway,
        service_tables.vllm_servers,
        service_tables.load_test,
        service_tables.routes,
        service_tables.routes_two_kinds,
        speed_tables.demo_times,
        speed_tables.memory,
        speed_tables.speed,
        speed_tables.fitting_time,
        speed_tables.calibration,
        speed_tables.compression,
        speed_tables.capacity,
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
