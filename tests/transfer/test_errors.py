"""What a transfer backend does when things go wrong or come to an end: copies that raise, busy producers, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hicache.errors import TransferError
from hicache.transfer import copies
from hicache.transfer.counter import NUM_PRODUCERS
from hicache.transfer.ids import IdUploader
from hicache.transfer.plan import Method
from transfer_case import Rig, before_each_move, force_ways, held

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def test_busy_producers_refuse_another_load(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many loads in flight as there are producers, `can_begin` says no and `begin` is a bug; once the first
    has ended its producer carries the next, and its id reads as finished."""
    rig = Rig(device, 2, 64, 64, 16, 1 << 16)
    try:
        slots, pages = torch.arange(16, 16 + 64, device=device), torch.arange(1, 5)
        rig.warm_up(slots, pages)
        with held(device, monkeypatch):
            ids, ops = zip(*(rig.load(pages, slots) for _ in range(NUM_PRODUCERS)), strict=True)
            assert not rig.counter.can_begin() and not any(op.done() for op in ops)
            with pytest.raises(AssertionError, match="without a free producer"):
                rig.counter.begin()
        for op in ops:
            op.wait()
        assert rig.counter.can_begin()
        another = rig.counter.begin()
        assert another not in ids and len(set(ids)) == NUM_PRODUCERS
        rig.counter.set_consumer(ids[0])
        rig.counter.wait_all()  # though the load that has its producer now was not even submitted
        rig.backend.load(pages, slots, another).wait()
    finally:
        rig.close()


