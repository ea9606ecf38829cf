"""Stage 2: the loss falls, every map learns, nothing else moves, and stopping and going on changes nothing."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlingo import objective
from kvlingo.assembling import continuation_logits
from kvlingo.compression import CompressOptions, compress
from kvlingo.corpus import Example, random_examples
from kvlingo.distillation import (
    Distilled,
    DistillOptions,
    Run,
    distill,
    judged_examples,
    judged_kl,
)
from kvlingo.errors import BadInput
from kvlingo.fitting import Fit, fit
from kvlingo.language_model import LanguageModel, read
from kvlingo.models import wrap
from kvlingo.objective import example_loss, small_vocabulary
from kvlingo.predictions import kl_to_likeliest_nats, likeliest
from kvlingo.shapes import FitOptions
from kvlingo.texts import Document
from kvlingo.translator import Translator
from kvlingo.whitening import coordinates
from tests import tiny
from tests.test_twins import rebased
from tests.tiny import unrelated_pair as pair

FIT = FitOptions(
    reach=0,
    shift=0,
    tokens=700,
    context_tokens=(48,),
    chat_share=0.0,
    held_out_share=0.2,
    held_out_examples=1,
    dampings=(1e-2,),
)
OPTIONS = DistillOptions(
    steps=4,
    minutes=None,
    batch=2,
    learning_rate=3e-3,
    context_tokens=(32, 40),
    continuation_tokens=12,
    tails=(1, 3),
    chat_share=0.0,
    judge_every=2,
    judged_examples=2,
    judged_context=(40,),
    vocabulary=None,
)
MAPS: dict[str, dict[str, Any]] = {
    "linear": {},
    "lowrank": {"map_kind": "lowrank", "rank": 8},
    "headwise": {"map_kind": "headwise"},
    "residual": {"residual_width": 6},
    "compressed": {},
}


def options(**changes: Any) -> DistillOptions:
    return replace(OPTIONS, **changes)


@cache
def fitted(kind: str = "linear") -> Fit:
    return fit(*pair(), tiny.documents(), replace(FIT, **MAPS[kind]))


def start(kind: str = "linear") -> Translator:
    """Return a fresh copy of the ridge solution, or of what is left of it."""
    if kind == "compressed":
        return compress(fitted(kind).translator, fitted(kind).stats, CompressOptions(rank=8, text_rank=12)).translator
    return copy.deepcopy(fitted(kind).translator)


def training(of: Fit) -> list[Document]:
    return [d for d in tiny.documents() if d not in of.held_out_documents]


def distilled(translator: Translator, changed: DistillOptions, kind: str = "linear", **kwargs: Any) -> Distilled:
    of = fitted(kind)
    return distill(translator, *pair(), training(of), of.held_out_documents, of.stats, changed, **kwargs)


@cache
def example() -> Example:
    return one_example(*pair(), training(fitted()), context=40, continuation=12)


def one_example(
    source: LanguageModel, target: LanguageModel, documents: Sequence[Document], *, context: int, continuation: int
) -> Example:
    return random_examples(
        documents,
        source.tokenizer,
        target.tokenizer,
        context_tokens=(context,),
        continuation_tokens=continuation,
        chat_share=0.0,
        seed="one",
        count=1,
    )[0]


def weights(translator: Translator) -> list[Tensor]:
    return [x.detach().clone() for x in translator.state_dict().values()]


# --- it learns -------------------------------------------------------------------------------------------------------


def test_the_loss_falls_and_so_does_held_out_kl() -> None:
    """From a ridge damped far too much, towards the exact map that a twin is known to have."""
    torch.manual_seed(0)
    one = tiny.scaled(tiny.llama())
    source, target = (
        wrap(model.float(), tiny.byte_tokenizer(), name=name)
        for model, name in ((tiny.clone(one), "a"), (rebased(one), "b"))
    )
    of = fit(source, target, tiny.documents(), replace(FIT, dampings=(1.0,)))
    changed = options(steps=30, batch=4, learning_rate=1e-3, judge_every=10, judged_examples=4, ce_weight=0.0)
    done = distill(of.translator, source, target, training(of), of.held_out_documents, of.stats, changed)
    curve = done.curve
    assert curve.steps == list(range(1, 31))
    assert curve.judged_steps == [0, 10, 20, 30]
    assert sum(curve.loss_nats[-8:]) < 0.92 * sum(curve.loss_nats[:8])
    assert min(curve.held_out_kl_nats) < 0.92 * curve.held_out_kl_nats[0]
    assert done.best_step > 0
    assert done.steps == 30
    assert done.translator is of.translator
    assert not of.translator.training
    json.dumps(curve.to_json(), allow_nan=False)


@pytest.mark.parametrize("kind", MAPS)
def test_gradients_reach_every_parameter_of_every_map(kind: str) -> None:
    translator = start(kind)
    if translator.config.residual_width:
        with torch.no_grad():  # off its zero start, where only the last layer of the MLP has a gradient
            for layer_map in translator.maps.values():
                torch.nn.init.normal_(layer_map.residual.leave.weight, std=0.01)  # type: ignore[union-attr, arg-type]
    before = {n: p.detach().clone() for n, p in translator.maps.named_parameters()}
    basis = None if translator.text_basis is None else translator.text_basis.clone()
    run = Run(translator, *pair(), training(fitted(kind)), fitted(kind).stats, OPTIONS, None, None)
    run.one_step()
    assert len(run.coordinates) == len(before)
    for name, parameter in translator.maps.named_parameters():
        assert not torch.equal(parameter, before[name]), name
        assert parameter.grad is None
    if translator.text_basis is not None:
        assert tiny.same([translator.text_basis], [basis]), "how the text is read is fixed"


def test_a_zero_start_of_the_residual_still_learns() -> None:
    translator = start("residual")
    run = Run(translator, *pair(), training(fitted("residual")), fitted("residual").stats, OPTIONS, None, None)
    for _ in range(2):
        run.one_step()
    for name, parameter in translator.named_parameters():
        if "residual" in name:
            assert not torch.equal(parameter, fitted("residual").translator.get_parameter(name)), name


def test_the_loss_hears_the_translated_cache() -> None:
    translator = start()
    with torch.no_grad():
        before = example_loss(translator, *pair(), example(), 1, 0.0)
        for layer_map in translator.maps.values():
            layer_map.bias.add_(0.5)  # type: ignore[union-attr, operator]
        after = example_loss(translator, *pair(), example(), 1, 0.0)
    assert abs(float(after - before)) > 1e-4


def test_hand_overs_of_one_text_share_what_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tails of each text: loss and gradient of as many plain hand-overs, from half as many passes of the frozen models."""
    changed = options(tails_each=2, tails=(1, 3), ce_weight=0.1)
    run = Run(start(), *pair(), training(fitted()), fitted().stats, changed, None, None)
    batch = run.draw()
    assert [sorted(tails) for _, tails in batch] == [[1, 3]] * OPTIONS.batch
    plain = start().train()
    moved = coordinates(plain, fitted().stats, OPTIONS.whitening_damping)
    losses = [example_loss(plain, *pair(), one, tail, 0.1) / 4 for one, tails in batch for tail in tails]
    sum(losses).backward()  # type: ignore[union-attr]
    for coordinate in moved:
        coordinate.pull_gradient()
    natives: list[int] = []
    native_logits = objective.native_logits

    def counting(*args: Any) -> Tensor:
        natives.append(1)
        return native_logits(*args)

    monkeypatch.setattr(objective, "native_logits", counting)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    assert run.one_step() == pytest.approx(float(sum(losses)), rel=1e-5)
    assert len(natives) == OPTIONS.batch
    for mine, theirs in zip(run.coordinates, moved, strict=True):
        torch.testing.assert_close(mine.delta.grad, theirs.delta.grad, rtol=1e-3, atol=1e-6)


