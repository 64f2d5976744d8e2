"""A disk and a remote store used as one: the stores for which a look-up waits, the store that reads a page, and faults
of the remote store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest

from disk_case import Clock, Gate, TroubledStore, blank, pages, started_tier
from hicache.metrics import Metrics
from hicache.storage import StoreError
from hicache.storage.process.jobs import FindDone, FindJob, ReadDone, ReadJob
from hicache.stores.disk_and_remote import Stores, answer_limit_s
from hicache.tiers import DISK, REMOTE, Store
from waiting import eventually

KEYS, DATA = pages(1, 4)


class Case(NamedTuple):
    """Two stores of pages. The disk has the first two, the remote store the middle two."""

    stores: Stores
    on: MappingProxyType[Store, TroubledStore]
    clock: Clock

    def find(self, answer_s: float = 1e9) -> None:
        assert self.stores.find(FindJob(1, (), others=KEYS), answer_s)

    def found(self) -> tuple[bool, ...] | None:
        """The answer to the look-up, or None if there is none yet."""
        for _, done in self.stores.poll():
            assert isinstance(done, FindDone) and done.ticket == 1
            return done.others
        return None

    def read(self, keys: Sequence[bytes] = KEYS[:3]) -> list[tuple[Store, bool]]:
        """Read pages in parts that belong to one store. Returns the store and the outcome of each page; pages that were
        read have the right bytes."""
        targets, start, num_parts = blank(len(keys)), 0, 0
        while start < len(keys):
            end = self.stores.end_of_part(keys, start, 8)
            job = ReadJob(2, start, tuple(keys[start:end]), targets[start:end], threading.Event())
            assert self.stores.read(job)
            start, num_parts = end, num_parts + 1
        answers: list[tuple[Store, ReadDone]] = []
        eventually(lambda: answers.extend(self.stores.poll()) or len(answers) == num_parts)
        read = sorted(((done.batch + i, store, ok) for store, done in answers for i, ok in enumerate(done.ok)))
        for (_, _, ok), key, target in zip(read, keys, targets, strict=True):
            assert not ok or np.array_equal(target, DATA[KEYS.index(key)])
        return [(store, ok) for _, store, ok in read]


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    clock = Clock()
    disk, on_disk = started_tier(tmp_path / "disk", KEYS[:2], DATA[:2], clock=clock)
    remote, on_remote = started_tier(tmp_path / "remote", KEYS[1:3], DATA[1:3], clock=clock, name="remote")
    case = Case(Stores({DISK: disk, REMOTE: remote}), MappingProxyType({DISK: on_disk, REMOTE: on_remote}), clock)
    yield case
    eventually(case.stores.close)


def test_pages_are_found_in_both_stores_and_read_from_the_disk_first(case: Case) -> None:
    """A look-up finds pages in both stores. A page that both have, or that no look-up named, is read from the disk."""
    case.find()
    assert eventually(case.found) == (True, True, True, False)
    assert case.read() == [(DISK, True), (DISK, True), (REMOTE, True)]
    assert case.read(KEYS[3:]) == [(DISK, False)]


def test_a_look_up_waits_for_the_remote_store_until_its_deadline(case: Case) -> None:
    """At the deadline only the disk's answer counts. A late answer of the remote store changes nothing, and the next
    look-up finds all pages."""
    metrics = Metrics()
    case.stores.register(metrics)
    gate = case.on[REMOTE].trouble = Gate("contains")
    case.find(answer_s=0.5)
    eventually(lambda: gate.held == 1)
    eventually(lambda: case.on[DISK].verbs("contains"))
    assert case.found() is None
    case.clock.now_s += 0.6
    assert eventually(case.found) == (True, True, False, False)
    assert metrics.snapshot()["remote.find_failures"] == 1
    gate.open()
    case.find()
    assert eventually(case.found) == (True, True, True, False)


def test_a_disk_with_all_pages_waits_for_nothing(case: Case) -> None:
    gate = case.on[REMOTE].trouble = Gate("contains")
    assert case.stores.find(FindJob(1, (), others=KEYS[:2]), 1e9)
    assert eventually(case.found) == (True, True)
    gate.open()


def test_a_page_that_the_remote_store_lost_is_a_miss_and_is_not_asked_for_again(case: Case) -> None:
    """For ten seconds a page that the remote store lost is a miss without another request."""
    case.find()
    eventually(case.found)
    case.on[REMOTE].inner.delete(KEYS[2:3])
    assert case.read() == [(DISK, True), (DISK, True), (REMOTE, False)]
    assert all(case.on[REMOTE].inner.put([(KEYS[2], DATA[2])]))
    case.find()
    assert eventually(case.found) == (True, True, False, False)
    case.clock.now_s += 11
    case.find()
    assert eventually(case.found) == (True, True, True, False)
    assert case.read()[2] == (REMOTE, True)


def test_a_store_that_refuses_is_not_asked(case: Case) -> None:
    """A stall has opened the breaker of the remote store. Then the disk alone answers, at once."""
    gate = case.on[REMOTE].trouble = Gate("contains")
    case.find()
    eventually(lambda: gate.held == 1)
    eventually(lambda: case.found() is None and not case.stores.tiers[DISK].reads.in_flight)
    case.clock.now_s += 11
    assert eventually(case.found) == (True, True, False, False)
    eventually(lambda: case.stores.poll() or case.stores.tiers[REMOTE].reads.refuses())
    case.find()
    assert eventually(case.found) == (True, True, False, False)
    gate.open()


def test_a_remote_store_that_hangs_leaves_the_disk_closed(case: Case) -> None:
    """If the remote store cannot be closed, the disk is closed, so that another process can open it."""
    gate = case.on[REMOTE].trouble = Gate("get_into")
    case.find()
    eventually(case.found)
    assert case.stores.read(ReadJob(2, 0, KEYS[2:3], blank(1), threading.Event()))
    eventually(lambda: gate.held == 1)
    case.clock.now_s += 11
    eventually(case.stores.poll)
    assert not case.stores.close()
    with pytest.raises(StoreError, match="closed"):
        case.on[DISK].contains(KEYS)
    gate.open()


def test_the_deadline_is_a_quarter_of_computing_and_at_most_a_second() -> None:
    for compute_s, limit_s in ((0.4, 0.1), (2.0, 0.5), (60.0, 1.0)):
        assert 0.9 * limit_s < answer_limit_s(compute_s) <= limit_s
