"""The in-process engine: whatever it reuses, batches or translates, it answers as a cold model would."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvlingo.serve.decoding as decoding
import kvlingo.serve.switching as switching
from kvlingo.batches import Batch
from kvlingo.confidence import Confidence
from kvlingo.cost import MapRates, Rates, ReadingRates
from kvlingo.errors import BadInput, IncompatiblePair
from kvlingo.serve.decoding import FairQueue, Job, Lane
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.metrics import Figures, kind_of
from kvlingo.serve.protocol import (
    Begun,
    Busy,
    Dial,
    Done,
    Message,
    Piece,
    Request,
    Sampling,
    TooLong,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from kvlingo.serve.sessions import Match, Radix, Sessions, Snapshot
from kvlingo.serve.switching import Link, Rule
from kvlingo.states import read_conversation
from kvlingo.translator import identity_translator
from tests import tiny
from tests.serving import (
    ALWAYS,
    answer,
    ask,
    assistant,
    closing,
    cold_ids,
    greedy,
    request_for,
    settled,
    twin_engine,
    user,
    within,
)

LM = tiny.language_model("llama")
IDENTITY = identity_translator(LM.geometry, torch.float64)
TEMPLATE_WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}<{{ tool['name'] }}>{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def talk(turns: int, seed: int = 0) -> list[Message]:
    """Return a conversation of that many turns, a user's message last."""
    messages: list[Message] = []
    for turn in range(turns):
        messages += [user(tiny.text(12, seed=seed + 2 * turn)), assistant(tiny.text(8, seed=seed + 2 * turn + 1))]
    return [*messages, user("and then?")]


# --- the same answers as a cold model --------------------------------------------------------------------------------


