"""Who may touch the memory map now: many short readers, or one thread that closes or replaces it.

An lmdb buffer is an address in the map. Touching one after the map is gone kills the process, so closing and
compacting wait here for the readers inside. Owns no data. May import the standard library and base.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hicache.storage.base import StoreError


class Gate:
    """Readers share it, at most `max_readers` at a time; `exclusive` waits until none is inside. Any thread.

    A waiting exclusive holds off new readers, so it cannot starve. Neither side may be entered twice by one thread.
    """

    def __init__(self, max_readers: int) -> None:
        self._max_readers = max_readers
        self._changed = threading.Condition()
        self._num_readers = 0
        self._exclusive = False
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the map open for the duration; raises `StoreError` when the store is closed."""
        with self._changed:
            while self._exclusive or self._num_readers >= self._max_readers:
                self._changed.wait()
            if self._closed:
                raise StoreError("the store is closed; open it again")
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, *, close: bool = False) -> Iterator[None]:
        """Keep readers out for the duration; with `close`, for ever after."""
        with self._changed:
            while self._exclusive:
                self._changed.wait()
            self._exclusive = True
            while self._num_readers:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._closed = self._closed or close
                self._changed.notify_all()
