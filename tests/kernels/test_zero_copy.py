"""Pages between a pool and host pages without staging, against a plain byte oracle and against the torch twin."""

from __future__ import annotations

import mmap
import random
from typing import Any

import pytest
import torch

from hicache.kernels import zero_copy
from hicache.kernels.page_copy import PageMover
from hicache.kernels.zero_copy import ZeroCopyMover
from page_case import POOLS, U8, build, host_pages, page_bytes, random_bytes, rows_of
from transfer_case import StreamGate

# The kernel alone, on every device that can run it.
the_kernel = pytest.mark.parametrize("kernels", ["triton"], indirect=True)
Pool = list[list[torch.Tensor]]


def pinned(host: torch.Tensor, device: str) -> torch.Tensor:
    """`host` where a pool on `device` can reach it."""
    return host.pin_memory() if device == "cuda" else host


def settled(host: torch.Tensor, device: str) -> list[bytes]:
    """The host's pages once the device has written them."""
    if device == "cuda":
        torch.cuda.synchronize()
    return page_bytes(host)


def written(before: list[bytes], pages: list[int], parts: list[bytes], begin: int) -> list[bytes]:
    """`before`, with `parts` from byte `begin` of each of `pages`."""
    after = list(before)
    for page, part in zip(pages, parts, strict=True):
        after[page] = before[page][:begin] + part + before[page][begin + len(part) :]
    return after


