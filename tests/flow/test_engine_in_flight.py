"""What happens to nodes, slots and states while copies of them are in flight: splits, aborts and failures.

Copies are stepped by the test (`stepped_transfer`), so that each interleaving is the one that its test names.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from component_case import EACH_MODEL, FULL, MODELS, STATES, WINDOWS, WITH_COMPONENTS, compute, config, prefill, verify
from engine_fuzz import EngineFuzz, run
from hicache import CacheEngine, CacheRequest, Lease, ModelGeometry, build_engine
from hicache.errors import OutOfSlots, ResourceExhausted, TransferBusy, TransferError
from hicache.flow.cost import LoadEstimate
from hicache.flow.movement import Copy
from hicache.pages.node import TreeNode
from hicache.pages.tree_results import Match
from hicache.tiers import FULL as FULL_KV
from hicache.tiers import SWA
from hicache.transfer.cpu import CpuOp
from memory_store import MemoryPageStore
from stepped_transfer import SteppedTransfers
from toy_model import prompt, settled

DOWN = RuntimeError("the link is down")


def stepped(model: ModelGeometry, **changes: object) -> tuple[CacheEngine, SteppedTransfers]:
    """A started engine whose copies wait to be stepped."""
    engine = build_engine(config(**{"window_tokens": 256, **changes}), model)
    transfers = SteppedTransfers(engine)
    engine.start()
    return engine, transfers


def serve(engine: CacheEngine, transfers: SteppedTransfers, name: str, tokens: np.ndarray, model: ModelGeometry) -> int:
    """A whole request, all copies let through; returns what it reused."""
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        transfers.finish()
        prefill(engine, lease, tokens, model)
    engine.flush()
    return lease.cached_len


def push_to_host(engine: CacheEngine, transfers: SteppedTransfers, model: ModelGeometry, *prompts: np.ndarray) -> None:
    """Serve others until the device has nothing of `prompts`, which the host keeps."""
    for n in range(50, 60):
        if not any(engine.lookup(tokens).device for tokens in prompts):
            break
        serve(engine, transfers, f"other{n}", prompt(n, 100), model)
    assert all(engine.lookup(tokens).host for tokens in prompts)


def push_windows_to_host(engine: CacheEngine, transfers: SteppedTransfers, tokens: np.ndarray) -> None:
    """Serve others until the end of a prompt, whose pages stay, has lost its windows."""
    for n in range(50, 60):
        tree = engine.inspect.context.tree
        if not tree.pages[SWA].has(tree.match(tokens[:40]).rows[-1:]).all():
            break
        serve(engine, transfers, f"other{n}", prompt(n, 41), WINDOWS)


def fail_first(engine: CacheEngine, transfers: SteppedTransfers, component: int = 0) -> None:
    """The next load of a component fails, and those after it wait."""
    link = transfers.up[component]
    link.fails = DOWN
    link.step()
    link.fails = None
    engine.poll()
    engine.check()


def end_loads(engine: CacheEngine, transfers: SteppedTransfers, ok: bool, component: int = 0) -> None:
    """All loads end; those of a component fail unless `ok`."""
    transfers.up[component].fails = None if ok else DOWN
    transfers.finish()
    transfers.up[component].fails = None
    engine.poll()
    engine.check()


def close(engine: CacheEngine) -> None:
    settled(engine)
    engine.close()


def test_a_state_under_a_load_is_free_when_the_load_has_ended() -> None:
    """A request is aborted while its state is being loaded: nobody gets that state before the copy has ended, so the
    copy writes over nobody's."""
    engine, transfers = stepped(STATES, mamba_size=4, device_tokens=512, max_requests=2)
    first = prompt(1, 41)
    serve(engine, transfers, "a", first, STATES)
    for n in (2, 3):
        serve(engine, transfers, f"b{n}", prompt(n, 41), STATES)
    aborted = engine.acquire(CacheRequest("c", first))
    assert aborted.cached_len == 40 and transfers.links
    engine.cancel("c")
    engine.check()
    fresh = prompt(9, 40)
    lease = None
    while lease is None:
        try:
            lease = engine.acquire(CacheRequest("d", fresh))
        except ResourceExhausted:
            transfers.links[0].step()
            engine.poll()
    transfers.finish()
    engine.poll()
    verify(engine, lease, fresh, 0, STATES)  # a state of zeros
    prefill(engine, lease, fresh, STATES, 40)
    engine.release(lease)
    assert serve(engine, transfers, "e", first, STATES) == 40
    close(engine)


