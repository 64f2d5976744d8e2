"""A node of the prefix tree: a run of whole pages, and what each tier holds of them.

Owns nothing beyond its own fields; only `RadixTree` changes them. A node is touched by the scheduler thread alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import torch

from hicache.tree.key import Tokens


class Tier(enum.IntEnum):
    """The tiers a node can hold bytes in. DEVICE values are slots, one a token; HOST values are pages, one a page."""

    DEVICE = 0
    HOST = 1


class PageState(enum.Enum):
    """Where the bytes of a node are, and the copy in flight if there is one. `docs/invariants.md` draws the table."""

    GONE = "in no tier"
    DEVICE = "device"
    BACKING_UP = "device, on its way to the host"
    BOTH = "device and host"
    HOST = "host"
    LOADING = "host, on its way to the device"


TRANSITIONS: dict[PageState, frozenset[PageState]] = {
    PageState.GONE: frozenset({PageState.DEVICE, PageState.HOST}),
    PageState.DEVICE: frozenset({PageState.BACKING_UP, PageState.BOTH, PageState.GONE}),
    PageState.BACKING_UP: frozenset({PageState.BOTH, PageState.DEVICE}),
    PageState.BOTH: frozenset({PageState.HOST, PageState.DEVICE}),
    PageState.HOST: frozenset({PageState.LOADING, PageState.BOTH, PageState.GONE}),
    PageState.LOADING: frozenset({PageState.BOTH, PageState.HOST}),
}


class Span:
    """A run of nodes, root side first, that something in flight refers to. A split keeps it whole."""

    def __init__(self, nodes: list[TreeNode]) -> None:
        self.nodes = nodes
        for node in nodes:
            node.spans.append(self)

    def leave(self) -> None:
        """Stop following the nodes."""
        for node in self.nodes:
            node.spans.remove(self)

    @property
    def num_tokens(self) -> int:
        return sum(len(node.key) for node in self.nodes)


class TreeNode:
    """A run of pages. `key` holds its tokens (int64, a multiple of the page size, its own memory).

    `values[tier]`: slots or pages, `None` where the tier holds nothing. `locks[tier]`: who needs it to stay, counted on
    the whole path to the root. `pending_pages`: host pages a backup in flight writes to. `stored`: all pages of the
    node are known to be on disk. `hit_count`: requests that used it, its maker included. `from_disk`: its host copy was
    prefetched and has not been used yet.
    """

    __slots__ = (
        "children",
        "from_disk",
        "hit_count",
        "key",
        "locks",
        "newer",
        "older",
        "page_keys",
        "parent",
        "pending_pages",
        "spans",
        "state",
        "stored",
        "values",
    )

    def __init__(self, key: Tokens, parent: TreeNode | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, TreeNode] = {}
        self.values: list[torch.Tensor | None] = [None, None]
        self.locks = [0, 0]
        self.state = PageState.GONE
        self.pending_pages: torch.Tensor | None = None
        self.page_keys: list[bytes] | None = None
        self.hit_count = 0
        self.stored = False
        self.from_disk = False
        self.spans: list[Span] = []
        # Neighbours in the recency list of each tier; None while in none.
        self.older: list[TreeNode | None] = [None, None]
        self.newer: list[TreeNode | None] = [None, None]

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def value(self, tier: Tier) -> torch.Tensor:
        value = self.values[tier]
        assert value is not None, f"node holds nothing on {tier.name}"
        return value

    def holds(self, tier: Tier) -> bool:
        return self.values[tier] is not None

    def path(self) -> Iterator[TreeNode]:
        """This node and its ancestors, the root left out, deepest first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def depth_tokens(self) -> int:
        """Tokens from the root to this node's end."""
        return sum(len(node.key) for node in self.path())
