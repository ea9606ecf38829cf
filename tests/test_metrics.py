"""Metrics against naive oracles, and numerics that others got wrong: bf16, -inf, empty masks."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvlingo.errors import BadInput
from kvlingo.metrics import (
    ArmScores,
    DocumentScores,
    Estimate,
    Ratio,
    arm_ratios,
    check_scores,
    cluster_bootstrap,
    estimates,
    kl_band_ratios,
    kl_nats,
    masked_mean,
    nll_nats,
    paired_kl_ratio,
    top1_agreement,
)

FP32 = 1e-6


def naive_kl(native_logits: Tensor, logits: Tensor) -> list[float]:
    """KL by definition, in Python floats."""
    result = []
    for row_p, row_q in zip(native_logits.tolist(), logits.tolist(), strict=True):
        p, q = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (row_p, row_q))
        result.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))
    return result


def logits_pair(*shape: int, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    native, other = (scale * torch.randn(*shape, generator=generator) for _ in range(2))
    return native, other


@given(
    rows=st.integers(0, 9),
    vocabulary=st.integers(1, 40),
    chunk=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_kl_and_nll_match_their_definitions(rows: int, vocabulary: int, chunk: int, seed: int) -> None:
    native, other = logits_pair(rows, vocabulary, seed=seed)
    ids = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))
    assert kl_nats(native, other, chunk=chunk).tolist() == pytest.approx(naive_kl(native, other), abs=1e-5)
    expected = [-math.log(row.double().softmax(0)[i]) for row, i in zip(other, ids, strict=True)]
    assert nll_nats(other, ids, chunk=chunk).tolist() == pytest.approx(expected, abs=1e-5)


def test_identical_bf16_logits_over_a_large_vocabulary_have_no_kl() -> None:
    native, _ = logits_pair(5, 152064)
    values = kl_nats(native.bfloat16(), native.bfloat16().clone())
    assert values.dtype == torch.float32
    assert float(values.abs().max()) < FP32


def test_kl_of_nearly_identical_logits_is_never_negative() -> None:
    native, noise = logits_pair(64, 5000)
    values = kl_nats(native, native + 1e-6 * noise)
    assert float(values.min()) >= 0
    assert float(values.max()) < FP32


def test_kl_keeps_float64() -> None:
    native, other = (x.double() for x in logits_pair(4, 50))
    other = native + 1e-6 * other
    p = native.softmax(-1)
    expected = (p * (native.log_softmax(-1) - other.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(kl_nats(native, other), expected, rtol=0, atol=1e-18)


def test_low_temperature_stays_finite() -> None:
    native, other = (x / 0.05 for x in logits_pair(6, 300, scale=8.0))
    other.requires_grad_()
    values = kl_nats(native, other)
    masked_mean(values).backward()
    expected = (native.double().log_softmax(-1) - other.detach().double().log_softmax(-1)) * native.double().softmax(-1)
    torch.testing.assert_close(values.detach().double(), expected.sum(-1), rtol=1e-5, atol=1e-4)
    assert other.grad is not None
    assert other.grad.isfinite().all()


def test_padding_of_the_vocabulary_with_minus_infinity_changes_nothing() -> None:
    native, other = logits_pair(4, 30)
    padding = torch.full((4, 6), -torch.inf)
    padded_native = torch.cat((native, padding), -1).requires_grad_()
    padded = torch.cat((other, padding), -1).requires_grad_()
    values = kl_nats(padded_native, padded)
    torch.testing.assert_close(values, kl_nats(native, other), rtol=0, atol=FP32)
    masked_mean(values).backward()
    for tensor in (padded_native, padded):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad[:, 30:].eq(0).all()


def test_tokens_that_only_one_side_rules_out() -> None:
    native, other = logits_pair(1, 10)
    ruled_out = torch.tensor([[True] + [False] * 9])
    assert kl_nats(native.masked_fill(ruled_out, -torch.inf), other).isfinite().all()
    assert kl_nats(native, other.masked_fill(ruled_out, -torch.inf)).tolist() == [math.inf]
    underflown = native.masked_fill(ruled_out, -1e4)
    assert kl_nats(underflown, other.masked_fill(ruled_out, -torch.inf)).isfinite().all()


@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
def test_masked_positions_never_enter(garbage: float) -> None:
    native, other = logits_pair(6, 20)
    mask = torch.tensor([True, False, True, True, False, False])
    expected = kl_nats(native, other)
    native[~mask] = garbage
    other = other.masked_fill(~mask.unsqueeze(-1), garbage).requires_grad_()
    values = kl_nats(native, other, mask=mask, chunk=2)
    assert values[~mask].eq(0).all()
    torch.testing.assert_close(values[mask], expected[mask])
    loss = masked_mean(values, mask)
    torch.testing.assert_close(loss, expected[mask].mean())
    loss.backward()
    assert other.grad is not None
    assert other.grad.isfinite().all()
    assert other.grad[~mask].eq(0).all()
    assert other.grad[mask].abs().sum() > 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_fully_masked_batch_gives_loss_zero_and_finite_gradients(chunk: int) -> None:
    native, other = logits_pair(3, 4, 20)
    other = other.masked_fill(torch.tensor(True), math.nan).requires_grad_()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    loss = masked_mean(kl_nats(native, other, mask=mask, chunk=chunk), mask)
    loss.backward()
    assert loss.item() == 0
    assert other.grad is not None
    assert other.grad.eq(0).all()


def test_masked_mean_survives_an_empty_mask_over_bad_values() -> None:
    values = torch.tensor([math.nan, math.inf], requires_grad=True)
    loss = masked_mean(values, torch.tensor([False, False]))
    loss.backward()
    assert loss.item() == 0
    assert values.grad is not None
    assert values.grad.eq(0).all()


def loss_and_gradient(measure: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = masked_mean(measure(leaf))
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_neither_values_nor_gradients(chunk: int, dtype: torch.dtype) -> None:
    native, other = (x.to(dtype) for x in logits_pair(2, 11, 60))
    ids = torch.randint(60, (2, 11), generator=torch.Generator().manual_seed(0))
    whole_kl = (native.float().softmax(-1) * (native.float().log_softmax(-1) - other.float().log_softmax(-1))).sum(-1)
    torch.testing.assert_close(kl_nats(native, other, chunk=chunk), whole_kl, rtol=0, atol=1e-5)
    for measure in (
        lambda x, size: kl_nats(native, x, chunk=size),
        lambda x, size: nll_nats(x, ids, chunk=size),
    ):
        expected = loss_and_gradient(lambda x, f=measure: f(x, 22), other)
        got = loss_and_gradient(lambda x, f=measure: f(x, chunk), other)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=FP32)


def test_gradient_of_kl_is_the_difference_of_the_distributions() -> None:
    native, other = logits_pair(5, 30)
    _, gradient = loss_and_gradient(lambda x: kl_nats(native, x, chunk=2), other)
    torch.testing.assert_close(gradient, (other.softmax(-1) - native.softmax(-1)) / 5, rtol=0, atol=FP32)


def test_logits_read_in_inference_mode_can_be_learned_from() -> None:
    with torch.inference_mode():
        native, other = logits_pair(5, 30)
        ids, mask = torch.arange(5), torch.tensor([1, 1, 0, 1, 1])
    leaf = other.clone().requires_grad_()
    for used in (mask, None):
        kl, nll = kl_nats(native, leaf, mask=used, chunk=2), nll_nats(leaf, ids, mask=used, chunk=2)
        (masked_mean(kl, used) + masked_mean(nll, used)).backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


class LargestFloat32(TorchDispatchMode):
    """Remember the most numbers that any float32 result held."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.numbers = max(self.numbers, tensor.numel())
        return result


