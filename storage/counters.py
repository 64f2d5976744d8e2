"""What a store counts since it was opened."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from hicache.storage.base import StoreStats


class _ThreadCounts(threading.local):
    read_errors = 0


class Counters:
    """The counters among the fields of `StoreStats`, by their names; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = Counter()
        self._of_thread = _ThreadCounts()

    @property
    def now(self) -> StoreStats:
        """Without the fields that are no counters."""
        with self._lock:
            return StoreStats(**self._counts)

    @property
    def thread_read_errors(self) -> int:
        """The part of `read_errors` that the calling thread added."""
        return self._of_thread.read_errors

    def add(self, *, read_errors: int = 0, **more: int) -> None:
        self._of_thread.read_errors += read_errors
        with self._lock:
            self._counts["read_errors"] += read_errors
            for name, count in more.items():
                self._counts[name] += count
