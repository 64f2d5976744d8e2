"""Prefetches of several requests: who shares a read, who waits for whom, and what bounds what is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    admitted,
    engine_of,
    fill,
    measure_disk,
    settings,
    tokens_of,
    until_found,
)
from stepped_transfer import SteppedTransfers
from toy_model import GEOMETRY, serve, settled, until_ready
from waiting import eventually


@contextmanager
def two_asked(store: PacedStore, compute_s: float, beside: str = "") -> Iterator[tuple[CacheEngine, list[Prefetch]]]:
    """An engine that reads a prompt in 12 s and computes it in `compute_s`, and the prefetches of two, found and held.
    `beside`: what others do, `r` a request that runs, `q` one that is queued, `p` that these two were announced."""
    prompts = [tokens_of(n) for n in range(3)]
    fill(store, *prompts)
    with engine_of(store) as engine:
        measure_disk(engine, store, prompts[0], 1.0)
        engine.observe_prefill(192, compute_s)
        for n, does in enumerate(beside):
            if does == "r":
                engine.acquire(CacheRequest(f"other {n}", tokens_of(10 + n, 20)))
            for name in "ab" if does == "p" else [f"other {n}"] if does == "q" else []:
                engine.expect(name, tokens_of(10 + n, 20))
        store.hold()
        handles = [engine.prefetch(name, tokens) for name, tokens in zip("ab", prompts[1:], strict=True)]
        until_found(engine, store, *handles)
        yield engine, handles
        for n in range(len(beside)):
            engine.cancel(f"other {n}")
        store.allow()
        until_ready(engine, *handles)
        admitted(engine, "b", prompts[2])


@pytest.mark.parametrize(
    ("beside", "compute_s", "ready"),
    [
        ("", 18.0, (False, True)),
        ("p", 18.0, (False, True)),
        ("r", 18.0, (False, False)),
        ("q", 18.0, (False, False)),
        ("p", 10.0, (True, False)),
    ],
)
def test_a_wait_counts_reads_before_it_and_those_that_computing_delays(
    beside: str, compute_s: float, ready: tuple[bool, bool], store: PacedStore
) -> None:
    """The second of two requests reads behind the first, longer than computing takes: it computes, unless one that runs
    or is queued would wait for that. The first, which waits for the disk itself, would not. Where it computes, it
    would, and the second reads behind nobody."""
    with two_asked(store, compute_s, beside) as (_, (first, second)):
        assert (first.ready, second.ready) == ready


def test_a_wait_goes_on_when_the_others_have_ended(store: PacedStore) -> None:
    """Two requests that run make waiting pay. They end while all others wait, and computing delays nobody any more:
    whoever waits goes on, for else all would compute at once."""
    with two_asked(store, 10.0, "rr") as (engine, handles):
        for name in ("other 0", "other 1"):
            engine.cancel(name)
        engine.poll()
        assert not any(handle.ready for handle in handles)


def test_a_disk_that_stands_still_keeps_nobody(store: PacedStore, clock: Clock) -> None:
    """A wait ends once nothing has come for as long as computing would cost this request and the one that it delays."""
    with two_asked(store, 18.0, "r") as (engine, handles):
        for passed_s, ready in ((35, False), (2, True)):
            clock.now_s += passed_s
            engine.poll()
            assert [handle.ready for handle in handles] == [ready] * 2, passed_s


def test_a_wait_goes_on_where_the_disk_is_a_little_slower(store: PacedStore) -> None:
    """By the rates of now it would not have begun. But these swing, and what was read would be of no use."""
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
        eventually(lambda: engine.poll() or (handle.landed_tokens >= 64 and store.held == 1))
        assert not handle.ready
        store.read_s = 0.0  # the clock does not run ahead of what the engine was told
        store.allow()
        until_ready(engine, handle)
        assert handle.landed_tokens == 192


def test_who_finds_no_room_waits_no_longer_than_pays(store: PacedStore) -> None:
    """A read that cannot begin, for the share is taken, comes after those that go on: a short prompt is computed, a
    long one waits."""
    prompts = [tokens_of(1), tokens_of(2), tokens_of(3, 49)]
    fill(store, *prompts)
    with engine_of(store, prefetch_host_share=0.121) as engine:
        measure_disk(engine, store, prompts[0], 1.0)
        engine.observe_prefill(192, 18.0)
        assert admitted(engine, "a", prompts[0]) == 192
        store.hold()
        handles = [engine.prefetch("0", prompts[1])]
        until_found(engine, store, *handles)
        handles += [engine.prefetch(str(n), tokens) for n, tokens in enumerate((tokens_of(4), prompts[2]), 1)]
        engine.poll()
        assert [handle.ready for handle in handles] == [False, False, True]
        store.allow()


def test_who_is_found_and_has_no_room_waits_no_longer_than_pays(store: PacedStore, clock: Clock) -> None:
    """Of two that ask at once the share has room for one. Neither waits for longer than computing takes, where the disk
    stands still."""
    prompts = [tokens_of(1), tokens_of(2)]
    fill(store, *prompts)
    with engine_of(store, prefetch_host_share=0.121) as engine:
        engine.observe_prefill(192, 18.0)
        store.hold()
        handles = [engine.prefetch(str(n), tokens) for n, tokens in enumerate(prompts)]
        until_found(engine, store, *handles)
        assert engine.stats()["prefetch.postponed_requests"] == 1
        for passed_s, ready in ((17, False), (2, True)):
            clock.now_s += passed_s
            for _ in range(2):  # the first that stops delays the other one in that poll
                engine.poll()
            assert [handle.ready for handle in handles] == [ready] * 2, passed_s


@pytest.mark.parametrize(("mode", "cancelled"), [("auto", None), ("auto", 0), ("wait_complete", 1)])
def test_requests_for_the_same_pages_share_one_read(
    mode: PrefetchMode, cancelled: int | None, store: PacedStore
) -> None:
    """Two equal prompts, one that begins with their first half, and one that ends before: every page is read once,
    whoever leaves meanwhile, and all find theirs."""
    same, half = tokens_of(1), tokens_of(1, 105)
    fork = np.concatenate([same[:96], tokens_of(2, 97)])
    prompts = [same, same, fork, half]
    fill(store, same, fork)
    asked = store.verbs("contains")
    with engine_of(store) as engine:
        store.hold()
        handles = [engine.prefetch(str(n), tokens, mode=mode) for n, tokens in enumerate(prompts)]
        until_found(engine, store, *handles)
        assert engine.stats()["prefetch.shared_requests"] == 3
        store.allow(2)
        if cancelled is not None:
            engine.cancel(str(cancelled))
        assert [handle.ready for handle in handles] == [n == cancelled for n in range(4)]
        store.allow()
        until_ready(engine, *handles)
        assert set(store.landed.values()) == {1} and store.verbs("contains") == asked + len(prompts)
        assert set(store.landed) == set(page_keys(engine, same[:192]) + page_keys(engine, fork[:192]))
        for n, tokens in enumerate(prompts):
            if n != cancelled:
                whole = (len(tokens) - 1) // PAGE * PAGE
                assert handles[n].landed_tokens == handles[n].found_tokens == whole
                with engine.acquire(CacheRequest(str(n), tokens)) as lease:
                    assert lease.cached_len == whole
        settled(engine)


@pytest.mark.parametrize("mode", ["wait_complete", "best_effort"])
def test_a_request_has_one_prefetch_and_one_answer(mode: PrefetchMode, store: PacedStore) -> None:
    """Another call while it goes on returns the same handle, of whatever mode, and admission waits where that says so.
    After its end there is a new one."""
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
        assert engine.prefetch("a", tokens, mode=mode) is not first and first.landed_tokens == 192
        assert admitted(engine, "a", tokens) == 192


def test_a_waiting_prefetch_joins_no_preemptible_read(store: PacedStore) -> None:
    """A preemptible read comes after all others: a request that waits reads the pages itself; one that does not wait
    joins the preemptible read."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        store.hold()
        engine.prefetch("a", tokens, mode="best_effort")
        eventually(lambda: engine.poll() or store.held == 1)
        waiting = engine.prefetch("b", tokens, mode="wait_complete")
        until_found(engine, store, waiting)
        assert engine.stats()["prefetch.shared_requests"] == 0
        engine.prefetch("c", tokens, mode="best_effort")
        engine.poll()
        assert engine.stats()["prefetch.shared_requests"] == 2
        store.allow()
        until_ready(engine, waiting)
        assert waiting.landed_tokens == 192
        settled(engine)


