"""The last slot of each prefix, compared by value."""

from __future__ import annotations

import random

import pytest
import torch

from cases import refused
from hicache.kernels.last_loc import get_last_loc_torch, get_last_loc_triton, last_loc


@pytest.mark.parametrize("num_requests", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_slot_before_the_end(device: str, kernels: str, num_requests: int, dtype: torch.dtype) -> None:
    """Each request gets the table's entry before the end of its prefix, as int64, and -1 for an empty prefix."""
    rng = random.Random(num_requests)
    table = torch.randint(1, 1 << 30, (num_requests + 1, 37), dtype=torch.int32)
    rows = rng.sample(range(num_requests + 1), num_requests)
    lens = [rng.choice([0, 1, 37, rng.randint(0, 37)]) for _ in rows]
    expected = [int(table[row, n - 1]) if n else -1 for row, n in zip(rows, lens, strict=True)]
    on = [table.to(device), *(torch.tensor(x, dtype=dtype, device=device) for x in (rows, lens))]
    out = last_loc(*on, kernels)
    assert out.dtype == torch.int64 and out.tolist() == expected
    get = get_last_loc_triton if kernels == "triton" else get_last_loc_torch
    assert get(*on).tolist() == expected


def test_no_requests_and_a_view_of_a_table(device: str, kernels: str) -> None:
    """Without requests the result is an empty tensor. A table that is a slice of a wider one is read by its stride."""
    table = torch.arange(60, dtype=torch.int32, device=device).view(6, 10)[:, :4]
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert last_loc(table, none, none, kernels).tolist() == []
    rows, lens = (torch.tensor(x, device=device) for x in ([5, 2], [4, 1]))
    assert last_loc(table, rows, lens, kernels).tolist() == [53, 20]


def test_counts_that_differ_are_refused() -> None:
    one, two, table = torch.ones(1, dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.zeros(3, 3).int()
    refused(ValueError, lambda: last_loc(table, one, two, "torch"), lambda: last_loc(table, one, one, "cuda"))
