"""From settings to a server that runs: load the models, find out between which of them each translator goes, serve.

Computes nothing itself. Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path

from kvlingo.errors import BadInput, IncompatiblePair
from kvlingo.models import LanguageModel, load_model, quiet_loading
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.gateway import listen, log_to_stderr, make_server
from kvlingo.serve.settings import Settings
from kvlingo.serve.switching import Link
from kvlingo.store import load_translator

Say = Callable[[str], None]


def serve(settings: Settings, tell: Say) -> None:
    """Load everything and serve until told to stop. The port is taken first: a model takes long to load for nothing."""
    if not settings.models:
        raise BadInput("no model to serve; give at least one: --model NAME=MODEL")
    with listen(settings) as listener:
        engine = build_engine(settings, tell)
        log_to_stderr()
        make_server(engine, settings).run(sockets=[listener])


def build_engine(settings: Settings, tell: Say) -> LocalEngine:
    """Load the models and the translators between them."""
    quiet_loading()
    models: dict[str, LanguageModel] = {}
    for name, place in settings.models.items():
        tell(f"loading {name}: {place}")
        models[name] = load_model(place, device=settings.device, dtype=settings.dtype)
    limits = Limits(max_rows=settings.max_rows, max_queue=settings.max_queue, cache_bytes=settings.cache_bytes)
    return LocalEngine(models, links_between(models, settings.translators, tell), limits)


def links_between(models: Mapping[str, LanguageModel], folders: Sequence[Path], tell: Say) -> list[Link]:
    """Load the translators; each goes between the models that it was fitted on."""
    links: dict[tuple[str, str], Link] = {}
    for folder in folders:
        link = link_of(models, folder)
        if (link.source, link.target) in links:
            raise BadInput(f"{folder} is a second translator from {link.source} to {link.target}; give one")
        links[link.source, link.target] = link
        tell(f"{link.source} → {link.target}: {folder}" + (f"; not used: {link.refusal}" if link.refusal else ""))
    return list(links.values())


def link_of(models: Mapping[str, LanguageModel], folder: Path) -> Link:
    """Find the pair of models that a translator was fitted on. One whose report failed is never used, and says so."""
    reasons: dict[str, str] = {}
    for source, target in permutations(models, 2):
        try:
            translator, manifest = load_translator(folder, source=models[source], target=models[target])
        except IncompatiblePair as error:
            reasons[f"{source} → {target}"] = str(error)
            continue
        failed = (manifest.held_out or {}).get("verdict") == "FAIL"
        refusal = "its report on held-out text says FAIL" if failed else None
        return Link(source, target, translator.to(models[target].device), refusal)
    if not reasons:
        raise BadInput(f"{folder} needs two models to translate between; give each with --model NAME=MODEL")
    if len(reasons) <= 2:
        raise IncompatiblePair(next(iter(reasons.values())))
    raise IncompatiblePair(
        f"{folder} fits no two of the models {', '.join(models)}; give the pair that it was fitted on"
    )
