"""Allocation for batches. A scheduler calls these functions before a forward pass and at the end of a request.

    alloc_for_extend   allocates rows [requests] and slots, request after request, and fills the rows in one launch
    alloc_for_decode   allocates token_per_req slots per request, and writes them to the rows
    release_kv_cache   frees the slots, the states and the row of one request

If too few slots or states are free, the prefix cache evicts first. Each call allocates everything, or raises and
allocates nothing. Only the scheduler's thread may call these functions. No call makes the host wait for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch

from hicache.alloc.base import AllocatorState
from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.config.environment import kernel_choice
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.req_to_token import ReqToTokenPool
from hicache.errors import InvariantError, OutOfRows, OutOfSlots, OutOfStates, ShapeError
from hicache.kernels.last_loc import get_last_loc_torch, get_last_loc_triton, last_loc
from hicache.kernels.write_req_to_token import write_req_to_token_pool, write_req_to_token_pool_triton
from hicache.prefix_cache.base import BasePrefixCache
from hicache.prefix_cache.params import EvictParams
from hicache.prefix_cache.protocols import CachedRequest, KVRequest
from hicache.prefix_cache.slots import free_states, states_of

__all__ = [
    "alloc_for_decode",
    "alloc_for_extend",
    "alloc_paged_token_slots_decode",
    "alloc_paged_token_slots_extend",
    "alloc_req_slots",
    "alloc_token_slots",
    "available_and_evictable_str",
    "evict_from_tree_cache",
    "get_last_loc",
    "get_last_loc_torch",
    "get_last_loc_triton",
    "release_kv_cache",
    "write_cache_indices",
    "write_req_to_token_pool_triton",
]

log = logging.getLogger("hicache.prefix_cache")

Lens: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Prefix and sequence lengths, each on the device and on the CPU."""


class Batch(Protocol):
    """The requests of one step. `seq_lens`: number of tokens of each request, int64 `[requests]` on the device;
    `seq_lens_cpu`: a copy on the host."""

    @property
    def seq_lens(self) -> torch.Tensor: ...

    @property
    def seq_lens_cpu(self) -> torch.Tensor: ...

    @property
    def tree_cache(self) -> BasePrefixCache: ...

    @property
    def req_to_token_pool(self) -> ReqToTokenPool: ...


class DecodeBatch(Batch, Protocol):
    """One decode step of requests that have rows. `seq_lens` do not include the new tokens."""

    @property
    def req_pool_indices(self) -> torch.Tensor: ...


class ExtendBatch(Batch, Protocol):
    """A batch of prefills. Request r has slots for `prefix_lens[r]` tokens and computes `extend_lens[r]` more tokens;
    `seq_lens[r]` is the sum of both numbers."""

    @property
    def reqs(self) -> Sequence[KVRequest]: ...

    @property
    def prefix_lens(self) -> Sequence[int]: ...

    @property
    def extend_lens(self) -> Sequence[int]: ...

    @property
    def extend_num_tokens(self) -> int: ...


def evict_from_tree_cache(tree: BasePrefixCache | None, num_tokens: int) -> None:
    """Evict until `num_tokens` full slots are free, and `num_tokens` window slots if the allocator has them.

    Does nothing without a tree."""
    if tree is None:
        return
    allocator, window = tree.token_to_kv_pool_allocator, 0
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        full = max(0, num_tokens - allocator.full_available_size())
        window = max(0, num_tokens - allocator.swa_available_size())
    else:
        full = max(0, num_tokens - allocator.available_size())
    if full or window:
        tree.evict(EvictParams(num_tokens=full, swa_num_tokens=window))


def available_and_evictable_str(tree: BasePrefixCache) -> str:
    """Return a text with the available and evictable sizes, for messages."""
    return tree.available_and_evictable_str()


