"""A lock for many short readers, or one thread that closes or replaces the memory map.

An LMDB buffer is an address in the map, and accessing it after the map is gone ends the process. So closing and
compacting wait until no reader is inside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hicache.storage.base import StoreError


class ReadWriteLock:
    """Shared by at most `max_readers` readers, or held exclusively; any thread, not reentrant.

    A waiting `exclusive` blocks new readers, so it cannot starve.
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
        """Hold the lock as a reader; raises `StoreError` when the store is closed."""
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
        """Wait until no reader is inside and keep readers out; with `close`, for ever after."""
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
