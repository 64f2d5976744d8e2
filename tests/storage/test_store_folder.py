"""The stores of one folder share a budget. The least recently used stores are removed before a store evicts pages of
another one."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hicache.storage import LmdbPageStore, StoreLocked, describe, store_folders
from hicache.storage.store_folder import remove_store, store_name
from storage_pages import IDENTITY, PAGE_BYTES, blocks_bytes, budget_of, found_numbers, open_store, put_numbers

BUDGET_BYTES = budget_of(40)


def named(folder: Path, model: str) -> Path:
    return folder / store_name({**IDENTITY, "model": model}, [PAGE_BYTES])


def opened(folder: Path, model: str, **changes: Any) -> LmdbPageStore:
    """Open the store of a model, as an engine does."""
    identity = {**IDENTITY, "model": model}
    settings = {"identity": identity, "budget_bytes": BUDGET_BYTES, "shares_budget": True, **changes}
    return open_store(named(folder, model), **settings)


def filled(folder: Path, model: str, num_pages: int, used_s: int) -> Path:
    """A closed store of `num_pages` pages, last used at `used_s`."""
    with contextlib.closing(opened(folder, model)) as store:
        assert all(put_numbers(store, range(num_pages)))
    os.utime(named(folder, model) / "writer.lock", (used_s, used_s))
    return named(folder, model)


def bytes_below(folder: Path) -> int:
    return sum(blocks_bytes(store) for store in folder.iterdir())


def test_least_recently_used_stores_go_first(tmp_path: Path) -> None:
    """If a store needs more than the common budget, closed stores are removed one by one, and then it evicts its own
    pages. A store with a custom name stays. All files are within the budget at any time."""
    own = open_store(tmp_path / "own")
    own.close()
    middle, oldest, newest = (filled(tmp_path, *args) for args in (("b", 10, 200), ("a", 10, 100), ("c", 10, 300)))
    spare_bytes = blocks_bytes(tmp_path / "own")
    order = []
    with contextlib.closing(opened(tmp_path, "new")) as store:
        for number in range(60):
            assert put_numbers(store, [number]) == [True]
            assert bytes_below(tmp_path) - spare_bytes <= BUDGET_BYTES
            removed = [one for one in (oldest, middle, newest) if not one.exists() and one not in order]
            order += removed
            assert not removed or store.stats().evicted == 0
        assert order == [oldest, middle, newest] and store.stats().evicted > 0
        assert set(range(40, 60)) <= found_numbers(store, range(60))
    assert {*store_folders(tmp_path)} == {tmp_path / "own", named(tmp_path, "new")}


def test_open_stores_come_to_equal_shares(tmp_path: Path) -> None:
    """No open store is removed. A store that is opened later gets its share of the budget: the others shrink at their
    next write, or when they check the budget."""
    with contextlib.closing(opened(tmp_path, "a")) as first, contextlib.closing(opened(tmp_path, "b")) as second:
        assert all(put_numbers(first, range(30))) and all(put_numbers(first, range(30, 60)))
        assert all(put_numbers(second, range(15)))
        first.keep_budget()
        assert bytes_below(tmp_path) <= BUDGET_BYTES and found_numbers(second, range(15)) == set(range(15))
        for number in range(100, 200):
            for store in (first, second):
                assert put_numbers(store, [number]) == [True]
            assert bytes_below(tmp_path) <= BUDGET_BYTES
        sizes = [store.stats().file_bytes for store in (first, second)]
        assert min(sizes) > 0.8 * BUDGET_BYTES / 2
        with pytest.raises(StoreLocked):
            opened(tmp_path, "a")
        assert not remove_store(named(tmp_path, "a"))
    assert len(store_folders(tmp_path)) == 2


def test_stats_have_the_bytes_of_the_other_stores(tmp_path: Path) -> None:
    """The stats of a store include the bytes of the other stores that share its budget. If the smallest stores together
    need more than the budget, the stats of the store that wrote last show it. A store that shares no budget counts no
    other store."""
    with contextlib.closing(opened(tmp_path, "a")) as first, contextlib.closing(opened(tmp_path, "b")) as second:
        assert first.stats().others_bytes == 0
        assert all(put_numbers(first, range(20))) and all(put_numbers(second, range(15)))
        assert second.stats().others_bytes >= blocks_bytes(named(tmp_path, "a"))
        assert second.stats().file_bytes + second.stats().others_bytes >= bytes_below(tmp_path)
        first.keep_budget()
        assert first.stats().others_bytes >= blocks_bytes(named(tmp_path, "b"))
    small = tmp_path / "small"
    budget_bytes = budget_of(8)  # the smallest budget of one store
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(contextlib.closing(opened(small, model, budget_bytes=budget_bytes))) for model in "ab"
        ]
        for store in stores:
            for number in range(60):
                assert put_numbers(store, [number]) == [True]
        stats = stores[1].stats()
        assert stats.file_bytes <= budget_bytes < (stats.file_bytes + stats.others_bytes) / 1.05
    with contextlib.closing(opened(tmp_path, "own", shares_budget=False)) as own:
        assert put_numbers(own, [1]) == [True] and own.stats().others_bytes == 0


def test_a_lowered_budget_says_what_it_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When a lower budget evicts pages, one message has both budgets, the pages and the stores. If nothing is evicted,
    nothing is logged."""
    filled(tmp_path, "a", 8, 100)
    filled(tmp_path, "b", 30, 200)
    less_bytes = budget_of(12)
    for budget_bytes in (BUDGET_BYTES, less_bytes, less_bytes, BUDGET_BYTES):
        opened(tmp_path, "b", budget_bytes=budget_bytes).close()
    [message] = caplog.messages
    num_left = describe(named(tmp_path, "b")).entries
    assert num_left is not None and 8 <= num_left < 30
    numbers = [
        int(number) for number in re.findall(r"(?<![\w-])\d+(?![\w-])", message.partition(named(tmp_path, "b").name)[2])
    ]
    assert numbers == [BUDGET_BYTES, less_bytes, 30 - num_left, 30, 1]


def test_only_engines_use_a_store(tmp_path: Path) -> None:
    """The last use of a store is when an engine last opened, closed or wrote it. Describing a store is no use."""
    store = filled(tmp_path, "a", 2, 100)
    for _ in range(2):
        assert describe(store).last_use_s == 100
    opened(tmp_path, "a").close()
    assert describe(store).last_use_s > 100


def test_a_store_that_is_removed_can_be_made_anew(tmp_path: Path) -> None:
    """No file of a removed store is left, and it can be created again. A kill during its removal leaves a valid store
    with fewer pages."""
    store = filled(tmp_path, "a", 4, 100)
    (store / "index.mdb").unlink()
    [data] = store.glob("pages-*")
    data.unlink()
    assert describe(store).entries == 0
    assert remove_store(store) and not store.exists() and remove_store(store) and not store.exists()
    filled(tmp_path, "a", 4, 100)
    assert describe(tmp_path).entries == 4
