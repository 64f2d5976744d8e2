"""What a store counts since it was opened."""

from __future__ import annotations

import dataclasses
import threading

from hicache.storage.base import StoreStats

Counts = StoreStats  # without the fields that are no counters


class _ThreadCounts(threading.local):
    read_errors = 0


class Counters:
    """The current `Counts`; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = Counts()
        self._of_thread = _ThreadCounts()

    @property
    def thread_read_errors(self) -> int:
        """The part of `read_errors` that the calling thread added."""
        return self._of_thread.read_errors

    def add(self, more: Counts) -> None:
        self._of_thread.read_errors += more.read_errors
        with self._lock:
            added = {name: count + getattr(self.now, name) for name, count in vars(more).items() if count}
            self.now = dataclasses.replace(self.now, **added)
