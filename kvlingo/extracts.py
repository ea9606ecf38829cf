"""What a hand-over needs of a model besides maps, in a small folder: no engine then loads the whole checkpoint a second time.

Knows which of a model's weights make its embeddings, its first layer's keys and values and its rotary angles, and its keys and
values of the tokens that its prompts begin with. Knows how that is kept, and that a folder belongs to a checkpoint. Does not know
engines.

Layout of the folder:
    extract.json         who the model is, its cache's shape, the tokens of the beginnings, hashes
    extract.safetensors  those weights, those beginnings, and a few values that tell whether all was understood
    config.json          as transformers writes it
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from kvlingo import __version__
from kvlingo.chat import Message
from kvlingo.errors import BadArtifact, BadInput, IncompatiblePair, KVLingoError, UnsupportedModel
from kvlingo.files import replace_folder, verify_file
from kvlingo.fingerprints import CONFIG_NOISE
from kvlingo.geometry import Geometry, LayerRope
from kvlingo.kv import KV
from kvlingo.language_model import Identity, LanguageModel, native_layers, read
from kvlingo.manifest import ModelCard, content_hash, first_line, sealed
from kvlingo.models import chosen_device, chosen_dtype, clear_load_errors, convert_gguf, load_model, quiet_loading
from kvlingo.probing import angle_source, decoder_of, no_angles, rotary_module
from kvlingo.reading import leading_ids, read_chat
from kvlingo.rope import Rotary

FORMAT_VERSION = 1
FACTS_FILE, WEIGHTS_FILE = "extract.json", "extract.safetensors"
FACTS = {"model", "dtype", "target_refusal", "beginnings", "checkpoint", "weights_sha256", "sha256"}
WEIGHT, BEGINNING, CHECK = "weight.", "beginning.", "check."
CHECKED_POSITIONS = (0, 1, 77, 1001)
SAMPLES = 64
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""How far, as a part of their norm, a few values may be off: another processor rounds otherwise."""
Beginning = tuple[int, ...]


@dataclass(frozen=True)
class Extract:
    """A model of which only a part is here.

    Fields:
        lm: embeds tokens, makes its first layer's keys and values and rotates; it can't read, and has no tokenizer.
        beginnings: its position-free KV of first tokens, every layer in full.
    """

    lm: LanguageModel
    beginnings: Mapping[Beginning, KV]

    def beginning(self, ids: Sequence[int]) -> KV | None:
        """Return the KV of a prompt's first tokens, where one of the beginnings has them."""
        for known, kv in self.beginnings.items():
            if known[: len(ids)] == tuple(ids):
                return kv.narrow(0, len(ids))
        return None


# --- making one ------------------------------------------------------------------------------------------------------


def extract_model(
    name: str, out: Path, *, dtype: str | None, systems: Sequence[str], overwrite: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Write the extract of a model that is given by its name; return what was written.

    Args:
        dtype: of weights and keys: what the engine computes in; None: the checkpoint's own.
        systems: system prompts that conversations begin with, besides what the chat template itself begins with.

    Raises:
        UnsupportedModel: its embeddings, first layer or rotation can't be kept apart from the rest.
        BadInput: the place is taken, or can't be written.
    """
    out = out.expanduser().resolve()
    refuse_to_replace(out, overwrite)
    quiet_loading()
    folder = checkpoint_folder(name)
    lm = load_model(folder, device=chosen_device("cpu"), dtype=dtype or own_dtype(folder))
    lm = replace(lm, name=name if not Path(name).exists() else Path(name).name)
    beginnings, left = beginnings_of(lm, systems)
    for said in left:
        tell(said)
    files = extract_files(lm, beginnings, checkpoint_digests(folder))
    with tempfile.TemporaryDirectory() as there:
        replace_folder(Path(there) / "extract", files)
        open_extract(Path(there) / "extract", lm.dtype)  # which compares
    replace_folder(out, files)
    return {
        "folder": str(out),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "num_bytes": sum(map(len, files.values())),
        "beginnings": [len(ids) for ids in beginnings],
    }


def refuse_to_replace(folder: Path, overwrite: bool) -> None:
    """Raise `BadInput` where writing would destroy something."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; give a folder")
    if (folder / "config.json").exists() and not (folder / FACTS_FILE).exists():
        raise BadInput(f"{folder} holds a model; give another folder")
    if (folder / FACTS_FILE).exists() and not overwrite:
        raise BadInput(f"{folder} already holds an extract; choose another folder, or replace it with --overwrite")


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """Return where a model's files are; a .gguf file is converted, as `load_model` does. Raises `BadInput`.

    `revision` is of a name on the hub.
    """
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        return convert_gguf(path)
    if path.is_dir():
        return path
    with clear_load_errors(name, weights=False):
        return Path(str(cached_file(name, "config.json", revision=revision))).parent


