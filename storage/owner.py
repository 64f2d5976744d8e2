"""The process that an object with threads or files belongs to. Imports errors alone."""

from __future__ import annotations

import os

from hicache.errors import NotRunning


class OwnerProcess:
    """The process that makes this record. A fork of it has no thread of its parent, and every file of it: what ends the
    object there would end it here. So in a fork nothing is closed or finished, and every use is refused."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return self._pid == os.getpid()

    def require_here(self) -> None:
        """NotRunning in a fork."""
        if self._pid != os.getpid():
            raise NotRunning(
                f"{self._what} belongs to process {self._pid}, of which this is a fork; open another after the fork"
            )
