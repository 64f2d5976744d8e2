"""The file of slots: what nobody finished is given back, buffers lie anywhere, and file systems differ."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.storage import LmdbPageStore, PageBuffer, PageFilter, describe
from hicache.storage.memory import aligned_buffer
from hicache.storage.slot_file import DirectReads
from slot_case import (
    BLOCK_BYTES,
    EXTENT_BYTES,
    SLOT_BYTES,
    Slots,
    closed_slots,
    open_slots,
    payloads,
    slots_file,
    slots_of,
    taken_bytes,
)
from storage_pages import forget_cached, found_numbers, key_of, page_of, put_numbers, slots_path


def used_up(path: Path) -> Slots:
    """A closed store with slots in use, freed and free, of payloads of one and of four blocks."""
    with contextlib.closing(open_slots(path)) as store:
        put_numbers(store, range(10))
        put_numbers(store, range(10, 30), kind="flat")
        put_numbers(store, range(30, 40))
        store.delete([key_of(number) for number in (*range(5), *range(10, 15))])
        for _ in range(2):
            store.delete([b"another"])
        store.delete([key_of(number) for number in (*range(5, 8), *range(15, 20))])
        store.delete([b"another"])  # the next commit may use again what this one may not
    slots = closed_slots(path)
    assert len(slots.free) == 10 and len(slots.freed) == 8 and len(slots.used) == 22
    return slots


def left_over(slots: Slots, where: str) -> list[tuple[int, int]]:
    """Offset and length of what a commit that nobody finished may have left: it writes to slots that are free, to freed
    ones that hold less, and behind the last."""
    if where == "free":
        return [(slot * SLOT_BYTES, SLOT_BYTES) for slot in slots.free]
    if where == "freed":
        return [(slot * SLOT_BYTES + held, SLOT_BYTES - held) for slot, (_, held) in slots.freed.items()]
    return [(slots.num_slots * SLOT_BYTES, 10 * SLOT_BYTES + 17)]


@pytest.mark.parametrize("where", ["free", "freed", "behind"])
def test_what_nobody_finished_is_given_back(tmp_path: Path, where: str) -> None:
    """What a killed process wrote to slots that no commit names takes nothing of the disk for longer than until the
    next opening, or, in slots that were freed, until those are used again; and no page is touched."""
    slots = used_up(tmp_path)
    before_bytes = taken_bytes(tmp_path)
    with slots_file(tmp_path) as descriptor:
        for offset, length in left_over(slots, where):
            assert os.pwrite(descriptor, b"\xa5" * length, offset) == length
    assert taken_bytes(tmp_path) >= before_bytes + 10 * BLOCK_BYTES
    store = open_slots(tmp_path)
    if where == "freed":
        assert put_numbers(store, range(100, 108), kind="flat") == [True] * 8
        before_bytes = slots_of(store).used_bytes + slots_of(store).freed_bytes
    assert taken_bytes(tmp_path) <= before_bytes + EXTENT_BYTES
    store.check()
    assert found_numbers(store, (8, 9, *range(30, 40))) == {8, 9, *range(30, 40)}
    assert found_numbers(store, range(20, 30), kind="flat") == set(range(20, 30))
    store.close()


def test_what_a_refused_write_left_is_given_back(tmp_path: Path) -> None:
    """A commit that the disk refuses half-way leaves nothing behind once the store writes again."""
    used_up(tmp_path)
    store = open_slots(tmp_path)
    before, before_bytes = slots_of(store), taken_bytes(tmp_path)
    limit = before.num_slots * SLOT_BYTES + 3 * BLOCK_BYTES
    now = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, now[1]))
    try:
        assert put_numbers(store, range(100, 140)) == [False] * 40
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, now)
    assert store.stats().read_only and taken_bytes(tmp_path) > before_bytes + 10 * SLOT_BYTES
    assert slots_of(store) == before
    assert store.reopen()
    assert taken_bytes(tmp_path) <= before_bytes + EXTENT_BYTES
    store.check()
    assert put_numbers(store, range(100, 140)) == [True] * 40
    assert found_numbers(store, range(100, 140)) == set(range(100, 140))
    store.check()
    store.close()


SHIFTS = (0, 1, 64, 4095)


def aligned(page_bytes: int, shift: int = 0) -> PageBuffer:
    """Memory for a page, `shift` bytes from an aligned place."""
    return np.frombuffer(aligned_buffer(page_bytes + shift), dtype=np.uint8)[shift : shift + page_bytes]


@pytest.mark.parametrize("page_bytes", [4096, 3 * 4096, 64 << 10, 70_001, 5000, 1, 256 << 10, 260 << 10, 300_001])
@pytest.mark.parametrize("kind", ["random", "normal", "flat"])
def test_buffers_may_lie_anywhere(tmp_path: Path, page_bytes: int, kind: str) -> None:
    """Pages put from and got into memory that is aligned or not, raw and compressed, from the kernel's memory and from
    the disk: the same bytes, the caller's page is as it was, and no byte beside a buffer is written."""
    settings = {"page_bytes": page_bytes, "budget_bytes": 8 << 20, "filter": PageFilter("byte_shuffle", 1)}
    keys = [key_of(number) for number in range(len(SHIFTS))]
    with contextlib.closing(open_slots(tmp_path, **settings)) as store:
        pages = [aligned(page_bytes, shift) for shift in SHIFTS]
        for page in pages:
            page[:] = page_of(7, page_bytes, kind)
        assert store.put(list(zip(keys, pages, strict=True))) == [True] * len(pages)
        assert all(np.array_equal(page, page_of(7, page_bytes, kind)) for page in pages)
        slots = slots_of(store)
        assert len(set(payloads(tmp_path, slots, slot_bytes_of(page_bytes)).values())) == 1
        require_at_every_shift(store, keys, page_of(7, page_bytes, kind))
    with contextlib.closing(open_slots(tmp_path, **settings)) as store:
        require_at_every_shift(store, keys, page_of(7, page_bytes, kind))
        forget_cached(slots_path(tmp_path))
        require_at_every_shift(store, keys, page_of(7, page_bytes, kind))
        store.check()