def own_dtype(folder: Path) -> str:
    """Return the floating-point type that a checkpoint says it is in."""
    with clear_load_errors(str(folder)):
        config = AutoConfig.from_pretrained(folder)
    return str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")


def beginnings_of(lm: LanguageModel, systems: Iterable[str] = ()) -> tuple[list[Beginning], list[str]]:
    """Return what a model's prompts begin with, whatever is asked, longest first, and what could not be had, in sentences.

    That is BOS, what the chat template writes before a first message, and before the one after each of the system prompts.
    """
    question: Message = {"role": "user", "content": "x"}
    chats: list[list[Message]] = [[question], [{"role": "system", "content": "x"}, question]]
    given: list[list[Message]] = [[{"role": "system", "content": text}, question] for text in systems]
    bos = lm.tokenizer.bos_token_id
    found, left = {leading_ids(lm.tokenizer), () if bos is None else (bos,)}, list[str]()
    for chat in (*chats, *given):
        constant = len(chat) - 1 if chat in given else 0
        try:
            reading = read_chat(lm.tokenizer, chat, add_generation_prompt=False)
        except KVLingoError as error:
            if chat in given:
                left.append(f"a system prompt is left out: {error}")
            continue
        until = reading.contents[constant][0]
        found.add(reading.ids[: sum(1 for _, stop in reading.spans if stop <= until)])
    longest = sorted(found, key=len, reverse=True)
    own = [b for i, b in enumerate(longest) if b and not any(a[: len(b)] == b for a in longest[:i])]
    return own, left


def extract_files(lm: LanguageModel, beginnings: Sequence[Beginning], checkpoint: frozenset[str]) -> dict[str, bytes]:
    """Return the files of an extract by their names."""
    kept = {WEIGHT + name: tensor for name, tensor in needed_weights(lm).items()}
    for index, ids in enumerate(beginnings):
        kv = read(lm, lm.ids(ids))
        kept |= {f"{BEGINNING}{index}.{layer}.keys": keys for layer, keys in enumerate(kv.keys)}
        kept |= {f"{BEGINNING}{index}.{layer}.values": values for layer, values in enumerate(kv.values)}
    kept |= {CHECK + name: tensor for name, tensor in checked_values(lm).items()}
    weights = to_safetensors({name: tensor.detach().clone().contiguous() for name, tensor in kept.items()})
    facts = {
        "format_version": FORMAT_VERSION,
        "kvlingo_version": __version__,
        "model": asdict(ModelCard.of(lm)),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "target_refusal": lm.target_refusal,
        "beginnings": [list(ids) for ids in beginnings],
        "checkpoint": sorted(checkpoint),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    with tempfile.TemporaryDirectory() as folder:
        lm.model.config.save_pretrained(folder)
        described = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
    document = (json.dumps(sealed(facts), indent=1, ensure_ascii=False) + "\n").encode()
    return {**described, WEIGHTS_FILE: weights, FACTS_FILE: document}


@torch.no_grad()
def needed_weights(lm: LanguageModel) -> dict[str, Tensor]:
    """Return the parameters and buffers of the parts that embeddings, first keys and values, and angles are made by.

    Those that run are the ones that are needed: where attention begins the rest of the pass is left.
    """
    run = {decoder_of(lm.model)}
    handles = [module.register_forward_pre_hook(lambda module, _: run.add(module)) for module in lm.model.modules()]
    try:
        _first_layer(lm)
        lm.embed(lm.ids([0]))
    finally:
        for handle in handles:
            handle.remove()
    rotary = rotary_module(lm.model)
    run |= set(rotary.modules()) if rotary is not None else set()
    return {
        f"{name}.{leaf}" if name else leaf: tensor
        for name, module in lm.model.named_modules()
        if module in run
        for leaf, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),  # one tensor may be there under two names
        )
    }


