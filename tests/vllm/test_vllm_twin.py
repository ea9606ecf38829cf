"""Exact-map twins through two real engines: whatever differs from the model's own answer is the connector's fault."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest
import torch

from kvlingo.language_model import read
from kvlingo.models import load_model
from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.entries import parse, unpack
from kvlingo.serve.external.servers import Answer, Server
from tests.vllm.conftest import PIECE, Fleet, wait_until

SAME = 1e-4
SAME_BFLOAT16 = 5e-2


@pytest.fixture(autouse=True, scope="module")
def _ahead(fleet: Fleet) -> None:
    fleet.begin("sync")


def counted(server: Server) -> dict[str, float]:
    """Return how many prompt tokens a server has computed and how many came from elsewhere."""
    kinds = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {kind: server.metric("vllm:prompt_tokens_by_source_total", source=kind) for kind in kinds}


def hand_over(fleet: Fleet, name: str, ids: Sequence[int], same: float) -> tuple[str, Answer, Answer]:
    """Let the source read and speak, the target go on; check all that can be checked of one hand-over."""
    source, target = fleet.get("source16" if name == "target16" else "source"), fleet.get(name)
    kept = source.complete(ids, save=True)
    before = counted(target)
    handed = target.complete(ids, load=kept.told["id"])
    computed = len(ids) + sum(before.values())
    wait_until(lambda: sum(counted(target).values()) >= computed)  # figures come a moment after the answer
    after = counted(target)
    assert handed.told["status"] == "applied", handed.told
    assert handed.told["prompt"] == {"native": 0, "translated": len(ids) - 2, "recomputed": 2}
    assert handed.cached == len(ids) - 1
    assert {kind: after[kind] - before[kind] for kind in after} == {
        "local_compute": 1,
        "local_cache_hit": 0,
        "external_kv_transfer": len(ids) - 1,
    }
    own = target.complete(ids)
    assert own.cached == 0
    assert handed.far_from(own) <= same
    return kept.told["id"], handed, own


@pytest.mark.parametrize("name", ["target", "sync"])
def test_one_token_of_a_prompt_is_computed_and_the_answer_is_the_model_s_own(fleet: Fleet, name: str) -> None:
    ids = prompt(900, seed=1 if name == "target" else 2)
    key, handed, own = hand_over(fleet, name, ids, SAME)
    target = fleet.get(name)
    later = [*ids, *handed.ids, 9, 8, 7]
    before = counted(target)
    again = target.complete(later, load=key, count=12)
    assert again.told["prompt"] == {"native": 896, "translated": 9, "recomputed": 4}
    wait_until(lambda: sum(counted(target).values()) >= sum(before.values()) + len(later))
    assert counted(target)["local_cache_hit"] - before["local_cache_hit"] == 896, "the prefix cache was not used"
    assert again.far_from(target.complete(later, count=12)) <= SAME
    assert own.ids == handed.ids


def test_what_the_source_has_said_is_carried_too(fleet: Fleet) -> None:
    """The kept cache ends one token before the source's answer does: that one was said, not read."""
    ids = prompt(400, seed=3)
    source, target = fleet.get("source"), fleet.get("target")
    said = source.complete(ids, save=True, count=20)
    turn = [*ids, *said.ids, 11, 12, 13, 14]
    handed = target.complete(turn, load=said.told["id"])
    assert handed.told["prompt"] == {"native": 0, "translated": 418, "recomputed": 6}
    assert handed.far_from(target.complete(turn)) <= SAME


def test_a_prompt_that_leaves_the_cache_s_text_is_translated_up_to_there(fleet: Fleet) -> None:
    ids = prompt(400, seed=4)
    source, target = fleet.get("source"), fleet.get("target")
    key = source.complete(ids, save=True).told["id"]
    other = [*ids[:250], 77, 78, *ids[252:]]
    handed = target.complete(other, load=key)
    assert handed.told["prompt"] == {"native": 0, "translated": 249, "recomputed": 151}
    assert handed.far_from(target.complete(other)) <= SAME


def reads_in_pieces(sync: Server) -> bool:
    """Tell whether a server's scheduler never gives more than so many tokens to a step, by its own word."""
    log = sync.log.read_text()
    return f"'max_num_batched_tokens': {PIECE}" in log and "enable_chunked_prefill=True" in log


def test_a_prompt_that_is_read_in_pieces_after_a_translation(fleet: Fleet) -> None:
    sync, ids = fleet.get("sync"), prompt(1300, seed=8)
    assert reads_in_pieces(sync)
    key = fleet.get("source").complete(ids[:500], save=True).told["id"]
    before = counted(sync)
    handed = sync.complete(ids, load=key, count=1)
    assert handed.told["prompt"] == {"native": 0, "translated": 499, "recomputed": 801}
    wait_until(lambda: sum(counted(sync).values()) >= sum(before.values()) + len(ids))
    assert counted(sync)["local_compute"] - before["local_compute"] == 800 > 3 * PIECE
    own = sync.complete(ids, count=1)
    assert own.cached == 0
    assert handed.far_from(own) <= SAME