def test_a_load_fails_with_the_one_that_it_continues() -> None:
    """Two requests load two parts of one prefix; when the first part fails, both are told, both parts are on the host
    as before, and no slot is used again while the second part's copy may still write to it."""
    engine, transfers = stepped(FULL)
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
    close(engine)


@pytest.mark.parametrize("is_loaded_again", [False, True])
def test_a_request_ends_whose_load_has_failed(is_loaded_again: bool) -> None:
    """The rows of its pages stay until its end: if another request has loaded these pages, and more, and if no tier of
    memory has them any more."""
    engine = build_engine(config(window_tokens=256), FULL, store=MemoryPageStore(1 << 20))
    transfers = SteppedTransfers(engine)
    engine.start()
    whole = prompt(1, 81)
    serve(engine, transfers, "a", whole, FULL)
    push_to_host(engine, transfers, FULL, whole)
    lease = engine.acquire(CacheRequest("b", whole[:41]))
    fail_first(engine, transfers)
    if is_loaded_again:
        assert serve(engine, transfers, "c", whole, FULL) == 80
    else:
        engine.reset(["host"])
    engine.check()
    engine.release(lease)
    assert serve(engine, transfers, "d", whole, FULL) == 80 * is_loaded_again
    close(engine)


def test_nobody_joins_a_load_that_has_failed() -> None:
    """Between the failure of a load and its end a request for the same prefix is refused for now. Once the copies of
    all components have ended, the next attempt lands the failed load and loads the prefix again."""
    engine, transfers = stepped(WINDOWS)
    first = prompt(1, 41)
    serve(engine, transfers, "a", first, WINDOWS)
    push_to_host(engine, transfers, WINDOWS, first)
    failed = engine.acquire(CacheRequest("b", first))
    link, other = transfers.up
    link.fails = DOWN
    link.step()
    link.fails = None
    with pytest.raises(TransferBusy):
        engine.acquire(CacheRequest("c", first))
    other.step()
    assert serve(engine, transfers, "c", first, WINDOWS) == 40
    engine.release(failed)
    close(engine)


@pytest.mark.parametrize("model", EACH_MODEL)
def test_a_request_is_refused_only_behind_copies_that_have_not_ended(model: ModelGeometry) -> None:
    """The refusal names the tokens that are being copied and poll(). Once their copies have ended, the next attempt
    lands them and is admitted, without a poll."""
    engine, transfers = stepped(model, device_tokens=64, write_policy="write_through")
    with engine.acquire(CacheRequest("first", prompt(0, 41))) as lease:
        prefill(engine, lease, prompt(0, 41), model)
    with pytest.raises(OutOfSlots, match=r"40 tokens .*poll\(\)") as refused:
        engine.acquire(CacheRequest("second", prompt(1, 41)))
    assert refused.value.in_flight == 40
    for link in transfers.down:
        link.run_all()
    engine.release(engine.acquire(CacheRequest("second", prompt(1, 41))))
    close(engine)


def test_a_copy_locks_no_page_behind_those_that_it_copies() -> None:
    """A host with capacity for two of five pages: the other three may leave the device while the two are copied."""
    engine, _ = stepped(FULL, device_tokens=64, host_bytes=3 * 8 * 192, write_policy="write_through")
    with engine.acquire(CacheRequest("first", prompt(0, 41))) as lease:
        prefill(engine, lease, prompt(0, 41), FULL)
    assert engine.inspect.copies.num_in_flight(FULL_KV) == engine.inspect.context.tree.protected(FULL_KV) == 16
    engine.release(engine.acquire(CacheRequest("second", prompt(1, 41))))
    engine.check()
    close(engine)


