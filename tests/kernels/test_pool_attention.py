"""Attention over slots equals plain attention over the same keys and values in float32."""

from __future__ import annotations

import math

import pytest
import torch

from hicache.kernels.pool_attention import MAX_SPLITS, AttentionRule, PoolQueries, num_splits, pool_attention

# Of the output's largest value: one rounding of the weights and one of the output in 16 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def scattered(lengths: list[int], num_slots: int, seed: int = 0) -> torch.Tensor:
    """A table int32 [len(lengths) + 2, 64...] whose rows 1.. hold distinct random slots from 1 on."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(len(lengths) + 2, max(lengths) + 3, dtype=torch.int32)
    slots = torch.randperm(num_slots - 1, generator=generator) + 1
    for row, length in enumerate(lengths, start=1):
        table[row, :length], slots = slots[:length].int(), slots[length:]
    return table


def plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """[n, heads, dim] over [len, kv_heads, dim], one query and head at a time, in float64."""
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
    """Sequences of `lengths`, the last `news` tokens of each are queries, over scattered slots."""

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
        self.keys[0] = self.values[0] = math.nan  # nobody reads the sink

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


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "dk", "dv"), [(8, 2, 16, 16), (7, 1, 32, 16), (3, 3, 40, 24)])
def test_one_token_per_sequence(
    device: str, kernels: str, splits: int, heads: int, kv_heads: int, dk: int, dv: int
) -> None:
    """Decode: sequences of one token, of less than a block, of whole blocks and of more, with any number of splits."""
    case = Case([1, 5, 64, 130, 33], [1] * 5, heads, kv_heads, dk, dv, torch.float32)
    check(case, AttentionRule(dk**-0.5), device, kernels, splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("news", [[1, 40, 64, 7], [130, 1, 3, 70]])
def test_new_tokens_behind_a_prefix(device: str, kernels: str, splits: int, news: list[int]) -> None:
    """Extend: decodes and prompts in one pass, with and without a prefix, over tiles that are not full."""
    case = Case([130, 40, 100, 71], news, 6, 2, 16, 16, torch.float32)
    check(case, AttentionRule(0.3), device, kernels, splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 5, 33, 4000])
def test_windows(device: str, kernels: str, splits: int, window: int) -> None:
    case = Case([130, 40, 100], [1, 40, 37], 4, 2, 16, 16, torch.float32)
    check(case, AttentionRule(0.25, window=window), device, kernels, splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("chunk", [1, 16, 33, 4000])
def test_chunks(device: str, kernels: str, splits: int, chunk: int) -> None:
    case = Case([130, 40, 100], [1, 40, 37], 4, 2, 16, 16, torch.float32)
    check(case, AttentionRule(0.25, chunk=chunk), device, kernels, splits)


@pytest.mark.parametrize("splits", [1, 4])
def test_soft_caps_and_sinks(device: str, kernels: str, splits: int) -> None:
    case = Case([70, 40, 100], [1, 40, 37], 4, 2, 16, 16, torch.float32)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 9.0])
    check(case, AttentionRule(2.0, window=20, softcap=3.0, sinks=sinks), device, kernels, splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_wide_heads(device: str, kernels: str, dtype: torch.dtype, dim: int) -> None:
    if device == "cpu" and kernels == "triton" and (dim > 64 or dtype == torch.bfloat16):
        pytest.skip("the interpreter has no products of bfloat16, and takes long for wide heads")
    case = Case([150, 90], [1, 33], 8, 2, dim, dim, dtype)
    check(case, AttentionRule(dim**-0.5), device, kernels, splits=2)
    check(case, AttentionRule(dim**-0.5), device, kernels, splits=1)


def test_slot_map_and_strided_query(device: str, kernels: str) -> None:
    """Slots of the table are mapped before the buffers are read; a query that is a view is read in place."""
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


def test_heads_that_do_not_group_are_refused(kernels: str) -> None:
    case = Case([5], [1], 3, 2, 16, 16, torch.float32)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2 key heads"):
        pool_attention(case.query, case.keys, case.values, case.queries("cpu", 1), AttentionRule(1.0), kernels)


@pytest.mark.gpu
def test_few_rows_are_split_and_many_are_not() -> None:
    cuda = torch.device("cuda")
    splits = [num_splits(tiles, cuda, decoding=True) for tiles in (1, 8, 64, 1 << 20)]
    assert splits == sorted(splits, reverse=True) and (splits[0], splits[-1]) == (MAX_SPLITS, 1)
