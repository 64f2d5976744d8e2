"""Slots are read and written without the kernel's page cache, and neighbours in one call. The tests check the bytes and
the calls."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.storage import PageCipher, slot_file
from hicache.storage.memory import ALIGNMENT, aligned_buffer
from hicache.storage.slot_file import BLOCK_BYTES, SlotFile, SlotRead, SlotWrite
from storage_pages import found_numbers, key_of, open_store, page_of, put_numbers

SLOT_BYTES = BLOCK_BYTES + 3 * ALIGNMENT
NUM_SLOTS = 12
PAYLOADS = st.lists(st.tuples(st.integers(1, 3 * ALIGNMENT), st.booleans()), min_size=1, max_size=5)


@contextlib.contextmanager
def slots_at(path: Path) -> Iterator[SlotFile]:
    with contextlib.closing(SlotFile(path, SLOT_BYTES)) as slots:
        slots.allocate(range(NUM_SLOTS))
        yield slots


def payload_of(seed: int, num_bytes: int, is_aligned: bool) -> memoryview:
    memory = aligned_buffer(num_bytes + 1)[0 if is_aligned else 1 :][:num_bytes]
    memory[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()
    return memory


def block_of(seed: int) -> bytes:
    return bytes([seed % 251 + 1]) * BLOCK_BYTES


def read_run(slots: SlotFile, first: int, lengths: Sequence[int], start: int = 0) -> list[tuple[bytes, bytes] | None]:
    """Read blocks and payloads in one call to memory from `start` on. None for a page whose bytes are not all in the
    file."""
    reads = [SlotRead(first + n, aligned_buffer(length)[start:], length) for n, length in enumerate(lengths)]
    blocks = slots.read(reads)
    return [
        None if block is None else (bytes(block), bytes(one.payload[: one.payload_bytes]))
        for block, one in zip(blocks, reads, strict=True)
    ]


@given(
    steps=st.lists(st.tuples(st.integers(0, NUM_SLOTS - 5), PAYLOADS), min_size=1, max_size=6), start=st.integers(0, 1)
)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, list[tuple[int, bool]]]], start: int
) -> None:
    """Runs of pages of any length, anywhere in memory, are read back alone and with their neighbours, and change no
    other slot. Incomplete pages of a truncated file are reported."""
    model: dict[int, tuple[bytes, bytes]] = {}
    path = tmp_path_factory.mktemp("slots") / "data"
    with slots_at(path) as slots:
        for step, (first, payloads) in enumerate(steps):
            run = [
                SlotWrite(first + n, block_of(9 * step + n), payload_of(9 * step + n, *payload))
                for n, payload in enumerate(payloads)
            ]
            slots.write(run)
            model.update((one.slot, (one.block, bytes(one.payload))) for one in run)
        lengths = [len(model[slot][1]) if slot in model else 1 for slot in range(NUM_SLOTS)]
        found = read_run(slots, 0, lengths, start)
        assert {slot: found[slot] for slot in model} == model
        assert [read_run(slots, slot, lengths[slot : slot + 1], start) for slot in model] == [[model[s]] for s in model]
        last = max(model)
        os.truncate(path, last * SLOT_BYTES + BLOCK_BYTES + lengths[last] - 1)
        found = read_run(slots, 0, lengths[: last + 1], start)
        assert found[last] is None and all(found[slot] == model[slot] for slot in model if slot != last)


class Calls:
    """Counts the reads and writes of files, separately with and without O_DIRECT."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[tuple[str, bool], int] = {}
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def count(descriptor: int, *arguments: Any) -> int:
            kind = name, bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            return call(descriptor, *arguments)

        return count


def test_neighbours_are_one_direct_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring pages of one put are written in one call. A batch of them is read in one call, whatever its order.
    Aligned pages are not copied."""
    page_bytes, calls = 64 << 10, Calls(monkeypatch)
    with contextlib.closing(open_store(tmp_path, page_bytes=page_bytes, budget_bytes=1 << 30)) as store:
        assert all(put_numbers(store, range(8), page_bytes))
        assert calls.counts == {("pwritev", True): 1}
        order = [3, 0, 7, 1, 2, 6, 5, 4]
        assert found_numbers(store, order, page_bytes) == set(order)
        assert calls.counts == {("pwritev", True): 1, ("preadv", True): 1}
        assert found_numbers(store, [0, 1, 4, 5], page_bytes) == {0, 1, 4, 5}
        assert calls.counts[("preadv", True)] == 3


def test_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without direct access, or with memory that direct access refuses, the same bytes go through the
    page cache. A failing disk raises."""

    def refuse(path: str, flags: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(slot_file, "_open_direct", refuse)
    page = SlotWrite(2, block_of(1), payload_of(1, 5000, is_aligned=True))
    with slots_at(tmp_path / "data") as slots:
        slots.write([page])
        assert read_run(slots, 2, [5000]) == [(page.block, bytes(page.payload))]
    monkeypatch.setattr(slot_file, "_open_direct", lambda path, flags: os.open(path, os.O_WRONLY))
    with slots_at(tmp_path / "data") as slots, pytest.raises(OSError):
        read_run(slots, 2, [5000])


def test_a_sync_beside_a_write_leaves_the_rest_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync in another thread may miss bytes of a page that is being written; the next sync writes them."""
    write, sync, calls = os.pwritev, os.fdatasync, list[str]()
    with slots_at(tmp_path / "data") as slots:

        def write_beside_a_sync(*arguments: Any) -> int:
            slots.sync()
            calls.append("write")
            return write(*arguments)

        def counted_sync(descriptor: int) -> None:
            calls.append("sync")
            sync(descriptor)

        monkeypatch.setattr(os, "pwritev", write_beside_a_sync)
        monkeypatch.setattr(os, "fdatasync", counted_sync)
        slots.write([SlotWrite(0, bytes(BLOCK_BYTES), memoryview(bytes(ALIGNMENT)))])
        slots.sync()
    assert calls == ["write", "sync"]


@pytest.mark.parametrize("num_pages", [1, 3])
def test_an_encrypted_page_is_longer_than_its_aligned_buffer(tmp_path: Path, num_pages: int) -> None:
    """The bytes that encryption adds to an incompressible page do not fit the page's buffer, so the store reads it to
    other memory first."""
    pages = {key_of(n): page_of(n, ALIGNMENT) for n in range(num_pages)}
    with contextlib.closing(open_store(tmp_path, page_bytes=ALIGNMENT, cipher=PageCipher(bytes(32)))) as store:
        assert store.put(list(pages.items())) == [True] * num_pages
        memory = np.frombuffer(aligned_buffer(num_pages * ALIGNMENT), dtype=np.uint8)
        into = list(memory[: num_pages * ALIGNMENT].reshape(num_pages, ALIGNMENT))
        assert store.get_into(list(pages), into) == [True] * num_pages
        assert all(np.array_equal(page, pages[key]) for key, page in zip(pages, into, strict=True))
