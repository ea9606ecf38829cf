"""Extracts: a part of a model that embeds, rotates and makes first layers as the whole model does, and says whose it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvlingo import cli
from kvlingo.errors import BadArtifact, BadInput, IncompatiblePair, KVLingoError, UnsupportedModel
from kvlingo.extracts import (
    FACTS_FILE,
    WEIGHTS_FILE,
    Extract,
    beginnings_of,
    extract_files,
    extract_model,
    known_beginnings,
    open_extract,
)
from kvlingo.files import replace_folder
from kvlingo.language_model import native_layers, read
from kvlingo.manifest import sealed
from kvlingo.models import load_model
from kvlingo.reading import read_chat
from kvlingo.serve.external import twins
from tests import families, tiny

BEGINNINGS = ((0, 5, 9), tuple(range(3, 20)))
NEEDS_MORE = ("gemma3n",)  # its first layer reads parameters of the whole model's own


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a chat template, and its extract."""
    folder = tmp_path_factory.mktemp("made")
    twins.make_twins(folder)
    extract_model(
        str(folder / "target"), folder / "extract", dtype=None, systems=["Be brief."], overwrite=False, tell=print
    )
    return folder


def opened(family: str, folder: Path) -> Extract:
    lm = families.language_model(family)
    replace_folder(folder / "extract", extract_files(lm, BEGINNINGS, frozenset()))
    return open_extract(folder / "extract", lm.dtype)


@pytest.mark.parametrize("family", [name for name in families.EXACT if name not in NEEDS_MORE])
def test_what_an_extract_gives_is_what_the_model_gives(family: str, tmp_path: Path) -> None:
    lm, extract = families.language_model(family), opened(family, tmp_path)
    part, ids = extract.lm, tiny.ids_of(lm, 30)
    assert torch.equal(part.embed(ids), lm.embed(ids))
    whole, mine = native_layers(lm, ids, 1), native_layers(part, ids, 1)
    assert torch.equal(mine.keys[0], whole.keys[0])
    assert torch.equal(mine.values[0], whole.values[0])
    own, positions = read(lm, ids), torch.arange(30) + 7
    for layer, (keys, values) in enumerate(zip(own.keys, own.values, strict=True)):
        expected = lm.rotary.apply(keys, values, layer, positions)
        assert all(map(torch.equal, part.rotary.apply(keys, values, layer, positions), expected))
    assert (part.fingerprint, part.tokenizer_hash, part.geometry) == (lm.fingerprint, lm.tokenizer_hash, lm.geometry)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe", "gpt-oss"])
def test_it_holds_the_beginnings_and_no_more_than_a_layer(family: str, tmp_path: Path) -> None:
    lm, extract = families.language_model(family), opened(family, tmp_path)
    own = read(lm, lm.ids(BEGINNINGS[1]))
    found = extract.beginning(BEGINNINGS[1][:9])
    assert found is not None
    assert found.tokens == 9
    for mine, whole in zip(found.keys + found.values, own.keys + own.values, strict=True):
        assert torch.equal(mine, whole[:, :, :9])
    assert extract.beginning((0, 5, 8)) is None
    assert extract.beginning((*BEGINNINGS[0], 1)) is None
    kept = [name for name, tensor in extract.lm.model.named_parameters() if tensor.device.type != "meta"]
    assert not [name for name in kept if ".layers.1." in name or "expert" in name or "mlp" in name], kept


@pytest.mark.parametrize("family", NEEDS_MORE)
def test_a_model_that_can_t_be_cut_so_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="leave the extract out"):
        opened(family, tmp_path)


