"""A bounded queue of jobs by priority, between the scheduler thread and the disk threads.

Bounded by their number alone: the bytes behind the jobs are host pages, which exist whether they wait here or not and
whose share their owners bound. May import the standard library.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")


class JobQueue(Generic[J]):
    """At most `capacity` jobs, the lowest priority first, within one priority in order of arrival. Any thread.

    `num_bytes` says what a job carries. Invariant: `len` is what `take` has not handed out.
    """

    def __init__(self, capacity: int, num_bytes: Callable[[J], int]) -> None:
        self._capacity, self._num_bytes = capacity, num_bytes
        self._changed = threading.Condition()
        self._heap: list[tuple[int, int, J]] = []
        self._arrivals = itertools.count()
        self._waiting_bytes = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, job: J, priority: int = 0) -> bool:
        """Add a job; False when the queue is full, and nothing happened then."""
        with self._changed:
            if len(self._heap) >= self._capacity:
                return False
            heapq.heappush(self._heap, (priority, next(self._arrivals), job))
            self._waiting_bytes += self._num_bytes(job)
            self._changed.notify()
            return True

    def take(self) -> J | None:
        """Wait for a job. None: closed, and none is left."""
        with self._changed:
            while not self._heap and not self._closed:
                self._changed.wait()
            return self._pop() if self._heap else None

    def take_more(self, most_bytes: int) -> list[J]:
        """The next that wait, up to `most_bytes` together, without waiting."""
        with self._changed:
            taken: list[J] = []
            while self._heap and (most_bytes := most_bytes - self._num_bytes(self._heap[0][-1])) >= 0:
                taken.append(self._pop())
            return taken

    def clear(self) -> list[J]:
        """Take all that wait, without waiting."""
        with self._changed:
            return [self._pop() for _ in range(len(self._heap))]

    def fullness(self, full_bytes: int) -> float:
        """In [0, 1], by the number of jobs or by their bytes, where `full_bytes` is all there can be."""
        with self._changed:
            return min(1.0, max(len(self._heap) / self._capacity, self._waiting_bytes / full_bytes))

    def close(self) -> None:
        """Whoever takes gets what is left, then nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _pop(self) -> J:
        job = heapq.heappop(self._heap)[-1]
        self._waiting_bytes -= self._num_bytes(job)
        return job
