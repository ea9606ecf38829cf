"""What other engines share, without an engine: kept caches, stores, matching, the desk, and a worker with blocks in memory."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlingo.assembling import assemble
from kvlingo.cli import main
from kvlingo.errors import BadInput, IncompatiblePair, UnsupportedModel
from kvlingo.extracts import checkpoint_digests, extract_files
from kvlingo.files import replace_folder
from kvlingo.kv import KV
from kvlingo.language_model import LanguageModel, read
from kvlingo.manifest import plain
from kvlingo.models import load_model
from kvlingo.plan import SpanKind
from kvlingo.serve.external import checking, entries, matching, scheduling, twins, versions
from kvlingo.serve.external.carrying import (
    Carry,
    Made,
    Target,
    fetch,
    head_range,
    lifted,
    map_anew,
    open_own,
    placed,
    rehearse,
    side_of,
    translated,
)
from kvlingo.serve.external.entries import Entry, checked_id, merge, new_id, tenant_of
from kvlingo.serve.external.matching import (
    Link,
    Match,
    Matcher,
    alignment_tensor,
    by_tokens,
    plan_match,
    read_link,
    read_wish,
)
from kvlingo.serve.external.opening import open_store
from kvlingo.serve.external.options import Options, read_options
from kvlingo.serve.external.refusals import Refused
from kvlingo.serve.external.scheduling import NO_BLOCK, Arrival, Desk, Load, Orders, Save
from kvlingo.serve.external.stores import FolderStore, Store
from kvlingo.serve.external.threads import Threads
from kvlingo.serve.external.working import Layers, Told, Worker
from tests.store_servers import RedisServer, no_redis, rewrite

TOKENS = 60
BLOCK = 16
SAME = 1e-4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twins")
    twins.make_twins(folder)
    return folder


@pytest.fixture(scope="module")
def other_ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    twins.make_twins(folder, other_ids=True)
    return folder


@pytest.fixture(scope="module")
def source(made: Path) -> LanguageModel:
    return load_model(made / "source", device="cpu")


@pytest.fixture(scope="module")
def target(made: Path) -> LanguageModel:
    return load_model(made / "target", device="cpu")


def prompt(tokens: int = TOKENS, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (0, *torch.randint(2, 250, (tokens - 1,), generator=generator).tolist())


def options_of(made: Path, **changes: Any) -> Options:
    usual = {"lookup_seconds": 0.3, "load_seconds": 5.0, "translators": (str(made / "translator"),)}
    return Options(**{"store": "x", **usual, **changes})


class MemoryPages:
    """Blocks in memory, [block, slot, heads, dim] a layer; `hold` keeps a write waiting after a layer, `broken` makes it fail."""

    def __init__(self, lm: LanguageModel, blocks: int = 12) -> None:
        shapes = lm.geometry.layers
        self.layers = [
            tuple(torch.full((blocks, BLOCK, s.kv_heads, s.key_dim), torch.nan) for _ in "kv") for s in shapes
        ]
        self.hold, self.broken = threading.Event(), False
        self.hold.set()

    def first_held(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        missing = [sum(block == NO_BLOCK for block in row) * BLOCK for row in blocks]
        return [missing[min(layer, len(blocks) - 1)] for layer in range(len(self.layers))]

    def write(self, layers: Iterable[Made], blocks: Sequence[Sequence[int]], stop: int) -> None:
        if self.broken:
            raise RuntimeError("the kernel says no")
        for layer, *pair in layers:
            mine = self.layers[layer]
            own = blocks[min(layer, len(blocks) - 1)]
            for cache, new in zip(mine, pair, strict=True):
                for place, row in enumerate(new, stop - len(new)):
                    assert own[place // BLOCK] != NO_BLOCK
                    cache[own[place // BLOCK], place % BLOCK] = row
            self.hold.wait(10)

    def read(self, blocks: Sequence[int], tokens: int) -> Layers:
        return [tuple(x[list(blocks)].flatten(0, 1)[:tokens].clone() for x in pair) for pair in self.layers]  # type: ignore[misc]


def layers_of(kv: KV) -> Iterator[Made]:
    return zip(range(len(kv)), kv.keys, kv.values, strict=True)


def in_one(layers: Iterable[Made], tokens: int) -> KV:
    _, keys, values = zip(*in_order(layers), strict=True)
    return KV(keys, values, tokens)


def in_order(layers: Iterable[Made]) -> list[Made]:
    return sorted(layers, key=lambda made: made[0])


def states_of(layers: Iterable[Made]) -> list[tuple[Tensor, Tensor]]:
    return [(keys, values) for _, keys, values in in_order(layers)]


def fill(pages: MemoryPages, lm: LanguageModel, ids: Sequence[int], blocks: Sequence[int]) -> KV:
    """Let a model's own keys and values be in the blocks, as an engine would have them."""
    kv = read(lm, lm.ids(ids))
    heads = [slice(0, s.kv_heads) for s in lm.geometry.layers]
    pages.write(placed(layers_of(kv), kv.tokens, lm.rotary, heads), [blocks], kv.tokens)
    return kv


