"""Damage to the index of a closed store: B-tree pages that LMDB would follow, changed in its file.

Run as a program, it plants damage at random, a store of its own each, and has a child use that store, which may crash.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb

from child_case import in_child
from hicache.storage import StoreIndexDamaged, rescue, verify
from hicache.storage.lmdb_pages import TableRecord, read_meta
from storage_pages import LAYOUTS, Layout, found_numbers, key_of, open_store, put_numbers

PSIZE = 4096
BRANCH, LEAF, RUN = 1, 2, 4
PAGE_BYTES = 2048 - 64  # short: B-trees with many leaf pages
SETTINGS: dict[str, Any] = {"page_bytes": PAGE_BYTES, "budget_bytes": 4 << 20, "level": 0}
NUM_PAGES, NUM_IN_SLOTS = 350, 307  # that are there: numbers from 60 on, with slots the later ones


def make(path: Path, layout: Layout) -> None:
    """A store with B-trees of two levels, free pages, and use orders that differ from the order of storing."""
    with contextlib.closing(open_store(path, **SETTINGS, **layout)) as store:
        for first in range(0, 400, 20):
            assert all(put_numbers(store, range(first, first + 20), PAGE_BYTES))
        store.delete([key_of(number) for number in range(60)])
        assert found_numbers(store, range(100, 200), PAGE_BYTES) == set(range(100, 200))
        assert all(put_numbers(store, range(400, 410), PAGE_BYTES))
        for number in range(400, 404):  # small commits, which use free pages again, far from the end
            store.touch([key_of(number)])
            store.sync()


class IndexPages:
    """The pages of a closed store's file, to be changed; `save` writes them back."""

    def __init__(self, path: Path) -> None:
        self._data = path / "data.mdb"
        self.bytes = bytearray(self._data.read_bytes())
        meta = read_meta(self._data)
        assert meta is not None
        self.meta = meta
        with lmdb.open(str(path), max_dbs=16, readonly=True, lock=False) as env, env.begin() as txn:
            self.tables = {bytes(name): TableRecord.unpack(record) for name, record in txn.cursor()}

    def save(self) -> None:
        self._data.write_bytes(self.bytes)

    def word(self, page: int, at: int) -> int:
        return int(struct.unpack_from("<H", self.bytes, page * PSIZE + at)[0])

    def put(self, page: int, at: int, value: int, kind: str = "H") -> None:
        struct.pack_into(f"<{kind}", self.bytes, page * PSIZE + at, value)

    def nodes(self, page: int) -> list[int]:
        """Where the nodes of a page begin in it, by key."""
        return [self.word(page, 16 + 2 * index) for index in range((self.word(page, 12) - 16) // 2)]

    def children(self, page: int) -> list[int]:
        return [self.word(page, at) | self.word(page, at + 2) << 16 for at in self.nodes(page)]

    def leaves(self, name: bytes) -> list[int]:
        """The leaves of a table, the lowest keys first."""
        table = self.meta.free if name == b"free pages" else self.tables[name]
        level = [table.root]
        for _ in range(table.depth - 1):
            level = [child for page in level for child in self.children(page)]
        return level

    def data_at(self, page: int, index: int) -> int:
        """Where the data of a node begins, in its page."""
        at = self.nodes(page)[index]
        return at + 8 + self.word(page, at + 6)

    def record_of(self, name: bytes) -> tuple[int, int]:
        """The page with the record of a table, and where in it the record begins."""
        page = self.meta.main.root
        for index, at in enumerate(self.nodes(page)):
            key = bytes(self.bytes[page * PSIZE + at + 8 : page * PSIZE + self.data_at(page, index)])
            if key == name:
                return page, self.data_at(page, index)
        raise KeyError(name)

    def all(self) -> list[int]:
        """Every page that says it is one of a tree."""
        stated = (
            (page, struct.unpack_from("<QHH", self.bytes, page * PSIZE)) for page in range(self.meta.last_page + 1)
        )
        return [page for page, (number, _, flags) in stated if number == page and flags in (BRANCH, LEAF)]


def _bits(tree: IndexPages, rng: random.Random, start: int) -> None:
    for _ in range(rng.choice((1, 1, 4))):
        tree.bytes[start + rng.randrange(PSIZE)] ^= 1 << rng.randrange(8)


def _noise(tree: IndexPages, rng: random.Random, start: int) -> None:
    length = rng.choice((16, 512))
    at = start + rng.randrange(PSIZE // length) * length
    tree.bytes[at : at + length] = rng.randbytes(length) if rng.random() < 0.6 else bytes(length)


def _head(tree: IndexPages, rng: random.Random, start: int) -> None:
    tree.bytes[start + rng.randrange(16)] = rng.randrange(256)


def _swap(tree: IndexPages, rng: random.Random, start: int) -> None:
    """Two pages in each other's place, as by a write that went astray."""
    other = rng.choice(tree.all()) * PSIZE
    ours, theirs = tree.bytes[start : start + PSIZE], tree.bytes[other : other + PSIZE]
    tree.bytes[start : start + PSIZE], tree.bytes[other : other + PSIZE] = theirs, ours


KINDS: tuple[Callable[[IndexPages, random.Random, int], None], ...] = (_bits, _noise, _head, _swap)


def spoil(path: Path, seed: int) -> None:
    """Damage one page of a tree, of a kind that `seed` decides."""
    rng, tree = random.Random(seed), IndexPages(path)
    rng.choice(KINDS)(tree, rng, rng.choice(tree.all()) * PSIZE)
    tree.save()


def use(path: Path, layout: Layout) -> dict[str, Any]:
    """Whatever is done to a store: read, put, evict, delete, verify. One that is refused is rebuilt before."""
    said: dict[str, Any] = {"refused": ""}
    try:
        store = open_store(path, **SETTINGS, **layout)
    except StoreIndexDamaged as error:
        said["refused"] = str(error)
        said["rescued"] = rescue(path)
        store = open_store(path, **SETTINGS, **layout)
        verify(store, repair=True)
    said["found"] = len(found_numbers(store, range(60, 410), PAGE_BYTES))
    for first in range(1000, 1150, 50):
        put_numbers(store, range(first, first + 40), PAGE_BYTES)
    found_numbers(store, range(1000, 1150), PAGE_BYTES)
    store.delete([key_of(number) for number in range(200, 230)])
    for first in range(2000, 3500, 50):  # more than the budget
        put_numbers(store, range(first, first + 50), PAGE_BYTES)
    if store.stats().read_only:  # lmdb or a record said that something is wrong
        store.close()
        store = open_store(path, **SETTINGS, **layout)
    verify(store, repair=True)
    said["left"] = [fault.reason for fault in verify(store).faults]
    found_numbers(store, range(3500), PAGE_BYTES)
    said["takes"] = all(put_numbers(store, range(5000, 5010), PAGE_BYTES))
    store.close()
    return said


def outcomes(folder: Path, layout: Layout, seeds: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """What becomes of a store for each seed of its damage."""
    source, copy = folder / "source", folder / "copy"
    make(source, layout)
    for seed in seeds:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        spoil(copy, seed)
        yield seed, in_child(lambda: use(copy, layout), folder / "result")


if __name__ == "__main__":
    for seed, said in outcomes(Path(sys.argv[1]), LAYOUTS[sys.argv[2]], range(int(sys.argv[3]), int(sys.argv[4]))):
        print(json.dumps([seed, said]), flush=True)