def alloc_req_slots(table: ReqToTokenPool, reqs: Sequence[KVRequest], tree: BasePrefixCache | None = None) -> list[int]:
    """Allocate a row for each request, and its states if the table has a pool of states. If too few states are free,
    the tree evicts some.

    Raises OutOfRows or OutOfStates, and then leaves the table unchanged.
    """
    if isinstance(table, HybridReqToTokenPool):
        num_short = _missing_states(table, reqs) - table.mamba_pool.available_size()
        if num_short > 0 and tree is not None:
            tree.evict(EvictParams(num_tokens=0, mamba_num=num_short))
            num_short = _missing_states(table, reqs) - table.mamba_pool.available_size()
        if num_short > 0:
            raise OutOfStates(num_short, table.mamba_pool.available_size())
    rows = table.alloc(reqs)
    if rows is None:
        raise OutOfRows(table.size)
    return rows


def alloc_token_slots(
    tree: BasePrefixCache, num_tokens: int, backup_state: bool = False
) -> torch.Tensor | tuple[torch.Tensor, AllocatorState]:
    """Allocate `num_tokens` slots, int64. With `backup_state`, also return the allocator's state before the allocation.

    This state was saved after the eviction, so `restore_state` undoes only the allocation. Raises OutOfSlots.
    """
    slots, state = _token_slots(tree, num_tokens, backup_state)
    return slots if state is None else (slots, state)


def alloc_paged_token_slots_extend(
    tree: BasePrefixCache,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    backup_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, AllocatorState]:
    """Allocate slots for a batch of prefills by the allocator's `alloc_extend`, after evicting if too few slots are
    free. `backup_state`: as in `alloc_token_slots`.

    Raises OutOfSlots, and NotImplementedError if the allocator has no pages.
    """
    lens = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
    slots, state = _extend_slots(tree, lens, last_loc, extend_num_tokens, backup_state)
    return slots if state is None else (slots, state)


def alloc_paged_token_slots_decode(
    tree: BasePrefixCache,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    token_per_req: int = 1,
) -> torch.Tensor:
    """Allocate `token_per_req` slots per request, request after request; `seq_lens` include the new tokens.

    Raises OutOfSlots, and NotImplementedError if the allocator has no pages.
    """
    allocator = tree.token_to_kv_pool_allocator
    before = seq_lens_cpu - token_per_req
    if token_per_req != 1:
        lens = (seq_lens - token_per_req, before, seq_lens, seq_lens_cpu)
        return _extend_slots(tree, lens, last_loc, token_per_req * seq_lens_cpu.numel())[0]
    num_tokens = int(np.count_nonzero(before.numpy() % allocator.page_size == 0)) * allocator.page_size
    return _take(tree, num_tokens, lambda: allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc))[0]


