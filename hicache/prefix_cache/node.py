"""The tree nodes of the prefix caches, with SGLang's names for their attributes."""

from __future__ import annotations

import torch

from hicache.pages.device import DevicePages
from hicache.pages.key import TokenRun
from hicache.pages.node import TreeNode as Node
from hicache.pages.tree import RadixTree
from hicache.prefix_cache.radix_key import RadixKey, key_of
from hicache.tiers import FULL, MAMBA, SWA, Component


class TreeNode(Node):
    """A tree node with SGLang's attributes.

    `tree`: the tree that the node is in; None for a node that was never in a tree. All pages of a node are used
    together, so the node's uses are read from its last page. Times are ticks of a logical clock. `host_ref_counter`:
    number of users of the host copy, see `protect_host`."""

    __slots__ = ("host_ref_counter", "tree")

    def __init__(
        self,
        id: int | None = None,
        run: TokenRun | None = None,
        parent: Node | None = None,
        namespace: str = "",
    ) -> None:
        super().__init__(id, run, parent, namespace)
        self.tree: RadixTree | None = parent.tree if isinstance(parent, TreeNode) else None
        self.host_ref_counter = 0

    def __lt__(self, other: TreeNode) -> bool:
        """Return whether this node was used less recently than `other`."""
        return self.last_access_time < other.last_access_time

    def has(self, component: Component) -> bool:
        """Return whether the device has the node's slots, window slots or state, depending on the component."""
        pages = self._pages(component)
        return pages is not None and bool(pages.has(self.rows[-1:]).all())

    @property
    def hit_count(self) -> int:
        """The number of requests that used the node, including the one that inserted it."""
        return 0 if self.tree is None else int(self.tree.table.hits[self.rows[-1:]].sum())

    @property
    def priority(self) -> int:
        return 0 if self.tree is None else int(self.tree.table.priority[self.rows[-1:]].sum())

    @property
    def last_access_time(self) -> int:
        pages = self._pages(FULL)
        return 0 if pages is None else int(pages.order.at.last_use[self.rows[-1]])

    @property
    def creation_time(self) -> int:
        return 0 if self.tree is None or self._pages(FULL) is None else int(self.tree.table.age[self.rows[-1]])

    @property
    def key(self) -> RadixKey | None:
        """The tokens of the node. The key is empty for the root of a tree, and None for a node that was never in a
        tree."""
        return None if self.run is None else key_of(self.run.tokens, self.namespace)

    @property
    def value(self) -> torch.Tensor | None:
        """The slots of the node, int64 `[tokens]`. Returns None if the node is not on the device."""
        pages = self._pages(FULL)
        return None if pages is None else pages.value(self.rows)

    @property
    def host_value(self) -> torch.Tensor | None:
        """None, because these trees have no host tier."""
        return None

    @property
    def mamba_value(self) -> torch.Tensor | None:
        """The state at the end of the node, int64 `[1]`. Returns None if the node has no state."""
        pages = self._pages(MAMBA)
        return pages.value(self.rows[-1:]) if pages is not None and self.has(MAMBA) else None

    @property
    def swa_tombstone(self) -> bool:
        """Return whether the window slots of the node were evicted."""
        return not self.has(SWA)

    @property
    def evicted(self) -> bool:
        """Return whether the node is not on the device. Returns False for the root of a tree, so that a walk to the
        root ends there."""
        return self._pages(FULL) is None and not (self.is_root and self.run is not None)

    @property
    def backuped(self) -> bool:
        return self.host_value is not None

    @property
    def lock_ref(self) -> int:
        """The number of locks on the slots of the node; 1 for the root of a tree, which is never evicted."""
        return 1 if self.is_root and self.run is not None else self._locks(FULL)

    @property
    def full_lock_ref(self) -> int:
        return self.lock_ref

    @property
    def swa_lock_ref(self) -> int:
        return self._locks(SWA)

    @property
    def mamba_lock_ref(self) -> int:
        return self._locks(MAMBA)

    @property
    def hash_value(self) -> list[str] | None:
        """The keys of the node's pages as hex digits. Returns None if these keys have not been computed yet."""
        keys = self._keys()
        return None if keys is None else [key.hex() for key in keys]

    def get_last_hash_value(self) -> str | None:
        keys = self._keys()
        return None if keys is None else keys[-1].hex()

    def protect_host(self) -> None:
        """Add one user of the host copy; `release_host` removes it."""
        self.host_ref_counter += 1

    def release_host(self) -> None:
        """Remove one user of the host copy. Raises RuntimeError if there is none."""
        if self.host_ref_counter < 1:
            raise RuntimeError(f"{self}: release_host was called more often than protect_host")
        self.host_ref_counter -= 1

    def _pages(self, component: Component) -> DevicePages | None:
        """Return the device pages of a component. Returns None if the node is not, or no longer, in a tree."""
        is_held = self.tree is not None and len(self.rows) > 0 and self.tree.node[self.rows[-1]] == self.id
        return self.tree.pages.get(component) if self.tree is not None and is_held else None

    def _locks(self, component: Component) -> int:
        pages = self._pages(component)
        return 0 if pages is None else int(pages.order.locks[self.rows[-1]])

    def _keys(self) -> list[bytes] | None:
        if self.tree is None or self._pages(FULL) is None:
            return None
        keys = self.tree.table.keys_of(self.rows)
        return None if keys[-1] is None else keys
