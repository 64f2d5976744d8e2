"""Measures the disk tier: cold reads, compressed reads, writes and lookups of the store, compared with raw I/O of the
same bytes.

    cold.<size>        reads of random, incompressible pages of 8 MiB, 2 MiB and 128 KiB by 8 threads, with caches
                       dropped before each round; the ceiling, raw.<size>, reads those pages by O_DIRECT, one per call
    compressed.8mib    reads of compressible synthetic KV, as uncompressed bytes per second, over raw.8mib
    pack.<filter>      compression ratio: bytes of a page of synthetic KV over its stored bytes
    write.*, read.*    writes alone, and writes and reads concurrently (bench.disk_writes)
    contains, open     look-ups in, and opening of, a store of a million small pages

A thread reads documents of 8 MiB in random order, each in one call. The rounds of different cases are in random order.
A round is cold if the kernel read all its bytes from the disk; the note of a case has the share that the kernel read.
"""

from __future__ import annotations

import argparse
import mmap
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hicache.bench.common import BenchUnavailable, Report, interleave, percentile
from hicache.bench.disk_writes import measure_writes
from hicache.bench.raw_io import drop_caches, host_pages, raw_file
from hicache.storage import LmdbPageStore, PageBuffer, PageFormat
from hicache.storage.codec import PageCodec
from hicache.storage.directory import slots_file
from hicache.storage.filters import PageFilter
from hicache.storage.memory import round_up
from hicache.storage.slot_file import BLOCK_BYTES

NAME = "disk"
DESCRIPTION = "disk tier: cold reads, compressed reads, writes and lookups, against raw I/O of the same bytes"

THREADS = 8
CHANNELS = 1024  # channels of a token of synthetic KV, bf16
DOCUMENT_BYTES = 8 << 20  # bytes that one call reads
CONTAINS_MS, OPEN_S = 2.0, 1.0
_SMALL_PAGE = 256
_NUM_KINDS = 8  # number of different page contents; each page also begins with its number, in 8 bytes
_Fetch: TypeAlias = Callable[[range, PageBuffer], None]
_Reader: TypeAlias = Callable[[], AbstractContextManager[_Fetch]]
# Virtual disks are faster after idle time. If a case always followed the same round, this would change its rate by up
# to a third.
_ROUNDS_PER_SAMPLE = 2


