"""A translator's folder: what comes back, what is refused and how, what a failed save leaves."""

import errno
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvlingo import files, store
from kvlingo import manifest as manifests
from kvlingo.errors import BadArtifact, BadInput, IncompatiblePair, KVLingoError, MissingExtra
from kvlingo.geometry import Geometry, LayerGeometry, LayerRope
from kvlingo.manifest import Manifest, ModelCard, plain
from kvlingo.store import (
    ARTIFACT_FILES,
    from_pretrained,
    load_translator,
    push_to_hub,
    read_manifest,
    save_confidence,
    save_report,
    save_translator,
)
from kvlingo.translator import Translator, TranslatorConfig

REPORT = {
    "verdict": "PASS",
    "num_documents": 48,
    "plan": {"sink": 4, "tail": 1},
    "arms": {
        "translated": {"kl_nats": {"mean": 0.1434, "low": 0.13, "high": 0.16}, "share_kept": None},
        "source_alone": {
            "kl_nats": None,
            "top1_agreement": {"mean": 0.5, "low": None, "high": None},
        },
    },
}


def geometry(layers: int, heads: int) -> Geometry:
    rope = LayerRope(layer_type=None, layout="half", repeat="half", dims=4)
    layer = LayerGeometry(kv_heads=heads, key_dim=4, value_dim=4, window=None, rope=rope)
    return Geometry(layers=(layer,) * layers, hidden_size=8, vocab_size=32, max_positions=64)


def card(name: str, layers: int, heads: int) -> ModelCard:
    shape = plain(geometry(layers, heads).to_json())
    return ModelCard(name, f"{name}-weights", f"{name}-tokenizer", shape)


SOURCE, TARGET = card("org/small", 4, 2), card("org/big", 3, 1)
MANIFEST = Manifest(SOURCE, TARGET, options={"tokens": 1000, "lags": (0, 1)}, held_out=REPORT)


def make_translator(**options: Any) -> Translator:
    config = TranslatorConfig(
        source=geometry(4, 2),
        target=geometry(3, 1),
        source_layers=((0,), (1, 2), (2, 3)),
        key_norms=(None, "head", None),
        **options,
    )
    translator = Translator(config)
    for tensor in translator.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    return translator


KINDS = [
    {},
    {"map_kind": "lowrank", "rank": 3},
    {"map_kind": "headwise"},
    {"residual_width": 6},
    {"embedding_lags": ()},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "small-to-big"
    save_translator(path, make_translator(), MANIFEST)
    return path


def same_state(left: torch.nn.Module, right: torch.nn.Module) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def snapshot(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


def edit(folder: Path, change: Callable[[dict[str, Any]], None], *, reseal: bool = False) -> None:
    file = folder / "translator.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(manifests.sealed(document) if reseal else document))


# What comes back


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_float32_comes_back_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    translator = make_translator(**options)
    saved = save_translator(tmp_path / "t", translator, MANIFEST)
    loaded, manifest = load_translator(tmp_path / "t", source=SOURCE, target=TARGET)
    same_state(translator, loaded)
    assert loaded.config == translator.config
    assert manifest == saved == read_manifest(tmp_path / "t")
    assert manifest.options == {"tokens": 1000, "lags": [0, 1]}
    assert manifest.held_out == REPORT
    assert not loaded.training
    assert sorted(names(tmp_path / "t")) == sorted(ARTIFACT_FILES)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_bfloat16_rounds_matrices_only(tmp_path: Path, options: dict[str, Any]) -> None:
    translator = make_translator(**options)
    save_translator(tmp_path / "t", translator, MANIFEST, dtype="bfloat16")
    loaded = load_translator(tmp_path / "t")[0].state_dict()
    for name, tensor in translator.state_dict().items():
        rounded = tensor.ndim > 1 and tensor.is_floating_point()
        assert torch.equal(loaded[name], tensor.bfloat16().float() if rounded else tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_weights_of_fewer_bits_ask_for_products_in_bfloat16(tmp_path: Path, dtype: Any) -> None:
    save_translator(tmp_path / "t", make_translator(), MANIFEST, dtype=dtype)
    loaded = load_translator(tmp_path / "t")[0]
    assert {layer_map.multiplies_in_bfloat16 for layer_map in loaded.maps.values()} == {dtype != "float32"}


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_int8_is_off_by_half_a_step_of_its_output_at_most(tmp_path: Path, options: dict[str, Any]) -> None:
    translator = make_translator(**options)
    save_translator(tmp_path / "t", translator, MANIFEST, dtype="int8")
    loaded = load_translator(tmp_path / "t")[0].state_dict()
    linear = {"residual.enter.weight", "residual.leave.weight"}
    for name, tensor in translator.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        if tensor.ndim < 2 or not tensor.is_floating_point():
            assert torch.equal(loaded[name], tensor), name
            continue
        inputs = -1 if any(name.endswith(end) for end in linear) else -2
        step = tensor.abs().amax(dim=inputs, keepdim=True) / 127
        assert ((loaded[name] - tensor).abs() <= step * 0.5001).all(), name
        assert not torch.equal(loaded[name], tensor), name


def test_int8_keeps_small_outputs_beside_large_ones(tmp_path: Path) -> None:
    translator = make_translator()
    weight = translator.maps["1"].linear.weight
    with torch.no_grad():
        weight[:, 0] *= 1e4
        weight[:, 1] = 0
    save_translator(tmp_path / "t", translator, MANIFEST, dtype="int8")
    loaded = load_translator(tmp_path / "t")[0].maps["1"].linear.weight
    assert torch.equal(loaded[:, 1], weight[:, 1])
    torch.testing.assert_close(loaded[:, 2:], weight[:, 2:], atol=0.03, rtol=0)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-3, 1.0, 1e6]))
