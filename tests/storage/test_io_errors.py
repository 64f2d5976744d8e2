"""A disk that fails: writing stops and starts again on request, reading goes on, and the process lives.

Run as a script, this file is the process whose data file is cut short under it.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.storage import LmdbPageReader, LmdbPageStore, StoreCorrupt, StoreError, verify
from hicache.storage.value_file import ValueLocation
from hicache.storage.write_transaction import WriteTransaction
from storage_pages import (
    LAYOUTS,
    PAGE_BYTES,
    SLOTS,
    Layout,
    both_layouts,
    found_numbers,
    key_of,
    open_store,
    put_numbers,
    slots_path,
)

NUM_PAGES = 64


def fill(store: LmdbPageStore) -> list[int]:
    """Put pages until one is refused; the numbers of those that were not."""
    stored: list[int] = []
    while put_numbers(store, [len(stored)]) == [True]:
        stored.append(len(stored))
        assert len(stored) < 3000
    return stored


@both_layouts
def test_revival_on_a_full_disk(small_disk: Path, layout: Layout) -> None:
    """On a full disk writing stops and reopening fails; when there is space again it succeeds, and nothing was lost."""
    (small_disk / "ballast").write_bytes(bytes(4 << 20))
    store = open_store(small_disk / "store", **layout)
    assert store.reopen()
    stored = fill(store)
    assert store.stats().read_only and len(stored) > 50
    for _ in range(3):
        assert not store.reopen() and store.stats().read_only
        assert found_numbers(store, range(len(stored) + 5)) == set(stored)
    (small_disk / "ballast").unlink()
    assert store.reopen() and not store.stats().read_only
    assert put_numbers(store, range(5000, 5010)) == [True] * 10
    assert found_numbers(store, range(6000)) == {*stored, *range(5000, 5010)}
    store.check()
    store.close()
    store = open_store(small_disk / "store", **layout)
    assert found_numbers(store, range(6000)) == {*stored, *range(5000, 5010)}
    store.check()
    store.close()


@both_layouts
def test_opening_without_room(small_disk: Path, layout: Layout) -> None:
    """However little space there is for a new store, opening it succeeds or says that there is none; never that what is
    there is no store."""
    outcomes = set()
    for left_bytes in range(0, 200 << 10, 8 << 10):
        ballast, store = small_disk / "ballast", small_disk / f"store{left_bytes}"
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        ballast.write_bytes(bytes(free - left_bytes))
        try:
            open_store(store, **layout).close()
            outcomes.add("opened")
        except StoreCorrupt:
            raise
        except StoreError as error:
            outcomes.add("room" if "room" in str(error) else str(error).replace(str(store), "")[:60])
        shutil.rmtree(store, ignore_errors=True)
        ballast.unlink()
    assert "opened" in outcomes and len(outcomes) > 1, outcomes


@both_layouts
def test_revival_after_a_limit(tmp_path: Path, layout: Layout) -> None:
    """Reviving stores a whole value, so it notices a limit that small writes do not meet."""
    store = open_store(tmp_path, **layout)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        stored = fill(store)
        assert not store.reopen() and store.delete([key_of(0)]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.reopen()
    assert store.delete([key_of(0)]) == 1
    assert put_numbers(store, [7000]) == [True]
    assert found_numbers(store, [*stored, 7000]) == {*stored[1:], 7000}
    store.check()
    store.close()


def descriptors_of(data: Path) -> dict[int, int]:
    """This process's open descriptors of a file, with their flags."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry) == str(data):
                text = Path(f"/proc/self/fdinfo/{entry.name}").read_text()
                found[int(entry.name)] = int(text.split("flags:")[1].split()[0], 8)
        except OSError:
            continue
    return found


