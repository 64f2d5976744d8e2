"""A page store in memory that is as fast as it is told to be, and stands still when it is told to.

A helper of benchmarks. Reads sleep in the threads of the tier that reads, so they cost the engine nothing. Of all pages
it keeps the keys, and of one the bytes, which it gives for each: what pages hold costs no time, and prompts that nobody
has computed can be read.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from hicache.storage import PageBuffer
from hicache.storage.base import StoreStats

# Sleeps are late, which is made up for; short ones would be late by more than they take.
_LATE_S, _AHEAD_S = 0.01, 0.002


class ThrottledStore:
    """See `hicache.storage.base.PageStore`. Any thread may call any method.

    `bytes_per_s`: of all readers together. `keeps`: whether it has from then on what is written, which takes as long as
    reading it; else that is forgotten at once.
    """

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self.keeps = False
        self._keys = set[bytes]()
        self._page = np.zeros(0, np.uint8)
        self._lock = threading.Lock()
        self._goes = threading.Event()
        self._free_at_s = 0.0
        self._left_bytes = math.inf
        self._goes.set()

    def fill(self, keys: Iterable[bytes]) -> None:
        """Have these alone."""
        self._keys = {*keys}

    def stop_after(self, num_bytes: float) -> None:
        """Bring so many bytes more, and nothing until `go_on`."""
        with self._lock:
            self._left_bytes = num_bytes

    def go_on(self) -> None:
        with self._lock:
            self._left_bytes = math.inf
            self._goes.set()

    @property
    def page_bytes(self) -> int:
        """Of one page; 0 before the first was written."""
        return self._page.nbytes

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return ()

    def register_memory(self, memory: PageBuffer) -> None:
        """Copies from and to any memory."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        return [key in self._keys for key in keys]

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        found = []
        for key, buffer in zip(keys, buffers, strict=True):
            found.append(key in self._keys and self._page.nbytes == buffer.nbytes)
            if found[-1]:
                buffer[:] = self._page
                self._pace(buffer.nbytes)
        return found

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        for key, page in items:
            if not self._page.nbytes:
                self._page = page.copy()
            if self.keeps:
                self._pace(page.nbytes)
                self._keys.add(key)
        return [True] * len(items)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Nothing leaves."""

    def reopen(self) -> bool:
        return True

    def delete(self, keys: Sequence[bytes]) -> int:
        known = self._keys.intersection(keys)
        self._keys -= known
        return len(known)

    def stats(self) -> StoreStats:
        num_bytes = len(self._keys) * self.page_bytes
        return StoreStats(entries=len(self._keys), live_bytes=num_bytes, budget_bytes=1 << 50)

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
