"""What a store counts since it was opened."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass(frozen=True)
class Counts:
    """The fields of `StoreStats` that only grow; see there."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    put_bytes_raw: int = 0
    put_bytes_stored: int = 0
    evicted: int = 0
    corrupt: int = 0
    read_errors: int = 0
    write_errors: int = 0


class _ThreadCounts(threading.local):
    read_errors = 0


class Counters:
    """The current `Counts`; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Counts()
        self._of_thread = _ThreadCounts()

    @property
    def thread_read_errors(self) -> int:
        """The part of `read_errors` that the calling thread added."""
        return self._of_thread.read_errors

    def add(self, more: Counts) -> None:
        self._of_thread.read_errors += more.read_errors
        with self._lock:
            fields = dataclasses.fields(Counts)
            self._now = Counts(*(getattr(self._now, f.name) + getattr(more, f.name) for f in fields))

    @property
    def now(self) -> Counts:
        return self._now