@torch.no_grad()
def checked_values(lm: LanguageModel) -> dict[str, Tensor]:
    """Return a few values that an extract has to give as the whole model does."""
    kv = _first_layer(lm)
    found = {"keys": kv.keys[0], "values": kv.values[0], "embeddings": lm.embed(lm.ids(_few_tokens(lm)))}
    positions = torch.tensor(CHECKED_POSITIONS)
    for number, (layer, rope) in enumerate(_kinds_of_rotation(lm.geometry)):
        steps = torch.arange(len(positions) * (rope.offset + rope.dims), dtype=torch.float32)
        pattern = (steps % 7 + 1).reshape(1, 1, len(positions), -1)
        found[f"rotated.{number}"] = lm.rotary.rotate(pattern, layer, positions)
    return found


def _few_tokens(lm: LanguageModel) -> list[int]:
    return [(7919 * step) % lm.geometry.vocab_size for step in range(1, 6)]


def _first_layer(lm: LanguageModel) -> KV:
    return native_layers(lm, lm.ids(_few_tokens(lm)), 1)


def _kinds_of_rotation(geometry: Geometry) -> list[tuple[int, LayerRope]]:
    """Return one layer of each kind of rotation."""
    kinds: dict[LayerRope, int] = {}
    for layer, shape in enumerate(geometry.layers):
        if shape.rope is not None:
            kinds.setdefault(shape.rope, layer)
    return [(layer, rope) for rope, layer in kinds.items()]


# --- opening one -----------------------------------------------------------------------------------------------------


def read_facts(folder: Path) -> dict[str, Any]:
    """Read extract.json and check that it is ours, whole, unedited, and no newer than we are. Raises `BadArtifact`."""
    file = folder / FACTS_FILE
    if not file.is_file():
        raise BadArtifact(
            f"{folder} has no {FACTS_FILE}, so it is no extract; give the folder that `kvlingo extract` wrote"
        )
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        version = facts["format_version"]
        if not isinstance(version, int) or version < 1:
            raise ValueError("it names no format version")
        lacking = sorted(FACTS - facts.keys())
        if version == FORMAT_VERSION and lacking:
            raise ValueError(f"it lacks {lacking[0]}")
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise BadArtifact(f"{file} is not whole ({first_line(error)}); copy the folder again") from error
    if version > FORMAT_VERSION:
        raise BadArtifact(
            f"{file} has format {version}, this kvlingo {__version__} reads up to {FORMAT_VERSION}; "
            "upgrade: pip install -U kvlingo"
        )
    if facts.get("sha256") != content_hash(facts):
        raise BadArtifact(
            f"{file} was changed after it was written; copy the folder again, or run kvlingo extract anew"
        )
    return dict(facts)


def known_beginnings(folder: str | Path) -> tuple[Beginning, ...]:
    """Return the beginnings of an extract, without its weights. Raises `BadArtifact`."""
    return tuple(tuple(ids) for ids in read_facts(Path(folder).expanduser())["beginnings"])


@torch.no_grad()
def open_extract(folder: str | Path, dtype: torch.dtype, *, checkpoint: Path | None = None) -> Extract:
    """Open an extract on the CPU; its weights are pages of its file, which processes share.

    Args:
        dtype: what the engine computes in; the extract has to be made in it.
        checkpoint: the folder of the engine's weights, which the extract has to be made from.

    Raises:
        BadArtifact: no extract, a damaged one, or one of a newer format.
        IncompatiblePair: it is of other weights, or in another floating-point type.
        UnsupportedModel: this release of transformers makes something else of it than the one that it was written with.
    """
    folder = Path(folder).expanduser()
    facts = read_facts(folder)
    made_in = chosen_dtype(facts["dtype"], torch.device("cpu"))
    if made_in != dtype:
        wanted = str(dtype).removeprefix("torch.")
        raise IncompatiblePair(
            f"the extract {folder} is in {facts['dtype']}, the engine computes in {wanted}; make one with "
            f"kvlingo extract --dtype {wanted}"
        )
    if checkpoint is not None and checkpoint_digests(checkpoint) != frozenset(facts["checkpoint"]):
        raise IncompatiblePair(
            f"the extract {folder} was made from other weights, tokens or configuration than {checkpoint}; make one of that with "
            "kvlingo extract"
        )
    tensors = _read_tensors(folder / WEIGHTS_FILE, facts["weights_sha256"])
    lm = _partial_model(folder, facts, _part(tensors, WEIGHT))
    _compare(folder, lm, _part(tensors, CHECK))
    kept = _part(tensors, BEGINNING)
    beginnings = {
        tuple(ids): _beginning(kept, index, len(ids), len(lm.geometry)) for index, ids in enumerate(facts["beginnings"])
    }
    return Extract(lm, beginnings)


