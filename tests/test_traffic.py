"""What hand-overs are worth to a service, beside the same sums done by hand; and the command that tells it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlingo import cli
from kvlingo.cost import TargetCost, handoff_flops, pass_flops
from kvlingo.errors import BadInput
from kvlingo.traffic import Accelerator, Target, Traffic, estimate, turn_at
from tests import tiny

COST = TargetCost(layer_weights=1_000_000_000, query_widths=(2048, 2048), windows=(None, 512))
TARGET = Target(COST, (20_000_000, 20_000_000), (1024, 1024))
TRAFFIC = Traffic((1000, 8000, 8000), 0.3, 100, 200, 30.0)
ONE = Accelerator(tflops=100, gigabytes_per_s=1000, flops_share=0.5, bandwidth_share=0.5, batch=10, price_per_hour=2.0)


def by_hand() -> dict[str, float]:
    """Go through the turns one by one."""
    seconds = {"reprefill": 0.0, "handoff": 0.0}
    prefill = dict(seconds)
    for context in TRAFFIC.contexts:
        tokens = context + 100
        again = pass_flops(COST, tokens) / 50e12
        over = handoff_flops(COST, TARGET.map_weights, tokens, sink=1, tail=100) / 50e12
        same = pass_flops(COST, 100, after=context) / 50e12
        held = 1024 * tokens + 1024 * min(tokens, 512)
        answer = 200 * 2 * (1e9 / 10 + held) / 500e9
        for way, switch in (("reprefill", again), ("handoff", min(over, again))):
            prefill[way] += (0.3 * switch + 0.7 * same) / 3
            seconds[way] += (0.3 * switch + 0.7 * same + answer) / 3
    users = {way: 3600 * 0.7 / (30 * s) for way, s in seconds.items()}
    hours = {way: 1e6 * s / 3600 / 0.7 for way, s in seconds.items()}
    return {
        "saved": 1 - prefill["handoff"] / prefill["reprefill"],
        "users": users["handoff"],
        "gained": users["handoff"] / users["reprefill"] - 1,
        "hours": hours["handoff"],
        "money": 2 * (hours["reprefill"] - hours["handoff"]),
    }


def test_it_is_what_the_sums_by_hand_give() -> None:
    told, by = estimate(TARGET, TRAFFIC, ONE), by_hand()
    assert told["prefill_saved_share"] == pytest.approx(by["saved"])
    assert told["users_per_accelerator"]["handoff"] == pytest.approx(by["users"])
    assert told["users_per_accelerator"]["gained_share"] == pytest.approx(by["gained"])
    assert told["accelerator_hours_per_million_turns"]["handoff"] == pytest.approx(by["hours"])
    assert told["cost_per_million_turns"]["saved"] == pytest.approx(by["money"])
    assert told["tokens_not_read_again_per_million_turns"] == pytest.approx(0.3e6 * (999 + 7999 + 7999) / 3)
    assert 0.2 < by["saved"] < 0.95
    assert by["gained"] > 0.01


def gained(target: Target = TARGET, accelerator: Accelerator = ONE, **changes: Any) -> float:
    share = estimate(target, replace(TRAFFIC, **changes), accelerator)["users_per_accelerator"]["gained_share"]
    assert isinstance(share, float)
    return share


def test_it_goes_the_way_it_must() -> None:
    assert gained(switch_share=0.0) == 0
    assert 0 < gained(switch_share=0.1) < gained(switch_share=0.2) < gained(switch_share=1.0)
    assert gained(contexts=(1000,)) < gained(contexts=(16000,))
    assert gained(answer_tokens=2000) < gained(answer_tokens=20)
    assert gained(replace(TARGET, map_weights=(10_000_000,) * 2)) > gained()
    # What can't change a share does not.
    assert gained(turns_per_user_hour=5.0) == pytest.approx(gained())
    assert gained(accelerator=replace(ONE, occupancy=0.1)) == pytest.approx(gained())


def test_where_a_hand_over_costs_more_nothing_is_gained_and_nothing_lost() -> None:
    heavy = replace(TARGET, map_weights=(10**12, 10**12))
    told = estimate(heavy, TRAFFIC, ONE)
    assert (told["prefill_saved_share"], told["users_per_accelerator"]["gained_share"]) == (0, 0)
    assert told["tokens_not_read_again_per_million_turns"] == 0
    assert {row["taken"] for row in told["contexts"]} == {"reprefill"}
    assert {row["taken"] for row in estimate(TARGET, TRAFFIC, ONE)["contexts"]} == {"handoff"}
    assert not turn_at(1000, heavy, TRAFFIC, ONE).translated


def test_every_number_that_goes_in_is_among_the_assumptions() -> None:
    odd = Accelerator(123.0, 4567.0, 0.31, 0.37, 41, 0.43, 3, 6.5)
    text = "\n".join(estimate(TARGET, Traffic((1234, 5678), 0.123, 149, 151, 15.5), odd)["assumptions"])
    for number in ("123 TFLOP", "4,567 GB", "31%", "37%", "41 answers", "43%", "3 bytes", "6.5"):
        assert number in text
    for number in ("12.3%", "2 contexts of 1,234 to 5,678", "149", "151", "15.5 turns", "1,000.0 M", "40.0 M"):
        assert number in text
    assert len(asdict(odd)) == 8  # a new one has to be told too
    assert len(asdict(TRAFFIC)) == 5


def test_without_a_price_there_is_no_cost() -> None:
    told = estimate(TARGET, TRAFFIC, replace(ONE, price_per_hour=None))
    assert told["cost_per_million_turns"] is None
    assert "not given" in " ".join(told["assumptions"])


@pytest.mark.parametrize("name", [*asdict(ONE)])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_an_impossible_accelerator_is_refused(name: str, value: float) -> None:
    with pytest.raises(BadInput, match="above 0"):
        replace(ONE, **{name: value})


@pytest.mark.parametrize(
    "changes",
    [{"contexts": ()}, {"contexts": (5, 0)}, {"switch_share": 1.1}, {"switch_share": math.nan}, {"answer_tokens": 0}],
    ids=str,
)
def test_impossible_traffic_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="give"):
        replace(TRAFFIC, **changes)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two models of which only configs and tokenizers are there."""
    root = tmp_path_factory.mktemp("pair")
    for name, family in (("source", "llama"), ("target", "gemma3")):
        lm = tiny.language_model(family, dtype=torch.float32)
        lm.model.config.save_pretrained(root / name)
        lm.tokenizer.save_pretrained(root / name)
        assert not list((root / name).glob("*.safetensors"))
    return SimpleNamespace(source=str(root / "source"), target=str(root / "target"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> SimpleNamespace:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    printed = capsys.readouterr()
    return SimpleNamespace(code=caught.value.code, out=printed.out, err=printed.err)


def test_the_command_tells_by_configs_alone(
    pair: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths"
    file.write_text("300\n20000\n20000\n")
    ran = run(
        capsys, "plan", pair.source, pair.target, "--context", file, "--price", 2, "--switch-share", 0.5, "--json"
    )
    assert ran.code == 0
    told = json.loads(ran.out.splitlines()[-1])
    assert [row["tokens"] for row in told["contexts"]] == [300, 20000]
    assert told["cost_per_million_turns"]["saved"] >= 0
    words = " ".join(ran.out.split())
    assert words.count("assumed:") == len(told["assumptions"])
    for line in told["assumptions"]:
        assert line[:60] in words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--context", "1,x"], "positive numbers"),
        (["--context", "0"], "positive numbers"),
        (["--switch-share", "2"], "from 0 to 1"),
        (["--batch", "0"], "above 0"),
        (["--occupancy", "1.5"], "up to 1"),
        (["--price", "-1"], "above 0"),
        (["--tflops", "fast"], "--help"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(
    pair: SimpleNamespace, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(capsys, "plan", pair.source, pair.target, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "12\nmany\n", "\x00", "9" * 13])
def test_a_file_without_numbers_is_one_line(
    pair: SimpleNamespace, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths").write_text(text)
    ran = run(capsys, "plan", pair.source, pair.target, "--context", tmp_path / "lengths")
    assert (ran.code, ran.out) == (2, "")
    assert "one number of tokens a line" in ran.err
    assert ran.err.count("\n") == 1
