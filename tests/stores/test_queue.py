"""The order of jobs of the disk tier, the jobs that are skipped, and the jobs that are executed together."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disk_case import PATIENCE_S, Clock, Gate, blank, num_held, pages, started_tier, wait_for_reads, wait_for_writes
from hicache.storage.process.health import Limits
from hicache.storage.process.io_queue import IoQueue
from hicache.storage.process.jobs import FindDone, FindJob, ReadClass, ReadDone, ReadJob, WriteDone, WriteJob
from hicache.storage.process.shared_memory import QUEUE_NUMBERS
from hicache.stores.tier import StoreTier
from waiting import eventually


def until_queued(disk: StoreTier, name: str, num_jobs: int) -> None:
    """Wait until `num_jobs` jobs are queued for a thread of the store. The tier's clock is set by hand."""
    eventually(lambda: disk.poll() or disk.status.queue(name)[QUEUE_NUMBERS.index("queued_jobs")] == num_jobs)


def address(page: np.ndarray) -> int:
    return page.__array_interface__["data"][0]


@given(
    st.lists(st.tuples(st.sampled_from(ReadClass), st.integers(0, 9)), max_size=30),
    st.integers(1, 20),
    st.integers(0, 40),
)
def test_a_queue_keeps_class_then_number(offers: list[tuple[ReadClass, int]], capacity: int, max_bytes: int) -> None:
    """Jobs leave the queue by class and, within a class, by number. A group has at most `max_bytes` and is as large as
    possible. A stopped queue keeps its jobs for its threads."""
    queue: IoQueue[ReadJob, None] = IoQueue("reads", capacity, lambda job: None, Limits(), Clock())
    queue.start(1, lambda watchdog: None)
    for n, (queue_class, num_bytes) in enumerate(offers):
        page = np.zeros(num_bytes, np.uint8)
        queue.submit(ReadJob(n, 0, (b"",), (page,), threading.Event(), queue_class=queue_class), lambda done: None)
    order = sorted(range(len(offers)), key=lambda n: (offers[n][0], n))
    assert queue.fullness(1000) == min(1, max(len(order) / capacity, sum(offers[n][1] for n in order) / 1000))
    group = [item.job.ticket for item in queue.take_more(max_bytes)]
    sizes = [offers[n][1] for n in order[: len(group) + 1]]
    assert group == order[: len(group)] and sum(sizes[: len(group)]) <= max_bytes
    assert len(group) == len(order) or sum(sizes) > max_bytes
    queue.stop()
    queue.look()
    rest = []
    while (item := queue.take()) is not None:
        rest.append(item.job.ticket)
    assert group + rest == order and len(queue) == 0 and queue.fullness(1) == 0


def test_finds_wait_for_no_read_and_urgent_reads_go_first(tmp_path: Path) -> None:
    """While the only reader is busy, finds are answered in the order of submission. Then urgent reads run before
    background reads, and reads of one class in the order of submission."""
    keys, data = [pages(n, 1)[0] for n in range(8)], [pages(n, 1)[1] for n in range(8)]
    disk, store = started_tier(tmp_path / "s", keys[0], data[0], clock=Clock(), readers=1)
    gate = store.trouble = Gate("get_into")

    def read(n: int, batch: int, queue_class: ReadClass) -> ReadJob:
        return ReadJob(n, batch, keys[n], blank(1), threading.Event(), queue_class=queue_class)

    urgent, background = ReadClass.URGENT_READ, ReadClass.BACKGROUND_READ
    disk.reads.submit(read(0, 0, background))
    eventually(lambda: gate.held == 1)
    for job in (
        read(6, 0, background),
        FindJob(1, keys[0]),
        read(7, 1, background),
        read(3, 0, urgent),
        FindJob(2, keys[1], ReadClass.BACKGROUND_FIND),
        read(4, 1, urgent),
        read(5, 0, urgent),
    ):
        assert disk.reads.submit(job)
    assert wait_for_reads(disk, 2) == [FindDone(1, 1), FindDone(2, 0)]
    until_queued(disk, "reads", 5)
    assert gate.held == 1
    gate.open()
    wait_for_reads(disk, 6)
    order = [call[1] for call in store.calls if call[0] == "get_into"]
    assert order == [keys[n] for n in (0, 3, 4, 5, 6, 7)]
    disk.close()


