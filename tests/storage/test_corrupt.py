"""Damaged stores: what cannot be verified is a miss, a counter and a deletion, and never wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from hicache.storage import PageFilter, StoreCorrupt
from storage_pages import PAGE_BYTES, found_numbers, key_of, open_store, page_of, put_numbers

HEADER = 48


def damage(path: Path, change: Callable[[dict[bytes, bytes]], None]) -> None:
    """Rewrite the stored values through lmdb itself, behind the store's back."""
    with lmdb.open(str(path), max_dbs=4, map_size=1 << 27) as env:
        pages = env.open_db(b"pages")
        with env.begin(write=True) as txn:
            before = {bytes(k): bytes(v) for k, v in txn.cursor(db=pages)}
            after = dict(before)
            change(after)
            for key, value in after.items():
                if value != before[key]:
                    txn.put(key, value, db=pages)


@pytest.mark.parametrize("kind", ["random", "normal"])
def test_flipped_bytes(tmp_path: Path, kind: str) -> None:
    """A flip of any header byte or of sampled payload bytes is a miss, counted, and gone after the next put."""
    places = [*range(HEADER), *range(HEADER, HEADER + 8), *range(1000, 10_000, 450)]
    store = open_store(tmp_path, filter=PageFilter("byte_shuffle", 2))
    put_numbers(store, range(len(places) + 3), kind=kind)
    store.close()

    def flip(values: dict[bytes, bytes]) -> None:
        for number, place in enumerate(places):
            value = bytearray(values[key_of(number)])
            value[place] ^= 1 << number % 8
            values[key_of(number)] = bytes(value)

    damage(tmp_path, flip)
    store = open_store(tmp_path, filter=PageFilter("byte_shuffle", 2))
    intact = set(range(len(places), len(places) + 3))
    assert store.contains([key_of(0)]) == [True]
    assert found_numbers(store, range(len(places) + 3), kind=kind) == intact
    assert store.stats().corrupt == len(places) and store.stats().misses == len(places)
    assert store.contains([key_of(0)]) == [False]
    assert put_numbers(store, [500], kind=kind) == [True]
    assert store.stats().entries == len(intact) + 1
    store.check()
    assert put_numbers(store, range(len(places)), kind=kind) == [True] * len(places)
    assert found_numbers(store, range(len(places) + 3), kind=kind) == set(range(len(places) + 3))
    store.check()
    store.close()


def test_truncated_and_swapped_values(tmp_path: Path) -> None:
    """A value cut short, a value under another key, and an empty value are misses; a rewrite of the key heals it."""
    store = open_store(tmp_path)
    put_numbers(store, range(10))
    store.close()

    def spoil(values: dict[bytes, bytes]) -> None:
        for number, length in enumerate((0, 1, HEADER - 1, HEADER, PAGE_BYTES, PAGE_BYTES + HEADER - 1)):
            values[key_of(number)] = values[key_of(number)][:length]
        values[key_of(7)], values[key_of(8)] = values[key_of(8)], values[key_of(7)]

    damage(tmp_path, spoil)
    store = open_store(tmp_path)
    with pytest.raises(StoreCorrupt) as caught:
        store.check()
    assert len([v for v in caught.value.violations if "recorded" in v]) == 6
    assert len([v for v in caught.value.violations if "checksum differs" in v]) == 2
    assert found_numbers(store, range(10)) == {6, 9}
    assert put_numbers(store, range(10)) == [True] * 10
    assert found_numbers(store, range(10)) == set(range(10))
    store.check()
    store.close()


def test_values_of_another_namespace(tmp_path: Path) -> None:
    """A whole value copied from a store of another identity is a miss."""
    theirs = open_store(tmp_path / "a", identity={"model": "theirs"})
    ours = open_store(tmp_path / "b", identity={"model": "ours"})
    put_numbers(theirs, [1])
    ours.put([(key_of(1), page_of(2))])
    theirs.close()
    ours.close()
    taken: dict[bytes, bytes] = {}
    damage(tmp_path / "a", taken.update)
    with lmdb.open(str(tmp_path / "a"), max_dbs=4) as env, env.begin(db=env.open_db(b"pages")) as txn:
        taken[key_of(1)] = txn.get(key_of(1))
    damage(tmp_path / "b", lambda values: values.update(taken))
    ours = open_store(tmp_path / "b", identity={"model": "ours"})
    assert ours.get_into([key_of(1)], [np.empty(PAGE_BYTES, dtype=np.uint8)]) == [False]
    assert ours.stats().corrupt == 1
    ours.close()


def test_bytes_changed_in_the_file(tmp_path: Path) -> None:
    """A payload byte changed in the data file itself is a miss, and the other pages are served."""
    store = open_store(tmp_path)
    put_numbers(store, range(6))
    store.close()
    data = tmp_path / "data.mdb"
    content = bytearray(data.read_bytes())
    content[content.index(page_of(4).tobytes()[100:200])] ^= 0x10
    data.write_bytes(content)
    store = open_store(tmp_path)
    assert found_numbers(store, range(6)) == {0, 1, 2, 3, 5}
    store.close()


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_file_cut_short(tmp_path: Path, share: float) -> None:
    """A data file cut short is refused with a remedy every time, and is neither mapped blindly nor changed."""
    store = open_store(tmp_path)
    put_numbers(store, range(50))
    store.close()
    data = tmp_path / "data.mdb"
    length = int(data.stat().st_size * share)
    with data.open("r+b") as file:
        file.truncate(length)
    for _ in range(2):
        with pytest.raises(StoreCorrupt, match=r"disk path|remove the directory"):
            open_store(tmp_path)
        assert data.stat().st_size == length


def test_short_file_without_loss(tmp_path: Path) -> None:
    """A data file that lacks only free pages at its end, as lmdb may leave it, opens whole; else it is refused."""
    store = open_store(tmp_path)
    put_numbers(store, range(20))
    put_numbers(store, range(100, 105))
    store.delete([key_of(number) for number in range(100, 105)])
    store.touch([key_of(0)])  # the next commits, which use free pages again: the lowest
    store.sync()
    store.touch([key_of(1)])
    store.close()
    data = tmp_path / "data.mdb"
    whole = data.read_bytes()
    outcomes = []
    for num_cut in range(1, 30):
        data.write_bytes(whole[: -num_cut * 4096])
        try:
            store = open_store(tmp_path)
        except StoreCorrupt:
            outcomes.append("refused")
            continue
        outcomes.append("opened")
        assert data.stat().st_size == len(whole)
        assert found_numbers(store, range(20)) == set(range(20))
        store.close()
    assert outcomes == sorted(outcomes) and set(outcomes) == {"opened", "refused"}
