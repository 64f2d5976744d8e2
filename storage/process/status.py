"""Numbers that a store process keeps where its clients see them: one shared page, written by the process alone.

So `stats` of a client is neither a question nor a wait, and what a job has done is counted before its answer is sent.
Each number is a float64, written at once: whole numbers are exact up to 2^53.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from hicache.storage.base import StoreStats
from hicache.storage.process.frames import FrameError
from hicache.storage.process.shared_memory import new_memory

_STATS = tuple(field.name for field in dataclasses.fields(StoreStats))
QUEUE_NUMBERS = ("state", "opens", "failures", "refused_jobs", "stalled_jobs", "queued_jobs", "queued_bytes")
_REFUSES_UNTIL = "refuses_until_s"
_NAMES = (
    *_STATS,
    "failed_touches",
    *(f"{queue}_{name}" for queue in ("reads", "writes") for name in (*QUEUE_NUMBERS, _REFUSES_UNTIL)),
)
_INDEX = {name: i for i, name in enumerate(_NAMES)}


class StatusWriter:
    """The numbers as the process writes them, into the file behind a client's `descriptor`, which it takes over. They
    are written, not mapped: who touches the memory of a file that was made shorter ends (SIGBUS)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size < mmap.PAGESIZE:
            self.close()
            raise FrameError("the status of a client is no memory of a page")

    def write(self, stats: StoreStats, failed_touches: int, queues: Mapping[str, tuple[float, ...]]) -> None:
        """`queues`: by name, the `QUEUE_NUMBERS`, and until when jobs are refused."""
        numbers = [*map(float, dataclasses.astuple(stats)), failed_touches, *queues["reads"], *queues["writes"]]
        os.pwrite(self._descriptor, array("d", numbers), 0)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedStatus:
    """The numbers as a client reads them. `descriptor`: of the memory, to be passed on, until `close`; the numbers can
    be read after that. StoreError where there is no memory to share."""

    def __init__(self) -> None:
        self.descriptor, memory = new_memory("hicache-status", mmap.PAGESIZE)
        self._numbers = memory.view(np.float64)

    def stats(self) -> StoreStats:
        values = self._numbers[: len(_STATS)].tolist()
        numbers: dict[str, Any] = {name: int(value) for name, value in zip(_STATS, values, strict=True)}
        return StoreStats(**{**numbers, "read_only": bool(numbers["read_only"])})

    @property
    def failed_touches(self) -> int:
        return int(self._numbers[_INDEX["failed_touches"]])

    def queue(self, name: str) -> tuple[float, ...]:
        """The `QUEUE_NUMBERS` of the reads or the writes."""
        first = _INDEX[f"{name}_{QUEUE_NUMBERS[0]}"]
        return tuple(self._numbers[first : first + len(QUEUE_NUMBERS)].tolist())

    def refuses_until_s(self, name: str) -> float:
        """Until when a job would be refused, on the process's clock; 0 where it would not."""
        return float(self._numbers[_INDEX[f"{name}_{_REFUSES_UNTIL}"]])

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def clear(self) -> None:
        """Nobody writes these numbers any more."""
        self._numbers[:] = 0.0
