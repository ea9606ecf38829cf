"""Two models that say one answer: whose token it is, what both hold of it, and what is told of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, cast

import openai
import pytest
import torch
from torch import Tensor

from kvlingo.errors import BadInput
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.serve.decoding import Lane
from kvlingo.serve.duet import Duet, Singer, Turn, fragment_ids, same_vocabulary
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.protocol import AUTO, Dial, Help, NoHelp, Piece, Request, Sampling, Unsupported
from kvlingo.serve.relay import Relay
from kvlingo.serve.routing.choosing import Pair
from kvlingo.serve.routing.routed import RoutedEngine
from kvlingo.serve.routing.threshold import Threshold
from kvlingo.serve.routing.token import Token, TokenRule
from kvlingo.serve.sampling import entropy_nats
from kvlingo.serve.settings import Settings
from kvlingo.states import read_conversation
from tests import tiny
from tests.fake_engine import serving
from tests.serving import (
    ALWAYS,
    NO_MODEL_PICKS,
    Answer,
    answer,
    ask,
    assistant,
    closing,
    cold_ids,
    greedy,
    printable_only,
    request_for,
    twin_engine,
    user,
    within,
)

PAIR = Pair("small", "big")
ALL, NONE = 0.0, math.inf
PROMPT = (user(tiny.text(12)),)


@cache
def pair(kind: str) -> tuple[LanguageModel, LanguageModel]:
    """Return a small and a big model that say different things."""
    big = tiny.language_model("gemma3" if kind == "windows" else "llama", seed=5)
    tokenizer = tiny.merging_tokenizer() if kind == "two vocabularies" else None
    return tiny.language_model("llama", tokenizer=tokenizer, seed=3, name="small"), big


KINDS = ("one vocabulary", "windows", "two vocabularies")


@contextmanager
def pair_engine(kind: str = "one vocabulary", **limits: Any) -> Iterator[LocalEngine]:
    small, big = pair(kind)
    with closing(LocalEngine({"small": small, "big": big}, limits=Limits(**limits))) as engine:
        yield engine


def helped(from_nats: float, sampling: Sampling | None = None, **changes: Any) -> Request:
    sampling = sampling or Sampling(12, temperature=0.0, top_logprobs=0)
    return Request(
        **{"model": "small", "prompt": PROMPT, "sampling": sampling, "help": Help("big", from_nats), **changes}
    )


def alone(model: str, request: Request) -> Request:
    return replace(request, model=model, help=None)


def prompt_ids(lm: LanguageModel) -> tuple[int, ...]:
    return read_conversation([dict(m) for m in PROMPT], lm, add_generation_prompt=True).ids


def likely_limit(kind: str) -> float:
    """Return a doubt that some tokens have and others have not."""
    small, _ = pair(kind)
    reading = read_conversation([dict(m) for m in PROMPT], small, add_generation_prompt=True)
    with torch.no_grad():
        logits = prefill(small, small.ids(reading.ids), logits_to_keep=0).logits
    return float(torch.tensor([entropy_nats(row) for row in logits]).quantile(0.4))


# --- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(10, 0.0, top_logprobs=0), Sampling(10, 1.0, seed=7, top_logprobs=0)])
@pytest.mark.parametrize("kind", KINDS)
def test_at_the_ends_of_the_dial_one_model_answers(kind: str, sampling: Sampling) -> None:
    with pair_engine(kind) as engine:
        for from_nats, model in ((ALL, "big"), (NONE, "small")):
            request = helped(from_nats, sampling)
            together, only = ask(engine, request, alone(model, request))
            assert (together.ids, together.text) == (only.ids, only.text)
            assert together.done.completion_tokens == only.done.completion_tokens
            counts = {part.model: part.completion_tokens for part in together.done.parts}
            assert counts == {"small": 0, "big": 0, model: only.done.completion_tokens}
        both = ask(engine, alone("small", helped(NONE)), alone("big", helped(NONE)))
        assert both[0].text != both[1].text


@torch.no_grad()
def cold_duet(small: LanguageModel, big: LanguageModel, from_nats: float, count: int) -> tuple[list[int], list[int]]:
    """Return what two models of one vocabulary say, and who said it: everything read anew for each token."""
    banned = torch.zeros(small.geometry.vocab_size, dtype=small.dtype)
    banned[list(printable_only(small))] = NO_MODEL_PICKS
    banned[len(small.tokenizer) :] = -torch.inf
    prompts = [read_conversation([dict(m) for m in PROMPT], lm, add_generation_prompt=True).ids for lm in (small, big)]
    said, by = list[int](), list[int]()
    for _ in range(count):
        logits = [
            prefill(lm, lm.ids([*ids, *said])).logits[-1] + banned
            for lm, ids in zip((small, big), prompts, strict=True)
        ]
        who = int(entropy_nats(logits[0]) >= from_nats)
        said.append(int(logits[who].argmax()))
        by.append(who)
    return said, by


@pytest.mark.parametrize("kind", ["one vocabulary", "windows"])
def test_each_token_is_that_of_the_model_whose_turn_it_is(kind: str) -> None:
    small, big = pair(kind)
    with pair_engine(kind) as engine:
        for from_nats in (0.5, 1.0, 2.0):
            (found,) = ask(engine, helped(from_nats, greedy(small, 16)))
            said, by = cold_duet(small, big, from_nats, 16)
            assert found.ids == said
            assert [part.completion_tokens for part in found.done.parts] == [by.count(0), by.count(1)]
        stats = engine.stats()
        assert stats["tokens"] == 3 * 16
        assert 0 < stats["helped_tokens"] < 3 * 16


@pytest.mark.parametrize("kind", KINDS)
def test_between_the_ends_counts_add_up_and_streams_say_the_whole(kind: str) -> None:
    with pair_engine(kind) as engine:
        request = helped(likely_limit(kind), Sampling(40, 0.0, top_logprobs=0))
        first, again = (ask(engine, request)[0] for _ in range(2))
        small, big = first.done.parts
        assert small.completion_tokens > 0 < big.completion_tokens
        assert small.completion_tokens + big.completion_tokens == first.done.completion_tokens == len(first.ids)
        assert small.turns - big.turns in (0, 1)
        assert (first.ids, first.text) == (again.ids, again.text), "who was read before makes no difference"
        assert again.begun.native_tokens > 0 == first.begun.native_tokens
        said = b"".join(bytes(token.bytes) for piece in first.pieces for token in piece.tokens)
        assert first.text == said.decode(errors="replace")


def test_answers_side_by_side_are_those_one_by_one() -> None:
    requests = [
        helped(likely_limit("windows"), Sampling(10, 1.0, seed=seed), prompt=(user(tiny.text(6, seed=seed)),))
        for seed in range(5)
    ]
    with pair_engine("windows") as engine:
        together = ask(engine, *requests, alone("small", requests[0]), alone("big", requests[1]))
    with pair_engine("windows") as engine:
        single = [
            ask(engine, request)[0] for request in (*requests, alone("small", requests[0]), alone("big", requests[1]))
        ]
    for found, wanted in zip(together, single, strict=True):
        assert found.text == wanted.text
        counts = [[part.completion_tokens for part in each.done.parts] for each in (found, wanted)]
        assert counts[0] == counts[1]


def test_stop_strings_and_lengths_go_over_turns() -> None:
    small, _ = pair("one vocabulary")
    with pair_engine() as engine:
        request = helped(1.0, greedy(small, 24))
        (whole,) = ask(engine, request)
        assert all(part.turns > 1 for part in whole.done.parts)
        for start in (3, 8, 13):
            stop = whole.text[start : start + 4]
            (found,) = ask(engine, replace(request, sampling=replace(request.sampling, stop=(stop,))))
            assert found.text == whole.text[: whole.text.index(stop)]
            assert found.done.finish_reason == "stop"
        assert whole.done.finish_reason == "length"


# --- what both hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "translate"])
def test_a_translated_prompt_serves_the_helper(mode: Any) -> None:
    with twin_engine(rule=ALWAYS) as (engine, lm):
        request = request_for(lm, "a", PROMPT, dial=Dial(mode), help=Help("b", 2.3), count=40)
        (found,) = ask(engine, request)
        assert found.ids == cold_ids(lm, PROMPT, 40)
        helper = found.done.parts[1]
        assert helper.completion_tokens > 0
        assert helper.translated_tokens > found.begun.prompt_tokens, "what the other said since is translated too"
        assert helper.fallback is None


def test_a_translator_that_fails_is_told_and_the_answer_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    with twin_engine(rule=ALWAYS) as (engine, lm):
        monkeypatch.setattr("kvlingo.serve.switching.hand_off_in_parts", lambda *_, **__: 1 / 0)
        request = request_for(lm, "a", PROMPT, help=Help("b", ALL))
        (found,) = ask(engine, request)
        assert found.ids == cold_ids(lm, PROMPT)
        assert "ZeroDivisionError" in str(found.done.parts[1].fallback)


def test_both_models_go_on_from_what_they_held() -> None:
    small, _ = pair("one vocabulary")
    with pair_engine() as engine:
        (first,) = ask(engine, helped(1.0, greedy(small, 12)))
        talk = (*PROMPT, assistant(first.text), user("and now"))
        for number, name in enumerate(("small", "big")):
            request = helped(1.0, greedy(small, 6), prompt=talk, model=name, help=None)
            (after,) = ask(engine, request)
            assert after.begun.native_tokens >= first.begun.prompt_tokens + first.done.completion_tokens - 1
            assert after.ids == cold_ids(pair("one vocabulary")[number], talk)


def test_who_leaves_stops_both_and_what_was_read_is_kept() -> None:
    small, _ = pair("one vocabulary")

    async def leave(engine: LocalEngine, after: int) -> str:
        events, text = cast("Any", engine.run(helped(1.0, greedy(small, 500)))), ""
        async with aclosing(events):
            async for event in events:
                text += event.text if isinstance(event, Piece) else ""
                if len(text) == after:
                    return text
        raise AssertionError("it ended")

    async def left_and_idle(engine: LocalEngine, after: int) -> str:
        text = await leave(engine, after)
        while engine.stats()["running"] or engine.stats()["queued"]:
            await asyncio.sleep(0.01)
        return text

    with pair_engine() as engine:
        for after in (1, 4, 9):
            text = within(left_and_idle(engine, after))
            talk = (*PROMPT, assistant(text), user("?"))
            for name in ("small", "big"):
                (next_turn,) = ask(engine, helped(NONE, greedy(small, 1), prompt=talk, model=name, help=None))
                held = next_turn.begun.native_tokens - len(prompt_ids(small))
                assert held >= (after - 1 if name == "small" else after // 9), "but for what the other said last"
        assert engine.stats()["tokens"] < 200
        (found,) = ask(engine, helped(1.0, greedy(small, 12)))
        assert found.begun.native_tokens == found.begun.prompt_tokens - 1
        assert found.ids == cold_duet(*pair("one vocabulary"), 1.0, 12)[0]


# --- between two vocabularies ----------------------------------------------------------------------------------------


def duet_of(kind: str, said: Sequence[tuple[str, str]], from_nats: float = 1.0) -> tuple[Duet, str]:
    """Let two models say given tokens: for each, whose turn it must be and the token's text (bytes by `bytes_of`)."""
    small, big = pair(kind)
    duet = Duet(Singer("small", small, 0), Singer("big", big, 0), Sampling(100, 0.0), from_nats)
    turn, text = Turn(duet), ""
    for who, piece in said:
        if who != turn.singer.name:
            text += turn.next(unsure(turn.singer.lm)).text
            turn = Turn(duet)
        assert turn.singer.name == who
        token = turn.singer.lm.tokenizer.convert_tokens_to_ids(piece)
        text += turn.next(sure(turn.singer.lm, token)).text
        if turn.finish_reason == "turn":
            turn = Turn(duet)
    return duet, text


