"""Memory for pages: its alignment, and how many threads use it concurrently."""

from __future__ import annotations

import contextlib
import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.storage.memory import ALIGNMENT, HUGE_PAGE_BYTES, CoreScratch, aligned_buffer
from memory_maps import flags_at

SIZES = [1, ALIGNMENT, HUGE_PAGE_BYTES - ALIGNMENT, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 5 * HUGE_PAGE_BYTES]


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_buffer_is_aligned_and_has_a_block_more(num_bytes: int) -> None:
    """A buffer has zeros in complete blocks, one more than its bytes need. All of it can be written."""
    memory = aligned_buffer(num_bytes)
    assert len(memory) >= num_bytes + ALIGNMENT and len(memory) % ALIGNMENT == 0
    assert address_of(memory) % ALIGNMENT == 0
    memory[len(memory) - 1] = 1
    assert bytes(memory[:2]) == bytes(2)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_a_large_buffer_asks_for_huge_pages() -> None:
    """A large buffer begins with a complete huge page. A small buffer does not take the memory of one."""
    large, small = aligned_buffer(HUGE_PAGE_BYTES), aligned_buffer(ALIGNMENT)
    assert address_of(large) % HUGE_PAGE_BYTES == 0 and "hg" in flags_at(address_of(large))
    assert "hg" not in flags_at(address_of(small)) and len(small) == 2 * ALIGNMENT


def test_scratch_of_cores_has_one_user_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one thread per core has scratch memory, and its bytes do not change until the thread leaves, also if
    another thread leaves by an exception."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    scratch, addresses = CoreScratch(), set[int]()

    def use(value: int) -> None:
        with contextlib.suppress(KeyError), scratch.page(HUGE_PAGE_BYTES) as page:
            addresses.add(page.ctypes.data)
            page[:] = value
            assert (page == value).all()
            if value % 3 == 0:
                raise KeyError(value)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(48)))
    assert len(addresses) <= 2
