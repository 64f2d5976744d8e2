"""Measures group commits of new pages to a new store, in turns with writes of the same bytes to a new file.

    write.alone           writes with durability `relaxed`; the ceiling, write.raw, writes a plain file by O_DIRECT, in
                          blocks of a page, with a fdatasync after each group
    write.commit          writes with durability `commit`; the ceiling is also write.raw
    write.beside_readers  writes with `relaxed` while 4 threads read other pages; the ceiling is writing without readers
    read.beside_writer    reads of these 4 threads; the ceiling is reading without a writer
    *.raw.beside_*        the same two cases for a plain file with O_DIRECT, which are the limits of the disk

As in a host pool, pages are aligned and in huge memory pages. The benchmark `disk` uses this module.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hicache.bench.common import Report
from hicache.bench.raw_io import drop_caches, host_pages, in_threads
from hicache.storage import LmdbPageStore, PageBuffer, PageFormat
from hicache.storage.base import Durability

ALONE_S = 1.0
_GROUP_BYTES = 56 << 20  # bytes that one commit of a store of 4 GiB or more writes
_GROUPS_PER_PUT = 4
_BLOCK_BYTES = 4096
_READERS = 4


def measure_writes(report: Report, folder: Path, page_bytes: int, num_pages: int, samples: int) -> None:
    """Measure all cases. Each case writes `num_pages` pages."""
    per_group = max(1, _GROUP_BYTES // page_bytes)
    pages = _aligned_pages(per_group, page_bytes)
    variants: dict[str, Callable[[], AbstractContextManager[_Target]]] = {
        "raw": lambda: _raw(folder / "write-raw", pages, num_pages),
        "relaxed": lambda: _store(folder / "write-relaxed", pages, num_pages, "relaxed"),
        "commit": lambda: _store(folder / "write-commit", pages, num_pages, "commit"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    mixed: dict[str, list[_Mixed]] = {"raw": [], "relaxed": []}
    for _ in range(samples):
        for name, variant in variants.items():
            with variant() as target:
                seconds[name].append(target.timed_write(0))
                if name in mixed:
                    mixed[name].append(_beside(target, num_pages, page_bytes))
    num_bytes = num_pages * page_bytes
    note = f"random bytes, groups of {per_group} pages of {page_bytes >> 20} MiB, a fdatasync each"
    report.rate("write.raw", num_bytes, seconds["raw"], note=note)
    report.rate("write.alone", num_bytes, seconds["relaxed"], ceiling_seconds=seconds["raw"], target=0.95, note=note)
    report.rate("write.commit", num_bytes, seconds["commit"], ceiling_seconds=seconds["raw"], note=note)
    for name, kind in (("raw.", "raw"), ("", "relaxed")):
        written = [one.write_s for one in mixed[kind]]
        targets = (None, None) if name else (0.6, 0.9)
        note = f"beside {_READERS} readers"
        report.rate(
            f"write.{name}beside_readers",
            num_bytes,
            written,
            ceiling_seconds=seconds["raw"],
            target=targets[0],
            note=note,
        )
        alone, concurrent = ([one.alone for one in mixed[kind]], [one.concurrent for one in mixed[kind]])
        report.case(f"read.{name}beside_writer", concurrent, "GB/s", ceiling=alone, target=targets[1])


class _Mixed(NamedTuple):
    """Seconds of writing during reads, and the GB/s of reads alone and during writing."""

    write_s: float
    alone: float
    concurrent: float


@dataclass(frozen=True)
class _Target:
    """A store or file to write and read. `write(salt)` writes all pages, with keys that depend on the salt. `read`
    reads one of the pages that were written with salt 0."""

    write: Callable[[int], None]
    read: Callable[[int, PageBuffer], None]
    path: Path

    def timed_write(self, salt: int) -> float:
        start = time.perf_counter()
        self.write(salt)
        return time.perf_counter() - start


def _beside(target: _Target, num_pages: int, page_bytes: int) -> _Mixed:
    """Measure readers alone, and then concurrently with a writer."""
    rates, written = list[float](), list[float]()
    for work in (lambda: time.sleep(ALONE_S), lambda: written.append(target.timed_write(1))):
        drop_caches(target.path)
        done, counts = threading.Event(), [0] * _READERS

        def until_done(work: Callable[[], None] = work, done: threading.Event = done) -> None:
            try:
                work()
            finally:
                done.set()

        start = time.perf_counter()
        readers = [partial(_read_until, done, target, num_pages, counts, t, page_bytes) for t in range(_READERS)]
        in_threads([until_done, *readers])
        rates.append(sum(counts) * page_bytes / (time.perf_counter() - start) / 1e9)
    return _Mixed(written[0], *rates)


def _read_until(
    done: threading.Event, target: _Target, num_pages: int, counts: list[int], which: int, page_bytes: int
) -> None:
    rng = np.random.default_rng(which)
    (page,) = host_pages(1, page_bytes)
    while not (counts[which] and done.is_set()):  # read at least once
        target.read(int(rng.integers(num_pages)), page)
        counts[which] += 1


def _aligned_pages(count: int, page_bytes: int) -> list[PageBuffer]:
    rng = np.random.default_rng(2)
    pages = host_pages(count, page_bytes)
    for page in pages:
        page[:] = rng.integers(0, 256, page_bytes, dtype=np.uint8)
    return pages


def _groups(num_pages: int, step: int) -> list[range]:
    return [range(start, min(start + step, num_pages)) for start in range(0, num_pages, step)]


@contextlib.contextmanager
def _raw(path: Path, pages: list[PageBuffer], num_pages: int) -> Iterator[_Target]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    page_bytes = len(pages[0])

    def write(salt: int) -> None:
        first = salt * (num_pages + 1)
        for group in _groups(num_pages, len(pages)):
            for i in group:
                os.pwrite(file, pages[i % len(pages)].data, (first + i) * page_bytes)
            os.pwrite(file, pages[0].data[:_BLOCK_BYTES], (first + num_pages) * page_bytes)
            os.fdatasync(file)

    try:
        yield _Target(write, lambda i, page: _require(os.preadv(file, [page.data], i * page_bytes) == page_bytes), path)
    finally:
        os.close(file)
        path.unlink()


@contextlib.contextmanager
def _store(path: Path, pages: list[PageBuffer], num_pages: int, durability: Durability) -> Iterator[_Target]:
    page_bytes = len(pages[0])
    store = LmdbPageStore(
        path,
        identity={"model": "bench"},
        formats=[PageFormat(page_bytes)],
        budget_bytes=max(4 << 30, 3 * num_pages * page_bytes),
        durability=durability,
    )

    def write(salt: int) -> None:
        for group in _groups(num_pages, len(pages) * _GROUPS_PER_PUT):
            _require(all(store.put([(_key(salt, i), pages[i % len(pages)]) for i in group])))

    try:
        yield _Target(write, lambda i, page: _require(all(store.get_into([_key(0, i)], [page]))), path)
        back = np.empty(page_bytes, dtype=np.uint8)
        for i in (*range(0, num_pages, 17), num_pages - 1):
            _require(store.get_into([_key(0, i)], [back]) == [True] and np.array_equal(back, pages[i % len(pages)]))
    finally:
        store.close()
        shutil.rmtree(path)


def _require(is_right: bool) -> None:
    if not is_right:
        raise AssertionError("a page was not written, or is not the page that was put")


def _key(salt: int, i: int) -> bytes:
    return salt.to_bytes(8, "big") + i.to_bytes(24, "big")
