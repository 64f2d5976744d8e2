"""Full attention in the engine: one slot per token, allocated in device pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.config import EngineConfig
from hicache.device.base import KVCache
from hicache.errors import PromptTooLong
from hicache.flow.components.base import Admission, CacheComponent, EngineParts, HostLink, InMemory, account_violations
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.page_transfer import Load
from hicache.layout import ModelGeometry
from hicache.pages.components import FullComponent, TreeComponent
from hicache.pages.states import COPY, HELD
from hicache.pages.table import Rows
from hicache.tiers import FULL


class FullAttention(CacheComponent):
    """The component of full attention, which every model has."""

    @classmethod
    def tree_component_for(cls, config: EngineConfig, model: ModelGeometry | KVCache) -> TreeComponent:
        return FullComponent()

    def __init__(self, engine: EngineParts, tree_component: TreeComponent, link: HostLink) -> None:
        super().__init__(engine, tree_component, link)
        self.allocator = allocator = engine.allocator
        # In a model with windows, the part of the allocator that allocates full slots without window slots.
        self._slots: BaseTokenToKVPoolAllocator = (
            allocator.full_attn_allocator if isinstance(allocator, SWATokenToKVPoolAllocator) else allocator
        )
        count, family = engine.metrics.counter, "evict_tokens"
        demoted, lost = "that the host has", "that the host does not have"
        of = "tokens that the device evicted and"
        self._demoted = count(
            "evict.device_demoted_tokens", f"{of} {demoted}", family, tier="device", outcome="demoted"
        )
        self._lost = count("evict.device_lost_tokens", f"{of} {lost}", family, tier="device", outcome="lost")

    def host_rows(self, rows: Rows) -> Rows:
        return rows  # device and host share rows

    def alloc(self, num_slots: int) -> torch.Tensor:
        """Allocate `num_slots` slots, in complete device pages, without window slots."""
        slots = self._slots.alloc(num_slots)
        assert slots is not None, "made available before"
        return slots

    def in_pages(self, num_tokens: int) -> int:
        """Round `num_tokens` up to complete device pages."""
        page = self._slots.page_size
        return -(-num_tokens // page) * page

    @cached_property
    def capacity(self) -> int:
        page = self._slots.page_size
        return self._slots.size // page * page

    def available(self) -> int:
        return self._slots.available_size()

    def free(self, value: torch.Tensor) -> None:
        self.allocator.free_run(value)

    def count_eviction(self, rows: Rows) -> None:
        num_on_host = int(np.count_nonzero(self.pages.has(rows, HELD | COPY))) if self.has_host else 0
        self._demoted.value += num_on_host * self.page_size
        self._lost.value += (len(rows) - num_on_host) * self.page_size

    def refuse_impossible(self, request: CacheRequest) -> None:
        num_tokens = len(request.tokens)
        for limit, setting in ((self.config.max_context_len, "max_context_len"), (self.capacity, "device_tokens")):
            if num_tokens > limit:
                raise PromptTooLong(num_tokens, limit, setting)

    def needed(self, admission: Admission) -> int:
        return admission.num_slots

    def size_of(self, num_slots: int) -> int:
        return num_slots

    def pages_to_load(self, end: int, pages: InMemory) -> Sequence[int]:
        return range(min(pages.device_end, end), end)

    def begin_load(self, load: Load, lease: Lease, slots: torch.Tensor) -> torch.Tensor:
        """Insert the loaded pages after `load.node`. Later matches find these pages."""
        page, prompt, (rows, pages) = self.page_size, load.prompt, load.pages[FULL]
        first, last = int(pages[0]), int(pages[-1]) + 1
        tokens, value = prompt.tokens[first * page : last * page], slots[: len(rows) * page]
        inserted = self.tree.insert(load.node, tokens, value, prompt.namespace, rows=rows)
        assert np.array_equal(inserted.gained, rows), "the tree already had some of the pages to load"
        load.brings[FULL], load.node = rows, inserted.node
        self.resident.load[rows] = load.number
        return value

    def fail_load(self, load: Load) -> None:
        """Remove the loaded pages from the tree. The slots of these pages are freed when no lease or load reads the
        pages any more."""
        if FULL in load.brings:
            released = self.tree.remove(load.brings[FULL])
            load.orphans += [gone.value for gone in released if gone.component == FULL]

    def release(self, lease: Lease) -> None:
        if lease.held_len > lease.tree_len:
            self.free(lease.held_slots(lease.tree_len, lease.held_len))

    def device_violations(self, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
        held, owned = self.tree.values(FULL), [*owned_slots(leases, loads), *self.evicting.values()]
        sums = (self.available(), len(held), sum(map(len, owned)))
        return account_violations("slots", sums, self.capacity, [held, *owned])


def owned_slots(leases: Sequence[Lease], loads: Sequence[Load]) -> list[torch.Tensor]:
    """Return the slots that leases own, and the slots of failed loads that leases or other loads still read."""
    owned = [lease.held_slots(lease.tree_len, lease.held_len) for lease in leases]
    known = {*loads, *(load for lease in leases for load in lease.loads)}
    known |= {below for load in known for below in load.depends_on}
    return owned + [slots for load in known for slots in load.orphans]
