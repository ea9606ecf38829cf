"""Confidence: the logistic model beside an oracle, honest precision, signs that are what they say, and the fall back."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from bench import quality_tables, records
from kvlingo.confidence import (
    SIGNS,
    Confidence,
    Judged,
    auc,
    best_threshold,
    fit_confidence,
    fit_logistic,
    fold_of,
    sigmoid,
    worth,
)
from kvlingo.errors import BadArtifact, BadInput
from kvlingo.handoff import hand_off
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.metrics import nll_nats
from kvlingo.plan import SpanKind
from kvlingo.reliability import ReliabilityOptions, judge_confidence
from kvlingo.states import read_native
from kvlingo.translator import Translator, identity_translator
from tests import tiny

PLAN = {"tail": 8}
TEXT = tiny.text_of_tokens(40)


# --- the model ---------------------------------------------------------------------------------------------------------


def drawn(count: int, *, seed: int = 0, tells: float = 3.0) -> list[Judged]:
    """Draw hand-overs of which `distance` tells whether they are bad, `entropy_nats` nothing."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        distance = rng.gauss(0, 1)
        is_bad = rng.random() < sigmoid(tells * distance - 1)
        signs = {"distance": 5 + 2 * distance, "entropy_nats": rng.gauss(3, 1), "mismatch": None}
        found.append(Judged(f"book {number % 24}", signs, 0.8 if is_bad else 0.1))
    return found


def test_newton_finds_what_a_slow_search_finds() -> None:
    torch.manual_seed(0)
    rows = torch.randn(80, 3, dtype=torch.float64)
    labels = (rows[:, 0] - rows[:, 2] + torch.randn(80, dtype=torch.float64) > 0.3).double()
    found = fit_logistic(rows, labels)
    x = (rows - rows.mean(0)) / (rows - rows.mean(0)).square().mean(0).sqrt()
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([theta], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(x @ theta[:3] + theta[3], labels, reduction="sum")
        value = value + 0.5 * theta[:3].square().sum()
        value.backward()
        return value

    search.step(loss)  # type: ignore[arg-type]
    torch.testing.assert_close(found.weights, theta[:3].detach(), atol=1e-4, rtol=0)
    assert found.bias == pytest.approx(float(theta[3]), abs=1e-4)


def test_what_tells_is_found_and_what_tells_nothing_is_not() -> None:
    found = fit_confidence(drawn(300), kl_nats=0.5, tail=8, plan=PLAN, seed=0)
    assert found.signs == ("entropy_nats", "distance")  # mismatch was never seen
    weights = dict(zip(found.signs, found.weights, strict=True))
    assert weights["distance"] > 5 * abs(weights["entropy_nats"])
    left_out = found.fitted["left_out"]
    assert left_out["precision"] > 0.6
    assert left_out["recall"] > 0.6
    assert left_out["auc"] > 0.85
    assert left_out["mean_kl_with_fallback_nats"] < left_out["mean_kl_nats"]
    assert found.doubt({"distance": 9.0, "entropy_nats": 3.0}) > found.threshold > found.doubt({"distance": 1.0})


def test_signs_that_tell_nothing_are_worth_nothing_on_texts_left_out() -> None:
    """A model judged on its own rows would look better than chance here."""
    areas = []
    for seed in range(6):
        rng = random.Random(seed)
        rows = [
            Judged(f"book {n % 24}", {name: rng.gauss(0, 1) for name in SIGNS}, rng.choice((0.1, 0.8)))
            for n in range(48)
        ]
        areas.append(fit_confidence(rows, kl_nats=0.5, tail=8, plan=PLAN, seed=seed).fitted["left_out"]["auc"])
    assert 0.3 < sum(areas) / len(areas) < 0.6


def test_a_text_s_cluster_is_never_on_both_sides() -> None:
    clusters = [f"book {n % 20}" for n in range(100)]
    folds = fold_of(clusters, seed=3)
    assert len({(c, int(f)) for c, f in zip(clusters, folds, strict=True)}) == 20
    assert len(set(folds.tolist())) == 8


@pytest.mark.parametrize("kl", [0.0, 1.0])
def test_without_both_kinds_there_is_nothing_to_tell_apart(kl: float) -> None:
    with pytest.raises(BadInput, match="nothing to tell apart"):
        fit_confidence(drawn(50), kl_nats=kl, tail=8, plan=PLAN, seed=0)


def test_precision_and_recall_by_hand() -> None:
    decided = torch.tensor([True, True, False, False])
    labels, kl = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([2.0, 0.2, 1.0, 0.4])
    found = worth(decided, torch.tensor([0.9, 0.6, 0.3, 0.1]), labels, kl)
    assert (found["flagged"], found["precision"], found["recall"], found["bad_share"]) == (2, 0.5, 0.5, 0.5)
    assert found["mean_kl_of_kept_nats"] == pytest.approx(0.7)
    assert found["mean_kl_with_fallback_nats"] == pytest.approx(0.35)
    assert found["auc"] == 0.75
    assert worth(torch.zeros(4, dtype=torch.bool), labels, labels, kl)["precision"] is None


def test_thresholds_lie_between_doubts() -> None:
    doubts, labels = torch.tensor([0.1, 0.2, 0.6, 0.9]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert best_threshold(doubts, labels) == pytest.approx(0.4)
    assert best_threshold(doubts, torch.zeros(4)) == 1.0
    assert auc(doubts, labels) == 1.0
    assert auc(doubts, torch.zeros(4)) is None


def confidence(**changes: object) -> Confidence:
    """Return one that looks at the entropy of the tail only."""
    plain = Confidence(("entropy_nats",), (0.0,), (1.0,), (1.0,), 0.0, 0.99, 0.5, 4, {})
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_confidence_is_plain_numbers() -> None:
    found = fit_confidence(drawn(100), kl_nats=0.5, tail=8, plan=PLAN, seed=0)
    again = Confidence.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False)))
    signs = {"distance": 6.0, "entropy_nats": 2.0}
    assert again.doubt(signs) == found.doubt(signs)
    assert again.threshold == found.threshold


