"""Every store keeps what `Store` promises; and what each server does that others can't: expire, be full, be slow, be down.

The servers are real ones. Where one can't be had its tests are skipped, with the reason.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlingo.errors import BadInput
from kvlingo.kv import KV
from kvlingo.manifest import plain
from kvlingo.serve.external import mooncake_store, redis_store
from kvlingo.serve.external.carrying import fetch
from kvlingo.serve.external.entries import Entry, describe, new_id, pack
from kvlingo.serve.external.mooncake_store import MooncakeStore
from kvlingo.serve.external.opening import open_store
from kvlingo.serve.external.redis_store import PASSWORD, RedisStore, read_address
from kvlingo.serve.external.refusals import Refused
from kvlingo.serve.external.stores import FolderStore, Store
from tests import store_servers, tiny
from tests.store_servers import PIECE, MooncakeServer, RedisServer, lose_data, rewrite, wait_until
from tests.store_writers import content, write_at_once

LATER = 60.0
MOST = 1 << 26
KINDS = ["folder", "redis", "mooncake"]


def soon(seconds: float = LATER) -> float:
    return time.time() + seconds


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if reason := store_servers.no_redis():
        pytest.skip(reason)
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def mooncake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    if reason := store_servers.no_mooncake():
        pytest.skip(reason)
    with MooncakeServer(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.fixture(scope="module")
def mooncake(mooncake_server: MooncakeServer) -> Store:
    """One client for all tests: each one is a process's worth of buffers."""
    return open_store(mooncake_server.url, MOST)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(mooncake_store, "PIECE_BYTES", 4 * PIECE)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"), MOST)
    if request.param == "mooncake":
        found: Store = request.getfixturevalue("mooncake")
        return found
    return open_store(request.getfixturevalue("redis_server").url, MOST)


@pytest.fixture(params=["folder", "redis"])
def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Store]:
    """Return how to open an empty store that counts what it holds."""
    if request.param == "folder":
        return lambda most: open_store(str(tmp_path / "store"), most)
    server: RedisServer = request.getfixturevalue("redis_server")
    server.client().flushall()
    return lambda most: open_store(server.url, most)


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisStore:
    redis_server.client().flushall()
    return RedisStore(redis_server.url, MOST)


def entry_of(key: str, tokens: int = 40, seed: int = 0, tenant: str = "") -> tuple[bytes, bytes]:
    """Return a manifest and data as engines write them."""
    geometry = tiny.language_model("llama").geometry
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, s.kv_heads, tokens, s.key_dim) for s in geometry.layers]
    kv = KV(*(tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in "kv"), tokens)
    data = pack(kv)
    entry = Entry(
        key,
        0,
        1,
        "f",
        "t",
        plain(geometry.to_json()),
        "float32",
        tuple(range(tokens)),
        tenant,
        None,
        0,
        time.time(),
        soon(),
        hashlib.sha256(data).hexdigest(),
        len(data),
    )
    return describe(entry), data


def keep(store: Store, key: str | None = None, **more: Any) -> str:
    key = key or new_id()
    manifest, data = entry_of(key, **more)
    store.put(key, 0, manifest, data, soon())
    return key


