"""Failures and ends of transfers: copies that raise, busy producers, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hicache.errors import TransferError
from hicache.kernels.upload import IdUploader
from hicache.transfer import copies, cuda
from hicache.transfer.counter import NUM_PRODUCERS
from hicache.transfer.plan import Method
from transfer_case import Rig, before_each_move, force_methods, held


@pytest.fixture(autouse=True)
def one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a load is submitted with its first step queued, and the others are queued as late as may be."""
    monkeypatch.setattr(cuda, "_SUBMIT_S", 0.0)
    monkeypatch.setattr(cuda, "_AHEAD", 1)


def test_busy_producers_refuse_another_load(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many loads in flight as producers, `can_begin` is false and `begin` is a bug; when the first has ended,
    its producer carries the next load, and its id counts as finished."""
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


def test_closing_finishes_what_is_in_flight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close()` returns when submitted loads and stores are done and their bytes have arrived."""
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
    """A fault makes CUDA refuse the copy: the call returns an error."""
    strided, batched = copies.cudart.cudaMemcpy2DAsync, copies.batch_call()
    unknown = copies.cudart.cudaError_t.cudaErrorUnknown

    def passes() -> bool:
        try:
            fault()
        except RuntimeError:
            return False
        return True

    monkeypatch.setattr(copies.cudart, "cudaMemcpy2DAsync", lambda *args: strided(*args) if passes() else (unknown,))
    if batched is not None:
        monkeypatch.setattr(copies, "batch_call", lambda: lambda *args: batched(*args) if passes() else int(unknown))


def before_each_upload(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Slots that are known on the host reach the device through page-locked memory, which may run out."""
    upload = IdUploader.__call__

    def uploaded(self: IdUploader, ids: torch.Tensor) -> torch.Tensor:
        fault()
        return upload(self, ids)

    monkeypatch.setattr(IdUploader, "__call__", uploaded)


Seam = Callable[[pytest.MonkeyPatch, Fault], None]
# Where a copy may raise, and the copy method: on CUDA there are several.
SEAMS: list[object] = [("cpu", before_each_move, "zero_copy")]
SEAMS += [
    pytest.param("cuda", seam, method, marks=pytest.mark.gpu)
    for seam, method in (
        (before_each_move, "strided"),
        (before_each_move, "batched"),
        (before_each_move, "zero_copy"),
        (before_each_copy_call, "unstaged"),
        (before_each_copy_call, "strided"),
        (before_each_copy_call, "batched"),
        (before_each_upload, "strided"),
        (before_each_upload, "zero_copy"),
    )
]
HOST_PAGE = 16


class Scene:
    """A rig with wide layers and known bytes in both tiers, inside and outside the destination of a copy."""

    def __init__(self, device: str) -> None:
        self.rig = Rig(device, 16, 128, 128, HOST_PAGE, 1 << 20)
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
        """Compare everything with the truth, the destinations of copies, `slots` and `pages`, only on request."""
        for buffer, kept in zip(self.rig.buffers, self.truth, strict=True):
            assert torch.equal(buffer[self.others], kept[self.others])
            assert not slots or torch.equal(buffer, kept)
        assert torch.equal(self.rig.host.bytes_of[self.other_pages], self.host_truth[self.other_pages])
        assert not pages or torch.equal(self.rig.host.bytes_of, self.host_truth)


def moments(passes: int) -> tuple[int, ...]:
    """At the first, in the middle, at the last, and once more than there are producers."""
    assert passes > 0, "the copy used another method than the test expects"
    return (0, passes // 2, passes - 1, 0)


@pytest.mark.parametrize(("device", "seam", "method"), SEAMS)
def test_a_failed_load_is_reported(monkeypatch: pytest.MonkeyPatch, device: str, seam: Seam, method: Method) -> None:
    """A load that raises at any point ends with an error, and its consumer gets a TransferError; bytes outside its
    destination do not change, and the next loads are complete."""
    force_methods(monkeypatch, [method])
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


@pytest.mark.parametrize(("device", "seam", "method"), SEAMS)
def test_a_failed_store_is_reported(monkeypatch: pytest.MonkeyPatch, device: str, seam: Seam, method: Method) -> None:
    """A store that raises ends with an error; its source and all other pages do not change, and the next stores are
    complete."""
    force_methods(monkeypatch, [method])
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


@pytest.mark.parametrize(("device", "seam", "method"), SEAMS)
def test_a_failure_does_not_affect_other_transfers(
    monkeypatch: pytest.MonkeyPatch, device: str, seam: Seam, method: Method
) -> None:
    """Of three loads submitted at once the second fails: the first and the third complete for their consumers."""
    force_methods(monkeypatch, [method])
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
