"""The self-test: it passes here, and fails where it has to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvlingo.cli import main
from kvlingo.serve.external import checking
from kvlingo.serve.external.checking import hand_over
from kvlingo.serve.external.servers import Server
from kvlingo.store import load_translator
from tests.vllm.conftest import Fleet

SAME = 1e-4


class Lent(Server):
    """A server of the fleet, which goes on when the self-test has ended."""

    def stop(self) -> None:
        """Leave it alone."""


def test_the_command_passes_here(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but for starting two servers of its own: the fleet's serve the same two models."""

    def lend(model: Path, log: Path, extra: Mapping[str, Any], *, dtype: str) -> Server:
        server = fleet.get(model.name)
        assert dtype == "float32"
        assert (model / "model.safetensors").read_bytes() == (
            fleet.place / "twins" / model.name / "model.safetensors"
        ).read_bytes()
        for folder in extra.get("translators", ()):
            assert load_translator(folder)[1].verdict == "PASS", "a connector would refuse it"
        return Lent(**vars(server))

    monkeypatch.setattr(checking, "start_server", lend)
    with pytest.raises(SystemExit) as left:
        main(["vllm-check", "--json"])
    said = capsys.readouterr()
    assert left.value.code == 0, said.err
    assert "passed: so is the next turn" in said.out
    result = json.loads(said.out.rstrip("\n").splitlines()[-1])
    assert (result["verdict"], result["dtype"]) == ("PASS", "float32")
    assert [check["passed"] for check in result["checks"]] == [True] * 5


def test_it_fails_with_a_wrong_one(fleet: Fleet) -> None:
    checks = hand_over(fleet.get("source"), fleet.get("target"), SAME, seed=302, as_other=fleet.as_strangers)
    assert [check.passed for check in checks] == [True, False, False, True, True]


def test_it_fails_where_no_cache_is_used(fleet: Fleet) -> None:
    checks = hand_over(fleet.get("source"), fleet.get("target"), SAME, seed=303, as_other=lambda _: "0" * 32)
    assert not checks[0].passed
    assert not checks[-1].passed
