"""Where the slots of a prefix cache go back to, what requests see of theirs, and how both are audited.

Owns the tensors behind the `prefix_indices` of requests that grow by chunks. May import torch, errors and, of its
package, base, core, node and views.
"""

from __future__ import annotations

from typing import Any

import torch

from hicache.errors import InvariantError
from hicache.tree.base import Released
from hicache.tree.core import RadixTree
from hicache.tree.node import Place
from hicache.tree.views import CachedRequest, FreeList, SlotAllocator, WindowAllocator


class SlotReturn:
    """Gives slots back to an allocator, or to nobody in a simulation. Never makes the host wait for the device where
    the allocator does not."""

    def __init__(self, allocator: Any) -> None:
        """`allocator`: a `SlotAllocator`, or None."""
        self._allocator: SlotAllocator | None = allocator
        # A stand-in may answer to every name; its free list is no tensor.
        real = isinstance(allocator, FreeList) and isinstance(allocator.free_pages, torch.Tensor)
        self._free_list: FreeList | None = allocator if real else None
        self._windows: WindowAllocator | None = allocator if isinstance(allocator, WindowAllocator) else None

    def free(self, slots: torch.Tensor, first_position: int = 0) -> None:
        """Slots of consecutive tokens of one sequence, the first of them at `first_position`."""
        if self._allocator is None or not slots.numel():
            return
        if self._free_list is not None:
            self._free_list.free_run(slots, first_position)
        else:
            self._allocator.free(slots)

    def available_str(self) -> str:
        """How many tokens the allocator has free, of each kind where there are two."""
        if self._free_list is None:
            return "tokens of an unknown number available"
        windows = self._windows
        text = f"{self._free_list.available_size()} tokens available"
        if windows is None:
            return text
        return f"{text} (full {windows.full_available_size()}, window {windows.swa_available_size()})"

    def take(self, released: list[Released]) -> None:
        """What left the tree: slots, or the window's part of them alone. States are others' business."""
        for gone in released:
            if gone.place is Place.FULL_DEVICE:
                self.free(gone.value)
            elif gone.place is Place.SWA_DEVICE and self._windows is not None:
                self._windows.free_swa(gone.value)

    def move_window(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        if self._windows is not None:
            self._windows.move_window(from_slots, to_slots)

    def violations(self, tree: RadixTree) -> list[str]:
        """The allocator's own, and slots that the tree holds twice, or that are free, or no slots at all."""
        allocator = self._free_list
        if allocator is None:
            return []
        found: list[str] = []
        try:
            allocator.check()
        except InvariantError as error:
            found.extend(error.violations)
        values = tree.values(Place.FULL_DEVICE)
        if not values:
            return found
        held = torch.cat(values).cpu()
        free = torch.cat((allocator.free_pages, allocator.release_pages)).cpu()
        page_size = allocator.page_size
        for bad, what in (
            (held[(held < page_size) | (held >= allocator.size // page_size * page_size + page_size)], "do not exist"),
            (held[torch.isin(held // page_size, free)], "are free"),
            (_repeated(held), "are held more than once"),
        ):
            if bad.numel():
                found.append(f"slots {bad[:8].tolist()} of the tree {what}")
        return found

    def window_violations(self, tree: RadixTree) -> list[str]:
        """Nodes whose window slots are not what the tree says of them."""
        if self._windows is None:
            return []
        found = []
        for node in tree.nodes():
            paired = self._windows.translate_loc_from_full_to_swa(node.held(Place.FULL_DEVICE)) > 0
            holds = node.holds(Place.SWA_DEVICE)
            if not bool((paired == holds).all()):
                found.append(f"node {node.id}: {int(paired.sum())} of {node.num_tokens} tokens have windows, {holds=}")
        return found


class PrefixBuffers:
    """`prefix_indices` of requests whose prefill goes by chunks: int64 copies of their rows that grow by what is new.

    A request's tensor is the front of a longer one, so the next chunk costs its own length. Each is known by the row,
    and is the request's only as long as the request shows it.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def grown(self, req: CachedRequest, row: torch.Tensor, known_len: int, num_tokens: int) -> torch.Tensor:
        """The first `num_tokens` slots of `row`; `known_len` of them are as `req.prefix_indices` has them."""
        assert req.req_pool_idx is not None
        buffer, shown = self._buffers.get(req.req_pool_idx), req.prefix_indices
        if buffer is None or len(shown) < known_len or shown.data_ptr() != buffer.data_ptr():
            buffer, known_len = row.new_empty(num_tokens, dtype=torch.int64), 0
        elif len(buffer) < num_tokens:
            longer = buffer.new_empty(max(num_tokens, 2 * len(buffer)))
            longer[:known_len] = buffer[:known_len]
            buffer = longer
        buffer[known_len:num_tokens] = row[known_len:num_tokens]
        self._buffers[req.req_pool_idx] = buffer
        return buffer[:num_tokens]

    def forget(self, row: int) -> None:
        self._buffers.pop(row, None)

    def clear(self) -> None:
        self._buffers.clear()


def _repeated(values: torch.Tensor) -> torch.Tensor:
    ids, counts = values.unique(return_counts=True)
    several: torch.Tensor = ids[counts > 1]
    return several