def edited(rng: random.Random, messages: list[Message], said: str) -> list[Message]:
    """Go on, ask again, branch off, change the history, or cut it short; a user's message is always last."""
    kind = rng.choice(("go on", "go on", "again", "branch", "change", "shorten"))
    new = user(tiny.text(rng.randint(1, 6), seed=rng.randrange(1000)))
    if kind == "go on" and len(messages) < 9:
        return [*messages, assistant(said), new]
    if kind == "again":
        return messages
    if kind == "shorten":
        return messages[: 2 * rng.randrange(len(messages) // 2 + 1) + 1]
    place = 2 * rng.randrange(len(messages) // 2 + 1)
    if kind == "branch":
        return [*messages[:place], new]
    changed = dict(messages[place])
    at = rng.randrange(len(changed["content"]))
    changed["content"] = changed["content"][:at] + rng.choice("xyz") + changed["content"][at + 1 :]
    return [*messages[:place], changed, *messages[place + 1 :]]


def play(engine: LocalEngine, edits: int, seed: int, lm: Any = LM) -> tuple[int, dict[str, int]]:
    """Edit a conversation at random; return how often the engine was wrong, and the tokens by kind.

    Wrong: an answer that differs from a cold model's, or a state that could not be kept.
    """
    rng = random.Random(seed)
    messages, wrong = talk(1, seed), 0
    tokens = {"native": 0, "translated": 0, "recomputed": 0, "fallbacks": 0}
    for _ in range(edits):
        dial = Dial(rng.choice(("auto", "auto", "translate", "reprefill")), rng.randint(0, 3), rng.randint(1, 4))
        (found,) = ask(engine, request_for(lm, rng.choice("ab"), messages, dial=dial))
        begun = found.begun
        assert begun.native_tokens + begun.translated_tokens + begun.recomputed_tokens == begun.prompt_tokens
        assert begun.prompt_tokens == len(
            read_conversation([dict(m) for m in messages], lm, add_generation_prompt=True)
        )
        wrong += found.ids != cold_ids(lm, messages)
        for kind in ("native", "translated", "recomputed"):
            tokens[kind] += getattr(begun, f"{kind}_tokens")
        tokens["fallbacks"] += begun.fallback is not None and dial.mode == "auto"
        messages = edited(rng, messages, found.text)
    return wrong + int(engine.stats()["not_kept"]), tokens


@pytest.mark.parametrize(("family", "edits"), [("llama", 240), ("gemma3", 60)])
def test_random_edits_answer_as_a_cold_model(family: str, edits: int) -> None:
    with twin_engine(family) as (engine, lm):
        wrong, tokens = play(engine, edits, seed=3, lm=lm)
        assert wrong == 0
        # Each way was taken, else nothing was tested.
        assert min(tokens["native"], tokens["translated"], tokens["recomputed"]) > 5 * edits


def claims_more(real: Callable[..., list[Match]]) -> Callable[..., list[Match]]:
    """Break the tree: every snapshot counts as far as it goes, where ids differ or not."""

    def find(self: Radix, ids: Any) -> list[Match]:
        return [Match(m.snapshot, min(len(m.snapshot.ids), len(ids))) for m in real(self, ids)]

    return find


def test_random_edits_see_a_cache_that_is_reused_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Radix, "find", claims_more(Radix.find))
    with twin_engine() as (engine, _):
        assert play(engine, 30, seed=3)[0] > 0


def test_random_edits_see_a_shared_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 5: whoever goes on from the stored object itself changes it."""
    monkeypatch.setattr("kvlingo.serve.sessions.fork", lambda cache: cache)
    monkeypatch.setattr(switching, "fork", lambda cache: cache)
    with twin_engine() as (engine, _):
        try:
            assert play(engine, 30, seed=3)[0] > 0
        except (RuntimeError, KeyError):  # or lengths and tensors no longer fit what is noted of them
            return


def test_random_edits_see_swapped_layers() -> None:
    translator = identity_translator(LM.geometry, torch.float64)
    first, last = (translator.maps[name].linear.weight for name in ("0", "2"))
    with torch.no_grad():
        first.copy_(first.flip(0))
        last.zero_()
    with twin_engine(translator=translator) as (engine, _):
        assert play(engine, 30, seed=3)[0] > 0


def test_the_generated_ids_are_kept_for_the_next_turn() -> None:
    with twin_engine() as (engine, lm):
        messages = talk(1)
        (first,) = ask(engine, request_for(lm, "a", messages))
        (second,) = ask(engine, request_for(lm, "a", [*messages, assistant(first.text), user("more")]))
        # All but the last token, which the model never read.
        assert second.begun.native_tokens == first.begun.prompt_tokens + first.done.completion_tokens - 1
        assert second.begun.hops == 0


def test_asking_again_reads_one_token() -> None:
    """Case 7: the whole prompt is there, and one token is read all the same."""
    with twin_engine() as (engine, lm):
        first, again = (ask(engine, request_for(lm, "a", talk(2)))[0] for _ in range(2))
        assert (again.begun.native_tokens, again.begun.recomputed_tokens) == (again.begun.prompt_tokens - 1, 1)
        assert first.ids == again.ids


def test_text_that_is_no_chat() -> None:
    with twin_engine() as (engine, lm):
        text = tiny.text(30)
        (first,) = ask(engine, request_for(lm, "a", text))
        (second,) = ask(engine, request_for(lm, "b", text + first.text + " and"))
        assert second.begun.translated_tokens > 100
        assert second.ids == cold_ids(lm, text + first.text + " and")


# --- switching -------------------------------------------------------------------------------------------------------


def there_and_back(rule: Rule, mode: Any = "auto", turns: int = 3) -> tuple[Begun, Begun]:
    with twin_engine(rule=rule) as (engine, lm):
        messages = talk(turns)
        (first,) = ask(engine, request_for(lm, "a", messages))
        messages = [*messages, assistant(first.text), user("go on")]
        (second,) = ask(engine, request_for(lm, "b", messages, dial=Dial(mode)))
        messages = [*messages, assistant(second.text), user("and back")]
        (third,) = ask(engine, request_for(lm, "a", messages, dial=Dial(mode)))
        assert third.ids == cold_ids(lm, messages)
        return second.begun, third.begun


def test_a_switch_translates_and_going_back_uses_what_is_there() -> None:
    there, back = there_and_back(ALWAYS)
    assert (there.model, there.source, there.hops, there.fallback) == ("b", "a", 1, None)
    assert there.translated_tokens > 0.8 * there.prompt_tokens
    assert back.native_tokens > 0.8 * back.prompt_tokens
    assert back.hops <= 1


def test_what_was_translated_from_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real, used = Sessions.used, list[str]()

    def noted(self: Sessions, snapshot: Snapshot) -> None:
        used.append(snapshot.place.model)
        real(self, snapshot)

    monkeypatch.setattr(Sessions, "used", noted)
    with twin_engine() as (engine, lm):
        for model in "ab":
            ask(engine, request_for(lm, model, talk(2)))
    assert used == ["a"]


def test_by_default_a_short_conversation_is_read_again() -> None:
    there, _ = there_and_back(Rule(), turns=1)
    assert (there.translated_tokens, there.source, there.fallback) == (0, None, None)
    assert there.recomputed_tokens == there.prompt_tokens


@pytest.mark.parametrize(("mode", "translated"), [("translate", True), ("reprefill", False)])
def test_the_mode_decides(mode: str, translated: bool) -> None:
    there, _ = there_and_back(ALWAYS if mode == "reprefill" else Rule(), mode)
    assert (there.translated_tokens > 0) == translated
    assert there.hops == translated


def test_between_the_thresholds_cost_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule(reprefill_up_to=1, translate_from=1 << 30)
    monkeypatch.setattr(switching, "handoff_flops", lambda *_, **__: 1.0)
    assert there_and_back(rule)[0].translated_tokens > 0
    monkeypatch.setattr(switching, "handoff_flops", lambda *_, **__: 1e30)
    assert there_and_back(rule)[0].translated_tokens == 0


def test_with_rates_between_the_thresholds_seconds_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of FLOPs say the opposite; with rates nobody asks them."""
    text = tiny.text(60)
    reading = ReadingRates(s_per_flop=1e-9, s_per_attention_flop=1e-9, s_per_byte=0.0, s_per_layer=0.0)
    for per_handoff, flops in ((0.0, 1e30), (1e3, 1.0)):
        monkeypatch.setattr(switching, "handoff_flops", lambda *_, flops=flops, **__: flops)
        rates = Rates(reading, MapRates(s_per_flop=0.0, s_per_byte=0.0, s_per_handoff=per_handoff))
        with twin_engine(rule=Rule(reprefill_up_to=1, translate_from=1 << 30)) as (engine, lm):
            engine._switch._links = tuple(replace(link, rates=rates) for link in engine._switch._links)
            ask(engine, request_for(lm, "a", text))
            (found,) = ask(engine, request_for(lm, "b", text))
        assert (found.begun.translated_tokens > 0) == (per_handoff == 0.0)


def test_a_reprefill_that_is_asked_for_uses_no_approximate_token() -> None:
    """Case 22, within one tenant: the same prompt, first translated, then read."""
    with twin_engine() as (engine, lm):
        messages = talk(2)
        ask(engine, request_for(lm, "a", messages))
        (translated,) = ask(engine, request_for(lm, "b", messages))
        (read,) = ask(engine, request_for(lm, "b", messages, dial=Dial("reprefill")))
        assert translated.begun.translated_tokens > 0
        assert (read.begun.native_tokens, read.begun.hops) == (1, 0)  # the sink


def test_another_tenant_finds_nothing() -> None:
    with twin_engine() as (engine, lm):
        messages = talk(2)
        ask(engine, request_for(lm, "a", messages, tenant="one"))
        for model in "ab":
            (other,) = ask(engine, request_for(lm, model, messages, tenant="two"))
            if model == "a":
                assert other.begun.recomputed_tokens == other.begun.prompt_tokens
            else:
                assert other.begun.source == "a"  # the second tenant's own reading of a moment ago
        (pinned,) = ask(engine, request_for(lm, "a", messages, tenant="one", conversation="c"))
        assert pinned.begun.native_tokens == 0
        (again,) = ask(engine, request_for(lm, "a", messages, tenant="one", conversation="c"))
        assert again.begun.native_tokens == again.begun.prompt_tokens - 1


@pytest.mark.parametrize("error", [RuntimeError("the map is on fire"), KeyError("x")])
def test_a_translator_that_raises_is_a_reprefill_with_its_reason(error: Exception) -> None:
    """Case 42: the answer is right, the reason visible and counted."""
    translator = identity_translator(LM.geometry, torch.float64)

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    translator.stream = broken  # type: ignore[method-assign]
    with twin_engine(translator=translator) as (engine, lm):
        messages = talk(2)
        ask(engine, request_for(lm, "a", messages))
        (found,) = ask(engine, request_for(lm, "b", messages))
        assert found.begun.fallback is not None
        assert type(error).__name__ in found.begun.fallback
        assert "fire" not in found.begun.fallback  # the text of an error that nobody foresaw may quote a prompt
        assert found.begun.translated_tokens == found.begun.hops == 0
        assert found.ids == cold_ids(lm, messages)
        assert engine.stats()["fallbacks"] == 1


def test_where_one_translator_fails_the_next_source_is_translated_from(caplog: pytest.LogCaptureFixture) -> None:
    broken = identity_translator(LM.geometry, torch.float64)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    broken.stream = fails  # type: ignore[method-assign]
    links = [Link("a", "c", broken), Link("b", "c", identity_translator(LM.geometry, torch.float64))]
    with closing(LocalEngine(dict.fromkeys("abc", LM), links, Limits(rule=ALWAYS))) as engine:
        ask(engine, request_for(LM, "b", talk(2)))
        ask(engine, request_for(LM, "a", talk(3)))  # it has read more, so it is asked first
        (found,) = ask(engine, request_for(LM, "c", talk(3)))
    assert found.ids == cold_ids(LM, talk(3))
    assert (found.begun.source, found.begun.fallback) == ("b", None)
    assert found.begun.translated_tokens > 0
    assert "a translation failed" in caplog.text


def test_a_switch_that_is_read_again_is_told_as_one() -> None:
    """By rule, because it was asked for, or because there is no way: nothing failed, and it is a switch all the same."""
    with closing(LocalEngine(dict.fromkeys("abc", LM), [Link("a", "b", IDENTITY)])) as engine:
        (first,) = ask(engine, request_for(LM, "a", talk(2)))
        switches = {
            "reading so little again costs no more, and is exact": request_for(LM, "b", talk(2)),
            "there is no translator from a to c": request_for(LM, "c", talk(2)),
        }
        for why, request in switches.items():
            (found,) = ask(engine, request)
            assert (found.begun.switched_from, found.begun.fallback) == ("a", None)
            assert found.begun.reread == why
            assert kind_of(found.begun) == "reprefill"
        (again,) = ask(engine, request_for(LM, "b", talk(2)))
        (other,) = ask(engine, request_for(LM, "b", "something else", tenant="t"))
    with twin_engine() as (engine, lm):
        ask(engine, request_for(lm, "a", talk(2)))
        (asked,) = ask(engine, request_for(lm, "b", talk(2), dial=Dial("reprefill")))
        (back,) = ask(engine, request_for(lm, "a", talk(3)))
        (moved,) = ask(engine, request_for(lm, "b", talk(3)))
    assert (asked.begun.switched_from, asked.begun.reread) == ("a", "a re-prefill was asked for")
    assert (moved.begun.switched_from, moved.begun.reread, kind_of(moved.begun)) == ("a", None, "translate")
    for stayed in (first, again, other, back):
        assert (stayed.begun.switched_from, stayed.begun.reread, kind_of(stayed.begun)) == (None, None, "none")


@pytest.mark.parametrize("field", ["name", "tool_calls"])
def test_what_a_template_leaves_out_of_messages_is_refused(field: str) -> None:
    value = {"name": "Ida", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}[field]
    messages = [user("hi"), {"role": "assistant", "content": "ho", field: value}, user("and?")]
    with twin_engine() as (engine, lm), pytest.raises(Unsupported, match="has no place for") as caught:
        ask(engine, request_for(lm, "a", messages))
    assert caught.value.param == "messages"


def test_reasons_have_labels_of_their_own() -> None:
    counted = Figures(dict)
    reasons = {
        "nothing between": "no tokens lie between 1 first and 30 last ones",
        "no source": "no model with a translator to b has read more of this conversation",
        "translator refused": "the translator from a: its report says FAIL",
        "doubted": "this hand-over looks bad: it is bad with probability 0.9",
        "RuntimeError": "RuntimeError: the translation failed; the server's log says where",
        "other": "a sentence that nobody knows",
    }
    assert {reason: counted.reason_class(text) for reason, text in reasons.items()} == {r: r for r in reasons}


def test_a_refused_translator_is_not_used_and_says_why() -> None:
    link = Link("a", "b", identity_translator(LM.geometry, torch.float64), refusal="its report says FAIL")
    with closing(LocalEngine({"a": LM, "b": LM}, [link], Limits(rule=ALWAYS))) as engine:
        ask(engine, request_for(LM, "a", talk(2)))
        (found,) = ask(engine, request_for(LM, "b", talk(2)))
        assert found.begun.translated_tokens == 0
        assert "FAIL" in str(found.begun.fallback)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_hand_over_that_is_doubted_is_read_again_and_says_why(threshold: float) -> None:
    confidence = Confidence(("entropy_nats",), (0.0,), (1.0,), (1.0,), 0.0, threshold, 0.5, 4, {})
    link = Link("a", "b", identity_translator(LM.geometry, torch.float64), confidence=confidence)
    with closing(LocalEngine({"a": LM, "b": LM}, [link], Limits(rule=ALWAYS))) as engine:
        ask(engine, request_for(LM, "a", talk(2)))
        (found,) = ask(engine, request_for(LM, "b", talk(2)))
        assert found.ids == cold_ids(LM, talk(2))
        assert (found.begun.translated_tokens == 0) == (threshold == 0)
        assert ("looks bad" in str(found.begun.fallback)) == (threshold == 0)


def test_a_hand_over_that_is_doubted_is_read_again_once() -> None:
    """What the target holds itself stays; the rest is read under the doubted cache, and once more."""
    confidence = Confidence(("entropy_nats",), (0.0,), (1.0,), (1.0,), 0.0, 0.0, 0.5, 4, {})
    link = Link("a", "b", identity_translator(LM.geometry, torch.float64), confidence=confidence)
    read = list[int]()
    with closing(LocalEngine({"a": LM, "b": LM}, [link], Limits(rule=ALWAYS))) as engine:
        ask(engine, request_for(LM, "b", talk(1)))
        ask(engine, request_for(LM, "a", talk(3)))
        watch = LM.model.register_forward_pre_hook(
            lambda _, __, given: read.append(given["input_ids"].shape[-1]), with_kwargs=True
        )
        try:
            (found,) = ask(engine, request_for(LM, "b", talk(3)))
        finally:
            watch.remove()
    assert found.ids == cold_ids(LM, talk(3))
    assert "looks bad" in str(found.begun.fallback)
    assert found.begun.native_tokens > 0
    anew = found.begun.prompt_tokens - found.begun.native_tokens
    assert anew < sum(read) - len(found.ids) < 2 * anew


@pytest.mark.parametrize("tail", [1, 6])
def test_what_a_model_holds_itself_is_no_fall_back(tail: int) -> None:
    """An answer asked for again, with nothing between what is held and the tail that anybody could translate."""
    with twin_engine() as (engine, lm):
        ask(engine, request_for(lm, "a", talk(2)))
        for model in ("b", "b", "a", "b"):
            (found,) = ask(engine, request_for(lm, model, talk(2), dial=Dial("translate", tail=tail)))
            assert found.begun.fallback is None
            assert found.ids == cold_ids(lm, talk(2))
        assert engine.stats()["fallbacks"] == 0


def test_what_two_doubt_at_once_is_read_once() -> None:
    confidence = Confidence(("entropy_nats",), (0.0,), (1.0,), (1.0,), 0.0, 0.0, 0.5, 4, {})
    link = Link("a", "b", identity_translator(LM.geometry, torch.float64), confidence=confidence)
    with closing(LocalEngine({"a": LM, "b": LM}, [link], Limits(rule=ALWAYS, part_tokens=16))) as engine:
        ask(engine, request_for(LM, "a", talk(6)))
        both = ask(engine, request_for(LM, "b", talk(6)), request_for(LM, "b", talk(6)))
    assert [found.ids for found in both] == [cold_ids(LM, talk(6))] * 2
    assert all("looks bad" in str(found.begun.fallback) for found in both)
    fewest, most = sorted(found.begun.native_tokens for found in both)
    assert fewest == 0
    assert most > 0.8 * both[0].begun.prompt_tokens


def test_a_translation_that_was_asked_for_and_cannot_be_says_why() -> None:
    with twin_engine() as (engine, lm):
        (found,) = ask(engine, request_for(lm, "b", talk(1), dial=Dial("translate")))
        assert "no model with a translator to b" in str(found.begun.fallback)


def test_a_translator_of_another_pair_is_refused() -> None:
    other = tiny.language_model("gemma3")
    with pytest.raises(IncompatiblePair):
        LocalEngine({"a": LM, "b": other}, [Link("a", "b", identity_translator(LM.geometry))])
    with pytest.raises(BadInput, match="'c'"):
        LocalEngine({"a": LM}, [Link("a", "c", identity_translator(LM.geometry))])


# --- batches ---------------------------------------------------------------------------------------------------------

PROMPTS = [tiny.text(words, seed=words) for words in (3, 25, 9, 14, 2, 40)]


def batched(family: str, count: int = 12) -> tuple[list[list[int]], list[list[int]], float]:
    """Return what requests say side by side, what the model says alone, and the mean rows of a step."""
    lm = tiny.language_model(family)
    with closing(LocalEngine({"m": lm}, limits=Limits(max_rows=4))) as engine:
        lengths = [count + 3 * i for i in range(len(PROMPTS))]
        sampling = [Sampling(n, temperature=0.0, top_logprobs=0) for n in lengths]
        requests = [Request("m", p, s, tenant=p[:3]) for p, s in zip(PROMPTS, sampling, strict=True)]
        found = [a.ids for a in ask(engine, *requests)]
        stats = engine.stats()
    alone = [cold_ids(lm, prompt, n, letters_only=False) for prompt, n in zip(PROMPTS, lengths, strict=True)]
    end = lm.tokenizer.eos_token_id
    return found, [ids[: ids.index(end)] if end in ids else ids for ids in alone], stats["rows"] / stats["steps"]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "qwen3"])