def test_kept_predictions_are_read_again_instead_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all tokens kept the run is the plain one; a second run asks the target for nothing; a damaged file is made anew."""
    natives: list[int] = []
    native_logits = objective.native_logits

    def counting(*args: Any) -> Tensor:
        natives.append(1)
        return native_logits(*args)

    monkeypatch.setattr(objective, "native_logits", counting)
    plain = distilled(start(), OPTIONS)
    assert len(natives) == 8
    every = options(kept_predictions=tiny.VOCAB)
    first = distilled(start(), every, work_dir=tmp_path / "a")
    assert len(natives) == 16
    files = sorted((tmp_path / "predictions").iterdir())
    assert len(files) == 8
    again = distilled(start(), every, work_dir=tmp_path / "b")
    assert len(natives) == 16
    for done in (first, again):
        assert done.curve.loss_nats == pytest.approx(plain.curve.loss_nats, rel=1e-4)
    files[0].write_bytes(b"half")
    distilled(start(), every, work_dir=tmp_path / "c")
    assert len(natives) == 17
    distilled(start(), options(kept_predictions=7), work_dir=tmp_path / "d")
    assert len(natives) == 25


def test_the_divergence_of_the_likeliest_is_that_of_two_coarser_distributions() -> None:
    native, other = (torch.randn(5, 40, dtype=torch.float64) * 3 for _ in range(2))
    p, q = native.softmax(-1), other.softmax(-1)
    whole = (p * (p / q).log()).sum(-1)
    for count in (1, 7, 39, 40, 99):
        kept = likeliest(native, count)
        ids = kept.ids.long()
        parts = [torch.cat((x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)), -1) for x in (p, q)]
        shown = parts if count < 40 else [p, q]
        expected = (shown[0] * (shown[0] / shown[1]).log()).sum(-1)
        variable = other.clone().requires_grad_()
        found = kl_to_likeliest_nats(kept, variable)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        assert (found <= whole + 1e-9).all()
        found.sum().backward()
        assert variable.grad is not None
        assert variable.grad.isfinite().all()


def test_more_hand_overs_of_a_text_than_tails_are_refused() -> None:
    with pytest.raises(BadInput, match="3 hand-overs of each text: there are 2 different tails"):
        distilled(start(), options(tails_each=3))


def test_gradients_are_those_of_the_loss() -> None:
    """In whitened coordinates, against finite differences."""
    source, target = (tiny.language_model(f, seed=s) for f, s in (("llama", 3), ("gemma3", 0)))
    documents = tiny.documents()
    of = fit(source, target, documents, FIT)
    translator = of.translator.double().train()
    one = one_example(source, target, documents, context=24, continuation=4)

    def loss() -> Tensor:
        return example_loss(translator, source, target, one, 1, 0.1)

    moved = coordinates(translator, of.stats, OPTIONS.whitening_damping)
    loss().backward()
    for coordinate in moved:
        coordinate.pull_gradient()
    for coordinate in moved[:2]:
        assert coordinate.delta.grad is not None
        index = int(coordinate.delta.grad.abs().argmax())
        values = []
        for step in (1e-3, -1e-3):  # not smaller: the models' norms round to float32
            coordinate.delta.data.view(-1)[index] += step
            coordinate.push_value()
            with torch.no_grad():
                values.append(float(loss()))
            coordinate.delta.data.view(-1)[index] -= step
            coordinate.push_value()
        slope = (values[0] - values[1]) / 2e-3
        assert float(coordinate.delta.grad.view(-1)[index]) == pytest.approx(slope, rel=1e-2)


def test_training_with_products_in_bfloat16_is_training_to_rounding() -> None:
    """The fast mode's gradients point where the plain ones do, its weights land where theirs do, and it ends with the run."""
    source, target = pair()
    plain, fast = start(), start()
    fast.multiply_in_bfloat16(True)
    found = []
    for translator, dtype in ((plain, None), (fast, torch.bfloat16)):
        moved = coordinates(translator.train(), fitted().stats, OPTIONS.whitening_damping, dtype=dtype)
        example_loss(translator, source, target, example(), 1, 0.1).backward()
        for coordinate in moved:
            coordinate.pull_gradient()
            coordinate.delta.data = coordinate.delta.grad.clone()  # type: ignore[union-attr]
            coordinate.push_value()
        found.append(moved)
    for exact, rounded in zip(*found, strict=True):
        assert not torch.equal(exact.delta.grad, rounded.delta.grad)  # type: ignore[arg-type]
        for a, b in (
            (exact.delta.grad, rounded.delta.grad),
            (exact.parameter - exact.base, rounded.parameter - rounded.base),
        ):
            assert float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0)) > 0.98  # type: ignore[union-attr]


