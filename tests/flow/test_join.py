"""`CacheEngine.join`, called as by an engine with its own scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from component_case import STATES, prefill
from component_case import config as config_with_states
from disk_case import page_keys
from hicache import CacheEngine, CacheRequest, Hit, Lease, Prefetch, build_engine
from hicache.pages.key import PageHasher
from hicache.tiers import MAMBA
from prefetch_case import PAGE, PacedStore, engine_of, fill, pending_prefetch, tokens_of, until_found
from toy_model import compute, expected_kv, read, serve, settled
from waiting import eventually


@contextmanager
def computing(
    store: PacedStore, tokens: np.ndarray, **changes: object
) -> Iterator[tuple[CacheEngine, Prefetch, Lease]]:
    """An engine over the store, which holds its reads, and a request with two computed pages that are not yet
    committed."""
    with engine_of(store, **changes) as engine:
        assert engine.inspect.prefetcher is not None
        engine.inspect.prefetcher.least_overlap_pages = 8
        store.hold()
        handle = engine.prefetch("a", tokens, overlaps=True)
        eventually(lambda: engine.poll() or handle.ready)
        lease = engine.acquire(CacheRequest("a", tokens))
        assert lease.cached_len == 0 and engine.next_stop(lease, 0, 2 * PAGE) == 2 * PAGE
        compute(engine, lease, tokens, 0, 2 * PAGE)
        yield engine, handle, lease


def test_read_pages_are_loaded_after_computed_ones(store: PacedStore) -> None:
    """A request without other requests is ready at once. After two computed pages the request joins all other pages of
    its prompt, byte for byte, and keeps its row."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with computing(store, tokens) as (engine, handle, lease):
        with lease:
            row = lease.row
            assert not handle.ended and engine.join(lease, 0) == Hit()
            engine.commit(lease, tokens[: 2 * PAGE])
            store.allow()
            eventually(lambda: engine.poll() or handle.ended)
            assert engine.join(lease, 2 * PAGE) == lease.hit == Hit(disk=22 * PAGE)
            assert lease.row == row and lease.cached_len == 192 and engine.join(lease, 192) == Hit()
            assert (read(engine, lease, 192) == expected_kv(tokens[:192])).all()
            engine.check()
        settled(engine)
        assert engine.stats()["prefetch.overlap_loaded_ratio"] == 22 / 24


def test_pages_without_capacity_on_the_device_are_joined_later(store: PacedStore) -> None:
    """While another request has the slots, a join changes nothing. After that request has ended, the pages are
    loaded."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store, device_tokens=256) as engine:
        assert engine.inspect.prefetcher is not None
        engine.inspect.prefetcher.least_overlap_pages = 8
        store.hold()
        handle = engine.prefetch("a", tokens, overlaps=True)
        eventually(lambda: engine.poll() or handle.ready)
        with engine.acquire(CacheRequest("a", tokens, reserve_tokens=2 * PAGE)) as lease:
            compute(engine, lease, tokens, 0, 2 * PAGE)
            engine.commit(lease, tokens[: 2 * PAGE])
            store.allow()
            eventually(lambda: engine.poll() or handle.ended)
            with engine.acquire(CacheRequest("b", tokens_of(2, 160))):
                assert engine.join(lease, 2 * PAGE) == Hit()
                assert (lease.cached_len, lease.held_len) == (0, 2 * PAGE)
                engine.check()
            assert engine.join(lease, 2 * PAGE) == Hit(disk=22 * PAGE)
            assert (read(engine, lease, 192) == expected_kv(tokens[:192])).all()
        settled(engine)


def test_keys_of_a_prompt_are_made_once_while_it_is_computed(
    store: PacedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joins and a second lookup in the stores hash nothing. After its release a request leaves no keys."""
    hashed, chain = list[int](), PageHasher.chain
    monkeypatch.setattr(
        PageHasher, "chain", lambda self, seed, tokens: hashed.append(len(tokens)) or chain(self, seed, tokens)
    )
    tokens = tokens_of(1)
    fill(store, tokens)
    with computing(store, tokens) as (engine, handle, lease):
        last_key = page_keys(engine, tokens)[-1]
        store.loses = lambda key, _: key == last_key
        hashed.clear()
        store.allow()
        eventually(lambda: engine.poll() or handle.ended)
        engine.commit(lease, tokens[: 2 * PAGE])
        assert engine.join(lease, 2 * PAGE).tokens and not engine.join(lease, lease.cached_len).tokens
        engine.release(lease)
        assert sum(hashed) == 0
        settled(engine)
        engine.reset()
        engine.prefetch("a", tokens)
        assert sum(hashed) == 192
        engine.cancel("a")


