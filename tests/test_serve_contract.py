"""What the official OpenAI client gets from the gateway, over a real server and a fake engine."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.serve.keys import digest_of
from kvlingo.serve.protocol import Busy, TooLong, Unavailable, Unsupported
from kvlingo.serve.settings import Settings
from tests.fake_engine import FakeEngine, Serving, serving

KEY = "sk-of-alice"
HELLO = [{"role": "user", "content": "hello"}]
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving[FakeEngine]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice: {digest_of(KEY)}\nbob: {digest_of('sk-of-bob')}\n")
    with serving(FakeEngine(), Settings(keys=keys, max_tokens=40, keepalive_s=0.2)) as running:
        yield running


@pytest.fixture
def engine(served: Serving[FakeEngine]) -> FakeEngine:
    """Return the served engine, all its knobs as new."""
    served.engine.__init__()  # type: ignore[misc]
    return served.engine


@pytest.fixture(scope="module")
def client(served: Serving[FakeEngine]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=20) as made:
        yield made


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "small", "messages": HELLO, **fields})


def collect(stream: Any) -> dict[int, dict[str, Any]]:
    """Put a stream's chunks together, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            one = choices.setdefault(choice.index, {"text": "", "finish": None, "logprobs": [], "role": None})
            if hasattr(choice, "delta"):
                one["text"] += choice.delta.content or ""
                one["role"] = choice.delta.role or one["role"]
                one["logprobs"] += choice.logprobs.content if choice.logprobs else []
            else:
                one["text"] += choice.text
            one["finish"] = choice.finish_reason or one["finish"]
    return choices


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = ask(client)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == "small"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30
    assert engine.asked[0].tenant == "alice"


SAME = [
    {},
    {"temperature": 0.0},
    {"seed": 3},
    {"seed": 3, "n": 3},
    {"stop": "green"},
    {"stop": ["blue", " end."]},
    {"max_tokens": 5},
    {"max_completion_tokens": 1},
    {"logprobs": True, "max_tokens": 4},
    {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 4},
    {"model": "org/big", "seed": 1},
    {"extra_body": {"kvlingo": {"mode": "reprefill"}}},
]


@pytest.mark.parametrize("fields", SAME, ids=str)
def test_streamed_or_not_the_answer_is_the_same(
    client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    whole = ask(client, **fields)
    with ask(client, stream=True, **fields) as stream:
        parts = collect(stream)
    assert engine.asked[: len(parts)] == engine.asked[len(parts) :]
    assert len(parts) == len(whole.choices) == fields.get("n", 1)
    for choice in whole.choices:
        part = parts[choice.index]
        assert (part["text"], part["finish"]) == (choice.message.content, choice.finish_reason)
        assert part["role"] == "assistant"
        assert part["logprobs"] == (choice.logprobs.content if choice.logprobs else [])


def test_choices_of_one_seed_differ_and_come_again(client: openai.OpenAI, engine: FakeEngine) -> None:
    texts = [choice.message.content for choice in ask(client, n=3, seed=5).choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in ask(client, n=3, seed=5).choices]
    assert [request.sampling.seed for request in engine.asked[:3]] == [5, 6, 7]


def test_every_field_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    ask(
        client,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        stop="x",
        max_tokens=9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"12": -100, "7": 3},
        logprobs=True,
        top_logprobs=4,
        extra_headers={"X-Conversation": "one"},
        extra_body={"top_k": 20, "min_p": 0.05, "kvlingo": {"mode": "translate", "tail": 3, "sink": 2}},
    )
    request = engine.asked[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 20, 0.05)
    assert (sampling.seed, sampling.stop, sampling.max_new_tokens, sampling.top_logprobs) == (11, ("x",), 9, 4)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
    assert sampling.logit_bias == {12: -100.0, 7: 3.0}
    assert (request.dial.mode, request.dial.tail, request.dial.sink) == ("translate", 3, 2)
    assert request.conversation == "one"
    assert request.prompt == ({"role": "user", "content": "hello"},)


