"""Loads that are queued on the device in steps, so that `load` returns before all of their layers are queued.

A copy of scattered pages takes the host about half a microsecond a page and layer: 10 ms for 512 pages of 32 layers,
in which it launches no forward. So `load` queues what takes a millisecond or two. The rest follows while the forward is
launched, each layer before a stream waits for it, and whenever somebody asks for the state of a copy. The link takes
several times as long for a layer as the host, so it stays busy. Decision 029 has the figures.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class _Load:
    """`steps` queues some layers each time it is resumed, and yields how many are queued, unless all are."""

    load_id: int
    steps: Iterator[int]
    num_queued: int = 0


class LoadQueue:
    """Loads with layers that are not queued yet, in submission order: all of one come before the first of the next.

    For the scheduler's thread and the one that launches forwards; without loads nothing takes the lock, which the
    collector may ask for again within a step. Steps do not raise: they end their load themselves.
    """

    def __init__(self) -> None:
        self._loads: deque[_Load] = deque()
        self._lock = threading.RLock()

    def put(self, load_id: int, steps: Iterator[int]) -> None:
        """Append a load. Ids ascend."""
        with self._lock:
            self._loads.append(_Load(load_id, steps))

    def queue_some(self, seconds: float) -> None:
        """Queue steps for so long, at least one."""
        if not self._loads:
            return
        with self._lock:
            end = time.perf_counter() + seconds
            while self._loads:
                self._step()
                if time.perf_counter() >= end:
                    break

    def queue_layers(self, load_id: int, num_layers: int) -> None:
        """Queue the loads before this one, and at least so many of its own layers (all, where it has fewer)."""
        if not self._loads:
            return
        with self._lock:
            while self._loads and (first := self._loads[0]).load_id <= load_id:
                if first.load_id == load_id and first.num_queued >= num_layers:
                    break
                self._step()

    def clear(self) -> list[int]:
        """Forget all steps that are left; returns the ids of their loads."""
        with self._lock:
            ids = [load.load_id for load in self._loads]
            self._loads.clear()
        return ids

    def _step(self) -> None:
        """One step of the first load, which leaves with its last one."""
        load = self._loads[0]
        num_queued = next(load.steps, None)
        if num_queued is not None:
            load.num_queued = num_queued
        elif self._loads and self._loads[0] is load:  # nobody cleared the queue meanwhile
            self._loads.popleft()
