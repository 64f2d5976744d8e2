"""Sliding windows: only the last `window` tokens before the end of a match are needed.

    match   where the last `window` tokens have their window state, or all tokens from the root on
    lock    the nodes that the last `window` tokens lie in
    evict   any node: an inner one becomes a tombstone, which later matches may pass and not end in

May import hicache.tree.node and components.base.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hicache.tree.components.base import Rules, Walk
from hicache.tree.node import Component, Place, Tier, TreeNode, own


class _Window(Walk):
    def __init__(self, window: int) -> None:
        self._window = window
        self._run_len = window  # tokens with window state up to here; from the root on it is enough at once

    def ends_in(self, node: TreeNode, length: int, on_host: bool) -> bool:
        held = node.holds(Place.SWA_DEVICE) or (on_host and node.holds(Place.SWA_HOST))
        self._run_len = self._run_len + length if held else 0
        return held and self._run_len >= self._window


class SwaRules(Rules):
    """`window`: tokens that a match must have window state of behind it; `page_size`: tokens of a tree page."""

    component = Component.SWA
    places = (Place.SWA_DEVICE, Place.SWA_HOST)
    follows_full_slots = True

    def __init__(self, window: int, page_size: int) -> None:
        self.window, self._page_size = window, page_size
        # Tokens that each lock at a node was counted over. They are the same however the nodes were split since.
        self._locked_tokens: dict[tuple[TreeNode, Tier], list[int]] = {}

    def walk(self) -> Walk:
        return _Window(self.window)

    def reach(self, node: TreeNode) -> Iterator[TreeNode]:
        return _last_tokens(node, self.window)

    def weight(self, node: TreeNode) -> int:
        return node.num_tokens

    def split(self, value: torch.Tensor, at_tokens: int, tier: Tier) -> tuple[torch.Tensor | None, torch.Tensor]:
        at = at_tokens if tier is Tier.DEVICE else at_tokens // self._page_size
        return own(value[:at]), own(value[at:])

    def to_lock(self, node: TreeNode, tier: Tier) -> Iterator[TreeNode]:
        nodes = list(self.reach(node))
        self._locked_tokens.setdefault((node, tier), []).append(sum(at.num_tokens for at in nodes))
        return iter(nodes)

    def to_unlock(self, node: TreeNode, tier: Tier) -> Iterator[TreeNode]:
        locks = self._locked_tokens[node, tier]
        num_tokens = locks.pop()
        if not locks:
            del self._locked_tokens[node, tier]
        return _last_tokens(node, num_tokens)

    def spare_tokens(self, node: TreeNode) -> int:
        """Tokens at the front of `node` whose window state no match at its end needs, in whole pages."""
        spare = max(0, node.num_tokens - self.window)
        return spare // self._page_size * self._page_size


def _last_tokens(node: TreeNode, num_tokens: int) -> Iterator[TreeNode]:
    """The nodes that the last `num_tokens` tokens up to the end of `node` lie in, deepest first."""
    for at in node.path():
        if num_tokens <= 0:
            return
        yield at
        num_tokens -= at.num_tokens