def test_requests_say_the_same_alone_or_together(family: str) -> None:
    """Rows join and leave at different tokens: their lengths differ, and two wait for a place."""
    together, alone, rows = batched(family)
    assert together == alone
    assert rows > 1.5


def test_positions_off_by_one_in_a_batch_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lane._join

    def shifted(self: Lane) -> Batch:
        batch = real(self)
        return Batch(batch.cache, tuple(max(0, p - 1) for p in batch.padding))

    monkeypatch.setattr(Lane, "_join", shifted)
    together, alone, _ = batched("llama")
    assert together != alone


def test_rows_that_swap_their_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoding.append_row

    def swapped(cache: Any, stacked: Any, row: int, tokens: int, geometry: Any) -> None:
        real(cache, stacked, 0, tokens, geometry)

    monkeypatch.setattr(decoding, "append_row", swapped)
    together, alone, _ = batched("llama")
    assert together != alone


def test_what_was_decoded_in_a_batch_can_be_translated() -> None:
    """A sliding layer keeps what left its window, so the source is whole after a batch."""
    with twin_engine("gemma3") as (engine, lm):
        talks = [talk(1, seed=100 * i) for i in range(3)]
        first = ask(engine, *(request_for(lm, "a", t, count=20) for t in talks))
        nexts = [[*t, assistant(f.text), user("go on")] for t, f in zip(talks, first, strict=True)]
        for found, messages in zip(ask(engine, *(request_for(lm, "b", n) for n in nexts)), nexts, strict=True):
            assert found.begun.fallback is None
            assert found.begun.translated_tokens > 0.7 * found.begun.prompt_tokens
            assert found.ids == cold_ids(lm, messages)