def test_quantising_twice_changes_nothing_more(seed: int, size: float) -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) * size
    once, scale = store.quantise(weight, inputs=-2)
    twice, _ = store.quantise(once * scale, inputs=-2)
    assert torch.equal(once, twice)


def test_storage_sizes(tmp_path: Path) -> None:
    config = replace(make_translator().config, residual_width=256)
    sizes = [
        save_translator(tmp_path / dtype, Translator(config), MANIFEST, dtype=dtype).weights.num_bytes
        for dtype in ("float32", "bfloat16", "int8")
    ]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.4 * sizes[0]


def test_other_types_shared_and_strided_weights_are_stored(tmp_path: Path) -> None:
    translator = make_translator().double()
    first, second = translator.maps["1"].linear, translator.maps["2"].linear
    first.weight = torch.nn.Parameter(first.weight.detach().T.contiguous().T)
    second.weight = first.weight
    save_translator(tmp_path / "t", translator, MANIFEST)
    loaded, _ = load_translator(tmp_path / "t")
    same_state(translator.float(), loaded)


def test_the_state_saved_is_left_alone(tmp_path: Path) -> None:
    translator = make_translator()
    before = {name: tensor.clone() for name, tensor in translator.state_dict().items()}
    for dtype in ("float32", "bfloat16", "int8"):
        save_translator(tmp_path / dtype, translator, MANIFEST, dtype=dtype)
    assert all(torch.equal(before[name], tensor) for name, tensor in translator.state_dict().items())


def test_a_loaded_model_describes_itself(folder: Path) -> None:
    model = SimpleNamespace(
        name="org/small",
        fingerprint=SOURCE.fingerprint,
        tokenizer_hash=SOURCE.tokenizer_hash,
        geometry=geometry(4, 2),
    )
    assert ModelCard.of(model) == SOURCE
    load_translator(folder, source=model)
    model.name = str(folder.parent / "weights" / "small")
    assert ModelCard.of(model).name == "small"


# What is refused


