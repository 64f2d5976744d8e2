"""The lmdb store keeps what it acknowledged, within its budget, for the identity it was made for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.storage import PageFilter, StoreCorrupt, StoreError, StoreLocked, StoreMismatch, pages, verify
from storage_pages import (
    IDENTITY,
    PAGE_BYTES,
    blocks_bytes,
    budget_of,
    change_index,
    found_numbers,
    key_of,
    open_store,
    page_of,
    put_numbers,
    slots_path,
)

NUM_SMALL = 100  # pages of a small budget


def small() -> dict[str, int]:
    """Settings with a small budget."""
    return {"page_bytes": PAGE_BYTES, "budget_bytes": budget_of(NUM_SMALL)}


@pytest.mark.parametrize("kind", ["random", "normal", "flat"])
@pytest.mark.parametrize("page_bytes", [1, 1000, 4096, 70_000, 1 << 20])
def test_roundtrip_and_reopen(tmp_path: Path, page_bytes: int, kind: str) -> None:
    """Every page put comes back byte for byte, also after reopening, and absent keys are misses."""
    with_filter = {"filter": PageFilter("byte_shuffle", 2)} if page_bytes % 2 == 0 else {}
    store = open_store(tmp_path, page_bytes=page_bytes, **with_filter)
    assert put_numbers(store, range(9), page_bytes, kind) == [True] * 9
    for _ in range(2):
        assert found_numbers(store, range(12), page_bytes, kind) == set(range(9))
        assert store.contains([key_of(n) for n in range(12)]) == [True] * 9 + [False] * 3
        stats = store.stats()
        assert (stats.entries, stats.hits, stats.misses, stats.corrupt) == (9, 9, 3, 0)
        store.check()
        store.close()
        store = open_store(tmp_path, page_bytes=page_bytes)
    store.close()


def test_put_counts_and_keeps_the_first(tmp_path: Path) -> None:
    """A key that is present is acknowledged without being written again; delete removes it."""
    store = open_store(tmp_path)
    assert store.put([(key_of(0), page_of(0)), (key_of(1), page_of(1)), (key_of(0), page_of(0))]) == [True] * 3
    assert store.put([(key_of(0), page_of(99)), (key_of(2), page_of(2))]) == [True, True]
    stats = store.stats()
    assert (stats.entries, stats.puts, stats.put_bytes_raw) == (3, 3, 3 * PAGE_BYTES)
    assert stats.put_bytes_stored == stats.live_bytes == 3 * (PAGE_BYTES + 52)
    assert found_numbers(store, range(3)) == {0, 1, 2}
    assert store.delete([key_of(0), key_of(7)]) == 1
    assert found_numbers(store, range(3)) == {1, 2}
    store.check()
    store.close()


VERBS = st.sampled_from(["put", "get", "delete", "reopen", "compact"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(st.tuples(VERBS, st.lists(st.integers(0, 9), max_size=6)), max_size=12))
def test_behaves_like_a_set(tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, list[int]]]) -> None:
    """Under any sequence of operations the store holds what a set of numbers would, and check() finds nothing."""
    path = tmp_path_factory.mktemp("store")
    store, model = open_store(path), set[int]()
    for verb, numbers in operations:
        if verb == "put":
            assert put_numbers(store, numbers) == [True] * len(numbers)
            model |= set(numbers)
        elif verb == "get":
            assert found_numbers(store, numbers) == model & set(numbers)
        elif verb == "delete":
            assert store.delete([key_of(n) for n in numbers]) == len(model & set(numbers))
            model -= set(numbers)
        elif verb == "compact":
            store.compact()
        else:
            store.close()
            store = open_store(path)
        store.check()
    assert found_numbers(store, range(10)) == model
    store.close()


def test_identity(tmp_path: Path) -> None:
    """A store made for another identity or page size is refused with both values, and stays as it was."""
    store = open_store(tmp_path)
    put_numbers(store, range(3))
    store.close()
    with pytest.raises(StoreMismatch, match=r"model: stored 'tiny', now 'huge'.*use another disk path"):
        open_store(tmp_path, identity={**IDENTITY, "model": "huge"})
    with pytest.raises(StoreMismatch, match=r"salt: stored None, now 'a'"):
        open_store(tmp_path, identity={**IDENTITY, "salt": "a"})
    with pytest.raises(StoreMismatch, match=r"page_bytes: stored \[16320\], now \[8192\]"):
        open_store(tmp_path, page_bytes=8192)
    with pytest.raises(StoreError, match="identity"):
        open_store(tmp_path, identity={})
    store = open_store(tmp_path)
    assert found_numbers(store, range(3)) == {0, 1, 2}
    store.close()


def test_one_writer(tmp_path: Path) -> None:
    """A path that is open is refused, and free again after close."""
    store = open_store(tmp_path)
    with pytest.raises(StoreLocked, match="in use by process"):
        open_store(tmp_path)
    put_numbers(store, [1])
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.contains([key_of(1)])
    with pytest.raises(StoreError, match="closed"):
        put_numbers(store, [1])
    again = open_store(tmp_path)
    assert found_numbers(again, [1]) == {1}
    again.close()


def test_bad_calls(tmp_path: Path) -> None:
    """Wrong buffers, keys, budgets and paths are refused in one line and leave nothing locked."""
    with pytest.raises(StoreError, match=r"budget_bytes=1000 .* raise it to"):
        open_store(tmp_path / "a", budget_bytes=1000)
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        with pytest.raises(StoreError, match="not a directory"):
            open_store(path)
    with pytest.raises(StoreError, match="cannot write"):
        open_store("/proc/no-such-place")
    store = open_store(tmp_path / "b")
    page = page_of(0)
    with pytest.raises(StoreError, match="uint8"):
        store.put([(key_of(0), page[:-1])])
    with pytest.raises(StoreError, match="contiguous"):
        store.get_into([key_of(0)], [np.empty(2 * PAGE_BYTES, dtype=np.uint8)[::2]])
    page.flags.writeable = False
    with pytest.raises(StoreError, match="writable"):
        store.get_into([key_of(0)], [page])
    for key in (b"", b"k" * 512):
        with pytest.raises(StoreError, match="1 to 511"):
            store.contains([key])
    with pytest.raises(StoreError, match="1 keys but 0 buffers"):
        store.get_into([key_of(0)], [])
    store.close()


@pytest.mark.parametrize("name", ["store.json", "index.mdb", "pages-4096.dat"])
@pytest.mark.parametrize("content", [b"some notes\n", b"\0" * 20000, b"{}"])
def test_foreign_file(tmp_path: Path, name: str, content: bytes) -> None:
    """A file that no store wrote is refused and not touched."""
    (tmp_path / name).write_bytes(content)
    for _ in range(2):
        with pytest.raises(StoreCorrupt, match=r"is damaged: its record|has lost its store.json"):
            open_store(tmp_path)
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("kind", ["random", "mixed"])
@pytest.mark.parametrize("batch", [1, 7, 100])
def test_budget_holds_from_the_first_write(tmp_path: Path, kind: str, batch: int) -> None:
    """Writing ten times the budget never takes the files 5 % above it, refuses nothing, and most of it stays in use."""
    settings = small()
    page_bytes, budget_bytes = settings["page_bytes"], settings["budget_bytes"]
    store = open_store(tmp_path, **settings)
    for start in range(0, 10 * NUM_SMALL, batch):
        numbers = range(start, start + batch)
        pages = [page_of(n, page_bytes) for n in numbers]
        if kind == "mixed":  # values of many sizes, which must find neighbouring file pages between each other
            for number, page in zip(numbers, pages, strict=True):
                page[(number * 2654435761) % page_bytes :] = 0
        stored = store.put([(key_of(n), page) for n, page in zip(numbers, pages, strict=True)])
        assert max(blocks_bytes(tmp_path), store.stats().file_bytes) <= 1.05 * budget_bytes
        assert stored == [True] * batch or (batch == 100 and all(stored[:70]))
    stats = store.stats()
    assert stats.evicted > 500 and stats.write_errors == 0
    assert stats.live_bytes > (0.45 if kind == "mixed" else 0.75) * NUM_SMALL * page_bytes
    assert stats.entries == stats.puts - stats.evicted
    store.check()
    store.close()


def test_first_key_of_a_call_outlives_its_last(tmp_path: Path) -> None:
    """A call larger than the budget keeps its head, says so truthfully, and drops its tail."""
    settings = small()
    store = open_store(tmp_path, **settings)
    stored = put_numbers(store, range(250), settings["page_bytes"])
    kept = stored.count(True)
    assert 90 < kept <= 112 and stored == [True] * kept + [False] * (250 - kept)
    assert found_numbers(store, range(250), settings["page_bytes"]) == set(range(kept))
    store.close()


@pytest.mark.parametrize("reopen", [False, True])
def test_use_protects(tmp_path: Path, reopen: bool) -> None:
    """Pages read or put again outlive older unread ones, also when the store was reopened in between."""
    settings = small()
    page_bytes, store = settings["page_bytes"], open_store(tmp_path, **settings)
    for number in range(60):
        put_numbers(store, [number], page_bytes)
    assert found_numbers(store, [3, 0, 5], page_bytes) == {0, 3, 5}
    put_numbers(store, [1], page_bytes)
    assert store.stats().evicted == 0
    if reopen:
        store.close()
        store = open_store(tmp_path, **settings)
    number = 100
    while store.stats().evicted < 20:
        put_numbers(store, [number], page_bytes)
        number += 1
        assert number < 1000
    unused = [n for n in range(60) if n not in (0, 1, 3, 5)]
    gone = store.stats().evicted
    assert gone < len(unused)
    assert found_numbers(store, range(60), page_bytes) == {0, 1, 3, 5, *unused[gone:]}
    store.check()
    store.close()


def test_smaller_budget_shrinks_the_file(tmp_path: Path) -> None:
    """Opening with a smaller budget drops the oldest pages and makes the files smaller at once."""
    settings = small()
    page_bytes, budget_bytes = settings["page_bytes"], settings["budget_bytes"]
    store = open_store(tmp_path, page_bytes=page_bytes)
    for start in range(0, 200, 10):
        put_numbers(store, range(start, start + 10), page_bytes)
    assert blocks_bytes(tmp_path) > 1.7 * budget_bytes
    store.close()
    store = open_store(tmp_path, **settings)
    assert max(blocks_bytes(tmp_path), store.stats().file_bytes) <= 1.05 * budget_bytes
    left = found_numbers(store, range(200), page_bytes)
    assert len(left) > 90 and min(left) >= 85
    store.check()
    assert put_numbers(store, range(200, 270), page_bytes) == [True] * 70
    store.check()
    store.close()


def test_space_comes_back(tmp_path: Path) -> None:
    """The space of deleted pages is free at once, and compacting cuts the files behind the last page; every other page
    is kept."""
    store = open_store(tmp_path)
    put_numbers(store, range(100))
    before_bytes = blocks_bytes(tmp_path)
    assert store.delete([key_of(n) for n in range(0, 100, 2)]) == 50
    assert blocks_bytes(tmp_path) < before_bytes - 45 * PAGE_BYTES
    assert store.stats().file_bytes < before_bytes - 45 * PAGE_BYTES
    store.delete([key_of(n) for n in range(1, 50, 2)])
    assert store.compact() >= 0
    assert slots_path(tmp_path).stat().st_size < 53 * (PAGE_BYTES + 4096 + 64)
    assert found_numbers(store, range(100)) == set(range(51, 100, 2))
    assert put_numbers(store, [200]) == [True]
    store.check()
    store.close()


def test_check_finds_what_the_index_says_wrongly(tmp_path: Path) -> None:
    """check() names every record that disagrees, in one error; repairing builds the index anew."""
    with contextlib.closing(open_store(tmp_path)) as store:
        put_numbers(store, range(5))

    def change(txn: Any, tables: dict[str, Any]) -> None:
        one, other = (bytes(txn.get(key_of(n), db=tables["pages"])) for n in (1, 2))
        txn.put(key_of(1), one[:8] + other[8:], db=tables["pages"])  # another page's slot
        txn.put(key_of(2), other[:8] + one[8:], db=tables["pages"])
        txn.put((77).to_bytes(8, "big"), key_of(9), db=tables["recency"])

    change_index(tmp_path, change)
    with contextlib.closing(open_store(tmp_path)) as store:
        assert store.rebuilt_pages is None
        with pytest.raises(StoreCorrupt) as caught:
            store.check()
        text = str(caught.value)
        assert f"page {key_of(1).hex()}: its slot holds another" in text and "use order" in text
        report = verify(store, repair=True)
        assert len(report.faults) == len(caught.value.violations) == 3
        store.check()
        assert found_numbers(store, range(5)) == set(range(5)) and store.stats().corrupt == 0


def test_what_was_touched_goes_last(tmp_path: Path) -> None:
    """Touched pages are the most recently used, the first key of the call last; absent ones change nothing."""
    with contextlib.closing(open_store(tmp_path)) as store:
        put_numbers(store, range(6))
        store.touch([key_of(n) for n in (3, 99, 1)])
        store.sync()
        order = [key for key, _ in pages(store)]
        assert order == [key_of(n) for n in (5, 4, 2, 0, 1, 3)]
        store.check()
