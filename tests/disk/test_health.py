"""A store that fails, fills up or hangs is left alone for a while, and tried again at the times that were set."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from disk_case import PATIENCE_S, Clock, Gate, blank, disk_threads, failing, pages, troubled_tier, wait_for, wait_until
from hicache.disk import DiskTier, FindDone, FindJob, Hung, Limits, ReadDone, ReadJob, State, WriteDone, WriteJob
from hicache.disk.health import Breaker
from hicache.metrics import Metrics
from hicache.storage import StoreError, StoreLocked
from hicache.storage.counters import Counts

LIMITS = Limits(retry_s=1, max_retry_s=6, max_failures=3)


def test_a_breaker_opens_and_closes_at_its_times(caplog: pytest.LogCaptureFixture) -> None:
    """Three failures in a row open it, one success between them does not; it lets one probe through when its delay is
    over; the delay doubles with each failed probe up to its bound and starts anew after a success."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    breaker = Breaker("reads", LIMITS, clock)

    def fail() -> None:
        permit = breaker.admit()
        assert permit is not None
        breaker.failed(permit, "broken")

    for _ in range(2):
        fail()
        fail()
        breaker.succeeded(breaker.admit())  # type: ignore[arg-type]
    assert breaker.state is State.CLOSED
    for _ in range(3):
        fail()
    for delay_s in (1, 2, 4, 6, 6):
        assert breaker.state is State.OPEN and breaker.refuses() and breaker.admit() is None
        clock.now_s += delay_s - 0.01
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
    assert "stops reads: broken; it tries again in 1 s" in caplog.text
    breaker.failed(breaker.admit(), "full", at_once=True)  # type: ignore[arg-type]
    clock.now_s += 1
    assert breaker.admit() is not None


def test_what_was_let_through_before_a_change_tells_nothing() -> None:
    """The outcome of a call from before a change of state neither closes nor opens the breaker."""
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


def gauges(disk: DiskTier) -> dict[str, float]:
    metrics = Metrics()
    disk.add_gauges(metrics)
    return metrics.snapshot()


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
    """Whatever a put raises is a failed write; after so many the store is not asked until the delay is over, then
    revived, and what is written then is found. Reads go on meanwhile."""
    clock = Clock()
    disk, store = troubled_tier(tmp_path / "s", clock=clock)
    disk.start()
    keys, data = pages(1, 2)
    asked = 0

    def trouble(verb: str) -> None:
        nonlocal asked
        asked += verb == "put"
        failing(error, "put")(verb)

    store.trouble = trouble
    for n in range(5):
        disk.submit(WriteJob(n, keys, data))
        assert wait_for(disk.drain_writes, 1) == [WriteDone(n, (False, False))]
    assert asked == calls_until_open and disk.failures == calls_until_open
    seen = gauges(disk)
    assert (seen["disk.writes_state"], seen["disk.writes_opens"], seen["disk.reads_state"]) == (2, 1, 0)
    assert seen["disk.writes_refused_jobs"] == 5 - calls_until_open
    disk.submit(FindJob(0, keys))
    assert wait_for(disk.drain_reads, 1) == [FindDone(0, 0)] and store.calls == [("contains", keys)]
    store.trouble = lambda verb: None
    clock.now_s += 0.9
    disk.submit(WriteJob(6, keys, data))
    assert wait_for(disk.drain_writes, 1)[0].ok == (False, False) and store.verbs("put") == 0
    clock.now_s += 0.1
    disk.submit(WriteJob(7, keys, data))
    assert wait_for(disk.drain_writes, 1)[0].ok == (True, True)
    assert [verb for verb, _ in store.calls[-2:]] == ["revive", "put"]
    disk.submit(WriteJob(8, keys, data))
    assert wait_for(disk.drain_writes, 1)[0].ok == (True, True) and store.verbs("revive") == 1
    assert gauges(disk)["disk.writes_state"] == 0 and disk.contains(keys, PATIENCE_S) == 2
    disk.close()


def test_a_store_that_cannot_be_revived_is_left_alone_longer(tmp_path: Path) -> None:
    """While `revive` says no, nothing is put, and the delay doubles."""
    clock = Clock()
    disk, store = troubled_tier(tmp_path / "s", clock=clock)
    disk.start()
    keys, data = pages(1, 1)
    store.trouble = failing(OSError(errno.ENOSPC, "no space"), "put")
    revive, store.inner.revive = store.inner.revive, lambda: False  # type: ignore[method-assign]
    for n, pause_s in enumerate((0, 1, 2, 4)):
        clock.now_s += pause_s
        disk.submit(WriteJob(n, keys, data))
        assert wait_for(disk.drain_writes, 1)[0].ok == (False,)
        assert store.verbs("revive") == n
    store.trouble, store.inner.revive = (lambda verb: None), revive  # type: ignore[method-assign]
    clock.now_s += 5
    disk.submit(WriteJob(4, keys, data))
    assert wait_for(disk.drain_writes, 1)[0].ok == (False,) and store.verbs("put") == 0
    clock.now_s += 1
    disk.submit(WriteJob(5, keys, data))
    assert wait_for(disk.drain_writes, 1)[0].ok == (True,)
    disk.close()


