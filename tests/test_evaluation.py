"""The evaluation can fail: random maps do, an exact twin passes; and each arm is what its name says."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from kvlingo.assembling import assemble, continuation_logits
from kvlingo.errors import BadInput
from kvlingo.evaluation import (
    Arms,
    Controls,
    EvaluationOptions,
    attention_cosine,
    choose_examples,
    evaluate,
    passkey_examples,
    plan_of,
    randomised,
    with_moments_of,
    wrong_document,
)
from kvlingo.fitting import Fit, control, fit
from kvlingo.kv import flatten_heads
from kvlingo.language_model import LanguageModel, read
from kvlingo.models import wrap
from kvlingo.report import Report
from kvlingo.shapes import FitOptions, source_free, text_free
from kvlingo.texts import Document
from kvlingo.translator import Translator, identity_translator
from tests import tiny
from tests.test_twins import rebased

FIT = FitOptions(
    reach=0,
    shift=0,
    tokens=1500,
    context_tokens=(48, 80),
    chat_share=0.0,
    held_out_share=0.2,
    held_out_examples=1,
)
OPTIONS = EvaluationOptions(context_tokens=56, continuation_tokens=10, documents=10, passkeys=2, attention_documents=2)
ARMS = {
    "native",
    "translated",
    "no_text",
    "token_only",
    "tail_only",
    "no_context",
    "wrong_document",
    "random_map",
    "source_alone",
}


@cache
def pair() -> tuple[LanguageModel, LanguageModel]:
    """A model and its twin: an exact map is known to exist."""
    torch.manual_seed(0)
    one = tiny.scaled(tiny.llama())
    return wrap(one, tiny.byte_tokenizer(), name="one"), wrap(rebased(one), tiny.byte_tokenizer(), name="twin")


@cache
def fitted() -> Fit:
    return fit(*pair(), tiny.documents(), FIT)


@cache
def controls() -> Controls:
    config = fitted().translator.config
    target = pair()[1]
    return Controls(
        token_only=control(source_free(config), fitted(), target), no_text=control(text_free(config), fitted(), target)
    )


def held_out() -> tuple[Document, ...]:
    return tiny.documents(10, 120, seed=7)


@cache
def report() -> Report:
    return evaluate(*pair(), fitted().translator, held_out(), controls=controls(), options=OPTIONS)


def judged(translator: Translator, changed: EvaluationOptions | None = None) -> Report:
    plain = replace(OPTIONS, passkeys=0, attention_documents=0)
    return evaluate(*pair(), translator, held_out(), controls=controls(), options=changed or plain)


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_an_exact_twin_passes() -> None:
    found = report()
    assert found.verdict == "PASS", found.reasons
    assert set(found.arms) == ARMS
    assert mean(found, "translated", "kl_nats") < 1e-6
    assert mean(found, "no_text", "kl_nats") < 1e-6
    assert mean(found, "translated", "top1_agreement") == 1
    # Random weights have no liking for text: a context gains them nothing, and there is no share of nothing.
    assert found.arms["translated"]["share_kept"] is None
    assert any("share kept is null" in note for note in found.notes)
    for arm in ("token_only", "tail_only", "wrong_document", "random_map", "no_context"):
        assert mean(found, arm, "kl_nats") > 0.05, arm
    assert mean(found, "no_context", "kl_nats") > 0.3
    assert found.arms["source_alone"]["kl_nats"] is None
    assert mean(found, "source_alone", "bits_per_byte") == pytest.approx(
        mean(found, "native", "bits_per_byte"), rel=1e-6
    )


def mean(found: Report, arm: str, metric: str) -> float:
    estimate = found.arms[arm][metric]
    assert estimate is not None
    return estimate["mean"]


def random_translator() -> Translator:
    translator = Translator(fitted().translator.config)
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.normal_(std=0.1)
    return translator.eval()


def test_a_random_translator_fails() -> None:
    found = judged(random_translator())
    assert found.verdict == "FAIL"
    assert any("does not beat" in reason for reason in found.reasons)


def test_the_token_only_control_in_the_translator_s_place_fails() -> None:
    """It beats a random map, but reads nothing of the source: it can't beat itself."""
    token_only = controls().token_only
    assert token_only is not None
    found = judged(token_only)
    assert found.verdict == "FAIL"
    assert any("token_only" in reason for reason in found.reasons)


