"""lm-evaluation-harness on every arm: register the `kvlingo` model type, run tasks, compare the arms item by item.

Knows lm-eval's entry and its results. lm-eval finds model types in its own registry only, so its own command can't know this one:
after `register()`, `lm_eval.simple_evaluate(model="kvlingo", …)` does, and `kvlingo lm-eval` is the command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlingo.environment import environment_card
from kvlingo.errors import BadInput, MissingExtra
from kvlingo.harness_arms import ARMS, NATIVE, NO_CONTEXT, SOURCE, TRANSLATED, Dial, check_arm, load_cast
from kvlingo.jobs import Say, Where
from kvlingo.metrics import cluster_bootstrap, estimates
from kvlingo.progress import progress_bar
from kvlingo.questions import beats
from kvlingo.workplace import model_names

MODEL_TYPE = "kvlingo"
IMPLEMENTATION = "kvlingo.harness_model:KVLingoLM"
USUAL_ARMS = (NATIVE, TRANSLATED, "token-only", SOURCE, NO_CONTEXT)
INVALID = ("", "[invalid]")
"""What lm-eval's filters leave of an answer in which they find none."""


@dataclass(frozen=True)
class HarnessOptions:
    """What to ask of whom.

    Fields:
        tasks: lm-eval's names of tasks, groups and tags.
        include: a folder of further tasks (YAML).
        shots: solved examples before each question; the task's own number if None.
        limit: items of each task; all if None.
        chat: render contexts as chats: for the target by its template, for the source by its own.
        lengths: of contexts that a task makes itself, in the target's tokens (RULER).
    """

    tasks: tuple[str, ...]
    arms: tuple[str, ...] = USUAL_ARMS
    include: Path | None = None
    shots: int | None = None
    limit: int | None = None
    batch: int = 1
    chat: bool = False
    system: str | None = None
    max_length: int | None = None
    lengths: tuple[int, ...] = ()
    dial: Dial = field(default_factory=Dial)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tasks:
            raise BadInput("no task is named; give lm-eval's names, like gsm8k,arc_challenge")
        for arm in self.arms:
            check_arm(arm)


def register() -> None:
    """Put the model type into lm-eval's registry. Raises `MissingExtra` without lm-eval."""
    try:
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise MissingExtra("lm-evaluation-harness is not installed: pip install 'kvlingo[lm-eval]'") from error
    if MODEL_TYPE not in model_registry:
        model_registry.register(MODEL_TYPE, target=IMPLEMENTATION)


def known_tasks(names: Sequence[str], include: Path | None, metadata: Mapping[str, Any] | None = None) -> Any:
    """Return lm-eval's manager of tasks; `metadata` goes to tasks that make their own texts.

    Raises:
        BadInput: lm-eval does not know a name.
    """
    from lm_eval.tasks import TaskManager

    made_with = dict(metadata or {})
    if include is not None:  # reading lm-eval's own thousands of files takes a minute: not where they aren't needed
        manager = TaskManager(include_path=str(include), include_defaults=False, metadata=made_with)
        if all(name in manager.all_tasks for name in names):
            return manager
    manager = TaskManager(include_path=None if include is None else str(include), metadata=made_with)
    unknown = unknown_tasks(names, manager)
    if unknown:
        raise BadInput(f"lm-eval {version('lm_eval')} has no task {unknown[0]!r}; `lm-eval ls tasks` lists them")
    return manager


def unknown_tasks(names: Sequence[str], manager: Any) -> list[str]:
    """Return the names of tasks that lm-eval does not know."""
    known = set(manager.all_tasks)
    return [name for name in names if name not in known]


def run_harness(
    folder: Path,
    options: HarnessOptions,
    *,
    source_name: str | None = None,
    target_name: str | None = None,
    where: Where | None = None,
    tell: Say,
) -> dict[str, Any]:
    """Run tasks on every arm with models that are loaded once; return plain values that `json` writes."""
    register()
    _, target_place = model_names(folder, source_name, target_name)
    made_with = {"tokenizer": target_place, **({"max_seq_lengths": list(options.lengths)} if options.lengths else {})}
    manager = known_tasks(options.tasks, options.include, made_with)
    cast = load_cast(TRANSLATED, source_name, target_name, folder, where or Where(), everyone=True)
    results = {}
    for arm in map(check_arm, options.arms):
        with progress_bar() as bar:
            results[arm] = run_arm(arm, cast, options, manager, bar.count)
        tell(f"{arm}: {ARMS[arm]}: done")
    assert cast.source is not None
    assert cast.target is not None
    return {
        "pair": {"source": cast.source.name, "target": cast.target.name},
        "options": json.loads(json.dumps(asdict(options), default=str)),
        **compared(results, options.seed),
        "held": {arm: result["config"]["kvlingo"] for arm, result in results.items()},
        "lm_eval": {"version": version("lm_eval"), "task_versions": results[options.arms[0]]["versions"]},
        "environment": environment_card(),
    }