def test_a_seed_says_the_same_whoever_decodes_beside_it() -> None:
    mine = Request("m", PROMPTS[1], Sampling(12, seed=5, top_logprobs=0))
    others = [Request("m", p, Sampling(15)) for p in PROMPTS[2:5]]
    with closing(LocalEngine({"m": LM})) as engine:
        alone = ask(engine, mine)[0]
        assert ask(engine, *others, mine)[-1].ids == alone.ids


def test_conversations_never_mix_and_cancels_leave_nothing_behind() -> None:
    """Case 41: many conversations, switches and cancels at once; each answer is that of its own single-threaded replay."""
    with twin_engine(max_rows=4) as (engine, lm):

        async def converse(number: int) -> int:
            rng = random.Random(number)
            messages: list[Message] = [user(f"codeword {number * 7919} {tiny.text(4, seed=number)}")]
            answered = 0
            for _ in range(12):
                request = request_for(lm, rng.choice("ab"), messages, tenant=f"t{number}", count=8)
                if rng.random() < 0.25:
                    events = engine.run(request)
                    for _ in range(rng.randint(1, 3)):
                        await anext(events)
                    await events.aclose()
                    continue
                found = await answer(engine, request)
                assert found.ids == cold_ids(lm, messages, 8)
                answered += 1
                messages = [*messages, assistant(found.text), user("next")]
            return answered

        async def all_of_them() -> list[int]:
            return await asyncio.gather(*map(converse, range(6)))

        assert sum(within(all_of_them(), 240)) > 40
        stats = settled(engine)
        assert stats["failed"] == 0
        assert stats["switches_translated"] > 10


