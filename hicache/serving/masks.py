"""Attention masks in the forms that transformers models take, for sequences of different lengths in one batch.

May import torch and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hicache.errors import UnsupportedModel

_ATTENTION_KERNELS = ("sdpa", "eager")


def attention_mask(
    query_positions: torch.Tensor, key_positions: torch.Tensor, kernel: str, dtype: torch.dtype, window: int = 0
) -> torch.Tensor:
    """The causal mask of queries at `query_positions` [B, n] over keys at `key_positions` [B or 1, keys]:
    [B, 1, n, keys].

    A query at p sees keys at [0, p], of which a `window` > 0 leaves (p - window, p]; so padding, which stands outside,
    is hidden too. True means seen for sdpa; eager wants 0 and the lowest value of `dtype`.
    """
    queries, keys = query_positions[:, None, :, None], key_positions[:, None, None, :]
    seen = (keys <= queries) & (keys >= 0)
    if window:
        seen &= keys > queries - window
    if kernel == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def mask_argument(masks: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None] | torch.Tensor | None:
    """What to pass as a model's `attention_mask`, of the masks of its layer types by the library's names.

    Models of one type of attention take a tensor, those of several a dict. None of them given: the model makes them.
    """
    if len(masks) == 1 or all(mask is None for mask in masks.values()):
        return next(iter(masks.values()))
    return dict(masks)


def attention_kernel(model: Any) -> str:
    """'sdpa' or 'eager': how the model computes attention. Raises UnsupportedModel for others, with the remedy."""
    kernel = str(model.config._attn_implementation)
    if kernel not in _ATTENTION_KERNELS:
        raise UnsupportedModel(f"attn_implementation={kernel!r}: load the model with 'sdpa' or 'eager'")
    return kernel