def test_closing_finishes_what_is_in_flight(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close()` returns when loads and stores that had not begun to move are done, and their bytes have arrived."""
    rig = Rig(device, 2, 64, 64, 16, 1 << 16)
    try:
        rig.fill()
        source, target = torch.arange(16, 80, device=device), torch.arange(160, 224, device=device)
        rig.warm_up(source, torch.arange(1, 5))
        with held(device, monkeypatch) as let_go:
            ops = [
                rig.load(torch.arange(1, 5), target)[1],
                rig.backend.store(source, torch.arange(5, 9)),
            ]
            assert not any(op.done() for op in ops)
            threading.Timer(0.05, let_go).start()
            rig.backend.close()
            assert all(op.done() and op.error is None for op in ops)
        assert all(torch.equal(buffer[source], buffer[target]) for buffer in rig.buffers)
        assert torch.equal(rig.host.bytes_of[5:9], rig.host.bytes_of[1:5]) and bool(rig.host.bytes_of[5:9].any())
    finally:
        rig.close()


class Fault:
    """Counts what passes, and raises at the pass whose number `at` says."""

    def __init__(self) -> None:
        self.seen = 0
        self.at = -1

    def __call__(self) -> None:
        self.seen += 1
        if self.seen - 1 == self.at:
            raise RuntimeError("the link is down")

    def arm(self, at: int) -> None:
        self.seen, self.at = 0, at

    def during(self, action: Callable[[], object]) -> int:
        """How much passes while `action` runs."""
        self.arm(-1)
        action()
        return self.seen


def before_each_copy_call(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """A fault makes CUDA refuse the copy: the call returns an error, as it does when it means it."""
    strided, batched = copies.cudart.cudaMemcpy2DAsync, copies._batch_call()
    unknown = copies.cudart.cudaError_t.cudaErrorUnknown

    def passes() -> bool:
        try:
            fault()
        except RuntimeError:
            return False
        return True

    monkeypatch.setattr(copies.cudart, "cudaMemcpy2DAsync", lambda *args: strided(*args) if passes() else (unknown,))
    if batched is not None:
        monkeypatch.setattr(copies, "_batch_call", lambda: lambda *args: batched(*args) if passes() else int(unknown))


def before_each_upload(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Slots that are known on the host reach the device through page-locked memory, which may run out."""
    upload = IdUploader.__call__

    def uploaded(self: IdUploader, ids: torch.Tensor) -> torch.Tensor:
        fault()
        return upload(self, ids)

    monkeypatch.setattr(IdUploader, "__call__", uploaded)


Seam = Callable[[pytest.MonkeyPatch, Fault], None]
# Where a copy may raise, and the way that copies go: on CUDA there are several.
SEAMS: list[object] = [("cpu", before_each_move, "direct")]
SEAMS += [
    pytest.param("cuda", seam, way, marks=pytest.mark.gpu)
    for seam, way in (
        (before_each_move, "strided"),
        (before_each_move, "batched"),
        (before_each_move, "direct"),
        (before_each_copy_call, "straight"),
        (before_each_copy_call, "strided"),
        (before_each_copy_call, "batched"),
        (before_each_upload, "strided"),
        (before_each_upload, "direct"),
    )
]
HOST_PAGE = 16


class Scene:
    """A rig with wide layers, every second page of both tiers in use, and nothing where a copy of `pages` should not
    write."""

    def __init__(self, device: str) -> None:
        self.rig = Rig(torch.device(device), 16, 128, 128, HOST_PAGE, 1 << 20)
        self.rig.fill()
        order = torch.from_numpy(np.random.default_rng(2).permutation(24))
        self.pages = order[:11] + 1
        self.slots = (order[:11, None] * HOST_PAGE + HOST_PAGE + torch.arange(HOST_PAGE)).reshape(-1)
        everything = torch.arange(HOST_PAGE, 32 * HOST_PAGE, device=device)
        self.rig.backend.store(everything, torch.arange(1, 32)).wait()
        self.truth = [buffer.clone() for buffer in self.rig.buffers]
        self.host_truth = self.rig.host.bytes_of.clone()
        self.others = torch.ones(len(self.truth[0]), dtype=torch.bool, device=device)
        self.others[self.slots] = False
        self.other_pages = torch.ones(len(self.host_truth), dtype=torch.bool)
        self.other_pages[self.pages] = False

    def load(self) -> None:
        self.rig.load(self.pages, self.slots)[1].wait()

    def store(self) -> None:
        self.rig.backend.store(self.slots, self.pages).wait()

    def poison_slots(self) -> None:
        for buffer in self.rig.buffers:
            buffer[self.slots] = -9

    def check(self, *, slots: bool, pages: bool) -> None:
        """Everything is as it was; what the copies write, `slots` and `pages`, only where it is asked for."""
        for buffer, kept in zip(self.rig.buffers, self.truth, strict=True):
            assert torch.equal(buffer[self.others], kept[self.others])
            assert not slots or torch.equal(buffer, kept)
        assert torch.equal(self.rig.host.bytes_of[self.other_pages], self.host_truth[self.other_pages])
        assert not pages or torch.equal(self.rig.host.bytes_of, self.host_truth)


def moments(passes: int) -> tuple[int, ...]:
    """At the first, in the middle, at the last, and once more than there are producers."""
    assert passes > 0, "the copy went by another way than the test expects"
    return (0, passes // 2, passes - 1, 0)


@pytest.mark.parametrize(("device", "seam", "way"), SEAMS)
def test_a_load_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, device: str, seam: Seam, way: Method) -> None:
    """A copy up that raises, wherever in the middle, ends its operation with an error and its consumer with
    TransferError; all that was not its destination stays as it was, and the next loads are whole."""
    force_ways(monkeypatch, [way])
    scene, fault = Scene(device), Fault()
    rig = scene.rig
    try:
        seam(monkeypatch, fault)
        passes = fault.during(scene.load)
        for at in moments(passes):
            scene.poison_slots()
            fault.arm(at)
            failed, op = rig.load(scene.pages, scene.slots)
            op.wait()
            assert fault.seen > at and op.done() and op.error is not None
            for consumed in (failed, (failed,)):
                rig.counter.set_consumer(consumed)
                with pytest.raises(TransferError):
                    rig.counter.wait_all()
            scene.check(slots=False, pages=True)
        for _ in range(NUM_PRODUCERS + 1):
            scene.poison_slots()
            fault.arm(-1)
            assert rig.counter.can_begin()
            load_id, op = rig.load(scene.pages, scene.slots)
            rig.counter.set_consumer(load_id)
            rig.counter.wait_all()
            op.wait()
            assert op.error is None
            scene.check(slots=True, pages=True)
    finally:
        rig.close()


@pytest.mark.parametrize(("device", "seam", "way"), SEAMS)
def test_a_store_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, device: str, seam: Seam, way: Method) -> None:
    """A copy down that raises ends its operation with an error; its source and all other pages stay as they were, and
    the next stores are whole."""
    force_ways(monkeypatch, [way])
    scene, fault = Scene(device), Fault()
    rig = scene.rig
    try:
        seam(monkeypatch, fault)
        passes = fault.during(scene.store)
        for at in moments(passes):
            rig.host.bytes_of[scene.pages] = 9
            fault.arm(at)
            op = rig.backend.store(scene.slots, scene.pages)
            op.wait()
            assert fault.seen > at and op.done() and op.error is not None
            scene.check(slots=True, pages=False)
            fault.arm(-1)
            op = rig.backend.store(scene.slots, scene.pages)
            op.wait()
            assert op.error is None
            scene.check(slots=True, pages=True)
    finally:
        rig.close()


@pytest.mark.parametrize(("device", "seam", "way"), SEAMS)
def test_a_failure_leaves_transfers_beside_it_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, seam: Seam, way: Method
) -> None:
    """Of loads submitted at once the second fails: the first and the third bring their bytes, to who consumes them."""
    force_ways(monkeypatch, [way])
    scene, fault = Scene(device), Fault()
    rig = scene.rig
    try:
        seam(monkeypatch, fault)
        parts = list(zip(scene.pages.tensor_split(3), scene.slots.view(-1, HOST_PAGE).tensor_split(3), strict=True))
        passes = [fault.during(lambda at=at: rig.load(at[0], at[1].reshape(-1))[1].wait()) for at in parts]
        scene.poison_slots()
        fault.arm(passes[0] + passes[1] // 2)
        loads = [rig.load(pages, slots.reshape(-1)) for pages, slots in parts]
        for number, (load_id, op) in enumerate(loads):
            rig.counter.set_consumer(load_id)
            if number == 1:
                with pytest.raises(TransferError):
                    rig.counter.wait_all()
                op.wait()
                assert op.error is not None
                continue
            rig.counter.wait_all()
            rows = parts[number][1].reshape(-1)
            assert all(torch.equal(b[rows], kept[rows]) for b, kept in zip(rig.buffers, scene.truth, strict=True))
            op.wait()
            assert op.error is None
        scene.check(slots=False, pages=True)
    finally:
        rig.close()
