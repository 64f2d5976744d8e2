"""The output of `hicache store` while it works: a progress bar on a terminal, and what the store logged.

Without the package rich there is no bar.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

from hicache.serving.interrupt import CalmInterrupt
from hicache.terminal import printable

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
except ImportError:
    _has_rich = False
else:
    _has_rich = True

Step: TypeAlias = Callable[[int, int | None], None]


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


class ProgressBars:
    """Progress on stderr, and the points at which Ctrl-C takes effect.

    `during` yields a function that is called after each step with the steps done and the steps in all (None: not
    known). The work between two calls is never interrupted.
    """

    def __init__(self, calm: CalmInterrupt, *, wanted: bool) -> None:
        self._calm = calm
        self._shown = wanted and _has_rich and sys.stderr is not None and sys.stderr.isatty()

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[Step]:
        if not self._shown:
            yield lambda done, total: self._calm.check()
        else:
            parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            with Progress(*parts, console=Console(stderr=True), transient=True) as progress:
                task = progress.add_task(what, total=None)

                def step(done: int, total: int | None) -> None:
                    progress.update(task, completed=done, total=total)
                    self._calm.check()

                yield step
        self._calm.check()


def columns(rows: list[tuple[str, object]]) -> str:
    """Names and values, one per line, without control characters."""
    shown = [(printable(name), printable(str(value))) for name, value in rows]
    width = max(len(name) for name, _ in shown) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in shown)
