"""What an operator does: describe a store, verify and repair it, move its pages elsewhere, shrink it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from hicache.storage import (
    LmdbPageStore,
    PageCipher,
    PageFilter,
    PageFormat,
    StoreError,
    StoreMismatch,
    VerifyReport,
    describe,
    evict,
    open_existing,
    pages,
    put_values,
    verify,
)
from storage_pages import (
    IDENTITY,
    PAGE_BYTES,
    change_index,
    found_numbers,
    key_of,
    open_store,
    page_of,
    put_numbers,
    slots_path,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(32)


def reasons(report: VerifyReport) -> str:
    return "\n".join(fault.reason for fault in report.faults)


def test_describe(tmp_path: Path) -> None:
    """A store says what it was made for and how it was opened the last time."""
    filter = PageFilter("byte_shuffle", 2)
    open_store(tmp_path, budget_bytes=32 << 20).close()
    store = open_store(tmp_path, filter=filter, level=3, durability="commit")
    put_numbers(store, range(7))
    live_bytes = store.stats().live_bytes
    store.close()
    found = describe(tmp_path)
    assert dict(found.identity) == IDENTITY and found.formats == (PageFormat(PAGE_BYTES, filter),)
    assert (found.level, found.durability, found.budget_bytes) == (3, "commit", 64 << 20)
    assert (found.entries, found.live_bytes, found.raw_bytes) == (7, live_bytes, 7 * PAGE_BYTES)
    assert (found.key_id, found.writer_pid) == ("", None)
    assert abs(found.file_bytes - (tmp_path / "index.mdb").stat().st_size - 7 * 5 * 4096) <= 8192 and found.format == 1
    with pytest.raises(StoreError, match="there is no store"):
        describe(tmp_path / "none")


def test_open_existing(tmp_path: Path) -> None:
    """A store opens with what it says of itself, and stays the same store."""
    store = open_store(tmp_path, filter=PageFilter("byte_shuffle", 2), durability="commit")
    put_numbers(store, range(5), kind="normal")
    store.close()
    before = describe(tmp_path)
    again = open_existing(tmp_path)
    assert found_numbers(again, range(6), kind="normal") == set(range(5))
    assert put_numbers(again, [9], kind="normal") == [True]
    again.close()
    after = describe(tmp_path)
    assert after.entries == 6
    assert (after.formats, after.durability, after.budget_bytes) == (before.formats, "commit", before.budget_bytes)
    store = open_store(tmp_path)
    assert found_numbers(store, range(10), kind="normal") == {0, 1, 2, 3, 4, 9}
    store.close()


def test_encrypted_store(tmp_path: Path) -> None:
    """A wrong key, none, or one for a plain store: an error with both ids, and the pages stay. An operator verifies
    and copies an encrypted store without its key, and cannot read or put a page of it.
    """
    cipher, other = PageCipher(KEY), PageCipher(OTHER_KEY)
    store = open_store(tmp_path / "a", cipher=cipher)
    put_numbers(store, range(6))
    store.close()
    with pytest.raises(StoreMismatch, match=f"cipher_key: stored '{cipher.key_id}', now '{other.key_id}'"):
        open_store(tmp_path / "a", cipher=other)
    with pytest.raises(
        StoreMismatch, match=f"cipher_key: stored '{cipher.key_id}', now None.*the key that it was made"
    ):
        open_store(tmp_path / "a")
    with pytest.raises(StoreMismatch, match=f"cipher_key: stored '{cipher.key_id}', now '{other.key_id}'"):
        open_existing(tmp_path / "a", cipher=other)
    assert describe(tmp_path / "a").key_id == cipher.key_id and dict(describe(tmp_path / "a").identity) == IDENTITY

    copy = open_store(tmp_path / "b", cipher=cipher)
    copy.close()
    source, copy = open_existing(tmp_path / "a"), open_existing(tmp_path / "b")
    for call in (lambda: put_numbers(source, [7]), lambda: found_numbers(source, [1])):
        with pytest.raises(StoreError, match=f"encrypted with the key {cipher.key_id}"):
            call()
    report = verify(source)
    assert (report.pages, report.faults) == (6, ())
    assert put_values(copy, list(pages(source))) == [True] * 6
    for opened in (source, copy):
        opened.check()
        opened.close()
    for name in "ab":
        store = open_existing(tmp_path / name, cipher=cipher)
        assert found_numbers(store, range(8)) == set(range(6))
        store.close()


def plant(txn: Any, tables: dict[str, Any]) -> None:
    """Wrong records in the index of the numbers 0 to 29: of places and of use."""
    one, other = (bytes(txn.get(key_of(number), db=tables["pages"])) for number in (7, 8))
    txn.put(key_of(7), one[:8] + other[8:], db=tables["pages"])
    txn.put(key_of(8), other[:8] + one[8:], db=tables["pages"])
    txn.put((900).to_bytes(8, "big"), key_of(77), db=tables["recency"])


def test_verify_finds_and_repairs_every_fault(tmp_path: Path) -> None:
    """Each planted fault is reported and nothing else; repair drops what does not verify, keeps every other page, and
    leaves a store in which nothing is wrong."""
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
        text = reasons(report)
        assert "another page" in text and "the use order names 31 pages" in text
        assert store.stats().entries == 30
        report = verify(store, repair=True)
        assert {f.key for f in report.faults if f.action == "dropped"} == set(map(key_of, bad))
        assert {f.key for f in report.faults if f.action == "index rebuilt"} == {None, key_of(7), key_of(8)}
        assert verify(store).faults == () and verify(store).pages == 27
        assert [key for key, _ in pages(store)] == [key_of(n) for n in range(30) if n not in bad]
        assert found_numbers(store, range(30)) == set(range(30)) - set(bad)
        assert put_numbers(store, sorted(bad)) == [True] * 3
        store.check()


def test_verify_of_a_valid_store(tmp_path: Path) -> None:
    """Nothing is reported, nothing is changed, and every byte was read."""
    store = open_store(tmp_path)
    put_numbers(store, range(20))
    report = verify(store, repair=True)
    assert (report.pages, report.bytes, report.faults) == (20, store.stats().live_bytes, ())
    assert found_numbers(store, range(20)) == set(range(20))
    store.close()


def test_pages_carry_the_order_of_use(tmp_path: Path) -> None:
    """Pages leave least recently used first; a store that takes them in evicts in the same order as their source."""
    source = open_store(tmp_path / "a")
    for number in range(40):
        put_numbers(source, [number])
    assert found_numbers(source, [5, 3]) == {3, 5}
    source.sync()
    carried = list(pages(source))
    assert [key for key, _ in carried] == [key_of(n) for n in [*(n for n in range(40) if n not in (3, 5)), 3, 5]]
    copy = open_store(tmp_path / "b")
    put_numbers(copy, [0])
    assert put_values(copy, carried) == [True] * 40
    assert copy.stats().puts == 40 and copy.stats().put_bytes_raw == 40 * PAGE_BYTES
    assert [key for key, _ in pages(copy)] == [key for key, _ in carried]
    assert evict(copy, 12 * (PAGE_BYTES + 4096)) > 20
    left = found_numbers(copy, range(40))
    assert {3, 5, 39, 38} <= left and left == set(sorted(left - {3, 5})[-len(left) + 2 :]) | {3, 5}
    for store in (source, copy):
        store.check()
        store.close()


def test_values_that_do_not_verify_are_not_taken(tmp_path: Path) -> None:
    """A value that was changed, is under another key or of another identity is refused; the others are stored."""
    ours, theirs = open_store(tmp_path / "a"), open_store(tmp_path / "b", identity={"model": "theirs"})
    put_numbers(ours, range(4))
    put_numbers(theirs, [9])
    (good, one, two, three), (foreign,) = list(pages(ours)), list(pages(theirs))
    ours.delete([key_of(n) for n in range(4)])
    changed = (one[0], one[1][:-1] + bytes([one[1][-1] ^ 1]))
    moved = (two[0], three[1])
    assert put_values(ours, [good, changed, moved, foreign]) == [True, False, False, False]
    assert put_values(ours, []) == []
    assert ours.stats().entries == 1
    ours.check()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("to_bytes", [0, 1 << 20])
def test_evict_shrinks_the_file(tmp_path: Path, to_bytes: int) -> None:
    """Shrinking drops the oldest pages, gives their space back and leaves a valid store of at most that size."""
    store: LmdbPageStore = open_store(tmp_path)
    for first in range(0, 200, 10):
        put_numbers(store, range(first, first + 10))
    with pytest.raises(StoreError, match="to_bytes=-1"):
        evict(store, -1)
    gone = evict(store, to_bytes)
    stats = store.stats()
    assert gone == 200 - stats.entries == stats.evicted and (stats.entries > 40 if to_bytes else stats.entries == 0)
    assert stats.file_bytes <= max(to_bytes, 64 << 10)
    left = found_numbers(store, range(200))
    assert len(left) == stats.entries and all(n >= 130 for n in left)
    assert store.put([(key_of(500), page_of(500))]) == [True]
    store.check()
    store.close()
