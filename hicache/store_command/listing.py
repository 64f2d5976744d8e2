"""Which pages a store has, in use order, without reading them.

The order and the sizes come from one snapshot. How a page is packed stands in its header, looked up afterwards, a few
pages at a time, so that a writer beside it is not held up. May import the standard library and storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from hicache.storage.base import StoreError
from hicache.storage.codec import is_packed
from hicache.storage.header import MAGIC
from hicache.storage.lmdb_tree import Place
from hicache.storage.lookup import Snapshots
from hicache.storage.lru import Age, Tables

_KEYS_AT_ONCE = 64


@dataclass(frozen=True)
class Entry:
    """A page of `page_bytes`, as its index says. `codec`: "raw" or "zstd"; "unreadable" for what is no page's value;
    "gone" when it was removed meanwhile."""

    key: bytes
    page_bytes: int
    stored_bytes: int
    codec: str


def entries(env: Snapshots, *, newest: bool, limit: int | None) -> Iterator[Entry]:
    """Least recently used first, or `newest` first; at most `limit`. StoreError when the store cannot be read."""
    listed: list[tuple[bytes, Age]] | None = env.read(partial(_in_order, newest=newest, limit=limit), None)
    if listed is None:
        raise StoreError("the store cannot be read")
    for start in range(0, len(listed), _KEYS_AT_ONCE):
        some = listed[start : start + _KEYS_AT_ONCE]
        codecs = env.read(partial(_codecs, keys=[key for key, _ in some]), ["unreadable"] * len(some))
        for (key, age), codec in zip(some, codecs, strict=True):
            yield Entry(key, age.page_bytes, age.value_bytes, codec)


def _in_order(txn: Any, tables: Tables, *, newest: bool, limit: int | None) -> list[tuple[bytes, Age]] | None:
    with txn.cursor(db=tables.recency) as cursor:
        steps = cursor.iterprev(keys=False) if newest else cursor.iternext(keys=False)
        keys = [bytes(key) for key in islice(steps, limit)]
    return [(key, Age.unpack(txn.get(key, db=tables.ages)) or Age(0, 0, 0)) for key in keys]


def _codecs(txn: Any, tables: Tables, *, keys: list[bytes]) -> list[str]:
    # One at a time: asked for several, `places` has the kernel read the values.
    return [_codec(tables, tables.places(txn, [key])[0]) for key in keys]


def _codec(tables: Tables, place: Place | None) -> str:
    if place is None:
        return "gone"
    try:
        header = tables.header(place)
    except OSError:
        return "unreadable"
    if header is None or header[: len(MAGIC)] != MAGIC:
        return "unreadable"
    return "zstd" if is_packed(header) else "raw"
