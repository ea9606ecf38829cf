"""Exchange plain linear maps with the mapper folders of vllm-project/semantic-router.

Knows what of a translator their format (`mapper_files`) can hold. Deliberately does not know how either is fitted or served, and
never makes up for what the format lacks: a translator that it can't hold whole is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlingo import __version__
from kvlingo.errors import BadInput, IncompatiblePair
from kvlingo.files import short
from kvlingo.geometry import Geometry
from kvlingo.jobs import Where, load_pair
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, ModelCard, StorageType
from kvlingo.mapper_files import (
    CHANNELS,
    CONTIGUOUS,
    FULL_HEAD,
    Compatibility,
    MapperManifest,
    precision_of,
    read_mapper,
    write_mapper,
)
from kvlingo.store import load_translator, refuse_to_replace, save_translator
from kvlingo.translator import HeadwiseMap, LayerMap, LinearMap, Translator, TranslatorConfig

COMMIT = re.compile(r"[0-9a-f]{40}")
Tell = Callable[[str], None]


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
