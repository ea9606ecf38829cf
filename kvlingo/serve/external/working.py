"""A worker's half: carries orders out beside the engine, and tells what came of them.

Knows stores, translators and jobs; the engine's blocks are behind `Pages`. What fails is told with its reason, and the engine
reads the prompt itself. Blocks are written, layer by layer as they are translated, by a load that somebody waits for: who gives
one up that has begun to write waits until it has ended.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from kvlingo.kv import KV
from kvlingo.serve.external.carrying import Carry, Made, Side, Target, fetch, head_range, lifted, placed, translated
from kvlingo.serve.external.entries import Entry, describe, pack, parse
from kvlingo.serve.external.options import Options
from kvlingo.serve.external.refusals import Refused
from kvlingo.serve.external.scheduling import Load, Orders, Save
from kvlingo.serve.external.stores import Store, taken
from kvlingo.serve.external.threads import Job, Threads

UNSAVED_PER_THREAD = 4
logger = logging.getLogger(__name__)
Layers = list[tuple[Tensor, Tensor]]


class Pages(Protocol):
    """An engine's blocks, as this rank holds them. Called from threads of ours."""

    def first_held(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        """Return per layer how many first tokens have no slot in these blocks (`Load.blocks`)."""
        ...

    def write(self, layers: Iterable[Made], blocks: Sequence[Sequence[int]], stop: int) -> None:
        """Put layers' keys and values [tokens, heads, dim], in any order, into the slots of the last tokens before `stop`."""
        ...

    def read(self, blocks: Sequence[int], tokens: int) -> Layers:
        """Return a copy of each layer's keys and values [tokens, heads, dim] of the first tokens, on the CPU."""
        ...


@dataclass
class Told:
    """What came of orders since this was asked last: requests by ids; `failed` with reason and sentence."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class Worker:
    """Carries out the orders of one rank.

    Args:
        target: None for an engine that only keeps caches.
        side: None for an engine that keeps none.
    """

    def __init__(
        self,
        store: Store,
        options: Options,
        pages: Pages,
        target: Target | None,
        side: Side | None,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._store, self._options, self._pages = store, options, pages
        self._target, self._side, self._rank, self._world = target, side, rank, world
        self._loaders = Threads("kvlingo-load", options.threads)
        self._copiers = Threads("kvlingo-copy", 1)
        self._savers = Threads("kvlingo-save", options.threads)
        self._loads: dict[str, Job[None]] = {}
        self._copies: dict[str, Job[Layers | None]] = {}
        self._puts: list[Job[None]] = []
        self._counts = Counter[str]()
        self._counting, self._translating = threading.Lock(), threading.Lock()

    def _count(self, what: str) -> None:
        with self._counting:
            self._counts[what] += 1

    # --- loading ---

    def start(self, orders: Orders) -> None:
        """Begin with what was ordered; loads of requests that are gone are given up."""
        for load in orders.loads:
            self._loads[load.request] = self._load(load)
        for request in orders.dropped:
            if request in self._loads:
                self._loads[request].cancel()
        for save in orders.saves:
            self._copies[save.request] = self._copiers.start(partial(self._copy, save))

    def load_now(self, load: Load) -> tuple[str, str] | None:
        """Load while the engine waits; return why it failed, or None."""
        job = self._load(load)
        job.wait()
        return self._outcome(job)

    def _load(self, load: Load) -> Job[None]:
        until = time.monotonic() + self._options.load_seconds
        return self._loaders.start(partial(self._bring, load), until)

    def _bring(self, load: Load, job: Job[None]) -> None:
        assert self._target is not None
        carry = load.carry
        entry, source = fetch(self._store, carry.key, carry.tenant)
        self._check(entry, carry)
        heads = [head_range(s.kv_heads, self._rank, self._world) for s in self._target.lm.geometry.layers]
        stop = carry.plan.translated[1]
        with self._translating:  # one at a time: it is arithmetic, and no model is asked by two threads
            if job.commit():
                layers = translated(
                    carry, entry.translated_until, source, self._target, self._pages.first_held(load.blocks)
                )
                rotated = placed(layers, stop, self._target.lm.rotary, heads)
                self._pages.write(while_wanted(rotated, job), load.blocks, stop)

    def _check(self, entry: Entry, carry: Carry) -> None:
        """Raise `Refused` where a cache is not the one that was planned with: it was replaced, or its time is over."""
        assert self._target is not None
        config = self._target.translators[carry.digest].config
        if entry.expires <= time.time():
            raise Refused("expired", "the kept cache has expired")
        if entry.sha256 != carry.sha256:
            raise Refused("gone", "another cache is kept under this id since it was looked at")
        if entry.geometry != self._target.sources[carry.digest] or max(carry.alignment) >= len(entry.ids):
            raise Refused("corrupt", f"the kept cache is not of a source of {len(config.source)} layers")

    def _outcome(self, job: Job[None]) -> tuple[str, str] | None:
        if job.cancel():
            return "store_slow", f"the kept cache was not there after {self._options.load_seconds:g} s"
        try:
            job.result()
        except Refused as refused:
            return refused.reason, refused.why
        except Exception as error:  # whatever it was, the prompt is read again
            logger.exception("a load failed")  # to the log, not to a client: it may name files
            return "error", type(error).__name__
        return None

    def rest(self, seconds: float) -> None:
        """Sleep until the oldest load has ended, `seconds` at most."""
        for job in list(self._loads.values())[:1]:
            job.wait(seconds)

    # --- keeping ---

    def _copy(self, save: Save, _: object) -> Layers | None:
        self._puts = [put for put in self._puts if not put.done]
        if len(self._puts) >= UNSAVED_PER_THREAD * self._options.threads:
            self._count("save_failed_store_slow")
            return None
        layers = self._pages.read(save.blocks, len(save.ids))
        self._puts.append(self._savers.start(partial(self._put, save, layers)))
        return layers

    def _put(self, save: Save, layers: Layers, _: object) -> None:
        try:
            assert self._side is not None
            if any(parse(data, save.key).rank == self._rank for data in self._store.manifests(save.key)):
                raise taken()  # before it is packed; the store itself looks again, at once with writing
            self._keep(save, lifted(layers, self._side.rotary), self._side)
        except Refused as refused:
            self._count(f"save_failed_{refused.reason}")
        except Exception:  # a cache that is not kept is read again
            self._count("save_failed_error")

    def _keep(self, save: Save, kv: KV, side: Side) -> None:
        data, now = pack(kv), time.time()
        entry = Entry(
            id=save.key,
            rank=self._rank,
            world=self._world,
            fingerprint=side.card.fingerprint,
            tokenizer_hash=side.card.tokenizer_hash,
            geometry=side.card.geometry,
            dtype=str(kv.keys[0].dtype).removeprefix("torch."),
            ids=save.ids,
            tenant=save.tenant,
            lora=save.lora,
            translated_until=save.translated_until,
            created=now,
            expires=now + self._options.expires_seconds,
            sha256=hashlib.sha256(data).hexdigest(),
            num_bytes=len(data),
        )
        self._store.put(save.key, self._rank, describe(entry), data, entry.expires)

    # --- telling ---

    def told(self) -> Told:
        """Return what has ended; a load that is late is given up, unless it is writing already."""
        with self._counting:
            told, self._counts = Told(counts=self._counts), Counter()
        for request, job in list(self._loads.items()):
            if not (job.done or job.late or job.cancelled):
                continue
            if job.late and not job.done and not job.cancel():
                continue  # it is writing; that ends soon
            outcome = self._outcome(job)
            if outcome is not None:
                told.failed[request] = outcome
            told.received.add(request)
            del self._loads[request]
        for request, copy in list(self._copies.items()):
            if copy.done:
                told.sent.add(request)
                del self._copies[request]
        return told

    @property
    def busy(self) -> bool:
        """Whether anything is under way that the engine waits for."""
        return bool(self._loads or self._copies)


def while_wanted(layers: Iterable[Made], job: Job[None]) -> Iterator[Made]:
    """Yield layers as long as somebody waits for them. Raises `Refused`: what is written by then is computed anew."""
    for layer in layers:
        if not job.wanted:
            raise Refused("late", "the translation took longer than anybody waits for it")
        yield layer