def test_beginnings_are_what_chats_begin_with(made: Path) -> None:
    lm = load_model(made / "target", device="cpu")
    kept = known_beginnings(made / "extract")
    for chat in (
        [{"role": "user", "content": "Hello there"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    ):
        reading = read_chat(lm.tokenizer, chat)
        constant = sum(1 for _, stop in reading.spans if stop <= reading.contents[-1][0])
        assert constant > 1
        assert any(ids[:constant] == reading.ids[:constant] for ids in kept), chat


def test_a_system_prompt_that_the_template_refuses_is_told(made: Path) -> None:
    lm = load_model(made / "target", device="cpu")
    lm.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    found, left = beginnings_of(lm, ["Be brief."])
    assert found == [(0,)]  # BOS, though this tokenizer does not begin with it
    assert len(left) == 1
    assert "no system" in left[0]


def test_its_weights_are_pages_of_its_file(made: Path) -> None:
    extract = open_extract(made / "extract", torch.float32, checkpoint=made / "target")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert str(made / "extract" / WEIGHTS_FILE) in maps.read_text()
    assert extract.lm.model.get_input_embeddings().weight.device.type == "cpu"


# --- whose it is -----------------------------------------------------------------------------------------------------


def test_another_checkpoint_is_refused(made: Path) -> None:
    with pytest.raises(IncompatiblePair, match="other weights, tokens or configuration"):
        open_extract(made / "extract", torch.float32, checkpoint=made / "source")


def test_another_type_of_numbers_is_refused(made: Path) -> None:
    with pytest.raises(IncompatiblePair, match="--dtype bfloat16"):
        open_extract(made / "extract", torch.bfloat16)


def test_in_the_engine_s_type(made: Path, tmp_path: Path) -> None:
    extract_model(str(made / "target"), tmp_path / "x", dtype="bfloat16", systems=[], overwrite=False, tell=print)
    extract = open_extract(tmp_path / "x", torch.bfloat16, checkpoint=made / "target")
    lm = load_model(made / "target", device="cpu", dtype=torch.bfloat16)
    ids = lm.ids(range(12))
    assert torch.equal(native_layers(extract.lm, ids, 1).keys[0], native_layers(lm, ids, 1).keys[0])
    assert extract.lm.fingerprint == lm.fingerprint


# --- damage ----------------------------------------------------------------------------------------------------------


def copy_of(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "extract", tmp_path / "extract"))


def test_a_flipped_bit_is_found(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, tmp_path)
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(bytes(data))
    with pytest.raises(BadArtifact, match="damaged"):
        open_extract(folder, torch.float32)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format_version": 0}', '{"format_version": "1"}', '{"format_version": 1}', "\udcff"]
)
def test_facts_that_are_none_are_refused(made: Path, tmp_path: Path, content: str) -> None:
    folder = copy_of(made, tmp_path)
    (folder / FACTS_FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(BadArtifact, match="copy the folder again"):
        known_beginnings(folder)


def test_edited_facts_and_newer_formats_are_refused(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, tmp_path)
    facts = json.loads((folder / FACTS_FILE).read_text())
    (folder / FACTS_FILE).write_text(json.dumps(facts | {"dtype": "bfloat16"}))
    with pytest.raises(BadArtifact, match="was changed"):
        open_extract(folder, torch.bfloat16)
    (folder / FACTS_FILE).write_text(json.dumps(sealed({**facts, "format_version": 99})))
    with pytest.raises(BadArtifact, match="upgrade"):
        open_extract(folder, torch.float32)


@pytest.mark.parametrize("missing", [FACTS_FILE, WEIGHTS_FILE, "config.json"])
def test_a_missing_file_is_one_sentence(made: Path, tmp_path: Path, missing: str) -> None:
    folder = copy_of(made, tmp_path)
    (folder / missing).unlink()
    with pytest.raises(KVLingoError) as error:
        open_extract(folder, torch.float32)
    assert "\n" not in str(error.value)


def test_a_model_that_the_extract_does_not_fit_is_refused(made: Path, tmp_path: Path) -> None:
    """As where another release of transformers names its parts otherwise."""
    folder = copy_of(made, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    with pytest.raises(UnsupportedModel, match="make the extract anew"):
        open_extract(folder, torch.float32)
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}})
    )
    extract = open_extract(
        folder, torch.float32
    )  # frequencies are kept as they were, whatever is computed from a config
    assert extract.lm.fingerprint


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    done = CliRunner().invoke(cli.app, ["extract", str(made / "target"), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["folder"] == str(out)
    assert told["num_bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert told["beginnings"] == [len(ids) for ids in known_beginnings(out)]


def test_nothing_is_replaced_unless_asked(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, tmp_path)
    for place, said in ((folder, "already holds an extract"), (made / "target", "holds a model")):
        with pytest.raises(BadInput, match=said):
            extract_model(str(made / "target"), place, dtype=None, systems=[], overwrite=False, tell=print)
    extract_model(str(made / "source"), folder, dtype=None, systems=[], overwrite=True, tell=print)
    assert open_extract(folder, torch.float32, checkpoint=made / "source")


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(KVLingoError, match="there is no"):
        extract_model(str(tmp_path / "none"), tmp_path / "x", dtype=None, systems=[], overwrite=False, tell=print)
    assert not (tmp_path / "x").exists()
