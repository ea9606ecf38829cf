"""translator.json: what is known about a translator besides its weights, and who may load it.

Knows formats, hashes and the identities of two models. Does not know how a translator is fitted or
judged: options and the held-out report are plain JSON here.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvlingo import __version__
from kvlingo.errors import BadArtifact, IncompatiblePair
from kvlingo.files import short
from kvlingo.geometry import Geometry
from kvlingo.translator import TranslatorConfig, check_geometry

if TYPE_CHECKING:
    from kvlingo.language_model import LanguageModel

FORMAT_VERSION = 1
MANIFEST_FILE = "translator.json"

StorageType = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True)
class ModelCard:
    """Which model stands on one side.

    Fields:
        name: for people; never compared.
        fingerprint: of the weights; what decides whether a model is the right one.
        tokenizer_hash: of the tokenizer and its chat template.
        geometry: `Geometry.to_json()` as plain JSON.
    """

    name: str
    fingerprint: str
    tokenizer_hash: str
    geometry: dict[str, Any]

    @classmethod
    def of(cls, model: LanguageModel) -> ModelCard:
        """Describe a loaded model; a path as its name loses its folders: an artifact travels."""
        name = Path(model.name).name if Path(model.name).is_absolute() else model.name
        geometry = plain(model.geometry.to_json())
        return cls(name, model.fingerprint, model.tokenizer_hash, geometry)


@dataclass(frozen=True)
class WeightsCard:
    """What the weights file must be."""

    sha256: str
    num_bytes: int
    dtype: StorageType


@dataclass(frozen=True)
class Manifest:
    """Everything about a translator but its weights and its config.

    Fields:
        source, target: the two models it was fitted on.
        options: of fitting and distilling, as plain JSON.
        held_out: the report on held-out documents (`Report.to_dict()`), or None before any
            evaluation.
        weights: of the file beside it; None until it is saved.
        confidence: what judges each of its hand-overs at run time (`Confidence.to_json()`); None where none was fitted.
    """

    source: ModelCard
    target: ModelCard
    options: dict[str, Any]
    held_out: dict[str, Any] | None = None
    weights: WeightsCard | None = None
    format_version: int = FORMAT_VERSION
    kvlingo_version: str = __version__
    confidence: dict[str, Any] | None = None

    @property
    def verdict(self) -> str | None:
        """Return what its evaluation said, PASS or FAIL; None before any: what fitting saw is no verdict."""
        return (self.held_out or {}).get("verdict")

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` restores; older versions read it too where there is no confidence."""
        content = asdict(self)
        return content if self.confidence is not None else {k: v for k, v in content.items() if k != "confidence"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Restore what `to_json` gave."""
        return cls(
            **{
                **data,
                "source": ModelCard(**data["source"]),
                "target": ModelCard(**data["target"]),
                "weights": WeightsCard(**data["weights"]),
            }
        )


def plain(value: Any) -> Any:
    """Return `value` as JSON would give it back: tuples as lists, keys as text.

    Raises:
        ValueError: it holds NaN or infinity, which JSON does not know.
        TypeError: it holds something that is no JSON value.
    """
    return json.loads(json.dumps(value, allow_nan=False))


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` as plain JSON with its own hash, which tells later edits."""
    content = plain(content)
    return {**content, "sha256": content_hash(content)}


def content_hash(content: Mapping[str, Any]) -> str:
    """Hash everything but the hash, whatever the order of keys and the white space."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_document(folder: Path) -> dict[str, Any]:
    """Read translator.json and check that it is ours, whole, unedited, and no newer than we are."""
    if not folder.exists():
        raise BadArtifact(f"there is no folder {folder}; give the one that `kvlingo fit` wrote")
    if not folder.is_dir():
        raise BadArtifact(f"{folder} is a file; give the folder that `kvlingo fit` wrote")
    file = folder / MANIFEST_FILE
    if not file.is_file() and (folder / "work").is_dir():
        raise BadArtifact(
            f"{folder} has no {MANIFEST_FILE}: its fit was stopped before the end; run the same `kvlingo fit` again, which "
            "goes on from what is kept there"
        )
    if not file.is_file():
        raise BadArtifact(
            f"{folder} has no {MANIFEST_FILE}, so it is no translator; give the folder that `kvlingo fit` wrote"
        )
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadArtifact(f"{file} is not whole ({first_line(error)}); copy the folder again") from error
    check_format(file, document)
    if document.get("sha256") != content_hash(document):
        raise BadArtifact(f"{file} was changed after it was saved; restore it, copy the folder again, or fit anew")
    return document


def check_format(file: Path, document: Any) -> None:
    """Raise `BadArtifact` for another program's JSON and for formats from the future."""
    manifest = document.get("manifest") if isinstance(document, dict) else None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or version < 1:
        raise BadArtifact(
            f"{file} names no format version, so it is no translator; give the folder that `kvlingo fit` wrote"
        )
    if version > FORMAT_VERSION:
        raise BadArtifact(
            f"{file} has format {version}, this kvlingo {__version__} reads up to "
            f"{FORMAT_VERSION}; upgrade: pip install -U kvlingo"
        )


def parse_manifest(document: Mapping[str, Any]) -> Manifest:
    """Build the manifest of a checked document."""
    try:
        return Manifest.from_json(document["manifest"])
    except (KeyError, TypeError) as error:
        raise BadArtifact(
            f"{MANIFEST_FILE} lacks a field or has a strange one ({first_line(error)}); fit anew"
        ) from error


def parse_config(document: Mapping[str, Any]) -> TranslatorConfig:
    """Build the translator's config of a checked document."""
    try:
        return TranslatorConfig.from_json(document["translator"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadArtifact(
            f"{MANIFEST_FILE} holds no translator that this version knows ({first_line(error)}); fit anew"
        ) from error


def card_of(model: ModelCard | LanguageModel | None) -> ModelCard | None:
    """Return the card of a side, if there is a model."""
    return model if model is None or isinstance(model, ModelCard) else ModelCard.of(model)


def check_pair(
    manifest: Manifest,
    source: ModelCard | None,
    target: ModelCard | None,
    *,
    allow_mismatch: bool = False,
) -> None:
    """Raise `IncompatiblePair` unless the given models are those the translator was fitted on."""
    sides = [("source", source, manifest.source), ("target", target, manifest.target)]
    given = [(side, got, fitted) for side, got, fitted in sides if got is not None]
    if is_swapped(manifest, source, target):
        raise IncompatiblePair(
            f"source and target are swapped: this translator goes from {manifest.source.name} to "
            f"{manifest.target.name}; "
            "swap the two models, or fit the other direction"
        )
    for side, got, fitted in given:
        problem = mismatch(side, got, fitted)
        if problem and not allow_mismatch:
            raise IncompatiblePair(
                f"{problem}; use the model it was fitted on, fit anew, or accept it with allow_mismatch=True"
            )
        if problem:
            warnings.warn(f"{problem}: quality is unknown, evaluate before use", stacklevel=3)


def is_swapped(manifest: Manifest, source: ModelCard | None, target: ModelCard | None) -> bool:
    """Whether every given side is the translator's other side."""
    here = (manifest.source.fingerprint, manifest.target.fingerprint)
    crossed = [card.fingerprint == other for card, other in ((source, here[1]), (target, here[0])) if card is not None]
    return here[0] != here[1] and bool(crossed) and all(crossed)


def mismatch(side: str, got: ModelCard, fitted: ModelCard) -> str | None:
    """Say how a model differs from the one the translator was fitted on, or None."""
    if got.fingerprint != fitted.fingerprint:
        return (
            f"wrong {side} model: got {got.name} (weights {short(got.fingerprint)}), "
            f"the translator was fitted on {fitted.name} ({short(fitted.fingerprint)})"
        )
    if got.tokenizer_hash != fitted.tokenizer_hash:
        return (
            f"the {side}'s tokenizer or chat template ({short(got.tokenizer_hash)}) is not the one "
            f"the translator was fitted with ({short(fitted.tokenizer_hash)})"
        )
    return None


def check_cache(config: TranslatorConfig, source: ModelCard | None, target: ModelCard | None) -> None:
    """Raise `IncompatiblePair` unless the given models' caches look as the translator expects."""
    check_geometry(
        config,
        config.source if source is None else Geometry.from_json(source.geometry),
        config.target if target is None else Geometry.from_json(target.geometry),
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
