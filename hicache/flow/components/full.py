"""Full attention in the engine: a slot a token, allocated in device pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.config import EngineConfig
from hicache.device.base import KVCache
from hicache.errors import PromptTooLong
from hicache.flow.components.base import Admission, Base, CacheComponent, HostLink, account_violations
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.load import Load
from hicache.layout import ModelGeometry
from hicache.tiers import DEVICE, FULL, HOST
from hicache.tree.base import Match
from hicache.tree.components import FullComponent, TreeComponent
from hicache.tree.node import NodeRun, TreeNode


class FullAttention(CacheComponent):
    """The component that every model has."""

    @classmethod
    def rules_for(cls, config: EngineConfig, model: ModelGeometry | KVCache) -> TreeComponent:
        return FullComponent()

    def __init__(self, base: Base, rules: TreeComponent, link: HostLink) -> None:
        super().__init__(base, rules, link)
        self.allocator = allocator = base.allocator
        # The full slots alone, where window slots are mapped to them.
        self._slots: BaseTokenToKVPoolAllocator = (
            allocator.full_attn_allocator if isinstance(allocator, SWATokenToKVPoolAllocator) else allocator
        )
        self._demoted, self._lost = (
            base.metrics.counter(f"evict.device_{outcome}_tokens", help, "evict_tokens", tier="device", outcome=outcome)
            for outcome, help in (
                ("demoted", "tokens evicted from the device that the host holds"),
                ("lost", "tokens evicted from the device that the host does not hold"),
            )
        )

    def alloc(self, num_slots: int) -> torch.Tensor:
        """`num_slots` free slots, in whole device pages, without window slots."""
        slots = self._slots.alloc(num_slots)
        assert slots is not None, "made available before"
        return slots

    def in_pages(self, num_tokens: int) -> int:
        """Slots of that many tokens in whole device pages."""
        page = self._slots.page_size
        return -(-num_tokens // page) * page

    @property
    def capacity(self) -> int:
        page = self._slots.page_size
        return self._slots.size // page * page

    def available(self) -> int:
        return self._slots.available_size()

    def free(self, value: torch.Tensor) -> None:
        self.allocator.free_run(value)

    def count_eviction(self, node: TreeNode) -> None:
        (self._demoted if node.holds(FULL, HOST) else self._lost).value += node.num_tokens

    def refuse_impossible(self, request: CacheRequest) -> None:
        num_tokens = len(request.tokens)
        for limit, setting in ((self.config.max_context_len, "max_context_len"), (self.capacity, "device_tokens")):
            if num_tokens > limit:
                raise PromptTooLong(num_tokens, limit, setting)

    def load_bytes(self, length: int, match: Match) -> int:
        if not self.has_host:
            return 0
        return max(0, length - match.device_len) // self.page_size * self.host.page_bytes

    def needed(self, admission: Admission) -> int:
        return admission.num_slots

    def kept(self, admission: Admission) -> int:
        return self.tree.unlocked_len(admission.match, admission.device_len)

    def size_of(self, num_slots: int) -> int:
        return num_slots

    def begin_load(self, load: Load, nodes: Sequence[TreeNode], lease: Lease, slots: torch.Tensor) -> torch.Tensor:
        load.runs[FULL] = NodeRun(list(nodes), FULL, DEVICE)
        start = 0
        for node in nodes:
            self.tree.begin_load(node, slots[start : start + node.num_tokens])
            node.source = None
            start += node.num_tokens
        return slots[:start]

    def fail_load(self, load: Load) -> None:
        """Its slots stay out of use as long as anyone reads them."""
        if FULL in load.runs:
            begun = [node for node in reversed(load.runs[FULL].nodes) if node.holds(FULL, DEVICE)]
            load.orphans += [self.tree.fail_load(node) for node in begun]

    def release(self, lease: Lease) -> None:
        if lease.held_len > lease.tree_len:
            self.free(lease.held_slots(lease.tree_len, lease.held_len))

    def pages_to_prefetch(self, end: int, in_memory: Sequence[bool], on_disk: Sequence[bool]) -> list[int] | None:
        missing = [page for page in range(end) if not in_memory[page]]
        return missing if all(on_disk[page] for page in missing) else None

    def device_violations(self, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
        held, owned = self.tree.values(FULL, DEVICE), owned_slots(leases, loads)
        sums = (self.available(), sum(map(len, held)), sum(map(len, owned)))
        return account_violations("slots", sums, self.capacity, [*held, *owned])


def owned_slots(leases: Sequence[Lease], loads: Sequence[Load]) -> list[torch.Tensor]:
    """Slots of leases, and of failed loads that leases or other loads still read."""
    owned = [lease.held_slots(lease.tree_len, lease.held_len) for lease in leases]
    known = {*loads, *(load for lease in leases for load in lease.loads)}
    known |= {below for load in known for below in load.depends_on}
    return owned + [slots for load in known for slots in load.orphans]
