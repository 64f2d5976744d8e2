"""A lock that many readers hold at the same time, or one writer alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ReadWriteLock:
    """Any thread; not to be taken twice by one. Entering is reading. A writer that waits keeps new readers out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_written = False

    def __enter__(self) -> None:
        """No writer is inside as long as the block lasts."""
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
        """Nobody else is inside as long as the block lasts. False: readers have not left `within_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_written)
            self._is_written = True
            is_alone = self._changed.wait_for(lambda: not self._num_readers, within_s)
        try:
            yield is_alone
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()
