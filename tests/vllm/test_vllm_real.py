"""Real weights through two servers, each of a real model: the hand-over is the in-process one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import vllm as bench
from kvlingo.texts import default_documents

pytestmark = pytest.mark.real_model
MODELS, TRANSLATOR = "KVLINGO_REAL_MODELS", "KVLINGO_REAL_TRANSLATOR"


def test_the_continuation_is_as_far_from_the_model_s_own_as_in_process(tmp_path: Path) -> None:
    """KVLINGO_REAL_MODELS is a folder of both models, KVLINGO_REAL_TRANSLATOR what was fitted from the first to the second."""
    folder, translator = Path(os.environ.get(MODELS, "")), os.environ.get(TRANSLATOR)
    if translator is None:
        pytest.skip(f"needs a translator of the two models: set {TRANSLATOR}")
    source, target = folder / "smollm2-135m-instruct", folder / "gemma-3-270m"
    where = ["--source", str(source), "--target", str(target)] if (target / "config.json").is_file() else []
    given = ["--translator", translator, *where, "--text-tokens", "600", "--continuation", "16", "--tokens"]
    record = bench.measure(bench.parse(given), default_documents(), tmp_path)
    assert record["texts"] == 8
    for engine in ("hybrid_off", "hybrid_on"):
        found = record["engines"][engine]
        assert found["told"]["status"] == "applied"
        assert found["largest_gap_nats"] <= bench.SAME
    assert min(record["in_process"]["kl_nats"]) > 0
