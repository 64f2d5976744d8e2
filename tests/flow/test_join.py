"""`CacheEngine.join`, as a caller with a scheduler of its own uses it."""

from __future__ import annotations

import pytest

from hicache import CacheRequest
from prefetch_case import PAGE, PacedStore, asked, engine_of, fill, tokens_of, until_found
from toy_model import compute, expected_kv, read, serve, settled
from waiting import eventually


def test_what_has_come_is_loaded_behind_what_is_computed(store: PacedStore) -> None:
    """A request that is alone is ready at once. Behind two computed pages it finds all others, byte for byte; leaving
    the `with` of the first lease ends the one that took its place."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        assert engine.inspect.prefetcher is not None
        engine.inspect.prefetcher.beside.least_pages = 8
        store.hold()
        handle = engine.prefetch("a", tokens, joins=True)
        eventually(lambda: engine.poll() or handle.ready)
        with engine.acquire(CacheRequest("a", tokens)) as first:
            assert not handle.ended and engine.join(first, 0) is first
            end = engine.next_stop(first, 0, 2 * PAGE)
            assert first.cached_len == 0 and end == 2 * PAGE
            compute(engine, first, tokens, 0, end)
            engine.commit(first, tokens[:end])
            store.allow()
            eventually(lambda: engine.poll() or handle.ended)
            lease = engine.join(first, end)
            assert first.released and lease.cached_len == 192 and engine.join(lease, 192) is lease
            assert (read(engine, lease, 192) == expected_kv(tokens[:192])).all()
            engine.check()
        assert lease.released and lease.hit.device == 2 * PAGE
        settled(engine)
        assert engine.stats()["prefetch.beside_loaded_ratio"] == 22 / 24


@pytest.mark.parametrize(("read_s", "waits"), [(2.0, True), (4.0, False)])
def test_a_store_that_is_much_faster_is_waited_for(read_s: float, *, waits: bool, store: PacedStore) -> None:
    """A request computes meanwhile where that is a sixth of the way at least: 12 reads of 4 s come beside 192 s of
    computing. Who waits does so until as little has come for as long."""
    with asked(store, read_s, joins=True) as (engine, handle, _):
        until_found(engine, store, handle)
        assert handle.ready == handle.yields == (not waits)
        store.clock.now_s += 38.0
        engine.poll()
        assert handle.ready == (not waits)
        store.clock.now_s += 2.0
        engine.poll()
        assert handle.ready and handle.yields


def test_what_comes_in_a_long_step_was_asked_for_before(store: PacedStore) -> None:
    """A pass on a CPU lets nobody poll: the store has work for as long as the last step took."""
    tokens = tokens_of(1, 70 * PAGE + 1)
    with engine_of(store, max_context_len=600) as engine:
        serve(engine, "fill", tokens)
        engine.flush()
        engine.reset()
        store.hold()
        handle = engine.prefetch("a", tokens, joins=True)
        eventually(lambda: engine.poll() or handle.ready)
        with engine.acquire(CacheRequest("a", tokens)):
            store.clock.now_s += 1.0
            engine.poll()
            store.allow()
            eventually(lambda: sum(store.landed.values()) == 70)
