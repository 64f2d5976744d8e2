"""Argument checks and counters of calls, shared by the embedded store and the remote stores."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from hicache.storage.base import PageBuffer, StoreError, StoreStats
from hicache.storage.slot_file import MAX_KEY_BYTES


class _ThreadCounts(threading.local):
    read_errors = 0


class Counters:
    """The fields of `StoreStats` that are counters, by name. Any thread may update them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = Counter()
        self._of_thread = _ThreadCounts()

    @property
    def now(self) -> StoreStats:
        """Return a `StoreStats` with the counters; its other fields are zero."""
        with self._lock:
            return StoreStats(**self._counts)

    @property
    def thread_read_errors(self) -> int:
        """Return the number of `read_errors` that the calling thread added."""
        return self._of_thread.read_errors

    def add(self, *, read_errors: int = 0, **more: int) -> None:
        self._of_thread.read_errors += read_errors
        with self._lock:
            self._counts["read_errors"] += read_errors
            for name, count in more.items():
                self._counts[name] += count


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise `StoreError` unless every key has 1 to 511 bytes."""
    for key in keys:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise StoreError(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(key)}")


def check_pages(
    keys: Sequence[bytes], pages: Sequence[PageBuffer], page_sizes: Collection[int], *, writeable: bool
) -> None:
    """Raise `StoreError` unless each key has a page that is contiguous uint8 of one of `page_sizes`, in bytes."""
    check_keys(keys)
    if len(keys) != len(pages):
        raise StoreError(f"{len(keys)} keys but {len(pages)} buffers")
    for page in pages:
        fits = page.dtype == np.uint8 and page.ndim == 1 and len(page) in page_sizes and page.flags.c_contiguous
        if not fits or (writeable and not page.flags.writeable):
            kind = "writable contiguous" if writeable else "contiguous"
            sizes = " or ".join(map(str, page_sizes))
            raise StoreError(f"a page is {kind} uint8 [{sizes}], got {page.dtype} {list(page.shape)}")
