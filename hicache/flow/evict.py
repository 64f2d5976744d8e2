"""Making room: what leaves a tier so that other things can enter.

A victim gives up only as many pages as are asked for, tail first: the front of a long prefix outlives its end. On the
device a victim that the host holds too is demoted; one that it does not is saved first where the write policy says so,
else it is gone from memory. Windows leave front first, for what lies before the last window is needed by nobody who
ends there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hicache.flow.base import Parts
from hicache.tree.base import Released
from hicache.tree.node import Component, PageState, Place, Tier, TreeNode


class Evictor:
    """Called by the other flows, on the scheduler thread. `save`: copies a node to the host and returns when it is
    there."""

    def __init__(self, parts: Parts, save: Callable[[TreeNode], None] | None) -> None:
        self._parts, self._save = parts, save
        count = parts.metrics.counter
        self._demoted = count("evict.device_demoted_tokens", "tokens that left the device and stayed on the host")
        self._evicted = count("evict.device_lost_tokens", "tokens that left the device without a copy on the host")
        self._host_evicted = count("evict.host_tokens", "tokens that left the host")
        self._never_stored = count("evict.unstored_tokens", "tokens that left the host before the disk had them")
        self._windows = count("evict.window_tokens", "tokens whose window slots left the device before their others")
        self._states = count("evict.states", "recurrent states that left the device before their pages")

    def device_slots(self, num_tokens: int, num_bare: int = 0) -> torch.Tensor | None:
        """`num_tokens` slots in whole device pages, after evicting what it takes; `None` when that is not enough.

        In a model with windows the first `num_bare` of them come without window slots.
        """
        allocator, windows = self._parts.allocator, self._parts.windows
        if windows is None:
            self._free_device(num_tokens - allocator.available_size())
            return allocator.alloc(num_tokens)
        self._free_device(num_tokens - windows.allocator.full_available_size())
        fits = self.free_windows(num_tokens - num_bare)
        if not fits or num_tokens > windows.allocator.full_available_size():
            return None
        bare, paired = windows.allocator.alloc_full(num_bare), allocator.alloc(num_tokens - num_bare)
        assert bare is not None and paired is not None, "counted above"
        return torch.cat([bare, paired])

    def free_windows(self, num_tokens: int) -> bool:
        """Make `num_tokens` window slots free; False when that cannot be."""
        windows, tree = self._parts.windows, self._parts.tree
        assert windows is not None
        short = num_tokens - windows.allocator.swa_available_size()
        while short > 0 and (node := tree.victim(Place.SWA_DEVICE)) is not None:
            spare = windows.rules.spare_tokens(node)
            if spare:
                node = tree.cut_head(node, spare)
            self._save_copy(node, Place.SWA_HOST)
            self._windows.value += node.num_tokens
            self._parts.give_back(tree.drop(node, Place.SWA_DEVICE))
            short = num_tokens - windows.allocator.swa_available_size()
        return short <= 0

    def free_states(self, num_states: int) -> bool:
        """Make `num_states` states free; False when that cannot be."""
        states, tree = self._parts.states, self._parts.tree
        assert states is not None
        while (short := num_states - states.pool.available_size()) > 0:
            node = tree.victim(Place.MAMBA_DEVICE)
            if node is None:
                break
            self._save_copy(node, Place.MAMBA_HOST)
            self._states.value += 1
            self._parts.give_back(tree.drop(node, Place.MAMBA_DEVICE))
        return short <= 0

    def host_pages(self, num_pages: int, component: Component = Component.FULL) -> torch.Tensor | None:
        """`num_pages` of a component's host pool, after evicting what it takes; `None` when that is not enough."""
        host, tree = self._parts.host_of(component), self._parts.tree
        place = Place.of(component, Tier.HOST)
        per_page = 1 if component is Component.MAMBA else tree.page_size
        if num_pages > host.available() + tree.evictable(place) // per_page:
            return None
        while (short := num_pages - host.available()) > 0:
            node = tree.victim(place) if component is Component.MAMBA else self._tail(place, short * per_page)
            if node is None:
                return None
            stored = node.stored
            released = tree.drop(node, place)
            self._parts.give_back(released)
            self._count_host(released, stored)
        return host.alloc(num_pages)

    def _free_device(self, short: int) -> None:
        """Evict until `short` full slots more are free, or nothing is left to evict."""
        tree = self._parts.tree
        released: list[Released] = []
        while short > 0 and (node := self._tail(Place.FULL_DEVICE, short)) is not None:
            if node.state is PageState.DEVICE and self._save is not None:
                self._save(node)
            counter = self._demoted if node.state is PageState.BOTH else self._evicted
            counter.value += node.num_tokens
            left = tree.drop(node, Place.FULL_DEVICE)
            short -= sum(item.num_tokens for item in left if item.place is Place.FULL_DEVICE)
            released += left
        self._parts.give_back(released)

    def _save_copy(self, node: TreeNode, place: Place) -> None:
        """Where the write policy saves at eviction: see that the host has what `place` names."""
        if self._save is not None and not node.holds(place):
            self._save(node)

    def _tail(self, place: Place, num_tokens: int) -> TreeNode | None:
        """The next victim, cut down to its last pages when fewer than all of them are needed."""
        tree = self._parts.tree
        node = tree.victim(place)
        if node is None:
            return None
        whole = -(-num_tokens // tree.page_size) * tree.page_size
        # A node that ends in a state gives it up with its last page: cut, the rest could end no match.
        if node.num_tokens <= whole or self._parts.states is not None:
            return node
        return tree.cut_tail(node, node.num_tokens - whole)

    def _count_host(self, released: list[Released], stored: bool) -> None:
        tokens = sum(item.num_tokens for item in released if item.place is Place.FULL_HOST)
        self._host_evicted.value += tokens
        if self._parts.disk is not None and not stored:
            self._never_stored.value += tokens
