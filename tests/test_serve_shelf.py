"""Snapshots on disk: the same answers after a restart, no other tenant's, and nothing that goes wrong reaches a client."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import kvlingo.files as files
import kvlingo.serve.shelf as shelving
from kvlingo.cache import can_cut, cut_from, read_cache, tensors_of
from kvlingo.cache_writing import fork
from kvlingo.errors import BadInput, UnsupportedCache
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.plan import reprefill_plan
from kvlingo.reading import reading_of_ids
from kvlingo.serve.disk import FOLDER, Disk
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.freezing import Label, Unusable, freeze, read_label, thaw
from kvlingo.serve.loading import build_engine
from kvlingo.serve.protocol import Message
from kvlingo.serve.settings import Settings, read_settings
from kvlingo.serve.shelf import REASONS, WORTH_TOKENS, Shelf
from kvlingo.serve.switching import Link
from kvlingo.states import ModelState, target_cache
from kvlingo.translator import identity_translator
from tests import tiny
from tests.families import EXACT, SOURCE_ONLY
from tests.families import language_model as family_model
from tests.serving import ALWAYS, Answer, ask, assistant, closing, cold_ids, request_for, user
from tests.test_serve_whole import listening

LM = tiny.language_model("llama")
ROOM = 1 << 30
FIRST = [user(tiny.text(12, seed=1))]


def state_of(lm: LanguageModel, count: int = 40, *, full_length: bool = True, seed: int = 0) -> ModelState:
    reading = reading_of_ids(lm.tokenizer, tiny.ids_of(lm, count, seed=seed))
    with torch.no_grad():
        cache = prefill(lm, lm.ids(reading.ids), full_length=full_length).cache
    return ModelState(reading, cache, reprefill_plan(count, "read").spans)


@torch.no_grad()
def going_on(lm: LanguageModel, cache: Any) -> torch.Tensor:
    """Return logits of a few more tokens, the cache left as it is."""
    mine = fork(cache)
    return torch.stack([prefill(lm, lm.ids([t]), cache=mine).logits[-1] for t in (9, 10, 11)])


def in_three_kinds(lm: LanguageModel) -> Iterator[ModelState]:
    """Yield a state as a source reads it, as the model itself does, and as a hand-over writes it and goes on."""
    state = state_of(lm)
    yield state
    yield state_of(lm, full_length=False)
    with torch.no_grad():
        written = target_cache(lm, read_cache(state.cache, lm.rotary, lm.geometry, stop=30))
        prefill(lm, lm.ids(state.reading.ids[30:]), cache=written)
    yield ModelState(state.reading, written, state.spans)


@pytest.mark.parametrize("family", EXACT)
def test_every_kind_of_cache_comes_back_bit_for_bit(family: str) -> None:
    lm = family_model(family)
    for state in in_three_kinds(lm):
        label, data = freeze(state, "k", lm)
        back = thaw(data, "k", lm)
        assert (back.reading, back.spans, back.no_text) == (state.reading, state.spans, False)
        assert [type(x) for x in back.cache.layers] == [type(x) for x in state.cache.layers]
        for mine, theirs in zip(back.cache.layers, state.cache.layers, strict=True):
            for fact in ("cumulative_length", "sliding_window", "record_past"):
                assert getattr(mine, fact, None) == getattr(theirs, fact, None)
        pairs = zip(tensors_of(back.cache), tensors_of(state.cache), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
        assert torch.equal(going_on(lm, back.cache), going_on(lm, state.cache))
        assert label.ids == state.reading.ids


def test_a_cache_that_came_back_otherwise_would_be_seen() -> None:
    state = state_of(LM)
    back = thaw(freeze(state, "k", LM)[1], "k", LM)
    back.cache.layers[1].values[:, 0] += 1e-6
    assert not torch.equal(going_on(LM, back.cache), going_on(LM, state.cache))


@pytest.mark.parametrize("family", SOURCE_ONLY)
def test_a_recurrent_state_is_not_kept(family: str) -> None:
    lm = family_model(family)
    with pytest.raises(Unusable) as caught:
        freeze(state_of(lm), "k", lm)
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_where_a_cache_can_be_cut_is_known_without_it(family: str) -> None:
    lm = family_model(family)
    for state in in_three_kinds(lm):
        least = cut_from(state.cache, lm.geometry)
        assert [can_cut(state.cache, n, lm.geometry) for n in range(1, 40)] == [n >= least for n in range(1, 40)]


def test_a_cache_of_another_shape_or_dtype_is_foreign() -> None:
    _, data = freeze(state_of(LM), "k", LM)
    for other in (
        tiny.language_model(lambda: tiny.llama(head_dim=16)),
        tiny.language_model("llama", dtype=torch.float32),
    ):
        with pytest.raises(Unusable) as caught:
            thaw(data, "k", other)
        assert caught.value.reason == "foreign"
    with pytest.raises(Unusable, match="another place"):
        thaw(data, "l", LM)


# --- over a restart --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(folder: Path, lm: LanguageModel = LM, disk_bytes: int = ROOM, **limits: Any) -> Iterator[LocalEngine]:
    """Serve one model under two names, with the identity between them and a disk."""
    models = {"a": lm, "b": tiny.language_model("llama", seed=5) if lm is LM else lm}
    links = [] if lm is LM else [Link("a", "b", identity_translator(lm.geometry, torch.float64))]
    with closing(LocalEngine(models, links, Limits(rule=ALWAYS, **limits), Disk(folder, disk_bytes))) as engine:
        yield engine


def said(engine: LocalEngine, messages: list[Message], lm: LanguageModel = LM, **changes: Any) -> Answer:
    (found,) = ask(engine, request_for(lm, "a", messages, **changes))
    return found


def later(first: Answer) -> list[Message]:
    return [*FIRST, assistant(first.text), user("and then?")]


def kept(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.safetensors"))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gemma3n", "deepseek-v2"])
def test_answers_after_a_restart_are_those_without(family: str, tmp_path: Path) -> None:
    lm = family_model(family)
    with served(tmp_path, lm) as engine:
        first = said(engine, FIRST, lm)
        assert engine.stats()["spill_written"] == 0
    assert kept(tmp_path)
    with served(tmp_path, lm) as engine:
        second = said(engine, later(first), lm)
        assert second.ids == cold_ids(lm, later(first))
        assert second.begun.native_tokens >= first.begun.prompt_tokens
        assert engine.stats()["spill_read"] == 1


def test_without_a_disk_a_restart_forgets() -> None:
    with closing(LocalEngine({"a": LM})) as engine:
        first = said(engine, FIRST)
    with closing(LocalEngine({"a": LM})) as engine:
        assert said(engine, later(first)).begun.native_tokens == 0
        assert "spill_read" not in engine.stats()


def test_a_cache_that_came_back_damaged_would_change_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checksum is for: without it, answers would be others."""

    def damaged(data: bytes, key: str, lm: LanguageModel) -> ModelState:
        state = thaw(data, key, lm)
        for layer in state.cache.layers:
            layer.values.zero_()
        return state

    with served(tmp_path) as engine:
        first = said(engine, FIRST)
    monkeypatch.setattr(shelving, "thaw", damaged)
    with served(tmp_path) as engine:
        assert said(engine, later(first)).ids != cold_ids(LM, later(first))


