"""Mapper folders of vllm-project/semantic-router: written and read as its own description says, and nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlingo import cli, files
from kvlingo.errors import BadArtifact, BadInput, IncompatiblePair
from kvlingo.geometry import Geometry, LayerGeometry, LayerRope
from kvlingo.handoff import hand_off
from kvlingo.interchange import Naming, export_folder, import_folder, mapper_tensors, translator_of
from kvlingo.jobs import Where
from kvlingo.kv import KV
from kvlingo.language_model import read
from kvlingo.manifest import Manifest, ModelCard
from kvlingo.mapper_files import MAPPER_FILES, read_mapper
from kvlingo.models import load_model
from kvlingo.store import load_translator, save_translator
from kvlingo.translator import LayerMap, Translator, TranslatorConfig
from tests import tiny

SOURCE_COMMIT, TARGET_COMMIT = "1f" * 20, "2e" * 20
NAMING = Naming("org/small", SOURCE_COMMIT, "org/big", TARGET_COMMIT)
# From the format's description: what its own reader asks for, field by field.
MANIFEST_FIELDS = {
    "mapper_id",
    "compatibility",
    "topk",
    "ridge_alpha",
    "centered_inputs",
    "rope_stripped_on_keys",
    "source_layers_per_target",
    "calibration",
    "evaluation_report",
    "schema_version",
}
COMPATIBILITY = {
    "source_model": "org/small",
    "source_revision": SOURCE_COMMIT,
    "target_model": "org/big",
    "target_revision": TARGET_COMMIT,
    "variant": "full_head",
    "precision": "bf16",
    "source_tp": 1,
    "target_tp": 1,
    "head_order": "contiguous",
    "num_kv_heads": 2,
    "head_dim": 8,
}


def geometry(layers: int, *, heads: int = 2, dim: int = 8, **changes: Any) -> Geometry:
    rope = LayerRope(None, "half", "half", dim)
    return Geometry((LayerGeometry(heads, dim, dim, None, rope),) * layers, 32, 320, 2048, **changes)


SOURCE, TARGET = geometry(4), geometry(3)
PLAIN = TranslatorConfig(SOURCE, TARGET, ((0, 1), (2, 1), (3, 2)), embedding_lags=(), map_kind="headwise")


@torch.no_grad()
def random_maps(config: TranslatorConfig, seed: int = 0) -> Translator:
    translator = Translator(config)
    generator = torch.Generator().manual_seed(seed)
    for name, x in translator.state_dict().items():
        if not x.is_floating_point():
            continue
        drawn = torch.randn(x.shape, generator=generator)
        x.copy_(0.5 + drawn.abs() if name.endswith("scale") else drawn)
    return translator.eval()


def card(name: str, shape: Geometry) -> ModelCard:
    return ModelCard(name, f"weights of {name}", "one tokenizer", shape.to_json())


def save(folder: Path, translator: Translator, options: dict[str, Any] | None = None) -> Path:
    config = translator.config
    save_translator(
        folder, translator, Manifest(card("small", config.source), card("big", config.target), options or {})
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "translator", random_maps(PLAIN))


def exported(folder: Path, out: Path, naming: Naming = NAMING) -> Path:
    return Path(export_folder(folder, out, naming, overwrite=False, tell=lambda _: None)["folder"])


@pytest.fixture
def mapper(folder: Path, tmp_path: Path) -> Path:
    return exported(folder, tmp_path / "mappers")


def random_kv(shape: Geometry, tokens: int = 7) -> KV:
    def draw() -> Tensor:
        return torch.randn(1, 2, tokens, 8)

    return KV(tuple(draw() for _ in shape.layers), tuple(draw() for _ in shape.layers), tokens)


def by_the_description(place: Path, kv: KV) -> list[tuple[Tensor, Tensor]]:
    """Apply a mapper folder as its description says, knowing nothing of this package: [tokens, heads, dim] rows."""
    told = json.loads((place / "manifest.json").read_text())
    weights = load_file(place / "weights.safetensors")
    named, made = told["compatibility"], []
    for layer in range(len(told["source_layers_per_target"]["k"])):
        pair = []
        for channel, side in (("k", kv.keys), ("v", kv.values)):
            rows = [side[s][0].transpose(0, 1) for s in told["source_layers_per_target"][channel][str(layer)]]
            x = torch.cat([each.reshape(len(each), -1) for each in rows], dim=-1)
            y = x @ weights[f"target.{layer}.{channel}.W"] + weights[f"target.{layer}.{channel}.b"]
            pair.append(y.reshape(len(y), named["num_kv_heads"], named["head_dim"]))
        made.append((pair[0], pair[1]))
    return made


def gap(made: list[tuple[Tensor, Tensor]], kv: KV) -> float:
    mine = [(k[0].transpose(0, 1), v[0].transpose(0, 1)) for k, v in zip(kv.keys, kv.values, strict=True)]
    pairs = [(a, b) for one, other in zip(made, mine, strict=True) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_written_mapper_computes_what_the_translator_does(folder: Path, mapper: Path) -> None:
    translator, _ = load_translator(folder)
    kv = random_kv(SOURCE)
    made = by_the_description(mapper, kv)
    assert gap(made, translator(kv, torch.arange(7), None)) < 1e-5  # float32
    assert gap([(v, k) for k, v in made], translator(kv, torch.arange(7), None)) > 0.1


def test_the_manifest_is_the_format_s(mapper: Path) -> None:
    told = json.loads((mapper / "manifest.json").read_text())
    assert set(told) == MANIFEST_FIELDS
    assert told["compatibility"] == COMPATIBILITY
    assert (told["schema_version"], told["topk"], told["rope_stripped_on_keys"]) == (1, 2, True)
    assert told["source_layers_per_target"]["k"] == {"0": [0, 1], "1": [2, 1], "2": [3, 2]}
    assert told["source_layers_per_target"]["v"] == told["source_layers_per_target"]["k"]
    assert told["mapper_id"] == mapper.name == f"small-big-full_head-bf16-tp1-h2-s{SOURCE_COMMIT}-t{TARGET_COMMIT}-b1"
    shapes = {name: (x.shape, x.dtype) for name, x in load_file(mapper / "weights.safetensors").items()}
    assert shapes == {
        f"target.{layer}.{channel}.{part}": (torch.Size(shape), torch.float32)
        for layer in range(3)
        for channel in "kv"
        for part, shape in (("W", (32, 16)), ("b", (16,)))
    }
    sums = dict(reversed(line.split()) for line in (mapper / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: hashlib.sha256((mapper / name).read_bytes()).hexdigest() for name in MAPPER_FILES}
    assert {x.name for x in mapper.iterdir()} == {*MAPPER_FILES, "SHA256SUMS"}


def test_a_layer_that_reads_fewer_is_filled_with_zeros(tmp_path: Path) -> None:
    config = replace(PLAIN, source_layers=((1,), (2, 0), (3, 1)))
    place = exported(save(tmp_path / "uneven", random_maps(config)), tmp_path)
    told = json.loads((place / "manifest.json").read_text())
    assert told["source_layers_per_target"]["k"]["0"] == [1, 0]
    assert not load_file(place / "weights.safetensors")["target.0.k.W"][16:].any()
    kv = random_kv(SOURCE)
    translator, _ = load_translator(tmp_path / "uneven")
    assert gap(by_the_description(place, kv), translator(kv, torch.arange(7), None)) < 1e-5


def test_a_dense_map_goes_out_only_where_keys_come_from_keys_alone() -> None:
    config = replace(PLAIN, map_kind="linear")
    mixed, split = random_maps(config), random_maps(config)
    with pytest.raises(IncompatiblePair, match=r"layer 0 makes keys from values too.*--map headwise"):
        mapper_tensors(mixed, config.source_layers)
    for layer_map in split.maps.values():
        assert isinstance(layer_map, LayerMap)
        for column in range(2):
            start = 32 * column
            layer_map.linear.weight.data[start : start + 16, 16:] = 0
            layer_map.linear.weight.data[start + 16 : start + 32, :16] = 0
    assert len(mapper_tensors(split, config.source_layers)) == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding_lags": (0, 1)}, "it reads the text"),
        ({"source_layers": ((), (), ())}, "it reads no source layer"),
        ({"source_lags": (0, 1)}, "source tokens before the aligned one"),
        ({"map_kind": "lowrank", "rank": 2}, "low-rank"),
        ({"map_kind": "linear", "residual_width": 4}, "MLP residual"),
        ({"key_norms": ("head", "head", "head")}, "key norm"),
        ({"target": geometry(3, heads=1, dim=16)}, "1 × 16, 2 × 8"),
        ({"target": geometry(3, owners=(0, 2, 3))}, "layers without"),
    ],
)
def test_what_the_format_can_t_hold_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = save(tmp_path / "translator", random_maps(replace(PLAIN, **changes)))
    with pytest.raises(IncompatiblePair, match="can't become a semantic-router mapper") as refused:
        exported(folder, tmp_path / "mappers")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "mappers").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_revision": None}, "give --source-revision"),
        ({"target_revision": "main"}, "got 'main'"),
        ({"target_revision": "2e" * 6}, "40 characters"),
        ({"precision": "int8"}, "use fp16, bf16 or fp32"),
        ({"pair": "…"}, "give --pair"),
    ],
)
def test_what_only_the_caller_knows_must_be_given(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        exported(folder, tmp_path / "mappers", replace(NAMING, **changes))


def test_a_mapper_that_is_there_stays(folder: Path, mapper: Path) -> None:
    before = (mapper / "weights.safetensors").read_bytes()
    with pytest.raises(BadInput, match="is there already"):
        exported(folder, mapper.parent)
    assert (mapper / "weights.safetensors").read_bytes() == before


def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, data: bytes) -> None:
        if file.name == "SHA256SUMS":
            raise OSError(errno.ENOSPC, "no space")
        file.write_bytes(data)

    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(BadInput, match="no space left"):
        exported(folder, tmp_path / "mappers")
    assert list((tmp_path / "mappers").iterdir()) == []


def test_other_tokenizers_are_told(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    export_folder(folder, tmp_path / "same", NAMING, overwrite=False, tell=lines.append)
    assert lines == []
    translator, manifest = load_translator(folder)
    other = replace(manifest, target=replace(manifest.target, tokenizer_hash="another"))
    save_translator(folder, translator, other, overwrite=True)
    export_folder(folder, tmp_path / "other", NAMING, overwrite=False, tell=lines.append)
    assert "pairs tokens one to one" in lines[0]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_mapper_comes_back_to_the_bit(mapper: Path) -> None:
    manifest, tensors = read_mapper(mapper)
    assert asdict(manifest.compatibility) == COMPATIBILITY
    translator = translator_of(manifest, tensors, SOURCE, TARGET)
    again = mapper_tensors(translator, manifest.source_layers)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    kv = random_kv(SOURCE)
    assert gap(by_the_description(mapper, kv), translator(kv, torch.arange(7), None)) < 1e-5


def resum(place: Path) -> None:
    names = MAPPER_FILES
    sums = [f"{hashlib.sha256((place / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (place / "SHA256SUMS").write_text("".join(sums))


def with_field(*path: str, value: Any) -> Callable[[Path], None]:
    """Change one field of a manifest, or remove it (`value` is ...); checksums are made to fit."""

    def change(place: Path) -> None:
        told = json.loads((place / "manifest.json").read_text())
        inner = told
        for step in path[:-1]:
            inner = inner[step]
        if value is ...:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        (place / "manifest.json").write_text(json.dumps(told))
        resum(place)

    return change


def with_tensor(name: str, change: Callable[[Tensor], Tensor] | None) -> Callable[[Path], None]:
    def changed(place: Path) -> None:
        tensors = load_file(place / "weights.safetensors")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name, torch.zeros(2)))
        save_file(tensors, place / "weights.safetensors")
        resum(place)

    return changed


def with_sums(change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda place: (place / "SHA256SUMS").write_text(change((place / "SHA256SUMS").read_text())) and None


def flip(name: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        data = bytearray((place / name).read_bytes())
        data[-40] ^= 1
        (place / name).write_bytes(bytes(data))

    return change


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (flip("weights.safetensors"), "is damaged"),
        (flip("manifest.json"), "is damaged"),
        (lambda place: (place / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
        (lambda place: (place / "weights.safetensors").unlink(), "has no weights.safetensors"),
        (with_sums(lambda text: text.splitlines()[0] + "\n"), "no line for weights.safetensors"),
        (with_sums(lambda text: text + text.splitlines()[0]), "strange line"),
        (with_sums(lambda text: text + f"{'0' * 64}  ../elsewhere\n"), "strange line"),
        (with_sums(lambda text: text.replace("0", "g")), "strange line"),
        (with_field("schema_version", value=2), "schema version 2"),
        (with_field("schema_version", value=True), "schema version True"),
        (with_field("topk", value=...), "lacks the field 'topk'"),
        (with_field("compatibility", "head_dim", value=...), "lacks the field 'head_dim'"),
        (with_field("rank", value=4), "has a field 'rank'"),
        (with_field("compatibility", "rope", value="yarn"), "has a field 'rope'"),
        (with_field("topk", value="2"), "topk is '2', expected int"),
        (with_field("compatibility", "source_tp", value=2), "split over ranks"),
        (with_field("compatibility", "variant", value="per_head"), "variant 'per_head'"),
        (with_field("compatibility", "head_order", value="interleaved"), "head order 'interleaved'"),
        (with_field("compatibility", "precision", value="int4"), "unknown precision"),
        (with_field("rope_stripped_on_keys", value=False), "rotated keys"),
        (with_field("source_layers_per_target", "v", "0", value=[1, 0]), "target layer 0 reads"),
        (with_field("source_layers_per_target", "k", "1", value=[2]), "target layer 1 reads"),
        (with_field("source_layers_per_target", "v", value=...), "does not list"),
        (with_tensor("target.1.v.W", None), "lacks tensor target.1.v.W"),
        (with_tensor("target.9.k.W", lambda x: x), "strange tensor target.9.k.W"),
        (with_tensor("target.0.k.W", lambda x: x.T.contiguous()), "expected finite float32"),
        (with_tensor("target.0.k.b", lambda x: x.half()), "expected finite float32"),
        (with_tensor("target.2.v.b", lambda x: x * torch.nan), "expected finite float32"),
    ],
)
def test_what_is_not_this_format_whole_is_refused(mapper: Path, harm: Callable[[Path], None], words: str) -> None:
    read_mapper(mapper)
    harm(mapper)
    with pytest.raises(BadArtifact) as refused:
        read_mapper(mapper)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (geometry(3), TARGET, "source layers up to 3"),
        (SOURCE, geometry(4), "for 3 target layers"),
        (geometry(4, dim=16), geometry(3, dim=16), "2 heads of 8, these models have 2 of 16"),
    ],
)
def test_other_models_are_refused(mapper: Path, source: Geometry, target: Geometry, words: str) -> None:
    manifest, tensors = read_mapper(mapper)
    with pytest.raises(IncompatiblePair, match=words):
        translator_of(manifest, tensors, source, target)


# --- with models, by the commands ------------------------------------------------------------------------------------


def test_fit_export_import_hand_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A translator goes out and comes back, and hands over as before."""
    (tmp_path / "text.txt").write_text("\n\n".join(tiny.text(150, seed=seed) for seed in range(4)))
    names = {}
    for name, family in (("small", "llama"), ("big", "qwen3")):
        lm = tiny.language_model(family, dtype=torch.float32)
        lm.model.save_pretrained(tmp_path / name)
        lm.tokenizer.save_pretrained(tmp_path / name)
        names[name] = str(tmp_path / name)

    def run(*words: str) -> int:
        with pytest.raises(SystemExit) as stopped:
            cli.main(list(words))
        return int(str(stopped.value.code))

    folder, back = tmp_path / "fitted", tmp_path / "back"
    plain = ("--map", "headwise", "--no-text", "--no-key-norm", "--tokens", "1500", "--context", "48")
    texts = [word for seed in range(4) for word in ("--text", str(written(tmp_path, seed)))]
    assert run("fit", names["small"], names["big"], "--out", str(folder), *texts, *plain) == 0
    commits = ("--source-revision", SOURCE_COMMIT, "--target-revision", TARGET_COMMIT)
    assert run("export", str(folder), "--format", "semantic-router", str(tmp_path / "mappers"), *commits) == 0
    (mapper,) = (tmp_path / "mappers").iterdir()
    sides = ("--source", names["small"], "--target", names["big"])
    assert run("import", str(mapper), "--format", "semantic-router", str(back), *sides) == 0
    source, target = (load_model(name) for name in names.values())
    (first, _), (second, manifest) = (load_translator(x, source=source, target=target) for x in (folder, back))
    assert manifest.verdict is None
    text = tiny.text_of_tokens(50)
    one, other = (hand_off(text, source, target, translator).logits for translator in (first, second))
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)  # float32 through three layers
    # The commits are remembered.
    assert run("export", str(back), "--format", "semantic-router", str(tmp_path / "again")) == 0
    assert read_mapper(tmp_path / "again" / mapper.name)[0].compatibility == read_mapper(mapper)[0].compatibility
    monkeypatch.setattr(type(source.model.config), "_commit_hash", "3d" * 20, raising=False)
    with pytest.raises(IncompatiblePair, match="the mapper's source is commit 1f1f"):
        imported(mapper, tmp_path / "other", names)


