"""Remote stores on loopback: pages put and got through the store, beside the client's own calls with the same buffers.

    <store>.put, <store>.get   random pages; the ceiling is what the store's own client does in a batch
    mooncake.*.parts           the library's calls with two buffers a page, as the store makes them, nothing verified
    mooncake.*.own             the same with the memory in this process: the library copies memory, without a socket
    <store>.engines            prompts that an engine in another process computed, beside the store's get

Variants run in turns in one process; what came back is compared after the rounds. Servers are started and stopped here.
"""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache.bench.common import BenchUnavailable, Case, Report, gb_per_s, interleave, percentile
from hicache.bench.mooncake_server import MooncakeServer, missing, running
from hicache.bench.remote_engines import NUM_PROMPTS, PROMPT_PAGES, measure_engines
from hicache.bench.remote_redis import measure_redis, measure_s3
from hicache.storage import PageBuffer, PageFormat, PageStore, open_store
from hicache.storage.header import HEADER_BYTES
from hicache.storage.mooncake_client import load_mooncake

NAME = "remote"
DESCRIPTION = "remote stores on loopback: put and get, against the client's own batch calls with the same buffers"

TARGET = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [name for name, _ in STORES]
    parser.add_argument("--stores", nargs="+", choices=names, default=names, help="default: all that are installed")
    parser.add_argument("--pages", type=int, default=64, help="of one batch (default: %(default)s)")
    parser.add_argument("--page-kib", type=int, default=1024, help="KiB of a page (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=25, help="timed rounds (default: %(default)s)")


def run(args: argparse.Namespace, report: Report) -> None:
    unavailable = []
    for name, measure in STORES:
        if name in args.stores:
            try:
                measure(report, args.pages, args.page_kib << 10, args.samples)
            except BenchUnavailable as error:
                unavailable.append(str(error))
    if len(unavailable) == len(args.stores):
        raise BenchUnavailable("; ".join(unavailable))


@dataclass(frozen=True)
class Batch:
    """Pages to put and buffers to get them into, each in one piece of memory, uint8 `[num_pages * page_bytes]`."""

    source: PageBuffer
    target: PageBuffer
    page_bytes: int

    @classmethod
    def of(cls, pages: Sequence[PageBuffer]) -> Batch:
        num_bytes = sum(map(len, pages))
        source, target = (np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8) for _ in range(2))
        np.concatenate(pages, out=source)
        target[:] = 0
        return cls(source, target, len(pages[0]))

    @property
    def pages(self) -> list[PageBuffer]:
        return list(self.source.reshape(-1, self.page_bytes))

    @property
    def buffers(self) -> list[PageBuffer]:
        return list(self.target.reshape(-1, self.page_bytes))

    @property
    def keys(self) -> list[bytes]:
        return [b"page %d" % n for n in range(len(self.pages))]

    def calls(self, store: PageStore) -> dict[str, Callable[[], None]]:
        """`put`, `get` and `delete` of the whole batch, each of which takes every page."""
        keys, buffers, items = self.keys, self.buffers, list(zip(self.keys, self.pages, strict=True))
        return {
            "put": lambda: _require(all(store.put(items))),
            "get": lambda: _require(all(store.get_into(keys, buffers))),
            "delete": lambda: _require(store.delete(keys) == len(keys)),
        }

    def compare(self, get: Callable[[], None]) -> None:
        self.target[:] = 0
        get()
        _require(np.array_equal(self.source, self.target))


def _require(holds: bool) -> None:
    if not holds:
        raise AssertionError("a page was not stored, not found, or came back changed")


def _random_pages(num_pages: int, page_bytes: int) -> list[PageBuffer]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, page_bytes, dtype=np.uint8) for _ in range(num_pages)]


def _mooncake(report: Report, num_pages: int, page_bytes: int, samples: int) -> None:
    if reason := missing():
        raise BenchUnavailable(reason)
    pool_bytes = 6 * num_pages * page_bytes + (256 << 20)
    random = Batch.of(_random_pages(num_pages, page_bytes))
    with running(pool_bytes) as server:
        _beside_library(report, "", server, server, 0, random, samples)
    with running((NUM_PROMPTS + 2) * PROMPT_PAGES << 20, lease_ms=5000) as server:  # as docs/remote.md starts it
        measure_engines(report, "mooncake", server.url, samples)
    # Two pools, for the master spreads values over all memory that it has.
    with running(0) as server, running(0) as other:
        _beside_library(report, ".own", server, other, pool_bytes, random, samples)


