"""Snapshots that memory has no room for, on disk: written by one thread of its own, read again when a prompt needs them.

Knows which model a place means, what is worth writing, and what is worth reading. Whatever goes wrong is counted by its
reason, and the model reads the prompt instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import torch

from kvlingo.language_model import LanguageModel
from kvlingo.serve.disk import Disk, Stored
from kvlingo.serve.freezing import Unusable, freeze, thaw
from kvlingo.serve.sessions import Match, Place, Snapshot, common
from kvlingo.states import ModelState

LOG = logging.getLogger(__name__)
WORTH_TOKENS = 32
LEAST_SHARE = 0.25
"""So much of a file's tokens must be of use, else reading it costs more than it spares."""
REASONS = (
    "corrupt",
    "foreign",
    "gone",
    "unreadable",
    "unfinished",
    "disk_full",
    "unwritable",
    "too_large",
    "no_room",
    "backlog",
    "unsupported",
    "failed",
)


class Shelf:
    """Snapshots of all models on one disk.

    Args:
        models: by the names they are served by; a file belongs to the weights and the dtype, not to the name.
        max_waiting_bytes: what may wait to be written; it is memory that is held beyond the cache's own.
    """

    def __init__(self, disk: Disk, models: Mapping[str, LanguageModel], max_waiting_bytes: int) -> None:
        self._disk, self._models, self._max_waiting = disk, models, max_waiting_bytes
        self._counts, self._counting = Counter[str](), threading.Lock()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Snapshot, float]] = deque()
        self._waiting_bytes = 0
        self._writing, self._until = False, float("inf")
        self._at_hand: Snapshot | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kvlingo-shelf", daemon=True)
        self._thread.start()

    def put(self, snapshot: Snapshot) -> None:
        """Queue a snapshot to be written; returns at once. Where too much waits already it is dropped."""
        if not worth_keeping(snapshot):
            return
        size = snapshot.num_bytes
        with self._changed:
            if self._closing or (self._waiting and self._waiting_bytes + size > self._max_waiting):
                self._count("dropped_backlog")
                return
            self._waiting.append((snapshot, time.time()))
            self._waiting_bytes += size
            self._changed.notify_all()

    def holds(self, place: Place) -> bool:
        """Tell whether anything is kept at a place, or about to be."""
        return bool(self._unwritten(place)) or self._disk.holds(self._key(place))

    def _unwritten(self, place: Place) -> list[Snapshot]:
        """Return what of a place waits to be written, or is being written: still in memory."""
        with self._changed:
            waiting = [snapshot for snapshot, _ in self._waiting]
            return [s for s in (*waiting, self._at_hand) if s is not None and s.place == place]

    def take(
        self, place: Place, ids: Sequence[int], *, beyond: int, most: int, exact_only: bool = False
    ) -> ModelState | None:
        """Return a state that shares the most with `ids`, or None where none is worth reading.

        Args:
            beyond: first tokens that are held anyway.
            most: first tokens that can be of use.
        """
        key = self._key(place)

        def worth(match: Match[Stored] | Match[Snapshot]) -> int:
            tokens = min(match.exact if exact_only else match.tokens, most)
            return tokens if tokens - beyond >= max(WORTH_TOKENS, LEAST_SHARE * len(match.snapshot.ids)) else 0

        def use(match: Match[Stored]) -> int:
            tokens, stored = worth(match), match.snapshot
            return 0 if tokens < len(stored.ids) and tokens < stored.label.cut_from else tokens

        for waiting in self._unwritten(place):
            found = Match(waiting, common(waiting.ids, ids))
            if worth(found) and (waiting.whole or worth(found) == len(waiting.ids)):
                return waiting.state
        for match in sorted(self._disk.find(key, ids), key=use, reverse=True):
            if not use(match):
                return None
            try:
                state = thaw(self._disk.read(match.snapshot), key, self._models[place.model])
                if state.reading.ids[: len(match.snapshot.ids)] != match.snapshot.ids:
                    raise Unusable("corrupt", "a kept cache holds other tokens than its label says")
                self._count("read")
                return state
            except Exception as error:
                self._note(error, "reading")
                self._disk.drop(match.snapshot)
        return None

    def stats(self) -> Mapping[str, int]:
        """Return counters and gauges; what was dropped by reason."""
        with self._counting:
            total = Counter(dict.fromkeys((f"dropped_{reason}" for reason in REASONS), 0))
            total.update({"written": 0, "read": 0, "evicted": 0})
            total.update(self._counts)
        total.update(self._disk.counts)
        gauges = {"bytes": self._disk.num_bytes, "files": len(self._disk), "waiting": len(self._waiting)}
        return {f"spill_{name}": value for name, value in {**total, **gauges}.items()}

    def settled(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout_s)

    def close(self, last: Sequence[Snapshot], timeout_s: float) -> None:
        """Write what is worth it of `last` (the one used last first) and what still waits, as far as there is time."""
        with self._changed:
            if self._closing:
                return
            self._closing, self._until = True, time.monotonic() + timeout_s
            now = time.time()
            worth = [(s, now - 1e-3 * i) for i, s in enumerate(last) if worth_keeping(s)]
            self._waiting.extendleft(reversed(worth))
            self._changed.notify_all()
        self._thread.join(timeout_s + 1.0)
        self._disk.close()

    # --- the writing thread ---

    def _work(self) -> None:
        while True:
            with self._changed:
                self._writing, self._at_hand = False, None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting or time.monotonic() > self._until:
                    return
                snapshot, when = self._waiting.popleft()
                self._writing, self._at_hand = True, snapshot
            try:
                self._write(snapshot, when)
            except Exception as error:
                self._note(error, "writing")
            with self._changed:
                self._waiting_bytes = max(0, self._waiting_bytes - snapshot.num_bytes)
            del snapshot

    @torch.no_grad()
    def _write(self, snapshot: Snapshot, when: float) -> None:
        place, key = snapshot.place, self._key(snapshot.place)
        there = self._disk.at(key, snapshot.ids)
        if there is not None and there.exact >= snapshot.exact:
            self._disk.touch(there, when)
            return
        label, data = freeze(snapshot.state, key, self._models[place.model])
        self._disk.write(self._disk.owner(place.tenant), label, data, when)
        self._count("written")

    def _key(self, place: Place) -> str:
        lm = self._models[place.model]
        return self._disk.key(place.tenant, place.conversation, lm.fingerprint, str(lm.dtype))

    def _count(self, name: str) -> None:
        with self._counting:
            self._counts[name] += 1

    def _note(self, error: Exception, doing: str) -> None:
        """Count and log what went wrong, without paths or text."""
        reason = error.reason if isinstance(error, Unusable) else "failed"
        self._count(f"dropped_{reason}")
        if not isinstance(error, Unusable):
            LOG.warning("%s a kept cache failed", doing, exc_info=error)


def worth_keeping(snapshot: Snapshot) -> bool:
    """Tell whether reading a snapshot from disk could ever spare more than it costs."""
    return len(snapshot.ids) >= WORTH_TOKENS and not snapshot.state.no_text
