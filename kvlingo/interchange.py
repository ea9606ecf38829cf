"""Exchange plain linear maps with the mapper folders of vllm-project/semantic-router.

Knows their format and what of a translator it can hold. Deliberately does not know how either is fitted or served, and never
makes up for what the format lacks: a translator that it can't hold whole is refused with the reason.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from kvlingo import __version__
from kvlingo.errors import BadArtifact, BadInput, IncompatiblePair
from kvlingo.files import replace_folder
from kvlingo.geometry import Geometry
from kvlingo.jobs import Where, load_pair
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, ModelCard, StorageType, first_line, short
from kvlingo.store import load_translator, refuse_to_replace, save_translator
from kvlingo.translator import HeadwiseMap, LayerMap, LinearMap, Translator, TranslatorConfig

SCHEMA_VERSION = 1
MANIFEST_FILE, WEIGHTS_FILE, SUMS_FILE = "manifest.json", "weights.safetensors", "SHA256SUMS"
MAPPER_FILES = (MANIFEST_FILE, WEIGHTS_FILE)
FULL_HEAD, CONTIGUOUS = "full_head", "contiguous"
PRECISIONS = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32"}
COMMIT = re.compile(r"[0-9a-f]{40}")
SUM_LINE = re.compile(r"([0-9a-fA-F]{64})\s+(\S+)")
CHANNELS = ("k", "v")
Tell = Callable[[str], None]


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


@dataclass(frozen=True)
class Naming:
    """What only the caller knows of a mapper to be written; None: what the translator says, where it says it.

    Fields:
        pair: the first words of its id.
        bundle: a number that grows when the same weights are fitted anew.
    """

    source_model: str | None = None
    source_revision: str | None = None
    target_model: str | None = None
    target_revision: str | None = None
    precision: str = "bf16"
    pair: str | None = None
    bundle: int = 1


# --- from names to files ---------------------------------------------------------------------------------------------


def export_folder(folder: Path, out: Path, naming: Naming, *, overwrite: bool, tell: Tell) -> dict[str, Any]:
    """Write a saved translator as a mapper folder, `out`/MAPPER_ID; return what was written.

    Raises:
        IncompatiblePair: the format can't hold this translator; the message names the reason.
        BadInput: a commit is missing, or the place is taken or can't be written.
        BadArtifact: as `load_translator`.
    """
    translator, manifest = load_translator(folder)
    refuse_config(translator.config)
    named = described(manifest, translator.config, naming)
    place = out.expanduser().resolve() / named.mapper_id
    if place.exists() and not overwrite:
        raise BadInput(f"{place} is there already; choose another place or --bundle, or replace it with --overwrite")
    if manifest.source.tokenizer_hash != manifest.target.tokenizer_hash:
        tell(
            "the two models' tokenizers or chat templates differ: the format pairs tokens one to one, so such a mapper "
            "serves only where both spell a prompt with the same ids"
        )
    write_mapper(place, named, mapper_tensors(translator, named.source_layers))
    return {"folder": str(place), "mapper_id": named.mapper_id, "source_layers_per_target": named.topk}


def import_folder(
    folder: Path,
    out: Path,
    *,
    source: str | None,
    target: str | None,
    where: Where,
    storage: StorageType,
    overwrite: bool,
    tell: Tell,
) -> dict[str, Any]:
    """Save a mapper folder as a translator; both models are loaded, since a translator knows them by their weights.

    Raises:
        BadArtifact: no mapper folder, a damaged one, or one of another version.
        IncompatiblePair: its maps don't fit these models, or other commits are loaded.
    """
    manifest, tensors = read_mapper(folder.expanduser())
    refuse_to_replace(out.expanduser().resolve(), overwrite)
    named = manifest.compatibility
    models = load_pair(source or named.source_model, target or named.target_model, where)
    for side, lm, commit in zip(
        ("source", "target"), models, (named.source_revision, named.target_revision), strict=True
    ):
        check_commit(side, lm, commit, tell)
    translator = translator_of(manifest, tensors, models[0].geometry, models[1].geometry)
    told = {"format": "semantic-router", **asdict(manifest)}
    saved = save_translator(
        out,
        translator,
        Manifest(ModelCard.of(models[0]), ModelCard.of(models[1]), {"interchange": told}),
        dtype=storage,
        overwrite=overwrite,
    )
    assert saved.weights is not None
    tell("no report comes with it: `kvlingo eval` writes one, and `kvlingo serve` translates once it says PASS")
    return {"folder": str(out), "mapper_id": manifest.mapper_id, "num_bytes": saved.weights.num_bytes}


def check_commit(side: str, lm: LanguageModel, commit: str, tell: Tell) -> None:
    """Refuse a model of another commit than the mapper's; say so where the commit of what was loaded is not known."""
    loaded = getattr(lm.model.config, "_commit_hash", None)
    if loaded is None:
        tell(f"{lm.name} came from no hub, so nothing says whether it is the {side}'s commit {short(commit)}")
    elif loaded != commit:
        raise IncompatiblePair(
            f"the mapper's {side} is commit {short(commit)}, loaded is {short(loaded)} of {lm.name}; "
            "load that commit from a folder"
        )