# --- queue, cancel, drain --------------------------------------------------------------------------------------------


def test_the_queue_takes_tenants_in_turn() -> None:
    queue = FairQueue()
    jobs = [job_of(tenant) for tenant in ("a", "a", "a", "b", "c", "c")]
    for job in jobs:
        queue.push(job)
    queue.remove(jobs[1])
    queue.remove(jobs[1])
    assert len(queue) == 5
    assert [queue.pop().tenant for _ in range(len(queue))] == ["a", "b", "c", "a", "c"]


def job_of(tenant: str) -> Job:
    return Job(tenant, Sampling(1), begin=lambda: (_ for _ in ()).throw(ValueError), tell=print, keep=print)


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    real = Lane._read

    def slowly(self: Lane, tokens: list[int]) -> Any:
        time.sleep(seconds)
        return real(self, tokens)

    monkeypatch.setattr(Lane, "_read", slowly)


def test_a_full_queue_is_busy_and_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)
    with twin_engine(max_rows=1, max_queue=2) as (engine, lm):

        async def flood() -> list[Any]:
            requests = [request_for(lm, "a", [user(f"{i}")], count=20) for i in range(6)]
            return await asyncio.gather(*(answer(engine, r) for r in requests), return_exceptions=True)

        found = within(flood())
        busy = [f for f in found if isinstance(f, Busy)]
        assert 1 <= len(busy) <= 4
        assert all(b.retry_after_s >= 1 for b in busy)
        assert len(found) - len(busy) >= 2
        assert not [f for f in found if isinstance(f, BaseException) and not isinstance(f, Busy)]


