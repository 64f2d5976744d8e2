"""Copies of pages between a pool and host pages without staging, compared with a plain byte oracle and with the torch
twin."""

from __future__ import annotations

import mmap

import pytest
import torch

from cases import KERNELS, pairwise, refused
from hicache.kernels import zero_copy
from hicache.kernels.page_copy import PageMover
from hicache.kernels.zero_copy import ZeroCopyMover
from kernel_case import no_waits, random_bits
from page_case import LAYERS, POOLS, U8, Pool, check_store_and_load, page_bytes, pinned
from transfer_hooks import StreamGate


def check(
    pool: Pool, page_tokens: int, num_pages: int, kernels: str, *, layers: str = "all", blocks: int = 4,
    offset: int = 0, padding: int = 0,
) -> None:  # fmt: skip
    """Run `check_store_and_load` with host pages from byte `offset` on that are `padding` bytes apart. Bytes between
    host pages must not change."""
    mover = pool.mover(page_tokens, kernels)
    size = mover.group_bytes(0, pool.num_layers)
    num_host = num_pages + 2
    complete = pinned(random_bits(offset + num_host * (size + padding), seed=4), pool.device)
    before, outside = complete.clone(), torch.ones(complete.shape, dtype=torch.bool)
    outside[offset:].view(num_host, -1)[:, :size] = False
    host = complete[offset:].view(num_host, -1)[:, :size]
    check_store_and_load(ZeroCopyMover(mover, host, blocks), pool, mover, host, num_pages, layers)
    assert torch.equal(complete[outside], before[outside])


@pairwise(kernels=KERNELS, pool_name=list(POOLS), pages=[1, 4, 16], layers=list(LAYERS))
def test_bytes_down_and_up(device: str, kernels: str, pool_name: str, pages: int, layers: str) -> None:
    """A stored page has the bytes of its layers, buffers and tokens in order; a row that tokens share is there once.
    Loaded to other slots, the page reads back the same, and no other slot, page or byte changes."""
    pool = Pool.named(pool_name, 6 * pages + 3, device)
    check(pool, pages * pool.page, 3, kernels, layers=layers)