def test_the_fast_mode_ends_with_the_run() -> None:
    source, target = pair()
    half = replace(target, model=copy.deepcopy(target.model).to(torch.bfloat16))
    of = fitted()
    translator = start()
    done = distill(translator, source, half, training(of), of.held_out_documents, of.stats, options(steps=2))
    assert not any(m.multiplies_in_bfloat16 for m in done.translator.maps.values())


def test_the_fast_mode_ends_with_a_run_that_is_cut_short() -> None:
    source, target = pair()
    half = replace(target, model=copy.deepcopy(target.model).to(torch.bfloat16))
    of, translator = fitted(), start()
    modes: list[bool] = []

    def stop(fact: dict[str, Any]) -> None:
        modes.extend(m.multiplies_in_bfloat16 for m in translator.maps.values())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(translator, source, half, training(of), of.held_out_documents, of.stats, options(steps=2), report=stop)
    assert modes
    assert all(modes)
    assert not any(m.multiplies_in_bfloat16 for m in translator.maps.values())


# --- and nothing gets worse ------------------------------------------------------------------------------------------


def test_a_wild_run_gives_back_where_it_started() -> None:
    translator = start()
    before = weights(translator)
    done = distilled(translator, options(learning_rate=30.0, clip=1e9, warmup_share=0.01))
    assert done.curve.held_out_kl_nats[-1] > done.curve.held_out_kl_nats[0]
    assert done.best_step == 0
    assert tiny.same(weights(done.translator), before)


