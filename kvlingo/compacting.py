"""What `kvlingo compress` does, from a saved translator to a smaller one beside it.

Computes nothing itself, and does not know the command line. The smaller translator is another one: the report and the confidence
of the whole one are not claimed for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from kvlingo.collecting import load_statistics
from kvlingo.compression import Compressed, CompressOptions, compress, refuse
from kvlingo.errors import BadInput
from kvlingo.geometry import Geometry
from kvlingo.jobs import Say, Where, gather, load_pair, statistics
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, StorageType
from kvlingo.progress import progress_bar
from kvlingo.shapes import FitOptions, options_from_json
from kvlingo.stats import GramStats
from kvlingo.store import load_translator, read_manifest, save_translator
from kvlingo.translator import TranslatorConfig
from kvlingo.workplace import model_names, refuse_early, split_as_fitted, texts_seen


@dataclass(frozen=True)
class Side:
    """What statistics know a model by: no weights are needed to find them."""

    fingerprint: str
    geometry: Geometry


def compress_folder(
    folder: Path,
    out: Path,
    options: CompressOptions,
    *,
    source_name: str | None,
    target_name: str | None,
    texts: Sequence[Path],
    where: Where,
    overwrite: bool,
    say: Say,
    tell: Say,
) -> dict[str, Any]:
    """Make a saved translator smaller, and save it in `out` with what distilling and evaluating it take.

    Raises `BadInput` for maps that can't be made smaller, and where no statistics say which dims matter.
    """
    if out.expanduser().resolve() == folder.expanduser().resolve():
        raise BadInput(f"{out} is the translator itself, which is kept; give another folder: --out")
    refuse_early(out, overwrite=overwrite)
    translator, manifest = load_translator(folder)
    refuse(translator, options)
    stats = statistics_of(folder, manifest, translator.config, source_name, target_name, texts, where, tell)
    small = compress(translator, stats, options)
    assert manifest.weights is not None
    known = {
        **manifest.options,
        "compress": {**asdict(options), **small.to_json(), "whole": asdict(manifest.weights)},
    }
    storage = cast(StorageType, options.storage)
    new = replace(manifest, options=known, held_out=None, confidence=None)
    saved = save_translator(out, small.translator, new, dtype=storage, overwrite=overwrite)
    assert saved.weights is not None
    bring_along(folder, out, tell)
    for line in compress_lines(small, manifest.weights.num_bytes, saved.weights.num_bytes, out):
        say(line)
    return {
        "folder": str(out),
        "num_bytes": saved.weights.num_bytes,
        "whole_num_bytes": manifest.weights.num_bytes,
        "storage": storage,
        **small.to_json(),
    }


def statistics_of(
    folder: Path,
    manifest: Manifest,
    config: TranslatorConfig,
    source_name: str | None,
    target_name: str | None,
    texts: Sequence[Path],
    where: Where,
    tell: Say,
) -> GramStats:
    """Return the statistics that fitting left; without them, text is read anew where there is some."""
    fitted = options_from_json(manifest.options.get("fit", {}))
    found = saved_statistics(manifest, config, fitted, folder / "work")
    if found is not None:
        return found
    if not texts:
        raise BadInput(
            f"{folder / 'work'} holds no statistics of this translator, and they say which dims matter; "
            "give text to read anew: --text"
        )
    documents = gather(texts)
    source, target = load_pair(*model_names(folder, source_name, target_name), where)
    seen = texts_seen(read_manifest(folder))
    training = split_as_fitted(documents, seen, share=fitted.held_out_share, seed=fitted.seed).training
    with progress_bar() as bar:
        return statistics(source, target, fitted, training, folder / "work", bar.count, tell)


def saved_statistics(manifest: Manifest, config: TranslatorConfig, fitted: FitOptions, work: Path) -> GramStats | None:
    """Return the statistics that `fit` left for this translator; None where there are none."""
    source, target = (
        cast(LanguageModel, Side(card.fingerprint, geometry))
        for card, geometry in ((manifest.source, config.source), (manifest.target, config.target))
    )
    return load_statistics(source, target, fitted, work)


def bring_along(folder: Path, out: Path, tell: Say) -> None:
    """Put beside the smaller translator what judging and distilling it read: controls, models' places, statistics."""
    if (folder / "controls").is_dir():
        shutil.copytree(folder / "controls", out / "controls", dirs_exist_ok=True)
    for file in sorted((folder / "work").glob("*")):
        if file.name == "models.json" or file.name.startswith("stats-"):
            link_or_copy(file, out / "work" / file.name, tell)


def link_or_copy(file: Path, place: Path, tell: Say) -> None:
    """Let a file be in two folders, taking its bytes once where the disk can do that."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    try:
        os.link(file, place)
    except OSError:  # another disk, or one that knows no links
        try:
            shutil.copyfile(file, place)
        except OSError as error:
            place.unlink(missing_ok=True)
            tell(f"{file.name} stays in {file.parent} alone ({error.strerror}): distilling reads text anew")


def compress_lines(small: Compressed, before: int, after: int, out: Path) -> Iterator[str]:
    """Return what a person is told."""
    yield f"{before / 1e6:.1f} MB → {after / 1e6:.1f} MB; {told_ranks(small.to_json())}"
    yield f"saved {out}; nothing is known of its quality yet"
    yield f"next: kvlingo eval {out}; where it lost too much: kvlingo distill {out} --minutes 5"


def told_ranks(chosen: Mapping[str, Any]) -> str:
    """Say in words what was chosen."""
    ranks = sorted(layer["rank"] for layer in chosen["layers"] if layer["rank"])
    whole = len(chosen["layers"]) - len(ranks)
    parts = [f"ranks {ranks[0]} to {ranks[-1]}"] if ranks else []
    parts += [f"{whole} layers whole"] if whole else []
    parts += [f"the text through {chosen['text_rank']} features"] if chosen["text_rank"] else []
    return f"{', '.join(parts)}: {chosen['lost_share']:.2%} of the outputs' variance is lost"
