"""Up, from the host: pages go back to device slots, layer by layer, while the forward pass that needs them runs.

A load is submitted before the forward is launched. Matches see its nodes on the device at once; whoever uses them waits
for its layers by the load id. Windows and states come with it: window pages to the window slots of their nodes, a state
to the request's own, for nobody else can use that one while it advances.
"""

from __future__ import annotations

from collections import deque

import torch

from hicache.flow.base import Load, LoadPlan, Parts
from hicache.transfer.base import TransferBackend, TransferOp
from hicache.transfer.counter import LayerTransferCounter
from hicache.tree.node import Component, Place, Tier, TreeNode, joined

_SMOOTHING = 0.2


class Restore:
    """Owned by the scheduler thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._under_way: deque[Load] = deque()
        self._bytes_per_s = 0.0
        self._estimates_s = (0.0, 0.0)
        count = parts.metrics.counter
        self._bytes = count("restore.bytes", "bytes copied from host to device")
        self._copy_ns = count("restore.copy_ns", "time those copies took")
        self._failures = count("restore.failures", "loads that failed; their nodes stayed on the host")
        self._declined = count("restore.declined", "loads not started because computing was estimated to be faster")
        parts.metrics.gauge("restore.last_load_s", "the gate's last estimate of a load", lambda: self._estimates_s[0])
        parts.metrics.gauge("restore.last_compute_s", "and of computing the same tokens", lambda: self._estimates_s[1])

    def worthwhile(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether loading `num_bytes` beats computing `num_tokens`. Yes, until both speeds are known."""
        rate = self._parts.config.prefill_tokens_per_s
        if not rate or not self._bytes_per_s:
            return True
        load_s, compute_s = num_bytes / self._bytes_per_s, num_tokens / rate
        self._estimates_s = (load_s, compute_s)
        self._declined.value += load_s > compute_s
        return load_s <= compute_s

    def can_start(self) -> bool:
        """Whether a load may start now, whatever it brings."""
        return all(counter.can_begin() for counter in (self._parts.counter, *(s.counter for s in self._parts.sides)))

    def start(self, plan: LoadPlan, slots: torch.Tensor, state: torch.Tensor | None) -> Load:
        """Bring what `plan` says; its full pages go to `slots`, the state to `state` `[1]`."""
        tree = self._parts.tree
        tree.lock(plan.node, Tier.HOST)
        load = Load(plan, self.loads_of(list(plan.node.path())))
        for below in load.stands_on:
            below.users += 1
        if plan.pages:
            self._submit(load, Component.FULL, [node.held(Place.FULL_HOST) for node in plan.pages], slots)
        start = 0
        for node in plan.pages:
            tree.begin_load(node, slots[start : start + node.num_tokens])
            node.from_disk = False
            start += node.num_tokens
        if plan.windows:
            for node in plan.windows:
                tree.attach(node, Place.SWA_DEVICE, node.held(Place.FULL_DEVICE))
            targets = joined([node.held(Place.SWA_DEVICE) for node in plan.windows])
            self._submit(load, Component.SWA, [node.held(Place.SWA_HOST) for node in plan.windows], targets)
        if state is not None:
            self._submit(load, Component.MAMBA, [plan.node.held(Place.MAMBA_HOST)], state)
        tree.lock(plan.node, Tier.DEVICE)
        self._under_way.append(load)
        return load

    def loads_of(self, nodes: list[TreeNode]) -> list[Load]:
        """The loads under way that bring anything of `nodes`, oldest first. One that was abandoned brings nothing."""
        live = [load for load in self._under_way if not load.abandoned]
        return [load for load in live if any(load.brings(node) for node in nodes)]

    def under_way(self) -> list[Load]:
        """The loads that have not landed, oldest first."""
        return list(self._under_way)

    def let_go(self, load: Load) -> None:
        """A lease, or a load that stands on it, stops reading what `load` brought."""
        load.users -= 1
        self._forget_unread(load)

    def ready(self) -> int:
        return next((i for i, load in enumerate(self._under_way) if not load.op.done()), len(self._under_way))

    def land(self, count: int) -> None:
        for _ in range(count):
            self._end(self._under_way.popleft())

    def wait(self) -> None:
        """Block until everything submitted has ended (it still has to land)."""
        for load in self._under_way:
            load.op.wait()

    def _submit(self, load: Load, component: Component, values: list[torch.Tensor], targets: torch.Tensor) -> None:
        parts, pages = self._parts, joined(values)
        side = next((side for side in parts.sides if side.component is component), None)
        transfer: TransferBackend | None = parts.transfer if side is None else side.transfer
        counter = self._counter_of(component)
        assert transfer is not None
        parts.host_of(component).begin_read(pages)
        load.load_ids[component] = load_id = counter.begin()
        slots = targets if side is None else side.device_ids(targets)
        op: TransferOp = transfer.load(pages, slots, load_id)
        load.reading[component] = pages
        load.ops.append(op)

    def _end(self, load: Load) -> None:
        tree = self._parts.tree
        load.op.wait()
        stood_on = load.stands_on
        load.land()
        for component, pages in load.reading.items():
            self._parts.host_of(component).end_read(pages)
        if load.error is None:
            self._count(load)
            for node in load.pages.nodes:
                tree.end_load(node, confirmed=True)
            load.leave()
        else:
            self._failures.value += 1
            # Deepest first: what stands on the load leaves the device before it does.
            for other in reversed(self._under_way):
                if other.error is not None:
                    self._abandon(other)
            self._abandon(load)
        tree.unlock(load.node, Tier.DEVICE)
        tree.unlock(load.node, Tier.HOST)
        if load.orphan_states:
            assert self._parts.states is not None
            self._parts.states.pool.free(torch.cat(load.orphan_states))
            load.orphan_states.clear()
        for below in stood_on:
            self.let_go(below)
        self._forget_unread(load)

    def _count(self, load: Load) -> None:
        seconds = load.op.seconds()
        self._bytes.value += load.op.num_bytes
        self._copy_ns.value += int(seconds * 1e9)
        speed = load.op.num_bytes / max(seconds, 1e-9)
        self._bytes_per_s += (_SMOOTHING if self._bytes_per_s else 1.0) * (speed - self._bytes_per_s)

    def _abandon(self, load: Load) -> None:
        """Take what a failed load was to bring off the device. Its slots stay out of use as long as they are read."""
        if load.abandoned:
            return
        load.abandoned, tree = True, self._parts.tree
        for node in reversed(load.pages.nodes):
            orphan = tree.end_load(node, confirmed=False)
            assert orphan is not None
            load.orphans.append(orphan)
        for node in load.windows.nodes:
            if node.holds(Place.SWA_DEVICE):  # on slots that stay: the window never came
                self._parts.give_back([tree.detach(node, Place.SWA_DEVICE)])
        load.leave()

    def _forget_unread(self, load: Load) -> None:
        """Once it has landed and nobody reads it any more: what failed can be used again, and its failure forgotten."""
        if load.users or not load.landed:
            return
        for slots in load.orphans:
            self._parts.allocator.free_run(slots)
        load.orphans.clear()
        for component, load_id in load.load_ids.items():
            self._counter_of(component).forget(load_id)

    def _counter_of(self, component: Component) -> LayerTransferCounter:
        side = next((side for side in self._parts.sides if side.component is component), None)
        return self._parts.counter if side is None else side.counter
