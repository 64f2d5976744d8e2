"""A disk that fails: the store stops writing and resumes on request, continues to read, and the process survives."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

import hicache.storage.store_files
from hicache.storage import StoreCorrupt, StoreError, verify
from hicache.storage.index import Index
from hicache.storage.slot_file import SlotFile, SlotRead
from hicache.storage.store_files import read_record
from storage_pages import (
    PAGE_BYTES,
    blocks_bytes,
    budget_of,
    found_numbers,
    key_of,
    open_store,
    put_numbers,
    slots_path,
)

NUM_PAGES = 20


@pytest.fixture(params=["a full disk", "a limit of file sizes"])
def short(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Callable[[], object]]]:
    """A folder with less space than the store's budget, and a function that frees space."""
    if request.param == "a full disk":
        disk = request.getfixturevalue("small_disk")
        (disk / "ballast").write_bytes(bytes(4 << 20))
        yield disk / "store", (disk / "ballast").unlink
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    yield tmp_path / "store", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_space_a_store_is_read_only(short: tuple[Path, Callable[[], object]]) -> None:
    """If the system refuses a write, the store becomes read-only: nothing is written, and reopening fails. Reads and
    deletes still work, also after closing and opening it. When there is space, reopening succeeds, and no page was
    lost.
    """
    path, make_space = short
    store, stored = open_store(path), list[int]()
    assert store.reopen()
    while put_numbers(store, [len(stored)]) == [True]:
        stored.append(len(stored))
    assert store.stats().read_only and store.stats().write_errors == 1 and 50 < len(stored) < 300
    for _ in range(2):
        assert put_numbers(store, [0, 5000]) == [False, False]
        assert store.compact() == 0
        assert not store.reopen() and store.stats().read_only
        assert found_numbers(store, range(len(stored) + 5)) == set(stored)
    assert store.delete([key_of(stored.pop(0))]) == 1 and store.stats().write_errors == 3
    store.check()
    store.close()
    store = open_store(path)
    assert found_numbers(store, range(len(stored) + 5)) == set(stored) and not store.stats().read_only
    assert not all(put_numbers(store, range(5000, 5005))) and store.stats().read_only
    make_space()
    assert store.reopen() and not store.stats().read_only
    assert store.delete([key_of(stored[0])]) == 1
    assert put_numbers(store, range(7000, 7010)) == [True] * 10
    requested = {*stored[1:], *range(7000, 7010)}
    assert found_numbers(store, [*stored, *range(7000, 7020)]) == requested
    store.check()
    store.close()
    with contextlib.closing(open_store(path)) as store:
        assert found_numbers(store, [*stored, *range(7000, 7020)]) == requested
        store.check()


def test_space_comes_back_on_a_full_disk(small_disk: Path) -> None:
    """On a full disk new pages take the space of deleted ones, compacting frees the rest, and all other pages stay."""
    path = small_disk / "store"
    with contextlib.closing(open_store(path)) as store:
        put_numbers(store, range(300))
        free = os.statvfs(small_disk)
        (small_disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_bsize - (64 << 10)))
        before_bytes = blocks_bytes(path)
        assert store.delete([key_of(n) for n in range(0, 300, 3)]) == 100
        assert put_numbers(store, range(300, 350)) == [True] * 50
        assert store.compact() >= 45 * PAGE_BYTES and blocks_bytes(path) <= before_bytes - 45 * PAGE_BYTES
        assert found_numbers(store, range(350)) == {n for n in range(350) if n % 3 or n >= 300}
        store.check()


