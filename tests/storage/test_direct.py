"""Long values that are read past the kernel's memory: the bytes, and when that way is taken."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage import slot_file
from hicache.storage.memory import ALIGNMENT, aligned_buffer
from hicache.storage.slot_file import MIN_DIRECT_BYTES, SlotFile
from storage_pages import (
    forget_cached,
    found_numbers,
    open_store,
    put_numbers,
    slots_path,
)

FILE_BYTES = 3 * MIN_DIRECT_BYTES + 5 * ALIGNMENT
CASES = ("cold", "partly cached", "beside a write", "of a reader")


class File:
    """Random bytes on disk, which `slots_of` takes for slots of one block each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truth = np.random.default_rng(4).integers(0, 256, FILE_BYTES, dtype=np.uint8).tobytes()
        path.write_bytes(self.truth)

    def slots_of(self, case: str) -> contextlib.closing[SlotFile]:
        """Nothing of the file is in the kernel's memory."""
        slots = SlotFile(self.path, ALIGNMENT, writable=case != "of a reader")
        if case == "beside a write":
            slots.write(0, self.truth[:ALIGNMENT], b"", is_hole=True)
        forget_cached(self.path)
        return contextlib.closing(slots)

    def needs_direct_reads(self) -> None:
        with self.slots_of("cold") as slots:
            if slots.is_cached(0, FILE_BYTES):
                pytest.skip("the kernel does not tell what it has in memory")


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "data")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> File:
    return File(tmp_path_factory.mktemp("direct") / "data")


@settings(max_examples=settings.default.max_examples * 3)
@given(
    block=st.integers(0, FILE_BYTES // ALIGNMENT),
    length=st.integers(1, FILE_BYTES),
    start=st.sampled_from([0, 0, 1]),
    case=st.sampled_from(CASES),
)
def test_a_payload_is_the_same_either_way(kept: File, block: int, length: int, start: int, case: str) -> None:
    """Wherever a slot begins and its payload ends, whatever of it the kernel has in memory, beside a write, and in
    memory that is not aligned; what the file does not have whole is told."""
    offset = block * ALIGNMENT
    with kept.slots_of(case) as slots:
        if case == "partly cached":
            with kept.path.open("rb", buffering=0) as cached:
                cached.seek(offset)
                cached.read(length // 3)
        first, buffer = aligned_buffer(ALIGNMENT)[:ALIGNMENT], aligned_buffer(length)[start:]
        is_whole = slots.read(block, length, first, buffer)
    found = kept.truth[offset : offset + ALIGNMENT + length]
    assert is_whole == (len(found) == ALIGNMENT + length)
    assert not is_whole or bytes(first) + bytes(buffer[:length]) == found


@pytest.mark.parametrize(("case", "through_memory"), [("cold", False), ("beside a write", True), ("of a reader", True)])
def test_reads_beside_a_writer_are_not_direct(file: File, case: str, through_memory: bool) -> None:
    """What is read directly is not in the kernel's memory afterwards. While slots are written, and in processes that do
    not know whether they are, reads go through it: direct ones would hold up the writer."""
    file.needs_direct_reads()
    with file.slots_of(case) as slots:
        first = aligned_buffer(ALIGNMENT)[:ALIGNMENT]
        assert slots.read(0, MIN_DIRECT_BYTES, first, aligned_buffer(MIN_DIRECT_BYTES))
        assert slots.is_cached(ALIGNMENT, MIN_DIRECT_BYTES) == through_memory


def test_only_long_values_that_are_not_in_memory_go_direct(file: File) -> None:
    """A short value, and one that the kernel has most of, are left to it."""
    file.needs_direct_reads()
    with file.slots_of("cold") as slots:
        assert not slots.is_cached(100, MIN_DIRECT_BYTES) and slots.is_cached(100, MIN_DIRECT_BYTES - 1)
        file.path.read_bytes()
        assert slots.is_cached(0, FILE_BYTES)


def test_without_direct_reads(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without such reads the same bytes come through the kernel's memory; a failing disk raises."""
    file.needs_direct_reads()
    first, buffer = aligned_buffer(ALIGNMENT)[:ALIGNMENT], aligned_buffer(MIN_DIRECT_BYTES)

    def refuse(path: str, flags: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(slot_file, "_open_direct", refuse)
    with file.slots_of("cold") as slots:
        assert slots.read(0, MIN_DIRECT_BYTES, first, buffer)
        assert bytes(first) + bytes(buffer[:MIN_DIRECT_BYTES]) == file.truth[: ALIGNMENT + MIN_DIRECT_BYTES]
    monkeypatch.setattr(slot_file, "_open_direct", lambda path, flags: os.open(path, os.O_WRONLY))
    with file.slots_of("cold") as slots, pytest.raises(OSError):
        slots.read(0, MIN_DIRECT_BYTES, first, buffer)


def test_a_sync_beside_a_write_leaves_the_rest_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sync in another thread may have missed of a page, the next one brings to the disk."""
    write, sync, calls = os.pwrite, os.fdatasync, list[str]()
    with contextlib.closing(SlotFile(tmp_path / "data", 2 * ALIGNMENT, writable=True)) as slots:

        def write_beside_a_sync(*arguments: Any) -> int:
            slots.sync()
            calls.append("write")
            return write(*arguments)

        def counted_sync(descriptor: int) -> None:
            calls.append("sync")
            sync(descriptor)

        monkeypatch.setattr(os, "pwrite", write_beside_a_sync)
        monkeypatch.setattr(os, "fdatasync", counted_sync)
        slots.write(0, bytes(ALIGNMENT), bytes(ALIGNMENT), is_hole=True)
        slots.sync()
    assert calls.count("write") == 2 and calls[-1] == "sync"


@pytest.mark.parametrize("kind", ["random", "normal"])
def test_long_pages_come_back_from_disk(tmp_path: Path, kind: str) -> None:
    """Cold and warm, one by one and in batches, before and while more are written: every page to the last byte."""
    settings = {"page_bytes": 2 * MIN_DIRECT_BYTES, "budget_bytes": 64 << 20}
    for stop in (4, 8):
        with contextlib.closing(open_store(tmp_path, **settings)) as store:
            for numbers in ([0], range(stop)):
                forget_cached(slots_path(tmp_path))
                assert found_numbers(store, numbers, 2 * MIN_DIRECT_BYTES, kind) == set(numbers) & set(range(stop - 4))
            put_numbers(store, range(stop), 2 * MIN_DIRECT_BYTES, kind)
            assert found_numbers(store, range(stop), 2 * MIN_DIRECT_BYTES, kind) == set(range(stop))
            store.check()