def sure(lm: LanguageModel, token: int) -> Tensor:
    return torch.full((lm.geometry.vocab_size,), -100.0).index_fill(0, torch.tensor([token]), 100.0)


def unsure(lm: LanguageModel) -> Tensor:
    return torch.zeros(lm.geometry.vocab_size)


def spelled(singer: Singer) -> str:
    return str(singer.lm.tokenizer.decode(singer.ids))


@pytest.mark.parametrize("kind", ["one vocabulary", "two vocabularies"])
def test_no_turn_ends_inside_a_character(kind: str) -> None:
    """The bytes of é and 漢 are Ã © and æ ¼ ¢ in the tokenizer's letters; the small model is unsure in the middle of one."""
    small, big = pair(kind)
    duet = Duet(Singer("small", small, 0), Singer("big", big, 0), Sampling(100, 0.0), from_nats=1.0)
    turn = Turn(duet)
    assert turn.next(sure(small, small.tokenizer.convert_tokens_to_ids("Ã"))).text == ""
    half = unsure(small).index_fill(0, torch.tensor([small.tokenizer.convert_tokens_to_ids("©")]), 1e-3)
    assert turn.next(half).text == "é", "it ends its character, however unsure it is"
    assert turn.finish_reason is None
    turn.next(unsure(small))
    assert (turn.finish_reason, duet.turn.name, spelled(duet.big)) == ("turn", "big", "é")
    turn = Turn(duet)
    for letter, text in (("æ", ""), ("¼", ""), ("¢", "漢")):
        assert turn.finish_reason is None
        assert turn.next(sure(big, big.tokenizer.convert_tokens_to_ids(letter))).text == text
    assert (turn.finish_reason, duet.turn.name, spelled(duet.small)) == ("turn", "small", "é漢")