def test_reads_end_with_the_prompt(store: PacedStore) -> None:
    """A request whose last page could not be read has no pages or claims on the host while it decodes."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with computing(store, tokens) as (engine, handle, lease):
        last_key = page_keys(engine, tokens)[-1]
        store.loses = lambda key, _: key == last_key
        store.allow()
        eventually(lambda: engine.poll() or handle.ended)
        engine.commit(lease, tokens[: 2 * PAGE])
        engine.join(lease, 2 * PAGE)
        assert lease.cached_len == 184
        index = engine.inspect.context.full.pages
        assert index.num_evictable < len(index) and engine.stats()["prefetch.waiting_requests"] == 1
        compute(engine, lease, tokens, 184, 193)
        engine.commit(lease, tokens)
        engine.flush()
        assert index.num_evictable == len(index) == 24 and engine.stats()["prefetch.waiting_requests"] == 0
        engine.release(lease)
        settled(engine)


def test_the_computed_beginning_is_kept_before_the_read_end(store: PacedStore) -> None:
    """The host evicts the end of a prompt first, even if the policy evicts the newest page first and the beginning
    arrived last."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with computing(store, tokens, eviction_policy="filo") as (engine, handle, lease):
        store.allow()
        eventually(lambda: engine.poll() or handle.ended)
        engine.commit(lease, tokens[: 2 * PAGE])
        engine.join(lease, 2 * PAGE)
        compute(engine, lease, tokens, 192, 193)
        engine.commit(lease, tokens)
        engine.release(lease)
        settled(engine)
        pages = engine.inspect.context.full.pages
        assert pages.table.index[pages.order.eviction_order()].tolist() == [*range(23, -1, -1)]


def test_full_pages_without_their_state_are_not_read(store: PacedStore) -> None:
    """The store loses the state that a hybrid prompt needs at its end. Then no full page is read, and no page is
    locked."""
    tokens = tokens_of(1)
    config = config_with_states(device_tokens=640, host_bytes=200 * PAGE * 256, max_context_len=512)
    with build_engine(config, STATES, store=store) as engine, engine.acquire(CacheRequest("fill", tokens)) as lease:
        prefill(engine, lease, tokens, STATES)
    with build_engine(config, STATES, store=store) as engine:
        engine.observe_prefill(100, 100.0)
        assert engine.inspect.prefetcher is not None
        engine.inspect.prefetcher.least_overlap_pages = 8
        store.num_reads.clear()
        state_bytes = engine.inspect.context.by_name[MAMBA].host.page_bytes
        store.loses = lambda _, buffer: len(buffer) == state_bytes
        handle = engine.prefetch("a", tokens, overlaps=True)
        eventually(lambda: engine.poll() or handle.ended)
        assert handle.is_preemptible and handle.found_tokens == 192
        assert sum(store.sizes) == 2
        settled(engine)


@pytest.mark.parametrize(("read_s", "waits"), [(2.0, True), (4.0, False)])
def test_a_store_that_is_much_faster_is_waited_for(read_s: float, *, waits: bool, store: PacedStore) -> None:
    """A request computes during the reads if it computes at least a sixth of its prompt: 12 reads of 4 s compare with
    192 s of computing. A request that waits stops waiting if no read ends for that time."""
    with pending_prefetch(store, read_s=read_s, overlaps=True) as (engine, handle, _):
        until_found(engine, store, handle)
        assert handle.ready == handle.is_preemptible == (not waits)
        store.clock.now_s += 38.0
        engine.poll()
        assert handle.ready == (not waits)
        store.clock.now_s += 2.0
        engine.poll()
        assert handle.ready and handle.is_preemptible


@pytest.mark.parametrize(("read_s", "no_progress_s"), [(4.0, 384.0), (40.0, 0.0)])
def test_waiting_and_computing_are_compared_again_with_other_requests(
    read_s: float, no_progress_s: float, store: PacedStore
) -> None:
    """The reads of a request are preemptible while it delays no other request. The request stops waiting if another
    request is delayed, and either the 12 reads take longer than twice the 192 s of computing, or no read has ended for
    that time."""
    with pending_prefetch(store, read_s=read_s, overlaps=True) as (engine, handle, _):
        until_found(engine, store, handle)
        engine.poll()
        assert handle.is_preemptible
        engine.expect("other", tokens_of(3))
        store.clock.now_s += no_progress_s
        engine.poll()
        assert handle.ready and handle.is_preemptible == (no_progress_s > 0)
        store.clock.now_s += 1.0
        engine.poll()
        assert handle.ready and not handle.is_preemptible


def test_a_pass_is_longer_while_the_store_is_slower_than_its_rate(store: PacedStore) -> None:
    """The pass ends at the position where computing and reading meet. The pass ends in the middle of 192 tokens if
    computing takes 192 s and reading 204 s, and near the end if none of the 24 reads has ended for 50 s."""
    with pending_prefetch(store, read_s=17.0, overlaps=True) as (engine, handle, tokens):
        until_found(engine, store, handle)
        with engine.acquire(CacheRequest("a", tokens)) as lease:
            assert engine.next_stop(lease, 0, 192) == 96
            store.clock.now_s += 50.0
            assert engine.next_stop(lease, 0, 192) == 160


def test_a_long_step_gets_enough_reads_queued_before_it(store: PacedStore) -> None:
    """No poll happens during a pass on a CPU. So the store gets enough jobs for a time as long as the last step."""
    tokens = tokens_of(1, 70 * PAGE + 1)
    with engine_of(store, max_context_len=600) as engine:
        serve(engine, "fill", tokens)
        engine.flush()
        engine.reset()
        store.hold()
        handle = engine.prefetch("a", tokens, overlaps=True)
        eventually(lambda: engine.poll() or handle.ready)
        with engine.acquire(CacheRequest("a", tokens)):
            store.clock.now_s += 1.0
            engine.poll()
            store.allow()
            eventually(lambda: sum(store.num_reads.values()) == 70)
