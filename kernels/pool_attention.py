"""Causal attention that reads all keys and values from the slots of a pool, with or without a cached prefix.

    sequence s has `lengths[s]` tokens; the last n_s = query_starts[s + 1] - query_starts[s] of them are queries
    query t of s is at position p = lengths[s] - n_s + t; it sees the keys at [0, p], with a window those at
    (p - window, p], with chunks those at [p - p % chunk, p]
    key j of s lies at slot table[rows[s], j], with a slot map at slot_map[table[rows[s], j]]

    score = scale * (q . k_j), with a soft cap c * tanh(score / c)
    out   = sum_j softmax(score)_j v_j, where a sink adds exp(sink) to the denominator of the softmax

One program computes BLOCK_ROWS rows over one split of the keys that these rows see. The rows are the query heads of one
key head, for successive tokens. Row r of a sequence is token r // group, head r % group of the key head's group. A
second kernel merges the splits by their log-sum-exps. Passes with few rows, as in decoding, use several splits. The
number of splits does not depend on lengths, so that a CUDA graph serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, power_of_two, tl

MAX_SPLITS = 64
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class PoolQueries:
    """The sequences of one pass, in the order of their queries.

    table          int32 [requests, max_len]   slot of each token of each request rows           int32 [S]
    row of each sequence in `table` query_starts   int32 [S + 1]               sequence s has the queries
    [query_starts[s], query_starts[s + 1]) lengths        int32 [S]                   tokens of each sequence, including
    its queries max_queries    the maximum number of queries of a sequence num_splits     parts into which the keys of
    each row are split
    """

    table: torch.Tensor
    rows: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    max_queries: int
    num_splits: int = 1


@dataclass(frozen=True)
class AttentionRule:
    """The parameters of a layer's mask and scores. `scale`: factor of the dot products. `window`: number of keys that a
    query sees, including its own; 0: all keys. `softcap`: limit of the scores; 0: no limit. `sinks`: logit of the sink
    of each query head, [query heads]; None: no sinks. `chunk`: a query sees only keys of its own chunk of `chunk`
    positions; 0: all keys. A layer has a window or chunks, not both."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    chunk: int = 0