@pytest.mark.parametrize("model", EACH_MODEL)
@pytest.mark.parametrize("ok", [True, False])
def test_what_was_computed_beside_a_load_does_not_depend_on_it(model: ModelGeometry, ok: bool) -> None:
    """A request computed what another loads meanwhile: its slots stay its own until the load has arrived, so a failed
    load takes nothing from it; what it commits after that is shared."""
    engine, transfers = stepped(model, device_tokens=256)
    first = prompt(1, 48)
    serve(engine, transfers, "a", np.append(first, 1), model)
    for n in range(50, 56):
        serve(engine, transfers, f"other{n}", prompt(n, 100), model)
    longer = np.concatenate([first, prompt(3, 17)])
    with pytest.MonkeyPatch.context() as patch:
        never = LoadEstimate(math.inf, 0.0)  # it computes all that only the host has
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
    close(engine)


def test_copies_are_one_with_those_that_are_submitted_later() -> None:
    """Whoever has looked at copies of some components sees the failure and the bytes of one that follows."""
    op, early, late = Copy(), CpuOp(10), CpuOp(20)
    op.operations.append(early)
    early.run(lambda: None)
    assert op.done() and op.error is None and op.num_bytes == 10
    op.operations.append(late)
    assert not op.done() and op.num_bytes == 30
    late.error = TransferError("a copy fails")
    late.run(lambda: None)
    assert op.done() and op.error is late.error