@dataclass(frozen=True)
class _Case:
    """A case with `num_pages` pages of one size in a separate store. The target for its reads is `target` times the
    rate of the raw reads `compared_with`."""

    name: str
    page_bytes: int
    num_pages: int
    target: float
    compared_with: str
    is_kv: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def documents(self) -> list[range]:
        step = max(1, DOCUMENT_BYTES // self.page_bytes)
        return [range(start, start + step) for start in range(0, self.num_pages, step)]

    def pages(self) -> list[PageBuffer]:
        rng = np.random.default_rng(0)
        if self.is_kv:
            return [synthetic_kv(rng, self.page_bytes) for _ in range(_NUM_KINDS)]
        return [rng.integers(0, 256, self.page_bytes, dtype=np.uint8) for _ in range(_NUM_KINDS)]


def cases_of(num_bytes: int) -> list[_Case]:
    num_documents = num_bytes // DOCUMENT_BYTES
    cold = (("8mib", 8 << 20, 0.98), ("2mib", 2 << 20, 0.97), ("128kib", 128 << 10, 0.85))
    cases = [
        _Case(f"cold.{name}", size, num_documents * DOCUMENT_BYTES // size, target, f"raw.{name}")
        for name, size, target in cold
    ]
    return [*cases, _Case("compressed.8mib", 8 << 20, num_documents, 1.25, "raw.8mib", is_kv=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, help="folder on the disk to be measured (default: the working directory)")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of pages of each kind (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument("--small-pages", type=int, default=1_000_000, help="of the large store (default: %(default)s)")


def run(args: argparse.Namespace, report: Report) -> None:
    cases = cases_of(int(args.gib * (1 << 30)))
    if cases[0].num_pages < THREADS:
        raise BenchUnavailable(f"--gib {args.gib} is too little for {THREADS} pages of 8 MiB")
    with tempfile.TemporaryDirectory(prefix="bench-disk-", dir=args.dir or Path.cwd()) as name:
        folder = Path(name)
        _reads(report, folder, cases, args.samples)
        measure_writes(report, folder, cases[0].page_bytes, cases[0].num_pages // 2, args.samples)
        _large_store(report, folder, args.small_pages)


def synthetic_kv(rng: np.random.Generator, page_bytes: int) -> PageBuffer:
    """Return a page of bfloat16 rows that resemble keys: each channel has a separate scale and changes slowly from
    token to token."""
    tokens = page_bytes // 2 // CHANNELS
    scale = np.exp(rng.normal(0, 1, CHANNELS)).astype(np.float32)
    noise = rng.standard_normal((tokens, CHANNELS), dtype=np.float32)
    for t in range(1, tokens):
        noise[t] = 0.9 * noise[t - 1] + 0.436 * noise[t]
    return np.frombuffer(((noise * scale).view(np.uint32) >> 16).astype(np.uint16).tobytes(), dtype=np.uint8)


def _key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def _open(path: Path, case: _Case) -> LmdbPageStore:
    return LmdbPageStore(
        path,
        identity={"model": "bench"},
        formats=[PageFormat(case.page_bytes, PageFilter("byte_shuffle", 2))],
        budget_bytes=int(1.3 * case.num_bytes) + (512 << 20),
    )


def _open_small(path: Path, budget_bytes: int) -> LmdbPageStore:
    formats = [PageFormat(_SMALL_PAGE)]
    return LmdbPageStore(path, identity={"model": "bench"}, formats=formats, budget_bytes=budget_bytes, level=0)


def _reads(report: Report, folder: Path, cases: Sequence[_Case], samples: int) -> None:
    """Measure cold reads of all cases, and raw reads, in turns."""
    readers: dict[str, tuple[_Case, _Reader]] = {}
    kept: dict[str, PageBuffer] = {}
    for case in cases:
        pages = case.pages()
        if case.is_kv:
            _compression(report, pages)
        _fill(folder / case.name, case, pages)
        kept[case.name] = pages[1]
        readers[case.name] = case, partial(_store_reader, folder / case.name, case)
        if case.compared_with not in readers:
            file = slots_file(folder / case.name, case.page_bytes, BLOCK_BYTES + round_up(case.page_bytes))
            readers[case.compared_with] = case, partial(_raw_reader, file, case)
    buffers = host_pages(THREADS, DOCUMENT_BYTES)
    rounds: dict[str, list[float]] = {name: [] for name in readers}
    read: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(-1, _ROUNDS_PER_SAMPLE * samples):
        rng = np.random.default_rng(turn + 1)
        for name in rng.permutation([*readers]).tolist():
            case, reader = readers[name]
            documents = case.documents
            order = [documents[i] for i in rng.permutation(len(documents)).tolist()]
            seconds, read_bytes = _timed(folder / case.name, reader, order, buffers)
            if turn >= 0:
                rounds[name].append(seconds)
                read[name].append(read_bytes / case.num_bytes)
            if name in kept:
                compare(buffers, kept[name], order)
    for name, (case, _) in readers.items():
        if name == case.compared_with:
            report.rate(name, case.num_bytes, rounds[name], note=f"O_DIRECT, blocks of {case.page_bytes} bytes")
    for case in cases:
        data = "synthetic KV, bf16" if case.is_kv else "random bytes"
        note = f"{data}; read from the medium: {percentile(read[case.name], 50):.2f} of the pages' bytes"
        ceiling_seconds = rounds[case.compared_with]
        report.rate(
            case.name, case.num_bytes, rounds[case.name], ceiling_seconds=ceiling_seconds, target=case.target, note=note
        )


def _fill(path: Path, case: _Case, pages: Sequence[PageBuffer]) -> None:
    store = _open(path, case)
    for document in case.documents:
        items = []
        for i in document:
            page = pages[i % _NUM_KINDS].copy()
            page[:8] = np.frombuffer(i.to_bytes(8, "big"), dtype=np.uint8)
            items.append((_key(i), page))
        if not all(store.put(items)):
            raise BenchUnavailable(f"the disk below {path} has no free space for {case.num_pages} pages")
    store.close()


def _timed(path: Path, reader: _Reader, order: Sequence[range], buffers: Sequence[PageBuffer]) -> tuple[float, int]:
    """Read all documents in `THREADS` threads, each with a separate buffer, after dropping the caches. Returns the
    seconds, and the bytes that were read from the disk."""
    with reader() as fetch, ThreadPoolExecutor(THREADS) as threads:
        _warm_up(threads, partial(fetch, order[0]), buffers)
        drop_caches(path)
        before, began = _bytes_read(), time.perf_counter()
        works = [partial(_fetch_all, fetch, order[t::THREADS], buffers[t]) for t in range(THREADS)]
        done = [threads.submit(work) for work in works]
        for future in done:
            future.result()
        return time.perf_counter() - began, _bytes_read() - before


def _compression(report: Report, pages: Sequence[PageBuffer]) -> None:
    """Report the compression ratio of synthetic KV under each filter."""
    for page_filter in (PageFilter(), PageFilter("byte_shuffle", 2)):
        codec = PageCodec(PageFormat(len(pages[0]), page_filter), bytes(16), 1)
        buffer = memoryview(bytearray(codec.max_payload_bytes))
        values = (codec.encode_split(b"key", page, buffer) for page in pages)
        report.case(f"pack.{page_filter.kind}", [len(pages[0]) / len(value) for value in values], "x")


def _warm_up(threads: Executor, fetch: Callable[[PageBuffer], None], buffers: Sequence[PageBuffer]) -> None:
    """Let each thread read once, so that it has allocated its memory before the timing, like the long-lived threads of
    an engine."""
    together = threading.Barrier(THREADS, timeout=60)

    def read(buffer: PageBuffer) -> None:
        fetch(buffer)
        together.wait()

    list(threads.map(read, buffers))


def _fetch_all(fetch: _Fetch, documents: Sequence[range], into: PageBuffer) -> None:
    for document in documents:
        fetch(document, into)


@contextmanager
def _store_reader(path: Path, case: _Case) -> Iterator[_Fetch]:
    store = _open(path, case)

    def fetch(document: range, into: PageBuffer) -> None:
        buffers = list(into.reshape(-1, case.page_bytes))
        if not all(store.get_into([_key(i) for i in document], buffers)):
            raise AssertionError(f"a page of {document} is missing")

    try:
        yield fetch
    finally:
        store.close()


@contextmanager
def _raw_reader(path: Path, case: _Case) -> Iterator[_Fetch]:
    with raw_file(path) as read_at:

        def fetch(document: range, into: PageBuffer) -> None:
            for i, buffer in zip(document, into.reshape(-1, case.page_bytes), strict=True):
                read_at(i * (BLOCK_BYTES + round_up(case.page_bytes)), buffer)

        yield fetch


def compare(buffers: Sequence[PageBuffer], like: PageBuffer, order: Sequence[range]) -> None:
    """Raise AssertionError unless each thread's buffer has the last document that the thread read. Pages whose content
    should equal `like` are compared completely."""
    for t, buffer in enumerate(buffers):
        document = order[t::THREADS][-1]
        for i, page in zip(document, buffer.reshape(len(document), -1), strict=True):
            if int.from_bytes(page[:8].tobytes(), "big") != i:
                raise AssertionError(f"page {i} holds another page's bytes")
            if i % _NUM_KINDS == 1 and not np.array_equal(page[8:], like[8:]):
                raise AssertionError(f"page {i} is not what was put")


def _bytes_read() -> int:
    """Return the bytes that this process has read from the disk so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def _large_store(report: Report, folder: Path, num_pages: int) -> None:
    """Measure the time to open a store of many small pages and to look up 1 000 keys, and the memory of opening."""
    page = np.arange(_SMALL_PAGE, dtype=np.uint8)
    sizes = {"small": num_pages // 100, "middle": num_pages // 16, "large": num_pages}
    opened_s: dict[str, list[float]] = {}
    resident: dict[str, int] = {}
    for name, count in sizes.items():
        path = folder / name
        store = _open_small(path, count * 9216 + (64 << 20))
        for start in range(0, count, 10_000):
            store.put([(_key(i), page) for i in range(start, min(start + 10_000, count))])
        if store.stats().entries != count:
            raise AssertionError(f"{store.stats().entries} of {count} small pages are there")
        budget_bytes = store.stats().budget_bytes
        store.close()
        opened_s[name] = []
        for _ in range(5):
            drop_caches(path)
            before, start_s = _resident_bytes(), time.perf_counter()
            store = _open_small(path, budget_bytes)
            opened_s[name].append(time.perf_counter() - start_s)
            resident[name] = _resident_bytes() - before
            if name == "large":
                _contains(report, store, count)
            store.close()
    note = f"{num_pages} pages, caches dropped; {num_pages // 100}: {percentile(opened_s['small'], 50) * 1e3:.1f} ms"
    report.time("open.1m", opened_s["large"], "s", ceiling_seconds=[OPEN_S], target=1.0, note=note)
    note = f"{num_pages // 16} pages, caches dropped; the whole index is compared with its seal"
    report.time("open.trees", opened_s["middle"], "s", ceiling_seconds=[OPEN_S], target=1.0, note=note)
    grown = [(resident["large"] - resident["small"]) / 1e6]
    report.case("open.1m.memory", grown, "MB", better="lower", note="more than opening a hundredth of it")


def _contains(report: Report, store: LmdbPageStore, count: int) -> None:
    """Measure `contains`, once, with half of the keys present."""
    if any(case.name == "contains.1000" for case in report.cases):
        return
    rng = np.random.default_rng(3)
    keys = [_key(int(i)) for i in rng.choice(2 * count, 1000, replace=False)]
    if store.contains(keys) != [int.from_bytes(key, "big") < count for key in keys]:
        raise AssertionError("contains does not tell what is there")
    seconds = interleave({"contains": lambda: store.contains(keys)}, samples=31)["contains"]
    note = f"1000 keys in {count} pages, half of them there"
    report.time("contains.1000", seconds, "ms", ceiling_seconds=[CONTAINS_MS / 1e3], target=1.0, note=note)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
