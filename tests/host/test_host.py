"""The host page pool: conservation, contiguity also under churn, and pages that are being read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.errors import ConfigError, DoubleFree, InvariantError, OutOfMemory
from hicache.host import HostPagePool
from hicache.host.runs import FreeRuns
from hicache.layout import BufferSpec, PoolLayout

LAYOUT = PoolLayout((BufferSpec("k", torch.bfloat16, (2, 8), "token", (0, 1)),), 4)
PAGE_BYTES = 2 * 8 * 2 * 8 * 2


def make_pool(num_pages: int) -> HostPagePool:
    return HostPagePool(LAYOUT, 8, (num_pages + 1) * PAGE_BYTES, pin=False)


class PoolAgainstSet(RuleBasedStateMachine):
    """Pages are handed out whole or not at all, never twice, never the sink, in the fewest runs there are, and out of
    the smallest run that holds them; they come back in any order and in any parts."""

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
        ids = pages.tolist()
        assert pages.dtype == torch.int64
        assert len(ids) == n and ids == sorted(set(ids)) and set(ids) <= self.free
        assert len(lengths_of(set(ids))) == fewest(lengths, n)
        self.free -= set(ids)
        self.held |= set(ids)
        if n and n <= max(lengths):  # what is left of the run that was cut is all that changed
            after = lengths_of(self.free)
            best = min(length for length in lengths if length >= n)
            lengths.remove(best)
            assert sorted(after) == sorted(lengths + [best - n] * (best > n))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=20))
        self.pool.free(torch.tensor(ids, dtype=torch.int64))
        self.free |= set(ids)
        self.held -= set(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), gap=st.integers(2, 3))
    def release_every_other(self, data: st.DataObject, gap: int) -> None:
        ids = sorted(self.held)[data.draw(st.integers(0, 2)) :: gap]
        self.pool.free(torch.tensor(ids[::-1], dtype=torch.int64))
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
    """How many of the runs it takes to hold `n` pages."""
    num_runs = 0
    for length in sorted(lengths, reverse=True):
        if n <= 0:
            break
        num_runs, n = num_runs + 1, n - length
    return num_runs


class FirstFitByPage:
    """The reference for contiguity: always the lowest free pages, one by one."""

    def __init__(self, num_pages: int) -> None:
        self._free = np.ones(num_pages, dtype=bool)

    def available(self) -> int:
        return int(self._free.sum())

    def alloc(self, num_pages: int) -> torch.Tensor | None:
        pages = np.flatnonzero(self._free)[:num_pages]
        self._free[pages] = False
        return torch.from_numpy(pages)

    def free(self, pages: torch.Tensor) -> None:
        self._free[pages.numpy()] = True


def churn(pool: HostPagePool | FirstFitByPage, num_pages: int, steps: int, seed: int, log_uniform: bool) -> list[int]:
    """A cache at 95 % for some thousand allocations of 1 to 512 pages: whole nodes and tails of nodes are evicted, more
    often old ones than new ones. Returns the number of pieces of each allocation of the second half."""
    rng = np.random.default_rng(seed)
    nodes: list[torch.Tensor] = []
    pieces: list[int] = []
    for _ in range(steps):
        wanted = int(2 ** rng.uniform(0, 9)) if log_uniform else int(rng.integers(1, 513))
        while pool.available() - wanted < num_pages // 20:
            at = int(rng.integers(len(nodes) // 4 + 1))
            node, keep = nodes[at], int(rng.integers(len(nodes[at]))) * int(rng.integers(2))
            pool.free(node[keep:])
            nodes[at : at + 1] = [node[:keep]] if keep else []
        pages = pool.alloc(wanted)
        assert pages is not None
        pieces.append(int((pages.diff() != 1).sum()) + 1)
        nodes.append(pages)
        nodes.append(nodes.pop(int(rng.integers(len(nodes)))))  # a hit
    assert sorted(torch.cat(nodes).tolist()) == sorted(set(torch.cat(nodes).tolist()))
    assert num_pages - pool.available() == sum(map(len, nodes))
    return pieces[steps // 2 :]


@pytest.mark.parametrize("log_uniform", [False, True], ids=["uniform", "log-uniform"])
@pytest.mark.parametrize("num_pages", [4096, 20000])
def test_allocations_stay_contiguous_under_churn(num_pages: int, log_uniform: bool) -> None:
    """After thousands of allocations and evictions an allocation has on average few pieces, a fraction of those that
    the lowest free pages have in the same run, and no page is lost."""
    pool = make_pool(num_pages)
    ours = churn(pool, num_pages, 4000, 7, log_uniform)
    reference = churn(FirstFitByPage(num_pages), num_pages, 4000, 7, log_uniform)
    pool.check()
    assert float(np.mean(ours)) < 4
    assert 4 * float(np.mean(ours)) < float(np.mean(reference))


def test_work_does_not_grow_with_the_pool() -> None:
    """An allocation and a free look at as many runs in a pool of 100 000 pages as in one of 1000."""

    class Counting(FreeRuns):
        touched = 0

        def _insert(self, start: int, length: int) -> None:
            type(self).touched += 1
            super()._insert(start, length)

        def _remove(self, start: int, length: int) -> None:
            type(self).touched += 1
            super()._remove(start, length)

    counts = []
    for num_pages in (1000, 100_000):
        runs = Counting(1, num_pages)
        for start, _ in [runs.take(1)[0] for _ in range(num_pages)][::2]:
            runs.give(start, 1)  # the worst case: no two free pages touch
        before = Counting.touched
        for _ in range(100):
            for start, length in runs.take(5):
                runs.give(start, length)
        counts.append(Counting.touched - before)
        assert runs.check() == []
    assert counts[0] == counts[1] == 100 * 5 * 2


def test_wrong_frees_raise_and_free_nothing() -> None:
    """Freeing a free, foreign, repeated or busy page raises, and the good pages beside it stay taken."""
    pool = make_pool(8)
    pages = pool.alloc(4)
    assert pages is not None
    for bad in ([1, 7], [1, 99], [1, 1], [1, 0], [1, -1]):
        with pytest.raises(DoubleFree):
            pool.free(torch.tensor(bad))
    pool.begin_read(pages[:1])
    with pytest.raises(DoubleFree, match="still being read"):
        pool.free(pages)
    assert pool.available() == 4
    pool.end_read(pages[:1])
    pool.free(pages)
    assert pool.available() == 8
    pool.check()


def test_views_share_memory() -> None:
    """What is written through a view is in the page, and nowhere else."""
    pool = make_pool(4)
    pages = torch.tensor([3, 1])
    for view, value in zip(pool.views(pages), (7, 9), strict=True):
        view[:] = value
    sums = pool.bytes_of.long().sum(1).tolist()
    assert sums == [0, 9 * PAGE_BYTES, 0, 7 * PAGE_BYTES, 0]


def test_check_finds_planted_faults() -> None:
    """A free page with a reader, a reader too few and a wrong account are named, all at once."""
    pool = make_pool(4)
    pages = pool.alloc(1)
    assert pages is not None
    pool.end_read(pages)
    pool.begin_read(torch.tensor([2]))
    pool._available = 4
    with pytest.raises(InvariantError) as caught:
        pool.check()
    assert len(caught.value.violations) == 3


def test_check_finds_an_index_that_lies() -> None:
    """A run that the index lost, one that it made up, and runs that it did not join are told from the bitmap."""
    lost, invented, apart = make_pool(9), make_pool(9), make_pool(9)
    lost._runs.take(2)
    pages = invented.alloc(9)
    assert pages is not None
    invented._runs.give(3, 2)
    pages = apart.alloc(9)
    assert pages is not None
    apart.free(torch.tensor([2, 3]))
    apart._runs._insert(4, 1)
    apart._free[4], apart._available = True, 3
    for pool, what in ((lost, "bitmap"), (invented, "bitmap"), (apart, "touch")):
        with pytest.raises(InvariantError, match=what):
            pool.check()


@pytest.mark.parametrize("which", ["_length_of", "_start_of", "_starts", "_lengths"])
def test_an_index_that_contradicts_itself_is_found(which: str) -> None:
    """Each of the ways to find a run is compared with the others."""
    runs = FreeRuns(1, 9)
    runs.take(9)
    for start in (1, 5, 8):
        runs.give(start, 1 + (start == 5))
    assert runs.check() == [] and runs.runs() == [(1, 1), (5, 2), (8, 1)]
    getattr(runs, which).pop(*([] if which == "_lengths" else [next(iter(getattr(runs, which)))]))
    assert runs.check()


def test_sizes_that_do_not_fit() -> None:
    """Too little for one page, and more than the machine has, name the knob and a value that would do."""
    with pytest.raises(ConfigError, match=f"raise host_bytes to at least {2 * PAGE_BYTES}"):
        HostPagePool(LAYOUT, 8, PAGE_BYTES, pin=False)
    with pytest.raises(OutOfMemory, match="lower host_bytes to at most"):
        HostPagePool(LAYOUT, 8, 1 << 50, pin=False)
    with pytest.raises(ConfigError, match=f"raise l2_bytes to at least {2 * PAGE_BYTES}"):
        HostPagePool(LAYOUT, 8, PAGE_BYTES, pin=False, knob="l2_bytes")
    with pytest.raises(OutOfMemory, match="lower l2_bytes to at most"):
        HostPagePool(LAYOUT, 8, 1 << 50, pin=False, knob="l2_bytes")


def test_layout_is_one_block_a_page() -> None:
    """Offsets of layers and buffers tile the page without gap or overlap, for buffers of unlike rows."""
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