def require_at_every_shift(store: LmdbPageStore, keys: list[bytes], page: PageBuffer) -> None:
    for shift in SHIFTS:
        rooms = [aligned(len(page) + 2 * BLOCK_BYTES) for _ in keys]
        for room in rooms:
            room[:] = 0x5A
        buffers = [room[BLOCK_BYTES + shift :][: len(page)] for room in rooms]
        assert store.get_into(keys, buffers) == [True] * len(keys)
        for room, buffer in zip(rooms, buffers, strict=True):
            np.testing.assert_array_equal(buffer, page)
            buffer[:] = 0x5A
            assert (room == 0x5A).all()


def test_pages_are_read_past_the_kernels_memory(tmp_path: Path) -> None:
    """What the kernel does not have of a raw page goes from the disk to where it is wanted, or, if that is not
    aligned, by way of the thread's memory: the kernel does not have it afterwards."""
    page_bytes = 1 << 20
    settings = {"page_bytes": page_bytes, "budget_bytes": 64 << 20}
    with contextlib.closing(open_slots(tmp_path, **settings)) as store:
        put_numbers(store, range(4), page_bytes)
    buffers = [aligned(page_bytes), aligned(page_bytes, 64)]
    with contextlib.closing(open_slots(tmp_path, **settings)) as store, slots_file(tmp_path) as descriptor:
        forget_cached(slots_path(tmp_path))
        with contextlib.closing(DirectReads(slots_path(tmp_path), descriptor)) as reads:
            if not reads.pays_off(0, page_bytes):
                pytest.skip("no direct reads here, or the kernel does not tell what it has in memory")
            assert store.get_into([key_of(0), key_of(1)], buffers) == [True] * 2
            assert reads.pays_off(0, 4 * page_bytes)
            os.pread(descriptor, 4 * page_bytes, 0)
            assert not reads.pays_off(0, 4 * page_bytes)
    for number, buffer in enumerate(buffers):
        np.testing.assert_array_equal(buffer, page_of(number, page_bytes))


def slot_bytes_of(page_bytes: int) -> int:
    return -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES


@pytest.fixture(params=["tmpfs", "ramfs"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A file system of that kind: the one makes holes, the other none and reads nothing directly."""
    point = tmp_path / "mounted"
    point.mkdir()
    try:
        command = ["mount", "-t", request.param, "none", str(point)]
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("mounting a file system needs root")
    yield request.param, point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_store_works_on_file_systems_of_all_kinds(mounted: tuple[str, Path], tmp_path: Path) -> None:
    """Where no holes can be made a new store has all values in its tables. A store that has slots works everywhere; a
    copy of it is the same store."""
    kind, path = mounted
    for name in ("new", "copied"):
        if name == "copied":
            with contextlib.closing(open_slots(tmp_path / "elsewhere")) as store:
                put_numbers(store, range(40))
                put_numbers(store, range(40, 50), kind="flat")
            shutil.copytree(tmp_path / "elsewhere", path / name)
        store = open_slots(path / name)
        put_numbers(store, range(40))
        put_numbers(store, range(40, 50), kind="flat")
        assert store.delete([key_of(number) for number in range(10)]) == 10
        store.check()
        store.compact()
        store.close()
        store = open_slots(path / name)
        assert found_numbers(store, range(40)) == set(range(10, 40))
        assert found_numbers(store, range(40, 50), kind="flat") == set(range(40, 50))
        assert put_numbers(store, range(60, 70)) == [True] * 10
        store.check()
        store.close()
        has_slots = name == "copied" or kind == "tmpfs"
        assert describe(path / name).has_slots == has_slots
        assert (slots_path(path / name).stat().st_size > 40 * SLOT_BYTES) == has_slots
