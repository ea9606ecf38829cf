"""Which tokens of a prompt a kept cache can be translated for: from a request and an entry to a plan.

Knows manifests, tokenizers and plans; runs where requests are scheduled, and touches no keys or values. The engine reads no
token before the translated ones: first tokens that are not translated are the worker's business (`carrying`), and there are few.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlingo.alignment import align, tokenizer_relation
from kvlingo.errors import BadInput, KVLingoError
from kvlingo.extracts import known_beginnings
from kvlingo.geometry import Geometry
from kvlingo.language_model import hash_tokenizer
from kvlingo.manifest import Manifest, parse_config, parse_manifest, read_document
from kvlingo.models import load_tokenizer
from kvlingo.plan import EARLIER, HandoffPlan, Provenance, Span, SpanKind, plan_handoff
from kvlingo.reading import reading_of_ids
from kvlingo.serve.external.entries import Entry, check_parts, checked_id, parse
from kvlingo.serve.external.options import Options
from kvlingo.serve.external.refusals import Refused
from kvlingo.serve.external.stores import Store
from kvlingo.translator import TranslatorConfig

POLL_SECONDS = 0.05
PARAMS = "kvlingo"
KNOWN = {"load", "mapper", "save", "source_contents", "target_contents", "tell"}


@dataclass(frozen=True)
class Link:
    """What is known of a translator without its weights; `digest` is of the weights."""

    folder: Path
    manifest: Manifest
    config: TranslatorConfig
    digest: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return what a request may call it: its folder's name, its weights' hash, and the id that a router knows it by.

        That id is in the manifest of what `kvlingo import` has read.
        """
        read = self.manifest.options.get("interchange")
        known = read.get("mapper_id") if isinstance(read, Mapping) else None
        return (self.folder.name, self.digest, *([known] if isinstance(known, str) else []))


def read_link(folder: str | Path, options: Options) -> Link:
    """Read what is known of a translator. Raises `BadArtifact`, or `BadInput` for one that no report vouches for."""
    folder = Path(folder).expanduser()
    document = read_document(folder)
    manifest = parse_manifest(document)
    if manifest.verdict != "PASS" and not options.unproven:
        said = "was never evaluated" if manifest.verdict is None else f"has a report that says {manifest.verdict}"
        raise BadInput(f"the translator {folder} {said}; run kvlingo eval, or set unproven to use it all the same")
    assert manifest.weights is not None
    return Link(folder, manifest, parse_config(document), manifest.weights.sha256)


@dataclass(frozen=True)
class Wish:
    """What a request asks for, as far as it makes sense.

    Fields:
        load: the id of a kept cache to go on from, or None.
        save: keep what this request has read and said.
        key: under which id; None for one that is drawn.
        mapper: the translator that has to be used, by one of its names (`Link.names`); None for whichever fits.
        source_contents, target_contents: where contents are in the bytes of both sides' tokens, where the tokenizers differ.
        tell: a name under which the server's process is told at the first token what became of the request (`telling`).
    """

    load: str | None = None
    save: bool = False
    key: str | None = None
    mapper: str | None = None
    source_contents: tuple[tuple[int, int], ...] | None = None
    target_contents: tuple[tuple[int, int], ...] | None = None
    tell: str | None = None


def read_wish(params: object) -> Wish | None:
    """Read `kv_transfer_params.kvlingo`, which a client may fill with anything; None where there is none. Raises `Refused`."""
    asked = params.get(PARAMS) if isinstance(params, Mapping) else None
    if asked is None:
        return None
    if not isinstance(asked, Mapping) or not set(asked) <= KNOWN:
        known = ", ".join(sorted(KNOWN))
        raise Refused(
            "bad_request", f"kv_transfer_params.{PARAMS} is an object that may hold {known}", unsupported=True
        )
    load, save, tell = asked.get("load"), asked.get("save", False), asked.get("tell")
    return Wish(
        None if load is None else checked_id(load),
        save is not False,
        None if isinstance(save, bool) else checked_id(save),
        asked.get("mapper"),
        _ranges(asked.get("source_contents")),
        _ranges(asked.get("target_contents")),
        None if tell is None else checked_id(tell),
    )