def test_both_hold_the_same_text_in_their_own_tokens() -> None:
    said = [
        ("small", "the"),
        ("small", "Ġthe"),
        ("big", "Ġ"),
        ("small", "ing"),
        ("big", "t"),
        ("big", "h"),
        ("small", "e"),
    ]
    duet, text = duet_of("two vocabularies", said)
    assert text == "the the ingthe"
    assert spelled(duet.small) == text
    assert spelled(duet.big) == "the the ingth", "what the small one says is read when the big one's turn comes"
    assert len(duet.small.ids) < len(duet.big.ids)


def test_special_tokens_are_no_text_and_no_turn() -> None:
    _, big = pair("two vocabularies")
    small = pair("two vocabularies")[0]
    duet = Duet(Singer("small", small, 0), Singer("big", big, 0), Sampling(100, 0.0), from_nats=ALL)
    Turn(duet).next(unsure(small))
    duet.small.state = cast("Any", object())  # it has read: with nothing new it has nothing to choose from
    duet.small.unread = lambda: list(duet.small.ids)  # type: ignore[method-assign]
    turn = Turn(duet)
    assert turn.next(sure(big, big.tokenizer.bos_token_id)).text == ""
    assert turn.finish_reason is None
    turn.next(sure(big, big.tokenizer.convert_tokens_to_ids("a")))
    assert (turn.finish_reason, spelled(duet.small)) == ("turn", "a")
    assert duet.big.ids[0] == big.tokenizer.bos_token_id


