"""The scheduler's half: what happens to each request, and what its client is told.

Knows requests by their ids, prompts and salts. Does not know an engine: the adapter calls the members in the engine's order.
Nothing here waits; threads of its own look into the store, and a request that waits for them too long is read again.

A request that goes on from a kept cache lives under a salt of its own from the beginning, so that no block of it, read or said,
is ever filed as the model's own. One that turns out to be read again gets its old salt back before anything is computed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlingo.plan import HandoffPlan, SpanKind
from kvlingo.serve.external.carrying import Carry
from kvlingo.serve.external.entries import new_id, tenant_of
from kvlingo.serve.external.matching import PARAMS, Match, Matcher, Wish, plan_match, read_tell, read_wish
from kvlingo.serve.external.options import Options
from kvlingo.serve.external.refusals import Refused
from kvlingo.serve.external.threads import Job, Threads

APPLIED = "applied"
SALT_PREFIX = "kvlingo:"
logger = logging.getLogger(__name__)
NO_BLOCK = -1
MOST_STEPS = 16
"""So many steps of an engine are under way at most; one that is never ended is taken for ended then."""


@dataclass(frozen=True)
class Arrival:
    """A request as it comes.

    Fields:
        params: `kv_transfer_params`, whatever the client put there.
        salt: its cache salt, which is also whose it is.
        lora: the adapter that it asks for.
        unusable: why nothing of it can be kept or translated (images, say), or None.
    """

    id: str
    params: object
    ids: Sequence[int]
    salt: str | None
    lora: str | None = None
    unusable: str | None = None


@dataclass
class Case:
    """What is known of a request."""

    arrival: Arrival
    wish: Wish
    until: float
    search: Job[Match] | None = None
    refused: Refused | None = None
    match: Match | None = None
    plan: HandoffPlan | None = None
    native: int = 0
    translated: int = 0
    salted: bool = False


@dataclass(frozen=True)
class Load:
    """An order to a worker: translate, and write the tokens from `carry.native` on into these blocks.

    `blocks` are one row for each kind of blocks that the engine keeps, from the first token on; `NO_BLOCK` stands where a layer
    with a window keeps nothing any more.
    """

    request: str
    carry: Carry
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Save:
    """An order to a worker: keep what these blocks hold of `ids`."""

    request: str
    key: str
    ids: tuple[int, ...]
    blocks: tuple[int, ...]
    tenant: str
    lora: str | None
    translated_until: int


@dataclass
class Orders:
    """What workers are to do after one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)


