"""Continuous batching: one worker thread a model, whose requests decode together.

Knows one model, jobs and rows. A row's own cache is the truth; the batch is a working copy that is made anew when a row joins
or leaves, always between two tokens. Does not know how a job's first state comes about, nor HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from kvlingo.batches import Batch, prefill_batch
from kvlingo.cache import append_row, stack_rows
from kvlingo.generation import grown
from kvlingo.handoff import ModelState
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.serve.protocol import Begun, Busy, Done, Event, Finish, Piece, Sampling, Unavailable
from kvlingo.serve.sampling import Speech

LOG = logging.getLogger(__name__)
ENDS = ("finished", "cancelled", "failed")


@dataclass(frozen=True)
class Started:
    """A state to go on from, whose cache is the row's own, and the logits [vocabulary] of its next token."""

    state: ModelState
    logits: Tensor
    begun: Begun


class Voice(Protocol):
    """What a row says: takes logits [vocabulary] until it is finished.

    Fields:
        ids: what was chosen, after what the row's state does not hold yet although its cache does.
    """

    ids: list[int]
    finish_reason: Finish | None

    def next(self, logits: Tensor) -> Piece:
        """Choose a token, or finish without one; return what can be told now."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """One request as a worker sees it.

    Fields:
        begin: runs on the worker's thread; what it raises is told and nothing else.
        tell: takes events and at most one error, from the worker's thread.
        keep: takes what the model holds in the end, before `Done` is told; also when it was cancelled.
        voice: says the answer; None: a `Speech` of the lane's model.
        cancelled: set by whoever no longer listens.
    """

    tenant: str
    sampling: Sampling
    begin: Callable[[], Started]
    tell: Callable[[Event | Exception], None]
    keep: Callable[[ModelState], None]
    voice: Voice | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    submitted: float = field(default_factory=time.perf_counter)


class FairQueue:
    """Jobs of several tenants, one of each in turn. Not thread-safe by itself."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting(self, tenant: str) -> int:
        """Return how many jobs of one tenant wait."""
        return len(self._waiting.get(tenant, ()))

    def push(self, job: Job) -> None:
        """Put a job behind its tenant's others."""
        self._waiting.setdefault(job.tenant, deque()).append(job)

    def pop(self) -> Job:
        """Take the first job of the tenant whose turn it is; the tenant goes to the end."""
        tenant, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        return job

    def remove(self, job: Job) -> None:
        """Take a job out, if it is still there."""
        jobs = self._waiting.get(job.tenant)
        if jobs is None or job not in jobs:
            return
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.tenant]


@dataclass(eq=False)
class _Row:
    job: Job
    state: ModelState
    speech: Voice
    queue_ms: float
    ttft_ms: float = 0.0
    error: Exception | None = None


