"""Nodes, slots and states while copies of them are in flight: random histories with splits, aborts and failures, and
the answers to requests that need capacity meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from component_case import EACH_MODEL, FULL, MODELS, config, prefill
from engine_fuzz import EngineFuzz, run
from hicache import CacheEngine, CacheRequest, Lease, ModelGeometry, build_engine
from hicache.errors import OutOfSlots, TransferError
from hicache.flow.movement import Copy
from hicache.pages.node import TreeNode
from hicache.pages.tree_results import Match
from hicache.tiers import FULL as FULL_KV
from hicache.transfer.cpu import CpuOp
from stepped_transfer import SteppedTransfers
from toy_model import prompt, settled


def engine_with_stepped_copies(model: ModelGeometry, **changes: object) -> tuple[CacheEngine, SteppedTransfers]:
    """A started engine whose copies run when the test steps them."""
    engine = build_engine(config(window_tokens=256, write_policy="write_through", **changes), model)
    transfers = SteppedTransfers(engine)
    engine.start()
    return engine, transfers


@pytest.mark.parametrize("model", EACH_MODEL)
def test_a_request_is_refused_only_behind_copies_that_have_not_ended(model: ModelGeometry) -> None:
    """The refusal names poll() and the tokens of copies in flight. After these copies have ended, the next attempt
    applies them and is admitted without a poll."""
    engine, transfers = engine_with_stepped_copies(model, device_tokens=64)
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


def test_a_copy_locks_no_page_behind_those_that_it_copies() -> None:
    """The host has capacity for two of five pages. The device can evict the other three while the two are copied."""
    engine, _ = engine_with_stepped_copies(FULL, device_tokens=64, host_bytes=3 * 8 * 192)
    with engine.acquire(CacheRequest("first", prompt(0, 41))) as lease:
        prefill(engine, lease, prompt(0, 41), FULL)
    assert engine.inspect.copies.num_in_flight(FULL_KV) == engine.inspect.context.tree.protected(FULL_KV) == 16
    engine.release(engine.acquire(CacheRequest("second", prompt(1, 41))))
    engine.check()
    settled(engine)
    engine.close()


def test_copies_are_one_with_those_that_are_submitted_later() -> None:
    """A group of copies that had ended reports the bytes and the failure of a copy that is added later."""
    op, early, late = Copy(), CpuOp(10), CpuOp(20)
    op.operations.append(early)
    early.run(lambda: None)
    assert op.done() and op.error is None and op.num_bytes == 10
    op.operations.append(late)
    assert not op.done() and op.num_bytes == 30
    late.error = TransferError("a copy fails")
    late.run(lambda: None)
    assert op.done() and op.error is late.error


@pytest.mark.parametrize(
    ("seed", "packing"), [(0, "off"), (1, "off"), (2, "off"), (3, "off"), (6, "off"), (0, "3"), (3, "4")]
)
@pytest.mark.parametrize("kind", MODELS)
def test_random_histories(device: str, kind: str, seed: int, packing: str) -> None:
    """Requests split nodes, abort, and call while copies and stores fail or stall. Every pass reads the truth, all
    accounts hold after every step, and at the end nothing is held. Packed host pages include some that do not fit."""
    run(kind, seed, 120, device, is_rough=seed > 2, packing=packing)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first_seed", range(1000, 11000, 1000))
@pytest.mark.parametrize("packing", ["off", "4"])
@pytest.mark.parametrize("kind", MODELS)
def test_many_random_histories(kind: str, packing: str, first_seed: int) -> None:
    """Longer histories, 50 in the thorough profile."""
    for seed in range(first_seed, first_seed + settings.default.max_examples // 3):
        run(kind, seed, 240, is_rough=True, packing=packing)


@pytest.mark.parametrize("kind", MODELS)
def test_what_an_admission_keeps_is_what_its_lock_covers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random histories, the lock of a prefix reduces the evictable pages of each component by the number that
    admission counted before. This includes windows and states of a prefix whose end is loaded."""
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
        counted.clear()  # a staged load released pages for the request, so the counted number has changed
        unlock(*args)

    monkeypatch.setattr(tree, "unlock", unlock_other)
    monkeypatch.setattr(tree, "to_protect", count)
    monkeypatch.setattr(tree, "lock", lock_once)
    monkeypatch.setattr(fuzz.engine, "acquire", acquire_one)
    fuzz.run(250)
    assert len(sizes) == len(fuzz.engine.inspect.context.components)
    assert all(any(found) for found in sizes.values())