# --- what the format can hold ----------------------------------------------------------------------------------------


def refuse_config(config: TranslatorConfig) -> None:
    """Raise `IncompatiblePair` for a translator that the format can't hold, with the reason."""
    for refused, reason in (
        (config.reads_text, "it reads the text, the format maps caches alone; fit one with --no-text"),
        (not config.reads_source, "it reads no source layer; the format maps caches"),
        (config.source_lags != (0,), "it reads source tokens before the aligned one, the format that one alone"),
        (
            config.map_kind == "lowrank",
            "its maps are low-rank, the format holds whole matrices; fit one with --map headwise",
        ),
        (
            config.residual_width > 0,
            "it has an MLP residual, the format holds linear maps; fit one with --map headwise",
        ),
        (
            any(config.key_norms),
            "its keys end in the target's key norm, the format's in the map; fit one with --no-key-norm",
        ),
    ):
        if refused:
            raise cant_hold(reason)
    head_shape(config.source, config.target)


def cant_hold(reason: str) -> IncompatiblePair:
    """Return the error for a translator that stays here."""
    return IncompatiblePair(f"this translator can't become a semantic-router mapper: {reason}")


def head_shape(source: Geometry, target: Geometry) -> tuple[int, int]:
    """Return the number of heads and the head size that all layers of both models share.

    Raises `IncompatiblePair` where they share none, or where some layers keep no keys and values of their own.
    """
    shapes = {(x.kv_heads, dim) for side in (source, target) for x in side.layers for dim in (x.key_dim, x.value_dim)}
    if len(shapes) > 1:
        told = ", ".join(f"{heads} × {dim}" for heads, dim in sorted(shapes))
        raise cant_hold(f"the format has one number of heads and one head size for both models, these have {told}")
    if source.owners is not None or target.owners is not None:
        raise cant_hold("the format has keys and values of every layer, one of these models has layers without")
    if any(x.rope is not None and x.rope.part != "keys" for side in (source, target) for x in side.layers):
        raise cant_hold("one of the models rotates what stands in the place of values (latent attention)")
    return next(iter(shapes))


# --- from a translator -----------------------------------------------------------------------------------------------