def test_a_tenant_that_floods_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)
    with twin_engine(max_rows=1, max_queue=2) as (engine, lm):

        async def flood() -> tuple[list[int], list[Any]]:
            loud = [request_for(lm, "a", [user(f"{i}")], count=20, tenant="loud") for i in range(6)]
            running = [asyncio.create_task(answer(engine, r)) for r in loud]
            # Full now, or full before this could see it: then one has been refused.
            while engine.stats()["queued"] < 2 and not any(task.done() for task in running):
                await asyncio.sleep(0.01)
            mine = await answer(engine, request_for(lm, "a", [user("me")], tenant="quiet"))
            return mine.ids, await asyncio.gather(*running, return_exceptions=True)

        mine, others = within(flood())
        assert mine == cold_ids(lm, [user("me")])
        assert any(isinstance(other, Busy) for other in others)


def test_a_full_queue_refuses_before_it_tokenises(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_lane: Lane, _tenant: str) -> None:
        raise Busy(1.0)

    monkeypatch.setattr(Lane, "see_room_for", full)
    monkeypatch.setattr("kvlingo.serve.engine.prompt_of", lambda *_: pytest.fail("tokenised"))
    with twin_engine() as (engine, lm), pytest.raises(Busy):
        ask(engine, request_for(lm, "a", "hi"))


def test_the_time_to_the_first_token_begins_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(request: Request, lm: Any) -> switching.Prompt:
        time.sleep(0.3)
        return switching.prompt_of(request, lm)

    monkeypatch.setattr("kvlingo.serve.engine.prompt_of", slowly)
    with twin_engine() as (engine, lm):
        assert ask(engine, request_for(lm, "a", "hi"))[0].done.ttft_ms > 300