def test_unwanted_pages_are_not_read(tmp_path: Path) -> None:
    """A read that was cancelled, or whose deadline has passed, is answered without calling the store; the next job is
    read. A cancel takes effect between two parts of a batch, and the pages already read are kept."""
    clock = Clock()
    keys, data = pages(1, 8)
    disk, store = started_tier(tmp_path / "s", keys, data, clock=clock)
    never, cancelled, halfway = threading.Event(), threading.Event(), threading.Event()
    cancelled.set()
    targets = [blank(8) for _ in range(4)]
    arrived, goes_on = threading.Event(), threading.Event()

    def trouble(verb: str) -> None:
        if store.verbs("get_into") == 5:  # the second call of the last job
            arrived.set()
            assert goes_on.wait(PATIENCE_S)

    store.trouble = trouble
    disk.reads.submit(ReadJob(1, 0, keys, targets[0], cancelled))
    disk.reads.submit(ReadJob(2, 0, keys, targets[1], never, deadline_s=100.0))
    disk.reads.submit(ReadJob(3, 0, keys, targets[2], never, deadline_s=100.1))
    disk.reads.submit(ReadJob(4, 5, keys, targets[3], halfway))
    assert arrived.wait(PATIENCE_S)
    halfway.set()
    disk.reads.notify_cancelled()
    goes_on.set()
    answers = wait_for_reads(disk, 4)
    assert answers[:3] == [
        ReadDone(1, 0, (False,) * 8),
        ReadDone(2, 0, (False,) * 8),
        ReadDone(3, 0, (True,) * 8, asked=8),
    ]
    read = answers[3].asked
    assert answers[3] == ReadDone(4, 5, (True,) * read + (False,) * (8 - read), asked=read) and 0 < read < 8
    for target, count in zip(targets, (0, 0, 8, read), strict=True):
        for n, page in enumerate(target):
            assert np.array_equal(page, data[n]) if n < count else not page.any()
    disk.close()


def test_pages_after_a_gap_are_not_read(tmp_path: Path) -> None:
    """A missing page ends its batch, because the pages after it would be useless."""
    disk, store = started_tier(tmp_path / "s")
    keys, data = pages(1, 8)
    disk.writes.submit(WriteJob(0, keys[:1] + keys[2:], data[:1] + data[2:]))
    wait_for_writes(disk, 1)
    disk.reads.submit(ReadJob(1, 0, keys, blank(8), threading.Event()))
    [answer] = wait_for_reads(disk, 1)
    assert answer.ok[:2] == (True, False) and not any(answer.ok[2:]) and store.verbs("get_into") == 1
    disk.close()


def test_writes_that_wait_are_put_together(tmp_path: Path) -> None:
    """Jobs that are submitted while the writer is busy share one put, in order. Each job is answered for its own
    pages."""
    disk, store = started_tier(tmp_path / "s", queue_jobs=10, clock=Clock())
    gate = store.trouble = Gate("put")
    jobs = [WriteJob(n, *pages(n, n + 1), batch=n) for n in range(5)]
    disk.writes.submit(jobs[0])
    eventually(lambda: gate.held == 1)
    for job in jobs[1:]:
        disk.writes.submit(job)
    until_queued(disk, "writes", 4)
    put, left_out = store.inner.put, (jobs[2].keys[0], jobs[4].keys[3])

    def picky(items: Sequence[tuple[bytes, np.ndarray]], *, lag: float, deadline_s: float) -> list[bool]:
        return [ok and key not in left_out for ok, (key, _) in zip(put(items, lag=lag), items, strict=True)]

    store.inner.put = picky  # type: ignore[method-assign, assignment]
    gate.open()
    answers = wait_for_writes(disk, 5)
    stored = [tuple(key not in left_out for key in job.keys) for job in jobs]
    assert answers == [
        WriteDone(job.ticket, ok, job.batch, num_new=sum(ok)) for job, ok in zip(jobs, stored, strict=True)
    ]
    assert [call[1] for call in store.calls] == [jobs[0].keys, sum((job.keys for job in jobs[1:]), ())]
    disk.close()


