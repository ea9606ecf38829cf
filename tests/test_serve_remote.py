"""The gateway before vLLM servers that have no model: what they are asked, what is told, and whatever may go wrong with them."""

import json
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from kvlingo.alignment import align
from kvlingo.errors import BadInput
from kvlingo.reading import read_chat, reading_of_ids
from kvlingo.serve import remote, speaking
from kvlingo.serve.external.twins import PIECES, SPECIALS, byte_tokenizer
from kvlingo.serve.keys import digest_of
from kvlingo.serve.ledger import Ledger, Owner, Record, common, marks, plain_text
from kvlingo.serve.loading import build_engine, find_engine
from kvlingo.serve.routing.rules import Calibrated, Rules
from kvlingo.serve.settings import Settings, read_settings
from tests.fake_engine import Serving, serving
from tests.fake_vllm import FakeVllm, Running, Store, running, shared, start

LONG = "All of this was read by the one model before the other one is asked. " * 12
DEFAULT_ABOUT = {"keeps": True, "loads": True, "tells": True, "expires_seconds": 3600.0}
TEXTS: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": LONG}], "max_tokens": 20}


def settings_of(servers: list[Running], **more: Any) -> Settings:
    return Settings(engine="vllm=" + ",".join(server.url for server in servers), **more)


@contextmanager
def gateway(*fakes: FakeVllm, **more: Any) -> Iterator[tuple[list[Running], Serving[Any], httpx.Client]]:
    """Run servers and a gateway before them."""
    with running(*fakes) as servers:
        settings = settings_of(servers, **more)
        with (
            serving(build_engine(settings, lambda _: None), settings) as served,
            httpx.Client(base_url=served.url, timeout=30) as http,
        ):
            yield servers, served, http


def pair(**more: Any) -> tuple[FakeVllm, FakeVllm]:
    store: Store = {}
    return FakeVllm("small", store, **more), FakeVllm("big", store, **more)


def ask(http: httpx.Client, **more: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={**TEXTS, **more})
    assert response.status_code == 200, response.text
    return dict(response.json())


def next_turn(messages: list[dict[str, str]], reply: dict[str, Any], text: str) -> list[dict[str, str]]:
    said = reply["choices"][0]["message"]["content"]
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": text}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def until(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def wish(asked: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (asked.get("kv_transfer_params") or {}).get("kvlingo", {})
    return found


# --- a switch --------------------------------------------------------------------------------------------------------


def test_a_switch_passes_the_cache_id_along_and_tells_the_tokens_right() -> None:
    small, big = pair()
    with gateway(small, big) as (_, _, http):
        first = ask(http)
        prompt = first["usage"]["prompt_tokens"]
        assert first["kvlingo"] | {"ttft_ms": 0} == {
            "model": "small",
            "native_tokens": 0,
            "translated_tokens": 0,
            "recomputed_tokens": prompt,
            "hops": 0,
            "source": None,
            "fallback": None,
            "switched_from": None,
            "reread": None,
            "ttft_ms": 0,
            "queue_ms": 0,
        }
        turn = next_turn(TEXTS["messages"], first, "And now?")
        switched = ask(http, model="big", messages=turn)
        kept = wish(small.asked[0])["save"]
        assert wish(big.asked[0])["load"] == kept
        assert "save" not in wish(big.asked[0])  # what begins with a translation is no source
        told = switched["kvlingo"]
        reach = shared(small.store[kept]["ids"], big.asked[0]["prompt"])
        assert (told["source"], told["hops"], told["fallback"], told["native_tokens"]) == ("small", 1, None, 0)
        assert told["translated_tokens"] == reach > prompt
        assert told["recomputed_tokens"] == len(big.asked[0]["prompt"]) - reach
        assert switched["model"] == "big"
        later = ask(http, model="big", messages=next_turn(turn, switched, "More?"))
        assert wish(big.asked[1])["load"] == kept
        assert later["kvlingo"]["native_tokens"] > told["translated_tokens"]
        assert later["kvlingo"]["hops"] == 1
        assert later["usage"]["prompt_tokens_details"]["cached_tokens"] == later["kvlingo"]["native_tokens"]
        back = ask(http, messages=next_turn(next_turn(turn, switched, "More?"), later, "Back."))
        assert "load" not in wish(small.asked[1])  # a translation is never translated again
        assert back["kvlingo"]["native_tokens"] >= prompt
        assert back["kvlingo"]["hops"] == 0
        figures = http.get("/metrics").text
        assert 'kvlingo_switches_total{kind="translate"} 1.0' in figures
        assert f'kvlingo_prompt_tokens_total{{origin="translated"}} {float(reach)}' in figures
        assert "kvlingo_engine_switches_translated 1.0" in figures


