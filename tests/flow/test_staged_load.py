"""Device and host under the write policy "exclusive": they hold different pages and exchange them in steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from component_case import EACH_MODEL, FULL, STATES, WINDOWS, WITH_COMPONENTS, compute, config, prefill, serve
from disk_case import TroubledStore, failing, page_keys
from hicache import AdvancedConfig, CacheEngine, CacheRequest, Lease, ModelGeometry, build_engine
from hicache.errors import ExchangePending, NotStored, OutOfSlots, TransferBusy
from hicache.flow.page_transfer import Load, settle
from hicache.flow.write_policy import OnEviction
from hicache.metrics import HistogramValue
from hicache.replay.cache import ReplaySettings
from memory_store import MemoryPageStore
from stepped_transfer import SteppedTransfers
from toy_model import flush_error, prompt, settled
from waiting import BOUND_S, eventually

# 16 pages and windows of eight tokens on the device, and 16 on the host.
SIZES = {"device_tokens": 128, "host_bytes": 17 * 8 * 192, "write_policy": "exclusive", "window_tokens": 152}
WITH_STATES = {"mamba_size": 40, "host_states": 40, "host_bytes": 17 * 8 * 128 + 41 * 312}


@pytest.fixture(params=EACH_MODEL)
def model(request: pytest.FixtureRequest) -> ModelGeometry:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def built(model: ModelGeometry) -> CacheEngine:
    return build_engine(config(**SIZES | (WITH_STATES if model is STATES else {})), model)


@pytest.fixture
def transfers(built: CacheEngine) -> SteppedTransfers:
    """The copies of the engine. A copy runs when a test steps it or waits for it."""
    return SteppedTransfers(built)


@pytest.fixture
def engine(built: CacheEngine, transfers: SteppedTransfers) -> Iterator[CacheEngine]:
    """A started engine. At the end of the test all accounts of the engine must hold."""
    with built as engine:
        yield engine
        settled(engine)


def test_two_tiers_have_the_hits_of_one_as_large_as_both(engine: CacheEngine, model: ModelGeometry) -> None:
    """Two prompts of 15 pages take turns. All pages of the one are loaded from the host while the pages of the other
    are copied to the host, in steps of one page, and no page is lost. All pages that return to the host are counted."""
    prompts = [prompt(n, 121) for n in range(2)]
    for n, tokens in enumerate(prompts):
        serve(engine, f"first{n}", tokens, model, 8)
    for n in range(4):
        tokens, other = prompts[n % 2], prompts[1 - n % 2]
        assert engine.lookup(tokens).host == 120 == engine.lookup(other).device
        with engine.acquire(CacheRequest(f"again{n}", tokens, reserve_tokens=0)) as lease:
            engine.flush()
            prefill(engine, lease, tokens, model)
        assert (lease.hit.device, lease.hit.host) == (0, 120)
        assert (engine.lookup(tokens).device, engine.lookup(other).host) == (120, 120)
    stats = engine.stats()
    assert stats["evict.host_lost_tokens"] == stats["evict.device_lost_tokens"] == 0
    assert stats["host.duplicate_tokens"] <= 2 * 8 < 3 * 120 - 2 * 8 <= stats["host.returned_tokens"]


@pytest.mark.parametrize("write_policy", ["exclusive", "write_back"])
def test_a_flush_stores_pages_of_the_device_alone(write_policy: str) -> None:
    """A flush copies pages that only the device has in steps of a page, so that both tiers keep their other pages. A
    second flush copies nothing."""
    store, prompts = MemoryPageStore(1 << 20), [prompt(n, 121) for n in range(2)]
    with build_engine(config(**SIZES | {"write_policy": write_policy}), FULL, store=store) as engine:
        for n, tokens in enumerate(prompts):
            with engine.acquire(CacheRequest(f"first{n}", tokens)) as lease:
                prefill(engine, lease, tokens, FULL)
        keys = [key for tokens in prompts for key in page_keys(engine, tokens[:120])]
        assert not any(store.contains(page_keys(engine, prompts[1][:120])))
        engine.flush()
        assert all(store.contains(keys))
        assert engine.lookup(prompts[1]).device == 120
        assert write_policy != "exclusive" or len([*engine.inspect.context.full.pages]) >= 15
        assert write_policy != "exclusive" or engine.stats()["host.duplicate_tokens"] <= 2 * 8
        num_copied = engine.stats()["backup.bytes"]
        engine.flush()
        assert (engine.stats()["backup.bytes"], store.stats().puts) == (num_copied, 30)
        settled(engine)


@pytest.mark.parametrize("write_policy", ["exclusive", "write_back"])
def test_a_flush_raises_for_pages_of_the_device_alone(write_policy: str) -> None:
    """A flush raises as long as the store refuses pages that only the device has. Meanwhile the device evicts no page
    that only it has, and a later flush stores all these pages."""
    store = TroubledStore(MemoryPageStore(1 << 20))
    store.trouble = failing(OSError("a bad sector"), "put")
    advanced = AdvancedConfig(disk_reopen_backoff_s=1e-3, disk_max_reopen_backoff_s=1e-3)
    with build_engine(
        config(**SIZES | {"write_policy": write_policy, "advanced": advanced}), FULL, store=store
    ) as engine:
        with engine.acquire(CacheRequest("first", prompt(0, 121))) as lease:
            prefill(engine, lease, prompt(0, 121), FULL)
        for _ in range(2):
            with pytest.raises(NotStored, match=r"^15 pages .*a bad sector"):
                engine.flush()
        assert engine.lookup(prompt(0, 121)).device == 120
        store.trouble = lambda verb: None
        eventually(lambda: flush_error(engine) is None, engine.stats)
        assert all(store.contains(page_keys(engine, prompt(0, 121)[:120])))
        settled(engine)


def test_pages_computed_although_on_the_host_are_duplicates(engine: CacheEngine, model: ModelGeometry) -> None:
    """A request computes pages although the host has them, because a load would not pay. The host evicts these
    duplicates before pages that only the host has."""
    first, second = prompt(0, 121), prompt(1, 57)
    serve(engine, "first", first, model, 8)
    serve(engine, "second", second, model, 8)
    assert (engine.lookup(first).device, engine.lookup(first).host) == (64, 56)
    with engine.acquire(CacheRequest("again", first, max_cached_tokens=0)) as lease:
        assert lease.cached_len == 0
        prefill(engine, lease, first, model)
    engine.check()
    assert engine.stats()["host.duplicate_tokens"] == 72 and engine.lookup(second).host == 56
    serve(engine, "third", prompt(2, 57), model, 8)
    assert engine.stats()["host.duplicate_tokens"] < 72
    assert len(engine.inspect.context.full.pages.held(page_keys(engine, second[:56]))) == 7


def test_a_failed_staged_load_keeps_its_completed_steps(
    engine: CacheEngine, model: ModelGeometry, transfers: SteppedTransfers
) -> None:
    """The steps that were completed stay on the device. The later pages are still on the host, and the next request
    loads them."""
    prompts = [prompt(n, 121) for n in range(2)]
    for n, tokens in enumerate(prompts):
        serve(engine, f"first{n}", tokens, model, 8)
    submit, up, left = engine.inspect.copies.load, transfers.up[0], 4

    def submitting(*args: Any) -> Load:
        nonlocal left
        left -= 1
        up.fails = ConnectionError("the link is down") if not left else None
        return submit(*args)

    engine.inspect.copies.load = submitting  # type: ignore[method-assign]
    with pytest.raises(TransferBusy):
        engine.acquire(CacheRequest("fails", prompts[0], reserve_tokens=0))
    engine.flush()
    engine.check()
    found = engine.lookup(prompts[0])
    assert (found.device, found.host) == (24, 96) and engine.lookup(prompts[1]).device < 120


@pytest.mark.parametrize("model", [FULL])
def test_a_request_that_could_be_admitted_keeps_nothing_of_a_load_that_fails(
    engine: CacheEngine, model: ModelGeometry, transfers: SteppedTransfers
) -> None:
    """A request could be admitted while its prefix is still being loaded for another request, and this load fails. The
    request gets TransferBusy, and all slots are free."""
    first, _ = serve_two_prompts(engine, model)
    engine.acquire(CacheRequest("other", first[:33], reserve_tokens=0))
    require_pending(engine, 1, first[:41])
    while not engine.stats()["device.free_tokens"]:
        transfers.down[0].run_all()
        engine.poll()
    transfers.up[0].fails = ConnectionError("the link is down")
    engine.cancel("other")
    settle([engine.inspect.copies], BOUND_S)
    engine.check()  # the exchange still reads from the failed load
    engine.flush()
    engine.check()
    with pytest.raises(TransferBusy):
        engine.acquire(CacheRequest("r1", first[:41], reserve_tokens=0))
    transfers.up[0].fails = None


def copies_and_waits(engine: CacheEngine) -> tuple[int, int]:
    """The number of backups of evicted pages, and how many of them a call waited for."""
    exposed = engine.metrics()["backup.exposed_seconds"]
    assert isinstance(exposed, HistogramValue)
    return exposed.count, sum(exposed.counts[1:])


def request_that_does_not_wait(number: int, tokens: np.ndarray) -> CacheRequest:
    return CacheRequest(f"r{number}", tokens, reserve_tokens=0, may_wait=False)


def require_pending(engine: CacheEngine, number: int, tokens: np.ndarray) -> None:
    """Check that a request that does not wait is refused, and that its staged load begins."""
    with pytest.raises(ExchangePending):
        engine.acquire(request_that_does_not_wait(number, tokens))


def admit(
    engine: CacheEngine, transfers: SteppedTransfers, number: int, tokens: np.ndarray, *, max_polls: int
) -> Lease | None:
    """Admit a request after as few polls as possible. All copies end before each poll. Returns the lease of the
    request."""
    require_pending(engine, number, tokens)
    for _ in range(max_polls):
        transfers.finish()
        engine.poll()
        engine.check()
        with contextlib.suppress(ExchangePending):
            return engine.acquire(request_that_does_not_wait(number, tokens))
    return None


def serve_two_prompts(engine: CacheEngine, model: ModelGeometry, first_len: int = 121) -> list[np.ndarray]:
    """Serve two prompts. Then the host holds the first one contiguously, and the device holds the second, of 15
    pages."""
    prompts = [prompt(0, first_len), prompt(1, 121)]
    for n, tokens in enumerate(prompts):
        serve(engine, f"first{n}", tokens, model)
    return prompts


def test_a_request_that_does_not_wait_is_admitted_when_all_but_the_last_step_is_there(
    engine: CacheEngine, model: ModelGeometry, transfers: SteppedTransfers
) -> None:
    """Each poll makes one step, and admission waits for no copy. The request has the same hit as one that waits, and no
    page is lost."""
    prompts = serve_two_prompts(engine, model)
    first = copies_and_waits(engine)
    for number in range(4):
        lease = admit(engine, transfers, number, prompts[number % 2], max_polls=40)
        assert lease is not None and (lease.hit.device, lease.hit.host) == (0, 120)
        (load,) = engine.inspect.copies.loads
        assert len(load.pages["full"].rows) == 1
        transfers.finish()
        prefill(engine, lease, prompts[number % 2], model)
        engine.release(lease)
        engine.flush()
    stats, (num_copies, num_waits) = engine.stats(), copies_and_waits(engine)
    assert stats["evict.host_lost_tokens"] == stats["evict.device_lost_tokens"] == 0
    assert num_copies >= first[0] + 4 * 14 and num_waits <= first[1] + 4  # for the token after each prompt


def test_shared_pages_are_loaded_in_steps(engine: CacheEngine, model: ModelGeometry) -> None:
    """Pages that another user has locked stay on the host while they are loaded in steps. The last step has locked its
    own pages."""
    first, _ = serve_two_prompts(engine, model)
    pages = engine.inspect.context.full.pages
    rows = pages.held(page_keys(engine, first[:120]))
    pages.lock(rows)
    with engine.acquire(CacheRequest("again", first, reserve_tokens=0)) as lease:
        assert (lease.hit.device, lease.hit.host) == (0, 120) and pages.order.locks[rows[-1]] == 2
        engine.flush()
    assert len(rows) == 15 and pages.has(rows).all() and (pages.order.locks[rows] == 1).all()
    pages.unlock(rows)


def test_capacity_ready_for_one_request_serves_another_one(
    engine: CacheEngine, model: ModelGeometry, transfers: SteppedTransfers
) -> None:
    """The engine has freed most of the device for a first request, which does not return. Another request, which only
    fits in that capacity, is admitted."""
    first, _ = serve_two_prompts(engine, model)
    require_pending(engine, 0, first)
    while engine.poll():
        transfers.finish()
    assert engine.stats()["device.protected_tokens"] >= 104
    engine.release(engine.acquire(CacheRequest("other", prompt(2, 121))))


@pytest.mark.parametrize("num_polls", (0, 3, 7, 14))
@pytest.mark.parametrize("end", ["cancelled", "for another", "failed up", "failed down", "stalled"])
def test_an_exchange_may_end_at_every_moment(
    engine: CacheEngine, model: ModelGeometry, transfers: SteppedTransfers, end: str, num_polls: int
) -> None:
    """During an exchange the request is cancelled, another request arrives, or a copy in one direction fails or is
    late. All accounts hold, and both prompts are on one of the tiers, except for pages whose copy to the host failed.
    The host also keeps windows that the device has. So windows of one prompt may find no host page when their load
    fails."""
    first, second = serve_two_prompts(engine, model)
    lease = admit(engine, transfers, 0, first, max_polls=num_polls)
    up, down = transfers.up[0], transfers.down[0]
    if end == "cancelled":
        engine.cancel("r0")
    elif end == "for another" and lease is None:  # the exchange waits for copies in flight
        with pytest.raises((ExchangePending, OutOfSlots)):
            engine.acquire(request_that_does_not_wait(1, second))
        engine.cancel("r0")
        engine.flush()  # the last load of the exchange locks the pages before it
        with engine.acquire(CacheRequest("r1", second, reserve_tokens=0)) as taken:
            assert taken.hit.tokens >= 104
    elif end in ("failed up", "failed down"):
        link = up if end == "failed up" else down
        link.fails = ConnectionError("the link is down")
        transfers.finish()
        link.fails = None
    elif end == "stalled":  # no step begins before the previous one has ended, even if slots are free
        for _ in range(5):
            down.run_all()
            engine.poll()
            assert len(engine.inspect.copies.loads) <= 1
    engine.check()
    engine.poll()
    engine.check()
    engine.cancel("r0")
    engine.flush()
    engine.check()
    num_held = sum(found.device + found.host for found in map(engine.lookup, (first, second)))
    assert num_held >= 232 or end == "failed down" or (end == "failed up" and model is WINDOWS)


def test_an_engine_closes_while_pages_are_exchanged() -> None:
    engine = build_engine(config(**SIZES), FULL)
    transfers = SteppedTransfers(engine)
    with engine:
        first, _ = serve_two_prompts(engine, FULL)
        assert admit(engine, transfers, 0, first, max_polls=5) is None
        tree = engine.inspect.context.tree
        assert tree.protected("full") > 0
    assert tree.protected("full") == 0


def test_another_request_may_compute_pages_of_a_staged_load(
    engine: CacheEngine, model: ModelGeometry, transfers: SteppedTransfers
) -> None:
    """Another request computes pages of a staged load. When the first request tries again, the other pages are
    loaded."""
    first, _ = serve_two_prompts(engine, model, 81)
    with engine.acquire(CacheRequest("own", first[:33], max_cached_tokens=0)) as own:
        assert admit(engine, transfers, 0, first, max_polls=2) is None
        transfers.up[0].run_all()  # the backups of the next step have not ended
        engine.poll()
        prefill(engine, own, first[:33], model)
        assert engine.lookup(first).device == 32
    lease = admit(engine, transfers, 0, first, max_polls=40)
    assert lease is not None and lease.hit.tokens == 80
    engine.release(lease)


def test_a_request_waits_for_pages_in_flight_to_the_host(
    engine: CacheEngine, model: ModelGeometry, transfers: SteppedTransfers
) -> None:
    """A request whose pages have left the device and are still being copied to the host computes none of them."""
    first, second = serve_two_prompts(engine, model)
    require_pending(engine, 0, first)
    assert len(transfers.down[0])
    require_pending(engine, 1, second)
    engine.cancel("r0")
    with engine.acquire(CacheRequest("r1", second, reserve_tokens=0)) as lease:
        assert lease.hit.tokens == 120


def test_pages_are_evicted_before_their_slots_are_needed(
    engine: CacheEngine, model: ModelGeometry, transfers: SteppedTransfers
) -> None:
    """Pages are backed up while a chunk is computed, so that their slots are free for the next chunk. The prompt waits
    for no copy."""
    serve(engine, "first", prompt(0, 121), model, 8)
    tokens = prompt(1, 121)
    with engine.acquire(CacheRequest("second", tokens, reserve_tokens=8, may_wait=True)) as lease:
        for end in range(8, 121, 8):
            if end > lease.length:
                engine.extend(lease, end - lease.length)
            compute(engine, lease, tokens, end - 8, end, model)
            engine.commit(lease, tokens[:end])
            engine.poll()
            transfers.finish()
            engine.poll()
    num_copies, num_waits = copies_and_waits(engine)
    assert num_copies > 10 and num_waits <= 1


@pytest.mark.parametrize("model", WITH_COMPONENTS)
def test_no_call_waits_where_windows_or_states_alone_have_to_leave(model: ModelGeometry) -> None:
    """If only windows or states must be evicted, a request is admitted when they are on the host. All full pages stay
    on the device."""
    sizes = {"device_tokens": 1024, "window_tokens": 88, "mamba_size": 16}
    engine, num_pending = build_engine(config(**SIZES | sizes | {"host_bytes": 60 * 8 * 256}), model), 0
    transfers = SteppedTransfers(engine)
    with engine, contextlib.ExitStack() as before:
        for n in range(12):
            request = CacheRequest(f"r{n}", prompt(n % 4, 41), reserve_tokens=8, may_wait=False)
            for _ in range(20):
                with contextlib.suppress(ExchangePending):
                    lease = engine.acquire(request)
                    break
                num_pending += 1
                engine.poll()
                transfers.finish()
                engine.poll()
                engine.check()
            before.close()
            assert n < 4 or (lease.hit.device, lease.cached_len) == (40, 40)
            transfers.finish()
            for start in range(lease.cached_len, 41, 8):
                if (end := min(start + 8, 41)) > lease.length:
                    engine.extend(lease, end - lease.length)
                compute(engine, lease, prompt(n % 4, 41), start, end, model)
                engine.commit(lease, prompt(n % 4, 41)[:end])
                engine.poll()
                transfers.finish()
                engine.poll()
            before.enter_context(lease)
        before.close()
        (num_copies, num_waits), stats = copies_and_waits(engine), engine.stats()
        assert num_pending and num_copies > num_waits == 0 and stats["restore.bytes"] > 0
        assert stats["evict.device_demoted_tokens"] == stats["evict.device_lost_tokens"] == 0
        settled(engine)


def test_the_engine_and_the_replay_choose_the_policy_that_is_not_set() -> None:
    """Without a configured policy, device and host hold different pages, unless other engines must find the pages in a
    store."""
    sizes = {"device_tokens": 128, "host_bytes": 17 * 8 * 256}
    for model, store, expected in (
        (FULL, None, "exclusive"),
        (FULL, MemoryPageStore(1 << 20), "write_through"),
        (WINDOWS, None, "exclusive"),
        (STATES, None, "exclusive"),
    ):
        with build_engine(config(**sizes), model, store=store) as engine:
            assert engine.inspect.context.config.write_policy == expected
            assert (engine.inspect.context.exclusive is not None) == (expected == "exclusive")
        with build_engine(config(**sizes, write_policy="write_back"), model, store=store) as engine:
            assert (
                engine.inspect.context.write_policy.on_eviction is not OnEviction.DROP
                and engine.inspect.context.exclusive is None
            )
    assert [ReplaySettings(4, 4, disk).write_policy for disk in (0, 4, None)] == ["exclusive", *["write_through"] * 2]
