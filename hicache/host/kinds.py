"""What a place of a packed pool holds, written into the place itself, so that each reader knows, of memory or a store.

[0, page_bytes - 16)   a packed page, or a part of a raw one; what is left of it means nothing
1 byte                 its kind
15 bytes               zero
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
    packed, raw, rest = list[int](), list[int](), list[int]()
    for run in runs:
        if not run.rest:
            packed += run.ids
            continue
        for key, page in zip(run.keys, run.ids, strict=True):
            (raw if key in run.rest else packed).append(page)
        rest += run.rest.values()
    trailers = host.bytes_of.numpy()[:, -TRAILER_BYTES:]
    for kind, places in ((PageKind.PACKED, packed), (PageKind.RAW, raw), (PageKind.REST, rest)):
        if places:
            trailers[places] = np.array([kind] + [0] * (TRAILER_BYTES - 1), dtype=np.uint8)


def kinds_of(host: HostPagePool, places: Sequence[int]) -> list[int]:
    """What they say that they hold; a number that is no `PageKind` was written by nobody."""
    kinds: list[int] = host.bytes_of.numpy()[list(places), -TRAILER_BYTES].tolist()
    return kinds
