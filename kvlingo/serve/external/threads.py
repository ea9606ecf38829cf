"""Work beside the engine: a few threads, and jobs that can be given up.

A thread that hangs in a store never holds the engine or its end up. Who gives a job up knows whether it has passed the point of
no return (`commit`): from then on its end has to be waited for, and a job that looks whether it is still `wanted` ends soon.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
State = Literal["open", "committed", "done", "cancelled"]


class Job(Generic[T]):
    """One piece of work and what came of it."""

    def __init__(self, work: Callable[[Job[T]], T], until: float | None) -> None:
        self._work, self.until = work, until
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._given_up = False
        self._state: State = "open"
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._ended.is_set()

    @property
    def late(self) -> bool:
        """Whether it should be given up."""
        return self.until is not None and time.monotonic() > self.until

    def commit(self) -> bool:
        """Go past the point of no return; False where the job was given up before."""
        with self._lock:
            if self._state == "open":
                self._state = "committed"
            return self._state != "cancelled"

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for it, in time."""
        return not (self._given_up or self.late)

    def cancel(self) -> bool:
        """Give a job up; False where its end has to be waited for."""
        self._given_up = True
        with self._lock:
            if self._state == "open":
                self._state = "cancelled"
            return self._state == "cancelled"

    def run(self) -> None:
        """Do the work, unless it was given up."""
        if not self.cancelled:
            try:
                self._result = self._work(self)
            except BaseException as error:  # handed to whoever asks for the result
                self._error = error
        with self._lock:
            if self._state != "cancelled":
                self._state = "done"
        self._ended.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was given up in time."""
        with self._lock:
            return self._state == "cancelled"

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the end, or until the job is late; `seconds` at most."""
        left = None if self.until is None else max(0.0, self.until - time.monotonic())
        self._ended.wait(min((x for x in (left, seconds) if x is not None), default=None))

    def result(self) -> T:
        """Return what came of it, or raise what went wrong; waits where it is past the point of no return."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Threads:
    """A fixed number of threads that work off jobs in their order."""

    def __init__(self, name: str, count: int) -> None:
        self._jobs: queue.SimpleQueue[Job[object]] = queue.SimpleQueue()
        for index in range(count):
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True).start()

    def start(self, work: Callable[[Job[T]], T], until: float | None = None) -> Job[T]:
        """Have work done; `until` (monotonic) is when whoever waits will give it up."""
        job = Job(work, until)
        self._jobs.put(job)  # type: ignore[arg-type]
        return job

    def _work(self) -> None:
        while True:
            self._jobs.get().run()
