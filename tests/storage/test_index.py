"""A damaged index, LMDB's B-tree pages: named before LMDB follows it, and rebuilt from its leaf pages."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb
import pytest

import index_damage
from child_case import in_child
from hicache.storage import (
    LmdbPageReader,
    PageCipher,
    StoreCorrupt,
    StoreError,
    StoreIndexDamaged,
    StoreLocked,
    lmdb_file,
    rescue,
    verify,
)
from hicache.storage.index_check import index_fault
from hicache.storage.lmdb_pages import read_meta
from index_damage import BRANCH, LEAF, NUM_IN_SLOTS, NUM_PAGES, PSIZE, RUN, SETTINGS, IndexPages, make
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
)

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def fault_of(path: Path) -> str:
    meta = read_meta(path / "data.mdb")
    assert meta is not None
    return index_fault(path / "data.mdb", meta, overflow=True)


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys(), name="layout")
def a_layout(request: pytest.FixtureRequest) -> Layout:
    layout: Layout = request.param
    return layout


@both_layouts
@pytest.mark.parametrize("page_bytes", [512, PAGE_BYTES, 70_000])
def test_what_lmdb_writes_is_valid(tmp_path: Path, layout: Layout, page_bytes: int) -> None:
    """After every commit of a store that puts, evicts, deletes and compacts at random, with values in leaves and in
    runs of pages, beside an open reader too."""
    rng = random.Random(page_bytes)
    settings = {"page_bytes": page_bytes, "budget_bytes": max(40 * page_bytes, 2 << 20), "level": 0}
    looks = 0
    with contextlib.closing(open_store(tmp_path, **settings, **layout)) as store:
        for step in range(60):
            numbers = [rng.randrange(4000) for _ in range(rng.choice((1, 5, 60)))]
            if rng.random() < 0.6:
                put_numbers(store, numbers, page_bytes)
            elif rng.random() < 0.7:
                store.delete([key_of(number) for number in numbers])
            elif rng.random() < 0.9:
                store.touch([key_of(number) for number in numbers])
                store.sync()
            else:
                store.compact()
            if step % 3 == 0:
                assert fault_of(tmp_path) == ""
                looks += 1
        store.check()
    assert fault_of(tmp_path) == "" and looks == 20


def test_a_file_without_tables_is_valid(tmp_path: Path) -> None:
    """As a process leaves it that dies while it makes a store."""
    lmdb.open(str(tmp_path)).close()
    assert fault_of(tmp_path) == ""
    with contextlib.closing(open_store(tmp_path)) as store:
        assert put_numbers(store, [1]) == [True]


def leaf(tree: IndexPages, name: bytes = b"ages", index: int = 3) -> int:
    return tree.leaves(name)[index]


def swap_offsets(tree: IndexPages, page: int) -> None:
    first, second = tree.word(page, 16), tree.word(page, 18)
    tree.put(page, 16, second)
    tree.put(page, 18, first)


def other_child(tree: IndexPages, child: int) -> None:
    root = tree.tables[b"ages"].root
    tree.put(root, tree.nodes(root)[2], child)


def free_list(tree: IndexPages, at: int, value: int) -> None:
    """Change the number at place `at` of the last list of free pages."""
    page = tree.leaves(b"free pages")[-1]
    tree.put(page, tree.data_at(page, len(tree.nodes(page)) - 1) + 8 * at, value, "Q")


def record(tree: IndexPages, at: int, value: int, kind: str = "Q", name: bytes = b"ages") -> None:
    page, start = tree.record_of(name)
    tree.put(page, start + at, value, kind)


def shorter_value(tree: IndexPages) -> None:
    """A node that is two bytes shorter than the place that it takes."""
    page = leaf(tree)
    tree.put(page, tree.nodes(page)[5], 14)


def last_page_in_use(tree: IndexPages) -> None:
    """Make the page with the highest number that is in use the first of a list of free ones."""
    page = tree.leaves(b"free pages")[-1]
    start = tree.data_at(page, len(tree.nodes(page)) - 1)
    listed = [int.from_bytes(tree.bytes[page * PSIZE + start + 8 * n :][:8], "little") for n in range(3)]
    used = max(number for number in tree.all() if number > listed[2] and number not in listed[1:])
    tree.put(page, start + 8, used, "Q")


DAMAGE: dict[str, tuple[Callable[[IndexPages], None], str]] = {
    "another page's number": (
        lambda tree: tree.put(leaf(tree), 0, 1, "Q"),
        "a page of ages has a damaged header",
    ),
    "of another kind": (lambda tree: tree.put(leaf(tree), 10, BRANCH), "a page of ages has a damaged header"),
    "of two kinds": (lambda tree: tree.put(leaf(tree), 10, LEAF | 64), "a page of ages has a damaged header"),
    "an odd number of bytes": (lambda tree: tree.put(leaf(tree), 12, 33), "a page of ages has a damaged header"),
    "no node": (lambda tree: tree.put(leaf(tree), 12, 16), "a page of ages has a damaged header"),
    "a branch with one child": (
        lambda tree: tree.put(tree.tables[b"ages"].root, 12, 18),
        "a page of ages has a damaged header",
    ),
    "nodes that begin in the list": (
        lambda tree: tree.put(leaf(tree), 14, 20),
        "a page of ages has a damaged header",
    ),
    "nodes behind the end": (
        lambda tree: tree.put(leaf(tree), 14, PSIZE + 2),
        "a page of ages has a damaged header",
    ),
    "a node before the others": (
        lambda tree: tree.put(leaf(tree), 20, 40),
        "a node of ages lies outside its page",
    ),
    "a node at the end": (
        lambda tree: tree.put(leaf(tree), 20, PSIZE - 6),
        "a node of ages lies outside its page",
    ),
    "an odd node": (
        lambda tree: tree.put(leaf(tree), 20, tree.word(leaf(tree), 20) + 1),
        "a node of ages lies outside its page",
    ),
    "a long key": (
        lambda tree: tree.put(leaf(tree), tree.nodes(leaf(tree))[4] + 6, 600),
        "a key of ages is too long",
    ),
    "a node that is named twice": (
        lambda tree: tree.put(leaf(tree), 20, tree.word(leaf(tree), 22)),
        "nodes of ages overlap or leave gaps",
    ),
    "a gap": (shorter_value, "nodes of ages overlap or leave gaps"),
    "a gap before all": (
        lambda tree: tree.put(leaf(tree), 14, tree.word(leaf(tree), 14) - 8),
        "nodes of ages overlap or leave gaps",
    ),
    "keys out of order": (lambda tree: swap_offsets(tree, leaf(tree)), "keys of ages are out of order"),
    "branch keys out of order": (
        lambda tree: tree.put(tree.tables[b"ages"].root, tree.nodes(tree.tables[b"ages"].root)[2] + 8, 0),
        "keys of ages are out of order",
    ),
    "a first key below its branch's": (
        lambda tree: tree.put(leaf(tree), tree.nodes(leaf(tree))[0] + 8, 0),
        "keys of ages are out of order",
    ),
    "a last key above the next": (
        lambda tree: tree.put(leaf(tree), tree.nodes(leaf(tree))[-1] + 8, 0xFFFF),
        "keys of ages are out of order",
    ),
    "a child behind the end": (lambda tree: other_child(tree, tree.meta.last_page + 1), "ages leads outside"),
    "a child that is a meta page": (lambda tree: other_child(tree, 1), "ages leads outside"),
    "a child that is another's": (lambda tree: other_child(tree, leaf(tree, index=3)), "keys of ages are out of"),
    "an entry that is a table": (
        lambda tree: tree.put(leaf(tree), tree.nodes(leaf(tree))[4] + 4, 2),
        "an entry of ages is of an unknown kind",
    ),
    "one entry more": (lambda tree: record(tree, 32, NUM_PAGES + 1), "ages has other pages or entries"),
    "one leaf more": (
        lambda tree: record(tree, 16, tree.tables[b"ages"].leaf_pages + 1),
        "ages has other pages or entries",
    ),
    "one leaf less": (lambda tree: record(tree, 16, tree.tables[b"ages"].leaf_pages - 1), "ages has more pages"),
    "a run that is not there": (lambda tree: record(tree, 24, 1), "ages has other pages or entries"),
    "a table with duplicates": (
        lambda tree: record(tree, 4, 4, "H"),
        "the record of the table ages cannot be right",
    ),
    "a deep table": (lambda tree: record(tree, 6, 99, "H"), "the record of the table ages cannot be right"),
    "a deeper table": (lambda tree: record(tree, 6, 3, "H"), "a page of ages has a damaged header"),
    "a free page in use": (last_page_in_use, "a page has two owners"),
    "a free page behind the end": (
        lambda tree: free_list(tree, 1, tree.meta.last_page + 1),
        "a free page is outside the file",
    ),
    "more free pages than there are": (lambda tree: free_list(tree, 0, 1 << 40), "a list of free pages is out of"),
    "free pages out of order": (lambda tree: free_list(tree, 2, 1 << 50), "a list of free pages is out of order"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A valid store in each layout, not to be changed."""
    found = {name: tmp_path_factory.mktemp(name) / "store" for name in LAYOUTS}
    for name, path in found.items():
        make(path, LAYOUTS[name])
    return found


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_before_lmdb_sees_it(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    """By the check, and by whoever opens the store, with its page and a remedy; nothing is changed. Rebuilt it has
    all pages in their order."""
    plant, message = DAMAGE[name]
    path = copied(sources["slots"], tmp_path / "store")
    before = order_of(path)
    tree = IndexPages(path)
    plant(tree)
    tree.save()
    assert fault_of(path).startswith(message)
    for opening in (lambda: open_store(path, **SETTINGS, **SLOTS), lambda: LmdbPageReader(path)):
        with pytest.raises(StoreIndexDamaged, match=r"verify the store with repair|is not the root"):
            opening()
    assert (path / "data.mdb").read_bytes() == tree.bytes
    assert rescue(path) >= len(before) - 1
    assert fault_of(path) == ""
    with contextlib.closing(open_store(path, **SETTINGS, **SLOTS)) as store:
        verify(store, repair=True)
        store.check()
    kept = set(order_of(path))
    assert len(kept & set(before)) >= len(before) - 1
    assert [key for key in order_of(path) if key in set(before)] == [key for key in before if key in kept]


def order_of(path: Path) -> list[bytes]:
    """The keys of a closed store, the least recently used first."""
    with lmdb.open(str(path), max_dbs=8, readonly=True, lock=False) as env:
        recency = env.open_db(b"recency", create=False)
        with env.begin() as txn:
            return [bytes(key) for _, key in txn.cursor(db=recency)]


def test_the_head_of_a_long_value(tmp_path: Path) -> None:
    """lmdb frees as many pages as the first page of a value says: `verify` looks at them all."""
    layout = LAYOUTS["tables"]
    store = open_store(tmp_path, **layout)
    put_numbers(store, range(20))
    store.close()
    tree = IndexPages(tmp_path)
    runs = [page for page in range(tree.meta.last_page + 1) if tree.word(page, 10) == RUN]
    page = next(page for page in runs if int.from_bytes(tree.bytes[page * PSIZE :][:8], "little") == page)
    tree.put(page, 12, 400, "I")
    tree.save()
    with contextlib.closing(open_store(tmp_path, **layout)) as store:
        assert found_numbers(store, range(20)) == set(range(20))
        with pytest.raises(StoreIndexDamaged, match=f"page {page} is not the first of 4"):
            verify(store)
    assert rescue(tmp_path) == 20
    with contextlib.closing(open_store(tmp_path, **layout)) as store:
        assert verify(store).faults == () and found_numbers(store, range(20)) == set(range(20))


def test_large_trees_are_left_to_verify(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an index that is too large to be validated when a store is opened, the roots are, and the rest by `verify`."""
    monkeypatch.setattr(lmdb_file, "MAX_INDEX_CHECKED_BYTES", 0)
    path = copied(sources["slots"], tmp_path / "store")
    tree = IndexPages(path)
    tree.put(leaf(tree, b"recency"), 0, 1, "Q")
    tree.save()
    with contextlib.closing(open_store(path, **SETTINGS, **SLOTS)) as store:
        assert found_numbers(store, [405], index_damage.PAGE_BYTES) == {405}
        with pytest.raises(StoreIndexDamaged, match="a page of recency has a damaged header"):
            verify(store)
        with pytest.raises(StoreIndexDamaged):
            store.check()
    tree = IndexPages(path)
    tree.put(tree.tables[b"recency"].root, 0, 1, "Q")
    tree.save()
    with pytest.raises(StoreIndexDamaged, match="a page of recency has a damaged header"):
        open_store(path, **SETTINGS, **SLOTS)


def test_a_use_order_that_cannot_be_searched(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ticks out of order are not found again: eviction ends all the same."""
    monkeypatch.setattr(lmdb_file, "MAX_INDEX_CHECKED_BYTES", 0)
    path = copied(sources["slots"], tmp_path / "store")
    tree = IndexPages(path)
    page = leaf(tree, b"recency", 0)
    last = len(tree.nodes(page)) - 1
    first_at, last_at = tree.word(page, 16), tree.word(page, 16 + 2 * last)
    tree.put(page, 16, last_at)
    tree.put(page, 16 + 2 * last, first_at)
    tree.save()

    def evicted() -> dict[str, object]:
        with contextlib.closing(open_store(path, **SETTINGS, **SLOTS)) as store:
            for first in range(2000, 4000, 50):
                put_numbers(store, range(first, first + 50), index_damage.PAGE_BYTES)
            return {"evicted": store.stats().evicted}

    said = in_child(evicted, tmp_path / "result")
    assert int(said["evicted"]) > NUM_PAGES, said


@both_layouts
def test_rescue_of_what_is_valid(sources: dict[str, Path], tmp_path: Path, layout: Layout) -> None:
    """Nothing is lost, not even the order. Pages that went lately may be there again; those whose slot was emptied or
    given away meanwhile are dropped."""
    name = next(name for name, other in LAYOUTS.items() if other == layout)
    path = copied(sources[name], tmp_path / "store")
    before = order_of(path)
    rescue(path)
    with contextlib.closing(open_store(path, **SETTINGS, **layout)) as store:
        dropped = {fault.key for fault in verify(store, repair=True).faults}
        assert not dropped & {*before, None} and verify(store).faults == ()
    after = order_of(path)
    assert [key for key in after if key in set(before)] == before
    with contextlib.closing(open_store(path, **SETTINGS, **layout)) as store:
        found = found_numbers(store, range(410), index_damage.PAGE_BYTES)
        assert {key_of(number) for number in found} == set(after)
        put_numbers(store, range(1000, 1010), index_damage.PAGE_BYTES)
        store.check()


def test_a_slot_that_is_claimed_twice(tmp_path: Path) -> None:
    """Of a page that left and the one that took its slot, that one is kept whose bytes are there."""
    settings = {"page_bytes": PAGE_BYTES, **SLOTS}
    with contextlib.closing(open_store(tmp_path, **settings)) as store:
        put_numbers(store, range(8))
        for number in range(8):
            store.delete([key_of(number)])
            store.delete([b"another"])
            store.delete([b"another"])
            put_numbers(store, [100 + number])
    assert 8 <= rescue(tmp_path) <= 10
    with contextlib.closing(open_store(tmp_path, **settings)) as store:
        verify(store, repair=True)
        assert found_numbers(store, range(100, 108)) == set(range(100, 108))
        store.check()


def test_rescue_without_the_key(tmp_path: Path) -> None:
    """An encrypted store is rebuilt by whoever cannot read it."""
    pytest.importorskip("cryptography")
    cipher = PageCipher(bytes(range(32)))
    for name, layout in LAYOUTS.items():
        with contextlib.closing(open_store(tmp_path / name, cipher=cipher, **layout)) as store:
            put_numbers(store, range(30))
        assert rescue(tmp_path / name) == 30
        with contextlib.closing(open_store(tmp_path / name, cipher=cipher, **layout)) as store:
            assert found_numbers(store, range(30)) == set(range(30)) and verify(store).faults == ()


def test_what_cannot_be_rescued(tmp_path: Path) -> None:
    """No store, one that is in use, a damaged head, no record of what the pages are: an error, and nothing changed."""
    with pytest.raises(StoreError, match="there is no store at"):
        rescue(tmp_path / "nothing")
    store = open_store(tmp_path / "store")
    put_numbers(store, range(5))
    with pytest.raises(StoreLocked, match="is in use by process"):
        rescue(tmp_path / "store")
    store.close()
    data = tmp_path / "store" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[:16] + bytes(4) + whole[20:])
    with pytest.raises(StoreCorrupt):
        rescue(tmp_path / "store")
    data.write_bytes(whole.replace(b'"identity"', b'"entity__"'))
    before = data.read_bytes()
    with pytest.raises(StoreCorrupt, match=r"nothing in .* says what its pages are"):
        rescue(tmp_path / "store")
    assert data.read_bytes() == before
    assert sorted(file.name for file in data.parent.iterdir()) == ["data.mdb", "writer.lock"]


@pytest.mark.parametrize("share", [0.6, 0.95])
@both_layouts
def test_rescue_of_a_file_cut_short(sources: dict[str, Path], tmp_path: Path, layout: Layout, share: float) -> None:
    """What is left of a file can be rebuilt; readers and writers refuse it before, and leave it as it is."""
    name = next(name for name, other in LAYOUTS.items() if other == layout)
    path = copied(sources[name], tmp_path / "store")
    length = int((path / "data.mdb").stat().st_size * share)
    os.truncate(path / "data.mdb", length)
    for opening in (lambda: open_store(path, **SETTINGS, **layout), lambda: LmdbPageReader(path)):
        with pytest.raises(StoreIndexDamaged):
            opening()
        assert (path / "data.mdb").stat().st_size == length
    rescue(path)  # the identity is in a leaf far from the end
    with contextlib.closing(open_store(path, **SETTINGS, **layout)) as store:
        verify(store, repair=True)
        store.check()
        assert len(found_numbers(store, range(410), index_damage.PAGE_BYTES)) > NUM_PAGES / 10


@both_layouts
def test_a_rescue_without_room(sources: dict[str, Path], tmp_path: Path, layout: Layout) -> None:
    """A disk that takes no copy is an error, and the store is as it was."""
    name = next(name for name, other in LAYOUTS.items() if other == layout)
    path = copied(sources[name], tmp_path / "store")
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "writer.lock"}

    def without_space() -> dict[str, object]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, 32 << 10))
        return {"rescued": rescue(path)}

    assert in_child(without_space, tmp_path / "result")["error"].startswith("StoreError: cannot rebuild the index of")
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name != "writer.lock"} == before


