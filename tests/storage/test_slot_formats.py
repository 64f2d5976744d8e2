"""Stores with and without slots: which is made, that each stays what it is, and pages carried from one to the other."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from hicache.storage import (
    LmdbPageReader,
    LmdbPageStore,
    PageCipher,
    PageFilter,
    PageFormat,
    StoreError,
    StoreMismatch,
    describe,
    evict,
    open_existing,
    pages,
    put_values,
    verify,
)
from slot_case import SLOT_BYTES, closed_slots, open_slots, payloads, slots_file, slots_of
from storage_pages import PAGE_BYTES, found_numbers, key_of, open_store, page_of, put_numbers, slots_path

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
LONG_PAGE_BYTES = 1 << 20
TABLES: dict[str, Any] = {"slots_from_bytes": 1 << 40}
SLOTS: dict[str, Any] = {"slots_from_bytes": 1}


def record_of(path: Path) -> dict[str, Any]:
    """The identity record of a closed store, as it is stored."""
    with lmdb.open(str(path), max_dbs=16, map_size=1 << 27) as env, env.begin(db=env.open_db(b"meta")) as txn:
        record: dict[str, Any] = json.loads(txn.get(b"store"))
        return record


@pytest.mark.parametrize(
    ("page_sizes", "changes", "slot_bytes"),
    [
        ([(256 << 10) - 1], {}, []),
        ([256 << 10], {}, [256 << 10]),
        ([256 << 10], TABLES, []),
        ([(256 << 10) + 1], {}, [(256 << 10) + 4096]),
        ([256 << 10], {"cipher": PageCipher(KEY)}, [(256 << 10) + 4096]),
        ([PAGE_BYTES], SLOTS, [SLOT_BYTES]),
        ([1], SLOTS, [4096]),
        ([100, 5000, 70_000], {}, []),
        ([1 << 20, 100, 5000], {}, [4096, 8192, 1 << 20]),
    ],
)
def test_the_largest_pages_decide_on_slots(
    tmp_path: Path, page_sizes: list[int], changes: dict[str, Any], slot_bytes: list[int]
) -> None:
    """A store whose largest pages have 256 KiB and more has a slot file for each size, with slots of whole blocks that
    take an encrypted page too; another has none. The record says so, and each stays what it is."""
    settings = {"formats": [PageFormat(page_bytes) for page_bytes in page_sizes], **changes}
    with contextlib.closing(open_store(tmp_path, **settings)) as store:
        for page_bytes in page_sizes:
            assert store.put([(key_of(page_bytes), page_of(3, page_bytes))] * 2) == [True] * 2
        store.check()
    files = {int(file.stem.split("-")[1]): file.stat().st_size for file in tmp_path.glob("pages-*.dat")}
    assert sorted(files) == (sorted(page_sizes) if slot_bytes else [])
    assert [-(-files[page_bytes] // 4096) * 4096 for page_bytes in sorted(files)] == slot_bytes
    settings["slots_from_bytes"] = 1 << 40 if slot_bytes else 1
    with contextlib.closing(open_store(tmp_path, **settings)) as store:
        for page_bytes in page_sizes:
            page = np.empty(page_bytes, dtype=np.uint8)
            assert store.get_into([key_of(page_bytes)], [page]) == [True]
            np.testing.assert_array_equal(page, page_of(3, page_bytes))
    record = record_of(tmp_path)
    assert describe(tmp_path).has_slots == record["slots"] == bool(slot_bytes)
    assert record.keys() == {"format", "identity", "page_bytes", "slots"} and record["format"] == 1
    assert record["page_bytes"] == sorted(page_sizes)


def test_long_pages_stay_in_tables(tmp_path: Path) -> None:
    """A store with pages of 1 MiB in its tables, opened as any store is, is read and written, evicts and compacts in
    them, and can be described, read by others and opened by an operator."""
    settings = {"page_bytes": LONG_PAGE_BYTES, "budget_bytes": 64 << 20}
    with contextlib.closing(open_store(tmp_path, **settings, **TABLES)) as store:
        put_numbers(store, range(10), LONG_PAGE_BYTES)
    for opening in (lambda: open_store(tmp_path, **settings), lambda: open_existing(tmp_path)):
        with contextlib.closing(opening()) as store:
            assert found_numbers(store, range(10), LONG_PAGE_BYTES) == set(range(10))
            assert put_numbers(store, range(10, 80), LONG_PAGE_BYTES).count(True) > 30
            assert store.stats().evicted > 10 and store.stats().file_bytes <= 1.05 * (64 << 20)
            held = found_numbers(store, range(80), LONG_PAGE_BYTES)
            store.delete([key_of(number) for number in held - set(range(10, 20))])
            assert store.compact() > 10 * LONG_PAGE_BYTES
            assert put_numbers(store, range(10), LONG_PAGE_BYTES) == [True] * 10
            store.check()
    with contextlib.closing(LmdbPageReader(tmp_path)) as reader:
        assert found_numbers(reader, range(10), LONG_PAGE_BYTES) == set(range(10))
    assert not describe(tmp_path).has_slots and not list(tmp_path.glob("pages-*.dat"))


def fill(store: LmdbPageStore) -> None:
    put_numbers(store, range(20))
    put_numbers(store, range(20, 30), kind="normal")
    put_numbers(store, range(30, 35), kind="flat")
    assert found_numbers(store, [5, 3]) == {3, 5}
    store.sync()


def require_filled(store: LmdbPageStore) -> None:
    assert found_numbers(store, range(20)) == set(range(20))
    assert found_numbers(store, range(20, 30), kind="normal") == set(range(20, 30))
    assert found_numbers(store, range(30, 35), kind="flat") == set(range(30, 35))
    store.check()


@pytest.mark.parametrize("ways", [(TABLES, SLOTS, TABLES), (SLOTS, TABLES, SLOTS), (SLOTS, SLOTS)])
@pytest.mark.parametrize("cipher", [None, PageCipher(KEY)], ids=["plain", "encrypted"])
def test_pages_are_carried_there_and_back(
    tmp_path: Path, ways: tuple[dict[str, Any], ...], cipher: PageCipher | None
) -> None:
    """From tables to slots and from slots to tables values stay as they are, to the last byte, in their order, and
    without the key; whoever has it reads every page, and what is put there later."""
    settings: dict[str, Any] = {"filter": PageFilter("byte_shuffle", 2), "cipher": cipher}
    with contextlib.closing(open_store(tmp_path / "0", **settings, **ways[0])) as store:
        fill(store)
        carried = list(pages(store))
    for number, way in enumerate(ways[1:], start=1):
        open_store(tmp_path / str(number), **settings, **way).close()
        with contextlib.closing(open_existing(tmp_path / str(number))) as target:
            assert put_values(target, carried) == [True] * 35
            assert put_values(target, carried[:3]) == [True] * 3
            target.sync()
            assert sorted(pages(target)) == sorted(carried)
            assert [key for key, _ in pages(target)] == [key for key, _ in (*carried[3:], *carried[:3])]
            assert (verify(target).pages, verify(target).faults) == (35, ())
            carried = list(pages(target))
    for number in range(len(ways)):
        with contextlib.closing(open_store(tmp_path / str(number), **settings)) as store:
            require_filled(store)
            store.delete([key_of(0)])
            assert put_numbers(store, [0, 50]) == [True] * 2
            assert found_numbers(store, [0, 50]) == {0, 50}
            require_filled(store)


def test_an_operator_shrinks_a_store_with_slots(tmp_path: Path) -> None:
    """`evict` keeps the most recently used, gives the disk what they had, and leaves a valid store."""
    with contextlib.closing(open_slots(tmp_path, budget_bytes=256 << 20)) as store:
        for number in range(100):
            put_numbers(store, [number])
        gone = evict(store, 60 * SLOT_BYTES)
        stats = store.stats()
        assert stats.entries == 100 - gone > 30 and stats.file_bytes <= 60 * SLOT_BYTES
        assert found_numbers(store, range(100)) == set(range(gone, 100))
        store.check()
        assert evict(store, 0) == 100 - gone and store.stats().file_bytes <= 64 << 10
        assert put_numbers(store, range(5)) == [True] * 5
        store.check()


@pytest.mark.parametrize(("kind", "level"), [("flat", 1), ("normal", 1), ("normal", 0), ("random", 1)])
def test_encrypted_slots(tmp_path: Path, kind: str, level: int) -> None:
    """Pages come back under their key alone. The files hold nothing of a plain page, which they do without a cipher;
    without the key a store is verified, and a changed page is found."""
    settings: dict[str, Any] = {"filter": PageFilter("byte_shuffle", 2), "level": level}
    page = page_of(3, kind=kind)
    for name, cipher in (("plain", None), ("sealed", PageCipher(KEY))):
        with contextlib.closing(open_slots(tmp_path / name, cipher=cipher, **settings)) as store:
            put_numbers(store, range(6), kind=kind)
            assert found_numbers(store, range(7), kind=kind) == set(range(6))
            aligned = np.frombuffer(os.urandom(PAGE_BYTES + 4096), dtype=np.uint8).copy()[:PAGE_BYTES]
            assert store.get_into([key_of(3)], [aligned]) == [True] and np.array_equal(aligned, page)
            slots = slots_of(store)
    plain, sealed = (slots_path(tmp_path / name).read_bytes() for name in ("plain", "sealed"))
    compressed = payloads(tmp_path / "plain", closed_slots(tmp_path / "plain"))[key_of(3)]
    assert (page.tobytes() in plain) == (len(compressed) == PAGE_BYTES) == (not level or kind == "random")
    for content in (page.tobytes(), compressed):
        assert not any(content[at : at + 12] in sealed for at in range(0, len(content) - 12, 12))
    assert all(record.num_bytes > 28 for record in slots.used.values())
    with pytest.raises(StoreMismatch, match="cipher_key"):
        open_slots(tmp_path / "sealed", cipher=PageCipher(OTHER_KEY), **settings)
    with pytest.raises(StoreMismatch, match="cipher_key"):
        open_slots(tmp_path / "sealed", **settings)
    record = closed_slots(tmp_path / "sealed").used[key_of(4)]
    with slots_file(tmp_path / "sealed") as descriptor:
        at = record.slot * SLOT_BYTES + record.num_bytes // 2
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 4]), at)
    with contextlib.closing(open_existing(tmp_path / "sealed")) as store:
        assert [fault.key for fault in verify(store).faults] == [key_of(4)]
        with pytest.raises(StoreError, match="encrypted with the key"):
            found_numbers(store, [1])
    with contextlib.closing(open_slots(tmp_path / "sealed", cipher=PageCipher(KEY), **settings)) as store:
        assert found_numbers(store, range(6), kind=kind) == {0, 1, 2, 3, 5} and store.stats().corrupt == 1
