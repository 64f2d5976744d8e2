"""Rows of the request table with prefix and new slots, compared with plain lists."""

from __future__ import annotations

import random

import torch

from cases import KERNELS, pairwise
from hicache.kernels.write_req_to_token import write_req_to_token_pool


def write(
    table: torch.Tensor,
    rows: list[int],
    prefixes: list[torch.Tensor],
    pre: list[int],
    seq: list[int],
    new: torch.Tensor,
    kernels: str,
) -> None:
    extend = [s - p for p, s in zip(pre, seq, strict=True)]
    device = table.device
    tensors = [torch.tensor(x, dtype=torch.int64, device=device) for x in (rows, pre, seq, extend)]
    write_req_to_token_pool(
        table, tensors[0], rows, prefixes, *tensors[1:], (pre, seq), new, kernels
    )  # fmt: skip


@pairwise(kernels=KERNELS, size=[(1, 5), (7, 200), (2, 1100), (130, 3)], dtype=[torch.int64, torch.int32])
def test_prefix_then_new_slots(device: str, kernels: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Row r holds the slots of its prefix and then its new ones. Other elements of the table do not change."""
    num_requests, longest = size
    rng = random.Random(longest)
    pre = [rng.choice([0, longest // 2, rng.randint(0, longest)]) for _ in range(num_requests)]
    seq = [p + rng.choice([0, 1, rng.randint(0, longest)]) for p in pre]
    rows = rng.sample(range(1, num_requests + 4), num_requests)
    before = torch.randint(0, 1 << 20, (num_requests + 4, 2 * longest + 3), dtype=torch.int32)
    # Prefix tensors may be longer than the prefix; only their first elements are used.
    prefixes = [torch.randint(1, 1 << 30, (p + rng.randint(0, 2),), dtype=dtype) for p in pre]
    new = torch.randint(1, 1 << 30, (sum(seq) - sum(pre),), dtype=torch.int64)
    expected, queue = before.tolist(), new.tolist()
    for row, prefix, p, s in zip(rows, prefixes, pre, seq, strict=True):
        expected[row][:s] = prefix.tolist()[:p] + queue[: s - p]
        queue = queue[s - p :]
    table = before.to(device)
    write(table, rows, [x.to(device) for x in prefixes], pre, seq, new.to(device), kernels)
    assert table.tolist() == expected


def test_no_requests(device: str, kernels: str) -> None:
    """An empty batch writes nothing."""
    table = torch.ones(2, 3, dtype=torch.int32, device=device)
    write(table, [], [], [], [], torch.empty(0, dtype=torch.int64, device=device), kernels)
    assert table.eq(1).all()
