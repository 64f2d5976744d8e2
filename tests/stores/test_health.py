"""A store that fails, is full or stalls is not used for a while. The tier tries it again after the configured
backoff."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disk_case import (
    PATIENCE_S,
    Clock,
    Gate,
    blank,
    disk_threads,
    failing,
    num_held,
    pages,
    started_tier,
    wait_for_reads,
    wait_for_writes,
)
from hicache.metrics import Metrics
from hicache.storage import StoreError
from hicache.storage.process.frames import Kind, frame
from hicache.storage.process.health import Breaker, Limits, State
from hicache.storage.process.jobs import FindDone, FindJob, ReadClass, ReadDone, ReadJob, Stalled, WriteDone, WriteJob
from hicache.storage.process.session import Session
from hicache.storage.process.shared_memory import StatusWriter
from hicache.stores.tier import StoreTier
from waiting import eventually

LIMITS = Limits(reopen_backoff_s=1, max_reopen_backoff_s=6, max_failures=3)


def test_a_breaker_opens_and_closes_after_its_backoff(caplog: pytest.LogCaptureFixture) -> None:
    """Three failures in a row open the breaker; a success between them resets the count. After the backoff one probe
    passes. The backoff doubles with each failed probe up to its maximum, and a success resets it."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    breaker = Breaker("reads", LIMITS, clock)

    def fail() -> None:
        token = breaker.admit()
        assert token is not None
        breaker.failed(token, "broken")

    for _ in range(2):
        fail()
        fail()
        breaker.succeeded(breaker.admit())  # type: ignore[arg-type]
    assert breaker.state is State.CLOSED
    for _ in range(3):
        fail()
    for backoff_s in (1, 2, 4, 6, 6):
        assert breaker.state is State.OPEN and breaker.refuses() and breaker.admit() is None
        clock.now_s += backoff_s - 0.01
        assert breaker.refuses()
        clock.now_s += 0.01
        assert not breaker.refuses()
        probe = breaker.admit()
        assert probe is not None and probe.is_probe and breaker.state is State.HALF_OPEN
        assert breaker.refuses() and breaker.admit() is None
        breaker.failed(probe, "still broken")
    clock.now_s += 6
    breaker.succeeded(breaker.admit())  # type: ignore[arg-type]
    assert breaker.state is State.CLOSED and (breaker.opens, breaker.failures) == (6, 12)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", *["INFO", "WARNING"] * 5, "INFO", "INFO"]
    breaker.failed(breaker.admit(), "full", at_once=True)  # type: ignore[arg-type]
    clock.now_s += 1
    assert breaker.admit() is not None


def test_a_token_of_an_earlier_epoch_changes_nothing() -> None:
    """The outcome of a call that began before a change of state neither closes nor opens the breaker."""
    clock = Clock()
    breaker = Breaker("reads", LIMITS, clock)
    early, other = breaker.admit(), breaker.admit()
    assert early is not None and other is not None
    breaker.failed(other, "full", at_once=True)
    breaker.succeeded(early)
    assert breaker.state is State.OPEN
    clock.now_s += 1
    probe = breaker.admit()
    breaker.failed(early, "late", at_once=True)
    breaker.succeeded(other)
    assert breaker.state is State.HALF_OPEN
    assert probe is not None
    breaker.succeeded(probe)
    assert breaker.state is State.CLOSED
    breaker.failed(early, "very late", at_once=True)
    assert breaker.state is State.CLOSED


def gauges(disk: StoreTier) -> dict[str, float]:
    metrics = Metrics()
    disk.register(metrics)
    return metrics.snapshot()


def num_failures(disk: StoreTier) -> float:
    return gauges(disk)["disk.reads_failures"]


@pytest.mark.parametrize(
    ("error", "calls_until_open"),
    [
        (OSError(errno.EIO, "I/O error"), 3),
        (OSError(errno.ENOSPC, "no space"), 1),
        (StoreError("the store is closed"), 1),
        (ZeroDivisionError("a bug"), 3),
    ],
)
def test_failing_writes_stop_and_resume(error: Exception, calls_until_open: int, tmp_path: Path) -> None:
    """Every error of a put is a failed write. After `calls_until_open` failures the store is not called until the
    backoff is over. Then the store is reopened, and pages that are written later are found. Reads continue
    meanwhile."""
    clock = Clock()
    disk, store = started_tier(tmp_path / "s", clock=clock)
    keys, data = pages(1, 2)
    asked = 0

    def trouble(verb: str) -> None:
        nonlocal asked
        asked += verb == "put"
        failing(error, "put")(verb)

    store.trouble = trouble
    for n in range(5):
        disk.writes.submit(WriteJob(n, keys, data))
        assert wait_for_writes(disk, 1) == [WriteDone(n, (False, False))]
    seen = gauges(disk)
    assert asked == seen["disk.writes_failures"] == calls_until_open
    assert (seen["disk.writes_state"], seen["disk.writes_opens"], seen["disk.reads_state"]) == (2, 1, 0)
    assert seen["disk.writes_refused_jobs"] == 5 - calls_until_open
    disk.reads.submit(FindJob(0, keys))
    assert wait_for_reads(disk, 1) == [FindDone(0, 0)] and store.calls == [("contains", keys)]
    store.trouble = lambda verb: None
    clock.now_s += 0.9
    disk.writes.submit(WriteJob(6, keys, data))
    assert wait_for_writes(disk, 1)[0].ok == (False, False) and store.verbs("put") == 0
    clock.now_s += 0.1
    disk.writes.submit(WriteJob(7, keys, data))
    assert wait_for_writes(disk, 1)[0].ok == (True, True)
    assert [verb for verb, _ in store.calls[-2:]] == ["reopen", "put"]
    disk.writes.submit(WriteJob(8, keys, data))
    assert wait_for_writes(disk, 1)[0].ok == (True, True) and store.verbs("reopen") == 1
    assert gauges(disk)["disk.writes_state"] == 0 and num_held(disk, keys, PATIENCE_S) == 2
    disk.close()