def wait_for(worker: Worker, want: str, seconds: float = 20) -> Told:
    """Ask a worker until something of the wanted kind has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        told = worker.told()
        if getattr(told, want):
            return told
        time.sleep(0.01)
    raise AssertionError(f"nothing was {want}")


def keep(store: Store, source: LanguageModel, ids: Sequence[int], **changes: Any) -> str:
    """Keep a cache as a producing engine does, and return its id."""
    pages, key = MemoryPages(source), changes.pop("key", None) or new_id()
    blocks = tuple(range(3, 3 + len(ids) // BLOCK + 1))
    fill(pages, source, ids, blocks)
    options = Options(store="x", expires_seconds=changes.pop("expires_seconds", 60.0))
    worker = Worker(store, options, pages, None, side_of(source))
    save = Save("r", key, tuple(ids), blocks, changes.pop("tenant", ""), None, 0)
    worker.start(Orders(saves=[replace(save, **changes)]))
    wait_for(worker, "sent")
    until = time.monotonic() + 10
    while not store.manifests(key) and time.monotonic() < until:
        time.sleep(0.01)
    return key


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store", 1 << 26)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if reason := no_redis():
        pytest.skip(reason)
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["folder", "redis"])
def store(request: pytest.FixtureRequest) -> Store:
    """Most of what is tested here holds whichever store it is; what each does alone is in `test_external_stores`."""
    if request.param == "folder":
        found: Store = request.getfixturevalue("folder_store")
        return found
    return open_store(request.getfixturevalue("redis_server").url, 1 << 26)


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_what_is_kept_is_the_source_s_own_position_free_cache(store: Store, source: LanguageModel) -> None:
    ids = prompt()
    entry, kv = fetch(store, keep(store, source, ids), "")
    own = read(source, source.ids(ids))
    assert entry.ids == ids
    assert entry.fingerprint == source.fingerprint
    for layer in range(len(own)):
        torch.testing.assert_close(kv.keys[layer], own.keys[layer], atol=1e-5, rtol=0)
        torch.testing.assert_close(kv.values[layer], own.values[layer], atol=0, rtol=0)


def test_every_flipped_byte_is_seen(store: Store, source: LanguageModel) -> None:
    """Of the manifest each one; of the data a thousand, at both ends and between."""
    key = keep(store, source, prompt(20))
    step = 1 if isinstance(store, FolderStore) else 16  # the checks are the same, the way there is longer
    for kind, count, whole in (("manifest", 10**6, store.manifests(key)[0]), ("data", 1000, store.data(key, 0))):
        places = range(len(whole)) if len(whole) <= count else [*range(200), *range(0, len(whole), len(whole) // 800)]
        for place in places[::step]:
            flipped = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
            rewrite(store, key, kind, lambda _, new=flipped: new)
            with pytest.raises(Refused):
                fetch(store, key, "")
        rewrite(store, key, kind, lambda _, new=whole: new)
    fetch(store, key, "")


@pytest.mark.parametrize("left", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["manifest", "data"])
def test_a_cut_part_is_seen(store: Store, source: LanguageModel, kind: str, left: float) -> None:
    key = keep(store, source, prompt(20))
    rewrite(store, key, kind, lambda whole: whole[: int(left * len(whole))])
    with pytest.raises(Refused):
        fetch(store, key, "")


def test_an_entry_under_another_id_is_refused(store: Store, source: LanguageModel) -> None:
    key, other = keep(store, source, prompt(20)), new_id()
    store.put(other, 0, store.manifests(key)[0], store.data(key, 0), time.time() + 60)
    with pytest.raises(Refused, match="damaged"):
        fetch(store, other, "")


@pytest.mark.parametrize(
    "given",
    [
        "",
        "../x",
        "/etc/passwd",
        "a" * 31,
        "A" * 32,
        "a" * 32 + "\n",
        "*" * 32,
        7,
        None,
        ["a" * 32],
        "ａ" * 32,
        "٣" * 32,
    ],
)
def test_what_is_no_id_is_refused(given: Any) -> None:
    with pytest.raises(Refused, match="no cache id"):
        checked_id(given)


def test_ids_are_random_and_accepted() -> None:
    assert len({checked_id(new_id()) for _ in range(100)}) == 100


@pytest.mark.parametrize(("heads", "world"), [(4, 2), (4, 4), (2, 4), (1, 2), (8, 2), (3, 3)])
def test_the_heads_of_all_ranks_are_put_together(source: LanguageModel, heads: int, world: int) -> None:
    shape = replace(source.geometry.layers[0], kv_heads=heads)
    geometry = replace(source.geometry, layers=(shape,) * 2)
    whole = KV(*(tuple(torch.randn(1, heads, 5, shape.key_dim) for _ in range(2)) for _ in "kv"), 5)
    entry = Entry("a" * 32, 0, world, "f", "t", plain(geometry.to_json()), "float32", (1,) * 5, "", None, 0, 0.0, 1.0)
    parts = []
    for rank in range(world):
        mine = head_range(heads, rank, world)
        parts.append(KV(*(tuple(x[:, mine] for x in side) for side in (whole.keys, whole.values)), 5))
    merged = merge(entry, parts)
    for one, other in ((merged.keys, whole.keys), (merged.values, whole.values)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- where it is kept ------------------------------------------------------------------------------------------------


def test_an_entry_is_there_whole_or_not_at_all(folder_store: FolderStore) -> None:
    """The data is written first; until the manifest is there, nothing is."""
    store = folder_store
    key, seen = new_id(), []
    (store.folder / f"{key}.0.safetensors").write_bytes(b"x")
    seen.append(store.manifests(key))
    store.put(key, 0, b"what", b"data", time.time() + 60)
    assert seen == [[]]
    assert store.manifests(key) == [b"what"]
    assert store.data(key, 0) == b"data"
    assert not [file for file in store.folder.iterdir() if file.name.endswith(".partial")]


def test_what_is_forgotten_is_gone(store: Store) -> None:
    key = new_id()
    store.put(key, 0, b"what", b"data", time.time() + 60)
    store.delete(key)
    store.delete(key)
    assert store.manifests(key) == []
    with pytest.raises(Refused) as refused:
        store.data(key, 0)
    assert refused.value.reason == "gone"


def test_a_store_is_bounded_and_what_expires_first_makes_room(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 1000)
    keys = [new_id() for _ in range(5)]
    for i, key in enumerate(keys):
        store.put(key, 0, b"m" * 10, b"d" * 290, time.time() + 60 + i)
        held = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert held <= 1000
    assert [bool(store.manifests(key)) for key in keys] == [False, False, True, True, True]
    with pytest.raises(Refused) as refused:
        store.put(new_id(), 0, b"", b"d" * 1001, time.time())
    assert refused.value.reason == "too_large"
    assert [bool(store.manifests(key)) for key in keys] == [False, False, True, True, True]


def test_what_has_expired_or_was_never_finished_is_swept(tmp_path: Path) -> None:
    store, now = FolderStore(tmp_path, 10**6), time.time()
    old, new = new_id(), new_id()
    store.put(old, 0, b"m", b"d", now - 1)
    for name, age in ((f".{old}.0.json.1-00.partial", 3600), (f".{new}.0.json.1-00.partial", 1), ("notes.txt", 9999)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (now - age,) * 2)
    store.put(new, 0, b"m", b"d", now + 60)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {f"{new}.0.json", f"{new}.0.safetensors", f".{new}.0.json.1-00.partial", "notes.txt", "lock"}


def test_many_writers_in_one_folder(tmp_path: Path) -> None:
    store, keys, faults = FolderStore(tmp_path, 5000), [new_id() for _ in range(40)], []

    def write(mine: list[str]) -> None:
        try:
            for key in mine:
                FolderStore(tmp_path, 5000).put(key, 0, key.encode(), key.encode() * 10, time.time() + 60)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(keys[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    there = [key for key in keys if store.manifests(key)]
    assert 5 <= len(there) <= 14
    assert all(store.data(key, 0) == key.encode() * 10 for key in there)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 5000


def test_a_store_that_is_down_says_so(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store", 1000)
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_bytes(b"")
    with pytest.raises(Refused) as refused:
        store.put(new_id(), 0, b"", b"", 0.0)
    assert refused.value.reason == "store_down"
    with pytest.raises(BadInput, match="can't keep caches"):
        FolderStore(tmp_path / "store" / "inside", 1000)


def test_stores_by_name(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path / "a"), 1), FolderStore)
    assert open_store(f"file:{tmp_path / 'b'}", 1).folder == tmp_path / "b"  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="no store of kind 's3'"):
        open_store("s3://bucket", 1)


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_are_read() -> None:
    given = {"store": "x", "translators": ["a"], "load_seconds": 3, "load_async": False}
    assert read_options(given) == Options("x", translators=("a",), load_seconds=3, load_async=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no store"),
        ({"store": 3}, "expected str"),
        ({"store": "x", "tails": 1}, "unknown option 'tails'"),
        ({"store": "x", "tail": 0}, "at least 1"),
        ({"store": "x", "tail": True}, "expected int"),
        ({"store": "x", "load_async": 1}, "expected bool"),
        ({"store": "x", "translators": "a"}, "expected tuple"),
        ({"store": "x", "load_seconds": 0}, "above 0"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_options(given)


# --- what fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"kvlingo": 7},
        {"kvlingo": {"file": "x"}},
        {"kvlingo": {"save": "yes"}},
        {"kvlingo": {"save": None}},
        {"kvlingo": {"save": 1}},
        {"kvlingo": {"load": "../../x"}},
        {"kvlingo": {"load": {"id": "a" * 32}}},
        {"kvlingo": {"source_contents": [[1]]}},
        {"kvlingo": {"source_contents": 5}},
        {"kvlingo": {"source_contents": [[0, float("inf")]]}},
        {"kvlingo": {"source_contents": [[0, 1.5]]}},
        {"kvlingo": {"source_contents": [[5, 2]]}},
        {"kvlingo": {"target_contents": [[-1, 2]]}},
        {"kvlingo": {"target_contents": [[False, True]]}},
    ],
)
def test_what_a_client_asks_for_makes_sense_or_is_refused(params: Any) -> None:
    with pytest.raises(Refused):
        read_wish(params)


@pytest.mark.parametrize("params", [None, 3, "x", [], {}, {"other": {}}, {"kvlingo": None}])
def test_what_is_not_for_us_is_left_alone(params: Any) -> None:
    assert read_wish(params) is None


def test_tokens_are_aligned_as_long_as_they_are_the_same() -> None:
    assert by_tokens([1, 2, 3], [1, 2, 4, 3]) == [0, 1, -1, -1]
    assert by_tokens([1, 2, 3], [1, 2]) == [0, 1]
    assert by_tokens([1], [2]) == [-1]


def matcher_of(made: Path, store: Store, **changes: Any) -> Matcher:
    options = options_of(made, **changes)
    links = [read_link(folder, options) for folder in options.translators]
    return Matcher(store, links, options, str(made / "target"))


def find(matcher: Matcher, key: str, ids: Sequence[int], tenant: str = "") -> Match:
    wish = read_wish({"kvlingo": {"load": key}})
    assert wish is not None
    return matcher.find(wish, ids, tenant, time.monotonic() + 0.2)


def test_all_but_sink_and_tail_is_translated(made: Path, store: Store, source: LanguageModel) -> None:
    ids = prompt()
    matcher = matcher_of(made, store)
    match = find(matcher, keep(store, source, ids), ids)
    plan = plan_match(match, 0, matcher.options)
    assert plan.translated == (1, TOKENS - 1)
    longer = find(matcher, match.entry.id, [*ids, 3, 4])
    assert plan_match(longer, 0, matcher.options).translated == (1, TOKENS)
    held = plan_match(longer, 48, matcher.options)
    assert held.translated == (48, TOKENS)
    assert held.spans[0].provenance == "translated"


def test_a_translation_is_not_translated_again(made: Path, store: Store, source: LanguageModel) -> None:
    ids = prompt()
    matcher = matcher_of(made, store, head_tokens=10)
    few = find(matcher, keep(store, source, ids, translated_until=8), ids)
    assert plan_match(few, 0, matcher.options).translated == (8, TOKENS - 1)
    many = find(matcher, keep(store, source, ids, translated_until=20), ids)
    with pytest.raises(Refused, match="only a translation"):
        plan_match(many, 0, matcher.options)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"tenant": tenant_of("x")}, "unknown"), ({"lora": "poet"}, "lora"), ({"expires_seconds": 0.15}, "expired")],
)
def test_what_does_not_belong_is_refused(
    made: Path, store: Store, source: LanguageModel, changes: dict[str, Any], reason: str
) -> None:
    ids = prompt(20)
    key = keep(store, source, ids, **changes)
    time.sleep(changes.get("expires_seconds", 0))
    with pytest.raises(Refused) as refused:
        find(matcher_of(made, store), key, ids)
    forgets = reason == "expired" and not isinstance(store, FolderStore)  # a server forgets by itself
    assert refused.value.reason == ("unknown" if forgets else reason)


def test_another_tenant_s_cache_and_none_are_told_apart_by_nobody(
    made: Path, store: Store, source: LanguageModel
) -> None:
    matcher, ids = matcher_of(made, store), prompt(20)
    told = []
    for key in (keep(store, source, ids, tenant=tenant_of("x")), new_id()):
        with pytest.raises(Refused) as refused:
            find(matcher, key, ids, tenant_of("y"))
        told.append((refused.value.reason, refused.value.why))
    assert told[0] == told[1]


def test_another_model_s_cache_is_unsupported(made: Path, store: Store, target: LanguageModel) -> None:
    with pytest.raises(Refused) as refused:
        find(matcher_of(made, store), keep(store, target, prompt(20)), prompt(20))
    assert refused.value.status == "unsupported"


def test_one_that_is_still_being_written_is_waited_for(made: Path, store: Store, source: LanguageModel) -> None:
    ids = prompt(20)
    matcher, key = matcher_of(made, store), keep(store, source, ids)
    manifest, data = store.manifests(key)[0], store.data(key, 0)
    store.delete(key)
    threading.Timer(0.3, lambda: store.put(key, 0, manifest, data, time.time() + 60)).start()
    wish = read_wish({"kvlingo": {"load": key}})
    assert wish is not None
    assert matcher.find(wish, ids, "", time.monotonic() + 5).entry.id == key


def test_other_ids_of_the_same_text_are_aligned(other_ids: Path, store: Store) -> None:
    source = load_model(other_ids / "source", device="cpu")
    target = load_model(other_ids / "target", device="cpu")
    text = "one text, two tokenizers: naïve café"
    ids, wanted = (tuple(lm.tokenizer(text)["input_ids"]) for lm in (source, target))
    assert ids != wanted
    key = keep(store, source, ids)
    with pytest.raises(Refused) as refused:
        find(matcher_of(other_ids, store), key, wanted)
    assert refused.value.reason == "tokenizer"
    matcher = matcher_of(other_ids, store, source_tokenizers=(str(other_ids / "source"),))
    assert find(matcher, key, wanted).alignment == tuple(range(len(ids)))
    with pytest.raises(Refused) as refused:
        find(matcher, key, tuple(target.tokenizer("quite another text")["input_ids"]))
    assert refused.value.reason == "text"


def test_vocabularies_are_spelled_out_before_the_first_request(
    other_ids: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a million tokens take seconds, longer than a request waits for a store."""
    spelled = list[int]()
    monkeypatch.setattr(matching, "align", lambda *sides: spelled.append(len(sides)))
    matcher_of(other_ids, store)
    assert not spelled
    matcher_of(other_ids, store, source_tokenizers=(str(other_ids / "source"),))
    assert spelled == [2]


