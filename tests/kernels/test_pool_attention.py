"""Attention over slots equals plain attention over the same keys and values in float32."""

from __future__ import annotations

import math

import pytest
import torch

from cases import KERNELS, pairwise, refused
from hicache.kernels.pool_attention import MAX_SPLITS, AttentionRule, PoolQueries, num_splits, pool_attention

# Tolerances as a share of the output's largest value: one rounding of the weights and one of the output in 16 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def scattered(lengths: list[int], num_slots: int) -> torch.Tensor:
    """A table int32 [len(lengths) + 2, 64...]. The rows of the table from 1 on hold distinct random slots from 1 on."""
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(len(lengths) + 2, max(lengths) + 3, dtype=torch.int32)
    slots = torch.randperm(num_slots - 1, generator=generator) + 1
    for row, length in enumerate(lengths, start=1):
        table[row, :length], slots = slots[:length].int(), slots[length:]
    return table


def plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Attention of [n, heads, dim] over [len, kv_heads, dim], for one query and head at a time, in float64."""
    n, heads, _ = query.shape
    length, kv_heads, dv = values.shape
    out = torch.zeros(n, heads, dv, dtype=torch.float64)
    for i in range(n):
        position = length - n + i
        low = max(0, position - rule.window + 1) if rule.window else 0
        low = position - position % rule.chunk if rule.chunk else low
        for head in range(heads):
            k, v = (x[low : position + 1, head * kv_heads // heads].double() for x in (keys, values))
            scores = (k @ query[i, head].double()) * rule.scale
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            if rule.sinks is not None:
                scores = torch.cat([scores, rule.sinks[head].double()[None]])
                v = torch.cat([v, torch.zeros(1, dv, dtype=torch.float64)])
            out[i, head] = scores.softmax(0) @ v
    return out


class Case:
    """Sequences of `lengths` over scattered slots. The last `news` tokens of each are queries."""

    def __init__(
        self, lengths: list[int], news: list[int], heads: int, kv_heads: int, dk: int, dv: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        num_slots = sum(lengths) + 9
        self.lengths, self.news = lengths, news
        self.table = scattered(lengths, num_slots)
        self.keys = torch.randn(num_slots, kv_heads, dk, generator=generator).to(dtype)
        self.values = torch.randn(num_slots, kv_heads, dv, generator=generator).to(dtype)
        self.query = torch.randn(sum(news), heads, dk, generator=generator).to(dtype)
        self.keys[0] = self.values[0] = math.nan  # the sink is never read

    def queries(self, device: str, splits: int) -> PoolQueries:
        starts = torch.tensor([0, *self.news]).cumsum(0).int()
        rows = torch.arange(1, len(self.lengths) + 1, dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return PoolQueries(
            self.table.to(device), rows.to(device), starts.to(device), lengths.to(device), max(self.news), splits
        )

    def expected(self, rule: AttentionRule) -> torch.Tensor:
        parts, start = [], 0
        for row, (length, n) in enumerate(zip(self.lengths, self.news, strict=True), start=1):
            slots = self.table[row, :length].long()
            parts.append(plain(self.query[start : start + n], self.keys[slots], self.values[slots], rule))
            start += n
        return torch.cat(parts)


def check(case: Case, rule: AttentionRule, device: str, kernels: str, splits: int) -> None:
    on_device = AttentionRule(
        rule.scale, rule.window, rule.softcap, None if rule.sinks is None else rule.sinks.to(device), rule.chunk
    )
    got = pool_attention(
        case.query.to(device), case.keys.to(device), case.values.to(device), case.queries(device, splits), on_device,
        kernels,
    )  # fmt: skip
    expected = case.expected(rule)
    error = (got.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[case.query.dtype], f"relative error {error:.2g}"


SINKS = torch.tensor([-1.0, 0.0, 2.0, 9.0, 0.5, -3.0, 1.0, 4.0])
RULES = {
    "all": {"scale": 0.3},
    "window of 1": {"scale": 0.25, "window": 1},
    "window of 17": {"scale": 0.25, "window": 17},
    "window of 4000": {"scale": 0.25, "window": 4000},
    "chunks of 1": {"scale": 0.25, "chunk": 1},
    "chunks of 17": {"scale": 0.25, "chunk": 17},
    "soft cap": {"scale": 2.0, "window": 20, "softcap": 3.0},
    "sinks": {"scale": 0.3, "sinks": SINKS},
}
# (tokens of each sequence, number of new ones). "decode": one new token each, over a part of a block of keys, a
# complete block and more. "prompts": with and without a prefix, over tiles that are not full. The last case has both.
PASSES = {"decode": ([1, 32, 70, 33], [1] * 4), "prompts": ([11, 37], [11, 7]), "both": ([70, 9], [1, 9])}


@pairwise(
    kernels=KERNELS,
    rule=list(RULES),
    tokens=list(PASSES),
    shape=[(8, 2, 16, 16), (5, 1, 32, 16), (2, 2, 40, 24)],
    splits=[1, 4],
    dtype=[torch.float32, torch.float16],
)
def test_each_token_attends_by_its_rule(
    device: str, kernels: str, rule: str, tokens: str, shape: tuple[int, int, int, int], splits: int, dtype: torch.dtype
) -> None:
    """Decodes, extends and both together equal plain attention, with windows, chunks, soft caps and sinks, however they
    are split."""
    case = Case(*PASSES[tokens], *shape, dtype)
    given = dict(RULES[rule])
    if "sinks" in given:
        given["sinks"] = SINKS[: shape[0]]
    check(case, AttentionRule(**given), device, kernels, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_wide_heads(kernels: str, dtype: torch.dtype, dim: int) -> None:
    """Tiles of every head size fit on the device. (The interpreter is slow for them, and cannot multiply bfloat16.)"""
    case = Case([150, 90], [1, 33], 8, 2, dim, dim, dtype)
    for splits in (1, 2):
        check(case, AttentionRule(dim**-0.5), "cuda", kernels, splits)


def test_slot_map_and_strided_query(device: str, kernels: str) -> None:
    """Slots of the table are mapped before the buffers are read. A query that is a view is read in place."""
    case = Case([50, 20], [3, 1], 4, 2, 16, 16, torch.float32)
    rule = AttentionRule(0.25, window=9)
    expected = case.expected(rule)
    shift = 5
    keys, values = (torch.cat([torch.full_like(x[:shift], math.nan), x]) for x in (case.keys, case.values))
    slot_map = torch.arange(len(case.keys)) + shift
    transposed = case.query.transpose(0, 1).contiguous().to(device).transpose(0, 1)
    got = pool_attention(
        transposed, keys.to(device), values.to(device), case.queries(device, 2), rule, kernels, slot_map.to(device)
    )
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_group_are_refused() -> None:
    case = Case([5], [1], 3, 2, 16, 16, torch.float32)
    queries = case.queries("cpu", 1)
    refused(
        ValueError,
        lambda: pool_attention(case.query, case.keys, case.values, queries, AttentionRule(1.0), "torch"),
        lambda: pool_attention(case.query[:, :2], case.keys, case.values, queries, AttentionRule(1.0), "cuda"),
    )


@pytest.mark.gpu
def test_few_rows_are_split_and_many_are_not() -> None:
    cuda = torch.device("cuda")
    splits = [num_splits(tiles, cuda, decoding=True) for tiles in (1, 8, 64, 1 << 20)]
    assert splits == sorted(splits, reverse=True) and (splits[0], splits[-1]) == (MAX_SPLITS, 1)
