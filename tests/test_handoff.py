"""Hand-overs of conversations: there and back, regenerated, edited, slid, without text, and when it can't be done."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import kvlingo.handoff as handoff_module
from kvlingo.cache import tensors_of
from kvlingo.confidence import Confidence
from kvlingo.errors import BadInput, IncompatiblePair, UnsupportedCache
from kvlingo.generation import generate, grown
from kvlingo.handoff import HandOff, hand_off, hand_off_in_parts
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.plan import Provenance, SpanKind, reprefill_plan
from kvlingo.states import ModelState, common_prefix, read_native
from kvlingo.steps import finished
from kvlingo.translator import Translator, TranslatorConfig, identity_translator
from tests import tiny

EXACT = 1e-8  # float64
N, R, T = SpanKind.NATIVE, SpanKind.RECOMPUTED, SpanKind.TRANSLATED
FIRST = tiny.text_of_tokens(30)
REPLY = " answer to that"
REPLY_TOKENS = len(REPLY)
WHOLE = FIRST + REPLY


@pytest.fixture(params=["llama", "gemma3"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny.language_model(request.param)


def identity(lm: LanguageModel) -> Translator:
    return identity_translator(lm.geometry, torch.float64)


def kinds(done: HandOff) -> list[tuple[SpanKind, int, int]]:
    return [(s.kind, s.start, s.stop) for s in done.plan.spans]


def assert_cold(lm: LanguageModel, done: HandOff) -> None:
    """The next token's logits are those of the model reading everything itself."""
    assert done.logits is not None
    assert done.state.cache.get_seq_length() == len(done.state.reading)
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=EXACT, rtol=0)


def says(lm: LanguageModel, state: ModelState, text: str) -> ModelState:
    """Return the state of a model that has said `text` and holds it."""
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    prefill(lm, lm.ids(ids), cache=state.cache)
    return grown(lm, state, ids)


def slid(lm: LanguageModel, text: str) -> ModelState:
    """Return a state as the model makes it by itself: sliding layers hold their window only."""
    state = read_native(text, lm)
    return replace(state, cache=prefill(lm, lm.ids(state.reading.ids)).cache)


def spoil(state: ModelState, tokens: int) -> None:
    """Overwrite what a full-length cache holds of the first tokens, so that reading them shows."""
    for layer in state.cache.layers:
        held = layer.keys.shape[2]
        first = max(0, tokens - (state.cache.get_seq_length() - held))
        layer.keys[:, :, :first] = float("nan")
        layer.values[:, :, :first] = float("nan")


# --- there and back --------------------------------------------------------------------------------------------------


def test_there_and_back(lm: LanguageModel) -> None:
    """Each side keeps what it read itself; only what it missed is translated."""
    a = read_native(FIRST, lm)
    there = hand_off(FIRST, lm, lm, identity(lm), source_state=a)
    assert kinds(there) == [(R, 0, 1), (T, 1, 29), (R, 29, 30)]
    assert_cold(lm, there)
    b = says(lm, there.state, REPLY)
    assert b.translated_until == 29
    assert b.spans[-1].provenance is Provenance.OWN
    assert b.spans[-1].reason == "generated"
    back = hand_off(WHOLE, lm, lm, identity(lm), source_state=b, target_state=a)
    total = 30 + REPLY_TOKENS
    assert kinds(back) == [(N, 0, 30), (T, 30, total - 1), (R, total - 1, total)]
    assert back.plan.fallback is None
    assert_cold(lm, back)


def test_a_translation_is_never_translated_again(lm: LanguageModel) -> None:
    there = hand_off(FIRST, lm, lm, identity(lm))
    b = says(lm, there.state, REPLY)
    spoil(b, b.translated_until)
    back = hand_off(WHOLE, lm, lm, identity(lm), source_state=b)
    assert back.plan.fallback is None
    assert kinds(back)[:2] == [(R, 0, 29), (T, 29, 29 + REPLY_TOKENS)]
    assert "only a translation" in back.plan.spans[0].reason
    assert_cold(lm, back)


