"""Anchors: which tokens the target reads in the middle, and that reading them is exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlingo.recompute as recompute_module
from kvlingo.anchors import Anchors, merged
from kvlingo.assembling import assemble, continuation_logits, not_held
from kvlingo.cache import read_cache
from kvlingo.cache_writing import write_cache
from kvlingo.errors import BadInput
from kvlingo.handoff import hand_off
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.plan import HandoffPlan, Provenance, SpanKind, plan_handoff, with_anchors
from kvlingo.recompute import at_once, in_turn, recompute, takes_masks
from kvlingo.translator import Translator, TranslatorConfig, identity_translator
from tests import tiny

EXACT = 1e-8
N, R, T = SpanKind.NATIVE, SpanKind.RECOMPUTED, SpanKind.TRANSLATED
TOKENS = 40
RANGES = ((5, 7), (12, 13), (16, 27))
FAMILIES = ("llama", "gemma3", "mistral", "qwen3", "olmo2", "glm4", "llama-yarn")


# --- which tokens ------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    st.sampled_from(["spread", "random", "signal"]),
    st.floats(0, 1),
    st.integers(1, 9),
    st.integers(0, 20),
    st.integers(0, 60),
)
def test_choices_read_what_they_cost(by: str, share: float, block: int, start: int, tokens: int) -> None:
    stop = start + tokens
    scores = [float((7 * i) % 11) for i in range(tokens)]
    picked = Anchors(by, share, block).pick(start, stop, scores)
    assert all(start <= a < b <= stop for a, b in picked)
    assert all(a[1] < b[0] for a, b in pairwise(picked))
    read_tokens = sum(b - a for a, b in picked)
    wanted = min(round(share * tokens / block) * block, tokens)
    assert read_tokens in (wanted, tokens // block * block)
    if by != "spread" and wanted < tokens:
        other = Anchors("random", share, block, seed=1).pick(start, stop)
        assert sum(b - a for a, b in other) == read_tokens


def test_spread_is_even() -> None:
    assert Anchors("spread", 0.2, 4).pick(0, 40) == [(8, 12), (28, 32)]
    assert Anchors("spread", 0.2, 1).pick(10, 20) == [(12, 13), (17, 18)]


def test_the_least_trusted_blocks_are_read() -> None:
    scores = [0.0] * 20
    scores[3] = scores[13] = 5.0
    scores[12] = 1.0
    assert Anchors("signal", 0.1, 2).pick(100, 120, scores) == [(112, 114)]
    assert Anchors("signal", 0.2, 2).pick(100, 120, scores) == [(102, 104), (112, 114)]


def test_a_choice_by_signal_needs_a_score_for_each_token() -> None:
    with pytest.raises(BadInput, match="score for each of 20 tokens, got none"):
        Anchors("signal", 0.5).pick(0, 20)


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"share": -0.1}, {"block": 0}])
def test_impossible_anchors_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Anchors(**wrong)  # type: ignore[arg-type]


def test_ranges_that_touch_are_one() -> None:
    assert merged([(5, 7), (1, 3), (3, 4), (6, 9), (8, 8)]) == [(1, 4), (5, 9)]


# --- in the plan -------------------------------------------------------------------------------------------------------


def spans(plan: HandoffPlan) -> list[tuple[SpanKind, int, int]]:
    return [(s.kind, s.start, s.stop) for s in plan.spans]


def test_anchors_split_the_middle() -> None:
    plan = plan_handoff(range(20), sink=2, tail=3, anchors=((5, 7), (9, 10)))
    assert spans(plan) == [(R, 0, 2), (T, 2, 5), (R, 5, 7), (T, 7, 9), (R, 9, 10), (T, 10, 17), (R, 17, 20)]
    assert plan.anchors == ((5, 7), (9, 10))
    assert plan.translated == (2, 17)
    assert plan.tail == 3
    assert [s.provenance for s in plan.spans if s.kind is R] == [Provenance.EXACT, *[Provenance.OWN] * 3]


def test_anchors_at_the_edges_belong_to_sinks_and_tail() -> None:
    plan = plan_handoff(range(20), sink=2, tail=3, anchors=((0, 4), (15, 40)))
    assert plan.translated == (4, 15)
    assert plan.anchors == ()
    assert plan.tail == 5
    assert [s.provenance for s in plan.spans if s.stop <= 4] == [Provenance.EXACT] * 2


def test_anchors_everywhere_are_a_reprefill() -> None:
    plan = plan_handoff(range(20), native=4, tail=3, anchors=((0, 20),))
    assert plan.fallback == "anchors cover everything between first and last tokens"
    assert spans(plan) == [(N, 0, 4), (R, 4, 20)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6), st.integers(0, 8), st.integers(1, 9))
def test_a_plan_with_anchors_covers_every_token_once(ranges: list[tuple[int, int]], sink: int, tail: int) -> None:
    plan = with_anchors(plan_handoff(range(30), sink=sink, tail=tail), ranges)
    assert plan.spans[0].start == 0
    assert plan.spans[-1].stop == 30
    assert all(a.stop == b.start for a, b in pairwise(plan.spans))
    start, stop = plan_handoff(range(30), sink=sink, tail=tail).translated
    translated = {i for s in plan.spans if s.kind is T for i in range(s.start, s.stop)}
    assert translated == set(range(start, stop)) - {i for a, b in ranges for i in range(a, b)}


# --- reading them ------------------------------------------------------------------------------------------------------


def spoilt(kv: KV, seed: int = 0, scale: float = 0.5) -> KV:
    """Return what a bad map would have made of the same tokens."""
    generator = torch.Generator().manual_seed(seed)

    def spoil(x: torch.Tensor) -> torch.Tensor:
        return x + scale * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)

    return KV(tuple(map(spoil, kv.keys)), tuple(map(spoil, kv.values)), kv.tokens)


def by_hand(lm: LanguageModel, kv: KV, ids: torch.Tensor, ranges: tuple[tuple[int, int], ...]) -> KV:
    """Read token after token, each on a cache that is written anew: slow, and nothing to get wrong."""
    keys, values = [x.clone() for x in kv.keys], [x.clone() for x in kv.values]
    for place in (p for start, stop in ranges for p in range(start, stop)):
        before = KV(tuple(k[:, :, :place] for k in keys), tuple(v[:, :, :place] for v in values), place)
        cache = write_cache(before, lm.rotary, lm.geometry, lm.model.config)
        prefill(lm, ids[place : place + 1], cache=cache)
        mine = read_cache(cache, lm.rotary, lm.geometry, start=place)
        for layer in range(len(keys)):
            keys[layer][:, :, place] = mine.keys[layer][:, :, 0]
            values[layer][:, :, place] = mine.values[layer][:, :, 0]
    return KV(tuple(keys), tuple(values), kv.tokens)


def assert_same(one: KV, other: KV) -> None:
    for x, y in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        torch.testing.assert_close(x, y, atol=EXACT, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways_of_reading_are_what_reading_by_hand_gives(family: str) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, TOKENS)
    bad = spoilt(read(lm, ids))
    wanted = by_hand(lm, bad, ids, RANGES)
    assert takes_masks(lm)
    assert_same(at_once(lm, bad, ids, RANGES), wanted)
    assert_same(in_turn(lm, bad, ids, RANGES), wanted)
    # The later ranges saw what the earlier ones became, not what was there before.
    alone = at_once(lm, bad, ids, RANGES[-1:])
    assert float((alone.keys[-1] - wanted.keys[-1])[:, :, 16:27].abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_again_what_is_exact_changes_nothing(family: str) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, TOKENS)
    native = read(lm, ids)
    assert_same(recompute(lm, native, ids, RANGES), native)


@torch.no_grad()
def test_a_model_that_ignores_masks_reads_range_after_range(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = replace(tiny.language_model("llama"))  # another object: nothing is known of it yet
    monkeypatch.setattr(recompute_module, "masks", lambda *_: None)
    assert not takes_masks(lm)
    ids = tiny.ids_of(lm, TOKENS)
    bad = spoilt(read(lm, ids))
    assert_same(recompute(lm, bad, ids, RANGES), by_hand(lm, bad, ids, RANGES))


@torch.no_grad()
def test_a_model_that_fails_on_masks_reads_range_after_range(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = replace(tiny.language_model("gemma3"))
    monkeypatch.setattr(recompute_module, "masks", lambda *_: {"no such kind of layer": torch.zeros(1)})
    assert not takes_masks(lm)


# --- in a hand-over ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["llama", "gemma3", "mistral"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny.language_model(request.param)


def bad_translator(lm: LanguageModel, seed: int = 0) -> Translator:
    """Return maps that are off by half of what they carry."""
    translator = identity_translator(lm.geometry, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in translator.parameters():
            if parameter.ndim == 2:
                parameter += 0.15 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return translator


TEXT = tiny.text_of_tokens(TOKENS)


@pytest.mark.parametrize("by", ["spread", "random", "distance"])
def test_with_an_exact_translator_anchors_change_nothing(lm: LanguageModel, by: str) -> None:
    done = hand_off(TEXT, lm, lm, identity_translator(lm.geometry, torch.float64), anchors=Anchors(by, 0.3, 2))
    assert done.plan.fallback is None
    assert done.plan.count(R) == 2 + 12  # by distance, some stand right before the tail
    assert done.logits is not None
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=EXACT, rtol=0)


@pytest.mark.parametrize("by", ["spread", "distance"])
def test_all_tokens_recomputed_are_a_reprefill(lm: LanguageModel, by: str) -> None:
    done = hand_off(TEXT, lm, lm, bad_translator(lm), anchors=Anchors(by, 1.0, 2))
    assert done.plan.count(T) == 0
    assert done.plan.fallback is not None
    assert done.logits is not None
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=EXACT, rtol=0)
    assert done.state.cache.get_seq_length() == TOKENS


@torch.no_grad()
def test_a_hand_over_s_cache_is_the_plan_s(lm: LanguageModel) -> None:
    """Every translated token comes from the map; every anchor is what the target reads on top of what stands before it."""
    translator = bad_translator(lm)
    ids = tiny.ids_of(lm, TOKENS)
    plan = plan_handoff(range(TOKENS), sink=2, tail=3, anchors=RANGES)
    source_kv = read(lm, ids)
    kv = assemble(plan, lm, translator, source_kv, torch.arange(TOKENS), ids)
    plain = replace(plan_handoff(range(TOKENS), sink=2, tail=3))
    whole = translator(source_kv, torch.arange(2, 37), None, start=2)
    mapped = KV(
        tuple(torch.cat((a[:, :, :2], b), 2) for a, b in zip(source_kv.keys, whole.keys, strict=True)),
        tuple(torch.cat((a[:, :, :2], b), 2) for a, b in zip(source_kv.values, whole.values, strict=True)),
        37,
    )
    wanted = by_hand(lm, mapped, ids, RANGES)
    for layer in range(len(kv)):
        held = kv.held(layer)
        torch.testing.assert_close(kv.keys[layer], wanted.keys[layer][:, :, -held:], atol=EXACT, rtol=0)
        torch.testing.assert_close(kv.values[layer], wanted.values[layer][:, :, -held:], atol=EXACT, rtol=0)
    # Sliding layers keep what the first anchor looks back to.
    reaches = [s.window or TOKENS for s in lm.geometry.layers]
    assert not_held(plan, lm) == [max(0, 5 - w + 1 - 2) for w in reaches]
    assert not_held(plain, lm) == [max(0, 37 - w + 1 - 2) for w in reaches]


@torch.no_grad()
def test_anchors_bring_a_bad_translation_nearer(lm: LanguageModel) -> None:
    ids, follow = tiny.ids_of(lm, TOKENS + 8)[:TOKENS], tiny.ids_of(lm, TOKENS + 8)[TOKENS:]
    native = continuation_logits(lm, None, ids, follow)
    gaps = []
    for share in (0.0, 0.5, 1.0):
        plan = plan_handoff(range(TOKENS))
        plan = with_anchors(plan, Anchors("spread", share).pick(*plan.translated))
        kv = assemble(plan, lm, bad_translator(lm), read(lm, ids), torch.arange(TOKENS), ids)
        rest = ids[plan.translated[1] :] if plan.count(T) else ids
        logits = continuation_logits(lm, kv if plan.count(T) else None, rest, follow)
        gaps.append(float(tiny.kl(native, logits).mean()))
    assert gaps[0] > gaps[2]
    assert gaps[1] < gaps[0]
    assert gaps[2] < 1e-9


def test_anchors_need_text(lm: LanguageModel) -> None:
    with pytest.raises(BadInput, match="anchors are text"):
        hand_off(TEXT, lm, lm, identity_translator(lm.geometry, torch.float64), anchors=Anchors(), no_text=True)


def test_an_unknown_signal_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(BadInput, match="no signal 'luck'; use one of distance"):
        hand_off(TEXT, lm, lm, identity_translator(lm.geometry, torch.float64), anchors=Anchors("luck"))


def test_after_an_earlier_cache_anchors_stand_in_what_is_new(lm: LanguageModel) -> None:
    before = hand_off(TEXT, lm, lm, identity_translator(lm.geometry, torch.float64)).state
    longer = TEXT + tiny.text_of_tokens(30, seed=1)
    done = hand_off(
        longer,
        lm,
        lm,
        identity_translator(lm.geometry, torch.float64),
        target_state=before,
        anchors=Anchors("spread", 0.2, 2),
    )
    assert done.plan.fallback is None
    assert done.plan.anchors
    assert done.plan.anchors[0][0] >= TOKENS
    assert done.logits is not None
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=EXACT, rtol=0)


# --- signals -----------------------------------------------------------------------------------------------------------


def doubts_of(lm: LanguageModel, by: str, translator: Translator, **known: object) -> torch.Tensor:
    from kvlingo.assembling import translate
    from kvlingo.trust import Evidence, doubts, exact_layers

    ids = tiny.ids_of(lm, TOKENS)
    plan = replace(plan_handoff(range(TOKENS)), native_layers=int(known.pop("native_layers", 0)))  # type: ignore[call-overload]
    start, stop = plan.translated
    kv = read(lm, ids)
    middle = translate(plan, lm, translator, kv, torch.arange(TOKENS), ids, skip=[0] * len(lm.geometry))
    exact = exact_layers(plan, translator)
    found = Evidence(lm, translator, middle, kv, torch.arange(start, stop), None, start, exact, **known)  # type: ignore[arg-type]
    return doubts(found, by)


@torch.no_grad()
def test_distance_is_the_mean_square_of_standard_features() -> None:
    lm = tiny.language_model("llama")
    ids = tiny.ids_of(lm, TOKENS)
    translator = identity_translator(lm.geometry, torch.float64)
    kv = read(lm, ids)
    for layer in range(len(kv)):
        layer_map = translator.maps[str(layer)]
        layer_map.feature_mean.copy_(kv.flat(layer)[0].mean(0))  # type: ignore[operator, union-attr]
        layer_map.feature_scale.copy_(kv.flat(layer)[0].std(0))  # type: ignore[operator, union-attr]
    found = doubts_of(lm, "distance", translator)
    z = [((kv.flat(i)[0] - kv.flat(i)[0].mean(0)) / kv.flat(i)[0].std(0)).square().mean(-1) for i in range(len(kv))]
    torch.testing.assert_close(found, torch.stack(z).mean(0)[1:-1])


@torch.no_grad()
def test_key_norm_sees_keys_that_are_too_short() -> None:
    lm = tiny.language_model("qwen3")
    good = doubts_of(lm, "key_norm", identity_translator(lm.geometry, torch.float64))
    assert float(good.max()) < 1e-3  # the norm's own epsilon
    shrunk = identity_translator(lm.geometry, torch.float64)
    for layer_map in shrunk.maps.values():
        layer_map.linear.weight.mul_(0.5)  # type: ignore[operator, union-attr]
    halved = doubts_of(lm, "key_norm", shrunk)
    torch.testing.assert_close(halved, torch.full_like(halved, 0.6931), atol=1e-3, rtol=0)


def test_key_norm_needs_a_norm() -> None:
    lm = tiny.language_model("llama")
    with torch.no_grad(), pytest.raises(BadInput, match="use another"):
        doubts_of(lm, "key_norm", identity_translator(lm.geometry, torch.float64))


@torch.no_grad()
def test_deviation_and_oracle_are_zero_for_an_exact_map_only() -> None:
    lm = tiny.language_model("llama")
    truth = read(lm, tiny.ids_of(lm, TOKENS)).narrow(1, TOKENS - 1)
    exact, bad = identity_translator(lm.geometry, torch.float64), bad_translator(lm)
    for by in ("deviation", "oracle"):
        known = {"truth": truth, "native_layers": 2 if by == "deviation" else 0}
        assert float(doubts_of(lm, by, exact, **dict(known)).max()) < 1e-9
        assert float(doubts_of(lm, by, bad, **dict(known)).min()) > 1e-3


def test_deviation_needs_native_layers_and_oracle_the_truth() -> None:
    lm = tiny.language_model("llama")
    exact = identity_translator(lm.geometry, torch.float64)
    for by, words in (("deviation", "at least 2"), ("oracle", "for experiments"), ("surprise", "own predictions")):
        with torch.no_grad(), pytest.raises(BadInput, match=words):
            doubts_of(lm, by, exact)


@torch.no_grad()
def test_surprise_is_the_source_s_at_the_aligned_token() -> None:
    lm = tiny.language_model("llama")
    nats = torch.arange(float(TOKENS))
    found = doubts_of(lm, "surprise", identity_translator(lm.geometry, torch.float64), source_nats=nats)
    assert torch.equal(found, nats[1:-1])


@torch.no_grad()
def test_layers_whose_window_has_slid_past_a_token_don_t_count() -> None:
    lm = tiny.language_model("mistral")  # every layer slides: the first tokens are held by none
    translator = Translator(
        TranslatorConfig(lm.geometry, lm.geometry, tuple((i,) for i in range(3)), embedding_lags=())
    ).double()
    found = doubts_of(lm, "distance", translator.eval())
    assert torch.equal(
        found[: TOKENS - 2 - tiny.WINDOW + 1] > 0, torch.zeros(TOKENS - 1 - tiny.WINDOW, dtype=torch.bool)
    )
    assert bool((found[-tiny.WINDOW + 1 :] > 0).all())
