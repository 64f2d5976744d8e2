"""What tests of the disk tier share: a clock that they set, and a real store that fails, waits or stalls on demand."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hicache.disk import DiskTier, Limits
from hicache.engine import CacheEngine
from hicache.storage import LmdbPageStore, PageBuffer, PageFormat, PageStore, StoreStats

PAGE_BYTES = 4096
PATIENCE_S = 20.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class TroubledStore:
    """Passes everything on to `inner`. `trouble(verb)` runs before each call and may raise or wait; `calls` lists
    what got through: the verb and its keys, of puts the lag too."""

    def __init__(self, inner: PageStore) -> None:
        self.inner = inner
        self.trouble: Callable[[str], object] = lambda verb: None
        self.calls: list[tuple[str, tuple[bytes, ...]]] = []
        self.lags: list[float] = []

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return self.inner.page_sizes

    def register_memory(self, memory: PageBuffer) -> None:
        self.inner.register_memory(memory)

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        self._begin("contains", keys)
        return self.inner.contains(keys, deadline_s=deadline_s)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        self._begin("get_into", keys)
        return self.inner.get_into(keys, buffers, deadline_s=deadline_s)

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        self._begin("put", [key for key, _ in items])
        self.lags.append(lag)
        return self.inner.put(items, lag=lag, deadline_s=deadline_s)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.inner.touch(keys)

    def reopen(self) -> bool:
        self._begin("reopen", ())
        return self.inner.reopen()

    def delete(self, keys: Sequence[bytes]) -> int:
        return self.inner.delete(keys)

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def thread_read_errors(self) -> int:
        return self.inner.thread_read_errors()

    def check(self) -> None:
        self.inner.check()

    def compact(self) -> int:
        return self.inner.compact()

    def sync(self) -> None:
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()

    def verbs(self, verb: str) -> int:
        return sum(name == verb for name, _ in self.calls)

    def _begin(self, verb: str, keys: Sequence[bytes]) -> None:
        self.trouble(verb)
        self.calls.append((verb, tuple(keys)))


class Gate:
    """Trouble that holds calls of some verbs until `open()`. `held`: calls that came to it."""

    def __init__(self, *verbs: str) -> None:
        self._verbs, self._opened = verbs, threading.Event()
        self.held = 0

    def __call__(self, verb: str) -> None:
        if verb in self._verbs:
            self.held += 1
            assert self._opened.wait(60)

    def open(self) -> None:
        self._opened.set()


def failing(error: Exception, *verbs: str) -> Callable[[str], None]:
    """Trouble that raises for some verbs."""

    def trouble(verb: str) -> None:
        if verb in verbs:
            raise error

    return trouble


def troubled_tier(
    path: Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    readers: int = 1,
    queue_jobs: int = 64,
    full_bytes: int = 1 << 40,
    close_s: float = 30.0,
) -> tuple[DiskTier, TroubledStore]:
    """A tier over a troubled store of 4 KiB pages; start it before use."""
    inner = LmdbPageStore(path, identity={"model": "toy"}, formats=[PageFormat(PAGE_BYTES)], budget_bytes=8 << 20)
    store = TroubledStore(inner)
    limits = Limits(io_timeout_s=10, reopen_backoff_s=1, max_reopen_backoff_s=6, close_s=close_s)
    tier = DiskTier(store, readers=readers, queue_jobs=queue_jobs, full_bytes=full_bytes, limits=limits, clock=clock)
    return tier, store


def pages(seed: int, count: int) -> tuple[tuple[bytes, ...], tuple[np.ndarray, ...]]:
    """Keys, and pages that no other seed has."""
    rng = np.random.default_rng(seed)
    keys = tuple(rng.bytes(32) for _ in range(count))
    return keys, tuple(rng.integers(0, 256, PAGE_BYTES, dtype=np.uint8) for _ in range(count))


def blank(count: int) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(PAGE_BYTES, np.uint8) for _ in range(count))


def take_reads(disk: DiskTier) -> list:
    return disk.reads.poll()


def take_writes(disk: DiskTier) -> list:
    return disk.writes.poll()


def wait_for_reads(disk: DiskTier, count: int) -> list:
    """The next `count` outcomes of reads."""
    return _wait_for(lambda: take_reads(disk), count)


def wait_for_writes(disk: DiskTier, count: int) -> list:
    """The next `count` outcomes of writes."""
    return _wait_for(lambda: take_writes(disk), count)


def _wait_for(take: Callable[[], list], count: int) -> list:
    found: list = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline_s:
        found.extend(take())
    assert len(found) == count, found
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


def disk_threads() -> list[str]:
    """Names of the threads of any disk tier that are alive; a store may have its own."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("hicache-disk-reads", "hicache-disk-writes"))]


def page_keys(engine: CacheEngine, tokens: np.ndarray, namespace: str = "") -> list[bytes]:
    """The keys of the whole pages of a prompt."""
    tree = engine.inspect.context.tree
    return tree.names.of_prompt(tree.match(tokens, namespace), tokens)


def num_held(disk: DiskTier, keys: Sequence[bytes], wait_s: float) -> int | None:
    """How many of `keys`, from the first on, the disk holds; None where it did not answer in time."""
    found = disk.find(keys, wait_s)
    return None if found is None else found.num_pages