def test_no_float32_copy_of_all_logits_forward_or_backward() -> None:
    native, other = (x.bfloat16() for x in logits_pair(40, 500))
    other.requires_grad_()
    with LargestFloat32() as largest:
        masked_mean(
            kl_nats(native, other, chunk=4) + nll_nats(other, torch.zeros(40, dtype=torch.long), chunk=4)
        ).backward()
    assert 0 < largest.numbers <= 4 * 500


def test_top1_agreement() -> None:
    native = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    assert top1_agreement(native, torch.tensor([[0.0, 9.0], [1.0, 2.0]])).tolist() == [True, False]


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(BadInput, match=r"native \[3, 5\], other \[2, 5\]"):
        kl_nats(torch.zeros(3, 5), torch.zeros(2, 5))
    with pytest.raises(BadInput, match="shift the ids"):
        nll_nats(torch.zeros(3, 5), torch.zeros(4, dtype=torch.long))
    with pytest.raises(BadInput, match=r"mask is \[2\] for positions \[3\]"):
        kl_nats(torch.zeros(3, 5), torch.zeros(3, 5), mask=torch.ones(2))
    with pytest.raises(BadInput, match="chunk is 0"):
        kl_nats(torch.zeros(3, 5), torch.zeros(3, 5), chunk=0)


# Scores and bootstrap


def estimate(ratio: Ratio, weights: Tensor) -> Estimate | None:
    """Estimate a ratio beside one that does not exist and a broken one: neither touches it."""
    broken = ratio[0] * math.inf, ratio[1]
    result = estimates({"none": None, "it": ratio, "broken": broken}, weights)
    assert list(result) == ["none", "it", "broken"]
    assert result["none"] is None
    assert result["broken"] is None
    return result["it"]


