"""The page store alone, as fast as a plug-in over it can be. A helper of the integrations bench."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hicache.bench.common import BenchUnavailable
from hicache.storage import LmdbPageStore, PageBuffer, PageFilter, PageFormat

READERS, WARMUP = 4, 2
_PART = 8  # pages of a read, as our plug-ins read


class BareStore:
    """One `put` of all pages, and `get_into` on as many threads as the plug-ins have."""

    def __init__(self, path: Path, page_bytes: int) -> None:
        formats = [PageFormat(page_bytes, PageFilter("byte_shuffle", 2))]
        self._store = LmdbPageStore(path, identity={"model": "bench"}, formats=formats, budget_bytes=8 << 30)
        self._threads = ThreadPoolExecutor(READERS)

    def round(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], into: Sequence[PageBuffer]) -> dict[str, float]:
        """Seconds of a store and a load."""
        begin_s = time.perf_counter()
        stored = self._store.put(list(zip(keys, pages, strict=True)))
        put_s = time.perf_counter() - begin_s

        def read(start: int) -> list[bool]:
            part = slice(start, start + _PART)
            return self._store.get_into(keys[part], into[part])

        begin_s = time.perf_counter()
        found = [ok for part in self._threads.map(read, range(0, len(keys), _PART)) for ok in part]
        get_s = time.perf_counter() - begin_s
        require_round_trip(stored + found, pages, into)
        return {"store": put_s, "load": get_s}

    def close(self) -> None:
        self._threads.shutdown()
        self._store.close()


def require_round_trip(answers: Sequence[bool], stored: Sequence[PageBuffer], loaded: Sequence[PageBuffer]) -> None:
    if not all(answers):
        raise BenchUnavailable(f"{list(answers).count(False)} of {len(answers)} pages were not stored or not loaded")
    if not all(map(np.array_equal, stored, loaded)):
        raise AssertionError("other bytes came back than were stored")
