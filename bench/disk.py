"""The disk tier: cold reads, compressed reads, writes and lookups through the store, beside raw I/O of the same bytes.

    read.cold          random, incompressible pages, 8 threads, caches dropped before each round; the ceiling is the
                       same bytes of the same file by O_DIRECT, in blocks of a page in random order, 8 threads
    read.packed        the same with compressible synthetic KV: bytes of pages a second over raw bytes read a second, of
                       what its own file stores (read.raw.packed): a host keeps in memory what is read most often
    pack.<data>.<filter>  bytes of a page over bytes stored
    write.<mode>       groups of pages until they are as durable as the mode says, beside plain files that get the same
                       bytes and as many fdatasync calls (bench.disk_writes)
    contains, open     in a store of a million small pages
    pipeline           documents from disk to device through an engine, beside its slowest leg (bench.disk_pipeline)

Rounds of reads come in a random order. A round is cold when the kernel read all its bytes from the medium; the note
tells the share that it read.
"""

from __future__ import annotations

import argparse
import mmap
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hicache.bench.common import BenchUnavailable, Report, gb_per_s, interleave, percentile
from hicache.bench.disk_pipeline import measure_pipeline
from hicache.bench.disk_writes import measure_writes
from hicache.bench.raw_io import drop_caches, host_pages, raw_file
from hicache.storage import LmdbPageStore, PageBuffer, PageFormat
from hicache.storage.codec import PageCodec
from hicache.storage.directory import slots_file
from hicache.storage.filters import PageFilter
from hicache.storage.memory import ALIGNMENT, round_up
from hicache.storage.slot_file import BLOCK_BYTES

NAME = "disk"
DESCRIPTION = "disk tier: cold reads, compressed reads, writes and lookups, against raw I/O of the same bytes"

