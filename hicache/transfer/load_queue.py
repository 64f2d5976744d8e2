"""Loads that are queued on the device in steps, so that `load` returns before all layers of the load are queued.

To queue a copy of scattered pages, the host needs about half a microsecond per page and layer: 10 ms for 512 pages of
32 layers. Meanwhile the host launches no forward pass. Therefore `load` queues steps for only a millisecond or two. The
other layers are queued while the forward pass is launched, each layer before a stream waits for it, and when a caller
asks for the state of a copy. The link needs several times as long for a layer as the host, so the link stays busy.
Decision 029 has the figures.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class _Load:
    """One load. Each time the iterator `steps` is resumed, it queues some layers and yields the number of layers queued
    so far. The iterator ends when all layers are queued."""

    load_id: int
    steps: Iterator[int]
    num_queued: int = 0


class LoadQueue:
    """Loads with layers that are not queued yet, in submission order: a load starts after all layers of the previous
    load are queued.

    Used by the scheduler thread and the thread that launches forwards. If there are no loads, no call takes the lock.
    The lock is reentrant, because the garbage collector may call this object within a step. A step does not raise an
    error; the step marks its load as failed instead.
    """

    def __init__(self) -> None:
        self._loads: deque[_Load] = deque()
        self._lock = threading.RLock()

    def put(self, load_id: int, steps: Iterator[int]) -> None:
        """Append a load. The ids of loads must ascend."""
        with self._lock:
            self._loads.append(_Load(load_id, steps))

    def queue_some(self, seconds: float) -> None:
        """Queue steps for about `seconds`, at least one step."""
        if not self._loads:
            return
        with self._lock:
            end = time.perf_counter() + seconds
            while self._loads:
                self._step()
                if time.perf_counter() >= end:
                    break

    def queue_layers(self, load_id: int, num_layers: int) -> None:
        """Queue all earlier loads, and at least `num_layers` layers of the load `load_id`, or all its layers if it has
        fewer."""
        if not self._loads:
            return
        with self._lock:
            while self._loads and (first := self._loads[0]).load_id <= load_id:
                if first.load_id == load_id and first.num_queued >= num_layers:
                    break
                self._step()

    def clear(self) -> list[int]:
        """Drop all remaining steps and return the ids of their loads."""
        with self._lock:
            ids = [load.load_id for load in self._loads]
            self._loads.clear()
        return ids

    def _step(self) -> None:
        """Queue one step of the first load; remove the load after its last step."""
        load = self._loads[0]
        num_queued = next(load.steps, None)
        if num_queued is not None:
            load.num_queued = num_queued
        elif self._loads and self._loads[0] is load:  # false if the step called `clear`
            self._loads.popleft()