class Lane:
    """One model's queue and worker.

    Args:
        max_rows: requests that decode together.
        max_queue: requests of one tenant that may wait; one more is `Busy`. Others' requests never make one so.
        when_idle: does a bounded piece of work on the worker's thread where no job waits or runs. Returns how many seconds later
            it wants to be asked again, or None for: after the next job.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_rows: int,
        max_queue: int,
        when_idle: Callable[[], float | None] | None = None,
    ) -> None:
        self.lm, self._when_idle = lm, when_idle
        self.counts = Counter[str](dict.fromkeys(("tokens", "steps", "rows", *ENDS, "not_kept"), 0))
        self._max_rows, self._max_queue = max_rows, max_queue
        self._changed, self._queue, self._closing = threading.Condition(), FairQueue(), False
        self._rows: list[_Row] = []
        self._batch: Batch | None = None
        self._joined_at = 0
        self._beginning = 0
        self._first: Job | None = None  # the one that begins, or began last
        self._news = False
        self._mean_s = 1.0
        # Padding a batch needs a cache that can be made from parts, and angles that don't depend on the longest row.
        self._one_by_one = lm.target_refusal is not None or lm.geometry.angle_limit is not None
        self._thread = threading.Thread(target=self._work, name=f"kvlingo-{lm.name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, *, goes_on: bool = False) -> None:
        """Queue a job. Raises `Busy` when its tenant's queue is full, `Unavailable` when the lane is closing.

        `goes_on`: with an answer that was begun, which no full queue may break off. An answer has one job at a time.
        """
        with self._changed:
            if self._closing or not goes_on:
                self.see_room_for(job.tenant)
            self._queue.push(job)
            self._changed.notify_all()

    def see_room_for(self, tenant: str) -> None:
        """Raise what `submit` would raise now: whoever asks first does not prepare a job for nothing."""
        with self._changed:
            if self._closing:
                raise Unavailable(1.0)
            if self._queue.waiting(tenant) >= self._max_queue:
                raise Busy(self._wait_s())

    def cancel(self, job: Job) -> None:
        """Let a job go: at once where it waits, else before the next token."""
        job.cancelled.set()
        with self._changed:
            self._queue.remove(job)
            self._changed.notify_all()

    def look_again(self) -> None:
        """Say that there may be work for a pause."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    @property
    def load(self) -> Mapping[str, int]:
        """Return how many jobs wait and how many run."""
        with self._changed:
            return {"queued": len(self._queue), "running": self._beginning + len(self._rows)}

    def close(self) -> None:
        """Finish what was taken, take nothing more. Returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def stop(self, timeout_s: float) -> None:
        """Close and cancel all jobs; wait for the worker to let go of them."""
        self.close()
        with self._changed:
            while len(self._queue):
                job = self._queue.pop()
                job.cancelled.set()
                job.tell(Unavailable(1.0))
            beginning = [self._first] if self._beginning and self._first else []
            for job in (*beginning, *(row.job for row in self._rows)):
                job.cancelled.set()
                job.tell(Unavailable(1.0))
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _wait_s(self) -> float:
        return max(1.0, round(self._mean_s * len(self._queue) / self._max_rows, 1))

    # --- the worker's thread ---

    def _work(self) -> None:
        with torch.no_grad():
            while True:
                job = self._next_job()
                if job is None and not self._rows:
                    return
                try:
                    self._advance(job)
                except Exception as error:
                    self._fail(error)

    def _advance(self, job: Job | None) -> None:
        """Let a job join, those that were cancelled leave, and all others say one more token."""
        if job is not None:
            self._begin(job)
        for row in [r for r in self._rows if r.job.cancelled.is_set()]:
            self._leave(row)
        if self._rows:
            self._step()

    def _next_job(self) -> Job | None:
        """Return a job where there is one and a free row. Waits only when no row decodes; None then means: closed."""
        wait_s: float | None = None if self._when_idle is None else 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work() or self._news, wait_s)
                self._news = False
                if self._has_work():
                    if not len(self._queue) or len(self._rows) >= self._max_rows:
                        return None
                    self._beginning, self._first = 1, self._queue.pop()
                    return self._first
            wait_s = self._use_the_pause()

    def _has_work(self) -> bool:
        return bool(self._rows or len(self._queue) or self._closing)

    def _use_the_pause(self) -> float | None:
        """Do one piece of what waits for pauses; a job that comes meanwhile waits for the piece, not for all of it."""
        assert self._when_idle is not None
        try:
            return self._when_idle()
        except Exception:
            LOG.warning("%s: work in a pause failed", self.lm.name, exc_info=True)
            return None

    def _begin(self, job: Job) -> None:
        """Bring a job to its first token; it then joins the rows. What goes wrong is its own until it has joined."""
        row = None
        try:
            if job.cancelled.is_set():
                self.counts["cancelled"] += 1
                return
            queue_ms = ms_since(job.submitted)
            started = job.begin()
            job.tell(started.begun)
            row = _Row(job, started.state, job.voice or Speech(self.lm, job.sampling), queue_ms)
            self._speak(row, started.logits)
            row.ttft_ms = ms_since(job.submitted)
        except Exception as error:
            row = None
            self.counts["failed"] += 1
            job.tell(error)
        finally:
            with self._changed:
                self._beginning = 0
                self._rows += [row] if row else []
                self._changed.notify_all()
        if row:
            self._settle()
            if row.speech.finish_reason:
                self._leave(row)

    def _speak(self, row: _Row, logits: Tensor) -> None:
        before = len(row.speech.ids)
        piece = row.speech.next(logits)
        self.counts["tokens"] += len(row.speech.ids) - before
        if piece.text or piece.tokens:
            row.job.tell(piece)

    def _step(self) -> None:
        """Let every row read the token it chose last and choose the next."""
        logits = self._read([row.speech.ids[-1] for row in self._rows])
        self.counts["steps"] += 1
        self.counts["rows"] += len(self._rows)
        for row, following in zip(list(self._rows), logits, strict=True):
            try:
                self._speak(row, following)
            except Exception as error:  # logits that nothing can be chosen from: the other rows are well
                row.error = error
        for row in [r for r in self._rows if r.speech.finish_reason or r.error]:
            self._leave(row)

    def _read(self, tokens: list[int]) -> list[Tensor]:
        """Return the logits [vocabulary] of each row after one more token."""
        if self._one_by_one or len(self._rows) == 1:
            self._settle()
            fed = zip(self._rows, tokens, strict=True)
            return [prefill(self.lm, self.lm.ids([t]), cache=row.state.cache).logits[-1] for row, t in fed]
        if self._batch is None:
            self._batch = self._join()
        ids = [self.lm.ids([token]) for token in tokens]
        return list(prefill_batch(self.lm, ids, batch=self._batch).logits[:, -1])

    def _join(self) -> Batch:
        caches = [row.state.cache for row in self._rows]
        lengths = [int(cache.get_seq_length()) for cache in caches]
        stacked = stack_rows(caches, self.lm.geometry, self.lm.model.config)
        self._joined_at = max(lengths)
        return Batch(stacked, tuple(self._joined_at - length for length in lengths))

    def _settle(self) -> None:
        """Give each row of the batch what it has read there, and forget the batch. Rows that have joined since come last."""
        batch, self._batch = self._batch, None
        if batch is None or batch.slots == self._joined_at:
            return
        for index, row in enumerate(self._rows[: len(batch.padding)]):
            append_row(row.state.cache, batch.cache, index, batch.slots - self._joined_at, self.lm.geometry)

    def _leave(self, row: _Row) -> None:
        """Let a row go: what it holds is kept, then its end is told."""
        self._settle()
        with self._changed:
            self._rows.remove(row)
        job, speech = row.job, row.speech
        if row.error is not None:
            self.counts["failed"] += 1
            job.tell(row.error)
            return
        try:
            job.keep(grown(self.lm, row.state, speech.ids))
        except Exception as error:  # the answer stands; only the next turn pays
            self.counts["not_kept"] += 1
            LOG.warning("%s: a cache could not be kept: %s", self.lm.name, type(error).__name__)
        seconds = time.perf_counter() - job.submitted
        self._mean_s += 0.1 * (seconds - self._mean_s)
        if speech.finish_reason is None:
            self.counts["cancelled"] += 1
        else:
            self.counts["finished"] += 1
            job.tell(Done(speech.finish_reason, len(speech.ids), row.ttft_ms, row.queue_ms))
        with self._changed:
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Tell every row that decoding went wrong; the lane goes on with the next jobs."""
        with self._changed:
            rows, self._rows, self._batch = self._rows, [], None
        for row in rows:
            self.counts["failed"] += 1
            row.job.tell(error)


def ms_since(began: float) -> float:
    """Return the milliseconds since a reading of `time.perf_counter`."""
    return 1e3 * (time.perf_counter() - began)


def clipped(sampling: Sampling, prompt_tokens: int, limit: int | None) -> Sampling:
    """Cut an answer to what the model can read with its prompt."""
    if limit is None:
        return sampling
    return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, limit - prompt_tokens))