def test_what_another_model_read_before_a_restart_is_translated(tmp_path: Path) -> None:
    lm = family_model("llama")
    other = tiny.language_model("llama", seed=5)
    translator = identity_translator(lm.geometry, torch.float64)

    def engine() -> LocalEngine:
        return LocalEngine(
            {"a": lm, "b": other}, [Link("a", "b", translator)], Limits(rule=ALWAYS), Disk(tmp_path, ROOM)
        )

    with closing(engine()) as before:
        first = said(before, FIRST, lm)
    with closing(engine()) as after:
        (switched,) = ask(after, request_for(lm, "b", later(first)))
        assert switched.begun.source == "a"
        assert switched.begun.translated_tokens > 0.8 * first.begun.prompt_tokens


def test_the_same_weights_in_another_dtype_find_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        first = said(engine, FIRST)
    less = tiny.language_model("llama", dtype=torch.float32)
    assert less.fingerprint == LM.fingerprint
    with closing(LocalEngine({"a": less}, (), Limits(), Disk(tmp_path, ROOM))) as engine:
        assert said(engine, later(first), less).begun.native_tokens == 0


# --- whose -----------------------------------------------------------------------------------------------------------


def test_no_tenant_finds_anothers_and_no_name_is_in_a_file(tmp_path: Path) -> None:
    alice = {"tenant": "alice-in-clear", "conversation": "her-divorce"}
    with served(tmp_path) as engine:
        first = said(engine, FIRST, **alice)
    names = [path.name for path in (tmp_path / FOLDER).iterdir()]
    texts = [path.read_bytes() for path in (tmp_path / FOLDER).iterdir()]
    for secret in ("alice", "divorce", hashlib.sha256(b"alice-in-clear").hexdigest()[:32]):
        assert not any(secret in name for name in names)
        assert not any(secret.encode() in text for text in texts)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    for other in ({"tenant": "bob", "conversation": "her-divorce"}, {"tenant": "alice-in-clear"}, {}):
        with served(tmp_path) as engine:
            assert said(engine, later(first), **other).begun.native_tokens == 0
            assert engine.stats()["spill_read"] == 0
    with served(tmp_path) as engine:
        assert said(engine, later(first), **alice).begun.native_tokens > 0


