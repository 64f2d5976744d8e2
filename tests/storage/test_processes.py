"""One process writes, others read: what is committed is seen, and nothing that the writer does can crash a reader.

Run as a script, this file is the other process: it takes commands on its input and answers each with one line.
"""

from __future__ import annotations

import contextlib
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
    StoreError,
    StoreLocked,
    StoreMismatch,
    describe,
)
from storage_pages import (
    IDENTITY,
    PAGE_BYTES,
    budget_of,
    found_numbers,
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


def start_writer(others: list[Other], path: Path, budget_bytes: int = 64 << 20) -> Other:
    return start(others, "write", path, budget_bytes)


def test_reader_sees_what_is_committed(tmp_path: Path, others: list[Other]) -> None:
    """A page is there as soon as the writer's put returned, gone when it was deleted, and bytes are always right."""
    writer = start_writer(others, tmp_path)
    reader = LmdbPageReader(tmp_path, identity=IDENTITY)
    for first in range(0, 40, 4):
        assert found_numbers(reader, range(first, first + 4)) == set()
        assert writer.do(f"put {first} {first + 4}") == "4"
        assert reader.contains([key_of(first), key_of(first + 4)]) == [True, False]
        assert found_numbers(reader, range(first, first + 5)) == set(range(first, first + 4))
    assert writer.do("delete 0 10") == "10"
    assert found_numbers(reader, range(40)) == set(range(10, 40))
    stats = reader.stats()
    assert (stats.entries, stats.corrupt, stats.read_errors, stats.read_only) == (30, 0, 0, True)
    reader.close()
    with pytest.raises(StoreError, match="closed"):
        reader.contains([key_of(1)])


def test_reader_follows_the_index(tmp_path: Path, others: list[Other]) -> None:
    """Whether the store is closed or opened again, a reader finds what was committed, and takes it from the sealed
    index while nobody writes."""
    writer = start_writer(others, tmp_path)
    reader = LmdbPageReader(tmp_path)
    held: set[int] = set()
    for turn in range(3):
        for first in range(turn * 100, turn * 100 + 32, 8):
            assert writer.do(f"put {first} {first + 8}") == "8"
            assert found_numbers(reader, range(first, first + 8)) == set(range(first, first + 8))
        assert writer.do(f"delete {turn * 100} {turn * 100 + 15}") == "15"
        held |= set(range(turn * 100 + 15, turn * 100 + 32))
        for verb in ("close", "open"):
            assert (tmp_path / "index.mdb").exists() == (verb == "open")
            assert writer.do(verb) == "clean"
            assert found_numbers(reader, range(300)) == held
        assert writer.do("check") == "clean"
    assert reader.stats().read_errors == reader.stats().corrupt == 0
    reader.close()


def test_reader_sees_what_came_between_two_looks(tmp_path: Path) -> None:
    """A store that was opened, changed and closed again between two calls of a reader is read by its new index."""
    for number in range(4):
        with contextlib.closing(open_store(tmp_path)) as store:
            put_numbers(store, [number])
        if not number:
            reader = LmdbPageReader(tmp_path)
        assert found_numbers(reader, range(9)) == set(range(number + 1))
    reader.close()


def test_reader_survives_eviction_and_death(tmp_path: Path, others: list[Other]) -> None:
    """Beside a writer that turns over its budget many times a reader sees whole pages or misses; after the writer was
    killed it goes on, and sees what the next writer stores.
    """
    writer = start_writer(others, tmp_path, budget_of(NUM_SMALL))
    reader = LmdbPageReader(tmp_path)
    hits = 0
    for first in range(0, 600, 6):
        assert writer.do(f"put {first} {first + 6}") == "6"
        hits += len(found_numbers(reader, range(max(0, first - 60), first + 6, 3)))
    assert hits > 500
    writer.kill()
    left = found_numbers(reader, range(600))
    assert left >= set(range(580, 600))
    writer = start_writer(others, tmp_path, budget_of(NUM_SMALL))
    assert writer.do("put 1000 1010") == "10"
    assert found_numbers(reader, range(1000, 1010)) == set(range(1000, 1010))
    assert writer.do("check") == "clean"
    assert reader.stats().read_errors == reader.stats().corrupt == 0
    reader.close()


@pytest.mark.parametrize("rounds", [40, pytest.param(600, marks=pytest.mark.long)])
def test_reader_beside_openings(tmp_path: Path, others: list[Other], rounds: int) -> None:
    """Reading without a pause while the store is closed and opened again and again: each look finds right pages, and
    those that the writer never touches every time.
    """
    writer = start_writer(others, tmp_path)
    assert writer.do("put 0 20") == "20"
    reader, looks = LmdbPageReader(tmp_path), 0
    writer.send(f"churn 100 {100 + rounds}")
    while not writer.has_answered():
        assert found_numbers(reader, range(0, 20, 3)) == set(range(0, 20, 3))
        found_numbers(reader, range(100, 100 + rounds, 7))
        looks += 1
    assert int(writer.answer()) == rounds and looks > 3
    assert reader.stats().read_errors == reader.stats().corrupt == 0
    assert writer.do("check") == "clean"
    reader.close()


def test_second_writer_is_told_who_writes(tmp_path: Path, others: list[Other]) -> None:
    """A second writer is refused with the process that holds the store; `describe` names it too, and needs no lock."""
    writer = start_writer(others, tmp_path)
    assert writer.do("put 0 3") == "3"
    with pytest.raises(StoreLocked, match=f"in use by process {writer.process.pid}"):
        open_store(tmp_path)
    found = describe(tmp_path)
    assert (found.writer_pid, found.entries, dict(found.identity)) == (writer.process.pid, 3, IDENTITY)
    assert (found.formats, found.budget_bytes, found.encrypted) == ((PageFormat(PAGE_BYTES),), 64 << 20, False)
    writer.kill()
    with pytest.raises(StoreError, match="has no sealed index"):
        describe(tmp_path)
    open_store(tmp_path).close()
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
    data = tmp_path / "a" / "index.mdb"
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)
    with pytest.raises(StoreError, match=r"has no sealed index.* open it for writing once"):
        LmdbPageReader(tmp_path / "a")


