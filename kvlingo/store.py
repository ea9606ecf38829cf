"""A translator on disk and on the hub: safetensors, JSON and a model card in one folder.

Knows file formats. What is known about a translator is `manifest`'s business, the card's text
`readme`'s. Nothing in an artifact is ever executed: no pickle, no code from a hub.

Layout of the folder:
    translator.safetensors  the weights: float32, bfloat16, or int8 with one scale per output
    translator.json         both models' identities, the translator's config, options, report, hash
    README.md               the model card
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from kvlingo import __version__
from kvlingo.errors import BadArtifact, BadInput, MissingExtra
from kvlingo.files import replace_folder, verify_file
from kvlingo.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Manifest,
    ModelCard,
    StorageType,
    WeightsCard,
    card_of,
    check_cache,
    check_pair,
    first_line,
    parse_config,
    parse_manifest,
    read_document,
    sealed,
)
from kvlingo.readme import model_card
from kvlingo.translator import Translator, TranslatorConfig

if TYPE_CHECKING:
    from kvlingo.language_model import LanguageModel

__all__ = [
    "Manifest",
    "ModelCard",
    "from_pretrained",
    "load_translator",
    "push_to_hub",
    "read_manifest",
    "save_translator",
]

WEIGHTS_FILE = "translator.safetensors"
CARD_FILE = "README.md"
ARTIFACT_FILES = (WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE)
BYTES: dict[StorageType, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
SCALE_SUFFIX = ".int8_scale"
UNKNOWN_REPOSITORY = {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}
OUT_OF_REACH = {
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ConnectError",
    "ConnectionError",
    "TimeoutException",
}
REPO_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def save_translator(
    folder: str | Path,
    translator: Translator,
    manifest: Manifest,
    *,
    dtype: StorageType = "float32",
    overwrite: bool = False,
) -> Manifest:
    """Write a translator's folder, whole or not at all.

    Everything goes into a sibling folder first, which then takes the place of the old one. Files in
    the old one that are not ours (a loss curve, notes) move along.

    Args:
        folder: where; made with its parents if need be.
        translator: on any device, in any floating-point type.
        manifest: versions and `weights` are filled in here.
        dtype: how matrices are stored; vectors are always float32.
        overwrite: replace the translator that is there.

    Returns the manifest as written.

    Raises:
        BadInput: the folder must not or can't be written, the disk is full, or weights are NaN.
    """
    if dtype not in get_args(StorageType):
        raise BadInput(f"unknown storage type {dtype!r}; choose one of {', '.join(get_args(StorageType))}")
    folder = Path(folder).expanduser().resolve()
    refuse_to_replace(folder, overwrite)
    weights = to_safetensors(pack(translator, dtype))
    manifest = replace(
        manifest,
        format_version=FORMAT_VERSION,
        kvlingo_version=__version__,
        weights=WeightsCard(hashlib.sha256(weights).hexdigest(), len(weights), dtype),
    )
    document = sealed({"manifest": manifest.to_json(), "translator": translator.config.to_json()})
    manifest = Manifest.from_json(document["manifest"])
    files = {
        WEIGHTS_FILE: weights,
        MANIFEST_FILE: (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(),
        CARD_FILE: model_card(manifest).encode(),
    }
    replace_folder(folder, files)
    return manifest


def load_translator(
    folder: str | Path,
    *,
    source: ModelCard | LanguageModel | None = None,
    target: ModelCard | LanguageModel | None = None,
    allow_mismatch: bool = False,
) -> tuple[Translator, Manifest]:
    """Read a translator's folder, on the CPU in float32, in eval mode.

    Weights that are stored in fewer bits are multiplied in bfloat16 too, where the machine is fast in it: what they lost in
    storing is more than what products lose.

    Args:
        folder: what `save_translator` wrote.
        source, target: the models at hand, checked where given.
        allow_mismatch: warn about another model or tokenizer instead of refusing. Swapped sides and
            other cache geometries are refused all the same.

    Raises:
        BadArtifact: not a translator, damaged, truncated, edited, or of a newer format.
        IncompatiblePair: it belongs to other models.
    """
    folder = Path(folder).expanduser()
    document = read_document(folder)
    manifest = parse_manifest(document)
    config = parse_config(document)
    check_pair(manifest, card_of(source), card_of(target), allow_mismatch=allow_mismatch)
    check_cache(config, card_of(source), card_of(target))
    assert manifest.weights is not None
    file = folder / WEIGHTS_FILE
    verify_weights(file, manifest.weights)
    translator = Translator(config)
    try:
        translator.load_state_dict(unpack(load_file(file)))
    except (SafetensorError, RuntimeError) as error:
        raise BadArtifact(
            f"{file} does not hold this translator's weights ({first_line(error)}); copy the folder again, or fit anew"
        ) from error
    translator.multiply_in_bfloat16(manifest.weights.dtype != "float32")
    return translator.eval(), manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Read what is known about a translator without its weights.

    Raises:
        BadArtifact: as `load_translator`.
    """
    return parse_manifest(read_document(Path(folder).expanduser()))


