"""Whatever order the disk threads answer in, outcomes are taken in the order in which their jobs were submitted."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disk_case import PATIENCE_S, Clock, Gate, blank, pages, troubled_tier, wait_for_writes, wait_until
from hicache.disk import DiskTier, FindDone, FindJob, ReadClass, ReadDone, ReadJob, Stalled, WriteDone, WriteJob
from hicache.disk.io_queue import OutcomeOrder


@given(st.data())
def test_outcomes_are_taken_in_submission_order(data: st.DataObject) -> None:
    """Of jobs that are answered in any order, some of them stalled before: outcomes are taken by number, each once; a
    late answer is taken once, if and only if its `Stalled` was, and after it."""
    count = data.draw(st.integers(0, 8))
    stalled = [number for number in range(1, count + 1) if data.draw(st.booleans())]
    puts = data.draw(st.permutations([*range(1, count + 1), *(Stalled(number, 0) for number in stalled)]))
    order: OutcomeOrder[int] = OutcomeOrder()
    taken: list[int | Stalled] = []
    late: list[int] = []
    answered: set[int] = set()
    for outcome in puts:
        number = outcome.ticket if isinstance(outcome, Stalled) else outcome
        if number in answered:
            continue  # a job is not announced after its answer
        order.put(number, outcome)
        if outcome == number:
            answered.add(number)
        assert order.released <= order.finished
        if data.draw(st.booleans()):
            taken += order.take(data.draw(st.integers(0, order.finished)))
            released = data.draw(st.integers(0, min(order.released, len(taken))))
            late += (found := order.take_late(released))
            assert all(number <= released and isinstance(taken[number - 1], Stalled) for number in found)
    assert order.finished == order.released == count
    taken += order.take(count)
    late += order.take_late(count)
    assert [outcome.ticket if isinstance(outcome, Stalled) else outcome for outcome in taken] == [*range(1, count + 1)]
    assert sorted(late) == [outcome.ticket for outcome in taken if isinstance(outcome, Stalled)]
    assert order.take(count) == [] and order.take_late(count) == []


class Shuffled:
    """Trouble that lets the calls of a store go on in an order drawn at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._held = rng, list[threading.Event]()

    def __call__(self, verb: str) -> None:
        let_go = threading.Event()
        self._held.append(let_go)
        assert let_go.wait(PATIENCE_S)

    def step(self) -> None:
        """Let one of the waiting calls go on, if there is one."""
        if self._held:
            self._held.pop(self._rng.randrange(len(self._held))).set()


def random_jobs(rng: random.Random, keys: tuple[bytes, ...], count: int) -> list[FindJob | ReadJob]:
    jobs: list[FindJob | ReadJob] = []
    for ticket in range(count):
        part, urgent = keys[rng.randrange(4) :][: rng.randint(1, 4)], rng.random() < 0.5
        if rng.random() < 0.4:
            jobs.append(FindJob(ticket, part, ReadClass.URGENT_FIND if urgent else ReadClass.BACKGROUND_FIND))
        else:
            queue_class = ReadClass.URGENT_READ if urgent else ReadClass.BACKGROUND_READ
            jobs.append(ReadJob(ticket, 0, part, blank(len(part)), threading.Event(), queue_class=queue_class))
    return jobs


def agreed(vectors: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(min, zip(*vectors, strict=True)))


@pytest.mark.parametrize("seed", range(6))
def test_tiers_that_agree_by_minimum_land_the_same(seed: int, tmp_path: Path) -> None:
    """Two tiers are fed the same jobs and answer in different orders. With minima of what both have finished, each
    takes the same outcomes at the same step: all of them, per class in submission order, each once."""
    rng = random.Random(seed)
    keys, data = pages(1, 6)
    tiers, shuffles = [], []
    for n in range(2):
        disk, store = troubled_tier(tmp_path / f"s{n}", readers=3)
        disk.start()
        disk.writes.submit(WriteJob(0, keys[:5], data[:5]))
        wait_for_writes(disk, 1)
        shuffles.append(Shuffled(random.Random(f"{seed} {n}")))
        store.trouble = shuffles[-1]
        tiers.append(disk)
    jobs = random_jobs(rng, keys, 30)
    waiting, landed = list(jobs), list[FindDone | ReadDone | Stalled]()
    steps = 0

    def step() -> bool:
        nonlocal steps
        steps += 1
        if waiting and rng.random() < 0.7:
            job = waiting.pop(0)
            assert all(disk.reads.submit(job) for disk in tiers)
        for shuffle in shuffles:
            shuffle.step()
        through = agreed([disk.reads.finished() for disk in tiers])
        found = [disk.reads.take(through) for disk in tiers]
        assert found[0] == found[1]
        landed.extend(found[0])
        return len(landed) == len(jobs)

    wait_until(step)
    classes = {job.ticket: job.queue_class for job in jobs}
    for queue_class in ReadClass:
        of_class = [outcome.ticket for outcome in landed if classes[outcome.ticket] is queue_class]
        assert of_class == [job.ticket for job in jobs if job.queue_class is queue_class]
    through = agreed([disk.reads.finished() for disk in tiers])
    assert [disk.reads.take(through) for disk in tiers] == [[], []]
    for disk in tiers:
        disk.close()