def test_the_best_on_held_out_text_is_kept() -> None:
    done = distilled(start(), options(steps=6, judge_every=1))
    judged = judged_examples(fitted().held_out_documents, *pair(), OPTIONS)
    kept = judged_kl(done.translator, pair()[1], judged)
    assert kept == pytest.approx(min(done.curve.held_out_kl_nats), rel=1e-5)
    assert (
        done.best_step == done.curve.judged_steps[done.curve.held_out_kl_nats.index(min(done.curve.held_out_kl_nats))]
    )


def test_the_models_stay_as_they_are() -> None:
    models = [lm.model for lm in pair()]
    before = tiny.parameters(models)
    distilled(start(), OPTIONS)
    assert tiny.same(before, tiny.parameters(models))
    for model in models:
        assert not model.training
        assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def test_a_residual_that_does_not_help_is_left_out() -> None:
    done = distilled(start("residual"), options(learning_rate=30.0, clip=1e9, warmup_share=0.01), "residual")
    assert done.translator.config.residual_width == 0
    out = [m.residual for m in done.translator.maps.values()]  # type: ignore[union-attr]
    assert out == [None] * len(out)
    assert judged_kl(done.translator, pair()[1], judged()) == pytest.approx(
        judged_kl(start("residual"), pair()[1], judged()), rel=1e-5
    )


def judged() -> list[Any]:
    return judged_examples(fitted().held_out_documents, *pair(), OPTIONS)


# --- stopping and going on -------------------------------------------------------------------------------------------


