"""A disk that fails: writing stops and starts again on request, reading goes on, and the process lives.

Run as a script, this file is the process whose data file is cut short under it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.storage import LmdbPageReader, LmdbPageStore, StoreCorrupt, StoreError, verify
from hicache.storage.slot_file import SlotFile
from storage_pages import (
    budget_of,
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


def test_revival_on_a_full_disk(small_disk: Path) -> None:
    """On a full disk writing stops and reopening fails; when there is space again it succeeds, and nothing was lost."""
    (small_disk / "ballast").write_bytes(bytes(4 << 20))
    store = open_store(small_disk / "store")
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
    store = open_store(small_disk / "store")
    assert found_numbers(store, range(6000)) == {*stored, *range(5000, 5010)}
    store.check()
    store.close()


def test_opening_without_room(small_disk: Path) -> None:
    """However little space there is for a new store, opening it succeeds or says that there is none; never that what is
    there is no store."""
    outcomes = set()
    for left_bytes in range(0, 200 << 10, 8 << 10):
        ballast, store = small_disk / "ballast", small_disk / f"store{left_bytes}"
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        ballast.write_bytes(bytes(free - left_bytes))
        try:
            open_store(store).close()
            outcomes.add("opened")
        except StoreCorrupt:
            raise
        except StoreError as error:
            outcomes.add("room" if "room" in str(error) else str(error).replace(str(store), "")[:60])
        shutil.rmtree(store, ignore_errors=True)
        ballast.unlink()
    assert "opened" in outcomes and len(outcomes) > 1, outcomes


def test_revival_after_a_limit(tmp_path: Path) -> None:
    """Reviving stores a whole value, so it notices a limit that small writes do not meet."""
    store = open_store(tmp_path)
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
    store = open_store(tmp_path)
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


def test_failed_writes_of_the_index(tmp_path: Path) -> None:
    """When the index cannot be written, the store is read-only and its pages are served; reopening builds the index
    anew from the slots, and nothing that was acknowledged is lost."""
    store = open_store(tmp_path)
    assert put_numbers(store, range(8)) == [True] * 8
    data = (tmp_path / "live").readlink() / "data.mdb"
    kept = exchange(list(descriptors_of(data)), data, os.O_RDONLY)
    assert put_numbers(store, [10]) == [False] and put_numbers(store, [11]) == [False]
    assert store.stats().read_only and store.stats().write_errors == 1
    assert found_numbers(store, range(12)) == set(range(8)) or store.stats().read_errors > 0
    restore(kept)
    assert store.reopen()
    assert put_numbers(store, [10, 11]) == [True] * 2
    assert found_numbers(store, range(12)) == {*range(8), 10, 11}
    store.check()
    store.close()


def spoil_one_page(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the page of `key` cannot be read from its file."""
    read = SlotFile.read

    def fail_there(self: SlotFile, slot: int, payload_bytes: int, block: memoryview, payload: memoryview) -> bool:
        found = self.read_block(slot)
        if found is not None and found.key == key:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, slot, payload_bytes, block, payload)

    monkeypatch.setattr(SlotFile, "read", fail_there)


def test_one_bad_sector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page that cannot be read is one miss; the others of the same call are served, and check() names it."""
    store = open_store(tmp_path)
    put_numbers(store, range(8))
    spoil_one_page(key_of(3), monkeypatch)
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


def test_a_hole_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that cannot free disk space fails, and the store counts its slots as before."""

    def fail(self: SlotFile, slot: int, start: int = 0) -> None:
        raise OSError(errno.EIO, "Input/output error")

    page_bytes = 64 << 10
    store = open_store(tmp_path, page_bytes=page_bytes, budget_bytes=budget_of(8, page_bytes))
    for number in range(100):  # short payloads, of which many go after a long one
        assert put_numbers(store, [number], page_bytes, "flat") == [True]
    assert put_numbers(store, [100], page_bytes) == [True]
    monkeypatch.setattr(SlotFile, "punch", fail)
    assert put_numbers(store, [200], page_bytes) == [False] and store.stats().read_only
    monkeypatch.undo()
    store.check()
    assert store.reopen() and put_numbers(store, [200], page_bytes) == [True]
    store.check()
    store.close()


@pytest.mark.parametrize(
    ("kind", "name"),
    [*itertools.product(("store", "reader"), ("pages-16320.dat", "store.json")), ("reader", "index.mdb")],
)
@pytest.mark.parametrize("left_bytes", [0, 4096, 30_000])
def test_file_cut_short_while_open(tmp_path: Path, kind: str, name: str, left_bytes: int) -> None:
    """When a file is cut short under an open store, what was in it is missed, all else served; the process lives."""
    store = open_store(tmp_path)
    put_numbers(store, range(NUM_PAGES))
    store.close()
    with subprocess.Popen(
        [sys.executable, __file__, kind, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "open\n"
        os.truncate(tmp_path / name, left_bytes)
        output, _ = child.communicate("go\n")
    assert child.returncode == 0, child.returncode
    num_left = left_bytes // 20480 if name.startswith("pages") else NUM_PAGES
    counted = [f"corrupt {NUM_PAGES - num_left}", "errors 0"]
    if (kind, name) == ("reader", "index.mdb"):  # another seal is another index, which a reader must not believe
        num_left, counted = 0, ["corrupt 0", "errors 1"]
    assert output.splitlines() == [f"found {num_left}", *counted, *(["stored [True]"] if kind == "store" else [])]
    with contextlib.closing(open_store(tmp_path)) if name != "store.json" else contextlib.nullcontext() as store:
        assert store is None or store.stats().entries <= NUM_PAGES + 1


def be_cut(kind: str, path: str) -> None:
    store = open_store(path) if kind == "store" else None
    source = store or LmdbPageReader(path)
    print("open", flush=True)
    sys.stdin.readline()
    print("found", len(found_numbers(source, range(NUM_PAGES))))
    stats = source.stats()
    print("corrupt", stats.corrupt)
    print("errors", stats.read_errors)
    if store is not None:
        print("stored", put_numbers(store, [9000]))
    source.close()


if __name__ == "__main__":
    be_cut(sys.argv[1], sys.argv[2])
