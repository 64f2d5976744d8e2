"""The nodes of the prefix caches' trees: SGLang's names for what a node is and holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.prefix_cache.radix_key import RadixKey, key_of
from hicache.tiers import FULL, MAMBA, SWA, Component
from hicache.tree.key import TokenRun
from hicache.tree.node import TreeNode as Node


class TreeNode(Node):
    """See the base for what it holds. `host_ref_counter`: users of its host copy, see `protect_host`."""

    __slots__ = ("host_ref_counter",)

    def __init__(
        self,
        id: int | None = None,
        run: TokenRun | None = None,
        parent: Node | None = None,
        namespace: str = "",
        components: Sequence[Component] = (FULL,),
    ) -> None:
        super().__init__(id, run, parent, namespace, components)
        self.host_ref_counter = 0

    @property
    def key(self) -> RadixKey | None:
        """The node's own tokens; empty for the root of a tree, None for a node that was never in one."""
        return None if self.run is None else key_of(self.run.tokens, self.namespace)

    @property
    def value(self) -> torch.Tensor | None:
        """Slots, int64 `[tokens]`."""
        return self.full.value

    @property
    def host_value(self) -> torch.Tensor | None:
        """None: what the host holds is no matter of these trees."""
        return None

    @property
    def mamba_value(self) -> torch.Tensor | None:
        """The state at the node's end, int64 `[1]`."""
        return self.holdings[MAMBA].value if MAMBA in self.holdings else None

    @property
    def swa_tombstone(self) -> bool:
        """Whether its window slots left the device."""
        return SWA not in self.holdings or self.holdings[SWA].value is None

    @property
    def evicted(self) -> bool:
        """Whether the device holds nothing of it. The root of a tree is not evicted: climbing ends there."""
        return self.value is None and not (self.is_root and self.run is not None)

    @property
    def backuped(self) -> bool:
        return self.host_value is not None

    @property
    def lock_ref(self) -> int:
        """Users that need its slots to stay; 1 for the root of a tree, which always stays."""
        return 1 if self.is_root and self.run is not None else self.full.locks

    @property
    def full_lock_ref(self) -> int:
        return self.lock_ref

    @property
    def swa_lock_ref(self) -> int:
        return self.holdings[SWA].locks if SWA in self.holdings else 0

    @property
    def mamba_lock_ref(self) -> int:
        return self.holdings[MAMBA].locks if MAMBA in self.holdings else 0

    @property
    def hash_value(self) -> list[str] | None:
        """Page keys as hex digits, where they were computed before."""
        return None if self.page_keys is None else [key.hex() for key in self.page_keys]

    def get_last_hash_value(self) -> str | None:
        return None if not self.page_keys else self.page_keys[-1].hex()

    def protect_host(self) -> None:
        """Count a user of the host copy; `release_host` undoes it."""
        self.host_ref_counter += 1

    def release_host(self) -> None:
        """RuntimeError below zero."""
        if self.host_ref_counter < 1:
            raise RuntimeError(f"{self}: release_host without a protect_host before it")
        self.host_ref_counter -= 1
