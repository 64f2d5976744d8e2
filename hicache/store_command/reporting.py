"""Output of `hicache store` while it works: progress, and warnings that the store logged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from hicache.console import Step, progress
from hicache.serving.interrupt import DeferredInterrupt


class LogCapture(logging.Handler):
    """Collects each different warning of the store once. So the warnings are not printed during the command, and an
    error message can name its cause in one line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._log = logging.getLogger("hicache.storage")

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() not in self.messages:
            self.messages.append(record.getMessage())

    def last(self, otherwise: str) -> str:
        return self.messages[-1] if self.messages else otherwise

    def __enter__(self) -> LogCapture:
        self._log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)


class Steps:
    """Progress display and interruption. Ctrl-C takes effect only between two steps.

    `during` yields a function. The caller calls it after each step with the number of steps done and the number of all
    steps, or None if this is unknown. With `is_shown`, `during` also shows a progress bar.
    """

    def __init__(self, interrupt: DeferredInterrupt, *, is_shown: bool) -> None:
        self._interrupt = interrupt
        self._is_shown = is_shown

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[Step]:
        with progress(what, is_shown=self._is_shown) as show:

            def step(done: int, total: int | None) -> None:
                show(done, total)
                self._interrupt.check()

            yield step
        self._interrupt.check()