def test_an_end_ends_whoever_says_it() -> None:
    for who, from_nats in (("small", NONE), ("big", ALL)):
        small, big = pair("two vocabularies")
        duet = Duet(Singer("small", small, 0), Singer("big", big, 0), Sampling(100, 0.0), from_nats)
        if who == "big":
            Turn(duet).next(unsure(small))
        turn = Turn(duet)
        turn.next(sure(turn.singer.lm, turn.singer.lm.tokenizer.eos_token_id))
        assert (turn.singer.name, turn.finish_reason, duet.completion_tokens) == (who, "stop", 1)


def test_vocabularies_are_told_apart() -> None:
    assert same_vocabulary(tiny.byte_tokenizer(), tiny.byte_tokenizer(bos=False))
    assert not same_vocabulary(tiny.byte_tokenizer(), tiny.merging_tokenizer())


def test_a_fragment_is_read_without_a_space_before_it() -> None:
    tokenizer = tiny.byte_tokenizer()
    assert tokenizer.decode(fragment_ids(tokenizer, "ing")) == "ing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlingo.serve.duet.spelling_of", lambda _: type("S", (), {"dummy_space": True}))
        patch.setattr("kvlingo.serve.duet.encode", lambda _, text: tuple(" " + text))
        assert "".join(map(str, fragment_ids(tokenizer, "ing"))) == "ing"
        patch.setattr("kvlingo.serve.duet.encode", lambda _, text: (len(text),))
        with pytest.raises(BadInput, match="puts a space"):
            fragment_ids(tokenizer, "ing")


