"""Attention over paged keys and values in torch, and conversions between contiguous and paged sequences.

This module defines the result of a paged attention kernel. It is slow, because it gathers the keys and values of all
requests.

    contiguous   [tokens, ...row]               token t at t
    paged        [num_pages, page_size, ...row]  token t at [page_table[t // page_size], t % page_size]

Only callers with SGLang's interface use it.
"""

from __future__ import annotations

import math

import torch


def contiguous_to_paged(
    contiguous: torch.Tensor, page_table: torch.Tensor, num_pages: int, page_size: int
) -> torch.Tensor:
    """Copy `[tokens, ...row]` to a zero-filled `[num_pages, page_size, ...row]`.

    `page_table`: integer `[pages]`, at least ceil(tokens / page_size) distinct page ids below `num_pages`. Raises
    ValueError if it has fewer pages.
    """
    num_tokens = contiguous.shape[0]
    used = _pages_used(num_tokens, page_table, page_size)
    padded = contiguous.new_zeros(used.numel() * page_size, *contiguous.shape[1:])
    padded[:num_tokens] = contiguous
    paged = contiguous.new_zeros(num_pages, page_size, *contiguous.shape[1:])
    paged[used] = padded.view(used.numel(), page_size, *contiguous.shape[1:])
    return paged


def paged_to_contiguous(paged: torch.Tensor, page_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Copy the first `num_tokens` tokens of the pages `page_table` from `[num_pages, page_size, ...row]` to a
    contiguous tensor. This is the inverse of `contiguous_to_paged`."""
    used = _pages_used(num_tokens, page_table, paged.shape[1])
    return paged[used].flatten(0, 1)[:num_tokens].clone()


def paged_attention_forward(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Return causal attention, softmax(q k^T / sqrt(head_dim)) v, of each request over its own pages: `[batch, seq_len,
    heads, v_dim]`.

    `query [batch, seq_len, heads, head_dim]` holds the last `seq_len` tokens of each context; `key_cache [slots,
    kv_heads, head_dim]` and `value_cache [slots, kv_heads, v_dim]` are a layer of a pool; `block_tables [batch,
    max_blocks]` has page ids; after the end of a context, any id is allowed. `context_lens [batch]` has the tokens of
    each context. Token t of request b is at slot block_tables[b, t // page_size] * page_size + t % page_size. Head h
    reads kv head h * kv_heads // heads. The computation is in float32. If seq_len exceeds the length of a context, the
    result of queries before the context's start is zero.
    """
    batch, seq_len, heads, head_dim = query.shape
    kv_heads = key_cache.shape[1]
    if heads % kv_heads or key_cache.shape[2] != head_dim or value_cache.shape[:2] != key_cache.shape[:2]:
        raise ValueError(
            f"query {tuple(query.shape)}, keys {tuple(key_cache.shape)}, values {tuple(value_cache.shape)}: need equal "
            f"slots and kv heads, kv heads that divide the query's, and equal head_dim of query and keys"
        )
    if block_tables.shape[0] != batch or context_lens.shape != (batch,):
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)}, context_lens {tuple(context_lens.shape)}: need one row and one "
            f"length for each of {batch} requests"
        )
    position = torch.arange(block_tables.shape[1] * page_size, device=query.device)
    lens = context_lens.to(torch.int64)[:, None]
    # After the end of a context the block table is undefined, so slot 0 is read there.
    page = block_tables.to(torch.int64).repeat_interleave(page_size, dim=1)
    slots = torch.where(position < lens, page * page_size + position % page_size, 0)
    # The shape is [batch, kv_heads, group, seq_len or tokens, dim].
    q = query.float().view(batch, seq_len, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    k, v = (cache[slots].float().transpose(1, 2)[:, :, None] for cache in (key_cache, value_cache))
    scores = q @ k.transpose(-1, -2) / math.sqrt(head_dim)
    query_position = lens - seq_len + torch.arange(seq_len, device=query.device)
    seen = (position[None, None, :] <= query_position[:, :, None])[:, None, None]
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0.0)
    # Values outside of the context are masked, because their slots may contain NaN, and NaN times a weight of 0 is NaN.
    inside = (position < lens)[:, None, None, :, None]
    out = weights @ v.masked_fill(~inside, 0.0)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, seq_len, heads, -1).to(query.dtype)


def _pages_used(num_tokens: int, page_table: torch.Tensor, page_size: int) -> torch.Tensor:
    num_used = -(-num_tokens // page_size)
    if page_table.dim() != 1 or page_table.numel() < num_used:
        raise ValueError(
            f"page_table {tuple(page_table.shape)} for {num_tokens} tokens: need one dimension of at least {num_used} "
            f"pages of {page_size}"
        )
    return page_table[:num_used].to(torch.int64)
