"""Sliding windows: with vLLM's hybrid cache manager off (every token is kept), on, and in models that slide in every layer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from kvlingo.language_model import read
from kvlingo.manifest import ModelCard
from kvlingo.models import load_model
from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.entries import Entry, describe, new_id, pack, parse, unpack
from kvlingo.serve.external.servers import Answer, Server
from kvlingo.serve.external.twins import WINDOW
from tests.vllm.conftest import Fleet, wait_until

SAME = 1e-4
SEEN = 1e-2
TOKENS = 600  # several windows, and no multiple of a block


@pytest.fixture(autouse=True, scope="module")
def _servers(fleet: Fleet) -> Iterator[None]:
    for name in ("slides", "hybrid", "window"):
        fleet.begin(name)
    yield
    fleet.end(*{"slides", "hybrid", "window"} & fleet.running.keys())


Keep = Callable[[Sequence[int]], str]


@pytest.fixture(params=["slides", "hybrid", "window"])
def sliding(request: pytest.FixtureRequest, fleet: Fleet) -> tuple[Server, Keep]:
    """Return a server with sliding windows, and what keeps a cache for it."""
    name = request.param

    def keep(ids: Sequence[int]) -> str:
        if name == "window":
            return keep_beside(fleet, "window", ids)
        key = fleet.get("slides").complete(ids, save=True, count=1).told["id"]
        wait_until(lambda: bool(fleet.store.manifests(key)))
        return str(key)

    return fleet.get(name), keep


def keep_beside(fleet: Fleet, made: str, ids: Sequence[int]) -> str:
    """Keep what the source has read in this process: as much as no engine with a window in every layer has."""
    lm = load_model(fleet.place / made / "source", device="cpu")
    data, card, now = pack(read(lm, lm.ids(ids))), ModelCard.of(lm), time.time()
    entry = Entry(
        id=new_id(),
        rank=0,
        world=1,
        fingerprint=card.fingerprint,
        tokenizer_hash=card.tokenizer_hash,
        geometry=card.geometry,
        dtype="float32",
        ids=tuple(ids),
        tenant="",
        lora=None,
        translated_until=0,
        created=now,
        expires=now + 600,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
    )
    fleet.store.put(entry.id, 0, describe(entry), data, entry.expires)
    return entry.id


def handed_over(server: Server, ids: Sequence[int], key: str, translated: int, native: int = 0) -> Answer:
    answer = server.complete(ids, load=key)
    assert answer.told["status"] == "applied", answer.told
    assert answer.told["prompt"]["native"] == native
    assert answer.told["prompt"]["translated"] == translated
    return answer


def test_the_answer_and_the_next_turn_are_the_model_s_own(fleet: Fleet, sliding: tuple[Server, Keep]) -> None:
    server, keep = sliding
    ids = prompt(TOKENS, seed=401)
    key = keep(ids)
    handed = handed_over(server, ids, key, TOKENS - 2)
    assert handed.cached == TOKENS - 1
    own = server.complete(ids, salt="own")
    assert own.cached == 0
    assert handed.far_from(own) <= SAME
    later = [*ids, *handed.ids, *prompt(60, 402)[1:]]
    again = server.complete(later, load=key)
    assert again.told["status"] == "applied"
    # vLLM's prefix cache needs a whole window before the place where it is gone on from; windows' blocks are not so many.
    assert again.told["prompt"]["native"] == (512 if server is fleet.running["slides"] else 0)
    assert again.far_from(server.complete(later)) <= SAME


def test_a_shorter_prompt_finds_only_what_is_whole(sliding: tuple[Server, Keep]) -> None:
    """Where windows have left blocks behind, a prompt that ends before has to be translated again, or all of it is there."""
    server, keep = sliding
    ids = prompt(TOKENS, seed=403)
    key = keep(ids)
    assert server.complete(ids, load=key).told["status"] == "applied"
    for cut in (290, 390, 520):
        shorter = [*ids[:cut], *prompt(30, seed=cut)[1:]]
        handed = server.complete(shorter, load=key)
        assert handed.told["status"] == "applied", handed.told
        assert handed.told["prompt"]["recomputed"] < 40
        assert handed.far_from(server.complete(shorter)) <= SAME


def test_a_long_tail_of_its_own(sliding: tuple[Server, Keep]) -> None:
    """The window passes over translated tokens while the rest of the prompt is read, and over all of them at last."""
    server, keep = sliding
    ids = prompt(TOKENS, seed=404)
    key = keep(ids[:300])
    longer = ids[:300] + prompt(2 * WINDOW, seed=405)[1:]
    handed = handed_over(server, longer, key, 299)
    assert handed.far_from(server.complete(longer)) <= SAME


def test_a_wrong_translation_is_seen_and_leaks_nowhere(fleet: Fleet) -> None:
    ids = prompt(TOKENS, seed=406)
    key = fleet.get("slides").complete(ids, save=True).told["id"]
    hybrid = fleet.get("hybrid")
    wrong = hybrid.complete(ids, load=fleet.as_strangers(key))
    assert wrong.told["status"] == "applied"
    own = hybrid.complete(ids)
    assert own.cached == 0
    assert wrong.far_from(own) > SEEN
    assert handed_over(hybrid, ids, key, TOKENS - 2).far_from(own) <= SAME


def test_a_load_that_fails_with_the_hybrid_manager(fleet: Fleet) -> None:
    ids = prompt(TOKENS, seed=407)
    key = fleet.get("slides").complete(ids, save=True).told["id"]
    wait_until(lambda: bool(fleet.store.manifests(key)))
    (fleet.store.folder / f"{key}.0.safetensors").write_bytes(b"")
    hybrid = fleet.get("hybrid")
    answer = hybrid.complete(ids, load=key)
    assert answer.told["reason"] == "corrupt"
    assert answer.told["prompt"]["translated"] == 0
    assert answer.far_from(hybrid.complete(ids, salt="fresh")) <= SAME


def test_a_model_that_slides_everywhere_keeps_what_its_window_holds(fleet: Fleet) -> None:
    """A longer conversation is not kept, and its client is told so; half a cache would be worse than none."""
    window = fleet.get("window")
    short = window.complete(prompt(WINDOW - 20, seed=408), save=True).told
    assert short["id"]
    long = window.complete(prompt(TOKENS, seed=408), save=True).told
    assert long["id"] is None
    assert "window" in long["not_kept"]


def test_what_it_kept_is_what_it_read(fleet: Fleet) -> None:
    window, ids = fleet.get("window"), prompt(WINDOW - 20, seed=409)
    key = window.complete(ids, save=True, count=1).told["id"]
    wait_until(lambda: bool(fleet.store.manifests(key)))
    kept = unpack(parse(fleet.store.manifests(key)[0], key), fleet.store.data(key, 0))
    lm = load_model(fleet.place / "window" / "target", device="cpu")
    assert lm.geometry.layers[0].window == WINDOW
    own = read(lm, lm.ids(ids))
    for mine, theirs in zip((*own.keys, *own.values), (*kept.keys, *kept.values), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
