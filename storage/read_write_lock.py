"""A lock for concurrent readers and exclusive writers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ReadWriteLock:
    """A context manager that locks for reading; `writing` locks for writing. Not reentrant; any thread. New readers
    wait while a writer waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_written = False

    def __enter__(self) -> None:
        """Lock for reading. No thread can lock for writing until the `with` block ends."""
        with self._changed:
            while self._is_written:
                self._changed.wait()
            self._num_readers += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._num_readers -= 1
            if self._is_written:
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self, within_s: float | None = None) -> Iterator[bool]:
        """Lock for writing until the `with` block ends. Yields False if threads still hold the lock for reading after
        `within_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_written)
            self._is_written = True
            is_exclusive = self._changed.wait_for(lambda: not self._num_readers, within_s)
        try:
            yield is_exclusive
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()
