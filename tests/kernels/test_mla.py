"""Latent rows in two parts, compared bit by bit with index assignment."""

from __future__ import annotations

import pytest
import torch

from hicache.kernels.mla import get_latent, set_latent
from kernel_case import as_bytes, random_bits

PARTS = [(512, 64, 576), (24, 8, 32), (7, 3, 10), (5, 1, 9), (1024, 1500, 2524)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize(("rank", "rope", "row"), PARTS)
def test_parts_are_written_and_read(
    device: str, kernels: str, dtype: torch.dtype, rank: int, rope: int, row: int
) -> None:
    """Each named slot holds its two parts next to each other. Bytes after them and all other slots stay unchanged, and
    reading returns the two parts."""
    loc = torch.randperm(30, generator=torch.Generator().manual_seed(1))[:11]
    first, second = (random_bits(11, 1, dim, dtype=dtype, seed=dim) for dim in (rank, rope))
    buffer = random_bits(30, 1, row, dtype=dtype, seed=4)
    expected, both = as_bytes(buffer).clone(), as_bytes(torch.cat((first, second), -1))
    expected[loc, :, : both.shape[-1]] = both
    on, at = buffer.to(device), loc.to(device)
    set_latent(first.to(device), second.to(device), on, at, kernels)
    assert torch.equal(as_bytes(on), expected)
    for got, part in zip(get_latent(on, at, rank, rope, kernels), (first, second), strict=True):
        assert torch.equal(as_bytes(got), as_bytes(part))


def test_parts_of_a_wider_tensor(device: str, kernels: str) -> None:
    """Parts that are slices of one projection, rows that are slices of wider ones, and int32 slots are stored
    correctly."""
    complete = random_bits(6, 90, dtype=torch.bfloat16, seed=1).to(device)
    nope, rope = complete[:, 3:27], complete[:, 30:38]
    rows = torch.zeros(9, 50, dtype=torch.bfloat16, device=device)
    loc = torch.tensor([8, 1, 3, 2, 7, 5], dtype=torch.int32, device=device)
    set_latent(nope, rope, rows[:, 5:40], loc, kernels)
    assert torch.equal(as_bytes(rows[loc.long(), 5:37]), as_bytes(torch.cat((nope, rope), -1)))
    assert not rows[:, :5].any() and not rows[:, 37:].any() and not rows[[0, 4, 6]].any()
    got = get_latent(rows[:, 5:40], loc, 24, 8, kernels)
    assert torch.equal(as_bytes(got[0][:, 0]), as_bytes(nope)) and torch.equal(as_bytes(got[1][:, 0]), as_bytes(rope))


def test_no_rows(device: str, kernels: str) -> None:
    """A call without slots stores nothing, and reads empty parts."""
    buffer = torch.zeros(4, 1, 6, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    set_latent(buffer[:0, :, :4], buffer[:0, :, 4:], buffer, none, kernels)
    assert [tuple(x.shape) for x in get_latent(buffer, none, 4, 2, kernels)] == [(0, 1, 4), (0, 1, 2)]
    assert not buffer.any()