def test_a_sign_that_could_not_be_had_counts_as_an_average_one() -> None:
    found = confidence(means=(3.0,), weights=(2.0,), bias=-1.0)
    assert found.doubt({}) == found.doubt({"entropy_nats": None}) == found.doubt({"entropy_nats": 3.0}) == sigmoid(-1.0)


@pytest.mark.parametrize("change", [{"signs": ("luck",)}, {"weights": (1.0, 2.0)}])
def test_a_strange_confidence_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadArtifact, match="kvlingo confidence"):
        Confidence.from_json({**confidence().to_json(), **change})
    with pytest.raises(BadArtifact, match="kvlingo confidence"):
        Confidence.from_json({"signs": []})


# --- signs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["llama", "gemma3"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny.language_model(request.param)


def off_by(lm: LanguageModel, share: float, seed: int = 0) -> Translator:
    """Return an identity with noise on its maps, features as on the text at hand."""
    translator = identity_translator(lm.geometry, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in translator.parameters():
            if parameter.ndim == 2:
                parameter += share * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return translator


def signs_at(lm: LanguageModel, translator: Translator, tail: int = 8) -> dict[str, float | None]:
    done = hand_off(TEXT, lm, lm, translator, tail=tail, watched=True)
    assert done.doubt is None
    assert done.signs is not None
    return done.signs


def test_signs_of_an_exact_hand_over(lm: LanguageModel) -> None:
    """The target knows as much as the source, and its tail is what the maps would have made of it."""
    found = signs_at(lm, identity_translator(lm.geometry, torch.float64))
    ids = tiny.ids_of(lm, 40)
    logits = tiny.cold_logits(lm, ids)
    assert found["tail_nats"] == pytest.approx(float(nll_nats(logits[32:39], ids[33:]).mean()), abs=1e-9)
    p = logits[32:].softmax(-1)
    assert found["entropy_nats"] == pytest.approx(float(-(p * p.log()).sum(-1).mean()), abs=1e-9)
    assert found["gap_nats_per_byte"] == pytest.approx(0.0, abs=1e-9)
    assert found["mismatch"] == pytest.approx(0.0, abs=1e-12)
    assert found["log_tokens"] == pytest.approx(math.log(40))
    features = [read(lm, ids).flat(layer)[0][1:].square().mean() for layer in range(len(lm.geometry))]
    assert found["distance"] == pytest.approx(float(torch.stack(features).mean()), rel=1e-6)


def test_a_bad_hand_over_shows(lm: LanguageModel) -> None:
    good, bad = signs_at(lm, identity_translator(lm.geometry, torch.float64)), signs_at(lm, off_by(lm, 0.3))
    assert bad["mismatch"] is not None
    assert bad["mismatch"] > 0.05
    assert bad["gap_nats_per_byte"] != pytest.approx(good["gap_nats_per_byte"], abs=1e-3)


def test_looking_changes_nothing(lm: LanguageModel) -> None:
    source_state = read_native(TEXT, lm)
    plain = hand_off(TEXT, lm, lm, off_by(lm, 0.2), tail=8, source_state=source_state)
    watched = hand_off(TEXT, lm, lm, off_by(lm, 0.2), tail=8, source_state=source_state, watched=True)
    assert plain.logits is not None
    assert watched.logits is not None
    torch.testing.assert_close(plain.logits, watched.logits, atol=1e-12, rtol=0)
    assert plain.signs is None
    assert watched.state.cache.get_seq_length() == source_state.cache.get_seq_length() == 40


def test_what_the_source_has_not_read_has_no_gap(lm: LanguageModel) -> None:
    done = hand_off(TEXT + " and more", lm, lm, off_by(lm, 0.2), source_state=read_native(TEXT, lm), watched=True)
    assert done.signs is not None
    assert done.signs["gap_nats_per_byte"] is None
    assert done.signs["mismatch"] is None
    assert done.signs["tail_nats"] is not None


# --- the fall back -----------------------------------------------------------------------------------------------------


def test_a_doubted_hand_over_is_a_reprefill_and_says_why(lm: LanguageModel) -> None:
    done = hand_off(TEXT, lm, lm, off_by(lm, 0.3), confidence=confidence(threshold=0.0))
    assert done.plan.fallback is not None
    assert "looks bad: KL above 0.5 nats with probability" in done.plan.fallback
    assert done.plan.count(SpanKind.TRANSLATED) == 0
    assert done.doubt is not None
    assert done.doubt > 0
    assert done.logits is not None
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=1e-8, rtol=0)
    assert done.state.spans == done.plan.spans
    more = prefill(lm, lm.ids([5]), cache=done.state.cache).logits[-1]
    torch.testing.assert_close(more, tiny.cold_logits(lm, lm.ids([*done.state.reading.ids, 5]))[-1], atol=1e-8, rtol=0)