def test_failing_reads_are_misses_and_resume(tmp_path: Path) -> None:
    """Reads that raise are misses. After three of them the store is not called, also not for finds. After the backoff a
    find passes, and the read after it decides whether the breaker closes."""
    clock = Clock()
    keys, data = pages(1, 2)
    disk, store = started_tier(tmp_path / "s", keys, data, clock=clock)

    def read() -> ReadDone:
        disk.reads.submit(FindJob(1, keys))
        found.append(wait_for_reads(disk, 1)[0].num_pages)
        disk.reads.submit(ReadJob(1, 0, keys, blank(2), threading.Event()))
        return wait_for_reads(disk, 1)[0]

    found: list[int] = []
    store.trouble = failing(OSError(errno.EIO, "I/O error"), "contains")
    assert num_held(disk, keys, PATIENCE_S) is None, "a store that cannot tell holds no page less"
    store.trouble = lambda verb: None
    assert read().ok == (True, True)
    found.clear()
    store.trouble = failing(OSError(errno.EIO, "I/O error"), "get_into")
    assert [read() for _ in range(4)] == [ReadDone(1, 0, (False, False), asked=2)] * 3 + [
        ReadDone(1, 0, (False, False), asked=0)
    ]
    assert found == [2, 2, 2, 0] and num_held(disk, keys, PATIENCE_S) is None
    clock.now_s += 1
    assert num_held(disk, keys, PATIENCE_S) == 2
    # The find's success does not close the breaker.
    assert read().asked == 2 and num_held(disk, keys, PATIENCE_S) is None
    clock.now_s += 1
    assert num_held(disk, keys, PATIENCE_S) is None
    clock.now_s += 1
    store.trouble = lambda verb: None
    assert read().ok == (True, True) and gauges(disk)["disk.reads_state"] == 0
    disk.close()


def test_a_late_read_that_returned_pages_is_no_failure(tmp_path: Path) -> None:
    """A read that returned pages after its deadline is no failure, however often this happens. A read that returned no
    page by its deadline, or failed earlier, is a failure."""
    clock = Clock()
    disk, store = started_tier(tmp_path / "s", clock=clock)
    errors = itertools.count()
    store.inner.thread_read_errors = lambda: next(errors)  # type: ignore[method-assign]

    def failures(answer: list[bool], took_s: int) -> int:
        def get_into(*_: object, **__: object) -> list[bool]:
            clock.now_s += took_s
            return answer

        store.inner.get_into = get_into  # type: ignore[method-assign, assignment]
        job = ReadJob(0, 0, pages(1, 2)[0], blank(2), threading.Event(), deadline_s=clock.now_s + 1)
        disk.reads.submit(job)
        assert wait_for_reads(disk, 1)[0].ok == tuple(answer)
        return num_failures(disk)

    assert [failures([True, False], took_s=1) for _ in range(4)] == [0] * 4
    assert failures([True, False], took_s=0) == 1
    assert [failures([False, False], took_s=1) for _ in range(2)] == [2, 3]
    assert gauges(disk)["disk.reads_state"] == State.OPEN
    disk.close()


