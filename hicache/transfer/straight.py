"""Loads into slots that are runs: the copy engine writes to the pool itself, and nothing is staged or scattered.

    run        k host pages with consecutive ids, k * page_tokens consecutive slots
    one call   a buffer of one layer of a run: k rows of the host, a page apart, to k * rows adjacent rows of the pool

It takes slots that the host knows: their values decide how many runs there are. May import torch, kernels and the rest
of its package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from hicache.kernels.page_copy import PageMover
from hicache.transfer.copies import copy_strided
from hicache.transfer.plan import Cut, Ids, cut


@dataclass(frozen=True)
class SlotRuns:
    """Pages and slots cut together: `first_slot` of each run of `cut`."""

    cut: Cut
    first_slot: Ids

    def __len__(self) -> int:
        return len(self.first_slot)

    @cached_property
    def at(self) -> list[tuple[int, int, int]]:
        """First page, pages and first slot of each."""
        return list(zip(self.cut.page, self.cut.count, self.first_slot.tolist(), strict=True))


@dataclass(frozen=True)
class _Part:
    """One buffer of one layer: where row 0 is, where its rows begin within a host page, and how many bytes of one."""

    address: int
    offset: int
    row_bytes: int
    page_bytes: int
    span: int


class StraightCopier:
    """Copies runs of host pages `[pages, page_bytes]` to the buffers of a mover's pool. Holds no state of any copy."""

    def __init__(self, mover: PageMover, host: torch.Tensor, rows_per_chunk: int, device_page_tokens: int) -> None:
        """`device_page_tokens`: of the allocator's pages, within which slots are adjacent and in order."""
        self._page_tokens, self._rows_per_chunk = mover.page_tokens, rows_per_chunk
        self._block = math.gcd(device_page_tokens, mover.page_tokens)
        self._host_address, self._pitch = host.data_ptr(), host.shape[1]
        table = mover.table
        self._layers = [
            [
                _Part(s.rows.data_ptr(), table.ends[layer] + s.offset, s.row_bytes, s.page_bytes, s.span)
                for s in segments
            ]
            for layer, segments in enumerate(table.segments)
        ]
        dense = all(s.rows.stride(0) == s.row_bytes for segments in table.segments for s in segments)
        self._span = max(s.span for segments in table.segments for s in segments)
        # Where rows are apart, a page of them is not one row of a copy.
        self._able = dense and all(self._span % s.span == 0 for segments in table.segments for s in segments)

    @property
    def num_parts(self) -> int:
        """Calls that one run takes, over all layers."""
        return sum(map(len, self._layers))

    @property
    def piece_bytes(self) -> int:
        """Of the smallest row of a copy: one buffer of one layer of a page."""
        return min(part.page_bytes for parts in self._layers for part in parts)

    def runs(self, pages: Ids, slots: Ids) -> SlotRuns | None:
        """`pages` and `slots` [p * page_tokens] as runs; None where the slots of a page are not adjacent, in order."""
        if not self._able or not len(pages):
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
        found = cut(pages, self._rows_per_chunk, first[1:] - first[:-1] != page)
        return SlotRuns(found, first[found.position])

    def load(self, runs: SlotRuns, layer: int, stream: int) -> None:
        """Queue one layer (dense index) of all runs. TransferError where a copy is refused."""
        for part in self._layers[layer]:
            for page, count, slot in runs.at:
                to = part.address + slot // part.span * part.row_bytes
                of = self._host_address + page * self._pitch + part.offset
                copy_strided(to, part.page_bytes, of, self._pitch, part.page_bytes, count, True, stream)
