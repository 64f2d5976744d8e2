"""What a place of a packed pool holds, written into the place itself, so that each reader knows, of memory or a store.

[0, page_bytes - 16)   a packed page, or a part of a raw one; what is left of it means nothing
1 byte                 its kind
15 bytes               the first of the key of its page
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hicache.host.pool import HostPagePool
from hicache.host.run import HostRun

TRAILER_BYTES = 16


class PageKind(enum.IntEnum):
    """PACKED: a page as it was packed. RAW: the first part of one that did not fit, REST: what follows that."""

    PACKED = 0
    RAW = 1
    REST = 2


def rest_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Under which stores have the second parts of raw pages: SHA-256(page key || 0xff "rest"). No name of a component
    has that byte, in UTF-8, so none has these keys."""
    return [hashlib.sha256(key + b"\xffrest").digest() for key in keys]


def mark(host: HostPagePool, runs: Iterable[HostRun]) -> None:
    """Write into the places of runs, whose bytes have come from the device, what they hold."""
    places, kinds, keys = list[int](), list[PageKind](), list[bytes]()
    for run in runs:
        places += [*run.ids, *run.rest.values()]
        keys += [*run.keys, *run.rest]
        kinds += [PageKind.RAW if key in run.rest else PageKind.PACKED for key in run.keys]
        kinds += [PageKind.REST] * len(run.rest)
    trailers = np.empty((len(places), TRAILER_BYTES), np.uint8)
    trailers[:, 0], trailers[:, 1:] = kinds, _beginnings(keys)
    host.bytes_of.numpy()[places, -TRAILER_BYTES:] = trailers


def kinds_of(host: HostPagePool, places: Sequence[int], keys: Sequence[bytes]) -> list[PageKind | None]:
    """What they hold of the pages with these keys, one each. None: what nobody writes, or of another page."""
    trailers = host.bytes_of.numpy()[list(places), -TRAILER_BYTES:]
    is_theirs, kinds = (trailers[:, 1:] == _beginnings(keys)).all(1), [*PageKind]
    return [
        kinds[kind] if theirs and kind < len(kinds) else None
        for kind, theirs in zip(trailers[:, 0].tolist(), is_theirs.tolist(), strict=True)
    ]


def _beginnings(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """As many bytes of each key as a trailer has."""
    size = TRAILER_BYTES - 1
    return np.frombuffer(b"".join([key[:size] for key in keys]), np.uint8).reshape(-1, size)
