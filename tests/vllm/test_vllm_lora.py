"""Adapters: what was read with one is never used without it, nor with another one, nor the other way round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.entries import parse
from kvlingo.serve.external.servers import Answer
from tests.vllm.conftest import ADAPTERS, Fleet, wait_until

SAME = 1e-4
SEEN = 1e-2
ONE, TWO = ADAPTERS


def alone(fleet: Fleet, ids: list[int], model: str) -> Answer:
    """Return what a model, or an adapter on it, says of a prompt where nothing was read before."""
    answer = fleet.get("sync").complete(ids, model=model, salt=f"alone {model}")
    assert answer.cached == 0
    return answer


def unsupported(answer: Answer) -> None:
    assert answer.told["status"] == "unsupported", answer.told
    assert answer.told["reason"] == "lora"
    assert answer.told["prompt"]["translated"] == 0


def test_adapters_change_what_is_said(fleet: Fleet) -> None:
    """The control: without a difference nothing below could fail."""
    ids = prompt(300, 61)
    answers = [alone(fleet, ids, name) for name in ("model", ONE, TWO)]
    assert all(a.far_from(b) > SEEN for i, a in enumerate(answers) for b in answers[:i])


@pytest.mark.parametrize("model", ["model", ONE, TWO])
def test_what_was_read_with_an_adapter_serves_nobody(fleet: Fleet, model: str) -> None:
    """The same cache without the adapter's name on it would be taken: it is the name that is heeded."""
    ids, sync = prompt(300, 62), fleet.get("sync")
    key = sync.complete(ids, model=ONE, save=True).told["id"]
    wait_until(lambda: bool(fleet.store.manifests(key)))
    assert parse(fleet.store.manifests(key)[0], key).lora == ONE
    answer = sync.complete(ids, model=model, load=fleet.as_strangers(key), salt=None)
    unsupported(answer)
    assert answer.far_from(alone(fleet, ids, model)) <= SAME
    nameless = fleet.relabel(fleet.as_strangers(key), lambda entry: replace(entry, lora=None))
    assert model != "model" or sync.complete(ids, load=nameless).told["status"] == "applied"


@pytest.mark.parametrize("model", ADAPTERS)
def test_an_adapter_goes_on_from_nobody_s_cache(fleet: Fleet, model: str) -> None:
    ids, sync = prompt(300, 63), fleet.get("sync")
    key = fleet.get("source").complete(ids, save=True).told["id"]
    answer = sync.complete(ids, model=model, load=key)
    unsupported(answer)
    assert answer.far_from(alone(fleet, ids, model)) <= SAME
    assert sync.complete(ids, load=key).told["status"] == "applied"


def test_a_translation_is_not_found_by_adapters_in_the_prefix_cache(fleet: Fleet) -> None:
    ids, sync = prompt(520, 64), fleet.get("sync")
    key = fleet.as_strangers(fleet.get("source").complete(ids, save=True).told["id"])
    assert sync.complete(ids, load=key).told["status"] == "applied"
    for model in ("model", *ADAPTERS):
        answer = sync.complete(ids, model=model)
        assert answer.cached == 0
        assert answer.far_from(alone(fleet, ids, model)) <= SAME
