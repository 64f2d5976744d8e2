"""Prefetches that share the host: the share of requests that have not been admitted, and waits for host pages."""

from __future__ import annotations

import threading

import pytest

from disk_case import Clock
from hicache import CacheRequest
from hicache.config import PrefetchMode
from hicache.flow.lease import Prefetch
from hicache.flow.reads import HostShare
from prefetch_case import (
    PAGE,
    PacedStore,
    engine_of,
    fill,
    tokens_from_disk,
    tokens_of,
    until_landed,
)
from toy_model import serve, settled, until_ready
from waiting import eventually


@pytest.mark.parametrize("leaves", ["acquire", "cancel", "forget"])
def test_a_share_of_the_host_bounds_prefetched_pages(leaves: str, store: PacedStore, clock: Clock) -> None:
    """Pages read for requests that are not admitted stay within `prefetch_host_share`. Other pages are read when these
    requests are admitted, cancelled or forgotten."""
    prompts = [tokens_of(n) for n in range(3)]
    fill(store, *prompts)
    with engine_of(store, prefetch_host_share=0.151) as engine:  # 30 pages
        handles = {n: engine.prefetch(str(n), tokens) for n, tokens in enumerate(prompts)}

        def landed() -> list[int]:
            clock.now_s += 1e-6
            engine.poll()
            engine.check()
            assert engine.stats()["prefetch.claimed_pages"] <= 30
            return [handle.read_tokens for handle in handles.values()]

        eventually(lambda: sum(landed()) == 30 * PAGE)
        assert handles[0].ended and not handles[1].ready
        for n in (0, 1):
            if leaves == "acquire":
                with engine.acquire(CacheRequest(str(n), prompts[n])) as lease:
                    assert lease.hit.disk == 192
            elif leaves == "cancel":
                engine.cancel(str(n))
            del handles[n]
            clock.now_s += 0.051
            eventually(lambda: landed()[0] == 192)
        until_ready(engine, handles[2])
        stats = engine.stats()
        assert stats["prefetch.deferred_requests"] >= 2 and stats["prefetch.retries"] >= 2
        assert tokens_from_disk(engine, "2", prompts[2]) == 192


def test_claims_of_handles_that_go_in_the_middle_of_a_call() -> None:
    """The garbage collector may delete a prefetch handle in any thread and in the middle of a call. Then the claim of
    the handle ends, and other claims stay correct."""
    share, gone, kept = HostShare(), [Prefetch(f"r{n}", "auto") for n in range(3)], Prefetch("kept", "auto")

    class Interrupting(int):
        """A number that deletes a handle when it is added to another number."""

        def __radd__(self, other: int) -> int:
            if gone:
                gone.pop()
            return int(self) + other

    for handle in gone:
        share.add(handle, 10)
    share.add(other := Prefetch("r0", "auto"), 1)  # the same request: from now on this handle has its pages
    del handle
    share.add(kept, Interrupting(5))
    while gone:
        thread = threading.Thread(target=gone.pop)
        thread.start()
        thread.join()
    share.forget_dropped()
    assert share.num_pages == 16 and share.of("kept") == 5 and share.of(other.request_id) == 11
    assert (share.end("kept"), share.end("r0"), share.end("r1"), share.num_pages) == (5, 11, 0, 0)


def test_a_prompt_larger_than_the_share_leaves_others_none(store: PacedStore, clock: Clock) -> None:
    """Of prompts that arrive together, only the first may exceed the share, by more than the pages of the other
    prompts. The other prompts read nothing until the first one is admitted, and then read all their pages."""
    prompts = [tokens_of(1), *(tokens_of(n, 33) for n in range(2, 6))]
    fill(store, *prompts)
    with engine_of(store, prefetch_host_share=0.01) as engine:
        handles = [engine.prefetch(str(n), tokens) for n, tokens in enumerate(prompts)]

        def landed() -> list[int]:
            clock.now_s += 1.0  # longer than the delay before a read is retried
            engine.poll()
            engine.check()
            return [handle.read_tokens for handle in handles]

        for n, tokens in enumerate(prompts):
            length = len(tokens) - 1
            eventually(lambda n=n, length=length: landed()[n] == length)
            assert not any(landed()[n + 1 :])
            assert tokens_from_disk(engine, str(n), tokens) == length