class Stop:
    """Presses Ctrl-C after so many steps, and keeps what was reported."""

    def __init__(self, after: int) -> None:
        self.after, self.seen = after, list[dict[str, Any]]()

    def __call__(self, report: dict[str, Any]) -> None:
        self.seen.append(report)
        if report["step"] == self.after:
            raise KeyboardInterrupt


def tokens_read(report: dict[str, Any]) -> int:
    return round(report["tokens_per_second"] * report["seconds"])


@pytest.mark.parametrize("kind", ["linear", "residual"])
def test_going_on_equals_never_having_stopped(kind: str, tmp_path: Path) -> None:
    once = Stop(-1)
    whole = distilled(start(kind), options(steps=5), kind, report=once)
    with pytest.raises(KeyboardInterrupt):
        distilled(start(kind), options(steps=5), kind, work_dir=tmp_path, report=Stop(3))
    assert [p.name for p in tmp_path.iterdir()] == ["distillation.safetensors"]
    rest = Stop(-1)
    resumed = distilled(start(kind), options(steps=5), kind, work_dir=tmp_path, report=rest)
    assert [r["step"] for r in rest.seen] == [4, 5]
    assert [tokens_read(r) for r in rest.seen] == [tokens_read(r) for r in once.seen[3:]]
    assert resumed.curve.steps == whole.curve.steps
    assert resumed.curve.judged_steps == whole.curve.judged_steps
    assert resumed.curve.loss_nats == pytest.approx(whole.curve.loss_nats, rel=1e-5)
    assert resumed.best_step == whole.best_step
    for mine, theirs in zip(weights(resumed.translator), weights(whole.translator), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = distilled(start(), OPTIONS, work_dir=tmp_path)
    again = Stop(-1)
    second = distilled(start(), OPTIONS, work_dir=tmp_path, report=again)
    assert not again.seen
    assert tiny.same(weights(first.translator), weights(second.translator))


def test_another_start_or_other_options_do_not_resume(tmp_path: Path) -> None:
    distilled(start(), OPTIONS, work_dir=tmp_path)
    other = start()
    with torch.no_grad():
        next(other.parameters()).add_(1e-3)
    for translator, changed in ((other, OPTIONS), (start(), options(learning_rate=1e-3))):
        seen = Stop(-1)
        distilled(translator, changed, work_dir=tmp_path, report=seen)
        assert [r["step"] for r in seen.seen] == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_no_start(tmp_path: Path) -> None:
    distilled(start(), OPTIONS, work_dir=tmp_path)
    file = tmp_path / "distillation.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    seen = Stop(-1)
    distilled(start(), OPTIONS, work_dir=tmp_path, report=seen)
    assert len(seen.seen) == 4


def test_minutes_end_a_run() -> None:
    done = distilled(start(), options(steps=None, minutes=1e-4))
    assert 1 <= done.steps <= 3
    with pytest.raises(BadInput, match="--steps or --minutes"):
        distilled(start(), options(steps=None))


def test_progress_is_told() -> None:
    seen = Stop(-1)
    distilled(start(), OPTIONS, report=seen)
    last = seen.seen[-1]
    assert last["progress"] == 1.0
    assert last["tokens_per_second"] > 0
    assert all(a["seconds"] <= b["seconds"] for a, b in zip(seen.seen, seen.seen[1:], strict=False))


def test_rates_warm_up_and_die_away() -> None:
    run = Run(start(), *pair(), training(fitted()), fitted().stats, options(steps=100, warmup_share=0.1), None, None)
    rates = []
    for step in range(101):
        run.step = step
        rates.append(run.rate())
    assert 0 < rates[0] < rates[5] < max(rates)
    assert max(rates) == pytest.approx(OPTIONS.learning_rate, rel=0.02)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0, abs=1e-9)


# --- graphs ----------------------------------------------------------------------------------------------------------