def test_a_trusted_hand_over_is_kept_with_the_tail_that_was_asked_for(lm: LanguageModel) -> None:
    done = hand_off(TEXT, lm, lm, off_by(lm, 0.3), confidence=confidence(threshold=1.0))
    assert done.plan.fallback is None
    assert done.plan.tail == 4
    assert done.doubt is not None
    assert hand_off(TEXT, lm, lm, off_by(lm, 0.3), tail=9, confidence=confidence(threshold=1.0)).plan.tail == 9


def test_what_is_read_again_anyway_is_not_doubted(lm: LanguageModel) -> None:
    done = hand_off(TEXT, lm, lm, off_by(lm, 0.3), confidence=confidence(), distrust="the report failed")
    assert done.plan.fallback == "the report failed"
    assert done.doubt is None


def test_after_a_doubt_what_the_target_held_stays(lm: LanguageModel) -> None:
    before = read_native(TEXT[:20], lm)
    done = hand_off(TEXT, lm, lm, off_by(lm, 0.3), target_state=before, confidence=confidence(threshold=0.0))
    assert done.plan.count(SpanKind.NATIVE) == 21
    assert done.logits is not None
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=1e-8, rtol=0)


# --- on held-out documents ---------------------------------------------------------------------------------------------


@cache
def sometimes_wrong() -> tuple[LanguageModel, Translator]:
    """A model and maps whose hand-overs are good or bad as the text has it."""
    model = tiny.language_model("gemma3")
    return model, off_by(model, 0.12)


def test_a_confidence_from_documents() -> None:
    model, translator = sometimes_wrong()
    options = ReliabilityOptions(contexts=(40, 60), continuation_tokens=6, documents=14, tail=6, kl_nats=0.25)
    found, record = judge_confidence(model, model, translator, tiny.documents(16, 60), options=options)
    rows = record["hand_overs"]
    assert len(rows) == 28
    assert 2 <= sum(row["kl_nats"] > 0.25 for row in rows) <= 26
    assert found.tail == 6
    assert set(found.signs) == set(rows[0]["signs"])
    assert record["confidence"]["fitted"]["hand_overs"] == 28
    json.dumps(record, allow_nan=False)


def test_a_judged_hand_over_has_its_real_kl() -> None:
    """The same KL as the evaluation gives for the same examples and plan."""
    from kvlingo.evaluation import Arms, Controls, choose_examples, judge
    from kvlingo.reliability import evaluation_of, judge_one

    model, translator = sometimes_wrong()
    options = ReliabilityOptions(contexts=(40,), continuation_tokens=6, documents=2, tail=6)
    evaluation = evaluation_of(options, 40)
    with torch.no_grad():
        arms = Arms(model, model, translator, Controls(), evaluation)
    for example in choose_examples(tiny.documents(16, 60), model, model, evaluation):
        with torch.no_grad():
            logits = dict(arms.logits(example, None, {"translated"}))["translated"]
            native = arms.native(example)
            found = judge_one(model, model, translator, example, options)
        wanted = judge(native, logits, model.ids(example.continuation)).kl_nats
        assert wanted is not None
        assert found.kl_nats == pytest.approx(float(wanted.mean()), abs=1e-8)


def test_the_table_shows_what_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit_confidence(drawn(100), kl_nats=0.5, tail=8, plan=PLAN, seed=0)
    record = {"confidence": found.to_json()}
    monkeypatch.setattr(records, "load", lambda name: record if name == "confidence-gemma-smollm2" else None)
    (row,) = quality_tables.confidence().splitlines()[2:]
    left_out = found.fitted["left_out"]
    assert row.startswith(f"| Gemma → SmolLM2 | 100 | {found.fitted['bad']} | {left_out['precision']:.2f} | ")
    monkeypatch.setattr(records, "load", lambda _: None)
    assert quality_tables.confidence() == "Not measured yet.\n"
