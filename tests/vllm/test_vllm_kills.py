"""Processes that die at the worst moment. These tests come last: starting one again takes a while."""

from __future__ import annotations

import contextlib
import threading
import time

from tests.vllm.conftest import Fleet
from tests.vllm.test_vllm_faults import SAME, file_of, kept, refused, wait_until
from tests.vllm.test_vllm_gateway import client_of, close, conversation, gateway_of, openai, reach, say


def test_a_consumer_that_is_killed_while_it_loads(fleet: Fleet) -> None:
    ids, key, own = kept(fleet, 242)
    target = fleet.get("target")
    fleet.set_faults(data=60)

    def ask() -> None:
        with contextlib.suppress(OSError):
            target.complete(ids, load=key)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(1.5)
    target.kill()
    thread.join(30)
    fleet.running.pop("target")
    fleet.set_faults()
    for name in ("sync", "target"):  # another one takes over; the one that died is started again
        again = fleet.get(name).complete(ids, load=key)
        assert again.told["status"] == "applied"
        assert again.far_from(own) <= SAME


def test_a_server_behind_the_gateway_that_is_killed_in_the_middle_of_a_switch(fleet: Fleet) -> None:
    """Its client gets an error that OpenAI's client knows; the conversation goes on with the other model, which has it still."""
    fleet.both("source", "target")
    with gateway_of(fleet) as gateway:
        client, messages, errors = client_of(gateway), conversation("killed"), []
        text, _, _ = say(client, "source", messages)
        turn = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        reach(fleet, gateway, turn)  # it is kept by then
        fleet.set_faults(data=60)

        def ask() -> None:
            try:
                say(client, "target", turn)
            except openai.APIStatusError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(1.5)
        fleet.running.pop("target").kill()
        thread.join(30)
        fleet.set_faults()
        (error,) = errors
        assert error.status_code in (502, 503)
        assert error.response.json()["error"]["message"]
        went_on = say(client, "source", turn)
        assert went_on[2]["native_tokens"] > 640
        assert close(went_on[1], say(client, "source", turn, mode="reprefill")[1])


def test_a_producer_that_is_killed_while_it_keeps(fleet: Fleet) -> None:
    ids, _, own = kept(fleet, 241)
    fleet.get("sync")
    source = fleet.get("source")
    fleet.set_faults(between=60)
    key = source.complete(ids, save=True).told["id"]
    wait_until(file_of(fleet, key, "safetensors").exists)
    source.kill()
    fleet.running.pop("source")
    fleet.set_faults()
    assert not file_of(fleet, key, "json").exists()
    refused(fleet, ids, key, own, "unknown", name="sync")