def test_an_unproven_translator_is_not_used_unasked(made: Path, tmp_path: Path) -> None:
    options = options_of(made)
    document = json.loads((made / "translator" / "translator.json").read_text())
    document["manifest"]["held_out"] = None
    document["sha256"] = entries.content_hash(document)
    folder = tmp_path / "unproven"
    folder.mkdir()
    for file in (made / "translator").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "translator.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match="never evaluated"):
        read_link(folder, options)
    assert isinstance(read_link(folder, replace(options, unproven=True)), Link)


@pytest.mark.parametrize(("mapper", "used"), [("translator", True), ("another", False), (7, False)])
def test_a_translator_that_was_asked_for_is_used_or_none(
    made: Path, store: Store, source: LanguageModel, mapper: Any, used: bool
) -> None:
    wish = read_wish({"kvlingo": {"load": keep(store, source, prompt()), "mapper": mapper}})
    assert wish is not None
    if used:
        assert matcher_of(made, store).find(wish, prompt(), "", time.monotonic() + 1).link.folder.name == mapper
        return
    with pytest.raises(Refused) as refused:
        matcher_of(made, store).find(wish, prompt(), "", time.monotonic() + 1)
    assert refused.value.status == "unsupported"


ROUTER_S = "a-b-full_head-bf16-tp1-h2-s" + "1" * 40 + "-t" + "2" * 40 + "-b1"


