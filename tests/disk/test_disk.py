"""The disk threads over a real store: what goes in comes out, and no failure leaves the worker."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from disk_case import PAGE_BYTES, PATIENCE_S, Clock, pages, troubled_tier, wait_for
from hicache.disk import DiskTier, FindDone, FindJob, ReadDone, ReadJob, WriteJob


def tier(path: Path, readers: int = 3, queue_jobs: int = 64) -> DiskTier:
    return troubled_tier(path, readers=readers, queue_jobs=queue_jobs)[0]


def test_written_pages_are_read_back(tmp_path: Path) -> None:
    """Every batch the writer thread wrote is found and read by the readers, byte for byte, under its own ticket."""
    disk = tier(tmp_path / "s")
    disk.start()
    batches = [pages(n, 5) for n in range(8)]
    for ticket, (keys, data) in enumerate(batches):
        assert disk.submit(WriteJob(ticket, keys, data))
    assert {(d.ticket, d.ok) for d in wait_for(disk.drain_writes, 8)} == {(n, (True,) * 5) for n in range(8)}
    targets = [tuple(np.zeros(PAGE_BYTES, np.uint8) for _ in range(5)) for _ in batches]
    for ticket, (keys, _) in enumerate(batches):
        assert disk.submit(FindJob(ticket, (*keys, b"missing" * 4, keys[0])))
        assert disk.submit(ReadJob(ticket, 7, keys, targets[ticket], threading.Event()))
    results = wait_for(disk.drain_reads, 16)
    assert {r.ticket: r.num_pages for r in results if isinstance(r, FindDone)} == dict.fromkeys(range(8), 5)
    assert {(r.ticket, r.batch, r.ok) for r in results if isinstance(r, ReadDone)} == {
        (n, 7, (True,) * 5) for n in range(8)
    }
    for (_, data), got in zip(batches, targets, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(data, got, strict=True))
    disk.store.check()
    disk.close()


def test_cancelled_reads_touch_nothing(tmp_path: Path) -> None:
    """A job whose cancel is set gives its pages back unread."""
    disk = tier(tmp_path / "s")
    disk.start()
    keys, data = pages(1, 3)
    disk.submit(WriteJob(0, keys, data))
    wait_for(disk.drain_writes, 1)
    cancelled = threading.Event()
    cancelled.set()
    target = tuple(np.full(PAGE_BYTES, 9, np.uint8) for _ in keys)
    disk.submit(ReadJob(1, 0, keys, target, cancelled))
    assert wait_for(disk.drain_reads, 1) == [ReadDone(1, 0, (False,) * 3)]
    assert all((t == 9).all() for t in target)
    disk.close()


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    """Beyond its bound a queue takes nothing and says so; what it took is done."""
    disk = tier(tmp_path / "s", queue_jobs=2)
    keys, data = pages(1, 1)
    assert [disk.submit(WriteJob(n, keys, data)) for n in range(4)] == [True, True, False, False]
    disk.start()
    assert sorted(d.ticket for d in wait_for(disk.drain_writes, 2)) == [0, 1]
    disk.close()


def test_a_failing_store_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the store raises becomes misses and failed writes, and is counted; that the store is out of use, logged."""
    disk = tier(tmp_path / "s", readers=1)
    disk.start()
    keys, data = pages(1, 2)
    disk.submit(WriteJob(0, keys, data))
    wait_for(disk.drain_writes, 1)
    disk.store.close()
    disk.submit(WriteJob(1, keys, data))
    disk.submit(FindJob(1, keys))
    disk.submit(ReadJob(1, 0, keys, data, threading.Event()))
    assert [d.ok for d in wait_for(disk.drain_writes, 1)] == [(False, False)]
    results = wait_for(disk.drain_reads, 2)
    assert FindDone(1, 0) in results and ReadDone(1, 0, (False, False)) in results
    assert disk.failures == 2  # the read was not tried after the find
    assert "stops reads: the store is closed" in caplog.text and "stops writes: the store is closed" in caplog.text
    disk.close()


def test_no_error_stops_a_thread(tmp_path: Path) -> None:
    """Jobs that no store can serve get an answer too, and the threads go on with the next."""
    clock = Clock()
    disk, _ = troubled_tier(tmp_path / "s", clock=clock)
    disk.start()
    keys, data = pages(1, 1)
    wrong = (np.zeros((3, 3)),)
    disk.submit(WriteJob(0, keys, wrong))  # type: ignore[arg-type]
    disk.submit(ReadJob(0, 0, keys, wrong, threading.Event()))  # type: ignore[arg-type]
    assert wait_for(disk.drain_writes, 1)[0].ok == (False,)
    assert wait_for(disk.drain_reads, 1)[0].ok == (False,)
    clock.now_s += 1
    disk.submit(WriteJob(1, keys, data))
    assert wait_for(disk.drain_writes, 1)[0].ok == (True,)
    disk.submit(FindJob(1, keys))
    assert wait_for(disk.drain_reads, 1) == [FindDone(1, 1)]
    disk.close()


def test_close_finishes_what_was_queued(tmp_path: Path) -> None:
    """Jobs on the queue when the tier closes are in the store afterwards."""
    disk = tier(tmp_path / "s")
    batches = [pages(n, 4) for n in range(10)]
    for ticket, (keys, data) in enumerate(batches):
        disk.submit(WriteJob(ticket, keys, data))
    disk.start()
    disk.close()
    again = tier(tmp_path / "s")
    again.start()
    assert all(again.contains(keys, PATIENCE_S) == 4 for keys, _ in batches)
    again.close()
