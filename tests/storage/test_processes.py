"""One process writes, others read: what is committed is seen, and nothing that the writer does can crash a reader.

Run as a script, this file is the other process: it takes commands on its input and answers each with one line.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.storage import (
    LmdbPageReader,
    LmdbPageStore,
    PageCipher,
    PageFormat,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreMismatch,
    describe,
)
from storage_pages import (
    IDENTITY,
    LAYOUTS,
    PAGE_BYTES,
    Layout,
    both_layouts,
    budget_of,
    found_numbers,
    has_slots,
    key_of,
    open_store,
    put_numbers,
)

NUM_SMALL = 60  # pages of a small budget


class Other:
    """The other process; `do` waits for its answer."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, __file__, *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parent)
        assert self.answer() == "ready"

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def do(self, command: str) -> str:
        self.send(command)
        return self.answer()

    def has_answered(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def others() -> Iterator[list[Other]]:
    started: list[Other] = []
    yield started
    for other in started:
        if other.process.returncode is None:
            other.kill()


def start(others: list[Other], *arguments: object) -> Other:
    others.append(Other(*arguments))
    return others[-1]


def start_writer(others: list[Other], path: Path, layout: Layout, budget_bytes: int = 64 << 20) -> Other:
    return start(others, "write", path, budget_bytes, layout["slots_from_bytes"])


@both_layouts
def test_reader_sees_what_is_committed(tmp_path: Path, others: list[Other], layout: Layout) -> None:
    """A page is there as soon as the writer's put returned, gone when it was deleted, and bytes are always right."""
    writer = start_writer(others, tmp_path, layout)
    reader = LmdbPageReader(tmp_path, identity=IDENTITY)
    for first in range(0, 40, 4):
        assert found_numbers(reader, range(first, first + 4)) == set()
        assert writer.do(f"put {first} {first + 4}") == "4"
        assert reader.contains([key_of(first), key_of(first + 4)]) == [True, False]
        assert found_numbers(reader, range(first, first + 5)) == set(range(first, first + 4))
    assert has_slots(tmp_path) == (layout == LAYOUTS["slots"])
    assert writer.do("delete 0 10") == "10"
    assert found_numbers(reader, range(40)) == set(range(10, 40))
    stats = reader.stats()
    assert (stats.entries, stats.corrupt, stats.read_errors, stats.read_only) == (30, 0, 0, True)
    reader.close()
    with pytest.raises(StoreError, match="closed"):
        reader.contains([key_of(1)])


@pytest.mark.parametrize("num_puts", [4, 5])  # the number of the last transaction is even or odd
@both_layouts
def test_reader_follows_compaction(tmp_path: Path, others: list[Other], layout: Layout, num_puts: int) -> None:
    """The reader finds all pages again after each time the file was replaced, and so does the writer: with readers
    alive the transaction numbers go on, whatever the copy begins with.
    """
    writer = start_writer(others, tmp_path, layout)
    reader = LmdbPageReader(tmp_path)
    held: set[int] = set()
    rounds = 3
    for turn in range(rounds):
        for first in range(turn * 100, turn * 100 + num_puts * 8, 8):
            assert writer.do(f"put {first} {first + 8}") == "8"
            assert found_numbers(reader, range(first, first + 8)) == set(range(first, first + 8))
        assert writer.do(f"delete {turn * 100} {turn * 100 + 15 + turn}") == str(15 + turn)
        held |= set(range(turn * 100 + 15 + turn, turn * 100 + num_puts * 8))
        inode = (tmp_path / "data.mdb").stat().st_ino
        assert int(writer.do("compact")) > 0
        assert (tmp_path / "data.mdb").stat().st_ino != inode
        assert writer.do(f"has 0 {rounds * 100}") == str(len(held))
        assert found_numbers(reader, range(rounds * 100)) == held
        assert writer.do("check") == "clean"
    assert reader.stats().read_errors == 0
    reader.close()


@both_layouts
def test_reader_survives_eviction_and_death(tmp_path: Path, others: list[Other], layout: Layout) -> None:
    """Beside a writer that turns over its budget many times a reader sees whole pages or misses; after the writer was
    killed it goes on, and sees what the next writer stores.
    """
    writer = start_writer(others, tmp_path, layout, budget_of(NUM_SMALL, layout))
    reader = LmdbPageReader(tmp_path)
    hits = 0
    for first in range(0, 600, 6):
        assert writer.do(f"put {first} {first + 6}") == "6"
        hits += len(found_numbers(reader, range(max(0, first - 60), first + 6, 3)))
    assert hits > 500
    writer.kill()
    left = found_numbers(reader, range(600))
    assert left >= set(range(580, 600))
    writer = start_writer(others, tmp_path, layout, budget_of(NUM_SMALL, layout))
    assert writer.do("put 1000 1010") == "10"
    assert found_numbers(reader, range(1000, 1010)) == set(range(1000, 1010))
    assert writer.do("check") == "clean"
    assert reader.stats().read_errors == reader.stats().corrupt == 0
    reader.close()


@pytest.mark.parametrize("rounds", [40, pytest.param(600, marks=pytest.mark.long)])
@both_layouts
def test_reader_beside_compactions(tmp_path: Path, others: list[Other], layout: Layout, rounds: int) -> None:
    """Reading without a pause while the file is replaced again and again: each look finds right pages, and those that
    the writer never touches every time.
    """
    writer = start_writer(others, tmp_path, layout)
    assert writer.do("put 0 20") == "20"
    reader, looks = LmdbPageReader(tmp_path), 0
    writer.send(f"churn 100 {100 + rounds}")
    while not writer.has_answered():
        assert found_numbers(reader, range(0, 20, 3)) == set(range(0, 20, 3))
        found_numbers(reader, range(100, 100 + rounds, 7))
        looks += 1
    assert int(writer.answer()) > rounds // 2 and looks > 3
    assert reader.stats().read_errors == reader.stats().corrupt == 0
    assert writer.do("check") == "clean"
    reader.close()


@pytest.mark.parametrize(("layout", "num_pages"), [("tables", 200), ("slots", 2200)])
def test_reader_follows_a_larger_budget(tmp_path: Path, others: list[Other], layout: str, num_pages: int) -> None:
    """A writer with a larger budget grows the file beyond the reader's map; the reader maps it again."""
    writer = start_writer(others, tmp_path, LAYOUTS[layout], budget_of(NUM_SMALL, LAYOUTS[layout]))
    assert writer.do("put 0 8") == "8"
    reader = LmdbPageReader(tmp_path)
    assert found_numbers(reader, range(8)) == set(range(8))
    map_bytes = reader.stored_values.env.read(lambda txn, tables: int(tables.env.info()["map_size"]), 0)
    writer.kill()
    writer = start_writer(others, tmp_path, LAYOUTS[layout], 96 << 20)
    for first in range(0, num_pages, 200):
        assert writer.do(f"put {first} {first + 200}") == "200"
    assert (tmp_path / "data.mdb").stat().st_size > map_bytes
    assert found_numbers(reader, range(num_pages)) == set(range(num_pages))
    assert reader.stats().read_errors == 0
    reader.close()


@both_layouts
def test_dead_reader_frees_its_slot(tmp_path: Path, others: list[Other], layout: Layout) -> None:
    """The pages that a reader pinned when it was killed are used again: no put is refused for want of room."""
    store = open_store(tmp_path, budget_bytes=budget_of(NUM_SMALL, layout), **layout)
    put_numbers(store, range(40))
    reader = start(others, "pin", tmp_path)
    assert reader.do("pin") == "pinned"
    reader.kill()
    for first in range(100, 400, 4):
        assert put_numbers(store, range(first, first + 4)) == [True] * 4
    assert store.stats().write_errors == 0
    store.check()
    store.close()


def test_second_writer_is_told_who_writes(tmp_path: Path, others: list[Other]) -> None:
    """A second writer is refused with the process that holds the store; `describe` names it too, and needs no lock."""
    writer = start_writer(others, tmp_path, {"slots_from_bytes": 1 << 20})
    assert writer.do("put 0 3") == "3"
    with pytest.raises(StoreLocked, match=f"in use by process {writer.process.pid}"):
        open_store(tmp_path)
    found = describe(tmp_path)
    assert (found.writer_pid, found.entries, dict(found.identity)) == (writer.process.pid, 3, IDENTITY)
    assert (found.formats, found.budget_bytes, found.encrypted) == ((PageFormat(PAGE_BYTES),), 64 << 20, False)
    writer.kill()
    assert describe(tmp_path).writer_pid is None


def test_reader_refuses_what_is_not_its_store(tmp_path: Path, others: list[Other]) -> None:
    """No store, another identity, a key for a plain store, a cut file, a store open in this process: each is an error
    that says so, and none disturbs the store.
    """
    with pytest.raises(StoreError, match="there is no store"):
        LmdbPageReader(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="there is no store"):
        LmdbPageReader(tmp_path / "empty")
    store = open_store(tmp_path / "a")
    put_numbers(store, range(20))
    with pytest.raises(StoreError, match="no other store object for it may be open in this process"):
        LmdbPageReader(tmp_path / "a")
    assert put_numbers(store, [30]) == [True]
    store.close()
    with pytest.raises(StoreMismatch, match="model: stored 'tiny', now 'huge'"):
        LmdbPageReader(tmp_path / "a", identity={**IDENTITY, "model": "huge"})
    with pytest.raises(StoreMismatch, match="cipher_key: stored None, now '"):
        LmdbPageReader(tmp_path / "a", cipher=PageCipher(bytes(32)))
    data = tmp_path / "a" / "data.mdb"
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)
    with pytest.raises(StoreCorrupt, match="cut short"):
        LmdbPageReader(tmp_path / "a")