def imported(mapper: Path, out: Path, names: dict[str, str]) -> None:
    import_folder(
        mapper,
        out,
        source=names["small"],
        target=names["big"],
        where=Where(),
        storage="float32",
        overwrite=False,
        tell=lambda _: None,
    )


def written(folder: Path, seed: int) -> Path:
    file = folder / f"text-{seed}.txt"
    file.write_text(tiny.text(150, seed=seed))
    return file


def test_keys_go_out_before_the_rotation() -> None:
    """What a mapper reads of a model is its keys as its projection and norm leave them, in the format's own order."""
    lm = tiny.language_model("qwen3", dtype=torch.float64)
    ids = tiny.ids_of(lm, 12)
    caught: list[Tensor] = []
    layer = lm.model.model.layers[1].self_attn
    handle = layer.k_norm.register_forward_hook(lambda _m, _i, out: caught.append(out))
    kv = read(lm, ids)
    handle.remove()
    assert caught[0].shape == (1, 12, 2, 8)  # [batch, tokens, heads, dim], as the format's own hooks take it
    torch.testing.assert_close(kv.keys[1][0].transpose(0, 1), caught[0][0], rtol=1e-6, atol=1e-6)


def test_the_help_names_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["export", "x", "y", "--format", "another"])
    assert stopped.value.code == 2
    assert "semantic-router" in capsys.readouterr().err


def test_what_is_no_mapper_says_so(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadArtifact, match=r"has no manifest\.json, so it is no mapper folder"):
        read_mapper(folder)
    shutil.rmtree(folder)
    with pytest.raises(BadArtifact, match="there is no folder"):
        exported(folder, tmp_path)
