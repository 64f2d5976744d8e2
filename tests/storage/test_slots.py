"""Slots against a model: each in one place, never written while a snapshot shows it, given back when it is free.

Run as a script, this file is another process that reads a snapshot: it says so, waits for a line, and reads it again.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage import LmdbPageReader, LmdbPageStore, PageBuffer
from hicache.storage.memory import aligned_buffer
from slot_case import (
    BLOCK_BYTES,
    EXTENT_BYTES,
    MEMORY,
    SLOT_BYTES,
    Slots,
    open_slots,
    payloads,
    read_slots,
    slots_of,
    tables_of,
    taken_bytes,
)
from storage_pages import found_numbers, key_of, page_of, put_numbers, slots_path

MODEL_PAGE_BYTES, MODEL_SLOT_BYTES = 60_000, 15 * BLOCK_BYTES
BUDGETS = (3_000_000, 1_750_000)  # the smaller one has space for about 16 raw pages
COMMIT_BUDGET = 8 << 20  # a commit takes two of the model's pages, the store about 120
AMPLE_BUDGET = 256 << 20  # tables have space for many commits while a reader keeps the pages that they free


def part_page(number: int, share: int) -> PageBuffer:
    """Random up to `share` sixteenths, zeros behind: 0 compresses to one block, 16 does not compress."""
    page = page_of(100 * number + share, MODEL_PAGE_BYTES)
    page[MODEL_PAGE_BYTES * share // 16 :] = 0
    return page


class Model:
    """A store, and which pages it has to have."""

    def __init__(self, path: Path) -> None:
        self.path, self.budget_bytes, self.shares = path, BUDGETS[0], dict[int, int]()
        self.store = self._open()

    def _open(self) -> LmdbPageStore:
        return open_slots(self.path, page_bytes=MODEL_PAGE_BYTES, budget_bytes=self.budget_bytes)

    def step(self, verb: str, numbers: list[tuple[int, int]]) -> int:
        """Do it, compare all, and tell how many pages were evicted."""
        evicted = self.store.stats().evicted
        if verb == "put":
            for number, share in numbers:
                self.shares.setdefault(number, share)
            stored = self.store.put([(key_of(n), part_page(n, share)) for n, share in numbers])
            assert stored == self.store.contains([key_of(n) for n, _ in numbers])
        elif verb == "delete":
            gone = [self.shares.pop(n, None) for n, _ in numbers]
            assert self.store.delete([key_of(n) for n, _ in numbers]) == len(gone) - gone.count(None)
        elif verb == "compact":
            before_bytes = self.store.stats().file_bytes
            saved_bytes = self.store.compact()
            assert self.store.stats().file_bytes == before_bytes - saved_bytes
        else:
            self.store.close()
            self.budget_bytes = self.budget_bytes if verb == "reopen" else BUDGETS[numbers[0][0] % 2]
            self.store, evicted = self._open(), 0
        held = [
            n for n, has in zip(self.shares, self.store.contains(list(map(key_of, self.shares))), strict=True) if has
        ]
        num_gone = len(self.shares) - len(held)
        assert num_gone == self.store.stats().evicted - evicted
        self.shares = {n: self.shares[n] for n in held}
        self.require()
        return num_gone

    def require(self) -> None:
        """Every byte of every page, every slot in one place, and the disk has what is in use and freed, no more."""
        buffers = [np.empty(MODEL_PAGE_BYTES, dtype=np.uint8) for _ in self.shares]
        assert self.store.get_into([key_of(n) for n in self.shares], buffers) == [True] * len(buffers)
        for (number, share), buffer in zip(self.shares.items(), buffers, strict=True):
            np.testing.assert_array_equal(buffer, part_page(number, share))
        self.store.check()
        slots, taken = slots_of(self.store), taken_bytes(self.path)
        slots.require_whole()
        assert set(slots.used) == {key_of(n) for n in self.shares}
        assert slots.used_bytes <= taken <= slots.used_bytes + slots.freed_bytes + EXTENT_BYTES
        stats = self.store.stats()
        assert stats.file_bytes == (self.path / "data.mdb").stat().st_size + taken <= 1.05 * self.budget_bytes
        assert (stats.entries, stats.write_errors) == (len(self.shares), 0)


NUMBERS, SHARES = st.integers(0, 59), st.one_of(st.integers(0, 16), st.just(16))
PUT = st.tuples(
    st.just("put"),
    st.lists(st.tuples(NUMBERS, SHARES), min_size=1, max_size=12, unique_by=lambda pair: pair[0]),
)
OTHERS = st.lists(st.tuples(NUMBERS, st.just(0)), min_size=1, max_size=12, unique=True)
STEPS = st.one_of(PUT, PUT, st.tuples(st.sampled_from(["delete", "compact", "reopen", "resize"]), OTHERS))


def empty(model: Model) -> None:
    """Deleting all and compacting leaves nothing, and the store goes on."""
    model.step("delete", [(number, 0) for number in list(model.shares)])
    model.store.compact()
    assert taken_bytes(model.path) <= EXTENT_BYTES
    assert (slots_of(model.store).num_slots, slots_path(model.path).stat().st_size) == (0, 0)
    model.step("put", [(number, 16) for number in range(5)])
    model.store.close()


@settings(deadline=None, max_examples=120)
@given(steps=st.lists(STEPS, max_size=30))
def test_slots_hold_what_a_model_holds(steps: list[tuple[str, list[tuple[int, int]]]]) -> None:
    """After any puts of pages of any compressed size, deletions, evictions, compactions and openings with any
    budget."""
    with TemporaryDirectory(dir=MEMORY) as path:
        model = Model(Path(path))
        for verb, numbers in steps:
            model.step(verb, numbers)
        empty(model)


@pytest.mark.parametrize("num_steps", [60, pytest.param(1500, marks=pytest.mark.long)])
def test_slots_hold_while_pages_are_evicted(tmp_path: Path, num_steps: int) -> None:
    """The same over many steps with a budget that nearly every put passes."""
    model, generator, evicted = Model(tmp_path), random.Random(num_steps), 0
    model.step("resize", [(1, 0)])
    for _ in range(num_steps):
        verb = generator.choice(["put"] * 8 + ["delete", "compact", "reopen"])
        numbers = generator.sample(range(1000) if verb == "put" else list(model.shares) or [0], k=1)
        if verb == "put":
            numbers = generator.sample(range(1000), k=generator.randrange(1, 13))
        evicted += model.step(verb, [(number, generator.choice([*range(17), 16, 16, 16])) for number in numbers])
    assert evicted > num_steps
    empty(model)


def churn(store: LmdbPageStore, turn: int) -> None:
    """Some pages go, others come, of several sizes, and the oldest are evicted."""
    store.delete([key_of(number) for number in range(turn * 7 % 40, turn * 7 % 40 + 9)])
    numbers = range(turn * 11, turn * 11 + 14)
    store.put([(key_of(n), page_of(n, kind="flat" if n % 5 == 0 else "random")) for n in numbers])
    store.parts.writer.evict_to(40 * SLOT_BYTES + store.parts.env.tables.data_bytes())


def assert_given_back(store: LmdbPageStore, path: Path) -> None:
    """Nobody reads: what a snapshot kept from being used again goes with the pages."""
    assert slots_of(store).freed_bytes > 40 * SLOT_BYTES
    store.parts.writer.evict_to(0)
    store.compact()
    assert taken_bytes(path) <= EXTENT_BYTES and slots_of(store).num_slots == 0
    store.check()


def test_a_slot_that_a_snapshot_shows_is_never_written(tmp_path: Path) -> None:
    """While a read transaction is open, the payloads that it shows stay, byte for byte, whatever is deleted, evicted
    and put; when it ends, their slots are given back."""
    store = open_slots(tmp_path, budget_bytes=AMPLE_BUDGET)
    put_numbers(store, range(40))
    with store.parts.env.tables.env.begin() as txn:
        shown = read_slots(txn, tables_of(store.parts.env.tables.env, txn))
        before = payloads(tmp_path, shown)
        for turn in range(25):
            churn(store, turn)
            assert payloads(tmp_path, shown) == before
            store.check()
        assert not shown.used.keys() & slots_of(store).used.keys()
    assert_given_back(store, tmp_path)
    store.close()


def test_a_slot_that_another_process_reads_is_never_written(tmp_path: Path) -> None:
    """The same for a reader in another process, over compactions too: it reads its snapshot whole at the end."""
    store = open_slots(tmp_path, budget_bytes=AMPLE_BUDGET)
    put_numbers(store, range(30))
    shown = slots_of(store)
    before = payloads(tmp_path, shown)
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, str(tmp_path), "30"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parent) as reader:
        assert reader.stdin and reader.stdout
        assert reader.stdout.readline() == "30 right\n"
        for turn in range(20):
            churn(store, turn)
            if turn % 8 == 5:
                assert store.compact() > 0
            assert payloads(tmp_path, shown) == before
        assert not shown.used.keys() & slots_of(store).used.keys()
        print(file=reader.stdin, flush=True)
        assert reader.stdout.readline() == "30 right\n"
    assert_given_back(store, tmp_path)
    store.close()


def read_twice(path: str, num_pages: int) -> None:
    """Read all pages of one snapshot, wait for a line, and read them again."""
    reader = LmdbPageReader(path)
    verifier = reader.stored_values.verifier

    def is_right(txn: Any, tables: Any, number: int, buffer: memoryview) -> bool:
        location = tables.locate(txn, [key_of(number)])[0]
        value = verifier.read(tables, key_of(number), location, buffer)
        return not isinstance(value, str) and bytes(value[48:]) == page_of(number).tobytes()

    def body(txn: Any, tables: Any) -> None:
        buffer = aligned_buffer(verifier.max_value_bytes)
        for turn in range(2):
            print(sum(is_right(txn, tables, number, buffer) for number in range(num_pages)), "right", flush=True)
            if not turn:
                sys.stdin.readline()

    reader.stored_values.env.read(body, None)
    reader.close()


class Moment(NamedTuple):
    """A store between two commits."""

    commit: int
    data: bytes
    slots: Slots
    payloads: dict[bytes, bytes]

    @classmethod
    def of(cls, store: LmdbPageStore, path: Path) -> Moment:
        slots, commit = slots_of(store), store.parts.env.tables.env.info()["last_txnid"]
        return cls(commit, (path / "data.mdb").read_bytes(), slots, payloads(path, slots, MODEL_SLOT_BYTES))

    def require_restored(self, copy: Path, newer: Path) -> None:
        """These tables beside the newer slots are a valid store with all its pages, which takes more."""
        copy.mkdir()
        (copy / "data.mdb").write_bytes(self.data)
        shutil.copy(slots_path(newer), copy)
        with contextlib.closing(open_commits(copy)) as store:
            held = {number for number in range(1000) if key_of(number) in self.slots.used}
            assert found_numbers(store, held, MODEL_PAGE_BYTES) == held and len(held) == len(self.slots.used)
            store.check()
            assert put_numbers(store, (1000, 1001), MODEL_PAGE_BYTES) == [True] * 2
            store.check()


def open_commits(path: Path) -> LmdbPageStore:
    return open_slots(path, page_bytes=MODEL_PAGE_BYTES, budget_bytes=COMMIT_BUDGET)


def test_pages_outlive_two_commits(tmp_path: Path) -> None:
    """Whatever two commits delete, evict and put, what the commit before them held is still there, as a machine needs
    it that loses its last commits. Later ones use the slots again."""
    path = tmp_path / "store"
    store = open_commits(path)
    put_numbers(store, range(140), MODEL_PAGE_BYTES)
    first_evicted = store.stats().evicted
    moments, num_reused = [Moment.of(store, path)], 0
    for turn in range(36):
        if turn % 3 == 1:
            assert store.delete([key_of(number) for number in range(turn * 2, turn * 2 + 5)]) > 0
        else:
            assert put_numbers(store, (140 + 2 * turn, 141 + 2 * turn), MODEL_PAGE_BYTES) == [True] * 2
        moments = [*moments[-3:], Moment.of(store, path)]
        if len(moments) < 4:
            continue
        assert [moment.commit for moment in moments] == list(range(moments[0].commit, moments[0].commit + 4))
        assert payloads(path, moments[1].slots, MODEL_SLOT_BYTES) == moments[1].payloads
        num_reused += payloads(path, moments[0].slots, MODEL_SLOT_BYTES) != moments[0].payloads
        if turn % 4 == 0:
            moments[1].require_restored(tmp_path / f"copy{turn}", path)
    assert num_reused > 8 and store.stats().evicted > first_evicted > 0
    store.close()


if __name__ == "__main__":
    read_twice(sys.argv[1], int(sys.argv[2]))
