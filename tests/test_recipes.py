"""Recipes: every file is read whole, its tasks are lm-eval's, and its steps run on tiny models of the same families."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvlingo import recipes
from kvlingo.errors import BadInput, MissingExtra
from kvlingo.recipes import read_recipe, rehearsed, run_recipe
from kvlingo.rehearsal import FAMILIES, tiny_model
from tests.test_cli import Run, assert_refused, last_json, run  # noqa: F401 - a fixture

FOLDER = Path(__file__).parents[1] / "recipes"
FILES = sorted(FOLDER.glob("*.toml"))
PAIRS = {
    "Qwen/Qwen3-4B": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-0.6B": "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-3.2-3B-Instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "google/gemma-2-2b-it": "google/gemma-2-9b-it",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-Small-24B-Instruct-2501",
    "Qwen/Qwen3-8B": "deepseek-ai/DeepSeek-V3",
}
HAS_LM_EVAL = find_spec("lm_eval") is not None


def test_there_is_a_recipe_for_every_pair() -> None:
    assert {r.source: r.target for r in map(read_recipe, FILES)} == PAIRS


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_recipe_says_what_to_do(file: Path) -> None:
    recipe = read_recipe(file)
    assert recipe.fit["tokens"] >= 100_000
    assert recipe.distill["steps"] >= 1000
    assert recipe.distill["minutes"] is None  # else it would stop after the usual ten
    assert min(recipe.contexts) == 192
    assert recipe.where.dtype == recipe.store == "bfloat16"
    assert recipe.tasks is not None
    assert {"native", "translated", "source", "no-context"} <= set(recipe.tasks.arms)
    assert recipe.both_ways == ("↔" in file.read_text(encoding="utf-8"))


@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm-evaluation-harness is not installed: pip install 'kvlingo[lm-eval]'")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lm_eval_knows_the_tasks_of_all_recipes_and_no_other_name() -> None:
    """Reading lm-eval's thousands of files takes a while: once for all."""
    from lm_eval.tasks import TaskManager

    from kvlingo.harness import unknown_tasks

    manager = TaskManager()
    wanted = {name for r in map(read_recipe, FILES) if r.tasks for name in r.tasks.tasks}
    assert unknown_tasks(sorted(wanted), manager) == []
    assert unknown_tasks(["gsm9k"], manager) == ["gsm9k"]
    # What the recipes say is missing is missing: once lm-eval has it, it belongs into them.
    assert not [name for name in manager.all_tasks if "quac" in name.lower() or "multichallenge" in name.lower()]


# --- what is refused -----------------------------------------------------------------------------------------------------

WHOLE = """
source = "a"
target = "b"
[dry_run]
source = "qwen3"
target = "qwen3"
[fit]
tokens = 1000
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (WHOLE.replace("tokens", "tokenz"), "[fit] has no 'tokenz'"),
        ("colour = 1\n" + WHOLE, "has no 'colour'"),
        (WHOLE + "[distill]\nstep = 3", "[distill] has no 'step'"),
        (WHOLE + "[compress]\nmegabytes = 3", "[compress] has no 'megabytes'"),
        (WHOLE + "[eval]\ncontext = 3", "[eval] has no 'context'"),
        (WHOLE + '[tasks]\nnames = ["gsm8k"]', "[tasks] has no 'names'"),
        (WHOLE + '[tasks]\ntasks = ["gsm8k"]\narms = ["magic"]', "no arm 'magic'"),
        (WHOLE + "[tasks]\nlimit = 3", "no task is named"),
        (WHOLE.replace('target = "qwen3"', 'target = "mamba9"'), "'mamba9'"),
        (WHOLE.replace('source = "a"', ""), "no source"),
        ("fit = 3\n" + WHOLE.replace("[fit]\ntokens = 1000", ""), "write a table"),
        ("source = ", "can't read the recipe"),
    ],
    ids=lambda x: x if len(x) < 40 else "",
)
def test_what_would_be_ignored_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(BadInput) as refused:
        read_recipe(file)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command_refuses_in_one_line(tmp_path: Path, run: Run) -> None:  # noqa: F811
    assert_refused(run("recipe", tmp_path / "nothing.toml"), "can't read the recipe")


# --- carrying out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_are_of_the_family(family: str, tmp_path: Path) -> None:
    from kvlingo.models import load_model

    lm = load_model(tiny_model(tmp_path / "m", family, "target"))
    assert lm.model.config.model_type == family
    assert lm.target_refusal is None
    assert lm.tokenizer("ab")["input_ids"][0] == lm.tokenizer.bos_token_id
    assert "user\nhello" in lm.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if HAS_LM_EVAL:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def done_steps(done: dict[str, Any]) -> set[str]:
    (direction,) = done["directions"]
    return {name for name, told in direction["steps"].items() if told and not recipes.is_left_out(told)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("file", [f for f in FILES if not read_recipe(f).both_ways], ids=lambda f: f.stem)
def test_every_step_of_a_recipe_runs_on_tiny_models(file: Path, run: Run) -> None:  # noqa: F811
    ran = run("recipe", file, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    done = last_json(ran)
    assert done["dry_run"]
    small = {"compress"} if read_recipe(file).compress is not None else set()
    assert done_steps(done) == {"fit", "distill", "eval"} | small | ({"tasks"} if HAS_LM_EVAL else set())
    steps = done["directions"][0]["steps"]
    assert steps["distill"]["steps"] == 2
    assert set(steps["eval"].values()) <= {"PASS", "FAIL"}
    if HAS_LM_EVAL:
        assert steps["tasks"]["tasks"] == ["rehearsal_choose", "rehearsal_say"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_ways_and_what_is_there_is_kept(tmp_path: Path) -> None:
    file = FOLDER / "qwen3-0.6b-1.7b.toml"
    recipe = rehearsed(read_recipe(file), tmp_path)

    recipe = replace(recipe, tasks=None)
    said: list[str] = []
    done = recipes.carry_out(recipe, said.append, lambda _: None)
    there, back = done["directions"]
    assert (there["source"], there["target"]) == (back["target"], back["source"])
    assert (recipe.out / "back" / "translator.json").is_file()
    assert json.loads((recipe.out / "there" / "report-40.json").read_text())["verdict"] in ("PASS", "FAIL")
    assert not [line for line in said if line.startswith("kept")]
    again: list[str] = []
    recipes.carry_out(recipe, again.append, lambda _: None)
    assert len([line for line in again if line.startswith("kept")]) == 6


@pytest.mark.skipif(HAS_LM_EVAL, reason="lm-evaluation-harness is installed")
def test_without_lm_eval_a_recipe_is_refused_before_hours_of_work() -> None:
    with pytest.raises(MissingExtra, match=r"kvlingo\[lm-eval\]"):
        run_recipe(FILES[0], dry_run=False, say=print, tell=print)
