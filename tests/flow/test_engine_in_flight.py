"""Nodes, slots and states while copies of them are in flight. Tests run random histories with splits, aborts and
failures, and check requests that need capacity during copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from component_case import EACH_MODEL, FULL, MODELS, WINDOWS, WITH_COMPONENTS, compute, config, prefill, verify
from engine_fuzz import EngineFuzz, run
from hicache import CacheEngine, CacheRequest, Lease, ModelGeometry, build_engine
from hicache.errors import OutOfSlots, TransferError
from hicache.flow.components.base import Admission, CacheComponent
from hicache.flow.cost import LoadEstimate
from hicache.flow.page_transfer import Copy
from hicache.pages.node import TreeNode
from hicache.tiers import FULL as FULL_KV
from hicache.tiers import SWA
from hicache.transfer.cpu import CpuOp
from stepped_transfer import SteppedTransfers
from toy_model import prompt, settled

DOWN = RuntimeError("the link is down")


def engine_with_stepped_copies(model: ModelGeometry, **changes: object) -> tuple[CacheEngine, SteppedTransfers]:
    """A started engine whose copies run when the test steps them."""
    engine = build_engine(config(**{"window_tokens": 256, **changes}), model)
    transfers = SteppedTransfers(engine)
    engine.start()
    return engine, transfers


def serve(engine: CacheEngine, transfers: SteppedTransfers, name: str, tokens: np.ndarray, model: ModelGeometry) -> int:
    """Serve a request to its end, with all copies completed. Returns the number of cached tokens."""
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        transfers.finish()
        prefill(engine, lease, tokens, model)
    engine.flush()
    return lease.cached_len


def push_to_host(engine: CacheEngine, transfers: SteppedTransfers, model: ModelGeometry, *prompts: np.ndarray) -> None:
    """Serve other prompts until only the host has `prompts`."""
    for n in range(50, 60):
        if not any(engine.lookup(tokens).device for tokens in prompts):
            break
        serve(engine, transfers, f"other{n}", prompt(n, 100), model)
    assert all(engine.lookup(tokens).host for tokens in prompts)


def push_windows_to_host(engine: CacheEngine, transfers: SteppedTransfers, tokens: np.ndarray) -> None:
    """Serve other prompts until the device has evicted the windows, but not the pages, of the end of `tokens`."""
    for n in range(50, 60):
        tree = engine.inspect.context.tree
        if not tree.pages[SWA].has(tree.match(tokens[:40]).rows[-1:]).all():
            break
        serve(engine, transfers, f"other{n}", prompt(n, 41), WINDOWS)


def fail_first(engine: CacheEngine, transfers: SteppedTransfers, component: int = 0) -> None:
    """Make the next load of a component fail. Later loads stay in flight."""
    link = transfers.up[component]
    link.fails = DOWN
    link.step()
    link.fails = None
    engine.poll()
    engine.check()


def end_loads(engine: CacheEngine, transfers: SteppedTransfers, ok: bool, component: int = 0) -> None:
    """End all loads. Loads of `component` fail unless `ok`."""
    transfers.up[component].fails = None if ok else DOWN
    transfers.finish()
    transfers.up[component].fails = None
    engine.poll()
    engine.check()


def test_a_load_fails_with_the_one_that_it_continues() -> None:
    """Two requests load two parts of one prefix, and the load of the first part fails. Both requests get the error, the
    host still has both parts, and no slot is allocated while the second load can still write to that slot."""
    engine, transfers = engine_with_stepped_copies(FULL)
    whole = prompt(1, 81)
    serve(engine, transfers, "a", whole, FULL)
    push_to_host(engine, transfers, FULL, whole)
    one = engine.acquire(CacheRequest("b", whole[:41]))
    two = engine.acquire(CacheRequest("c", whole))
    assert (one.hit.host, two.hit.device, two.hit.host) == (40, 40, 40)
    fail_first(engine, transfers)
    for lease in (one, two):
        with pytest.raises(TransferError):
            engine.commit(lease, whole[: lease.length])
        engine.release(lease)
        engine.check()
    num_free = int(engine.stats()["device.free_tokens"])
    other = prompt(7, num_free)
    taker = engine.acquire(CacheRequest("d", other))
    compute(engine, taker, other, 0, num_free, FULL)
    transfers.finish()
    engine.poll()
    verify(engine, taker, other, num_free, FULL)
    engine.release(taker)
    assert serve(engine, transfers, "e", whole, FULL) == 80
    settled(engine)
    engine.close()


@pytest.mark.parametrize("model", EACH_MODEL)
@pytest.mark.parametrize("ok", [True, False])
def test_pages_computed_during_a_load_do_not_depend_on_it(model: ModelGeometry, ok: bool) -> None:
    """A request has computed pages that another request is loading. The request that computes keeps its own slots until
    the load has ended, so a failed load does not affect this request. After that, its commit adds the pages to the
    tree."""
    engine, transfers = engine_with_stepped_copies(model, device_tokens=256)
    first = prompt(1, 48)
    serve(engine, transfers, "a", np.append(first, 1), model)
    for n in range(50, 56):
        serve(engine, transfers, f"other{n}", prompt(n, 100), model)
    longer = np.concatenate([first, prompt(3, 17)])
    with pytest.MonkeyPatch.context() as patch:
        never = LoadEstimate(math.inf, 0.0)  # the request computes all pages that only the host has
        patch.setattr(engine.inspect.copies, "estimate", lambda *_: never)
        own = engine.acquire(CacheRequest("b", longer))
    assert own.hit.host == 0 and own.cached_len < 48
    loading = engine.acquire(CacheRequest("c", np.append(first, 1)))
    assert loading.hit.host > 0
    compute(engine, own, longer, own.cached_len, 64, model)
    engine.commit(own, longer[:64])
    assert own.tree_len == loading.hit.device and not own.loads
    engine.check()
    end_loads(engine, transfers, ok)
    verify(engine, own, longer, 64, model)
    engine.commit(own, longer[:64])
    assert own.tree_len == 64
    for lease in (own, loading):
        engine.release(lease)
    engine.flush()
    assert serve(engine, transfers, "d", longer, model) == 64
    assert engine.inspect.context.tree.protected(FULL_KV) == 0
    settled(engine)
    engine.close()


def test_window_slots_of_an_abandoned_load_are_not_written_later() -> None:
    """Two requests load two windows of one prefix, whose full pages are on the device. The first of two loads fails,
    and the second load fails with it. The next owners of these window slots read the values that they wrote."""
    engine, transfers = engine_with_stepped_copies(WINDOWS, window_tokens=128, device_tokens=1024)
    whole = prompt(1, 41)
    serve(engine, transfers, "a", whole, WINDOWS)
    push_windows_to_host(engine, transfers, whole)
    loading = [engine.acquire(CacheRequest("b", whole[:25])), engine.acquire(CacheRequest("c", whole))]
    assert [lease.hit.device for lease in loading] == [24, 40] and [len(link) for link in transfers.up] == [0, 2]
    fail_first(engine, transfers, 1)
    for lease in loading:
        engine.release(lease)
    others = [prompt(n, 24) for n in range(80, 84)]  # these prompts take nearly all window slots
    taking = [engine.acquire(CacheRequest(f"d{n}", tokens)) for n, tokens in enumerate(others)]
    for lease, tokens in zip(taking, others, strict=True):
        compute(engine, lease, tokens, 0, 24, WINDOWS)
    transfers.finish()
    engine.poll()
    for lease, tokens in zip(taking, others, strict=True):
        verify(engine, lease, tokens, 24, WINDOWS)
        engine.release(lease)
    assert serve(engine, transfers, "e", whole, WINDOWS) == 40
    settled(engine)
    engine.close()


@pytest.mark.parametrize("model", EACH_MODEL)
def test_a_request_is_refused_only_while_copies_are_in_flight(model: ModelGeometry) -> None:
    """The refusal names poll() and the tokens of copies in flight. When the copies in flight have ended, the next
    attempt applies the copies and is admitted without a poll."""
    engine, transfers = engine_with_stepped_copies(model, device_tokens=64, write_policy="write_through")
    with engine.acquire(CacheRequest("first", prompt(0, 41))) as lease:
        prefill(engine, lease, prompt(0, 41), model)
    with pytest.raises(OutOfSlots, match=r"40 tokens .*poll\(\)") as refused:
        engine.acquire(CacheRequest("second", prompt(1, 41)))
    assert refused.value.in_flight == 40
    for link in transfers.down:
        link.run_all()
    engine.release(engine.acquire(CacheRequest("second", prompt(1, 41))))
    settled(engine)
    engine.close()


def test_a_backup_locks_no_page_after_its_last_one() -> None:
    """The host has capacity for two of five pages. The device can evict the other three while the two are copied."""
    engine, _ = engine_with_stepped_copies(FULL, device_tokens=64, host_bytes=3 * 8 * 192, write_policy="write_through")
    with engine.acquire(CacheRequest("first", prompt(0, 41))) as lease:
        prefill(engine, lease, prompt(0, 41), FULL)
    assert engine.inspect.copies.num_in_flight(FULL_KV) == engine.inspect.context.tree.protected(FULL_KV) == 16
    engine.release(engine.acquire(CacheRequest("second", prompt(1, 41))))
    engine.check()
    settled(engine)
    engine.close()


def test_copies_are_one_with_those_that_are_submitted_later() -> None:
    """A copy is added to a group of copies that have already ended. The group reports its bytes and its failure."""
    op, early, late = Copy(), CpuOp(10), CpuOp(20)
    op.add(early)
    early.run(lambda: None)
    assert op.done() and op.error is None and op.num_bytes == 10
    op.add(late)
    assert not op.done() and op.num_bytes == 30
    late.error = TransferError("a copy fails")
    late.run(lambda: None)
    assert op.done() and op.error is late.error


@pytest.mark.parametrize("model", WITH_COMPONENTS)
def test_victims_are_not_freed_under_a_copy_whose_companion_raised(
    model: ModelGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under write_back the full pages of a victim are being copied when the copy of its windows or state raises. The
    call raises after the first copy has ended, because the next owner of the slots writes to them."""
    engine, transfers = engine_with_stepped_copies(model, write_policy="write_back")
    with engine.acquire(CacheRequest("first", prompt(1, 65))) as lease:
        prefill(engine, lease, prompt(1, 65), model)

    def fail(*_: object) -> None:
        raise DOWN

    with monkeypatch.context() as patch:
        patch.setattr(engine.inspect.context.components[1].transfer, "store", fail)
        with pytest.raises(RuntimeError, match="the link is down"):
            engine.acquire(CacheRequest("second", prompt(2, 120)))
    assert not transfers.links
    engine.check()
    settled(engine)
    engine.close()


