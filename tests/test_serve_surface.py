"""What a client meets at the whole server: room, pins, keys, choices and stops streamed or not, answers that were cut off."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from kvlingo.serve import keys as keys_module
from kvlingo.serve.doors import LOG, JsonLines
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.keys import Keys, digest_of
from kvlingo.serve.protocol import Message, Piece
from kvlingo.serve.settings import Settings
from kvlingo.serve.switching import Link
from kvlingo.translator import identity_translator
from tests import tiny
from tests.fake_engine import serving
from tests.serving import (
    ALWAYS,
    ask,
    assistant,
    closing,
    cold_ids,
    letters_model,
    request_for,
    twin_engine,
    user,
    within,
)

ALICE, BOB = "sk-of-alice-0123456789", "sk-of-bob-0123456789"
CODEWORD = "zanzibar"


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        twin_engine(letters_model()) as (engine, _),
        serving(engine, Settings()) as served,
        client_of(served.url) as client,
    ):
        yield client


def say(client: openai.OpenAI, model: str, messages: list[Message], **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    return client.chat.completions.create(model=model, messages=messages, **fields)  # type: ignore[arg-type]


def rounded(choice: Any) -> list[Any]:
    """Return a choice's tokens with their log-probabilities and likeliest others, to rounding: who decodes beside it may vary."""
    entries = choice.logprobs.content if choice.logprobs else []
    return [
        (entry.token, round(entry.logprob, 6), [(o.token, round(o.logprob, 6)) for o in entry.top_logprobs])
        for entry in entries
    ]


def told(client: openai.OpenAI, messages: list[Message], **fields: Any) -> tuple[dict[int, str], dict[int, Any], Any]:
    """Return texts, ends and log-probabilities by choice, streamed or not."""
    texts: dict[int, str] = {}
    ends: dict[int, Any] = {}
    logprobs: dict[int, list[Any]] = {}
    answer = say(client, "a", messages, **fields)
    if not fields.get("stream"):
        for choice in answer.choices:
            texts[choice.index], ends[choice.index] = choice.message.content, choice.finish_reason
            logprobs[choice.index] = rounded(choice)
        return texts, ends, logprobs
    for chunk in answer:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
            logprobs.setdefault(choice.index, []).extend(rounded(choice))
    return texts, ends, logprobs


# --- a stream says what the whole answer says ------------------------------------------------------------------------

