"""Prefetches of several requests: shared reads, the order of reads, and when a request stops waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from disk_case import Clock, page_keys
from hicache import CacheEngine, CacheRequest, build_engine
from hicache.config import PrefetchMode
from hicache.errors import OutOfSlots, PrefetchPending, TransferError
from hicache.flow.lease import Prefetch
from prefetch_case import (
    PAGE,
    PacedStore,
    engine_of,
    fill,
    measure_disk,
    settings,
    tokens_from_disk,
    tokens_of,
    until_found,
)
from stepped_transfer import SteppedTransfers
from toy_model import GEOMETRY, serve, settled, until_ready
from waiting import eventually


@contextmanager
def two_pending_prefetches(
    store: PacedStore, *, compute_s: float, num_running: int = 0, num_queued: int = 0, are_expected: bool = False
) -> Iterator[tuple[CacheEngine, list[Prefetch]]]:
    """An engine, and prefetches of two prompts whose reads have begun. A prompt is read in 12 s and computed in
    `compute_s`. Other requests run or are queued. If `are_expected`, both requests have called `expect` before."""
    prompts, others = [tokens_of(n) for n in range(3)], [f"other {n}" for n in range(num_running + num_queued)]
    fill(store, *prompts)
    with engine_of(store) as engine:
        measure_disk(engine, store, prompts[0], 1.0)
        engine.observe_prefill(192, compute_s)
        for n, name in enumerate(others[:num_running]):
            engine.acquire(CacheRequest(name, tokens_of(10 + n, 20)))
        for name in (*others[num_running:], *("ab" if are_expected else "")):
            engine.expect(name, tokens_of(10, 20))
        store.hold()
        handles = [engine.prefetch(name, tokens) for name, tokens in zip("ab", prompts[1:], strict=True)]
        until_found(engine, store, *handles)
        yield engine, handles
        for name in others:
            engine.cancel(name)
        store.allow()
        until_ready(engine, *handles)
        tokens_from_disk(engine, "b", prompts[2])


@pytest.mark.parametrize(
    ("others", "compute_s", "ready"),
    [
        ({}, 18.0, (False, True)),
        ({"are_expected": True}, 18.0, (False, True)),
        ({"num_running": 1}, 18.0, (False, False)),
        ({"num_queued": 1}, 18.0, (False, False)),
        ({"are_expected": True}, 10.0, (True, False)),
    ],
)
def test_a_wait_counts_reads_before_it_and_those_that_computing_delays(
    others: dict[str, Any], compute_s: float, ready: tuple[bool, bool], store: PacedStore
) -> None:
    """The read of the second request, queued behind that of the first, takes longer than computing. The second
    request computes unless this delays a running or queued request. The first request does not count as delayed
    while it waits for the disk. If the first request computes, it counts as delayed, and no read is queued before
    that of the second."""
    with two_pending_prefetches(store, compute_s=compute_s, **others) as (_, (first, second)):
        assert (first.ready, second.ready) == ready


def test_a_wait_continues_when_other_requests_have_ended(store: PacedStore) -> None:
    """Two requests wait for the disk because computing would delay two running requests. When the running requests end,
    the two waiting requests continue to wait; otherwise they would both compute at once."""
    with two_pending_prefetches(store, compute_s=10.0, num_running=2) as (engine, handles):
        for name in ("other 0", "other 1"):
            engine.cancel(name)
        engine.poll()
        assert not any(handle.ready for handle in handles)


def test_a_frozen_disk_blocks_no_request(store: PacedStore, clock: Clock) -> None:
    """A wait ends if no page arrives for the time that computing would take the waiting request and the request that it
    delays."""
    with two_pending_prefetches(store, compute_s=18.0, num_running=1) as (engine, handles):
        for passed_s, ready in ((35, False), (2, True)):
            clock.now_s += passed_s
            engine.poll()
            assert [handle.ready for handle in handles] == [ready] * 2, passed_s


def test_a_wait_continues_if_the_disk_is_a_little_slower(store: PacedStore) -> None:
    """A wait that has begun continues although the current rates would not start it. Rates vary, and the pages already
    read would be wasted."""
    tokens = tokens_of(1)
    fill(store, tokens, tokens_of(2))
    with engine_of(store) as engine:
        measure_disk(engine, store, tokens_of(2), 1.0)
        engine.observe_prefill(192, 13.0)
        store.hold()
        handle = engine.prefetch("a", tokens)
        until_found(engine, store, handle)
        store.read_s = 1.6
        store.allow(8)
        eventually(lambda: engine.poll() or (handle.read_tokens >= 64 and store.held == 1))
        assert not handle.ready
        store.read_s = 0.0  # the clock must not advance before the engine polls
        store.allow()
        until_ready(engine, handle)
        assert handle.read_tokens == 192


def test_a_read_without_host_pages_is_queued_after_reads_with_them(store: PacedStore) -> None:
    """While other requests use the share of the host, a short prompt is computed and a long prompt waits."""
    prompts = [tokens_of(1), tokens_of(2), tokens_of(3, 49)]
    fill(store, *prompts)
    with engine_of(store, prefetch_host_share=0.121) as engine:
        measure_disk(engine, store, prompts[0], 1.0)
        engine.observe_prefill(192, 18.0)
        assert tokens_from_disk(engine, "a", prompts[0]) == 192
        store.hold()
        handles = [engine.prefetch("0", prompts[1])]
        until_found(engine, store, *handles)
        handles += [engine.prefetch(str(n), tokens) for n, tokens in enumerate((tokens_of(4), prompts[2]), 1)]
        engine.poll()
        assert [handle.ready for handle in handles] == [False, False, True]
        store.allow()


def test_a_wait_for_host_pages_ends_when_computing_is_faster(store: PacedStore, clock: Clock) -> None:
    """The share of the host has pages for one of two requests. If the disk does not answer, neither request waits
    longer than computing takes."""
    prompts = [tokens_of(1), tokens_of(2)]
    fill(store, *prompts)
    with engine_of(store, prefetch_host_share=0.121) as engine:
        engine.observe_prefill(192, 18.0)
        store.hold()
        handles = [engine.prefetch(str(n), tokens) for n, tokens in enumerate(prompts)]
        until_found(engine, store, *handles)
        assert engine.stats()["prefetch.deferred_requests"] == 1
        for passed_s, ready in ((17, False), (2, True)):
            clock.now_s += passed_s
            for _ in range(2):  # the first request that stops waiting delays the other one in the same poll
                engine.poll()
            assert [handle.ready for handle in handles] == [ready] * 2, passed_s


@pytest.mark.parametrize(("mode", "cancelled"), [("auto", None), ("auto", 0), ("wait_complete", 1)])
def test_requests_for_the_same_pages_share_one_read(
    mode: PrefetchMode, cancelled: int | None, store: PacedStore
) -> None:
    """Every page of prompts with common beginnings is read once, also if a request is cancelled meanwhile. Each request
    finds all of its pages."""
    same, half = tokens_of(1), tokens_of(1, 105)
    fork = np.concatenate([same[:96], tokens_of(2, 97)])
    prompts = [same, same, fork, half]
    fill(store, same, fork)
    asked = store.verbs("contains")
    with engine_of(store) as engine:
        store.hold()
        handles = [engine.prefetch(str(n), tokens, mode=mode) for n, tokens in enumerate(prompts)]
        until_found(engine, store, *handles)
        assert engine.stats()["prefetch.coalesced_requests"] == 3
        store.allow(2)
        if cancelled is not None:
            engine.cancel(str(cancelled))
        assert [handle.ready for handle in handles] == [n == cancelled for n in range(4)]
        store.allow()
        until_ready(engine, *handles)
        assert set(store.num_reads.values()) == {1} and store.verbs("contains") == asked + len(prompts)
        assert set(store.num_reads) == set(page_keys(engine, same[:192]) + page_keys(engine, fork[:192]))
        for n, tokens in enumerate(prompts):
            if n != cancelled:
                whole = (len(tokens) - 1) // PAGE * PAGE
                assert handles[n].read_tokens == handles[n].found_tokens == whole
                with engine.acquire(CacheRequest(str(n), tokens)) as lease:
                    assert lease.cached_len == whole
        settled(engine)


@pytest.mark.parametrize("mode", ["wait_complete", "best_effort"])
def test_a_request_has_one_prefetch_and_one_answer(mode: PrefetchMode, store: PacedStore) -> None:
    """While a prefetch is in progress, another call returns the same handle whatever its mode, and admission waits if
    the handle does. After the end of the prefetch a call returns a new handle."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        store.hold()
        first = engine.prefetch("a", tokens, mode="wait_complete")
        assert engine.prefetch("a", tokens, mode=mode) is first and not first.ready
        until_found(engine, store, first)
        assert engine.prefetch("a", tokens_of(2), mode=mode) is first
        with pytest.raises(PrefetchPending):
            engine.acquire(CacheRequest("a", tokens))
        store.allow()
        until_ready(engine, first)
        assert engine.prefetch("a", tokens, mode=mode) is not first and first.read_tokens == 192
        assert tokens_from_disk(engine, "a", tokens) == 192


