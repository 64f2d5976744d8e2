"""Measures nodes that share pages. Processes of this machine simulate several machines.

    nodes.store.<store>   reads of 2 MiB pages from a shared store by 8 readers; the ceiling reads with the store's own
                          client: for S3, obstore in 8 threads on SeaweedFS; for a directory, direct reads of its files
                          in 8 threads
    other cases           see `nodes_sharing`

Variants run in turns in one process, and the contents of returned pages are checked. Stores that are not installed are
left out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hicache.bench import nodes_sharing
from hicache.bench.common import BenchUnavailable, Report, add_parts, chosen_parts, interleave
from hicache.bench.remote import Batch
from hicache.bench.remote_servers import BUCKET, CREDENTIALS, S3Server
from hicache.storage import PageStore
from hicache.storage.shared_pages import shared_pages
from hicache.storage.slot_file import BLOCK_BYTES

NAME = "nodes"
DESCRIPTION = "nodes that share pages: reads of shared stores, faults of them, prompts and sessions of several nodes"

_STORE_TARGET = 0.9
_NUM_READERS = 8
_PAGE_BYTES = 2 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, list(_PARTS))
    stores = list(_STORES)
    parser.add_argument("--stores", nargs="+", choices=stores, default=stores, help="default: all that are installed")
    parser.add_argument("--pages", type=int, default=64, help="of one batch (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=15, help="timed rounds (default: %(default)s)")
    help = "folder on the file system to be measured (default: that of temporary files)"
    parser.add_argument("--dir", type=Path, help=help)


def run(args: argparse.Namespace, report: Report) -> None:
    for part in chosen_parts(args, report, list(_PARTS)):
        _PARTS[part](args, report)


def _store(args: argparse.Namespace, report: Report) -> None:
    """Measure reads through each store and directly through the store's client, with the same buffers."""
    reason = S3Server.missing()
    names = [name for name in args.stores if name != "s3" or not reason]
    if not names:
        raise BenchUnavailable(reason)
    for name in names:
        _measure(name, args, report)


def _measure(name: str, args: argparse.Namespace, report: Report) -> None:
    batch, keys = Batch.of(args.pages, _PAGE_BYTES), [b"page %d" % n for n in range(args.pages)]
    with ThreadPoolExecutor(_NUM_READERS) as threads, _STORES[name](batch, args.dir) as (store, client_read):
        if not all(store.put(list(zip(keys, batch.pages, strict=True)))):
            raise AssertionError("a page was not stored")
        variants: Mapping[str, Callable[[], object]] = {
            "client": lambda: list(threads.map(client_read, range(args.pages))),
            "store": lambda: store.get_into(keys, batch.buffers),
        }
        seconds = interleave(variants, samples=args.samples)
        batch.target[:] = 0
        if not all(store.get_into(keys, batch.buffers)) or not np.array_equal(batch.source, batch.target):
            raise AssertionError("a page was not found, or came back changed")
    report.rate(
        f"nodes.store.{name}",
        batch.source.nbytes,
        seconds["store"],
        ceiling_seconds=seconds["client"],
        target=_STORE_TARGET,
        note=f"{args.pages} pages of {_PAGE_BYTES >> 20} MiB a call, {_NUM_READERS} readers",
    )


@contextmanager
def _s3(batch: Batch, _: Path | None) -> Iterator[tuple[PageStore, Callable[[int], object]]]:
    """Yield a store on SeaweedFS, and a function that reads object n with the client."""
    obstore: Any = importlib.import_module("obstore")
    with ExitStack() as held:
        server = held.enter_context(S3Server())
        held.enter_context(mock.patch.dict(os.environ, CREDENTIALS))
        options = {"endpoint": server.endpoint, "client_options": {"allow_http": True}}
        bucket = importlib.import_module("obstore.store").S3Store(BUCKET, **options)
        for n, page in enumerate(batch.pages):
            obstore.put(bucket, f"own {n}", page, use_multipart=False)
        url = f"s3://{BUCKET}?endpoint={server.endpoint}&level=0&concurrency={_NUM_READERS}"
        store = held.enter_context(closing(batch.open(url)))
        yield store, lambda n: len(obstore.get(bucket, f"own {n}").bytes())


@contextmanager
def _dir(batch: Batch, path: Path | None) -> Iterator[tuple[PageStore, Callable[[int], object]]]:
    """Yield a store in a new directory, and a function that reads the n-th file of this store directly to the n-th
    buffer."""
    buffers = batch.buffers
    with tempfile.TemporaryDirectory(dir=path) as folder:
        url = f"dir://{folder}?level=0&concurrency={_NUM_READERS}"
        with closing(batch.open(url)) as store:
            files = list[str]()

            def read(n: int) -> int:
                if not files:
                    files.extend(each.name for each in shared_pages(url).pages())
                descriptor = os.open(files[n], os.O_RDONLY | os.O_DIRECT)
                try:
                    return os.preadv(descriptor, [buffers[n].data], BLOCK_BYTES)
                finally:
                    os.close(descriptor)

            yield store, read


_STORES = {"s3": _s3, "dir": _dir}
_PARTS: Mapping[str, Callable[[argparse.Namespace, Report], None]] = {"store": _store, **nodes_sharing.PARTS}