def test_a_group_is_bounded_and_gets_the_lag(tmp_path: Path) -> None:
    """A put has at most a maximum of bytes. `lag` is how full the queue behind it is."""
    disk, store = started_tier(tmp_path / "s", queue_jobs=20, full_bytes=96 << 20, clock=Clock())
    store.inner.put = lambda items, lag, deadline_s=0: [True] * len(items)  # type: ignore[method-assign, assignment]
    gate = store.trouble = Gate("put")
    keys, data = pages(1, 1)
    disk.writes.submit(WriteJob(0, keys, data))
    eventually(lambda: gate.held == 1)
    many = data * 6144  # 24 MiB, of which ten fit in the limit of 256 MiB and eleven do not
    for n in range(12):
        disk.writes.submit(WriteJob(1 + n, keys * len(many), many))
    until_queued(disk, "writes", 12)
    gate.open()
    assert [answer.ticket for answer in wait_for_writes(disk, 13)] == list(range(13))
    assert [len(call[1]) for call in store.calls] == [1, 10 * len(many), 2 * len(many)]
    assert store.lags == [0.0, 48 / 96, 0.0]
    disk.close()


def test_close_finishes_queued_jobs(tmp_path: Path) -> None:
    """A full queue refuses jobs. When the tier has closed, the store has the pages of all accepted jobs."""
    disk, store = started_tier(tmp_path / "s", queue_jobs=9)  # eight jobs, and one for the reader
    gate = store.trouble = Gate("put")
    batches = [pages(n, 4) for n in range(12)]
    accepted = [disk.writes.submit(WriteJob(n, *batch)) for n, batch in enumerate(batches)]
    assert accepted == [True] * 10 + [False] * 2
    gate.open()
    disk.close()
    again, _ = started_tier(tmp_path / "s")
    assert [num_held(again, keys, PATIENCE_S) for keys, _ in batches] == [4] * 10 + [0] * 2
    again.close()


def test_a_closed_tier_refers_to_no_page_of_its_jobs(tmp_path: Path) -> None:
    """A closed tier has no references to pages of its jobs, even while the tier itself is kept, because their memory
    may be unmapped."""
    disk, _ = started_tier(tmp_path / "s")
    keys, written = pages(1, 2)
    into = blank(2)
    alive = [weakref.ref(page) for page in (*written, *into)]
    disk.writes.submit(WriteJob(1, keys, written))
    wait_for_writes(disk, 1)
    disk.reads.submit(ReadJob(2, 0, keys, into, threading.Event()))
    wait_for_reads(disk, 1)
    del written, into
    assert disk.close()
    gc.collect()
    assert not any(page() is not None for page in alive)


@pytest.mark.parametrize("ends", ["cancelled", "stalled"])
def test_a_detached_read_that_hangs_is_answered(tmp_path: Path, ends: str) -> None:
    """A read in the thread, and a read queued behind it, are answered at once when they are cancelled or stall. Pages
    that the thread reads later do not reach the client's memory, which may then have another use. Later reads get
    pages."""
    clock = Clock()
    keys, data = pages(1, 2)
    disk, store = started_tier(tmp_path / "s", keys, data, clock=clock, detaches_reads=True)
    gate = store.trouble = Gate("get_into")
    cancelled, targets = threading.Event(), [blank(2) for _ in range(3)]
    for n in range(2):
        assert disk.reads.submit(ReadJob(n, 0, keys, targets[n], cancelled))
    eventually(lambda: gate.held == 1)
    if ends == "cancelled":
        cancelled.set()
        disk.reads.notify_cancelled()
    else:
        clock.now_s += 11
    answers = wait_for_reads(disk, 2)
    assert sorted(done.ticket for done in answers) == [0, 1]
    assert all(isinstance(done, ReadDone) and not any(done.ok) for done in answers)
    gate.open()

    def is_read() -> bool:
        clock.now_s += 11  # a stall has opened the breaker, which now tries again
        disk.reads.submit(ReadJob(2, 0, keys, targets[2], threading.Event()))
        return wait_for_reads(disk, 1)[0].ok == (True, True)

    eventually(is_read)
    assert not any(page.any() for target in targets[:2] for page in target)
    assert all(np.array_equal(page, content) for page, content in zip(targets[2], data, strict=True))
    assert disk.close()