@pytest.mark.parametrize(
    ("mode", "host_pages", "share", "landed"),
    [
        ("auto", 200, 0.05, 24),
        ("wait_complete", 200, 0.05, 24),
        ("timeout", 17, 0.5, 16),
        ("auto", 17, 1.0, 16),
        ("wait_complete", 17, 1.0, 16),
        ("timeout", 200, 0.0, 0),
        ("auto", 200, 0.0, 0),
    ],
)
def test_no_request_waits_for_host_pages_that_are_never_freed(
    mode: PrefetchMode, host_pages: int, share: float, landed: int, store: PacedStore
) -> None:
    """A prompt may exceed the share while it is the only one. A prompt that is larger than the host gets the pages that
    fit and does not wait for more. With a share of 0 nothing is read."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store, prefetch_host_share=share, host_bytes=host_pages * PAGE * 192) as engine:
        handle = engine.prefetch("a", tokens, mode=mode)
        until_ready(engine, handle)
        assert handle.read_tokens == landed * PAGE
        with engine.acquire(CacheRequest("a", tokens)) as lease:
            assert lease.hit.disk == landed * PAGE
        settled(engine)


@pytest.mark.parametrize(("others", "landed"), [(5, 5), (2, 5), (0, 5)])
def test_a_read_keeps_the_pages_before_it_on_the_host(others: int, landed: int, store: PacedStore) -> None:
    """A read keeps the host pages that come before it in its prompt, although the device has them too. The read takes
    all other host pages, free ones and those of other prompts, and no more."""
    tokens = tokens_of(1, 20 * PAGE + 1)
    fill(store, tokens)
    with engine_of(store, host_bytes=16 * PAGE * 192) as engine:
        if others:
            serve(engine, "x", tokens_of(2, others * PAGE + 1))
            engine.flush()
        serve(engine, "a", tokens[: 10 * PAGE + 1])
        engine.flush()
        handle = engine.prefetch("b", tokens)
        eventually(lambda: engine.poll() or handle.ready, engine.stats)
        engine.check()
        assert (handle.found_tokens, handle.read_tokens) == (10 * PAGE, landed * PAGE)
        assert engine.lookup(tokens).device + engine.lookup(tokens).host == (10 + landed) * PAGE
        engine.cancel("b")
        settled(engine)


def test_a_read_ends_if_other_requests_took_the_host_pages(store: PacedStore) -> None:
    """The reads of a long prompt are queued in steps. If the host pages of the prompt are taken between two steps,
    the reads that are already queued still land. The remaining reads of the prompt follow when host pages are free
    again."""
    tokens = tokens_of(1, 150 * PAGE + 1)
    sizes = {"device_tokens": 2048, "max_context_len": 2048, "host_bytes": 200 * PAGE * 192}
    with engine_of(store, **sizes) as engine:
        serve(engine, "fill", tokens)
    with engine_of(store, **sizes) as engine:
        host = engine.inspect.context.full.host
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        eventually(lambda: engine.poll() or handle.found_tokens, engine.stats)
        taken = host.alloc(host.available())
        assert taken is not None
        eventually(lambda: engine.poll() or handle.ready, engine.stats)
        assert 0 < handle.read_tokens < 150 * PAGE and handle.found_tokens == 150 * PAGE
        host.free(taken)
        engine.check()
        store.clock.now_s += 1.1
        until_landed(engine, handle, 150 * PAGE)
        assert tokens_from_disk(engine, "a", tokens) == 150 * PAGE
