"""Numbers that a store process shares with its clients: one memory page, which only the process writes.

So `stats` of a client neither sends a frame nor waits, and the process counts a job before it sends its answer. Each
number is a float64, written atomically: integers are exact up to 2^53.
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
# Pages that a replicator copies to a remote store, the state of the breaker of writes there, and pages read from a
# remote store that the local one stored, or did not.
BACKUP_NUMBERS = (
    "queued_pages", "queued_bytes", "sent_pages", "sent_bytes", "dropped_pages", "failed_pages", "state",
    "filled_pages", "unfilled_pages",
)  # fmt: skip
_REFUSES_UNTIL = "refuses_until_s"
_NAMES = (
    *_STATS,
    "failed_touches",
    *(f"{queue}_{name}" for queue in ("reads", "writes") for name in (*QUEUE_NUMBERS, _REFUSES_UNTIL)),
    *(f"backup_{name}" for name in BACKUP_NUMBERS),
)
_INDEX = {name: i for i, name in enumerate(_NAMES)}


class StatusWriter:
    """Writes the numbers into the file of a client's `descriptor`, which it owns. It does not map the file: touching a
    map of a file that was truncated would end the process (SIGBUS)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size < mmap.PAGESIZE:
            self.close()
            raise FrameError("the status of a client is no memory of a page")

    def write(self, stats: StoreStats, failed_touches: int, queues: Mapping[str, tuple[float, ...]]) -> None:
        """Write all numbers. `queues`: by name, the `QUEUE_NUMBERS`, then the time until which jobs are refused; and as
        `backup` the `BACKUP_NUMBERS`."""
        of_queues = (*queues["reads"], *queues["writes"], *queues["backup"])
        numbers = [*map(float, dataclasses.astuple(stats)), failed_touches, *of_queues]
        os.pwrite(self._descriptor, array("d", numbers), 0)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedStatus:
    """Reads the numbers in a client. `descriptor`: of the memory, to be sent to the process, open until `close`; the
    numbers can be read afterwards too. StoreError if there is no memory to share."""

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

    @property
    def backup(self) -> tuple[float, ...]:
        """The `BACKUP_NUMBERS`."""
        first = _INDEX[f"backup_{BACKUP_NUMBERS[0]}"]
        return tuple(self._numbers[first : first + len(BACKUP_NUMBERS)].tolist())

    def refuses_until_s(self, name: str) -> float:
        """Time until which a job would be refused, on the process's clock; 0 if it would not."""
        return float(self._numbers[_INDEX[f"{name}_{_REFUSES_UNTIL}"]])

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def clear(self) -> None:
        """Set all numbers to 0, because no process writes them any more."""
        self._numbers[:] = 0.0
