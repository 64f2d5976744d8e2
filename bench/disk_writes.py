"""Group commits of new pages into a fresh store, beside the same bytes into a fresh file, in turns.

    write.<mode>          the ceiling is a plain file written through the page cache, with a fdatasync after each group
    write.<mode>.direct   the same values; the ceiling is a plain file written by O_DIRECT, in blocks of a page
    mixed.write, .read    the same writes, `relaxed`, while 4 threads read other pages, caches dropped before; and those
                          reads. The ceiling is writing alone

Pages are aligned and in huge pages, as those of a host pool are. A helper of the disk bench.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np

from hicache.bench.common import Report
from hicache.bench.raw_io import drop_caches, host_pages, in_threads
from hicache.storage import LmdbPageStore, PageBuffer, PageFormat
from hicache.storage.base import Durability

TARGET = 0.85
_GROUP_BYTES = 56 << 20  # of one commit of a store of 4 GiB or more
_GROUPS_PER_PUT = 4
_BLOCK_BYTES = 4096
_READERS = 4


class SyncedFiles:
    """The files that another system writes to `folder` without a sync."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._synced: set[Path] = set()

    def timed(self, seconds: dict[str, float]) -> dict[str, float]:
        """`seconds`, and as "synced" those of its "store" and until the files that it wrote are on the disk."""
        new = {file for file in self._folder.rglob("*") if file.is_file()} - self._synced
        self._synced |= new
        start = time.perf_counter()
        for file in new:
            descriptor = os.open(file, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.close(descriptor)
        return {**seconds, "synced": seconds["store"] + time.perf_counter() - start}


def measure_writes(
    report: Report, folder: Path, page_bytes: int, num_pages: int, durability: Durability, samples: int
) -> None:
    """Both cases of one mode; `num_pages` are written each time."""
    per_group = max(1, _GROUP_BYTES // page_bytes)
    pages = _aligned_pages(per_group, page_bytes)
    variants: dict[str, Callable[[], AbstractContextManager[tuple[object, Callable[..., None]]]]] = {
        "raw": lambda: _raw(folder / "write-raw", pages, num_pages, 0),
        "direct": lambda: _raw(folder / "write-direct", pages, num_pages, os.O_DIRECT),
        "store": lambda: _store(folder / "write-store", pages, num_pages, durability),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(samples):
        for name, variant in variants.items():
            with variant() as (_, write):
                start = time.perf_counter()
                write()
                seconds[name].append(time.perf_counter() - start)
    note = f"random bytes, groups of {per_group} pages of {page_bytes >> 20} MiB, a fdatasync each"
    for case, ceiling in ((f"write.{durability}", "raw"), (f"write.{durability}.direct", "direct")):
        beside = seconds[ceiling]
        report.rate(case, num_pages * page_bytes, seconds["store"], beside=beside, target=TARGET, note=note)
    if durability == "relaxed":
        _mixed(report, folder / "write-mixed", pages, num_pages, seconds["store"], samples)


def _mixed(
    report: Report, path: Path, pages: list[PageBuffer], num_pages: int, alone: Sequence[float], samples: int
) -> None:
    """`alone`: seconds of writing as many pages without readers."""
    written: list[float] = []
    read: list[float] = []
    for turn in range(samples):
        with _store(path, pages, num_pages, "relaxed") as (store, write):
            write(1)
            drop_caches(path)
            done, counts = threading.Event(), [0] * _READERS
            readers = [partial(_read_until, done, store, num_pages, counts, t, len(pages[0])) for t in range(_READERS)]

            def write_beside(done: threading.Event = done, write: Callable[[int], None] = write) -> None:
                start = time.perf_counter()
                try:
                    write(2)
                finally:
                    done.set()
                    written.append(time.perf_counter() - start)

            in_threads([write_beside, *readers])
            read.append(sum(counts) * len(pages[0]) / written[turn] / 1e9)
    report.rate("mixed.write", num_pages * len(pages[0]), written, beside=alone, note=f"beside {_READERS} readers")
    report.case("mixed.read", read, "GB/s", note="beside one writer")


def _read_until(
    done: threading.Event, store: LmdbPageStore, num_pages: int, counts: list[int], which: int, page_bytes: int
) -> None:
    rng = np.random.default_rng(which)
    (page,) = host_pages(1, page_bytes)
    while not done.is_set():
        if store.get_into([_key(1, int(rng.integers(num_pages)))], [page]) != [True]:
            raise AssertionError("a page is missing")
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
def _raw(path: Path, pages: list[PageBuffer], num_pages: int, flags: int) -> Iterator[tuple[None, Callable[[], None]]]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    end = len(pages[0]) * num_pages

    def write() -> None:
        for group in _groups(num_pages, len(pages)):
            for i in group:
                os.pwrite(file, pages[i % len(pages)].data, i * len(pages[0]))
            os.pwrite(file, pages[0].data[:_BLOCK_BYTES], end)
            os.fdatasync(file)

    try:
        yield None, write
    finally:
        os.close(file)
        path.unlink()


@contextlib.contextmanager
def _store(
    path: Path, pages: list[PageBuffer], num_pages: int, durability: Durability
) -> Iterator[tuple[LmdbPageStore, Callable[..., None]]]:
    page_bytes = len(pages[0])
    store = LmdbPageStore(
        path,
        identity={"model": "bench"},
        formats=[PageFormat(page_bytes)],
        budget_bytes=max(4 << 30, 3 * num_pages * page_bytes),
        durability=durability,
    )

    def write(salt: int = 0) -> None:
        for group in _groups(num_pages, len(pages) * _GROUPS_PER_PUT):
            if not all(store.put([(_key(salt, i), pages[i % len(pages)]) for i in group])):
                raise AssertionError("a page was not stored")

    try:
        yield store, write
        _compare(store, pages, num_pages)
    finally:
        store.close()
        shutil.rmtree(path)


def _key(salt: int, i: int) -> bytes:
    return salt.to_bytes(8, "big") + i.to_bytes(24, "big")


def _compare(store: LmdbPageStore, pages: list[PageBuffer], num_pages: int) -> None:
    """AssertionError unless some pages of the last write, its last page among them, are stored byte for byte."""
    back = np.empty(len(pages[0]), dtype=np.uint8)
    salt = next(salt for salt in (2, 0) if store.contains([_key(salt, 0)]) == [True])
    for i in (*range(0, num_pages, 17), num_pages - 1):
        if store.get_into([_key(salt, i)], [back]) != [True] or not np.array_equal(back, pages[i % len(pages)]):
            raise AssertionError(f"page {i} is not the page that was put")