def get_last_loc(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """Return the slot of the last token of each prefix, int64 `[requests]`. An empty prefix has -1."""
    return last_loc(req_to_token, req_pool_indices, prefix_lens, kernel_choice(req_to_token.device))


def write_cache_indices(
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_pool_indices_cpu: Sequence[int] | torch.Tensor,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: Sequence[int] | torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: Sequence[int] | torch.Tensor,
    extend_lens: torch.Tensor,
    extend_lens_cpu: Sequence[int] | torch.Tensor,
    prefix_tensors: Sequence[torch.Tensor],
    req_to_token_pool: ReqToTokenPool,
) -> None:
    """Write the slots of the prefixes and the new slots of a batch to the rows of its requests, in one kernel launch.

    Rows and lengths are integers `[requests]` on the table's device. Arguments with the suffix `_cpu` have the same
    values on the host, as a sequence of ints or a CPU tensor. Raises ShapeError if counts disagree.
    """
    rows, prefix, seq, extend = map(_as_list, (req_pool_indices_cpu, prefix_lens_cpu, seq_lens_cpu, extend_lens_cpu))
    if [p + n for p, n in zip(prefix, extend, strict=False)] != seq:
        raise ShapeError(f"seq_lens {seq} are not the sums of prefix_lens {prefix} and extend_lens {extend}")
    table = req_to_token_pool
    try:
        write_req_to_token_pool(
            table.req_to_token,
            req_pool_indices,
            rows,
            prefix_tensors,
            prefix_lens,
            seq_lens,
            extend_lens,
            (prefix, seq),
            out_cache_loc,
            kernel_choice(table.req_to_token.device),
        )
    except ValueError as error:
        raise ShapeError(str(error)) from error


def alloc_for_extend(batch: ExtendBatch) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Allocate rows and slots for a batch of prefills, and write the slots to the rows.

    Returns the new slots, int64 `[extend_num_tokens]`; the rows, int64 `[requests]` on the device; and the rows as a
    list. A request that already has a row keeps this row. Raises OutOfRows or OutOfSlots, and then allocates nothing.
    """
    tree, table = batch.tree_cache, batch.req_to_token_pool
    allocator, device = tree.token_to_kv_pool_allocator, table.req_to_token.device
    # Request r continues from its prefix [0, p_r) and gets slots for [p_r, s_r).
    prefixes = [req.prefix_indices[:n] for req, n in zip(batch.reqs, batch.prefix_lens, strict=True)]
    seq_lens_cpu = batch.seq_lens_cpu.tolist()
    _check_lens(batch, prefixes, seq_lens_cpu, table.req_to_token.shape[1])
    lens_cpu = torch.tensor([list(batch.prefix_lens), list(batch.extend_lens)], dtype=torch.int64)
    prefix_lens, extend_lens = _to_device(lens_cpu, device).unbind(0)
    new_requests = {id(req): (req, states_of(table, req)) for req in batch.reqs if req.req_pool_idx is None}
    rows = alloc_req_slots(table, batch.reqs, tree)
    try:
        if allocator.page_size == 1:
            slots, _ = _token_slots(tree, batch.extend_num_tokens)
        else:
            none = prefix_lens.new_full((1,), -1)
            last = torch.cat([p[-1:].to(torch.int64) if p.numel() else none for p in prefixes] or [none[:0]])
            lens = (prefix_lens, lens_cpu[0], batch.seq_lens, batch.seq_lens_cpu)
            slots, _ = _extend_slots(tree, lens, last, batch.extend_num_tokens)
    except (OutOfSlots, ShapeError, InvariantError, NotImplementedError):
        for req, states in new_requests.values():
            if not states:
                free_states(table, req)
            table.free(req)
        raise
    row_ids = _to_device(torch.tensor(rows, dtype=torch.int64), device)
    write_cache_indices(
        slots, row_ids, rows, prefix_lens, batch.prefix_lens, batch.seq_lens, seq_lens_cpu, extend_lens,
        batch.extend_lens, prefixes, table,
    )  # fmt: skip
    return slots, row_ids, rows


def alloc_for_decode(batch: DecodeBatch, token_per_req: int = 1) -> torch.Tensor:
    """Allocate slots for the next tokens, int64 `[requests * token_per_req]`, and write them to the rows.

    The slots are ordered request after request. Raises OutOfSlots. Raises ShapeError if a sequence is longer than a
    row.
    """
    tree, table, seq_lens = batch.tree_cache, batch.req_to_token_pool, batch.seq_lens
    columns = table.req_to_token.shape[1]
    longest = int(batch.seq_lens_cpu.max()) + token_per_req if batch.seq_lens_cpu.numel() else 0
    if longest > columns:
        raise ShapeError(f"a sequence of {longest} tokens exceeds max_context_len={columns}; raise it to {longest}")
    if tree.token_to_kv_pool_allocator.page_size == 1:
        slots, _ = _token_slots(tree, seq_lens.numel() * token_per_req)
    else:
        last = get_last_loc(table.req_to_token, batch.req_pool_indices, seq_lens)
        slots = alloc_paged_token_slots_decode(
            tree, seq_lens + token_per_req, batch.seq_lens_cpu + token_per_req, last, token_per_req
        )
    # The tokens [s_r, s_r + token_per_req) of row r.
    positions = seq_lens[:, None] + torch.arange(token_per_req, device=seq_lens.device)
    table.write((batch.req_pool_indices[:, None], positions), slots.view(-1, token_per_req))
    return slots


def release_kv_cache(request: CachedRequest, tree: BasePrefixCache, is_insert: bool = True) -> None:
    """Free the slots, states and row of a request. With `is_insert` the tree keeps the slots of committed full pages.

    If the request has no row, only a state that it got from a match is freed. Releasing a request again does nothing.
    """
    row, table, allocator = request.req_pool_idx, tree.req_to_token_pool, tree.token_to_kv_pool_allocator
    if row is None:
        free_states(table, request)
        return
    tree.cache_finished_req(request, is_insert=is_insert)
    # The slots of tokens [0, start) are in the tree, or `cache_finished_req` has freed them. `start` is the end of the
    # last page with committed tokens. If the request was cancelled before its first pass, it has committed no token,
    # and `start` is the end of the locked prefix. The slots of tokens [start, allocated) are freed here.
    start = max(-(-request.kv_committed_len // allocator.page_size) * allocator.page_size, request.cache_protected_len)
    allocator.free_run(table.req_to_token[row, start : request.kv_allocated_len].to(torch.int64), start)
    free_states(table, request)
    table.free(request)


def _take(
    tree: BasePrefixCache, num_tokens: int, take: Callable[[], torch.Tensor | None], backup_state: bool = False
) -> tuple[torch.Tensor, AllocatorState | None]:
    """Evict until `num_tokens` slots are free, then call `take`. Returns the slots that `take` returned, and with
    `backup_state` the allocator's state before this call."""
    evict_from_tree_cache(tree, num_tokens)
    allocator = tree.token_to_kv_pool_allocator
    state = allocator.backup_state() if backup_state else None
    slots = take()
    if slots is None:
        log.error(
            "out of slots for %d tokens: %s\n%s", num_tokens, available_and_evictable_str(tree), tree.pretty_print()
        )
        raise OutOfSlots(num_tokens, allocator.available_size(), tree.evictable_size())
    return slots, state


def _token_slots(
    tree: BasePrefixCache, num_tokens: int, backup_state: bool = False
) -> tuple[torch.Tensor, AllocatorState | None]:
    return _take(tree, num_tokens, lambda: tree.token_to_kv_pool_allocator.alloc(num_tokens), backup_state)


def _extend_slots(
    tree: BasePrefixCache, lens: Lens, last_loc: torch.Tensor, extend_num_tokens: int, backup_state: bool = False
) -> tuple[torch.Tensor, AllocatorState | None]:
    allocator = tree.token_to_kv_pool_allocator
    page_size, (_, prefix, _, seq) = allocator.page_size, lens
    new_pages = int((-(-seq.numpy() // page_size) + -prefix.numpy() // page_size).sum())
    take = lambda: allocator.alloc_extend(*lens, last_loc, extend_num_tokens)  # noqa: E731
    return _take(tree, new_pages * page_size, take, backup_state)


def _missing_states(table: HybridReqToTokenPool, requests: Sequence[KVRequest]) -> int:
    """Return the number of states that must be allocated for the requests."""
    per_request = 2 if table.enable_mamba_extra_buffer else 1
    return sum(per_request - len(states_of(table, request)) for request in requests)


def _as_list(values: Sequence[int] | torch.Tensor) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _check_lens(batch: ExtendBatch, prefixes: Sequence[torch.Tensor], seq_lens: Sequence[int], columns: int) -> None:
    sums = [p + n for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    if sums != list(seq_lens) or sum(batch.extend_lens) != batch.extend_num_tokens:
        raise ShapeError(
            f"prefix_lens + extend_lens = {sums} must equal seq_lens = {list(seq_lens)}, and the sum of extend_lens, "
            f"{sum(batch.extend_lens)}, must equal extend_num_tokens = {batch.extend_num_tokens}"
        )
    if [x.numel() for x in prefixes] != list(batch.prefix_lens):
        counts = [x.numel() for x in prefixes]
        raise ShapeError(f"prefix_indices have {counts} slots, fewer than prefix_lens = {list(batch.prefix_lens)}")
    if (longest := max(seq_lens, default=0)) > columns:
        raise ShapeError(f"a sequence of {longest} tokens exceeds max_context_len={columns}; raise it to {longest}")


def _to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from CPU memory to the device, through pinned memory, so that the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
