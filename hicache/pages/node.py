"""A node of the prefix tree: consecutive pages of a prompt, by their tokens and their rows. The records that the tree
returns: a match, an insertion, and removed values.

Only `RadixTree` changes nodes, on the scheduler thread.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, TypeAlias

import torch

from hicache.pages.key import TokenRun
from hicache.pages.table import NO_ROWS, Rows
from hicache.tiers import Component

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


class Match(NamedTuple):
    """The longest prefix whose full pages are on the device. `rows`: the rows of its pages; `nodes`: the nodes of these
    pages, from the root on.

    `RadixTree.usable_len` returns the length of the part of a match that all components can use.
    """

    namespace: str
    nodes: tuple[TreeNode, ...]
    rows: Rows
    full_len: int


class Inserted(NamedTuple):
    """The result of an insertion of tokens with slots; `node` ends after the last token that the tree has.

    [0, len(existing))              the tree had these tokens in slots `existing`, which replace the offered slots
    [len(existing), accepted_len)   the tree added these tokens, as the pages `gained`
    [accepted_len, offered)         refused, because a load in flight writes the first of these pages

    `adopted`: intervals of existing pages that got windows by the insertion. The caller maps the window slots of the
    offered slots to `existing` before it frees the offered slots. `attached`: components whose end values the tree
    accepted.
    """

    node: TreeNode
    gained: Rows
    existing: torch.Tensor
    adopted: tuple[tuple[int, int], ...]
    accepted_len: int
    attached: frozenset[Component] = frozenset()


class Released(NamedTuple):
    """Values that the tree removed and that the caller frees. `size`: tokens or states."""

    component: Component
    value: torch.Tensor
    size: int
