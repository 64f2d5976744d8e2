"""Helpers of tests of the disk tier: a clock that tests set, and a real store that fails, waits or stalls on demand."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hicache.engine import CacheEngine
from hicache.storage import LmdbPageStore, PageBuffer, PageFormat, PageStore
from hicache.storage.process.health import Limits
from hicache.storage.process.settings import ServiceSettings
from hicache.stores.tier import StoreTier, open_given
from memory_store import MemoryPageStore
from waiting import BOUND_S, eventually

PAGE_BYTES = 4096
PATIENCE_S = BOUND_S


class Clock:
    """A clock whose seconds pass only when a test advances it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class TroubledStore:
    """A `PageStore` that passes calls on to `inner`. `trouble(verb)` runs before each call that reads or writes, and
    may raise or wait. If `loses(key, buffer)`, a read reports the page as missing and leaves wrong bytes in the buffer.
    `calls`: verb and keys of each call that reached `inner`; `lags`: the lags of its puts."""

    def __init__(self, inner: PageStore) -> None:
        self.inner = inner
        self.trouble: Callable[[str], object] = lambda verb: None
        self.loses: Callable[[bytes, PageBuffer], bool] = lambda key, buffer: False
        self.calls: list[tuple[str, tuple[bytes, ...]]] = []
        self.lags: list[float] = []

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        self._begin("contains", keys)
        return self.inner.contains(keys, deadline_s=deadline_s)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        self._begin("get_into", keys)
        ok = list(self.inner.get_into(keys, buffers, deadline_s=deadline_s))
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if self.loses(key, buffer):
                buffer[:], ok[index] = 0xA5, False
        return ok

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        self._begin("put", [key for key, _ in items])
        self.lags.append(lag)
        return self.inner.put(items, lag=lag, deadline_s=deadline_s)

    def reopen(self) -> bool:
        self._begin("reopen", ())
        return self.inner.reopen()

    def __getattr__(self, name: str) -> Any:
        """Pass on attributes that no fault affects."""
        return getattr(self.inner, name)

    def verbs(self, verb: str) -> int:
        return sum(name == verb for name, _ in self.calls)

    def _begin(self, verb: str, keys: Sequence[bytes]) -> None:
        self.trouble(verb)
        self.calls.append((verb, tuple(keys)))


class LossyStore(MemoryPageStore):
    """A store that announces the page `lost`, fails to verify it after it has filled the buffer, and then deletes
    it."""

    lost: bytes = b""

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        ok = super().get_into(keys, buffers, deadline_s=deadline_s)
        if self.lost in keys:
            self.delete([self.lost])
        return [arrived and key != self.lost for arrived, key in zip(ok, keys, strict=True)]


class Gate:
    """A `trouble` that blocks calls of some verbs until `open()`. `held`: the number of calls that have been
    blocked."""

    def __init__(self, *verbs: str) -> None:
        self._verbs, self._opened = verbs, threading.Event()
        self._came: list[str] = []  # a list, because several threads may append concurrently

    @property
    def held(self) -> int:
        return len(self._came)

    def __call__(self, verb: str) -> None:
        if verb in self._verbs:
            self._came.append(verb)
            assert self._opened.wait(BOUND_S)

    def open(self) -> None:
        self._opened.set()


def failing(error: Exception, *verbs: str) -> Callable[[str], None]:
    """A `trouble` that raises `error` for some verbs."""

    def trouble(verb: str) -> None:
        if verb in verbs:
            raise error

    return trouble


def started_tier(
    path: Path,
    keys: Sequence[bytes] = (),
    data: Sequence[np.ndarray] = (),
    *,
    clock: Callable[[], float] = time.monotonic,
    readers: int = 1,
    queue_jobs: int = 64,
    full_bytes: int = 1 << 40,
    detaches_reads: bool = False,
    name: str = "disk",
) -> tuple[StoreTier, TroubledStore]:
    """A tier over a troubled store of 4 KiB pages, which contains the pages `data`. The tier closes the store."""
    inner = LmdbPageStore(path, identity={"model": "toy"}, formats=[PageFormat(PAGE_BYTES)], budget_bytes=8 << 20)
    assert all(inner.put(list(zip(keys, data, strict=True))))
    store = TroubledStore(inner)
    limits = Limits(io_timeout_s=10, reopen_backoff_s=1, max_reopen_backoff_s=6)
    sizes = {"queue_jobs": queue_jobs, "full_bytes": full_bytes, "part_bytes": 2 * PAGE_BYTES}
    settings = ServiceSettings(readers=readers, detaches_reads=detaches_reads, name=name, limits=limits, **sizes)
    return open_given(store, settings, clock=clock, owns_store=True), store


def pages(seed: int, count: int) -> tuple[tuple[bytes, ...], tuple[np.ndarray, ...]]:
    """Random keys and pages; no other seed has the same pages."""
    rng = np.random.default_rng(seed)
    keys = tuple(rng.bytes(32) for _ in range(count))
    return keys, tuple(rng.integers(0, 256, PAGE_BYTES, dtype=np.uint8) for _ in range(count))


def blank(count: int) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(PAGE_BYTES, np.uint8) for _ in range(count))


def wait_for_reads(disk: StoreTier, count: int) -> list:
    """Wait for the next `count` outcomes of reads, and return them."""
    return _wait_for(disk.reads.poll, count)


def wait_for_writes(disk: StoreTier, count: int) -> list:
    """Wait for the next `count` outcomes of writes, and return them."""
    return _wait_for(disk.writes.poll, count)


def _wait_for(poll: Callable[[], list], count: int) -> list:
    found: list = []
    eventually(lambda: found.extend(poll()) or len(found) >= count, lambda: found)
    assert len(found) == count, found
    return found


def disk_threads() -> list[str]:
    """Names of the running threads of all disk tiers, without threads that belong to a store itself."""
    return _threads(("hicache-disk-reads", "hicache-disk-writes"))


def serving_threads() -> list[str]:
    """Names of the running threads that serve, open and close stores."""
    return _threads(("hicache-store",))


def _threads(prefixes: tuple[str, ...]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefixes)]


def page_keys(engine: CacheEngine, tokens: np.ndarray) -> list[bytes]:
    """The keys of the complete pages of a prompt."""
    tree = engine.inspect.context.tree
    return tree.prompt_keys(tree.match(tokens), tokens)


def num_held(disk: StoreTier, keys: Sequence[bytes], wait_s: float) -> int | None:
    """How many of `keys`, counted from the first on, the disk holds; None if the disk did not answer within
    `wait_s`."""
    found = disk.find(keys, wait_s)
    return None if found is None else found.num_pages
