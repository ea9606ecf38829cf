"""From names to an engine: load the models, find out between which of them each translator goes.

Knows the artifact and its report. A translator that no report vouches for is loaded and never used: its requests are re-prefills
that say why.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

from kvlingo.confidence import Confidence
from kvlingo.errors import BadInput, MissingExtra
from kvlingo.handoff import hand_off
from kvlingo.jobs import Where
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest
from kvlingo.models import load_model, quiet_loading
from kvlingo.serve.disk import Disk
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.protocol import Engine
from kvlingo.serve.routing.building import build_router
from kvlingo.serve.routing.routed import RoutedEngine
from kvlingo.serve.routing.rules import Calibrated, Rules, read_rules
from kvlingo.serve.settings import CACHE_DISK_BYTES, Settings
from kvlingo.serve.switching import Link, Rule
from kvlingo.store import load_translator, read_manifest

Tell = Callable[[str], None]
WARM_UP = "Every map is used once, and every kernel that it needs is made ready. " * 8


def build_engine(settings: Settings, tell: Tell) -> Engine:
    """Load the engine that the settings describe. What can be wrong with a router or a folder comes first: models take long."""
    rules = read_rules(settings.rules) if settings.rules else Rules()
    router = build_router(settings, rules)
    engine = find_engine(settings, rules, tell) if settings.engine else load_here(settings, rules, tell)
    return RoutedEngine(engine, router) if router else engine


def find_engine(settings: Settings, rules: Rules, tell: Tell) -> Engine:
    """Return the engine before servers that run already, or will soon."""
    try:
        from kvlingo.serve.remote import RemoteEngine, find_places
    except ModuleNotFoundError as error:
        raise MissingExtra(f"--engine needs {error.name}: pip install 'kvlingo[serve]'") from error
    if rules.switches:
        raise BadInput(
            f"{settings.rules} has figures of a switch, which were measured in one process, and the engine is vllm; "
            "leave its tables switch out"
        )
    secret = settings.engine_salt.encode() if settings.engine_salt else secrets.token_bytes(32)
    return RemoteEngine(
        find_places(settings.engine_urls, settings.engine_key, tell),
        max_open=settings.max_rows + settings.max_queue,
        max_bytes=settings.cache_bytes,
        secret=secret,
    )


def load_here(settings: Settings, rules: Rules, tell: Tell) -> LocalEngine:
    """Load models and translators into this process."""
    limits = Limits(
        max_rows=settings.max_rows,
        max_queue=settings.max_queue,
        cache_bytes=settings.cache_bytes,
        part_tokens=settings.part_tokens,
        heal=settings.heal,
        ahead=settings.ahead,
    )
    where = Where(settings.device, settings.dtype)
    disk = Disk(settings.cache_dir, settings.cache_disk_bytes or CACHE_DISK_BYTES) if settings.cache_dir else None
    if disk is not None:
        tell(f"kept caches: {len(disk)} in {settings.cache_dir}, {disk.num_bytes / 1e6:,.1f} MB")
    try:
        return load_engine(
            settings.models,
            settings.translators,
            where=where,
            limits=limits,
            switches=rules.switches,
            disk=disk,
            tell=tell,
        )
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def load_engine(
    models: Mapping[str, str],
    translators: Sequence[Path],
    *,
    where: Where | None = None,
    limits: Limits | None = None,
    switches: Sequence[Calibrated] = (),
    disk: Disk | None = None,
    tell: Tell = lambda _: None,
) -> LocalEngine:
    """Load models (served name → hub id, folder or .gguf file) and translators' folders into an engine."""
    for folder in translators:
        read_manifest(folder)  # which refuses what is none: models take long
    loaded = load_models(models, where or Where(), tell)
    links = with_rules(links_between(loaded, translators, tell), loaded, switches)
    for link in links:
        warm_up(loaded, link, tell)
    return LocalEngine(loaded, links, limits, disk)