@pairwise(kernels=KERNELS, num_pages=[1, 7], pieces=[2, 16, 256], blocks=[1, 3, 1000])
def test_tiles_that_end_anywhere(
    device: str, kernels: str, num_pages: int, pieces: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of pages, tile size and number of programs, exactly the requested pieces are copied."""
    monkeypatch.setattr(zero_copy, "MAX_PIECES", pieces)
    check(Pool.named("k and v differ", 45, device), 3, num_pages, kernels, layers="last", blocks=blocks)


@pytest.mark.parametrize("row_bytes", [16, 656, 1152, 8448, 2056, 130, 999])
def test_rows_of_any_size(device: str, kernels: str, row_bytes: int) -> None:
    """Rows whose size is no multiple of a piece, or of 16 bytes, are copied completely, and no other bytes."""
    check(Pool([[random_bits(11, row_bytes, seed=5 + layer)] for layer in range(2)], device), 2, 2, kernels)


@pairwise(kernels=KERNELS, pool_name=["mha", "layers differ"], offset=[0, 3, 4, 8], padding=[0, 5, 16, 24])
def test_host_pages_apart_and_unaligned(device: str, kernels: str, pool_name: str, offset: int, padding: int) -> None:
    """Host pages may be apart and start at any byte. Bytes between host pages stay unchanged."""
    check(Pool.named(pool_name, 20, device), 4, 2, kernels, offset=offset, padding=padding)


def test_layers_of_one_tensor(device: str, kernels: str) -> None:
    """Buffers that are views of one tensor, a token row apart, are moved at their own strides. Bytes between their rows
    stay unchanged."""
    complete = random_bits(2, 12, 3, 4, seed=2).to(device)
    middle = complete[:, :, 1].clone()
    check(Pool([[layer[:, 0], layer[:, 2]] for layer in complete], device), 2, 3, kernels)
    assert torch.equal(complete[:, :, 1], middle)


def sparse(num_bytes: int) -> torch.Tensor:
    """Zeros, for which the machine allocates memory only when they are touched."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=U8)


def check_far_apart(pool: torch.Tensor, host: torch.Tensor, kernels: str) -> None:
    """Check that row 10 and the last row are stored to pages 0 and 2, and are loaded exchanged."""
    device, last = pool.device, len(pool) - 1
    rows = random_bits(2, pool.shape[1], seed=1)
    slots, pages = torch.tensor([10, last], device=device), torch.tensor([0, 2], device=device)
    pool[slots] = rows.to(device)
    copier = ZeroCopyMover(PageMover([[pool]], 1, kernels), host)
    copier.store(slots, pages, 0, 1)
    assert page_bytes(host[::2]) == page_bytes(rows)
    copier.load(pages, slots.flip(0).contiguous(), 0, 1)
    assert torch.equal(pool[slots].cpu(), rows.flip(0))


def test_offsets_beyond_four_gib(kernels: str) -> None:
    """Rows and host pages at offsets beyond 2^32 bytes are read and written correctly."""
    pool = sparse((1 << 32) + (64 << 10)).view(-1, 1 << 10)
    check_far_apart(pool, sparse((5 << 30) + (1 << 10)).as_strided((3, 1 << 10), (5 << 29, 1)), kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_offsets_beyond_four_gib_from_the_gpu(kernels: str) -> None:
    """A GPU copies correctly at offsets beyond 2^32 bytes, with host pages that were pinned separately."""
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
    """Pages are copied in both directions on the caller's stream, after its earlier work, without waiting for the
    device."""
    pool = [[torch.zeros(4096, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(8)]
    mover = PageMover(pool, 16, "triton")
    host = random_bits(257, mover.group_bytes(0, 8), seed=1).pin_memory()
    expected = host.clone()
    copier, stream = ZeroCopyMover(mover, host), torch.cuda.Stream()
    slots = torch.randperm(256, device="cuda").repeat_interleave(16) * 16 + torch.arange(16, device="cuda").repeat(256)
    pages = torch.randperm(256, device="cuda") + 1
    turned = pages.flip(0).contiguous()
    copier.load(pages, slots, 0, 8)  # the host waits for this compilation
    copier.store(slots, pages, 0, 8)
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    gate = StreamGate()
    try:
        with no_waits(), torch.cuda.stream(stream):
            gate.hold(stream)
            copier.load(pages, slots, 0, 8)
            copier.store(slots, turned, 0, 8)
            assert not stream.query()
    finally:
        gate.open()
    stream.synchronize()
    expected[turned.cpu()] = expected[pages.cpu()]
    assert torch.equal(host, expected)


def test_wrong_shapes_are_refused_and_no_rows_copy_nothing(device: str, kernels: str) -> None:
    """Host pages, ids, slots or layers that do not fit raise ValueError. A call without pages, or without layers, moves
    no bytes."""
    pool = Pool.named("mha", 8, device)
    mover = pool.mover(4, kernels)
    size = mover.group_bytes(0, 3)
    host = pinned(random_bits(3, size, seed=1), device)
    rows, before = pool.rows(), page_bytes(host)
    copier, slots, page = ZeroCopyMover(mover, host), torch.arange(8, device=device), torch.tensor([1], device=device)
    refused(
        ValueError,
        lambda: ZeroCopyMover(mover, host[:, 1:]),
        lambda: ZeroCopyMover(mover, host.view(torch.int8)),
        lambda: ZeroCopyMover(mover, host[0]),
        lambda: ZeroCopyMover(mover, pinned(random_bits(size, 3, seed=1), device).T),
        lambda: ZeroCopyMover(mover, host.to("meta")),
        lambda: ZeroCopyMover(mover, host, 0),
        lambda: copier.load(page.repeat(2), slots[:4], 0, 3),
        lambda: copier.store(slots[:4], page.int(), 0, 3),
        lambda: copier.load(page, slots[:3], 0, 3),
        lambda: copier.load(page, slots[::2], 0, 3),
        lambda: copier.load(slots[:4:2], slots, 0, 3),
        lambda: copier.load(page.to("meta"), slots[:4], 0, 3),
        lambda: copier.store(slots[:4], page, 2, 2),
    )
    if device == "cuda":  # a GPU cannot access pageable memory
        refused(ValueError, lambda: ZeroCopyMover(mover, random_bits(3, size, seed=1)))
    for first, count, pages, at in ((0, 3, page[:0], slots[:0]), (1, 0, page, slots[:4])):
        copier.load(pages, at, first, count)
        copier.store(at, pages, first, count)
    assert pool.rows() == rows and page_bytes(host) == before