def test_what_was_read_in_pieces_is_kept_whole(fleet: Fleet) -> None:
    sync, ids = fleet.get("sync"), prompt(3 * PIECE + 132, seed=9)
    assert reads_in_pieces(sync)
    key = sync.complete(ids, save=True, count=1).told["id"]
    wait_until(lambda: bool(fleet.store.manifests(key)))
    kept = parse(fleet.store.manifests(key)[0], key)
    lm = load_model(fleet.place / "twins" / "target", device="cpu")
    own, kv = read(lm, lm.ids(ids)), unpack(kept, fleet.store.data(key, 0))
    for mine, theirs in zip((*own.keys, *own.values), (*kv.keys, *kv.values), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_bfloat16_is_within_rounding(fleet: Fleet) -> None:
    """Greedy answers of random models part at the first close call: the first token's distribution is compared."""
    ids = prompt(300, seed=5)
    source, target = fleet.both("source16", "target16")
    key = source.complete(ids, save=True, count=1).told["id"]
    handed = target.complete(ids, load=key, count=1)
    own = target.complete(ids, count=1)
    assert handed.told["prompt"]["translated"] == 298
    assert handed.far_from(own) <= SAME_BFLOAT16
    wrong = target.complete(ids, load=fleet.as_strangers(key), count=1)
    assert wrong.told["status"] == "applied"
    assert wrong.far_from(own) > SAME_BFLOAT16
    fleet.end("source16", "target16")


@pytest.mark.parametrize("name", ["target", "sync"])
def test_a_wrong_translator_is_seen(fleet: Fleet, name: str) -> None:
    """The control that must fail: the same path with another map gives another answer."""
    ids = prompt(300, seed=6)
    source, target = fleet.get("source"), fleet.get(name)
    key = fleet.as_strangers(source.complete(ids, save=True).told["id"])
    handed = target.complete(ids, load=key)
    assert handed.told["prompt"]["translated"] == 298
    assert handed.far_from(target.complete(ids)) > 100 * SAME


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks_on_each_side(fleet: Fleet) -> None:
    """Each rank keeps its heads and loads its own; a cache of two ranks serves one, and the other way round."""
    source, target = fleet.both("source_of_two", "target_of_two")
    one_source, one_target = fleet.get("source"), fleet.get("target")
    ids = prompt(300, seed=7)
    key = source.complete(ids, save=True).told["id"]
    one_key = one_source.complete(ids, save=True).told["id"]
    own = one_target.complete(ids)
    for server, kept in ((target, key), (target, one_key), (one_target, key)):
        handed = server.complete(ids, load=kept)
        assert handed.told["status"] == "applied", handed.told
        assert handed.cached == 299
        assert handed.far_from(own) <= SAME
    assert len(fleet.store.manifests(key)) == 2
    (fleet.store.folder / f"{key}.1.json").unlink()
    half = target.complete([*ids[:-1], 3], load=key)
    assert half.told["status"] == "fallback_reprefill"
    fleet.end("source_of_two", "target_of_two")


def test_other_ids_of_the_same_text_and_requests_that_push_each_other_out(fleet: Fleet) -> None:
    """Four long answers in room for two: some are preempted, matched again and loaded again, and all are what they were alone."""
    source, target = fleet.get("source"), fleet.get("few")
    turned = [*range(2), *reversed(range(2, 258))]
    prompts = [prompt(500, seed=seed) for seed in range(10, 14)]
    keys = [source.complete(ids, save=True, count=1).told["id"] for ids in prompts]
    theirs = [[turned[i] for i in ids] for ids in prompts]
    alone = [target.complete(ids, load=key, count=40) for ids, key in zip(theirs, keys, strict=True)]
    cold = [target.complete(ids, count=40) for ids in theirs]
    before = target.metric("vllm:num_preemptions_total")
    together = all_at_once(target, theirs, keys)
    assert target.metric("vllm:num_preemptions_total") > before
    for one, many, own in zip(alone, together, cold, strict=True):
        assert one.told["status"] == many.told["status"] == "applied"
        assert one.told["prompt"]["translated"] == 498
        assert one.far_from(own) <= SAME
        assert many.far_from(own) <= SAME
    fleet.end("few")


def all_at_once(target: Server, prompts: Sequence[Sequence[int]], keys: Sequence[str]) -> list[Answer]:
    answers: dict[int, Answer] = {}

    def ask(index: int) -> None:
        answers[index] = target.complete(prompts[index], load=keys[index], count=40)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(len(prompts))]