@pytest.mark.parametrize("model", WITH_COMPONENTS)
def test_victims_are_not_freed_under_a_copy_whose_companion_raised(
    model: ModelGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under write_back the full pages of a victim are being copied when the copy of its windows or state cannot be
    begun: the call fails when the first has ended, for whoever gets the slots next writes to them."""
    engine, transfers = stepped(model, write_policy="write_back")
    serve(engine, transfers, "a", prompt(1, 65), model)
    with monkeypatch.context() as patch:
        patch.setattr(engine.inspect.context.components[1].transfer, "store", _raise)
        with pytest.raises(RuntimeError, match="the link is down"):
            engine.acquire(CacheRequest("b", prompt(2, 120)))
    assert not transfers.links
    engine.check()
    close(engine)


def _raise(*_: object) -> None:
    raise DOWN


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("kind", MODELS)
def test_random_histories(device: str, kind: str, seed: int) -> None:
    """Splits, aborts, failing and stalled copies and disks, and calls that raise, in any order: every pass reads the
    truth, every account holds at every step, and at the end everything is given back. The last one is rough."""
    run(kind, seed, 120, device, is_rough=seed > 2)


@pytest.mark.parametrize(("seed", "bits"), [(0, "3"), (3, "4")])
@pytest.mark.parametrize("kind", MODELS)
def test_random_histories_of_packed_pages(device: str, kind: str, seed: int, bits: str) -> None:
    """The same where host pages are packed, and each fifth or so does not fit."""
    run(kind, seed, 120, device, is_rough=seed > 2, packing=bits)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first_seed", range(1000, 11000, 1000))
@pytest.mark.parametrize("packing", ["off", "4"])
@pytest.mark.parametrize("kind", MODELS)
def test_many_random_histories(kind: str, packing: str, first_seed: int) -> None:
    """The same, longer: 50 histories in the thorough profile."""
    for seed in range(first_seed, first_seed + settings.default.max_examples // 3):
        run(kind, seed, 240, is_rough=True, packing=packing)


@pytest.mark.parametrize("policy", ["write_back", "exclusive"])
def test_windows_that_leave_alone_hold_up_nobody(policy: str) -> None:
    """Before their copy has ended their full slots get other windows, or leave, and nobody gets the old window slots,
    whose bytes come back."""
    engine, transfers = stepped(WINDOWS, write_policy=policy)
    tokens = prompt(1, 41)
    serve(engine, transfers, "a", tokens, WINDOWS)
    full, windows = engine.inspect.context.components
    copies = engine.inspect.copies
    copies.prepare(windows, windows.available() + 8)
    assert [len(link) for link in transfers.down] == [0, 1]  # of full pages, which stay, none is copied
    for name, computed in (("again", tokens), ("other", prompt(2, 41))):
        with engine.acquire(CacheRequest(name, computed, max_cached_tokens=0)) as lease:
            compute(engine, lease, computed, 0, 41, WINDOWS)
            engine.commit(lease, computed)
            engine.check()
    assert not copies.prepare(full, full.capacity) and transfers.links and windows.num_leaving
    engine.check()
    transfers.finish()
    engine.flush()
    assert full.available() == full.capacity
    assert serve(engine, transfers, "b", tokens, WINDOWS) == 40
    close(engine)


def test_window_slots_of_an_abandoned_load_are_not_written_later() -> None:
    """Two requests load two windows of one prefix whose full pages stayed; when the first load fails, the second fails
    with it, and whoever gets their window slots next reads what it wrote."""
    engine, transfers = stepped(WINDOWS, window_tokens=128, device_tokens=1024)
    whole = prompt(1, 41)
    serve(engine, transfers, "a", whole, WINDOWS)
    push_windows_to_host(engine, transfers, whole)
    loading = [engine.acquire(CacheRequest("b", whole[:25])), engine.acquire(CacheRequest("c", whole))]
    assert [lease.hit.device for lease in loading] == [24, 40] and [len(link) for link in transfers.up] == [0, 2]
    fail_first(engine, transfers, 1)
    for lease in loading:
        engine.release(lease)
    others = [prompt(n, 24) for n in range(80, 84)]  # they take nearly all window slots
    taking = [engine.acquire(CacheRequest(f"d{n}", tokens)) for n, tokens in enumerate(others)]
    for lease, tokens in zip(taking, others, strict=True):
        compute(engine, lease, tokens, 0, 24, WINDOWS)
    transfers.finish()
    engine.poll()
    for lease, tokens in zip(taking, others, strict=True):
        verify(engine, lease, tokens, 24, WINDOWS)
        engine.release(lease)
    assert serve(engine, transfers, "e", whole, WINDOWS) == 40
    close(engine)


@pytest.mark.parametrize("ok", [True, False])
def test_windows_in_flight_are_nobody_elses(ok: bool) -> None:
    """A request that computed what the device holds, while another loads the windows of it, reads its own until they
    have arrived; a load of them that fails takes nothing from it."""
    engine, transfers = stepped(WINDOWS, window_tokens=160, device_tokens=512)
    tokens = prompt(1, 41)
    own = engine.acquire(CacheRequest("own", tokens))
    serve(engine, transfers, "a", tokens, WINDOWS)
    push_windows_to_host(engine, transfers, tokens)
    loading = engine.acquire(CacheRequest("b", tokens))
    assert loading.hit.device == 40 and [len(link) for link in transfers.up] == [0, 1]
    compute(engine, own, tokens, 0, 41, WINDOWS)
    engine.commit(own, tokens)
    verify(engine, own, tokens, 41, WINDOWS)
    end_loads(engine, transfers, ok, 1)
    verify(engine, own, tokens, 41, WINDOWS)
    engine.commit(own, tokens)
    assert own.tree_len == 40
    engine.release(own)
    engine.release(loading)
    assert serve(engine, transfers, "c", tokens, WINDOWS) == 40
    close(engine)


@pytest.mark.parametrize("kind", MODELS)
def test_what_an_admission_keeps_is_what_its_lock_covers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each component, over random histories: what is evictable falls with the lock of a prefix by what was counted
    before anything changed, windows and states that the device keeps of a prefix whose end is loaded included."""
    fuzz = EngineFuzz(kind, seed=4)
    tree = fuzz.engine.inspect.context.tree
    to_protect, lock, unlock, acquire = tree.to_protect, tree.lock, tree.unlock, fuzz.engine.acquire
    counted = dict[str, int]()
    sizes = dict[str, list[int]]()

    def count(component: str, match: Match, end: int, length: int) -> int:
        counted[component] = to_protect(component, match, end, length)
        return counted[component]

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
        counted.clear()  # an exchange gives way to the request, so what was counted has changed
        unlock(*args)

    monkeypatch.setattr(tree, "unlock", unlock_other)
    monkeypatch.setattr(tree, "to_protect", count)
    monkeypatch.setattr(tree, "lock", lock_once)
    monkeypatch.setattr(fuzz.engine, "acquire", acquire_one)
    fuzz.run(250)
    assert len(sizes) == len(fuzz.engine.inspect.context.components)
    assert all(any(found) for found in sizes.values())