def test_captured_in_inference_mode_then_trained() -> None:
    """What was read in the caller's inference mode can be learnt from outside it."""
    with torch.inference_mode():
        of = fit(*pair(), tiny.documents(), FIT)
        held_out = list(of.held_out_documents)
        source_kv = read(pair()[0], pair()[0].ids(example().source.ids))
    assert source_kv.keys[0].is_inference()
    assert not any(p.is_inference() for p in of.translator.parameters())
    done = distill(of.translator, *pair(), training(of), held_out, of.stats, options(steps=2))
    assert done.steps == 2


def test_distilling_inside_inference_mode() -> None:
    translator = start()
    with torch.inference_mode():
        done = distilled(translator, options(steps=2))
    assert done.steps == 2
    assert len(done.curve.loss_nats) == 2


def test_distilling_inside_no_grad() -> None:
    with torch.no_grad():
        assert distilled(start(), options(steps=1)).steps == 1


def test_gradient_checkpointing_of_the_target_changes_nothing() -> None:
    """The target stays in eval mode, where its cache survives."""

    def gradients(translator: Translator) -> list[Tensor]:
        example_loss(translator, *pair(), example(), 1, 0.1).backward()
        return [p.grad.clone() for p in translator.parameters() if p.grad is not None]

    plain = gradients(start())
    target = pair()[1].model
    name = "activation" if hasattr(target, "activation_checkpointing_enable") else "gradient"
    getattr(target, f"{name}_checkpointing_enable")()
    try:
        checkpointed = gradients(start())
    finally:
        getattr(target, f"{name}_checkpointing_disable")()
    assert len(plain) == len(list(start().parameters()))
    for a, b in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_nothing_piles_up_from_step_to_step() -> None:
    run = Run(start(), *pair(), training(fitted()), fitted().stats, OPTIONS, None, None)
    counts = []
    for _ in range(5):
        run.one_step()
        gc.collect()
        counts.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))
    assert counts[-1] <= counts[1]


# --- the loss --------------------------------------------------------------------------------------------------------


def test_a_small_vocabulary_is_some_columns_of_the_whole() -> None:
    _, target = pair()
    view = small_vocabulary(target, training(fitted()), 20)
    assert view is not None
    kept = (view.place >= 0).nonzero().flatten()
    assert 20 <= len(kept) <= 23
    assert set(target.tokenizer.all_special_ids) <= set(kept.tolist())
    assert view.place[kept].tolist() == list(range(len(kept)))
    ids, follow = target.ids(example().target.ids), target.ids(example().continuation)
    whole, some = (continuation_logits(lm, None, ids, follow) for lm in (target, view.lm))
    torch.testing.assert_close(some, whole[:, kept], atol=1e-5, rtol=1e-5)
    assert small_vocabulary(target, [], None) is None
    assert small_vocabulary(target, [], 10**6) is None
    translator = start()
    loss = example_loss(translator, *pair(), example(), 1, 0.1, view=view)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in translator.parameters())


def test_distilling_over_a_small_vocabulary() -> None:
    done = distilled(start(), options(steps=2, vocabulary=20))
    assert done.steps == 2
    assert all(0 <= x < 50 for x in done.curve.loss_nats)


def test_the_loss_is_kl_and_cross_entropy() -> None:
    source, target = pair()
    translator = start()
    with torch.no_grad():
        bare, both = (float(example_loss(translator, source, target, example(), 1, w)) for w in (0.0, 0.5))
        ids, follow = target.ids(example().target.ids), target.ids(example().continuation)
        native = tiny.cold_logits(target, torch.cat((ids, follow)))[len(ids) - 1 : -1]
        own = float(-native.log_softmax(-1).gather(1, follow[:, None]).mean())
    assert bare > 0
    assert both > bare
    assert (both - bare) / 0.5 == pytest.approx(own, rel=1.0)  # of the same order: it is the translated side's


def test_too_little_text() -> None:
    short = [replace(d, text=d.text[:60]) for d in tiny.documents()]
    with pytest.raises(BadInput, match="too short: no piece of"):
        distill(start(), *pair(), short, short, fitted().stats, OPTIONS)