def read_tell(params: object) -> str | None:
    """Return the name under which a request wants to be told of, whatever else it asks for; None where it gives none."""
    asked = params.get(PARAMS) if isinstance(params, Mapping) else None
    try:
        return checked_id(asked["tell"]) if isinstance(asked, Mapping) and "tell" in asked else None
    except Refused:
        return None


def _ranges(given: Any) -> tuple[tuple[int, int], ...] | None:
    if given is None:
        return None
    try:
        ranges = tuple((start, stop) for start, stop in given)
        if not all(type(start) is type(stop) is int and 0 <= start <= stop for start, stop in ranges):
            raise ValueError("no offsets")
    except (TypeError, ValueError) as error:
        raise Refused("bad_request", "contents are lists of two byte offsets", unsupported=True) from error
    return ranges


@dataclass(frozen=True)
class Match:
    """A kept cache that fits a request.

    Fields:
        entry, link: which, and by which translator.
        alignment: the source token of each token of the prompt.
        known: how many first tokens of the prompt the extract has keys and values of; None without one: any can be read.
    """

    entry: Entry
    link: Link
    alignment: tuple[int, ...]
    known: int | None = None

    @property
    def reach(self) -> int:
        """Return how many first tokens of the prompt the cache covers."""
        return sum(1 for aligned in self.alignment if aligned >= 0)


class Matcher:
    """Finds kept caches and what they are good for. Safe to use from several threads."""

    def __init__(self, store: Store, links: Sequence[Link], options: Options, target_tokenizer: str) -> None:
        self._beginnings = None if options.extract is None else known_beginnings(options.extract)
        self.store, self.options = store, options
        self.links = {link.manifest.source.fingerprint: link for link in links}
        if len(self.links) < len(links):
            raise BadInput("two translators are given from one source model; give one")
        self._target_name = target_tokenizer
        self._target: Any = None
        self._sources = {hash_tokenizer(t): t for t in map(load_tokenizer, options.source_tokenizers)}
        if self._sources:
            self._target = load_tokenizer(target_tokenizer)
            self._rehearse()

    def _rehearse(self) -> None:
        """Align a word of each source: vocabularies are spelled out now, and not while the first request waits."""
        for tokenizer in self._sources.values():
            sides = [(each, each("a b", add_special_tokens=False)["input_ids"]) for each in (tokenizer, self._target)]
            with suppress(KVLingoError):  # a request would be told of it
                align(*(reading_of_ids(each, ids) for each, ids in sides))
                tokenizer_relation(tokenizer, self._target)

    def find(self, wish: Wish, ids: Sequence[int], tenant: str, until: float) -> Match:
        """Return what a kept cache gives for a prompt; wait for one that is still being written, `until` (monotonic) at most.

        Raises `Refused`.
        """
        assert wish.load is not None
        entry = self._entry(wish.load, tenant, until)
        link = self.links.get(entry.fingerprint)
        if link is None:
            raise Refused("other_model", "no translator here reads the model that this cache is of", unsupported=True)
        self._check_name(wish.mapper, link)
        self._check(entry, link)
        return Match(entry, link, tuple(self._align(entry, link, wish, ids)), self._known(ids))

    def _known(self, ids: Sequence[int]) -> int | None:
        if self._beginnings is None:
            return None
        return max((same_tokens(known, ids) for known in self._beginnings), default=0)

    def _entry(self, key: str, tenant: str, until: float) -> Entry:
        while True:
            parts = [parse(data, key) for data in self.store.manifests(key)]
            # Another one's cache is not there: neither the words nor the time that it takes tell it from none.
            mine = all(part.tenant == tenant for part in parts)
            if mine and parts and len(parts) >= parts[0].world:
                return check_parts(parts)
            if time.monotonic() + POLL_SECONDS > until:
                raise Refused("unknown", "no such cache is kept")
            time.sleep(POLL_SECONDS)

    def _check_name(self, name: object, link: Link) -> None:
        named = [each for each in self.links.values() if name in each.names]
        if len(named) > 1:
            raise Refused("mapper", "two translators here go by the name that was asked for", unsupported=True)
        if name is not None and named != [link]:
            raise Refused("mapper", "the translator that was asked for is not the one that is here", unsupported=True)

    def _check(self, entry: Entry, link: Link) -> None:
        if entry.expires <= time.time():
            raise Refused("expired", "the kept cache has expired")
        if entry.lora is not None:
            raise Refused(
                "lora", "the kept cache was made with an adapter; no translator is fitted for it", unsupported=True
            )
        if entry.geometry != link.manifest.source.geometry:
            raise Refused("other_model", "the kept cache has another shape than the translator reads", unsupported=True)
        limit = Geometry.from_json(entry.geometry).angle_limit
        if limit is not None and len(entry.ids) > limit:
            raise Refused("too_long", f"the source changes its rotary angles beyond {limit} tokens", unsupported=True)

    def _align(self, entry: Entry, link: Link, wish: Wish, ids: Sequence[int]) -> Sequence[int]:
        if entry.tokenizer_hash == link.manifest.target.tokenizer_hash:
            return by_tokens(entry.ids, ids)
        tokenizer = self._sources.get(entry.tokenizer_hash)
        if tokenizer is None:
            raise Refused(
                "tokenizer", "the source has another tokenizer; name it in source_tokenizers", unsupported=True
            )
        if tokenizer_relation(tokenizer, self._target).kind == "same" and wish.source_contents is None:
            return by_tokens(entry.ids, ids)
        try:
            source = reading_of_ids(tokenizer, entry.ids, wish.source_contents)
            target = reading_of_ids(self._target, ids, wish.target_contents)
            return align(source, target).tolist()
        except KVLingoError as error:
            raise Refused("text", str(error)) from error


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens of two sequences are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def by_tokens(source: Sequence[int], target: Sequence[int]) -> list[int]:
    """Align two token sequences of one tokenizer: one to one as long as they are the same."""
    same = same_tokens(source, target)
    return [*range(same), *[-1] * (len(target) - same)]


