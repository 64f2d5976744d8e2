"""A custom component of the engine: it caches the hidden state of the last token of a cached prefix.

A speculative decoder starts from the hidden state of the last token. If a prompt continues a cached prefix, the model
does not compute that token again, and reads its hidden state from the cache. Hidden states are optional: the engine
neither delays nor refuses a request that lacks one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.config import EngineConfig
from hicache.device.base import KVCache, SlotSpace
from hicache.flow.components.base import Admission, CacheComponent, EngineParts, HostLink, InMemory, account_violations
from hicache.flow.lease import Lease
from hicache.flow.page_transfer import Load
from hicache.layout import BufferSpec, ModelGeometry, PoolLayout
from hicache.pages.components import TreeComponent
from hicache.pages.table import Rows
from own_component.tree import LastHiddenComponent


class LastHidden(CacheComponent):
    """float32 rows `[NUM_ROWS + 1, HIDDEN]` on the device; row 0 is the sink. Subclass it for other sizes.

    Each row except the sink is free, held by a page of the tree, or kept for a failed load whose copy may still run.
    Leases own no rows.
    """

    HIDDEN, NUM_ROWS = 16, 8

    @classmethod
    def tree_component_for(cls, config: EngineConfig, model: ModelGeometry | KVCache) -> TreeComponent:
        return LastHiddenComponent()

    @classmethod
    def slot_space(cls, config: EngineConfig, tree_component: TreeComponent, pool: KVCache) -> SlotSpace:
        rows = torch.zeros(cls.NUM_ROWS + 1, cls.HIDDEN, device=pool.device)
        layout = PoolLayout((BufferSpec("last_hidden", rows.dtype, (cls.HIDDEN,), "request", (0,)),), 1)
        return SlotSpace(tree_component.name, layout, len(rows), rows.device, lambda layer: (rows,))

    def __init__(self, engine: EngineParts, tree_component: TreeComponent, link: HostLink) -> None:
        super().__init__(engine, tree_component, link)
        (self._rows,) = link.space.layer_buffers(0)
        self._free = list(range(1, len(self._rows)))
        self._offered: dict[str, tuple[int, torch.Tensor]] = {}
        self._evicted = engine.metrics.counter("evict.hidden_states", "hidden states evicted from the device")

    # Methods that a model runner calls

    def offer(self, lease: Lease, length: int, hidden: torch.Tensor) -> None:
        """Offer the hidden state `hidden`, `[HIDDEN]`, of token `length - 1`. The commit of the first `length` tokens
        keeps it."""
        self._offered[lease.request_id] = (length, hidden)

    def read(self, lease: Lease) -> torch.Tensor | None:
        """The hidden state `[HIDDEN]` of the last cached token, or None if the cache has no hidden state for it.

        Call it after `begin_forward`, before the lease's first commit. Raises `TransferError` if the load of the hidden
        state failed.
        """
        self.counter.wait_all()
        end = self.resident.held(lease.node.rows[-1:])
        return self._rows[int(self.resident.value(end))].clone() if len(end) else None

    # Evict

    @property
    def capacity(self) -> int:
        return self.NUM_ROWS

    def available(self) -> int:
        return len(self._free)

    def free(self, value: torch.Tensor) -> None:
        self._free += value.tolist()

    def count_eviction(self, rows: Rows) -> None:
        self._evicted.value += len(rows)

    # Admit

    def needed(self, admission: Admission) -> int:
        return len(admission.to_load.get(self.name, ()))

    # Restore

    def pages_to_load(self, end: int, pages: InMemory) -> list[int]:
        """The last page, if the host has it, the device lacks it, and a row is free or can be evicted."""
        wanted = bool(end) and pages.on_host(self, end - 1) and not pages.on_device(self, end - 1)
        has_row = bool(self._free) or self.resident.evictable > 0
        return [end - 1] if wanted and has_row and self.counter.can_begin() else []

    def begin_load(self, load: Load, lease: Lease, slots: torch.Tensor) -> torch.Tensor:
        """Give the row to the tree, where the lease and later requests read it."""
        row = self._take()
        self.tree.attach(load.node, self.name, row)
        load.brings[self.name] = load.node.rows[-1:]
        self.resident.load[load.brings[self.name]] = load.number
        return row

    def fail_load(self, load: Load) -> None:
        """Free the row when the copy has ended, because the copy may still write to it."""
        rows = self.resident.held(load.brings[self.name]) if self.name in load.brings else ()
        if len(rows):
            load.orphan_states.setdefault(self.name, []).append(self.tree.detach(rows, self.name).value)

    # Commit

    def needed_to_hand_over(self, lease: Lease, length: int) -> int:
        return int(lease.request_id in self._offered and self._offered[lease.request_id][0] == length)

    def hand_over(self, lease: Lease, length: int) -> torch.Tensor | None:
        if not self.needed_to_hand_over(lease, length):
            return None
        row = self._take()
        self._rows[int(row)] = self._offered.pop(lease.request_id)[1]
        return row

    def release(self, lease: Lease) -> None:
        self._offered.pop(lease.request_id, None)

    # Check

    def device_violations(self, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
        held = self.tree.values(self.name)
        orphans = [row for load in loads for row in load.orphan_states.get(self.name, ())]
        sums = (self.available(), len(held), len(orphans))
        free = torch.tensor(self._free, dtype=torch.int64)
        return account_violations("hidden states", sums, self.capacity, [held, *orphans, free])

    def _take(self) -> torch.Tensor:
        """Take a free row, `[1]`."""
        return torch.tensor([self._free.pop()])
