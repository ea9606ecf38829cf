"""Continuous batching: one worker thread a model, whose requests decode together.

Between two tokens of theirs one job that begins takes one bounded step: a long prompt holds nobody up, and several long ones take
turns. Knows one model, jobs and rows. A row's own cache is the truth; the batch is a working copy that is made anew when a row
joins or leaves, always between two tokens. Does not know how a job's first state comes about, nor HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvlingo.batches import Batch, prefill_batch
from kvlingo.cache_writing import append_row, stack_rows
from kvlingo.generation import grown
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.serve.protocol import Begun, Busy, Done, Event, Finish, Piece, Sampling, Unavailable
from kvlingo.serve.sampling import Speech
from kvlingo.states import ModelState
from kvlingo.steps import WAITED, Steps

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
        begin: runs on the worker's thread, one bounded step between two tokens of others, and is closed where it is left in the
            middle; what it raises is told and nothing else.
        tell: takes events and at most one error, from the worker's thread.
        keep: takes what the model holds in the end, before `Done` is told; also when it was cancelled.
        voice: says the answer; None: a `Speech` of the lane's model.
        cancelled: set by whoever no longer listens.
    """

    tenant: str
    sampling: Sampling
    begin: Callable[[], Steps[Started]]
    tell: Callable[[Event | Exception], None]
    keep: Callable[[ModelState], None]
    voice: Voice | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    submitted: float = field(default_factory=time.perf_counter)


