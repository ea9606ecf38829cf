"""Progress on stderr: one bar for what is being done now; where stderr is no terminal, a line every tenth.

Knows rich. Does not know models, texts or translators: it is told names, counts and figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Bar:
    """What `fit`, `distill` and `evaluate` report to: (what, done, total), or a step's figures."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._tasks = progress, dict[str, TaskID]()
        self._told: dict[str, int] = {}  # tenths that a log has seen

    def count(self, what: str, done: int, total: int) -> None:
        """Show `done` of `total`; a new `what` gets its own line."""
        self._show(what, done / max(total, 1), f"{done:,} of {total:,}")

    def train(self, step: dict[str, Any]) -> None:
        """Show one step of distilling: held-out KL, loss, tokens a second; the time left follows from the share done."""
        figures = (
            f"KL {step['held_out_kl_nats']:.3f}, loss {step['loss_nats']:.3f} nats, "
            f"{step['tokens_per_second']:.0f} tokens/s"
        )
        self._show("distilling", step["progress"], figures)

    def _show(self, what: str, share: float, figures: str) -> None:
        if not self._progress.console.is_terminal:
            self._tell(what, share, figures)
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=1.0, figures=figures)
        self._progress.update(self._tasks[what], completed=share, figures=figures)

    def _tell(self, what: str, share: float, figures: str) -> None:
        tenth = int(share * 10)
        if self._told.get(what) != tenth:
            self._told[what] = tenth
            self._progress.console.print(f"{what}: {figures}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(*, shown: bool = True) -> Iterator[Bar]:
    """Show a bar on stderr while the block runs; where stderr is no terminal, a line for every tenth.

    The columns fit a terminal of 80 characters. `shown`: one of several processes shows it.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=8),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True, quiet=not shown)) as progress:
        yield Bar(progress)