def test_doubt_is_the_entropy() -> None:
    assert entropy_nats(torch.zeros(8)) == pytest.approx(math.log(8))
    assert entropy_nats(torch.tensor([0.0, -math.inf, 0.0])) == pytest.approx(math.log(2))
    assert entropy_nats(torch.tensor([1e4, 0.0, 0.0])) == 0.0


# --- as a router -----------------------------------------------------------------------------------------------------


def events_of(engine: RoutedEngine, request: Request) -> Answer:
    return within(answer(cast("Any", engine), request))


def test_auto_is_neither_models_name() -> None:
    with pair_engine() as engine:
        routed = RoutedEngine(engine, Token(PAIR, TokenRule(1.0)))
        found = events_of(routed, helped(0.0, model=AUTO, help=None))
        assert found.begun.model == AUTO
        assert found.begun.route is not None
        assert "1 nats or more from big" in found.begun.route.reason
        assert found.ids == ask(engine, helped(1.0))[0].ids


def test_without_the_helper_the_small_model_answers_alone() -> None:
    small, _ = pair("one vocabulary")
    short = tiny.language_model(lambda: tiny.llama(max_position_embeddings=40), seed=5, name="short")
    with closing(LocalEngine({"small": small, "big": short})) as engine:
        with pytest.raises(NoHelp, match="big: the prompt has"):
            ask(engine, helped(ALL))
        found = events_of(RoutedEngine(engine, Token(PAIR)), helped(ALL, model=AUTO, help=None))
        assert found.begun.model == "small"
        assert "but big reads 40 tokens" in str(found.begun.route)
        assert found.done.parts == ()
    with closing(LocalEngine({"small": short, "big": small})) as engine:
        found = events_of(RoutedEngine(engine, Token(PAIR)), helped(ALL, model=AUTO, help=None))
        assert found.begun.model == "big"


def test_an_answer_ends_where_one_model_has_no_more_room() -> None:
    small, _ = pair("one vocabulary")
    prompt = len(prompt_ids(small))
    short = tiny.language_model(lambda: tiny.llama(max_position_embeddings=prompt + 5), seed=5, name="short")
    with closing(LocalEngine({"small": small, "big": short})) as engine:
        (found,) = ask(engine, helped(1.0, greedy(small, 50)))
        assert (found.done.finish_reason, found.done.completion_tokens) == ("length", 5)
    few = tiny.language_model(lambda: tiny.llama(max_position_embeddings=64), seed=5, name="few")
    words, _ = pair("two vocabularies")
    duet = Duet(Singer("small", words, 0), Singer("big", few, 60), Sampling(100, 0.0), from_nats=1.0)
    turn = Turn(duet)
    turn.next(sure(words, words.tokenizer.convert_tokens_to_ids("Ġthe")))
    assert turn.finish_reason is None
    turn.next(unsure(words))
    assert (turn.finish_reason, len(duet.big.ids)) == ("length", 4), "one token of the one is four of the other"


def test_over_http_the_alias_answers_and_parts_are_told() -> None:
    with (
        pair_engine("two vocabularies") as engine,
        serving(RoutedEngine(engine, Token(PAIR, TokenRule(likely_limit("two vocabularies")))), Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=60) as client,
    ):
        fields: Any = {"model": AUTO, "messages": list(PROMPT), "max_tokens": 30, "temperature": 1, "seed": 3}
        whole = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True))
    assert whole.model == AUTO
    assert {chunk.model for chunk in chunks} == {AUTO}
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    ours, streamed = cast("Any", whole).kvlingo, cast("Any", chunks[-1]).kvlingo
    assert ours["model"] == AUTO
    assert [part["model"] for part in ours["parts"]] == ["small", "big"]
    assert sum(part["completion_tokens"] for part in ours["parts"]) == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert all(part["completion_tokens"] for part in ours["parts"])
    count = [[part["completion_tokens"] for part in said["parts"]] for said in (ours, streamed)]
    assert count[0] == count[1]


