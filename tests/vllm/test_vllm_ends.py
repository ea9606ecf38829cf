"""First and last tokens that are not translated: two sinks, sixteen tokens of tail, prompts without BOS, read in pieces.

Where Mooncake's client can be loaded, its store lies between these two engines; else it is the folder that all share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.opening import open_store
from kvlingo.serve.external.servers import Answer, Server
from kvlingo.serve.external.stores import Store
from tests.store_servers import MooncakeServer, lose_data, no_mooncake, rewrite
from tests.vllm.conftest import PIECE, SINK, TAIL, Fleet, wait_until
from tests.vllm.test_vllm_twin import SAME, counted, reads_in_pieces

SEEN = 1e-2


@dataclass
class Two:
    """The two engines, and a look into what is between them."""

    fleet: Fleet
    source: Server
    ends: Server
    store: Store

    def kept(self, ids: Sequence[int]) -> tuple[str, Answer]:
        """Return the id of a kept cache, and what the model says by itself."""
        answer = self.source.complete(ids, save=True)
        wait_until(lambda: bool(self.store.manifests(answer.told["id"])))
        return answer.told["id"], answer

    def handed_over(self, ids: Sequence[int], key: str) -> Answer:
        """Go on from a cache of the whole prompt; exactly the tail is computed by the engine."""
        before = counted(self.ends)
        answer = self.ends.complete(ids, load=key)
        wait_until(lambda: sum(counted(self.ends).values()) >= sum(before.values()) + len(ids))
        after = counted(self.ends)
        assert answer.told["status"] == "applied", answer.told
        translated = len(ids) - SINK - TAIL
        assert answer.told["prompt"] == {"native": 0, "translated": translated, "recomputed": SINK + TAIL}
        assert {kind: after[kind] - before[kind] for kind in after} == {
            "local_compute": TAIL,
            "local_cache_hit": 0,
            "external_kv_transfer": len(ids) - TAIL,
        }
        return answer


@pytest.fixture(scope="module")
def mooncake(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer | None]:
    if no_mooncake():
        yield None
        return
    with MooncakeServer(tmp_path_factory.mktemp("mooncake")) as server:
        fleet.mooncake = server
        yield server
        fleet.mooncake = None


@pytest.fixture(scope="module")
def two(fleet: Fleet, mooncake: MooncakeServer | None) -> Iterator[Two]:
    name = "source_mooncake" if mooncake else "source"
    source, ends = fleet.both(name, "ends")
    yield Two(fleet, source, ends, open_store(mooncake.url, 1 << 26) if mooncake else fleet.store)
    fleet.end(*{"source_mooncake", "ends"} & fleet.running.keys())


@pytest.fixture
def between(two: Two, mooncake: MooncakeServer | None) -> Two:
    """Return the engines where Mooncake is between them."""
    if mooncake is None:
        pytest.skip(str(no_mooncake()))
    return two


@pytest.mark.parametrize("first", [[0], []], ids=["with BOS", "without BOS"])
def test_exactly_the_tail_is_computed_and_the_answer_is_the_model_s_own(two: Two, first: list[int]) -> None:
    ids = [*first, *prompt(900, seed=501 + len(first))[1:]]
    key, own = two.kept(ids)
    handed = two.handed_over(ids, key)
    assert handed.far_from(own) <= SAME
    later = [*ids, *handed.ids, 9, 8, 7]
    again = two.ends.complete(later, load=key)
    assert again.told["prompt"] == {"native": 896, "translated": 0, "recomputed": len(later) - 896}
    assert again.far_from(two.source.complete(later)) <= SAME
    assert two.ends.complete(ids).cached == 0, "nothing of it is the model's own"


def test_a_prompt_that_is_read_in_pieces_after_a_load_between_steps(two: Two) -> None:
    """The same as with loading within a step (`test_vllm_twin`): what follows a translation is several steps' work."""
    assert reads_in_pieces(two.ends)
    ids = prompt(1300, seed=503)
    key, _ = two.kept(ids[:500])
    before = counted(two.ends)
    handed = two.ends.complete(ids, load=key, count=1)
    assert handed.told["prompt"] == {"native": 0, "translated": 500 - SINK, "recomputed": 800 + SINK}
    wait_until(lambda: sum(counted(two.ends).values()) >= sum(before.values()) + len(ids))
    assert counted(two.ends)["local_compute"] - before["local_compute"] == 800 > 3 * PIECE
    assert handed.far_from(two.source.complete(ids, count=1)) <= SAME


def test_a_wrong_translator_is_seen_and_does_not_leak(two: Two) -> None:
    ids = prompt(400, seed=504)
    key, own = two.kept(ids)
    assert two.handed_over(ids, two.fleet.as_strangers(key, two.store)).far_from(own) > SEEN
    clean = two.ends.complete(ids)
    assert clean.cached == 0
    assert clean.far_from(own) <= SAME


# --- Mooncake between them -------------------------------------------------------------------------------------------


def refused(two: Two, ids: Sequence[int], key: str, own: Answer, *reasons: str) -> None:
    answer = two.ends.complete(ids, load=key)
    assert answer.told["reason"] in reasons, answer.told
    assert answer.told["status"] == "fallback_reprefill"
    assert answer.told["prompt"]["translated"] == 0
    assert answer.far_from(own) <= SAME


def test_a_hand_over_through_mooncake_is_exact(between: Two) -> None:
    ids = prompt(700, seed=505)
    key, own = between.kept(ids)
    assert not between.fleet.store.manifests(key), "it is in the folder"
    assert between.handed_over(ids, key).far_from(own) <= SAME


def test_an_entry_of_mooncake_s_that_is_harmed(between: Two) -> None:
    ids = prompt(400, seed=506)
    key, own = between.kept(ids)
    rewrite(between.store, key, "data", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    refused(between, ids, key, own, "corrupt")
    lose_data(between.store, key)
    refused(between, ids, key, own, "gone")


def test_a_master_that_is_killed(between: Two, mooncake: MooncakeServer | None) -> None:
    """The last one: what was kept is lost with it."""
    assert mooncake is not None
    ids = prompt(400, seed=507)
    key, own = between.kept(ids)
    mooncake.kill_master()
    refused(between, ids, key, own, "store_down", "store_slow")
    mooncake.start_master()
