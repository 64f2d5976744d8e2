"""A page store in memory for benchmarks. Its rate can be set, and it can hang.

Reads sleep in the threads of the tier that reads, so they take no time of the engine's thread. The store keeps the keys
of all pages, but the bytes of only one page, which it returns for every key. So a benchmark can read prompts that were
never computed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from hicache.storage import PageBuffer
from hicache.storage.base import StoreStats

# Sleeps end late; later sleeps compensate up to _LATE_S. Sleeps below _AHEAD_S are skipped, because they would end too
# late by more than their length.
_LATE_S, _AHEAD_S = 0.01, 0.002


class ThrottledStore:
    """Implements `hicache.storage.base.PageStore`. Any thread may call any method.

    `bytes_per_s`: total rate of all threads. `keeps`: whether the store keeps the keys of written pages. If so, writing
    takes as long as reading; otherwise the store drops written pages.
    """

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self.keeps = False
        self._keys = set[bytes]()
        self._page = np.zeros(0, np.uint8)
        self._lock = threading.Lock()
        self._is_running = threading.Event()
        self._free_at_s = 0.0
        self._left_bytes = math.inf
        self._is_running.set()

    def fill(self, keys: Iterable[bytes]) -> None:
        """Replace the store's keys by `keys`."""
        self._keys = {*keys}

    def stop_after(self, num_bytes: float) -> None:
        """Make reads and writes hang after `num_bytes` more bytes, until `go_on` is called."""
        with self._lock:
            self._left_bytes = num_bytes

    def go_on(self) -> None:
        with self._lock:
            self._left_bytes = math.inf
            self._is_running.set()

    @property
    def page_bytes(self) -> int:
        """The bytes of a page; 0 before the first page is written."""
        return self._page.nbytes

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return ()

    def register_memory(self, memory: PageBuffer) -> None:
        """Do nothing, because this store copies from and to any memory."""

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
        """Do nothing, because this store never evicts."""

    def get_value(self, key: bytes) -> bytes | None:
        """Return None, because pages of this store are not copied to other stores."""
        return None

    def put_values(self, items: Sequence[tuple[bytes, bytes | memoryview]]) -> list[bool]:
        return [False] * len(items)

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
        """Do nothing, because no page survives the process."""

    def check(self) -> None:
        """Do nothing, because this store has no counters to check."""

    def compact(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing, so that another engine can use the pages."""

    def _pace(self, num_bytes: int) -> None:
        """Sleep until `num_bytes` would be transferred at `bytes_per_s`, after the earlier transfers of all threads."""
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s - _LATE_S) + num_bytes / self.bytes_per_s
            wait_s = self._free_at_s - now_s
            self._left_bytes -= num_bytes
            if self._left_bytes < 0:
                self._is_running.clear()
        if wait_s > _AHEAD_S:
            time.sleep(wait_s)
        self._is_running.wait()
