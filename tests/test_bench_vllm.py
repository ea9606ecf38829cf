"""The parts of `bench.vllm` that need no vLLM: what is made of a list of likeliest tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import vllm as bench
from kvlingo.metrics import kl_nats
from kvlingo.serve.external import twins
from kvlingo.store import load_translator, save_translator
from kvlingo.texts import Document


def two(seed: int, tokens: int = 300, apart: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    own = 3 * torch.randn(5, tokens, generator=generator)
    return own, own + apart * torch.randn(5, tokens, generator=generator)


def bound(own: torch.Tensor, other: torch.Tensor) -> list[float]:
    said = torch.zeros(len(own), dtype=torch.long)
    pairs = zip(bench.likeliest(own, said), bench.likeliest(other, said), strict=True)
    return [bench.partition_kl(p, q) for p, q in pairs]


@pytest.mark.parametrize("seed", range(4))
def test_it_is_a_lower_bound_and_a_close_one(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    own, other = two(seed)
    full = kl_nats(own, other).tolist()
    before = [0.0] * len(own)
    for top in (10, 100, 299):
        monkeypatch.setattr(bench, "TOP", top)
        found = bound(own, other)
        assert all(b <= f + 2e-5 for b, f in zip(found, full, strict=True))
        assert sum(found) >= sum(before) - 2e-5, "more tokens tell more"
        before = found
    assert before == pytest.approx(full, abs=1e-4)


def test_of_two_that_are_the_same_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TOP", 20)
    own, _ = two(9)
    assert bound(own, own) == pytest.approx([0.0] * len(own), abs=1e-9)


def test_the_longest_text_of_each_cluster_comes_first() -> None:
    texts = [("a" * 9, "x"), ("a" * 8, "x"), ("a" * 7, "y"), ("a", "z")]
    documents = [Document(text, "kind", cluster, text) for text, cluster in texts]
    found = [(len(d.text), d.cluster) for d in bench.longest_of_each(documents[::-1])]
    assert found == [(9, "x"), (7, "y"), (1, "z"), (8, "x")]


def test_the_record_names_its_translator_and_what_its_report_says(tmp_path: Path) -> None:
    twins.make_twins(tmp_path)
    found = bench.about(tmp_path / "translator")
    assert found == {"sha256": load_translator(tmp_path / "translator")[1].weights.sha256, "verdict": "PASS"}
    translator, manifest = load_translator(tmp_path / "wrong")
    save_translator(tmp_path / "never", translator, replace(manifest, held_out=None))
    assert bench.about(tmp_path / "never")["verdict"] is None
    assert bench.about(tmp_path / "wrong")["sha256"] != found["sha256"]


def test_arms_take_turns() -> None:
    order: list[str] = []
    bench.in_turn(3, lambda i: order.append(f"a{i}"), lambda i: order.append(f"b{i}"))
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]


def test_a_summary_has_median_and_90th_percentile() -> None:
    found = bench.summary({"ms": [float(i) for i in range(11)], "one": [4.0]})
    assert (found["ms"]["median"], found["ms"]["p90"]) == (5.0, 9.0)
    assert (found["one"]["median"], found["one"]["p90"]) == (4.0, 4.0)
