"""Protocols of the objects that a caller implements: requests, and the allocator of a simulation.

Request tables, state pools and the allocators of real engines are classes of `hicache.device` and `hicache.alloc`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hicache.prefix_cache.node import TreeNode


class SlotAllocator(Protocol):
    """The allocator of a simulation. The cache only calls `free`."""

    @property
    def device(self) -> torch.device | str: ...

    def free(self, free_index: torch.Tensor) -> None: ...


class KVRequest(Protocol):
    """A request with a row in the request table.

    Tokens [0, kv_committed_len) of its row are computed and may be inserted into the tree. Tokens [kv_committed_len,
    kv_allocated_len) have slots without valid KV (speculation, or a cancelled step). `prefix_indices`: slots of the
    cached prefix from which the request continues, int64 `[prefix]` on the device. The first `cache_protected_len` of
    these slots belong to the tree.
    """

    req_pool_idx: int | None
    prefix_indices: torch.Tensor
    cache_protected_len: int
    kv_committed_len: int
    kv_allocated_len: int


class CachedRequest(KVRequest, Protocol):
    """A request that is cached as it grows.

    `last_node`: the node at the end of the request's prefix in the tree; the request has locked this prefix.
    `fill_ids`: the computed tokens of the request. `origin_input_ids`, `output_ids`: the tokens of the prompt and of
    the output. If a request has a `priority`, the nodes of its prefix get at least that priority.
    """

    last_node: TreeNode
    fill_ids: Sequence[int]
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None

    # Read only by SWARadixCache: the number of first tokens whose window slots were freed.
    swa_evicted_seqlen: int

    # Read only by MambaRadixCache: the id of the running state, a 0-dim tensor. With the extra buffer also the id of
    # the checkpoint, which is the state after `mamba_last_track_seqlen` tokens (None: no checkpoint).
    mamba_pool_idx: torch.Tensor | None
    mamba_checkpoint_idx: torch.Tensor | None
    mamba_last_track_seqlen: int | None


def priority_of(request: CachedRequest) -> int:
    """Return the priority of a request; 0 if it has none."""
    priority: int | None = getattr(request, "priority", None)
    return priority or 0