def reason_of(do: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as refused:
        do()
    return refused.value.reason


def outcome(do: Callable[[], Any]) -> Any:
    """Return what comes of it, or the reason why nothing does."""
    try:
        return do()
    except Refused as refused:
        return refused.reason


def whole_of(store: Store, kept: dict[str, bytes]) -> int:
    """Count the entries that are there; each is what was written, or is gone."""
    found = {key: outcome(lambda key=key: store.data(key, 0)) for key in kept if store.manifests(key)}
    assert all(data in (kept[key], "gone") for key, data in found.items())
    return sum(data != "gone" for data in found.values())


# --- what every store promises ---------------------------------------------------------------------------------------


def test_what_is_kept_is_found_again_bit_for_bit(store: Store) -> None:
    key = new_id()
    manifest, data = entry_of(key)
    assert len(data) > 3 * PIECE
    store.put(key, 0, manifest, data, soon())
    assert store.manifests(key) == [manifest]
    assert store.data(key, 0) == data
    assert fetch(store, key, "")[0].ids == tuple(range(40))


def test_parts_are_found_up_to_the_first_that_is_missing(store: Store) -> None:
    key = new_id()
    for rank in (0, 2, 3):
        store.put(key, rank, b"%d" % rank, b"data of %d" % rank, soon())
    assert store.manifests(key) == [b"0"]
    store.put(key, 1, b"1", b"data of 1", soon())
    assert store.manifests(key) == [b"0", b"1", b"2", b"3"]
    assert [store.data(key, rank) for rank in range(4)] == [b"data of %d" % rank for rank in range(4)]


def test_what_was_never_kept_is_not_there(store: Store) -> None:
    assert store.manifests(new_id()) == []
    assert reason_of(lambda: store.data(new_id(), 0)) == "gone"
    assert reason_of(lambda: fetch(store, new_id(), "")) == "gone"


def test_what_is_there_is_not_written_over(store: Store) -> None:
    key = keep(store)
    before = store.manifests(key), store.data(key, 0)
    assert reason_of(lambda: store.put(key, 0, b"other", b"other", soon())) == "taken"
    assert (store.manifests(key), store.data(key, 0)) == before


def test_what_is_forgotten_is_gone_and_nothing_else(store: Store) -> None:
    key, other = keep(store), keep(store)
    store.delete(key)
    store.delete(key)
    assert store.manifests(key) == []
    assert reason_of(lambda: store.data(key, 0)) == "gone"
    fetch(store, other, "")
    keep(store, key)
    fetch(store, key, "")


def test_another_tenant_s_cache_is_not_there(store: Store) -> None:
    key = keep(store, tenant="a" * 64)
    fetch(store, key, "a" * 64)
    for other in ("", "b" * 64):
        assert reason_of(lambda tenant=other: fetch(store, key, tenant)) == "gone"


@pytest.mark.parametrize("kind", ["manifest", "data"])
@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "longer"])
def test_harm_behind_its_back_is_seen(store: Store, kind: str, harm: str) -> None:
    key = keep(store)

    def change(data: bytes) -> bytes:
        half = len(data) // 2
        flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        return {"flipped": flipped, "cut": data[:half], "empty": b"", "longer": data + b"x"}[harm]

    rewrite(store, key, kind, change)
    assert reason_of(lambda: fetch(store, key, "")) in ("corrupt", "gone")


def test_half_an_entry_is_none(store: Store) -> None:
    key = keep(store)
    lose_data(store, key)
    assert reason_of(lambda: fetch(store, key, "")) == "gone"


def test_of_two_writers_of_one_entry_one_wins(store: Store) -> None:
    for turn in range(8):
        key, start, said = new_id(), threading.Barrier(2), []
        entries = [entry_of(key, seed=seed) for seed in (2 * turn, 2 * turn + 1)]

        def write(
            manifest: bytes, data: bytes, key: str = key, start: threading.Barrier = start, said: list[str] = said
        ) -> None:
            start.wait()
            try:
                store.put(key, 0, manifest, data, soon())
                said.append("kept")
            except Refused as refused:
                said.append(refused.reason)

        threads = [threading.Thread(target=write, args=entry) for entry in entries]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said) == ["kept", "taken"]
        assert (store.manifests(key)[0], store.data(key, 0)) in entries


def test_what_is_being_written_is_not_there_yet(store: Store) -> None:
    """Whoever looks while it is written sees nothing or all of it."""
    key, seen, ended = new_id(), [], threading.Event()

    def look() -> None:
        while not ended.is_set():
            if store.manifests(key):
                seen.append(fetch(store, key, "")[0])
                return

    thread = threading.Thread(target=look)
    thread.start()
    manifest, data = entry_of(key, tokens=1000)
    store.put(key, 0, manifest, data, soon())
    thread.join(10)
    ended.set()
    assert [entry.num_bytes for entry in seen] == [len(data)]


def test_what_no_store_of_this_size_holds_is_refused(store: Store) -> None:
    assert reason_of(lambda: store.put(new_id(), 0, b"", bytes(MOST + 1), soon())) == "too_large"