def test_the_spoiled_cache_shows_when_it_is_read(lm: LanguageModel) -> None:
    state = read_native(FIRST, lm)
    spoil(state, 5)
    done = hand_off(FIRST, lm, lm, identity(lm), source_state=state)
    assert done.logits is not None
    first_full = next(i for i, layer in enumerate(lm.geometry.layers) if layer.window is None)
    assert bool(done.state.cache.layers[first_full].keys.isnan().any())


def test_the_source_s_words_after_the_prompt_are_translated(lm: LanguageModel) -> None:
    state = says(lm, read_native(FIRST, lm), REPLY)
    assert state.spans[-1].provenance is Provenance.EXACT
    done = hand_off(WHOLE, lm, lm, identity(lm), source_state=state)
    assert done.plan.translated == (1, 29 + REPLY_TOKENS)
    assert_cold(lm, done)


def test_what_the_source_has_not_read_is_read_by_the_target(lm: LanguageModel) -> None:
    done = hand_off(WHOLE, lm, lm, identity(lm), source_state=read_native(FIRST, lm))
    assert kinds(done) == [(R, 0, 1), (T, 1, 30), (R, 30, 30 + REPLY_TOKENS)]
    assert_cold(lm, done)


# --- there, back, there, back ------------------------------------------------------------------------------------------

USER = " and then?"
DELTA = REPLY_TOKENS + len(USER)


def unreadable(state: ModelState) -> ModelState:
    """Return a state whose translated spans can't be read without showing."""
    cache = deepcopy(state.cache)
    for layer in cache.layers:
        lost = cache.get_seq_length() - layer.keys.shape[2]
        for span in state.spans:
            if span.provenance is Provenance.TRANSLATED:
                place = slice(max(0, span.start - lost), max(0, span.stop - lost))
                layer.keys[:, :, place] = layer.values[:, :, place] = float("nan")
    return replace(state, cache=cache)


def test_six_switches_translate_only_what_was_missed(lm: LanguageModel) -> None:
    """A -> B -> A -> B -> A -> B -> A: what was once translated for a side stays in that side's cache."""
    conversation = FIRST + REPLY
    holder, other = says(lm, read_native(FIRST, lm), REPLY), None
    for turn in range(6):
        conversation += USER
        read_before = len(holder.reading)
        held = 0 if other is None else len(other.reading)
        done = hand_off(conversation, lm, lm, identity(lm), source_state=unreadable(holder), target_state=other)
        assert done.plan.fallback is None, turn
        assert_cold(lm, done)
        assert done.plan.hops == 1
        assert done.plan.count(N) == held
        assert done.plan.count(T) == (read_before - 1 if other is None else DELTA)
        assert done.plan.count(R) == (1 if other is None else 0) + len(USER)
        assert done.plan.translated == (max(held, 1), read_before)
        assert_provenance_is_carried(done, other)
        holder, other = says(lm, done.state, REPLY), holder
        conversation += REPLY


def assert_provenance_is_carried(done: HandOff, before: ModelState | None) -> None:
    """Every native token is worth what it was worth before; every new one is translated, or own (no longer exact)."""
    old = {} if before is None else {i: s.provenance for s in before.spans for i in range(s.start, s.stop)}
    for span in done.state.spans:
        for token in range(span.start, span.stop):
            if span.kind is N:
                assert span.provenance is old[token]
            elif span.kind is T:
                assert span.provenance is Provenance.TRANSLATED
            elif token:
                assert span.provenance is Provenance.OWN
            else:
                assert span.provenance is Provenance.EXACT  # the sink, read first of all


def test_the_marked_spans_are_really_unreadable(lm: LanguageModel) -> None:
    marked = unreadable(hand_off(FIRST, lm, lm, identity(lm)).state)
    assert any(bool(layer.keys.isnan().any()) for layer in marked.cache.layers)
    done = hand_off(FIRST, lm, lm, identity(lm), source_state=replace(marked, spans=reprefill_plan(30, "x").spans))
    assert done.plan.fallback is not None or bool(done.logits is not None and done.logits.isnan().any())


