"""Measures put and get of remote stores on loopback, compared with direct calls of the store's client with the same
buffers.

    <store>.put, <store>.get   random pages; the ceiling is the client alone: a batch of Mooncake's library; for S3,
                               obstore in 16 threads

Variants run in turns in one process, and the contents of returned pages are checked. The benchmark starts and stops the
servers. Stores that are not installed are left out.
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

from hicache.bench.common import BenchUnavailable, Report, interleave
from hicache.bench.remote_servers import BUCKET, CREDENTIALS, MooncakeServer, S3Server, Server
from hicache.storage import PageBuffer, PageFormat, PageStore, open_store

NAME = "remote"
DESCRIPTION = "remote stores on loopback: put and get, against the client's own batch calls with the same buffers"

TARGET = 0.9
_S3_THREADS = 16  # the default number of threads of S3PageStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = list(STORES)
    parser.add_argument("--stores", nargs="+", choices=names, default=names, help="default: all that are installed")
    parser.add_argument("--pages", type=int, default=64, help="of one batch (default: %(default)s)")
    parser.add_argument("--page-kib", type=int, default=1024, help="KiB of a page (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=25, help="timed rounds (default: %(default)s)")


def run(args: argparse.Namespace, report: Report) -> None:
    batch = Batch.of(args.pages, args.page_kib << 10)
    missing = {name: STORES[name][0].missing() for name in args.stores}
    if all(missing.values()):
        raise BenchUnavailable("; ".join(missing.values()))
    for name, reason in missing.items():
        if not reason:
            STORES[name][1](report, batch, args.samples)


@dataclass(frozen=True)
class Batch:
    """Random pages to put, and buffers for `get`. Both are contiguous uint8 `[num_pages * page_bytes]`."""

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

    def open(self, url: str) -> PageStore:
        return open_store(url, identity={"model": "bench"}, formats=[PageFormat(self.page_bytes)])

    def calls(self, store: PageStore) -> dict[str, Callable[[], None]]:
        """Return functions that put, get and delete all pages, each with one call of the store."""
        buffers, keys = self.buffers, [b"page %d" % n for n in range(len(self.pages))]
        items = list(zip(keys, self.pages, strict=True))
        return {
            "put": lambda: _require(all(store.put(items))),
            "get": lambda: _require(all(store.get_into(keys, buffers))),
            "delete": lambda: _require(store.delete(keys) == len(keys)),
        }


def _require(holds: bool) -> None:
    if not holds:
        raise AssertionError("a page was not stored, not found, or came back changed")


def _measure(
    report: Report,
    name: str,
    batch: Batch,
    store: PageStore,
    client: Mapping[str, Callable[[], object]],
    samples: int,
) -> None:
    """Measure put, get and delete, each by the client and then by the store. `client`: the client's functions, by the
    names "put", "get" and "delete"."""
    calls = batch.calls(store)
    variants = {f"{who}.{verb}": of[verb] for verb in calls for who, of in (("client", client), ("store", calls))}
    seconds = interleave(variants, samples=samples)
    note = f"{len(batch.pages)} pages of {batch.page_bytes >> 10} KiB a call"
    for verb in ("put", "get"):
        ceiling_seconds = seconds[f"client.{verb}"]
        report.rate(
            f"{name}.{verb}",
            batch.source.nbytes,
            seconds[f"store.{verb}"],
            ceiling_seconds=ceiling_seconds,
            target=TARGET,
            note=note,
        )
    batch.target[:] = 0
    calls["put"]()
    calls["get"]()
    _require(np.array_equal(batch.source, batch.target))


def _mooncake(report: Report, batch: Batch, samples: int) -> None:
    """Measure the store and the library, each with a separate client for which the batch's memory is registered."""
    names, sizes = [f"own {n}" for n in range(len(batch.pages))], [batch.page_bytes] * len(batch.pages)
    sources, targets = ([page.ctypes.data for page in pages] for pages in (batch.pages, batch.buffers))
    with (
        MooncakeServer(6 * batch.source.nbytes + (256 << 20)) as server,
        closing(batch.open(server.url)) as store,
        closing(server.library()) as library,
    ):
        for memory in (batch.source, batch.target):
            store.register_memory(memory)
            _require(library.register_buffer(memory.ctypes.data, memory.nbytes) == 0)
        client = {
            "put": lambda: _require(not any(library.batch_put_from(names, sources, sizes))),
            "get": lambda: _require(library.batch_get_into(names, targets, sizes) == sizes),
            "delete": lambda: _require(not any(library.batch_remove(names, True))),
        }
        _measure(report, "mooncake", batch, store, client, samples)


def _s3(report: Report, batch: Batch, samples: int) -> None:
    obstore: Any = importlib.import_module("obstore")
    with S3Server() as server, ThreadPoolExecutor(_S3_THREADS) as threads, mock.patch.dict(os.environ, CREDENTIALS):
        options = {"endpoint": server.endpoint, "client_options": {"allow_http": True}}
        bucket = importlib.import_module("obstore.store").S3Store(BUCKET, **options)
        names = [f"own {n}" for n in range(len(batch.pages))]
        put = partial(obstore.put, bucket, mode="create", use_multipart=False)
        client = {
            "put": lambda: list(threads.map(put, names, batch.pages)),
            "get": lambda: list(threads.map(lambda name: len(obstore.get(bucket, name).bytes()), names)),
            "delete": lambda: obstore.delete(bucket, names),
        }
        with closing(batch.open(f"s3://{BUCKET}?endpoint={server.endpoint}&level=0")) as store:
            _measure(report, "s3", batch, store, client, samples)


STORES: dict[str, tuple[type[Server], Callable[[Report, Batch, int], None]]] = {
    "mooncake": (MooncakeServer, _mooncake),
    "s3": (S3Server, _s3),
}