def test_a_waiting_prefetch_joins_no_preemptible_read(store: PacedStore) -> None:
    """The reads of a preemptible prefetch are queued after all others. A request that waits reads the pages itself; a
    request that does not wait joins the preemptible read."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        store.hold()
        engine.prefetch("a", tokens, mode="best_effort")
        eventually(lambda: engine.poll() or store.held == 1)
        waiting = engine.prefetch("b", tokens, mode="wait_complete")
        until_found(engine, store, waiting)
        assert engine.stats()["prefetch.coalesced_requests"] == 0
        engine.prefetch("c", tokens, mode="best_effort")
        engine.poll()
        assert engine.stats()["prefetch.coalesced_requests"] == 2
        store.allow()
        until_ready(engine, waiting)
        assert waiting.read_tokens == 192
        settled(engine)


def test_pages_that_are_being_copied_to_the_host_are_not_read(store: PacedStore) -> None:
    """A prefetch of a prompt whose backup is in flight ends at once."""
    tokens = tokens_of(1)
    fill(store, tokens)
    engine = build_engine(settings(), GEOMETRY, store=store)
    transfers = SteppedTransfers(engine)
    with engine:
        serve(engine, "b", tokens)
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        assert handle.ended and handle.found_tokens == 0
        transfers.finish()
        settled(engine)


@pytest.mark.parametrize("fails", [False, True])
def test_pages_read_after_a_copy_in_flight_are_usable_at_once(store: PacedStore, fails: bool) -> None:
    """The beginning of a prompt is being copied to the host while the rest is read from disk. The pages from disk land
    at once, and stay if the copy of the beginning fails."""
    tokens = tokens_of(1)
    fill(store, tokens)
    engine = build_engine(settings(), GEOMETRY, store=store)
    transfers = SteppedTransfers(engine)
    with engine:
        serve(engine, "b", tokens[:33])
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        until_ready(engine, handle)
        assert handle.read_tokens == 160
        for link in transfers.down:
            link.fails = TransferError("a copy fails") if fails else None
        transfers.finish()
        assert engine.lookup(tokens).device + engine.lookup(tokens).host == 192
        settled(engine)


def test_a_read_ends_with_the_last_page_that_a_request_waits_for(store: PacedStore) -> None:
    """If the request with the long prompt is cancelled, the read ends after the pages that another request shares. If
    the two requests are cancelled, the read ends at once."""
    long, short = tokens_of(1), tokens_of(1, 50)
    fill(store, long)
    for gone in (["long"], ["short", "long"]):
        with engine_of(store) as engine:
            store.num_reads.clear()
            store.hold()
            handles = {"long": engine.prefetch("long", long), "short": engine.prefetch("short", short)}
            until_found(engine, store, *handles.values())
            for name in gone:
                engine.cancel(name)
            store.allow(4)
            until_ready(engine, *handles.values())
            store.allow()
            settled(engine)
            assert sum(store.num_reads.values()) <= (2 if len(gone) == 2 else 8 + 2)
            assert handles["short"].read_tokens == (48 if len(gone) == 1 else 0)


def test_pages_after_a_lost_page_are_not_read(store: PacedStore) -> None:
    """A store lacks a page that it announced: the prefix ends before that page, and so do later jobs."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        store.hold()
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        until_found(engine, store, handle)
        store.inner.delete(page_keys(engine, tokens)[2:3])
        store.allow(4)  # the first job
        eventually(lambda: engine.poll() or handle.read_tokens == 2 * PAGE)
        store.allow(1)  # a read that a thread has begun
        until_ready(engine, handle)
        assert handle.read_tokens == 2 * PAGE and sum(store.num_reads.values()) <= 7 + 2
        store.allow()
        assert tokens_from_disk(engine, "a", tokens) == 2 * PAGE


def test_a_refused_admission_leaves_its_prefetch(store: PacedStore) -> None:
    """A request without free slots continues to wait. The pages that its prefetch reads meanwhile are hits at
    admission."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        others = [engine.acquire(CacheRequest(f"other {n}", tokens_of(10 + n, 200))) for n in range(3)]
        store.hold()
        engine.prefetch("a", tokens, mode="best_effort")
        with pytest.raises(OutOfSlots):
            engine.acquire(CacheRequest("a", tokens))
        store.allow()
        engine.flush()
        for lease in others:
            engine.release(lease)
        assert tokens_from_disk(engine, "a", tokens) == 192
        engine.check()
