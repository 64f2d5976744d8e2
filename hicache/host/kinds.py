"""What a place of a packed pool holds, written into the place itself, so that each reader knows, of memory or a store.

[0, page_bytes - 16)   a packed page, or a part of a raw one
1 byte                 its kind
15 bytes               the first of the key of its page
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from hicache.host.pool import HostPagePool
from hicache.host.run import HostRun

TRAILER_BYTES = 16


class PageKind(enum.IntEnum):
    """PACKED: a page as it was packed. RAW: the first part of one that did not fit, REST: what follows that."""

    PACKED = 0
    RAW = 1
    REST = 2


def rest_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Under which stores have the second parts of raw pages: SHA-256(page key || "rest")."""
    return [hashlib.sha256(key + b"rest").digest() for key in keys]


def mark(host: HostPagePool, runs: Iterable[HostRun]) -> None:
    """Write into the places of runs, whose bytes have come from the device, what they hold."""
    places, trailers = list[int](), list[bytes]()
    for run in runs:
        places += [*run.ids, *run.rest.values()]
        trailers += [_trailer(PageKind.RAW if key in run.rest else PageKind.PACKED, key) for key in run.keys]
        trailers += [_trailer(PageKind.REST, key) for key in run.rest]
    written = np.frombuffer(b"".join(trailers), dtype=np.uint8)
    host.bytes_of.numpy()[places, -TRAILER_BYTES:] = written.reshape(-1, TRAILER_BYTES)


def kinds_of(host: HostPagePool, places: Sequence[int], keys: Sequence[bytes]) -> list[PageKind | None]:
    """What they hold of the pages with these keys, one each. None: what nobody writes, or of another page."""
    trailers = host.bytes_of.numpy()[list(places), -TRAILER_BYTES:]
    found = (trailer.tobytes() for trailer in trailers)
    return [
        next((kind for kind in PageKind if trailer == _trailer(kind, key)), None)
        for trailer, key in zip(found, keys, strict=True)
    ]


def _trailer(kind: PageKind, key: bytes) -> bytes:
    return bytes([kind]) + key[: TRAILER_BYTES - 1]
