"""Slots and rows for whole batches, with room made in the prefix tree: what a scheduler calls before a forward.

    alloc_for_extend   rows [requests]; new slots, request after request; the rows of the table, in one launch
    alloc_for_decode   token_per_req new slots a request, and their columns of the table
    release_kv_cache   everything that one request held

Each takes all it needs or raises and leaves no trace but what the tree gave up. Owns nothing: slots belong to the
allocator, rows to the table, prefixes to the tree, which are seen through the protocols below. Scheduler thread only.
Nothing here makes the host wait for the device, where the tree frees by `free_run`. May import what the base may.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, overload

import numpy as np
import torch

from hicache.alloc.base import AllocatorState
from hicache.alloc.views import (
    BatchTree,
    CheckpointRequest,
    DecodeBatch,
    ExtendBatch,
    KVRequest,
    PrefixRequest,
    PrefixTree,
    RequestTable,
    StateRequest,
    StateTable,
    WindowAllocator,
)
from hicache.config import kernel_choice
from hicache.errors import InvariantError, OutOfRows, OutOfSlots, OutOfStates, ShapeError
from hicache.kernels.last_loc import get_last_loc_torch, get_last_loc_triton, last_loc
from hicache.kernels.write_req_to_token import write_req_to_token_pool, write_req_to_token_pool_triton
from hicache.values import EvictParams

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

log = logging.getLogger("hicache.alloc")


def evict_from_tree_cache(tree: PrefixTree | None, num_tokens: int) -> None:
    """Have the tree give up what `num_tokens` tokens are short of, on either side where there are two.

    Without a tree nothing happens.
    """
    if tree is None:
        return
    allocator = tree.token_to_kv_pool_allocator
    if isinstance(allocator, WindowAllocator):
        full = max(0, num_tokens - allocator.full_available_size())
        window = max(0, num_tokens - allocator.swa_available_size())
    else:
        full, window = max(0, num_tokens - allocator.available_size()), 0
    if full or window:
        tree.evict(EvictParams(num_tokens=full, swa_num_tokens=window))


def available_and_evictable_str(tree: PrefixTree) -> str:
    """What could be allocated now, for messages."""
    return tree.available_and_evictable_str()


def alloc_req_slots(table: RequestTable, reqs: Sequence[KVRequest], tree: PrefixTree | None = None) -> list[int]:
    """A row for each request, and states where the table has them, after the tree gave up states that are short.

    Raises OutOfRows or OutOfStates, which change nothing in the table.
    """
    short = _states_short(table, reqs)
    if short > 0 and tree is not None:
        tree.evict(EvictParams(num_tokens=0, mamba_num=short))
        short = _states_short(table, reqs)
    if short > 0 and isinstance(table, StateTable):
        raise OutOfStates(short, table.mamba_pool.available_size())
    rows = table.alloc(reqs)
    if rows is None:
        raise OutOfRows(table.size)
    return rows


def _states_short(table: RequestTable, reqs: Sequence[KVRequest]) -> int:
    """How many states the requests need beyond what is free; none where the table has no states."""
    if not isinstance(table, StateTable):
        return 0
    need = sum(isinstance(req, StateRequest) and req.mamba_pool_idx is None for req in reqs)
    if table.enable_mamba_extra_buffer:
        need += sum(isinstance(req, CheckpointRequest) and req.mamba_checkpoint_idx is None for req in reqs)
    return need - table.mamba_pool.available_size()


@overload
def alloc_token_slots(tree: PrefixTree, num_tokens: int, backup_state: Literal[False] = False) -> torch.Tensor: ...


@overload
def alloc_token_slots(
    tree: PrefixTree, num_tokens: int, backup_state: Literal[True]
) -> tuple[torch.Tensor, AllocatorState]: ...


def alloc_token_slots(
    tree: PrefixTree, num_tokens: int, backup_state: bool = False
) -> torch.Tensor | tuple[torch.Tensor, AllocatorState]:
    """`num_tokens` slots, int64; with `backup_state` also the allocator's state before they were taken.

    The state is of after the eviction: `restore_state` undoes the allocation, not what the tree gave up. Raises
    OutOfSlots.
    """
    evict_from_tree_cache(tree, num_tokens)
    allocator = tree.token_to_kv_pool_allocator
    state = allocator.backup_state() if backup_state else None
    slots = allocator.alloc(num_tokens)
    if slots is None:
        raise _out_of_slots(tree, num_tokens)
    return slots if state is None else (slots, state)


def alloc_paged_token_slots_extend(
    tree: PrefixTree,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    backup_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, AllocatorState]:
    """As the allocator's `alloc_extend`, with room made first; `backup_state` as in `alloc_token_slots`.

    NotImplementedError where the allocator has no pages.
    """
    allocator = tree.token_to_kv_pool_allocator
    size = allocator.page_size
    prefix, seq = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
    new_pages = int((-(-seq // size) + -prefix // size).sum())
    evict_from_tree_cache(tree, new_pages * size)
    state = allocator.backup_state() if backup_state else None
    slots = allocator.alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
    if slots is None:
        raise _out_of_slots(tree, new_pages * size)
    return slots if state is None else (slots, state)


def alloc_paged_token_slots_decode(
    tree: PrefixTree,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    token_per_req: int = 1,
) -> torch.Tensor:
    """`token_per_req` slots a request, request after request; `seq_lens` count the new tokens.

    Raises OutOfSlots, and NotImplementedError where the allocator has no pages.
    """
    allocator = tree.token_to_kv_pool_allocator
    before = seq_lens_cpu - token_per_req
    if token_per_req != 1:
        num_tokens = token_per_req * seq_lens_cpu.numel()
        lens = (seq_lens - token_per_req, before, seq_lens, seq_lens_cpu)
        slots = alloc_paged_token_slots_extend(tree, *lens, last_loc, num_tokens)
        assert isinstance(slots, torch.Tensor), "no state was asked for"
        return slots
    new_pages = int(np.count_nonzero(before.numpy() % allocator.page_size == 0))
    evict_from_tree_cache(tree, new_pages * allocator.page_size)
    taken = allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)
    if taken is None:
        raise _out_of_slots(tree, new_pages * allocator.page_size)
    return taken


def get_last_loc(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """The slot of the last token of each prefix, int64 `[requests]`; -1 where it is empty."""
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
    req_to_token_pool: RequestTable,
) -> None:
    """Fill the rows of a batch with prefix and new slots, in one launch.

    Rows and lengths are integer `[requests]` on the table's device, and what ends in `_cpu` says the same on the host:
    a sequence of ints, or a CPU tensor. ShapeError where counts disagree.
    """
    rows, prefix, seq, extend = map(_as_list, (req_pool_indices_cpu, prefix_lens_cpu, seq_lens_cpu, extend_lens_cpu))
    if [p + n for p, n in zip(prefix, extend, strict=False)] != seq:
        raise ShapeError(f"prefix_lens {prefix} and extend_lens {extend} do not add up to seq_lens {seq}")
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
    """Rows and slots for a batch of prefills, written to the table.

    Returns the new slots, int64 `[extend_num_tokens]`; the rows, int64 `[requests]` on the device; and the rows as a
    list. Requests that have a row keep it. Raises OutOfRows or OutOfSlots, and then takes neither rows nor slots.
    """
    tree, table = batch.tree_cache, batch.req_to_token_pool
    allocator, device = tree.token_to_kv_pool_allocator, table.req_to_token.device
    # Request r is at its prefix [0, p_r) and gets slots for [p_r, s_r).
    prefixes = [req.prefix_indices[:n] for req, n in zip(batch.reqs, batch.prefix_lens, strict=True)]
    seq_lens_cpu = batch.seq_lens_cpu.tolist()
    _check_lens(batch, prefixes, seq_lens_cpu, table.req_to_token.shape[1])
    lens_cpu = torch.tensor([list(batch.prefix_lens), list(batch.extend_lens)], dtype=torch.int64)
    prefix_lens, extend_lens = _to_device(lens_cpu, device).unbind(0)
    newcomers = {id(req): (req, _has_state(req)) for req in batch.reqs if req.req_pool_idx is None}
    rows = alloc_req_slots(table, batch.reqs, tree)
    try:
        if allocator.page_size == 1:
            slots = alloc_token_slots(tree, batch.extend_num_tokens)
        else:
            none = prefix_lens.new_full((1,), -1)
            last = torch.cat([p[-1:].to(torch.int64) if p.numel() else none for p in prefixes] or [none[:0]])
            lens = (prefix_lens, lens_cpu[0], batch.seq_lens, batch.seq_lens_cpu)
            taken = alloc_paged_token_slots_extend(tree, *lens, last, batch.extend_num_tokens)
            assert isinstance(taken, torch.Tensor), "no state was asked for"
            slots = taken
    except (OutOfSlots, ShapeError, InvariantError, NotImplementedError):
        for req, had_state in newcomers.values():
            _free_row(table, req, and_state=not had_state)
        raise
    row_ids = _to_device(torch.tensor(rows, dtype=torch.int64), device)
    write_cache_indices(
        slots, row_ids, rows, prefix_lens, batch.prefix_lens, batch.seq_lens, seq_lens_cpu, extend_lens,
        batch.extend_lens, prefixes, table,
    )  # fmt: skip
    return slots, row_ids, rows


def alloc_for_decode(batch: DecodeBatch, token_per_req: int = 1) -> torch.Tensor:
    """Slots int64 `[requests * token_per_req]` for the next tokens, request after request, written to the table.

    Raises OutOfSlots, and ShapeError where a row is too short for its sequence.
    """
    tree, table, seq_lens = batch.tree_cache, batch.req_to_token_pool, batch.seq_lens
    allocator = tree.token_to_kv_pool_allocator
    columns = table.req_to_token.shape[1]
    longest = int(batch.seq_lens_cpu.max()) + token_per_req if batch.seq_lens_cpu.numel() else 0
    if longest > columns:
        raise ShapeError(f"a sequence of {longest} tokens does not fit rows of {columns}; raise max_context_len")
    if allocator.page_size == 1:
        slots = alloc_token_slots(tree, seq_lens.numel() * token_per_req)
    else:
        last = get_last_loc(table.req_to_token, batch.req_pool_indices, seq_lens)
        slots = alloc_paged_token_slots_decode(
            tree, seq_lens + token_per_req, batch.seq_lens_cpu + token_per_req, last, token_per_req
        )
    # Tokens [s_r, s_r + token_per_req) of row r.
    positions = seq_lens[:, None] + torch.arange(token_per_req, device=seq_lens.device)
    table.write((batch.req_pool_indices[:, None], positions), slots.view(-1, token_per_req))
    return slots


def release_kv_cache(request: KVRequest, tree: BatchTree, is_insert: bool = True) -> None:
    """Give back everything a request held: slots (to the tree, with `is_insert`, or free), states and row.

    Without a row it can hold no more than the states of its match; released before, or refused, nothing.
    """
    row, table, allocator = request.req_pool_idx, tree.req_to_token_pool, tree.token_to_kv_pool_allocator
    if row is None:
        _free_states(table, request)
        return
    tree.cache_finished_req(request, is_insert=is_insert)
    # [0, committed) was the tree's business, with the page that `committed` ends in; so was a prefix that it holds,
    # though a request that was called off at once may not have committed it. [start, allocated) is left here.
    start = -(-request.kv_committed_len // allocator.page_size) * allocator.page_size
    if isinstance(request, PrefixRequest):
        start = max(start, request.cache_protected_len)
    allocator.free_run(table.req_to_token[row, start : request.kv_allocated_len].to(torch.int64), start)
    _free_row(table, request)


def _has_state(request: KVRequest) -> bool:
    return isinstance(request, StateRequest) and request.mamba_pool_idx is not None


def _free_row(table: RequestTable, request: KVRequest, and_state: bool = True) -> None:
    if and_state:
        _free_states(table, request)
    table.free(request)


def _free_states(table: RequestTable, request: KVRequest) -> None:
    """The states that the request has and did not give to a tree."""
    if not (isinstance(table, StateTable) and isinstance(request, StateRequest)):
        return
    if request.mamba_pool_idx is not None or (table.enable_mamba_extra_buffer and _has_checkpoint(request)):
        table.free_mamba_cache(request)


def _has_checkpoint(request: KVRequest) -> bool:
    return isinstance(request, CheckpointRequest) and request.mamba_checkpoint_idx is not None


def _as_list(values: Sequence[int] | torch.Tensor) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _check_lens(batch: ExtendBatch, prefixes: Sequence[torch.Tensor], seq_lens: Sequence[int], columns: int) -> None:
    sums = [p + n for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    if sums != list(seq_lens) or sum(batch.extend_lens) != batch.extend_num_tokens:
        raise ShapeError(
            f"prefix_lens + extend_lens are {sums}, seq_lens {list(seq_lens)}; extend_lens sum up to "
            f"{sum(batch.extend_lens)}, extend_num_tokens is {batch.extend_num_tokens}"
        )
    if [x.numel() for x in prefixes] != list(batch.prefix_lens):
        raise ShapeError(f"prefix_lens {list(batch.prefix_lens)}, but slots are {[x.numel() for x in prefixes]}")
    if max(seq_lens, default=0) > columns:
        raise ShapeError(f"a sequence of {max(seq_lens)} tokens does not fit rows of {columns}; raise max_context_len")


def _to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From CPU memory, pinned on the way, so that the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _out_of_slots(tree: PrefixTree, num_tokens: int) -> OutOfSlots:
    log.error("no slots for %d tokens: %s\n%s", num_tokens, available_and_evictable_str(tree), tree.pretty_print())
    return OutOfSlots(num_tokens, tree.token_to_kv_pool_allocator.available_size(), tree.evictable_size())
