"""The host page pool: conservation of pages, contiguity after many frees, and pages that are being read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import hicache.host.pool
from costs import lines_of
from hicache.errors import ConfigError, DoubleFree, InvariantError, OutOfMemory
from hicache.host.pool import HostPagePool
from hicache.layout import BufferSpec, PoolLayout

LAYOUT = PoolLayout((BufferSpec("k", torch.bfloat16, (2, 8), "token", (0, 1)),), 4)
PAGE_BYTES = 2 * 8 * 2 * 8 * 2


def make_pool(num_pages: int) -> HostPagePool:
    return HostPagePool(LAYOUT, 8, (num_pages + 1) * PAGE_BYTES, pin=False)


class PoolAgainstSet(RuleBasedStateMachine):
    """The pool compared with a set of pages. An allocation gets all its pages or none, no page twice and never the
    sink, in the fewest possible runs. A run is cut from the smallest run that holds it. Pages are freed in any order
    and in any parts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(40)
        self.free = set(range(1, 41))
        self.held: set[int] = set()

    @rule(n=st.integers(0, 12) | st.integers(0, 42))
    def alloc(self, n: int) -> None:
        lengths = lengths_of(self.free)
        pages = self.pool.alloc(n)
        assert (pages is None) == (n > len(self.free))
        if pages is None:
            return
        assert len(pages) == n and pages == sorted(set(pages)) and set(pages) <= self.free
        assert len(lengths_of(set(pages))) == fewest(lengths, n)
        self.free -= set(pages)
        self.held |= set(pages)
        if n and n <= max(lengths):  # only the run that was cut has changed
            after = lengths_of(self.free)
            best = min(length for length in lengths if length >= n)
            lengths.remove(best)
            assert sorted(after) == sorted(lengths + [best - n] * (best > n))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=20))
        self.pool.free(ids)
        self.free |= set(ids)
        self.held -= set(ids)

    @precondition(lambda self: self.held)
    @rule(first=st.integers(0, 2), gap=st.integers(2, 3))
    def release_every_other(self, first: int, gap: int) -> None:
        ids = sorted(self.held)[first::gap]
        self.pool.free(ids[::-1])
        self.free |= set(ids)
        self.held -= set(ids)

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        assert self.pool.available() == len(self.free)


TestPoolAgainstSet = PoolAgainstSet.TestCase


def lengths_of(pages: set[int]) -> list[int]:
    """The lengths of the runs of a set of pages, ascending by page."""
    lengths: list[int] = []
    for page in sorted(pages):
        if page - 1 in pages:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def fewest(lengths: list[int], n: int) -> int:
    """The smallest number of runs that hold `n` pages."""
    num_runs = 0
    for length in sorted(lengths, reverse=True):
        if n <= 0:
            break
        num_runs, n = num_runs + 1, n - length
    return num_runs


def test_work_does_not_grow_with_the_pool() -> None:
    """Allocations and frees execute the same number of lines and allocate the same memory in pools of 1000 and of 100
    000 pages, even if no two free pages are adjacent."""

    def work(pool: HostPagePool) -> None:
        for _ in range(20):
            pages = pool.alloc(5)
            assert pages is not None
            pool.free(pages)

    costs = []
    for num_pages in (1000, 100_000):
        pool = make_pool(num_pages)
        pages = pool.alloc(num_pages)
        assert pages is not None
        pool.free(pages[::2])
        tracemalloc.start()
        work(pool)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        costs.append((lines_of(lambda pool=pool: work(pool), hicache.host.pool.__file__), peak_bytes < num_pages))
        pool.check()
    assert costs[0][0] == costs[1][0] > 0 and costs[1][1]


def test_wrong_calls_raise_and_change_nothing() -> None:
    """Freeing a free, foreign or repeated page raises, and the other pages of the call stay allocated."""
    pool = make_pool(8)
    pages = pool.alloc(4)
    assert pages is not None
    for other in (7, 99, 1, 0, -1):
        with pytest.raises(DoubleFree):
            pool.free([1, other])
        assert pool.available() == 4
    pool.free(pages)
    assert pool.available() == 8
    pool.check()


def test_check_finds_planted_faults() -> None:
    """`check` finds pages and runs that disagree, a run whose length is not at both ends, a free sink, and a wrong
    count."""
    for page, value, found in (
        (3, 2, ["by length", "count"]),  # allocated, and in a run
        (8, -1, ["by length", "count"]),  # free, and in no run
        (2, -1, ["both ends"]),
        (5, -2, ["both ends"]),
        (0, -1, ["by length", "sink"]),
    ):
        pool = make_pool(9)
        pool.alloc(9)
        pool.free([2, 3, 4, 5])
        pool.check()
        pool._marks[page] = value
        with pytest.raises(InvariantError) as error:
            pool.check()
        assert all(part in str(error.value) for part in found)


@pytest.mark.parametrize("setting", ["host_bytes", "l2_bytes"])
def test_sizes_that_do_not_fit(setting: str) -> None:
    """Sizes below one page and above the machine's memory raise an error with the setting and a value that works."""
    with pytest.raises(ConfigError, match=rf"{setting} to at least .*\({2 * PAGE_BYTES} bytes\)"):
        HostPagePool(LAYOUT, 8, PAGE_BYTES, pin=False, setting=setting)
    with pytest.raises(OutOfMemory, match=f"{setting} to at most"):
        HostPagePool(LAYOUT, 8, 1 << 50, pin=False, setting=setting)


def test_layout_is_one_block_a_page() -> None:
    """Layers and buffers with different rows fill the page without gap or overlap."""
    layout = PoolLayout(
        (
            BufferSpec("k", torch.bfloat16, (2, 8), "token", (3, 4, 7)),
            BufferSpec("v", torch.uint8, (5,), "token", (4,)),
            BufferSpec("scale", torch.float32, (3,), "page", (3, 7)),
        ),
        4,
    )
    assert layout.layers == (3, 4, 7)
    sizes = [layout.layer_bytes(layer, 8) for layer in layout.layers]
    assert sizes == [8 * 32 + 2 * 12, 8 * 32 + 8 * 5, 8 * 32 + 2 * 12]
    assert [layout.layer_offset(i, 8) for i in range(4)] == [0, *np.cumsum(sizes).tolist()]
    assert layout.page_bytes(8) == sum(sizes)
    assert layout.token_bytes == 3 * 32 + 5 + 2 * 12 // 4
    assert layout.digest() != PoolLayout(layout.buffers[:2], 4).digest()