def arm(kl: list[float] | None, nll: list[float], num_bytes: int | None = None) -> ArmScores:
    top1 = None if kl is None else torch.tensor(kl) < 0.5
    return ArmScores(torch.tensor(nll), None if kl is None else torch.tensor(kl), top1, num_bytes)


def two_documents() -> list[DocumentScores]:
    return [
        DocumentScores(
            "a",
            "novel",
            8,
            {
                "native": arm([0.0, 0.0], [1.0, 1.0]),
                "translated": arm([0.1, 0.3], [1.5, 1.5]),
                "token_only": arm([0.4, 0.8], [2.0, 2.0]),
                "no_context": arm([1.0, 1.0], [3.0, 3.0]),
                "source_alone": arm(None, [2.0, 2.0, 2.0], 8),
            },
        ),
        DocumentScores(
            "b",
            "web",
            12,
            {
                "native": arm([0.0], [2.0]),
                "translated": arm([0.2], [2.5]),
                "token_only": arm([0.9], [3.0]),
                "no_context": arm([2.0], [4.0]),
                "source_alone": arm(None, [5.0], 11),
            },
        ),
    ]


def test_metrics_are_ratios_of_sums() -> None:
    scores = two_documents()
    weights = torch.ones(1, 2, dtype=torch.float64)

    def means(name: str) -> dict[str, float | None]:
        values = estimates(arm_ratios(scores, name), weights)
        return {k: v and v["mean"] for k, v in values.items()}

    assert means("translated") == pytest.approx(
        {
            "kl_nats": 0.6 / 3,
            "top1_agreement": 1.0,
            "nll_nats": 5.5 / 3,
            "bits_per_byte": 5.5 / math.log(2) / 20,
            "share_kept": (10 - 5.5) / (10 - 4),
        }
    )
    assert means("native")["share_kept"] == 1
    assert means("no_context")["share_kept"] == 0
    alone = means("source_alone")
    assert alone == pytest.approx(
        {
            "kl_nats": None,
            "top1_agreement": None,
            "nll_nats": 11 / 4,
            "bits_per_byte": 11 / math.log(2) / 19,
            "share_kept": None,
        }
    )


def test_paired_difference_is_above_zero_where_the_reference_is_closer() -> None:
    scores = two_documents()
    weights = torch.ones(1, 2, dtype=torch.float64)
    ratio = paired_kl_ratio(scores, "token_only", "translated")
    assert ratio is not None
    result = estimate(ratio, weights)
    assert result is not None
    assert result["mean"] == pytest.approx((2.1 - 0.6) / 3)
    assert paired_kl_ratio(scores, "source_alone", "translated") is None


def test_kl_by_position_bands() -> None:
    kl = [float(i) for i in range(1, 12)]
    scores = [
        DocumentScores("a", "novel", 9, {"x": arm(kl, kl)}),
        DocumentScores("a", "novel", 9, {"x": arm([5.0], [5.0])}),
    ]
    bands = kl_band_ratios(scores, "x")
    assert bands is not None
    sums = {name: (n.tolist(), d.tolist()) for name, (n, d) in bands.items()}
    assert sums == {
        "1": ([1.0, 5.0], [1.0, 1.0]),
        "2-8": ([sum(range(2, 9)), 0.0], [7.0, 0.0]),
        "rest": ([9.0 + 10 + 11, 0.0], [3.0, 0.0]),
    }


def naive_bootstrap(
    clusters: list[str], numerators: list[float], denominators: list[float], two_stage: bool
) -> tuple[float, float]:
    """Percentile interval by drawing documents one at a time."""
    rng = random.Random(7)
    names = sorted(set(clusters))
    members = {name: [i for i, cluster in enumerate(clusters) if cluster == name] for name in names}
    values = []
    for _ in range(4000):
        drawn: list[int] = []
        for name in rng.choices(names, k=len(names)):
            own = members[name]
            drawn += rng.choices(own, k=len(own)) if two_stage else own
        values.append(sum(numerators[i] for i in drawn) / sum(denominators[i] for i in drawn))
    values.sort()
    return values[100], values[3899]


