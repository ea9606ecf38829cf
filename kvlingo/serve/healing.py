"""Reading what was translated again, exactly, while nobody waits.

Knows one model and its snapshots. Works in bounded pieces on the thread where the model runs, so a request waits for one piece at
most; what was read so far is kept for the next pause. Does not know queues: whoever calls says when nothing else is to be done.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from kvlingo.cache import can_cut
from kvlingo.cache_writing import fork, truncate
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.plan import reprefill_plan
from kvlingo.reading import first_tokens
from kvlingo.serve.sessions import Sessions, Snapshot
from kvlingo.states import ModelState

LOG = logging.getLogger(__name__)
PIECE_TOKENS = 64
AGAIN_S = 0.1
HEALED = "read again while nobody waited"
COUNTED = ("heal_done", "heal_pieces", "heal_tokens", "heal_abandoned", "heal_failed")


@dataclass
class _Work:
    """A snapshot that is being read again: the model's own cache of its first tokens, None for none yet."""

    snapshot: Snapshot
    cache: Any


class Healer:
    """Heals the snapshots of one model, the one used last first.

    Args:
        name: the model's, as it is served.
        busy: whether anything else is to be done, here or elsewhere.
    """

    def __init__(self, name: str, lm: LanguageModel, sessions: Sessions, busy: Callable[[], bool]) -> None:
        self.name, self.counts = name, Counter[str](dict.fromkeys(COUNTED, 0))
        self._lm, self._sessions, self._busy = lm, sessions, busy
        self._work: _Work | None = None
        self._hopeless = WeakSet[Snapshot]()

    @torch.no_grad()
    def do_a_piece(self) -> float | None:
        """Read up to `PIECE_TOKENS` tokens of a snapshot again; return in how many seconds to go on, None for nothing to do."""
        if self._busy():
            return AGAIN_S
        if self._work is not None and not self._sessions.keeps(self._work.snapshot):
            self.counts["heal_abandoned"] += 1
            self._work = None
        if self._work is None:
            self._work = self._begin()
        if self._work is None:
            return None
        try:
            self._read(self._work)
        except Exception as error:  # it stays as it is, and is not tried again
            self.counts["heal_failed"] += 1
            self._hopeless.add(self._work.snapshot)
            self._work = None
            LOG.warning("%s: a cache could not be read again", self.name, exc_info=error)
        return 0.0

    def _begin(self) -> _Work | None:
        """Choose a snapshot; begin with what the model has read exactly."""
        limit = self._lm.geometry.angle_limit
        for snapshot in self._sessions.all():
            # Beyond `angle_limit` the angles of all tokens change, and pieces would not fit together.
            if (
                snapshot.place.model == self.name
                and snapshot.exact < len(snapshot.ids)
                and snapshot not in self._hopeless
                and not snapshot.state.no_text
                and (limit is None or len(snapshot.ids) <= limit)
            ):
                return _Work(snapshot, self._exact_cache(snapshot))
        return None

    def _exact_cache(self, snapshot: Snapshot) -> Any:
        """Return a cache of the most first tokens that the model has read exactly, or None."""
        lm = self._lm
        for match in sorted(self._sessions.find(snapshot.place, snapshot.ids), key=lambda m: m.exact, reverse=True):
            cache = match.snapshot.state.cache
            if match.exact and match.exact == match.tokens == len(match.snapshot.ids):
                return fork(cache)
            if match.exact and can_cut(cache, match.exact, lm.geometry):
                return truncate(cache, match.exact, lm.geometry, lm.model.config)
        return None

    def _read(self, work: _Work) -> None:
        lm, ids = self._lm, work.snapshot.ids
        done = 0 if work.cache is None else int(work.cache.get_seq_length())
        piece = ids[done : done + PIECE_TOKENS]
        if piece:
            work.cache = prefill(lm, lm.ids(piece), cache=work.cache, full_length=True).cache
            self.counts["heal_pieces"] += 1
            self.counts["heal_tokens"] += len(piece)
        if done + len(piece) < len(ids):
            return
        reading = first_tokens(work.snapshot.state.reading, len(ids))
        state = ModelState(reading, work.cache, reprefill_plan(len(ids), HEALED).spans)
        swapped = self._sessions.swap(work.snapshot, state, lm.geometry)
        self.counts["heal_done" if swapped else "heal_abandoned"] += 1
        self._work = None
