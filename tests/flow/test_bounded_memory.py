"""An engine keeps no memory of requests that have ended, in whatever order its verbs were called: neither their prompts
nor anything else that would accumulate."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from hicache.config import PrefetchMode
from memory_store import MemoryPageStore
from prefetch_case import PAGE, PacedStore, engine_of, settings
from toy_model import GEOMETRY, flush_error
from waiting import eventually

Order = Callable[[CacheEngine, str, np.ndarray], None]
LENGTH = 8 * PAGE + 1
# Containers grow in steps of a few KiB. 40 prompts at eight bytes a token would take twice this limit. The warm-up has
# more than 64 requests, the number of prefetches that may be in progress.
NOISE_BYTES = 40 << 10
_NOT_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)


def prompt(number: int) -> np.ndarray:
    tokens = np.arange(LENGTH) % 50
    tokens[0] = number
    return tokens


def held_bytes(root: object) -> int:
    """Bytes of all objects that can be reached from `root`, without code."""
    seen, todo, num_bytes = {id(root)}, [root], 0
    while todo:
        held = todo.pop()
        num_bytes += sys.getsizeof(held)
        for below in gc.get_referents(held):
            if id(below) not in seen and not isinstance(below, _NOT_DATA):
                seen.add(id(below))
                todo.append(below)
    return num_bytes


def growth(engine: CacheEngine, order: Order, warm: range, measured: range) -> int:
    """The bytes by which the engine grows over the `measured` requests."""
    sizes = []
    for numbers in (warm, measured):
        for number in numbers:
            order(engine, f"r{number}", prompt(number))
        flush_error(engine)
        sizes.append(held_bytes(engine))
    engine.check()
    return sizes[1] - sizes[0]


def compute(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        engine.begin_forward([lease])
        engine.commit(lease, tokens)
    engine.poll()


def prefetched(mode: PrefetchMode | None) -> Order:
    """A request in the order of the README: prefetch, poll, acquire, commit, release."""

    def order(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
        handle = engine.prefetch(name, tokens, mode=mode)
        while not handle.ready:
            engine.poll()
        compute(engine, name, tokens)

    return order


def prefetch_and_cancel(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    engine.prefetch(name, tokens)
    engine.cancel(name)


def prefetch_poll_and_cancel(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    engine.prefetch(name, tokens)
    engine.poll()
    engine.cancel(name)


def expect_and_cancel(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    engine.expect(name, tokens)
    engine.cancel(name)


def expect_and_acquire(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    engine.expect(name, tokens)
    compute(engine, name, tokens)


def lookup(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    engine.lookup(tokens, disk_wait_s=0.0)


def same_name(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    prefetched(None)(engine, "always", tokens)


def same_prompt(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    """A request whose prompt is in memory already, so its prefetch is ready at once. The array of its tokens is a new
    one."""
    prefetched(None)(engine, name, prompt(0))


def cancel_a_lease(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    engine.acquire(CacheRequest(name, tokens))
    engine.cancel(name)


ORDERS = {
    **{mode or "default": prefetched(mode) for mode in (None, "auto", "best_effort", "wait_complete", "timeout")},
    **{
        order.__name__: order
        for order in (
            prefetch_and_cancel,
            prefetch_poll_and_cancel,
            expect_and_cancel,
            expect_and_acquire,
            lookup,
            compute,
            same_name,
            same_prompt,
            cancel_a_lease,
        )
    },
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_memory_does_not_grow_with_requests(order: Order) -> None:
    """Once the tiers are full, requests with new names and new prompts do not increase the memory of the engine."""
    with build_engine(settings(host_bytes=20 * PAGE * 192), GEOMETRY, store=MemoryPageStore(1 << 13)) as engine:
        assert growth(engine, order, range(70), range(70, 110)) < NOISE_BYTES


def test_memory_without_stores_does_not_grow_with_requests() -> None:
    """With device and host tiers alone, requests with new names and prompts do not increase the memory of the
    engine."""
    with build_engine(settings(host_bytes=20 * PAGE * 192), GEOMETRY) as engine:
        assert growth(engine, expect_and_acquire, range(70), range(70, 110)) < NOISE_BYTES


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in ORDERS if name not in get_args(PrefetchMode)])
def test_memory_over_5_000_requests(name: str) -> None:
    """The same over 5 000 requests, so that eight bytes a request are seen."""
    with build_engine(settings(host_bytes=20 * PAGE * 192), GEOMETRY, store=MemoryPageStore(1 << 13)) as engine:
        assert growth(engine, ORDERS[name], range(1000), range(1000, 6000)) < NOISE_BYTES


@pytest.mark.parametrize("why", ["the store hangs", "no host page is free"])
def test_a_frozen_tier_keeps_no_cancelled_request(why: str, store: PacedStore) -> None:
    """An engine keeps nothing of cancelled requests that were queued behind reads, or waited for host pages."""
    with engine_of(store) as engine:
        compute(engine, "first", prompt(0))
        engine.flush()
        engine.reset()
        host = engine.inspect.context.full.host
        if why == "the store hangs":
            store.hold()
        else:
            taken = host.alloc(host.available())
        engine.prefetch("waits", prompt(0), mode="timeout")
        store.trouble = lambda verb: store.calls.clear()
        eventually(lambda: engine.poll() or store.held or engine.stats()["prefetch.deferred_requests"])
        sizes = []
        for numbers in (range(100), range(100, 200)):
            for number in numbers:
                tokens = prompt(number + 1 if why == "the store hangs" else 0)
                engine.prefetch(f"r{number}", tokens, mode="best_effort")
                engine.poll()
                engine.cancel(f"r{number}")
            if why != "the store hangs":
                engine.flush()  # cancelled reads end
            prefetcher = engine.inspect.prefetcher
            assert prefetcher is not None
            eventually(lambda: engine.poll() or not prefetcher._jobs.num_awaited_lookups)  # noqa: B023
            sizes.append(held_bytes(engine))
        assert sizes[1] - sizes[0] < NOISE_BYTES
        engine.cancel("waits")
        if why == "the store hangs":
            store.allow()
        else:
            host.free(taken)
        engine.flush()
        engine.check()
