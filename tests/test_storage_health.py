"""A medium that fails: writing stops and starts again on request, reading goes on, and the process lives.

Run as a script, this file is the process whose data file is cut short under it.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from storage_pages import PAGE_BYTES, forget_cached, found_numbers, key_of, open_store, put_numbers

from hicache.storage import LmdbPageReader, LmdbPageStore, StoreCorrupt, verify
from hicache.storage.direct_read import LEAST_BYTES
from hicache.storage.lmdb_meta import TreeRoot
from hicache.storage.lmdb_tree import Place, ValueFile
from hicache.storage.lru import Ledger

NUM_PAGES = 64


def fill(store: LmdbPageStore) -> list[int]:
    """Put pages until one is refused; the numbers of those that were not."""
    stored: list[int] = []
    while put_numbers(store, [len(stored)]) == [True]:
        stored.append(len(stored))
        assert len(stored) < 3000
    return stored


def test_revival_on_a_full_disk(small_disk: Path) -> None:
    """On a full disk writing stops and reviving fails; when there is room again it succeeds, and nothing was lost."""
    (small_disk / "ballast").write_bytes(bytes(4 << 20))
    store = open_store(small_disk / "store")
    assert store.revive()
    stored = fill(store)
    assert store.stats().read_only and len(stored) > 50
    for _ in range(3):
        assert not store.revive() and store.stats().read_only
        assert found_numbers(store, range(len(stored) + 5)) == set(stored)
    (small_disk / "ballast").unlink()
    assert store.revive() and not store.stats().read_only
    assert put_numbers(store, range(5000, 5010)) == [True] * 10
    assert found_numbers(store, range(6000)) == {*stored, *range(5000, 5010)}
    store.check()
    store.close()
    store = open_store(small_disk / "store")
    assert found_numbers(store, range(6000)) == {*stored, *range(5000, 5010)}
    store.check()
    store.close()


def test_revival_after_a_limit(tmp_path: Path) -> None:
    """Reviving stores a whole value, so it notices a limit that small writes do not meet."""
    store = open_store(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        stored = fill(store)
        assert not store.revive() and store.delete([key_of(0)]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.revive()
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


def test_failed_write_of_the_head(tmp_path: Path) -> None:
    """After a failed write of its head lmdb refuses even to read; the store is opened anew and read, and revives."""
    store = open_store(tmp_path, durability="commit")
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
    assert store.revive()
    assert put_numbers(store, [10, 11]) == [True] * 2
    assert found_numbers(store, range(12)) == {*range(8), 10, 11}
    store.check()
    store.close()


@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, LEAST_BYTES])
def test_failed_reads_are_misses(tmp_path: Path, page_bytes: int) -> None:
    """A read that the medium refuses is a counted miss, no reason to drop the page: later it is served again. Long
    values, which the kernel does not have in memory, are read through another descriptor."""
    store = open_store(tmp_path, page_bytes=page_bytes)
    put_numbers(store, range(20), page_bytes)
    reading = {fd: flags for fd, flags in descriptors_of(tmp_path / "data.mdb").items() if flags & os.O_ACCMODE == 0}
    direct = page_bytes == LEAST_BYTES and any(flags & os.O_DIRECT for flags in reading.values())
    (values,) = (fd for fd, flags in reading.items() if bool(flags & os.O_DIRECT) == direct)
    if direct:
        forget_cached(tmp_path / "data.mdb")
    readable, unreadable = os.dup(values), os.open(tmp_path / "data.mdb", os.O_WRONLY)
    os.dup2(unreadable, values)
    served = len(found_numbers(store, range(20), page_bytes))  # what the kernel would not forget
    assert served < (20 if direct else 1)
    stats = store.stats()
    assert stats.read_errors > 0 and stats.misses == 20 - served and stats.corrupt == 0
    assert store.contains([key_of(0)]) == [True]
    os.dup2(readable, values)
    os.close(readable)
    os.close(unreadable)
    assert found_numbers(store, range(20), page_bytes) == set(range(20))
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

    def come_and_go(ledger: Ledger) -> bool:
        ledger.touch(key_of(0))  # copies the pages of the trees first, so that the value's are the last of the file
        ledger.save()
        ledger.add(key_of(50), bytes(60 * PAGE_BYTES))
        return ledger.remove(key_of(50))

    assert store.parts.writer.change(come_and_go)
    assert store.stats().file_bytes > before + 50 * PAGE_BYTES
    assert found_numbers(store, range(5)) == {0, 1, 2, 3} and store.stats().read_errors == 0
    code = "import sys; from hicache.storage import describe; print(describe(sys.argv[1]).entries)"
    seen = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert seen.stdout == "4\n"
    store.close()


class BadSector(ValueFile):
    """A value file of which the first value of each read transaction cannot be read."""

    def places(self, root: TreeRoot, keys: Sequence[bytes]) -> list[Place | None]:
        found = super().places(root, keys)
        self.bad = found[0]
        return found

    def read(self, place: Place, target: memoryview) -> memoryview:
        if place == self.bad:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(place, target)


def test_one_bad_sector(tmp_path: Path) -> None:
    """One value that cannot be read is one miss; the others of the same call are served, and check() names it."""
    store = open_store(tmp_path)
    put_numbers(store, range(8))
    whole = store._env.tables
    bad = BadSector(tmp_path / "data.mdb", whole.psize)
    store._env._tables = dataclasses.replace(whole, values=bad)
    assert found_numbers(store, range(8)) == set(range(1, 8))
    stats = store.stats()
    assert (stats.read_errors, stats.corrupt, stats.misses) == (1, 0, 1)
    with pytest.raises(StoreCorrupt, match=r"cannot be read: .*Input/output error") as caught:
        store.check()
    assert len(caught.value.violations) == 1
    assert [fault.action for fault in verify(store, repair=True).faults] == ["dropped"]
    bad.close()
    store._env._tables = whole
    assert len(found_numbers(store, range(8))) == 7
    store.check()
    store.close()


@pytest.mark.parametrize("kind", ["store", "reader"])
@pytest.mark.parametrize("left_bytes", [0, 4096, 100_000, 3 * NUM_PAGES * PAGE_BYTES // 4])
def test_file_cut_short_while_open(tmp_path: Path, kind: str, left_bytes: int) -> None:
    """When the data file is cut short under an open store, reads are misses and errors, writes are refused, and the
    process lives. Reviving is refused, except where nothing is left: then the store begins anew.
    """
    store = open_store(tmp_path)
    put_numbers(store, range(NUM_PAGES))
    store.close()
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, kind, str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=Path(__file__).parent) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "open\n"
        os.truncate(tmp_path / "data.mdb", left_bytes)
        output, _ = child.communicate("go\n")
    assert child.returncode == 0, child.returncode
    writing = ["stored [False]", f"revived {left_bytes == 0}"] if kind == "store" else []
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
        print("revived", store.revive())
    source.close()


if __name__ == "__main__":
    be_cut(sys.argv[1], sys.argv[2])