def test_a_map_that_reads_the_token_before_reads_no_translated_one(lm: LanguageModel) -> None:
    layers = tuple((layer,) for layer in range(len(lm.geometry)))
    translator = Translator(TranslatorConfig(lm.geometry, lm.geometry, layers, (0, 1), ())).double()
    a = read_native(FIRST, lm)
    b = says(lm, hand_off(FIRST, lm, lm, identity(lm), source_state=a).state, REPLY)
    a = replace(a, cache=prefill(lm, lm.ids(a.reading.ids[:29]), full_length=True).cache)
    back = hand_off(WHOLE, lm, lm, translator, source_state=unreadable(b), target_state=a)
    assert back.plan.translated[0] == 29
    assert not any(bool(layer.keys.isnan().any()) for layer in back.state.cache.layers)


def test_an_answer_asked_for_again_keeps_what_came_before_it(lm: LanguageModel) -> None:
    """The conversation leaves B's cache in the middle of its own words: they stay up to there, translated ones included."""
    b = says(lm, hand_off(FIRST, lm, lm, identity(lm)).state, REPLY)
    done = hand_off(WHOLE[:-4] + "#" + REPLY, lm, lm, identity(lm), target_state=b)
    assert done.plan.fallback is None
    assert done.plan.count(N) == len(b.reading) - 4
    provenances = [s.provenance for s in done.plan.spans if s.kind is N]
    assert provenances == [Provenance.EXACT, Provenance.TRANSLATED, Provenance.OWN]
    assert_cold(lm, done)


def test_editing_inside_what_was_translated(lm: LanguageModel) -> None:
    b = says(lm, hand_off(FIRST, lm, lm, identity(lm)).state, REPLY)
    done = hand_off(FIRST[:14] + "#" + FIRST[15:] + REPLY, lm, lm, identity(lm), target_state=b)
    if all(layer.window is None for layer in lm.geometry.layers):
        assert done.plan.fallback is None
        assert [(s.stop, s.provenance) for s in done.plan.spans if s.kind is N] == [
            (1, Provenance.EXACT),
            (15, Provenance.TRANSLATED),
        ]
    else:
        assert done.plan.fallback is not None
        assert "slid out of its window" in done.plan.fallback
    assert_cold(lm, done)


def test_what_is_recomputed_after_an_approximate_prefix_is_not_exact(lm: LanguageModel) -> None:
    b = hand_off(FIRST, lm, lm, identity(lm)).state
    done = hand_off(WHOLE, lm, lm, identity(lm), target_state=b, tail=100)
    assert done.plan.fallback is not None
    assert [s.provenance for s in done.plan.spans] == [
        Provenance.EXACT,
        Provenance.TRANSLATED,
        Provenance.OWN,
        Provenance.OWN,
    ]
    assert done.plan.hops == 1
    assert_cold(lm, done)


def test_beyond_the_fitting_length_it_works_and_says_so(lm: LanguageModel) -> None:
    translator = identity(lm)
    translator.config = replace(translator.config, fitted_tokens=16)
    done = hand_off(FIRST, lm, lm, translator)
    (span,) = [s for s in done.plan.spans if s.kind is T]
    assert span.reason == "from the source's cache, 29 tokens into it: fitted on contexts of up to 16"
    assert_cold(lm, done)
    (span,) = [s for s in hand_off(FIRST[:15], lm, lm, translator).plan.spans if s.kind is T]
    assert span.reason == "from the source's cache"


# --- the target has been here before ---------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [-1, 0, 1, 9])
def test_regenerating_and_editing_shorter_leave_a_token_to_read(lm: LanguageModel, held: int) -> None:
    """The target's earlier cache is a token short, just as long, longer, much longer than the conversation."""
    before = read_native(tiny.text(60)[: 29 + held], lm)
    assert before.cache.get_seq_length() == 30 + held
    done = hand_off(tiny.text(60)[:29], lm, lm, identity(lm), target_state=before)
    assert kinds(done) == [(N, 0, 29), (R, 29, 30)]
    assert_cold(lm, done)


