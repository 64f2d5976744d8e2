"""Commands for operators: describe a store, verify it, and repair it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from hicache.storage import (
    PageCipher,
    PageFilter,
    PageFormat,
    StoreCorrupt,
    StoreError,
    StoreMismatch,
    describe,
    list_pages,
    open_existing,
    verify,
)
from storage_pages import (
    IDENTITY,
    PAGE_BYTES,
    change_index,
    found_numbers,
    key_of,
    open_store,
    put_numbers,
    slot_key,
    slots_path,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(32)


def test_a_store_opens_by_what_it_says_of_itself(tmp_path: Path) -> None:
    """A store records its identity and its last settings. The store opens with only this record, and does not
    change."""
    filter = PageFilter("byte_shuffle", 2)
    open_store(tmp_path, budget_bytes=32 << 20).close()
    with contextlib.closing(open_store(tmp_path, filter=filter, level=3, durability="commit")) as store:
        put_numbers(store, range(7))
        live_bytes = store.stats().live_bytes
    found = describe(tmp_path)
    assert dict(found.identity) == IDENTITY and found.formats == (PageFormat(PAGE_BYTES, filter),)
    assert (found.level, found.durability, found.budget_bytes) == (3, "commit", 64 << 20)
    assert (found.entries, found.live_bytes, found.raw_bytes) == (7, live_bytes, 7 * PAGE_BYTES)
    assert (found.key_id, found.encrypted, found.writer_pid, found.format) == ("", False, None, 1)
    assert abs(found.file_bytes - (tmp_path / "index.mdb").stat().st_size - 7 * 5 * 4096) <= 8192
    with contextlib.closing(open_existing(tmp_path)) as store:
        assert found_numbers(store, range(8)) == set(range(7)) and put_numbers(store, [9]) == [True]
    settings = ("identity", "formats", "level", "durability", "budget_bytes")
    assert [getattr(describe(tmp_path), name) for name in settings] == [getattr(found, name) for name in settings]
    for unknown in (describe, open_existing):
        with pytest.raises(StoreError, match="there is no store"):
            unknown(tmp_path / "none")


def test_encrypted_store(tmp_path: Path) -> None:
    """A wrong key, a missing key, or a key for a plain store is an error with both ids, and the pages stay. An operator
    can verify an encrypted store without its key, but cannot read or put a page."""
    cipher, other = PageCipher(KEY), PageCipher(OTHER_KEY)
    with contextlib.closing(open_store(tmp_path, cipher=cipher)) as store:
        put_numbers(store, range(6))
    for opened, wrong in ((open_store, other), (open_existing, other), (open_store, None)):
        now = repr(wrong.key_id) if wrong else "None"
        with pytest.raises(StoreMismatch, match=f"cipher_key.*{cipher.key_id}.*{now}"):
            opened(tmp_path, cipher=wrong)
    assert describe(tmp_path).key_id == cipher.key_id and dict(describe(tmp_path).identity) == IDENTITY
    with contextlib.closing(open_existing(tmp_path)) as store:
        for call in (put_numbers, found_numbers):
            with pytest.raises(StoreError, match=cipher.key_id):
                call(store, [1])
        assert (verify(store).pages, verify(store).faults) == (6, ())
    with contextlib.closing(open_existing(tmp_path, cipher=cipher)) as store:
        assert found_numbers(store, range(8)) == set(range(6))


def plant(txn: Any, tables: dict[str, Any]) -> None:
    """Put three wrong records into the index of pages 0 to 29: exchange the entries of two pages, and enter a key for a
    free slot."""
    one, other = (bytes(txn.get(key_of(number), db=tables["pages"])) for number in (7, 8))
    txn.put(key_of(7), other, db=tables["pages"])
    txn.put(key_of(8), one, db=tables["pages"])
    txn.put(slot_key(900), key_of(77), db=tables["slots"])


def test_verify_finds_and_repairs_every_fault(tmp_path: Path) -> None:
    """Verify reports each planted fault and no other. Repair drops the pages that do not verify, keeps all others, and
    leaves a store without faults."""
    with contextlib.closing(open_store(tmp_path)) as store:
        for number in range(30):
            put_numbers(store, [number])
    content = bytearray(slots_path(tmp_path).read_bytes())
    bad = {3: 0, 4: 60, 5: 4096 + 5000}
    for number, place in bad.items():
        content[20480 * number + place] ^= 4
    slots_path(tmp_path).write_bytes(content)
    change_index(tmp_path, plant)
    with contextlib.closing(open_existing(tmp_path)) as store:
        steps: list[tuple[int, int]] = []
        report = verify(store, lambda done, total: steps.append((done, total)))
        assert steps == [(n, 30) for n in range(1, 31)] and report.pages == 30
        assert {fault.key for fault in report.faults} == {None, *map(key_of, (*bad, 7, 8))}
        assert all(not fault.action for fault in report.faults)
        with pytest.raises(StoreCorrupt) as caught:
            store.check()
        assert sorted(caught.value.violations) == sorted(map(str, report.faults)) and len(report.faults) == 6
        assert sum("another page" in violation for violation in caught.value.violations) == 2
        assert store.stats().entries == 30
        report = verify(store, repair=True)
        assert {f.key for f in report.faults if f.action == "dropped"} == set(map(key_of, bad))
        assert {f.key for f in report.faults if f.action == "index rebuilt"} == {None, key_of(7), key_of(8)}
        assert verify(store).faults == () and verify(store).pages == 27
        assert [entry.key for entry in list_pages(store)] == [key_of(n) for n in range(30) if n not in bad]
        assert found_numbers(store, range(30)) == set(range(30)) - set(bad)
        assert put_numbers(store, sorted(bad)) == [True] * 3
        store.check()