def _library(server: MooncakeServer, segment_bytes: int, batch: Batch) -> Any:
    """A client of the library, with the batch's memory registered."""
    library = load_mooncake().MooncakeDistributedStore()
    master = server.url.partition("//")[2]
    _require(library.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master) == 0)
    for memory in (batch.source, batch.target):
        _require(library.register_buffer(memory.ctypes.data, memory.nbytes) == 0)
    return library


class _InParts:
    """The library's calls as the store makes them: each value a header and a page, and nothing verified."""

    def __init__(self, library: Any, sources: Sequence[int], targets: Sequence[int], page_bytes: int) -> None:
        self._library, self._page_bytes = library, page_bytes
        self._headers = np.zeros((len(sources), HEADER_BYTES), np.uint8)
        _require(library.register_buffer(self._headers.ctypes.data, self._headers.nbytes) == 0)
        self.names = [f"parts {n}" for n in range(len(sources))]
        headers = [header.ctypes.data for header in self._headers]
        self._sources = [list(pair) for pair in zip(headers, sources, strict=True)]
        self._targets = [list(pair) for pair in zip(headers, targets, strict=True)]
        self._sizes = [[HEADER_BYTES, page_bytes] for _ in sources]

    def put(self) -> None:
        _require(not any(self._library.batch_put_from_multi_buffers(self.names, self._sources, self._sizes)))

    def get(self) -> None:
        codes = self._library.batch_get_into_multi_buffers(self.names, self._targets, self._sizes)
        _require(codes == [HEADER_BYTES + self._page_bytes] * len(codes))


def _beside_library(
    report: Report,
    suffix: str,
    server: MooncakeServer,
    server_of_library: MooncakeServer,
    segment_bytes: int,
    batch: Batch,
    samples: int,
) -> None:
    """Store and library, each with a client of its own, which lends so much memory."""
    sizes, names = [batch.page_bytes] * len(batch.pages), [f"own {n}" for n in range(len(batch.pages))]
    sources, targets = ([page.ctypes.data for page in pages] for pages in (batch.pages, batch.buffers))
    formats = [PageFormat(batch.page_bytes)]
    with closing(
        open_store(f"{server.url}?segment={segment_bytes}", identity={"model": "bench"}, formats=formats)
    ) as st:
        for memory in (batch.source, batch.target):
            st.register_memory(memory)
        library = _library(server_of_library, segment_bytes, batch)
        calls, parts = batch.calls(st), _InParts(library, sources, targets, batch.page_bytes)
        variants: dict[str, Callable[[], None]] = {
            "library.put": lambda: _require(not any(library.batch_put_from(names, sources, sizes))),
            "put": calls["put"],
            "put.parts": parts.put,
            "library.get": lambda: _require(library.batch_get_into(names, targets, sizes) == sizes),
            "get": calls["get"],
            "get.parts": parts.get,
            "library.delete": lambda: _require(not any(library.batch_remove([*names, *parts.names], True))),
            "delete": calls["delete"],
        }
        seconds = interleave(variants, samples=samples)
        where = "memory of this process, copied by the library" if suffix else "memory of another process, tcp"
        note = f"{len(sizes)} pages of {batch.page_bytes >> 10} KiB a call; {where}"
        for verb in ("put", "get"):
            ceiling = percentile(gb_per_s(batch.source.nbytes, seconds[f"library.{verb}"]), 50)
            for name, target in ((verb, None if suffix else TARGET), (f"{verb}.parts", None)):
                rates = gb_per_s(batch.source.nbytes, seconds[name])
                report.add(
                    Case.of(f"mooncake.{name}{suffix}", rates, "GB/s", ceiling=ceiling, target=target, note=note)
                )
        calls["put"]()
        batch.compare(calls["get"])
        library.close()


# Each measures one store, and raises BenchUnavailable where its server or its package is missing.
STORES: tuple[tuple[str, Callable[[Report, int, int, int], None]], ...] = (
    ("mooncake", _mooncake),
    ("redis", measure_redis),
    ("s3", measure_s3),
)
