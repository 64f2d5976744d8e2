"""Sliding windows in the engine: window slots, mapped to full slots, for the last window of each prefix.

A prefix needs the window slots of its last `window` tokens only. The window slots of earlier tokens are not locked, and
are evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch

from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.config import EngineConfig
from hicache.device.base import KVCache
from hicache.errors import PromptTooLong
from hicache.flow.components.base import Admission, CacheComponent, EngineParts, HostLink, account_violations
from hicache.flow.components.full import owned_slots
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.page_transfer import Load
from hicache.layout import ModelGeometry
from hicache.pages.components import SwaComponent, TreeComponent
from hicache.pages.table import NO_ROWS, Rows
from hicache.tiers import FULL, SWA


class SlidingWindow(CacheComponent):
    """The component of models with window layers."""

    tree_component: SwaComponent

    @classmethod
    def tree_component_for(cls, config: EngineConfig, model: ModelGeometry | KVCache) -> TreeComponent | None:
        if not isinstance(model, ModelGeometry) or not model.window_layers:
            return None
        return SwaComponent(model.window)

    def __init__(self, engine: EngineParts, tree_component: TreeComponent, link: HostLink) -> None:
        super().__init__(engine, tree_component, link)
        assert isinstance(engine.allocator, SWATokenToKVPoolAllocator)
        self._allocator = engine.allocator
        self._evicted = engine.metrics.counter(
            "evict.window_tokens", "tokens whose window slots were evicted from the device before their full slots"
        )
        gauge, total = engine.metrics.gauge, self.capacity
        gauge("device.total_window_tokens", "window slots of the device tier", lambda: total)
        gauge("device.used_window_tokens", "window slots that the cache or a request uses", self._used)

    @property
    def max_tokens(self) -> int:
        """Return the most tokens for which one request may get slots at a time, in addition to the window of its
        prefix."""
        return self.capacity - self.tree_component.window - self.page_size

    @property
    def capacity(self) -> int:
        page = self._allocator.page_size
        return self._allocator.size_swa // page * page

    def _used(self) -> int:
        return self.capacity - self.available()

    def device_ids(self, value: torch.Tensor) -> torch.Tensor:
        """Return the window slots of full slots."""
        return self._allocator.translate_loc_from_full_to_swa(value)

    def available(self) -> int:
        return self._allocator.swa_available_size()

    def free(self, value: torch.Tensor) -> None:
        self._allocator.free_swa(value)

    def take_evicted(self, value: torch.Tensor) -> torch.Tensor:
        """Unmap the windows, so that full slots that stay on the device may get new windows at once."""
        return self._allocator.unmap(value)

    def free_evicted(self, ids: torch.Tensor) -> None:
        self._allocator.free_unmapped(ids)

    def adopt(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """Move the window slots of the full slots `from_slots` to the full slots `to_slots`."""
        self._allocator.move_window(from_slots, to_slots)

    def count_eviction(self, rows: Rows) -> None:
        self._evicted.value += len(rows) * self.page_size

    def refuse_impossible(self, request: CacheRequest) -> None:
        reserve = request.reserve_tokens
        reserved = len(request.tokens) if reserve is None else min(len(request.tokens), reserve)
        page = self._allocator.page_size
        if -(-reserved // page) * page > self.max_tokens:
            setting = "window_tokens (or acquire less with reserve_tokens)"
            raise PromptTooLong(len(request.tokens), self.max_tokens, setting)

    def needed(self, admission: Admission) -> int:
        """Return one window slot per token to compute, and one per token of the last window that the device lacks."""
        return admission.num_own + len(admission.to_load.get(SWA, ())) * self.page_size

    def take(self, slots: torch.Tensor) -> None:
        mapped = self._allocator.alloc_window(slots)
        assert mapped, "made available before"

    def size_of(self, num_slots: int) -> int:
        return num_slots

    def begin_load(self, load: Load, lease: Lease, slots: torch.Tensor) -> torch.Tensor:
        required = self.tree.required_rows(SWA, load.node)
        rows = required[~self.resident.has(required)]
        assert len(rows) == len(load.pages[SWA].rows), "the tree already had some of the pages to load"
        value = self.resident.value(rows)
        self.take(value)
        with ExitStack() as undo:
            undo.callback(self.free, value)
            self.resident.enter(rows)
            undo.pop_all()
        load.brings[SWA] = rows
        self.resident.load[rows] = load.number
        return value

    def fail_load(self, load: Load) -> None:
        """Remove the windows of pages whose full slots stay on the device. Other windows are removed with their full
        slots."""
        if SWA not in load.brings:
            return
        rows = self.resident.held(load.brings[SWA])
        rows = rows[~np.isin(rows, load.brings.get(FULL, NO_ROWS))]
        if len(rows):  # another load failed first; this one may still write to the window slots
            load.wait()
            self.free(self.tree.detach(rows, SWA).value)

    def device_violations(self, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
        """Check that each window slot is in a node, mapped to a full slot of a lease, or being evicted."""
        slots = self.tree.values(SWA)
        held = self.device_ids(slots) if len(slots) else slots  # without slots, the tensor has no device yet
        owned = [self.device_ids(slots) for slots in owned_slots(leases, loads)]
        owned = [slots[slots > 0] for slots in owned] + [*self.evicting.values()]
        sums = (self.available(), len(held), sum(map(len, owned)))
        return account_violations("window slots", sums, self.capacity, [held, *owned])
