"""What a caller's own objects must have: requests, and an allocator that stands in for a real one.

Request tables, state pools and real allocators are the classes of `hicache.device` and `hicache.alloc`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hicache.prefix_cache.node import TreeNode


class SlotAllocator(Protocol):
    """An allocator of a simulation: it takes slots back, and nothing else is asked of it."""

    @property
    def device(self) -> torch.device | str: ...

    def free(self, free_index: torch.Tensor) -> None: ...


class KVRequest(Protocol):
    """A request with a row in the table.

    Of the tokens in its row, [0, kv_committed_len) are computed and may be shared, and
    [kv_committed_len, kv_allocated_len) have slots with nothing in them (speculation, or a cancelled step).
    `prefix_indices`, int64 `[prefix]` on the device, are the slots it continues from; the first `cache_protected_len`
    of them belong to the tree.
    """

    req_pool_idx: int | None
    prefix_indices: torch.Tensor
    cache_protected_len: int
    kv_committed_len: int
    kv_allocated_len: int


class CachedRequest(KVRequest, Protocol):
    """A request that is cached as it grows.

    Its match ended at `last_node`, which it has locked. `fill_ids` are its tokens as far as they are computed,
    `origin_input_ids` and `output_ids` all its tokens. `priority`, where a request has one, is raised on its path.
    """

    last_node: TreeNode
    fill_ids: Sequence[int]
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None

    # Read by SWARadixCache alone: the first tokens, which have no window slots any more.
    swa_evicted_seqlen: int

    # Read by MambaRadixCache alone: the running state, a 0-dim id; and with the extra buffer the state after
    # `mamba_last_track_seqlen` tokens, which is None where there is no such checkpoint.
    mamba_pool_idx: torch.Tensor | None
    mamba_checkpoint_idx: torch.Tensor | None
    mamba_last_track_seqlen: int | None


def priority_of(request: CachedRequest) -> int:
    """The request's priority; 0 where it has none."""
    priority: int | None = getattr(request, "priority", None)
    return priority or 0
