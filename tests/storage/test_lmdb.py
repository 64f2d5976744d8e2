"""The lmdb store keeps the pages that it acknowledged, for the identity with which it was created, in its own
directory."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from hicache.storage import (
    PageFilter,
    PageFormat,
    StoreCorrupt,
    StoreError,
    StoreMismatch,
    StoreStats,
    describe,
    open_existing,
)
from storage_pages import IDENTITY, PAGE_BYTES, found_numbers, open_store, put_numbers

FORMATS = (
    PageFormat(60_000, PageFilter("byte_shuffle", 2)),
    PageFormat(700),
    PageFormat(5_000, PageFilter("byte_shuffle", 4)),
)
SIZES = (700, 5_000, 60_000)


def test_stored_bytes_are_counted(tmp_path: Path) -> None:
    """A page that does not compress takes its own bytes and a header. A page that is present is not written again. The
    drive writes a day are computed over at least one hour."""
    with contextlib.closing(open_store(tmp_path)) as store:
        assert put_numbers(store, [0, 1, 0]) == put_numbers(store, [0, 2, 1]) == [True] * 3
        stats = store.stats()
        assert (stats.entries, stats.puts, stats.put_bytes_raw, stats.raw_bytes) == (3, 3, *[3 * PAGE_BYTES] * 2)
        assert stats.put_bytes_stored == stats.live_bytes == 3 * (PAGE_BYTES + 52)
        assert stats.drive_bytes == shutil.disk_usage(tmp_path).total
        assert stats.drive_writes_per_day == 24 * stats.put_bytes_stored / stats.drive_bytes
    two_hours = StoreStats(put_bytes_stored=50, drive_bytes=100, open_seconds=7200)
    assert (two_hours.drive_writes_per_day, StoreStats(put_bytes_stored=50).drive_writes_per_day) == (6.0, 0.0)


def test_identity(tmp_path: Path) -> None:
    """A store opens with its page sizes in any order, and with other filters. With another identity or other sizes it
    is refused; the error has both values, and the store does not change."""
    with contextlib.closing(open_store(tmp_path, formats=FORMATS)) as store:
        put_numbers(store, range(6), SIZES)
    for formats in (FORMATS, FORMATS[::-1], [PageFormat(size) for size in SIZES]):
        with contextlib.closing(open_store(tmp_path, formats=formats)) as store:
            assert found_numbers(store, range(7), SIZES) == set(range(6))
    assert describe(tmp_path).formats == tuple(PageFormat(size) for size in SIZES)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"identity": {**IDENTITY, "model": "huge"}}, "model: stored 'tiny', now 'huge'"),
        ({"identity": {**IDENTITY, "salt": "a"}}, "salt: stored None, now 'a'"),
        ({"formats": FORMATS[:2]}, r"page_bytes: stored \[700, 5000, 60000\], now \[700, 60000\]"),
        ({"formats": (*FORMATS, PageFormat(9))}, "page_bytes: stored"),
    ]
    for change, both in changes:
        with pytest.raises(StoreMismatch, match=both):
            open_store(tmp_path, **{"formats": FORMATS, **change})
    with contextlib.closing(open_existing(tmp_path)) as store:
        assert store.page_sizes == SIZES and found_numbers(store, range(7), SIZES) == set(range(6))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"identity": {}}, "identity"),
    ({"durability": "eager"}, "durability"),
    ({"level": 23}, "level=23"),
    ({"budget_bytes": 1000}, "raise it to"),
    ({"formats": []}, "give 1 to 16"),
    ({"formats": [PageFormat(700), PageFormat(700, PageFilter("byte_shuffle", 2))]}, "another page size"),
    ({"formats": [PageFormat(size) for size in range(1, 18)]}, "give 1 to 16"),
    ({"formats": [PageFormat(700), PageFormat(0)]}, "page_bytes=0"),
    ({"formats": [PageFormat((1 << 30) + 1)]}, "page_bytes=1073741825"),
    ({"formats": [PageFormat(9, PageFilter("byte_shuffle", 2))]}, "a divisor of page_bytes=9"),
    ({"page_bytes": 1 << 30}, "raise it to"),
]


@pytest.mark.parametrize(("changes", "named"), BAD, ids=[named for _, named in BAD])
def test_what_makes_no_store_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """An empty identity, a setting out of range, and an empty, too long, repeated or too large list of page sizes are
    refused by name. No store is created."""
    with pytest.raises(StoreError, match=named):
        open_store(tmp_path, **changes)
    assert not (tmp_path / "store.json").exists()
    open_store(tmp_path).close()


def test_paths_that_are_no_directory(tmp_path: Path) -> None:
    """A path to a file, or below a place where nothing can be created, is refused."""
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below", "/proc/no-such-place"):
        with pytest.raises(StoreError):
            open_store(path)


@pytest.mark.parametrize("name", ["store.json", "index.mdb", "pages-4096-8192.dat"])
def test_foreign_file(tmp_path: Path, name: str) -> None:
    """A file that no store wrote is refused and not changed."""
    for content in (b"some notes\n", b"\0" * 20000, b"{}"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(StoreCorrupt):
            open_store(tmp_path)
        assert (tmp_path / name).read_bytes() == content