def warm_up(models: Mapping[str, LanguageModel], link: Link, tell: Tell) -> None:
    """Hand one text over, so that the first who switches does not wait for what a first time costs (seconds)."""
    if link.refusal is not None:
        return
    try:
        hand_off(WARM_UP, models[link.source], models[link.target], link.translator)
    except Exception as error:  # those who switch are told by the plan; the others are served
        tell(f"{link.source} → {link.target}: warming up failed: {error}")


def load_models(models: Mapping[str, str], where: Where, tell: Tell) -> dict[str, LanguageModel]:
    """Load models by the names they are served by."""
    quiet_loading()
    loaded: dict[str, LanguageModel] = {}
    for name, place in models.items():
        tell(f"loading {name}: {place}")
        loaded[name] = load_model(place, device=where.device, dtype=where.dtype)
    return loaded


def with_rules(
    links: Sequence[Link], models: Mapping[str, LanguageModel], switches: Sequence[Calibrated]
) -> list[Link]:
    """Give each translator what was measured for it. Raises `BadInput` for figures of a pair that is not served."""
    found = {(link.source, link.target): link for link in links}
    for each in switches:
        link = found.get((each.source, each.target))
        if link is None:
            raise BadInput(f"the rules have {each.source} → {each.target}, and no translator for it is served")
        fingerprints = (models[each.source].fingerprint, models[each.target].fingerprint)
        if fingerprints != (each.source_fingerprint, each.target_fingerprint):
            raise BadInput(
                f"{each.source} → {each.target} was calibrated with other weights; run kvlingo calibrate again"
            )
        if link.rule is not None:
            raise BadInput(f"the rules have {each.source} → {each.target} twice; give it once")
        found[each.source, each.target] = replace(
            link, rule=Rule(each.reprefill_up_to, each.translate_from), rates=each.rates
        )
    return list(found.values())


def links_between(models: Mapping[str, LanguageModel], folders: Sequence[Path], tell: Tell) -> list[Link]:
    """Load the translators. Raises `BadInput` for a second one between the same two models: which to use would be a guess."""
    links: dict[tuple[str, str], Link] = {}
    for folder in folders:
        for link in links_of(models, folder):
            way = f"{link.source} → {link.target}"
            if (link.source, link.target) in links:
                raise BadInput(f"{folder} is a second translator {way}; give one")
            links[link.source, link.target] = link
            tell(f"{way}: {folder}" + (f"; not used: {link.refusal}" if link.refusal else ""))
    return list(links.values())


def links_of(models: Mapping[str, LanguageModel], folder: Path) -> list[Link]:
    """Return the ways between served models for which a translator was fitted, by the models' content, not their names.

    Raises `BadInput` where there is none.
    """
    manifest = read_manifest(folder)
    wanted = (manifest.source.fingerprint, manifest.target.fingerprint)
    pairs = [
        (source, target)
        for source, target in permutations(models, 2)
        if (models[source].fingerprint, models[target].fingerprint) == wanted
    ]
    if not pairs:
        raise BadInput(
            f"{folder} translates from {manifest.source.name} to {manifest.target.name}, and these weights are not both "
            "served; serve both with --model, or leave the translator out"
        )
    return [_link(models, source, target, folder, manifest) for source, target in pairs]


def _link(models: Mapping[str, LanguageModel], source: str, target: str, folder: Path, manifest: Manifest) -> Link:
    translator, _ = load_translator(folder, source=models[source], target=models[target])
    confidence = None if manifest.confidence is None else Confidence.from_json(manifest.confidence)
    there = translator.to(models[target].device)
    return Link(source, target, there, refusal_of(manifest, folder), confidence=confidence)


def refusal_of(manifest: Manifest, folder: Path) -> str | None:
    """Say why a translator is not to be used, or None: only a passed report on held-out documents lets it in."""
    if manifest.verdict is None:
        return f"it was never evaluated; run kvlingo eval {folder.name}"
    return None if manifest.verdict == "PASS" else f"its report says {manifest.verdict}"
