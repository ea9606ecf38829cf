"""Two real engines with a Redis server between them: exact, no leak; whatever happens to it, the prompt is read again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvlingo.serve.external.checking import hand_over, prompt
from kvlingo.serve.external.entries import new_id
from kvlingo.serve.external.redis_store import PASSWORD, RedisStore
from kvlingo.serve.external.servers import Answer, Server
from tests.store_servers import RedisServer, lose_data, no_redis, rewrite
from tests.vllm.conftest import LOAD_SECONDS, LOOKUP_SECONDS, REDIS_PASSWORD, Fleet, wait_until

SAME, SEEN = 1e-4, 1e-2
PATIENCE = LOOKUP_SECONDS + LOAD_SECONDS + 20
NAMES = ("source_redis", "target_redis")


class Two:
    """The two engines, what is between them, and a look into it."""

    def __init__(self, fleet: Fleet, server: RedisServer) -> None:
        self.fleet, self.server = fleet, server
        self.source, self.target = (fleet.get(name) for name in NAMES)
        self.store = RedisStore(server.url, 1 << 30)

    def kept(self, seed: int, tokens: int = 400, **more: Any) -> tuple[list[int], str, Answer]:
        """Return a prompt, the id of its kept cache, and what the model says by itself."""
        ids = prompt(tokens, seed)
        answer = self.source.complete(ids, save=True, **more)
        wait_until(lambda: bool(self.store.manifests(answer.told["id"])))
        return ids, answer.told["id"], answer

    def refused(self, ids: list[int], key: str, own: Answer, reason: str, **more: Any) -> None:
        """Ask to go on from a cache that can't be used: in time, once, told, counted, and with the model's own answer."""
        before, started = count(self.target, f"refused_{reason}"), time.monotonic()
        answer = self.target.complete(ids, load=key, **more)
        assert time.monotonic() - started < PATIENCE
        assert answer.told["reason"] == reason, answer.told
        assert answer.told["status"] == "fallback_reprefill"
        assert answer.told["prompt"]["translated"] == 0
        assert answer.far_from(own) <= SAME
        assert str(self.server.port) not in str(answer.told), "a client is not told where the store is"
        wait_until(lambda: count(self.target, f"refused_{reason}") > before)
        assert count(self.target, f"refused_{reason}") == before + 1


def count(server: Server, what: str) -> float:
    return server.metric("vllm:kvlingo_total", what=what)


@pytest.fixture(scope="module")
def two(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    if reason := no_redis():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PASSWORD, REDIS_PASSWORD)
        with RedisServer(tmp_path_factory.mktemp("redis"), ["--requirepass", REDIS_PASSWORD]) as server:
            fleet.redis = server
            for name in NAMES:
                fleet.begin(name)
            yield Two(fleet, server)
            for name in NAMES:
                fleet.end(name)


def test_a_hand_over_through_redis_is_exact(two: Two) -> None:
    """Both turns are the model's own, one token is computed, and nothing of it is left as the model's own."""
    checks = hand_over(two.source, two.target, SAME, seed=301)
    assert [check for check in checks if not check.passed] == []


def test_a_wrong_translator_is_seen_and_does_not_leak(two: Two) -> None:
    ids, key, own = two.kept(302)
    wrong = two.target.complete(ids, load=two.fleet.as_strangers(key, two.store))
    assert wrong.told["status"] == "applied"
    assert wrong.far_from(own) > SEEN
    clean = two.target.complete(ids)
    assert clean.cached == 0
    assert clean.far_from(own) <= SAME


def test_another_s_id_and_a_guessed_one(two: Two) -> None:
    ids, key, own = two.kept(303, salt="alice")
    two.refused(ids, key, own, "unknown", salt="mallory")
    two.refused(ids, new_id(), own, "unknown", salt="alice")
    assert two.target.complete(ids, load=key, salt="alice").told["status"] == "applied"


def test_an_entry_that_is_harmed(two: Two) -> None:
    ids, key, own = two.kept(304)
    rewrite(two.store, key, "data", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    two.refused(ids, key, own, "corrupt")
    lose_data(two.store, key)
    two.refused(ids, key, own, "gone")


def test_a_redis_that_hangs(two: Two) -> None:
    """A request waits so long and no longer, others are answered meanwhile, and afterwards it works again."""
    ids, key, own = two.kept(305)
    others, _, their_own = two.kept(306)
    two.server.hold()
    try:
        told: list[bool] = []
        thread = threading.Thread(target=lambda: told.append(two.refused(ids, key, own, "store_slow") is None))
        thread.start()
        time.sleep(0.5)
        meanwhile = [two.target.complete(others) for _ in range(2)]
        thread.join(PATIENCE)
    finally:
        two.server.release()
    assert told == [True]
    assert all(answer.far_from(their_own) <= SAME for answer in meanwhile)
    again = two.target.complete(ids, load=key)
    assert again.told["status"] == "applied"
    assert again.far_from(own) <= SAME


def test_a_redis_that_is_killed_and_comes_back(two: Two) -> None:
    """The last one: what was kept is lost with it. Neither engine is started again."""
    ids, key, own = two.kept(307)
    two.server.kill()
    two.refused(ids, key, own, "store_down")
    before = count(two.source, "save_failed_store_down")
    assert two.source.complete(ids, save=True).far_from(own) <= SAME
    wait_until(
        lambda: bool(two.source.complete(prompt(20)).ids) and count(two.source, "save_failed_store_down") > before
    )
    two.server.start()
    two.refused(ids, key, own, "unknown")
    ids, key, own = two.kept(308)
    handed = two.target.complete(ids, load=key)
    assert handed.told["status"] == "applied"
    assert handed.far_from(own) <= SAME
    for server in (two.source, two.target):
        assert REDIS_PASSWORD not in server.log.read_text(errors="replace")
