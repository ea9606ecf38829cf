"""Whatever goes wrong: the answer is the model's own, the client is told, no request is lost, and nothing is tried for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.entries import new_id
from kvlingo.serve.external.servers import Answer, Server
from tests.vllm.conftest import LOAD_SECONDS, LOOKUP_SECONDS, Fleet, wait_until

SAME = 1e-4
PATIENCE = LOOKUP_SECONDS + LOAD_SECONDS + 20  # seconds; a busy machine may take long, for ever is longer


@pytest.fixture(autouse=True, scope="module")
def _ahead(fleet: Fleet) -> None:
    fleet.begin("sync")


def kept(fleet: Fleet, seed: int, tokens: int = 400, **more: object) -> tuple[list[int], str, Answer]:
    """Return a prompt, the id of its kept cache, and what the model says by itself."""
    ids = prompt(tokens, seed)
    answer = fleet.get("source").complete(ids, save=True, **more)  # type: ignore[arg-type]
    wait_until(lambda: bool(fleet.store.manifests(answer.told["id"])))
    return ids, answer.told["id"], answer


def refused(
    fleet: Fleet, ids: list[int], key: str, own: Answer, *reasons: str, name: str = "target", **more: object
) -> Answer:
    """Ask to go on from a kept cache that can't be used; check the answer, what is told and what is counted."""
    target = fleet.get(name)
    before = counted(target, reasons)
    started = time.monotonic()
    answer = target.complete(ids, load=key, **more)  # type: ignore[arg-type]
    assert time.monotonic() - started < PATIENCE
    assert answer.far_from(own) <= SAME
    assert answer.told["reason"] in reasons, answer.told
    assert answer.told["status"] == "fallback_reprefill"
    assert answer.told["prompt"]["translated"] == 0
    assert answer.told["why"]
    wait_until(lambda: counted(target, reasons) > before)
    assert counted(target, reasons) == before + 1
    return answer


def counted(server: Server, reasons: Sequence[str]) -> float:
    """Return how often a server has refused to use a cache for these reasons."""
    return sum(server.metric("vllm:kvlingo_total", what=f"refused_{reason}") for reason in reasons)


def file_of(fleet: Fleet, key: str, kind: str) -> Path:
    return fleet.store.folder / f"{key}.0.{kind}"


# --- entries ---------------------------------------------------------------------------------------------------------


def test_a_deleted_entry(fleet: Fleet) -> None:
    ids, key, own = kept(fleet, 201)
    fleet.store.delete(key)
    refused(fleet, ids, key, own, "unknown")


@pytest.mark.parametrize("name", ["target", "sync"])
def test_an_entry_that_is_deleted_between_the_look_and_the_load(fleet: Fleet, name: str) -> None:
    ids, key, own = kept(fleet, 202)
    file_of(fleet, key, "safetensors").unlink()
    refused(fleet, ids, key, own, "gone", name=name)
    assert fleet.get(name).complete(ids).far_from(own) <= SAME


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_a_cut_entry(fleet: Fleet, kind: str) -> None:
    ids, key, own = kept(fleet, 203)
    file = file_of(fleet, key, kind)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(fleet, ids, key, own, "corrupt")


@pytest.mark.parametrize(("kind", "name"), [("json", "target"), ("safetensors", "target"), ("safetensors", "sync")])
def test_a_flipped_bit(fleet: Fleet, kind: str, name: str) -> None:
    ids, key, own = kept(fleet, 204)
    file = file_of(fleet, key, kind)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refused(fleet, ids, key, own, "corrupt", name=name)


@pytest.mark.parametrize("name", ["target", "sync"])
def test_a_fault_on_the_next_turn(fleet: Fleet, name: str) -> None:
    """What the first turn's wrong translation has left in the prefix cache is not used either."""
    ids, key, _ = kept(fleet, 207)
    wrong = fleet.as_strangers(key)
    assert fleet.get(name).complete(ids, load=wrong).told["status"] == "applied"
    file_of(fleet, wrong, "safetensors").write_bytes(b"")
    later = [*ids, *prompt(200, 208)[1:]]
    refused(fleet, later, wrong, fleet.get("source").complete(later), "corrupt", name=name)


