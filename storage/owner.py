"""Records which process owns an object with threads or files. Imports only errors."""

from __future__ import annotations

import os

from hicache.errors import NotRunning


class OwnerProcess:
    """Records the process that creates it. A forked process shares the files of its parent but has none of the parent's
    threads. If the forked process closed such an object, the object would be closed for the parent too. Therefore
    nothing is closed in a forked process, and every use raises."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return self.pid == os.getpid()

    def require_here(self) -> None:
        """Raise NotRunning in a forked process."""
        if self.pid != os.getpid():
            raise NotRunning(
                f"{self._what} belongs to process {self.pid}, of which this is a fork; open another after the fork"
            )
