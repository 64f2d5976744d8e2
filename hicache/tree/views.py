"""What the public prefix caches ask of allocators, of the request table, of its states and of requests.

They live in other units, or in a caller's code: any object of these shapes will do. Where a protocol can be checked at
run time, a request or an allocator may lack what it says. Owns the protocols. May import torch and hicache.tree.node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from hicache.tree.node import TreeNode


class SlotAllocator(Protocol):
    """Takes slots back; a stand-in needs no more."""

    @property
    def device(self) -> torch.device | str: ...

    def free(self, free_index: torch.Tensor) -> None: ...


@runtime_checkable
class FreeList(SlotAllocator, Protocol):
    """An allocator that can be audited, and that is told where a run of slots stands in its sequence."""

    @property
    def size(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def free_pages(self) -> torch.Tensor: ...

    @property
    def release_pages(self) -> torch.Tensor: ...

    def free_run(self, slots: torch.Tensor, first_position: int = 0) -> None: ...

    def available_size(self) -> int: ...

    def check(self) -> None: ...


@runtime_checkable
class WindowAllocator(Protocol):
    """An allocator whose full slots are paired with window slots, or not any more."""

    def full_available_size(self) -> int: ...

    def swa_available_size(self) -> int: ...

    def free_swa(self, free_index: torch.Tensor) -> None: ...

    def move_window(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None: ...

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor: ...


class RequestTable(Protocol):
    """Rows of slots, one a request: int32 `[rows, columns]`."""

    @property
    def req_to_token(self) -> torch.Tensor: ...

    def write(self, indices: tuple[int, slice], values: torch.Tensor) -> None: ...


class StateTensors(Protocol):
    """All states of a pool: `[layers, states, ...]` each."""

    @property
    def conv(self) -> list[torch.Tensor]: ...

    @property
    def temporal(self) -> torch.Tensor: ...


class StatePool(Protocol):
    """Recurrent states by id, int64; `alloc` and `fork_from` give None when short."""

    @property
    def mamba_cache(self) -> StateTensors: ...

    @property
    def free_slots(self) -> torch.Tensor: ...

    @property
    def size(self) -> int: ...

    def available_size(self) -> int: ...

    def free(self, free_index: torch.Tensor) -> None: ...

    def fork_from(self, src_index: torch.Tensor) -> torch.Tensor | None: ...

    def copy_from(self, src_index: torch.Tensor, dst_index: torch.Tensor) -> None: ...

    def check(self) -> None: ...


@runtime_checkable
class StateTable(Protocol):
    """A table whose requests have recurrent states."""

    @property
    def mamba_pool(self) -> StatePool: ...

    @property
    def enable_mamba_extra_buffer(self) -> bool: ...

    def free_mamba_cache(self, request: Any) -> None: ...

    def take_checkpoint(self, request: Any) -> torch.Tensor | None: ...


class CachedRequest(Protocol):
    """A request that is cached as it grows.

    `last_node` is where its match ended: it holds a lock there, and the tokens up to there are the tree's. `fill_ids`
    are its tokens as far as they are computed, `origin_input_ids` and `output_ids` all that it has; of these
    `kv_committed_len` are computed. `prefix_indices`, int64, are the slots to go on from; `cache_protected_len` of them
    are the tree's.
    """

    req_pool_idx: int | None
    prefix_indices: torch.Tensor
    cache_protected_len: int
    last_node: TreeNode
    fill_ids: Sequence[int]
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None
    kv_committed_len: int


@runtime_checkable
class RankedRequest(Protocol):
    """One that says how dear it is to its owner; None counts as 0."""

    priority: int | None


@runtime_checkable
class WindowRequest(Protocol):
    """One whose first `swa_evicted_seqlen` tokens have lost their window slots."""

    swa_evicted_seqlen: int


@runtime_checkable
class StateRequest(Protocol):
    """One with a recurrent state of its own, a 0-dim id, or None."""

    mamba_pool_idx: torch.Tensor | None


@runtime_checkable
class CheckpointRequest(StateRequest, Protocol):
    """One with a second state, which has consumed exactly `mamba_last_track_seqlen` tokens; None: nothing yet."""

    mamba_checkpoint_idx: torch.Tensor | None
    mamba_last_track_seqlen: int | None


def priority_of(request: CachedRequest) -> int:
    """The request's priority, 0 where it has none."""
    return (request.priority or 0) if isinstance(request, RankedRequest) else 0


def evicted_window_of(request: CachedRequest) -> int:
    """Tokens at the front of a request that have no window slots any more."""
    return request.swa_evicted_seqlen if isinstance(request, WindowRequest) else 0