@pytest.mark.parametrize(
    ("seed", "packing"), [(0, "off"), (1, "off"), (2, "off"), (3, "off"), (6, "off"), (0, "3"), (3, "4")]
)
@pytest.mark.parametrize("kind", MODELS)
def test_random_histories(device: str, kind: str, seed: int, packing: str) -> None:
    """Requests split nodes, abort, and call while copies and stores fail or stall. Every pass reads the true values,
    all accounts hold after every step, and at the end nothing is held. Packed host pages include some that do not
    fit."""
    run(kind, seed, 120, device, is_rough=seed > 2, packing=packing)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first_seed", range(1000, 11000, 1000))
@pytest.mark.parametrize("packing", ["off", "4"])
@pytest.mark.parametrize("kind", MODELS)
def test_many_random_histories(kind: str, packing: str, first_seed: int) -> None:
    """Longer histories: in the thorough profile five of each kind, 300 in all."""
    for seed in range(first_seed, first_seed + max(1, settings.default.max_examples // 30)):
        run(kind, seed, 240, is_rough=True, packing=packing)


@pytest.mark.parametrize("kind", MODELS)
def test_an_admission_keeps_exactly_the_pages_of_its_lock(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random histories, the lock of a prefix reduces the evictable pages of each component by the number that
    admission counted before. The lock includes windows and states of a prefix whose end is loaded."""
    fuzz = EngineFuzz(kind, seed=4)
    tree = fuzz.engine.inspect.context.tree
    lock, unlock, acquire = tree.lock, tree.unlock, fuzz.engine.acquire
    counted = dict[str, int]()
    sizes = dict[str, list[int]]()

    def fits(component: CacheComponent, fits_now: Callable[[Admission], bool], admission: Admission) -> bool:
        counted[component.name] = tree.to_protect(
            component.name, admission.match, admission.device_len, admission.length
        )
        return fits_now(admission)

    def lock_once(node: TreeNode, ahead: int = 0) -> None:
        before = {name: tree.evictable(name) for name in counted}
        lock(node, ahead)
        for name, size in counted.items():
            assert before[name] - tree.evictable(name) == size
            sizes.setdefault(name, []).append(size)
        counted.clear()

    def acquire_one(request: CacheRequest) -> Lease:
        try:
            return acquire(request)
        finally:
            counted.clear()

    def unlock_other(*args: Any) -> None:
        counted.clear()  # a staged load released pages for the request, so the counted number has changed
        unlock(*args)

    monkeypatch.setattr(tree, "unlock", unlock_other)
    for component in fuzz.engine.inspect.context.components:
        monkeypatch.setattr(component, "fits_now", partial(fits, component, component.fits_now))
    monkeypatch.setattr(tree, "lock", lock_once)
    monkeypatch.setattr(fuzz.engine, "acquire", acquire_one)
    fuzz.run(250)
    assert len(sizes) == len(fuzz.engine.inspect.context.components)
    assert all(any(found) for found in sizes.values())
