"""The sweep: each point is its plan, each line what its name says, costs are counted, and chance is beaten where it can be."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kvlingo.frontier as frontier_module
from bench import quality_tables, records
from kvlingo.anchors import Anchors
from kvlingo.cost import TargetCost, attention_flops, handoff_flops, pass_flops, plan_flops
from kvlingo.errors import BadInput
from kvlingo.evaluation import Controls, EvaluationOptions, choose_examples
from kvlingo.frontier import FrontierOptions, Point, Sweep, frontier, points_of
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, read
from kvlingo.metrics import nll_nats
from kvlingo.plan import plan_handoff, reprefill_plan
from kvlingo.quantised import Quantisation, quantise, rounded, rounded_groups
from kvlingo.translator import Translator, identity_translator
from tests import tiny

OPTIONS = FrontierOptions(
    contexts=(40,),
    continuation_tokens=8,
    documents=4,
    sinks=(1, 4),
    tails=(1, 8),
    native_layers=(2,),
    shares=(0.3,),
    blocks=(1, 4),
    by=("spread", "random", "distance", "oracle"),
    bits=(2, 4),
    group=4,
)
TARGET = TargetCost(layer_weights=1_000_000, query_widths=(64, 64), windows=(None, 100))


@cache
def lm() -> LanguageModel:
    return tiny.language_model("gemma3")


def off_by(share: float, seed: int = 0) -> Translator:
    """Return an identity that is wrong about some dims of some tokens: it has something to gain from anchors."""
    translator = identity_translator(lm().geometry, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in translator.parameters():
            if parameter.ndim == 2:
                parameter += share * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return translator


@cache
def record() -> dict[str, Any]:
    model = lm()
    return frontier(
        model,
        model,
        off_by(0.1),
        tiny.documents(6, 60),
        controls=Controls(token_only=off_by(0.6, seed=1)),
        options=OPTIONS,
    )


def row_of(name: str) -> dict[str, Any]:
    return next(row for row in record()["contexts"][0]["points"] if row["name"] == name)


# --- the record --------------------------------------------------------------------------------------------------------


def test_the_record_is_plain_json() -> None:
    found = json.loads(json.dumps(record(), allow_nan=False))
    length = found["contexts"][0]
    assert length["context_tokens"] == 40
    assert length["num_documents"] == 4
    assert [row["name"] for row in length["controls"]] == ["token_only", "tail_only", "no_context", "wrong_document"]
    assert [row["name"] for row in length["quantised"]] == [
        "2-bit KV",
        "4-bit KV",
        "2-bit KV, keys by channel",
        "4-bit KV, keys by channel",
    ]
    assert length["reprefill"]["share_of_reprefill"] == 1
    assert length["reprefill"]["kl_nats"]["mean"] < 1e-6


def test_every_setting_is_there_once() -> None:
    names = [row["name"] for row in record()["contexts"][0]["points"]]
    assert len(names) == len(set(names))
    assert {"sink 1, tail 1", "sink 1, tail 8", "sink 4, tail 1", "sink 1, tail 1, 2 native layers"} <= set(names)
    assert sum("30% oracle" in name for name in names) == 2
    assert [p.name for p in points_of(OPTIONS, lm())] == names


def test_more_of_the_target_s_own_reading_costs_more_and_is_nearer() -> None:
    plain = row_of("sink 1, tail 1")
    for name in ("sink 1, tail 8", "sink 1, tail 1, 2 native layers", "sink 1, tail 1, 30% spread by 1"):
        assert row_of(name)["share_of_reprefill"] > plain["share_of_reprefill"], name
    assert row_of("sink 1, tail 1, 30% spread by 1")["kl_nats"]["mean"] < plain["kl_nats"]["mean"]
    assert row_of("sink 1, tail 1, 2 native layers")["kl_nats"]["mean"] < plain["kl_nats"]["mean"]


def test_the_frontier_holds_what_nothing_beats() -> None:
    rows = [row for row in record()["contexts"][0]["points"] if row["knowable"]]
    best = min(rows, key=lambda row: row["kl_nats"]["mean"])
    cheapest = min(rows, key=lambda row: (row["share_of_reprefill"], row["kl_nats"]["mean"]))
    assert best["on_frontier"]
    assert cheapest["on_frontier"]
    assert not all(row["on_frontier"] for row in rows)
    assert not any(row["on_frontier"] for row in record()["contexts"][0]["points"] if not row["knowable"])


def test_choices_are_compared_with_as_many_random_tokens() -> None:
    rows = record()["contexts"][0]["selection"]
    assert {(row["by"], row["block"]) for row in rows} == {
        (b, n) for b in ("spread", "distance", "oracle") for n in (1, 4)
    }
    for row in rows:
        gap = row["kl_random_nats"]["mean"] - row["kl_nats"]["mean"]
        assert row["nearer_than_random_nats"]["mean"] == pytest.approx(gap, abs=1e-9)


def test_a_signal_that_knows_beats_chance() -> None:
    """Half of the tokens are wrong and the oracle sees which: reading these is exact, reading random ones is not."""
    model = lm()
    sweep = Sweep(model, model, identity_translator(model.geometry, torch.float64), OPTIONS)
    example = choose_examples(
        tiny.documents(6, 60), model, model, EvaluationOptions(context_tokens=40, continuation_tokens=8, documents=1)
    )[0]
    known = sweep.know(example)
    wrong = torch.arange(known.middle.tokens) % 3 == 0

    def spoil(x: torch.Tensor) -> torch.Tensor:
        return torch.where(wrong[:, None], x + 2.0, x)

    known = replace(
        known,
        middle=KV(tuple(map(spoil, known.middle.keys)), tuple(map(spoil, known.middle.values)), known.middle.tokens),
    )
    native = sweep.logits(known, reprefill_plan(len(known.ids), "all"), known.middle)
    gaps = {}
    for by in ("oracle", "random"):
        point = Point("x", anchors=Anchors(by, float(wrong.double().mean())))
        gaps[by] = float(tiny.kl(native, sweep.logits(known, *sweep.plan(known, point, 0))).mean())
    assert gaps["oracle"] < 1e-8
    assert gaps["random"] > 1e-3


@torch.no_grad()
def test_a_point_is_the_hand_over_that_serving_would_make() -> None:
    """What the sweep shares between settings changes nothing: each is what `hand_off` gives by itself."""
    from kvlingo.handoff import hand_off

    model, translator = lm(), off_by(0.1)
    sweep = Sweep(model, model, translator, OPTIONS)
    options = EvaluationOptions(context_tokens=40, continuation_tokens=1, documents=1)
    known = sweep.know(choose_examples(tiny.documents(6, 60), model, model, options)[0])
    text = known.example.target.stream.decode().removeprefix("<s>")
    for point in (
        Point("x", tail=8),
        Point("x", native_layers=2),
        Point("x", sink=4, tail=3, anchors=Anchors("spread", 0.3, 4)),
        Point("x", anchors=Anchors("distance", 0.3, 1)),
    ):
        done = hand_off(
            text,
            model,
            model,
            translator,
            sink=point.sink,
            tail=point.tail,
            native_layers=point.native_layers,
            anchors=point.anchors,
        )
        assert done.logits is not None
        plan, middle = sweep.plan(known, point, 0)
        assert [(s.kind, s.start, s.stop) for s in plan.spans] == [(s.kind, s.start, s.stop) for s in done.plan.spans]
        torch.testing.assert_close(sweep.logits(known, plan, middle)[0], done.logits, atol=1e-8, rtol=0)


def test_an_exact_translator_is_exact_at_every_point() -> None:
    model = lm()
    small = replace(OPTIONS, documents=2, by=("spread", "surprise", "deviation"), shares=(0.2,), bits=(), blocks=(1,))
    found = frontier(
        model, model, identity_translator(model.geometry, torch.float64), tiny.documents(6, 60), options=small
    )
    rows = found["contexts"][0]["points"]
    assert {row["sweep"] for row in rows} >= {"anchors: surprise, by 1", "anchors: deviation, by 1, 2 native layers"}
    assert max(row["kl_nats"]["mean"] for row in rows) < 1e-8
    assert found["contexts"][0]["selection"] == []  # nothing was chosen at random


def test_deviation_is_compared_with_chance_at_its_own_cost() -> None:
    names = [p.name for p in points_of(replace(OPTIONS, by=("random", "deviation"), blocks=(1,)), lm())]
    assert names[-3:] == [
        "sink 1, tail 1, 30% random by 1",
        "sink 1, tail 1, 2 native layers, 30% deviation by 1",
        "sink 1, tail 1, 2 native layers, 30% random by 1",
    ]


@torch.no_grad()
def test_surprise_is_read_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm()
    ids = tiny.ids_of(model, 30)
    wanted = nll_nats(tiny.cold_logits(model, ids)[:-1], ids[1:]).float()
    for size in (7, 29, 64):
        monkeypatch.setattr(frontier_module, "PIECE_TOKENS", size)
        found = frontier_module.surprises(model, ids)
        assert found[0] == 0
        torch.testing.assert_close(found[1:], wanted, atol=1e-5, rtol=0)


# --- costs -------------------------------------------------------------------------------------------------------------


def test_a_plan_without_anchors_costs_what_a_hand_over_costs() -> None:
    plan = plan_handoff(range(1000), sink=20, tail=30)
    by_hand = handoff_flops(TARGET, (10_000, 0), 1000, sink=20, tail=30)
    assert plan_flops(TARGET, (10_000, 0), plan) == pytest.approx(by_hand, rel=1e-9)


def test_anchors_cost_one_pass_and_what_sliding_layers_look_back_to() -> None:
    plain, anchored = plan_handoff(range(1000)), plan_handoff(range(1000), anchors=((500, 520), (700, 704)))
    no_maps = plan_flops(TARGET, (0, 0), anchored) - plan_flops(TARGET, (0, 0), plain)
    attention = attention_flops(TARGET, 20, after=500) + attention_flops(TARGET, 4, after=700)
    assert no_maps == pytest.approx(2 * 1_000_000 * 24 + attention)
    of_maps = plan_flops(TARGET, (0, 10_000), anchored) - plan_flops(TARGET, (0, 0), anchored)
    assert of_maps == pytest.approx(2 * 10_000 * (999 - (500 - 99)))
    by_signal = plan_flops(TARGET, (0, 10_000), anchored, is_chosen_by_signal=True)
    assert by_signal - plan_flops(TARGET, (0, 0), anchored) == pytest.approx(2 * 10_000 * 998)


def test_native_layers_cost_their_share_and_no_map() -> None:
    two_of_four = TargetCost(1_000_000, (0,) * 4, (None,) * 4)
    plan = replace(plan_handoff(range(1001)), native_layers=2)
    plain = plan_flops(two_of_four, (0, 500, 500, 500), plan_handoff(range(1001)))
    gained = plan_flops(two_of_four, (0, 500, 500, 500), plan) - plain
    assert gained == pytest.approx(2 * 0.5 * 1_000_000 * 1000 - 2 * 500 * 999)


def test_a_reprefill_costs_a_pass() -> None:
    assert plan_flops(TARGET, (9, 9), reprefill_plan(300, "x")) == pass_flops(TARGET, 300)
    held = reprefill_plan(300, "x", native=100)
    assert plan_flops(TARGET, (9, 9), held) == pass_flops(TARGET, 200, after=100)


# --- quantised ---------------------------------------------------------------------------------------------------------


def test_rounding_is_even_and_keeps_the_ends() -> None:
    x = torch.tensor([[0.0, 0.4, 0.6, 3.0]])
    assert torch.equal(rounded(x, 2), torch.tensor([[0.0, 0.0, 1.0, 3.0]]))
    assert torch.equal(rounded(torch.full((2, 3), 7.0), 2), torch.full((2, 3), 7.0))


def test_groups_are_of_dims_or_of_tokens() -> None:
    x = torch.randn(1, 2, 10, 8, dtype=torch.float64)
    by_token = rounded_groups(x, 2, 4, "token")
    assert torch.equal(by_token[0, 1, 3, 4:], rounded(x[0, 1, 3, 4:], 2))
    by_channel = rounded_groups(x, 2, 4, "channel")
    assert torch.equal(by_channel[0, 1, 4:8, 5], rounded(x[0, 1, 4:8, 5], 2))
    assert torch.equal(by_channel[0, 1, 8:, 5], rounded(x[0, 1, 8:, 5], 2))  # a shorter last group


@torch.no_grad()
def test_a_quantised_cache_keeps_its_sinks_and_gets_better_with_bits() -> None:
    model = lm()
    kv = read(model, tiny.ids_of(model, 30))
    errors = []
    for bits in (2, 4, 8):
        found = quantise(model, kv, Quantisation(bits, 4), keep_first=3)
        for x, y in zip((*found.keys, *found.values), (*kv.keys, *kv.values), strict=True):
            torch.testing.assert_close(x[:, :, :3], y[:, :, :3], atol=1e-12, rtol=0)
        errors.append(float((found.keys[1] - kv.keys[1]).square().mean()))
    assert errors[0] > 4 * errors[1] > 16 * errors[2] > 0


@torch.no_grad()
def test_keys_are_rounded_as_the_cache_holds_them() -> None:
    model = lm()
    kv = read(model, tiny.ids_of(model, 12))
    found = quantise(model, kv, Quantisation(2, 4), keep_first=0)
    at = torch.arange(12)
    turned, wanted = (model.rotary.rotate(x.keys[1], 1, at) for x in (found, kv))
    torch.testing.assert_close(turned, rounded_groups(wanted, 2, 4, "token"), atol=1e-6, rtol=0)


@pytest.mark.parametrize("wrong", [{"bits": 0}, {"bits": 9}, {"bits": 2, "group": 1}])
def test_impossible_bits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        Quantisation(**wrong)


# --- the picture -------------------------------------------------------------------------------------------------------


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from kvlingo.plots import draw_frontier

    file = tmp_path / "frontier.png"
    draw_frontier(record(), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 20_000


def test_the_tables_show_the_frontier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "load", lambda name: record() if name == "frontier-smollm2-gemma" else None)
    rows = quality_tables.frontier().splitlines()[2:]
    best = [p for p in record()["contexts"][0]["points"] if p["on_frontier"]]
    assert len(rows) == 4 + len(best) + 2
    assert any(row.startswith(f"| SmolLM2 → Gemma | 40 | {best[0]['name']} | ") for row in rows)
    assert len(quality_tables.selection().splitlines()) == 2 + len(record()["contexts"][0]["selection"])
    monkeypatch.setattr(records, "load", lambda _: None)
    assert quality_tables.frontier() == quality_tables.selection() == "Not measured yet.\n"
