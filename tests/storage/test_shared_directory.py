"""Pages in a shared directory survive kills, other writers, a prune, wrong bytes, a full disk, and lost permissions."""

from __future__ import annotations

import errno
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import hicache.storage.dir_store
import hicache.storage.urls
from hicache.storage import PageStore, StoreError, StoreLocked, StoreUnavailable, open_store
from hicache.storage.conformance import FORMATS, IDENTITY, LARGE_BYTES, page
from hicache.storage.dir_store import DirPageStore
from hicache.storage.mounts import network_type
from hicache.storage.shared_pages import DirPages, SharedPage, shared_pages
from programs import Program
from waiting import eventually

PAGES = {b"%d" % n: page(n) for n in range(8)}
WRITER = """
import sys
from hicache.storage import open_store
from hicache.storage.conformance import FORMATS, IDENTITY, page
store = open_store(sys.argv[1], identity=IDENTITY, formats=FORMATS)
print("ready", flush=True)
for turn in range(1000):
    for n in range(int(sys.argv[2]), 400):
        store.put([(b"%d" % n, page(n))])
    store.delete([b"%d" % n for n in range(int(sys.argv[2]), 400)])
"""


def opened(folder: Path, options: str = "concurrency=2") -> PageStore:
    return open_store(f"dir://{folder}?{options}", identity=IDENTITY, formats=FORMATS)


def found_in(store: PageStore, pages: dict[bytes, np.ndarray] = PAGES) -> list[bytes]:
    """The keys whose pages the store returns, with equal bytes."""
    buffers = [np.empty_like(content) for content in pages.values()]
    hits = store.get_into(list(pages), buffers)
    assert all(not hit or np.array_equal(*both) for hit, *both in zip(hits, buffers, pages.values(), strict=True))
    return [key for key, hit in zip(pages, hits, strict=True) if hit]


def files_of(folder: Path) -> list[Path]:
    return sorted(Path(each.name) for each in DirPages(str(folder)).pages())


def test_killed_writers_leave_whole_pages(tmp_path: Path) -> None:
    """After kills of two writers of the same keys, each page is complete or absent, and the next writer adds the absent
    ones. An unpublished file is no page; a prune removes it when it is old."""
    url = f"dir://{tmp_path}?concurrency=1"
    for _ in range(3):
        with Program(WRITER, url, "0") as one, Program(WRITER, url, "0") as other:
            for writer in (one, other):
                assert writer.stdout is not None and writer.stdout.readline()
            eventually(lambda: len(files_of(tmp_path)) > 20)
            for writer in (one, other):
                writer.send_signal(signal.SIGKILL)
                writer.wait()
        written = {b"%d" % n: page(n) for n in range(400)}
        with closing(opened(tmp_path)) as store:
            present = [key for key, held in zip(written, store.contains(list(written)), strict=True) if held]
            assert found_in(store, written) == present and present and store.stats().corrupt == 0
    (left := files_of(tmp_path)[0].parent / ".00.node-1-0.new").write_bytes(b"half")
    os.utime(left, (0, 0))
    with closing(opened(tmp_path)) as store:
        assert all(store.put(list(written.items()))) and found_in(store, written) == list(written)
    assert DirPages(str(tmp_path)).prune(1 << 40).left == len(written) and not left.exists()


def test_the_first_writer_of_a_key_wins(tmp_path: Path) -> None:
    """Several stores put different pages under one key at the same time. All puts succeed, and one of the pages is
    there."""
    contents = [page(2 * n) for n in range(8)]
    with closing(opened(tmp_path)) as first, closing(opened(tmp_path)) as second, ThreadPoolExecutor(8) as threads:
        for turn in range(20):
            key = b"key %d" % turn
            stores = [first, second] * 4
            puts = [threads.submit(store.put, [(key, one)]) for store, one in zip(stores, contents, strict=True)]
            assert all(put.result() == [True] for put in puts)
            buffer = np.empty_like(contents[0])
            assert first.get_into([key], [buffer]) == [True]
            assert any(np.array_equal(buffer, one) for one in contents)
        assert first.stats().puts + second.stats().puts == 20 == len(files_of(tmp_path))


