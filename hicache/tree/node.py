"""A node of the prefix tree: a run of whole pages, and what each component holds of them on each tier.

Only `RadixTree` changes nodes, on the scheduler thread.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from hicache.eviction.orders import NOBODY, Record, clock
from hicache.tiers import DEVICE, FULL, HOST, Component, Store, Tier
from hicache.tree.key import TokenRun

_ids = itertools.count()

ChildKey: TypeAlias = bytes | tuple[str, bytes]
"""The first page of a child's tokens; of a child of the root with its namespace."""


class PageState(enum.Enum):
    """Where the full pages of a node are, and the copy in flight if there is one. Derived, never stored."""

    GONE = "in no tier"
    DEVICE = "device"
    BACKING_UP = "device, being copied to the host"
    BOTH = "device and host"
    HOST = "host"
    LOADING = "host, being copied to the device"


def last_nodes(node: TreeNode, num_tokens: int) -> list[TreeNode]:
    """The nodes that the last `num_tokens` tokens up to the end of `node` lie in, deepest first."""
    nodes: list[TreeNode] = []
    while node.parent is not None and num_tokens > 0:
        nodes.append(node)
        num_tokens -= node.num_tokens
        node = node.parent
    return nodes


def name_of(namespace: str, start: int, first_page: ChildKey) -> int:
    """Of what goes on with a page behind `start` tokens. Equal names of different prefixes are rare, and misjudge only
    these."""
    return hash((namespace, start, first_page))


class Holding(Record):
    """What one component holds of one node on one tier, and its place in the eviction order of both.

    `value`: None for nothing. On the device slots, one a token, or a state `[1]`; on the host pages of the component's
    pool, one a tree page, or a state `[1]`. The window component holds the full slots whose window slots are mapped.
    `locks`: how many users need it to stay. `pending`, on the host: the pages that a copy in flight writes to.
    `stored`, on the host: the `Store` bits of those that are known to have all of it. `owner`: its node while it has a
    value; as part of a cycle, a dropped node would keep its tokens in memory until the garbage collector runs.
    """

    __slots__ = ("locks", "owner", "pending", "stored", "value")

    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor | None = None
        self.pending: torch.Tensor | None = None
        self.stored = self.locks = 0
        self.owner: TreeNode = NOBODY


class NodeRun:
    """Consecutive nodes of one path, root side first, of whose `component` a copy is in flight. Splits keep it whole.

    `to`: the tier of memory that it goes to; None: to a store.
    """

    def __init__(self, nodes: list[TreeNode], component: Component = FULL, to: Tier | None = None) -> None:
        self.nodes, self.component, self.to = nodes, component, to
        for node in nodes:
            node.runs.append(self)

    def detach(self) -> None:
        """Stop following the nodes."""
        for node in self.nodes:
            node.runs.remove(self)


class TreeNode:
    """A run of pages: `run` holds their tokens, `num_tokens` of them; `child_key` is the node's key in its parent.

    `holdings[component][tier]`: what is held of it. `children_on[tier]`: children that hold FULL there. `source`: the
    store that the host copy was prefetched from, None where it was not or was used since. `hit_count`: requests that
    used it, its maker included. Times are ticks of a logical clock.
    """

    __slots__ = (
        "child_key",
        "children",
        "children_on",
        "creation_time",
        "depth_tokens",
        "full",
        "hit_count",
        "holdings",
        "id",
        "last_access_time",
        "namespace",
        "num_tokens",
        "page_keys",
        "parent",
        "priority",
        "run",
        "runs",
        "source",
    )

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
        self.children_on = [0, 0]
        self.holdings = {component: (Holding(), Holding()) for component in components}
        self.full = self.holdings[FULL]
        self.page_keys: list[bytes] | None = None
        self.hit_count = self.priority = 0
        self.source: Store | None = None
        self.last_access_time = self.creation_time = next(clock)
        self.runs: list[NodeRun] = []

    def __lt__(self, other: TreeNode) -> bool:
        """Used longer ago."""
        return self.last_access_time < other.last_access_time

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id}, tokens={self.num_tokens}, state={self.state.name})"

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def held(self, component: Component, tier: Tier) -> torch.Tensor:
        """What is held there, which must be something."""
        value = self.holdings[component][tier].value
        assert value is not None, f"the node holds no {component} on {tier.name}"
        return value

    def holds(self, component: Component, tier: Tier) -> bool:
        return self.holdings[component][tier].value is not None

    def locks(self, component: Component, tier: Tier) -> int:
        return self.holdings[component][tier].locks

    def pending(self, component: Component) -> torch.Tensor | None:
        """The host pages that a copy in flight writes to."""
        return self.holdings[component][HOST].pending

    def is_stored(self, component: Component, store: Store | None = None) -> bool:
        """Whether `store`, or any (None), is known to have what the host holds of a component."""
        stored = self.holdings[component][HOST].stored
        return bool(stored if store is None else stored & store)

    @property
    def is_locked(self) -> bool:
        """Whether anyone needs anything of it."""
        return any(device.locks or host.locks for device, host in self.holdings.values())

    @property
    def is_loading(self) -> bool:
        """Whether a copy of anything of it to the device is in flight."""
        return bool(self.runs) and any(run.to is DEVICE for run in self.runs)

    @property
    def state(self) -> PageState:
        device, host = self.full
        if device.value is None:
            return PageState.GONE if host.value is None else PageState.HOST
        if host.value is None:
            return PageState.DEVICE if host.pending is None else PageState.BACKING_UP
        loading = any(run.to is DEVICE and run.component == FULL for run in self.runs)
        return PageState.LOADING if loading else PageState.BOTH

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

    @property
    def name(self) -> int:
        """The same for a node that starts where it does and as it does, see `name_of`."""
        return name_of(self.namespace, self.depth_tokens - self.num_tokens, self.child_key)
