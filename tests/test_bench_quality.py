"""The quality tables' own steps: which of the maps that were made are judged, and beside which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import quality, quality_tables, records
from bench.quality import made


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def eval(self) -> Named:
        return self


@pytest.mark.parametrize(
    ("there", "judged", "beside"),
    [
        (("ridge",), "ridge", {"ridge"}),
        (("ridge", "ridge_shared", "distilled"), "distilled", {"ridge", "ridge_shared"}),
        (("ridge", "distilled", "distilled_longer"), "distilled_longer", {"ridge", "distilled"}),
        (("ridge", "token_only", "no_text", "token_only_distilled"), "ridge", {"ridge", "token_only_distilled"}),
    ],
)
def test_what_was_distilled_longest_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], judged: str, beside: set[str]
) -> None:
    monkeypatch.setattr(quality, "load_translator", lambda folder: (Named(folder.name), None))
    for name in there:
        (tmp_path / name).mkdir()
    translator, controls = made(tmp_path)
    assert translator.name == judged  # type: ignore[attr-defined]
    assert set(controls.others) == beside
    assert getattr(controls.token_only, "name", None) == ("token_only" if "token_only" in there else None)
    assert getattr(controls.no_text, "name", None) == ("no_text" if "no_text" in there else None)


def test_the_fit_to_compare_with_differs_in_one_option(tmp_path: Path) -> None:
    calls = [SimpleNamespace(direction="smollm2-gemma", shared=shared, work=tmp_path) for shared in (False, True)]
    alike, shared = (quality.fit_options(call) for call in calls)  # type: ignore[arg-type]
    assert alike == replace(shared, shared_weight=0.0) != shared
    assert len({quality.statistics_of(call) for call in calls}) == 2  # type: ignore[arg-type]


def test_the_table_of_shared_errors_shows_both_and_their_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(mean: float) -> dict[str, float]:
        return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}

    arms = {"translated": 0.2, "ridge_shared": 0.18, "token_only": 0.5}
    record = {
        "arms": {name: {"kl_nats": told(kl)} for name, kl in arms.items()},
        "paired": {"ridge_shared": {"kl_difference_nats": told(-0.02)}},
    }
    monkeypatch.setattr(records, "load", lambda name: record if name == "shared-smollm2-gemma-1024-tail1" else None)
    (row,) = quality_tables.shared_errors().splitlines()[2:]
    assert row == (
        "| SmolLM2 → Gemma | 1,024 | 0.200 [0.190, 0.210] | 0.180 [0.170, 0.190] | -0.020 [-0.030, -0.010] "
        "| 0.500 [0.490, 0.510] |"
    )
    monkeypatch.setattr(records, "load", lambda _: None)
    assert quality_tables.shared_errors() == "Not measured yet.\n"