@both_layouts
def test_failed_write_of_the_meta_page(tmp_path: Path, layout: Layout) -> None:
    """After a failed write of its meta page LMDB refuses even to read; the store is opened again, read, and
    writable."""
    store = open_store(tmp_path, durability="commit", **layout)
    assert put_numbers(store, range(8)) == [True] * 8
    heads = [fd for fd, flags in descriptors_of(tmp_path / "data.mdb").items() if flags & os.O_DSYNC]
    assert len(heads) == 1, "lmdb writes its head through a descriptor of its own in this mode"
    unwritable = os.open(tmp_path / "data.mdb", os.O_RDONLY)
    os.dup2(unwritable, heads[0])
    os.close(unwritable)
    assert put_numbers(store, [10]) == [False]
    assert store.stats().read_only and store.stats().write_errors == 1
    assert found_numbers(store, range(12)) == set(range(8)) and store.stats().read_errors == 0
    assert put_numbers(store, [10]) == [False]
    assert store.reopen()
    assert put_numbers(store, [10, 11]) == [True] * 2
    assert found_numbers(store, range(12)) == {*range(8), 10, 11}
    store.check()
    store.close()


def test_failed_reads_are_misses(tmp_path: Path) -> None:
    """A read that the disk refuses is a counted miss, no reason to drop the page: later it is served again."""
    store = open_store(tmp_path, **LAYOUTS["tables"])
    put_numbers(store, range(20))
    data = tmp_path / "data.mdb"
    kept = exchange(list(descriptors_of(data)), data, os.O_WRONLY)
    assert found_numbers(store, range(20)) == set()
    stats = store.stats()
    assert stats.read_errors > 0 and stats.misses == 20 and stats.corrupt == 0
    assert store.contains([key_of(0)]) == [False], "of a file that cannot be read, lmdb is to touch nothing"
    restore(kept)
    assert found_numbers(store, range(20)) == set(range(20))
    store.check()
    store.close()


def exchange(descriptors: Sequence[int], file: Path, flags: int) -> dict[int, int]:
    """Have descriptors lead to `file` opened with other flags; what restores them: a copy of each."""
    kept = {descriptor: os.dup(descriptor) for descriptor in descriptors}
    other = os.open(file, flags)
    for descriptor in descriptors:
        os.dup2(other, descriptor)
    os.close(other)
    return kept


def restore(kept: dict[int, int]) -> None:
    for descriptor, copy in kept.items():
        os.dup2(copy, descriptor)
        os.close(copy)


def test_failed_reads_and_writes_of_slots(tmp_path: Path) -> None:
    """Slots that cannot be read are counted misses, no reason to drop their pages; a slot that cannot be written turns
    the store read-only, which reads on. Both pass: the pages are served, and the store becomes writable again."""
    store = open_store(tmp_path, **SLOTS)
    data = slots_path(tmp_path)
    assert put_numbers(store, range(20)) == [True] * 20
    kept = exchange(list(descriptors_of(data)), data, os.O_WRONLY)
    assert len(kept) in (1, 2) and found_numbers(store, range(20)) == set()
    stats = store.stats()
    assert (stats.read_errors, stats.misses, stats.corrupt, stats.read_only) == (20, 20, 0, False)
    assert store.contains([key_of(n) for n in range(21)]) == [True] * 20 + [False]
    restore(kept)
    kept = exchange(list(descriptors_of(data)), data, os.O_RDONLY)
    assert put_numbers(store, [30]) == [False] and put_numbers(store, [31]) == [False]
    assert store.stats().read_only and store.stats().write_errors == 1
    assert found_numbers(store, range(40)) == set(range(20)) and store.stats().read_errors == 20
    restore(kept)
    assert store.reopen() and put_numbers(store, [30]) == [True]
    assert found_numbers(store, range(40)) == {*range(20), 30}
    store.check()
    store.close()