def with_options(link: Link, options: dict[str, Any], **changes: Any) -> Link:
    return replace(link, manifest=replace(link.manifest, options=options), **changes)


def test_a_translator_is_found_by_the_id_that_a_router_knows_it_by(
    made: Path, store: Store, source: LanguageModel
) -> None:
    """The name of a mapper that was imported: semantic-router sends it, whatever the folder is called here."""
    options = options_of(made)
    (link,) = (read_link(folder, options) for folder in options.translators)
    imported = with_options(link, {"interchange": {"format": "semantic-router", "mapper_id": ROUTER_S}})
    wish = read_wish({"kvlingo": {"load": keep(store, source, prompt()), "mapper": ROUTER_S}})
    assert wish is not None
    for name in (ROUTER_S, "translator", link.digest):
        match = Matcher(store, [imported], options, "").find(replace(wish, mapper=name), prompt(), "", time.monotonic())
        assert match.link is imported
    for other in ({}, {"interchange": 7}, {"interchange": {"mapper_id": 7}}, {"interchange": {"mapper_id": "other"}}):
        with pytest.raises(Refused) as refused:
            Matcher(store, [with_options(link, other)], options, "").find(wish, prompt(), "", time.monotonic())
        assert (refused.value.reason, refused.value.status) == ("mapper", "unsupported")


@pytest.mark.parametrize("name", ["mapper_id", "folder"])
def test_a_name_of_two_translators_is_refused(made: Path, store: Store, source: LanguageModel, name: str) -> None:
    """A folder's name may be another one's id, and an id may be on two mappers: neither is guessed at."""
    options = options_of(made)
    (link,) = (read_link(folder, options) for folder in options.translators)
    imported = {"interchange": {"mapper_id": ROUTER_S}}
    stranger = replace(link.manifest, source=replace(link.manifest.source, fingerprint="0" * 64), options=imported)
    other = replace(link, manifest=stranger, folder=Path("elsewhere"), digest="0" * 64)
    mine = with_options(link, imported) if name == "mapper_id" else replace(link, folder=Path(ROUTER_S))
    matcher = Matcher(store, [mine, other], options, "")
    key = keep(store, source, prompt())
    wish = read_wish({"kvlingo": {"load": key, "mapper": ROUTER_S}})
    assert wish is not None
    with pytest.raises(Refused, match="two translators") as refused:
        matcher.find(wish, prompt(), "", time.monotonic())
    assert refused.value.status == "unsupported"
    assert find(matcher, key, prompt()).link is mine


# --- what is made of it ----------------------------------------------------------------------------------------------


def carry_of(matcher: Matcher, match: Match, ids: Sequence[int], native: int = 0) -> Carry:
    plan = plan_match(match, native, matcher.options)
    stop = plan.translated[1]
    known = match.entry.id, "", match.entry.sha256, match.link.digest
    return Carry(*known, tuple(ids[:stop]), match.alignment[:stop], plan, native)


@pytest.mark.parametrize("native", [0, 16, 48])
def test_the_target_s_own_keys_come_out(
    made: Path, store: Store, source: LanguageModel, target: LanguageModel, native: int
) -> None:
    """Through store, map and rotation: what the engine would have computed, from the first token it does not hold."""
    ids = prompt()
    matcher = matcher_of(made, store)
    match = find(matcher, keep(store, source, ids), ids)
    side = Target(target, [match.link])
    entry, kv = fetch(store, match.entry.id, "")
    carry = carry_of(matcher, match, ids, native)
    got = in_one(translated(carry, entry.translated_until, kv, side, [0] * len(target.geometry)), TOKENS - 1 - native)
    known = target, side.translators[carry.digest], kv, alignment_tensor(carry.alignment), torch.tensor(carry.ids)
    plain = assemble(carry.plan, *known, prefix=read(target, target.ids(ids[: carry.plan.translated[0]])))
    own = read(target, target.ids(ids)).narrow(native, TOKENS - 1)
    torch.testing.assert_close(got.keys, plain.narrow(native, TOKENS - 1).keys, atol=1e-6, rtol=0)
    torch.testing.assert_close(got.values, plain.narrow(native, TOKENS - 1).values, atol=1e-6, rtol=0)
    for layer in range(len(own)):
        torch.testing.assert_close(got.keys[layer], own.keys[layer], atol=SAME, rtol=0)
        torch.testing.assert_close(got.values[layer], own.values[layer], atol=SAME, rtol=0)


@pytest.mark.parametrize("native", [0, 16])
def test_what_no_window_holds_is_not_made(
    made: Path, store: FolderStore, source: LanguageModel, target: LanguageModel, native: int
) -> None:
    """Layers for which the engine keeps only the last blocks get those, the others all; both are the target's own."""
    ids, first = prompt(), [32, 0, 48]  # not the order in which layers are made
    matcher = matcher_of(made, store)
    match = find(matcher, keep(store, source, ids), ids)
    entry, kv = fetch(store, match.entry.id, "")
    carry = carry_of(matcher, match, ids, native)
    made = translated(carry, entry.translated_until, kv, Target(target, [match.link]), first)
    got = in_one(made, TOKENS - 1 - native)
    own = read(target, target.ids(ids)).narrow(0, TOKENS - 1)
    assert [got.held(layer) for layer in range(3)] == [TOKENS - 1 - max(native, f) for f in first]
    heads = [slice(0, s.kv_heads) for s in target.geometry.layers]
    rows = zip(
        *(states_of(placed(layers_of(x), TOKENS - 1, target.rotary, heads)) for x in (got, own)),
        strict=True,
    )
    for layer, (mine, whole) in enumerate(rows):
        for a, b in zip(mine, whole, strict=True):
            torch.testing.assert_close(a, b[max(native, first[layer]) :], atol=SAME, rtol=0)