@both_layouts
def test_store_of_another_identity_takes_the_place(tmp_path: Path, layout: Layout) -> None:
    """When a store of another identity takes the place of the one that is open, a reader misses; it serves nothing."""
    for name, model in (("a", "tiny"), ("b", "huge")):
        store = open_store(tmp_path / name, identity={**IDENTITY, "model": model}, **layout)
        put_numbers(store, range(4))
        store.close()
    reader = LmdbPageReader(tmp_path / "a")
    assert found_numbers(reader, range(4)) == {0, 1, 2, 3}
    (tmp_path / "b" / "data.mdb").replace(tmp_path / "a" / "data.mdb")
    assert reader.contains([key_of(0)]) == [False]
    assert found_numbers(reader, range(4)) == set()
    assert reader.stats().read_errors > 0
    reader.close()


@pytest.fixture
def read_only_view(tmp_path: Path) -> Iterator[Path]:
    """A read-only mount of `tmp_path / "store"`."""
    for name in ("store", "view"):
        (tmp_path / name).mkdir()
    bind = ["mount", "--bind", str(tmp_path / "store"), str(tmp_path / "view")]
    remount = ["mount", "-o", "remount,ro,bind", str(tmp_path / "view")]
    try:
        mounted = all(subprocess.run(c, capture_output=True, check=False).returncode == 0 for c in (bind, remount))
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a read-only mount needs root")
    yield tmp_path / "view"
    subprocess.run(["umount", "-l", str(tmp_path / "view")], check=True)


