"""What one of several processes does in `test_processes.py`: fit, be stopped, go on, distil, be stopped, go on.

    python -m tests.together FOLDER

Every process leaves what it ended up with, so that all can be compared with one process alone.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from kvlingo import collecting
from kvlingo.distillation import Distilled, DistillOptions, Run, distill
from kvlingo.fitting import Fit, fit
from kvlingo.processes import ALONE, Processes, joined
from kvlingo.shapes import FitOptions
from tests import tiny
from tests.tiny import unrelated_pair as pair

FIT = FitOptions(
    reach=1,
    shift=1,
    tokens=900,
    context_tokens=(48,),
    chat_share=0.2,
    held_out_share=0.2,
    held_out_examples=2,
    dampings=(1e-3, 1e-2),
)
DISTILL = DistillOptions(
    steps=4,
    minutes=None,
    batch=3,  # one process reads two of them, the other one
    learning_rate=1e-3,
    context_tokens=(32, 40),
    continuation_tokens=12,
    tails=(1, 3),
    chat_share=0.0,
    judge_every=2,
    judged_examples=2,
    judged_context=(40,),
    vocabulary=None,
)
STOP_AFTER = 7


class Stop:
    """Presses Ctrl-C when so many pieces of training text have been read, by whichever process."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, what: str, done: int, total: int) -> None:
        self.left -= "training" in what
        if self.left == 0:
            raise KeyboardInterrupt


def fitted(folder: Path | None, processes: Processes = ALONE) -> Fit:
    """Fit in one go, or with a folder: be stopped and go on."""
    if folder is not None:
        collecting.SAVE_EVERY_SECONDS = -1.0
        try:
            fit(*pair(), tiny.documents(), FIT, work_dir=folder, progress=Stop(STOP_AFTER), processes=processes)
        except KeyboardInterrupt:
            return fit(*pair(), tiny.documents(), FIT, work_dir=folder, processes=processes)
        raise AssertionError("nothing was stopped")
    return fit(*pair(), tiny.documents(), FIT, processes=processes)


def distilled(of: Fit, folder: Path | None, processes: Processes = ALONE) -> Distilled:
    """Distil in one go, or with a folder: be stopped in the middle and go on."""
    training = [d for d in tiny.documents() if d not in of.held_out_documents]

    def run() -> Distilled:
        start = copy.deepcopy(of.translator)
        documents = (training, of.held_out_documents)
        return distill(start, *pair(), *documents, of.stats, DISTILL, work_dir=folder, processes=processes)

    if folder is None:
        return run()
    tell = Run.tell
    Run.tell = stop_in_the_middle  # type: ignore[method-assign]
    try:
        run()
    except KeyboardInterrupt:
        Run.tell = tell  # type: ignore[method-assign]
        return run()
    raise AssertionError("nothing was stopped")


def stop_in_the_middle(run: Run, loss: float) -> None:
    """Press Ctrl-C in all processes after two steps."""
    if run.step == 2:
        raise KeyboardInterrupt


def main() -> None:
    """Do all of it; leave sums, maps and the loss curve."""
    folder = Path(sys.argv[1])
    with joined() as processes:
        of = fitted(folder / "work", processes)
        done = distilled(of, folder / "work", processes)
        save_file(of.stats.state_dict(), folder / f"sums-{processes.rank}.safetensors")
        save_file(of.translator.state_dict(), folder / f"maps-{processes.rank}.safetensors")
        save_file(done.translator.state_dict(), folder / f"distilled-{processes.rank}.safetensors")
        curve = {**done.curve.to_json(), "best_step": done.best_step, "count": processes.count}
        (folder / f"curve-{processes.rank}.json").write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
