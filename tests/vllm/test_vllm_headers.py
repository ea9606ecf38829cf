"""semantic-router's headers through real servers: what is asked for in them, and the status in the head of the answer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.entries import new_id
from kvlingo.serve.external.servers import Server
from tests.vllm.conftest import MAPPER, Fleet, wait_until

STATUS = "x-vsr-kv-transfer-status"


def ask(server: Server, headers: dict[str, str], path: str = "/v1/completions", **body: Any) -> tuple[str | None, str]:
    """Return the status in an answer's head, and its body."""
    data = json.dumps({"model": server.model, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **body}).encode()
    headers = {"Content-Type": "application/json", **headers}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=120) as response:
        return response.headers.get(STATUS), response.read().decode()


@pytest.fixture(scope="module")
def kept(fleet: Fleet) -> tuple[list[int], str]:
    """Return a prompt and the id of its kept cache."""
    ids = prompt(300, 601)
    key = fleet.get("source").complete(ids, save=True).told["id"]
    wait_until(lambda: bool(fleet.store.manifests(key)))
    return ids, key


def text_of(answer: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(answer)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(each)["choices"][0]["text"] for each in events)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wish", "status"),
    [
        ({}, "applied"),
        ({"x-vsr-kv-mapper-id": "translator"}, "applied"),
        ({"x-vsr-kv-mapper-id": "another"}, "unsupported"),
        ({"x-vsr-kv-mapper-id": MAPPER}, "unsupported"),
        ({"x-vsr-kv-cache-id": "f" * 32}, "fallback_reprefill"),
        ({"x-vsr-kv-cache-id": "session-7/of/somebody"}, "fallback_reprefill"),
    ],
)
def test_what_came_of_it_is_in_the_head_and_the_answer_is_the_model_s_own(
    fleet: Fleet, kept: tuple[list[int], str], stream: bool, wish: dict[str, str], status: str
) -> None:
    target, (ids, key) = fleet.get("target"), kept
    headers = {"x-vsr-kv-cache-id": key, "x-vsr-kv-source-pod": "pod-1:9000", **wish}
    said, answer = ask(target, headers, prompt=ids, stream=stream)
    assert said == status
    none, own = ask(target, {}, prompt=ids, stream=stream)
    assert none is None
    assert text_of(answer, stream) == text_of(own, stream)


def test_a_mapper_s_own_id_chooses_it(fleet: Fleet, kept: tuple[list[int], str]) -> None:
    """The id of a mapper that was imported, whose folder has another name here."""
    ids, key = kept
    headers = {"x-vsr-kv-cache-id": fleet.as_strangers(key), "x-vsr-kv-mapper-id": MAPPER}
    assert ask(fleet.get("target"), headers, prompt=ids)[0] == "applied"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(fleet: Fleet, stream: bool) -> None:
    source, target = fleet.get("source"), fleet.get("target")
    messages = [{"role": "user", "content": "what was read by one model is not read again by the other. " * 6}]
    asked = {"messages": messages, "kv_transfer_params": {"kvlingo": {"save": True}}}
    reply = source.post("/v1/chat/completions", {"model": source.model, "max_tokens": 1, **asked})
    headers = {"x-vsr-kv-cache-id": reply["kv_transfer_params"]["kvlingo"]["id"]}
    assert ask(target, headers, "/v1/chat/completions", messages=messages, stream=stream)[0] == "applied"


def test_what_no_connector_is_asked_about_is_unsupported_and_no_answer_has_no_status(fleet: Fleet) -> None:
    target, headers = fleet.get("target"), {"x-vsr-kv-cache-id": new_id()}
    assert ask(target, headers, "/tokenize", prompt="x")[0] == "unsupported"
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(target, headers, prompt=[1, 2], max_tokens=-1)
    with refused.value as answer:
        assert (answer.code, answer.headers.get(STATUS)) == (400, None)
