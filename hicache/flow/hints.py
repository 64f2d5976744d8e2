"""What a request says of later ones, when it ends: that its session has ended, or until when its prompt is awaited."""

from __future__ import annotations

from hicache.eviction.keeps import KEPT_SHARE, Keeps
from hicache.flow.context import EngineContext
from hicache.flow.lease import Lease
from hicache.flow.located import path_keys
from hicache.tiers import FULL
from hicache.tree.node import TreeNode


class Hints:
    """Owned by the scheduler thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context, self._has_kept = context, False
        self._on_device = Keeps(KEPT_SHARE * context.full.capacity)
        self._on_host = Keeps(KEPT_SHARE * context.full.host.num_pages if context.has_host else 0)
        context.metrics.gauge(
            "evict.kept_tokens",
            "tokens of prompts that the device keeps for their next turn",
            lambda: self._on_device.num_tokens,
        )

    def expire(self) -> None:
        """What was awaited until now is kept no more."""
        if not self._has_kept:
            return
        now_s = self._context.clock()
        self._on_device.expire(now_s)
        self._on_host.expire(now_s)

    def enter(self, lease: Lease) -> TreeNode:
        """What a request that ends says, which has let go of its prompt and used it last. Returns the end of what of it
        may be used again."""
        if lease.session_end:
            return self._end_session(lease)
        if lease.expected_uses is not None:
            self._expect_uses(lease, lease.expected_uses)
        if lease.next_turn_within_s is not None:
            self._keep(lease, lease.next_turn_within_s)
        return lease.node

    def _end_session(self, lease: Lease) -> TreeNode:
        context, names, shared = self._context, self._context.tree.names, lease.node
        ended = context.tree.end_session(lease.node, max(lease.branch_points, default=0))
        for node in ended:
            assert node.parent is not None
            shared = node.parent
        if context.has_host:
            keys = [key for node in ended for key in names.of(node)]
            for component in context.components:
                component.index.end_session(names.of_component(component.name, keys))
        return shared

    def _expect_uses(self, lease: Lease, num_uses: int) -> None:
        self._context.tree.expect_uses(lease.node, num_uses)
        if self._context.has_host:
            keys = path_keys(self._context, lease.node)
            for component in self._context.components:
                component.index.expect_uses(keys[component.name], num_uses)

    def _keep(self, lease: Lease, within_s: float) -> None:
        context, node, now_s = self._context, lease.node, self._context.clock()
        if node.is_root:
            return
        self._has_kept = True
        self._on_device.add(lease.namespace, now_s, within_s, node.depth_tokens, context.tree.keep(node))
        if context.has_host:
            keys = path_keys(context, node)
            keeps = [keep for at in context.components for keep in at.index.keep(keys[at.name])]
            self._on_host.add(lease.namespace, now_s, within_s, len(keys[FULL]), keeps)
