"""A node of the prefix tree: a run of whole pages, and what each component holds of them on each tier.

Owns nothing beyond its own fields; only `RadixTree` changes them. A node is touched by the scheduler thread alone. May
import numpy, torch, errors and hicache.tree.key.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hicache.tree.key import RadixKey, TokenRun, key_of

_NUM_PLACES = 6  # components times tiers
_ids = itertools.count()
_clock = itertools.count(1)


class Component(enum.IntEnum):
    """What a prefix has to have: attention state of every token, of the last window, a recurrent state at its end."""

    FULL = 0
    SWA = 1
    MAMBA = 2


class Tier(enum.IntEnum):
    """The tiers of memory. As a place, a tier means what FULL holds there."""

    DEVICE = 0
    HOST = 1


class Place(enum.IntEnum):
    """A component on a tier: 2 * component + tier.

    FULL_DEVICE    slots, one a token            FULL_HOST    pages of the full pool, one a page
    SWA_DEVICE     the same full slots, whose    SWA_HOST     pages of the window pool, one a page
                   window slots are still paired
    MAMBA_DEVICE   one state `[1]`               MAMBA_HOST   one state `[1]` of the host's pool
    """

    FULL_DEVICE = 0
    FULL_HOST = 1
    SWA_DEVICE = 2
    SWA_HOST = 3
    MAMBA_DEVICE = 4
    MAMBA_HOST = 5

    @property
    def component(self) -> Component:
        return _COMPONENTS[self >> 1]

    @property
    def tier(self) -> Tier:
        return _TIERS[self & 1]

    @staticmethod
    def of(component: Component, tier: Tier) -> Place:
        return _PLACES[2 * component + tier]


# Looking members up is much faster than calling their classes.
_COMPONENTS, _TIERS, _PLACES = tuple(Component), tuple(Tier), tuple(Place)


class PageState(enum.Enum):
    """Where the full pages of a node are, and the copy in flight if there is one. `docs/invariants.md` draws it."""

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


def own(value: torch.Tensor) -> torch.Tensor:
    """A copy of slots or pages. On the CPU by one thread: torch would have others help, and wait for them to wake."""
    if value.device.type != "cpu":
        return value.clone()
    return torch.from_numpy(value.numpy().copy())


def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Slots or pages of several nodes, at least one, as one tensor; on the CPU by one thread, see `own`."""
    if values[0].device.type != "cpu":
        return torch.cat(list(values))
    return torch.from_numpy(np.concatenate([value.numpy() for value in values]))


class Span:
    """A run of nodes, root side first, of whose `component` a copy is in flight. A split keeps it whole.

    `to`: the tier of memory that it goes to; None: to the disk.
    """

    def __init__(self, nodes: list[TreeNode], component: Component = Component.FULL, to: Tier | None = None) -> None:
        self.nodes, self.component, self.to = nodes, component, to
        for node in nodes:
            node.spans.append(self)

    def leave(self) -> None:
        """Stop following the nodes."""
        for node in self.nodes:
            node.spans.remove(self)

    @property
    def num_tokens(self) -> int:
        return sum(node.num_tokens for node in self.nodes)