def test_store_of_another_identity_takes_the_place(tmp_path: Path) -> None:
    """When a store of another identity takes the place of the one that is open, a reader never serves its pages."""
    for name, model in (("a", "tiny"), ("b", "huge")):
        with contextlib.closing(open_store(tmp_path / name, identity={**IDENTITY, "model": model})) as store:
            put_numbers(store, range(4) if name == "a" else range(10))
    reader = LmdbPageReader(tmp_path / "a")
    assert found_numbers(reader, range(10)) == {0, 1, 2, 3}
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    assert found_numbers(reader, range(10)) == set()
    with contextlib.closing(open_store(tmp_path / "a", identity={**IDENTITY, "model": "huge"})):
        assert reader.contains([key_of(0), key_of(8)]) == [False, False]
        assert found_numbers(reader, range(10)) == set()
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


def test_read_only_mount(tmp_path: Path, read_only_view: Path, others: list[Other]) -> None:
    """On a read-only mount a reader sees what is committed, while somebody writes elsewhere and afterwards."""
    writer = start_writer(others, tmp_path / "store")
    assert writer.do("put 0 6") == "6"
    with contextlib.closing(LmdbPageReader(read_only_view)) as reader:
        assert found_numbers(reader, range(8)) == set(range(6))
        assert writer.do("put 6 7") == "1" and found_numbers(reader, range(8)) == set(range(7))
        assert writer.do("close") == "clean"
        assert found_numbers(reader, range(8)) == set(range(7))


def test_a_killed_writer_leaves_no_reader(tmp_path: Path, others: list[Other]) -> None:
    """A reader that was open before its writer was killed goes on; one that comes later is told what to do, which
    helps."""
    writer = start_writer(others, tmp_path)
    assert writer.do("put 0 6") == "6"
    with contextlib.closing(LmdbPageReader(tmp_path)) as reader:
        writer.kill()
        assert found_numbers(reader, range(8)) == set(range(6))
        with pytest.raises(StoreError, match=r"has no sealed index.* open it for writing once"):
            LmdbPageReader(tmp_path)
    open_store(tmp_path).close()
    with contextlib.closing(LmdbPageReader(tmp_path)) as reader:
        assert found_numbers(reader, range(8)) == set(range(6))


def churn(path: str, store: LmdbPageStore, number: int) -> LmdbPageStore:
    """Change the store, close it and open it again."""
    put_numbers(store, [number, number + 1000, number + 2000])
    store.delete([key_of(number - 1), key_of(number + 999), key_of(number + 1998)])
    store.close()
    return open_store(path)


def serve(_: str, path: str, *rest: str) -> None:
    """The other process: obeys one command a line."""
    settings = {"budget_bytes": int(rest[0])}
    store = open_store(path, **settings)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        span = range(*map(int, numbers)) if numbers else range(0)
        answer: object = "clean"
        if verb == "put":
            answer = sum(put_numbers(store, span))
        elif verb == "delete":
            answer = store.delete([key_of(n) for n in span])
        elif verb == "has":
            answer = sum(store.contains([key_of(n) for n in span]))
        elif verb == "churn":
            for number in span:
                store = churn(path, store, number)
            answer = len(span)
        elif verb == "close":
            store.close()
        elif verb == "open":
            store = open_store(path, **settings)
        elif verb == "check":
            store.check()
        print(answer, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
