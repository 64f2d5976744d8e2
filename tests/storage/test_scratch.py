"""Memory for pages: where it lies, and how many threads use it at once."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hicache.storage.memory import ALIGNMENT, HUGE_PAGE_BYTES, CoreScratch, Scratch, aligned_buffer
from memory_maps import flags_at

SIZES = [1, ALIGNMENT, HUGE_PAGE_BYTES - ALIGNMENT, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 5 * HUGE_PAGE_BYTES]


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_buffer_is_aligned_and_has_a_block_more(num_bytes: int) -> None:
    memory = aligned_buffer(num_bytes)
    assert len(memory) >= num_bytes + ALIGNMENT and len(memory) % ALIGNMENT == 0
    assert address_of(memory) % ALIGNMENT == 0
    memory[len(memory) - 1] = 1
    assert bytes(memory[:2]) == bytes(2)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_a_large_buffer_asks_for_huge_pages() -> None:
    """It begins with a whole one; a small buffer does not take as much."""
    large, small = aligned_buffer(HUGE_PAGE_BYTES), aligned_buffer(ALIGNMENT)
    assert address_of(large) % HUGE_PAGE_BYTES == 0 and "hg" in flags_at(address_of(large))
    assert "hg" not in flags_at(address_of(small)) and len(small) == 2 * ALIGNMENT


def test_each_thread_has_scratch_of_its_own() -> None:
    scratch, together = Scratch(), threading.Barrier(4, timeout=30)

    def fill(value: int) -> bool:
        page = scratch.take_page(ALIGNMENT)
        page[:] = value
        together.wait()
        return bool((page == value).all()) and scratch.take_page(ALIGNMENT).ctypes.data == page.ctypes.data

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fill, range(4)))


def test_scratch_of_cores_has_one_user_at_a_time(two_cores: None) -> None:
    """Of many threads only as many are in the block as there are cores; what one writes stays until it leaves, also
    where another leaves by an exception."""
    scratch, lock = CoreScratch(), threading.Lock()
    inside: list[int] = []
    most: list[int] = []

    def use(value: int) -> bool:
        try:
            with scratch.page(HUGE_PAGE_BYTES) as page:
                with lock:
                    inside.append(page.ctypes.data)
                    most.append(len(inside))
                    assert len(set(inside)) == len(inside)
                page[:] = value
                kept = bool((page == value).all())
                with lock:
                    inside.remove(page.ctypes.data)
                if value % 3 == 0:
                    raise KeyError(value)
        except KeyError:
            pass
        return kept

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(48)))
    assert max(most) <= 2


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    yield


def test_scratch_grows_with_what_is_asked_for() -> None:
    scratch = Scratch()
    assert np.shape(scratch.take_page(10)) == (10,) and len(scratch.take(3 << 20)) >= 3 << 20
