"""A tree as text, for logs and for people.

May import hicache.tree.node and core.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache.tree.core import RadixTree
from hicache.tree.node import Component, TreeNode

_SHOWN_TOKENS = 10


def draw(tree: RadixTree, components: Sequence[Component]) -> str:
    """A line a node, children below and right of their parent: id, tokens, the first of them, and what holds them."""
    lines: list[str] = []
    stack = [(tree.root, 0)]
    while stack:
        node, depth = stack.pop()
        lines.append("  " * depth + _line(node, components))
        stack.extend((child, depth + 1) for child in reversed(node.children.values()))
    return "\n".join(lines)


def _line(node: TreeNode, components: Sequence[Component]) -> str:
    key = node.key
    tokens = [] if key is None else list(key.token_ids[:_SHOWN_TOKENS])
    extra = f" extra_key={key.extra_key!r}" if key is not None and key.extra_key is not None else ""
    parts = [f"[{node.id}] {node.num_tokens} {tokens}{extra} r={node.lock_ref}"]
    if Component.SWA in components:
        parts.append(f"sr={node.swa_lock_ref} ts={node.swa_tombstone}")
    if Component.MAMBA in components:
        state = node.mamba_value
        parts.append(f"mr={node.mamba_lock_ref} mv={None if state is None else state.tolist()}")
    return " ".join(parts)
