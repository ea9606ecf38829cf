"""Sufficient statistics and ridge against naive float64 oracles, and on data that breaks ridge elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlingo import stats as stats_module
from kvlingo.errors import BadInput
from kvlingo.fitting import reduced_rank
from kvlingo.ridge import DAMPINGS, choose_damping, factor, relative_error, require_enough, solve, unexplained
from kvlingo.stats import GramStats, Moments

F64 = {"atol": 1e-9, "rtol": 1e-9}
DIMS = {"a": 3, "b": 4, "y": 2}


def empty(dims: dict[str, int] | None = None) -> GramStats:
    dims = dims or DIMS
    features = [n for n in dims if n != "y"]
    pairs = [*combinations_with_replacement(features, 2), *((f, "y") for f in features)]
    return GramStats(dims, pairs, ("y",))


def data(tokens: int, dims: dict[str, int] | None = None) -> dict[str, Tensor]:
    return {n: torch.randn(tokens, d, dtype=torch.float64) * 3 + d for n, d in (dims or DIMS).items()}


def collected(blocks: dict[str, Tensor], sizes: Sequence[int] | None = None) -> GramStats:
    stats = empty({n: x.shape[1] for n, x in blocks.items()})
    tokens = len(next(iter(blocks.values())))
    start = 0
    for size in sizes or [tokens]:
        stats.add({n: x[start : start + size] for n, x in blocks.items()})
        start += size
    assert start == tokens
    return stats


def tensors(stats: GramStats) -> dict[str, Tensor]:
    return stats.state_dict()


def assert_equal(a: GramStats, b: GramStats) -> None:
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **F64)


# --- statistics ------------------------------------------------------------------------------------------------------


def test_moments_are_those_of_the_definition() -> None:
    blocks = data(50)
    moments = collected(blocks, [10, 25, 15]).moments(["b", "a"], "y")
    x, y = torch.cat((blocks["b"], blocks["a"]), 1), blocks["y"]
    mean, scale = x.mean(0), x.std(0, unbiased=False)
    z, w = (x - mean) / scale, y - y.mean(0)
    torch.testing.assert_close(moments.gram, z.T @ z / 50, **F64)
    torch.testing.assert_close(moments.cross, z.T @ w / 50, **F64)
    torch.testing.assert_close(moments.feature_mean, mean, **F64)
    torch.testing.assert_close(moments.feature_scale, scale, **F64)
    torch.testing.assert_close(moments.output_mean, y.mean(0), **F64)
    torch.testing.assert_close(moments.output_variance, y.var(0, unbiased=False), **F64)
    assert moments.tokens == 50


def test_held_out_moments_in_the_training_coordinates() -> None:
    training, held_out = data(60), data(20)
    moments = collected(training).moments(["a", "b"], "y")
    judge = collected(held_out).moments(["a", "b"], "y", like=moments)
    x = torch.cat((held_out["a"], held_out["b"]), 1)
    z, w = (x - moments.feature_mean) / moments.feature_scale, held_out["y"] - moments.output_mean
    torch.testing.assert_close(judge.gram, z.T @ z / 20, **F64)
    torch.testing.assert_close(judge.cross, z.T @ w / 20, **F64)
    torch.testing.assert_close(judge.output_variance, w.square().mean(0), **F64)
    weight = torch.randn(7, 2, dtype=torch.float64)
    torch.testing.assert_close(unexplained(weight, judge), (w - z @ weight).square().mean(0), **F64)
    share = ((w - z @ weight).square().mean(0) / w.square().mean(0)).mean()
    assert relative_error(weight, judge) == pytest.approx(float(share), rel=1e-9)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_order_and_cuts_do_not_matter(sizes: list[int], rng: object) -> None:
    blocks = data(sum(sizes))
    order = torch.randperm(sum(sizes))
    shuffled = {n: x[order] for n, x in blocks.items()}
    assert_equal(collected(blocks, sizes), collected(shuffled))


def test_large_amounts_are_summed_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = data(99)
    whole = collected(blocks)
    monkeypatch.setattr(stats_module, "FLUSH_TOKENS", 16)
    portions = collected(blocks, [7] * 14 + [1])
    assert portions.tokens == 99
    assert portions.summed_tokens == 84  # sevens, three at a time; two and one more token wait
    assert_equal(whole, portions)


def test_statistics_of_disjoint_data_add_up() -> None:
    blocks = data(90)
    parts = [collected({n: x[i : i + 30] for n, x in blocks.items()}) for i in (0, 30, 60)]
    merged = parts[2]
    merged += parts[0]
    merged += parts[1]
    assert merged.tokens == 90
    assert_equal(merged, collected(blocks))
    with pytest.raises(ValueError, match="different blocks"):
        merged += collected(data(5, {"a": 3, "y": 2}))


def test_statistics_are_saved_and_restored_with_what_still_waits() -> None:
    blocks = data(40)
    first = collected({n: x[:25] for n, x in blocks.items()})
    second = empty()
    second.load_state_dict(first.state_dict())
    assert second.tokens == 25
    second.add({n: x[25:] for n, x in blocks.items()})
    assert_equal(second, collected(blocks))
    with pytest.raises(BadInput, match="another pair"):
        empty({"a": 3, "y": 3}).load_state_dict(first.state_dict())


def test_single_precision_blocks_are_summed_in_double() -> None:
    blocks = {n: (x * 1e3 + 1e4).float() for n, x in data(5000).items()}
    stats = collected(blocks, [50] * 100)
    assert all(x.dtype == torch.float64 for n, x in tensors(stats).items() if n != "tokens")
    a = blocks["a"].double()
    torch.testing.assert_close(stats.product("a", "a"), a.T @ a, rtol=1e-12, atol=0)
    torch.testing.assert_close(stats.product("b", "a"), stats.product("a", "b").T, **F64)
    with pytest.raises(KeyError):
        stats.product("y", "y")


# --- products in float32 ---


def in_bfloat16(tokens: int, seed: int) -> dict[str, Tensor]:
    """Columns as a model in bfloat16 gives them: far from 0, collinear but for rounding, with outputs that they explain."""
    wide, shared = torch.Generator().manual_seed(5), torch.Generator().manual_seed(seed)
    mix = torch.randn(60, 60, generator=wide) * torch.logspace(0, -4, 60)[:, None]
    mean, map_ = 30 * torch.randn(60, generator=wide), torch.randn(60, 2, generator=wide)
    x = torch.randn(tokens, 60, generator=shared) @ mix
    y = x @ map_ + 0.2 * torch.randn(tokens, 2, generator=shared)
    x = (x + mean).bfloat16().float()
    return {"a": x[:, :25], "b": x[:, 25:], "y": y.bfloat16().float()}


def multiplied(blocks: dict[str, Tensor], dtype: torch.dtype) -> GramStats:
    stats = empty({n: x.shape[1] for n, x in blocks.items()})
    stats.multiplied_in = dtype
    for start in range(0, len(blocks["y"]), 500):
        stats.add({n: x[start : start + 500] for n, x in blocks.items()})
    return stats


def test_products_in_single_precision_lose_less_than_bfloat16_has_lost() -> None:
    """Proof that they are safe: what they err by is smaller than the noise that rounding left in the least of all directions."""
    blocks = in_bfloat16(20_000, 0)
    exact, fast = (multiplied(blocks, dtype).moments(["a", "b"], "y") for dtype in (torch.float64, torch.float32))
    error = torch.linalg.matrix_norm(fast.gram - exact.gram, 2)
    assert 0 < float(error) < 0.2 * float(torch.linalg.eigvalsh(exact.gram)[0])
    for name in ("feature_mean", "feature_scale", "output_mean", "output_variance"):
        torch.testing.assert_close(getattr(fast, name), getattr(exact, name), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("damping", DAMPINGS)
def test_maps_from_products_in_single_precision_are_as_good_on_other_text(damping: float) -> None:
    blocks, other = in_bfloat16(20_000, 0), in_bfloat16(3000, 1)
    exact, fast = (multiplied(blocks, dtype) for dtype in (torch.float64, torch.float32))
    judge = multiplied(other, torch.float64).moments(["a", "b"], "y", like=exact.moments(["a", "b"], "y"))
    errors = [unexplained(solve(s.moments(["a", "b"], "y"), damping), judge) for s in (exact, fast)]
    torch.testing.assert_close(errors[1], errors[0], rtol=1e-3, atol=0)


def test_columns_far_from_zero_lose_nothing_in_single_precision() -> None:
    """A feature of mean 300 and deviation 0.02: its square in float32 alone would keep nothing of its variance."""
    x = 300 + 0.02 * torch.randn(9000, 3)
    blocks = {"a": x, "y": x[:, :1] - 300}
    exact, fast = (multiplied(blocks, dtype).moments(["a"], "y") for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(fast.gram, exact.gram, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast.cross, exact.cross, rtol=1e-4, atol=1e-6)


# --- ridge against the normal equations' oracle ----------------------------------------------------------------------


def ridge_oracle(x: Tensor, y: Tensor, damping: float) -> Tensor:
    """Predict y from x by ridge on standardised features, through the singular vectors of the data."""
    mean, scale = x.mean(0), x.std(0, unbiased=False)
    z = (x - mean) / torch.where(scale > 1e-12 * scale.max(), scale, torch.ones_like(scale))
    u, s, vh = torch.linalg.svd(z, full_matrices=False)
    weight = vh.T @ ((s / (s.square() + damping * len(x)))[:, None] * (u.T @ (y - y.mean(0))))
    return z @ weight + y.mean(0)


def predicted(moments: Moments, weight: Tensor, x: Tensor) -> Tensor:
    return (x - moments.feature_mean) / moments.feature_scale @ weight + moments.output_mean


def moments_of(x: Tensor, y: Tensor) -> Moments:
    return collected({"a": x, "y": y}).moments(["a"], "y")


def zero_column(tokens: int, width: int) -> Tensor:
    x = torch.randn(tokens, width, dtype=torch.float64)
    x[:, 2] = 0
    return x


def constant_column(tokens: int, width: int) -> Tensor:
    x = torch.randn(tokens, width, dtype=torch.float64)
    x[:, 1] = 7
    return x


def duplicates(tokens: int, width: int) -> Tensor:
    x = torch.randn(tokens, width, dtype=torch.float64)
    x[:, width // 2 :] = x[:, : width - width // 2]
    return x


def ill_conditioned(tokens: int, width: int) -> Tensor:
    left, _ = torch.linalg.qr(torch.randn(tokens, width, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))
    return left * torch.logspace(0, -10, width, dtype=torch.float64) @ right


@pytest.mark.parametrize("damping", [1e-10, 1e-6, 1e-2])
@pytest.mark.parametrize("make", [torch.randn, zero_column, constant_column, duplicates, ill_conditioned])
def test_ridge_is_the_svd_oracle_s(make: object, damping: float) -> None:
    x = make(200, 12).double()  # type: ignore[operator]
    y = x @ torch.randn(12, 3, dtype=torch.float64) + 0.1 * torch.randn(200, 3, dtype=torch.float64) * x.std()
    moments = moments_of(x, y)
    got = predicted(moments, solve(moments, damping), x)
    wanted = ridge_oracle(x, y, damping)
    assert bool(torch.isfinite(got).all())
    error = (got - wanted).norm() / (wanted - y.mean(0)).norm()
    assert float(error) < 1e-4


def test_fewer_tokens_than_features() -> None:
    x, y = torch.randn(20, 40, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    moments = moments_of(x, y)
    for damping in (1e-6, 1e-2):
        torch.testing.assert_close(
            predicted(moments, solve(moments, damping), x), ridge_oracle(x, y, damping), atol=1e-4, rtol=0
        )
    with pytest.raises(BadInput, match=r"20 tokens are too few to fit 40 features.*at least 80"):
        require_enough(20, 40)
    require_enough(40, 40)


def test_a_singular_matrix_gets_more_damping_and_says_so() -> None:
    gram = torch.ones(5, 5, dtype=torch.float64)
    with pytest.warns(UserWarning, match="collinear: damping raised from 1e-20 to"):
        lower, used = factor(gram, 1e-20)
    assert used > 1e-20
    torch.testing.assert_close(lower @ lower.T, gram + used * torch.eye(5, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert factor(torch.eye(5, dtype=torch.float64), 1e-3)[1] == 1e-3


def test_indefinite_rounding_does_not_loop_for_ever() -> None:
    gram = torch.ones(4, 4, dtype=torch.float64) - 1e-6 * torch.eye(4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="collinear"):
        lower, _ = factor(gram, 1e-10)
    assert bool(torch.isfinite(lower).all())


def test_damping_is_chosen_on_other_data() -> None:
    torch.manual_seed(1)
    true = torch.zeros(30, 1, dtype=torch.float64)
    true[:3] = 1

    def draw(tokens: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(tokens, 30, dtype=torch.float64)
        return x, x @ true + 3 * torch.randn(tokens, 1, dtype=torch.float64)

    (x, y), (x2, y2) = draw(40), draw(4000)
    moments = moments_of(x, y)
    judge = collected({"a": x2, "y": y2}).moments(["a"], "y", like=moments)
    damping, weight, error = choose_damping(moments, judge)
    errors = {d: relative_error(solve(moments, d), judge) for d in DAMPINGS}
    assert errors[damping] == min(errors.values()) == error
    assert damping >= 1e-2
    assert float(unexplained(weight, moments).sum()) > float(unexplained(solve(moments, 1e-10), moments).sum())


def test_without_noise_the_least_damping_wins() -> None:
    x = torch.randn(300, 10, dtype=torch.float64)
    y = x @ torch.randn(10, 4, dtype=torch.float64)
    moments = moments_of(x[:200], y[:200])
    judge = collected({"a": x[200:], "y": y[200:]}).moments(["a"], "y", like=moments)
    damping, _, error = choose_damping(moments, judge)
    assert damping == min(DAMPINGS)
    assert error < 1e-15


def test_outputs_that_never_move_do_not_count() -> None:
    x = torch.randn(100, 4, dtype=torch.float64)
    y = torch.cat((x[:, :1], torch.full((100, 1), 3.0, dtype=torch.float64)), 1)
    moments = moments_of(x, y)
    assert relative_error(solve(moments, 1e-10), moments) < 1e-9
    still = moments_of(x, torch.zeros(100, 2, dtype=torch.float64))
    assert relative_error(solve(still, 1e-10), still) == 0.0


# --- outliers and scales ---------------------------------------------------------------------------------------------


def test_an_outlier_channel_does_not_drown_the_others() -> None:
    """Keys have channels 300 times the others; every channel must be fitted to its own scale."""
    true = torch.randn(16, 16, dtype=torch.float64)
    x = torch.randn(2000, 16, dtype=torch.float64)
    x[:, 5] *= 300
    y = x @ true
    y[:, 7] *= 300
    moments = moments_of(x[:1500], y[:1500])
    judge = collected({"a": x[1500:], "y": y[1500:]}).moments(["a"], "y", like=moments)
    _, weight, _ = choose_damping(moments, judge)
    got = predicted(moments, weight, x[1500:])
    channel = ((got - y[1500:]).square().mean(0) / y[1500:].var(0)).sqrt()
    assert float(channel.max()) < 1e-3


@pytest.mark.parametrize("damping", [1e-8, 1e-3])
def test_scaling_and_shifting_inputs_changes_nothing(damping: float) -> None:
    x = torch.randn(300, 8, dtype=torch.float64)
    y = x @ torch.randn(8, 5, dtype=torch.float64) + torch.randn(300, 5, dtype=torch.float64)
    factors = torch.logspace(-3, 3, 8, dtype=torch.float64)
    plain, other = moments_of(x, y), moments_of(x * factors * 100 + 3, y)
    got = predicted(other, solve(other, damping), x * factors * 100 + 3)
    torch.testing.assert_close(got, predicted(plain, solve(plain, damping), x), atol=1e-7, rtol=0)


# --- reduced rank ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_reduced_rank_is_the_best_map_of_its_rank(rank: int) -> None:
    x = torch.randn(500, 8, dtype=torch.float64) @ torch.randn(8, 8, dtype=torch.float64)
    y = x @ torch.randn(8, 5, dtype=torch.float64) + torch.randn(500, 5, dtype=torch.float64)
    moments = moments_of(x, y)
    weight = solve(moments, 1e-10)
    down, up = reduced_rank(moments, 1e-10, weight, rank)
    assert down.shape == (8, rank)
    assert up.shape == (rank, 5)
    z, w = (x - moments.feature_mean) / moments.feature_scale, y - moments.output_mean
    # Brute force: the best rank-r fit projects the full prediction on its own first right singular vectors.
    full = z @ torch.linalg.lstsq(z, w).solution
    _, _, vh = torch.linalg.svd(full, full_matrices=False)
    best = (w - full @ vh[:rank].T @ vh[:rank]).square().sum()
    got = (w - z @ down @ up).square().sum()
    assert float(got) == pytest.approx(float(best), rel=1e-6)
    assert float(by_descent(z, w, rank)) >= float(got) * (1 - 1e-6)


def by_descent(z: Tensor, w: Tensor, rank: int) -> Tensor:
    """Alternating least squares from a random start: an upper bound that a best map can't lie above."""
    down = torch.randn(z.shape[1], rank, dtype=torch.float64)
    for _ in range(50):
        up = torch.linalg.lstsq(z @ down, w).solution
        gram = up @ up.T
        down = torch.linalg.lstsq(z, w @ up.T).solution @ torch.linalg.inv(gram)
    return (w - z @ down @ up).square().sum()


def test_full_rank_is_the_ridge_itself() -> None:
    x, y = torch.randn(100, 6, dtype=torch.float64), torch.randn(100, 4, dtype=torch.float64)
    moments = moments_of(x, y)
    weight = solve(moments, 1e-3)
    down, up = reduced_rank(moments, 1e-3, weight, 4)
    torch.testing.assert_close(down @ up, weight, atol=1e-9, rtol=0)
