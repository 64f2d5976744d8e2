"""Gather and scatter of pages against a plain byte oracle."""

from __future__ import annotations

import pytest
import torch

from hicache.kernels.page_copy import PageMover
from page_case import POOLS, U8, build, host_pages, page_bytes, random_bytes, rows_of


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("name", POOLS)
def test_bytes_down_and_up(device: str, kernels: str, page_tokens: int, name: str) -> None:
    """A gathered page is its layers', buffers' and tokens' bytes in order; scattered elsewhere, it reads back the same,
    and no other slot changes."""
    num_pages, slots = (2, 260) if page_tokens == 64 else (3, 100)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(page_tokens))
    source, target = order[: num_pages * page_tokens], order[-num_pages * page_tokens :]
    pool = build(name, slots, device)
    mover = PageMover(pool, page_tokens, kernels)
    assert mover.uniform == (name != "layers differ")
    layers = len(pool)
    for first, count in {(0, layers), (layers // 2, layers - layers // 2), (layers - 1, 1)}:
        before = rows_of(pool)
        expected = host_pages(before, source.tolist(), page_tokens, first, count)
        staging = torch.zeros(num_pages, mover.group_bytes(first, count), dtype=U8, device=device)
        mover.gather(source.to(device), staging, first, count)
        assert page_bytes(staging) == expected
        mover.scatter(staging, target.to(device), first, count)
        for layer in range(first, first + count):
            for b in before[layer]:
                moved = [b[s] for s in source.tolist()]
                for slot, row in zip(target.tolist(), moved, strict=True):
                    b[slot] = row
        assert rows_of(pool) == before


@pytest.mark.parametrize(("offset", "padding"), [(0, 24), (3, 5), (4, 0), (8, 8)])
def test_strided_and_unaligned_staging(device: str, kernels: str, offset: int, padding: int) -> None:
    """Rows of staging may be apart and start at any byte; the bytes between them stay."""
    pool = build("k and v differ", 20, device)
    mover = PageMover(pool, 4, kernels)
    slots = torch.tensor([3, 19, 1, 7, 8, 9, 10, 11])
    size = mover.group_bytes(0, 2)
    whole = random_bytes(offset + 2 * (size + padding), seed=1).to(device)
    rest = whole.clone()
    staging = whole[offset:].view(2, size + padding)[:, :size]
    mover.gather(slots.to(device), staging, 0, 2)
    assert page_bytes(staging) == host_pages(rows_of(pool), slots.tolist(), 4, 0, 2)
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside[offset:].view(2, size + padding)[:, :size] = False
    assert torch.equal(whole[outside], rest[outside])
    target = torch.tensor([2, 4, 5, 6, 12, 13, 14, 15])
    mover.scatter(staging, target.to(device), 0, 2)
    assert host_pages(rows_of(pool), target.tolist(), 4, 0, 2) == page_bytes(staging)


def test_layers_of_one_tensor(device: str, kernels: str) -> None:
    """Buffers that are views of one tensor, token rows apart, are read and written at their own strides."""
    whole = random_bytes(2, 10, 3, 4, seed=2).to(device)
    pool = [[whole[layer, :, 0], whole[layer, :, 2]] for layer in range(2)]
    mover = PageMover(pool, 2, kernels)
    slots = torch.tensor([9, 0, 4, 5])
    staging = torch.zeros(2, mover.group_bytes(0, 2), dtype=U8, device=device)
    mover.gather(slots.to(device), staging, 0, 2)
    assert page_bytes(staging) == host_pages(rows_of(pool), slots.tolist(), 2, 0, 2)
    middle = whole[:, :, 1].clone()
    mover.scatter(staging, torch.tensor([1, 2, 3, 6], device=device), 0, 2)
    assert host_pages(rows_of(pool), [1, 2, 3, 6], 2, 0, 2) == page_bytes(staging)
    assert torch.equal(whole[:, :, 1], middle)


@pytest.mark.parametrize(("span", "page_tokens"), [(4, 4), (4, 16), (3, 6)])
@pytest.mark.parametrize("layers_differ", [False, True])
def test_rows_of_device_pages(device: str, kernels: str, span: int, page_tokens: int, layers_differ: bool) -> None:
    """Buffers with a row a device page move beside those with a row a slot, each row once, and nothing else does."""
    pages, spans = 20, [[1, span], [1, span], [span, 1] if layers_differ else [1, span]]
    shapes = {1: (pages * span, 2, 6), span: (pages, 13 * span)}
    pool = [
        [random_bytes(*shapes[s], seed=9 * i + s).to(device) for s in layer_spans]
        for i, layer_spans in enumerate(spans)
    ]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(5))
    slots = (order[:, None] * span + torch.arange(span)).reshape(-1)
    source, target = slots[: 2 * page_tokens], slots[-2 * page_tokens :]
    mover = PageMover(pool, page_tokens, kernels, spans)
    assert mover.uniform == (not layers_differ)
    for first, count in ((0, 3), (1, 2), (2, 1)):
        before = rows_of(pool)

        def ids(of: torch.Tensor, layer: int, b: int) -> list[int]:
            return [slot // spans[layer][b] for slot in of.tolist() if slot % spans[layer][b] == 0]

        expected = [
            b"".join(
                before[layer][b][i]
                for layer in range(first, first + count)
                for b in range(2)
                for i in ids(of, layer, b)
            )
            for of in source.split(page_tokens)
        ]
        staging = torch.zeros(2, mover.group_bytes(first, count), dtype=U8, device=device)
        mover.gather(source.to(device), staging, first, count)
        assert page_bytes(staging) == expected
        mover.scatter(staging, target.to(device), first, count)
        for layer in range(first, first + count):
            for b in range(2):
                moved = [before[layer][b][i] for i in ids(source, layer, b)]
                for i, row in zip(ids(target, layer, b), moved, strict=True):
                    before[layer][b][i] = row
        assert rows_of(pool) == before


@pytest.mark.gpu
def test_offsets_beyond_two_gib() -> None:
    """Rows whose offset passes 2^31 words of their buffer, and staging beyond it, are moved right."""
    slots = (1 << 31) // 512 + 64
    pool = [[torch.zeros(slots, 1024, dtype=torch.int32, device="cuda")]]
    tail = torch.arange(slots - 32, slots, device="cuda")
    pool[0][0][tail] = torch.arange(32, dtype=torch.int32, device="cuda")[:, None].expand(-1, 1024)
    mover = PageMover(pool, 16, "triton")
    staging = torch.zeros(2, mover.group_bytes(0, 1), dtype=U8, device="cuda")
    mover.gather(tail, staging, 0, 1)
    assert torch.equal(staging.view(torch.int32).view(32, 1024)[:, 5], torch.arange(32, device="cuda").int())
    mover.scatter(staging, tail.flip(0).contiguous(), 0, 1)
    assert pool[0][0][tail][:, 7].tolist() == list(range(31, -1, -1))


def test_wrong_arguments_are_named() -> None:
    """A staging buffer, slots or layers that do not fit raise ValueError with both shapes, and move nothing."""
    pool = build("mha", 8, "cpu")
    mover = PageMover(pool, 4, "torch")
    size = mover.group_bytes(0, 1)
    slots, staging = torch.arange(4), torch.zeros(1, size, dtype=U8)
    before = rows_of(pool)
    with pytest.raises(ValueError, match=rf"need uint8 \(1, {size}\)"):
        mover.scatter(torch.zeros(2, size, dtype=U8), slots, 0, 1)
    with pytest.raises(ValueError, match="need int64"):
        mover.scatter(staging, slots.int(), 0, 1)
    with pytest.raises(ValueError, match="4 a page"):
        mover.scatter(staging, slots[:3], 0, 1)
    with pytest.raises(ValueError, match=r"layers \[2, 4\) are not within the pool's 3"):
        mover.gather(slots, staging, 2, 2)
    with pytest.raises(ValueError, match="rows contiguous"):
        PageMover([[torch.zeros(4, 3, 2).transpose(1, 2)]], 1, "torch")
    with pytest.raises(ValueError, match="buffer 1 has a row for 3 tokens, which does not divide a page of 4"):
        PageMover(pool, 4, "torch", [[1, 3]] * 3)
    with pytest.raises(ValueError, match="0 layers"):
        PageMover([], 1, "torch")
    assert rows_of(pool) == before


def test_no_pages_move_nothing() -> None:
    """No slots, or no layers, leave the pool and staging as they are."""
    pool = build("mha", 8, "cpu")
    mover = PageMover(pool, 4, "torch")
    before = rows_of(pool)
    mover.gather(torch.empty(0, dtype=torch.int64), torch.empty(0, mover.group_bytes(0, 3), dtype=U8), 0, 3)
    mover.scatter(torch.empty(1, 0, dtype=U8), torch.arange(4), 1, 0)
    assert rows_of(pool) == before
