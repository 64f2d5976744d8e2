"""What must hold in an lmdb page store, as one walk over all of it.

Owns nothing; reads in one transaction. May import numpy, lmdb, the standard library and its siblings below the store.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hicache.storage.codec import PageCodec
from hicache.storage.lru import COUNTERS_KEY, PAIR, TICK, Tables
from hicache.storage.packages import lmdb


def live_bytes(txn: Any, tables: Tables) -> int:
    """The stored sum of all value sizes."""
    return int(PAIR.unpack(txn.get(COUNTERS_KEY, db=tables.meta))[1])


def violations(tables: Tables, codec: PageCodec, page_bytes: int) -> list[str]:
    """Every violation found: values that do not verify, indexes or counters that disagree. Reads every byte."""
    found: list[str] = []
    try:
        with tables.env.begin(buffers=True) as txn:
            total_bytes = _check_values(txn, tables, codec, page_bytes, found)
            _check_recency(txn, tables, found)
            if live_bytes(txn, tables) != total_bytes:
                found.append(f"live_bytes is {live_bytes(txn, tables)}, the values have {total_bytes}")
    except lmdb.Error as error:
        found.append(f"the file cannot be read: {error}")
    return found


def _check_values(txn: Any, tables: Tables, codec: PageCodec, page_bytes: int, found: list[str]) -> int:
    """Each value verifies and its age record states its size; returns the sum of the sizes."""
    total_bytes, scratch = 0, np.empty(page_bytes, dtype=np.uint8)
    with txn.cursor(db=tables.pages) as cursor:
        for view, value in cursor:
            key = bytes(view)
            total_bytes += len(value)
            reason = codec.decode_into(key, value, scratch)
            if reason:
                found.append(f"page {key.hex()}: {reason}")
            age = txn.get(key, db=tables.ages)
            if age is None or len(age) != PAIR.size:
                found.append(f"page {key.hex()}: no age record")
            elif PAIR.unpack(age)[1] != len(value):
                found.append(f"page {key.hex()}: recorded {PAIR.unpack(age)[1]} bytes, stored {len(value)}")
    return total_bytes


def _check_recency(txn: Any, tables: Tables, found: list[str]) -> None:
    """pages, ages and recency hold the same keys; each tick leads to the key whose age record has it."""
    counts = {name: txn.stat(table)["entries"] for name, table in _indexes(tables).items()}
    if len(set(counts.values())) > 1:
        found.append("tables differ in size: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    next_tick = PAIR.unpack(txn.get(COUNTERS_KEY, db=tables.meta))[0]
    with txn.cursor(db=tables.recency) as cursor:
        for packed, key in cursor:
            tick = TICK.unpack(packed)[0] if len(packed) == TICK.size else -1
            age = txn.get(key, db=tables.ages)
            if age is None or len(age) != PAIR.size or PAIR.unpack(age)[0] != tick:
                found.append(f"tick {tick} leads to {bytes(key).hex()}, whose age record differs")
            if not 0 < tick < next_tick:
                found.append(f"tick {tick} is not below the next tick {next_tick}")
            if txn.get(key, db=tables.pages) is None:
                found.append(f"tick {tick} leads to {bytes(key).hex()}, which is no page")


def _indexes(tables: Tables) -> dict[str, Any]:
    return {"pages": tables.pages, "ages": tables.ages, "recency": tables.recency}
