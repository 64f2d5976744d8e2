"""Keys and pages made from a number, for the tests of the page stores: the same number always gives the same bytes."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from hicache.storage import LmdbPageStore, PageFilter, PageFormat, PageStore
from hicache.storage.codec import PageCodec
from hicache.storage.header import HEADER_BYTES, finalise_header

PAGE_BYTES = (16 << 10) - 64
IDENTITY: dict[str, str | int] = {"model": "tiny", "dtype": "bfloat16", "layout": "ab12", "page_size": 64}

_MIN_INDEX_BYTES = 256 << 10
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # commits in memory wait for no disk


def budget_of(num_pages: int, page_bytes: int = PAGE_BYTES) -> int:
    """A budget in bytes for about `num_pages` pages that do not compress."""
    return num_pages * (-(-page_bytes // 4096) + 1) * 4096 + _MIN_INDEX_BYTES


# Bytes of every page; or several lengths, from which the number of a page chooses one.
Bytes = int | Sequence[int]


def bytes_of(number: int, page_bytes: Bytes) -> int:
    return page_bytes if isinstance(page_bytes, int) else page_bytes[number % len(page_bytes)]


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def value_of(key: bytes, fields: bytes, payload: bytes | memoryview) -> bytes:
    """A stored value with these header fields, a correct checksum and this payload."""
    return finalise_header(key, fields, payload) + bytes(payload)


class WholeCodec(PageCodec):
    """A codec that writes each value in one part."""

    def encode(self, key: bytes, page: npt.NDArray[np.uint8], *, lag: float = 0.0) -> bytes:
        value = self.encode_split(key, page, memoryview(bytearray(self.max_payload_bytes)), lag=lag)
        return value.header + bytes(value.payload)

    def decode_into(self, key: bytes, value: bytes | memoryview, page: npt.NDArray[np.uint8]) -> str:
        view = memoryview(value)
        return self.decode_split(key, view[:HEADER_BYTES], view[HEADER_BYTES:], page)


def is_compressed(value: bytes) -> bool:
    """Whether the header of a value says that its page is compressed."""
    return value[6] != 0


def page_of(number: int, page_bytes: int = PAGE_BYTES, kind: str = "random") -> npt.NDArray[np.uint8]:
    """A page made from its number. `random` bytes do not compress, `normal` ones (16-bit floats) compress a little,
    `flat` ones very well."""
    generator = np.random.default_rng(number)
    if kind == "random":
        return generator.integers(0, 256, page_bytes, dtype=np.uint8)
    if kind == "flat":
        return np.full(page_bytes, number % 251, dtype=np.uint8)
    floats = generator.standard_normal(-(-page_bytes // 2)).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:page_bytes].copy()


def open_store(path: Any, **changes: Any) -> LmdbPageStore:
    """Open a store of `formats`, or of the formats given by `page_bytes` and `filter`."""
    page_bytes, filter = changes.pop("page_bytes", PAGE_BYTES), changes.pop("filter", PageFilter())
    formats = [PageFormat(size, filter) for size in ([page_bytes] if isinstance(page_bytes, int) else page_bytes)]
    return LmdbPageStore(path, **{"identity": IDENTITY, "formats": formats, "budget_bytes": 64 << 20, **changes})


def put_numbers(store: PageStore, numbers: Any, page_bytes: Bytes = PAGE_BYTES, kind: str = "random") -> list[bool]:
    return store.put([(key_of(n), page_of(n, bytes_of(n, page_bytes), kind)) for n in numbers])


def slots_path(path: Path) -> Path:
    """The file with the slots of a store whose pages have one size."""
    [file] = path.glob("pages-*.dat")
    return file


def change_index(path: Path, body: Callable[[Any, dict[str, Any]], None]) -> None:
    """Change the tables of a closed store's index without the store, and seal the index again."""
    file = path / "index.mdb"
    os.truncate(file, file.stat().st_size - 8)
    with lmdb.open(str(file), subdir=False, max_dbs=3, map_size=1 << 27, lock=False) as env:
        tables = {name: env.open_db(name.encode()) for name in ("pages", "slots", "uses")}
        with env.begin(write=True) as txn:
            body(txn, tables)
    with file.open("ab") as sealed:
        sealed.write(xxhash.xxh3_64_digest(file.read_bytes(), seed=1))


def slot_key(slot: int) -> bytes:
    """The name that the index has for a slot of pages of `PAGE_BYTES`."""
    return struct.pack(">IIQ", PAGE_BYTES, 5 * 4096, slot)


def blocks_bytes(path: Path) -> int:
    """Disk space of the files of a store, in bytes."""
    return sum(file.stat().st_blocks * 512 for file in path.iterdir() if file.is_file())


def found_numbers(store: PageStore, numbers: Any, page_bytes: Bytes = PAGE_BYTES, kind: str = "random") -> set[int]:
    """The numbers of the pages that the store has. Compares every byte of these pages."""
    requested = list(numbers)
    buffers = [np.empty(bytes_of(n, page_bytes), dtype=np.uint8) for n in requested]
    found = set()
    for number, buffer, hit in zip(
        requested, buffers, store.get_into([key_of(n) for n in requested], buffers), strict=True
    ):
        if hit:
            np.testing.assert_array_equal(buffer, page_of(number, bytes_of(number, page_bytes), kind))
            found.add(number)
    return found
