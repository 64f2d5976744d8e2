"""The disk threads over a real store: pages come back as they were written, and no failure ends a thread."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from disk_case import PAGE_BYTES, PATIENCE_S, Clock, num_held, pages, troubled_tier, wait_for_reads, wait_for_writes
from hicache.disk import DiskTier, FindDone, FindJob, ReadDone, ReadJob, WriteJob


def tier(path: Path, readers: int = 3, queue_jobs: int = 64) -> DiskTier:
    return troubled_tier(path, readers=readers, queue_jobs=queue_jobs)[0]


def test_written_pages_are_read_back(tmp_path: Path) -> None:
    """Every batch that was written is found and read byte for byte, under its own ticket."""
    disk = tier(tmp_path / "s")
    disk.start()
    batches = [pages(n, 5) for n in range(8)]
    for ticket, (keys, data) in enumerate(batches):
        assert disk.writes.submit(WriteJob(ticket, keys, data))
    assert {(d.ticket, d.ok) for d in wait_for_writes(disk, 8)} == {(n, (True,) * 5) for n in range(8)}
    targets = [tuple(np.zeros(PAGE_BYTES, np.uint8) for _ in range(5)) for _ in batches]
    for ticket, (keys, _) in enumerate(batches):
        assert disk.reads.submit(FindJob(ticket, (*keys, b"missing" * 4, keys[0])))
        assert disk.reads.submit(ReadJob(ticket, 7, keys, targets[ticket], threading.Event()))
    results = wait_for_reads(disk, 16)
    assert {r.ticket: r.num_pages for r in results if isinstance(r, FindDone)} == dict.fromkeys(range(8), 5)
    assert {(r.ticket, r.batch, r.ok) for r in results if isinstance(r, ReadDone)} == {
        (n, 7, (True,) * 5) for n in range(8)
    }
    for (_, data), got in zip(batches, targets, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(data, got, strict=True))
    disk.store.check()
    disk.close()


def test_cancelled_reads_leave_their_pages_unchanged(tmp_path: Path) -> None:
    """The pages of a cancelled job are not written to."""
    disk = tier(tmp_path / "s")
    disk.start()
    keys, data = pages(1, 3)
    disk.writes.submit(WriteJob(0, keys, data))
    wait_for_writes(disk, 1)
    cancelled = threading.Event()
    cancelled.set()
    target = tuple(np.full(PAGE_BYTES, 9, np.uint8) for _ in keys)
    disk.reads.submit(ReadJob(1, 0, keys, target, cancelled))
    assert wait_for_reads(disk, 1) == [ReadDone(1, 0, (False,) * 3)]
    assert all((t == 9).all() for t in target)
    disk.close()


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    """A full queue refuses jobs; the jobs that it accepted are done."""
    disk = tier(tmp_path / "s", queue_jobs=2)
    keys, data = pages(1, 1)
    assert [disk.writes.submit(WriteJob(n, keys, data)) for n in range(4)] == [True, True, False, False]
    disk.start()
    assert sorted(d.ticket for d in wait_for_writes(disk, 2)) == [0, 1]
    disk.close()


def test_a_failing_store_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors of the store become misses and failed writes and are counted; an open breaker is logged."""
    disk = tier(tmp_path / "s", readers=1)
    disk.start()
    keys, data = pages(1, 2)
    disk.writes.submit(WriteJob(0, keys, data))
    wait_for_writes(disk, 1)
    disk.store.close()
    disk.writes.submit(WriteJob(1, keys, data))
    disk.reads.submit(FindJob(1, keys))
    disk.reads.submit(ReadJob(1, 0, keys, data, threading.Event()))
    assert [d.ok for d in wait_for_writes(disk, 1)] == [(False, False)]
    results = wait_for_reads(disk, 2)
    assert FindDone(1, 0) in results and ReadDone(1, 0, (False, False)) in results
    assert disk.reads.breaker.failures + disk.writes.breaker.failures == 2  # the read was not tried after the find
    assert "stops reads: the store is closed" in caplog.text and "stops writes: the store is closed" in caplog.text
    disk.close()


def test_no_error_stops_a_thread(tmp_path: Path) -> None:
    """Jobs that no store can serve are answered too, and the threads go on with the next job."""
    clock = Clock()
    disk, _ = troubled_tier(tmp_path / "s", clock=clock)
    disk.start()
    keys, data = pages(1, 1)
    wrong = (np.zeros((3, 3)),)
    disk.writes.submit(WriteJob(0, keys, wrong))  # type: ignore[arg-type]
    disk.reads.submit(ReadJob(0, 0, keys, wrong, threading.Event()))  # type: ignore[arg-type]
    assert wait_for_writes(disk, 1)[0].ok == (False,)
    assert wait_for_reads(disk, 1)[0].ok == (False,)
    clock.now_s += 1
    disk.writes.submit(WriteJob(1, keys, data))
    assert wait_for_writes(disk, 1)[0].ok == (True,)
    disk.reads.submit(FindJob(1, keys))
    assert wait_for_reads(disk, 1) == [FindDone(1, 1)]
    disk.close()


def test_close_finishes_what_was_queued(tmp_path: Path) -> None:
    """Jobs queued when the tier closes are in the store afterwards."""
    disk = tier(tmp_path / "s")
    batches = [pages(n, 4) for n in range(10)]
    for ticket, (keys, data) in enumerate(batches):
        disk.writes.submit(WriteJob(ticket, keys, data))
    disk.start()
    disk.close()
    again = tier(tmp_path / "s")
    again.start()
    assert all(num_held(again, keys, PATIENCE_S) == 4 for keys, _ in batches)
    again.close()
