"""Failures and ends of transfers: copies that raise, busy producers, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hicache.errors import TransferError
from hicache.kernels.upload import IdUploader
from hicache.transfer import TransferOp, copies, cuda
from hicache.transfer.counter import NUM_PRODUCERS
from hicache.transfer.plan import Method
from transfer_case import Rig
from transfer_hooks import before_each_move, force_methods


@pytest.fixture(autouse=True)
def one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a load is submitted with its first step queued, and the others are queued as late as may be."""
    monkeypatch.setattr(cuda, "_SUBMIT_S", 0.0)
    monkeypatch.setattr(cuda, "_AHEAD", 1)


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
    """A rig with known bytes in both tiers, inside and outside the destination of a copy. On CUDA with wide layers,
    which each copy method can take."""

    def __init__(self, device: str) -> None:
        heads, dim = (16, 128) if device == "cuda" else (2, 64)
        self.rig, self.fault = Rig(device, heads, dim, dim, HOST_PAGE, 1 << 20), Fault()
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

    def moments(self, action: Callable[[], tuple[int, TransferOp] | TransferOp]) -> Iterator[None]:
        """Arms the fault for a copy at the first pass, in the middle, at the last, and once more than there are
        producers; `action` tells how many passes there are."""
        self.fault.arm(-1)
        done = action()
        (done[1] if isinstance(done, tuple) else done).wait()
        passes = self.fault.seen
        assert passes > 0, "the copy used another method than the test expects"
        for at in (0, passes // 2, passes - 1, 0):
            self.fault.arm(at)
            yield
            assert self.fault.seen > at
            self.fault.arm(-1)

    def load(self) -> tuple[int, TransferOp]:
        for buffer in self.rig.buffers:
            buffer[self.slots] = -9
        return self.rig.load(self.pages, self.slots)

    def store(self) -> TransferOp:
        self.rig.host.bytes_of[self.pages] = 9
        return self.rig.backend.store(self.slots, self.pages)

    def check(self, *, slots: bool, pages: bool) -> None:
        """Compare everything with the truth, the destinations of copies, `slots` and `pages`, only on request."""
        for buffer, kept in zip(self.rig.buffers, self.truth, strict=True):
            assert torch.equal(buffer[self.others], kept[self.others])
            assert not slots or torch.equal(buffer, kept)
        assert torch.equal(self.rig.host.bytes_of[self.other_pages], self.host_truth[self.other_pages])
        assert not pages or torch.equal(self.rig.host.bytes_of, self.host_truth)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, device: str, seam: Seam, method: Method) -> Iterator[Scene]:
    force_methods(monkeypatch, [method])
    scene = Scene(device)
    with scene.rig:
        seam(monkeypatch, scene.fault)
        yield scene


@pytest.mark.parametrize(("device", "seam", "method"), SEAMS)
def test_a_failed_load_is_reported(scene: Scene) -> None:
    """A load that raises at any point ends with an error, and its consumer gets a TransferError; bytes outside its
    destination do not change, and the next loads are complete."""
    counter = scene.rig.counter
    for _ in scene.moments(scene.load):
        failed, op = scene.load()
        op.wait()
        assert op.done() and op.error is not None
        for consumed in (failed, (failed,)):
            counter.set_consumer(consumed)
            with pytest.raises(TransferError):
                counter.wait_all()
        scene.check(slots=False, pages=True)
    for _ in range(NUM_PRODUCERS + 1):
        assert counter.can_begin()
        load_id, op = scene.load()
        counter.set_consumer(load_id)
        counter.wait_all()
        op.wait()
        assert op.error is None
        scene.check(slots=True, pages=True)


@pytest.mark.parametrize(("device", "seam", "method"), SEAMS)
def test_a_failed_store_is_reported(scene: Scene) -> None:
    """A store that raises ends with an error; its source and all other pages do not change, and the next stores are
    complete."""
    for _ in scene.moments(scene.store):
        op = scene.store()
        op.wait()
        assert op.done() and op.error is not None
        scene.check(slots=True, pages=False)
    op = scene.store()
    op.wait()
    assert op.error is None
    scene.check(slots=True, pages=True)


def test_the_error_is_known_when_the_consumers_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that gets the error of a load finds it at the operation too, which may not have ended yet."""
    with Rig("cpu", 1, 24, 24, HOST_PAGE, 1 << 16) as rig:
        fault, submitted, found = Fault(), threading.Event(), list[Exception | None]()
        fail = rig.counter.fail

        def failing(load_id: int, error: Exception) -> None:
            submitted.wait()
            found.append(op.error)
            fail(load_id, error)

        monkeypatch.setattr(rig.counter, "fail", failing)
        before_each_move(monkeypatch, fault)
        fault.arm(2)
        _, op = rig.load(torch.arange(1, 3), torch.arange(16, 48))
        submitted.set()
        op.wait()
        assert found == [op.error] and isinstance(op.error, RuntimeError)