def test_a_time_in_the_past_is_no_time(store: Store) -> None:
    key = new_id()
    if not isinstance(store, FolderStore):  # a folder's readers go by the manifest; it is swept with the next one
        store.put(key, 0, b"m", b"d", soon(-1))
        assert store.manifests(key) == []


# --- room ------------------------------------------------------------------------------------------------------------


def test_a_store_is_bounded_and_what_expires_first_makes_room(bounded: Callable[[int], Store]) -> None:
    store, keys = bounded(1000), [new_id() for _ in range(5)]
    for place, key in enumerate(keys):
        store.put(key, 0, b"m" * 10, b"d" * 290, soon(LATER + place))
    assert [bool(store.manifests(key)) for key in keys] == [False, False, True, True, True]
    store.put(new_id(), 0, b"m" * 10, b"d" * 90, soon(LATER + 9))
    assert [bool(store.manifests(key)) for key in keys] == [False, False, True, True, True], "there was room"


def test_an_entry_goes_with_all_its_parts(bounded: Callable[[int], Store]) -> None:
    store, key = bounded(1000), new_id()
    for rank in range(3):
        store.put(key, rank, b"m", b"d" * 300, soon(LATER + rank))
    store.put(new_id(), 0, b"m", b"d" * 300, soon(2 * LATER))
    assert store.manifests(key) == []
    for rank in range(3):
        assert reason_of(lambda rank=rank: store.data(key, rank)) == "gone"