def test_failing_reads_are_misses_and_resume(tmp_path: Path) -> None:
    """Reads that raise are misses; after three the store is not asked, finds included; after the delay a find passes,
    and the read behind it decides."""
    clock = Clock()
    disk, store = troubled_tier(tmp_path / "s", clock=clock)
    disk.start()
    keys, data = pages(1, 2)
    disk.submit(WriteJob(0, keys, data))
    wait_for(disk.drain_writes, 1)

    def read() -> ReadDone:
        disk.submit(FindJob(1, keys))
        disk.submit(ReadJob(1, 0, keys, blank(2), threading.Event()))
        wait_until(lambda: len(answers.extend(disk.drain_reads()) or answers) == 2)
        done = [answer for answer in answers if isinstance(answer, ReadDone)]
        found.extend(answer.num_pages for answer in answers if isinstance(answer, FindDone))
        answers.clear()
        return done[0]

    answers: list = []
    found: list[int] = []
    store.trouble = failing(OSError(errno.EIO, "I/O error"), "get_into")
    assert [read() for _ in range(4)] == [ReadDone(1, 0, (False, False), asked=2)] * 3 + [
        ReadDone(1, 0, (False, False), asked=0)
    ]
    assert found == [2, 2, 2, 0] and disk.contains(keys, PATIENCE_S) is None
    clock.now_s += 1
    assert disk.contains(keys, PATIENCE_S) == 2
    assert read().asked == 2 and disk.contains(keys, PATIENCE_S) is None  # the find succeeded and proved nothing
    clock.now_s += 1
    assert disk.contains(keys, PATIENCE_S) is None
    clock.now_s += 1
    store.trouble = lambda verb: None
    assert read().ok == (True, True) and gauges(disk)["disk.reads_state"] == 0
    disk.close()


def test_reads_that_the_medium_refuses_count_as_failures(tmp_path: Path) -> None:
    """A store that answers with misses because its medium cannot be read is told from one that has not the pages by
    its own count of errors."""
    disk, store = troubled_tier(tmp_path / "s", clock=Clock())
    disk.start()
    keys, _ = pages(1, 2)
    for n in range(5):
        disk.submit(ReadJob(n, 0, keys, blank(2), threading.Event()))
    wait_for(disk.drain_reads, 5)
    assert store.verbs("get_into") == 5 and gauges(disk)["disk.reads_state"] == 0
    errors = itertools.count()
    store.inner.thread_read_errors = lambda: next(errors)  # type: ignore[method-assign]
    for n in range(5):
        disk.submit(ReadJob(n, 0, keys, blank(2), threading.Event()))
    wait_for(disk.drain_reads, 5)
    assert store.verbs("get_into") == 8 and gauges(disk)["disk.reads_state"] == 2
    disk.close()


@pytest.mark.parametrize("readers", [1, 3])
def test_a_hanging_read_is_announced_and_the_others_go_on(readers: int, tmp_path: Path) -> None:
    """A read under way for longer than hang_s is announced once; what waits behind it is answered with nothing; its own
    answer comes when its thread returns, with the bytes; then reads resume."""
    clock = Clock()
    disk, store = troubled_tier(tmp_path / "s", clock=clock, readers=readers)
    disk.start()
    keys, data = pages(1, 2)
    disk.submit(WriteJob(0, keys, data))
    wait_for(disk.drain_writes, 1)
    gate = store.trouble = Gate("get_into")
    targets = [blank(2) for _ in range(readers + 1)]
    for n in range(readers + 1):
        disk.submit(ReadJob(n, n, keys, targets[n], threading.Event()))
    wait_until(lambda: gate.held == readers)
    clock.now_s += 10
    assert disk.drain_reads() == []
    clock.now_s += 0.1
    announced = disk.drain_reads()
    assert sorted(announced[:readers], key=lambda a: a.ticket) == [Hung(n, n) for n in range(readers)]
    assert announced[readers:] == [ReadDone(readers, readers, (False, False))]
    assert disk.drain_reads() == [] and disk.contains(keys, PATIENCE_S) is None
    for pause_s in (0, 5):  # after its delay too: no thread is left that could try
        clock.now_s += pause_s
        disk.submit(FindJob(9, keys))
        assert disk.drain_reads() == [FindDone(9, 0)]
    gate.open()
    late = wait_for(disk.drain_reads, readers)
    assert sorted(late, key=lambda a: a.ticket) == [ReadDone(n, n, (True, True), asked=2) for n in range(readers)]
    for target in targets[:readers]:
        assert all(np.array_equal(a, b) for a, b in zip(target, data, strict=True))
    disk.submit(ReadJob(10, 0, keys, blank(2), threading.Event()))
    assert wait_for(disk.drain_reads, 1)[0].ok == (True, True)
    seen = gauges(disk)
    assert (seen["disk.reads_hung_jobs"], seen["disk.reads_opens"], seen["disk.reads_state"]) == (readers, 1, 0)
    assert disk.close() and disk_threads() == []