def test_a_full_disk_takes_a_smaller_budget(small_disk: Path) -> None:
    """A store that fills its disk is opened with a smaller budget. The store evicts pages, and records its settings in
    the freed space. If the settings cannot be recorded, the store still opens."""
    path = small_disk / "store"
    with contextlib.closing(open_store(path)) as store:
        put_numbers(store, range(300))
    with pytest.raises(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    for settings in ({"budget_bytes": 2 << 20}, {"budget_bytes": 2 << 20, "level": 3}):
        with contextlib.closing(open_store(path, **settings)) as store:
            assert store.stats().file_bytes <= 2 << 20 and 0 in found_numbers(store, range(300))
            store.check()
        assert (read_record(path).budget_bytes, read_record(path).level) == (2 << 20, 1)
        (path / "store.json.new").mkdir(exist_ok=True)


def test_opening_a_store_on_a_full_disk(small_disk: Path) -> None:
    """However little space is left for a new store, opening it succeeds or raises an error about space. The error never
    says that the existing files are no store."""
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
        except StoreError:
            outcomes.add("refused")
        shutil.rmtree(store, ignore_errors=True)
        ballast.unlink()
    assert outcomes == {"opened", "refused"}


def descriptors_of(file: Path) -> list[int]:
    """The descriptors of a file that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.path.samefile(entry, file):
                found.append(int(entry.name))
    return found


def index_in_memory() -> Path:
    """The file of the index of the only open store."""
    return next(file for file in Path("/proc/self/fd").iterdir() if "hicache-index" in os.path.realpath(file))


@contextlib.contextmanager
def opened_otherwise(file: Path, flags: int) -> Iterator[None]:
    """Within this context, the open descriptors of a file refer to the file opened with `flags`."""
    kept = {descriptor: os.dup(descriptor) for descriptor in descriptors_of(file)}
    assert kept
    other = os.open(file, flags)
    for descriptor in kept:
        os.dup2(other, descriptor)
    os.close(other)
    yield
    for descriptor, copy in kept.items():
        os.dup2(copy, descriptor)
        os.close(copy)


@pytest.mark.parametrize("what", ["slots", "index", "what the binding cannot name", "holes"])
def test_failed_writes(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a slot or the index cannot be written, or the space of a slot cannot be freed, the store becomes read-only,
    and its counts of slots stay right. Reopening the store, if necessary with a rebuilt index, loses no page."""

    def fail(*_: object) -> None:
        raise SystemError("error return without exception set")  # a failure that lmdb's binding cannot name

    def fail_to_punch(self: SlotFile, slots: Iterable[int]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    page_bytes = 64 << 10
    store = open_store(tmp_path, page_bytes=page_bytes, budget_bytes=budget_of(8, page_bytes))
    for number in range(100):  # short pages, many of which are evicted for a long one
        assert put_numbers(store, [number], page_bytes, "flat") == [True]
    assert put_numbers(store, [100], page_bytes) == [True]
    held = found_numbers(store, range(100), page_bytes, "flat")
    assert found_numbers(store, [100], page_bytes) == {100}
    slots = tmp_path / f"pages-{page_bytes}-{page_bytes + 4096}.dat"
    file = slots if what == "slots" else index_in_memory()
    with monkeypatch.context() as patched, contextlib.ExitStack() as stack:
        if what in ("slots", "index"):
            stack.enter_context(opened_otherwise(file, os.O_RDONLY))
        elif what == "holes":
            patched.setattr(SlotFile, "punch", fail_to_punch)
        else:
            patched.setattr(Index, "changes", fail)
        assert put_numbers(store, [200], page_bytes) == put_numbers(store, [201], page_bytes) == [False]
        assert store.stats().read_only and store.stats().write_errors == 1
        if what == "slots":
            assert not store.reopen()
    if what != "index":
        store.check()
    assert store.reopen() and put_numbers(store, [200], page_bytes) == [True]
    kept = found_numbers(store, range(100), page_bytes, "flat")
    assert kept and kept <= held and found_numbers(store, [100, 200], page_bytes) == {100, 200}
    store.check()
    store.close()


@pytest.mark.parametrize("durability", ["relaxed", "commit"])
def test_a_failed_sync(durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With durability "commit" a page is not stored if its sync fails. With "relaxed" a page whose sync fails counts as
    stored, but the next page is not stored."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with contextlib.closing(open_store(tmp_path, durability=durability)) as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fail)
            assert [put_numbers(store, [n]) for n in range(2)] == [[durability == "relaxed"], [False]]
        assert store.reopen() and put_numbers(store, range(3)) == [True] * 3
        store.check()


def test_an_index_that_was_lost_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the last change of the index failed, the next open rebuilds it from the slots, with every stored page."""

    def fail(*_: object) -> None:
        raise lmdb.Error("no page")

    with contextlib.closing(open_store(tmp_path)) as store:
        put_numbers(store, range(8))
        monkeypatch.setattr(Index, "changes", fail)
        assert put_numbers(store, [8]) == [False]
    monkeypatch.undo()
    with contextlib.closing(open_store(tmp_path)) as store:
        assert store.rebuilt_pages is not None and found_numbers(store, range(8)) == set(range(8))
        store.check()


def test_a_lookup_that_the_binding_cannot_name_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmdb's binding raises SystemError for failures that it cannot name. The lookup counts as a failed read."""

    def fail(*_: object) -> None:
        raise SystemError("error return without exception set")

    with contextlib.closing(open_store(tmp_path)) as store:
        put_numbers(store, [0])
        with monkeypatch.context() as patched:
            patched.setattr(Index, "locate", fail)
            assert found_numbers(store, [0]) == set() and store.stats().read_errors == 1
        assert found_numbers(store, [0]) == {0}


def test_one_bad_sector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that cannot be read is one miss. The other pages of the call are served, and check() names the page."""
    store, read = open_store(tmp_path), SlotFile.read
    put_numbers(store, range(8))

    def fail_there(self: SlotFile, run: Sequence[SlotRead]) -> list[memoryview | None]:
        if any(block is not None and block.key == key_of(3) for block in (self.read_block(one.slot) for one in run)):
            raise OSError(errno.EIO, "Input/output error")
        return read(self, run)

    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "read", fail_there)
        assert found_numbers(store, range(8)) == set(range(8)) - {3} and store.contains([key_of(3)]) == [True]
    assert found_numbers(store, range(8)) == set(range(8)), "a page was dropped that can be read again"
    monkeypatch.setattr(SlotFile, "read", fail_there)
    assert found_numbers(store, range(8)) == set(range(8)) - {3}
    stats = store.stats()
    assert (stats.read_errors, stats.corrupt, stats.misses, stats.read_only) == (2, 0, 2, False)
    with pytest.raises(StoreCorrupt) as caught:
        store.check()
    assert len(caught.value.violations) == 1 and key_of(3).hex() in caught.value.violations[0]
    assert [fault.action for fault in verify(store, repair=True).faults] == ["dropped"]
    monkeypatch.undo()
    assert found_numbers(store, range(8)) == set(range(8)) - {3}
    store.check()
    store.close()


def test_file_cut_short_while_open(tmp_path: Path) -> None:
    """If the slots are cut short while a store is open, pages in the lost part are misses, and all others are served.
    The process survives, and the store opens again."""
    settings: dict[str, Any] = {"budget_bytes": 64 << 20}
    with contextlib.closing(open_store(tmp_path, **settings)) as store:
        put_numbers(store, range(NUM_PAGES))
    with contextlib.closing(open_store(tmp_path, **settings)) as store:
        os.truncate(slots_path(tmp_path), 30_000)
        assert len(found_numbers(store, range(NUM_PAGES))) == 1
        stats = store.stats()
        assert stats.corrupt == NUM_PAGES - 1
        assert stats.read_errors == 0
        assert put_numbers(store, [9000]) == [True]
    open_store(tmp_path, **settings).close()


def test_an_index_that_could_not_be_rebuilt_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fails while the index is rebuilt, pages are misses until the store is opened again. No page is
    lost."""
    store = open_store(tmp_path / "store")
    put_numbers(store, range(40))

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch, store.writing() as writer:
        patch.setattr(hicache.storage.store_files, "_rebuild", failing)
        writer.rebuild()
    assert store.stats().read_only and not found_numbers(store, range(40))
    store.close()
    with contextlib.closing(open_store(tmp_path / "store")) as store:
        assert store.rebuilt_pages == 40 and found_numbers(store, range(40)) == set(range(40))
        store.check()