def refusal(kind: type[KVLingoError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message
    assert re.search(r"give |copy |fit |choose |use |swap |restore|upgrade|free |check ", message)
    return message


def test_wrong_models(folder: Path) -> None:
    other = replace(SOURCE, name="org/other", fingerprint="other-weights")
    source = refusal(IncompatiblePair, lambda: load_translator(folder, source=other))
    target = refusal(IncompatiblePair, lambda: load_translator(folder, target=other))
    assert "wrong source model: got org/other" in source
    assert "org/small" in source
    assert "wrong target model" in target


def test_the_same_name_with_other_weights_is_another_model(folder: Path) -> None:
    retrained = replace(SOURCE, fingerprint="later-weights")
    assert "later-weight" in refusal(IncompatiblePair, lambda: load_translator(folder, source=retrained, target=TARGET))


def test_the_same_weights_under_another_name_are_the_same_model(folder: Path) -> None:
    load_translator(folder, source=replace(SOURCE, name="a copy"), target=TARGET)


@pytest.mark.parametrize("source", [TARGET, None])
@pytest.mark.parametrize("target", [SOURCE, None])
def test_swapped_sides(folder: Path, source: ModelCard | None, target: ModelCard | None) -> None:
    if source is None and target is None:
        load_translator(folder)
        return
    for allow in (False, True):
        message = refusal(
            IncompatiblePair,
            lambda allow=allow: load_translator(folder, source=source, target=target, allow_mismatch=allow),
        )
        assert "swapped" in message


def test_a_model_translated_to_itself_is_not_swapped(tmp_path: Path) -> None:
    config = replace(make_translator().config, target=geometry(4, 2), key_norms=())
    config = replace(config, source_layers=((0,),) * 4)
    save_translator(tmp_path / "t", Translator(config), replace(MANIFEST, target=SOURCE))
    load_translator(tmp_path / "t", source=SOURCE, target=SOURCE)
    message = refusal(IncompatiblePair, lambda: load_translator(tmp_path / "t", target=TARGET))
    assert "wrong target" in message


def test_another_tokenizer(folder: Path) -> None:
    changed = replace(TARGET, tokenizer_hash="another")
    message = refusal(IncompatiblePair, lambda: load_translator(folder, target=changed))
    assert "target's tokenizer" in message


@pytest.mark.parametrize("change", [{"fingerprint": "tuned"}, {"tokenizer_hash": "patched"}])
def test_a_mismatch_can_be_allowed_and_is_warned_about(folder: Path, change: dict[str, str]) -> None:
    with pytest.warns(UserWarning, match="evaluate before use") as caught:
        load_translator(folder, source=replace(SOURCE, **change), allow_mismatch=True)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_translator(folder, source=SOURCE, target=TARGET, allow_mismatch=True)


def test_another_cache_geometry_is_never_allowed(folder: Path) -> None:
    wider = replace(SOURCE, geometry=plain(geometry(4, 1).to_json()))
    for allow in (False, True):
        refusal(
            IncompatiblePair,
            lambda allow=allow: load_translator(folder, source=wider, allow_mismatch=allow),
        )


def test_every_flipped_byte_of_the_weights_is_seen(folder: Path) -> None:
    file = folder / "translator.safetensors"
    whole = file.read_bytes()
    for place in range(0, len(whole), 97):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "damaged" in refusal(BadArtifact, lambda: load_translator(folder))
    file.write_bytes(whole)
    load_translator(folder)


def cut(file: Path, keep: float) -> None:
    """Keep so many bytes of a file, all but so many, or half."""
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2 if keep == 0.5 else int(keep)])


@pytest.mark.parametrize("keep", [0, 7, 0.5, -1])
def test_truncated_weights(folder: Path, keep: float) -> None:
    cut(folder / "translator.safetensors", keep)
    assert "truncated" in refusal(BadArtifact, lambda: load_translator(folder))


@pytest.mark.parametrize("keep", [0, 1, 0.5, -3])
def test_truncated_manifest(folder: Path, keep: float) -> None:
    cut(folder / "translator.json", keep)
    assert "is not whole" in refusal(BadArtifact, lambda: load_translator(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["manifest"]["source"].update(fingerprint="mine"),
        lambda d: d["manifest"]["held_out"].update(verdict="FAIL"),
        lambda d: d["manifest"]["options"].update(tokens=2000),
        lambda d: d["translator"].update(rank=1),
        lambda d: d["manifest"].pop("weights"),
        lambda d: d.pop("sha256"),
    ],
)
def test_an_edited_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    edit(folder, change)
    assert "changed after it was saved" in refusal(BadArtifact, lambda: load_translator(folder))


