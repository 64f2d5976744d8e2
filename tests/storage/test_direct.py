"""Long values that are read past the kernel's memory: the bytes, and when that way is taken."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage.memory import ALIGNMENT, aligned_buffer
from hicache.storage.slot_file import MIN_DIRECT_BYTES, DirectReads, SlotFile
from storage_pages import (
    forget_cached,
    found_numbers,
    key_of,
    open_store,
    page_of,
    put_numbers,
    slots_path,
)

FILE_BYTES = 3 * MIN_DIRECT_BYTES + 5 * ALIGNMENT
CASES = ("cold", "partly cached", "beside a write", "of a reader")


class File:
    """Random bytes on disk, and direct reads of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truth = np.random.default_rng(4).integers(0, 256, FILE_BYTES, dtype=np.uint8).tobytes()
        path.write_bytes(self.truth)
        self.descriptor = os.open(path, os.O_RDONLY)
        self.direct = DirectReads(path, self.descriptor)

    def needs_direct_reads(self) -> None:
        forget_cached(self.path)
        if not self.direct.pays_off(0, FILE_BYTES):
            pytest.skip("no direct reads here, or the kernel does not tell what it has in memory")

    def close(self) -> None:
        self.direct.close()
        os.close(self.descriptor)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    with contextlib.closing(File(tmp_path / "data")) as file:
        yield file


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[File]:
    with contextlib.closing(File(tmp_path_factory.mktemp("direct") / "data")) as file:
        yield file


@settings(max_examples=60, deadline=None)
@given(block=st.integers(0, FILE_BYTES // ALIGNMENT), length=st.integers(1, FILE_BYTES), case=st.sampled_from(CASES))
def test_a_payload_is_the_same_either_way(kept: File, block: int, length: int, case: str) -> None:
    """Wherever a slot begins and its payload ends, whatever of it the kernel has in memory, and beside a write; what
    the file does not have whole is told."""
    offset = block * ALIGNMENT
    with contextlib.closing(SlotFile(kept.path, ALIGNMENT, writable=case != "of a reader")) as slots:
        if case == "beside a write":
            slots.write(0, kept.truth[:ALIGNMENT], b"", is_hole=True)
        forget_cached(kept.path)
        if case == "partly cached":
            os.pread(kept.descriptor, length // 3, offset)
        first, buffer = aligned_buffer(ALIGNMENT)[:ALIGNMENT], aligned_buffer(length)
        is_whole = slots.read(block, length, first, buffer)
    found = kept.truth[offset : offset + ALIGNMENT + length]
    assert is_whole == (len(found) == ALIGNMENT + length)
    assert not is_whole or bytes(first) + bytes(buffer[:length]) == found


@pytest.mark.parametrize(("case", "through_memory"), [("cold", False), ("beside a write", True), ("of a reader", True)])
def test_reads_beside_a_writer_are_not_direct(file: File, case: str, through_memory: bool) -> None:
    """What is read directly is not in the kernel's memory afterwards. While slots are written, and in processes that do
    not know whether they are, reads go through it: direct ones would hold up the writer."""
    file.needs_direct_reads()
    with contextlib.closing(SlotFile(file.path, ALIGNMENT, writable=case != "of a reader")) as slots:
        if case == "beside a write":
            slots.write(0, file.truth[:ALIGNMENT], b"", is_hole=True)
        forget_cached(file.path)
        first = aligned_buffer(ALIGNMENT)[:ALIGNMENT]
        assert slots.read(0, MIN_DIRECT_BYTES, first, aligned_buffer(MIN_DIRECT_BYTES))
        assert file.direct.pays_off(ALIGNMENT, MIN_DIRECT_BYTES) != through_memory


def test_only_long_values_that_are_not_in_memory_go_direct(file: File) -> None:
    """A short value, and one that the kernel has most of, are left to it; afterwards, nothing new is in its memory."""
    file.needs_direct_reads()
    assert file.direct.pays_off(100, MIN_DIRECT_BYTES) and not file.direct.pays_off(100, MIN_DIRECT_BYTES - 1)
    buffer = aligned_buffer(MIN_DIRECT_BYTES)
    assert file.direct.read([buffer[:MIN_DIRECT_BYTES]], ALIGNMENT) == MIN_DIRECT_BYTES
    assert bytes(buffer[:MIN_DIRECT_BYTES]) == file.truth[ALIGNMENT : ALIGNMENT + MIN_DIRECT_BYTES]
    assert file.direct.pays_off(0, FILE_BYTES)
    os.pread(file.descriptor, FILE_BYTES, 0)
    assert not file.direct.pays_off(0, FILE_BYTES)


def test_what_direct_reads_refuse_is_read_otherwise(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not aligned, or a file system without such reads, gives nothing and no error; a failing disk
    raises."""
    file.needs_direct_reads()
    buffer = aligned_buffer(MIN_DIRECT_BYTES)
    assert file.direct.read([buffer[1 : MIN_DIRECT_BYTES + 1]], 0) == 0
    end = FILE_BYTES - ALIGNMENT
    assert (
        file.direct.read([buffer[:MIN_DIRECT_BYTES]], end) == ALIGNMENT
        and bytes(buffer[:ALIGNMENT]) == file.truth[end:]
    )
    open_as_usual = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: open_as_usual(path, os.O_WRONLY))
    with contextlib.closing(DirectReads(file.path, file.descriptor)) as failing, pytest.raises(OSError):
        failing.read([buffer[:MIN_DIRECT_BYTES]], 0)

    def refuse(path: Path, flags: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    with contextlib.closing(DirectReads(file.path, file.descriptor)) as without:
        assert not without.pays_off(0, FILE_BYTES) and without.read([buffer[:MIN_DIRECT_BYTES]], 0) == 0


@pytest.mark.parametrize("kind", ["random", "normal"])
def test_long_pages_come_back_from_disk(tmp_path: Path, kind: str) -> None:
    """Cold and warm, one by one and in batches, while more are written: every page to the last byte."""
    page_bytes = 2 * MIN_DIRECT_BYTES
    with contextlib.closing(open_store(tmp_path, page_bytes=page_bytes, budget_bytes=256 << 20)) as store:
        for start in range(0, 40, 10):
            put_numbers(store, range(start, start + 10), page_bytes, kind)
            forget_cached(slots_path(tmp_path))
            for number in range(0, start + 10, 7):
                assert found_numbers(store, [number], page_bytes, kind) == {number}
            assert found_numbers(store, range(start + 10), page_bytes, kind) == set(range(start + 10))
        buffer = np.empty(page_bytes, dtype=np.uint8)
        assert store.get_into([key_of(3)], [buffer]) == [True]
        np.testing.assert_array_equal(buffer, page_of(3, page_bytes, kind))
        store.check()
