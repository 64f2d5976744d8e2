"""Paged attention in torch, compared with attention of each request to its own tokens; and the two formats of a
sequence."""

from __future__ import annotations

import math

import pytest
import torch

from cases import pairwise, refused
from hicache.kernels.paged_attention import contiguous_to_paged, paged_attention_forward, paged_to_contiguous


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one request, token by token and head by head: the last `len(q)` of `len(k)` tokens attend
    causally."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        end = len(k) - len(q) + i + 1
        for head in range(q.shape[1]):
            if end > 0:
                keys, values = k[:end, head // group].double(), v[:end, head // group].double()
                out[i, head] = (keys @ q[i, head].double() / math.sqrt(q.shape[2])).softmax(0) @ values
    return out


@pairwise(page_size=[1, 4, 16], num_heads=[(4, 4), (6, 2), (3, 1)], seq_len=[1, 5])
def test_pages_and_tokens_give_equal_results(
    device: str, page_size: int, num_heads: tuple[int, int], seq_len: int
) -> None:
    """Each request attends to its own tokens up to its own position, wherever its pages are. Other rows are not
    read."""
    (heads, kv_heads), generator = num_heads, torch.Generator().manual_seed(page_size)
    lens = torch.tensor([17, 5, 1, 32])
    pages_each = [-(-int(n) // page_size) for n in lens]
    order = torch.randperm(sum(pages_each) + 3, generator=generator) + 1
    slots = (len(order) + 1) * page_size
    keys, values = torch.full((slots, kv_heads, 8), math.nan), torch.full((slots, kv_heads, 6), math.nan)
    tables, expected = torch.full((4, max(pages_each) + 2), 9999), []
    queries = torch.randn(4, seq_len, heads, 8, generator=generator)
    for b, (num_tokens, num_pages) in enumerate(zip(lens.tolist(), pages_each, strict=True)):
        mine, order = order[:num_pages], order[num_pages:]
        tables[b, :num_pages] = mine
        k, v = (torch.randn(num_tokens, kv_heads, dim, generator=generator) for dim in (8, 6))
        at = (mine[:, None] * page_size + torch.arange(page_size)).reshape(-1)[:num_tokens]
        keys[at], values[at] = k, v
        expected.append(plain(queries[b], k, v))
    on = [x.to(device) for x in (queries, keys, values, tables, lens)]
    got = paged_attention_forward(*on, page_size)
    assert got.shape == (4, seq_len, heads, 6)
    torch.testing.assert_close(got.cpu().double(), torch.stack(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [0, 1, 4, 11])
@pytest.mark.parametrize("row", [(), (3, 2, 2, 5)])
def test_formats_convert_both_ways(tokens: int, row: tuple[int, ...]) -> None:
    """Token t is at its page and offset, all other elements are zero, and the inverse returns the tokens."""
    x = torch.randn(tokens, *row)
    table = torch.tensor([5, 0, 3])
    paged = contiguous_to_paged(x, table, num_pages=6, page_size=4)
    assert paged.shape == (6, 4, *row)
    complete = torch.zeros_like(paged)
    for t in range(tokens):
        complete[int(table[t // 4]), t % 4] = x[t]
    assert torch.equal(paged, complete) and torch.equal(paged_to_contiguous(paged, table, tokens), x)


def test_wrong_arguments_are_refused() -> None:
    """Heads, sizes and tables that do not fit raise ValueError."""
    q, k, table, lens = torch.zeros(1, 1, 4, 8), torch.zeros(9, 2, 8), torch.zeros(1, 2).long(), torch.ones(1).long()
    paged = torch.zeros(6, 4, 1)
    refused(
        ValueError,
        lambda: paged_attention_forward(q[:, :, :3], k, k, table, lens, 4),
        lambda: paged_attention_forward(q[..., :4], k, k, table, lens, 4),
        lambda: paged_attention_forward(q, k, k[:8], table, lens, 4),
        lambda: paged_attention_forward(q, k, k, table, lens.repeat(2), 4),
        lambda: paged_attention_forward(q, k, k, table.repeat(2, 1), lens, 4),
        lambda: paged_to_contiguous(paged, torch.tensor([5, 0, 3]), 13),
        lambda: paged_to_contiguous(paged, torch.tensor([[5, 0, 3]]), 3),
    )