class OfTenant(Protocol):
    """What waits."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        ...


Waits = TypeVar("Waits", bound=OfTenant)


class FairQueue(Generic[Waits]):
    """Things of several tenants, one of each in turn. Not thread-safe by itself."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Waits]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Waits]:
        for each in self._waiting.values():
            yield from each

    def waiting(self, tenant: str) -> int:
        """Return how many of one tenant wait."""
        return len(self._waiting.get(tenant, ()))

    def push(self, item: Waits) -> None:
        """Put something behind its tenant's others."""
        self._waiting.setdefault(item.tenant, deque()).append(item)

    def pop(self) -> Waits:
        """Take the first of the tenant whose turn it is; the tenant goes to the end."""
        tenant, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        return item

    def turn(self) -> Waits:
        """Return the first of the tenant whose turn it is; it stays, behind its others, and the tenant goes to the end."""
        item = self.pop()
        self.push(item)
        return item

    def remove(self, item: Waits) -> bool:
        """Take something out; False where it is not there any more."""
        items = self._waiting.get(item.tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[item.tenant]
        return True


@dataclass(eq=False)
class _Beginning:
    """A job on its way to its first token; `steps` is None until the first is taken."""

    job: Job
    queue_ms: float = 0.0
    steps: Steps[Started] | None = None

    @property
    def tenant(self) -> str:
        return self.job.tenant


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
        self._changed, self._queue, self._closing = threading.Condition(), FairQueue[Job](), False
        self._rows: list[_Row] = []
        self._ending = 0  # jobs that are no rows any more and not counted yet
        self._batch: Batch | None = None
        self._joined_at = 0
        self._beginning = FairQueue[_Beginning]()
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
            self.counts["left_queue"] += self._queue.remove(job)
            self._changed.notify_all()

    def look_again(self) -> None:
        """Say that there may be work for a pause."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    @property
    def load(self) -> Mapping[str, int]:
        """Return how many jobs wait and how many run. One runs until what it read is kept and its end is in `counts`."""
        with self._changed:
            return {"queued": len(self._queue), "running": len(self._beginning) + len(self._rows) + self._ending}

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
            for job in (*(each.job for each in self._beginning), *(row.job for row in self._rows)):
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
                self._take_jobs()
                if not self._rows and not len(self._beginning):
                    return
                try:
                    self._advance()
                except Exception as error:
                    self._fail(error)

    def _advance(self) -> None:
        """Let who was cancelled leave, one job that begins take a step, and all rows say one more token."""
        for each in [b for b in self._beginning if b.job.cancelled.is_set()]:
            self._give_up(each)
        for _ in range(len(self._beginning)):
            if self._begin() != WAITED:  # who waits for another's reading takes no turn from it
                break
        for row in [r for r in self._rows if r.job.cancelled.is_set()]:
            self._leave(row)
        if self._rows:
            self._step()

    def _take_jobs(self) -> None:
        """Let jobs begin while there are free rows. Waits only when no row decodes and nothing begins; without any: closed."""
        wait_s: float | None = None if self._when_idle is None else 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work() or self._news, wait_s)
                self._news = False
                if self._has_work():
                    while len(self._queue) and len(self._rows) + len(self._beginning) < self._max_rows:
                        self._beginning.push(_Beginning(self._queue.pop()))
                    return
            wait_s = self._use_the_pause()

    def _has_work(self) -> bool:
        return bool(self._rows or len(self._beginning) or len(self._queue) or self._closing)

    def _use_the_pause(self) -> float | None:
        """Do one piece of what waits for pauses; a job that comes meanwhile waits for the piece, not for all of it."""
        assert self._when_idle is not None
        try:
            return self._when_idle()
        except Exception:
            LOG.warning("%s: work in a pause failed", self.lm.name, exc_info=True)
            return None

    def _begin(self) -> str | None:
        """Let the job whose turn it is take a step; after the last it says its first token and joins the rows.

        What goes wrong is its own until it has joined. It counts as running all the time. Returns what the step gave.
        """
        with self._changed:
            beginning = self._beginning.turn()
        job, row = beginning.job, None
        try:
            if beginning.steps is None:
                beginning.queue_ms = ms_since(job.submitted)
                beginning.steps = job.begin()
            return next(beginning.steps)
        except StopIteration as end:
            row = self._first_token(beginning, end.value)
        except Exception as error:
            self._failed_to_begin(job, error)
        with self._changed:
            self._beginning.remove(beginning)
            self._rows += [row] if row else []
            self._changed.notify_all()
        if row:
            self._settle()
            if row.speech.finish_reason:
                self._leave(row)
        return None

    def _first_token(self, beginning: _Beginning, started: Started) -> _Row | None:
        """Let a job say its first token; None where that fails."""
        job = beginning.job
        try:
            job.tell(started.begun)
            row = _Row(job, started.state, job.voice or Speech(self.lm, job.sampling), beginning.queue_ms)
            self._speak(row, started.logits)
            row.ttft_ms = ms_since(job.submitted)
        except Exception as error:
            self._failed_to_begin(job, error)
            return None
        return row

    def _failed_to_begin(self, job: Job, error: Exception) -> None:
        self.counts["failed"] += 1
        job.tell(error)

    def _give_up(self, beginning: _Beginning) -> None:
        """Let a job go that has not said anything yet."""
        try:
            if beginning.steps is not None:
                beginning.steps.close()
        except Exception as error:  # only what was read so far is lost
            self._was_not_kept(error)
        with self._changed:
            self.counts["cancelled"] += 1
            self._beginning.remove(beginning)
            self._changed.notify_all()

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
        """Let a row go: what it holds is kept, its end is counted, then told."""
        self._settle()
        with self._changed:
            self._rows.remove(row)
            self._ending += 1
        if row.error is None:
            self._keep(row)
        with self._changed:
            self._count_end(row)
            self._ending -= 1
            self._changed.notify_all()
        if row.error is not None:
            row.job.tell(row.error)
        elif row.speech.finish_reason is not None:
            row.job.tell(Done(row.speech.finish_reason, len(row.speech.ids), row.ttft_ms, row.queue_ms))

    def _keep(self, row: _Row) -> None:
        try:
            row.job.keep(grown(self.lm, row.state, row.speech.ids))
        except Exception as error:  # the answer stands; only the next turn pays
            self._was_not_kept(error)

    def _was_not_kept(self, error: Exception) -> None:
        self.counts["not_kept"] += 1
        LOG.warning("%s: a cache could not be kept: %s", self.lm.name, type(error).__name__)

    def _count_end(self, row: _Row) -> None:
        if row.error is not None:
            self.counts["failed"] += 1
        elif row.speech.finish_reason is None:
            self.counts["cancelled"] += 1
        elif row.speech.finish_reason != "turn":  # there another model takes over: the answer goes on
            seconds = time.perf_counter() - row.job.submitted
            self._mean_s += 0.1 * (seconds - self._mean_s)
            self.counts["finished"] += 1

    def _fail(self, error: Exception) -> None:
        """Tell every row that decoding went wrong; the lane goes on with the next jobs."""
        with self._changed:
            rows, self._rows, self._batch = self._rows, [], None
            self.counts["failed"] += len(rows)
        for row in rows:
            row.job.tell(error)


def ms_since(began: float) -> float:
    """Return the milliseconds since a reading of `time.perf_counter`."""
    return 1e3 * (time.perf_counter() - began)


def clipped(sampling: Sampling, prompt_tokens: int, limit: int | None) -> Sampling:
    """Cut an answer to what the model can read with its prompt."""
    if limit is None:
        return sampling
    return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, limit - prompt_tokens))
