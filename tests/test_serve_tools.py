"""Tools: shown by the model's own template, called in its text, and handed over with the rest of a conversation."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import torch

from kvlingo.chat import ignored, plain_message, render, writes_tool_call_tags
from kvlingo.language_model import LanguageModel
from kvlingo.reading import read_chat
from kvlingo.serve.calls import Call, Calls, call_of
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.protocol import Begun, Done, Event, Piece, Request, Unsupported
from kvlingo.serve.settings import Settings
from kvlingo.serve.switching import Link
from kvlingo.translator import identity_translator
from tests import tiny
from tests.fake_engine import FakeEngine, serving
from tests.serving import ALWAYS, ask, assistant, closing, request_for, user

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
HERMES = (
    "{% if tools %}{% for tool in tools %}<tools>{{ tool['function'] | tojson }}</tools>{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}[user]<tool_response>{{ message['content'] }}</tool_response>"
    "{% else %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}</tool_call>"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MENTIONS_TOOLS = "{# no tools here #}{% for message in messages %}{{ message['content'] }}{% endfor %}"
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"word": "stone"}}}
WITH_CALL = (
    user("where is the stone"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "over seven hills", "tool_call_id": "c1"},
    assistant("it is over seven hills"),
    user("and the river"),
)


def model(template: str | None) -> LanguageModel:
    return tiny.language_model(tiny.FAMILIES["llama"], tokenizer=tiny.byte_tokenizer(chat_template=template))


# --- shown to the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "tools", "param"),
    [
        (HERMES, WITH_CALL, [TOOL], None),
        (HERMES, WITH_CALL, [], None),
        (None, [user("hi")], [], None),
        (None, [user("hi")], [TOOL], "tools"),
        (MENTIONS_TOOLS, [user("hi")], [TOOL], "tools"),
        (None, WITH_CALL, [], "tool_calls"),
    ],
)
def test_what_a_template_leaves_out_is_known_by_rendering(
    template: str | None, messages: Any, tools: list[Any], param: str | None
) -> None:
    assert ignored(tiny.byte_tokenizer(chat_template=template), messages, tools) == param


def test_contents_are_found_between_calls_of_tools() -> None:
    tokenizer = tiny.byte_tokenizer(chat_template=HERMES)
    reading = read_chat(tokenizer, WITH_CALL, tools=[TOOL])
    found = [reading.stream[start:stop].decode() for start, stop in reading.contents]
    assert found == [message["content"] for message in WITH_CALL]
    rendered = render(tokenizer, [plain_message(m) for m in WITH_CALL], True, [TOOL])
    assert '<tool_call>{"name": "find", "arguments": {"word": "stone"}}</tool_call>' in rendered


def test_a_conversation_with_calls_is_handed_over() -> None:
    lm = model(HERMES)
    links = [Link("a", "b", identity_translator(lm.geometry, torch.float64))]
    with closing(LocalEngine({"a": lm, "b": lm}, links, Limits(rule=ALWAYS))) as engine:
        (own,) = ask(engine, request_for(lm, "a", WITH_CALL, tools=(TOOL,)))
        (switched,) = ask(engine, request_for(lm, "b", WITH_CALL, tools=(TOOL,)))
        assert (switched.begun.fallback, switched.ids) == (None, own.ids)
        assert switched.begun.translated_tokens > 0.9 * switched.begun.prompt_tokens
        assert own.begun.calls
        (plain,) = ask(engine, request_for(lm, "a", WITH_CALL))
        assert not plain.begun.calls
        assert plain.ids != own.ids


def test_a_conversation_with_calls_is_handed_to_another_vocabulary() -> None:
    """Which token feeds which goes by contents: those of a tool too."""
    big = model(HERMES)
    small = tiny.language_model(
        tiny.FAMILIES["llama"], tokenizer=tiny.merging_tokenizer(bos=True, chat_template=HERMES), seed=3
    )
    links = [Link("a", "b", identity_translator(big.geometry, torch.float64))]
    with closing(LocalEngine({"a": small, "b": big}, links, Limits(rule=ALWAYS))) as engine:
        ask(engine, request_for(big, "a", WITH_CALL, tools=(TOOL,)))
        (switched,) = ask(engine, request_for(big, "b", WITH_CALL, tools=(TOOL,)))
        assert switched.begun.fallback is None
        assert switched.begun.translated_tokens > 0.9 * switched.begun.prompt_tokens


def test_a_model_that_would_not_see_them_refuses() -> None:
    lm = tiny.language_model("llama")
    with closing(LocalEngine({"a": lm})) as engine:
        for changes, param in (({"tools": (TOOL,)}, "tools"), ({"messages": WITH_CALL}, "messages")):
            messages = changes.pop("messages", (user("hi"),))
            with pytest.raises(Unsupported) as refused:
                ask(engine, request_for(lm, "a", messages, **changes))  # type: ignore[arg-type]
            assert refused.value.param == param
        with pytest.raises(Unsupported):
            ask(engine, request_for(lm, "a", "a text", tools=(TOOL,)))


# --- called by the model ---------------------------------------------------------------------------------------------

TWO = (
    'Let me look.\n<tool_call>\n{"name": "find", "arguments": {"word": "grün"}}\n</tool_call>\n'
    '<tool_call>{"name": "go"}</tool_call>\n'
)
ANSWERS = [
    (TWO, "Let me look.", [("find", {"word": "grün"}), ("go", {})]),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call> then more ', "then more ", [("f", {})]),
    ("no call at all \n", "no call at all \n", []),
    (" \n", " \n", []),
    ("a < b <tool", "a < b <tool", []),
    ("<tool_call>not JSON</tool_call> x", "<tool_call>not JSON</tool_call> x", []),
    ('x\n<tool_call>{"arguments": {}}</tool_call>', 'x\n<tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', []),
    ('x <tool_call>{"name": "f", "argum', 'x <tool_call>{"name": "f", "argum', []),
    ("</tool_call> y", "</tool_call> y", []),
]  # fmt: skip


def heard(pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    calls = Calls()
    said = [each for piece in pieces for each in calls.add(piece)] + calls.flush()
    text = "".join(each for each in said if isinstance(each, str))
    return text, [(each.name, json.loads(each.arguments)) for each in said if isinstance(each, Call)]


@pytest.mark.parametrize(("answer", "text", "calls"), ANSWERS, ids=range(len(ANSWERS)))
def test_calls_are_read_however_the_text_comes(answer: str, text: str, calls: list[Any]) -> None:
    assert heard([answer]) == (text, calls)
    assert heard(list(answer)) == (text, calls)
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(answer) + 1), k=4))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert heard(pieces) == (text, calls)


def test_text_does_not_wait_for_the_end() -> None:
    calls = Calls()
    assert calls.add("some text <") == ["some text"]
    assert calls.add("3 ") == [" <3"]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '{"name": ""}',
        '{"name": 3}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": [-Infinity]}}',
        "[" * 99999,
    ],
)
def test_what_is_no_call(text: str) -> None:
    assert call_of(text) is None


def test_the_form_is_known_by_the_template() -> None:
    assert writes_tool_call_tags(tiny.byte_tokenizer(chat_template=HERMES))
    assert not writes_tool_call_tags(tiny.byte_tokenizer(chat_template="<|tool_call|>"))
    assert not writes_tool_call_tags(tiny.byte_tokenizer())


# --- told to the client ----------------------------------------------------------------------------------------------


@dataclass
class Calling(FakeEngine):
    """Says one text, three characters at a time."""

    text: str = TWO
    knows: bool = True

    async def events(self, request: Request) -> AsyncIterator[Event]:
        yield Begun(request.model, 3, 0, 0, 3, 0, None, None, calls=self.knows and bool(request.tools))
        most = request.sampling.max_new_tokens
        for start in list(range(0, len(self.text), 3))[:most]:
            yield Piece(self.text[start : start + 3], ())
        yield Done("length" if most * 3 < len(self.text) else "stop", 9, 1.0)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serving(Calling(), Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=20) as made,
    ):
        yield made


def asked(client: openai.OpenAI, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    return client.chat.completions.create(**{"model": "small", "messages": messages, "tools": [TOOL], **fields})


def put_together(chunks: Any) -> tuple[str, list[tuple[str, str]], str]:
    text, calls, finish = "", {}, ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                assert call.index not in calls
                assert call.id
                calls[call.index] = (call.function.name, call.function.arguments)
    assert list(calls) == list(range(len(calls)))
    return text, list(calls.values()), finish


@pytest.mark.parametrize(
    ("fields", "text", "names", "finish"),
    [
        ({}, "Let me look.", ["find", "go"], "tool_calls"),
        ({"max_tokens": 10}, TWO[:30], [], "length"),
        ({"max_tokens": len(TWO) // 3 - 6}, "Let me look.", ["find"], "length"),
        ({"tool_choice": "none"}, TWO, [], "stop"),
    ],
    ids=["whole", "cut", "one whole", "not shown"],
)
def test_streamed_or_not_calls_are_the_same(
    client: openai.OpenAI, fields: dict[str, Any], text: str, names: list[str], finish: str
) -> None:
    (choice,) = asked(client, **fields).choices
    with asked(client, stream=True, **fields) as stream:
        streamed = put_together(stream)
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert streamed == (choice.message.content or "", calls, choice.finish_reason)
    assert choice.message.content is not None
    assert choice.message.content.startswith(text)
    assert ([name for name, _ in calls], choice.finish_reason) == (names, finish)
    if names:
        assert json.loads(calls[0][1]) == {"word": "grün"}


def test_a_call_and_its_result_can_be_sent_back(client: openai.OpenAI) -> None:
    message = asked(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "here"}
    first = {"role": "user", "content": "hello"}
    assert asked(client, messages=[first, message, result]).choices
    assert asked(client, messages=[first, message.model_dump(), result]).choices


def test_an_answer_that_only_calls_has_no_content() -> None:
    only = Calling(text='<tool_call>{"name": "find", "arguments": {}}</tool_call>')
    with (
        serving(only, Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=20) as client,
    ):
        message = asked(client).choices[0].message
        assert (message.content, len(message.tool_calls)) == (None, 1)
        only.knows = False
        message = asked(client).choices[0].message
        assert (message.content, message.tool_calls) == (only.text, None), "a form that is not known stays text"
