"""Threads that do queued work, and the finished tasks that LMCache's controllers wait for."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

from hicache.disk.health import LIMITS

log = logging.getLogger(__name__)
R = TypeVar("R")


class Workers:
    """`count` threads that do work in the order of its submission. Any thread may call.

    `failures`: work that raised, which is logged once.
    """

    def __init__(self, name: str, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun_s = [0.0] * count  # of the work under way, 0 without
        self.failures = 0
        self._threads = [
            threading.Thread(target=self._loop, args=(n,), name=f"hicache-{name}-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def are_stalled(self) -> bool:
        """Whether every thread has been at its work for longer than I/O may take: nothing more would be done now."""
        limit_s = self._clock() - LIMITS.io_timeout_s
        return all(0 < begun_s < limit_s for begun_s in self._begun_s)

    def close(self, deadline_s: float) -> bool:
        """Finish what is queued, until `deadline_s` of `time.monotonic`; true when all threads have ended."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self, n: int) -> None:
        while (work := self._work.get()) is not None:
            self._begun_s[n] = self._clock()
            try:
                work()
            except Exception:  # the server's other work goes on
                if not self.failures:
                    log.exception("an unexpected error; further ones are counted in report_status")
                self.failures += 1
            self._begun_s[n] = 0.0


class Results(Generic[R]):
    """Finished tasks of one kind, each taken once, and the descriptor that becomes readable with each. Any thread."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._finished: dict[int, R] = {}
        self._closed = False

    @property
    def descriptor(self) -> int:
        return int(self._notifier.fileno())

    def put(self, task_id: int, result: R) -> None:
        with self._lock:
            self._finished[task_id] = result
            if not self._closed:
                self._notifier.notify()

    def take(self, task_id: int) -> R | None:
        with self._lock:
            return self._finished.pop(task_id, None)

    def take_all(self) -> dict[int, R]:
        with self._lock:
            taken, self._finished = self._finished, {}
            return taken

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()