def test_editing_the_history_keeps_what_is_still_the_same(lm: LanguageModel) -> None:
    before = read_native(FIRST, lm)
    edited = FIRST[:14] + "#" + FIRST[15:] + REPLY
    done = hand_off(edited, lm, lm, identity(lm), target_state=before)
    total = 30 + REPLY_TOKENS
    assert kinds(done) == [(N, 0, 15), (T, 15, total - 1), (R, total - 1, total)]
    assert_cold(lm, done)
    assert before.cache.get_seq_length() == 30


def test_a_slid_target_cache_is_gone_on_from_at_its_end() -> None:
    lm = tiny.language_model("gemma3")
    done = hand_off(WHOLE, lm, lm, identity(lm), target_state=slid(lm, FIRST))
    assert done.plan.fallback is None
    assert kinds(done)[0] == (N, 0, 30)
    assert_cold(lm, done)


def test_a_slid_target_cache_cut_short_is_read_again() -> None:
    lm = tiny.language_model("gemma3")
    edited = FIRST[:14] + "#" + FIRST[15:]
    done = hand_off(edited, lm, lm, identity(lm), target_state=slid(lm, FIRST))
    assert done.plan.fallback is not None
    assert "slid out of its window" in done.plan.fallback
    assert kinds(done) == [(R, 0, 30)]
    assert_cold(lm, done)


def test_where_a_source_can_not_be_read_the_target_goes_on_from_what_it_holds() -> None:
    lm = tiny.language_model("gemma3")
    held = read_native(FIRST[:12], lm)
    done = hand_off(WHOLE, lm, lm, identity(lm), source_state=slid(lm, FIRST), target_state=held)
    assert done.plan.fallback is not None
    assert "slid out of its window" in done.plan.fallback
    tokens = len(done.state.reading)
    assert kinds(done) == [(N, 0, len(held.reading)), (R, len(held.reading), tokens)]
    assert_cold(lm, done)
    assert held.cache.get_seq_length() == len(held.reading)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_what_is_gone_on_from_after_a_fall_back_can_be_translated_from(family: str) -> None:
    """The target held more than the two texts share: what its windows have left behind is kept all the same."""
    lm = tiny.language_model(family)
    held = read_native(FIRST[:20] + REPLY, lm)
    done = hand_off(
        WHOLE, lm, lm, identity(lm), source_state=read_native(WHOLE, lm), target_state=held, distrust="why not"
    )
    assert done.plan.fallback == "why not"
    assert done.plan.count(N) == 21
    assert_cold(lm, done)
    assert {layer.keys.shape[2] for layer in done.state.cache.layers} == {len(done.state.reading)}
    onwards = hand_off(WHOLE + USER, lm, lm, identity(lm), source_state=done.state)
    assert onwards.plan.fallback is None
    assert onwards.plan.count(T) > 0


def test_who_reads_by_other_means_gets_no_cache_of_a_fall_back(lm: LanguageModel) -> None:
    def given(confidence: Confidence | None, source: ModelState) -> HandOff:
        steps = hand_off_in_parts(
            FIRST,
            lm,
            lm,
            identity(lm),
            most=None,
            sink=3,
            source_state=source,
            confidence=confidence,
            reads_again=False,
        )
        with torch.no_grad():
            return finished(steps)

    never = Confidence(("entropy_nats",), (0.0,), (1.0,), (1.0,), 0.0, 0.0, 0.5, 4, {})
    short = read_native(FIRST[:1], lm)  # which has read no more than the sinks
    for done in (given(never, read_native(FIRST, lm)), given(None, short)):
        assert done.plan.fallback is not None
        assert done.state.cache is None
        assert done.logits is None


def test_few_native_tokens_are_extended_to_the_sinks(lm: LanguageModel) -> None:
    done = hand_off(FIRST, lm, lm, identity(lm), sink=6, target_state=read_native(FIRST[:2], lm))
    assert kinds(done)[:2] == [(N, 0, 3), (R, 3, 6)]
    assert_cold(lm, done)