def test_a_rehearsal_lays_out_the_maps_and_remembers_no_text(
    made: Path, store: FolderStore, source: LanguageModel, target: LanguageModel
) -> None:
    match = find(matcher_of(made, store), keep(store, source, prompt()), prompt())
    side = Target(target, [match.link])
    heads, translator = dict(side._heads), side.translators[match.link.digest]
    assert translator._folded is None
    rehearse(side)
    assert translator._folded is not None
    assert side._heads == heads


def test_lifting_undoes_placing(source: LanguageModel) -> None:
    own = read(source, source.ids(prompt()))
    heads = [slice(0, s.kv_heads) for s in source.geometry.layers]
    again = lifted(states_of(placed(layers_of(own), own.tokens, source.rotary, heads)), source.rotary)
    torch.testing.assert_close(again.keys, own.keys, atol=1e-5, rtol=0)


def test_another_target_is_refused(made: Path, source: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(IncompatiblePair):
        Target(source, [read_link(made / "translator", options_of(made))])


def test_a_checkpoint_is_mapped_and_not_held(made: Path) -> None:
    """The same weights, from the file; what the file has in another type stays as it was loaded."""
    lm = load_model(made / "target", device="cpu")
    own, names = read(lm, lm.ids(prompt())), [name for name, _ in lm.model.named_parameters()]
    before = {name: weight.data_ptr() for name, weight in lm.model.named_parameters()}
    size = sum(weight.nbytes for weight in lm.model.parameters())
    assert map_anew(lm, made / "target") == size
    assert not {before[name] for name in names} & {weight.data_ptr() for weight in lm.model.parameters()}
    again = read(lm, lm.ids(prompt()))
    assert all(torch.equal(a, b) for a, b in zip(own.keys + own.values, again.keys + again.values, strict=True))
    assert lm.fingerprint == load_model(made / "target", device="cpu").fingerprint
    other = load_model(made / "target", device="cpu", dtype=torch.bfloat16)
    assert map_anew(other, made / "target") == 0
    assert other.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def extract(made: Path) -> Path:
    """The target's own part as a folder; one of the beginnings is that of the prompts here."""
    lm = load_model(made / "target", device="cpu")
    files = extract_files(lm, [prompt()[:6]], checkpoint_digests(made / "target"))
    replace_folder(made / "extract", files)
    return made / "extract"


@pytest.mark.parametrize("native", [0, 2, 16])
def test_from_an_extract_comes_what_comes_from_the_checkpoint(
    made: Path, extract: Path, store: Store, source: LanguageModel, target: LanguageModel, native: int
) -> None:
    ids = prompt()
    matcher = matcher_of(made, store, sink=4, extract=str(extract))
    match = find(matcher, keep(store, source, ids), ids)
    assert match.known == 6
    entry, kv = fetch(store, match.entry.id, "")
    carry, first = carry_of(matcher, match, ids, native), [0] * len(target.geometry)
    assert (carry.plan.translated[0] > native) == (native < 4)
    own = open_own(str(made / "target"), torch.float32, str(extract))
    got = translated(carry, entry.translated_until, kv, Target(own.lm, [match.link], own.extract), first)
    expected = translated(carry, entry.translated_until, kv, Target(target, [match.link]), first)
    torch.testing.assert_close(states_of(got), states_of(expected), atol=1e-5, rtol=1e-5)


def test_a_beginning_that_the_extract_lacks_is_refused(
    made: Path, extract: Path, store: Store, source: LanguageModel
) -> None:
    """By the scheduler, before anything is loaded; by the worker, should it be asked all the same."""
    ids = prompt(seed=1)
    matcher = matcher_of(made, store, sink=4, extract=str(extract))
    match = find(matcher, keep(store, source, ids), ids)
    assert match.known == 1
    with pytest.raises(Refused, match="has the first 1") as refused:
        plan_match(match, 0, matcher.options)
    assert (refused.value.reason, refused.value.status) == ("head", "fallback_reprefill")
    assert plan_match(match, 4, matcher.options).translated[0] == 4
    own = open_own(str(made / "target"), torch.float32, str(extract))
    with pytest.raises(Refused, match="begins with these 4"):
        Target(own.lm, [match.link], own.extract).head(ids[:4])


def test_an_engine_that_keeps_needs_no_checkpoint(made: Path, extract: Path, target: LanguageModel) -> None:
    own = open_own(str(made / "target"), torch.float32, str(extract))
    side = side_of(own.lm)
    assert side.card == replace(side_of(target).card, name=side.card.name)
    assert side.geometry == target.geometry


def test_an_extract_of_another_model_is_refused(made: Path, extract: Path) -> None:
    with pytest.raises(IncompatiblePair, match="other weights, tokens or configuration"):
        open_own(str(made / "source"), torch.float32, str(extract))


@pytest.mark.parametrize("changed", ["configuration", "one norm", "tokens", "nothing"])
def test_an_extract_of_a_changed_checkpoint_is_refused(made: Path, extract: Path, tmp_path: Path, changed: str) -> None:
    folder = shutil.copytree(made / "target", tmp_path / "target")
    if changed == "configuration":
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 2 * config["rope_parameters"]["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config))
    elif changed == "one norm":
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.1.input_layernorm.weight"][3] += 0.5
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    elif changed == "tokens":
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace('"a"', '"\\u00e5"', 1))
    else:
        (folder / "model.safetensors").rename(folder / "renamed.safetensors")
        assert open_own(str(folder), torch.float32, str(extract)).folder == folder
        return
    with pytest.raises(IncompatiblePair, match="other weights, tokens or configuration"):
        open_own(str(folder), torch.float32, str(extract))


# --- a worker --------------------------------------------------------------------------------------------------------


@pytest.fixture
def loading(
    made: Path, store: Store, source: LanguageModel, target: LanguageModel
) -> Iterator[tuple[Worker, MemoryPages, Load, KV]]:
    ids = prompt()
    matcher = matcher_of(made, store)
    match = find(matcher, keep(store, source, ids), ids)
    pages = MemoryPages(target)
    worker = Worker(store, matcher.options, pages, Target(target, [match.link]), None)
    load = Load("r", carry_of(matcher, match, ids), ((7, 2, 9, 4),))
    yield worker, pages, load, read(target, target.ids(ids))
    pages.hold.set()


def test_a_load_fills_its_slots_and_no_others(loading: tuple[Worker, MemoryPages, Load, KV]) -> None:
    worker, pages, load, own = loading
    worker.start(Orders(loads=[load]))
    told = wait_for(worker, "received")
    assert told.received == {"r"}
    assert told.failed == {}
    held = pages.read(load.blocks[0], TOKENS)
    assert not held[0][0][-1].isfinite().any()  # the last token is the engine's to read
    again = lifted([(k[:-1], v[:-1]) for k, v in held], _rotary(worker))
    torch.testing.assert_close(again.keys, own.narrow(0, TOKENS - 1).keys, atol=SAME, rtol=0)
    others = [b for b in range(12) if b not in load.blocks[0]]
    assert not pages.layers[0][0][others].isfinite().any()


def test_a_load_writes_nothing_where_no_block_is(loading: tuple[Worker, MemoryPages, Load, KV]) -> None:
    """Three kinds of blocks, as a hybrid cache manager has them; in two of them a window has left first blocks behind."""
    worker, pages, load, own = loading
    rows = ((7, 2, 9, 4), (NO_BLOCK, 0, 1, 3), (NO_BLOCK, NO_BLOCK, 5, 6))
    worker.start(Orders(loads=[replace(load, blocks=rows)]))
    assert wait_for(worker, "received").failed == {}
    heads = [slice(0, s.kv_heads) for s in _target(worker).lm.geometry.layers]
    whole = states_of(placed(layers_of(own.narrow(0, TOKENS - 1)), TOKENS - 1, _rotary(worker), heads))
    for layer, row in enumerate(rows):
        first = row.count(NO_BLOCK) * BLOCK
        held = pages.layers[layer][0][[b for b in row if b != NO_BLOCK]].flatten(0, 1)[: TOKENS - 1 - first]
        torch.testing.assert_close(held, whole[layer][0][first:], atol=SAME, rtol=0)


def _rotary(worker: Worker) -> Any:
    return _target(worker).lm.rotary


def _target(worker: Worker) -> Target:
    assert worker._target is not None
    return worker._target


@pytest.mark.parametrize("fault", ["deleted", "corrupt", "kernel", "late", "expired", "replaced"])
def test_a_load_that_fails_is_told_once(
    loading: tuple[Worker, MemoryPages, Load, KV], store: Store, source: LanguageModel, fault: str
) -> None:
    worker, pages, load, _ = loading
    key = load.carry.key
    if fault == "deleted":
        store.delete(key)
    elif fault == "corrupt":
        rewrite(store, key, "data", lambda _: b"")
    elif fault == "kernel":
        pages.broken = True
    elif fault == "late":
        worker._options = replace(worker._options, load_seconds=0.05)
        store.data = lambda *_: time.sleep(0.5) or b""  # type: ignore[method-assign, func-returns-value]
    elif fault == "expired":
        entry, data = entries.parse(store.manifests(key)[0], key), store.data(key, 0)
        store.delete(key)
        store.put(key, 0, entries.describe(replace(entry, expires=time.time() - 1)), data, time.time() + 60)
    elif fault == "replaced":  # by one of another text of the same length, under the id that a client has chosen
        store.delete(key)
        assert keep(store, source, prompt(seed=1), key=key) == key
    worker.start(Orders(loads=[load]))
    told = wait_for(worker, "received")
    expected = {"deleted": "gone", "replaced": "gone", "kernel": "error", "late": "store_slow"}.get(fault, fault)
    assert told.failed["r"][0] == expected
    assert "/" not in told.failed["r"][1], "it names a file"
    time.sleep(0.6 if fault == "late" else 0.05)
    assert worker.told().received == set()
    assert fault == "kernel" or not pages.layers[0][0].isfinite().any(), "a load that was given up has written"


@pytest.mark.parametrize("ends", ["late", "gone"])
def test_a_load_that_is_writing_ends_at_its_next_layer_and_is_told_then(
    loading: tuple[Worker, MemoryPages, Load, KV], ends: str
) -> None:
    """Until then its blocks are held: what is told as ended writes nothing any more."""
    worker, pages, load, _ = loading
    pages.hold.clear()
    worker._options = replace(worker._options, load_seconds=2.0 if ends == "late" else 30.0)
    worker.start(Orders(loads=[load]))
    until = time.monotonic() + 10
    while not pages.layers[0][1].isfinite().any() and time.monotonic() < until:
        time.sleep(0.01)
    if ends == "gone":
        worker.start(Orders(dropped={"r"}))
    time.sleep(2.2 if ends == "late" else 0.1)
    assert worker.told().received == set()
    pages.hold.set()
    assert wait_for(worker, "received").failed["r"][0] == "late"
    assert pages.layers[0][0].isfinite().any()
    assert not pages.layers[1][0].isfinite().any()


def test_a_request_that_is_gone_is_not_written_for(loading: tuple[Worker, MemoryPages, Load, KV], store: Store) -> None:
    worker, pages, load, _ = loading
    whole = store.data
    store.data = lambda *a: (time.sleep(0.3), whole(*a))[1]  # type: ignore[method-assign]
    worker.start(Orders(loads=[load]))
    worker.start(Orders(dropped={"r"}))
    assert wait_for(worker, "received", 0.25).received == {"r"}
    time.sleep(0.4)
    assert not pages.layers[0][0].isfinite().any()


def test_an_id_that_is_taken_is_not_written_over(store: Store, source: LanguageModel) -> None:
    """A client may choose the id (an answer that is streamed can't tell one); it can't choose one that is there."""
    key = keep(store, source, prompt(20), tenant=tenant_of("alice"))
    before = store.manifests(key), store.data(key, 0)
    pages = MemoryPages(source)
    fill(pages, source, prompt(20, seed=9), (1, 2))
    worker = Worker(store, Options(store="x"), pages, None, side_of(source))
    worker.start(Orders(saves=[Save("r", key, prompt(20, seed=9), (1, 2), "", None, 0)]))
    assert wait_for(worker, "counts").counts == {"save_failed_taken": 1}
    assert (store.manifests(key), store.data(key, 0)) == before


def test_a_store_that_hangs_holds_no_blocks(source: LanguageModel, store: Store) -> None:
    """Copies are made at once; what can't be put away in time is not kept, and counted."""
    pages, hang = MemoryPages(source), threading.Event()
    fill(pages, source, prompt(), (0, 1, 2, 3))
    store.put = lambda *_: hang.wait(20)  # type: ignore[method-assign, assignment]
    worker = Worker(store, Options(store="x", threads=1), pages, None, side_of(source))
    saves = [Save(f"r{i}", new_id(), prompt(), (0, 1, 2, 3), "", None, 0) for i in range(9)]
    worker.start(Orders(saves=saves))
    sent: set[str] = set()
    until, counts = time.monotonic() + 10, 0
    while len(sent) < len(saves) and time.monotonic() < until:
        told = worker.told()
        sent |= told.sent
        counts += told.counts["save_failed_store_slow"]
    hang.set()
    assert len(sent) == len(saves)
    assert counts + worker.told().counts["save_failed_store_slow"] == 5


# --- the desk --------------------------------------------------------------------------------------------------------


def arrival(ids: Sequence[int], key: str | None = None, **changes: Any) -> Arrival:
    asked = {"load": key} if key is not None else {"save": True}
    return Arrival(**{"id": "r", "params": {"kvlingo": asked}, "ids": ids, "salt": None, **changes})


def ask(desk: Desk, native: int = 0, request: str = "r") -> int:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        tokens = desk.matched(request, native)
        if tokens is not None:
            return tokens
        time.sleep(0.01)
    raise AssertionError("the desk never answered")


@pytest.fixture
def desk(made: Path, store: Store) -> Desk:
    matcher = matcher_of(made, store)
    return Desk(matcher, matcher.options, saves=True)


def test_a_request_is_matched_loaded_and_told(desk: Desk, store: Store, source: LanguageModel) -> None:
    ids = prompt()
    salt = desk.arrive(arrival(ids, keep(store, source, ids)))
    assert salt is not None
    assert ask(desk) == TOKENS - 1
    assert desk.salt_again("r") == (False, None)
    desk.allocated("r", [[7, 2, 9, 4]], TOKENS - 1)
    (load,) = desk.orders().loads
    assert load.blocks == ((7, 2, 9, 4),)
    assert load.carry.ids == ids[:-1]
    assert desk.orders().loads == []
    desk.arrived("r")
    keeps, told = desk.finished("r", [*ids, 5], [7, 2, 9, 4], whole=True)
    assert not keeps
    assert told is not None
    assert told["kvlingo"]["status"] == "applied"
    assert told["kvlingo"]["prompt"] == {"native": 0, "translated": TOKENS - 2, "recomputed": 2}


def test_one_that_comes_again_and_finds_all_of_its_prompt_has_translated_nothing(
    desk: Desk, store: Store, source: LanguageModel
) -> None:
    """As after a preemption: the engine asks anew, with what is left of it in its prefix cache."""
    ids = prompt()
    desk.arrive(arrival(ids, keep(store, source, ids)))
    desk.allocated("r", [[7, 2, 9, 4]], ask(desk))
    desk.arrived("r")
    assert ask(desk, TOKENS) == 0
    _, told = desk.finished("r", [*ids, 5], [7, 2, 9, 4], whole=True)
    assert told is not None
    assert told["kvlingo"]["prompt"] == {"native": TOKENS, "translated": 0, "recomputed": 0}


def test_nothing_that_a_client_asks_for_ends_the_engine(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the desk is called, an error would end the server for all."""
    monkeypatch.setattr(scheduling, "read_wish", lambda params: 1 // 0)
    assert desk.arrive(arrival(prompt(), new_id())) is None
    _, told = desk.finished("r", prompt(), [1], whole=True)
    assert told is not None
    assert (told["kvlingo"]["status"], told["kvlingo"]["reason"]) == ("unsupported", "bad_request")


def test_a_refused_request_gets_its_own_salt_back_once(desk: Desk) -> None:
    assert desk.arrive(arrival(prompt(), new_id(), salt="mine")) not in (None, "mine")
    assert ask(desk) == 0
    assert desk.salt_again("r") == (True, "mine")
    assert desk.salt_again("r") == (False, None)
    assert ask(desk, 32) == 0
    _, told = desk.finished("r", prompt(), [1], whole=True)
    assert told is not None
    assert told["kvlingo"]["reason"] == "unknown"
    assert told["kvlingo"]["prompt"] == {"native": 32, "translated": 0, "recomputed": TOKENS - 32}


def test_a_failed_load_is_not_tried_again(desk: Desk, store: Store, source: LanguageModel) -> None:
    ids = prompt()
    desk.arrive(arrival(ids, keep(store, source, ids)))
    assert ask(desk)
    desk.allocated("r", [[7, 2, 9, 4]], TOKENS - 1)
    desk.failed("r", "corrupt", "bits fell over")
    assert ask(desk) == 0
    assert desk.salt_again("r")[0]
    _, told = desk.finished("r", ids, [1], whole=True)
    assert told is not None
    assert told["kvlingo"]["status"] == "fallback_reprefill"
    assert told["kvlingo"]["prompt"]["translated"] == 0


def test_salts_are_one_for_each_hand_over(desk: Desk, made: Path, store: Store) -> None:
    keys = [new_id(), new_id()]
    salts = [
        desk.arrive(arrival(prompt(), key, id=f"{key}-{salt}-{again}", salt=salt))
        for key in keys
        for salt in (None, "x", "y")
        for again in (1, 2)
    ]
    assert len(set(salts)) == 6
    other = Desk(matcher_of(made, store), desk.options, saves=True)
    assert other.arrive(arrival(prompt(), keys[0])) not in salts  # another process: nobody can send one


@pytest.mark.parametrize(
    "changes",
    [{"lora": "poet"}, {"unusable": "images"}, {"params": {"kvlingo": {"load": "../x"}}}, {"params": {"kvlingo": []}}],
)
def test_what_can_t_be_done_is_never_salted(desk: Desk, changes: dict[str, Any]) -> None:
    assert desk.arrive(arrival(prompt(), new_id(), **changes)) is None
    assert ask(desk) == 0
    _, told = desk.finished("r", prompt(), [1], whole=True)
    assert told is not None
    assert told["kvlingo"]["status"] in ("unsupported", "fallback_reprefill")


def test_a_store_that_says_nothing_is_not_waited_for(desk: Desk, store: Store) -> None:
    store.manifests = lambda _: time.sleep(3) or []  # type: ignore[method-assign, func-returns-value]
    desk.arrive(arrival(prompt(), new_id()))
    started = time.monotonic()
    assert ask(desk) == 0
    assert time.monotonic() - started < 2
    assert desk.counts["refused_store_slow"] == 0
    desk.finished("r", prompt(), [1], whole=True)
    assert desk.counts["refused_store_slow"] == 1


def test_what_is_kept_says_how_far_it_is_translated(desk: Desk, store: Store, source: LanguageModel) -> None:
    """Also where this request found all of it in the prefix cache of one before it."""
    ids = prompt()
    both = {"kvlingo": {"load": keep(store, source, ids), "save": True}}
    desk.arrive(arrival([*ids, 9], params=both))
    assert ask(desk, 60) == 0
    keeps, told = desk.finished("r", [*ids, 9, 8], [1, 2, 3, 4], whole=True)
    assert keeps
    assert told is not None
    (save,) = desk.orders().saves
    assert save.translated_until == TOKENS
    assert save.key == told["kvlingo"]["id"]


@pytest.mark.parametrize(("whole", "count"), [(True, 1), (False, 0)])
def test_only_what_ended_by_itself_is_kept(desk: Desk, whole: bool, count: int) -> None:
    assert desk.arrive(arrival(prompt())) is None
    assert ask(desk) == 0
    keeps, _ = desk.finished("r", prompt(), [1, 2, 3, 4], whole=whole)
    assert keeps == bool(count)
    assert len(desk.orders().saves) == count


def test_what_a_window_has_left_behind_is_not_kept(desk: Desk) -> None:
    desk.arrive(arrival(prompt()))
    keeps, told = desk.finished("r", prompt(), [0, 2, 3, 4], whole=True, lost=True)
    assert not keeps
    assert told is not None
    assert "window" in told["kvlingo"]["not_kept"]
    assert desk.orders().saves == []


def test_what_was_cut_off_is_kept_under_its_client_s_own_id(desk: Desk) -> None:
    """vLLM cuts off what ends with a stop string; an id that was drawn here could not be told any more."""
    key = new_id()
    desk.arrive(arrival(prompt(), params={"kvlingo": {"save": key}}))
    assert desk.finished("r", prompt(), [1, 2, 3, 4], whole=False)[0]
    assert [save.key for save in desk.orders().saves] == [key]


def test_a_request_that_goes_while_it_is_loaded_is_dropped(desk: Desk, store: Store, source: LanguageModel) -> None:
    ids = prompt()
    both = {"kvlingo": {"load": keep(store, source, ids), "save": new_id()}}
    desk.arrive(arrival(ids, params=both))
    assert ask(desk)
    desk.allocated("r", [[7, 2, 9, 4]], TOKENS - 1)
    keeps, _ = desk.finished("r", ids, [7, 2, 9, 4], whole=False)
    assert not keeps, "its blocks hold nothing yet"
    orders = desk.orders()
    assert [load.request for load in orders.loads] == ["r"]
    assert orders.dropped == {"r"}


def test_plain_requests_are_left_alone(desk: Desk) -> None:
    assert desk.arrive(arrival(prompt(), params=None)) is None
    assert desk.matched("r", 0) == 0
    assert desk.salt_again("r") == (False, None)
    assert desk.finished("r", prompt(), [1], whole=True) == (False, None)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_a_job_that_was_given_up_does_not_commit() -> None:
    go, committed = threading.Event(), []
    job = Threads("test", 1).start(lambda job: (go.wait(5), committed.append(job.commit())))
    assert job.cancel()
    go.set()
    job._ended.wait(5)
    assert committed == [False] or committed == []


def test_a_job_past_its_commit_is_not_given_up() -> None:
    go, there = threading.Event(), threading.Event()
    job = Threads("test", 1).start(lambda job: (job.commit(), there.set(), go.wait(5), 7)[-1])
    there.wait(5)
    assert not job.cancel()
    go.set()
    assert job.result() == 7


def test_the_plan_of_a_prompt_without_the_cache_s_beginning_is_a_reprefill(
    made: Path, store: Store, source: LanguageModel
) -> None:
    matcher = matcher_of(made, store)
    match = find(matcher, keep(store, source, prompt()), prompt(seed=5))
    assert plan_match(match, 0, matcher.options).count(SpanKind.TRANSLATED) == 0


# --- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1"])
def test_a_checked_version_is_taken(found: str) -> None:
    versions.refuse_version(found)


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "0.320.1", "1.32.0"])
def test_other_versions_are_refused(found: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"vLLM {found} is installed; the connector is checked on 0.32"):
        versions.refuse_version(found)


def test_without_vllm_the_self_test_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(SystemExit) as left:
        main(["vllm-check"])
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        "kvlingo: vLLM is not installed here: pip install 'kvlingo[vllm]', in an environment of its own\n"
    )


def test_a_self_test_that_fails_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"vllm": "0.32.0", "dtype": "float32", "verdict": "FAIL"}
    failed = {"checks": [{"name": "so is the next turn", "passed": False, "what": "it is not"}]}
    monkeypatch.setattr(checking, "check_engine_pair", lambda *_: result | failed)
    with pytest.raises(SystemExit) as left:
        main(["vllm-check", "--json"])
    assert left.value.code == 3
    assert "FAILED: so is the next turn (it is not)" in capsys.readouterr().out


def test_a_stream_s_client_is_told_when_the_step_that_reads_its_prompt_has_ended(
    desk: Desk, store: FolderStore, source: LanguageModel
) -> None:
    """Steps are begun before older ones have ended; what is told is what was true at the end of the request's own."""
    ids, tell = prompt(), new_id()
    desk.arrive(arrival(ids, params={"kvlingo": {"load": keep(store, source, ids), "tell": tell}}))
    assert ask(desk)
    desk.allocated("r", [[7, 2, 9, 4]], TOKENS - 1)
    assert desk.has_untold
    desk.begin_step({"r": 40})
    desk.begin_step({"r": TOKENS})
    assert not desk.has_untold
    assert desk.end_step() == {}
    desk.failed("r", "corrupt", "bits fell over")
    (told,) = desk.end_step().values()
    assert (told["status"], told["reason"]) == ("fallback_reprefill", "corrupt")
    assert told["prompt"] == {"native": 0, "translated": 0, "recomputed": TOKENS}
    assert desk.counts["fallback_reprefill"] == 0  # it is counted once, at its end
    assert desk.end_step() == {}


def test_a_client_without_a_kept_cache_is_told_what_the_prefix_cache_held(desk: Desk) -> None:
    tell = new_id()
    assert desk.arrive(arrival(prompt(), params={"kvlingo": {"tell": tell}}, salt="mine")) is None
    assert ask(desk, 32) == 0
    desk.begin_step({"r": TOKENS})
    desk.finished("r", prompt(), [1], whole=True)  # its first token is its last
    assert desk.end_step() == {tell: {"prompt": {"native": 32, "translated": 0, "recomputed": TOKENS - 32}}}


@pytest.mark.parametrize("asked", [{"load": "../x"}, {"load": 7, "mapper": "m"}, {"file": "x"}])
def test_a_client_whose_wish_makes_no_sense_is_told_too(desk: Desk, asked: dict[str, Any]) -> None:
    tell = new_id()
    desk.arrive(arrival(prompt(), params={"kvlingo": {**asked, "tell": tell}}))
    assert ask(desk) == 0
    desk.begin_step({"r": TOKENS})
    desk.finished("r", prompt(), [1], whole=True)
    assert desk.end_step()[tell]["status"] != "applied"
    assert desk.counts["refused_bad_id"] + desk.counts["refused_bad_request"] == 1


def test_a_name_that_is_none_is_told_to_nobody(desk: Desk) -> None:
    desk.arrive(arrival(prompt(), params={"kvlingo": {"tell": "../x"}}))
    assert not desk.has_untold


def test_a_step_that_never_ends_keeps_nobody_waiting_for_ever(desk: Desk) -> None:
    for number in range(40):
        desk.arrive(arrival(prompt(), id=f"r{number}", params={"kvlingo": {"tell": new_id()}}))
        desk.matched(f"r{number}", 0)
        desk.begin_step({f"r{number}": TOKENS})
    assert len(desk.end_step()) == 25
    assert len(desk.end_step()) == 1
