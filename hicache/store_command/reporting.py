"""What `hicache store` tells while it works: its progress, and what the store logged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from hicache.console import Step, progress
from hicache.serving.interrupt import CalmInterrupt


class LogCapture(logging.Handler):
    """Collects the warnings of the store, each once, so that an error stays one line and can name its cause."""

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
    """The points at which Ctrl-C takes effect, and a bar that shows them where it is `wanted`.

    `during` yields a function that is called after each step with the steps done and the steps in all (None: not
    known). The work between two calls is never interrupted.
    """

    def __init__(self, calm: CalmInterrupt, *, wanted: bool) -> None:
        self._calm = calm
        self._wanted = wanted

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[Step]:
        with progress(what, wanted=self._wanted) as show:

            def step(done: int, total: int | None) -> None:
                show(done, total)
                self._calm.check()

            yield step
        self._calm.check()
