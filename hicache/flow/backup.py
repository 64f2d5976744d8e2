"""Down, first half: device to host.

A backup locks its nodes on both tiers, takes host pages and submits one copy. Only when the copy is confirmed do the
nodes count as held by the host; a failed copy leaves them where they were and frees the pages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import torch

from hicache.flow.base import Parts
from hicache.transfer.base import TransferOp
from hicache.tree.node import PageState, Span, Tier, TreeNode

log = logging.getLogger(__name__)


class _Copy(Span):
    def __init__(self, nodes: list[TreeNode], pages: torch.Tensor, op: TransferOp) -> None:
        super().__init__(nodes)
        self.pages, self.op = pages, op


class Backup:
    """`host_pages(n)` makes room on the host; `on_host(nodes)` is told what arrived there."""

    def __init__(
        self,
        parts: Parts,
        host_pages: Callable[[int], torch.Tensor | None],
        on_host: Callable[[list[TreeNode]], None],
    ) -> None:
        self._parts, self._host_pages, self._on_host = parts, host_pages, on_host
        self._under_way: deque[_Copy] = deque()
        count = parts.metrics.counter
        self._bytes = count("backup.bytes", "bytes copied from device to host")
        self._copy_ns = count("backup.copy_ns", "time those copies took")
        self._failures = count("backup.failures", "copies to the host that failed; their nodes stayed on the device")
        self._skipped = count("backup.skipped_tokens", "tokens not backed up because the host had no room")
        self._waits = count("backup.waits", "evictions that had to wait for a backup")

    def consider(self, node: TreeNode) -> None:
        """Back up what the write policy wants of the path to `node`, in one copy, as far as the host has room."""
        policy, hits = self._parts.config.write_policy, self._parts.config.selective_hits
        if policy == "write_back":
            return
        wanted: list[TreeNode] = []
        for at in reversed(list(node.path())):
            if at.state is PageState.DEVICE:
                if policy == "write_through_selective" and at.hit_count < hits:
                    break
                wanted.append(at)
            elif at.state is PageState.BACKING_UP or at.holds(Tier.HOST):
                assert not wanted, "a node below one that is only on the device is on the host"
        if wanted:
            self._submit(wanted)

    def save(self, node: TreeNode) -> None:
        """Copy a node now, with what it stands on, and wait: write_back's last moment before an eviction."""
        self._waits.value += 1
        if self._submit([at for at in reversed(list(node.path())) if at.state is PageState.DEVICE]):
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

    @property
    def pages_under_way(self) -> int:
        """Host pages that wait for their bytes."""
        return sum(len(copy.pages) for copy in self._under_way)

    def _submit(self, nodes: list[TreeNode]) -> bool:
        tree, host, transfer = self._parts.tree, self._parts.host, self._parts.transfer
        assert host is not None and transfer is not None
        last = nodes[-1]
        num_pages = sum(len(node.key) for node in nodes) // tree.page_size
        # Locked before room is made: the copy needs its parents to stay on the host, and itself on the device.
        tree.lock(last, Tier.DEVICE)
        tree.lock(last, Tier.HOST)
        pages = self._host_pages(num_pages)
        if pages is None:
            tree.unlock(last, Tier.HOST)
            tree.unlock(last, Tier.DEVICE)
            self._skipped.value += num_pages * tree.page_size
            return False
        host.begin_read(pages)
        op = transfer.store(torch.cat([node.value(Tier.DEVICE) for node in nodes]), pages)
        at = 0
        for node in nodes:
            end = at + len(node.key) // tree.page_size
            tree.begin_backup(node, pages[at:end])
            at = end
        self._under_way.append(_Copy(nodes, pages, op))
        return True

    def _end(self, copy: _Copy) -> None:
        tree, host = self._parts.tree, self._parts.host
        assert host is not None
        copy.op.wait()
        host.end_read(copy.pages)
        arrived: list[TreeNode] = []
        for node in copy.nodes:
            unused = tree.end_backup(node, confirmed=copy.op.error is None)
            if unused is None:
                arrived.append(node)
            else:
                host.free(unused)
        copy.leave()
        last = copy.nodes[-1]
        if copy.op.error is None:
            self._bytes.value += copy.op.num_bytes
            self._copy_ns.value += int(copy.op.seconds() * 1e9)
        else:
            self._failures.value += 1
        if arrived:
            self._on_host(arrived)
        tree.unlock(last, Tier.HOST)
        tree.unlock(last, Tier.DEVICE)
