"""A recipe: a pair of models and all that is done with it, from texts to benchmarks, as a TOML file; and carrying it out.

Knows the sections of the file and the jobs in their order; a step whose result is there is not made again. A rehearsal runs every
step on tiny models of the same families.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvlingo.compacting import compress_folder
from kvlingo.compression import CompressOptions
from kvlingo.distillation import DistillOptions
from kvlingo.errors import BadInput, MissingExtra
from kvlingo.evaluation import EvaluationOptions
from kvlingo.files import write_file
from kvlingo.harness import HarnessOptions, known_tasks, register, run_harness
from kvlingo.jobs import Say, Where, distill_folder, fit_pair
from kvlingo.manifest import StorageType
from kvlingo.rehearsal import check_family, local_tasks, some_texts, tiny_model
from kvlingo.shapes import FitOptions
from kvlingo.store import read_manifest
from kvlingo.trials import evaluate_folder

TOP = {"source", "target", "both_ways", "out", "about", "dtype", "device", "text", "store"}
SECTIONS = {"fit", "compress", "distill", "eval", "tasks", "dry_run"}
REHEARSED_FIT = {"tokens": 2500, "context_tokens": (32, 48), "held_out_examples": 2, "chat_share": 0.1}
REHEARSED_DISTILLING = {
    "steps": 2,
    "minutes": None,
    "batch": 2,
    "context_tokens": (16, 24),
    "continuation_tokens": 8,
    "judged_examples": 2,
    "judged_context": (24,),
    "vocabulary": None,
    "chat_share": 0.0,
}
REHEARSED_EVALUATION = {"continuation_tokens": 8, "documents": 3, "passkeys": 0, "attention_documents": 1}
REHEARSED_CONTEXT = 40


@dataclass(frozen=True)
class Recipe:
    """A pair of models and what is done with it.

    Fields:
        both_ways: the other direction is made too.
        text: files and folders to learn from; the prose that comes with Python if there are none.
        fit, distill, evaluation: what differs from `FitOptions`, `DistillOptions` and `EvaluationOptions`; with `auto_map` the
            pair decides on the kind of map.
        compress: what differs from `CompressOptions`: a smaller translator is made of the fitted one, and distilled in its place;
            None for no such step.
        contexts: a report is made at each; the one at the first becomes the translator's own.
        tasks: what lm-eval is asked; None for nothing.
        families: of source and target, by `model_type`: what a rehearsal's tiny models are.
    """

    name: str
    source: str
    target: str
    out: Path
    families: tuple[str, str]
    both_ways: bool = False
    text: tuple[Path, ...] = ()
    where: Where = field(default_factory=Where)
    store: StorageType = "float32"
    auto_map: bool = True
    fit: Mapping[str, Any] = field(default_factory=dict)
    compress: Mapping[str, Any] | None = None
    distill: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    contexts: tuple[int, ...] = (192,)
    tasks: HarnessOptions | None = None

    @property
    def place(self) -> Path:
        """Return the folder of the translator that is distilled, judged and asked."""
        return self.out if self.compress is None else self.out / "small"


# --- reading ---------------------------------------------------------------------------------------------------------


def read_recipe(file: Path) -> Recipe:
    """Read a recipe. Raises `BadInput` for a key that is not known: it would be ignored."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"can't read the recipe {file}: {error.strerror}; see recipes/ for examples") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"can't read the recipe {file}: {error}; see recipes/ for examples") from error
    refuse_unknown(data, TOP | SECTIONS, "the recipe")
    for key in ("source", "target", "dry_run"):
        if key not in data:
            raise BadInput(f"{file.name} has no {key}; see recipes/ for examples")
    for section in SECTIONS & set(data):
        if not isinstance(data[section], dict):
            raise BadInput(f"[{section}] of {file.name} is {data[section]!r}; write a table")
    refuse_unknown(data["dry_run"], {"source", "target"}, "[dry_run]")
    learning, evaluation = dict(data.get("fit", {})), dict(data.get("eval", {}))
    training = dict(data.get("distill", {}))
    if "steps" in training:  # a number of steps takes the time that it takes
        training.setdefault("minutes", None)
    contexts = tuple(evaluation.pop("contexts", (192,)))
    return Recipe(
        name=file.stem,
        source=data["source"],
        target=data["target"],
        out=Path(data.get("out", file.stem)),
        families=(check_family(data["dry_run"].get("source", "")), check_family(data["dry_run"].get("target", ""))),
        both_ways=bool(data.get("both_ways", False)),
        text=tuple(file.parent / place for place in data.get("text", ())),
        where=Where(data.get("device"), data.get("dtype")),
        store=data.get("store", "float32"),
        auto_map="map_kind" not in learning,
        fit=options("fit", learning, FitOptions),
        compress=options("compress", data["compress"], CompressOptions) if "compress" in data else None,
        distill=options("distill", training, DistillOptions),
        evaluation=options("eval", evaluation, EvaluationOptions),
        contexts=contexts,
        tasks=read_tasks(data["tasks"]) if "tasks" in data else None,
    )