def test_a_file_under_another_tenants_name_is_dropped(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        first = said(engine, FIRST, tenant="alice")
        said(engine, FIRST, tenant="bob", count=1)
    with contextlib.closing(Disk(tmp_path, ROOM)) as disk:
        mine = disk.key("bob", None, LM.fingerprint, str(LM.dtype))
        hers = next(x for x in disk._used if x.label.key != mine)
        theirs = next(x for x in disk._used if x.label.key == mine)
    moved = tmp_path / FOLDER / f"{theirs.owner}-{mine}-{hers.digest}.safetensors"
    (tmp_path / FOLDER / hers.name).rename(moved)
    (tmp_path / FOLDER / theirs.name).unlink()
    with served(tmp_path) as engine:
        answer = said(engine, later(first), tenant="bob")
        assert answer.begun.native_tokens == 0
        assert answer.ids == cold_ids(LM, later(first))
        assert engine.stats()["spill_dropped_foreign"] == 1
    assert not moved.exists()


# --- what goes wrong -------------------------------------------------------------------------------------------------


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def other_ids(file: Path) -> None:
    """Change what the label says without changing its length."""
    data = file.read_bytes()
    place = data.index(b'\\"tokens\\": ')
    file.write_bytes(data[:place] + data[place:].replace(b'\\"exact\\": ', b'\\"exact\\":9', 1))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flipped, "corrupt"),
        (other_ids, "corrupt"),
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), "corrupt"),
        (lambda file: file.write_bytes(b""), "corrupt"),
        (lambda file: file.write_bytes(b"\xff" * 5000), "corrupt"),
    ],
    ids=["flipped", "another label", "truncated", "empty", "noise"],
)
@pytest.mark.parametrize("found_at", ["start", "use"])
def test_a_damaged_file_is_a_reprefill_and_is_counted(
    tmp_path: Path, harm: Callable[[Path], object], reason: str, found_at: str
) -> None:
    with served(tmp_path) as engine:
        first = said(engine, FIRST)
    for file in kept(tmp_path) if found_at == "start" else ():
        harm(file)
    with served(tmp_path) as engine:
        for file in kept(tmp_path) if found_at == "use" else ():
            harm(file)
        answer = said(engine, later(first))
        assert answer.ids == cold_ids(LM, later(first))
        assert answer.begun.native_tokens == 0
        assert answer.begun.fallback is None
        stats = engine.stats()
        assert stats[f"spill_dropped_{reason}"] == 1
        assert (stats["spill_files"], stats["spill_bytes"]) == (0, 0)


def test_a_file_that_was_taken_away_is_a_reprefill(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        first = said(engine, FIRST)
    with served(tmp_path) as engine:
        for file in kept(tmp_path):
            file.unlink()
        assert said(engine, later(first)).ids == cold_ids(LM, later(first))
        assert engine.stats()["spill_dropped_gone"] == 1


def test_a_full_disk_costs_a_snapshot_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, "full")

    with served(tmp_path, cache_bytes=1) as engine:
        monkeypatch.setattr(files, "write_synced", full)
        first = said(engine, FIRST)
        assert first.ids == cold_ids(LM, FIRST)
        assert engine._shelf is not None
        assert engine._shelf.settled(30)
        assert engine.stats()["spill_dropped_disk_full"] >= 1
        assert said(engine, later(first)).ids == cold_ids(LM, later(first))
    assert not kept(tmp_path)
    assert [path.name for path in (tmp_path / FOLDER).iterdir() if "partial" in path.name] == []


