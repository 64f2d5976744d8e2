"""Up: host to device, layer by layer, hidden behind the forward pass.

A load is submitted whole before the forward that needs it; the layer counter tells that forward when each layer is
there. The tree shows the nodes on the device from submission on, so a second request can share a load under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from hicache.flow.base import Load, Parts
from hicache.tree.node import Tier, TreeNode

_SMOOTHING = 0.2  # weight of the newest measurement of the link's speed


class Restore:
    """Owned by the scheduler thread. `free_slots` takes back the slots of a failed load."""

    def __init__(self, parts: Parts, free_slots: Callable[[torch.Tensor], None]) -> None:
        self._parts, self._free_slots = parts, free_slots
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

    def worthwhile(self, num_tokens: int) -> bool:
        """Whether loading `num_tokens` beats computing them. Yes, until both speeds are known."""
        rate = self._parts.config.prefill_tokens_per_s
        if not rate or not self._bytes_per_s:
            return True
        load_s = num_tokens * self._parts.pool.layout.token_bytes / self._bytes_per_s
        compute_s = num_tokens / rate
        self._estimates_s = (load_s, compute_s)
        self._declined.value += load_s > compute_s
        return load_s <= compute_s

    def can_start(self) -> bool:
        return self._parts.counter.can_begin()

    def start(self, nodes: list[TreeNode], slots: torch.Tensor) -> None:
        """Load host-held `nodes`, a piece of one path, to `slots`."""
        tree, host, transfer = self._parts.tree, self._parts.host, self._parts.transfer
        assert host is not None and transfer is not None
        last = nodes[-1]
        pages = torch.cat([node.value(Tier.HOST) for node in nodes])
        tree.lock(last, Tier.HOST)
        host.begin_read(pages)
        load_id = self._parts.counter.begin()
        op = transfer.load(pages, slots, load_id)
        at = 0
        for node in nodes:
            tree.begin_load(node, slots[at : at + len(node.key)])
            node.from_disk = False
            at += len(node.key)
        tree.lock(last, Tier.DEVICE)
        self._under_way.append(Load(nodes, slots, pages, load_id, op))

    def loads_of(self, nodes: list[TreeNode]) -> list[Load]:
        """The loads under way that bring any of `nodes`, oldest first."""
        return [load for load in self._under_way if any(node in load.nodes for node in nodes)]

    def let_go(self, load: Load) -> None:
        """A lease stops reading what `load` brought."""
        load.users -= 1
        if not load.users:
            self._free_orphans(load)

    def ready(self) -> int:
        return next((i for i, load in enumerate(self._under_way) if not load.op.done()), len(self._under_way))

    def land(self, count: int) -> None:
        for _ in range(count):
            self._end(self._under_way.popleft())

    def wait(self) -> None:
        """Block until everything submitted has ended (it still has to land)."""
        for load in self._under_way:
            load.op.wait()

    def _end(self, load: Load) -> None:
        tree, host = self._parts.tree, self._parts.host
        assert host is not None
        load.op.wait()
        host.end_read(load.pages)
        if load.failed:
            self._failures.value += 1
        else:
            self._bytes.value += load.op.num_bytes
            self._copy_ns.value += int(load.op.seconds() * 1e9)
            speed = load.op.num_bytes / max(load.op.seconds(), 1e-9)
            self._bytes_per_s += (_SMOOTHING if self._bytes_per_s else 1.0) * (speed - self._bytes_per_s)
        for node in reversed(load.nodes):
            orphan = tree.end_load(node, confirmed=not load.failed)
            if orphan is not None:
                load.orphans.append(orphan)
        load.leave()
        tree.unlock(load.nodes[-1], Tier.DEVICE)
        tree.unlock(load.nodes[-1], Tier.HOST)
        if not load.users:
            self._free_orphans(load)

    def _free_orphans(self, load: Load) -> None:
        for slots in load.orphans:
            self._free_slots(slots)
        load.orphans.clear()
