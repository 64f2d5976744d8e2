"""Gathering and scattering pages, compared with a plain byte oracle."""

from __future__ import annotations

import pytest
import torch

from cases import KERNELS, pairwise, refused
from hicache.kernels.page_copy import PageMover
from kernel_case import random_bits
from page_case import LAYERS, POOLS, U8, Pool, check_store_and_load, page_bytes


class Staged:
    """A mover that stages pages in rows. The rows begin at byte `offset` and are `padding` bytes apart."""

    def __init__(self, mover: PageMover, host: torch.Tensor, offset: int = 0, padding: int = 0) -> None:
        self._mover, self._host, self._offset, self._padding = mover, host, offset, padding

    def _staging(self, pages: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random bytes, and the part of them that is the staging."""
        bits = random_bits(self._offset + len(pages) * (size + self._padding), seed=3).to(pages.device)
        return bits, bits[self._offset :].view(len(pages), size + self._padding)[:, :size]

    def store(self, slots: torch.Tensor, pages: torch.Tensor, first_layer: int, num_layers: int) -> None:
        begin, size = (self._mover.group_bytes(*layers) for layers in ((0, first_layer), (first_layer, num_layers)))
        bits, staging = self._staging(pages, size)
        before, rest = bits.clone(), torch.ones_like(bits, dtype=torch.bool)
        rest[self._offset :].view(len(pages), -1)[:, :size] = False
        self._mover.gather(slots, staging, first_layer, num_layers)
        assert torch.equal(bits[rest], before[rest])
        self._host[pages.cpu(), begin : begin + size] = staging.cpu()

    def load(self, pages: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int) -> None:
        begin, size = (self._mover.group_bytes(*layers) for layers in ((0, first_layer), (first_layer, num_layers)))
        _, staging = self._staging(pages, size)
        staging.copy_(self._host[pages.cpu(), begin : begin + size])
        self._mover.scatter(staging, slots, first_layer, num_layers)


@pairwise(kernels=KERNELS, pool_name=list(POOLS), pages=[1, 4, 16], layers=list(LAYERS))
def test_bytes_down_and_up(device: str, kernels: str, pool_name: str, pages: int, layers: str) -> None:
    """A gathered page has the bytes of its layers, buffers and tokens in order; a row that tokens share is there once.
    Scattered to other slots, the page reads back the same, and no other slot changes."""
    pool = Pool.named(pool_name, 6 * pages + 3, device)
    mover = pool.mover(pages * pool.page, kernels)
    assert mover.uniform == (pool_name not in ("layers differ", "spans differ"))
    host = random_bits(5, mover.group_bytes(0, pool.num_layers), seed=9)
    check_store_and_load(Staged(mover, host), pool, mover, host, 3, layers)


@pytest.mark.parametrize(("offset", "padding"), [(0, 24), (3, 5), (4, 0), (8, 8)])
def test_strided_and_unaligned_staging(device: str, kernels: str, offset: int, padding: int) -> None:
    """Rows of staging may be apart and start at any byte. Bytes between rows stay unchanged."""
    pool = Pool.named("k and v differ", 20, device)
    mover = pool.mover(4, kernels)
    host = random_bits(3, mover.group_bytes(0, 3), seed=9)
    check_store_and_load(Staged(mover, host, offset, padding), pool, mover, host, 2)


def test_layers_of_one_tensor(device: str, kernels: str) -> None:
    """Buffers that are views of one tensor, a token row apart, are read and written at their own strides."""
    complete = random_bits(2, 10, 3, 4, seed=2).to(device)
    pool, middle = Pool([[layer[:, 0], layer[:, 2]] for layer in complete], device), complete[:, :, 1].clone()
    mover = pool.mover(2, kernels)
    host = random_bits(3, mover.group_bytes(0, 2), seed=9)
    check_store_and_load(Staged(mover, host), pool, mover, host, 2)
    assert torch.equal(complete[:, :, 1], middle)


@pytest.mark.gpu
def test_offsets_beyond_two_gib() -> None:
    """Rows at offsets beyond 2^31 words of their buffer, and staging beyond that, are moved correctly."""
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


def test_wrong_shapes_are_refused_and_no_rows_copy_nothing() -> None:
    """Staging, slots, layers or buffers that do not fit raise ValueError. A call without slots, or without layers,
    moves no bytes."""
    pool = Pool.named("mha", 8, "cpu")
    mover, before = pool.mover(4, "torch"), pool.rows()
    size = mover.group_bytes(0, 1)
    slots, staging = torch.arange(4), torch.full((1, size), 3, dtype=U8)
    refused(
        ValueError,
        lambda: mover.scatter(torch.zeros(2, size, dtype=U8), slots, 0, 1),
        lambda: mover.scatter(staging.view(torch.int8), slots, 0, 1),
        lambda: mover.scatter(torch.zeros(1, 2 * size, dtype=U8)[:, ::2], slots, 0, 1),
        lambda: mover.scatter(staging.to("meta"), slots, 0, 1),
        lambda: mover.scatter(staging, slots.int(), 0, 1),
        lambda: mover.scatter(staging, slots[:3], 0, 1),
        lambda: mover.scatter(staging, slots[None], 0, 1),
        lambda: mover.gather(slots, staging, 2, 2),
        lambda: mover.gather(slots, staging, -1, 1),
        lambda: mover.gather(slots, staging, 1, -1),
        lambda: PageMover([[torch.zeros(4, 3, 2).transpose(1, 2)]], 1, "torch"),
        lambda: PageMover([[torch.zeros(4)]], 1, "torch"),
        lambda: PageMover(pool.buffers, 4, "torch", [[1, 3]] * 3),
        lambda: PageMover(pool.buffers, 4, "torch", [[1, 0]] * 3),
        lambda: PageMover(pool.buffers, 0, "torch"),
        lambda: PageMover(pool.buffers, 4, "cuda"),
        lambda: PageMover([], 1, "torch"),
        lambda: PageMover([[]], 1, "torch"),
    )
    mover.gather(torch.empty(0, dtype=torch.int64), torch.empty(0, mover.group_bytes(0, 3), dtype=U8), 0, 3)
    mover.scatter(torch.empty(1, 0, dtype=U8), slots, 1, 0)
    assert pool.rows() == before and set(page_bytes(staging)) == {bytes([3]) * size}
