"""One process writes, others read: what is committed is seen, and nothing that the writer does can crash a reader."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.storage import LmdbPageReader, PageCipher, StoreError, StoreMismatch, describe
from storage_pages import IDENTITY, budget_of, found_numbers, key_of, open_store, put_numbers
from store_program import StoreProgram

NUM_SMALL = 60  # pages of a small budget
SETTINGS = {"budget_bytes": 64 << 20}


def test_reader_follows_the_writer(tmp_path: Path) -> None:
    """A page is there as soon as the writer's put returned, and gone when it was deleted. Whether the store is closed
    or opened again, a reader finds what was committed, and takes it from the sealed index while nobody writes."""
    with StoreProgram(tmp_path, SETTINGS) as writer:
        reader = LmdbPageReader(tmp_path, identity=IDENTITY)
        held: set[int] = set()
        for start in range(0, 96, 32):
            for first in range(start, start + 32, 8):
                assert found_numbers(reader, range(first, first + 8)) == set()
                assert writer.do("put", first, first + 8) == 8
                assert reader.contains([key_of(first), key_of(first + 8)]) == [True, False]
                assert found_numbers(reader, range(first, first + 9)) == set(range(first, first + 8))
            assert writer.do("delete", start, start + 15) == 15
            held |= set(range(start + 15, start + 32))
            for verb in ("close", "open"):
                assert (tmp_path / "index.mdb").exists() == (verb == "open")
                writer.do(verb)
                assert found_numbers(reader, range(96)) == held
            writer.do("check")
    stats = reader.stats()
    assert (stats.entries, stats.corrupt, stats.read_errors, stats.read_only) == (len(held), 0, 0, True)
    reader.close()
    with pytest.raises(StoreError):
        reader.contains([key_of(1)])


def test_reader_sees_what_came_between_two_looks(tmp_path: Path) -> None:
    """A store that was opened, changed and closed again between two calls of a reader is read by its new index."""
    for number in range(4):
        with contextlib.closing(open_store(tmp_path)) as store:
            put_numbers(store, [number])
        if not number:
            reader = LmdbPageReader(tmp_path)
        assert found_numbers(reader, range(9)) == set(range(number + 1))
    reader.close()


def test_reader_survives_eviction_and_death(tmp_path: Path) -> None:
    """Beside a writer that turns over its budget a reader sees whole pages or misses. After the writer was killed it
    goes on, one that comes then is told what to do, and it sees what the next writer stores."""
    settings = {"budget_bytes": budget_of(NUM_SMALL)}
    with StoreProgram(tmp_path, settings) as writer:
        assert writer.do("put", 0, 6) == 6
        found = describe(tmp_path)
        assert (found.writer_pid, found.entries, dict(found.identity)) == (writer.process.pid, 6, IDENTITY)
        reader = LmdbPageReader(tmp_path)
        hits = 0
        for first in range(0, 240, 6):
            assert writer.do("put", first, first + 6) == 6
            hits += len(found_numbers(reader, range(max(0, first - 60), first + 6, 3)))
        assert hits > 200
        writer.kill()
    assert found_numbers(reader, range(240)) >= set(range(220, 240))
    for late in (LmdbPageReader, describe):
        with pytest.raises(StoreError, match="has no sealed index"):
            late(tmp_path)
    with StoreProgram(tmp_path, settings) as writer:
        assert writer.do("put", 1000, 1010) == 10
        assert found_numbers(reader, range(1000, 1010)) == set(range(1000, 1010))
        writer.do("check")
        writer.do("close")
    assert describe(tmp_path).writer_pid is None
    assert reader.stats().read_errors == reader.stats().corrupt == 0
    reader.close()


@pytest.mark.parametrize("rounds", [15, pytest.param(600, marks=pytest.mark.long)])
def test_reader_beside_openings(tmp_path: Path, rounds: int) -> None:
    """Reading without a pause while the store is closed and opened again and again: each look finds right pages, and
    those that the writer never touches every time."""
    with StoreProgram(tmp_path, SETTINGS) as writer:
        assert writer.do("put", 0, 20) == 20
        reader = LmdbPageReader(tmp_path)
        writer.send("churn", 100, 100 + rounds)
        while not writer.has_answered():
            assert found_numbers(reader, range(0, 20, 3)) == set(range(0, 20, 3))
            found_numbers(reader, range(100, 100 + rounds, 7))
        writer.answer()
        assert reader.stats().read_errors == reader.stats().corrupt == 0
        writer.do("check")
    reader.close()


def test_reader_refuses_what_is_not_its_store(tmp_path: Path) -> None:
    """No store, another identity, a key for a plain store, a cut index, a store open in this process: each is an error
    of its kind, and none disturbs the store."""
    for nothing in (tmp_path / "none", tmp_path):
        with pytest.raises(StoreError, match="there is no store"):
            LmdbPageReader(nothing)
    path = tmp_path / "a"
    with contextlib.closing(open_store(path)) as store:
        put_numbers(store, range(20))
        with pytest.raises(StoreError):
            LmdbPageReader(path)
        assert put_numbers(store, [30]) == [True]
    for other in ({"identity": {**IDENTITY, "model": "huge"}}, {"cipher": PageCipher(bytes(32))}):
        with pytest.raises(StoreMismatch):
            LmdbPageReader(path, **other)  # type: ignore[arg-type]
    data = path / "index.mdb"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(StoreError, match="has no sealed index"):
        LmdbPageReader(path)


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
    store, view = (tmp_path / name for name in ("store", "view"))
    for folder in (store, view):
        folder.mkdir()
    for options in (["--bind", store, view], ["-o", "remount,ro,bind", view]):
        try:
            done = subprocess.run(["mount", *options], capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("mount is not there")
        if done.returncode:
            pytest.skip("a read-only mount needs root")
    yield view
    subprocess.run(["umount", "-l", view], check=True)


def test_read_only_mount(tmp_path: Path, read_only_view: Path) -> None:
    """On a read-only mount a reader sees what is committed, while somebody writes elsewhere and afterwards."""
    with (
        StoreProgram(tmp_path / "store", SETTINGS) as writer,
        contextlib.closing(LmdbPageReader(read_only_view)) as reader,
    ):
        assert writer.do("put", 0, 6) == 6
        assert found_numbers(reader, range(8)) == set(range(6))
        writer.do("close")
        assert found_numbers(reader, range(8)) == set(range(6))
