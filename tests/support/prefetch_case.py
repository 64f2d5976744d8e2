"""Helpers for prefetches: a clock that only the test advances, and a reader that reads only when the test allows it."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from disk_case import Clock, TroubledStore
from hicache import AdvancedConfig, CacheEngine, EngineConfig, Prefetch, build_engine
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config, prompt, serve, settled, until_ready
from waiting import BOUND_S, eventually

PAGE = 8
SLOW, FAST = 1000.0, 0.001  # seconds of a call that reads two pages


class PacedStore(TroubledStore):
    """A store in memory whose reads wait until the test allows them. A read of two pages, the largest of a disk, takes
    `read_s` of the clock; other reads take time in proportion to their pages.

    `held`: number of waiting reads; `num_ended`: number of reads that have ended; `num_reads`: how often each page was
    read; `sizes`: pages of each read.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(MemoryPageStore(1 << 30))
        self.clock, self.read_s, self.held, self.num_ended = clock, 0.0, 0, 0
        self.num_reads: Counter[bytes] = Counter()
        self.sizes: list[int] = []
        self._allowed = threading.Semaphore(1 << 30)

    def hold(self) -> None:
        """Block all reads from now on until `allow` permits them."""
        self._allowed = threading.Semaphore(0)

    def allow(self, num_reads: int = 1 << 10) -> None:
        self._allowed.release(num_reads)

    def get_into(self, keys, buffers, *, deadline_s=math.inf):  # type: ignore[no-untyped-def]
        self.sizes.append(len(keys))
        self.held += 1
        assert self._allowed.acquire(timeout=BOUND_S)
        self.held -= 1
        self.clock.now_s += self.read_s * len(keys) / 2
        try:
            ok = super().get_into(keys, buffers, deadline_s=deadline_s)
            self.num_reads.update(key for key, verified in zip(keys, ok, strict=True) if verified)
        finally:
            self.num_ended += 1
        return ok


def tokens_of(seed: int, length: int = 193) -> np.ndarray:
    """A prompt of 24 complete pages, which three jobs read."""
    return prompt(seed, length)


def settings(**changes: object) -> EngineConfig:
    """Settings with capacity for several such prompts on every tier, and with one reader."""
    advanced = AdvancedConfig(transfer_chunk_tokens=16, disk_reader_threads=1, disk_io_timeout_s=1e8)
    values = {"device_tokens": 640, "host_bytes": 200 * PAGE * 192, "advanced": advanced}
    return config(**{**values, **changes})


@contextmanager
def engine_of(store: PacedStore, **changes: object) -> Iterator[CacheEngine]:
    """Open an engine over the store. When the context ends, the store releases all reads."""
    with build_engine(settings(**changes), GEOMETRY, store=store) as engine:
        try:
            yield engine
        finally:
            store.allow()


def fill(store: PacedStore, *prompts: np.ndarray) -> None:
    """Store the pages of some prompts through an engine that ends."""
    with engine_of(store) as engine:
        for n, tokens in enumerate(prompts):
            serve(engine, f"f{n}", tokens)
            engine.flush()
    store.num_reads.clear()


def until_found(engine: CacheEngine, store: PacedStore, *handles: Prefetch) -> None:
    """Poll until the store has reported its pages for these prefetches, and the first read is blocked."""
    eventually(
        lambda: engine.poll() or (all(handle.found_tokens for handle in handles) and store.held == 1), engine.stats
    )


def until_landed(engine: CacheEngine, handle: Prefetch, num_tokens: int) -> None:
    eventually(lambda: engine.poll() or handle.read_tokens == num_tokens, engine.stats)


def measure_disk(engine: CacheEngine, store: PacedStore, tokens: np.ndarray, read_s: float) -> None:
    """Measure the time of reads with a prefetch that runs to its end."""
    store.read_s = read_s
    until_ready(engine, engine.prefetch("measure", tokens, mode="wait_complete"))
    engine.cancel("measure")


@contextmanager
def pending_prefetch(
    store: PacedStore, *, read_s: float, overlaps: bool = False
) -> Iterator[tuple[CacheEngine, Prefetch, np.ndarray]]:
    """An engine that computes a token in 1 s and has measured reads of `read_s`; a pending prefetch of request "a"; and
    the tokens of its prompt. The store has the pages and reads them when the test allows it."""
    one, two = tokens_of(1), tokens_of(2)
    fill(store, one, two)
    with engine_of(store) as engine:
        engine.observe_prefill(100, 100.0)
        measure_disk(engine, store, one, read_s)
        store.hold()
        assert engine.inspect.prefetcher is not None
        engine.inspect.prefetcher.least_overlap_pages = 8
        yield engine, engine.prefetch("a", two, overlaps=overlaps), two


def tokens_from_disk(engine: CacheEngine, name: str, tokens: np.ndarray) -> int:
    """Serve a request and compare every byte that it reuses. Returns the number of its tokens that came from disk."""
    hit = serve(engine, name, tokens).hit
    settled(engine)
    assert engine.inspect.prefetcher is not None and not engine.inspect.prefetcher.is_busy()
    assert engine.stats()["host.free_pages"] + engine.stats()["host.evictable_tokens"] / PAGE == 199
    return hit.disk