class Desk:
    """All requests of one engine. Called by the scheduler's thread only.

    Args:
        matcher: None for an engine that only keeps caches.
        saves: whether this engine keeps caches.
    """

    def __init__(self, matcher: Matcher | None, options: Options, *, saves: bool) -> None:
        self.options, self._matcher, self._saves = options, matcher, saves
        self._secret = secrets.token_bytes(32)
        self._threads = Threads("kvlingo-lookup", 2 * options.threads)
        self._cases: dict[str, Case] = {}
        self._orders = Orders()
        self._loading: set[str] = set()
        self._untold: set[str] = set()
        self._steps = deque[list[str]]()
        self._news: dict[str, dict[str, Any]] = {}
        self.counts = Counter[str]()

    # --- a request comes ---

    def arrive(self, arrival: Arrival) -> str | None:
        """Take a request in; return the salt that it has to have from now on, or None for its own."""
        try:
            wish = _wish(arrival.params)
        except Refused as refused:
            self._take_in(Case(arrival, Wish(tell=read_tell(arrival.params)), 0.0, refused=refused))
            return None
        if wish is None:
            if self._saves and self.options.save_always:
                self._cases[arrival.id] = Case(arrival, Wish(save=True), 0.0)
            return None
        case = Case(arrival, wish, time.monotonic() + self.options.lookup_seconds)
        self._take_in(case)
        if wish.load is None:
            return None
        case.refused = self._unusable(arrival)
        if case.refused is not None:
            return None
        matcher, ids, tenant = self._matcher, tuple(arrival.ids), tenant_of(arrival.salt)
        assert matcher is not None
        case.search = self._threads.start(lambda job: matcher.find(wish, ids, tenant, case.until), case.until)
        case.salted = True
        return self._salt(wish.load, arrival.salt)

    def _take_in(self, case: Case) -> None:
        self._cases[case.arrival.id] = case
        if case.wish.tell is not None:
            self._untold.add(case.arrival.id)

    def _unusable(self, arrival: Arrival) -> Refused | None:
        if self._matcher is None:
            return Refused("no_translator", "this engine only keeps caches, it has no translator", unsupported=True)
        if arrival.unusable is not None:
            return Refused("request", arrival.unusable, unsupported=True)
        if arrival.lora is not None:
            return Refused("lora", "no translator is fitted for an adapter", unsupported=True)
        return None

    def _salt(self, key: str, salt: str | None) -> str:
        """Return a salt that only this hand-over has, and that nobody can send."""
        assert self._matcher is not None
        digests = sorted(link.digest for link in self._matcher.links.values())
        parts = [key, salt, digests, self.options.sink, self.options.tail]
        return SALT_PREFIX + hmac.new(self._secret, json.dumps(parts).encode(), hashlib.sha256).hexdigest()

    # --- it is looked at, maybe often ---

    def matched(self, request: str, native: int) -> int | None:
        """Return how many tokens after the `native` ones that the engine holds will be translated; None: ask again later."""
        case = self._cases.get(request)
        if case is None:
            return 0
        if case.refused is None and case.wish.load is not None:
            try:
                return self._planned(case, native)
            except Refused as refused:
                case.refused = refused
        case.plan, case.native, case.translated = None, min(native, len(case.arrival.ids)), 0
        return 0

    def _planned(self, case: Case, native: int) -> int | None:
        if case.match is None:
            assert case.search is not None
            if not case.search.done and time.monotonic() < case.until:
                return None
            if case.search.cancel():
                raise Refused("store_slow", f"the store said nothing for {self.options.lookup_seconds:g} s")
            case.match = _result(case.search)
        plan = plan_match(case.match, native, self.options)
        _, stop = plan.translated
        if not plan.count(SpanKind.TRANSLATED) and not native:
            raise Refused("nothing", plan.fallback or "there is nothing to translate")
        case.plan, case.native, case.translated = plan, min(native, len(case.arrival.ids)), 0
        return max(0, stop - native) if plan.count(SpanKind.TRANSLATED) else 0

    def salt_again(self, request: str) -> tuple[bool, str | None]:
        """Tell whether a request has to get its own salt back, and which that is; it must be looked up again then."""
        case = self._cases.get(request)
        if case is None or case.refused is None or not case.salted:
            return False, None
        case.salted = False
        return True, case.arrival.salt

    def is_looking(self) -> bool:
        """Tell whether a request waits for the store."""
        return any(c.search is not None and c.match is None and c.refused is None for c in self._cases.values())

    def is_loading(self) -> bool:
        """Tell whether a request waits for a worker that loads."""
        return bool(self._loading)

    # --- it is given blocks ---

    def allocated(self, request: str, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """Order what was promised, into the blocks of each kind that hold a request's tokens from the first on."""
        case = self._cases.get(request)
        if case is None or not tokens:
            return
        assert case.plan is not None
        assert case.match is not None
        _, stop = case.plan.translated
        carry = Carry(
            key=case.match.entry.id,
            tenant=tenant_of(case.arrival.salt),
            sha256=case.match.entry.sha256,
            digest=case.match.link.digest,
            ids=tuple(case.arrival.ids[:stop]),
            alignment=case.match.alignment[:stop],
            plan=case.plan,
            native=case.native,
        )
        case.translated = case.plan.count(SpanKind.TRANSLATED)
        self._orders.loads.append(Load(request, carry, tuple(map(tuple, blocks))))
        if self.options.load_async:
            self._loading.add(request)

    def orders(self) -> Orders:
        """Return what has been ordered since this was asked last."""
        orders, self._orders = self._orders, Orders()
        return orders

    # --- what workers tell ---

    def failed(self, request: str, reason: str, why: str) -> None:
        """Remember that a request's cache could not be loaded: it is read again, once, and not tried any more."""
        case = self._cases.get(request)
        if case is not None and case.refused is None:
            case.refused = Refused(reason, why)
            case.native, case.translated = 0, 0

    def arrived(self, request: str) -> None:
        """Note that workers are through with a request's load, one way or the other."""
        self._loading.discard(request)

    def tell(self, counts: Mapping[str, int]) -> None:
        """Add what workers have counted."""
        self.counts.update(counts)

    # --- it has its first token ---

    @property
    def has_untold(self) -> bool:
        """Tell whether a request waits for its first token whose client wants to know by then what became of it."""
        return bool(self._untold)

    def begin_step(self, computed: Mapping[str, int]) -> None:
        """Note a step of the engine, with how many tokens of each request are computed when it has ended."""
        whole = [
            request for request in self._untold if computed.get(request, 0) >= len(self._cases[request].arrival.ids)
        ]
        self._untold.difference_update(whole)
        self._steps.append(whole)

    def end_step(self) -> dict[str, dict[str, Any]]:
        """Note that the oldest step has ended; return what became of the requests that were read by then, by their `tell`."""
        while self._steps:
            for request in self._steps.popleft():
                self._tell_begun(request)
            if len(self._steps) < MOST_STEPS:
                break
        news, self._news = self._news, {}
        return news

    def _tell_begun(self, request: str) -> None:
        case = self._cases.get(request)
        if case is not None and case.wish.tell is not None:
            self._news[case.wish.tell] = begun(case)

    # --- it ends ---

    def finished(
        self, request: str, ids: Sequence[int], blocks: Sequence[int], *, whole: bool, lost: bool = False
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell whether a request's blocks are still needed, and what its client is told.

        Args:
            ids: the tokens whose keys and values the engine holds.
            whole: it ended by itself. One that was cut off is kept under an id of its client's own only.
            lost: the engine has let go of blocks that a sliding window left behind.
        """
        if any(request in step for step in self._steps):
            self._tell_begun(request)  # its first token is its last one
        self._untold.discard(request)
        case = self._cases.pop(request, None)
        if case is None:
            return False, None
        loading = request in self._loading
        if loading:
            self._orders.dropped.add(request)
        told = self._told(case) if case.wish.load is not None or case.refused is not None else {}
        ended = bool(ids) and not loading and (whole or case.wish.key is not None)
        keeps = ended and not lost and case.wish.save and self._saves and case.arrival.unusable is None
        if keeps:
            save = Save(
                request,
                case.wish.key or new_id(),
                tuple(ids),
                tuple(blocks),
                tenant_of(case.arrival.salt),
                case.arrival.lora,
                translated_until(case),
            )
            self._orders.saves.append(save)
            told |= {"id": save.key, "tokens": len(ids)}
            self.counts["saved"] += 1
        elif case.wish.save:
            why = "the engine keeps no token outside its sliding window, and this is longer" if lost else None
            told |= {
                "id": None,
                "not_kept": case.arrival.unusable
                or why
                or ("the request was cut off" if self._saves else "this engine keeps no caches"),
            }
        return keeps, {PARAMS: told} if told else None

    def _told(self, case: Case) -> dict[str, Any]:
        told = begun(case)
        self.counts[told["status"]] += 1
        for kind, count in told["prompt"].items():
            self.counts[f"tokens_{kind}"] += count
        if case.refused is not None:
            self.counts[f"refused_{case.refused.reason}"] += 1
        return told


def begun(case: Case) -> dict[str, Any]:
    """Say how a request's prompt came to be read; without a status where no kept cache was asked for."""
    total, reused, translated = len(case.arrival.ids), case.native, case.translated
    told: dict[str, Any] = {}
    if case.wish.load is not None or case.refused is not None:
        told["status"] = case.refused.status if case.refused is not None else APPLIED
    told["prompt"] = {"native": reused, "translated": translated, "recomputed": total - reused - translated}
    if case.refused is not None:
        told |= {"reason": case.refused.reason, "why": case.refused.why}
    elif case.plan is not None:
        told["plan"] = str(case.plan)
    return told


def translated_until(case: Case) -> int:
    """Return before which token a request's keys and values may be translated: by this request or by one before it."""
    if case.match is None or (case.refused is not None and not case.salted):
        return 0
    return case.match.reach


def _result(search: Job[Match]) -> Match:
    try:
        return search.result()
    except Refused:
        raise
    except Exception as error:  # whatever a file or a tokenizer raises, the prompt is read again
        logger.exception("looking for a kept cache failed")
        raise Refused("error", type(error).__name__) from error


def _wish(params: object) -> Wish | None:
    """Read what a client asks for; raises nothing but `Refused`: where this is called, an error would end the whole engine."""
    try:
        return read_wish(params)
    except Refused:
        raise
    except Exception as error:
        logger.exception("what a request asks for could not be read")
        raise Refused("bad_request", type(error).__name__, unsupported=True) from error