def test_killed_while_it_writes(tmp_path: Path) -> None:
    with contextlib.closing(Disk(tmp_path, ROOM)) as disk:
        key = disk.key("t", None, LM.fingerprint, str(LM.dtype))
        label, data = freeze(state_of(LM), key, LM)
        disk.write(disk.owner("t"), label, data, time.time())
        other, more = freeze(state_of(LM, seed=3), key, LM)
        child = os.fork()
        if not child:
            real = files.write_synced

            def half(path: Path, data: bytes) -> None:
                real(path, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

            files.write_synced = half
            with contextlib.suppress(BaseException):
                disk.write(disk.owner("t"), other, more, time.time())
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(list((tmp_path / FOLDER).glob(".*.partial"))) == 1
    with contextlib.closing(Disk(tmp_path, ROOM)) as disk:
        assert disk.counts["dropped_unfinished"] == 1
        assert not list((tmp_path / FOLDER).glob(".*.partial"))
        (found,) = disk.find(key, label.ids)
        assert disk.read(found.snapshot) == data
        assert not disk.find(key, other.ids) or other.ids[0] == label.ids[0]
        assert len(disk) == 1


def test_strangers_files_are_left_alone(tmp_path: Path) -> None:
    Disk(tmp_path, ROOM).close()
    mine = tmp_path / FOLDER / "notes.safetensors"
    mine.write_bytes(b"mine")
    with contextlib.closing(Disk(tmp_path, ROOM)) as disk:
        assert (len(disk), disk.counts.total()) == (0, 0)
    assert mine.read_bytes() == b"mine"


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match=r"can't keep caches in .* --cache-dir"):
        Disk(tmp_path / "file", ROOM)
    with contextlib.closing(Disk(tmp_path, ROOM)), pytest.raises(BadInput, match="another server"):
        Disk(tmp_path, ROOM)
    Disk(tmp_path, ROOM).close()


# --- room ------------------------------------------------------------------------------------------------------------


def labelled(disk: Disk, number: int, tenant: str = "t") -> Label:
    ids = (number, *[8] * 9)
    return Label(disk.key(tenant, None, "m"), ids, 10, 0, 0)


def test_the_disk_is_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    with contextlib.closing(Disk(tmp_path, 250)) as disk:
        for number in range(1, 5):
            disk.write(disk.owner("t"), labelled(disk, number), bytes([number]) * 100, number)
            assert sum(file.stat().st_size for file in kept(tmp_path)) == disk.num_bytes <= 250
        assert [bool(disk.find(disk.key("t", None, "m"), [n])) for n in range(1, 5)] == [False, False, True, True]
        assert disk.counts["evicted"] == 2
        disk.touch(disk.find(disk.key("t", None, "m"), [3])[0].snapshot, 9)
        disk.write(disk.owner("t"), labelled(disk, 5), b"5" * 100, 10)
        assert [bool(disk.find(disk.key("t", None, "m"), [n])) for n in range(3, 6)] == [True, False, True]
        with pytest.raises(Unusable) as caught:  # what is older makes no room for itself
            disk.write(disk.owner("t"), labelled(disk, 6), b"6" * 100, 1)
        assert caught.value.reason == "no_room"
        with pytest.raises(Unusable) as caught:
            disk.write(disk.owner("t"), labelled(disk, 7), b"7" * 251, 99)
        assert caught.value.reason == "too_large"


def test_a_tenant_that_keeps_much_costs_another_nothing(tmp_path: Path) -> None:
    with contextlib.closing(Disk(tmp_path, 400)) as disk:
        disk.write(disk.owner("quiet"), labelled(disk, 1, "quiet"), b"q" * 100, 0)
        for number in range(1, 9):
            disk.write(disk.owner("loud"), labelled(disk, number, "loud"), bytes([number]) * 100, number)
        assert disk.find(disk.key("quiet", None, "m"), [1])