def test_streamed_or_not_the_same_is_said_and_told() -> None:
    small, big = pair()
    with gateway(small, big) as (_, served, http):
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        first = ask(http)
        turn = next_turn(TEXTS["messages"], first, "And now?")
        whole = ask(http, model="big", messages=turn, logprobs=True, top_logprobs=2)
        big.read.clear()
        options: Any = {"include_usage": True}
        chunks = list(
            client.chat.completions.create(
                model="big",
                messages=turn,  # type: ignore[arg-type]
                max_tokens=20,
                stream=True,
                stream_options=options,
                logprobs=True,
                top_logprobs=2,
                extra_body={"kvlingo": {"mode": "translate"}},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole["choices"][0]["message"]["content"]
        assert "\u2028" in text or text  # what looks like the end of a line ends none
        told = chunks[-1].model_extra["kvlingo"]  # type: ignore[index]
        ours = {key: value for key, value in whole["kvlingo"].items() if not key.endswith("_ms")}
        assert {key: told[key] for key in ours} == ours
        tokens = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
        assert [t.token for t in tokens] == [t["token"] for t in whole["choices"][0]["logprobs"]["content"]]
        assert "</s>" not in [t.token for t in tokens]
        assert len(tokens[0].top_logprobs) == 2


def test_a_line_ends_with_a_line_feed_only() -> None:
    fake = FakeVllm(answer="a\u2028b\x85c\x0bd\ne")
    with gateway(fake) as (_, _, http):
        assert ask(http)["choices"][0]["message"]["content"] == "a\u2028b\x85c\x0bd\ne"


@pytest.mark.parametrize("mode", ["reprefill", "auto", "translate"])
def test_modes(mode: str) -> None:
    """`auto` spares short conversations a hand-over, `translate` does not, `reprefill` never makes one."""
    small, big = pair()
    short = [{"role": "user", "content": "Not much was said here, in all."}]
    with gateway(small, big) as (_, _, http):
        for messages, wanted in ((short, mode == "translate"), (TEXTS["messages"], mode != "reprefill")):
            first = ask(http, messages=messages)
            turn = next_turn(messages, first, "And now?")
            told = ask(http, model="big", messages=turn, kvlingo={"mode": mode})["kvlingo"]
            assert (told["translated_tokens"] > 0) == wanted
            assert told["fallback"] is None


def test_a_translation_that_is_asked_for_and_can_t_be_says_why() -> None:
    small, big = pair()
    with gateway(small, big) as (_, _, http):
        told = ask(http, model="big", kvlingo={"mode": "translate"})["kvlingo"]
        assert told["fallback"] == "no model with a translator to big has read more of this conversation"


def test_what_a_connector_refuses_is_read_again_and_told_and_if_it_lasts_not_tried_again() -> None:
    small, big = pair()
    big.refusal = ("unsupported", "other_model", "no translator here reads the model that this cache is of")
    with gateway(small, big) as (_, _, http):
        first = ask(http)
        turn = next_turn(TEXTS["messages"], first, "And now?")
        told = ask(http, model="big", messages=turn)["kvlingo"]
        assert told["fallback"].startswith("other_model: no translator here")
        assert (told["translated_tokens"], told["hops"], told["source"]) == (0, 0, "small")
        assert 'kvlingo_fallbacks_total{reason="other_model"} 1.0' in http.get("/metrics").text
        other = next_turn(TEXTS["messages"], first, "Something else?")
        again = ask(http, model="big", messages=other, kvlingo={"mode": "translate"})["kvlingo"]
        assert again["fallback"].startswith("other_model")
        assert "load" not in wish(big.asked[-1])
        ask(http)
        assert "save" in wish(small.asked[0])
        assert "save" not in wish(small.asked[-1])  # nobody could go on from it


def test_what_is_refused_once_is_tried_again_with_the_next_cache() -> None:
    small, big = pair()
    with gateway(small, big) as (_, _, http):
        first = ask(http)
        small.store.clear()
        turn = next_turn(TEXTS["messages"], first, "And now?")
        told = ask(http, model="big", messages=turn)["kvlingo"]
        assert told["fallback"] == "unknown: no such cache is kept"
        second = ask(http, messages=[{"role": "user", "content": LONG[::-1]}])
        turn = next_turn([{"role": "user", "content": LONG[::-1]}], second, "And now?")
        assert ask(http, model="big", messages=turn)["kvlingo"]["translated_tokens"] > 500


@pytest.mark.parametrize("about", [None, {**DEFAULT_ABOUT, "tells": False}, {**DEFAULT_ABOUT, "loads": False}])
def test_a_server_that_can_t_tell_or_load_is_passed_no_cache(about: dict[str, Any] | None) -> None:
    store: Store = {}
    small, big = FakeVllm("small", store), FakeVllm("big", store, about=about)
    with gateway(small, big) as (_, _, http):
        first = ask(http)
        assert "save" not in wish(small.asked[0])
        turn = next_turn(TEXTS["messages"], first, "And now?")
        told = ask(http, model="big", messages=turn, kvlingo={"mode": "translate"})["kvlingo"]
        assert told["fallback"].startswith("no_connector: the server of big")
        assert "load" not in wish(big.asked[0])


def test_where_nothing_is_told_all_the_same_nothing_passes_for_the_model_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    small, big = pair()
    monkeypatch.setattr(big, "told", lambda body, wish: None)
    monkeypatch.setattr("kvlingo.serve.external.headers.TOLD_SECONDS", 0.02)
    with gateway(small, big) as (_, _, http):
        turn = next_turn(TEXTS["messages"], ask(http), "And now?")
        told = ask(http, model="big", messages=turn)["kvlingo"]
        assert told["fallback"].startswith("untold:")
        assert (told["native_tokens"], told["recomputed_tokens"], told["hops"]) == (0, 1, 1)


# --- other ids and templates -----------------------------------------------------------------------------------------


def tokenizer_of(fake: FakeVllm) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are the fake's."""
    alphabet = {chr(b) for b in range(0x21, 0x7F)} | {chr(b) for b in [*range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    byte_of = {piece: ord(piece) for piece in PIECES if piece in alphabet}
    others = [b for b in range(256) if b not in byte_of.values()]
    byte_of |= {chr(0x100 + i): b for i, b in enumerate(others)}
    order = [*range(len(SPECIALS)), *(2 + (byte_of[piece] + fake.offset) % 256 for piece in PIECES)]
    template = (
        "{% for m in messages %}"
        + fake.heading.replace("\n", "\\n")
        + "{{ m['role'] + '\\n' + m['content'] + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}" + fake.heading + "assistant\n{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(order), bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def test_the_fake_reads_as_its_tokenizer_does() -> None:
    fake = FakeVllm(offset=5)
    messages = [{"role": "user", "content": "grün und user"}]
    ids = fake.ids_of(fake.render({"messages": messages}))
    assert read_chat(tokenizer_of(fake), messages).ids == tuple(ids)


def test_between_other_ids_and_templates_the_contents_are_told_so_that_they_align() -> None:
    """ "user" and "### " stand in messages too: a search for them would find the wrong place."""
    store: Store = {}
    small, big = FakeVllm("small", store), FakeVllm("big", store, offset=7, heading="[turn] ")
    messages = [{"role": "system", "content": "user"}, {"role": "user", "content": f"### user\n{LONG}grün"}]
    with gateway(small, big) as (_, _, http):
        turn = next_turn(messages, ask(http, messages=messages), " user? ")
        ask(http, model="big", messages=turn)
        told = wish(big.asked[0])
        entry = store[told["load"]]
        source = reading_of_ids(tokenizer_of(small), entry["ids"], [tuple(x) for x in told["source_contents"]])
        target = reading_of_ids(tokenizer_of(big), big.asked[0]["prompt"], [tuple(x) for x in told["target_contents"]])
        spelled = [target.stream[a:b].decode() for a, b in target.contents]
        assert spelled == [message["content"] for message in turn]
        theirs = [source.stream[a:b].decode(errors="replace") for a, b in source.contents]
        assert theirs[:2] == spelled[:2]
        assert turn[2]["content"].startswith(theirs[2][:-1])
        alignment = align(source, target).tolist()
        place = big.text_of(big.asked[0]["prompt"]).encode().index(b"All of this")
        assert alignment[place] == small.text_of(entry["ids"]).encode().index(b"All of this")
        assert sum(a >= 0 for a in alignment) > len(LONG)


def test_what_may_quote_the_conversation_is_not_passed_on() -> None:
    small, big = pair()
    big.refusal = ("fallback_reprefill", "text", "content 0 differs between the two readings, near 'my secret'")
    with gateway(small, big) as (_, _, http):
        told = ask(http, model="big", messages=next_turn(TEXTS["messages"], ask(http), "And now?"))["kvlingo"]
        assert told["fallback"] == "text: what the two models have read can't be aligned"


def test_where_contents_can_t_be_found_it_is_read_again_and_told() -> None:
    store: Store = {}
    small, big = FakeVllm("small", store), FakeVllm("big", store, offset=7)
    with gateway(small, big) as (servers, _, http):
        turn = next_turn(TEXTS["messages"], ask(http), "And now?")
        servers[0].stop()
        told = ask(http, model="big", messages=turn)["kvlingo"]
        assert told["fallback"].startswith("text: where the messages are in it can't be found")
        assert told["translated_tokens"] == 0


# --- what servers are asked ------------------------------------------------------------------------------------------


def test_what_is_asked_is_passed_on_with_its_meaning() -> None:
    fake = FakeVllm()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with gateway(fake) as (_, _, http):
        ask(
            http,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            seed=3,
            stop=["x", "yy"],
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            logit_bias={"5": 2.0},
            n=2,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        )
        plain = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": ["x", "yy"], "max_tokens": 20}
        plain |= {
            "presence_penalty": 0.25,
            "frequency_penalty": -0.5,
            "logit_bias": {"5": 2.0},
            "repetition_penalty": 1.0,
        }
        for asked in fake.asked:
            assert {name: asked[name] for name in plain} == plain
            assert json.loads(asked["structured_outputs"]["json"]) == schema
        assert [asked["seed"] for asked in fake.asked] == [3, 4]
        ask(http)
        assert (fake.asked[-1]["top_k"], fake.asked[-1]["temperature"]) == (0, 1.0)  # never the server's own defaults
        assert not {"seed", "logprobs", "logit_bias", "structured_outputs"} & set(fake.asked[-1])


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("kv_transfer_params", {"kvlingo": {"load": "a" * 32}}, "kv_transfer_params"),
        ("cache_salt", "somebody", "cache_salt"),
        ("vllm_xargs", {"kv_transfer_params": 1}, "vllm_xargs"),
        ("kvlingo", {"load": "a" * 32}, "kvlingo.load"),
        ("kvlingo", {"tail": 4}, "kvlingo.tail"),
        ("kvlingo", {"sink": 2}, "kvlingo.sink"),
        ("best_of", 2, "best_of"),
    ],
)
def test_what_no_client_may_ask_is_a_400_that_names_it(field: str, value: Any, param: str) -> None:
    fake = FakeVllm()
    with gateway(fake) as (_, _, http):
        for path, prompt in (("/v1/chat/completions", {}), ("/v1/completions", {"messages": None, "prompt": "x"})):
            body = {key: each for key, each in {**TEXTS, **prompt, field: value}.items() if each is not None}
            assert error_of(http.post(path, json=body), 400)["param"] == param
        assert not fake.asked


def test_headers_of_a_client_reach_no_server() -> None:
    fake = FakeVllm()
    with gateway(fake) as (_, _, http):
        headers = {"x-vsr-kv-cache-id": "a" * 32, "x-kvlingo-tell": "b" * 32, "authorization": "Bearer mine"}
        http.post("/v1/chat/completions", json=TEXTS, headers=headers)
        assert not {"x-vsr-kv-cache-id", "authorization"} & set(fake.asked[0]["headers"])
        assert fake.asked[0]["headers"]["x-kvlingo-tell"] == wish(fake.asked[0])["tell"] != "b" * 32


def test_tools_are_shown_by_the_server_s_template_and_their_calls_read() -> None:
    fake = FakeVllm(answer='<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with gateway(fake) as (_, _, http):
        reply = ask(http, tools=tools, max_tokens=200)
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert '"name": "f"' in fake.text_of(fake.asked[0]["prompt"])
        turn = [*TEXTS["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
        turn.append({"role": "tool", "content": "2", "tool_call_id": call["id"]})
        ask(http, tools=tools, messages=turn)
        assert '"arguments": "{\\"a\\": 1}"' in fake.text_of(fake.asked[-1]["prompt"])
        fake.tools_shown = False
        assert error_of(http.post("/v1/chat/completions", json={**TEXTS, "tools": tools}), 400)["param"] == "tools"
        assert error_of(http.post("/v1/chat/completions", json={**TEXTS, "messages": turn}), 400)["param"] == "messages"


def test_a_text_goes_on_too() -> None:
    small, big = pair()
    with gateway(small, big) as (_, _, http):
        first = http.post("/v1/completions", json={"model": "small", "prompt": LONG, "max_tokens": 9}).json()
        text = LONG + first["choices"][0]["text"] + "more"
        reply = http.post(
            "/v1/completions", json={"model": "big", "prompt": text, "max_tokens": 9, "logprobs": 1}
        ).json()
        assert reply["kvlingo"]["translated_tokens"] > 500
        assert reply["choices"][0]["finish_reason"] == "length"
        assert len(reply["choices"][0]["logprobs"]["tokens"]) == 9


def test_a_stop_text_and_the_end_are_both_stop_and_a_prompt_too_long_is_seen_before() -> None:
    fake = FakeVllm(answer="abcdef", room=1200)
    with gateway(fake) as (_, _, http):
        reply = ask(http, stop="d")
        assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == ("abc", "stop")
        assert ask(http)["choices"][0]["finish_reason"] == "stop"
        ask(http, max_tokens=4000)
        assert fake.asked[-1]["max_tokens"] == 1200 - len(fake.asked[-1]["prompt"])
        count = len(fake.asked)
        error = error_of(http.post("/v1/chat/completions", json={**TEXTS, "messages": TEXTS["messages"] * 2}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert len(fake.asked) == count
        refused = {**TEXTS, "messages": [{"role": "user", "content": "refuse"}]}
        error = error_of(http.post("/v1/chat/completions", json=refused), 400)
        assert "the template wants a user first" in error["message"]


# --- tenants ---------------------------------------------------------------------------------------------------------


def test_one_tenant_never_reaches_what_is_another_s(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {digest_of('sk-a')}\nbob: {digest_of('sk-b')}\n")
    small, big = pair()
    with gateway(small, big, keys=keys) as (_, _, http):
        alice, bob = ({"Authorization": f"Bearer sk-{name}"} for name in "ab")
        http.headers.update(alice)
        first = ask(http)
        turn = next_turn(TEXTS["messages"], first, "And now?")
        http.headers.update(bob)
        told = ask(http, model="big", messages=turn, kvlingo={"mode": "translate"})["kvlingo"]
        assert told["translated_tokens"] == told["native_tokens"] == 0
        assert "load" not in wish(big.asked[0])
        http.headers.update(alice)
        assert ask(http, model="big", messages=turn)["kvlingo"]["translated_tokens"] > 500
        salts = {asked["cache_salt"] for asked in [*small.asked, *big.asked]}
        assert len(salts) == 2
        assert small.asked[0]["cache_salt"] == big.asked[1]["cache_salt"] != big.asked[0]["cache_salt"]
        assert not any(name in salt for name in ("alice", "bob", "sk-") for salt in salts)


def test_a_pinned_conversation_is_found_under_its_name_only() -> None:
    small, big = pair()
    with gateway(small, big) as (_, _, http):
        http.headers["X-Conversation"] = "one"
        turn = next_turn(TEXTS["messages"], ask(http), "And now?")
        http.headers["X-Conversation"] = "two"
        assert ask(http, model="big", messages=turn)["kvlingo"]["translated_tokens"] == 0
        http.headers["X-Conversation"] = "one"
        assert ask(http, model="big", messages=turn)["kvlingo"]["translated_tokens"] > 500


# --- what goes wrong with servers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_is_down_is_a_503_and_the_other_goes_on(stream: bool) -> None:
    small, big = pair()
    with gateway(small, big) as (servers, _, http):
        servers[1].stop()
        response = http.post("/v1/chat/completions", json={**TEXTS, "model": "big", "stream": stream})
        assert error_of(response, 503)["code"] == "model_unavailable"
        assert int(response.headers["retry-after"]) >= 1
        assert ask(http)["model"] == "small"
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["small"]
        assert http.get("/readyz").json() == {"status": "ready", "away": ["big"]}
        servers[0].stop()
        assert error_of(http.get("/readyz"), 503)["code"] == "model_unavailable"
        assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("status", "error", "wanted", "param"),
    [
        (429, {}, 429, None),
        (503, {}, 503, None),
        (500, {"message": "secret"}, 502, None),
        (400, {"message": "secret", "param": "logit_bias"}, 400, "logit_bias"),
        (400, {"message": "secret", "param": "structured_outputs"}, 400, "response_format"),
        (400, {"message": "secret", "param": None}, 400, "messages"),
        (401, {}, 502, None),
        (418, {}, 502, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_a_server_are_openai_s_and_quote_nothing(
    status: int, error: dict[str, Any], wanted: int, param: str | None, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speaking, "FIRST_BYTE_S", 30.0)  # on a busy machine an error comes after a stream's head else
    fake = FakeVllm(status=status, error=error, headers={"Retry-After": "7"})
    with gateway(fake) as (_, _, http):
        response = http.post("/v1/chat/completions", json={**TEXTS, "stream": stream})
        told = error_of(response, wanted)
        assert told["param"] == param
        assert "secret" not in response.text
        assert response.headers.get("retry-after") == ("7" if wanted in (429, 503) else None)


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    fake = FakeVllm(break_after=3, answer="abcdef")
    with gateway(fake) as (_, _, http):
        assert error_of(http.post("/v1/chat/completions", json=TEXTS), 502)["code"] == "model_broken"
        text = http.post("/v1/chat/completions", json={**TEXTS, "stream": True}).text
        assert '"content":"c"' in text
        assert '"code":"model_broken"' in text
        assert "[DONE]" not in text


def test_a_client_that_leaves_ends_the_request_over_there() -> None:
    fake = FakeVllm(answer="word " * 500, token_s=0.02)
    with gateway(fake) as (_, served, http):
        with http.stream("POST", "/v1/chat/completions", json={**TEXTS, "max_tokens": 400, "stream": True}) as response:
            next(response.iter_raw())
        until(lambda: fake.aborted == 1)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json={**TEXTS, "max_tokens": 400}, timeout=0.5)
        until(lambda: fake.aborted == 2)
        until(lambda: served.engine.stats()["running"] == 0)
        assert served.engine.stats()["cancelled"] == 2


def test_what_a_client_left_is_gone_on_from() -> None:
    small, big = pair(answer="word " * 500)
    small.token_s = 0.02
    with gateway(small, big) as (_, _, http):
        said = ""
        with http.stream("POST", "/v1/chat/completions", json={**TEXTS, "max_tokens": 400, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    said += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if len(said) > 10:
                    break
        until(lambda: small.aborted == 1)
        turn = [*TEXTS["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
        assert ask(http, model="big", messages=turn)["kvlingo"]["translated_tokens"] > len(LONG)


def test_drain_lets_answers_end_and_cuts_what_is_left() -> None:
    fake = FakeVllm(answer="word " * 500, token_s=0.02)
    with gateway(fake, drain_s=0.3) as (_, served, http):
        got: list[str] = []
        body = {**TEXTS, "max_tokens": 400, "stream": True}
        asking = threading.Thread(target=lambda: got.append(http.post("/v1/chat/completions", json=body).text))
        asking.start()
        until(lambda: bool(fake.asked))
        served.server.handle_exit(15, None)
        asking.join(20)
        assert '"code":"shutting_down"' in got[0]
        until(lambda: fake.aborted == 1)


def test_one_tenant_fills_its_own_places_only() -> None:
    fake = FakeVllm(silent=True)
    with gateway(fake, max_rows=1, max_queue=1) as (_, served, http):
        got: list[int] = []

        def post() -> None:
            got.append(httpx.post(f"{served.url}/v1/chat/completions", json=TEXTS, timeout=30).status_code)

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: len(fake.asked) == 2)
        assert error_of(http.post("/v1/chat/completions", json=TEXTS), 429)["code"] == "queue_full"
        fake.silent = False
        for thread in threads:
            thread.join(20)
        assert got == [200, 200]


# --- routers ---------------------------------------------------------------------------------------------------------


def test_routers_work_through_servers_and_go_round_one_that_is_down() -> None:
    small, big = pair()
    with gateway(small, big, router="cascade") as (servers, _, http):
        assert "auto" in [model["id"] for model in http.get("/v1/models").json()["data"]]
        told = ask(http, model="auto")
        assert told["kvlingo"]["routes"][0]["router"] == "cascade"
        assert small.asked[0]["logprobs"] == 0  # the small model's doubt is heard
        servers[0].stop()
        reply = ask(http, model="auto")
        assert reply["model"] == "big"
        assert "the server of small does not answer" in reply["kvlingo"]["routes"][0]["reason"]


def test_threshold_routes_and_an_unknown_pair_is_refused() -> None:
    small, big = pair()
    with gateway(small, big, router="threshold") as (_, _, http):
        assert ask(http, model="auto")["kvlingo"]["routes"][0]["router"] == "threshold"
    with running(FakeVllm("only")) as servers, pytest.raises(BadInput, match="which is not served; there are: only"):
        build_engine(settings_of(servers, router="threshold"), lambda _: None)


# --- the start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"engine": "vllm"}, "give vllm=URL,URL"),
        ({"engine": "sglang=http://x"}, "give vllm=URL,URL"),
        ({"engine": "vllm=ftp://x"}, "give vllm=URL,URL"),
        ({"engine": "vllm="}, "give each server's URL once"),
        ({"engine": "vllm=http://x,http://x/"}, "give each server's URL once"),
        ({"engine": "vllm=http://x", "models": {"a": "b"}}, "^models is for models"),
        ({"engine": "vllm=http://x", "translators": (Path("t"),)}, "^translators is for models"),
        ({"engine": "vllm=http://x", "cache_dir": Path("t")}, "^cache_dir is for models"),
        ({"engine": "vllm=http://x", "heal": True}, "^heal is for models"),
        ({"engine": "vllm=http://x", "ahead": True}, "^ahead is for models"),
        ({"engine": "vllm=http://x", "router": "token"}, "^the router token needs both models in this process"),
        ({"engine_key": "k"}, "^engine_key is for --engine"),
    ],
)
def test_settings_that_don_t_go_together_are_refused(more: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        Settings(**more)


def test_the_engine_is_set_by_environment_file_or_flag(tmp_path: Path) -> None:
    file = tmp_path / "kvlingo.toml"
    file.write_text('engine = "vllm=http://file:1, http://file:2/"\nengine_salt = "grain"\n')
    settings, _ = read_settings({}, {}, file)
    assert (settings.engine_urls, settings.engine_salt) == (("http://file:1", "http://file:2"), "grain")
    settings, _ = read_settings({}, {"KVLINGO_ENGINE": "vllm=http://env:1", "KVLINGO_ENGINE_KEY": "k"}, file)
    assert (settings.engine_urls, settings.engine_key) == (("http://env:1",), "k")
    settings, origin = read_settings({"engine": "vllm=http://flag:1"}, {"KVLINGO_ENGINE": "vllm=http://env:1"}, file)
    assert (settings.engine_urls, origin["engine"]) == (("http://flag:1",), "the command line")


def test_secrets_are_not_shown() -> None:
    settings = Settings(engine="vllm=http://x", engine_key="sk-1", engine_salt="grain")
    assert "sk-1" not in repr(settings)
    assert "grain" not in repr(settings)


def test_a_key_of_the_servers_is_sent_and_a_wrong_one_seen_at_the_start() -> None:
    fake = FakeVllm(key="sk-engine")
    with gateway(fake, engine_key="sk-engine") as (_, _, http):
        assert ask(http)["model"] == "small"
    with running(fake) as servers, pytest.raises(BadInput, match="asks for another API key"):
        build_engine(settings_of(servers), lambda _: None)


def test_two_servers_of_one_name_are_refused() -> None:
    with running(FakeVllm(), FakeVllm()) as servers, pytest.raises(BadInput, match="both serve 'small'"):
        build_engine(settings_of(servers), lambda _: None)


def test_figures_that_were_measured_in_one_process_are_refused(tmp_path: Path) -> None:
    switch = Calibrated("small", "big", "f" * 64, "e" * 64, 1, 2, {})
    with pytest.raises(BadInput, match="measured in one process"):
        find_engine(Settings(engine="vllm=http://x"), Rules(switches=(switch,)), lambda _: None)


def test_a_server_that_comes_up_late_is_waited_for_and_one_that_does_not_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "START_LOOK_S", 0.05)
    late = start(FakeVllm())
    url = late.url
    late.stop()
    with pytest.raises(BadInput, match="does not answer; is vLLM up there"):
        remote.find_places([url], None, lambda _: None, wait_s=0.2)


def test_a_server_that_was_started_anew_is_looked_at_again() -> None:
    small, big = pair()
    with gateway(small, big) as (servers, served, http):
        listener = servers[1].listener.getsockname()
        assert next(m for m in served.engine.models() if m.name == "big").max_tokens == 4096
        big.room = 2048
        http.get("/readyz")
        assert next(m for m in served.engine.models() if m.name == "big").max_tokens == 2048
        assert listener


# --- the ledger ------------------------------------------------------------------------------------------------------


def record(text: str, tenant: str = "", model: str = "small", **more: Any) -> Record:
    usual: dict[str, Any] = {"key": "k", "of": None, "ids": array("q"), "prompt_tokens": 0, "prompt": text, "tools": ()}
    return Record(owner=Owner(tenant, None), model=model, text=text, until=100.0, **{**usual, **more})


def test_the_ledger_finds_the_record_that_shares_the_most() -> None:
    ledger = Ledger(1 << 20)
    ledger.put(record("x" * 200))  # both of the next ones go on from it
    one, two = record("x" * 300), record("x" * 200 + "y" * 300)
    ledger.put(one)
    ledger.put(two)
    found = ledger.find(Owner("", None), "small", "own", "x" * 299 + "z", 0.0)
    assert found is not None
    assert (found.record, found.covered) == (one, 299)
    found = ledger.find(Owner("", None), "small", "kept", "x" * 200 + "y" * 100, 0.0)
    assert found is not None
    assert (found.record, found.covered) == (two, 300)
    assert ledger.find(Owner("", None), "small", "handed", "x" * 299, 0.0) is None
    assert ledger.find(Owner("", None), "big", "own", "x" * 299, 0.0) is None
    assert ledger.find(Owner("other", None), "small", "own", "x" * 299, 0.0) is None
    assert ledger.find(Owner("", None), "small", "kept", "x" * 299, 101.0) is None  # it has expired over there
    assert ledger.find(Owner("", None), "small", "own", "x" * 299, 101.0) is not None
    assert len(ledger) == 2
    ledger.put(record("x" * 350, key=None))
    assert len(ledger) == 3  # the one before is still good for a hand-over


def test_the_ledger_is_bounded_and_who_holds_the_most_gives_up_first() -> None:
    ledger = Ledger(10 * record("x" * 300).num_bytes)
    mine = record("m" * 300, "quiet")
    ledger.put(mine)
    for number in range(50):
        ledger.put(record(f"{number:02d}" * 150, "loud"))
        assert ledger.num_bytes <= ledger.max_bytes
    assert ledger.find(Owner("quiet", None), "small", "own", "m" * 300, 0.0) is not None
    assert ledger.find(Owner("loud", None), "small", "own", "00" * 150, 0.0) is None
    assert ledger.find(Owner("loud", None), "small", "own", "49" * 150, 0.0) is not None
    assert len(ledger) == 10
    for each in list(ledger._records["loud"]):
        ledger.drop(each)
        ledger.drop(each)
    ledger.drop(mine)
    assert (len(ledger), ledger.num_bytes, ledger._marks) == (0, 0, {})


def test_marks_and_texts() -> None:
    assert len(list(marks("x" * 15))) == 0
    assert len(list(marks("x" * 64))) == 3
    assert common("abc", "abd") == 2
    assert common("", "x") == 0
    said = plain_text([{"role": "user", "content": "a"}], " b ")
    asked = plain_text(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    )
    assert asked.startswith(said)
    assert plain_text("a", "b") == plain_text("ab")
    assert plain_text([{"role": "user", "content": "a"}]) != plain_text([{"role": "system", "content": "a"}])
    assert replace(record("x"), key=None).kinds == ("own",)
