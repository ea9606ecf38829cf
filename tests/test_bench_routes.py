"""The parts of `bench.routes` that need no real weights, and the whole of it once on tiny models."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench import routes as bench
from kvlingo.cost import TargetCost, pass_flops
from kvlingo.errors import BadInput
from kvlingo.serve.protocol import AUTO, Done, Part
from kvlingo.serve.routing.comparing import recorded
from kvlingo.serve.routing.learning import labelled
from tests import tiny

COST = TargetCost(1_000, [8], [None], head_weights=500)


def test_questions_are_of_every_kind_and_none_is_its_own_example() -> None:
    asked = bench.write_questions(80, 3, 0)
    assert asked == bench.write_questions(80, 3, 0) != bench.write_questions(80, 3, 1)
    assert set(Counter(each.kind for each in asked).values()) == {10}
    assert len({each.prompt for each in asked}) == 80
    for each in asked:
        *examples, last = each.prompt.split("\n\n")
        assert len(examples) == 3
        assert last.endswith("\nAnswer:")
        assert last not in each.prompt.removesuffix(last)
    with pytest.raises(BadInput, match="fewer --questions"):
        bench.write_questions(800, 3, 0)


def test_each_half_has_every_kind() -> None:
    asked = bench.write_questions(80, 2, 0)
    halves = {True: Counter[str](), False: Counter[str]()}
    for each, to_fit in zip(asked, bench.first_half(asked), strict=True):
        halves[to_fit][each.kind] += 1
    assert halves[True] == halves[False]


@pytest.mark.parametrize("said", [" 42", "42.\n\nQuestion", "\n42"])
def test_an_answer_is_right_by_its_first_line(said: str) -> None:
    assert bench.is_right(said, "42")
    assert bench.is_right("paris", "Paris")


@pytest.mark.parametrize("said", ["Paris", "420", "it is 42", "4\n42", ""])
def test_any_other_answer_is_wrong(said: str) -> None:
    assert not bench.is_right(said, "42")


def test_a_row_holds_what_both_halves_read() -> None:
    """Costs by hand: what was read and said once, and the head for each token said; of an answer of two, both."""
    small = bench.Told(" 4", 10.0, 5.0, -0.5, 20, Done("stop", 2, 5.0))
    big = bench.Told(" 5", 30.0, 9.0, -0.1, 20, Done("length", 3, 9.0))
    parts = (Part("small", 2, 1, recomputed_tokens=30), Part("big", 1, 1, recomputed_tokens=25), Part("big"))
    both = bench.Told(" 4", 50.0, 9.0, None, 20, Done("stop", 3, 9.0, parts=parts))
    asked = bench.Asked("sums", "What is 2 plus 2?", "4")
    row = bench.row_of(asked, {"small": small, "big": big, AUTO: both}, {"small": COST, "big": COST})
    assert (row["small"]["quality"], row["big"]["quality"], row["token"]["quality"]) == (1.0, 0.0, 1.0)
    assert (row["small"]["answer"], row["small"]["cut"]) == (" 4", False)
    assert row["token"]["share_big"] == pytest.approx(1 / 3)
    assert bench.gflops(COST, Part("small", 2, recomputed_tokens=20)) == (pass_flops(COST, 22) + 2 * 500 * 2) / 1e9
    assert bench.gflops(COST, Part("big")) == 0.0
    found = recorded(json.loads(json.dumps(row)))
    assert found.mixed is not None
    assert labelled(row).big is False
    assert bench.outcomes([row]) == {"both": 0, "small alone": 1, "big alone": 0, "neither": 0}


def test_all_of_it_on_tiny_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("small", 0), ("big", 5)):
        lm = tiny.language_model("llama", seed=seed)
        lm.model.save_pretrained(tmp_path / name)
        lm.tokenizer.save_pretrained(tmp_path / name)
    places = [word for name in ("small", "big", "work") for word in (f"--{name}", str(tmp_path / name))]
    with pytest.raises(BadInput, match="at least two of a kind"):
        bench.main([*places, "--questions", "8"])
    bench.main([*places, "--questions", "16", "--shots", "1", "--out", str(tmp_path / "routes.json")])
    record = json.loads((tmp_path / "routes.json").read_text(encoding="utf-8"))
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(record["outcomes"].values()) == 16
    assert "give at least 20 of each" in record["fit"]["reason"]
    assert {"always small", "always big", "random", "threshold", "cascade"} <= set(record["eval"]["arms"])
    assert "environment" in record
    rows = [json.loads(line) for line in (tmp_path / "work" / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 8
    assert all("token" in row for row in rows)
