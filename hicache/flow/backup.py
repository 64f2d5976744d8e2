"""Device to host.

A backup locks its nodes on both tiers, takes host pages and submits one copy for each component. Only when the copy is
confirmed do the nodes count as held by the host; a failed copy leaves them where they were and frees the pages. Window
slots and states are copied with the pages of their nodes; those that were added later are copied on their own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

import torch

from hicache.flow.completion import CopyMovement
from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.host_eviction import HostEviction
from hicache.flow.load import JointOp
from hicache.flow.persist import Persist
from hicache.tiers import DEVICE, FULL, HOST, Component, Tier, joined
from hicache.transfer.base import TransferOp
from hicache.tree.node import NodeRun, PageState, TreeNode

log = logging.getLogger(__name__)


class _Copy:
    """Copies that were submitted together. A node may split meanwhile; its parts keep what is pending for them.

    `runs[component]` follows the nodes that are copied, `pages[component]` is written to, `locked` are to unlock.
    """

    def __init__(self, locked: list[TreeNode]) -> None:
        self.locked = tuple(locked)
        self.runs: dict[Component, NodeRun] = {}
        self.pages: dict[Component, torch.Tensor] = {}
        self.ops: list[TransferOp] = []

    @cached_property
    def op(self) -> JointOp:
        return JointOp(self.ops)


class Backup(CopyMovement[_Copy]):
    """What arrives on the host is handed to each of `persists`."""

    def __init__(self, context: EngineContext, host_eviction: HostEviction, persists: Sequence[Persist]) -> None:
        super().__init__()
        self._context, self._host_eviction, self._persists = context, host_eviction, tuple(persists)
        count = context.metrics.counter
        help, labels = "bytes of a copy from device to host", {"movement": "backup", "direction": "device_to_host"}
        self._bytes, self._seconds = context.metrics.movement("backup", help, "time that copy took", **labels)
        context.metrics.gauge("backup.queued_copies", "copies to the host in flight", self.num_in_flight)
        self._failures = count("backup.failures", "copies to the host that failed; their nodes stayed on the device")
        self._skipped = count("backup.skipped_tokens", "tokens not backed up because the host had no page to give")
        self._skipped_components = count(
            "backup.skipped_nodes", "nodes whose window or state was not backed up for that reason"
        )
        self._waits = count("backup.awaited_evictions", "evictions that had to wait for a backup")

    def maybe_backup(self, node: TreeNode) -> None:
        """Copy what the write policy wants of the path to `node`, together, as far as the host has capacity."""
        if node.parent is None:
            return
        wanted, policy = self._only_on_device(node), self._context.write_policy
        wanted = wanted[: next((i for i, at in enumerate(wanted) if not policy.wants(at)), len(wanted))]
        if not wanted and node.holds(FULL, HOST) and policy.wants(node) and self._lacks_component(node):
            wanted = [node]  # its pages were copied before
        if wanted:
            self._submit(wanted)

    def backup_now(self, node: TreeNode) -> None:
        """Copy a node with what it continues, and wait: the last moment before an eviction."""
        self._waits.value += 1
        if self._submit(self._only_on_device(node) or [node]):
            self.wait_and_complete()

    def backup_path(self, node: TreeNode) -> None:
        """Copy the path to `node` now, whatever the policy wants of it, and wait, so that its slots may be taken.

        A policy that copies at eviction does so then."""
        if node.parent is not None and not self._context.write_policy.at_eviction:
            self._submit(self._only_on_device(node) or [node])
            self.wait_and_complete()

    def pages_in_flight(self, component: Component) -> int:
        return sum(len(copy.pages[component]) for copy in self._in_flight if component in copy.pages)

    def locks(self) -> list[tuple[TreeNode, Tier]]:
        return [(node, tier) for copy in self._in_flight for node in copy.locked for tier in Tier]

    @staticmethod
    def _only_on_device(node: TreeNode) -> list[TreeNode]:
        """The end of the path to `node` that has no copy on the host and none in flight, root side first."""
        wanted: list[TreeNode] = []
        for at in node.climb():
            if at.state is not PageState.DEVICE:
                break
            wanted.append(at)
        return wanted[::-1]

    def _lacks_component(self, node: TreeNode) -> bool:
        return any(_to_copy(component, [node]) for component in self._context.components)

    def _submit(self, nodes: list[TreeNode]) -> bool:
        """Start the copies of `nodes`, a piece of one path; False where the host is full or nothing is to be copied."""
        tree = self._context.tree
        # Locked before host pages are evicted: a copy needs its parents to stay on the host, and itself on the device.
        # The lock of the last covers the full pages of all; other components of the others need locks of their own.
        copy = _Copy(nodes if len(self._context.components) > 1 else nodes[-1:])
        with ExitStack() as undo:
            for node in copy.locked:
                for tier in Tier:
                    tree.lock(node, tier)
                    undo.callback(tree.unlock, node, tier)
            try:
                self._start_all(copy, nodes)
            finally:
                if copy.ops:
                    undo.pop_all()
                    self._in_flight.append(copy)
        return bool(copy.ops)

    def _start_all(self, copy: _Copy, nodes: list[TreeNode]) -> None:
        """Submit what each component holds of `nodes` on the device alone, FULL first: the others need it there."""
        for component in self._context.components:
            to_copy = _to_copy(component, nodes)
            if not to_copy or self._start(copy, component, to_copy):
                continue
            if component.name == FULL:
                self._skip(sum(node.num_tokens for node in to_copy))
                return
            self._skipped_components.value += len(to_copy)

    def _skip(self, num_tokens: int) -> None:
        if not self._skipped.value:
            log.warning(
                "%d tokens are not backed up: of %d host pages none can be evicted for them; raise host_bytes",
                num_tokens,
                self._context.full.host.num_pages,
            )
        self._skipped.value += num_tokens

    def _start(self, copy: _Copy, component: CacheComponent, nodes: list[TreeNode]) -> bool:
        """Submit what a component holds of `nodes` on the device, where the host has capacity."""
        name, page = component.name, component.page_size
        values = [node.held(name, DEVICE) for node in nodes]
        pages = self._host_eviction.alloc(component, sum(map(len, values)) // page)
        if pages is None:
            return False
        tree, host, start = self._context.tree, component.host, 0
        with ExitStack() as undo:
            undo.callback(host.free, pages)
            host.begin_read(pages)
            undo.callback(host.end_read, pages)
            for node, value in zip(nodes, values, strict=True):
                end = start + len(value) // page
                tree.begin_backup(node, name, pages[start:end])
                undo.callback(tree.end_backup, node, name, False)
                start = end
            run = NodeRun(nodes, name, HOST)
            undo.callback(run.detach)
            op = component.transfer.store(component.device_ids(joined(values)), pages)
            undo.pop_all()
        copy.ops.append(op)
        copy.pages[name], copy.runs[name] = pages, run
        return True

    def _end(self, operation: _Copy) -> None:
        copy, tree = operation, self._context.tree
        copy.op.wait()  # before its end nothing is known of its error
        confirmed = copy.op.error is None
        arrived: dict[TreeNode, None] = {}
        for name, run in copy.runs.items():  # FULL first: the others need it there
            host = self._context.by_name[name].host
            host.end_read(copy.pages[name])
            for node in run.nodes:
                unused = tree.end_backup(node, name, confirmed)
                if unused is not None:
                    host.free(unused)
                else:
                    arrived[node] = None
            run.detach()
        if confirmed:
            self._bytes.observe(copy.op.num_bytes)
            self._seconds.observe(copy.op.seconds())
        else:
            self._failures.value += 1
        for node in copy.locked:
            tree.unlock(node, HOST)
            tree.unlock(node, DEVICE)
        for persist in self._persists:
            persist.store(list(arrived))


def _to_copy(component: CacheComponent, nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """Those of `nodes` whose component is on the device alone, with no copy in flight."""
    name = component.name
    return [
        node for node in nodes if node.holds(name, DEVICE) and not node.holds(name, HOST) and node.pending(name) is None
    ]