def save_report(folder: str | Path, report: dict[str, Any]) -> Manifest:
    """Write a held-out report into a saved translator; its weights stay as they are.

    Raises:
        BadArtifact: as `load_translator`.
        BadInput: the folder can't be written, or the disk is full.
    """
    return rewrite_manifest(Path(folder), held_out=report)


def save_confidence(folder: str | Path, confidence: dict[str, Any]) -> Manifest:
    """Write what judges its hand-overs into a saved translator; raises as `save_report`."""
    return rewrite_manifest(Path(folder), confidence=confidence)


def rewrite_manifest(folder: Path, **changes: Any) -> Manifest:
    """Change what is known about a saved translator; its weights stay as they are."""
    folder = folder.expanduser().resolve()
    document = read_document(folder)
    manifest = replace(parse_manifest(document), **changes)
    document = sealed({"manifest": manifest.to_json(), "translator": document["translator"]})
    files = {
        WEIGHTS_FILE: (folder / WEIGHTS_FILE).read_bytes(),
        MANIFEST_FILE: (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(),
        CARD_FILE: model_card(manifest).encode(),
    }
    replace_folder(folder, files)
    return manifest


# Weights


def pack(translator: nn.Module, dtype: StorageType) -> dict[str, Tensor]:
    """Return the state as it is stored: contiguous, on the CPU, sharing nothing.

    Matrices take `dtype`; vectors, such as means and scales, stay float32, integers as they are.
    """
    linear = {f"{name}.weight" for name, m in translator.named_modules() if isinstance(m, nn.Linear)}
    stored: dict[str, Tensor] = {}
    for name, tensor in translator.state_dict().items():
        tensor = tensor.detach().cpu()
        if not tensor.is_floating_point():
            stored[name] = tensor.clone().contiguous()
            continue
        if not tensor.isfinite().all():
            raise BadInput(
                f"weight {name} holds NaN or infinity, so nothing was saved; fit anew with more damping or text"
            )
        tensor = tensor.to(torch.float32, copy=True).contiguous()
        if tensor.ndim < 2 or dtype == "float32":
            stored[name] = tensor
        elif dtype == "bfloat16":
            stored[name] = tensor.bfloat16()
        else:  # nn.Linear keeps [outputs, inputs], our own maps [..., inputs, outputs]
            stored[name], stored[name + SCALE_SUFFIX] = quantise(tensor, inputs=-1 if name in linear else -2)
    return stored


def packed_bytes(config: TranslatorConfig, dtype: StorageType) -> int:
    """Return what the weights of a translator of this shape take when stored, without making it; a file adds a short header."""
    with torch.device("meta"):
        translator = Translator(config)
    linear = {f"{name}.weight" for name, m in translator.named_modules() if isinstance(m, nn.Linear)}
    total = 0
    for name, tensor in translator.state_dict().items():
        is_matrix = tensor.is_floating_point() and tensor.ndim >= 2
        size = BYTES[dtype] if is_matrix else 4 if tensor.is_floating_point() else tensor.element_size()
        total += size * tensor.numel()
        if is_matrix and dtype == "int8":
            total += 4 * tensor.numel() // tensor.shape[-1 if name in linear else -2]
    return total


def quantise(weight: Tensor, *, inputs: int) -> tuple[Tensor, Tensor]:
    """Round to int8 with one scale per output: w ≈ q · s, s = max |w| over the inputs / 127.

    Args:
        weight: float32, at least 2-D.
        inputs: the dim that runs over the inputs.

    Returns q and s, s with size 1 in that dim. No weight is off by more than s / 2.
    """
    scale = weight.abs().amax(dim=inputs, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def unpack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state that `pack` stored, float32."""
    state: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        if name + SCALE_SUFFIX in stored:
            state[name] = tensor.float() * stored[name + SCALE_SUFFIX]
        else:
            state[name] = tensor.float() if tensor.is_floating_point() else tensor
    return state


def verify_weights(file: Path, expected: WeightsCard) -> None:
    """Raise `BadArtifact` unless the file is byte for byte what was saved."""
    verify_file(
        file, expected.sha256, "copy or download the whole folder again, or fit anew", num_bytes=expected.num_bytes
    )


def refuse_to_replace(folder: Path, overwrite: bool) -> None:
    """Raise `BadInput` where saving would destroy something."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; give a folder to save to")
    taken = [name for name in ARTIFACT_FILES if (folder / name).exists()]
    if taken and MANIFEST_FILE not in taken:
        raise BadInput(f"{folder} has a {taken[0]} that is no translator's; choose another folder")
    if taken and not overwrite:
        raise BadInput(f"{folder} already holds a translator; choose another folder, or overwrite it (overwrite=True)")


# The hub


def push_to_hub(folder: str | Path, repo_id: str, *, private: bool = False) -> str:
    """Upload a saved translator, whole and verified; return its address.

    Raises:
        BadArtifact: the folder is no good.
        BadInput: the hub refused it, or is out of reach.
        MissingExtra: `huggingface_hub` is not installed.
    """
    load_translator(folder)
    client = hub()
    with clear_hub_errors(repo_id):
        address = client.create_repo(repo_id, private=private, exist_ok=True)
        client.upload_folder(
            repo_id=repo_id,
            folder_path=Path(folder).expanduser(),
            allow_patterns=list(ARTIFACT_FILES),
            commit_message=f"Translator saved by kvlingo {__version__}",
        )
    return str(address)


def from_pretrained(
    repo_id_or_folder: str | Path,
    *,
    source: ModelCard | LanguageModel | None = None,
    target: ModelCard | LanguageModel | None = None,
    revision: str | None = None,
    allow_mismatch: bool = False,
) -> tuple[Translator, Manifest]:
    """Load a translator from a folder or, if there is none of that name, from the hub.

    Raises:
        BadArtifact, IncompatiblePair: as `load_translator`.
        BadInput: the hub has no such translator, or is out of reach.
        MissingExtra: `huggingface_hub` is not installed.
    """
    name = str(repo_id_or_folder)
    folder = Path(name).expanduser()
    if not folder.exists() and REPO_ID.fullmatch(name):
        folder = download(name, revision)
    return load_translator(folder, source=source, target=target, allow_mismatch=allow_mismatch)


def download(repo_id: str, revision: str | None = None) -> Path:
    """Fetch a translator's three files into the hub client's cache, resuming an interrupted one."""
    client = hub()
    with clear_hub_errors(repo_id):
        return Path(client.snapshot_download(repo_id, revision=revision, allow_patterns=list(ARTIFACT_FILES)))


def hub() -> Any:
    """Return the hub's client library."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra("the hub needs huggingface_hub: pip install 'kvlingo[hub]'") from error
    return huggingface_hub


@contextmanager
def clear_hub_errors(repo_id: str) -> Iterator[None]:
    """Turn whatever the hub's client raises, in any of its versions, into `BadInput`."""
    try:
        yield
    except Exception as error:
        raise BadInput(f"{repo_id}: {hub_advice(error)}") from error


def hub_advice(error: Exception) -> str:
    """Say what went wrong at the hub and what to do; kinds go by name, their homes move."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & UNKNOWN_REPOSITORY:
        return "no such folder and no such repository; check the name, or log in: hf auth login"
    if kinds & OUT_OF_REACH:
        return "no such folder, and the hub is out of reach; check the network and HF_HUB_OFFLINE"
    what = f"{type(error).__name__}: {first_line(error)}"
    return f"the hub failed ({what}); try again, or log in: hf auth login"
