"""Exact-map twins through two real engines: whatever differs from the model's own answer is the connector's fault."""

from __future__ import annotations

import os
import re
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvlingo.language_model import read
from kvlingo.models import load_model
from kvlingo.serve.external import checking
from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.entries import parse, unpack
from kvlingo.serve.external.servers import Answer, Server
from kvlingo.serve.external.twins import VOCABULARY
from tests.vllm.conftest import PIECE, Fleet, wait_until

LONG = 100  # tokens of an answer that is still going on when all others have begun
SAME = 1e-4
SEEN_BFLOAT16 = 0.3  # a wrong translation is further off than that
MARGIN = 2  # times the noise floor of bfloat16


@pytest.fixture(autouse=True, scope="module")
def _ahead(fleet: Fleet) -> None:
    fleet.begin("sync")


def counted(server: Server) -> dict[str, float]:
    """Return how many prompt tokens a server has computed and how many came from elsewhere."""
    kinds = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {kind: server.metric("vllm:prompt_tokens_by_source_total", source=kind) for kind in kinds}


def hand_over(fleet: Fleet, name: str, ids: Sequence[int], same: float) -> tuple[str, Answer, Answer]:
    """Let the source read and speak, the target go on; check all that can be checked of one hand-over."""
    source, target = fleet.get("source"), fleet.get(name)
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


@pytest.mark.parametrize("name", ["target", "sync"])
def test_a_prompt_without_bos(fleet: Fleet, name: str) -> None:
    """Its first token is text, which the worker reads for each hand-over, and not what many prompts begin with."""
    ids = prompt(300, seed=23 if name == "target" else 24)[1:]
    key, handed, _ = hand_over(fleet, name, ids, SAME)
    later = [*ids, *handed.ids, 9, 8, 7]
    again = fleet.get(name).complete(later, load=key)
    assert again.told["prompt"]["native"] == 256
    assert again.far_from(fleet.get("source").complete(later)) <= SAME


def test_what_happened_is_counted_at_metrics(fleet: Fleet) -> None:
    """All of it and nothing else, with the right numbers: of the first turn, of the next one, and of keeping."""
    source, target, ids = fleet.get("source"), fleet.get("target"), prompt(400, seed=13)
    before, kept_before = figures(target), figures(source)
    key = source.complete(ids, save=True, count=1).told["id"]
    target.complete(ids, load=key, count=1)
    first = {"applied": 1, "tokens_translated": 398, "tokens_recomputed": 2}
    wait_until(lambda: grown(target, before) == first)
    wait_until(lambda: grown(source, kept_before) == {"saved": 1})
    target.complete([*ids, 7, 8, 9], load=key, count=1)
    both = {"applied": 2, "tokens_native": 384, "tokens_translated": 398 + 16, "tokens_recomputed": 2 + 3}
    wait_until(lambda: grown(target, before) == both)


