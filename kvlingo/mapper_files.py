"""Read and write the mapper folders of vllm-project/semantic-router.

Knows their format, and refuses a folder that is not whole, of another version, or of a kind that nothing here computes.
Deliberately does not know translators.

A mapper folder (schema version 1):
    manifest.json        both models with the commits of their weights, one number of heads and one head size for both, and for
                         each target layer the source layers that it reads: the same for keys and values, equally many everywhere
    weights.safetensors  float32: target.{layer}.k.W [source layers · heads · dim, heads · dim] and target.{layer}.k.b
                         [heads · dim]; the same for v. Rows are tokens: y = x W + b, where x is the paired layers' keys (for v
                         their values), one layer after another, head after head. Keys are after the key norm, before the rotation
    SHA256SUMS           of the two
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from kvlingo import __version__
from kvlingo.errors import BadArtifact, BadInput
from kvlingo.files import replace_folder, verify_file
from kvlingo.manifest import first_line

SCHEMA_VERSION = 1
MANIFEST_FILE, WEIGHTS_FILE, SUMS_FILE = "manifest.json", "weights.safetensors", "SHA256SUMS"
MAPPER_FILES = (MANIFEST_FILE, WEIGHTS_FILE)
FULL_HEAD, CONTIGUOUS = "full_head", "contiguous"
PRECISIONS = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32"}
SUM_LINE = re.compile(r"([0-9a-fA-F]{64})\s+(\S+)")
CHANNELS = ("k", "v")


@dataclass(frozen=True)
class Compatibility:
    """What a deployment must be for a mapper to be used; the format's own names.

    Fields:
        source_revision, target_revision: the commits of the weights on the hub.
        variant: full_head: every head may reach every head.
        precision: of the caches it is served with: fp16, bf16 or fp32.
        source_tp, target_tp: over how many ranks heads are split.
        head_order: contiguous: head after head.
    """

    source_model: str
    source_revision: str
    target_model: str
    target_revision: str
    variant: str
    precision: str
    source_tp: int
    target_tp: int
    head_order: str
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Return the key (or value) features of one token in one layer."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MapperManifest:
    """A mapper folder's manifest.json; the format's own names."""

    mapper_id: str
    compatibility: Compatibility
    topk: int
    ridge_alpha: float
    centered_inputs: bool
    rope_stripped_on_keys: bool
    source_layers_per_target: dict[str, dict[str, list[int]]]
    calibration: dict[str, Any] = field(default_factory=dict)
    evaluation_report: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def source_layers(self) -> tuple[tuple[int, ...], ...]:
        """Return for each target layer the source layers that it reads."""
        listed = self.source_layers_per_target["k"]
        return tuple(tuple(listed[str(layer)]) for layer in range(len(listed)))


# --- in and out -------------------------------------------------------------------------------------------------------


def write_mapper(place: Path, manifest: MapperManifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a mapper folder, whole or not at all.

    Raises:
        BadInput: weights are NaN or infinite, the place can't be written, or the disk is full.
    """
    wrong = next((name for name, x in tensors.items() if not x.isfinite().all()), None)
    if wrong is not None:
        raise BadInput(
            f"weight {wrong} holds NaN or infinity, so nothing was written; fit anew with more damping or text"
        )
    check_mapper(manifest, tensors)
    files = {
        MANIFEST_FILE: (json.dumps(asdict(manifest), indent=2, sort_keys=True, allow_nan=False) + "\n").encode(),
        WEIGHTS_FILE: to_safetensors(dict(tensors)),
    }
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    replace_folder(place, {**files, SUMS_FILE: sums.encode()})


def read_mapper(folder: Path) -> tuple[MapperManifest, dict[str, Tensor]]:
    """Read a mapper folder, verified byte for byte.

    Raises:
        BadArtifact: it is none, is damaged, or is of a version or variant that is not known here.
    """
    for name in (*MAPPER_FILES, SUMS_FILE):
        if not (folder / name).is_file():
            raise BadArtifact(f"{folder} has no {name}, so it is no mapper folder; give one of semantic-router's")
    verify_sums(folder)
    manifest = parse_mapper(folder / MANIFEST_FILE)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise BadArtifact(
            f"{folder / WEIGHTS_FILE} can't be read ({first_line(error)}); copy the folder again"
        ) from error
    check_mapper(manifest, tensors)
    return manifest, tensors


