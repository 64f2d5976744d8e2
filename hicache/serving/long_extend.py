"""Attention of long prefill chunks by cuDNN, which multiplies matrices faster than Triton kernels.

    new keys     causal attention to the keys and values that the layer just computed
    prefix       attention without a mask to keys and values gathered from the pool, segment by segment
    out          sum of both results, each weighted by its share of the softmax's denominator, exp(log-sum-exp)

On one H200 with heads of 128 elements, cuDNN computes 590 to 670 TFLOP/s, and the kernel that reads slots in place
computes 370 TFLOP/s. In chunks of thousands of tokens, gathering a segment takes a hundredth of the time of attending
to it.
"""

from __future__ import annotations

import torch

from hicache.kernels.pool_attention import AttentionRule

MIN_QUERIES = 2048  # minimum tokens of a long chunk; for shorter chunks, reading slots in place is as fast
_SEGMENT_TOKENS = 32768  # prefix tokens gathered at a time; for an 8B model they take 128 MiB a layer
_HOPPER = (9, 0)


def suits(query: torch.Tensor, rule: AttentionRule) -> bool:
    """Return whether cuDNN can compute attention by `rule` for `query` [n, heads, dim] on this device."""
    plain = not (rule.window or rule.chunk or rule.softcap) and rule.sinks is None
    half = query.dtype in (torch.bfloat16, torch.float16)
    if not (plain and half and query.device.type == "cuda" and query.shape[2] % 8 == 0 and query.shape[2] <= 128):
        return False
    return torch.cuda.get_device_capability(query.device) >= _HOPPER


def long_extend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    prefix_slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute causal attention of one sequence's new tokens, `query` [n, heads, dim], to the prefix of the sequence and
    to the new tokens' `key` and `value`, [n, kv_heads, dim]. `prefix_slots`: int64 [prefix], rows of the buffers.
    Returns [n, heads, dim]."""
    out, log_sum = _attend(query, key, value, scale, is_causal=True)
    for start in range(0, len(prefix_slots), _SEGMENT_TOKENS):
        slots = prefix_slots[start : start + _SEGMENT_TOKENS]
        keys, values = (buffer[slots].to(query.dtype) for buffer in (key_buffer, value_buffer))
        part, part_log_sum = _attend(query, keys, values, scale, is_causal=False)
        share = torch.sigmoid(part_log_sum - log_sum)
        out.lerp_(part, share.to(out.dtype))
        if start + _SEGMENT_TOKENS < len(prefix_slots):
            log_sum = torch.logaddexp(log_sum, part_log_sum)
    return out[0].transpose(0, 1)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [1, heads, n, dim], and log-sum-exps float32 [1, heads, n, 1]."""
    states = [x.transpose(0, 1)[None] for x in (query, key, value)]
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *states, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, log_sum.view(1, query.shape[1], -1, 1)