def test_a_closed_iterator_stops_within_two_steps_and_keeps_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 18."""
    slow_steps(monkeypatch)
    with twin_engine(max_rows=1) as (engine, lm):

        async def leave_early() -> float:
            events = engine.run(request_for(lm, "a", talk(1), count=500))
            for _ in range(4):
                await anext(events)
            await events.aclose()
            steps = engine.stats()["steps"]
            found = await answer(engine, request_for(lm, "a", talk(1), count=3))
            assert found.begun.native_tokens == found.begun.prompt_tokens - 1
            assert found.ids == cold_ids(lm, talk(1), 3)
            return engine.stats()["steps"] - 2 - steps

        assert within(leave_early()) <= 2
        settled(engine)


def test_draining_finishes_what_runs_and_takes_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)
    others = set(threading.enumerate())
    with twin_engine() as (engine, lm):

        async def shut_down() -> None:
            running = asyncio.create_task(answer(engine, request_for(lm, "a", talk(1), count=10)))
            while not engine.stats().get("running"):
                await asyncio.sleep(0.01)
            drained = asyncio.create_task(engine.drain(30))
            await asyncio.sleep(0.01)
            with pytest.raises(Unavailable):
                await answer(engine, request_for(lm, "a", talk(1)))
            assert len((await running).ids) == 10
            await drained

        within(shut_down())
        assert not [t for t in set(threading.enumerate()) - others if t.name.startswith("kvlingo-")]


def test_draining_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)
    with twin_engine() as (engine, lm):

        async def shut_down() -> None:
            running = asyncio.create_task(answer(engine, request_for(lm, "a", talk(1), count=900)))
            while not engine.stats().get("running"):
                await asyncio.sleep(0.01)
            await engine.drain(0.1)
            with pytest.raises(Unavailable):
                await running

        within(shut_down())


# --- what is refused -------------------------------------------------------------------------------------------------


def test_names_lengths_and_fields_that_cannot_be_served() -> None:
    short = tiny.language_model(lambda: tiny.llama(max_position_embeddings=64))
    with closing(LocalEngine({"short": short, "long": LM})) as engine:
        with pytest.raises(UnknownModel, match="nobody"):
            ask(engine, request_for(LM, "nobody", "hi"))
        with pytest.raises(TooLong) as error:
            ask(engine, request_for(short, "short", "x" * 63))
        assert (error.value.tokens, error.value.limit) == (64, 64)
        (clipped,) = ask(engine, request_for(short, "short", "x" * 59, count=50))
        assert (len(clipped.ids), clipped.done.finish_reason) == (4, "length")
        ask(engine, request_for(LM, "long", "x" * 63))  # judged against the model that answers
        with pytest.raises(Unsupported) as refused:
            ask(engine, request_for(LM, "long", [user("hi")], tools=({"name": "f"},)))
        assert refused.value.param == "tools"
        for wrong in (
            request_for(LM, "long", ""),
            request_for(LM, "long", []),
            request_for(LM, "long", "hi", dial=Dial(tail=0)),
            request_for(LM, "long", "hi", sampling=greedy(LM, top_p=0.0)),
        ):
            with pytest.raises(BadInput):
                ask(engine, wrong)
        assert {m.name: m.max_tokens for m in engine.models()} == {"short": 64, "long": 2048}


def test_tools_are_rendered_by_the_models_own_template() -> None:
    lm = tiny.language_model(tiny.FAMILIES["llama"], tokenizer=tiny.byte_tokenizer(chat_template=TEMPLATE_WITH_TOOLS))
    links = [Link("a", "b", identity_translator(lm.geometry, torch.float64))]
    with closing(LocalEngine({"a": lm, "b": lm}, links, Limits(rule=ALWAYS))) as engine:
        plain, tooled = (
            ask(engine, request_for(lm, "a", talk(1), tools=tools))[0] for tools in ((), ({"name": "find"},))
        )
        assert tooled.begun.prompt_tokens == plain.begun.prompt_tokens + len("<find>")
        (switched,) = ask(engine, request_for(lm, "b", talk(1), tools=({"name": "find"},)))
        assert (switched.begun.fallback, switched.ids) == (None, tooled.ids)
        assert switched.begun.translated_tokens > 0


def test_an_error_while_decoding_reaches_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Lane._read, []

    def fails_once(self: Lane, tokens: list[int]) -> Any:
        calls.append(tokens)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return real(self, tokens)

    monkeypatch.setattr(Lane, "_read", fails_once)
    with twin_engine() as (engine, lm):
        with pytest.raises(RuntimeError, match="out of memory"):
            ask(engine, request_for(lm, "a", talk(1)))
        assert ask(engine, request_for(lm, "a", talk(1)))[0].ids == cold_ids(lm, talk(1))


def test_one_requests_own_error_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoding.Speech.next

    def fails(self: decoding.Speech, logits: torch.Tensor) -> Piece:
        if self._sampling.max_new_tokens == 9 and len(self.ids) == 3:
            raise ValueError("nothing to choose from")
        return real(self, logits)

    monkeypatch.setattr(decoding.Speech, "next", fails)
    with twin_engine() as (engine, lm):

        async def both() -> list[Any]:
            requests = [request_for(lm, "a", [user(f"{n}")], count=n) for n in (9, 12, 14)]
            return await asyncio.gather(*(answer(engine, r) for r in requests), return_exceptions=True)

        failed, *others = within(both())
        assert isinstance(failed, ValueError)
        assert [o.ids for o in others] == [cold_ids(lm, [user(f"{n}")], n) for n in (12, 14)]
        assert engine.stats()["failed"] == 1


def test_rows_whose_caches_are_torn_are_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that can't be taken apart leaves rows without their tokens: none of them may go on."""
    real, torn = decoding.append_row, []

    def tears_once(*args: Any) -> None:
        if not torn:
            torn.append(True)
            raise RuntimeError("torn")
        real(*args)

    monkeypatch.setattr(decoding, "append_row", tears_once)
    with twin_engine() as (engine, lm):

        async def several() -> list[Any]:
            requests = [request_for(lm, "a", [user(f"{n}")], count=n) for n in (9, 12, 14)]
            return await asyncio.gather(*(answer(engine, r) for r in requests), return_exceptions=True)

        found = within(several())
        assert any(isinstance(f, RuntimeError) for f in found)
        for n, f in zip((9, 12, 14), found, strict=True):
            assert isinstance(f, RuntimeError) or f.ids == cold_ids(lm, [user(f"{n}")], n)
        assert ask(engine, request_for(lm, "a", talk(1)))[0].ids == cold_ids(lm, talk(1))