THINKING = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_template_that_drops_thoughts_keeps_what_came_before_them(family: str) -> None:
    """What a model said with its thoughts stands without them in the next turn: no count of messages tells what is held."""
    lm = tiny.language_model(family, tokenizer=tiny.byte_tokenizer(chat_template=THINKING))
    asked = [{"role": "user", "content": "Who counts the stones?"}]
    answer = "<think>The river or the winter?</think>The river does."
    held = says(lm, read_native(asked, lm), "[assistant]" + answer)
    chat = [*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "And in the winter?"}]
    done = hand_off(chat, lm, lm, identity(lm), target_state=held)
    assert done.plan.fallback is None
    kept = done.plan.count(N)
    assert lm.tokenizer.decode(done.state.reading.ids[:kept]).endswith("[user]Who counts the stones?[assistant]")
    assert "think" not in lm.tokenizer.decode(done.state.reading.ids)
    assert_cold(lm, done)


@pytest.mark.parametrize("cut", [1, 4, 7, 13])
def test_ids_that_its_tokenizer_would_not_give_end_what_is_kept(cut: int) -> None:
    """A model may say a word in other pieces than its tokenizer cuts: kept as far as the ids are the same, no further."""
    lm = tiny.language_model("llama", tokenizer=tiny.merging_tokenizer())
    said = " then the other string"
    pieces = [lm.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (said[:cut], said[cut:])]
    before = read_native(FIRST, lm)
    ids = [*pieces[0], *pieces[1]]
    prefill(lm, lm.ids(ids), cache=before.cache)
    held = grown(lm, before, ids)
    done = hand_off(FIRST + said + " in winter", lm, lm, identity(lm), target_state=held)
    same = [mine == theirs for mine, theirs in zip(held.reading.ids, done.state.reading.ids, strict=False)]
    assert done.plan.count(N) == (same.index(False) if False in same else len(same))
    assert_cold(lm, done)


def test_common_prefixes() -> None:
    lm = tiny.language_model("llama")
    whole = read_native(WHOLE, lm).reading
    assert common_prefix(None, whole) == 0
    assert common_prefix(read_native(FIRST, lm), whole) == 30
    assert common_prefix(read_native(WHOLE, lm), whole) == len(whole) - 1
    assert common_prefix(read_native("x" + FIRST, lm), whole) == 1
    translated = hand_off(FIRST, lm, lm, identity(lm)).state
    assert common_prefix(translated, whole) == 30  # what was translated for it is its own from then on
    assert (
        common_prefix(replace(translated, spans=translated.spans[:1]), whole) == 1
    )  # no more than its spans vouch for


# --- the dial --------------------------------------------------------------------------------------------------------


def test_the_dial(lm: LanguageModel) -> None:
    for options in ({"sink": 4}, {"tail": 12}, {"native_layers": 2}, {"sink": 3, "tail": 3, "native_layers": 3}):
        done = hand_off(FIRST, lm, lm, identity(lm), **options)
        assert done.plan.fallback is None
        assert done.plan.native_layers == options.get("native_layers", 0)
        assert_cold(lm, done)


def test_all_recomputed_is_a_reprefill_that_says_so(lm: LanguageModel) -> None:
    done = hand_off(FIRST, lm, lm, identity(lm), tail=100)
    assert done.plan.fallback is not None
    assert done.plan.count(T) == 0
    assert_cold(lm, done)


def test_one_token_and_two(lm: LanguageModel) -> None:
    for text in ("a", "ab"):
        done = hand_off(text, lm, lm, identity(lm))
        assert_cold(lm, done)


def test_times_are_told(lm: LanguageModel) -> None:
    done = hand_off(FIRST, lm, lm, identity(lm))
    assert set(done.timings_ms) == {"source_prefill", "translate", "tail"}
    assert all(ms >= 0 for ms in done.timings_ms.values())


# --- without text ----------------------------------------------------------------------------------------------------