def test_pages_that_came_and_went_in_one_commit(tmp_path: Path) -> None:
    """lmdb does not write pages that one commit took and freed again, and counts them: the file is made that long, is
    not mistaken for one that was cut, and another process can open it.
    """
    store = open_store(tmp_path)
    put_numbers(store, range(30))
    for number in range(4, 30):  # leaves room for everything that the commit writes but the value itself
        store.delete([key_of(number)])
    before = store.stats().file_bytes

    def come_and_go(transaction: WriteTransaction) -> bool:
        transaction.touch(key_of(0))  # copies B-tree pages first, so that the value is at the end of the file
        transaction.save()
        transaction.put(key_of(50), bytes(60 * PAGE_BYTES))
        return transaction.delete(key_of(50))

    assert store.parts.writer.change(come_and_go)
    assert store.stats().file_bytes > before + 50 * PAGE_BYTES
    assert found_numbers(store, range(5)) == {0, 1, 2, 3} and store.stats().read_errors == 0
    code = "import sys; from hicache.storage import describe; print(describe(sys.argv[1]).entries)"
    seen = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert seen.stdout == "4\n"
    store.close()


def spoil_one_value(store: LmdbPageStore, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the value of `key` cannot be read from its file."""
    tables = store.parts.env.tables
    with tables.env.begin(buffers=True) as txn:
        [location] = tables.locate(txn, [key])
    assert location is not None
    file = tables.values if tables.slots is None else tables.slots.file_of(location)
    read = file.read

    def fail_there(at: ValueLocation | int, *rest: Any) -> Any:
        if at in (location, location.offset):
            raise OSError(errno.EIO, "Input/output error")
        return read(at, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(file, "read", fail_there)


@both_layouts
def test_one_bad_sector(tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value that cannot be read is one miss; the others of the same call are served, and check() names it."""
    store = open_store(tmp_path, **layout)
    put_numbers(store, range(8))
    spoil_one_value(store, key_of(3), monkeypatch)
    for _ in range(2):
        assert found_numbers(store, range(8)) == set(range(8)) - {3}
    stats = store.stats()
    assert (stats.read_errors, stats.corrupt, stats.misses) == (2, 0, 2)
    with pytest.raises(StoreCorrupt, match=r"cannot be read: .*Input/output error") as caught:
        store.check()
    assert len(caught.value.violations) == 1
    assert [fault.action for fault in verify(store, repair=True).faults] == ["dropped"]
    monkeypatch.undo()
    assert found_numbers(store, range(8)) == set(range(8)) - {3}
    store.check()
    store.close()


@pytest.mark.parametrize("kind", ["store", "reader"])
@pytest.mark.parametrize(
    ("layout", "left_bytes"),
    [
        *(("tables", left_bytes) for left_bytes in (0, 4096, 100_000, 3 * NUM_PAGES * PAGE_BYTES // 4)),
        *(("slots", left_bytes) for left_bytes in (0, 4096, 20_000)),
    ],
)
def test_file_cut_short_while_open(tmp_path: Path, kind: str, layout: str, left_bytes: int) -> None:
    """When the data file is cut short under an open store, reads are misses and errors, writes are refused, and the
    process lives. Reopening is refused, except where nothing is left: then the store starts empty.
    """
    store = open_store(tmp_path, **LAYOUTS[layout])
    put_numbers(store, range(NUM_PAGES))
    store.close()
    assert left_bytes < (tmp_path / "data.mdb").stat().st_size
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, kind, str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=Path(__file__).parent) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "open\n"
        os.truncate(tmp_path / "data.mdb", left_bytes)
        output, _ = child.communicate("go\n")
    assert child.returncode == 0, child.returncode
    writing = ["stored [False]", f"reopened {left_bytes == 0}"] if kind == "store" else []
    assert output.splitlines() == ["found 0", "errors True", *writing]


def be_cut(kind: str, path: str) -> None:
    store = open_store(path) if kind == "store" else None
    source = store or LmdbPageReader(path)
    assert found_numbers(source, [0]) == {0}
    print("open", flush=True)
    sys.stdin.readline()
    print("found", len(found_numbers(source, range(NUM_PAGES))))
    print("errors", source.stats().read_errors > 0)
    if store is not None:
        print("stored", put_numbers(store, [9000]))
        print("reopened", store.reopen())
    source.close()


if __name__ == "__main__":
    be_cut(sys.argv[1], sys.argv[2])