def test_the_same_request_works_once_the_entry_is_whole_again(fleet: Fleet) -> None:
    """A failure belongs to its request: it is not held against the next one."""
    ids, key, own = kept(fleet, 205)
    file = file_of(fleet, key, "safetensors")
    whole = file.read_bytes()
    file.write_bytes(b"")
    refused(fleet, ids, key, own, "corrupt")
    file.write_bytes(whole)
    again = fleet.get("target").complete(ids, load=key)
    assert again.told["status"] == "applied"
    assert again.far_from(own) <= SAME


def test_an_entry_of_another_source(fleet: Fleet) -> None:
    ids, key, own = kept(fleet, 206)
    other = fleet.relabel(key, lambda entry: replace(entry, fingerprint="0" * 64))
    answer = fleet.get("target").complete(ids, load=other)
    assert answer.told["status"] == "unsupported"
    assert answer.told["reason"] == "other_model"
    assert answer.far_from(own) <= SAME


# --- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "name"), [("manifests", "target"), ("data", "target"), ("data", "sync")])
def test_a_store_that_is_down(fleet: Fleet, what: str, name: str) -> None:
    ids, key, own = kept(fleet, 210)
    fleet.set_faults(**{what: "down"})
    refused(fleet, ids, key, own, "store_down", name=name)
    fleet.set_faults()
    assert fleet.get(name).complete(ids, load=key).told["status"] == "applied"


@pytest.mark.parametrize("what", ["manifests", "data"])
def test_a_store_that_is_slow(fleet: Fleet, what: str) -> None:
    """A request waits so long and no longer, and others are answered meanwhile."""
    ids, key, own = kept(fleet, 211)
    others, _, their_own = kept(fleet, 212)
    fleet.set_faults(**{what: LOAD_SECONDS + 6})
    told: list[Answer] = []
    thread = threading.Thread(target=lambda: told.append(refused(fleet, ids, key, own, "store_slow")))
    thread.start()
    time.sleep(0.5)
    meanwhile = [fleet.get("target").complete(others) for _ in range(3)]
    assert what == "manifests" or thread.is_alive(), "others have waited for it"
    thread.join(PATIENCE)
    assert len(told) == 1
    assert all(answer.far_from(their_own) <= SAME for answer in meanwhile)
    fleet.set_faults()
    time.sleep(7)
    again = fleet.get("target").complete(ids, load=key)
    assert again.told["status"] == "applied"
    assert again.far_from(own) <= SAME


@pytest.mark.parametrize("what", ["manifests", "data"])
def test_a_slow_store_and_loading_within_a_step(fleet: Fleet, what: str) -> None:
    """A look into it holds nobody; a load holds the whole engine, for `load_seconds` and no longer."""
    ids, key, own = kept(fleet, 215)
    others, _, their_own = kept(fleet, 216)
    sync = fleet.get("sync")
    fleet.set_faults(**{what: LOAD_SECONDS + 6})
    told: list[Answer] = []
    thread = threading.Thread(target=lambda: told.append(refused(fleet, ids, key, own, "store_slow", name="sync")))
    thread.start()
    time.sleep(1)
    started = time.monotonic()
    meanwhile = sync.complete(others, count=6)
    held = time.monotonic() - started
    thread.join(PATIENCE)
    assert len(told) == 1
    assert meanwhile.far_from(their_own) <= SAME
    if what == "data":
        assert LOAD_SECONDS / 2 < held < LOAD_SECONDS + 8, "docs/vllm.md says that the others wait for it"
    fleet.set_faults()
    time.sleep(7)
    again = sync.complete(ids, load=key)
    assert again.told["status"] == "applied"
    assert again.far_from(own) <= SAME


def test_a_store_that_is_down_when_it_is_kept(fleet: Fleet) -> None:
    source = fleet.get("source")
    fleet.set_faults(put="down")
    before = _failed(source)
    ids = prompt(300, 213)
    answer = source.complete(ids, save=True)
    wait_until(lambda: source.complete(prompt(20)).cached >= 0 and _failed(source) > before)
    fleet.set_faults()
    assert source.complete(ids).far_from(answer) <= SAME
    refused(fleet, ids, answer.told["id"], answer, "unknown")