def test_a_rescue_that_was_killed(sources: dict[str, Path], tmp_path: Path) -> None:
    """What it left is removed when the store is opened."""
    path = copied(sources["tables"], tmp_path / "store")
    (path / "rescue.tmp").mkdir()
    (path / "rescue.tmp" / "data.mdb").write_bytes(b"half")
    open_store(path, **SETTINGS, **LAYOUTS["tables"]).close()
    assert not (path / "rescue.tmp").exists()


def campaign(layout: str, seeds: range) -> None:
    """Damage at random, each in a store of its own, used by a child: no crash, no wrong byte, nothing that verification
    cannot repair, and few pages lost."""
    with TemporaryDirectory(dir=MEMORY) as folder:
        command = [sys.executable, index_damage.__file__, folder, layout, str(seeds.start), str(seeds.stop)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [seed for seed, _ in outcomes] == list(seeds)
    for seed, said in outcomes:
        assert "failed" not in said and "error" not in said, (seed, said)
        assert (said["left"], said["takes"]) == ([], True), (seed, said)
        assert said["found"] >= (NUM_PAGES if layout == "tables" else NUM_IN_SLOTS) - 12, (seed, said)
    assert 0.1 < sum(bool(said["refused"]) for _, said in outcomes) / len(outcomes) < 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_damage_ends_the_process(layout: str) -> None:
    campaign(layout, range(20))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_damage_ends_the_process_for_longer(layout: str) -> None:
    campaign(layout, range(1000, 2000))
