"""The quality tables' own steps: which of the maps that were made are judged, and beside which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import quality
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
