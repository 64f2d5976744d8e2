"""Handles Ctrl-C between two steps of a loop, so that no step is interrupted."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Within the `with` block, the first Ctrl-C makes the next `check()` raise KeyboardInterrupt. A second Ctrl-C
    raises immediately.

    The block has an effect only in the main thread, because only this thread receives signals.
    """

    def __init__(self) -> None:
        self._interrupted = False
        self._is_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> DeferredInterrupt:
        if self._is_main_thread:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_main_thread:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise the deferred KeyboardInterrupt, if there is one."""
        if self._interrupted:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