def test_white_space_and_the_order_of_keys_are_no_edit(folder: Path) -> None:
    file = folder / "translator.json"
    file.write_text(json.dumps(json.loads(file.read_text()), sort_keys=True))
    load_translator(folder)


@pytest.mark.parametrize("reseal", [False, True])
def test_a_newer_format(folder: Path, reseal: bool) -> None:
    edit(folder, lambda d: d["manifest"].update(format_version=2, news=1), reseal=reseal)
    message = refusal(BadArtifact, lambda: load_translator(folder))
    assert "has format 2" in message
    assert "pip install -U kvlingo" in message


@pytest.mark.parametrize("text", [b"[]", b"{}", b"3", b'{"manifest": {}}', b'{"manifest": {"format_version": "1"}}'])
def test_json_of_another_program(folder: Path, text: bytes) -> None:
    (folder / "translator.json").write_bytes(text)
    assert "no translator" in refusal(BadArtifact, lambda: load_translator(folder))


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"[" * 100_000, b"weights"])
def test_junk_for_json(folder: Path, text: bytes) -> None:
    (folder / "translator.json").write_bytes(text)
    assert "is not whole" in refusal(BadArtifact, lambda: load_translator(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["manifest"].pop("source"),
        lambda d: d["manifest"].update(colour="blue"),
        lambda d: d["manifest"].update(weights=None),
        lambda d: d["translator"].pop("source"),
        lambda d: d["translator"].update(source_layers=3),
        lambda d: d.pop("translator"),
    ],
)
def test_a_strange_but_sealed_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    edit(folder, change, reseal=True)
    assert "fit anew" in refusal(BadArtifact, lambda: load_translator(folder))


def test_weights_of_another_translator(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    manifest = save_translator(other, make_translator(residual_width=3), MANIFEST)
    shutil.copy(other / "translator.safetensors", folder)
    assert "damaged" in refusal(BadArtifact, lambda: load_translator(folder))
    edit(folder, lambda d: d["manifest"].update(weights=vars(manifest.weights)), reseal=True)
    assert "does not hold" in refusal(BadArtifact, lambda: load_translator(folder))


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    (folder / "translator.safetensors").unlink()
    assert "translator.safetensors is missing" in refusal(BadArtifact, lambda: load_translator(folder))
    (folder / "translator.json").unlink()
    assert "no translator.json" in refusal(BadArtifact, lambda: load_translator(folder))
    assert "there is no folder" in refusal(BadArtifact, lambda: load_translator(tmp_path / "nowhere"))


def test_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "translator.json"
    file.write_text("{}")
    assert "is a file" in refusal(BadArtifact, lambda: load_translator(file))
    assert "is a file" in refusal(BadInput, lambda: save_translator(file, make_translator(), MANIFEST))


# What a save replaces, and what a failed one leaves behind


def test_a_translator_is_replaced_only_on_request(folder: Path) -> None:
    before = snapshot(folder)
    assert "already holds a translator" in refusal(
        BadInput, lambda: save_translator(folder, make_translator(), MANIFEST)
    )
    assert snapshot(folder) == before
    newer = make_translator()
    save_translator(folder, newer, MANIFEST, overwrite=True)
    same_state(newer, load_translator(folder)[0])


def test_other_files_in_the_folder_stay(folder: Path) -> None:
    (folder / "loss.json").write_text("[1]")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("mine")
    save_translator(folder, make_translator(), MANIFEST, overwrite=True)
    assert (folder / "loss.json").read_text() == "[1]"
    assert (folder / "notes" / "a.txt").read_text() == "mine"
    assert names(folder.parent) == [folder.name]
    load_translator(folder)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my project")
    for overwrite in (False, True):
        message = refusal(
            BadInput,
            lambda overwrite=overwrite: save_translator(tmp_path, make_translator(), MANIFEST, overwrite=overwrite),
        )
        assert "README.md" in message
    assert snapshot(tmp_path) == {"README.md": b"my project"}


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "a" / "b"):
        save_translator(place, make_translator(), MANIFEST)
        load_translator(place)


