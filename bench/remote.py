"""Remote stores on loopback: pages put and got through the store, beside the client's own calls with the same buffers.

    <store>.put, <store>.get   random pages; the ceiling is what the store's own client does: a batch of Mooncake's
                               library, a pipeline of redis-py with hiredis, obstore in as many threads
    mooncake.*.parts           the library's calls with two buffers a page, as the store makes them, nothing verified

Variants run in turns in one process; what came back is compared. Servers are started and stopped here. What is not
installed is left out.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from hicache.bench.common import BenchUnavailable, Report, in_turns, interleave, wall_timer
from hicache.bench.remote_servers import BUCKET, CREDENTIALS, MooncakeServer, RedisServer, S3Server, Server, free_port
from hicache.storage import PageBuffer, PageFormat, PageStore, open_store
from hicache.storage.header import HEADER_BYTES

NAME = "remote"
DESCRIPTION = "remote stores on loopback: put and get, against the client's own batch calls with the same buffers"

TARGET = 0.9
_S3_THREADS = 16  # what S3PageStore has by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = list(STORES)
    parser.add_argument("--stores", nargs="+", choices=names, default=names, help="default: all that are installed")
    parser.add_argument("--pages", type=int, default=64, help="of one batch (default: %(default)s)")
    parser.add_argument("--page-kib", type=int, default=1024, help="KiB of a page (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=25, help="timed rounds (default: %(default)s)")


def run(args: argparse.Namespace, report: Report) -> None:
    unavailable = []
    batch = Batch.of(args.pages, args.page_kib << 10)
    for name in dict.fromkeys(args.stores):
        server, measure = STORES[name]
        try:
            if reason := server.missing():
                raise BenchUnavailable(reason)
            measure(report, batch, args.samples)
        except BenchUnavailable as error:
            unavailable.append(str(error))
    if len(unavailable) == len(args.stores):
        raise BenchUnavailable("; ".join(unavailable))


@dataclass(frozen=True)
class Batch:
    """Random pages to put and buffers to get them into, each in one piece, uint8 `[num_pages * page_bytes]`."""

    source: PageBuffer
    target: PageBuffer
    page_bytes: int

    @classmethod
    def of(cls, num_pages: int, page_bytes: int) -> Batch:
        source, target = (np.frombuffer(mmap.mmap(-1, num_pages * page_bytes), np.uint8) for _ in range(2))
        source[:] = np.random.default_rng(0).integers(0, 256, num_pages * page_bytes, dtype=np.uint8)
        return cls(source, target, page_bytes)

    @property
    def pages(self) -> list[PageBuffer]:
        return list(self.source.reshape(-1, self.page_bytes))

    @property
    def buffers(self) -> list[PageBuffer]:
        return list(self.target.reshape(-1, self.page_bytes))

    @property
    def keys(self) -> list[bytes]:
        return [b"page %d" % n for n in range(len(self.pages))]

    @property
    def note(self) -> str:
        return f"{len(self.pages)} pages of {self.page_bytes >> 10} KiB a call"

    def open(self, url: str) -> PageStore:
        return open_store(url, identity={"model": "bench"}, formats=[PageFormat(self.page_bytes)])

    def calls(self, store: PageStore) -> dict[str, Callable[[], None]]:
        """`put`, `get` and `delete` of the whole batch, each of which takes every page."""
        keys, buffers, items = self.keys, self.buffers, list(zip(self.keys, self.pages, strict=True))
        return {
            "put": lambda: _require(all(store.put(items))),
            "get": lambda: _require(all(store.get_into(keys, buffers))),
            "delete": lambda: _require(store.delete(keys) == len(keys)),
        }

    def compare(self) -> None:
        """What was got is what was put; it is cleared."""
        _require(np.array_equal(self.source, self.target))
        self.target[:] = 0


def _require(holds: bool) -> None:
    if not holds:
        raise AssertionError("a page was not stored, not found, or came back changed")


def _mooncake(report: Report, batch: Batch, samples: int) -> None:
    with MooncakeServer(6 * batch.source.nbytes + (256 << 20)) as server:
        _beside_library(report, server, batch, samples)


class _InParts:
    """The library's calls as the store makes them: each value a header and a page, and nothing verified."""

    def __init__(self, library: Any, batch: Batch) -> None:
        self._library, self._page_bytes = library, batch.page_bytes
        self._headers = np.zeros((len(batch.pages), HEADER_BYTES), np.uint8)
        _require(library.register_buffer(self._headers.ctypes.data, self._headers.nbytes) == 0)
        self.names = [f"parts {n}" for n in range(len(batch.pages))]
        headers = [header.ctypes.data for header in self._headers]
        self._sources, self._targets = (
            [[header, page.ctypes.data] for header, page in zip(headers, pages, strict=True)]
            for pages in (batch.pages, batch.buffers)
        )
        self._sizes = [[HEADER_BYTES, batch.page_bytes] for _ in headers]

    def put(self) -> None:
        _require(not any(self._library.batch_put_from_multi_buffers(self.names, self._sources, self._sizes)))

    def get(self) -> None:
        codes = self._library.batch_get_into_multi_buffers(self.names, self._targets, self._sizes)
        _require(codes == [HEADER_BYTES + self._page_bytes] * len(codes))