def _read_tensors(file: Path, sha256: str) -> dict[str, Tensor]:
    verify_file(file, sha256, "copy the whole folder again")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise BadArtifact(f"{file} can't be read ({first_line(error)}); copy the folder again") from error


def _part(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}


def _beginning(kept: Mapping[str, Tensor], index: int, tokens: int, layers: int) -> KV:
    keys, values = (tuple(kept[f"{index}.{layer}.{side}"] for layer in range(layers)) for side in ("keys", "values"))
    return KV(keys, values, tokens)


def _partial_model(folder: Path, facts: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LanguageModel:
    """Build the model without data, and put what there is in its place."""
    card = ModelCard(**facts["model"])
    with clear_load_errors(str(folder), weights=False):
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, facts["dtype"]))
    model.eval().requires_grad_(False)
    for name, tensor in weights.items():
        _put(model, name, tensor)
    geometry = Geometry.from_json(card.geometry)
    angles = angle_source(model, of_its_own=geometry.angle_limit is not None)
    rotary = Rotary(angles or no_angles, [layer.rope for layer in geometry.layers])
    return LanguageModel(
        card.name,
        model,
        None,
        geometry,
        rotary,
        (None,) * len(geometry),
        facts["target_refusal"],
        known_as=Identity(card.fingerprint, card.tokenizer_hash),
    )


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    *path, leaf = name.split(".")
    try:
        module = model.get_submodule(".".join(path))
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        here = next((place for place in places if leaf in place), None)
        if here is None or not isinstance(here[leaf], Tensor) or here[leaf].shape != tensor.shape:
            raise KeyError(leaf)
    except (AttributeError, KeyError) as error:
        raise UnsupportedModel(
            f"this release of transformers knows no {name} of such a shape in this model; make the extract anew with it"
        ) from error
    here[leaf] = nn.Parameter(tensor, requires_grad=False) if here is places[0] else tensor


def _compare(folder: Path, lm: LanguageModel, expected: Mapping[str, Tensor]) -> None:
    """Raise `UnsupportedModel` unless a few values are those of the whole model."""
    try:
        got = checked_values(lm)
    except (RuntimeError, NotImplementedError):  # something without data was needed after all (Gemma 3n)
        got = {}
    same = got.keys() == expected.keys() and all(_close(got[name], value) for name, value in expected.items())
    if not same:
        raise UnsupportedModel(
            f"what {folder} gives of this model's first layer or rotation is not what the whole model gives; leave the "
            "extract out, so that the checkpoint is loaded"
        )


def _close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    off = (got.float() - expected.float()).norm()
    return bool(off <= TOLERANCE.get(got.dtype, 0.0) * expected.float().norm())


# --- whose it is -----------------------------------------------------------------------------------------------------


def checkpoint_digests(folder: Path) -> frozenset[str]:
    """Return what tells a model's weights, configuration and tokens from others: `fingerprint` of what lies in files.

    A checkpoint of hundreds of gigabytes is told in a moment; names of files of weights do not count.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{folder} holds no weights (*.safetensors); an extract belongs to such files")
    with clear_load_errors(str(folder)):
        config = json.loads((folder / "config.json").read_bytes())
        described = {k: v for k, v in config.items() if k not in CONFIG_NOISE}
        weights = set(map(_sampled, files))
    told = [f"config {json.dumps(described, sort_keys=True)}".encode()]
    told += [name.encode() + (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()]
    return frozenset(weights | {hashlib.sha256(each).hexdigest() for each in told})


def _sampled(file: Path) -> str:
    """Hash the names and shapes of a file's tensors, and evenly spaced values of each."""
    data = np.memmap(file, np.uint8, mode="r")
    head = 8 + int(data[:8].view("<u8")[0])
    tensors = json.loads(bytes(data[8:head]))
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if name == "__metadata__":
            continue
        start, stop = tensor["data_offsets"]
        count = math.prod(tensor["shape"])
        width = (stop - start) // max(count, 1)
        places = np.arange(min(SAMPLES, count)) * count // max(min(SAMPLES, count), 1)
        taken = head + start + places[:, None] * width + np.arange(width)
        digest.update(f"{name}{tensor['dtype']}{tensor['shape']}".encode() + data[taken].tobytes())
    return digest.hexdigest()
