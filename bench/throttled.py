"""A page store in memory that is as fast as it is told to be, and stands still when it is told to.

A helper of benchmarks. Reads sleep in the threads of the tier that reads, so they cost the engine nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from hicache.storage import PageBuffer
from hicache.storage.base import StoreStats

_LATE_S, _AHEAD_S = (
    0.01,
    0.002,
)  # sleeps are late, which is made up for; short ones would be late by more than they take


class ThrottledStore:
    """See `hicache.storage.base.PageStore`. Any thread may call any method.

    `bytes_per_s`: of all readers together. `keeps`: whether it takes what is written; else that is forgotten.
    """

    def __init__(self) -> None:
        self.bytes_per_s, self.keeps = math.inf, True
        self._pages: dict[bytes, PageBuffer] = {}
        self._lock, self._goes = threading.Lock(), threading.Event()
        self._free_at_s, self._left_bytes = 0.0, math.inf
        self._goes.set()

    def stop_after(self, num_bytes: float) -> None:
        """Bring so many bytes more, and nothing until `go_on`."""
        with self._lock:
            self._left_bytes = num_bytes

    def go_on(self) -> None:
        with self._lock:
            self._left_bytes = math.inf
            self._goes.set()

    @property
    def num_bytes(self) -> int:
        """Of all pages."""
        return sum(page.nbytes for page in self._pages.values())

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return ()

    def register_memory(self, memory: PageBuffer) -> None:
        """Copies from and to any memory."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        return [key in self._pages for key in keys]

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        found = []
        for key, buffer in zip(keys, buffers, strict=True):
            page = self._pages.get(key)
            found.append(page is not None and page.nbytes == buffer.nbytes)
            if page is not None and found[-1]:
                buffer[:] = page
                self._pace(page.nbytes)
        return found

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        if self.keeps:
            self._pages.update((key, page.copy()) for key, page in items if key not in self._pages)
        return [True] * len(items)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Nothing leaves."""

    def reopen(self) -> bool:
        return True

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self._pages.pop(key, None) is not None for key in keys)

    def stats(self) -> StoreStats:
        return StoreStats(entries=len(self._pages), live_bytes=self.num_bytes, budget_bytes=1 << 50)

    def thread_read_errors(self) -> int:
        return 0

    def sync(self) -> None:
        """Nothing of it survives."""

    def check(self) -> None:
        """There is nothing to lose count of."""

    def compact(self) -> int:
        return 0

    def close(self) -> None:
        """The pages stay, for another engine."""

    def _pace(self, num_bytes: int) -> None:
        """Return when so many bytes have come at the rate, behind those of other threads."""
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s - _LATE_S) + num_bytes / self.bytes_per_s
            wait_s = self._free_at_s - now_s
            self._left_bytes -= num_bytes
            if self._left_bytes < 0:
                self._goes.clear()
        if wait_s > _AHEAD_S:
            time.sleep(wait_s)
        self._goes.wait()
