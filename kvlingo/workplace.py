"""A translator's folder as the place where it is made.

Knows what `kvlingo fit` leaves beside the artifact and reads it back for `distill`, `eval` and `handoff`. Computes nothing.

Layout:
    translator.safetensors, translator.json, README.md   the artifact
    controls/token_only, controls/no_text                the controls, fitted alike: artifacts of their own
    ridge/                                               the artifact before distilling
    distillation.json, distillation.png                  the loss curve
    work/                                                statistics and checkpoints: to resume and to distil, else free to delete
    work/models.json                                     where the two models were loaded from on this machine
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo.errors import BadInput
from kvlingo.files import replace_folder, write_file
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, ModelCard, StorageType
from kvlingo.store import ARTIFACT_FILES, load_translator, read_manifest, refuse_to_replace, save_translator
from kvlingo.texts import Document, Split, split_documents
from kvlingo.translator import Translator

CONTROLS = ("token_only", "no_text")
MANY_CLUSTERS = 20


# --- which texts a translator has seen -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextsSeen:
    """What became of each text, by digest: names and paths stay on the machine that fitted.

    Fields:
        training: learnt from; no evaluation may use them.
        held_out: dampings, source layers and the best training step were chosen on them.
        reserved: never read while fitting or distilling.
    """

    training: frozenset[str] = frozenset()
    held_out: frozenset[str] = frozenset()
    reserved: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, list[str]]:
        """Return a plain dict that `from_json` restores."""
        return {
            "training": sorted(self.training),
            "held_out": sorted(self.held_out),
            "reserved": sorted(self.reserved),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[str]]) -> TextsSeen:
        """Restore what `to_json` gave."""
        return cls(*(frozenset(data.get(name, ())) for name in ("training", "held_out", "reserved")))


def digest(document: Document) -> str:
    """Identify a text by its words, whatever its white space and wherever it lies."""
    return hashlib.sha256(" ".join(document.text.split()).encode()).hexdigest()[:16]


def reserve(documents: Sequence[Document], *, share: float = 0.1, seed: int = 0) -> Split:
    """Put clusters aside that neither fitting nor distilling ever reads; none where there are few."""
    if len({d.cluster for d in documents}) < MANY_CLUSTERS:
        return Split([], list(documents))
    # Another draw than the one by which `fit` holds out clusters of what is left.
    return split_documents(documents, held_out_share=share, seed=seed + 1)


def clusters_with(documents: Iterable[Document], digests: frozenset[str]) -> set[str]:
    """Return the clusters in which some text is among `digests`."""
    return {d.cluster for d in documents if digest(d) in digests}


def split_as_fitted(documents: Sequence[Document], seen: TextsSeen, *, share: float, seed: int) -> Split:
    """Split texts for distilling: what was held out stays held out, what was reserved stays unread.

    Texts that fitting has not seen are split anew.

    Raises:
        BadInput: too few texts for both sides.
    """
    reserved = clusters_with(documents, seen.reserved)
    free = [d for d in documents if d.cluster not in reserved]
    held_out = clusters_with(free, seen.held_out)
    if not held_out:
        return split_documents(free, held_out_share=share, seed=seed)
    split = Split([d for d in free if d.cluster in held_out], [d for d in free if d.cluster not in held_out])
    if not split.training:
        raise BadInput("every text given is held out from fitting; give more text to distil on")
    return split


def fair_to_judge_on(documents: Sequence[Document], seen: TextsSeen) -> tuple[list[Document], str | None]:
    """Return the texts an evaluation may use, and what to tell the user about the choice.

    Whole clusters go where one of their texts was learnt from. Where texts were reserved, only those are used among what
    fitting knew.

    Raises:
        BadInput: nothing is left.
    """
    learnt = clusters_with(documents, seen.training)
    chosen_on = clusters_with(documents, seen.held_out) - learnt
    fresh = [d for d in documents if d.cluster not in learnt | chosen_on]
    kept = fresh or [d for d in documents if d.cluster not in learnt]
    if not kept:
        raise BadInput(
            "the translator was fitted on all of these texts, so judging it on them proves nothing; give other ones: --text"
        )
    if len(kept) == len(documents):
        return kept, None
    left_out = f"{len(documents) - len(kept)} of {len(documents)} texts were used in fitting and are left out"
    return kept, left_out if fresh else f"{left_out}; dampings were chosen on the others: better give new texts"


# --- writing ---------------------------------------------------------------------------------------------------------


def refuse_early(folder: Path, *, overwrite: bool) -> None:
    """Raise `BadInput` before hours of work where the result could not be saved."""
    refuse_to_replace(folder.expanduser().resolve(), overwrite)


def save_fitted(
    folder: Path,
    translator: Translator,
    controls: Mapping[str, Translator],
    *,
    source: LanguageModel,
    target: LanguageModel,
    options: dict[str, Any],
    held_out: dict[str, Any],
    storage: StorageType,
    overwrite: bool,
) -> Manifest:
    """Save the controls, then the translator: a folder without its translator is no artifact yet."""
    cards = ModelCard.of(source), ModelCard.of(target)
    for name, control in controls.items():
        mine = {**options, "control": name}
        save_translator(folder / "controls" / name, control, Manifest(*cards, mine), dtype=storage, overwrite=overwrite)
    return save_translator(folder, translator, Manifest(*cards, options, held_out), dtype=storage, overwrite=overwrite)


def save_distilled(folder: Path, translator: Translator, manifest: Manifest) -> Manifest:
    """Put a distilled translator in the place of the one it came from, which is kept in `ridge/`."""
    before = read_manifest(folder)
    if "distill" not in before.options:
        replace_folder(folder / "ridge", {name: (folder / name).read_bytes() for name in ARTIFACT_FILES})
    assert before.weights is not None
    return save_translator(folder, translator, manifest, dtype=before.weights.dtype, overwrite=True)


def remember_models(folder: Path, source: str, target: str) -> None:
    """Note where the models were loaded from; the artifact itself names no path."""
    write_file(folder / "work" / "models.json", json.dumps(_places(source, target)).encode())


def refuse_other_pair(folder: Path, source: str, target: str) -> None:
    """Raise `BadInput` where the folder holds what was begun for another pair: its statistics may be hours of work."""
    file = folder / "work" / "models.json"
    if file.is_file() and (begun := json.loads(file.read_text(encoding="utf-8"))) != _places(source, target):
        raise BadInput(
            f"{folder} holds what was begun for {begun['source']} → {begun['target']}; "
            f"give another folder, or remove {folder / 'work'}"
        )


def _places(source: str, target: str) -> dict[str, str]:
    sides = (("source", source), ("target", target))
    return {side: str(Path(name).absolute()) if Path(name).exists() else name for side, name in sides}


def forget(folder: Path) -> None:
    """Remove what a refused run began, where the folder held nothing else."""
    shutil.rmtree(folder / "work", ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


# --- reading ---------------------------------------------------------------------------------------------------------


def model_names(folder: Path, source: str | None, target: str | None) -> tuple[str, str]:
    """Return where to load both models from: as given, as remembered, or as the manifest names them.

    Raises:
        BadArtifact: the folder holds no translator.
    """
    manifest = read_manifest(folder)
    names = {"source": manifest.source.name, "target": manifest.target.name}
    note = folder / "work" / "models.json"
    if note.is_file():
        names |= json.loads(note.read_text(encoding="utf-8"))
    return source or names["source"], target or names["target"]


def load_controls(folder: Path, *, source: LanguageModel, target: LanguageModel) -> dict[str, Translator]:
    """Load what lies beside a translator by name: its controls, and the `ridge` that distilling started from."""
    places = {**{name: folder / "controls" / name for name in CONTROLS}, "ridge": folder / "ridge"}
    return {
        name: load_translator(place, source=source, target=target)[0].to(target.device)
        for name, place in places.items()
        if place.is_dir()
    }


def texts_seen(manifest: Manifest) -> TextsSeen:
    """Return which texts a translator has seen."""
    return TextsSeen.from_json(manifest.options.get("texts", {}))