def plan_match(match: Match, native: int, options: Options) -> HandoffPlan:
    """Plan a prompt of which the engine holds `native` tokens, in the same hand-over's own prefix cache. Raises `Refused`."""
    tokens = len(match.alignment)
    limit = match.link.config.target.angle_limit
    if limit is not None and tokens > limit:
        raise Refused("too_long", f"the target changes its rotary angles beyond {limit} tokens", unsupported=True)
    plan = plan_handoff(
        match.alignment,
        sink=options.sink,
        tail=options.tail,
        native=native,
        earlier=held_spans(match, native),
        untrusted=match.entry.translated_until,
        fitted_tokens=match.link.config.fitted_tokens,
    )
    if not plan.count(SpanKind.TRANSLATED):
        return plan
    start, _ = plan.translated
    if start <= native:
        return plan
    why = next(s.reason for s in plan.spans if s.kind is SpanKind.RECOMPUTED)
    if match.known is not None and start > match.known:
        raise Refused(
            "head",
            f"the first {start} tokens can't be translated ({why}), and of those the extract has the first {match.known}",
        )
    if match.known is None and start - native > options.head_tokens:
        raise Refused("head", f"the first {start} tokens can't be translated ({why}), more than {options.head_tokens}")
    return plan


def held_spans(match: Match, native: int) -> list[Span]:
    """Return what the first `native` tokens are worth: they are of this hand-over, and as far as it can reach, translated."""
    reach = min(native, match.reach)
    spans = (
        Span(0, reach, SpanKind.NATIVE, Provenance.TRANSLATED, EARLIER),
        Span(reach, native, SpanKind.NATIVE, Provenance.OWN, EARLIER),
    )
    return [span for span in spans if len(span)]


def alignment_tensor(match_alignment: Sequence[int]) -> torch.Tensor:
    """Return an alignment as `assemble` wants it."""
    return torch.tensor(match_alignment, dtype=torch.long)