def test_a_smaller_bound_at_the_next_start_holds(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        first = said(engine, FIRST)
        said(engine, [user(tiny.text(12, seed=9))])
        said(engine, later(first), tenant="x")
    assert len(kept(tmp_path)) >= 3
    largest = max(file.stat().st_size for file in kept(tmp_path))
    with contextlib.closing(Disk(tmp_path, largest)) as disk:
        assert disk.num_bytes <= largest
        assert len(kept(tmp_path)) == len(disk)


def test_a_longer_file_stands_in_for_a_shorter_one(tmp_path: Path) -> None:
    with contextlib.closing(Disk(tmp_path, ROOM)) as disk:
        key = disk.key("t", None, "m")
        for tokens in (3, 5):
            disk.write(disk.owner("t"), Label(key, (1, 2, 3, 4, 5)[:tokens], tokens, 0, 0), bytes([tokens]), tokens)
        assert len(kept(tmp_path)) == len(disk) == 1
        approximate = Label(key, (1, 2, 3, 4, 5, 6, 7), 1, 6, 0)
        disk.write(disk.owner("t"), approximate, b"7", 7)
        assert len(disk) == 2  # an approximate one never stands in for an exact one


# --- what has to make room in memory ---------------------------------------------------------------------------------


def test_what_memory_evicts_is_found_again(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        first = said(engine, FIRST)
        one = int(engine.stats()["cache_bytes"])
    folder = tmp_path / "another"
    with served(folder, cache_bytes=3 * one // 2) as engine:
        first = said(engine, FIRST)
        said(engine, [user(tiny.text(12, seed=9))])
        assert engine._shelf is not None
        assert engine._shelf.settled(30)
        assert engine.stats()["spill_written"] == 1
        answer = said(engine, later(first))
        assert answer.begun.native_tokens >= first.begun.prompt_tokens
        assert answer.ids == cold_ids(LM, later(first))


def test_what_waits_to_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is out of the store and not on the disk yet: nothing of it is read again."""
    go_on, real = threading.Event(), files.write_synced

    def hang(path: Path, data: bytes) -> None:
        assert go_on.wait(60)
        real(path, data)

    with served(tmp_path) as engine:
        said(engine, FIRST)
        one = int(engine.stats()["cache_bytes"])
    with served(tmp_path / "another", cache_bytes=3 * one // 2) as engine:
        monkeypatch.setattr(files, "write_synced", hang)
        first = said(engine, FIRST)
        said(engine, [user(tiny.text(12, seed=9))])  # which takes its room
        assert engine._shelf is not None
        assert engine._shelf.stats()["spill_files"] == 0
        answer = said(engine, later(first))
        go_on.set()
        assert answer.begun.native_tokens >= first.begun.prompt_tokens
        assert answer.ids == cold_ids(LM, later(first))


def test_a_disk_that_hangs_holds_no_answer_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, go_on = threading.Event(), threading.Event()
    real = files.write_synced

    def hang(path: Path, data: bytes) -> None:
        writing.set()
        assert go_on.wait(60)
        real(path, data)

    with served(tmp_path, cache_bytes=1) as engine:
        monkeypatch.setattr(files, "write_synced", hang)
        said(engine, FIRST)
        assert writing.wait(30)
        for seed in range(4):
            messages = [user(tiny.text(12, seed=20 + seed))]
            assert said(engine, messages).ids == cold_ids(LM, messages)
        stats = engine.stats()
        assert stats["spill_written"] == 0
        assert stats["spill_dropped_backlog"] >= 1  # what waits is bounded
        go_on.set()
        assert engine._shelf is not None
        assert engine._shelf.settled(30)
        assert engine.stats()["spill_written"] >= 1


def test_closing_ends_in_time_whatever_the_disk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_synced", lambda path, data: time.sleep(0.3) or path.write_bytes(data))
    shelf = Shelf(Disk(tmp_path, ROOM), {"a": LM}, 1)
    from kvlingo.serve.sessions import Place, snapshot_of

    last = [snapshot_of(Place("t", None, "a"), state_of(LM, seed=s), LM.geometry) for s in range(20)]
    started = time.monotonic()
    shelf.close(last, 0.5)
    assert time.monotonic() - started < 3
    assert 1 <= shelf.stats()["spill_written"] < 20
    with contextlib.closing(Disk(tmp_path, ROOM)) as disk:
        assert disk.at(disk.key("t", None, LM.fingerprint, str(LM.dtype)), last[0].ids)  # the one used last comes first


def test_what_is_too_short_is_not_kept(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        (found,) = ask(engine, request_for(LM, "a", "abc", count=2))
        assert found.begun.prompt_tokens < WORTH_TOKENS
    assert not kept(tmp_path)


def test_a_little_in_common_does_not_read_a_large_file(tmp_path: Path) -> None:
    text = tiny.text(80, seed=1)
    with served(tmp_path) as engine:
        ask(engine, request_for(LM, "a", text))
    with served(tmp_path) as engine:
        (found,) = ask(engine, request_for(LM, "a", text[:40] + "something else"))
        assert (found.begun.native_tokens, engine.stats()["spill_read"]) == (0, 0)


def test_every_reason_is_told_from_the_start(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        assert {f"spill_dropped_{reason}" for reason in REASONS} <= set(engine.stats())


def test_a_label_that_is_no_label(tmp_path: Path) -> None:
    with pytest.raises(Unusable) as caught:
        read_label(tmp_path / "none")
    assert caught.value.reason == "unreadable"


def test_a_quantised_layer_is_refused() -> None:
    from kvlingo.packing import pack_cache

    class Quantised:
        keys = torch.zeros(1)

    class Cache:
        layers = (Quantised(),)

    with pytest.raises(UnsupportedCache, match="Quantised"):
        pack_cache(Cache())


# --- as the server is started ----------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    LM.model.save_pretrained(folder)
    LM.tokenizer.save_pretrained(folder)
    return str(folder)


def test_settings_give_the_engine_a_disk(model: str, tmp_path: Path) -> None:
    environment = {"KVLINGO_CACHE_DIR": str(tmp_path / "kept"), "KVLINGO_CACHE_DISK_BYTES": "1000000"}
    settings, _ = read_settings({"models": [f"a={model}"], "dtype": "float64", "device": "cpu"}, environment)
    told: list[str] = []
    with closing(build_engine(settings, told.append)) as engine:
        first = said(engine, FIRST)
    with closing(build_engine(settings, told.append)) as engine:
        assert said(engine, later(first)).begun.native_tokens >= first.begun.prompt_tokens
    assert [line.partition(" in ")[0] for line in told if "kept" in line] == ["kept caches: 0", "kept caches: 1"]


def test_a_folder_that_cannot_be_had_is_told_before_models_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    told: list[str] = []
    with pytest.raises(BadInput, match="--cache-dir"):
        build_engine(Settings(models={"a": "nowhere"}, cache_dir=tmp_path / "file"), told.append)
    assert not told
    with pytest.raises(BadInput, match="nowhere"):
        build_engine(Settings(models={"a": str(tmp_path / "nowhere")}, cache_dir=tmp_path / "kept"), told.append)
    Disk(tmp_path / "kept", ROOM).close()  # it was let go of


@contextlib.contextmanager
def process(model: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `kvlingo serve` and yield it with its address."""
    command = [sys.executable, "-m", "kvlingo.cli", "serve", "--model", f"a={model}", "--port", "0"]
    command += ["--cache-dir", str(folder), "--cache-disk-bytes", "100000000", "--heal"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as run:
        try:
            assert run.stderr is not None
            yield run, listening(run.stderr)
        finally:
            run.kill()


def test_kvlingo_serve_remembers_over_a_restart_and_after_a_kill(model: str, tmp_path: Path) -> None:
    body = {"model": "a", "prompt": tiny.text(40, seed=1), "max_tokens": 2}
    native = []
    for number, ending in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)):
        with process(model, tmp_path / "kept") as (run, url):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            native.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            figures = httpx.get(f"{url}/metrics", timeout=60).text
            assert f"kvlingo_engine_spill_read {float(number > 0)}" in figures
            assert "kvlingo_engine_spill_dropped_corrupt 0.0" in figures
            run.send_signal(ending)
            assert run.wait(timeout=60) == (0 if ending is signal.SIGTERM else -signal.SIGKILL)
    assert native[0] == 0
    assert min(native[1:]) == answer["usage"]["prompt_tokens"] - 1