def test_without_text_the_target_starts_at_the_next_new_token(lm: LanguageModel) -> None:
    done = hand_off(FIRST, lm, lm, identity(lm), no_text=True, tail=5)
    assert kinds(done) == [(R, 0, 1), (T, 1, 30)]
    assert done.logits is None
    assert done.state.cache.get_seq_length() == 30
    new = lm.ids(lm.tokenizer(REPLY, add_special_tokens=False)["input_ids"])
    got = prefill(lm, new, cache=done.state.cache).logits[-1]
    cold = tiny.cold_logits(lm, torch.cat((lm.ids(done.state.reading.ids), new)))[-1]
    torch.testing.assert_close(got, cold, atol=EXACT, rtol=0)


def test_without_text_nothing_falls_back_on_reading_it() -> None:
    lm = tiny.language_model("gemma3")
    with pytest.raises(UnsupportedCache, match="without its text"):
        hand_off(FIRST, lm, lm, identity(lm), no_text=True, source_state=slid(lm, FIRST))
    with pytest.raises(UnsupportedCache, match="without its text"):
        hand_off(FIRST, lm, lm, identity(lm), no_text=True, sink=100)
    twice = says(lm, hand_off(FIRST, lm, lm, identity(lm)).state, REPLY)
    with pytest.raises(UnsupportedCache, match="without its text"):
        hand_off(WHOLE, lm, lm, identity(lm), no_text=True, source_state=twice)


def test_a_translator_that_reads_the_text_needs_it(lm: LanguageModel) -> None:
    reader = Translator(TranslatorConfig(lm.geometry, lm.geometry, ((0,),) * len(lm.geometry))).double()
    with pytest.raises(BadInput, match="--no-text"):
        hand_off(FIRST, lm, lm, reader, no_text=True)


# --- re-prefill, always with its reason ------------------------------------------------------------------------------


def test_a_slid_source_cache_is_reprefilled() -> None:
    lm = tiny.language_model("gemma3")
    done = hand_off(FIRST, lm, lm, identity(lm), source_state=slid(lm, FIRST))
    assert done.plan.fallback is not None
    assert "slid out of its window" in done.plan.fallback
    assert kinds(done) == [(R, 0, 30)]
    assert done.plan.hops == 0
    assert done.state.translated_until == 0
    assert_cold(lm, done)


def test_a_source_cache_of_our_own_keeps_every_token() -> None:
    lm = tiny.language_model("gemma3")
    state = read_native(FIRST, lm)
    assert [layer.keys.shape[2] for layer in state.cache.layers] == [30] * 4


def test_a_cache_of_another_model_is_reprefilled(lm: LanguageModel) -> None:
    other = tiny.language_model(lambda: tiny.llama(num_hidden_layers=2))
    state = replace(read_native(FIRST, lm), cache=read_native(FIRST, other).cache)
    done = hand_off(FIRST, lm, lm, identity(lm), source_state=state)
    assert done.plan.fallback is not None
    assert "2 layers" in done.plan.fallback
    assert_cold(lm, done)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversation", ["", "  \n", []])
def test_nothing_to_hand_over(conversation: Any) -> None:
    lm = tiny.language_model("llama")
    with pytest.raises(BadInput, match=r"empty|no messages"):
        hand_off(conversation, lm, lm, identity(lm))


def test_a_translator_of_another_pair() -> None:
    llama, gemma = tiny.language_model("llama"), tiny.language_model("gemma3")
    with pytest.raises(IncompatiblePair, match="target has 3 layers"):
        hand_off(FIRST, llama, gemma, identity(llama))


def test_two_states_of_different_conversations() -> None:
    lm = tiny.language_model("llama")
    other = tiny.language_model("llama", tokenizer=tiny.merging_tokenizer())
    state = read_native(tiny.text(80, seed=3).upper(), other)
    with pytest.raises(BadInput, match="same conversation"):
        hand_off("0123456789 " * 12, other, lm, identity(lm), source_state=state)


# --- two tokenizers --------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "user", "content": "What is the river counting?"},
    {"role": "assistant", "content": "The stones and then the string."},
    {"role": "user", "content": "And in the winter?"},
]


