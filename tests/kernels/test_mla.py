"""Latent rows in two parts against index assignment, bit by bit."""

from __future__ import annotations

import pytest
import torch

from hicache.kernels.mla import get_latent, set_latent

PARTS = [(512, 64, 576), (24, 8, 32), (7, 3, 10), (5, 1, 9), (1024, 1500, 2524)]


def bits(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bit patterns of a dtype, so that only a copy of bytes comes through."""
    row_bytes = shape[-1] * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape[:-1], row_bytes), dtype=torch.uint8, generator=generator).view(dtype)


def as_bytes(x: torch.Tensor) -> list[int]:
    return x.cpu().contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize(("rank", "rope", "row"), PARTS)
def test_parts_go_in_and_come_out(
    device: str, kernels: str, dtype: torch.dtype, rank: int, rope: int, row: int
) -> None:
    """Each named slot holds its two parts side by side, what is behind them and every other slot stay, and reading
    gives the parts back."""
    slots, tokens = 30, 11
    loc = torch.randperm(slots, generator=torch.Generator().manual_seed(1))[:tokens]
    first, second = bits(tokens, 1, rank, dtype=dtype, seed=2), bits(tokens, 1, rope, dtype=dtype, seed=3)
    buffer = bits(slots, 1, row, dtype=dtype, seed=4)
    expected = buffer.view(torch.uint8).clone()
    size, middle = dtype.itemsize, rank * dtype.itemsize
    for t, slot in enumerate(loc.tolist()):
        expected[slot, 0, :middle] = first[t, 0].view(torch.uint8)
        expected[slot, 0, middle : middle + rope * size] = second[t, 0].view(torch.uint8)
    on, at = buffer.to(device), loc.to(device)
    set_latent(first.to(device), second.to(device), on, at, kernels)
    assert as_bytes(on) == as_bytes(expected)
    got = get_latent(on, at, rank, rope, kernels)
    assert [x.shape for x in got] == [first.shape, second.shape]
    assert [as_bytes(x) for x in got] == [as_bytes(first), as_bytes(second)]


def test_parts_of_a_wider_tensor(device: str, kernels: str) -> None:
    """Parts that are slices of one projection, rows that are slices of wider ones, and int32 slots are stored right."""
    whole = bits(6, 90, dtype=torch.bfloat16, seed=1).to(device)
    nope, rope = whole[:, 3:27], whole[:, 30:38]
    rows = torch.zeros(9, 50, dtype=torch.bfloat16, device=device)
    loc = torch.tensor([8, 1, 3, 2, 7, 5], dtype=torch.int32, device=device)
    set_latent(nope, rope, rows[:, 5:40], loc, kernels)
    assert as_bytes(rows[loc.long(), 5:29]) == as_bytes(nope)
    assert as_bytes(rows[loc.long(), 29:37]) == as_bytes(rope)
    assert not rows[:, :5].any() and not rows[:, 37:].any() and not rows[[0, 4, 6]].any()
    got = get_latent(rows[:, 5:40], loc, 24, 8, kernels)
    assert as_bytes(got[0]) == as_bytes(nope) and as_bytes(got[1]) == as_bytes(rope)


def test_no_rows(device: str, kernels: str) -> None:
    """No slots store nothing and read empty parts."""
    buffer = torch.zeros(4, 1, 6, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    set_latent(buffer[:0, :, :4], buffer[:0, :, 4:], buffer, none, kernels)
    assert [tuple(x.shape) for x in get_latent(buffer, none, 4, 2, kernels)] == [(0, 1, 4), (0, 1, 2)]
    assert not buffer.any()


def test_wrong_rows_are_named() -> None:
    """Parts that do not fit the row, the slots or its dtype raise ValueError with both shapes, and store nothing."""
    buffer, loc = torch.zeros(4, 1, 6), torch.tensor([1, 2])
    for nope, rope, message in (
        (torch.ones(2, 1, 4), torch.ones(2, 1, 3), r"nope \(2, 4\) and rope \(2, 3\) .* rows of 6 elements"),
        (torch.ones(3, 1, 4), torch.ones(2, 1, 2), "for 2 slots"),
        (torch.ones(2, 1, 4).half(), torch.ones(2, 1, 2), "torch.float16, rope of torch.float32"),
        (torch.ones(2, 2, 4), torch.ones(2, 1, 2), r"nope of shape \(2, 2, 4\)"),
        (torch.ones(4, 2).T, torch.ones(2, 1, 2), "rows must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            set_latent(nope, rope, buffer, loc, "torch")
    assert not buffer.any()
