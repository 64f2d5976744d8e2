"""What batch-level allocation sees of batches, requests, the request table and the prefix tree.

They live in other units, which allocators must not import: any object of these shapes will do. Owns the protocols.
May import what the base may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.values import EvictParams, EvictResult


class KVRequest(Protocol):
    """What these functions ask of a request.

    Of the tokens in its row, [0, kv_committed_len) have been computed and may go to the tree, and
    [kv_committed_len, kv_allocated_len) have slots and nothing in them (speculation, or a step that was called off).
    `prefix_indices` are the slots of the prefix that it starts from, int64 `[prefix]` on the device.
    """

    req_pool_idx: int | None
    prefix_indices: torch.Tensor
    kv_committed_len: int
    kv_allocated_len: int


@runtime_checkable
class PrefixRequest(Protocol):
    """A request that knows how many tokens of its row are the tree's, and not its own to free."""

    cache_protected_len: int


class RequestTable(Protocol):
    """The table of rows, as `device.ReqToTokenPool` has it."""

    @property
    def size(self) -> int: ...

    @property
    def req_to_token(self) -> torch.Tensor: ...

    def alloc(self, need: Sequence[KVRequest]) -> list[int] | None: ...

    def free(self, what: KVRequest) -> None: ...

    def write(self, indices: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> None: ...

    def available_size(self) -> int: ...


class StatePool(Protocol):
    def available_size(self) -> int: ...


@runtime_checkable
class StateTable(Protocol):
    """A table whose requests have a recurrent state beside their row, as `device.HybridReqToTokenPool` has it."""

    @property
    def mamba_pool(self) -> StatePool: ...

    @property
    def enable_mamba_extra_buffer(self) -> bool: ...

    def free_mamba_cache(self, request: StateRequest) -> None: ...


@runtime_checkable
class StateRequest(Protocol):
    """A request of a hybrid model: `mamba_pool_idx` is its state, or None once it has given that away."""

    mamba_pool_idx: torch.Tensor | None


@runtime_checkable
class CheckpointRequest(StateRequest, Protocol):
    """One that has a second state, for the last checkpoint."""

    mamba_checkpoint_idx: torch.Tensor | None


class PrefixTree(Protocol):
    """What making room asks of a prefix tree."""

    @property
    def page_size(self) -> int: ...

    @property
    def token_to_kv_pool_allocator(self) -> BaseTokenToKVPoolAllocator: ...

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least so many tokens' slots, in whole pages, or all that nobody has locked."""
        ...

    def evictable_size(self) -> int: ...

    def available_and_evictable_str(self) -> str: ...

    def pretty_print(self) -> str: ...


class BatchTree(PrefixTree, Protocol):
    """What the end of a request asks beside it."""

    @property
    def req_to_token_pool(self) -> RequestTable: ...

    def cache_finished_req(self, req: KVRequest, is_insert: bool = True) -> None:
        """Keep or free the slots of the tokens [0, kv_committed_len), and unlock the prefix; the row stays."""
        ...


@runtime_checkable
class WindowAllocator(Protocol):
    """An allocator of two sides, either of which can be short."""

    def full_available_size(self) -> int: ...

    def swa_available_size(self) -> int: ...


class DecodeBatch(Protocol):
    """A batch of one step, of requests that have rows. `seq_lens`, int64 `[requests]`, are those before the step."""

    @property
    def req_pool_indices(self) -> torch.Tensor: ...

    @property
    def seq_lens(self) -> torch.Tensor: ...

    @property
    def seq_lens_cpu(self) -> torch.Tensor: ...

    @property
    def tree_cache(self) -> PrefixTree: ...

    @property
    def req_to_token_pool(self) -> RequestTable: ...


class ExtendBatch(Protocol):
    """A batch of prefills. `prefix_lens[r]` tokens of request r have slots, `extend_lens[r]` more are to be computed;
    `seq_lens`, int64 `[requests]`, are their sums."""

    @property
    def reqs(self) -> Sequence[KVRequest]: ...

    @property
    def prefix_lens(self) -> Sequence[int]: ...

    @property
    def extend_lens(self) -> Sequence[int]: ...

    @property
    def seq_lens(self) -> torch.Tensor: ...

    @property
    def seq_lens_cpu(self) -> torch.Tensor: ...

    @property
    def extend_num_tokens(self) -> int: ...

    @property
    def tree_cache(self) -> PrefixTree: ...

    @property
    def req_to_token_pool(self) -> RequestTable: ...