def verify_sums(folder: Path) -> None:
    """Raise `BadArtifact` unless SHA256SUMS names both files, each once, as they are."""
    found: dict[str, str] = {}
    for line in (folder / SUMS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
        match = SUM_LINE.fullmatch(line.strip())
        if match is None or match[2] not in MAPPER_FILES or match[2] in found:
            raise BadArtifact(f"{folder / SUMS_FILE} has a strange line, {line[:80]!r}; copy the folder again")
        found[match[2]] = match[1].lower()
    for name in MAPPER_FILES:
        if name not in found:
            raise BadArtifact(f"{folder / SUMS_FILE} has no line for {name}; copy the folder again")
        verify_file(folder / name, found[name], "copy the folder again")


def parse_mapper(file: Path) -> MapperManifest:
    """Read manifest.json: every field of schema version 1, each of its kind, and no other."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadArtifact(f"{file} is no JSON ({first_line(error)}); copy the folder again") from error
    if not isinstance(data, dict):
        raise BadArtifact(f"{file} holds no object; give a mapper folder of semantic-router's")
    version = data.get("schema_version", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise BadArtifact(
            f"{file} has schema version {version!r}, this kvlingo {__version__} reads {SCHEMA_VERSION}; "
            "upgrade: pip install -U kvlingo"
        )
    compatibility = data.get("compatibility")
    of_kind(file, data, MAPPER_KINDS, required=set(MAPPER_KINDS) - OPTIONAL)
    assert isinstance(compatibility, dict)
    of_kind(file, compatibility, COMPATIBILITY_KINDS, required=set(COMPATIBILITY_KINDS))
    named = Compatibility(**compatibility)
    return MapperManifest(**{**data, "compatibility": replace(named, precision=known_precision(file, named.precision))})


MAPPER_KINDS: dict[str, tuple[type, ...]] = {
    "mapper_id": (str,),
    "compatibility": (dict,),
    "topk": (int,),
    "ridge_alpha": (int, float),
    "centered_inputs": (bool,),
    "rope_stripped_on_keys": (bool,),
    "source_layers_per_target": (dict,),
    "calibration": (dict,),
    "evaluation_report": (str, type(None)),
    "schema_version": (int,),
}
OPTIONAL = {"calibration", "evaluation_report", "schema_version"}
COMPATIBILITY_KINDS: dict[str, tuple[type, ...]] = {
    each.name: (int,) if each.type == "int" else (str,) for each in fields(Compatibility)
}


def of_kind(file: Path, data: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], *, required: set[str]) -> None:
    """Raise `BadArtifact` unless an object has the fields that it must have, of their kinds, and none that is not known."""
    strange = sorted(set(data) - set(kinds))
    if strange:
        raise BadArtifact(f"{file} has a field {strange[0]!r} that schema version {SCHEMA_VERSION} does not have")
    for name in sorted(required - set(data)):
        raise BadArtifact(f"{file} lacks the field {name!r} of schema version {SCHEMA_VERSION}; copy the folder again")
    for name, value in data.items():
        if type(value) not in kinds[name]:  # a bool is no number here
            wanted = " or ".join(kind.__name__ for kind in kinds[name])
            raise BadArtifact(f"{file}: {name} is {str(value)[:60]!r}, expected {wanted}")


def precision_of(name: str) -> str:
    """Return a precision as the format spells it."""
    found = PRECISIONS.get(name.strip().lower(), name.strip().lower())
    if found not in PRECISIONS.values():
        raise BadInput(f"unknown precision {name!r}; use fp16, bf16 or fp32")
    return found


def known_precision(file: Path, name: str) -> str:
    """Return a precision that was read. Raises `BadArtifact` for one that is not known."""
    try:
        return precision_of(name)
    except BadInput as error:
        raise BadArtifact(f"{file}: {error}") from error


# --- what is read -----------------------------------------------------------------------------------------------------


def check_mapper(manifest: MapperManifest, tensors: Mapping[str, Tensor]) -> None:
    """Raise `BadArtifact` unless a manifest is one that is known here and the tensors are what it says."""
    refuse_manifest(manifest)
    check_layers(manifest)
    width, layers = manifest.compatibility.width, len(manifest.source_layers)
    shapes = {
        f"target.{layer}.{channel}.{part}": shape
        for layer in range(layers)
        for channel in CHANNELS
        for part, shape in (("W", (manifest.topk * width, width)), ("b", (width,)))
    }
    for name in sorted(shapes.keys() ^ tensors.keys()):
        raise BadArtifact(
            f"{WEIGHTS_FILE} {'lacks' if name in shapes else 'has a strange'} tensor {name}; copy the folder again"
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise BadArtifact(
                f"{WEIGHTS_FILE}: {name} is {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, expected finite "
                f"float32 {shape}"
            )


def refuse_manifest(manifest: MapperManifest) -> None:
    """Raise `BadArtifact` for what the format allows and nothing here computes."""
    named = manifest.compatibility
    for refused, reason in (
        (named.variant != FULL_HEAD, f"variant {named.variant!r}, {FULL_HEAD} is read"),
        (named.head_order != CONTIGUOUS, f"head order {named.head_order!r}, {CONTIGUOUS} is read"),
        ((named.source_tp, named.target_tp) != (1, 1), "heads split over ranks, maps of whole layers are read"),
        (not manifest.rope_stripped_on_keys, "rotated keys, maps of keys before the rotation are read"),
        (min(named.num_kv_heads, named.head_dim, manifest.topk) < 1, "no heads, dims or source layers"),
    ):
        if refused:
            raise BadArtifact(f"mapper {manifest.mapper_id} has {reason}")


def check_layers(manifest: MapperManifest) -> None:
    """Raise `BadArtifact` unless every target layer lists as many source layers, each once, for keys and values alike."""
    listed = manifest.source_layers_per_target
    names = {str(layer) for layer in range(len(listed.get("k", {})))}
    if set(listed) != set(CHANNELS) or not names or any(set(listed[channel]) != names for channel in CHANNELS):
        raise BadArtifact(
            f"mapper {manifest.mapper_id} does not list the source layers of target layers 0, 1, … for k and for v"
        )
    for name in sorted(names, key=int):
        layers = listed["k"][name]
        whole = isinstance(layers, list) and all(type(x) is int and x >= 0 for x in layers)
        if not whole or layers != listed["v"][name] or not len(layers) == len(set(layers)) == manifest.topk:
            raise BadArtifact(
                f"mapper {manifest.mapper_id}: target layer {name} reads {str(layers)[:60]} for keys and "
                f"{str(listed['v'][name])[:60]} for values, "
                f"expected the same {manifest.topk} source layers, each once"
            )