def test_without_a_control_there_is_no_pass() -> None:
    plain = replace(OPTIONS, documents=4, passkeys=0, attention_documents=0)
    found = evaluate(*pair(), fitted().translator, held_out(), options=plain)
    assert found.verdict == "FAIL"
    assert any("token_only was not scored" in reason for reason in found.reasons)


def test_the_report_is_plain_data() -> None:
    data = json.loads(report().to_json())
    assert Report.from_dict(data) == report()
    assert data["pair"] == {"source": "one", "target": "twin"}
    assert data["num_documents"] == 10
    assert data["plan"]["first_document"]["counts"]["translated"] > 50
    for metric in ("kl_nats", "top1_agreement", "nll_nats", "bits_per_byte"):
        assert set(data["arms"]["translated"][metric]) == {"mean", "low", "high"}
    assert data["arms"]["translated"]["share_kept"] is None
    assert set(data["kl_by_position"]["translated"]) == {"1", "2-8", "rest"}
    assert data["attention_output_cosine"]["worst_layer"] > 0.999
    assert data["passkey"]["codes"] == 2
    assert set(data["passkey"]) == {"native", "translated", "no_text", "token_only", "tail_only", "codes"}


# --- arms ------------------------------------------------------------------------------------------------------------


def examples() -> list[Any]:
    return choose_examples(held_out(), *pair(), OPTIONS)


def arms_of(translator: Translator, one: Any, other: Any) -> dict[str, torch.Tensor]:
    return dict(Arms(*pair(), translator, controls(), OPTIONS).logits(one, other))


@torch.no_grad()
def test_every_arm_is_what_its_name_says() -> None:
    _, target = pair()
    one, other = examples()[:2]
    arms = arms_of(fitted().translator, one, other)
    ids, follow = target.ids(one.target.ids), target.ids(one.continuation)
    count = len(follow)

    def cold(*parts: torch.Tensor) -> torch.Tensor:
        return tiny.cold_logits(target, torch.cat((*parts, follow[:-1])))[-count:]

    def close(arm: str, wanted: torch.Tensor) -> bool:
        return float((arms[arm] - wanted).abs().max()) < 1e-4

    assert close("translated", cold(ids))
    assert close("no_text", cold(ids))
    assert close("no_context", cold(ids[:1]))
    assert close("tail_only", cold(ids[:1], ids[-1:]))  # compact positions: nothing stands between
    wrong = torch.cat((ids[:1], target.ids(other.target.ids)[1:]))[: len(ids)]
    # The cache of the other document under this one's text features: neither document.
    assert not close("wrong_document", cold(ids))
    assert not close("wrong_document", cold(wrong))
    assert not close("token_only", cold(ids))
    assert not close("random_map", cold(ids))


@torch.no_grad()
def test_the_wrong_document_is_the_other_one_where_text_is_not_read() -> None:
    """A translator without text features hands over exactly what the source holds: the other document."""
    _, target = pair()
    one, other = examples()[:2]
    no_text = controls().no_text
    assert no_text is not None
    arms = arms_of(no_text, one, other)
    ids, theirs = target.ids(one.target.ids), target.ids(other.target.ids)
    follow = target.ids(one.continuation)
    mixed = torch.cat((ids[:1], theirs[1 : len(ids) - 1], ids[-1:]))
    logits = tiny.cold_logits(target, torch.cat((mixed, follow[:-1])))[-len(follow) :]
    torch.testing.assert_close(arms["wrong_document"], logits, atol=1e-4, rtol=0)


def test_wrong_documents_are_from_another_cluster() -> None:
    chosen = examples()
    for number, example in enumerate(chosen):
        other = wrong_document(chosen, number)
        assert other is not None
        assert other.cluster != example.cluster
    assert wrong_document(chosen[:1], 0) is None
    assert wrong_document([replace(e, cluster="one") for e in chosen], 2) is None