def test_closing_leaves_a_thread_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """close() waits for a hanging thread as long as was set and says False; the store stays open and the memory of the
    thread's pages mapped, so that it may return at any time; then closing ends well."""
    disk, store = troubled_tier(tmp_path / "s", close_s=0.05)
    disk.start()
    keys, data = pages(1, 2)
    disk.submit(WriteJob(0, keys, data))
    wait_for(disk.drain_writes, 1)
    gate = store.trouble = Gate("get_into")
    arena = np.zeros((4, 4096), np.uint8)
    disk.submit(ReadJob(1, 0, keys, (arena[1], arena[3]), threading.Event()))
    wait_until(lambda: gate.held == 1)
    assert disk.close() is False
    assert "a thread hangs in it" in caplog.text and disk_threads() == ["hicache-disk-reads-0"]
    assert store.inner.contains(keys) == [True, True]
    del arena
    gc.collect()
    gate.open()
    [answer] = wait_for(disk.drain_reads, 1)
    assert answer.ok == (True, True)
    wait_until(lambda: disk_threads() == [])
    assert disk.close() is True
    with pytest.raises(StoreError):
        store.inner.contains(keys)


def test_only_the_thread_that_could_not_read_is_at_fault(tmp_path: Path) -> None:
    """Of two reads at a time, one of which the medium refuses, that one alone counts as failed, whoever ends first."""
    disk, store = troubled_tier(tmp_path / "s", clock=Clock(), readers=2)
    disk.start()
    (lost, absent), _ = pages(1, 2)
    refused, judged = threading.Event(), threading.Event()

    def get_into(keys: Sequence[bytes], buffers: Sequence[np.ndarray]) -> list[bool]:
        if keys[0] == lost:
            store.inner._counters.add(Counts(read_errors=1))
            refused.set()
            assert judged.wait(PATIENCE_S)
        else:
            assert refused.wait(PATIENCE_S)
        return [False]

    store.inner.get_into = get_into  # type: ignore[method-assign]
    disk.submit(ReadJob(0, 0, (lost,), blank(1), threading.Event()))
    disk.submit(ReadJob(1, 0, (absent,), blank(1), threading.Event()))
    assert [answer.ticket for answer in wait_for(disk.drain_reads, 1)] == [1]
    assert disk.failures == 0, "a page that is not there is no failure"
    judged.set()
    wait_for(disk.drain_reads, 1)
    assert disk.failures == 1
    disk.close()


def test_a_look_at_the_disk_waits_no_longer_than_it_is_told_to(tmp_path: Path) -> None:
    """While the store does not answer, `contains` says that it does not know, and only the first call waits for it at
    all; when the store has answered, it knows again."""
    disk, store = troubled_tier(tmp_path / "s", clock=Clock(), readers=1)
    disk.start()
    keys, data = pages(1, 2)
    disk.submit(WriteJob(0, keys, data))
    wait_for(disk.drain_writes, 1)
    gate = store.trouble = Gate("contains")
    assert disk.contains(keys, 0.01) is None
    wait_until(lambda: gate.held == 1)
    assert disk.contains(keys, math.inf) is None, "this call would never return if it waited"
    assert gate.held == 1 and disk.drain_reads() == []
    gate.open()
    wait_until(lambda: disk.contains(keys, PATIENCE_S) == 2)
    assert disk.contains((), 0) == 0
    disk.close()


def test_closing_ends_later_where_the_store_hangs_while_it_is_closed(tmp_path: Path) -> None:
    """close() returns although the store does not; a later call finishes, and the path is free."""
    disk, store = troubled_tier(tmp_path / "s", close_s=0.05)
    disk.start()
    let_go, close = threading.Event(), store.inner.close
    store.inner.close = lambda: (let_go.wait(PATIENCE_S), close())[1]  # type: ignore[method-assign]
    assert disk.close() is False and disk.close() is False
    with pytest.raises(StoreLocked):
        troubled_tier(tmp_path / "s")
    let_go.set()
    wait_until(disk.close)
    again, _ = troubled_tier(tmp_path / "s")
    again.close()