@both_layouts
def test_read_only_mount(tmp_path: Path, read_only_view: Path, layout: Layout) -> None:
    """On a read-only mount a reader keeps writers out, as it cannot register, and is refused while one is inside."""
    store = open_store(tmp_path / "store", **layout)
    put_numbers(store, range(6))
    with pytest.raises(StoreLocked, match="readers cannot register on a read-only mount"):
        LmdbPageReader(read_only_view)
    store.close()
    reader = LmdbPageReader(read_only_view)
    assert found_numbers(reader, range(8)) == set(range(6))
    with pytest.raises(StoreLocked):
        open_store(tmp_path / "store")
    reader.close()
    (tmp_path / "store" / "lock.mdb").symlink_to("/dev/shm/of-a-process-that-died")
    reader = LmdbPageReader(read_only_view)
    assert found_numbers(reader, range(8)) == set(range(6))
    reader.close()
    open_store(tmp_path / "store").close()


def churn(store: LmdbPageStore, number: int) -> bool:
    """Whether the file was replaced."""
    put_numbers(store, [number, number + 1000, number + 2000])
    store.delete([key_of(number - 1), key_of(number + 999), key_of(number + 1998)])
    return store.compact() > 0


def serve(kind: str, path: str, *rest: str) -> None:
    """The other process: obeys one command a line."""
    settings = dict(zip(("budget_bytes", "slots_from_bytes"), map(int, rest), strict=False))
    store = open_store(path, **settings) if kind == "write" else None
    reader = LmdbPageReader(path) if kind == "pin" else None
    print("ready", flush=True)
    pinned = []
    for line in sys.stdin:
        verb, *numbers = line.split()
        span = range(*map(int, numbers)) if numbers else range(0)
        answer: object = "clean"
        if verb == "pin":
            assert reader is not None
            pinned.append(reader.stored_values.env.read(lambda txn, tables: tables.env, None).begin())
            answer = "pinned"
        elif store is None:
            raise ValueError(line)
        elif verb == "put":
            answer = sum(put_numbers(store, span))
        elif verb == "delete":
            answer = store.delete([key_of(n) for n in span])
        elif verb == "has":
            answer = sum(store.contains([key_of(n) for n in span]))
        elif verb == "churn":
            answer = sum(churn(store, number) for number in span)
        elif verb == "compact":
            answer = store.compact()
        elif verb == "check":
            store.check()
        print(answer, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
