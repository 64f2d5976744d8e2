"""Records which process owns an object with threads or files. This module imports only errors."""

from __future__ import annotations

import os

from hicache.errors import NotRunning


class OwnerProcess:
    """Records the process that creates it. A forked process shares the files of its parent but has none of the parent's
    threads. If the forked process closed an object with files, the object would be closed for the parent too. Therefore
    a forked process closes nothing, and every use of the object there raises."""

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
                f"{self._what} belongs to process {self.pid}, an ancestor of this one; open another after the fork"
            )