def test_a_link_to_a_folder_stays_a_link(folder: Path) -> None:
    link = folder.with_name("latest")
    link.symlink_to(folder)
    newer = make_translator()
    save_translator(link, newer, MANIFEST, overwrite=True)
    assert link.is_symlink()
    same_state(newer, load_translator(folder)[0])


def test_permissions_are_the_usual_ones(folder: Path) -> None:
    usual = folder.with_name("usual")
    usual.mkdir()
    assert folder.stat().st_mode == usual.stat().st_mode


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


STEPS = ["write_synced", "sync_folder", "second write", "into place"]


def break_at(step: str, failure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    if step == "second write":
        calls: Iterator[bool] = iter([True, False])
        write = files.write_synced

        def fail_second(file: Path, data: bytes) -> None:
            write(file, data) if next(calls) else failure()

        monkeypatch.setattr(files, "write_synced", fail_second)
    elif step == "into place":
        rename = Path.rename

        def fail_into_place(self: Path, place: Path) -> Path:
            return failure() if self.suffix == ".partial" else rename(self, place)  # type: ignore

        monkeypatch.setattr(Path, "rename", fail_into_place)
    else:
        monkeypatch.setattr(files, step, failure)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("failure", "seen"), [(full_disk, BadInput), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failed_save_changes_nothing(
    folder: Path,
    step: str,
    failure: Callable[..., None],
    seen: type[BaseException],
    existing: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "loss.json").write_text("[1]")
    if not existing:
        shutil.rmtree(folder)
    before = snapshot(folder.parent)
    break_at(step, failure, monkeypatch)
    with pytest.raises(seen) as caught:
        save_translator(folder, make_translator(), MANIFEST, overwrite=True)
    if seen is BadInput:
        assert "no space left" in str(caught.value)
        assert "nothing was changed" in str(caught.value)
    assert snapshot(folder.parent) == before
    assert names(folder.parent) == ([folder.name] if existing else [])


def test_an_interrupt_after_the_swap_leaves_the_new_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "loss.json").write_text("[1]")
    newer = make_translator()
    sync = files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda p: interrupt() if p == folder.parent else sync(p))
    with pytest.raises(KeyboardInterrupt):
        save_translator(folder, newer, MANIFEST, overwrite=True)
    same_state(newer, load_translator(folder)[0])
    assert (folder / "loss.json").exists()
    assert names(folder.parent) == [folder.name]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(BadInput, lambda: save_translator(tmp_path / "file" / "t", make_translator(), MANIFEST))
    assert "can't write" in message


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    translator = make_translator()
    with torch.no_grad():
        translator.maps["2"].bias[0] = float("nan")
    message = refusal(BadInput, lambda: save_translator(tmp_path / "t", translator, MANIFEST))
    assert "maps.2.bias" in message
    assert not (tmp_path / "t").exists()


def test_an_unknown_storage_type(tmp_path: Path) -> None:
    message = refusal(
        BadInput,
        lambda: save_translator(tmp_path / "t", make_translator(), MANIFEST, dtype="int4"),  # type: ignore
    )
    assert "int8" in message


# The model card


