"""The contract of `tests/test_serve_contract.py` on a real engine: tiny models, so that every answer has a right text.

Everything is greedy or has a seed. What a request means is held against the model alone, which reads the messages in their plain
form anew; what is refused must be refused by the same names, and leave the next answer as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from kvlingo.language_model import LanguageModel
from kvlingo.serve.protocol import Message
from kvlingo.serve.settings import Settings
from tests.fake_engine import serving
from tests.serving import cold_ids, letters_model, twin_engine
from tests.test_serve_contract import HELLO, NEUTRAL, REFUSED, SHAPES, collect

LIMIT = 8


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return letters_model()


@pytest.fixture(scope="module")
def client(lm: LanguageModel) -> Iterator[openai.OpenAI]:
    """One tiny model under two names with the identity between them, behind a server."""
    with (
        twin_engine(lm) as (engine, _),
        serving(engine, Settings(max_tokens=LIMIT)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0, timeout=60) as made,
    ):
        yield made


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "a", "messages": HELLO, "temperature": 0, **fields})


def said(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def right(lm: LanguageModel, messages: Sequence[Message] | str = tuple(HELLO), count: int = LIMIT) -> str:
    """Return what the model alone says."""
    return str(lm.tokenizer.decode(cold_ids(lm, messages, count, letters_only=False)))


# --- answers ---------------------------------------------------------------------------------------------------------

SAME = [
    {},
    {"model": "b"},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "top_p": 0.9, "seed": 4},
    {"temperature": 1.0, "seed": 3, "n": 3},
    {"max_tokens": 5},
    {"max_completion_tokens": 1},
    {"max_tokens": 3, "max_completion_tokens": 4},
    {"logprobs": True, "max_tokens": 4},
    {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 9, "extra_body": {"top_k": 3, "min_p": 0.05}},
    {"extra_body": {"kvlingo": {"mode": "reprefill"}}},
    {"model": "b", "extra_body": {"kvlingo": {"mode": "translate", "tail": 3, "sink": 2}}},
    {"extra_headers": {"X-Conversation": "one"}},
]


@pytest.mark.parametrize("fields", SAME, ids=str)
def test_streamed_or_not_the_answer_is_the_same(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = ask(client, **fields)
    with ask(client, stream=True, **fields) as stream:
        parts = collect(stream)
    assert len(parts) == len(whole.choices) == fields.get("n", 1)
    for choice in whole.choices:
        part = parts[choice.index]
        assert (part["text"], part["finish"]) == (choice.message.content, choice.finish_reason)
        assert part["role"] == "assistant"
        told, streamed = choice.logprobs.content if choice.logprobs else [], part["logprobs"]
        assert [each.token for each in streamed] == [each.token for each in told]
        assert [each.logprob for each in streamed] == pytest.approx([each.logprob for each in told], abs=1e-9)


@pytest.mark.parametrize("model", ["a", "b"])
def test_a_chat_is_answered_as_the_model_alone_answers(client: openai.OpenAI, lm: LanguageModel, model: str) -> None:
    answer = ask(client, model=model)
    assert said(answer) == right(lm)
    assert (answer.model, answer.choices[0].finish_reason) == (model, "length")
    assert answer.usage.completion_tokens == LIMIT
    ours = answer.kvlingo
    counts = [ours[f"{kind}_tokens"] for kind in ("native", "translated", "recomputed")]
    assert sum(counts) == answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == counts[0]


def test_a_conversation_may_change_its_model_at_any_turn(client: openai.OpenAI, lm: LanguageModel) -> None:
    messages: list[Any] = []
    for turn, model in enumerate("abba"):
        messages.append({"role": "user", "content": f"turn {turn} of a conversation that goes on"})
        answer = ask(client, model=model, messages=messages)
        assert said(answer) == right(lm, messages)
        assert (answer.kvlingo["source"] is not None) == (turn in (1, 3))
        messages.append({"role": "assistant", "content": said(answer)})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_text_ends_an_answer_also_across_tokens(
    client: openai.OpenAI, lm: LanguageModel, length: int, stream: bool
) -> None:
    text = right(lm)
    stop = text[3 : 3 + length]
    with ask(client, stop=stop, stream=True) as chunks:
        part = collect(chunks)[0]
    whole = ask(client, stop=[stop, "?"]).choices[0]
    found = (part["text"], part["finish"]) if stream else (whole.message.content, whole.finish_reason)
    assert found == (text[: text.index(stop)], "stop")


def test_choices_of_one_seed_differ_and_come_again(client: openai.OpenAI) -> None:
    texts = [choice.message.content for choice in ask(client, n=3, seed=5, temperature=1.0).choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in ask(client, n=3, seed=5, temperature=1.0).choices]


def test_log_probabilities_are_of_what_is_said(client: openai.OpenAI, lm: LanguageModel) -> None:
    content = ask(client, logprobs=True, top_logprobs=3, max_tokens=3).choices[0].logprobs.content
    assert "".join(each.token for each in content) == right(lm, count=3)
    for each in content:
        assert bytes(each.bytes).decode() == each.token
        assert [top.logprob for top in each.top_logprobs] == sorted(
            (t.logprob for t in each.top_logprobs), reverse=True
        )
        assert (each.top_logprobs[0].token, each.top_logprobs[0].logprob) == (each.token, each.logprob)
    assert ask(client, max_tokens=1).choices[0].logprobs is None


@pytest.mark.parametrize("bias", [-100, 100])
def test_a_bias_forbids_and_forces(client: openai.OpenAI, lm: LanguageModel, bias: int) -> None:
    first = right(lm)[0]
    letter = first if bias < 0 else next(x for x in "qxz" if x != first)
    text = said(ask(client, logit_bias={str(lm.tokenizer.convert_tokens_to_ids(letter)): bias}))
    assert (letter not in text) if bias < 0 else text == letter * LIMIT


def test_usage_in_a_stream_is_asked_for(client: openai.OpenAI) -> None:
    with ask(client, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = list(stream)
    usage = ask(client).usage
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], usage.prompt_tokens, LIMIT)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.kvlingo["model"] == "a"


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "plain"), SHAPES, ids=[str(i) for i in range(len(SHAPES))])
def test_messages_of_every_shape_are_read_as_plain_ones(
    client: openai.OpenAI, lm: LanguageModel, message: dict[str, Any], plain: dict[str, Any]
) -> None:
    lost = {"tool_calls": "tool_calls", "name": "the name of a message"}  # what this template has no place for
    for field, told in lost.items():
        if field in plain:
            with pytest.raises(openai.BadRequestError, match=f"no place for {told}"):
                ask(client, messages=[message, *HELLO])
            return
    assert said(ask(client, messages=[message, *HELLO])) == right(lm, [plain, *HELLO])


def test_an_answer_can_be_sent_back_as_the_client_holds_it(client: openai.OpenAI, lm: LanguageModel) -> None:
    answer = ask(client).choices[0].message
    whole = right(lm, [*HELLO, {"role": "assistant", "content": answer.content}, *HELLO])
    for held in (answer, answer.model_dump()):
        assert said(ask(client, messages=[*HELLO, held, *HELLO])) == whole


@pytest.mark.parametrize("text", ["Grüße", "\u05e9\u05dc\u05d5\u05dd", "\U0001f469\u200d\U0001f467", "a\u2028\r\n\tb"])
def test_bytes_of_any_language_are_read(client: openai.OpenAI, lm: LanguageModel, text: str) -> None:
    messages: list[Any] = [{"role": "user", "content": text}]
    assert said(ask(client, messages=messages)) == right(lm, messages)


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2, "seed": 1, "temperature": 1.0}, {"prompt": ["one", "two"], "n": 2}, {"model": "b"}, {"logprobs": 2}],
    ids=str,
)
def test_texts_streamed_or_not(client: openai.OpenAI, lm: LanguageModel, fields: dict[str, Any]) -> None:
    fields = {"model": "a", "prompt": "once", "max_tokens": 6, "temperature": 0, **fields}
    whole = client.completions.create(**fields)
    with client.completions.create(stream=True, **fields) as stream:
        parts = collect_texts(stream)
    prompts = fields["prompt"] if isinstance(fields["prompt"], list) else [fields["prompt"]]
    assert parts == [choice.text for choice in whole.choices]
    assert len(parts) == fields.get("n", 1) * len(prompts)
    if not fields["temperature"]:
        assert parts == [right(lm, prompt, 6) for prompt in prompts for _ in range(fields.get("n", 1))]


def collect_texts(stream: Any) -> list[str]:
    found: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return [found[i] for i in sorted(found)]


# --- what asks for nothing, and what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_what_asks_for_nothing_is_accepted(client: openai.OpenAI, lm: LanguageModel, fields: dict[str, Any]) -> None:
    assert said(ask(client, extra_body=fields)) == right(lm)


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    body: Any = caught.value.body
    assert body["type"] == "invalid_request_error"
    assert str(body["param"]).startswith(param)


def test_after_all_that_was_refused_the_answer_is_what_it_was(client: openai.OpenAI, lm: LanguageModel) -> None:
    assert said(ask(client)) == right(lm)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI, lm: LanguageModel, stream: bool) -> None:
    room = client.models.retrieve("a").kvlingo["max_tokens"]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "x" * (room + 1)}], stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert str(room) in str(caught.value)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", ["gpt-4o", "auto"])
def test_a_model_that_is_not_there(client: openai.OpenAI, model: str, stream: bool) -> None:
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as caught:
        ask(client, model=model, stream=stream)
    assert caught.value.code == ("no_router" if model == "auto" else "model_not_found")


@pytest.mark.parametrize("token", ["-1", "1000000000"])
def test_a_token_that_the_vocabulary_lacks(client: openai.OpenAI, token: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, logit_bias={token: 1})
    assert str(caught.value.param).startswith("logit_bias")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["a", "b"]
    assert client.models.retrieve("b").kvlingo["can_be_target"]
