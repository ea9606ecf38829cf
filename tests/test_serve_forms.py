"""Answers that must be JSON: whatever a model of random weights says, it parses and keeps to its schema."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from kvlingo.serve import forms
from kvlingo.serve.engine import LocalEngine
from kvlingo.serve.forms import form_of
from kvlingo.serve.protocol import AUTO, Help, NoHelp, Request, Sampling, Unsupported
from kvlingo.serve.routing.choosing import Pair
from kvlingo.serve.routing.routed import RoutedEngine
from kvlingo.serve.routing.token import Token, TokenRule
from kvlingo.serve.settings import Settings
from tests import tiny
from tests.fake_engine import serving
from tests.serving import ask, closing, user

needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed (pip install 'kvlingo[json]')"
)
LM = tiny.language_model("llama")
WORDS = tiny.language_model("llama", tokenizer=tiny.merging_tokenizer(), seed=3)
PROMPT = (user("say something"),)
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["cat", "dog", None, 3]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "$ref": "#/$defs/row",
        "$defs": {
            "cell": {"type": "integer", "minimum": 0, "maximum": 99},
            "row": {"type": "array", "items": {"$ref": "#/$defs/cell"}, "minItems": 1, "maxItems": 3},
        },
    },
    {"type": "string", "pattern": "^[a-c]{3}-[0-9]{2}$"},
]


def request(schema: Any, seed: int = 0, most: int = 400, **changes: Any) -> Request:
    text = None if schema is None else json.dumps(schema)
    return Request("a", PROMPT, Sampling(most, temperature=1.0, seed=seed, json_schema=text, **changes))


@needs_llguidance
@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "array", "row", "pattern"])
@pytest.mark.parametrize("lm", [LM, WORDS], ids=["bytes", "merges"])
def test_every_answer_parses_and_validates(lm: Any, schema: dict[str, Any]) -> None:
    with closing(LocalEngine({"a": lm})) as engine:
        answers = ask(engine, *(request(schema, seed) for seed in range(6)))
        assert len({answer.text for answer in answers}) > 1
        for answer in answers:
            assert answer.done.finish_reason == "stop"
            jsonschema.validate(json.loads(answer.text), schema)
        (greedy,) = ask(engine, Request("a", PROMPT, Sampling(400, 0.0, json_schema=json.dumps(schema))))
        if greedy.done.finish_reason == "stop":
            jsonschema.validate(json.loads(greedy.text), schema)


@needs_llguidance
def test_each_row_has_its_own_form() -> None:
    with closing(LocalEngine({"a": LM})) as engine:
        requests = [request(schema, most=60) for schema in (None, *SCHEMAS, None)]
        together = ask(engine, *requests)
        single = [ask(engine, each)[0] for each in requests]
        assert [answer.text for answer in together] == [answer.text for answer in single]
        assert together[0].text == together[-1].text
        with pytest.raises(json.JSONDecodeError):
            json.loads(together[0].text)


@needs_llguidance
def test_log_probabilities_are_the_models_own() -> None:
    with closing(LocalEngine({"a": LM})) as engine:
        free, formed = ask(engine, request(None, most=1, top_logprobs=3), request(SCHEMAS[1], most=1, top_logprobs=3))
        assert free.pieces[0].tokens[0].top == formed.pieces[0].tokens[0].top
        assert formed.pieces[0].tokens[0].text in " \n\t["


@needs_llguidance
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"type": "string", "format": "nonsense"}, "format"),
        ({"type": "bogus"}, "bogus"),
        ({"$ref": "http://127.0.0.1:9/x"}, "registry"),
        ({"$ref": "file:///etc/hostname"}, "registry"),
        ({"not": {}}, "not"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"const": 2**63}, "9223372036854775808, which can't"),
        ({"const": [{"a": -(2**63)}]}, "-9223372036854775808, which can't"),  # would end the process
        ({"anyOf": [{"properties": {f"p{i}": {} for i in range(401)}}]}, "401 optional properties"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_can_not_be_forced_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=words) as refused:
        form_of(json.dumps(schema), LM)
    assert refused.value.param == "response_format"


@needs_llguidance
def test_the_most_that_can_be_forced_is_forced() -> None:
    names = [f"p{i}" for i in range(800)]
    schema = {"type": "object", "properties": {n: {"const": -(2**62)} for n in names}, "required": names[400:]}
    form = form_of(json.dumps(schema), LM)
    for character in '{"p399":-4611686018427387904,"p400"':
        (token,) = LM.tokenizer(character, add_special_tokens=False)["input_ids"]
        assert form.allowed()[token], character
        form.take(token)


@needs_llguidance
def test_a_model_that_never_ends_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "end_ids", lambda _: frozenset())
    with pytest.raises(Unsupported, match="no token that ends"):
        form_of(json.dumps({"type": "string"}), LM)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "find_spec", lambda _: None)
    with closing(LocalEngine({"a": LM})) as engine:
        with pytest.raises(Unsupported, match=r"pip install 'kvlingo\[json\]'"):
            ask(engine, request(SCHEMAS[0]))
        assert ask(engine, request(None, most=2))[0].done.completion_tokens == 2


@needs_llguidance
def test_two_models_do_not_share_a_form() -> None:
    with closing(LocalEngine({"a": LM, "b": WORDS})) as engine:
        helped = Request(**{**vars(request(SCHEMAS[1])), "help": Help("b", 0.0)})
        with pytest.raises(NoHelp, match="one form"):
            ask(engine, helped)
        routed: Any = RoutedEngine(engine, Token(Pair("a", "b"), TokenRule(0.0)))
        (found,) = ask(routed, Request(**{**vars(request(SCHEMAS[1])), "model": AUTO}))
        assert found.begun.model == "a"
        jsonschema.validate(json.loads(found.text), SCHEMAS[1])


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        closing(LocalEngine({"a": LM})) as engine,
        serving(engine, Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=60) as made,
    ):
        yield made


@needs_llguidance
def test_the_official_client_asks_for_it(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMAS[0], "strict": True}}
    fields: Any = {"model": "a", "messages": list(PROMPT), "seed": 5, "max_tokens": 400, "response_format": schema}
    whole = client.chat.completions.create(**fields)
    text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**fields, stream=True))
    assert text == whole.choices[0].message.content
    found = json.loads(text)
    jsonschema.validate(found, SCHEMAS[0])
    assert list(found) == ["name", "age", "kind"]
    # Bytes that close what is open are made likely, else random weights ramble in a text of any length.
    bias = {str(LM.tokenizer.convert_tokens_to_ids(letter)): 20 for letter in '"}]'}
    fields |= {"response_format": {"type": "json_object"}, "logit_bias": bias}
    answer = client.chat.completions.create(**fields).choices[0]
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.message.content or ""), dict)


@needs_llguidance
def test_a_refusal_names_the_field(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="a", messages=list(PROMPT), response_format=schema)  # type: ignore[call-overload]
    assert caught.value.param == "response_format"