def check_store_and_load(
    pool: Pool, mover: PageMover, host: torch.Tensor, page_tokens: int, num_pages: int, device: str, blocks: int = 4
) -> None:
    """Rows at random slots reach random pages, and come back at other slots; all other rows and bytes stay. For all
    layers, for the last, and for the upper half. Spans are 1."""
    copier = ZeroCopyMover(mover, host, blocks)
    generator = torch.Generator().manual_seed(page_tokens + num_pages)
    layers, num_tokens = len(pool), num_pages * page_tokens
    for first, count in {(0, layers), (layers // 2, layers - layers // 2), (layers - 1, 1)}:
        order = torch.randperm(len(pool[0][0]), generator=generator)
        source, target = order[:num_tokens], order[-num_tokens:]
        pages = torch.randperm(len(host), generator=generator)[:num_pages]
        begin = mover.group_bytes(0, first)
        rows, before = rows_of(pool), settled(host, device)
        parts = host_pages(rows, source.tolist(), page_tokens, first, count)

        copier.store(source.to(device), pages.to(device), first, count)
        after = written(before, pages.tolist(), parts, begin)
        assert settled(host, device) == after and after != before
        assert rows_of(pool) == rows

        copier.load(pages.to(device), target.to(device), first, count)
        for layer in rows[first : first + count]:
            for b in layer:
                moved = [b[s] for s in source.tolist()]
                for slot, row in zip(target.tolist(), moved, strict=True):
                    b[slot] = row
        assert rows_of(pool) == rows
        assert settled(host, device) == after


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("name", POOLS)
def test_bytes_down_and_up(device: str, kernels: str, page_tokens: int, name: str) -> None:
    """A stored host page is its layers', buffers' and tokens' bytes in order; loaded elsewhere, it reads back the same,
    and nothing else changes on either side."""
    num_pages, slots = (2, 260) if page_tokens == 64 else (3, 100)
    pool = build(name, slots, device)
    mover = PageMover(pool, page_tokens, kernels)
    host = pinned(random_bytes(6, mover.group_bytes(0, len(pool)), seed=3), device)
    check_store_and_load(pool, mover, host, page_tokens, num_pages, device)


@pytest.mark.parametrize("num_pages", [1, 7])
@pytest.mark.parametrize("pieces", [2, 16, 256])
@pytest.mark.parametrize("blocks", [1, 3, 1000])
def test_tiles_that_end_anywhere(
    device: str, kernels: str, num_pages: int, pieces: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of pages, the size of a tile and the number of programs, each piece moves, and only those."""
    monkeypatch.setattr(zero_copy, "MAX_PIECES", pieces)
    pool = build("mha", 90, device)
    mover = PageMover(pool, 3, kernels)
    host = pinned(random_bytes(8, mover.group_bytes(0, 3), seed=4), device)
    check_store_and_load(pool, mover, host, 3, num_pages, device, blocks)


@pytest.mark.parametrize("row_bytes", [16, 656, 1152, 8448, 2056, 130, 999])
def test_rows_of_any_size(device: str, kernels: str, row_bytes: int) -> None:
    """Rows that are no multiple of a piece, or of 16 bytes, move whole and no further."""
    pool = [[random_bytes(11, row_bytes, seed=5 + layer).to(device)] for layer in range(2)]
    mover = PageMover(pool, 2, kernels)
    host = pinned(random_bytes(4, mover.group_bytes(0, 2), seed=7), device)
    check_store_and_load(pool, mover, host, 2, 2, device)


@pytest.mark.parametrize("name", ["mha", "layers differ"])
@pytest.mark.parametrize(("offset", "padding"), [(0, 16), (0, 24), (3, 5), (4, 0), (8, 8)])
def test_host_pages_apart_and_unaligned(device: str, kernels: str, name: str, offset: int, padding: int) -> None:
    """Host pages may lie apart and start at any byte; the bytes between them stay."""
    pool = build(name, 30, device)
    mover = PageMover(pool, 4, kernels)
    size = mover.group_bytes(0, len(pool))
    whole = pinned(random_bytes(offset + 5 * (size + padding), seed=1), device)
    before = whole.clone()
    host = whole[offset:].view(5, size + padding)[:, :size]
    check_store_and_load(pool, mover, host, 4, 3, device)
    outside = torch.ones(whole.shape, dtype=torch.bool)
    outside[offset:].view(5, size + padding)[:, :size] = False
    assert torch.equal(whole[outside], before[outside])


def test_layers_of_one_tensor(device: str, kernels: str) -> None:
    """Buffers that are views of one tensor, token rows apart, move at their own strides; what lies between stays."""
    whole = random_bytes(2, 12, 3, 4, seed=2).to(device)
    pool = [[whole[layer, :, 0], whole[layer, :, 2]] for layer in range(2)]
    middle = whole[:, :, 1].clone()
    mover = PageMover(pool, 2, kernels)
    host = pinned(random_bytes(4, mover.group_bytes(0, 2), seed=8), device)
    check_store_and_load(pool, mover, host, 2, 3, device)
    assert torch.equal(whole[:, :, 1], middle)


@pytest.mark.parametrize(("span", "page_tokens"), [(4, 4), (4, 16), (3, 6)])
@pytest.mark.parametrize("layers_differ", [False, True])
def test_rows_of_device_pages(device: str, kernels: str, span: int, page_tokens: int, layers_differ: bool) -> None:
    """Buffers with a row a device page move beside those with a row a slot, each row once, and nothing else does."""
    num_rows, spans = 20, [[1, span], [1, span], [span, 1] if layers_differ else [1, span]]
    shapes = {1: (num_rows * span, 2, 6), span: (num_rows, 13 * span)}
    pool = [[random_bytes(*shapes[s], seed=9 * i + s).to(device) for s in layer] for i, layer in enumerate(spans)]
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(5))
    slots = (order[:, None] * span + torch.arange(span)).reshape(-1)
    source, target = slots[: 2 * page_tokens], slots[-2 * page_tokens :]
    mover = PageMover(pool, page_tokens, kernels, spans)
    assert mover.uniform == (not layers_differ)
    host = pinned(random_bytes(4, mover.group_bytes(0, 3), seed=9), device)
    copier, pages = ZeroCopyMover(mover, host), torch.tensor([3, 1])
    for first, count in ((0, 3), (1, 2), (2, 1)):
        rows, before = rows_of(pool), settled(host, device)

        def ids(of: torch.Tensor, layer: int, b: int) -> list[int]:
            return [slot // spans[layer][b] for slot in of.tolist() if slot % spans[layer][b] == 0]

        places = [(layer, b) for layer in range(first, first + count) for b in range(2)]
        parts = [
            b"".join(rows[layer][b][i] for layer, b in places for i in ids(of, layer, b))
            for of in source.split(page_tokens)
        ]
        copier.store(source.to(device), pages.to(device), first, count)
        after = written(before, [3, 1], parts, mover.group_bytes(0, first))
        assert settled(host, device) == after and rows_of(pool) == rows
        copier.load(pages.to(device), target.to(device), first, count)
        for layer, b in places:
            moved = [rows[layer][b][i] for i in ids(source, layer, b)]
            for i, row in zip(ids(target, layer, b), moved, strict=True):
                rows[layer][b][i] = row
        assert rows_of(pool) == rows and settled(host, device) == after


def random_pool(seed: int) -> tuple[Pool, int, list[list[int]]]:
    """Buffers of random structure, 24 device pages of 4 tokens; tokens of a host page; spans."""
    rng = random.Random(seed)
    alike = rng.random() < 0.6
    pool: Pool = []
    spans: list[list[int]] = []
    for layer in range(rng.randint(1, 4)):
        if not pool or not alike:
            kinds = [(rng.choice([1, 1, 4]), rng.choice([1, 2, 6, 16, 40, 144, 272, 1000])) for _ in range(3)]
            kinds = kinds[: rng.randint(1, 3)]
        pool.append([random_bytes(96 // span, row, seed=seed + layer) for span, row in kinds])
        spans.append([span for span, _ in kinds])
    return pool, rng.choice([4, 8, 16]), spans


@the_kernel
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_agrees_with_its_twin(device: str, seed: int) -> None:
    """On pools of random structure, the kernel and the torch twin leave the same bytes on both sides."""
    pool, page_tokens, spans = random_pool(seed)
    rng = torch.Generator().manual_seed(seed)
    slots = (torch.randperm(24, generator=rng)[:, None] * 4 + torch.arange(4)).reshape(-1)
    num_pages = 48 // page_tokens
    source, target = slots[:48].to(device), slots[48:].to(device)
    pages = torch.randperm(num_pages + 2, generator=rng)[:num_pages].to(device)
    results = []
    for kernels in ("torch", "triton"):
        buffers = [[b.to(device, copy=True) for b in layer] for layer in pool]
        mover = PageMover(buffers, page_tokens, kernels, spans)
        host = pinned(random_bytes(num_pages + 2, mover.group_bytes(0, len(pool)), seed=seed), device)
        copier = ZeroCopyMover(mover, host, blocks=1 + seed % 4)
        copier.store(source, pages, 0, len(pool))
        copier.load(pages.flip(0).contiguous(), target, len(pool) // 2, len(pool) - len(pool) // 2)
        results.append((settled(host, device), rows_of(buffers)))
    assert results[0] == results[1]


class Launches:
    """Stands before the kernel and notes the grid and the layers of each launch."""

    def __init__(self, kernel: Any) -> None:
        self.grids: list[tuple[int, ...]] = []
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


@the_kernel
@pytest.mark.usefixtures("kernels")
def test_few_programs_in_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows alike in all layers go in one launch of at most `blocks` programs, and no more than there are tiles; rows
    of two sizes in two, and layers that differ one by one. Pieces that cannot be numbered at once go in turn."""
    launches = Launches(zero_copy.zero_copy_kernel)
    monkeypatch.setattr(zero_copy, "zero_copy_kernel", launches)

    def grids(name: str, blocks: int) -> list[tuple[int, ...]]:
        pool = build(name, 100, device)
        mover = PageMover(pool, 16, "triton")
        host = pinned(random_bytes(6, mover.group_bytes(0, len(pool)), seed=3), device)
        launches.grids.clear()
        ZeroCopyMover(mover, host, blocks).store(
            torch.arange(80, device=device), torch.arange(5, device=device), 0, len(pool)
        )
        assert settled(host, device)[:5] == host_pages(rows_of(pool), list(range(80)), 16, 0, len(pool))
        return list(launches.grids)

    # 5 pages of 16 rows in 2 buffers of 3 layers: 480 pieces, of which a tile takes 256.
    assert grids("mha", 1) == [(1,)]
    assert grids("mha", 4) == [(2,)]
    assert grids("k and v differ", 4) == [(1,), (1,)]
    assert grids("layers differ", 4) == [(1,), (1,), (1,)]
    monkeypatch.setattr(zero_copy, "MAX_INDEX", 2 * 96 + 1)
    assert grids("mha", 4) == [(1,), (1,), (1,)]


def sparse(num_bytes: int) -> torch.Tensor:
    """Zeros of which the machine holds only what is touched."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=U8)


def check_far_apart(pool: torch.Tensor, host: torch.Tensor, kernels: str) -> None:
    """Rows 10 and the last go down to pages 0 and 2, and come up exchanged."""
    device, last = pool.device, len(pool) - 1
    rows = random_bytes(2, pool.shape[1], seed=1)
    slots, pages = torch.tensor([10, last], device=device), torch.tensor([0, 2], device=device)
    pool[slots] = rows.to(device)
    copier = ZeroCopyMover(PageMover([[pool]], 1, kernels), host)
    copier.store(slots, pages, 0, 1)
    assert settled(host[::2], device.type) == page_bytes(rows)
    copier.load(pages, slots.flip(0).contiguous(), 0, 1)
    assert torch.equal(pool[slots].cpu(), rows.flip(0))


def test_offsets_beyond_four_gib(kernels: str) -> None:
    """Rows and host pages whose offsets pass 2^32 bytes are read and written where they are."""
    pool = sparse((1 << 32) + (64 << 10)).view(-1, 1 << 10)
    check_far_apart(pool, sparse((5 << 30) + (1 << 10)).as_strided((3, 1 << 10), (5 << 29, 1)), kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_offsets_beyond_four_gib_from_the_gpu(kernels: str) -> None:
    """The same over the link, with host pages that were pinned apart from each other."""
    pool = torch.zeros((1 << 22) + 64, 1 << 10, dtype=U8, device="cuda")
    memory, cudart = sparse((5 << 30) + mmap.PAGESIZE), torch.cuda.cudart()
    ends = [memory.data_ptr(), memory.data_ptr() + (5 << 30)]
    assert [int(cudart.cudaHostRegister(start, mmap.PAGESIZE, 0)) for start in ends] == [0, 0]
    try:
        check_far_apart(pool, memory.as_strided((3, 1 << 10), (5 << 29, 1)), kernels)
    finally:
        torch.cuda.synchronize()
        assert [int(cudart.cudaHostUnregister(start)) for start in ends] == [0, 0]


@pytest.mark.gpu
def test_a_copy_makes_no_one_wait() -> None:
    """Pages move both ways on a stream of the caller's, after what it queued there, without a wait for the device."""
    pool = [[torch.zeros(4096, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(8)]
    mover = PageMover(pool, 16, "triton")
    host = random_bytes(257, mover.group_bytes(0, 8), seed=1).pin_memory()
    expected = host.clone()
    copier, stream = ZeroCopyMover(mover, host), torch.cuda.Stream()
    slots = torch.randperm(256, device="cuda").repeat_interleave(16) * 16 + torch.arange(16, device="cuda").repeat(256)
    pages = torch.randperm(256, device="cuda") + 1
    turned = pages.flip(0).contiguous()
    copier.load(pages, slots, 0, 8)  # compiles, which the host waits for
    copier.store(slots, pages, 0, 8)
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    gate = StreamGate()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            gate.hold(stream)
            copier.load(pages, slots, 0, 8)
            copier.store(slots, turned, 0, 8)
            assert not stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        gate.open()
    stream.synchronize()
    expected[turned.cpu()] = expected[pages.cpu()]
    assert torch.equal(host, expected)


def test_wrong_arguments_are_named() -> None:
    """Host pages, ids, slots or layers that do not fit raise ValueError that says what does, and move nothing."""
    pool = build("mha", 8, "cpu")
    mover = PageMover(pool, 4, "torch")
    size = mover.group_bytes(0, 3)
    host = random_bytes(3, size, seed=1)
    rows, before = rows_of(pool), page_bytes(host)
    copier, slots, page = ZeroCopyMover(mover, host), torch.arange(4), torch.tensor([1])
    for wrong in (host[:, 1:], host.view(torch.int8), host[0], random_bytes(size, 3, seed=1).T):
        with pytest.raises(ValueError, match=rf"need uint8 \[pages, {size}\]"):
            ZeroCopyMover(mover, wrong)
    with pytest.raises(ValueError, match=r"on meta.*need pinned CPU memory"):
        ZeroCopyMover(mover, host.to("meta"))
    with pytest.raises(ValueError, match="blocks=0"):
        ZeroCopyMover(mover, host, 0)
    with pytest.raises(ValueError, match=r"pages \(2,\) of torch\.int64: need int64 \(1,\)"):
        copier.load(torch.tensor([1, 2]), slots, 0, 3)
    with pytest.raises(ValueError, match=r"of torch\.int32: need int64"):
        copier.store(slots, page.int(), 0, 3)
    with pytest.raises(ValueError, match="4 a page"):
        copier.load(page, slots[:3], 0, 3)
    with pytest.raises(ValueError, match="slots must be contiguous, but their stride is 2"):
        copier.load(page, torch.arange(8)[::2], 0, 3)
    with pytest.raises(ValueError, match="pages must be contiguous"):
        copier.load(torch.arange(4)[::2], torch.arange(8), 0, 3)
    with pytest.raises(ValueError, match="pages on meta, the pool on cpu"):
        copier.load(page.to("meta"), slots, 0, 3)
    with pytest.raises(ValueError, match=r"layers \[2, 4\) are not within the pool's 3"):
        copier.store(slots, page, 2, 2)
    assert rows_of(pool) == rows and page_bytes(host) == before


@pytest.mark.gpu
def test_pageable_memory_is_refused() -> None:
    """Host pages that a GPU cannot reach are refused before anything is launched."""
    mover = PageMover(build("mha", 8, "cuda"), 4, "triton")
    host = random_bytes(3, mover.group_bytes(0, 3), seed=1)
    with pytest.raises(ValueError, match="need pinned CPU memory"):
        ZeroCopyMover(mover, host)


def test_no_pages_move_nothing(device: str, kernels: str) -> None:
    """No pages, or no layers, leave the pool and the host as they are."""
    pool = build("mha", 8, device)
    mover = PageMover(pool, 4, kernels)
    host = pinned(random_bytes(3, mover.group_bytes(0, 3), seed=1), device)
    rows, before = rows_of(pool), page_bytes(host)
    copier = ZeroCopyMover(mover, host)
    none, slots = torch.empty(0, dtype=torch.int64, device=device), torch.arange(4, device=device)
    for first, count, pages, at in ((0, 3, none, none), (1, 0, slots[:1], slots)):
        copier.load(pages, at, first, count)
        copier.store(at, pages, first, count)
    assert rows_of(pool) == rows and settled(host, device) == before
