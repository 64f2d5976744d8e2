"""A node of the prefix tree: consecutive pages of a prompt, by their tokens and their rows.

Only `RadixTree` changes nodes, on the scheduler thread.
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

from hicache.pages.key import TokenRun
from hicache.pages.table import NO_ROWS, Rows

_ids = itertools.count()

ChildKey: TypeAlias = bytes | tuple[str, bytes]
"""The tokens of a child's first page, as bytes. A child of the root also has its namespace in the key."""


class TreeNode:
    """Consecutive pages `rows` with the tokens `run`. `num_tokens`: the number of these tokens; `child_key`: the key of
    the node in its parent's `children`.

    A split moves the start of a node, and never its end: a reference to the end of a node stays valid. The end of a
    leaf moves when unlocked pages are evicted.
    """

    __slots__ = (
        "child_key", "children", "depth_tokens", "id", "namespace", "num_tokens", "parent", "rows", "run",
    )  # fmt: skip

    def __init__(
        self,
        id: int | None = None,
        run: TokenRun | None = None,
        parent: TreeNode | None = None,
        namespace: str = "",
    ) -> None:
        self.id = next(_ids) if id is None else id
        self.run, self.parent, self.namespace = run, parent, namespace
        self.rows: Rows = NO_ROWS
        self.num_tokens: int = 0 if run is None else run.num_tokens
        self.depth_tokens: int = self.num_tokens + (0 if parent is None else parent.depth_tokens)
        self.child_key: ChildKey = b""
        self.children: dict[ChildKey, TreeNode] = {}

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id}, tokens={self.num_tokens})"

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def path(self) -> list[TreeNode]:
        """Return this node and its ancestors without the root, deepest first."""
        nodes: list[TreeNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes
