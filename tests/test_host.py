"""The host page pool: conservation, contiguity, and pages that are being read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.errors import ConfigError, DoubleFree, InvariantError, OutOfMemory
from hicache.host import HostPagePool, PinnedArena
from hicache.layout import BufferSpec, PoolLayout

LAYOUT = PoolLayout((BufferSpec("k", torch.bfloat16, (2, 8), "token", (0, 1)),), 4)
PAGE_BYTES = 2 * 8 * 2 * 8 * 2


def make_pool(num_pages: int) -> HostPagePool:
    return HostPagePool(LAYOUT, 8, (num_pages + 1) * PAGE_BYTES, pin=False)


class PoolAgainstSet(RuleBasedStateMachine):
    """Pages are handed out whole or not at all, never twice, never the sink, and in the fewest runs there are."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(24)
        self.free = set(range(1, 25))
        self.held: list[torch.Tensor] = []

    @rule(n=st.integers(0, 26))
    def alloc(self, n: int) -> None:
        pages = self.pool.alloc(n)
        assert (pages is None) == (n > len(self.free))
        if pages is None:
            return
        ids = pages.tolist()
        assert len(set(ids)) == n and set(ids) <= self.free
        longest = max(runs_of(self.free), default=0)
        if n and n <= longest:
            assert ids == list(range(ids[0], ids[0] + n))
        self.free -= set(ids)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 50), part=st.integers(0, 8))
    def release(self, which: int, part: int) -> None:
        pages = self.held.pop(which % len(self.held))
        self.pool.free(pages[:part])
        self.free |= set(pages[:part].tolist())
        if len(pages) > part:
            self.held.append(pages[part:])

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        assert self.pool.available() == len(self.free)


TestPoolAgainstSet = PoolAgainstSet.TestCase


def runs_of(pages: set[int]) -> list[int]:
    lengths: list[int] = []
    for page in sorted(pages):
        if page - 1 in pages:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


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
    """A free page with a reader and a wrong account are both named."""
    pool = make_pool(4)
    pool.begin_read(torch.tensor([2]))
    pool._available = 3
    with pytest.raises(InvariantError) as caught:
        pool.check()
    assert len(caught.value.violations) == 2


def test_sizes_that_do_not_fit() -> None:
    """Too little for one page, and more than the machine has, name the knob and a value that would do."""
    with pytest.raises(ConfigError, match=f"raise host_bytes to at least {2 * PAGE_BYTES}"):
        HostPagePool(LAYOUT, 8, PAGE_BYTES, pin=False)
    with pytest.raises(OutOfMemory, match="lower host_bytes to at most"):
        HostPagePool(LAYOUT, 8, 1 << 50, pin=False)


@pytest.mark.gpu
def test_pinned_memory_is_pinned() -> None:
    """Every page of the arena is page-locked as CUDA sees it, and is not any more after close."""
    arena = PinnedArena(64, 1 << 20, pin=True)
    assert arena.data.is_pinned() and arena.data[63].is_pinned()
    source = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)
    arena.data[63].copy_(source)
    assert torch.equal(arena.data[63].cuda(non_blocking=True).cpu(), source)
    arena.close()
    assert not arena.data.is_pinned()


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
