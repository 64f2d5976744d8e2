"""A custom page store: a dictionary of pages, which evicts the least recently used page first.

An engine uses it as its disk tier: `build_engine(config, model, store=MemoryPageStore(1 << 30))`. Several engines may
share it, one after the other or concurrently, because page keys differ between models, layouts and tenants.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from hicache.storage.base import PageBuffer, StoreCorrupt, StoreError, StoreStats
from hicache.storage.codec import page_of_value, value_of_page


class MemoryPageStore:
    """A page store in memory, as `hicache.storage.base.PageStore` defines it. Any thread may call any method: one lock
    guards all state."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()  # ordered by use, the most recently used last
        self._num_bytes = self._hits = self._misses = self._puts = self._evicted = 0
        self._closed = False

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Empty: pages may have any size."""
        return ()

    def register_memory(self, memory: PageBuffer) -> None:
        """Do nothing: the store copies from and to any memory."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        with self._lock:
            self._require(keys)
            return [key in self._pages and time.monotonic() < deadline_s for key in keys]

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        with self._lock:
            self._require(keys, buffers)
            if time.monotonic() >= deadline_s:
                return [False] * len(keys)
            pages = [self._pages.get(key, b"") for key in keys]
            self._use(keys)
            ok = [len(page) == len(buffer) for page, buffer in zip(pages, buffers, strict=True)]
            self._hits += sum(ok)
            self._misses += len(ok) - sum(ok)
        for page, buffer, held in zip(pages, buffers, ok, strict=True):  # without the lock: bytes never change
            if held:
                buffer[:] = np.frombuffer(page, np.uint8)
        return ok

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._require(keys)
            self._use(keys)

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        keys = [key for key, _ in items]
        with self._lock:
            self._require(keys, [page for _, page in items], writable=False)
            if time.monotonic() >= deadline_s:
                return [False] * len(items)
            for key, page in items:
                if key not in self._pages:
                    self._pages[key] = page.tobytes()
                    self._num_bytes += len(page)
                    self._puts += 1
            self._use(keys)
            while self._num_bytes > self._budget_bytes:
                _, page_bytes = self._pages.popitem(last=False)
                self._num_bytes -= len(page_bytes)
                self._evicted += 1
            return [key in self._pages for key in keys]

    def get_value(self, key: bytes) -> bytes | None:
        with self._lock:
            self._require([key])
            page = self._pages.get(key)
        return None if page is None else value_of_page(key, np.frombuffer(page, np.uint8))

    def put_values(self, items: Sequence[tuple[bytes, bytes | memoryview]]) -> list[bool]:
        with self._lock:
            self._require([key for key, _ in items])
        pages = {key: page for key, value in items if (page := page_of_value(key, value)) is not None}
        stored = dict(zip(pages, self.put(list(pages.items())), strict=True))
        return [stored.get(key, False) for key, _ in items]

    def reopen(self) -> bool:
        with self._lock:
            self._require()
            return True

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._require(keys)
            removed = [page for page in (self._pages.pop(key, None) for key in keys) if page is not None]
            self._num_bytes -= sum(map(len, removed))
            return len(removed)

    def stats(self) -> StoreStats:
        return StoreStats(
            entries=len(self._pages),
            live_bytes=self._num_bytes,
            budget_bytes=self._budget_bytes,
            hits=self._hits,
            misses=self._misses,
            puts=self._puts,
            evicted=self._evicted,
        )

    def thread_read_errors(self) -> int:
        return 0

    def check(self) -> None:
        with self._lock:
            num_bytes = sum(map(len, self._pages.values()))
            if num_bytes != self._num_bytes:
                violations = [f"the pages have {num_bytes} bytes, {self._num_bytes} were counted"]
                raise StoreCorrupt("the store in memory has lost count", violations)

    def compact(self) -> int:
        return 0

    def sync(self) -> None:
        """Do nothing: the process loses all pages at its end."""

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _use(self, keys: Sequence[bytes]) -> None:
        """Move `keys` to the end of the order of use; the first key becomes the most recently used."""
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)

    def _require(
        self, keys: Sequence[bytes] = (), pages: Sequence[PageBuffer] | None = None, *, writable: bool = True
    ) -> None:
        """Raise `StoreError` unless the store is open, every key has 1 to 511 bytes, and each key has a page."""
        if self._closed:
            raise StoreError("the store is closed; make another")
        if not all(1 <= len(key) <= 511 for key in keys):
            raise StoreError("a key has 1 to 511 bytes")
        if pages is not None and len(pages) != len(keys):
            raise StoreError(f"{len(keys)} keys but {len(pages)} pages")
        for page in pages or ():
            if page.dtype != np.uint8 or page.ndim != 1 or not page.flags.c_contiguous:
                raise StoreError(f"a page is contiguous uint8 of one dimension, got {page.dtype} {list(page.shape)}")
            if writable and not page.flags.writeable:
                raise StoreError("a page is read into memory that can be written")