def test_many_writers_keep_within_bounds(bounded: Callable[[int], Store]) -> None:
    keys, faults = [new_id() for _ in range(40)], []
    bounded(5000)

    def write(mine: list[str]) -> None:
        try:
            for key in mine:
                bounded(5000).put(key, 0, key.encode(), key.encode() * 10, soon())
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(keys[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    store = bounded(5000)
    there = [key for key in keys if store.manifests(key)]
    assert 10 <= len(there) <= 14
    assert all(store.data(key, 0) == key.encode() * 10 for key in there)


MARKS = ("one", "two", "three")


@pytest.fixture(params=["folder", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the name of an empty store that several processes reach."""
    if request.param == "folder":
        return str(tmp_path / "store")
    server: RedisServer = request.getfixturevalue("redis_server")
    server.client().flushall()
    return server.url


def test_of_several_processes_that_write_one_entry_one_wins(place: str) -> None:
    """In another order each, so that all are first at some; what is there is what the one wrote that was told so."""
    keys = [new_id() for _ in range(90)]
    orders = {mark: keys[30 * turn :] + keys[: 30 * turn] for turn, mark in enumerate(MARKS)}
    said = write_at_once(place, MOST, orders)
    won: dict[str, list[str]] = {key: [] for key in keys}
    for mark, order in orders.items():
        for key, outcome_ in zip(order, said[mark], strict=True):
            assert outcome_ in ("kept", "taken")
            if outcome_ == "kept":
                won[key].append(mark)
    store = open_store(place, MOST)
    for key, marks in won.items():
        (mark,) = marks
        assert (store.manifests(key), store.data(key, 0)) == ([mark.encode()], content(mark, key))
    assert len({mark for marks in won.values() for mark in marks}) > 1, "they did not write at once"


def test_several_processes_keep_within_bounds(place: str) -> None:
    keys = {mark: [new_id() for _ in range(20)] for mark in MARKS}
    size = len(content("three", new_id())) + len("three")
    said = write_at_once(place, 10 * size, keys)
    assert {outcome_ for told in said.values() for outcome_ in told} == {"kept"}
    store = open_store(place, 10 * size)
    there = [(mark, key) for mark, mine in keys.items() for key in mine if store.manifests(key)]
    assert 8 <= len(there) <= 11
    assert all(store.data(key, 0) == content(mark, key) for mark, key in there)
    if isinstance(store, FolderStore):
        assert sum(file.stat().st_size for file in store.folder.iterdir()) <= 10 * size


# --- names -----------------------------------------------------------------------------------------------------------


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(BadInput, match="no store of kind 's3'; give a folder that both engines see, or redis://"):
        open_store("s3://bucket", 1)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:secret@host", "holds a password"),
        ("redis://user:secret@host:6379/0", "holds a password"),
        ("redis://", "names no host"),
        ("redis://host:port", "can't be read"),
        ("redis://host/first", "database is 'first'"),
        ("redis://host?ssl_ca_certs=x", "option 'ssl_ca_certs'"),
        ("rediss://host?ssl_cert_reqs=none", "option 'ssl_cert_reqs'"),
    ],
)
def test_urls_that_are_none_are_refused_without_their_password(url: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        read_address(url)
    assert "secret" not in str(refused.value)


def test_urls_are_read() -> None:
    address = read_address("redis://cache:7000/3")
    assert (address.host, address.port, address.database, address.username, address.tls) == (
        "cache",
        7000,
        3,
        None,
        None,
    )
    address = read_address("rediss://me@[::1]?ssl_ca_certs=ca.pem")
    assert (address.host, address.port, address.username, address.tls) == (
        "::1",
        6379,
        "me",
        {"ssl_ca_certs": "ca.pem"},
    )


@pytest.mark.parametrize("url", ["mooncake://host", "mooncake://host:1/x", "mooncake://u@host:1", "mooncake://host:x"])
def test_a_master_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="give mooncake://HOST:PORT"):
        mooncake_store.read_master(url)


def test_a_master_s_options_are_known() -> None:
    with pytest.raises(BadInput, match="the option 'size'; known are host, protocol"):
        mooncake_store.read_master("mooncake://host:1?size=3")


# --- Redis -----------------------------------------------------------------------------------------------------------


def test_redis_forgets_by_itself(redis: RedisStore, redis_server: RedisServer) -> None:
    key = new_id()
    redis.put(key, 0, b"m", b"d" * 3 * PIECE, soon(0.4))
    assert redis.manifests(key) == [b"m"]
    wait_until(lambda: redis.manifests(key) == [], 5)
    wait_until(lambda: redis_server.client().keys("*") == [b"kvlingo:index"], 5)
    keep(redis)
    assert redis_server.client().zcard("kvlingo:index") == 1


def test_all_that_redis_holds_expires(redis: RedisStore, redis_server: RedisServer) -> None:
    client = redis_server.client()
    for key in (keep(redis), keep(redis)):
        redis.put(key, 1, b"m", b"d", soon())
    assert all(0 < client.ttl(name) <= LATER for name in client.keys("*") if name != b"kvlingo:index")


def test_a_dead_writer_s_room_is_given_back(
    redis_server: RedisServer, redis: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies between its pieces and its manifest, and has no time to clean up."""
    monkeypatch.setattr(redis_store, "UNFINISHED_SECONDS", 0.3)

    class Died(BaseException):
        pass

    def die(**_: Any) -> None:
        raise Died

    store, key, other = RedisStore(redis_server.url, 1000), new_id(), RedisStore(redis_server.url, 1000)
    kept = [new_id(), new_id()]
    other.put(kept[0], 0, b"m", b"d" * 400, soon())
    store._publish = store._drop = die
    with pytest.raises(Died):
        store.put(key, 0, b"m", b"d" * 500, soon(3 * LATER))
    assert redis.manifests(key) == []
    assert redis_server.client().zcard("kvlingo:index") == 2
    time.sleep(0.4)
    other.put(kept[1], 0, b"m", b"d" * 400, soon(2 * LATER))
    assert [bool(other.manifests(one)) for one in kept] == [True, True], "the dead one's room counts no more"
    assert redis_server.client().zcard("kvlingo:index") == 2
    assert not redis_server.client().keys(f"kvlingo:{key}*")


def test_a_writer_whose_room_was_taken_keeps_nothing(redis_server: RedisServer, redis: RedisStore) -> None:
    store, key, other = RedisStore(redis_server.url, 1000), new_id(), new_id()
    publish = store._publish

    def late(**given: Any) -> Any:
        RedisStore(redis_server.url, 1000).put(other, 0, b"m", b"d" * 600, soon(2 * LATER))
        return publish(**given)

    store._publish = late
    assert reason_of(lambda: store.put(key, 0, b"m", b"d" * 600, soon())) == "store_full"
    assert redis.manifests(key) == []
    assert redis.manifests(other) == [b"m"]
    assert not redis_server.client().keys(f"kvlingo:{key}*")


def test_a_lost_index_is_made_anew(redis: RedisStore, redis_server: RedisServer) -> None:
    key = keep(redis)
    redis_server.client().delete("kvlingo:index")
    fetch(redis, key, "")
    fetch(redis, keep(redis), "")
    redis.delete(key)
    assert redis.manifests(key) == []


def test_a_redis_that_is_killed_and_comes_back(tmp_path: Path, redis_server: RedisServer) -> None:
    with RedisServer(tmp_path) as server:
        store = RedisStore(server.url, MOST)
        key = keep(store)
        server.kill()
        for do in (
            lambda: store.manifests(key),
            lambda: store.data(key, 0),
            lambda: keep(store),
            lambda: store.delete(key),
        ):
            assert reason_of(do) == "store_down"
        server.start()
        assert store.manifests(key) == [], "it has forgotten all, and says so"
        fetch(store, keep(store, key), "")


def test_a_redis_that_is_down_at_the_start_may_come_later(tmp_path: Path, redis_server: RedisServer) -> None:
    server = RedisServer(tmp_path)
    store = RedisStore(server.url, MOST)
    assert reason_of(lambda: store.manifests(new_id())) == "store_down"
    with server:
        fetch(store, keep(store), "")


def test_a_slow_redis_is_asked_once_and_its_late_answers_are_not_mixed_up(
    redis_server: RedisServer, redis: RedisStore
) -> None:
    store, client = RedisStore(redis_server.url, MOST, patience=0.3), redis_server.client()
    first, second = keep(store, seed=1), keep(store, seed=2)
    own = {key: (store.manifests(key), store.data(key, 0)) for key in (first, second)}
    client.execute_command("CLIENT", "PAUSE", "1500")
    started = time.monotonic()
    assert reason_of(lambda: store.manifests(first)) == "store_slow"
    assert time.monotonic() - started < 0.8, "asked again"
    assert reason_of(lambda: store.data(first, 0)) == "store_slow"
    time.sleep(1.6)
    for key in (second, first):
        assert (store.manifests(key), store.data(key, 0)) == own[key]


def test_a_redis_that_hangs_holds_nobody(redis_server: RedisServer, redis: RedisStore) -> None:
    store = RedisStore(redis_server.url, MOST, patience=0.3)
    key = keep(store)
    redis_server.hold()
    try:
        assert reason_of(lambda: fetch(store, key, "")) == "store_slow"
        started = time.monotonic()
        assert reason_of(lambda: keep(store)) == "store_slow"
        assert time.monotonic() - started < 3
    finally:
        redis_server.release()
    fetch(store, key, "")


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
def test_a_redis_that_throws_out_what_it_likes(
    tmp_path: Path, redis_server: RedisServer, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it leaves each entry is whole, or is not there."""
    monkeypatch.setattr(redis_store, "PIECE_BYTES", 200_000)
    with RedisServer(tmp_path, ["--maxmemory", "6mb", "--maxmemory-policy", policy]) as server:
        store, kept = RedisStore(server.url, MOST), {}
        for seed in range(40):
            key, data = new_id(), bytes([seed]) * 500_000
            if outcome(lambda key=key, data=data: store.put(key, 0, b"m", data, soon())) != "store_full":
                kept[key] = data
        assert 0 < whole_of(store, kept) < len(kept)


def test_a_redis_that_is_full_says_so(tmp_path: Path, redis_server: RedisServer) -> None:
    with RedisServer(tmp_path, ["--maxmemory", "3mb", "--maxmemory-policy", "noeviction"]) as server:
        store = RedisStore(server.url, MOST)
        key = keep(store)
        assert reason_of(lambda: store.put(new_id(), 0, b"m", bytes(4 << 20), soon())) == "store_full"
        fetch(store, key, "")


def test_a_password_comes_from_the_environment_and_goes_nowhere(
    tmp_path: Path,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer(tmp_path, ["--requirepass", "open sesame"]) as server:
        said = []
        for wrong in (None, "open barley"):
            monkeypatch.delenv(PASSWORD, raising=False)
            if wrong:
                monkeypatch.setenv(PASSWORD, wrong)
            with pytest.raises(BadInput, match=f"does not let us in; set {PASSWORD}") as refused:
                RedisStore(server.url, MOST)
            said.append(str(refused.value))
        monkeypatch.setenv(PASSWORD, "open sesame")
        store = RedisStore(server.url, MOST)
        fetch(store, keep(store), "")
        server.client(password="open sesame").config_set("requirepass", "another")
        server.client(password="another").client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(Refused) as late:
            store.manifests(new_id())
        assert late.value.reason == "store_down"
    assert (tmp_path / "redis.log").read_text()
    out, err = capfd.readouterr()
    everything = [*said, late.value.why, repr(store), repr(vars(store)), caplog.text, out, err]
    assert not [text for text in everything if "sesame" in text or "barley" in text]


def test_tls_is_spoken_and_checked(tmp_path: Path, redis_server: RedisServer) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here, to make a certificate with")
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    for name in ("server", "stranger"):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        command = ["openssl", "req", *kind, "-addext", "subjectAltName=IP:127.0.0.1", *files]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    mine = {"--tls-cert-file": "server.crt", "--tls-key-file": "server.key", "--tls-ca-cert-file": "server.crt"}
    arguments = [word for name, file in mine.items() for word in (name, str(tmp_path / file))]
    with RedisServer(tmp_path, [*arguments, "--tls-auth-clients", "no"], tls=True) as server:
        store = open_store(f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={tmp_path / 'server.crt'}", MOST)
        fetch(store, keep(store), "")
        for other in (f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={tmp_path / 'stranger.crt'}", server.url):
            assert reason_of(lambda url=other: open_store(url, MOST).manifests(new_id())) == "store_down"


# --- Mooncake --------------------------------------------------------------------------------------------------------


def test_mooncake_s_entries_expire(mooncake: MooncakeStore) -> None:
    key = new_id()
    mooncake.put(key, 0, b"m", b"d" * 3 * PIECE, soon(0.4))
    assert mooncake.manifests(key) == [b"m"]
    time.sleep(0.5)
    assert reason_of(lambda: mooncake.data(key, 0)) == "gone"
    assert mooncake.manifests(key) == []
    assert mooncake._store.is_exist(f"kvlingo/{key}/0") == 0


def test_mooncake_s_memory_is_bounded(mooncake: MooncakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the pool holds: the oldest go, whole or in pieces, and none is half there."""
    monkeypatch.setattr(mooncake_store, "PIECE_BYTES", 4 << 20)
    kept = {}
    for seed in range(12):
        key, data = new_id(), bytes([seed]) * (16 << 20)
        if outcome(lambda key=key, data=data: mooncake.put(key, 0, b"m", data, soon())) != "store_full":
            kept[key] = data
    assert 0 < whole_of(mooncake, kept) < 12
    for key in kept:
        mooncake.delete(key)


def test_a_master_that_is_not_there_is_told_at_the_start() -> None:
    if reason := store_servers.no_mooncake():
        pytest.skip(reason)
    started = time.monotonic()
    with pytest.raises(BadInput, match=r"no Mooncake master answers at 127\.0\.0\.1:1 "):
        open_store("mooncake://127.0.0.1:1", MOST)
    assert time.monotonic() - started < 10


def test_a_master_that_goes_and_comes_back(mooncake: MooncakeStore, mooncake_server: MooncakeServer) -> None:
    """The last of Mooncake's tests: what was kept is lost with it."""
    key = keep(mooncake)
    mooncake_server.kill_master()
    assert reason_of(lambda: mooncake.manifests(key)) in ("store_down", "store_slow")
    assert reason_of(lambda: keep(mooncake)) in ("store_down", "store_slow")
    mooncake_server.start_master()

    def again() -> bool:
        try:
            fetch(mooncake, keep(mooncake), "")
        except Refused:
            time.sleep(0.5)
            return False
        return True

    wait_until(again, 40)
