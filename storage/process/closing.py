"""Waits at the end of a store process until stores are closed, and a limited time only for remote stores."""

from __future__ import annotations

import threading
import time

from hicache.storage.process.service import CLOSES_DISK, CLOSES_REMOTE, OPENS

_REMOTE_CLOSE_S = 5.0  # maximum time for opening and closing remote stores after the disk is closed


def wait_for_closing() -> bool:
    """Wait until the threads that open or close stores have ended, but at most `_REMOTE_CLOSE_S` for other threads than
    those that close a disk. Returns whether all have ended. If threads are left, the process must end by `os._exit`,
    because the interpreter would wait for them."""
    for thread in _threads(CLOSES_DISK):
        thread.join()
    until_s = time.monotonic() + _REMOTE_CLOSE_S
    for thread in _threads(CLOSES_REMOTE, OPENS):  # closing a disk starts such a thread
        thread.join(max(0.0, until_s - time.monotonic()))
    return not _threads(CLOSES_REMOTE, OPENS)


def _threads(*names: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in names]
