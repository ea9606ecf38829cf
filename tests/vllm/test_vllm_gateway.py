"""The gateway before two real servers: a conversation changes models, and what is answered and told is what it should be."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvlingo.serve.external.entries import parse
from kvlingo.serve.loading import build_engine
from kvlingo.serve.remote import RemoteEngine
from kvlingo.serve.settings import Settings
from tests.fake_engine import Serving, serving
from tests.vllm.conftest import Fleet, wait_until
from tests.vllm.test_vllm_twin import SAME, counted

openai = pytest.importorskip("openai", reason="the official client is not installed")

Messages = list[dict[str, str]]
COUNT = 12


@contextmanager
def gateway_of(fleet: Fleet) -> Iterator[Serving[RemoteEngine]]:
    """Serve both models through one gateway."""
    urls = [fleet.get(name).url for name in ("source", "target")]
    settings = Settings(engine=f"vllm={','.join(urls)}")
    engine = build_engine(settings, lambda _: None)
    assert isinstance(engine, RemoteEngine)
    with serving(engine, settings) as served:
        yield served
        served.server.handle_exit(signal.SIGTERM, None)  # it closes its connections to the servers, too
        wait_until(lambda: not served.thread.is_alive())


def client_of(gateway: Serving[RemoteEngine]) -> Any:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def gateway(fleet: Fleet) -> Iterator[Serving[RemoteEngine]]:
    with gateway_of(fleet) as served:
        yield served


@pytest.fixture(scope="module")
def client(gateway: Serving[RemoteEngine]) -> Any:
    return client_of(gateway)


def say(client: Any, model: str, messages: Messages, *, stream: bool = False, mode: str = "auto", **more: Any) -> Any:
    """Return text, tokens with their log-probabilities, and what is told."""
    asked = {"model": model, "messages": messages, "max_tokens": COUNT, "temperature": 0, "logprobs": True, **more}
    asked["extra_body"] = {"kvlingo": {"mode": mode}}
    if not stream:
        reply = client.chat.completions.create(**asked)
        choice = reply.choices[0]
        return choice.message.content, tokens(choice.logprobs), reply.model_extra["kvlingo"]
    chunks = list(client.chat.completions.create(stream=True, **asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    said = [token for chunk in chunks for token in tokens(chunk.choices[0].logprobs)]
    return text, said, chunks[-1].model_extra["kvlingo"]


def tokens(logprobs: Any) -> list[tuple[str, float]]:
    return [(token.token, token.logprob) for token in (logprobs.content or [])] if logprobs else []


def close(one: list[tuple[str, float]], other: list[tuple[str, float]]) -> bool:
    """Tell whether two answers have the same tokens, with the same log-probabilities but for rounding."""
    alike = [a == b and abs(x - y) <= SAME for (a, x), (b, y) in zip(one, other, strict=True)]
    return len(one) == COUNT and all(alike)


def conversation(seed: str) -> Messages:
    return [
        {"role": "user", "content": f"{seed}: " + "what was read by one model is not read again by the other. " * 14}
    ]


def reach(fleet: Fleet, gateway: Serving[RemoteEngine], messages: Messages) -> tuple[int, int]:
    """Return how many tokens the target's prompt has, and how many first ones are those that the source has kept."""
    (record,) = [r for r in gateway.engine._ledger._records[""] if r.model == "source" and r.prompt == (messages[0],)]
    assert record.key is not None
    wait_until(lambda: bool(fleet.store.manifests(str(record.key))))
    entry = parse(fleet.store.manifests(record.key)[0], record.key)
    ids = fleet.get("target").post("/tokenize", {"model": "target", "messages": messages})["tokens"]
    return len(ids), next(i for i, (a, b) in enumerate(zip(entry.ids, ids, strict=False)) if a != b)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_changes_models_and_nobody_could_tell(
    fleet: Fleet, gateway: Serving[RemoteEngine], client: Any, stream: bool
) -> None:
    """The twin's answer after the switch is its own cold one; the cold one finds nothing of the hand-over."""
    messages, target = conversation(f"stream {stream}"), fleet.get("target")
    text, _, told = say(client, "source", messages, stream=stream)
    assert (told["native_tokens"], told["translated_tokens"], told["source"]) == (0, 0, None)
    turn = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    total, kept = reach(fleet, gateway, turn)
    assert total > kept > 700
    before = counted(target)
    switched = say(client, "target", turn, stream=stream)
    wait_until(lambda: sum(counted(target).values()) >= sum(before.values()) + total)
    after = counted(target)
    assert switched[2] | {"ttft_ms": 0, "queue_ms": 0} == {
        "model": "target",
        "native_tokens": 0,
        "translated_tokens": kept - 1,
        "recomputed_tokens": total - kept + 1,
        "hops": 1,
        "source": "source",
        "fallback": None,
        "switched_from": "source",
        "reread": None,
        "ttft_ms": 0,
        "queue_ms": 0,
    }
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == kept
    assert after["local_compute"] - before["local_compute"] == total - kept
    cold = say(client, "target", turn, stream=stream, mode="reprefill")
    assert (cold[2]["native_tokens"], cold[2]["recomputed_tokens"], cold[2]["hops"]) == (0, total, 0)
    assert close(switched[1], cold[1])
    later = [*turn, {"role": "assistant", "content": switched[0]}, {"role": "user", "content": "And then?"}]
    gone_on = say(client, "target", later, stream=not stream, seed=1)
    assert gone_on[2]["fallback"] is None
    assert gone_on[2]["native_tokens"] >= 640
    assert close(gone_on[1], say(client, "target", later, mode="reprefill")[1])


def test_stop_texts_and_a_client_that_leaves_keep_what_was_read(
    fleet: Fleet, gateway: Serving[RemoteEngine], client: Any
) -> None:
    """Both end a request inside vLLM before it has ended by itself; it is kept under the id that the gateway drew."""
    for seed in ("stop", "leave"):
        messages = conversation(seed)
        if seed == "stop":
            said = say(client, "source", messages)[0]
            text = say(client, "source", messages, stop=[said[3]])[0]
            assert said.startswith(text)
            assert len(text) <= 3
        else:
            stream = client.chat.completions.create(model="source", messages=messages, max_tokens=900, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk, _ in zip(stream, range(4), strict=False))
            stream.close()
            wait_until(lambda: fleet.get("source").metric("vllm:num_requests_running") == 0)
            wait_until(lambda: gateway.engine.stats()["running"] == 0)
        turn = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        told = say(client, "target", turn, mode="translate")[2]
        assert told["fallback"] is None
        assert told["translated_tokens"] > 700


def test_what_the_server_refuses_is_told_and_the_answer_is_the_model_s_own(
    fleet: Fleet, gateway: Serving[RemoteEngine], client: Any
) -> None:
    messages = conversation("lost")
    text = say(client, "source", messages)[0]
    turn = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    reach(fleet, gateway, turn)  # it is kept by now
    fleet.set_faults(data="down")
    told = say(client, "target", turn, stream=True)
    fleet.set_faults()
    assert told[2]["fallback"].startswith("store_")
    assert told[2]["translated_tokens"] == 0
    assert close(told[1], say(client, "target", turn, mode="reprefill")[1])


def test_models_readiness_and_fields_that_no_client_may_send(gateway: Serving[RemoteEngine], client: Any) -> None:
    assert sorted(model.id for model in client.models.list()) == ["source", "target"]
    extra = {"kv_transfer_params": {"kvlingo": {"load": "0" * 32}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="target", messages=conversation("x"), extra_body=extra)
    assert caught.value.param == "kv_transfer_params"
