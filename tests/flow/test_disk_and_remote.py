"""A disk and a remote store of one engine: the engine asks both, and reads each page from the store that will finish
first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import hicache.build.store_tiers
import hicache.flow.reads
from disk_case import Clock, TroubledStore, failing, page_keys
from hicache import CacheEngine, Prefetch, build_engine
from hicache.tiers import DISK, REMOTE
from memory_store import MemoryPageStore
from prefetch_case import PAGE, PacedStore, settings, tokens_of
from toy_model import GEOMETRY, serve, settled, until_ready
from waiting import eventually

LONG = {"device_tokens": 1024, "max_context_len": 1024, "host_bytes": 400 * PAGE * 192}
NUM_PAGES, IN_FLIGHT, JOB_PAGES = 64, 2, 8


@contextmanager
def engine_over(disk: PacedStore | None, remote: PacedStore | None = None) -> Iterator[CacheEngine]:
    """Open an engine over stores. When the context ends, the stores release all reads."""
    with build_engine(settings(**LONG), GEOMETRY, store=disk, remote=remote) as engine:
        try:
            yield engine
        finally:
            for store in (disk, remote):
                if store is not None:
                    store.allow()


@contextmanager
def prefetch_from_both(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CacheEngine, list[PacedStore], Prefetch, np.ndarray]]:
    """An engine, a disk and a remote store that both have all pages of a prompt, a prefetch of this prompt, and its
    tokens. Each store has at most two jobs, and its first read is blocked. At the end the prompt is served."""
    monkeypatch.setattr(hicache.flow.reads, "_MAX_IN_FLIGHT", IN_FLIGHT)
    monkeypatch.setattr(hicache.build.store_tiers, "_REMOTE_READERS", 1)
    tokens, stores = tokens_of(1, NUM_PAGES * PAGE + 1), [PacedStore(clock), PacedStore(clock)]
    for pair in ((stores[0], None), (None, stores[1])):
        with engine_over(*pair) as engine:
            serve(engine, "fill", tokens)
            engine.flush()
    for store in stores:
        store.num_reads.clear()
        store.hold()
    with engine_over(*stores) as engine:
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        eventually(lambda: engine.poll() or all(store.held for store in stores))
        yield engine, stores, handle, tokens
        eventually(lambda: engine.poll() or handle.ended, engine.stats)
        assert handle.read_tokens == handle.found_tokens == NUM_PAGES * PAGE
        hit = serve(engine, "a", tokens).hit
        assert hit.disk + hit.remote == NUM_PAGES * PAGE
        for store in stores:
            store.allow()
        settled(engine)


def test_stores_of_equal_rate_read_about_half_each(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test always allows the store with fewer read pages to read. Then each page is read once, and the numbers of
    pages of the stores differ by at most the jobs in flight."""
    with prefetch_from_both(clock, monkeypatch) as (engine, stores, handle, _):
        assert engine.inspect.prefetcher is not None
        jobs = engine.inspect.prefetcher._jobs.reads.values()

        def is_settled() -> bool:
            """Whether each store holds a read or has no job."""
            engine.poll()
            stores_with_jobs = {job.store for job in jobs}
            return all(
                store.held or name not in stores_with_jobs for name, store in zip((DISK, REMOTE), stores, strict=True)
            )

        while not handle.ended:
            slower = min((store for store in stores if store.held), key=lambda store: sum(store.num_reads.values()))
            before = slower.num_ended
            slower.allow(1)
            eventually(lambda slower=slower, before=before: slower.num_ended > before)
            eventually(is_settled)
        counts = [sum(store.num_reads.values()) for store in stores]
        assert sum(counts) == NUM_PAGES
        assert abs(counts[0] - counts[1]) <= IN_FLIGHT * JOB_PAGES
        assert not {*stores[0].num_reads} & {*stores[1].num_reads}


def test_a_stalled_disk_is_left_to_the_remote_store(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk does not answer within the I/O timeout, the remote store reads the pages of its jobs."""
    with prefetch_from_both(clock, monkeypatch) as (engine, stores, _, _):
        stores[1].allow()
        eventually(lambda: engine.poll() or sum(stores[1].num_reads.values()) == NUM_PAGES - IN_FLIGHT * JOB_PAGES)
        assert engine.inspect.prefetcher is not None
        jobs = engine.inspect.prefetcher._jobs.reads.values()
        eventually(lambda: engine.poll() or {job.store for job in jobs} == {DISK})
        clock.now_s += 2e8
    assert sum(stores[1].num_reads.values()) == NUM_PAGES


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_a_page_that_one_store_cannot_read_is_read_from_the_other(
    which: int, fails: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a store fails, or lacks pages that it announced, the other store reads them, and no store is asked a second
    time."""
    with prefetch_from_both(clock, monkeypatch) as (engine, stores, _, tokens):
        if fails:
            stores[which].trouble = failing(OSError(5, "I/O error"), "get_into")
        else:
            stores[which].inner.delete(page_keys(engine, tokens))
        num_asked = [store.verbs("contains") for store in stores]
        for store in stores:
            store.allow()
    other = stores[1 - which]
    assert set(other.num_reads.values()) == {1}
    assert len(other.num_reads) == NUM_PAGES
    assert num_asked == [store.verbs("contains") for store in stores]


def test_the_remote_store_is_not_asked_for_a_short_prompt_on_disk(clock: Clock) -> None:
    """The remote store gets no question if the disk has all pages of a short prompt."""
    tokens, disk, remote = tokens_of(2), PacedStore(clock), TroubledStore(MemoryPageStore(1 << 30))
    with build_engine(settings(**LONG), GEOMETRY, store=disk, remote=remote) as engine:
        serve(engine, "fill", tokens)
        engine.flush()
    num_asked = remote.verbs("contains")
    with build_engine(settings(**LONG), GEOMETRY, store=disk, remote=remote) as engine:
        until_ready(engine, engine.prefetch("short", tokens, mode="wait_complete"))
        assert serve(engine, "short", tokens).hit.disk == 192
        settled(engine)
    assert remote.verbs("contains") == num_asked