def described(manifest: Manifest, config: TranslatorConfig, naming: Naming) -> MapperManifest:
    """Return the manifest of a translator's mapper."""
    heads, dim = head_shape(config.source, config.target)
    earlier = manifest.options.get("interchange", {}).get("compatibility", {})
    sides = {
        f"{side}_model": getattr(naming, f"{side}_model") or earlier.get(f"{side}_model") or card.name
        for side, card in (("source", manifest.source), ("target", manifest.target))
    }
    commits = {
        f"{side}_revision": commit_of(side, getattr(naming, f"{side}_revision") or earlier.get(f"{side}_revision"))
        for side in ("source", "target")
    }
    compatibility = Compatibility(
        **sides,
        **commits,
        variant=FULL_HEAD,
        precision=precision_of(naming.precision),
        source_tp=1,
        target_tp=1,
        head_order=CONTIGUOUS,
        num_kv_heads=heads,
        head_dim=dim,
    )
    listed = same_number(config.source_layers, len(config.source))
    chosen = {str(layer): list(layers) for layer, layers in enumerate(listed)}
    return MapperManifest(
        mapper_id=mapper_id(compatibility, naming),
        compatibility=compatibility,
        topk=len(listed[0]),
        ridge_alpha=0.0,  # chosen for each layer here, and gone after distilling
        centered_inputs=True,
        rope_stripped_on_keys=True,
        source_layers_per_target={channel: {k: list(v) for k, v in chosen.items()} for channel in CHANNELS},
        calibration={
            "made_by": f"kvlingo {__version__}",
            "fitted_tokens": config.fitted_tokens,
            "verdict": manifest.verdict,
            "source_fingerprint": manifest.source.fingerprint,
            "target_fingerprint": manifest.target.fingerprint,
        },
    )


def commit_of(side: str, revision: str | None) -> str:
    """Return a commit as the format wants it. Raises `BadInput` for a branch, a tag or nothing."""
    commit = (revision or "").strip().lower()
    if not COMMIT.fullmatch(commit):
        got = f"got {revision!r}" if revision else "a translator does not know it"
        raise BadInput(
            f"the format names the {side}'s weights by their commit on the hub, 40 characters ({got}); give --{side}-revision"
        )
    return commit


def precision_of(name: str) -> str:
    """Return a precision as the format spells it."""
    found = PRECISIONS.get(name.strip().lower(), name.strip().lower())
    if found not in PRECISIONS.values():
        raise BadInput(f"unknown precision {name!r}; use fp16, bf16 or fp32")
    return found


def mapper_id(compatibility: Compatibility, naming: Naming) -> str:
    """Return the id that a router names a mapper by: pair, layout, precision and both commits."""
    both = (compatibility.source_model, compatibility.target_model)
    pair = naming.pair or "-".join(name.split("/")[-1] for name in both)
    words = re.sub(r"[^a-z0-9._]+", "-", pair.lower()).strip("-.")
    if not words:
        raise BadInput(f"the pair's name {pair!r} has no letter or digit; give --pair")
    return (
        f"{words}-{compatibility.variant}-{compatibility.precision}-tp{compatibility.source_tp}-h{compatibility.num_kv_heads}"
        f"-s{compatibility.source_revision}-t{compatibility.target_revision}-b{naming.bundle}"
    )