PENALTIES = (
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.2},
    {"presence_penalty": -0.5, "frequency_penalty": 0.8},
)


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_are_for_the_whole_answer_whoever_says_it(penalties: dict[str, float]) -> None:
    """One model under two names: with its own help at some tokens it says what it says alone, punished or not."""
    with twin_engine() as (engine, lm):
        limit = float(torch.tensor([2.0]))
        plain = request_for(lm, "a", PROMPT, count=24)
        punished = replace(plain, sampling=replace(plain.sampling, **penalties))
        alone_, helped_ = ask(engine, punished, replace(punished, help=Help("b", limit)))
        assert helped_.ids == alone_.ids
        assert all(part.completion_tokens for part in helped_.done.parts)
        assert alone_.ids != ask(engine, plain)[0].ids


def test_a_penalty_that_each_model_counts_for_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Singer, "reads", lambda self, ids: self.ids.extend(ids))
    with twin_engine() as (engine, lm):
        plain = request_for(lm, "a", PROMPT, count=24)
        punished = replace(plain, sampling=replace(plain.sampling, presence_penalty=1.5))
        alone_, helped_ = ask(engine, punished, replace(punished, help=Help("b", 2.0)))
        assert helped_.ids != alone_.ids


def test_between_two_vocabularies_each_counts_the_answer_in_its_own_tokens() -> None:
    sampling = Sampling(30, temperature=0.0, top_logprobs=0, frequency_penalty=0.7)
    with pair_engine("two vocabularies") as engine:
        relays = list[Relay]()
        real = engine._relay

        def noted(*args: Any) -> Relay:
            relays.append(real(*args))
            return relays[-1]

        engine._relay = noted  # type: ignore[method-assign]
        ask(engine, helped(likely_limit("two vocabularies"), sampling))
    for singer in (relays[0].duet.small, relays[0].duet.big):
        assert singer.part.completion_tokens
        assert singer.picker.said == Counter(singer.ids)
        assert len(singer.ids) > singer.part.completion_tokens


def test_a_bias_is_for_ids_that_both_models_share() -> None:
    """Else the same number would be one word to one model and another word to the other."""
    biased = replace(helped(0.0, model=AUTO, help=None), sampling=Sampling(5, logit_bias={40: 3.0}))
    with pair_engine("one vocabulary") as engine:
        assert events_of(RoutedEngine(engine, Token(PAIR, TokenRule(1.0))), biased).done.completion_tokens == 5
    with pair_engine("two vocabularies") as engine:
        for router in (Token(PAIR, TokenRule(1.0)), Threshold(PAIR)):
            with pytest.raises(Unsupported, match="logit_bias: its token ids mean something else") as refused:
                events_of(RoutedEngine(engine, router), biased)
            assert refused.value.param == "logit_bias"
        with pytest.raises(NoHelp, match="logit_bias"):
            ask(engine, helped(1.0, biased.sampling))
        assert events_of(RoutedEngine(engine, Token(PAIR)), replace(biased, model="small")).done.completion_tokens == 5


def test_waiting_is_told_for_all_turns_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn waits for the lane that it goes to."""
    real = Lane.submit

    def late(self: Lane, job: Any, *, goes_on: bool = False) -> None:
        time.sleep(0.01)
        real(self, job, goes_on=goes_on)

    monkeypatch.setattr(Lane, "submit", late)
    with pair_engine() as engine:
        (found,) = ask(engine, helped(likely_limit("one vocabulary")))
    turns = sum(part.turns for part in found.done.parts)
    assert turns >= 4
    assert found.done.queue_ms >= 10 * turns