@pytest.fixture
def alignments(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the alignment of every hand-over."""
    seen: list[list[int]] = []
    plan = handoff_module.plan_handoff

    def recorded(alignment: list[int], **options: Any) -> Any:
        seen.append(list(alignment))
        return plan(alignment, **options)

    monkeypatch.setattr(handoff_module, "plan_handoff", recorded)
    return seen


def ends(reading: Any, index: int) -> str:
    """Return the text up to the end of a token."""
    return reading.stream[: reading.spans[index][1]].decode(errors="ignore")


def assert_aligned(source: Any, target: Any, alignment: list[int], text: str) -> None:
    """Every token inside `text` is fed by the first source token that has read as far."""
    begin = target.stream.decode().index(text)
    inside = [j for j in range(len(target)) if begin < len(ends(target, j)) <= begin + len(text)]
    assert inside
    for j in inside:
        read = ends(target, j)[begin:]
        i = alignment[j]
        start = source.stream.decode().index(text)
        assert ends(source, i)[start:].startswith(read), (j, i)
        assert len(ends(source, i - 1)) < start + len(read), (j, i)


def test_a_chat_in_two_tokenizers(alignments: list[list[int]]) -> None:
    source = tiny.language_model("llama", tokenizer=tiny.merging_tokenizer())
    target = tiny.language_model("gemma3")
    translator = Translator(
        TranslatorConfig(source.geometry, target.geometry, ((0, 1),) * 4, embedding_lags=())
    ).double()
    state = read_native(CHAT, source)
    done = hand_off(CHAT, source, target, translator, source_state=state)
    assert done.plan.fallback is None
    assert done.plan.tail >= 1
    for message in CHAT:
        assert_aligned(state.reading, done.state.reading, alignments[0], message["content"])


def test_a_text_gone_on_with_in_two_tokenizers(alignments: list[list[int]]) -> None:
    """The source's own words are one more content of its reading, and part of the one text for the target."""
    source = tiny.language_model("llama", tokenizer=tiny.merging_tokenizer())
    target = tiny.language_model("llama")
    state = says(source, read_native(FIRST, source), REPLY + " in winter")
    done = hand_off(FIRST + REPLY + " in winter", source, target, identity(target), source_state=state)
    assert done.plan.fallback is None
    assert_aligned(state.reading, done.state.reading, alignments[0], REPLY + " in winter")


def test_a_state_tells_how_far_it_can_be_trusted() -> None:
    lm = tiny.language_model("llama")
    assert read_native(FIRST, lm).translated_until == 0
    spans = reprefill_plan(30, "x").spans
    assert replace(read_native(FIRST, lm), spans=spans).translated_until == 0
    assert hand_off(FIRST, lm, lm, identity(lm), tail=4).state.translated_until == 26


def test_a_stream_left_in_the_middle_leaves_a_whole_state(lm: LanguageModel) -> None:
    done = hand_off(FIRST, lm, lm, identity(lm))
    assert done.logits is not None
    stream = generate(lm, done.state, done.logits, max_new_tokens=40, stop_at_eos=False)
    for _ in stream:
        if len(stream.ids) >= 5:
            break
    said = len(stream.ids)
    assert said < 40
    state = stream.state
    assert state.cache.get_seq_length() == len(state.reading) == state.spans[-1].stop == 30 + said - 1
    logits = prefill(lm, lm.ids(stream.ids[-1:]), cache=state.cache).logits[-1]
    cold = tiny.cold_logits(lm, lm.ids([*state.reading.ids, stream.ids[-1]]))[-1]
    torch.testing.assert_close(logits, cold, atol=EXACT, rtol=0)


def test_hand_offs_work_inside_inference_mode(lm: LanguageModel) -> None:
    with torch.inference_mode():
        done = hand_off(FIRST, lm, lm, identity(lm))
        assert_cold(lm, done)


# --- a target's own cache that is not what it seems ------------------------------------------------------------------------


def shortened(layer: int, tokens: int) -> Callable[[Any], Any]:
    def spoil(cache: Any) -> Any:
        one = cache.layers[layer]
        one.keys, one.values = one.keys[:, :, :tokens].contiguous(), one.values[:, :, :tokens].contiguous()
        return cache

    return spoil


def lengthened(cache: Any) -> Any:
    one = cache.layers[1]
    one.keys, one.values = (torch.cat((x, x[:, :, :3]), 2) for x in (one.keys, one.values))
    return cache


def without_its_last_layer(cache: Any) -> Any:
    cache.layers = cache.layers[:-1]
    return cache


def with_a_layer_too_many(cache: Any) -> Any:
    cache.layers = [*cache.layers, deepcopy(cache.layers[0])]
    return cache


def of_two_rows(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.repeat(2, 1, 1, 1), layer.values.repeat(2, 1, 1, 1)
    return cache


def of_an_encoder_decoder(cache: Any) -> Any:
    return EncoderDecoderCache(cache, DynamicCache())


@pytest.mark.parametrize(
    "spoil",
    [
        shortened(0, 10),
        shortened(1, 10),
        shortened(2, 10),
        lengthened,
        without_its_last_layer,
        with_a_layer_too_many,
        of_two_rows,
        of_an_encoder_decoder,
    ],
    ids=lambda f: getattr(f, "__name__", None),
)
def test_a_damaged_target_cache_is_read_again_and_says_so(spoil: Callable[[Any], Any]) -> None:
    lm = tiny.language_model("llama")
    source = read_native(FIRST + REPLY, lm)
    target = read_native(FIRST, lm)
    target = replace(target, cache=spoil(target.cache))
    done = hand_off(FIRST + REPLY, lm, lm, identity(lm), source_state=source, target_state=target)
    assert done.plan.fallback is not None
    assert done.logits is not None
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=1e-8, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_target_cache_of_another_dtype_is_brought_to_the_models_own(family: str) -> None:
    lm = tiny.language_model(family)
    source, target = read_native(FIRST + REPLY, lm), read_native(FIRST, lm)
    for layer in target.cache.layers:
        layer.keys, layer.values = layer.keys.float(), layer.values.float()
    done = hand_off(FIRST + REPLY, lm, lm, identity(lm), source_state=source, target_state=target)
    assert done.plan.count(N) > 0
    assert done.logits is not None
    assert {x.dtype for x in tensors_of(done.state.cache) if x.is_floating_point()} == {torch.float64}
    cold = tiny.cold_logits(lm, lm.ids(done.state.reading.ids))[-1]
    torch.testing.assert_close(done.logits, cold, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_hand_over_leaves_the_target_s_earlier_cache_as_it_was(family: str) -> None:
    lm = tiny.language_model(family)
    source, target = read_native(FIRST + REPLY, lm), read_native(FIRST, lm)
    before = [x.clone() for x in tensors_of(target.cache)]
    hand_off(FIRST + REPLY, lm, lm, identity(lm), source_state=source, target_state=target)
    assert tiny.same(before, list(tensors_of(target.cache)))
    assert target.cache.get_seq_length() == len(target.reading)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_source_cache_that_ends_before_its_reading_is_used_as_far_as_it_goes(family: str, cut: int) -> None:
    """A token that was said and not fed back, or a cache that was cut: the target reads those tokens itself."""
    lm, text = tiny.language_model(family), tiny.text(60, seed=1)[:100]
    state = read_native(text, lm)
    short = replace(state, cache=prefill(lm, lm.ids(state.reading.ids[:-cut]), full_length=True).cache)
    handed = hand_off(text + " on", lm, lm, identity_translator(lm.geometry, torch.float64), source_state=short)
    assert handed.plan.fallback is None
    assert handed.plan.translated[1] <= len(state.reading.ids) - cut
    cold = tiny.cold_logits(lm, lm.ids(handed.state.reading.ids))[-1]
    assert handed.logits is not None
    torch.testing.assert_close(handed.logits, cold, atol=1e-8, rtol=0)
