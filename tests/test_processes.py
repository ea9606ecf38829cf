"""Fitting and distilling on two processes: what comes out is what one process makes, and what is refused takes one line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from kvlingo import cli
from kvlingo.errors import BadInput
from kvlingo.processes import ALONE, Processes
from tests import tiny
from tests.test_cli import SMALL_FIT, SMALL_TRAINING, names_in, relative_gap
from tests.test_cli import pair as pair  # a fixture
from tests.together import DISTILL, distilled, fitted

REPO = Path(__file__).parents[1]
PATIENCE_S = 240

pytest.importorskip("accelerate", reason="several processes need accelerate (the extra train)")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def started(*commands: Sequence[str]) -> list[SimpleNamespace]:
    """Run one command in each of several processes that know of each other; return how each ended."""
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(len(commands)),
                LOCAL_WORLD_SIZE=str(len(commands)),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            cwd=REPO,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, command in enumerate(commands)
    ]
    ended = []
    try:
        for process in running:
            out, err = process.communicate(timeout=PATIENCE_S)
            ended.append(SimpleNamespace(code=process.returncode, out=out, err=err))
    finally:
        for process in running:
            process.kill()
    return ended


# --- equal to one process --------------------------------------------------------------------------------------------


def test_two_processes_make_what_one_makes_also_when_they_are_stopped_and_go_on(tmp_path: Path) -> None:
    """Sums to rounding in float64, maps and losses to what that and another order of float32 gradients make of it."""
    ended = started(*[["-m", "tests.together", tmp_path]] * 2)
    assert [e.code for e in ended] == [0, 0], ended
    of = fitted(None)
    alone = distilled(of, None)
    first, second = (load_file(tmp_path / f"sums-{rank}.safetensors") for rank in (0, 1))
    for name, mine in of.stats.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], mine, rtol=1e-12, atol=1e-9)
    maps = load_file(tmp_path / "maps-0.safetensors")
    for name, mine in of.translator.state_dict().items():
        torch.testing.assert_close(maps[name], mine, rtol=1e-5, atol=1e-6)
    curves = [json.loads((tmp_path / f"curve-{rank}.json").read_text()) for rank in (0, 1)]
    assert curves[0] == curves[1]
    assert curves[0]["count"] == 2
    assert curves[0]["steps"] == alone.curve.steps == list(range(1, DISTILL.steps + 1))
    assert curves[0]["loss_nats"] == pytest.approx(alone.curve.loss_nats, rel=1e-4)
    assert curves[0]["held_out_kl_nats"] == pytest.approx(alone.curve.held_out_kl_nats, rel=1e-4)
    moved, moved_second = (load_file(tmp_path / f"distilled-{rank}.safetensors") for rank in (0, 1))
    for name, start in maps.items():
        assert torch.equal(moved[name], moved_second[name]), name
        change, mine = moved[name] - start, alone.translator.state_dict()[name] - of.translator.state_dict()[name]
        assert float((change - mine).norm()) <= 0.02 * float(mine.norm()) + 1e-6, name


def test_the_commands_under_accelerate_launch_and_torchrun(pair: SimpleNamespace, tmp_path: Path) -> None:
    """The first process alone prints and writes; the translator is the one that one process makes."""
    fit = ["fit", pair.source, pair.target, "--text", pair.texts, *SMALL_FIT]
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    accelerate = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port"]
    together, alone = tmp_path / "together", tmp_path / "alone"
    distill = ["--text", pair.texts, "--steps", "2", *SMALL_TRAINING, "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*fit, "--out", str(alone)])
    assert ended.value.code == 0
    told = []
    for launcher, command in (
        (accelerate, [*fit, "--out", str(together), "--json"]),
        (torchrun, ["distill", str(together), *distill]),
    ):
        words = [sys.executable, "-m", *launcher, str(free_port()), "-m", "kvlingo.cli", *command]
        ran = subprocess.run(words, env=environment(), cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("saved ") == 1
        told.append(json.loads(ran.stdout.rstrip("\n").splitlines()[-1]))
        if command[0] == "fit":
            assert names_in(together) == names_in(alone)
            # The forward passes are float32, so sums agree to its rounding, which a nearly collinear solve magnifies in single
            # weights: hence the sums closely, and the maps as a whole.
            sums = ("work/stats-training.safetensors", "work/stats-held-out.safetensors")
            for file, most in (*((name, 1e-5) for name in sums), ("translator.safetensors", 1e-3)):
                made, mine = (load_file(folder / file) for folder in (together, alone))
                assert made.keys() == mine.keys()
                for name in mine.keys() - {"note", "tokens"}:
                    assert relative_gap(made[name], mine[name]) < most, (file, name)
    with pytest.raises(SystemExit) as ended:
        cli.main(["distill", str(alone), *distill])
    assert ended.value.code == 0
    curves = [json.loads((folder / "distillation.json").read_text()) for folder in (together, alone)]
    assert curves[0]["loss_nats"] == pytest.approx(curves[1]["loss_nats"], rel=1e-3)
    assert told[1]["steps"] == 2
    assert not list((together / "work" / "translator").iterdir())  # the checkpoint went when all was saved


# --- refused in one line ---------------------------------------------------------------------------------------------


def assert_one_line(ended: Sequence[SimpleNamespace], *words: str) -> None:
    assert [e.code for e in ended] == [2] * len(ended), ended
    lines = [line for e in ended for line in e.err.splitlines() if "kvlingo: " in line]
    assert len(lines) == 1, ended
    assert "Traceback" not in "".join(e.err for e in ended)
    for word in words:
        assert word in lines[0]


def test_other_arguments_in_one_process_are_refused_by_all(pair: SimpleNamespace, tmp_path: Path) -> None:
    fit = ["-m", "kvlingo.cli", "fit", pair.source, pair.target, "--text", pair.texts, "--out", tmp_path / "t"]
    ended = started([*fit, *SMALL_FIT], [*fit, *SMALL_FIT, "--reach", "0"])
    assert_one_line(ended, "the 2 processes differ in options", "same arguments")
    assert not (tmp_path / "t").exists()


def test_what_one_process_refuses_all_refuse(pair: SimpleNamespace, tmp_path: Path) -> None:
    fit = ["-m", "kvlingo.cli", "fit", pair.source, pair.target, "--out", tmp_path / "t", *SMALL_FIT, "--text"]
    ended = started([*fit, pair.texts], [*fit, tmp_path / "nowhere"])
    assert_one_line(ended, "process 1 of 2: ", "nowhere")
    assert not (tmp_path / "t").exists()


def test_more_processes_than_there_is_work_for_are_refused() -> None:
    with pytest.raises(BadInput, match="9 processes are too many for 3 texts: start at most 3"):
        Processes(0, 9).refuse_more_than(3, "texts")
    Processes(0, 3).refuse_more_than(3, "texts")


def test_without_accelerate_several_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", "a", "b", "--out", str(tmp_path / "t")])
    assert ended.value.code == 2
    assert "needs the accelerate package: pip install 'kvlingo[train]'" in capsys.readouterr().err


def test_one_process_alone_waits_for_nobody() -> None:
    x = torch.ones(3)
    for change in (ALONE.add_up, ALONE.add_up_at_first, ALONE.take_from_first):
        change(x)
    assert torch.equal(x, torch.ones(3))
    assert ALONE.told({"a": 1.5}) == {"a": 1.5}
    assert ALONE.takes(7)
    ALONE.require_alike({"a": tiny.VOCAB})
