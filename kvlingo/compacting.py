"""What `kvlingo compress` does, from a saved translator to a smaller one beside it.

Computes nothing itself, and does not know the command line. The smaller translator is another one: the report and the confidence
of the whole one are not claimed for it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from kvlingo.collecting import load_statistics
from kvlingo.compression import CompressOptions, compress, refuse, refuse_budget
from kvlingo.errors import BadInput
from kvlingo.geometry import Geometry
from kvlingo.jobs import Say, Where, gather, load_pair, statistics
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, StorageType, card_of, check_pair
from kvlingo.progress import progress_bar
from kvlingo.sensitivity import measure_sensitivity, options_for
from kvlingo.shapes import FitOptions, options_from_json
from kvlingo.stats import GramStats, load_tensors, save_tensors
from kvlingo.store import BYTES, load_translator, save_translator
from kvlingo.translator import Translator, TranslatorConfig
from kvlingo.workplace import model_names, refuse_early, split_as_fitted, texts_seen

Weigh = Literal["sensitivity", "deviation"]
SENSITIVITY_FILE = "sensitivity.safetensors"


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
    weigh: Weigh,
    source_name: str | None,
    target_name: str | None,
    texts: Sequence[Path],
    where: Where,
    overwrite: bool,
    say: Say,
    tell: Say,
) -> dict[str, Any]:
    """Make a saved translator smaller, and save it in `out` with what distilling and evaluating it take.

    Args:
        weigh: what an error costs: `sensitivity`, as the target minds it, for which both models are loaded and read some text
            (kept in `work/` for the next time); `deviation`, each output alike in units of its own.

    Raises `BadInput` for maps that can't be made smaller.
    """
    there, here = out.expanduser().resolve(), folder.expanduser().resolve()
    if there == here:
        raise BadInput(f"{out} is the translator itself, which is kept; give another folder: --out")
    if {here / "controls", here / "work"} & {there, *there.parents}:
        raise BadInput(f"{out} lies inside the translator, in what is copied along; give another folder: --out")
    refuse_early(out, overwrite=overwrite)
    translator, manifest = load_translator(folder)
    if options.is_unbounded:
        return store_narrower(folder, out, options, translator, manifest, overwrite=overwrite, say=say, tell=tell)
    refuse(translator, options)
    refuse_budget(translator.config, options)
    known = Known(
        saved_statistics(manifest, translator.config, fitted_with(manifest), folder / "work"),
        saved_sensitivity(folder, manifest) if weigh == "sensitivity" else {},
    )
    if known.stats is None or known.sensitivity is None:
        known = found_out(
            known, folder, translator, manifest, model_names(folder, source_name, target_name), texts, where, tell
        )
    assert known.stats is not None
    small = compress(translator, known.stats, options, known.sensitivity or None)
    told = {**asdict(options), "weigh": weigh, **small.to_json()}
    sizes = save_beside(folder, out, small.translator, manifest, told, overwrite=overwrite, tell=tell)
    for line in compress_lines(told_made(told), sizes, out):
        say(line)
    return {"folder": str(out), **sizes, "storage": options.storage, "weigh": weigh, **small.to_json()}


def store_narrower(
    folder: Path,
    out: Path,
    options: CompressOptions,
    translator: Translator,
    manifest: Manifest,
    *,
    overwrite: bool,
    say: Say,
    tell: Say,
) -> dict[str, Any]:
    """Save the same maps with weights of fewer bytes; products are made in bfloat16 then (`store.load_translator`)."""
    assert manifest.weights is not None
    before = manifest.weights.dtype
    if BYTES[cast(StorageType, options.storage)] >= BYTES[before]:
        smaller = "" if before == "int8" else "--store int8, or "
        raise BadInput(
            f"its weights are stored as {before}, which {options.storage} is not smaller than; give {smaller}one of --budget-mb, "
            "--flops and --rank"
        )
    told = {"whole": asdict(manifest.weights)} | manifest.options.get("compress", asdict(options))
    told["storage"] = options.storage  # what was made of it before is still so
    sizes = save_beside(folder, out, translator, manifest, told, overwrite=overwrite, tell=tell)
    for line in compress_lines(told_made(told), sizes, out):
        say(line)
    return {"folder": str(out), **sizes, "storage": options.storage}


def save_beside(
    folder: Path,
    out: Path,
    translator: Translator,
    manifest: Manifest,
    told: dict[str, Any],
    *,
    overwrite: bool,
    tell: Say,
) -> dict[str, int]:
    """Save the smaller translator with what judging and distilling it take; return what both weigh, in bytes."""
    assert manifest.weights is not None
    options = {**manifest.options, "compress": {"whole": asdict(manifest.weights), **told}}
    new = replace(manifest, options=options, held_out=None, confidence=None)
    saved = save_translator(out, translator, new, dtype=cast(StorageType, told["storage"]), overwrite=overwrite)
    assert saved.weights is not None
    bring_along(folder, out, tell)
    return {"num_bytes": saved.weights.num_bytes, "whole_num_bytes": manifest.weights.num_bytes}


@dataclass(frozen=True)
class Known:
    """What compressing goes by; None for what is not known yet, an empty sensitivity where none is asked for."""

    stats: GramStats | None
    sensitivity: dict[int, Tensor] | None


def found_out(
    known: Known,
    folder: Path,
    translator: Translator,
    manifest: Manifest,
    names: tuple[str, str],
    texts: Sequence[Path],
    where: Where,
    tell: Say,
) -> Known:
    """Load both models and let them read what is not known yet; the sensitivity is kept for the next time."""
    documents, fitted, seen = gather(texts), fitted_with(manifest), texts_seen(manifest)
    source, target = load_pair(*names, where)
    check_pair(manifest, card_of(source), card_of(target))
    training = split_as_fitted(documents, seen, share=fitted.held_out_share, seed=fitted.seed).training
    stats, minds = known.stats, known.sensitivity
    with progress_bar() as bar:
        if stats is None:
            stats = statistics(source, target, fitted, training, folder / "work", bar.count, tell)
        if minds is None:
            mine = translator.to(target.device)
            minds = measure_sensitivity(mine, source, target, training, options_for(fitted), progress=bar.count)
            translator.to("cpu")
            save_sensitivity(folder, manifest, minds)
    return Known(stats, minds)


def fitted_with(manifest: Manifest) -> FitOptions:
    """Return the options that a translator was fitted with."""
    return options_from_json(manifest.options.get("fit", {}))


def saved_sensitivity(folder: Path, manifest: Manifest) -> dict[int, Tensor] | None:
    """Return what was measured of these very weights; None where nothing was."""
    loaded = load_tensors(folder / "work" / SENSITIVITY_FILE)
    if loaded is None or loaded[1] != note_of(manifest):
        return None
    return {int(layer): x for layer, x in loaded[0].items()}


def save_sensitivity(folder: Path, manifest: Manifest, found: Mapping[int, Tensor]) -> None:
    """Keep what was measured."""
    tensors = {str(layer): x for layer, x in found.items()}
    save_tensors(folder / "work" / SENSITIVITY_FILE, tensors, note_of(manifest))


def note_of(manifest: Manifest) -> dict[str, Any]:
    """Say which weights a sensitivity belongs to, and how it was measured."""
    assert manifest.weights is not None
    measured = json.loads(json.dumps(asdict(options_for(fitted_with(manifest)))))
    return {"weights": manifest.weights.sha256, "options": measured}


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


def compress_lines(what: str, sizes: Mapping[str, int], out: Path) -> Iterator[str]:
    """Return what a person is told."""
    yield f"{sizes['whole_num_bytes'] / 1e6:.1f} MB → {sizes['num_bytes'] / 1e6:.1f} MB; {what}"
    yield f"saved {out}; nothing is known of its quality yet"
    yield f"next: kvlingo eval {out}; where it lost too much: kvlingo distill {out} --minutes 5"


def told_made(chosen: Mapping[str, Any]) -> str:
    """Say in words what was made of the whole translator."""
    if "layers" not in chosen:
        return f"the same maps, stored as {chosen['storage']}"
    ranks = sorted(layer["rank"] for layer in chosen["layers"] if layer["rank"])
    whole = len(chosen["layers"]) - len(ranks)
    parts = [f"ranks {ranks[0]} to {ranks[-1]}"] if ranks else []
    parts += [f"{whole} layers whole"] if whole else []
    parts += [f"the text through {chosen['text_rank']} features"] if chosen["text_rank"] else []
    return f"{', '.join(parts)}, stored as {chosen['storage']}: {chosen['lost_share']:.2%} of the outputs' variance is lost"