FIELDS: list[dict[str, Any]] = [
    {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 3},
    {"n": 2, "temperature": 1.0, "seed": 9, "presence_penalty": 1.5, "top_p": 0.9},
    {"logprobs": True, "max_tokens": 1},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_choices_ends_and_log_probabilities_are_the_same_streamed_or_not(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    messages = [user(tiny.text(8, seed=11))]
    whole, streamed = told(client, messages, **fields), told(client, messages, stream=True, **fields)
    assert whole == streamed
    assert len(whole[0]) == fields.get("n", 1)
    assert "temperature" not in fields or len(set(whole[0].values())) > 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_over_several_tokens_is_cut_and_never_sent(client: openai.OpenAI, stream: bool) -> None:
    messages = [user(tiny.text(8, seed=12))]
    text = told(client, messages, max_tokens=20)[0][0]
    stop = text[7:12]  # a letter is a token here
    at = text.index(stop)
    texts, ends, logprobs = told(
        client, messages, max_tokens=20, stop=["never said", stop], stream=stream, logprobs=True
    )
    assert (texts[0], ends[0]) == (text[:at], "stop")
    assert "".join(token for token, _, _ in logprobs[0]) == text[:at]
    half = stop[:2] + "\u00e9"  # begins like what is said, and goes on otherwise
    assert told(client, messages, max_tokens=20, stop=half, stream=stream)[0][0] == text


# --- room ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_room_is_that_of_the_model_that_answers(stream: bool) -> None:
    """A conversation that has outgrown the small window goes on with the large one, and back is a 400 that changes nothing."""
    wide = letters_model()
    narrow = tiny.language_model(lambda: tiny.llama(max_position_embeddings=96), seed=2, name="narrow")
    link = Link("wide", "narrow", identity_translator(wide.geometry, torch.float64))
    engine = LocalEngine({"wide": wide, "narrow": narrow}, [link], Limits(rule=ALWAYS))
    with closing(engine), serving(engine, Settings(max_tokens=40)) as served, client_of(served.url) as client:
        short = [user("x" * 40)]
        assert say(client, "narrow", short, max_tokens=2000).usage.total_tokens <= 96
        long = [
            user("x" * 60),
            assistant(say(client, "wide", [user("x" * 60)]).choices[0].message.content),
            user("y" * 40),
        ]
        with pytest.raises(openai.BadRequestError) as refused:
            list(say(client, "narrow", long, stream=True)) if stream else say(client, "narrow", long)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        assert "reads 96" in str(refused.value)
        went_on = say(client, "wide", long)
        assert went_on.model == "wide"
        assert went_on.kvlingo["native_tokens"] > 60


# --- whose cache it is -----------------------------------------------------------------------------------------------


def test_a_conversation_that_is_pinned_is_apart_from_all_others(client: openai.OpenAI) -> None:
    messages = [user(tiny.text(20, seed=21))]

    def cached(name: str | None) -> tuple[int, int]:
        headers = {} if name is None else {"X-Conversation": name}
        usage = say(client, "a", messages, extra_headers=headers).usage
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens

    assert cached("one")[0] == 0
    assert cached("two")[0] == 0
    assert cached(None)[0] < 20  # what other tests' conversations begin with too
    for name in ("one", "two", None):
        held, tokens = cached(name)
        assert held == tokens - 1


def test_two_keys_share_nothing_and_no_key_or_word_is_logged(tmp_path: Path) -> None:
    """The second one's answer says that all was read, as if nobody had asked before; so does the way back to the other model."""
    file = tmp_path / "keys"
    file.write_text(f"alice: {digest_of(ALICE)}\nbob: {digest_of(BOB)}\n")
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    messages = [user(f"{CODEWORD} {tiny.text(20, seed=31)}")]
    try:
        with twin_engine(letters_model()) as (engine, _), serving(engine, Settings(keys=file)) as served:
            facts = []
            for key in (ALICE, BOB):
                with client_of(served.url, key) as one:
                    facts += [say(one, model, messages).kvlingo for model in "ab"]
            with client_of(served.url, "sk-nobody") as nobody, pytest.raises(openai.AuthenticationError):
                say(nobody, "a", messages)
    finally:
        LOG.removeHandler(handler)
    kinds = ("native_tokens", "translated_tokens", "recomputed_tokens")
    first, second = facts[:2], facts[2:]
    assert [[told[kind] for kind in kinds] for told in first] == [[told[kind] for kind in kinds] for told in second]
    assert first[0]["native_tokens"] == first[0]["translated_tokens"] == 0
    assert first[1]["translated_tokens"] > 0
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert {line.get("tenant") for line in lines if line["event"] == "request"} >= {"alice", "bob"}
    for secret in (CODEWORD, ALICE, BOB, "sk-nobody", digest_of(ALICE)):
        assert secret not in written.getvalue()


def test_every_key_is_compared_in_constant_time_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {digest_of(f"key {i}"): f"t{i}" for i in range(5)}
    real, compared = keys_module.hmac.compare_digest, list[bytes]()

    def noted(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", noted)
    for header, whose in (("Bearer key 0", "t0"), ("Bearer key 4", "t4"), ("Bearer nobody", None), (None, None)):
        compared.clear()
        assert Keys(names).tenant(header) == whose
        assert compared == [digest.encode() for digest in names]


# --- cut off, and gone on with ---------------------------------------------------------------------------------------


def test_answers_that_were_cut_off_are_gone_on_with_as_by_a_cold_model() -> None:
    """The client keeps what it heard; the model had said more by then. Then again, elsewhere, and with another model."""
    rng = random.Random(4)
    with twin_engine(part_tokens=8) as (engine, lm):

        async def heard(messages: list[Message], model: str, pieces: int) -> str:
            events, said = engine.run(request_for(lm, model, messages, count=60)), ""
            async for event in events:
                if isinstance(event, Piece):
                    said, pieces = said + event.text, pieces - 1
                if pieces <= 0:
                    break
            await events.aclose()  # type: ignore[attr-defined]
            return said

        messages: list[Message] = [user(tiny.text(15, seed=1))]
        for turn in range(8):
            said = within(heard(messages, rng.choice("ab"), rng.randint(1, 9)))
            kept = said[: rng.randint(1, len(said))]
            messages = [*messages, assistant(kept), user(f"go on {turn}")]
            for model in rng.sample("ab", 2):
                (found,) = ask(engine, request_for(lm, model, messages))
                assert found.ids == cold_ids(lm, messages)
            if turn == 4:
                messages = messages[:3]
        assert engine.stats()["not_kept"] == engine.stats()["failed"] == 0
