"""Frees and checks the slots of a prefix cache, and builds the `prefix_indices` of requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.req_to_token import ReqToTokenPool
from hicache.errors import InvariantError
from hicache.pages.node import Inserted, Released
from hicache.pages.tree import RadixTree
from hicache.prefix_cache.protocols import CachedRequest, SlotAllocator
from hicache.tiers import FULL, SWA, joined


class AllocatorAdapter:
    """Wraps the allocator of a cache: an allocator of `hicache.alloc`, or for a simulation another object with `free`,
    or None."""

    def __init__(self, allocator: SlotAllocator | None) -> None:
        self._allocator = allocator
        self._real = allocator if isinstance(allocator, BaseTokenToKVPoolAllocator) else None
        self._windows = allocator if isinstance(allocator, SWATokenToKVPoolAllocator) else None

    def free(self, slots: torch.Tensor, first_position: int = 0) -> None:
        """Free the slots of consecutive tokens of one sequence. `first_position`: position of the first token."""
        if not slots.numel():
            return
        if self._real is not None:
            self._real.free_run(slots, first_position)
        elif self._allocator is not None:
            self._allocator.free(slots)

    def free_released(self, released: list[Released]) -> None:
        """Free the full slots that the tree released, and window slots that it released separately. Does not free
        states."""
        windows = [each.value for each in released if each.component == SWA]
        if windows and self._windows is not None:
            self._windows.free_swa(joined(windows))
        slots = [each.value for each in released if each.component == FULL]
        if slots:
            self.free(joined(slots))

    def free_replaced(self, offered: torch.Tensor, inserted: Inserted, first_position: int) -> None:
        """Free the offered slots of tokens for which the tree already has slots. If such a token is a tombstone in the
        tree, the tree's slot first takes over the window slot of the offered slot."""
        replaced = offered[: len(inserted.existing)]
        if self._windows is not None:
            for start, end in inserted.adopted:
                self._windows.move_window(replaced[start:end], inserted.existing[start:end])
        self.free(replaced, first_position)

    def available_str(self) -> str:
        """Return a text with the number of free slots of the allocator; if it has full and window slots, with both
        numbers."""
        if self._real is None:
            return "unknown number of tokens available"
        text = f"{self._real.available_size()} tokens available"
        if self._windows is None:
            return text
        return f"{text} (full {self._windows.full_available_size()}, window {self._windows.swa_available_size()})"

    def violations(self, tree: RadixTree) -> list[str]:
        """Return the allocator's violations, and slots of the tree that are repeated, free or out of range."""
        allocator = self._real
        # A custom allocator may have no `free_pages`.
        if allocator is None or not isinstance(getattr(allocator, "free_pages", None), torch.Tensor):
            return []
        found: list[str] = []
        try:
            allocator.check()
        except InvariantError as error:
            found.extend(error.violations)
        values = tree.values(FULL)
        if not len(values):
            return found
        held = values.cpu()
        free = torch.cat((allocator.free_pages, allocator.release_pages)).cpu()
        page_size = allocator.page_size
        for bad, problem in (
            (held[(held < page_size) | (held >= allocator.size // page_size * page_size + page_size)], "do not exist"),
            (held[torch.isin(held // page_size, free)], "are free"),
            (_repeated(held), "are held more than once"),
        ):
            if bad.numel():
                found.append(f"slots {bad[:8].tolist()} of the tree {problem}")
        return found

    def window_violations(self, tree: RadixTree) -> list[str]:
        """Return a text for each node for which tree and allocator disagree whether the node has window slots."""
        if self._windows is None:
            return []
        found = []
        for node in tree.nodes():
            mapped = self._windows.translate_loc_from_full_to_swa(tree.pages[FULL].value(node.rows)) > 0
            holds = tree.pages[SWA].has(node.rows)
            if int(mapped.sum()) != (node.num_tokens if holds.all() else 0) or holds.any() != holds.all():
                found.append(f"node {node.id}: {int(mapped.sum())} of {node.num_tokens} tokens have windows, {holds=}")
        return found


class TableRows:
    """Reads rows of a request table as int64. Rows on the CPU are read with numpy, which is faster than torch for a few
    slots."""

    def __init__(self, table: ReqToTokenPool | None) -> None:
        self._rows = None if table is None else table.req_to_token
        self._on_host = None if self._rows is None or not self._rows.is_cpu else self._rows.numpy()

    def slots(self, row: int, start: int, end: int) -> torch.Tensor:
        """Return a copy of the slots of tokens [start, end), int64."""
        if self._on_host is not None:
            return torch.from_numpy(self._on_host[row, start:end].astype(np.int64))
        assert self._rows is not None, "the cache was built without a request table"
        return self._rows[row, start:end].to(torch.int64)


class PrefixBuffers:
    """Growing buffers for the `prefix_indices` of requests that are prefilled in chunks, int64.

    The `prefix_indices` of a request are a view of the front of a longer buffer, so that each chunk only copies its own
    slots. There is one buffer per row of the request table. A buffer belongs to a request only while
    `req.prefix_indices` is a view of this buffer's front.
    """

    def __init__(self, rows: TableRows) -> None:
        self._rows = rows
        self._buffers: dict[int, torch.Tensor] = {}

    def extended(self, req: CachedRequest, known_len: int, num_tokens: int) -> torch.Tensor:
        """Return the first `num_tokens` slots of the request's row. The first `known_len` slots are taken from
        `req.prefix_indices` and not read again."""
        row, shown = req.req_pool_idx, req.prefix_indices
        assert row is not None, "the request has no row"
        buffer = self._buffers.get(row)
        if buffer is None or shown.numel() < known_len or shown.data_ptr() != buffer.data_ptr():
            self._buffers[row] = buffer = self._rows.slots(row, 0, num_tokens)
            return buffer
        if buffer.numel() < num_tokens:
            longer = buffer.new_empty(max(num_tokens, 2 * buffer.numel()))
            longer[:known_len] = buffer[:known_len]
            self._buffers[row] = buffer = longer
        buffer[known_len:num_tokens] = self._rows.slots(row, known_len, num_tokens)
        return buffer[:num_tokens]

    def remove(self, row: int) -> None:
        self._buffers.pop(row, None)

    def clear(self) -> None:
        self._buffers.clear()


def _repeated(values: torch.Tensor) -> torch.Tensor:
    ids, counts = values.unique(return_counts=True)
    several: torch.Tensor = ids[counts > 1]
    return several


def states_of(table: ReqToTokenPool, request: Any) -> list[torch.Tensor]:
    """Return the recurrent states of a request: the running state and, with the extra buffer, the checkpoint."""
    if not isinstance(table, HybridReqToTokenPool):
        return []
    held = [request.mamba_pool_idx, request.mamba_checkpoint_idx if table.enable_mamba_extra_buffer else None]
    return [state for state in held if state is not None]


def free_states(table: ReqToTokenPool, request: Any) -> None:
    """Free the states that a request still owns, because it has not handed them over to a tree."""
    if isinstance(table, HybridReqToTokenPool) and states_of(table, request):
        table.free_mamba_cache(request)
