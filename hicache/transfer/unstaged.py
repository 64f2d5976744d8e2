"""Loads into slots that are runs: the copy engine writes to the pool itself, without staging and scattering.

    run        k host pages with consecutive ids, k * page_tokens consecutive slots
    one call   a buffer of one layer of a run: k rows of the host, a page apart, to k * rows adjacent rows of the pool

Slots must be known on the host, because their values decide how many runs there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from hicache.kernels.page_copy import PageMover
from hicache.transfer.copies import copy_strided
from hicache.transfer.plan import Ids, PageRuns, page_runs


@dataclass(frozen=True)
class SlotRuns:
    """Runs of pages whose slots are runs too, and the first slot of each."""

    pages: PageRuns
    first_slot: Ids

    def __len__(self) -> int:
        return len(self.first_slot)

    @cached_property
    def copies(self) -> list[tuple[int, int, int]]:
        """First page, pages and first slot of each run."""
        return list(zip(self.pages.first_pages, self.pages.lengths, self.first_slot.tolist(), strict=True))


class UnstagedCopier:
    """Copies runs of host pages `[pages, page_bytes]` to the buffers of a mover's pool. Holds no state of any copy."""

    def __init__(self, mover: PageMover, host: torch.Tensor, rows_per_chunk: int, device_page_tokens: int) -> None:
        """`device_page_tokens`: of the allocator's pages, within which slots are adjacent and in order."""
        self._page_tokens, self._rows_per_chunk = mover.page_tokens, rows_per_chunk
        self._block = math.gcd(device_page_tokens, mover.page_tokens)
        self._host_address, self._pitch = host.data_ptr(), host.stride(0)
        self._table = mover.table
        segments = [segment for layer in self._table.segments for segment in layer]
        # Copy calls for a run, over all layers, and bytes of the smallest row of a copy, a buffer of a layer of a page.
        self.num_buffers, self.piece_bytes = len(segments), min(s.page_bytes for s in segments)
        self._span = max(s.span for s in segments)
        # A page is one row of a copy only where its rows in the pool are adjacent.
        self._can_copy = all(s.rows.stride(0) == s.row_bytes and self._span % s.span == 0 for s in segments)

    def runs(self, pages: Ids, slots: Ids) -> SlotRuns | None:
        """`pages` and `slots` [p * page_tokens] as runs; None unless the slots of a page are adjacent and in order."""
        if not self._can_copy or not len(pages):
            return None
        block, page = self._block, self._page_tokens
        first = slots[::block]
        if block > 1 and (slots[block - 1 :: block] - first != block - 1).any():
            return None
        if block < page:
            by_page = first.reshape(len(pages), page // block)
            if (by_page[:, 1:] - by_page[:, :-1] != block).any():
                return None
            first = by_page[:, 0]
        if self._span > 1 and (first % self._span).any():
            return None
        found = page_runs(pages, self._rows_per_chunk, first[1:] - first[:-1] != page)
        return SlotRuns(found, first[found.position])

    def load(self, runs: SlotRuns, layer: int, stream: int) -> None:
        """Queue one layer (dense index) of all runs. TransferError when a copy is refused."""
        for buffer in self._table.segments[layer]:
            address, host_address = buffer.rows.data_ptr(), self._host_address + self._table.ends[layer] + buffer.offset
            for page, num_pages, slot in runs.copies:
                dst = address + slot // buffer.span * buffer.row_bytes
                src = host_address + page * self._pitch
                copy_strided(dst, buffer.page_bytes, src, self._pitch, buffer.page_bytes, num_pages, True, stream)