def pool_attention(
    query: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    queries: PoolQueries,
    rule: AttentionRule,
    kernels: Kernels,
    slot_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of `query` [N, heads, dim] over keys [slots, kv_heads, dim] and values [slots, kv_heads,
    v_dim].

    `slot_map`: int64 [slots], maps slots in the table to slots of the buffers. Returns [N, heads, v_dim] in the dtype
    of `query`, contiguous. Scores are computed in float32.
    """
    check_kernels(kernels)
    if query.shape[1] % key_buffer.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads are no multiple of {key_buffer.shape[1]} key heads")
    attend = _attend_triton if kernels == "triton" else _attend_torch
    return attend(query, key_buffer, value_buffer, queries, rule, slot_map)


def num_splits(num_tiles: int, device: torch.device, *, decoding: bool) -> int:
    """Return the number of splits, a power of two, with which `num_tiles` tiles fill the device; 1 on the CPU.

    `decoding`: whether the tiles have few rows, so that four of them fit in a multiprocessor instead of two.
    """
    if device.type != "cuda":
        return 1
    programs = (4 if decoding else 2) * torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_SPLITS, 1 << (max(1, programs // max(1, num_tiles)).bit_length() - 1))


@jit
def _add_block(  # noqa: PLR0917 - Triton binds constants by position
    acc, highest, total, q, k_start, k_end, positions, slots_of_row, slot_map, k_head, v_head, k_stride, v_stride,
    scale_log2, softcap, bound,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    HAS_MAP: tl.constexpr, SOFTCAP: tl.constexpr, BOUND: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The block has keys [k_start, k_start + BLOCK_KEYS). Keys from k_end on, and keys that a row does not see, are
    # masked.
    keys = k_start + tl.arange(0, BLOCK_KEYS)
    column, v_column = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    in_split = keys < k_end
    if MASKED:
        slot = tl.load(slots_of_row + keys, mask=in_split, other=0).to(tl.int64)
    else:
        slot = tl.load(slots_of_row + keys).to(tl.int64)
    if HAS_MAP:
        slot = tl.load(slot_map + slot)
    k_at = k_head + slot[None, :] * k_stride + column[:, None]
    if MASKED or DK != BLOCK_DK:
        k = tl.load(k_at, mask=in_split[None, :] & (column < DK)[:, None], other=0.0)
    else:
        k = tl.load(k_at)
    score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale_log2
    if SOFTCAP:
        # Scores are in units of log2: softcap is c * log2(e), and tanh(x) = 2 * sigmoid(2x) - 1.
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    if MASKED:
        seen = (keys[None, :] <= positions[:, None]) & in_split[None, :]
        if BOUND == "window":
            seen = seen & (keys[None, :] > positions[:, None] - bound)
        if BOUND == "chunk":
            seen = seen & (keys[None, :] >= positions[:, None] // bound * bound)
        score = tl.where(seen, score, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(score, 1))
    # A row that has seen no key yet has the highest score -inf, and its sums are 0, so the base does not matter.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weight, 1)
    v_at = v_head + slot[:, None] * v_stride + v_column[None, :]
    if MASKED or DV != BLOCK_DV:
        v = tl.load(v_at, mask=in_split[:, None] & (v_column < DV)[None, :], other=0.0)
    else:
        v = tl.load(v_at)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    return acc, new_highest, total


@jit
def _keys_of_split(
    before, num_queries, first_row, split, bound,
    GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLITS: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    # At least one row of the tile sees each key in [low, high). This split works on the keys [start, end). Every row
    # sees the keys [start, common).
    first_token = first_row // GROUP
    high = before + tl.minimum((first_row + BLOCK_ROWS - 1) // GROUP, num_queries - 1) + 1
    low = 0
    if BOUND == "window":
        low = tl.maximum(0, before + first_token - bound + 1)
    if BOUND == "chunk":
        low = (before + first_token) // bound * bound
    width = tl.cdiv(tl.cdiv(high - low, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    start = low + split * width
    end = tl.minimum(start + width, high)
    common = start
    if BOUND == "none":
        common = start + tl.maximum(0, tl.minimum(end, before + first_token + 1) - start) // BLOCK_KEYS * BLOCK_KEYS
    return start, common, end


@jit
def _store_rows(  # noqa: PLR0917 - Triton binds constants by position
    acc, highest, total, token, head, in_rows, split, out, partial, log_sums, sinks,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    # Store the result of each row at its token and head in the pass.
    column = tl.arange(0, BLOCK_DV)
    row = token.to(tl.int64) * HEADS + head
    mask = in_rows[:, None] & (column < DV)[None, :]
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=in_rows, other=0.0).to(tl.float32) * 1.4426950408889634
            total += tl.exp2(sink - highest)
        acc = acc / total[:, None]
        tl.store(out + row[:, None] * DV + column[None, :], acc.to(out.dtype.element_ty), mask=mask)
    else:
        total_or_1 = tl.where(total > 0, total, 1.0)
        log_sum = tl.where(total > 0, highest + tl.log2(total_or_1), float("-inf"))
        part = row * SPLITS + split
        tl.store(log_sums + part, log_sum, mask=in_rows)
        tl.store(partial + part[:, None] * DV + column[None, :], acc / total_or_1[:, None], mask=mask)


@jit(do_not_specialize=["bound"], do_not_specialize_on_alignment=["rows", "query_starts", "lengths", "slot_map"])
def _attend_kernel(  # noqa: PLR0917 - Triton binds constants by position
    query, k_buffer, v_buffer, out, partial, log_sums, table, rows, query_starts, lengths, slot_map, sinks,
    scale_log2, softcap, bound,
    q_token, q_head, k_stride, k_head_stride, v_stride, v_head_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    SPLITS: tl.constexpr, HAS_MAP: tl.constexpr, HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, BOUND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # The last tiles of a sequence take longest, so they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_ROWS
    kv_head, sequence, split = tl.program_id(1), tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    first_query = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_query
    if first_row >= num_queries * GROUP:
        return
    row = first_row + tl.arange(0, BLOCK_ROWS)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    in_rows = token < num_queries
    before = tl.load(lengths + sequence) - num_queries
    start, common, end = _keys_of_split(
        before, num_queries, first_row, split, bound, GROUP, BLOCK_ROWS, BLOCK_KEYS, SPLITS, BOUND
    )
    column = tl.arange(0, BLOCK_DK)
    at = query + (first_query + token).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + column[None, :]
    q = tl.load(at, mask=in_rows[:, None] & (column < DK)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    slots = table + tl.load(rows + sequence).to(tl.int64) * table_stride
    k_head, v_head = k_buffer + kv_head * k_head_stride, v_buffer + kv_head * v_head_stride
    for k_start in range(start, common, BLOCK_KEYS):
        acc, highest, total = _add_block(
            acc, highest, total, q, k_start, end, before + token, slots, slot_map, k_head, v_head, k_stride, v_stride,
            scale_log2, softcap, bound, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_KEYS, HAS_MAP, SOFTCAP, BOUND,
            False, PRECISION,
        )  # fmt: skip
    for k_start in range(common, end, BLOCK_KEYS):
        acc, highest, total = _add_block(
            acc, highest, total, q, k_start, end, before + token, slots, slot_map, k_head, v_head, k_stride, v_stride,
            scale_log2, softcap, bound, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_KEYS, HAS_MAP, SOFTCAP, BOUND,
            True, PRECISION,
        )  # fmt: skip
    _store_rows(
        acc, highest, total, first_query + token, head, in_rows, split, out, partial, log_sums, sinks,
        HEADS, DV, BLOCK_DV, SPLITS, HAS_SINKS,
    )  # fmt: skip


@jit
def _merge_kernel(
    partial, log_sums, out, sinks,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    # Program (token, head) sums the outputs of all splits, weighted by each split's share of the softmax's denominator.
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split, column = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    log_sum = tl.load(log_sums + row * SPLITS + split)
    highest = tl.max(log_sum, 0)
    weight = tl.exp2(log_sum - highest)
    total = tl.sum(weight, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + tl.program_id(1)).to(tl.float32) * 1.4426950408889634 - highest)
    at = partial + (row * SPLITS + split)[:, None] * DV + column[None, :]
    parts = tl.load(at, mask=(column < DV)[None, :] & (weight > 0)[:, None], other=0.0)
    merged = tl.sum(parts * weight[:, None], 0) / total
    tl.store(out + row * DV + column, merged.to(out.dtype.element_ty), mask=column < DV)


def _attend_triton(
    query: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    queries: PoolQueries,
    rule: AttentionRule,
    slot_map: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, heads, dk = query.shape
    kv_heads, dv, splits = key_buffer.shape[1], value_buffer.shape[2], queries.num_splits
    group = heads // kv_heads
    block_rows, block_keys, warps, stages = _tile(queries.max_queries * group, max(dk, dv), query.dtype)
    out = torch.empty(num_tokens, heads, dv, dtype=query.dtype, device=query.device)
    partial = log_sums = out
    if splits > 1:
        partial = torch.empty(num_tokens, heads, splits, dv, dtype=torch.float32, device=query.device)
        log_sums = torch.empty(num_tokens, heads, splits, dtype=torch.float32, device=query.device)
    bound = "window" if rule.window else "chunk" if rule.chunk else "none"
    grid = (cdiv(queries.max_queries * group, block_rows), kv_heads, len(queries.rows) * splits)
    block_dv = power_of_two(max(16, dv))
    _attend_kernel[grid](
        query, key_buffer, value_buffer, out, partial, log_sums,
        queries.table, queries.rows, queries.query_starts, queries.lengths,
        queries.rows if slot_map is None else slot_map, out if rule.sinks is None else rule.sinks,
        rule.scale * _LOG2E, rule.softcap * _LOG2E, rule.window or rule.chunk,
        query.stride(0), query.stride(1), key_buffer.stride(0), key_buffer.stride(1),
        value_buffer.stride(0), value_buffer.stride(1), queries.table.stride(0),
        HEADS=heads, GROUP=group, DK=dk, DV=dv, BLOCK_DK=power_of_two(max(16, dk)), BLOCK_DV=block_dv,
        BLOCK_ROWS=block_rows, BLOCK_KEYS=block_keys, SPLITS=splits, HAS_MAP=slot_map is not None,
        HAS_SINKS=rule.sinks is not None, SOFTCAP=rule.softcap > 0, BOUND=bound,
        PRECISION="ieee", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(num_tokens, heads)](
            partial, log_sums, out, out if rule.sinks is None else rule.sinks,
            HEADS=heads, DV=dv, BLOCK_DV=block_dv, SPLITS=splits, HAS_SINKS=rule.sinks is not None, num_warps=1,
        )  # fmt: skip
    return out


def _tile(num_rows: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return (rows, keys, warps, stages) of a program, limited by the shared memory of a multiprocessor."""
    row_bytes = dim * dtype.itemsize
    if row_bytes > 512:  # heads of 512 elements, or of 256 in float32
        return min(32, power_of_two(max(16, num_rows))), 16, 4, 1
    if dtype == torch.float32:
        return 16, 32, 4, 2
    if dim > 128:
        return min(64, power_of_two(max(16, num_rows))), 32, 4, 2
    rows = min(128, power_of_two(max(16, num_rows)))
    return rows, 64, 2 if rows == 16 else 4, 3  # measured on one H200 with heads of 128 elements and pages of 16 tokens


def _attend_torch(
    query: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    queries: PoolQueries,
    rule: AttentionRule,
    slot_map: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, heads, _ = query.shape
    group = heads // key_buffer.shape[1]
    out = torch.empty(num_tokens, heads, value_buffer.shape[2], dtype=query.dtype, device=query.device)
    starts = queries.query_starts.tolist()
    for s, (row, length) in enumerate(zip(queries.rows.tolist(), queries.lengths.tolist(), strict=True)):
        first, end = starts[s], starts[s + 1]
        slots = queries.table[row, :length].long()
        slots = slots if slot_map is None else slot_map[slots]
        keys, values = (x[slots].float().repeat_interleave(group, dim=1) for x in (key_buffer, value_buffer))
        scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), keys) * rule.scale
        if rule.softcap:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        at = torch.arange(length, device=query.device)
        position = at[length - (end - first) :, None]
        seen = at <= position
        if rule.window:
            seen &= at > position - rule.window
        if rule.chunk:
            seen &= at >= position - position % rule.chunk
        scores = scores.masked_fill(~seen, float("-inf"))
        if rule.sinks is not None:
            sinks = rule.sinks.float()[:, None, None].expand(heads, end - first, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out