def _failed(source: Server) -> float:
    return source.metric("vllm:kvlingo_total", what="save_failed_store_down")


def test_one_that_is_still_being_kept_is_waited_for(fleet: Fleet) -> None:
    """The client has the id before the cache is put away."""
    fleet.get("target")
    fleet.set_faults(put=LOOKUP_SECONDS / 3)
    ids = prompt(300, 214)
    answer = fleet.get("source").complete(ids, save=True)
    handed = fleet.get("target").complete(ids, load=answer.told["id"])
    assert handed.told["status"] == "applied", handed.told
    assert handed.far_from(answer) <= SAME


# --- whose it is -----------------------------------------------------------------------------------------------------


def test_another_tenant_s_id(fleet: Fleet) -> None:
    ids, key, own = kept(fleet, 220, salt="alice")
    assert fleet.get("target").complete(ids, load=key, salt="alice").told["status"] == "applied"
    refused(fleet, ids, key, own, "unknown", salt="mallory")
    refused(fleet, ids, key, own, "unknown")


def test_everybody_s_id_is_not_a_tenant_s(fleet: Fleet) -> None:
    ids, key, own = kept(fleet, 221)
    refused(fleet, ids, key, own, "unknown", salt="mallory")


def test_a_guessed_id(fleet: Fleet) -> None:
    ids, _, own = kept(fleet, 222)
    refused(fleet, ids, new_id(), own, "unknown")


@pytest.mark.parametrize(
    "form", ["{folder}/{key}.0", "../store/{key}", "{key}.0", "./{key}", "file:{key}", "{key}\0", "*"]
)
def test_a_path_as_an_id(fleet: Fleet, form: str) -> None:
    ids, key, own = kept(fleet, 223)
    refused(fleet, ids, form.format(folder=fleet.store.folder, key=key), own, "bad_id")


def test_a_replay_after_expiry(fleet: Fleet) -> None:
    ids, key, own = kept(fleet, 224)
    old = fleet.relabel(key, lambda entry: replace(entry, expires=time.time() - 1))
    refused(fleet, ids, old, own, "expired")


def test_what_is_told_holds_nothing_of_the_prompt_and_no_place(fleet: Fleet) -> None:
    ids, key, own = kept(fleet, 225)
    for told in (own.told, fleet.get("target").complete(ids, load=key).told):
        assert str(fleet.place) not in str(told)
        assert "ids" not in told


# --- what can't be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"file": "x"},
        {"load": "a" * 32, "tail": 3},
        {"source_contents": [[1]]},
        {"load": "a" * 32, "source_contents": [[0, float("inf")]]},
    ],
)
def test_a_request_that_makes_no_sense(fleet: Fleet, asked: dict[str, object]) -> None:
    ids, _, own = kept(fleet, 230)
    answer = fleet.get("target").complete(ids, asked=asked)
    assert answer.told["status"] == "unsupported"
    assert answer.far_from(own) <= SAME


def test_logprobs_of_the_prompt_need_the_prompt_to_be_read(fleet: Fleet) -> None:
    ids, key, _ = kept(fleet, 231)
    body = {"model": "target", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
    reply = fleet.get("target").post("/v1/completions", body | {"kv_transfer_params": {"kvlingo": {"load": key}}})
    assert reply["kv_transfer_params"]["kvlingo"]["status"] == "unsupported"


# --- requests that go ------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_while_its_cache_is_loaded(fleet: Fleet) -> None:
    ids, key, own = kept(fleet, 240)
    target = fleet.get("target")
    fleet.set_faults(data=2.0)
    with pytest.raises(TimeoutError):
        target.complete(ids, load=key, timeout=1.0)
    fleet.set_faults()
    for _ in range(3):
        assert target.complete(ids, load=key).far_from(own) <= SAME
    wait_until(lambda: target.metric("vllm:num_requests_running") + target.metric("vllm:num_requests_waiting") == 0)
