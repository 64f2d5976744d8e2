"""A pool of Mooncake that is full: pages of another model take its memory, and their leases keep them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from hicache.bench.remote_servers import MooncakeServer
from hicache.storage import PageFormat, PageStore, open_store

_POOL_BYTES = 16 << 20  # the least that Mooncake lends
_LEASE_MS = 3_600_000
_PAGE_BYTES = (1 << 20, 16 << 10, 512)  # smaller pages fill what larger ones leave


@contextlib.contextmanager
def full_pool() -> Iterator[tuple[MooncakeServer, PageStore, list[bytes]]]:
    """Yield the server, the store of the other model, and that store's keys. Mooncake evicts nothing that was looked up
    within the lease of an hour."""
    formats = [PageFormat(num_bytes) for num_bytes in _PAGE_BYTES]
    with (
        MooncakeServer(_POOL_BYTES, lease_ms=_LEASE_MS) as server,
        closing(open_store(f"{server.url}?timeout=60", identity={"model": "another"}, formats=formats)) as other,
    ):
        keys = [b"%d" % n for n in range(1 << 16)]
        left = iter(keys)
        for num_bytes in _PAGE_BYTES:
            batch = [(key, np.zeros(num_bytes, np.uint8)) for key in itertools.islice(left, 16)]
            while any(other.put(batch)):
                other.contains([key for key, _ in batch])
                batch = [(key, page) for key, (_, page) in zip(left, batch, strict=False)]
        yield server, other, keys