def test_the_card_states_pair_plan_figures_use_and_limits(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: kvlingo\n")
    assert '- "org/small"\n- "org/big"\n---' in text
    assert "# org/small → org/big" in text
    assert "Verdict **PASS** on 48 held-out documents." in text
    assert "Plan: sink 4, tail 1." in text
    assert "| translated | 0.143 (0.130 … 0.160) | – | – |" in text
    assert "| source_alone | – | 0.500 | – |" in text
    assert "## Limits" in text
    assert '"tokens": 1000' in text
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


def test_a_card_without_a_report_says_so(tmp_path: Path) -> None:
    bare = replace(MANIFEST, held_out=None, source=replace(SOURCE, name="small"))
    save_translator(tmp_path / "t", make_translator(), bare)
    text = (tmp_path / "t" / "README.md").read_text()
    assert "Not evaluated yet" in text
    assert '- "small"' not in text


def test_a_report_with_nan_is_a_programming_error(tmp_path: Path) -> None:
    bad = replace(MANIFEST, held_out={"kl_nats": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        save_translator(tmp_path / "t", make_translator(), bad)
    assert names(tmp_path) == []


# The hub


class FakeHub:
    """A hub in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return f"hub:{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str) -> None:
        for name in allow_patterns:
            shutil.copy(folder_path / name, self.root / repo_id)

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        class RepositoryNotFoundError(Exception):
            pass

        if not (self.root / repo_id).is_dir():
            raise RepositoryNotFoundError("404\nmore")
        return str(self.root / repo_id)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_to_the_hub_and_back(folder: Path, fake_hub: FakeHub) -> None:
    (folder / "private-notes.txt").write_text("mine")
    assert push_to_hub(folder, "me/small-to-big") == "hub:me/small-to-big"
    assert sorted(names(fake_hub.root / "me/small-to-big")) == sorted(ARTIFACT_FILES)
    translator, manifest = from_pretrained("me/small-to-big", source=SOURCE, target=TARGET)
    same_state(load_translator(folder)[0], translator)
    assert manifest == read_manifest(folder)
    with pytest.raises(IncompatiblePair):
        from_pretrained("me/small-to-big", source=TARGET)


def test_a_damaged_folder_is_not_pushed(folder: Path, fake_hub: FakeHub) -> None:
    (folder / "translator.safetensors").write_bytes(b"")
    refusal(BadArtifact, lambda: push_to_hub(folder, "me/small-to-big"))
    assert not fake_hub.root.exists()


def test_what_the_hub_does_not_have(fake_hub: FakeHub) -> None:
    message = refusal(BadInput, lambda: from_pretrained("me/nothing"))
    assert "no such repository" in message


def test_from_a_folder_no_hub_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    from_pretrained(folder, source=SOURCE)
    from_pretrained(str(folder))
    assert "there is no folder" in refusal(BadArtifact, lambda: from_pretrained(folder / "a" / "b"))


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvlingo\[hub\]'"):
        from_pretrained("me/small-to-big")


def test_the_real_client_without_a_network() -> None:
    pytest.importorskip("huggingface_hub")
    message = refusal(BadInput, lambda: from_pretrained("kvlingo-tests/there-is-no-such-thing"))
    assert "out of reach" in message


def test_the_weights_file_is_plain_safetensors(folder: Path) -> None:
    assert load_file(folder / "translator.safetensors").keys() == make_translator().state_dict().keys()


def test_a_confidence_is_kept_beside_the_weights(tmp_path: Path) -> None:
    """Without one, the artifact is what older versions read: they refuse fields that they don't know."""
    save_translator(tmp_path / "t", make_translator(), MANIFEST)
    before = (tmp_path / "t" / "translator.safetensors").read_bytes()
    assert "confidence" not in json.loads((tmp_path / "t" / "translator.json").read_text())["manifest"]
    kept = {"signs": ["distance"], "threshold": 0.5}
    save_confidence(tmp_path / "t", kept)
    loaded, manifest = load_translator(tmp_path / "t", source=SOURCE, target=TARGET)
    assert manifest.confidence == kept
    assert manifest.held_out == REPORT
    assert (tmp_path / "t" / "translator.safetensors").read_bytes() == before
    save_report(tmp_path / "t", {"verdict": "PASS"})
    assert read_manifest(tmp_path / "t").confidence == kept
    save_translator(tmp_path / "t", loaded, MANIFEST, overwrite=True)  # other weights: what judged the old ones is gone
    assert read_manifest(tmp_path / "t").confidence is None