def same_number(source_layers: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """Return lists of one length: a shorter one is filled with the lowest layers that it lacks, whose weights will be zero."""
    most = max(map(len, source_layers))
    return tuple(
        (*layers, *[x for x in range(count) if x not in layers][: most - len(layers)]) for layers in source_layers
    )


@torch.no_grad()
def mapper_tensors(translator: Translator, source_layers: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return a translator's maps as the format holds them.

    Features are standardised here and plain there: with scale s and mean m, W' = W / s and b' = b - (m / s) W.
    """
    tensors: dict[str, Tensor] = {}
    for layer, read in enumerate(source_layers):
        layer_map = translator.maps[str(layer)]
        assert isinstance(layer_map, LayerMap)
        weight = whole_matrix(layer_map).double() / layer_map.feature_scale.double()[:, None]
        bias = layer_map.bias.double() - layer_map.feature_mean.double() @ weight
        width = layer_map.shape.key_width
        own = list(translator.config.source_layers[layer])
        parts = (weight[:, :width], weight[:, width:])
        for channel, part, of_bias in zip(CHANNELS, parts, (bias[:width], bias[width:]), strict=True):
            rows = part.unflatten(0, (len(own), 2, width))  # of each source layer: keys, then values
            if bool(rows[:, 1 - CHANNELS.index(channel)].any()):
                mine, other = ("keys", "values") if channel == "k" else ("values", "keys")
                raise cant_hold(
                    f"layer {layer} makes {mine} from {other} too, the format {mine} from {mine} alone; "
                    "fit one with --map headwise"
                )
            wanted = rows[:, CHANNELS.index(channel)]
            blocks = [wanted[own.index(s)] if s in own else torch.zeros_like(wanted[0]) for s in read]
            tensors[f"target.{layer}.{channel}.W"] = torch.cat(blocks).float().contiguous()
            tensors[f"target.{layer}.{channel}.b"] = of_bias.float().contiguous()
    return tensors


def whole_matrix(layer_map: LayerMap) -> Tensor:
    """Return a linear map's weights as one matrix [features, outputs]."""
    linear = layer_map.linear
    if isinstance(linear, LinearMap):
        return linear.weight
    if not isinstance(linear, HeadwiseMap):
        raise cant_hold(f"its maps are of kind {type(linear).__name__}, the format holds linear ones")
    matrix = torch.zeros(len(layer_map.feature_mean), layer_map.shape.width)
    start = 0
    for index, weight in ((linear.key_index, linear.key_weight), (linear.value_index, linear.value_weight)):
        dim = weight.shape[-1]
        for head, columns in enumerate(index):
            matrix[columns, start + head * dim : start + (head + 1) * dim] = weight[head]
        start += len(index) * dim
    return matrix


# --- to a translator -------------------------------------------------------------------------------------------------


@torch.no_grad()
def translator_of(
    manifest: MapperManifest, tensors: Mapping[str, Tensor], source: Geometry, target: Geometry
) -> Translator:
    """Return the translator that computes what a mapper does.

    Raises `IncompatiblePair` where the mapper does not fit the two models.
    """
    named, read = manifest.compatibility, manifest.source_layers
    got = head_shape(source, target)
    if got != (named.num_kv_heads, named.head_dim):
        raise IncompatiblePair(
            f"the mapper is for {named.num_kv_heads} heads of {named.head_dim}, these models have {got[0]} of {got[1]}; "
            "give the models it was fitted on (--source, --target)"
        )
    if len(read) != len(target) or max(map(max, read)) >= len(source):
        raise IncompatiblePair(
            f"the mapper reads source layers up to {max(map(max, read))} for {len(read)} target layers, these models have "
            f"{len(source)} and {len(target)}; give the models it was fitted on (--source, --target)"
        )
    seen = manifest.calibration.get("seq_len", manifest.calibration.get("fitted_tokens"))
    fitted_tokens = seen if isinstance(seen, int) and seen > 0 else None
    translator = Translator(TranslatorConfig(source, target, read, embedding_lags=(), fitted_tokens=fitted_tokens))
    width = named.width
    for layer, layers in enumerate(read):
        layer_map = translator.maps[str(layer)]
        assert isinstance(layer_map, LayerMap)
        assert isinstance(layer_map.linear, LinearMap)
        rows = layer_map.linear.weight.unflatten(0, (len(layers), 2, width))
        for place, channel in enumerate(CHANNELS):
            outputs = slice(place * width, (place + 1) * width)
            rows[:, place, :, outputs] = tensors[f"target.{layer}.{channel}.W"].unflatten(0, (len(layers), width))
            layer_map.bias[outputs] = tensors[f"target.{layer}.{channel}.b"]
    return translator.eval()


# --- files -----------------------------------------------------------------------------------------------------------


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
        with (folder / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != found[name]:
            raise BadArtifact(
                f"{folder / name} is damaged: SHA-256 {short(digest)}, expected {short(found[name])}; copy the folder again"
            )


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


def known_precision(file: Path, name: str) -> str:
    """Return a precision that was read. Raises `BadArtifact` for one that is not known."""
    try:
        return precision_of(name)
    except BadInput as error:
        raise BadArtifact(f"{file}: {error}") from error


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
