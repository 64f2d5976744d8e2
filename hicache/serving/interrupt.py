"""Ctrl-C between two steps instead of within one, so that what is under way is left in order.

May import the standard library alone.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class CalmInterrupt:
    """While it is entered, the first Ctrl-C is kept until `check()`; the second one is raised at once.

    Outside the main thread, which alone receives signals, it does nothing.
    """

    def __init__(self) -> None:
        self._asked = False
        self._owns = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> CalmInterrupt:
        if self._owns:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._owns:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was kept, if there is one."""
        if self._asked:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
