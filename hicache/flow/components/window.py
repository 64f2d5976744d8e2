"""Sliding windows in the engine: window slots, mapped to full slots, for the last window of each prefix.

A prefix needs the window slots of its last `window` tokens only. What lies before them is evicted first, and nodes are
split where the last window begins, so that no more is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.config import EngineConfig
from hicache.device.base import KVCache
from hicache.errors import PromptTooLong
from hicache.flow.components.base import Admission, CacheComponent, EngineParts, HostLink, account_violations
from hicache.flow.components.full import owned_slots
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.movement import Load
from hicache.layout import ModelGeometry
from hicache.tiers import FULL, SWA, joined
from hicache.tree.components import SwaComponent, TreeComponent
from hicache.tree.node import NodeRun, TreeNode


class SlidingWindow(CacheComponent):
    """Of models with window layers."""

    tree_component: SwaComponent

    @classmethod
    def tree_component_for(cls, config: EngineConfig, model: ModelGeometry | KVCache) -> TreeComponent | None:
        if not isinstance(model, ModelGeometry) or not model.window_layers:
            return None
        return SwaComponent(model.window, config.cache_page_size)

    def __init__(self, engine: EngineParts, tree_component: TreeComponent, link: HostLink) -> None:
        super().__init__(engine, tree_component, link)
        assert isinstance(engine.allocator, SWATokenToKVPoolAllocator)
        self._allocator = engine.allocator
        self._evicted = engine.metrics.counter(
            "evict.window_tokens", "tokens whose window slots were evicted from the device before their full slots"
        )
        gauge, total = engine.metrics.gauge, self.capacity
        gauge("device.total_window_tokens", "window slots of the device tier", lambda: total)
        gauge("device.used_window_tokens", "window slots that the cache or a request holds", self._used)

    @property
    def max_tokens(self) -> int:
        """Tokens that one request may get slots for at a time, beside the window of its prefix."""
        return self.capacity - self.tree_component.window - self.page_size

    @property
    def capacity(self) -> int:
        page = self._allocator.page_size
        return self._allocator.size_swa // page * page

    def _used(self) -> int:
        return self.capacity - self.available()

    def device_ids(self, value: torch.Tensor) -> torch.Tensor:
        """The window slots of full slots."""
        return self._allocator.translate_loc_from_full_to_swa(value)

    def available(self) -> int:
        return self._allocator.swa_available_size()

    def free(self, value: torch.Tensor) -> None:
        self._allocator.free_swa(value)

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """Full slots that stay may get other windows at once."""
        return self._allocator.unmap(value)

    def free_left(self, ids: torch.Tensor) -> None:
        self._allocator.free_unmapped(ids)

    def adopt(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """Map the window slots of full slots `from_slots` to `to_slots` instead."""
        self._allocator.move_window(from_slots, to_slots)

    def device_victim(self, size: int) -> TreeNode | None:
        """Of a node longer than the window the front goes first: no match at its end needs it."""
        node = self.tree.victim(SWA)
        surplus = 0 if node is None else self.tree_component.surplus_tokens(node)
        return self.tree.split_prefix(node, surplus) if node is not None and surplus else node

    def count_eviction(self, node: TreeNode) -> None:
        self._evicted.value += node.num_tokens

    def trim(self, node: TreeNode, ahead: int = 0) -> None:
        required = self.tree_component.required_nodes(node, ahead)
        start = self.tree_component.first_required(node.depth_tokens + ahead) // self.page_size * self.page_size
        if required and (surplus := start - required[-1].depth_tokens + required[-1].num_tokens) > 0:
            self.tree.split_prefix(required[-1], surplus)

    def refuse_impossible(self, request: CacheRequest) -> None:
        reserve = request.reserve_tokens
        reserved = len(request.tokens) if reserve is None else min(len(request.tokens), reserve)
        page = self._allocator.page_size
        if -(-reserved // page) * page > self.max_tokens:
            setting = "window_tokens (or acquire less with reserve_tokens)"
            raise PromptTooLong(len(request.tokens), self.max_tokens, setting)

    def needed(self, admission: Admission) -> int:
        """A window slot for each token to be computed, and for each of the last window that the device lacks."""
        return admission.num_own + len(admission.to_load.get(SWA, ())) * self.page_size

    def take(self, slots: torch.Tensor) -> None:
        mapped = self._allocator.alloc_window(slots)
        assert mapped, "made available before"

    def size_of(self, num_slots: int) -> int:
        return num_slots

    def begin_load(self, load: Load, lease: Lease, slots: torch.Tensor) -> torch.Tensor:
        self.trim(load.node)
        nodes = [node for node in reversed(self.tree_component.required_nodes(load.node)) if not node.has(SWA)]
        num_pages = len(load.pages[SWA].rows)
        assert sum(node.num_tokens for node in nodes) == num_pages * self.page_size, "nodes end where windows begin"
        load.runs[SWA] = NodeRun(nodes, SWA)
        joint = joined([node.value_of(FULL) for node in nodes])
        self.take(joint)
        with ExitStack() as undo:
            undo.callback(self.free, joint)
            for node in nodes:
                self.tree.attach(node, SWA, node.value_of(FULL))
                undo.callback(self.tree.detach, node, SWA)
            undo.pop_all()
        return joint

    def fail_load(self, load: Load) -> None:
        """Windows of nodes whose full slots stay; the others leave with those."""
        leaving = {*load.runs[FULL].nodes} if FULL in load.runs else set()
        nodes = (
            [node for node in load.runs[SWA].nodes if node not in leaving and node.has(SWA)] if SWA in load.runs else []
        )
        if nodes:  # a load that fails with another may still write to the window slots: only its end makes them free
            load.wait()
        for node in nodes:
            self.free(self.tree.detach(node, SWA).value)

    def device_violations(self, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
        """Window slots of the nodes that hold them, those of full slots that leases have, and those that leave."""
        held = [self.device_ids(value) for value in self.tree.values(SWA)]
        owned = [self.device_ids(slots) for slots in owned_slots(leases, loads)]
        owned = [slots[slots > 0] for slots in owned] + [*self.leaving.values()]
        sums = (self.available(), sum(map(len, held)), sum(map(len, owned)))
        return account_violations("window slots", sums, self.capacity, [*held, *owned])