def refuse_unknown(given: Mapping[str, Any], known: set[str], place: str) -> None:
    """Raise `BadInput` for the first key that is not known."""
    unknown = sorted(set(given) - known)
    if unknown:
        raise BadInput(f"{place} has no {unknown[0]!r}; its keys are {', '.join(sorted(known))}")


def options(section: str, given: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return a section as changes to its options, with lists as tuples."""
    refuse_unknown(given, {f.name for f in fields(kind)}, f"[{section}]")
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        kind(**changes)
    except (TypeError, ValueError) as error:
        raise BadInput(f"[{section}] can't be read: {error}") from error
    return changes


def read_tasks(given: Mapping[str, Any]) -> HarnessOptions:
    """Read what lm-eval is asked."""
    known = {f.name for f in fields(HarnessOptions)} - {"include", "dial"}
    refuse_unknown(given, known, "[tasks]")
    changes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return HarnessOptions(**{"tasks": (), **changes})


# --- carrying out ----------------------------------------------------------------------------------------------------


def run_recipe(file: Path, *, dry_run: bool, say: Say, tell: Say) -> dict[str, Any]:
    """Carry a recipe out, or rehearse it; return what each direction came to."""
    recipe = read_recipe(file)
    if not dry_run:
        if recipe.tasks is not None:
            register()
            known_tasks(recipe.tasks.tasks, None)  # hours before they are needed
        return carry_out(recipe, say, tell)
    with tempfile.TemporaryDirectory() as folder:
        return {"dry_run": True, **carry_out(rehearsed(recipe, Path(folder)), say, tell, rehearsing=True)}


def carry_out(recipe: Recipe, say: Say, tell: Say, *, rehearsing: bool = False) -> dict[str, Any]:
    """Make each direction of a recipe, step by step."""
    directions = [(recipe.source, recipe.target, recipe.out)]
    if recipe.both_ways:
        directions = [
            (recipe.source, recipe.target, recipe.out / "there"),
            (recipe.target, recipe.source, recipe.out / "back"),
        ]
    done = []
    for source, target, out in directions:
        say(f"{recipe.name}: {source} → {target}")
        steps = {
            "fit": make_fit,
            "compress": make_smaller,
            "distill": make_distilled,
            "eval": make_reports,
            "tasks": make_tasks,
        }
        told = {}
        if recipe.compress is None:
            del steps["compress"]
        if recipe.tasks is None:
            del steps["tasks"]
        for name, step in steps.items():
            say(f"step: {name}")
            try:
                told[name] = step(replace(recipe, source=source, target=target, out=out), say, tell)
            except MissingExtra as error:
                if not rehearsing:
                    raise
                told[name] = {"left_out": str(error)}
        done.append({"source": source, "target": target, "folder": str(out), "steps": told})
    return {"recipe": recipe.name, "directions": done}


def make_fit(recipe: Recipe, say: Say, tell: Say) -> Any:
    """Fit, unless the folder holds a translator."""
    if (recipe.out / "translator.json").is_file():
        return kept(say, "the translator is there")
    return fit_pair(
        recipe.source,
        recipe.target,
        recipe.out,
        texts=recipe.text,
        changes=recipe.fit,
        auto_map=recipe.auto_map,
        no_text=False,
        where=recipe.where,
        storage=recipe.store,
        overwrite=False,
        say=say,
        tell=tell,
    )


def make_smaller(recipe: Recipe, say: Say, tell: Say) -> Any:
    """Compress, unless that was done."""
    assert recipe.compress is not None
    if (recipe.place / "translator.json").is_file():
        return kept(say, "the smaller translator is there")
    return compress_folder(
        recipe.out,
        recipe.place,
        CompressOptions(**recipe.compress),
        weigh="sensitivity",
        source_name=None,
        target_name=None,
        texts=recipe.text,
        where=recipe.where,
        overwrite=False,
        say=say,
        tell=tell,
    )


def make_distilled(recipe: Recipe, say: Say, tell: Say) -> Any:
    """Distil, unless that was done."""
    if "distill" in read_manifest(recipe.place).options:
        return kept(say, "the translator is distilled")
    return distill_folder(
        recipe.place,
        source_name=None,
        target_name=None,
        texts=recipe.text,
        changes=recipe.distill,
        control_name=None,
        where=recipe.where,
        say=say,
        tell=tell,
    )


def make_reports(recipe: Recipe, say: Say, tell: Say) -> Any:
    """Evaluate at each context; the first report is the translator's own, all are files beside it."""
    verdicts = {}
    for number, context in enumerate(recipe.contexts):
        file = recipe.place / f"report-{context}.json"
        if file.is_file():
            verdicts[str(context)] = kept(say, f"{file.name} is there")
            continue
        report = evaluate_folder(
            recipe.place,
            source_name=None,
            target_name=None,
            texts=recipe.text,
            options=EvaluationOptions(**{**recipe.evaluation, "context_tokens": context}),
            where=recipe.where,
            keep=number == 0,
            tell=tell,
        )
        write_file(file, (report.to_json() + "\n").encode())
        verdicts[str(context)] = "PASS" if report.passed else "FAIL"
        say(f"{file.name}: {verdicts[str(context)]}")
    return verdicts


def make_tasks(recipe: Recipe, say: Say, tell: Say) -> Any:
    """Run the tasks on every arm, unless that was done."""
    assert recipe.tasks is not None
    file = recipe.place / "tasks.json"
    if file.is_file():
        return kept(say, f"{file.name} is there")
    record = run_harness(recipe.place, recipe.tasks, where=recipe.where, tell=tell)
    write_file(file, (json.dumps(record, allow_nan=False) + "\n").encode())
    return {"tasks": sorted(record["tasks"]), "counting": record["counting"]}


def kept(say: Say, why: str) -> str:
    """Say that a step's result is there."""
    say(f"kept: {why}")
    return "kept"


# --- rehearsing ------------------------------------------------------------------------------------------------------


def rehearsed(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with tiny models of its families and little of everything; its own options have been read by now."""
    source, target = (
        tiny_model(folder / side, family, side)
        for side, family in zip(("source", "target"), recipe.families, strict=True)
    )
    tasks = None
    if recipe.tasks is not None:
        names = local_tasks(folder / "tasks")
        tasks = replace(
            recipe.tasks, tasks=names, include=folder / "tasks", limit=2, shots=None, batch=2, max_length=None
        )
    return replace(
        recipe,
        source=source,
        target=target,
        out=folder / "out",
        text=(some_texts(folder / "texts"),),
        where=Where("cpu", "float32"),
        fit={**recipe.fit, **REHEARSED_FIT},
        distill={**recipe.distill, **REHEARSED_DISTILLING},
        evaluation={**recipe.evaluation, **REHEARSED_EVALUATION},
        contexts=(REHEARSED_CONTEXT,),
        tasks=tasks,
    )


def lines(done: Mapping[str, Any]) -> Iterator[str]:
    """Return in words what a recipe came to."""
    for direction in done["directions"]:
        steps = direction["steps"]
        left_out = [f"{name} left out: {told['left_out']}" for name, told in steps.items() if is_left_out(told)]
        made = [name for name, told in steps.items() if not is_left_out(told)]
        yield f"{done['recipe']}: {', '.join(made)} done"
        yield from left_out


def is_left_out(told: Any) -> bool:
    """Tell whether a step could not be rehearsed here."""
    return isinstance(told, dict) and "left_out" in told