@pytest.mark.parametrize("off", [0, -1, None])
def test_top_k_off(client: openai.OpenAI, engine: FakeEngine, off: int | None) -> None:
    ask(client, extra_body={"top_k": off})
    assert engine.asked[0].sampling.top_k is None


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 40),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 4, "max_completion_tokens": None}, 4),
        ({"max_tokens": None}, 40),
    ],
    ids=str,
)
def test_the_limit_of_tokens(client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any], limit: int) -> None:
    answer = ask(client, **fields)
    assert engine.asked[0].sampling.max_new_tokens == limit
    assert answer.choices[0].finish_reason == ("length" if limit < 30 else "stop")
    assert answer.usage.completion_tokens == min(limit, 30)


def test_log_probabilities(client: openai.OpenAI, engine: FakeEngine) -> None:
    content = ask(client, logprobs=True, top_logprobs=2, max_tokens=3).choices[0].logprobs.content
    assert len(content) == 3
    assert bytes(content[0].bytes).decode() == content[0].token
    assert content[0].logprob == -0.5
    assert [top.logprob for top in content[0].top_logprobs] == [-1.0, -2.0]
    assert ask(client, logprobs=True, max_tokens=1).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(client, max_tokens=1).choices[0].logprobs is None


# --- who answered, and how -------------------------------------------------------------------------------------------

SWITCH = {
    "model": "org/big",
    "prompt_tokens": 100,
    "native_tokens": 10,
    "translated_tokens": 80,
    "recomputed_tokens": 10,
    "hops": 1,
    "source": "small",
}
FALLBACK = {
    "prompt_tokens": 100,
    "native_tokens": 0,
    "translated_tokens": 0,
    "recomputed_tokens": 100,
    "source": "small",
    "fallback": "BadArtifact: damaged",
}


@pytest.mark.parametrize("begun", [SWITCH, FALLBACK], ids=["switch", "fallback"])
def test_the_reply_says_who_answered_and_how(client: openai.OpenAI, engine: FakeEngine, begun: dict[str, Any]) -> None:
    engine.begun = begun
    answer = ask(client)
    ours = answer.kvlingo
    assert answer.model == begun.get("model", "small") == ours["model"]
    assert answer.usage.prompt_tokens_details.cached_tokens == begun["native_tokens"]
    assert {name: ours[name] for name in begun if name in ours} == {k: v for k, v in begun.items() if k in ours}
    assert ours["fallback"] == begun.get("fallback")
    assert ours["ttft_ms"] == 12.5
    with ask(client, stream=True) as stream:
        chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {answer.model}
    assert chunks[-1].kvlingo == ours
    assert not any(hasattr(chunk, "kvlingo") for chunk in chunks[:-1])


def test_usage_in_a_stream_is_asked_for(client: openai.OpenAI, engine: FakeEngine) -> None:
    with ask(client, stream=True, n=2, seed=1, stream_options={"include_usage": True}) as stream:
        *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage == ask(client, n=2, seed=1).usage
    assert last.kvlingo["model"] == "small"
    assert all(chunk.usage is None for chunk in chunks)
    assert sum(choice.finish_reason is not None for chunk in chunks for choice in chunk.choices) == 2


def test_a_prompt_counts_once_however_many_choices(client: openai.OpenAI, engine: FakeEngine) -> None:
    one, three = ask(client).usage, ask(client, n=3).usage
    assert one.prompt_tokens == three.prompt_tokens
    assert three.completion_tokens == 3 * one.completion_tokens


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2, "seed": 1}, {"prompt": ["one", "two"], "n": 2}, {"stop": "blue"}], ids=str
)
def test_texts_streamed_or_not(client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any]) -> None:
    fields = {"model": "small", "prompt": "once", "max_tokens": 6, **fields}
    whole = client.completions.create(**fields)
    with client.completions.create(stream=True, **fields) as stream:
        parts = collect(stream)
    assert whole.object == "text_completion"
    assert [parts[c.index]["text"] for c in whole.choices] == [c.text for c in whole.choices]
    assert [parts[c.index]["finish"] for c in whole.choices] == [c.finish_reason for c in whole.choices]
    assert len(whole.choices) == fields.get("n", 1) * (
        len(fields["prompt"]) if isinstance(fields["prompt"], list) else 1
    )


