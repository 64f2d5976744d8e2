"""Keys and pages made from a number, for the tests of the page stores: the same number always gives the same bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hicache.storage import LmdbPageStore, PageFilter, PageFormat
from hicache.storage.header import finalise_header

# With a value's header and lmdb's own 16 bytes exactly four pages of the file.
PAGE_BYTES = (16 << 10) - 68
IDENTITY: dict[str, str | int] = {"model": "tiny", "dtype": "bfloat16", "layout": "ab12", "page_size": 64}

# What a store is opened with to have its values in its tables, or in slots, whatever the size of a page.
Layout = dict[str, int]
LAYOUTS: dict[str, Layout] = {"tables": {"slots_from_bytes": 1 << 40}, "slots": {"slots_from_bytes": 1}}
SLOTS = LAYOUTS["slots"]
both_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
_INDEX_SHARE, _MIN_INDEX_BYTES = 8, 256 << 10  # of a budget, at most and at least, for the tables beside slots


def budget_of(num_pages: int, layout: Layout, page_bytes: int = PAGE_BYTES) -> int:
    """A budget with about the same capacity for values in both layouts."""
    values_bytes = num_pages * page_bytes
    index_bytes = max(values_bytes // (_INDEX_SHARE - 1), _MIN_INDEX_BYTES)
    return values_bytes + (index_bytes if layout == SLOTS else 0)


# The length of all pages, or the lengths between which the number of a page chooses.
Bytes = int | Sequence[int]


def bytes_of(number: int, page_bytes: Bytes) -> int:
    return page_bytes if isinstance(page_bytes, int) else page_bytes[number % len(page_bytes)]


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def value_of(key: bytes, fields: bytes, payload: bytes | memoryview) -> bytes:
    """The value with these header fields, a right checksum and this payload."""
    return finalise_header(key, fields, payload) + bytes(payload)


def page_of(number: int, page_bytes: int = PAGE_BYTES, kind: str = "random") -> npt.NDArray[np.uint8]:
    """`random` bytes do not compress, `normal` ones (16-bit floats) do a little, `flat` ones very well."""
    generator = np.random.default_rng(number)
    if kind == "random":
        return generator.integers(0, 256, page_bytes, dtype=np.uint8)
    if kind == "flat":
        return np.full(page_bytes, number % 251, dtype=np.uint8)
    floats = generator.standard_normal(-(-page_bytes // 2)).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:page_bytes].copy()


def open_store(path: Any, **changes: Any) -> LmdbPageStore:
    """A store of `formats`, or of those that `page_bytes` and `filter` make."""
    page_bytes, filter = changes.pop("page_bytes", PAGE_BYTES), changes.pop("filter", PageFilter())
    formats = [PageFormat(size, filter) for size in ([page_bytes] if isinstance(page_bytes, int) else page_bytes)]
    return LmdbPageStore(path, **{"identity": IDENTITY, "formats": formats, "budget_bytes": 64 << 20, **changes})


def put_numbers(store: LmdbPageStore, numbers: Any, page_bytes: Bytes = PAGE_BYTES, kind: str = "random") -> list[bool]:
    return store.put([(key_of(n), page_of(n, bytes_of(n, page_bytes), kind)) for n in numbers])


def slots_path(path: Path) -> Path:
    """The file of slots of a store whose pages have one size."""
    [file] = path.glob("pages-*.dat")
    return file


def values_file(path: Path, layout: Layout) -> Path:
    """The file of a store that has its values."""
    return slots_path(path) if layout == SLOTS else path / "data.mdb"


def has_slots(path: Path) -> bool:
    """Whether values of a store are in slots; it must have some."""
    return any(file.stat().st_size > 0 for file in path.glob("pages-*.dat"))


def blocks_bytes(path: Path) -> int:
    """What the files of a store take of the disk."""
    return sum(file.stat().st_blocks * 512 for file in (path / "data.mdb", *path.glob("pages-*.dat")))


def forget_cached(path: Path) -> None:
    """Have the kernel drop what it keeps of a file that nobody has mapped pages of."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def found_numbers(store: LmdbPageStore, numbers: Any, page_bytes: Bytes = PAGE_BYTES, kind: str = "random") -> set[int]:
    """The numbers that the store has, after comparing every byte of each."""
    wanted = list(numbers)
    buffers = [np.empty(bytes_of(n, page_bytes), dtype=np.uint8) for n in wanted]
    found = set()
    for number, buffer, hit in zip(wanted, buffers, store.get_into([key_of(n) for n in wanted], buffers), strict=True):
        if hit:
            np.testing.assert_array_equal(buffer, page_of(number, bytes_of(number, page_bytes), kind))
            found.add(number)
    return found