class TreeNode:
    """A run of pages: `run` holds their tokens, in memory of its own.

    `values[place]`: what is held there, `None` for nothing. `locks[place]`: who needs it to stay.
    `pending[component]`: where on the host a copy in flight writes to. `children_held[tier]`: children that hold FULL
    there. `stored`: all pages are known to be on disk. `from_disk`: the host copy was prefetched and not used yet.
    `hit_count`: requests that used it, its maker included. Times are ticks of a logical clock. The properties behind
    them speak of FULL, under the names that the field uses.
    """

    __slots__ = (
        "children",
        "children_held",
        "creation_time",
        "depth_tokens",
        "from_disk",
        "hit_count",
        "host_ref_counter",
        "id",
        "last_access_time",
        "locks",
        "namespace",
        "newer",
        "older",
        "page_keys",
        "parent",
        "pending",
        "priority",
        "run",
        "spans",
        "state",
        "stored",
        "values",
    )

    def __init__(
        self,
        id: int | None = None,
        run: TokenRun | None = None,
        parent: TreeNode | None = None,
        namespace: str = "",
    ) -> None:
        self.id = next(_ids) if id is None else id
        self.run, self.parent, self.namespace = run, parent, namespace
        # Tokens from the root to this node's end. A split moves its start, and never its end.
        self.depth_tokens: int = self.num_tokens + (0 if parent is None else parent.depth_tokens)
        self.children: dict[bytes | tuple[str, bytes], TreeNode] = {}
        self.children_held = [0] * len(Tier)
        self.values: list[torch.Tensor | None] = [None] * _NUM_PLACES
        self.locks = [0] * _NUM_PLACES
        self.pending: list[torch.Tensor | None] = [None] * len(Component)
        self.state = PageState.GONE
        self.page_keys: list[bytes] | None = None
        self.hit_count = self.priority = self.host_ref_counter = 0
        self.stored = self.from_disk = False
        self.last_access_time = self.creation_time = next(_clock)
        self.spans: list[Span] = []
        # Neighbours in the recency list of each place; None while in none.
        self.older: list[TreeNode | None] = [None] * _NUM_PLACES
        self.newer: list[TreeNode | None] = [None] * _NUM_PLACES

    def __lt__(self, other: TreeNode) -> bool:
        """Used longer ago."""
        return self.last_access_time < other.last_access_time

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id}, tokens={self.num_tokens}, state={self.state.name})"

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def num_tokens(self) -> int:
        return 0 if self.run is None else len(self.run)

    def held(self, place: int) -> torch.Tensor:
        """What is held at `place`, which must be something."""
        value = self.values[place]
        assert value is not None, f"node holds nothing at {Place(place).name}"
        return value

    def holds(self, place: int) -> bool:
        return self.values[place] is not None

    def path(self) -> Iterator[TreeNode]:
        """This node and its ancestors, the root left out, deepest first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def used(self) -> None:
        """Note a use now."""
        self.last_access_time = next(_clock)

    # The field's names

    @property
    def key(self) -> RadixKey | None:
        """The node's own tokens; empty for the root of a tree, None for a node that was never in one."""
        return None if self.run is None else key_of(self.run.tokens, self.namespace)

    @property
    def value(self) -> torch.Tensor | None:
        """Slots, int64 `[tokens]`."""
        return self.values[Place.FULL_DEVICE]

    @property
    def host_value(self) -> torch.Tensor | None:
        """Host pages, int64 `[pages]`."""
        return self.values[Place.FULL_HOST]

    @property
    def mamba_value(self) -> torch.Tensor | None:
        """The state at the node's end, int64 `[1]`."""
        return self.values[Place.MAMBA_DEVICE]

    @property
    def swa_tombstone(self) -> bool:
        """Whether its window slots are gone from the device."""
        return self.values[Place.SWA_DEVICE] is None

    @property
    def evicted(self) -> bool:
        """Whether the device holds nothing of it. The root of a tree is not evicted, so that climbing ends there."""
        return self.value is None and not (self.is_root and self.run is not None)

    @property
    def backuped(self) -> bool:
        return self.host_value is not None

    @property
    def lock_ref(self) -> int:
        """Who needs the node's slots to stay; 1 for the root of a tree, which always stays."""
        return 1 if self.is_root and self.run is not None else self.locks[Place.FULL_DEVICE]

    @property
    def full_lock_ref(self) -> int:
        return self.lock_ref

    @property
    def swa_lock_ref(self) -> int:
        return self.locks[Place.SWA_DEVICE]

    @property
    def mamba_lock_ref(self) -> int:
        return self.locks[Place.MAMBA_DEVICE]

    @property
    def hash_value(self) -> list[str] | None:
        """Page keys as hex digits, where they were asked for before."""
        return None if self.page_keys is None else [key.hex() for key in self.page_keys]

    def get_last_hash_value(self) -> str | None:
        return None if not self.page_keys else self.page_keys[-1].hex()

    def protect_host(self) -> None:
        """A user of the host copy says so; undone by `release_host`."""
        self.host_ref_counter += 1

    def release_host(self) -> None:
        """RuntimeError below zero."""
        if self.host_ref_counter < 1:
            raise RuntimeError(f"{self}: release_host without a protect_host before it")
        self.host_ref_counter -= 1
