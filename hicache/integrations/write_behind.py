"""Writes to a store on another machine, by a thread of their own: a slow one does not hold up the disk before it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

import numpy as np

from hicache.integrations.forwarding_store import ForwardingStore
from hicache.storage import PageBuffer, PageStore, StoreError

log = logging.getLogger(__name__)

BUDGET_BYTES = 256 << 20
CLOSE_S = 10.0
_GROUP_BYTES = 64 << 20


class WriteBehind(ForwardingStore):
    """See `PageStore`; made to stand behind a disk in a `ChainStore`. `put` copies pages and returns, True where the
    copy fits the budget; a thread puts the copies into `store`, which this one closes. Until then only the disk has
    them: a copy is not read, for under its key the store may hold a page already, which stays.

    At most `budget_bytes` wait, one page if it is larger. `sync` and `close` wait for `close_s` seconds and for the put
    under way then. `dropped_pages` counts the pages beyond the budget, those that `store` did not take, and those that
    `close` gave up.
    """

    def __init__(self, store: PageStore, *, budget_bytes: int = BUDGET_BYTES, close_s: float = CLOSE_S) -> None:
        super().__init__(store)
        self._budget_bytes, self._close_s = budget_bytes, close_s
        self.dropped_pages = 0
        self._waiting: dict[bytes, PageBuffer] = {}  # oldest first
        self._putting: dict[bytes, PageBuffer] = {}
        self._held_bytes = 0  # of both
        self._closing = False
        self._changed = threading.Condition()  # guards all of the above
        self._writing = threading.Lock()  # the store has one writer at a time
        self._thread = threading.Thread(target=self._write_loop, name="hicache-write-behind", daemon=True)
        self._thread.start()

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        return [time.monotonic() < deadline_s and self._take(key, page) for key, page in items]

    def reopen(self) -> bool:
        """The thread does that before it writes."""
        return not self._store.stats().read_only

    def delete(self, keys: Sequence[bytes]) -> int:
        """Waits for a put of these pages that is under way."""
        with self._changed:
            dropped = [page for page in (self._waiting.pop(key, None) for key in keys) if page is not None]
            self._held_bytes -= sum(map(len, dropped))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._putting.keys().isdisjoint(keys))
        with self._writing:
            return max(len(dropped), self._store.delete(keys))

    def sync(self) -> None:
        self._drain()
        with self._writing:
            self._store.sync()

    def close(self) -> None:
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._drain()
        with self._changed:
            self.dropped_pages += len(self._waiting)
            self._waiting.clear()
        self._thread.join()
        if self.dropped_pages:
            log.warning("%d pages were not written to the remote store", self.dropped_pages)
        self._store.close()

    def _take(self, key: bytes, page: PageBuffer) -> bool:
        """Whether a copy of the page waits to be put."""
        with self._changed:
            if self._closing:
                raise StoreError("the store is closed")
            if key in self._waiting or key in self._putting:
                return True
            if self._held_bytes and self._held_bytes + len(page) > self._budget_bytes:
                if not self.dropped_pages:
                    log.warning("the remote store does not keep up: some pages are written to the disk alone")
                self.dropped_pages += 1
                return False
            self._held_bytes += len(page)
        copy = np.array(page)  # without the lock: only this thread adds pages
        with self._changed:
            self._waiting[key] = copy
            self._changed.notify_all()
        return True

    def _drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held_bytes, timeout=self._close_s)

    def _write_loop(self) -> None:
        while self._begin():
            with self._writing:
                failed = self._write([*self._putting.items()])
            with self._changed:
                self.dropped_pages += failed
                self._held_bytes -= sum(map(len, self._putting.values()))
                self._putting = {}
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait for pages and take those of the next put, oldest first; False when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            num_bytes = 0
            for key, page in self._waiting.items():
                if num_bytes and num_bytes + len(page) > _GROUP_BYTES:
                    break
                self._putting[key] = page
                num_bytes += len(page)
            for key in self._putting:
                del self._waiting[key]
            return bool(self._putting)

    def _write(self, items: Sequence[tuple[bytes, PageBuffer]]) -> int:
        """How many pages were not stored."""
        try:
            if self._store.stats().read_only and not self._store.reopen():
                return len(items)
            return self._store.put(items).count(False)
        except Exception:  # whatever it is, later pages are tried
            log.exception("%d pages were not written to the remote store", len(items))
            return len(items)
