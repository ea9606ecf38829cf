"""Local tasks: multiple choice from BIG-bench's JSON files, with solved examples before each question as the context to read.

    python -m bench.tasks --tasks DIR --direction smollm2-gemma --work DIR --smollm2 MODEL --gemma MODEL --out results/NAME.json

DIR holds one folder a task with its task.json, as in BIG-bench's source archive (bigbench/benchmark_tasks). The source reads
solved examples and the question, the target answers on the translated cache. JSON on the last line of stdout: accuracy, gold
nats, retention and share of the gap to the source that is recovered, by task. A task counts where the target on its own cache
beats the source, and itself without context, by two standard errors; the others are listed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.passkey import ask_all
from bench.quality import DIRECTIONS, finish, models
from kvlingo.errors import BadInput
from kvlingo.models import default_cache_dir
from kvlingo.questions import Question

MOST_CHOICES = 6


@dataclass(frozen=True)
class Item:
    """One row of a task: what is asked, what may be answered, which is right."""

    asked: str
    choices: tuple[str, ...]
    right: int


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--names", help="tasks to take, separated by commas; all that are there if not given")
    parser.add_argument("--direction", choices=DIRECTIONS, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--gemma", type=Path)
    parser.add_argument("--sibling", type=Path)
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--items", type=int, default=60, help="of each task")
    parser.add_argument("--shots", type=int, default=4, help="solved examples before each question")
    parser.add_argument("--tail", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def read_task(file: Path) -> list[Item]:
    """Read the multiple-choice items of a task with exactly one right answer; the others are left out.

    Raises:
        BadInput: not a task, or none of its items is of that kind.
    """
    try:
        task = json.loads(file.read_text(encoding="utf-8"))
        rows = [item for row in task["examples"] if (item := read_item(row)) is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file} is no task of BIG-bench ({error}); give folders with a task.json each") from None
    if not rows:
        raise BadInput(f"{file} has no multiple-choice item; leave this task out")
    return rows


def read_item(row: dict[str, Any]) -> Item | None:
    """Read one item; None for one without choices, or without exactly one right answer."""
    scores = row.get("target_scores")
    if not scores or not 2 <= len(scores) <= MOST_CHOICES:
        return None
    right = [place for place, value in enumerate(scores.values()) if float(value) == 1.0]
    if len(right) != 1:
        return None
    return Item(row["input"].strip(), tuple(scores), right[0])


def questions_of(name: str, items: Sequence[Item], count: int, shots: int, seed: int) -> list[Question]:
    """Put solved examples of the same task before each item; an item is never its own example."""
    rng = random.Random(f"{seed} {name}")
    chosen = rng.sample(range(len(items)), min(count, len(items)))
    found = []
    for place in chosen:
        others = [i for i in range(len(items)) if items[i].asked != items[place].asked]
        shown = [items[i] for i in rng.sample(others, min(shots, len(others)))]
        solved = [f"Question: {x.asked}\nAnswer: {x.choices[x.right]}\n\n" for x in shown]
        item = items[place]
        context = f"{''.join(solved)}Question: {item.asked}\nAnswer:"
        found.append(
            Question(name, f"{name} {place}", context, tuple(f" {choice}" for choice in item.choices), item.right)
        )
    return found


def load_questions(arguments: argparse.Namespace) -> list[Question]:
    """Read every task that is asked for."""
    names = (
        arguments.names.split(",")
        if arguments.names
        else sorted(f.parent.name for f in arguments.tasks.glob("*/task.json"))
    )
    if not names:
        raise BadInput(f"{arguments.tasks} holds no folder with a task.json; give bigbench/benchmark_tasks")
    found = []
    for name in names:
        items = read_task(arguments.tasks / name / "task.json")
        found += questions_of(name, items, arguments.items, arguments.shots, arguments.seed)
    return found


def main() -> None:
    """Ask all questions of all arms."""
    arguments = parse()
    questions = load_questions(arguments)
    options = {name: getattr(arguments, name) for name in ("items", "shots", "tail", "seed")}
    record = {**ask_all(arguments, questions, models(arguments, "float32"), "asking questions"), "options": options}
    finish(arguments, json.loads(json.dumps(record, allow_nan=False)))


if __name__ == "__main__":
    main()