def landed(tiers: Sequence[DiskTier]) -> list[list]:
    """What each tier takes of what all have finished, reads before writes."""
    reads = agreed([disk.reads.finished() for disk in tiers])
    writes = agreed([disk.writes.finished() for disk in tiers])
    return [[*disk.reads.take(reads), *disk.writes.take(writes)] for disk in tiers]


def test_a_stalled_thread_holds_up_nobody_anywhere(tmp_path: Path) -> None:
    """Where a read and a write stall in one of two tiers, both take `Stalled` or the answer in its place and go on to
    the jobs behind; the late answers come last, and until then neither tier counts these jobs' pages as unused."""
    clock = Clock()
    stuck, other = (troubled_tier(tmp_path / name, clock=clock, readers=2) for name in ("a", "b"))
    tiers = [stuck[0], other[0]]
    keys, data = pages(1, 2)
    for disk in tiers:
        disk.start()
        disk.writes.submit(WriteJob(0, keys, data))
        wait_for_writes(disk, 1)
    gate = stuck[1].trouble = Gate("get_into", "put")
    read = ReadJob(1, 0, keys, blank(2), threading.Event())
    for disk in tiers:
        disk.reads.submit(read)
        disk.writes.submit(WriteJob(1, keys, data))
    wait_until(lambda: gate.held == 2)
    wait_until(lambda: (tiers[1].reads.finished()[1], tiers[1].writes.finished()[0]) == (1, 2))
    assert landed(tiers) == [[], []]
    clock.now_s += 10.1
    outcomes: list[list] = [[], []]

    def land(count: int) -> list[list]:
        def step() -> bool:
            for found, new in zip(outcomes, landed(tiers), strict=True):
                found.extend(new)
            return len(outcomes[0]) >= count

        wait_until(step)
        return outcomes

    answers = [ReadDone(1, 0, (True, True), asked=2), WriteDone(1, (True, True))]
    assert land(2) == [[Stalled(1, 0), Stalled(1, 0)], answers]
    assert [disk.reads.finished() for disk in tiers] == [(0, 1, 0, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 1, 0, 0)]
    assert [disk.writes.finished() for disk in tiers] == [(2, 1), (2, 2)]
    for disk in tiers:
        disk.reads.submit(FindJob(2, keys))
        disk.reads.submit(ReadJob(3, 0, keys, blank(2), threading.Event()))
    assert [found[2:] for found in land(4)] == [
        [FindDone(2, 0), ReadDone(3, 0, (False, False))],  # the stall opened the breaker
        [FindDone(2, 2), ReadDone(3, 0, (True, True), asked=2)],
    ]
    gate.open()
    land(6)
    # Reads and writes have an order each.
    assert [sorted(found[4:], key=lambda done: type(done).__name__) for found in outcomes] == [answers, []]
    assert [disk.reads.finished() for disk in tiers] == [(1, 2, 0, 0, 1, 2, 0, 0)] * 2
    for disk in tiers:
        disk.close()


def test_an_answer_takes_the_place_of_a_stall_that_was_not_taken(tmp_path: Path) -> None:
    """Where a stalled job is answered before its outcome was agreed on, its outcome is the answer, once."""
    clock = Clock()
    disk, store = troubled_tier(tmp_path / "s", clock=clock)
    disk.start()
    keys, _ = pages(1, 2)
    gate = store.trouble = Gate("contains")
    disk.reads.submit(FindJob(1, keys))
    wait_until(lambda: gate.held == 1)
    clock.now_s += 10.1
    assert disk.reads.finished() == (1, 0, 0, 0, 0, 0, 0, 0)
    gate.open()
    wait_until(lambda: disk.reads.finished()[4] == 1)
    assert disk.reads.take(disk.reads.finished()) == [FindDone(1, 0)]
    assert disk.reads.take(disk.reads.finished()) == []
    disk.close()