def figures(server: Server) -> dict[str, float]:
    """Return all that the connector has counted, by what it is."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found = (re.fullmatch(r'vllm:kvlingo_total\{.*what="(\w+)".*\} (\S+)', line) for line in lines)
    return {each[1]: float(each[2]) for each in found if each}


def grown(server: Server, before: dict[str, float]) -> dict[str, float]:
    return {what: count - before.get(what, 0) for what, count in figures(server).items() if count - before.get(what, 0)}


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


def test_what_is_kept_with_scaled_angles_is_what_the_model_reads(fleet: Fleet) -> None:
    """Two twins of one kind of angles can't show this: what both sides do wrong alike cancels."""
    scaled, ids = fleet.get("scaled"), prompt(600, seed=41)
    key = scaled.complete(ids, save=True, count=1).told["id"]
    wait_until(lambda: bool(fleet.store.manifests(key)))
    kv = unpack(parse(fleet.store.manifests(key)[0], key), fleet.store.data(key, 0))
    lm = load_model(fleet.place / "scaled", device="cpu")
    for mine, theirs in zip(read(lm, lm.ids(ids)).keys, kv.keys, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
    plain = load_model(fleet.place / "twins" / "source", device="cpu")
    assert (read(plain, plain.ids(ids)).keys[-1] - kv.keys[-1]).abs().max() > 0.1, "the angles are not scaled"
    fleet.end("scaled")


# --- bfloat16 --------------------------------------------------------------------------------------------------------


def first_token(server: Server, ids: Sequence[int], **asked: Any) -> Answer:
    """Return one token, and the log-probability of every other."""
    answer = server.complete(ids, count=1, logprobs=VOCABULARY, **asked)
    assert len(answer.tops[0]) == VOCABULARY
    return answer


def noise_floor(source: Server, target: Server) -> float:
    """Return how far the two models by themselves are apart, which would be the same were it not for rounding.

    Reading in pieces is no measure: what this backend makes of a token is the same to the bit, however a prompt is cut.
    """
    prompts = [prompt(300, seed) for seed in range(21, 25)]
    return max(first_token(target, ids).apart_from(first_token(source, ids)) for ids in prompts)


def test_bfloat16_is_within_rounding(fleet: Fleet) -> None:
    """Greedy answers of random models part at the first close call: the first token's distribution is compared.

    A hand-over rounds as both do, and once more what is made of the one's cache.
    """
    source, target = fleet.both("source16", "target16")
    floor, far = noise_floor(source, target), []
    assert 0 < floor < SEEN_BFLOAT16 / MARGIN
    for seed in (5, 6):
        ids = prompt(300, seed)
        key = source.complete(ids, save=True, count=1).told["id"]
        handed = first_token(target, ids, load=key)
        assert handed.told["prompt"] == {"native": 0, "translated": 298, "recomputed": 2}
        later = [*ids, *handed.ids, *prompt(20, seed=5)[1:]]
        again = first_token(target, later, load=key)
        assert again.told["prompt"]["native"] == 256
        own = first_token(target, ids)
        assert own.cached == 0
        far += [own.apart_from(handed), first_token(target, later).apart_from(again)]
        wrong = first_token(target, ids, load=fleet.as_strangers(key))
        assert wrong.told["status"] == "applied"
        assert own.apart_from(wrong) > SEEN_BFLOAT16
    assert max(far) <= MARGIN * floor


def test_the_self_test_passes_in_bfloat16(fleet: Fleet) -> None:
    source, target, allowed = *fleet.both("source16", "target16"), checking.ALLOWED["bfloat16"]
    for seed in (27, 30):  # where greedy answers part, on some processors
        checks = checking.hand_over(source, target, allowed, seed=seed, rounded=True)
        assert all(check.passed for check in checks), checks
    wrong = checking.hand_over(source, target, allowed, seed=28, rounded=True, as_other=fleet.as_strangers)
    fleet.end("source16", "target16")
    assert [check.passed for check in wrong] == [True, False, False, True, True]


# --- controls, ranks, preemption -------------------------------------------------------------------------------------


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
        later = [*ids, *handed.ids, 9, 8, 7]
        again = server.complete(later, load=kept)
        assert again.told["prompt"]["native"] == 256
        assert again.far_from(one_source.complete(later)) <= SAME
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
        assert min(many.told["prompt"].values()) >= 0
        assert sum(many.told["prompt"].values()) == 500
        assert one.far_from(own) <= SAME
        assert many.far_from(own) <= SAME
    fleet.end("few")


def test_requests_that_push_each_other_out_and_load_within_a_step(fleet: Fleet) -> None:
    """The same with synchronous loading, of twice as many requests as there is room for; long answers, so that they meet."""
    source, sync = fleet.get("source"), fleet.get("sync")
    prompts = [prompt(500, seed=seed) for seed in range(14, 22)]
    own = [source.complete(ids, save=True, count=LONG) for ids in prompts]
    before = sync.metric("vllm:num_preemptions_total")
    together = all_at_once(sync, prompts, [each.told["id"] for each in own], LONG)
    assert sync.metric("vllm:num_preemptions_total") > before
    for many, alone in zip(together, own, strict=True):
        assert many.told["status"] == "applied"
        read = many.told["prompt"]
        assert min(read.values()) >= 0, (
            "one that comes again may find all of its prompt, and then nothing is translated"
        )
        assert sum(read.values()) == 500
        assert read["recomputed"] <= 2
        assert many.far_from(alone) <= SAME


def all_at_once(target: Server, prompts: Sequence[Sequence[int]], keys: Sequence[str], count: int = 40) -> list[Answer]:
    answers: dict[int, Answer] = {}

    def ask(index: int) -> None:
        answers[index] = target.complete(prompts[index], load=keys[index], count=count)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(len(prompts))]