@torch.no_grad()
def test_a_random_map_has_the_translated_cache_s_moments() -> None:
    source, target = pair()
    one = examples()[0]
    plan = plan_of(one, OPTIONS)
    start, stop = plan.translated
    ids, source_kv = target.ids(one.target.ids), read(source, source.ids(one.source.ids))
    like, noise = (
        assemble(plan, target, t, source_kv, one.alignment, ids)
        for t in (fitted().translator, randomised(fitted().translator, 1))
    )
    matched = with_moments_of(noise, like, start)
    for layer in range(1, len(like)):
        for x, y in ((matched.keys[layer], like.keys[layer]), (matched.values[layer], like.values[layer])):
            a, b = flatten_heads(x), flatten_heads(y)
            assert torch.equal(a[:, :start], b[:, :start])
            torch.testing.assert_close(a[:, start:stop].mean(1), b[:, start:stop].mean(1), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(a[:, start:stop].std(1), b[:, start:stop].std(1), atol=1e-6, rtol=1e-5)
            assert float((a - b).abs().max()) > 0.1


def test_randomising_leaves_the_translator_alone() -> None:
    before = copy.deepcopy(fitted().translator.state_dict())
    with torch.no_grad():
        one, again = randomised(fitted().translator, 1), randomised(fitted().translator, 1)
    for name, x in fitted().translator.state_dict().items():
        assert torch.equal(x, before[name])
        assert torch.equal(one.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(one.maps["1"].linear.weight, before["maps.1.linear.weight"])  # type: ignore[union-attr]


# --- beside the arms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merging", [False, True], ids=["same-tokenizer", "other-tokenizer"])
def test_the_passkey_is_inside_the_translated_span(merging: bool) -> None:
    source, target = pair()
    if merging:
        source = replace(source, tokenizer=tiny.merging_tokenizer())
    for tail in (1, 16):
        options = replace(OPTIONS, passkeys=4, tail=tail)
        asked = passkey_examples(held_out(), source, target, options)
        assert len(asked) == 4
        codes = set()
        for example in asked:
            code = example.continuation_text.strip()
            assert len(code) == 6
            assert code.isdigit()
            codes.add(code)
            assert target.tokenizer.decode(example.continuation).strip() == code
            stream = example.target.stream.decode()
            assert stream.endswith("The secret code is")
            start, stop = plan_of(example, options).translated
            first, last = example.target.spans[start][0], example.target.spans[stop - 1][1]
            assert stream[first:last].count(code) == stream.count(code) == 2
            assert example.source.stream.decode().count(code) == 2
        assert len(codes) == 4


@torch.no_grad()
def test_attention_cosine_tells_good_from_bad() -> None:
    source, target = pair()
    chosen = examples()
    good = attention_cosine(source, target, fitted().translator, chosen, OPTIONS)
    bad = attention_cosine(source, target, random_translator(), chosen, OPTIONS)
    assert good is not None
    assert bad is not None
    assert good["mean"] > 0.9999
    assert bad["worst_layer"] < 0.95
    assert len(good["layers"]) == len(target.geometry)
    assert (
        attention_cosine(source, target, fitted().translator, chosen, replace(OPTIONS, attention_documents=0)) is None
    )


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "qwen3", "olmo2"])
def test_attention_cosine_of_families(family: str) -> None:
    """Sliding windows and norms: the attention modules are called as the model calls them."""
    lm = tiny.language_model(family)
    chosen = choose_examples(held_out(), lm, lm, OPTIONS)
    found = attention_cosine(lm, lm, identity_translator(lm.geometry, torch.float64), chosen, OPTIONS)
    assert found is not None
    assert found["worst_layer"] == pytest.approx(1, abs=1e-6)


# --- what is scored --------------------------------------------------------------------------------------------------


def test_examples_are_balanced_over_kinds_and_clusters() -> None:
    chosen = choose_examples(held_out(), *pair(), replace(OPTIONS, documents=4))
    assert sorted(e.kind for e in chosen) == ["letters", "letters", "reports", "reports"]
    assert len({e.cluster for e in chosen}) == 4
    many = choose_examples(held_out(), *pair(), replace(OPTIONS, documents=20))
    assert len(many) == 20
    assert len({(e.cluster, e.target.ids) for e in many}) == 20
    for example in many:
        assert example.context_tokens == OPTIONS.context_tokens
        assert len(example.continuation) == OPTIONS.continuation_tokens


def test_too_little_text_is_said() -> None:
    short = tuple(replace(d, text=d.text[:50]) for d in held_out())
    with pytest.raises(BadInput, match="too short"):
        evaluate(*pair(), fitted().translator, short, controls=controls(), options=OPTIONS)


@torch.no_grad()
def test_scoring_starts_at_the_prediction_of_the_last_tail_token() -> None:
    _, target = pair()
    one = examples()[0]
    ids, follow = target.ids(one.target.ids), target.ids(one.continuation)
    native = continuation_logits(target, None, ids, follow)
    cold = tiny.cold_logits(target, torch.cat((ids, follow)))
    torch.testing.assert_close(native, cold[len(ids) - 1 : -1], atol=1e-10, rtol=0)