def test_several_prompts_keep_their_order(client: openai.OpenAI, engine: FakeEngine) -> None:
    both = client.completions.create(model="small", prompt=["one", "two"], n=2, seed=1)
    alone = [client.completions.create(model="small", prompt=prompt, n=2, seed=1) for prompt in ("one", "two")]
    assert [c.text for c in both.choices] == [c.text for answer in alone for c in answer.choices]
    assert both.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)


def test_log_probabilities_of_a_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    choice = client.completions.create(model="small", prompt="once", max_tokens=3, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    starts = [0, len(logprobs.tokens[0]), len(logprobs.tokens[0] + logprobs.tokens[1])]
    assert logprobs.text_offset == starts
    assert logprobs.token_logprobs == [-0.5] * 3
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]
    with client.completions.create(model="small", prompt="once", max_tokens=3, logprobs=2, stream=True) as stream:
        offsets = [o for chunk in stream for c in chunk.choices if c.logprobs for o in c.logprobs.text_offset]
    assert offsets == logprobs.text_offset


# --- models ----------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert [model.id for model in client.models.list()] == ["small", "org/big"]
    assert client.models.retrieve("org/big").kvlingo == {"max_tokens": None, "can_be_target": False}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


# --- message shapes --------------------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
PLAIN_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SHAPES = [
    ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
    ({"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "user", "content": "hi"}),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "ab"},
    ),
    ({"role": "developer", "content": "rules"}, {"role": "system", "content": "rules"}),
    ({"role": "system", "content": [{"type": "text", "text": "rules"}]}, {"role": "system", "content": "rules"}),
    ({"role": "user", "content": "hi", "name": "ann"}, {"role": "user", "content": "hi", "name": "ann"}),
    ({"role": "assistant", "content": ""}, {"role": "assistant", "content": ""}),
    ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
    ({"role": "assistant"}, {"role": "assistant", "content": ""}),
    (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [PLAIN_CALL]},
    ),
    (
        {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "c1"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ),
    (
        {"role": "assistant", "content": "ok", "refusal": None, "annotations": [], "audio": None, "tool_calls": None},
        {"role": "assistant", "content": "ok"},
    ),
]


@pytest.mark.parametrize(("message", "plain"), SHAPES, ids=[str(i) for i in range(len(SHAPES))])
def test_message_shapes(
    client: openai.OpenAI, engine: FakeEngine, message: dict[str, Any], plain: dict[str, Any]
) -> None:
    ask(client, messages=[message, *HELLO])
    assert engine.asked[0].prompt == (plain, *HELLO)


def test_an_answer_can_be_sent_back_as_the_client_holds_it(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = ask(client).choices[0].message
    ask(client, messages=[*HELLO, answer, *HELLO])
    ask(client, messages=[*HELLO, answer.model_dump(), *HELLO])
    assert engine.asked[1].prompt == engine.asked[2].prompt
    assert engine.asked[1].prompt[1] == {"role": "assistant", "content": answer.content}  # type: ignore[index]


# --- what is refused -------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
REFUSED = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop.1"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "json"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"user": "ann"}, "user"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"nonsense": None}, "nonsense"),
    ({"kvlingo": {"mode": "fast"}}, "kvlingo.mode"),
    ({"kvlingo": {"tail": 0}}, "kvlingo.tail"),
    ({"kvlingo": {"tial": 1}}, "kvlingo.tial"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages.0.mood"),
    ({"model": ""}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    body: Any = caught.value.body
    assert body["type"] == "invalid_request_error"
    assert str(body["param"]).startswith(param)
    assert param.split(".")[0] in body["message"]
    assert not engine.asked


NEUTRAL = [
    {"tools": []},
    {"tools": None},
    {"tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"store": False},
    {"user": None},
    {"parallel_tool_calls": True},
    {"stop": None},
    {"logit_bias": None},
    {"kvlingo": None},
    {"stream_options": None},
    {"n": None},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_what_asks_for_nothing_is_accepted(client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any]) -> None:
    ask(client, extra_body=fields)
    ask(client)
    assert engine.asked[0] == engine.asked[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": HELLO}, "messages"),
    ],
    ids=str,
)
def test_what_a_text_refuses(client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="once", extra_body=fields)
    assert str(caught.value.body["param"]).startswith(param)  # type: ignore[index]


# --- errors ----------------------------------------------------------------------------------------------------------

STATUSES = [
    (Busy(2.2), openai.RateLimitError, "queue_full", None),
    (Unavailable(5), openai.InternalServerError, "shutting_down", None),
    (TooLong(900, 512), openai.BadRequestError, "context_length_exceeded", "messages"),
    (Unsupported("tools"), openai.BadRequestError, "unsupported_parameter", "tools"),
    (
        BadInput("the chat template refuses these messages: roles must alternate"),
        openai.BadRequestError,
        None,
        "messages",
    ),
    (RuntimeError("secret prompt"), openai.InternalServerError, "internal", None),
    (UnsupportedCache("a secret of the server"), openai.InternalServerError, "internal", None),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("error", "kind", "code", "param"), STATUSES, ids=lambda value: type(value).__name__)
def test_an_error_before_the_first_token_has_its_status(
    client: openai.OpenAI,
    engine: FakeEngine,
    error: Exception,
    kind: type[openai.APIStatusError],
    code: str | None,
    param: str | None,
    stream: bool,
) -> None:
    engine.error = error
    with pytest.raises(kind) as caught:
        ask(client, stream=stream)
    body: Any = caught.value.body
    assert body["param"] == param
    assert code is None or body["code"] == code
    assert "secret" not in body["message"]
    assert body["message"] == str(error) or code == "internal"
    retry = caught.value.response.headers.get("retry-after")
    assert retry == {"Busy": "3", "Unavailable": "5"}.get(type(error).__name__)


def test_an_unknown_model(client: openai.OpenAI, engine: FakeEngine) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="there are: small, org/big") as caught:
            ask(client, model="gpt-4o", stream=stream)
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("key", ["sk-wrong", "sk-of-alic", digest_of(KEY)])
def test_a_wrong_key(served: Serving[FakeEngine], engine: FakeEngine, key: str) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as wrong:
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(wrong)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
    assert caught.value.code == "invalid_api_key"
    assert not engine.asked


def test_an_error_after_the_first_token_is_an_event(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.error, engine.error_after = RuntimeError("secret prompt"), 3
    got = []
    with pytest.raises(openai.APIError, match="something went wrong") as caught, ask(client, stream=True) as stream:
        got.extend(stream)
    assert len(got) == 4  # the role and three words
    assert not isinstance(caught.value, openai.APIStatusError)
    with pytest.raises(openai.InternalServerError):
        ask(client)


def test_half_an_answer_does_not_pass_for_a_whole_one(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.silent = True
    with pytest.raises(openai.InternalServerError):
        ask(client)
    with pytest.raises(openai.APIError), ask(client, stream=True) as stream:
        list(stream)


def test_an_error_of_one_choice_ends_all(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.error, engine.error_after = Busy(1), 2
    with pytest.raises(openai.RateLimitError):
        ask(client, n=3)
    assert engine.running == 0


def test_the_client_does_not_mind_waiting(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.prefill_s = 0.9
    with ask(client, stream=True, seed=1) as stream:
        slow = collect(stream)
    assert slow[0]["text"] == ask(client, seed=1).choices[0].message.content


def test_bytes_of_any_language_survive(client: openai.OpenAI, engine: FakeEngine) -> None:
    text = "Grüße, \u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f467 \u2028\u0000\r\n end"
    ask(client, messages=[{"role": "user", "content": text}])
    assert engine.asked[0].prompt[0]["content"] == text  # type: ignore[index, call-overload]


def test_the_client_sees_the_requests_number(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert ask(client)._request_id.startswith("req-")
    raw = client.chat.completions.with_raw_response.create(model="small", messages=HELLO)  # type: ignore[arg-type]
    assert json.loads(raw.text)["id"].startswith("chatcmpl-")
