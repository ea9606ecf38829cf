"""The model `auto`: who decides, who answers, what the asker is told, and how a router is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from kvlingo import cli
from kvlingo.commands.options import Routing
from kvlingo.cost import MapRates, Rates, ReadingRates
from kvlingo.errors import BadArtifact, BadInput
from kvlingo.serve.loading import with_rules
from kvlingo.serve.protocol import (
    AUTO,
    Begun,
    Busy,
    Done,
    Engine,
    Event,
    ModelInfo,
    Piece,
    Request,
    Sampling,
    TooLong,
    Unsupported,
)
from kvlingo.serve.routing.building import build_router
from kvlingo.serve.routing.cascade import Cascade, CascadeRule
from kvlingo.serve.routing.choosing import Choice, Heard, Pair, Prompt
from kvlingo.serve.routing.routed import RoutedEngine
from kvlingo.serve.routing.rules import NEVER, Calibrated, Measured, Rules, read_rules, written
from kvlingo.serve.routing.threshold import Threshold, ThresholdRule
from kvlingo.serve.settings import ROUTERS, Settings
from kvlingo.serve.switching import Rule
from tests import tiny
from tests.fake_engine import FakeEngine, serving
from tests.serving import answer, assistant, cold_ids, request_for, twin_engine, user, within

PAIR = Pair("small", "org/big")
FAKE_LOGPROB = -0.5
KEEPS, ESCALATES = CascadeRule(FAKE_LOGPROB - 0.1), CascadeRule(FAKE_LOGPROB + 0.1)
HELLO = (user("hello"),)


def asked(model: str = AUTO, top_logprobs: int | None = None) -> Request:
    return Request(model, HELLO, Sampling(5, temperature=0.0, top_logprobs=top_logprobs))


async def events_of(engine: Engine, request: Request) -> list[Event]:
    return [event async for event in engine.run(request)]


def heard_by(engine: Engine, request: Request) -> list[Event]:
    return within(events_of(engine, request))


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def begun_of(events: list[Event]) -> Begun:
    (begun,) = [event for event in events if isinstance(event, Begun)]
    return begun


@dataclass
class Refusing(FakeEngine):
    """Refuses what is asked of some models, and may have other rooms."""

    refusals: dict[str, Exception] = field(default_factory=dict)
    rooms: dict[str, int | None] = field(default_factory=dict)

    def models(self) -> list[ModelInfo]:
        return [replace(info, max_tokens=self.rooms.get(info.name, info.max_tokens)) for info in super().models()]

    async def events(self, request: Request) -> AsyncIterator[Event]:
        if request.model in self.refusals:
            raise self.refusals[request.model]
        async for event in super().events(request):
            yield event


# --- deciding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "model", "reason"),
    [
        ("short", "small", "no limit"),
        ("x" * 9, "small", "no limit"),
        ("x" * 10, "org/big", "question 10 ≥ 10 characters"),
        ((user("ab"), assistant("y" * 18), user("cd")), "org/big", "conversation 22 ≥ 20 characters"),
        ((user("a"), assistant("b"), user("c"), assistant("d"), user("e")), "org/big", "turn 3 ≥ 3"),
        (({"role": "system", "content": "y" * 15}, user("c")), "small", "no limit"),
        ((assistant("only"),), "small", "no limit"),
    ],
)
def test_length_and_turn_decide(prompt: Prompt, model: str, reason: str) -> None:
    choice = Threshold(PAIR, ThresholdRule(question_chars=10, total_chars=20, turn=3)).choose(prompt)
    assert choice.model == model
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("mean", "model"),
    [(-0.9, "small"), (-1.0, "small"), (-1.001, "org/big"), (None, "org/big"), (float("nan"), "org/big")],
)
def test_doubt_decides(mean: float | None, model: str) -> None:
    assert Cascade(PAIR, CascadeRule(-1.0)).judge(Heard(3, mean)).model == model


def judged(rule: CascadeRule, text: str | None, *, cut: bool | None = False) -> Choice:
    return Cascade(PAIR, rule).judge(Heard(30, -0.1, text, cut))


LOOP = "I am not sure what you mean. " * 8
PROSE = "".join(f"The {i} th house of {i * i} stands by itself, and {i + 3} others behind it. " for i in range(20))


@pytest.mark.parametrize(
    ("text", "goes"),
    [
        (LOOP, True),
        ("the " * 60, True),
        ("\u8fd9\u662f\u4e00\u53e5\u8bdd\u3002" * 30, True),
        (LOOP[:90], False),
        (PROSE, False),
        (json.dumps([{"name": f"user {i}", "value": 7 * i, "active": True} for i in range(40)]), False),
        (", ".join(map(str, range(300))), False),
        ("", False),
        (None, False),
    ],
    ids=["loop", "word", "no spaces", "short", "prose", "json", "numbers", "empty", "not known"],
)
def test_an_answer_that_goes_in_circles_is_given_away(text: str | None, goes: bool) -> None:
    choice = judged(CascadeRule(), text)
    assert choice.model == ("org/big" if goes else "small")
    assert ("repeats itself" in choice.reason) == goes
    assert judged(CascadeRule(escalate_repeating=1.0), text).model == "small"


@pytest.mark.parametrize(
    ("rule", "text", "cut", "reason"),
    [
        (CascadeRule(escalate_shorter_than=4), "  no \n", False, "has 2 characters, fewer than 4"),
        (CascadeRule(escalate_shorter_than=2), "  no \n", False, None),
        (CascadeRule(escalate_matching=("xyz", "(?i)i (don't|can't) ")), "I DON'T know", False, "expression 2"),
        (CascadeRule(escalate_matching=("^know",)), "I don't know", False, None),
        (CascadeRule(escalate_cut=True), "half an answ", True, "was cut"),
        (CascadeRule(escalate_cut=True), "a whole one", False, None),
        (CascadeRule(escalate_cut=True), "who knows", None, None),
        (CascadeRule(), "half an answ", True, None),
    ],
)
def test_an_answer_is_scored_by_what_it_says(
    rule: CascadeRule, text: str, cut: bool | None, reason: str | None
) -> None:
    choice = judged(rule, text, cut=cut)
    assert choice.model == ("org/big" if reason else "small")
    assert (reason or "mean log-probability") in choice.reason
    assert "know" not in choice.reason, "a reason holds no word of an answer"


# --- answering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "model"), [(1_000, "small"), (1, "org/big")])
def test_who_is_chosen_answers_as_if_it_had_been_named(limit: int, model: str) -> None:
    found = heard_by(RoutedEngine(FakeEngine(), Threshold(PAIR, ThresholdRule(question_chars=limit))), asked())
    named = heard_by(FakeEngine(), asked(model))
    begun, route = begun_of(found), begun_of(found).route
    assert route is not None
    assert (route.asked, route.router, route.discarded_tokens) == (AUTO, "threshold", 0)
    assert replace(begun, route=None) == begun_of(named)
    assert found[1:-1] == named[1:-1]
    assert said(heard_by(FakeEngine(), asked("small"))) != said(heard_by(FakeEngine(), asked("org/big")))


def test_a_request_that_names_a_model_is_not_routed() -> None:
    engine = FakeEngine()
    routed = RoutedEngine(engine, Cascade(PAIR, ESCALATES))
    assert heard_by(routed, asked("small")) == heard_by(FakeEngine(), asked("small"))
    assert [request.model for request in engine.asked] == ["small"]
    assert routed.stats()["routed"] == 0


@pytest.mark.parametrize("top", [None, 0, 2])
def test_an_answer_that_is_sure_enough_is_sent_as_it_is(top: int | None) -> None:
    engine = FakeEngine(token_s=0.01)
    found = heard_by(RoutedEngine(engine, Cascade(PAIR, KEEPS)), asked(top_logprobs=top))
    named = heard_by(FakeEngine(), asked("small", top))
    assert found[1:-1] == named[1:-1], "log-probabilities are told as asked for, not as the router needed them"
    assert begun_of(found).model == "small"
    assert "-0.500 ≥ -0.6" in str(begun_of(found).route)
    assert isinstance(found[-1], Done)
    assert found[-1].ttft_ms >= 5 * 10, "the first token came when the whole answer was there"


def test_an_answer_in_doubt_is_never_seen() -> None:
    engine = FakeEngine(token_s=0.01)
    routed = RoutedEngine(engine, Cascade(PAIR, ESCALATES))
    found = heard_by(routed, asked())
    assert said(found) == said(heard_by(FakeEngine(), asked("org/big")))
    begun = begun_of(found)
    assert begun.model == "org/big"
    assert begun.route is not None
    assert begun.route.discarded_tokens == 5
    assert "-0.500 < -0.4" in begun.route.reason
    assert [request.model for request in engine.asked] == ["small", "org/big"]
    assert engine.asked[1].sampling.top_logprobs is None
    assert isinstance(found[-1], Done)
    assert found[-1].ttft_ms >= 12.5 + 5 * 10, "the time of the first answer counts"
    stats = routed.stats()
    assert (stats["routed"], stats["routed_to_the_other"], stats["routed_tokens_discarded"]) == (1, 1, 5)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (replace(KEEPS, escalate_cut=True), "was cut"),
        (replace(KEEPS, escalate_shorter_than=10_000), "fewer than 10000"),
        (replace(KEEPS, escalate_matching=("[a-z]", "x")), "expression 1"),
    ],
)
def test_what_a_router_reads_is_the_whole_first_answer(rule: CascadeRule, reason: str) -> None:
    engine = FakeEngine()
    found = heard_by(RoutedEngine(engine, Cascade(PAIR, rule)), asked())
    assert said(found) == said(heard_by(FakeEngine(), asked("org/big")))
    route = begun_of(found).route
    assert route is not None
    assert reason in route.reason
    length = len(said(heard_by(FakeEngine(), asked("small"))).strip())
    sure = replace(KEEPS, escalate_shorter_than=length)
    assert begun_of(heard_by(RoutedEngine(FakeEngine(), Cascade(PAIR, sure)), asked())).model == "small"


@pytest.mark.parametrize("error", [TooLong(600, 512), Unsupported("tools")], ids=["too long", "unsupported"])
@pytest.mark.parametrize("router", [Threshold(PAIR), Cascade(PAIR, KEEPS)], ids=["threshold", "cascade"])
def test_what_one_model_can_not_serve_goes_to_the_other(router: Any, error: Exception) -> None:
    begun = begun_of(heard_by(RoutedEngine(Refusing(refusals={"small": error}), router), asked()))
    assert begun.model == "org/big"
    assert begun.route is not None
    assert "small reads 512 tokens" in begun.route.reason or "small can't serve tools" in begun.route.reason


@pytest.mark.parametrize("router", [Threshold(PAIR), Cascade(PAIR, KEEPS)], ids=["threshold", "cascade"])
def test_a_prompt_that_is_too_long_for_both_is_refused(router: Any) -> None:
    engine = Refusing(refusals={"small": TooLong(600, 512)}, rooms={"org/big": 512})
    with pytest.raises(TooLong):
        heard_by(RoutedEngine(engine, router), asked())
    assert [request.model for request in engine.asked] == ["small"]


@pytest.mark.parametrize("error", [Busy(1.0), TooLong(600, 512)], ids=["busy", "too long"])
def test_where_nobody_takes_over_the_first_answer_is_better_than_none(error: Exception) -> None:
    engine = Refusing(refusals={"org/big": error})
    found = heard_by(RoutedEngine(engine, Cascade(PAIR, ESCALATES)), asked())
    assert said(found) == said(heard_by(FakeEngine(), asked("small")))
    route = begun_of(found).route
    assert route is not None
    assert route.discarded_tokens == 0
    assert "-0.500 < -0.4, but" in route.reason


@pytest.mark.parametrize("router", [Threshold(PAIR), Cascade(PAIR, KEEPS)], ids=["threshold", "cascade"])
def test_other_errors_stay_errors(router: Any) -> None:
    with pytest.raises(Busy):
        heard_by(RoutedEngine(Refusing(refusals={"small": Busy(1.0)}), router), asked())


def test_half_an_answer_is_not_judged() -> None:
    with pytest.raises(RuntimeError, match="without an end"):
        heard_by(RoutedEngine(FakeEngine(silent=True), Cascade(PAIR, KEEPS)), asked())


@pytest.mark.parametrize("router", [Threshold(PAIR), Cascade(PAIR, KEEPS)], ids=["threshold", "cascade"])
def test_leaving_stops_the_model(router: Any) -> None:
    engine = FakeEngine(prefill_s=0.05, token_s=30.0)

    async def leave() -> None:
        events = cast("Any", RoutedEngine(engine, router).run(asked()))
        async with aclosing(events):
            waiting = asyncio.ensure_future(reading(events))
            await asyncio.sleep(0.3)
            waiting.cancel()
            await asyncio.wait([waiting])

    async def reading(events: AsyncIterator[Event]) -> None:
        async for _ in events:
            pass

    within(leave(), 20)
    assert (engine.cancelled, engine.running) == (1, 0)


def test_names_that_do_not_fit() -> None:
    with pytest.raises(BadInput, match="'tiny', which is not served; there are: small, org/big"):
        RoutedEngine(FakeEngine(), Threshold(Pair("tiny", "org/big")))

    class Auto(FakeEngine):
        def models(self) -> list[ModelInfo]:
            return [*super().models(), ModelInfo(AUTO, 1, 1, True)]

    with pytest.raises(BadInput, match="another name"):
        RoutedEngine(Auto(), Threshold(PAIR))


@pytest.mark.parametrize(("limit", "model"), [(0.0, "b"), (-1e5, "a")], ids=["never sure enough", "always sure enough"])
def test_the_big_model_takes_over_by_a_switch(limit: float, model: str) -> None:
    """The same model under two names with the identity between them: who takes over says what a cold one says."""
    text = tiny.text(40)
    with twin_engine() as (engine, lm):
        routed = RoutedEngine(engine, Cascade(Pair("a", "b"), CascadeRule(limit)))
        found = within(answer(cast("Any", routed), request_for(lm, AUTO, text)))
        assert found.begun.model == model
        assert found.ids == cold_ids(lm, text)
        assert found.begun.source == ("a" if model == "b" else None)
        assert (found.begun.translated_tokens > 100) == (model == "b")


@pytest.mark.parametrize(
    ("rule", "model"),
    [
        (CascadeRule(-1e5, escalate_cut=True), "b"),
        (CascadeRule(-1e5, escalate_shorter_than=7), "b"),
        (CascadeRule(-1e5, escalate_shorter_than=6), "a"),
        (CascadeRule(-1e5, escalate_matching=("^[a-z]{6}$",)), "b"),
        (CascadeRule(-1e5, escalate_matching=("[^a-z]",)), "a"),
    ],
)
def test_an_answer_of_a_model_is_scored_by_its_text(rule: CascadeRule, model: str) -> None:
    """Six letters, cut by the limit of tokens: what a rule reads is what the tiny model said."""
    text = tiny.text(40)
    with twin_engine() as (engine, lm):
        routed = RoutedEngine(engine, Cascade(Pair("a", "b"), rule))
        found = within(answer(cast("Any", routed), request_for(lm, AUTO, text)))
    assert found.begun.model == model
    assert found.ids == cold_ids(lm, text)


# --- over HTTP -------------------------------------------------------------------------------------------------------


@dataclass
class InTurn:
    """Chooses one after the other: for what a real router never does."""

    pair: Pair = PAIR
    name: str = "in turn"
    listens: bool = False
    calls: int = 0

    def choose(self, prompt: Prompt) -> Choice:
        self.calls += 1
        return Choice(self.pair.small if self.calls % 2 else self.pair.big, f"call {self.calls}")

    def judge(self, heard: Heard) -> Choice:
        raise NotImplementedError


@pytest.fixture(scope="module")
def cascade() -> Iterator[openai.OpenAI]:
    with (
        serving(RoutedEngine(FakeEngine(), Cascade(PAIR, ESCALATES)), Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=20) as client,
    ):
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    return client.chat.completions.create(**{"model": AUTO, "messages": messages, "max_tokens": 5, **fields})


def test_auto_is_listed_and_answers_say_who_and_why(cascade: openai.OpenAI) -> None:
    assert [model.id for model in cascade.models.list()] == ["small", "org/big", AUTO]
    found = ask(cascade)
    (route,) = found.kvlingo["routes"]
    assert found.model == found.kvlingo["model"] == route["model"] == "org/big"
    assert (route["router"], route["asked"], route["discarded_tokens"]) == ("cascade", AUTO, 5)
    with ask(cascade, stream=True) as stream:
        chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {"org/big"}
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == found.choices[0].message.content == ask(cascade, model="org/big").choices[0].message.content
    assert chunks[-1].kvlingo["routes"] == found.kvlingo["routes"]
    assert "routes" not in ask(cascade, model="small").kvlingo


def test_choices_of_several_models_are_not_passed_off_as_one_s() -> None:
    with (
        serving(RoutedEngine(FakeEngine(), InTurn()), Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=20) as client,
    ):
        found = ask(client, n=2)
        assert found.model == AUTO
        assert [route["model"] for route in found.kvlingo["routes"]] == ["small", "org/big"]


def test_without_a_router_auto_is_refused_and_says_what_there_is() -> None:
    with (
        serving(FakeEngine(), Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=20) as client,
    ):
        assert AUTO not in [model.id for model in client.models.list()]
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client)
        assert caught.value.code == "no_router"
        assert caught.value.param == "model"
        assert "name one of: small, org/big" in str(caught.value)
        with pytest.raises(openai.NotFoundError):
            ask(client, model="automatic")


# --- settings and rules ----------------------------------------------------------------------------------------------

MODELS = {"small": "x", "big": "y"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"router": "magic"}, "explicit, threshold, cascade, learned"),
        ({"router": "learned"}, "give both"),
        ({"router": "threshold", "learned": Path("x")}, "give both"),
        ({"small": "small"}, "leave it out"),
        ({"router": "cascade", "big": "huge"}, "'huge' is not served"),
        ({"router": "cascade", "small": "big"}, "both 'big'"),
        ({"router": "cascade", "models": {}}, "'small' is not served"),
    ],
)
def test_settings_that_do_not_go_together(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Settings(**{"models": MODELS, **values})


def test_every_router_can_be_had(tmp_path: Path) -> None:
    found = {}
    for name in set(ROUTERS) - {"learned"}:
        found[name] = build_router(Settings(models=MODELS, router=name), Rules())
    assert found["explicit"] is None
    assert found["threshold"] == Threshold(Pair("small", "big"))
    assert found["cascade"] == Cascade(Pair("small", "big"))
    with pytest.raises(BadArtifact, match="kvlingo route fit"):
        build_router(Settings(models=MODELS, router="learned", learned=tmp_path), Rules())


def test_the_command_line_knows_every_router() -> None:
    assert [each.value for each in Routing] == list(ROUTERS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--router", "learned"], "give both"),
        (["--router", "magic"], "'magic' is not one of"),
        (["--small", "a"], "leave it out"),
        (["--router", "cascade", "--rules", "nowhere.toml"], "can't read the rules"),
        (["--router", "learned", "--learned", "nowhere"], "holds no router"),
    ],
)
def test_a_bad_router_is_one_line_before_any_model_is_loaded(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--port", "0", "--model", "small=x", "--model", "big=y", *options])
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert words in err
    assert err.count("\n") == 1
    assert "loading" not in err


def test_rules_reach_the_router(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(
        "[cascade]\nescalate_below = -2\nescalate_repeating = 1\nescalate_shorter_than = 3\nescalate_cut = true\n"
        "escalate_matching = ['(?i)i can.t', '^$']\n"
    )
    settings = Settings(models={"x": "x", "y": "y"}, small="x", big="y", router="cascade", rules=file)
    assert build_router(settings, read_rules(file)) == Cascade(
        Pair("x", "y"), CascadeRule(-2.0, 1.0, 3, ("(?i)i can.t", "^$"), True)
    )
    for router in ("threshold", "explicit"):
        with pytest.raises(BadInput, match=f"the router is {router}"):
            build_router(Settings(models=MODELS, router=router, rules=file), read_rules(file))


SWITCH = (
    'source = "a"\ntarget = "b"\nsource_fingerprint = "f"\ntarget_fingerprint = "g"\n'
    "reprefill_up_to = 1\ntranslate_from = 2\n"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cascade", "not TOML"),
        ("[cascad]", "'cascad'"),
        ("cascade = 3", "not a table"),
        ("[cascade]\nescalate_above = -1", "there are: escalate_below"),
        ("[cascade]\nescalate_below = 0.5", "0 or less"),
        ("[cascade]\nescalate_below = nan", "0 or less"),
        ("[cascade]\nescalate_repeating = 0", "share above 0"),
        ("[cascade]\nescalate_shorter_than = -1", "0 or more"),
        ("[cascade]\nescalate_matching = 'x'", "list of regular expressions"),
        ("[cascade]\nescalate_matching = ['x', '(']", "no regular expression"),
        ("[cascade]\nescalate_cut = 1", "true or false"),
        ("[threshold]\nturn = 0", "above 0"),
        ("[threshold]\nturn = true", "whole number"),
        ("[threshold]\nquestion_chars = 1.5", "whole number"),
        ("[switch]\nsource = 'a'", "write \\[\\[switch\\]\\]"),
        ("[[switch]]\nsource = 'a'", "has no reprefill_up_to"),
        (f"[[switch]]\n{SWITCH.replace('2', '1')}", "up to which it does not"),
        (f"[[switch]]\n{SWITCH}measured = [[1, 2]]", "rows of tokens"),
    ],
)
def test_rules_that_can_not_be_read(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=words):
        read_rules(file)
    with pytest.raises(BadInput, match="can't read the rules"):
        read_rules(tmp_path / "none")


def test_what_is_written_is_read_as_the_same(tmp_path: Path) -> None:
    rows = (Measured(128, 12.5, 10.25), Measured(256, 13.0, 20.0))
    rates = Rates(ReadingRates(1.5e-12, 0.0, 2.25e-10, 1e-5), MapRates(1e-12, 3.5e-10, 0.0))
    switches = (
        Calibrated("small", 'a "grün"\x7f \\ name', "f1", "f2", 128, 256, rows, rates),
        Calibrated("b", "small", "f2", "f1", 256, NEVER),
    )
    file = tmp_path / "rules.toml"
    file.write_text(written(switches, ["a note", "another"]), encoding="utf-8")
    assert read_rules(file).switches == switches


def test_rates_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    whole = Rates(ReadingRates(1e-12, 1e-12, 1e-10, 1e-5), MapRates(1e-12, 1e-10, 1e-4))
    text = written([Calibrated("a", "b", "f1", "f2", 1, 2, (), whole)], [])
    for old, new, words in (
        ("s_per_byte = 1e-10, s_per_layer = 1e-05", "s_per_layer = 1e-05", "reading has no s_per_byte"),
        ("s_per_layer = 1e-05", "s_per_layer = -1.0", "give seconds, 0 or more"),
        ("maps = {", "other = {", "give the tables reading and maps"),
    ):
        assert old in text
        (tmp_path / "rules.toml").write_text(text.replace(old, new))
        with pytest.raises(BadInput, match=words):
            read_rules(tmp_path / "rules.toml")


def test_what_was_calibrated_goes_to_its_translator_only() -> None:
    with twin_engine() as (engine, lm):
        links = engine._switch._links
    models, print_ = {"a": lm, "b": lm}, lm.fingerprint
    rates = Rates(ReadingRates(1e-12, 1e-12, 1e-10, 1e-5), MapRates(1e-12, 1e-10, 1e-4))
    each = Calibrated("a", "b", print_, print_, 5, 9, rates=rates)
    found = {(link.source, link.target): (link.rule, link.rates) for link in with_rules(links, models, [each])}
    assert found == {("a", "b"): (Rule(5, 9), rates), ("b", "a"): (None, None)}
    for wrong, words in (
        (replace(each, target_fingerprint="other"), "other weights"),
        (replace(each, target="c"), "no translator for it"),
    ):
        with pytest.raises(BadInput, match=words):
            with_rules(links, models, [wrong])
    with pytest.raises(BadInput, match="twice"):
        with_rules(links, models, [each, each])


@pytest.mark.parametrize(("rule", "translates"), [(Rule(0, 1), True), (Rule(NEVER - 1, NEVER), False), (None, True)])
def test_a_translator_s_own_rule_goes_before_the_engine_s(rule: Rule | None, translates: bool) -> None:
    text = tiny.text(40)
    with twin_engine() as (engine, lm):
        engine._switch._links = tuple(replace(link, rule=rule) for link in engine._switch._links)
        within(answer(engine, request_for(lm, "a", text)))
        found = within(answer(engine, request_for(lm, "b", text)))
    assert (found.begun.translated_tokens > 0) == translates
    assert found.ids == cold_ids(lm, text)