DAMAGE = {
    "a byte of the key": lambda raw: raw[:70] + b"?" + raw[71:],
    "a byte of the page": lambda raw: raw[:4500] + bytes([raw[4500] ^ 1]) + raw[4501:],
    "cut off": lambda raw: raw[:5000],
    "a part of the block": lambda raw: raw[:100],
    "longer than any page": lambda raw: raw + bytes(1 << 20),
    "empty": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_wrong_bytes_are_a_miss_and_go(tmp_path: Path, damage: str) -> None:
    """A damaged file is a miss, is counted, and is found by `verify`. A damaged file hides no other page, and its page
    can be stored again."""
    with closing(opened(tmp_path, "level=0")) as store:
        assert all(store.put(list(PAGES.items())))
        first, *others = PAGES
        (file,) = (Path(each.name) for each in DirPages(str(tmp_path)).pages() if each.key == first)
        file.write_bytes(DAMAGE[damage](file.read_bytes()))
        faults = [one.name for one in DirPages(str(tmp_path)).pages() if DirPages(str(tmp_path)).fault(one)]
        assert faults == [str(file)]
        assert store.get_value(first) is None and store.stats().corrupt == 1
        assert found_in(store) == others and store.stats().read_errors == 0
        assert store.contains([first]) == [False]
        assert all(store.put(list(PAGES.items()))) and found_in(store) == list(PAGES)


def test_a_file_of_another_page_is_a_miss(tmp_path: Path) -> None:
    """A valid file under the name of another key, or in the folder of another identity, is refused, also by
    `verify`."""
    with closing(opened(tmp_path)) as store:
        store.put([(b"a", page(0)), (b"b", page(0))])
        first, second = files_of(tmp_path)
        second.write_bytes(first.read_bytes())
        shared = DirPages(str(tmp_path))
        assert [each.name for each in shared.pages() if shared.fault(each)] == [str(second)]
        assert len(found_in(store, {b"a": page(0), b"b": page(0)})) == 1 and store.stats().corrupt == 1


def test_readers_with_a_concurrent_prune(tmp_path: Path) -> None:
    """While pages are pruned and put again, reads return right pages or miss, and nothing counts as damage or as an
    error."""
    with closing(opened(tmp_path)) as store, closing(opened(tmp_path)) as reader, ThreadPoolExecutor(2) as threads:
        is_done = False

        def read() -> int:
            num_hits = 0
            while not is_done:
                num_hits += len(found_in(reader))
            return num_hits

        reads = [threads.submit(read) for _ in range(2)]
        try:
            for turn in range(30):
                assert all(store.put(list(PAGES.items())))
                DirPages(str(tmp_path)).prune(0 if turn % 2 else 3 * LARGE_BYTES)
        finally:
            is_done = True
        assert all(one.result() >= 0 for one in reads)
        stats = reader.stats()
        assert (stats.corrupt, stats.read_errors, stats.write_errors) == (0, 0, 0)


def test_a_look_up_does_not_wait_for_reads(tmp_path: Path) -> None:
    """While all threads for reads are blocked by the file system, pages and leases are looked up."""
    with closing(opened(tmp_path, "concurrency=2")) as store, ThreadPoolExecutor(2) as threads:
        assert isinstance(store, DirPageStore) and all(store.put(list(PAGES.items())))
        pipes = [Path(each.name) for each in DirPages(str(tmp_path)).pages() if each.key in (b"0", b"1")]
        for pipe in pipes:
            pipe.unlink()
            os.mkfifo(pipe)  # opening it for reading blocks until it is opened for writing
        read = threads.submit(found_in, store)
        look_up = threads.submit(
            lambda: (store.contains(list(PAGES)), store.who(b"key"), store.begin(b"key", time.time() + 1e5))
        )
        try:
            eventually(look_up.done)
            assert look_up.result() == ([True] * len(PAGES), None, True) and not read.done()
        finally:
            writers = [os.open(pipe, os.O_WRONLY) for pipe in pipes]  # each waits until a thread reads the pipe
            assert read.result() == list(PAGES)[2:]
            for writer in writers:
                os.close(writer)


def test_a_prune_keeps_what_was_used_last(tmp_path: Path) -> None:
    """A prune removes pages down to the budget by the hour of their last use. Of pages with the same hour a prune
    removes the later pages of a prompt first. A read counts as a use, at most once an hour. Only one prune runs at a
    time."""
    keys = [b"%d" % n for n in range(6)]
    now_s = time.time()
    with closing(opened(tmp_path, "level=0")) as store:
        store.put([(key, page(1)) for key in keys])
        pages = {each.key: each for each in DirPages(str(tmp_path)).pages()}
        hour_s = now_s // 3600 * 3600
        for n, key in enumerate(keys):  # in order, pages of two prompts that were used ten hours apart
            used_s = hour_s - 20 * 3600 + n if n < 3 else hour_s - 10 * 3600 + n
            os.utime(pages[key].name, (used_s, used_s))
        os.utime(pages[keys[5]].name, (now_s - 1800, now_s - 1800))
        assert found_in(store, {keys[0]: page(1), keys[5]: page(1)}) == [keys[0], keys[5]]
        store.touch([keys[3]])
        store.sync()
        times = {each.key: each.used_s for each in DirPages(str(tmp_path)).pages()}
        assert times[keys[0]] >= now_s - 1 and times[keys[3]] >= now_s - 1 and times[keys[5]] < now_s - 1700
    num_bytes = pages[keys[0]].num_bytes
    for budget, left in ((5, {0, 1, 3, 4, 5}), (4, {0, 3, 4, 5}), (3, {0, 3, 5}), (0, set())):
        report = DirPages(str(tmp_path)).prune(budget * num_bytes)
        assert {each.key for each in DirPages(str(tmp_path)).pages()} == {keys[n] for n in left}
        assert (report.left, report.left_bytes) == (budget, budget * num_bytes)
    with DirPages(str(tmp_path)).pruning(), pytest.raises(StoreLocked, match="prune"):
        DirPages(str(tmp_path)).prune(0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_writes_costs_pages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Pages that cannot be written are not stored, and are counted. Other pages are read, and no file is left
    behind."""
    some = dict(list(PAGES.items())[:4])
    with closing(opened(tmp_path)) as store:
        assert all(store.put(list(some.items())))

        def refuse(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(hicache.storage.dir_store.os, "pwritev", refuse)
            assert store.put(list(PAGES.items())) == [True] * 4 + [False] * 4
            values = [(key, store.get_value(b"0") or b"") for key in (b"0", b"7")]
            assert store.put_values(values) == [True, False]
        assert store.stats().write_errors == 4 and store.stats().read_errors == 0 and found_in(store) == list(some)
        assert not list(tmp_path.rglob("*.new")) and store.reopen()
        assert all(store.put(list(PAGES.items()))) and found_in(store) == list(PAGES)


def test_a_folder_that_is_lost_is_counted(tmp_path: Path) -> None:
    """If the folder of the namespace vanishes under an open store, reads miss, writes fail, and the folder is not
    created again."""
    with closing(opened(tmp_path)) as store:
        assert all(store.put(list(PAGES.items())))
        (tmp_path / "hicache").rename(tmp_path / "away")
        assert found_in(store) == [] and not any(store.contains(list(PAGES))) and store.stats().read_errors == 0
        assert not any(store.put(list(PAGES.items()))) and store.stats().write_errors == len(PAGES)
        assert not (tmp_path / "hicache").exists()
        (tmp_path / "away").rename(tmp_path / "hicache")
        assert found_in(store) == list(PAGES)
    with pytest.raises(StoreUnavailable, match="does not exist"):
        opened(tmp_path / "absent")
    for url in ("dir://host/path", "dir:///", "dir://user@/path", f"dir://{tmp_path}?budget=1GiB"):
        with pytest.raises(StoreError):
            open_store(url, identity=IDENTITY, formats=FORMATS)
        with pytest.raises(StoreError):  # a command must not prune another directory than the named one
            shared_pages(url)


def test_a_directory_without_pages_is_pruned(tmp_path: Path) -> None:
    """A prune before the first start of a server removes nothing and creates nothing."""
    assert DirPages(str(tmp_path)).prune(0).removed == 0 and not list(tmp_path.iterdir())


def test_files_get_the_permissions_of_the_directory(tmp_path: Path) -> None:
    """A group of users can share a directory, because files get its permissions, also the lock of `prune`."""
    for mode in (0o700, 0o2770):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        with closing(opened(folder)) as store:
            assert all(store.put(list(PAGES.items())))
        assert DirPages(str(folder)).prune(1 << 40).left == len(PAGES)
        modes = {each.stat().st_mode & 0o7777 for each in folder.rglob("*") if each.is_file()}
        assert modes == {mode & 0o666}
        assert {each.stat().st_mode & 0o7777 for each in folder.rglob("*") if each.is_dir()} == {mode}


def test_a_file_system_without_links_or_direct_access_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without links or direct access, files are published by renaming, and read through the page cache
    of the kernel."""
    monkeypatch.setattr(os, "O_DIRECT", 0)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    with closing(opened(tmp_path)) as store:
        assert all(store.put(list(PAGES.items()))) and found_in(store) == list(PAGES)
        assert not list(tmp_path.rglob("*.new"))


def test_leases_expire_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many machines gets a lease. Another machine gets the lease after it has expired. If the store fails, no
    machine gets one."""
    now_s = time.time()
    monkeypatch.setattr(hicache.storage.dir_store.time, "time", lambda: now_s)
    stores = [DirPageStore(f"dir://{tmp_path}", identity=IDENTITY, formats=FORMATS, cipher=None) for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        for turn in range(20):
            begun = [threads.submit(store.begin, b"key", now_s + 10 + n) for n, store in enumerate(stores)]
            winners = [n for n, one in enumerate(begun) if one.result()]
            assert len(winners) == 1, turn
            assert all(store.who(b"key") == pytest.approx(now_s + 10 + winners[0], abs=1e-3) for store in stores)
            assert stores[0].who(b"other") is None and not stores[0].begin(b"key", now_s + 99)
            now_s += 20
            assert stores[0].who(b"key") is None
    assert stores[1].begin(b"other", now_s + 10) and stores[0].who(b"other")
    assert stores[0].stats().read_errors == stores[0].stats().write_errors == 0
    (tmp_path / "hicache").rename(tmp_path / "away")
    assert not stores[0].begin(b"key", now_s + 10) and stores[0].who(b"other") is None
    assert stores[0].stats().write_errors == 1
    (tmp_path / "away").rename(tmp_path / "hicache")
    for store in stores:
        store.close()
    with pytest.raises(StoreError):
        stores[0].begin(b"key", now_s)
    lease = next(tmp_path.glob("hicache/*/leases/*/*"))
    os.utime(lease, (0, 0))
    DirPages(str(tmp_path)).prune(0)
    assert not lease.exists()


@pytest.mark.parametrize("text", ["1e308", "inf", "nan", "", "?", "9" * 99])
def test_a_wrong_lease_costs_no_error(tmp_path: Path, text: str) -> None:
    """A file that has no end of a lease means that no machine has the lease. Reading it is no failure of the store."""
    store = DirPageStore(f"dir://{tmp_path}", identity=IDENTITY, formats=FORMATS, cipher=None)
    with closing(store):
        assert store.begin(b"key", time.time() + 1e5)
        (lease,) = tmp_path.glob("hicache/*/leases/*/*")
        lease.write_text(text)
        assert store.who(b"key") is None and not store.begin(b"key", time.time() + 1e5)
        assert store.stats().read_errors == store.stats().write_errors == 0


def test_a_prune_ends_no_lease(tmp_path: Path) -> None:
    """A lease is found through the earlier leases of its key. A prune keeps them, however old, until the last lease is
    old too."""
    store = DirPageStore(f"dir://{tmp_path}", identity=IDENTITY, formats=FORMATS, cipher=None)
    with closing(store):
        for until_s in (10.0, 20.0, time.time() + 1e5):
            assert store.begin(b"key", until_s)
        *earlier, last = sorted(tmp_path.glob("hicache/*/leases/*/*"), key=lambda file: float(file.read_text()))
        for file in earlier:
            os.utime(file, (0, 0))
        DirPages(str(tmp_path)).prune(0)
        assert store.who(b"key") == pytest.approx(until_s, abs=1e-3) and not store.begin(b"key", until_s + 1)
        os.utime(last, (0, 0))
        DirPages(str(tmp_path)).prune(0)
        assert store.who(b"key") is None and not list(tmp_path.glob("hicache/*/leases/*/*"))


def test_a_link_whose_answer_was_lost_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an NFS client repeats a `link` that the server has executed, it reports that the file exists. The caller has
    the lease, and does not wait for itself."""
    link = os.link

    def repeated(new: str, file: str) -> None:
        link(new, file)
        link(new, file)

    with closing(opened(tmp_path)) as one, closing(opened(tmp_path)) as other:
        assert isinstance(one, DirPageStore) and isinstance(other, DirPageStore)
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", repeated)
            assert one.begin(b"key", time.time() + 1e5) and one.put([(b"0", page(0))]) == [True]
        assert one.stats().puts == 1
        assert not other.begin(b"key", time.time() + 2e5) and not one.begin(b"key", time.time() + 3e5)
        assert other.put([(b"0", page(0))]) == [True] and other.stats().puts == 0


MOUNTS = """
20 1 8:1 / / rw - ext4 /dev/sda1 rw
21 20 0:40 / /mnt/nfs\\040share rw shared:1 - nfs4 server:/export rw
22 20 0:41 / /mnt/fuse rw - fuse.juicefs JuiceFS rw
23 20 0:42 / /var/lib/containers rw - fuse.fuse-overlayfs fuse-overlayfs rw
24 20 0:43 / /mnt/lustre rw - lustre mgs@tcp:/fs rw
25 24 8:2 / /mnt/lustre/local rw - xfs /dev/sdb rw
26 20 0:44 / /mnt/both rw - nfs server:/a rw
27 20 8:3 / /mnt/both rw - ext4 /dev/sdc rw
broken
"""


def test_network_file_systems_are_known(tmp_path: Path) -> None:
    """The type of a path's file system is that of the longest mount point above it. If a path is mounted twice, the
    later mount counts."""
    (table := tmp_path / "mountinfo").write_text(MOUNTS)
    expected = {
        "/srv/x": "",
        "/mnt/nfs share/a/b": "nfs4",
        "/mnt/nfs share": "nfs4",
        "/mnt/nfs shared": "",
        "/mnt/fuse/kv": "fuse.juicefs",
        "/var/lib/containers/x": "",
        "/mnt/lustre/x": "lustre",
        "/mnt/lustre/local/x": "",
        "/mnt/both/x": "",
    }
    assert {path: network_type(path, table) for path in expected} == expected
    assert network_type("/mnt/lustre", tmp_path / "absent") == ""


def test_a_disk_store_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the kind of store for network file systems. Nothing is created."""
    monkeypatch.setattr(hicache.storage.urls, "network_type", lambda _: "nfs4")
    with pytest.raises(StoreError, match=rf"nfs4.*dir://{tmp_path}"):
        open_store(f"lmdb://{tmp_path}/s", identity=IDENTITY, formats=FORMATS)
    assert not list(tmp_path.iterdir())


def test_a_store_that_lists_nothing_says_so() -> None:
    """Mooncake, and schemes of other packages, list no pages; the error says so."""
    for url, text in (("mooncake://host:1", "Mooncake lists no pages"), ("lmdb:///x", "directory"), ("odd://x", "odd")):
        with pytest.raises(StoreError, match=text):
            shared_pages(url)


def test_pages_are_described_by_their_files(tmp_path: Path) -> None:
    """The file of a page shows its key, namespace and length. A long key is named by its digest. The identity is
    recorded."""
    long_key = b"k" * 200
    with closing(opened(tmp_path, "level=0")) as store:
        store.put([(b"a", page(1)), (long_key, page(1))])
    listed = sorted(DirPages(str(tmp_path)).pages(), key=lambda each: each.key or b"")
    assert [each.key for each in listed] == [None, b"a"] and isinstance(listed[0], SharedPage)
    assert {each.num_bytes for each in listed} == {4096 + LARGE_BYTES}
    assert DirPages(str(tmp_path)).identity(listed[0].namespace) == IDENTITY
    assert not any(map(DirPages(str(tmp_path)).fault, listed))
