"""The store process beside an engine whose loop never lets go of the interpreter.

    read.busy.<page>     reads beside such a loop; the ceiling is the same beside an idle interpreter
    threads.busy.2mib    the same by a store in threads of the interpreter, for comparison
    loop.reads, .writes  parts of the loop a second beside reads and beside writes; the ceiling is the loop alone
    loop.longest         the longest part of the loop beside reads, in ms, against 1 ms
    engine.batch64       time in the engine's thread, which computes meanwhile, to submit a batch of 64 pages and take
                         its answer, against 100 us
    ready                from the start of the process until it takes jobs, against 0.5 s

Every read is compared with what was written, outside the timing. Pages are bf16 normals at level 1; those that are read
are in the kernel's memory where the machine has enough of it.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from hicache.bench.common import Report
from hicache.storage import PageFilter, PageFormat
from hicache.storage.process.health import Limits
from hicache.storage.process.jobs import PageRows, ReadDone, ReadJob, WriteDone, WriteJob
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.stores import StoreRequest
from hicache.stores.tier import StoreTier, open_tier

NAME = "store_process"
DESCRIPTION = "the store process beside a loop that holds the interpreter: reads, writes, the loop's steps"

_JOB_PAGES, _READERS = 8, 4
_BATCH = 64
_PATIENT = Limits(io_timeout_s=600, close_s=600)  # threads beside a loop that holds the interpreter take long
_THREADS_SHARE = 8  # of the pages, which are read by threads
_PARTS = 25
_PAGES = {"2mib": 2 << 20, "128kib": 128 << 10}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=1024, help="of the pages that are read at a time")
    parser.add_argument("--samples", type=int, default=5, help="of each case, in turns")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")


def run(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, page_bytes in _PAGES.items():
            _measure(report, Path(folder, name), name, page_bytes, (args.mib << 20) // page_bytes, args.samples)


@dataclass
class Loop:
    """An engine's loop that computes in Python all the time, some 20 us in a part, and polls once in some 0.5 ms, as
    the shortest steps of a server do. `longest_s`: between the ends of two parts."""

    parts: int = 0
    seconds: float = 0.0
    longest_s: float = field(default=0.0)

    def run(self, is_done: Callable[[], bool]) -> None:
        begin_s = last_s = time.perf_counter()
        while not is_done():
            for _ in range(_PARTS):
                sum(range(1500))
                now_s = time.perf_counter()
                self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s
                self.parts += 1
        self.seconds = time.perf_counter() - begin_s

    @property
    def rate(self) -> float:
        return self.parts / self.seconds


class Rig:
    """A tier, and pages in the memory that it shares with its process."""

    def __init__(self, folder: Path, page_bytes: int, num_pages: int, *, in_process: bool) -> None:
        num_bytes = num_pages * page_bytes
        self._descriptor = os.memfd_create("hicache-bench")
        os.ftruncate(self._descriptor, num_bytes)
        mapping = mmap.mmap(self._descriptor, num_bytes)
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapping, np.uint8)
        request = StoreRequest(
            f"lmdb://{folder}?budget={8 * num_bytes + (1 << 30)}&level=1",
            {"model": "bench"},
            [PageFormat(page_bytes, PageFilter("byte_shuffle", 2))],
            settings=ServiceSettings(readers=_READERS, queue_jobs=1 << 20, limits=_PATIENT),
        )
        begin_s = time.perf_counter()
        self.tier: StoreTier = open_tier(request, in_process=in_process)
        self.ready_s = time.perf_counter() - begin_s
        self.tier.share(self._descriptor, memory)
        self.memory = memory.reshape(num_pages, page_bytes)
        self.num_bytes = num_bytes
        self._left = 0

    def close(self) -> None:
        if not self.tier.close():
            raise AssertionError("the store process did not close")
        os.close(self._descriptor)

    def submit_reads(self) -> None:
        never = threading.Event()
        for batch in range(0, len(self.memory), _JOB_PAGES):
            pages = PageRows(self.memory, list(range(batch, min(batch + _JOB_PAGES, len(self.memory)))))
            self.tier.reads.submit(ReadJob(1, batch, _keys(0, batch, len(pages)), pages, never))
            self._left += 1

    def submit_writes(self, salt: int) -> None:
        for batch in range(0, len(self.memory), _JOB_PAGES):
            pages = PageRows(self.memory, list(range(batch, min(batch + _JOB_PAGES, len(self.memory)))))
            self.tier.writes.submit(WriteJob(salt, _keys(salt, batch, len(pages)), pages, batch))
            self._left += 1

    def is_done(self) -> bool:
        for done in (*self.tier.reads.poll(), *self.tier.writes.poll()):
            if not isinstance(done, (ReadDone, WriteDone)) or not all(done.ok):
                raise AssertionError(f"the store did not do a job: {done}")
            self._left -= 1
        return not self._left

    def wait(self) -> None:
        """Beside an idle interpreter."""
        while not self.is_done():
            self.tier.wait(0.01)


def _measure(report: Report, folder: Path, name: str, page_bytes: int, num_pages: int, samples: int) -> None:
    content = _normals(num_pages, page_bytes)
    seconds: dict[str, list[float]] = {"idle": [], "busy": [], "threads": []}
    alone, reads, writes, longest_ms = list[float](), list[float](), list[float](), list[float]()
    with _rig(folder, page_bytes, num_pages, in_process=False) as rig:
        rig.memory[:] = content
        rig.submit_writes(0)
        rig.wait()
        if name == "2mib":
            report.case("ready", [rig.ready_s], "s", ceiling=0.5, better="lower", target=1.0)
        for sample in range(samples):
            seconds["idle"].append(_read(rig, content, rig.wait))
            loop = Loop()
            seconds["busy"].append(_read(rig, content, partial(loop.run, rig.is_done)))
            reads.append(loop.rate)
            longest_ms.append(loop.longest_s * 1e3)
            loop = Loop()
            loop.run(partial(_idle_until, rig, time.perf_counter() + 0.5))
            alone.append(loop.rate)
            loop = Loop()
            rig.submit_writes(1 + sample)
            loop.run(rig.is_done)
            writes.append(loop.rate)
        if name == "128kib":
            _batch64(report, rig, samples)
    if name == "2mib":
        few = content[: len(content) // _THREADS_SHARE]
        with _rig(folder, page_bytes, len(few), in_process=True) as rig:
            loop = Loop()
            seconds["threads"].append(_THREADS_SHARE * _read(rig, few, partial(loop.run, rig.is_done)))
    num_bytes = num_pages * page_bytes
    report.rate(f"read.busy.{name}", num_bytes, seconds["busy"], beside=seconds["idle"], target=0.95)
    if name == "2mib":
        report.rate("threads.busy.2mib", num_bytes, seconds["threads"], beside=seconds["idle"], note="for comparison")
        report.case("loop.reads", reads, "parts/s", ceiling=alone, target=0.97)
        report.case("loop.writes", writes, "parts/s", ceiling=alone, target=0.97)
        report.case("loop.longest", longest_ms, "ms", ceiling=1.0, better="lower", target=1.0)


def _read(rig: Rig, content: np.ndarray, wait: Callable[[], None]) -> float:
    """Seconds of reading all pages."""
    rig.memory[:] = 0
    begin_s = time.perf_counter()
    rig.submit_reads()
    wait()
    seconds = time.perf_counter() - begin_s
    if not np.array_equal(rig.memory, content):
        raise AssertionError("other bytes came back")
    return seconds


def _idle_until(rig: Rig, end_s: float) -> bool:
    return rig.is_done() and time.perf_counter() > end_s


def _batch64(report: Report, rig: Rig, samples: int) -> None:
    micros, never, keys = list[float](), threading.Event(), _keys(0, 0, _BATCH)
    for ticket in range(200 * samples):
        begin_s = time.perf_counter()
        pages = PageRows(rig.memory, list(range(_BATCH)))
        rig.tier.reads.submit(ReadJob(ticket, 0, keys, pages, never))
        spent_s, found = time.perf_counter() - begin_s, False
        while not found:
            sum(range(1500))  # an engine's thread does not sleep between two polls
            begin_s = time.perf_counter()
            found = bool(rig.tier.reads.poll())
            end_s = time.perf_counter()
        micros.append((spent_s + end_s - begin_s) * 1e6)
    report.case("engine.batch64", micros, "us", ceiling=100.0, better="lower", target=1.0)


@contextlib.contextmanager
def _rig(folder: Path, page_bytes: int, num_pages: int, *, in_process: bool) -> Iterator[Rig]:
    rig = Rig(folder, page_bytes, num_pages, in_process=in_process)
    try:
        yield rig
    finally:
        rig.close()


def _keys(salt: int, first: int, count: int) -> tuple[bytes, ...]:
    return tuple(b"%032d" % (salt << 24 | number) for number in range(first, first + count))


def _normals(num_pages: int, page_bytes: int) -> np.ndarray:
    """bf16 normals, uint8 [num_pages, page_bytes]; 64 pages, repeated."""
    rng = np.random.default_rng(0)
    some = rng.standard_normal((min(64, num_pages), page_bytes // 2)).astype(np.float32).view(np.uint32) >> 16
    return np.resize(some.astype(np.uint16).view(np.uint8), (num_pages, page_bytes))
