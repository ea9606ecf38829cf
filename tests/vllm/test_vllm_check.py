"""The self-test: it passes here, and fails where it has to."""

from __future__ import annotations

from kvlingo.serve.external.checking import hand_over
from tests.vllm.conftest import Fleet

SAME = 1e-4


def test_it_passes_with_the_exact_translator(fleet: Fleet) -> None:
    checks = hand_over(fleet.get("source"), fleet.get("target"), SAME, seed=301)
    assert all(check.passed for check in checks), checks


def test_it_fails_with_a_wrong_one(fleet: Fleet) -> None:
    checks = hand_over(fleet.get("source"), fleet.get("target"), SAME, seed=302, as_other=fleet.as_strangers)
    assert [check.passed for check in checks] == [True, False, False, True, True]


def test_it_fails_where_no_cache_is_used(fleet: Fleet) -> None:
    checks = hand_over(fleet.get("source"), fleet.get("target"), SAME, seed=303, as_other=lambda _: "0" * 32)
    assert not checks[0].passed
    assert not checks[-1].passed