THREADS = 8
PAGE_TOKENS, CHANNELS = 64, 1024  # of synthetic KV: segments [tokens, channels] of bf16
TARGETS = {"read.cold": 0.90, "read.packed": 1.2}
CONTAINS_MS, OPEN_S = 2.0, 1.0
_SMALL_PAGE = 256
_Fetch: TypeAlias = Callable[[int, PageBuffer], None]
_Reader: TypeAlias = Callable[[], AbstractContextManager[_Fetch]]
# Virtual disks give credit for the time in which they were used less: what always follows the same round of reads gains
# or loses by it, up to a third.
_ROUNDS_PER_SAMPLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, help="folder on the disk to be measured (default: the working directory)")
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of pages (default: %(default)s)")
    parser.add_argument("--page-mib", type=int, default=8, help="MiB of a page (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument("--small-pages", type=int, default=1_000_000, help="of the large store (default: %(default)s)")
    parser.add_argument(
        "--document-tokens", type=int, help="of each of the pipeline's 16 (default: 2048 on CUDA, else 1024)"
    )


def run(args: argparse.Namespace, report: Report) -> None:
    page_bytes = args.page_mib << 20
    num_pages = int(args.gib * (1 << 30)) // page_bytes
    if num_pages < 2 * THREADS:
        raise BenchUnavailable(f"--gib {args.gib} is too little for {2 * THREADS} pages of {args.page_mib} MiB")
    with tempfile.TemporaryDirectory(prefix="bench-disk-", dir=args.dir or Path.cwd()) as name:
        folder = Path(name)
        _reads(report, folder, page_bytes, num_pages, args.samples)
        for durability in ("relaxed", "commit"):
            measure_writes(report, folder, page_bytes, num_pages // 2, durability, args.samples)
        _large_store(report, folder, args.small_pages)
        tokens = args.document_tokens or (2048 if args.device.type == "cuda" else 1024)
        measure_pipeline(report, folder, args.device, tokens, args.samples)


def synthetic_kv(rng: np.random.Generator, page_bytes: int) -> PageBuffer:
    """bf16 rows whose channels have scales of their own and change slowly from token to token, as keys do."""
    tokens = page_bytes // 2 // CHANNELS
    scale = np.exp(rng.normal(0, 1, CHANNELS)).astype(np.float32)
    noise = rng.standard_normal((tokens, CHANNELS), dtype=np.float32)
    for t in range(1, tokens):
        noise[t] = 0.9 * noise[t - 1] + 0.436 * noise[t]
    return np.frombuffer(((noise * scale).view(np.uint32) >> 16).astype(np.uint16).tobytes(), dtype=np.uint8)


def _key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def _open(path: Path, page_bytes: int, num_pages: int, *, filter: PageFilter | None = None) -> LmdbPageStore:
    return LmdbPageStore(
        path,
        identity={"model": "bench"},
        formats=[PageFormat(page_bytes, filter or PageFilter("byte_shuffle", 2))],
        budget_bytes=int((num_pages + 32) * page_bytes * 1.1) + (64 << 20),
    )


def _open_small(path: Path, budget_bytes: int) -> LmdbPageStore:
    formats = [PageFormat(_SMALL_PAGE)]
    return LmdbPageStore(path, identity={"model": "bench"}, formats=formats, budget_bytes=budget_bytes, level=0)


def _reads(report: Report, folder: Path, page_bytes: int, num_pages: int, samples: int) -> None:
    """Cold reads of all kinds, and raw reads, in turns."""
    rng = np.random.default_rng(0)
    kinds = {
        "read.cold": [rng.integers(0, 256, page_bytes, dtype=np.uint8) for _ in range(8)],
        "read.packed": [synthetic_kv(rng, page_bytes) for _ in range(8)],
    }
    _compression(report, kinds["read.packed"])
    kept: dict[str, PageBuffer] = {}
    for kind, pages in kinds.items():  # pages of one kind differ in their first bytes
        store = _open(folder / kind, page_bytes, num_pages)
        for start in range(0, num_pages, 8):
            items = []
            for i in range(start, min(start + 8, num_pages)):
                page = pages[i % 8].copy()
                page[:8] = np.frombuffer(i.to_bytes(8, "big"), dtype=np.uint8)
                items.append((_key(i), page))
            if not all(store.put(items)):
                raise BenchUnavailable(f"the disk below {folder} has no room for {num_pages} pages")
        kept[kind] = pages[1]
        store.close()
    buffers = host_pages(THREADS, page_bytes)
    raw_bytes = {kind: _stored_bytes(pages) for kind, pages in kinds.items()}
    readers: dict[str, _Reader] = {kind: partial(_store_reader, folder / kind, page_bytes, num_pages) for kind in kinds}
    for kind, length in raw_bytes.items():
        file = slots_file(folder / kind, page_bytes)
        readers[_raw(kind)] = partial(_raw_reader, file, BLOCK_BYTES + round_up(page_bytes), length)
    rounds: dict[str, list[float]] = {name: [] for name in readers}
    read: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(-1, _ROUNDS_PER_SAMPLE * samples):
        rng = np.random.default_rng(turn + 1)
        order = rng.permutation(num_pages)
        for name in rng.permutation([*readers]).tolist():
            with readers[name]() as fetch, ThreadPoolExecutor(THREADS) as threads:
                _warm_up(threads, fetch, buffers)
                drop_caches(folder / name.replace(".raw", ""))
                before, began = _bytes_read(), time.perf_counter()
                works = [partial(_fetch_all, fetch, order[t::THREADS].tolist(), buffers[t]) for t in range(THREADS)]
                done = [threads.submit(work) for work in works]
                for future in done:
                    future.result()
                elapsed = time.perf_counter() - began
            if turn >= 0:
                rounds[name].append(elapsed)
                read[name].append((_bytes_read() - before) / (num_pages * page_bytes))
            if name in kept:
                _compare(buffers, kept[name], order.tolist())
    for kind in kinds:
        _report_reads(report, kind, rounds, read[kind], num_pages, page_bytes, raw_bytes[kind])


def _raw(kind: str) -> str:
    return kind.replace("read", "read.raw")


def _report_reads(
    report: Report,
    kind: str,
    rounds: Mapping[str, list[float]],
    read: Sequence[float],
    num_pages: int,
    page_bytes: int,
    raw_bytes: int,
) -> None:
    """Reads of one kind beside raw ones of its file, `raw_bytes` of each page."""
    data = {"read.cold": "random bytes", "read.packed": "synthetic KV, bf16"}[kind]
    raw = gb_per_s(num_pages * raw_bytes, rounds[_raw(kind)])
    report.case(_raw(kind), raw, "GB/s", note=f"O_DIRECT, blocks of {raw_bytes} bytes")
    share = percentile(read, 50)
    note = f"{data}, pages of {page_bytes >> 20} MiB; read from the medium: {share:.2f} of the pages' bytes"
    report.rate(kind, num_pages * page_bytes, rounds[kind], ceiling=raw, target=TARGETS[kind], note=note)


def _stored_bytes(pages: Sequence[PageBuffer]) -> int:
    """What each of them takes in its slot at least, in whole blocks."""
    codec = PageCodec(PageFormat(len(pages[0]), PageFilter("byte_shuffle", 2)), bytes(16), 1)
    shortest = min(len(codec.encode_split(b"key", page, memoryview(b"")).payload) for page in pages)
    return shortest // ALIGNMENT * ALIGNMENT


def _compression(report: Report, pages: Sequence[PageBuffer]) -> None:
    """The compression ratio of synthetic KV under each filter."""
    by_channel = PageFilter("channel_byte_shuffle", 2, PAGE_TOKENS, CHANNELS)
    for page_filter in (PageFilter(), PageFilter("byte_shuffle", 2), by_channel):
        codec = PageCodec(PageFormat(len(pages[0]), page_filter), bytes(16), 1)
        values = (codec.encode_split(b"key", page, memoryview(b"")) for page in pages)
        report.case(f"pack.packed.{page_filter.kind}", [len(pages[0]) / len(value) for value in values], "x")


def _warm_up(threads: Executor, fetch: _Fetch, buffers: Sequence[PageBuffer]) -> None:
    """Each thread reads a page, after which it has its memory, like the threads of an engine, which live as long."""
    together = threading.Barrier(THREADS, timeout=60)

    def read(buffer: PageBuffer) -> None:
        fetch(0, buffer)
        together.wait()

    list(threads.map(read, buffers))


def _fetch_all(fetch: _Fetch, pages: Sequence[int], into: PageBuffer) -> None:
    for i in pages:
        fetch(int(i), into)


@contextmanager
def _store_reader(path: Path, page_bytes: int, num_pages: int) -> Iterator[_Fetch]:
    store = _open(path, page_bytes, num_pages)

    def fetch(i: int, into: PageBuffer) -> None:
        if store.get_into([_key(i)], [into]) != [True]:
            raise AssertionError(f"page {i} is missing")

    try:
        yield fetch
    finally:
        store.close()


@contextmanager
def _raw_reader(path: Path, stride_bytes: int, length: int) -> Iterator[_Fetch]:
    with raw_file(path) as read_at:
        yield lambda i, into: read_at(i * stride_bytes, into[:length])


def _compare(buffers: Sequence[PageBuffer], like: PageBuffer, order: Sequence[int]) -> None:
    """The last page of each thread is the one it asked for; those made like `like` are so to the last byte."""
    for t, buffer in enumerate(buffers):
        i = int(order[t::THREADS][-1])
        if int.from_bytes(buffer[:8].tobytes(), "big") != i:
            raise AssertionError(f"page {i} holds another page's bytes")
        if i % 8 == 1 and not np.array_equal(buffer[8:], like[8:]):
            raise AssertionError(f"page {i} is not what was put")


def _bytes_read() -> int:
    """Bytes that the medium gave this process so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def _large_store(report: Report, folder: Path, num_pages: int) -> None:
    """The time to open a store of many small pages and to look up 1 000 keys, and the memory that opening takes."""
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
    report.time("open.1m", opened_s["large"], "s", beside=[OPEN_S], target=1.0, note=note)
    note = f"{num_pages // 16} pages, caches dropped; the whole index is compared with its seal"
    report.time("open.trees", opened_s["middle"], "s", beside=[OPEN_S], target=1.0, note=note)
    grown = [(resident["large"] - resident["small"]) / 1e6]
    report.case("open.1m.memory", grown, "MB", better="lower", note="more than opening a hundredth of it")


def _contains(report: Report, store: LmdbPageStore, count: int) -> None:
    """Once: half of the keys are there."""
    if any(case.name == "contains.1000" for case in report.cases):
        return
    rng = np.random.default_rng(3)
    keys = [_key(int(i)) for i in rng.choice(2 * count, 1000, replace=False)]
    if store.contains(keys) != [int.from_bytes(key, "big") < count for key in keys]:
        raise AssertionError("contains does not tell what is there")
    seconds = interleave({"contains": lambda: store.contains(keys)}, samples=31)["contains"]
    note = f"1000 keys in {count} pages, half of them there"
    report.time("contains.1000", seconds, "ms", beside=[CONTAINS_MS / 1e3], target=1.0, note=note)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