def _beside_library(report: Report, server: MooncakeServer, batch: Batch, samples: int) -> None:
    """Store and library, each with a client of its own, with the batch's memory registered."""
    sizes, names = [batch.page_bytes] * len(batch.pages), [f"own {n}" for n in range(len(batch.pages))]
    sources, targets = ([page.ctypes.data for page in pages] for pages in (batch.pages, batch.buffers))
    with closing(batch.open(server.url)) as store, closing(server.library()) as library:
        for memory in (batch.source, batch.target):
            store.register_memory(memory)
            _require(library.register_buffer(memory.ctypes.data, memory.nbytes) == 0)
        calls, parts = batch.calls(store), _InParts(library, batch)
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
        note = f"{batch.note}; memory of another process, tcp"
        for verb in ("put", "get"):
            for name, target in ((verb, TARGET), (f"{verb}.parts", None)):
                beside = seconds[f"library.{verb}"]
                report.rate(
                    f"mooncake.{name}", batch.source.nbytes, seconds[name], beside=beside, target=target, note=note
                )
        batch.target[:] = 0
        calls["put"]()
        calls["get"]()
        batch.compare()


def _redis(report: Report, batch: Batch, samples: int) -> None:
    clients, port = _client("redis", "hiredis"), free_port()
    url = f"redis://127.0.0.1:{port}?level=0"
    listening = RedisServer("--bind", "127.0.0.1", "--port", str(port))
    with listening, closing(batch.open(url)) as store, closing(clients.Redis(port=port)) as client:
        names = [key.decode() for key in batch.keys]

        def pipeline(verb: str, *values: Any) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for arguments in zip(names, *values, strict=True):
                getattr(pipe, verb)(*arguments)
            return list(pipe.execute())

        contents = [page.data for page in batch.pages]
        ceilings = {"put": lambda: pipeline("set", contents), "get": lambda: pipeline("get")}
        _put_and_get(report, "redis", batch, batch.calls(store), ceilings, client.flushdb, samples)


def _s3(report: Report, batch: Batch, samples: int) -> None:
    obstore = _client("obstore")
    with S3Server() as server, ThreadPoolExecutor(_S3_THREADS) as threads, mock.patch.dict(os.environ, CREDENTIALS):
        options = {"endpoint": server.endpoint, "client_options": {"allow_http": True}}
        bucket = importlib.import_module("obstore.store").S3Store(BUCKET, **options)
        names = [key.decode() for key in batch.keys]
        put = partial(obstore.put, bucket, mode="create", use_multipart=False)
        ceilings = {
            "put": lambda: list(threads.map(put, names, batch.pages)),
            "get": lambda: list(threads.map(lambda name: len(obstore.get(bucket, name).bytes()), names)),
        }
        with closing(batch.open(f"s3://{BUCKET}?endpoint={server.endpoint}&level=0")) as store:
            _put_and_get(report, "s3", batch, batch.calls(store), ceilings, server.wipe, samples)


def _client(*packages: str) -> Any:
    """The first of the packages that the ceilings are measured with."""
    try:
        client, *_ = [importlib.import_module(name) for name in packages]
        return client
    except ImportError as error:
        raise BenchUnavailable(f"{error}: pip install {' '.join(packages)}") from None


def _put_and_get(
    report: Report,
    name: str,
    batch: Batch,
    calls: Mapping[str, Callable[[], object]],
    ceilings: Mapping[str, Callable[[], object]],
    wipe: Callable[[], object],
    samples: int,
) -> None:
    """Each put into an empty server; each get of both, compared outside the times."""
    clock = wall_timer()

    def round_of(verb: str, of: Mapping[str, Callable[[], object]]) -> Callable[[int], dict[str, float]]:
        def run(_: int) -> dict[str, float]:
            if verb == "put":
                wipe()
            seconds = clock(of[verb])
            if of is calls and verb == "get":
                batch.compare()
            return {verb: seconds}

        return run

    for verb in ("put", "get"):
        rounds = {"store": round_of(verb, calls), "ceiling": round_of(verb, ceilings)}
        seconds = in_turns(rounds, samples=samples, warmup=1)
        beside = seconds["ceiling", verb]
        report.rate(
            f"{name}.{verb}", batch.source.nbytes, seconds["store", verb], beside=beside, target=TARGET, note=batch.note
        )
        calls["put"]()  # beside what the ceiling put last


# Each measures one store; BenchUnavailable where a client for the ceiling is missing.
STORES: dict[str, tuple[type[Server], Callable[[Report, Batch, int], None]]] = {
    "mooncake": (MooncakeServer, _mooncake),
    "redis": (RedisServer, _redis),
    "s3": (S3Server, _s3),
}