def run_arm(arm: str, cast: Any, options: HarnessOptions, manager: Any, progress: Any) -> dict[str, Any]:
    """Run all tasks on one arm by lm-eval's own `simple_evaluate`."""
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model

    dial = options.dial
    lm = get_model(MODEL_TYPE)(
        arm=arm,
        cast=cast,
        sink=dial.sink,
        tail=dial.tail,
        native_layers=dial.native_layers,
        batch_size=options.batch,
        max_length=options.max_length,
        seed=options.seed,
        progress=progress,
    )
    found = simple_evaluate(
        model=lm,
        tasks=list(options.tasks),
        num_fewshot=options.shots,
        limit=options.limit,
        system_instruction=options.system,
        apply_chat_template=options.chat,
        fewshot_as_multiturn=options.chat,
        task_manager=manager,
        log_samples=True,
        random_seed=options.seed,
        numpy_random_seed=options.seed,
        torch_random_seed=options.seed,
        fewshot_random_seed=options.seed,
    )
    result: dict[str, Any] = dict(found)
    return result


# --- comparing -------------------------------------------------------------------------------------------------------

Column = dict[Any, float]
"""An arm's figure for each item of a task."""


def compared(results: Mapping[str, Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Compare the arms' answers to the same items, by task, filter and metric."""
    columns = {arm: columns_of(result) for arm, result in results.items()}
    names = list(dict.fromkeys(name for found in columns.values() for name in found))
    tasks: dict[str, Any] = {}
    for task, way, metric in names:
        each = {arm: found[task, way, metric] for arm, found in columns.items() if (task, way, metric) in found}
        tasks.setdefault(task, {})[f"{metric},{way}"] = one_metric(each, seed)
    return {
        "tasks": tasks,
        "counting": [task for task, rows in tasks.items() if any(row["counts"] for row in rows.values())],
        "unparseable": {arm: unparseable(result) for arm, result in results.items()},
        "groups": {arm: result.get("groups", {}) for arm, result in results.items()},
    }


def columns_of(result: Mapping[str, Any]) -> dict[tuple[str, str, str], Column]:
    """Return every metric that is one number an item."""
    found: dict[tuple[str, str, str], Column] = {}
    for task, samples in result["samples"].items():
        for sample in samples:
            for metric in sample["metrics"]:
                value = sample.get(metric)
                if isinstance(value, (bool, int, float)):
                    found.setdefault((task, sample["filter"], metric), {})[sample["doc_id"]] = float(value)
    return found


def one_metric(columns: Mapping[str, Column], seed: int) -> dict[str, Any]:
    """Return each arm's mean with what it keeps of native's, over the items that every arm was asked.

    It counts where native beats the source and itself without the context by two standard errors of the paired difference:
    elsewhere there is nothing to keep. `gap_recovered` is the share of what native has over the source.
    """
    items = sorted(set.intersection(*(set(column) for column in columns.values())), key=str)
    values = {
        arm: torch.tensor([column[item] for item in items], dtype=torch.float64) for arm, column in columns.items()
    }
    ones, weights = torch.ones(len(items), dtype=torch.float64), cluster_bootstrap([str(i) for i in items], seed=seed)
    native = values.get(NATIVE)
    return {
        "items": len(items),
        "counts": native is not None
        and len(values) > 1
        and all(beats(native, values[rival]) for rival in (SOURCE, NO_CONTEXT) if rival in values),
        "arms": {
            arm: estimates(ratios(mine, native, values.get(SOURCE), ones), weights) for arm, mine in values.items()
        },
    }


def ratios(mine: Tensor, native: Tensor | None, source: Tensor | None, ones: Tensor) -> dict[str, Any]:
    """Return an arm's figures as ratios of sums over the same items."""
    found = {"mean": (mine, ones)}
    if native is not None:
        found |= {"retention": (mine, native), "below_native": (native - mine, ones)}
        if source is not None:
            found["gap_recovered"] = (mine - source, native - source)
    return found


def unparseable(result: Mapping[str, Any]) -> dict[str, float]:
    """Return by task and filter the share of generated answers in which no answer was found."""
    found: dict[str, list[bool]] = {}
    for task, samples in result["samples"].items():
        if result["configs"][task].get("output_type") != "generate_until":
            continue
        for sample in samples:
            answers = sample["filtered_resps"]
            first = answers[0] if isinstance(answers, list) and answers else answers
            is_empty = isinstance(first, str) and first.strip() in INVALID
            found.setdefault(f"{task},{sample['filter']}", []).append(is_empty)
    return {name: sum(values) / len(values) for name, values in found.items()}


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Return the record in words: a line for each task and metric, those that don't count in brackets."""
    for task, rows in record["tasks"].items():
        for metric, row in rows.items():
            told = ", ".join(f"{arm} {number(figures['mean'])}" for arm, figures in row["arms"].items())
            kept = row["arms"].get(TRANSLATED, {}).get("retention")
            share = f"; {TRANSLATED} keeps {number(kept)} of {NATIVE}" if kept else ""
            line = f"{task} {metric} ({row['items']}): {told}{share}"
            yield line if row["counts"] else f"[{line}]"
    for arm, held in record["held"].items():
        again = sum(held["read_again"].values())
        if again:
            reason = next(iter(held["read_again"]))
            yield f"{arm}: {again} of {held['contexts']} contexts were read again, most often: {reason}"


def number(found: Mapping[str, float] | None) -> str:
    """Format a figure."""
    return "–" if found is None else f"{found['mean']:.3f}"