THINKING_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)


def test_a_template_that_renders_old_turns_differently_gives_a_shorter_prefix() -> None:
    """Case 3: the generation prompt and the thoughts are gone from the next turn's rendering."""
    lm = tiny.language_model(tiny.FAMILIES["llama"], tokenizer=tiny.byte_tokenizer(chat_template=THINKING_TEMPLATE))
    links = [Link("a", "b", identity_translator(lm.geometry, torch.float64))]
    with closing(LocalEngine({"a": lm, "b": lm}, links, Limits(rule=ALWAYS))) as engine:
        messages = talk(1)
        (first,) = ask(engine, request_for(lm, "a", messages))
        messages = [*messages, assistant(f"<think>{first.text}</think>yes"), user("and?")]
        for model in "ba":
            (found,) = ask(engine, request_for(lm, model, messages))
            assert found.ids == cold_ids(lm, messages)
            assert 0 < max(found.begun.native_tokens, found.begun.translated_tokens) < first.begun.prompt_tokens


def test_ids_that_are_read_again_as_others_are_cut_off_before_they_differ() -> None:
    """Case 4: a model says what no tokenizer would write (half characters, unmerged pieces); sent back, it is other ids."""
    lm = tiny.language_model(tiny.FAMILIES["llama"], tokenizer=tiny.merging_tokenizer(bos=True))
    links = [Link("a", "b", identity_translator(lm.geometry, torch.float64))]
    shorter = 0
    with closing(LocalEngine({"a": lm, "b": lm}, links, Limits(rule=ALWAYS))) as engine:
        for seed in range(12):
            messages = talk(1, seed=seed)
            wild = Sampling(10, temperature=1.5, seed=seed)
            (said,) = ask(engine, request_for(lm, "a", messages, sampling=wild))
            messages = [*messages, assistant(said.text), user("again")]
            for model in "ab":
                (found,) = ask(engine, request_for(lm, model, messages))
                assert found.ids == cold_ids(lm, messages)
                if model == "a":
                    shorter += found.begun.native_tokens < said.begun.prompt_tokens + said.done.completion_tokens - 1
    assert shorter > 6


def test_events_come_in_order_and_text_as_it_is_said() -> None:
    with twin_engine() as (engine, lm):

        async def collect() -> list[Any]:
            return [event async for event in engine.run(request_for(lm, "a", talk(1), count=9))]

        begun, *pieces, done = within(collect())
        assert isinstance(begun, Begun)
        assert len(pieces) == 9
        assert all(isinstance(p, Piece) and len(p.tokens) == 1 for p in pieces)
        assert isinstance(done, Done)
        assert (done.finish_reason, done.completion_tokens) == ("length", 9)
        assert done.ttft_ms > 0


def test_a_model_that_can_only_be_a_source_is_served_by_reading() -> None:
    """Case 11: a recurrent state can't be made from parts, so such a model reads, and goes on from whole snapshots only."""
    from tests.families import language_model as family_model

    lm = family_model("qwen3-next")
    assert lm.target_refusal is not None
    links = [Link("a", "b", identity_translator(lm.geometry, torch.float64))]
    with closing(LocalEngine({"a": lm, "b": lm}, links, Limits(rule=ALWAYS))) as engine:
        messages = talk(1)
        found = ask(engine, *(request_for(lm, "a", talk(1, seed=i)) for i in (0, 50)))
        assert [f.ids for f in found] == [cold_ids(lm, talk(1, seed=i)) for i in (0, 50)]
        (switched,) = ask(engine, request_for(lm, "b", messages))
        assert switched.begun.translated_tokens == 0
        assert "target" in str(switched.begun.fallback) or "recurrent" in str(switched.begun.fallback)
        assert switched.ids == cold_ids(lm, messages)
        (again,) = ask(engine, request_for(lm, "a", [*messages, assistant("other"), user("x")]))
        assert again.ids == cold_ids(lm, [*messages, assistant("other"), user("x")])
