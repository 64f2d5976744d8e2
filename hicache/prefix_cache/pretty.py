"""A tree as text, for logs and for people."""

from __future__ import annotations

from typing import cast

from hicache.prefix_cache.node import TreeNode
from hicache.tiers import MAMBA, SWA
from hicache.tree.core import RadixTree

_SHOWN_TOKENS = 10


def draw(tree: RadixTree) -> str:
    """A line a node, children below and right of their parent: id, tokens, the first of them, and what holds them."""
    lines: list[str] = []
    stack = [(tree.root, 0)]
    while stack:
        node, depth = stack.pop()
        lines.append("  " * depth + _line(cast(TreeNode, node)))
        stack.extend((child, depth + 1) for child in reversed(node.children.values()))
    return "\n".join(lines)


def _line(node: TreeNode) -> str:
    key = node.key
    tokens = [] if key is None else list(key[:_SHOWN_TOKENS])
    extra = f" extra_key={key.extra_key!r}" if key is not None and key.extra_key is not None else ""
    parts = [f"[{node.id}] {node.num_tokens} {tokens}{extra} r={node.lock_ref}"]
    if node.tree is not None and SWA in node.tree.pages:
        parts.append(f"sr={node.swa_lock_ref} ts={node.swa_tombstone}")
    if node.tree is not None and MAMBA in node.tree.pages:
        state = node.mamba_value
        parts.append(f"mr={node.mamba_lock_ref} mv={None if state is None else state.tolist()}")
    return " ".join(parts)