@pytest.mark.parametrize("readers", [1, 3])
def test_a_stalled_read_is_announced_and_the_others_go_on(readers: int, tmp_path: Path) -> None:
    """A read that takes longer than io_timeout_s is announced once as stalled, and reads queued behind it are misses.
    When the stalled thread returns, the late answer has the bytes, and reads resume."""
    clock = Clock()
    keys, data = pages(1, 2)
    disk, store = started_tier(tmp_path / "s", keys, data, clock=clock, readers=readers)
    gate = store.trouble = Gate("get_into")
    targets = [blank(2) for _ in range(readers + 1)]
    for n in range(readers + 1):
        disk.reads.submit(ReadJob(n, n, keys, targets[n], threading.Event()))
    eventually(lambda: gate.held == readers)
    clock.now_s += 10
    assert disk.reads.poll() == []
    clock.now_s += 0.1
    announced = disk.reads.poll()
    assert sorted(announced[:readers], key=lambda a: a.ticket) == [Stalled(n, n) for n in range(readers)]
    assert announced[readers:] == [ReadDone(readers, readers, (False, False))]
    assert disk.reads.poll() == [] and num_held(disk, keys, PATIENCE_S) is None
    for pause_s in (0, 5):  # also after the backoff, because no thread is free to try
        clock.now_s += pause_s
        disk.reads.submit(FindJob(9, keys))
        assert disk.reads.poll() == [FindDone(9, 0)]
    gate.open()
    late = wait_for_reads(disk, readers)
    assert sorted(late, key=lambda a: a.ticket) == [ReadDone(n, n, (True, True), asked=2) for n in range(readers)]
    for target in targets[:readers]:
        assert all(np.array_equal(a, b) for a, b in zip(target, data, strict=True))
    disk.reads.submit(ReadJob(10, 0, keys, blank(2), threading.Event()))
    assert wait_for_reads(disk, 1)[0].ok == (True, True)
    seen = gauges(disk)
    assert (seen["disk.reads_stalled_jobs"], seen["disk.reads_opens"], seen["disk.reads_state"]) == (readers, 1, 0)
    assert disk.close() and disk_threads() == []


def test_an_answer_comes_behind_the_state_that_it_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A client that has received the late answer to a stalled read may read again at once, even if the answer arrived
    while the server was writing the previous state."""
    clock, (keys, data) = Clock(), pages(1, 2)
    disk, store = started_tier(tmp_path / "s", keys, data, clock=clock, readers=1)
    gate, arrived, write, post, tell = (
        Gate("get_into"),
        threading.Event(),
        StatusWriter.write,
        Session.post,
        Session._send,
    )
    store.trouble = gate
    until_s: list[float] = []  # when reads resume, as last written to the status
    reported: list[tuple[float, float]] = []  # with each answer: when reads resumed by the status, and in truth

    def written(status: StatusWriter, stats: Any, touches: int, queues: Any) -> None:
        write(status, stats, touches, queues)
        until_s[:] = [queues["reads"][-1]]
        if gate.held:
            gate.open()
            assert arrived.wait(PATIENCE_S)

    def posted(session: Session, is_write: bool, done: Any) -> None:
        post(session, is_write, done)
        if isinstance(done, ReadDone):
            arrived.set()

    def telling(session: Session, message: bytes) -> None:
        if message not in (b"", frame(Kind.ALIVE)) and session._service is not None:
            reported.append((until_s[0], session._service.numbers()["reads"][-1]))
        tell(session, message)

    monkeypatch.setattr(Session, "post", posted)
    disk.reads.submit(ReadJob(1, 0, keys, blank(2), threading.Event()))
    eventually(lambda: gate.held == 1)
    clock.now_s += 10.1
    assert disk.reads.poll() == [Stalled(1, 0)]
    monkeypatch.setattr(StatusWriter, "write", written)
    monkeypatch.setattr(Session, "_send", telling)
    assert wait_for_reads(disk, 1) == [ReadDone(1, 0, (True, True), asked=2)]
    assert reported and all(state == now for state, now in reported)
    disk.close()


def test_only_the_thread_that_could_not_read_is_at_fault(tmp_path: Path) -> None:
    """Of two simultaneous reads, only the one that the medium refused counts as failed, whichever ends first."""
    disk, store = started_tier(tmp_path / "s", clock=Clock(), readers=2)
    (lost, absent), _ = pages(1, 2)
    refused, judged = threading.Event(), threading.Event()
    errors = threading.local()

    def get_into(keys: Sequence[bytes], buffers: Sequence[np.ndarray], *, deadline_s: float) -> list[bool]:
        if keys[0] == lost:
            errors.count = 1
            refused.set()
            assert judged.wait(PATIENCE_S)
        else:
            assert refused.wait(PATIENCE_S)
        return [False]

    store.inner.get_into = get_into  # type: ignore[method-assign]
    store.inner.thread_read_errors = lambda: getattr(errors, "count", 0)  # type: ignore[method-assign]
    disk.reads.submit(ReadJob(0, 0, (lost,), blank(1), threading.Event()))
    background = ReadClass.BACKGROUND_READ  # not queued behind the other read
    disk.reads.submit(ReadJob(1, 0, (absent,), blank(1), threading.Event(), queue_class=background))
    assert [answer.ticket for answer in wait_for_reads(disk, 1)] == [1]
    assert num_failures(disk) == 0, "a page that is not there is no failure"
    judged.set()
    wait_for_reads(disk, 1)
    assert num_failures(disk) == 1
    disk.close()