def test_pages_that_are_being_copied_to_the_host_are_not_read(store: PacedStore) -> None:
    """A prefetch of a prompt whose backup is in flight has nothing to do."""
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
def test_what_is_read_behind_a_copy_in_flight_lands_at_once(store: PacedStore, fails: bool) -> None:
    """The beginning of a prompt is being copied to the host when the disk brings the rest, which waits for nothing, and
    stays where the copy fails."""
    tokens = tokens_of(1)
    fill(store, tokens)
    engine = build_engine(settings(), GEOMETRY, store=store)
    transfers = SteppedTransfers(engine)
    with engine:
        serve(engine, "b", tokens[:33])
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        until_ready(engine, handle)
        assert handle.landed_tokens == 160
        for link in transfers.down:
            link.fails = TransferError("a copy fails") if fails else None
        transfers.finish()
        assert engine.lookup(tokens).device + engine.lookup(tokens).host == 192
        settled(engine)


def test_pages_that_came_otherwise_meanwhile_are_freed(store: PacedStore) -> None:
    """Pages that were computed and copied to the host while they were read stay as they are, and none is lost."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        store.hold()
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        until_found(engine, store, handle)
        serve(engine, "b", tokens)
        engine.inspect.copies.end_backups()
        store.allow()
        until_ready(engine, handle)
        assert admitted(engine, "a", tokens) == 0


def test_a_read_goes_no_further_than_somebody_wants(store: PacedStore) -> None:
    """When the request with the long prompt is gone, its read ends with the pages that another shares; when all are
    gone, at once."""
    long, short = tokens_of(1), tokens_of(1, 50)
    fill(store, long)
    for gone in (["long"], ["short", "long"]):
        with engine_of(store) as engine:
            store.landed.clear()
            store.hold()
            handles = {"long": engine.prefetch("long", long), "short": engine.prefetch("short", short)}
            until_found(engine, store, *handles.values())
            for name in gone:
                engine.cancel(name)
            store.allow(4)
            until_ready(engine, *handles.values())
            store.allow()
            settled(engine)
            assert sum(store.landed.values()) <= (2 if len(gone) == 2 else 8 + 2)
            assert handles["short"].landed_tokens == (48 if len(gone) == 1 else 0)


def test_what_follows_a_lost_page_is_not_read(store: PacedStore) -> None:
    """A store that has lost a page says so when it is asked again: the prefix ends there, and later jobs with it."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        store.hold()
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        until_found(engine, store, handle)
        store.inner.delete(page_keys(engine, tokens)[2:3])
        store.allow(4)  # the first job
        eventually(lambda: engine.poll() or handle.landed_tokens == 2 * PAGE)
        store.allow(1)  # what a thread has begun goes on
        until_ready(engine, handle)
        assert handle.landed_tokens == 2 * PAGE and sum(store.landed.values()) <= 7 + 2
        store.allow()
        assert admitted(engine, "a", tokens) == 2 * PAGE


def test_a_refused_admission_leaves_its_prefetch(store: PacedStore) -> None:
    """A request that finds no slots goes on waiting: what its prefetch brings meanwhile is a hit when it is
    admitted."""
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
        assert admitted(engine, "a", tokens) == 192
        engine.check()
