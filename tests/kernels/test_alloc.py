"""The slot kernels compared with plain Python, by value."""

from __future__ import annotations

import random

import pytest
import torch

from hicache.kernels.alloc_decode import alloc_decode
from hicache.kernels.alloc_extend import alloc_extend


def batch(
    rng: random.Random, num_requests: int, page_size: int, longest: int
) -> tuple[list[int], list[int], list[int]]:
    """Prefixes, sequences (some without new tokens) and last slots that keep the contract of the kernels."""
    prefixes = [rng.choice([0, rng.randint(0, longest)]) for _ in range(num_requests)]
    grown = [p + rng.choice([0, 1, rng.randint(0, longest)]) for p in prefixes]
    last = [-1 if p == 0 else (100 + r) * page_size + (p - 1) % page_size for r, p in enumerate(prefixes)]
    return prefixes, grown, last


def extend_oracle(prefixes: list[int], seqs: list[int], last: list[int], free: list[int], page_size: int) -> list[int]:
    """Allocate token by token: the next slot of the current page, or the first slot of the next free page."""
    free, out = list(free), []
    for prefix, seq, before in zip(prefixes, seqs, last, strict=True):
        slot = before
        for position in range(prefix, seq):
            slot = free.pop(0) * page_size if position % page_size == 0 else slot + 1
            out.append(slot)
    return out


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_extend_fills_pages_in_order(device: str, kernels: str, page_size: int) -> None:
    """Slots of a batch equal those of allocating one token after the other. Batches have odd sizes, extends without
    tokens, more requests than a step of the kernel's loop sums up, and lengths of either integer width."""
    rng = random.Random(page_size)
    for num_requests, longest, dtype in (
        (1, 3 * page_size, torch.int64),
        (3, 5, torch.int32),
        (7, 2 * page_size + 1, torch.int64),
        (2, 700, torch.int64),
        *([(135, 6, torch.int32)] if page_size == 4 else []),
    ):
        prefixes, seqs, last = batch(rng, num_requests, page_size, longest)
        free = rng.sample(range(1, 4000), 3000)
        expected = extend_oracle(prefixes, seqs, last, free, page_size)
        out = torch.full((len(expected) + 9,), -7, dtype=torch.int64, device=device)
        lens = [torch.tensor(x, dtype=dtype, device=device) for x in (prefixes, seqs, last)]
        longest_extend = max(s - p for p, s in zip(prefixes, seqs, strict=True))
        alloc_extend(*lens, torch.tensor(free, device=device), out[:-9], page_size, longest_extend, kernels)
        assert out.tolist() == expected + [-7] * 9


def test_extend_within_the_old_page_takes_none(device: str, kernels: str) -> None:
    """An extend that fits in its last page reads no free page, even if there is none."""
    lens = [torch.tensor(x, dtype=torch.int64, device=device) for x in ([5, 2], [8, 2], [20, 41])]
    out = torch.zeros(3, dtype=torch.int64, device=device)
    alloc_extend(*lens, torch.empty(0, dtype=torch.int64, device=device), out, 4, 3, kernels)
    assert out.tolist() == [21, 22, 23]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("num_requests", [1, 5, 130, 300])
def test_decode_takes_a_page_at_each_boundary(device: str, kernels: str, page_size: int, num_requests: int) -> None:
    """Each request gets the slot after its last one, or, if its page is full, the first slot of the next free page."""
    rng = random.Random(num_requests)
    seqs = [rng.choice([1, page_size + 1, rng.randint(1, 200)]) for _ in range(num_requests)]
    last = [-1 if s == 1 else (500 + r) * page_size + (s - 2) % page_size for r, s in enumerate(seqs)]
    free = rng.sample(range(1, 500), 400)
    queue, expected = list(free), []
    for seq, slot in zip(seqs, last, strict=True):
        expected.append(queue.pop(0) * page_size if (seq - 1) % page_size == 0 else slot + 1)
    out = torch.full((num_requests + 9,), -7, dtype=torch.int64, device=device)
    tensors = [torch.tensor(x, dtype=torch.int64, device=device) for x in (seqs, last, free)]
    alloc_decode(*tensors, out[:-9], page_size, kernels)
    assert out.tolist() == expected + [-7] * 9
