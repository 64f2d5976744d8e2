"""A node of the prefix tree: a run of whole pages, and what each component holds of them on the device.

Only `RadixTree` changes nodes, on the scheduler thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from hicache.eviction.orders import NOBODY, Record, clock
from hicache.tiers import FULL, Component
from hicache.tree.key import TokenRun

_ids = itertools.count()

ChildKey: TypeAlias = bytes | tuple[str, bytes]
"""The first page of a child's tokens; of a child of the root with its namespace."""


def last_nodes(node: TreeNode, num_tokens: int) -> list[TreeNode]:
    """The nodes that the last `num_tokens` tokens up to the end of `node` lie in, deepest first."""
    nodes: list[TreeNode] = []
    while node.parent is not None and num_tokens > 0:
        nodes.append(node)
        num_tokens -= node.num_tokens
        node = node.parent
    return nodes


def alone(node: TreeNode) -> list[TreeNode]:
    """The nodes of the path to `node`, deepest first, that no other prompt goes through; none where one goes on."""
    nodes: list[TreeNode] = []
    while node.parent is not None and len(node.children) <= bool(nodes):
        nodes.append(node)
        node = node.parent
    return nodes


def name_of(namespace: str, start: int, first_page: ChildKey) -> int:
    """Of what goes on with a page behind `start` tokens. Equal names of different prefixes are rare, and misjudge only
    these."""
    return hash((namespace, start, first_page))


class Holding(Record):
    """What one component holds of one node, and its place in the eviction order.

    `value`: None for nothing; slots, one a token, or a state `[1]`. The window component holds the full slots whose
    window slots are mapped. `locks`: how many users need it to stay. `owner`: its node while it has a value; as part of
    a cycle, a dropped node would keep its tokens in memory until the garbage collector runs.
    """

    __slots__ = ("locks", "owner", "value")

    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor | None = None
        self.locks = 0
        self.owner: TreeNode = NOBODY


class NodeRun:
    """Consecutive nodes of one path, root side first, to whose `component` a load in flight writes. Splits keep it
    whole."""

    def __init__(self, nodes: list[TreeNode], component: Component = FULL) -> None:
        self.nodes, self.component = nodes, component
        for node in nodes:
            node.runs.append(self)

    def detach(self) -> None:
        """Stop following the nodes."""
        for node in self.nodes:
            node.runs.remove(self)


class TreeNode:
    """A run of pages: `run` holds their tokens, `num_tokens` of them; `child_key` is the node's key in its parent.

    `holdings[component]`: what is held of it. `hit_count`: requests that used it, its maker included. Times are ticks
    of a logical clock.
    """

    __slots__ = (
        "child_key", "children", "creation_time", "depth_tokens", "full", "hit_count", "holdings", "id",
        "last_access_time", "namespace", "num_tokens", "page_keys", "parent", "priority", "run", "runs",
    )  # fmt: skip

    def __init__(
        self,
        id: int | None = None,
        run: TokenRun | None = None,
        parent: TreeNode | None = None,
        namespace: str = "",
        components: Sequence[Component] = (FULL,),
    ) -> None:
        self.id = next(_ids) if id is None else id
        self.run, self.parent, self.namespace = run, parent, namespace
        self.num_tokens: int = 0 if run is None else len(run)
        # Tokens from the root to this node's end. A split moves its start, and never its end.
        self.depth_tokens: int = self.num_tokens + (0 if parent is None else parent.depth_tokens)
        self.child_key: ChildKey = b""
        self.children: dict[ChildKey, TreeNode] = {}
        self.holdings = {component: Holding() for component in components}
        self.full = self.holdings[FULL]
        self.page_keys: list[bytes] | None = None
        self.hit_count = self.priority = 0
        self.last_access_time = self.creation_time = next(clock)
        self.runs: list[NodeRun] = []

    def __lt__(self, other: TreeNode) -> bool:
        """Used longer ago."""
        return self.last_access_time < other.last_access_time

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id}, tokens={self.num_tokens})"

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def value_of(self, component: Component) -> torch.Tensor:
        """What is held of it, which must be something."""
        value = self.holdings[component].value
        assert value is not None, f"the node holds no {component}"
        return value

    def has(self, component: Component) -> bool:
        return self.holdings[component].value is not None

    def locks(self, component: Component) -> int:
        return self.holdings[component].locks

    @property
    def is_locked(self) -> bool:
        """Whether anyone needs anything of it."""
        return any(holding.locks for holding in self.holdings.values())

    @property
    def is_loading(self) -> bool:
        """Whether a load to anything of it is in flight."""
        return bool(self.runs)

    def climb(self) -> Iterator[TreeNode]:
        """As `path`, one by one, for callers that stop half-way."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path(self) -> list[TreeNode]:
        """This node and its ancestors, the root left out, deepest first."""
        nodes: list[TreeNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def touch(self) -> None:
        """Record a use now."""
        self.last_access_time = next(clock)

    def begin_use(self) -> None:
        """One more request uses it, and has locked it: if its session has ended, it goes on."""
        self.hit_count += 1
        for holding in self.holdings.values():
            holding.has_ended = False

    @property
    def name(self) -> int:
        """The same for a node that starts where it does and as it does, see `name_of`."""
        return name_of(self.namespace, self.depth_tokens - self.num_tokens, self.child_key)