@pytest.mark.parametrize("num_clusters", [1, 3, 5, 6, 12])
def test_bootstrap_agrees_with_a_naive_loop(num_clusters: int) -> None:
    rng = random.Random(num_clusters)
    clusters = [f"book {rng.randrange(num_clusters) if i >= num_clusters else i}" for i in range(40)]
    denominators = [float(rng.randrange(10, 60)) for _ in clusters]
    numerators = [d * (1 + rng.random() + 0.1 * int(c.split()[1])) for c, d in zip(clusters, denominators, strict=True)]
    low, high = naive_bootstrap(clusters, numerators, denominators, two_stage=num_clusters < 6)
    ratio = (torch.tensor(numerators).double(), torch.tensor(denominators).double())
    result = estimate(ratio, cluster_bootstrap(clusters, resamples=4000, seed=1))
    assert result is not None
    assert result["low"] is not None
    assert result["high"] is not None
    width = high - low
    assert result["low"] == pytest.approx(low, abs=0.12 * width)
    assert result["high"] == pytest.approx(high, abs=0.12 * width)
    assert result["low"] <= result["mean"] <= result["high"]


def test_bootstrap_draws_as_many_clusters_as_there_are() -> None:
    clusters = [f"{i}" for i in range(8) for _ in range(i + 1)]
    weights = cluster_bootstrap(clusters, resamples=500, seed=3)
    first = torch.tensor([clusters.index(c) for c in clusters])
    assert torch.equal(weights, weights[:, first])
    assert weights[:, sorted(set(first.tolist()))].sum(1).eq(8).all()


def test_few_clusters_draw_documents_too() -> None:
    weights = cluster_bootstrap(["a"] * 10, resamples=500)
    assert weights.sum(1).eq(10).all()
    assert weights.std() > 0
    sizes = torch.tensor([1.0, 1, 1, 2, 2]).double()
    weights = cluster_bootstrap(["a", "b", "b", "c", "c"], resamples=3000)
    in_b = weights[:, 1:3].sum(1)
    assert (in_b % 2).eq(0).all()
    torch.testing.assert_close(weights.mean(0), torch.ones_like(sizes), rtol=0, atol=0.08)


def test_bootstrap_is_seeded() -> None:
    clusters = list("aabbccddeeff")
    assert torch.equal(cluster_bootstrap(clusters, seed=5), cluster_bootstrap(clusters, seed=5))
    assert not torch.equal(cluster_bootstrap(clusters, seed=5), cluster_bootstrap(clusters, seed=6))


def test_intervals_cover_the_truth() -> None:
    generator = torch.Generator().manual_seed(0)
    clusters = [f"{i // 3}" for i in range(60)]
    weights = cluster_bootstrap(clusters, resamples=500)
    hits = 0
    for _ in range(200):
        effect = torch.randn(20, generator=generator).repeat_interleave(3) + torch.randn(60, generator=generator)
        result = estimate((effect.double(), torch.ones(60).double()), weights)
        assert result is not None
        assert result["low"] is not None
        assert result["high"] is not None
        hits += result["low"] <= 0 <= result["high"]
    assert 176 <= hits <= 198


def test_bootstrap_of_a_whole_evaluation_is_quick() -> None:
    documents = torch.rand(50, dtype=torch.float64)
    start = time.perf_counter()
    weights = cluster_bootstrap([f"{i % 12}" for i in range(50)])
    estimates({i: (documents, documents + i) for i in range(9 * 9)}, weights)
    assert time.perf_counter() - start < 2.0  # 0.02 s on an idle machine; the bound leaves room for a busy one


def test_estimate_without_a_positive_denominator_does_not_exist() -> None:
    weights = cluster_bootstrap(list("abcdefgh"))
    ones = torch.ones(8, dtype=torch.float64)
    assert estimate((ones, -ones), weights) is None
    assert estimate((ones, 0 * ones), weights) is None
    assert estimate((ones * math.inf, ones), weights) is None
    mixed = torch.tensor([-1.0, -1, -1, -1, 2, 2, 2, 2]).double()
    result = estimate((ones, mixed), weights)
    assert result == {"mean": 2.0, "low": None, "high": None}
    assert estimate((ones[:1], ones[:1]), cluster_bootstrap(["a"])) == {
        "mean": 1.0,
        "low": None,
        "high": None,
    }


def test_scores_that_can_not_be_compared_are_refused() -> None:
    good = two_documents()
    check_scores(good)
    with pytest.raises(BadInput, match="no held-out documents"):
        check_scores([])
    del good[1].arms["token_only"]
    with pytest.raises(BadInput, match="token_only is scored on 1 of 2"):
        check_scores(good)
    good = two_documents()
    good[0].arms["token_only"] = arm([0.1], [0.1])
    with pytest.raises(BadInput, match=r"document 0: arm .* scored"):
        check_scores(good)
    good[0].arms["token_only"] = ArmScores(torch.zeros(2), torch.zeros(2), torch.zeros(1))
    with pytest.raises(BadInput, match="token_only"):
        check_scores(good)
