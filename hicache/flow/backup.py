"""Down, first half: device to host.

A backup locks its nodes on both tiers, takes host pages and submits one copy for each component. Only when the copy is
confirmed do the nodes count as held by the host; a failed copy leaves them where they were and frees the pages. Window
slots and states travel with the pages of their nodes; those that came later follow on their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property

import torch

from hicache.flow.base import JointOp, Parts, States, Windows
from hicache.transfer.base import TransferOp
from hicache.tree.node import Component, PageState, Place, Span, Tier, TreeNode, joined


class _Copy:
    """Copies that were submitted together. A node may split on the way; its parts keep what is pending for them.

    `spans[component]` follows the nodes that are copied, `pages[component]` is written to, `locked` are to unlock.
    """

    def __init__(self, locked: list[TreeNode]) -> None:
        self.locked = tuple(locked)
        self.spans: dict[Component, Span] = {}
        self.pages: dict[Component, torch.Tensor] = {}
        self.ops: list[TransferOp] = []

    @cached_property
    def op(self) -> JointOp:
        return JointOp(self.ops)


class Backup:
    """`host_pages(n, component)` makes room on the host; `on_host(nodes)` is told what arrived there."""

    def __init__(
        self,
        parts: Parts,
        host_pages: Callable[[int, Component], torch.Tensor | None],
        on_host: Callable[[list[TreeNode]], None],
    ) -> None:
        self._parts, self._host_pages, self._on_host = parts, host_pages, on_host
        self._under_way: deque[_Copy] = deque()
        count = parts.metrics.counter
        self._bytes = count("backup.bytes", "bytes copied from device to host")
        self._copy_ns = count("backup.copy_ns", "time those copies took")
        self._failures = count("backup.failures", "copies to the host that failed; their nodes stayed on the device")
        self._skipped = count("backup.skipped_tokens", "tokens not backed up because the host had no room")
        self._skipped_sides = count(
            "backup.skipped_sides", "windows and states left behind because the host had no room"
        )
        self._waits = count("backup.waits", "evictions that had to wait for a backup")

    def consider(self, node: TreeNode) -> None:
        """Back up what the write policy wants of the path to `node`, in one copy, as far as the host has room."""
        policy, hits = self._parts.config.write_policy, self._parts.config.selective_hits
        if policy == "write_back" or node.is_root:
            return
        wanted = self._only_on_device(node)
        if policy == "write_through_selective":
            wanted = wanted[: next((i for i, at in enumerate(wanted) if at.hit_count < hits), len(wanted))]
        if not wanted and node.state is not PageState.DEVICE and self._lacks_side(node):
            wanted = [node]  # its pages went before
        if wanted:
            self._submit(wanted)

    def save(self, node: TreeNode) -> None:
        """Copy a node now, with what it stands on, and wait: write_back's last moment before an eviction."""
        self._waits.value += 1
        if self._submit(self._only_on_device(node) or [node]):
            self._under_way[-1].op.wait()
            self.land(len(self._under_way))

    def ready(self) -> int:
        return next((i for i, copy in enumerate(self._under_way) if not copy.op.done()), len(self._under_way))

    def land(self, count: int) -> None:
        for _ in range(count):
            self._end(self._under_way.popleft())

    def wait(self) -> None:
        """Block until everything submitted has ended (it still has to land)."""
        for copy in self._under_way:
            copy.op.wait()

    def pages_under_way(self, component: Component) -> int:
        """Host pages of a component that wait for their bytes."""
        return sum(len(copy.pages[component]) for copy in self._under_way if component in copy.pages)

    @staticmethod
    def _only_on_device(node: TreeNode) -> list[TreeNode]:
        """The end of the path to `node` that has no copy on the host and none under way, root side first."""
        wanted: list[TreeNode] = []
        for at in node.path():
            if at.state is not PageState.DEVICE:
                break
            wanted.append(at)
        return wanted[::-1]

    def _lacks_side(self, node: TreeNode) -> bool:
        return any(self._to_copy(side, [node]) for side in self._parts.sides)

    def _to_copy(self, side: Windows | States, nodes: list[TreeNode]) -> list[TreeNode]:
        """Those of `nodes` whose component is on the device alone, with no copy under way."""
        device, host = Place.of(side.component, Tier.DEVICE), Place.of(side.component, Tier.HOST)
        return [
            node
            for node in nodes
            if node.holds(device) and not node.holds(host) and node.pending[side.component] is None
        ]

    def _submit(self, nodes: list[TreeNode]) -> bool:
        """Start the copies of `nodes`, a piece of one path; False where there is no room or nothing to copy."""
        tree = self._parts.tree
        # Locked before room is made: a copy needs its parents to stay on the host, and itself on the device. The lock
        # of the last covers the full pages of all; states and windows of the others need locks of their own.
        copy = _Copy(nodes if self._parts.sides else nodes[-1:])
        for node in copy.locked:
            tree.lock(node, Tier.DEVICE)
            tree.lock(node, Tier.HOST)
        try:
            self._start_all(copy, nodes)
        finally:
            if copy.ops:
                self._under_way.append(copy)
            else:
                self._unlock(copy)
        return bool(copy.ops)

    def _start_all(self, copy: _Copy, nodes: list[TreeNode]) -> None:
        """Submit what each component holds of `nodes` on the device alone, FULL first: the others stand on it."""
        full = [node for node in nodes if node.state is PageState.DEVICE]
        if full and not self._start(copy, Component.FULL, full):
            self._skipped.value += sum(node.num_tokens for node in full)
            return
        for side in self._parts.sides:
            to_copy = self._to_copy(side, nodes)
            if to_copy and not self._start(copy, side.component, to_copy):
                self._skipped_sides.value += len(to_copy)

    def _start(self, copy: _Copy, component: Component, nodes: list[TreeNode]) -> bool:
        """Submit what `component` holds of `nodes` on the device, where the host has room."""
        parts = self._parts
        side = next((side for side in parts.sides if side.component is component), None)
        transfer = parts.transfer if side is None else side.transfer
        values = [node.held(Place.of(component, Tier.DEVICE)) for node in nodes]
        per_page = 1 if component is Component.MAMBA else parts.tree.page_size
        pages = self._host_pages(sum(map(len, values)) // per_page, component)
        if pages is None:
            return False
        assert transfer is not None
        slots = joined(values)
        parts.host_of(component).begin_read(pages)
        copy.ops.append(transfer.store(slots if side is None else side.device_ids(slots), pages))
        copy.pages[component] = pages
        start = 0
        for node, value in zip(nodes, values, strict=True):
            end = start + len(value) // per_page
            parts.tree.begin_backup(node, pages[start:end], component)
            start = end
        copy.spans[component] = Span(nodes, component, Tier.HOST)
        return True

    def _end(self, copy: _Copy) -> None:
        copy.op.wait()  # before its end nothing is known of its error
        tree, confirmed = self._parts.tree, copy.op.error is None
        arrived: list[TreeNode] = []
        for component, span in copy.spans.items():  # FULL first: the others stand on it
            host = self._parts.host_of(component)
            host.end_read(copy.pages[component])
            for node in span.nodes:
                unused = tree.end_backup(node, confirmed, component)
                if unused is not None:
                    host.free(unused)
                elif component is Component.FULL:
                    arrived.append(node)
            span.leave()
        if confirmed:
            self._bytes.value += copy.op.num_bytes
            self._copy_ns.value += int(copy.op.seconds() * 1e9)
        else:
            self._failures.value += 1
        self._unlock(copy)
        if arrived:
            self._on_host(arrived)

    def _unlock(self, copy: _Copy) -> None:
        for node in copy.locked:
            self._parts.tree.unlock(node, Tier.HOST)
            self._parts.tree.unlock(node, Tier.DEVICE)
