"""What the flows share: the parts they move bytes between, and the records of what is under way.

A flow is one movement. It starts when the engine tells it to and ends when the engine lets it land: `ready()` says how
many of its oldest operations have finished, `land(n)` applies exactly `n` of them. That split is what several ranks
agree on. This module holds no movement itself, so every flow may import it; no flow imports another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.config import EngineConfig
from hicache.device.base import KVCache
from hicache.device.req_to_token import ReqToTokenPool
from hicache.disk.workers import DiskTier
from hicache.host.pool import HostPagePool
from hicache.metrics import Metrics
from hicache.transfer.base import TransferBackend, TransferOp
from hicache.transfer.counter import LayerTransferCounter
from hicache.tree.node import Span, TreeNode

from hicache.tree.core import RadixTree  # isort: skip


@dataclass(frozen=True)
class Parts:
    """Everything an engine is made of. `host`, `transfer` and `disk` are `None` where the tier is not configured."""

    config: EngineConfig
    pool: KVCache
    req_to_token: ReqToTokenPool
    allocator: BaseTokenToKVPoolAllocator
    tree: RadixTree
    counter: LayerTransferCounter
    metrics: Metrics
    host: HostPagePool | None = None
    transfer: TransferBackend | None = None
    disk: DiskTier | None = None


class Flow(Protocol):
    """A movement whose operations end in the order in which they were started."""

    def ready(self) -> int:
        """How many of the oldest operations have finished; never blocks."""
        ...

    def land(self, count: int) -> None:
        """Apply the oldest `count` operations, all of them finished."""
        ...


@dataclass(frozen=True)
class Hit:
    """Tokens of a request that need not be computed, by the tier that held them when it was admitted."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class CacheRequest:
    """What admission needs to know. `tokens`: int64 ids of the whole prompt; `namespace`: the tenant."""

    request_id: str
    tokens: npt.NDArray[np.int64]
    namespace: str = ""


class Load(Span):
    """A load under way: `nodes` get their bytes at `slots`. `users`: leases that read them.

    A failed load's slots stay out of use until the last user is gone: `orphans`.
    """

    def __init__(self, nodes: list[TreeNode], slots: torch.Tensor, pages: torch.Tensor, load_id: int, op: TransferOp):
        super().__init__(nodes)
        self.slots, self.pages, self.load_id, self.op = slots, pages, load_id, op
        self.users = 0
        self.orphans: list[torch.Tensor] = []

    @property
    def failed(self) -> bool:
        return self.op.error is not None


class Lease:
    """A request's hold on the cache: a pinned prefix, a row of the request table and the slots of the rest.

    Made by `acquire`, ended by `release` (or by leaving its `with`). Intervals of positions:

        [0, cached_len)          needed no computing when the lease was made; its loads are `load_ids`
        [0, tree_len)            slots belong to the tree, pinned through `node`
        [tree_len, length)       slots belong to the lease and hold, or will hold, KV of its own
        [length, held_len)       slots of the last device page that no token uses yet
    """

    def __init__(self, request: CacheRequest, node: TreeNode, row: int, req_to_token: torch.Tensor) -> None:
        self.request_id, self.namespace = request.request_id, request.namespace
        self.node, self.row = node, row
        self._table = req_to_token
        self.hit = Hit()
        self.cached_len = self.tree_len = self.length = self.held_len = 0
        self.loads: list[Load] = []
        self.released = False
        self.on_exit: Callable[[Lease], None] = _no_owner

    @property
    def load_ids(self) -> tuple[int, ...]:
        """The loads that the forward of this request must wait for, layer by layer."""
        return tuple(load.load_id for load in self.loads)

    @property
    def slots(self) -> torch.Tensor:
        """Slots of positions [0, length), int64 on the pool's device."""
        return self.slots_of(0, self.length)

    def slots_of(self, start: int, end: int) -> torch.Tensor:
        """Slots of positions [start, end), int64 on the pool's device."""
        return self._table[self.row, start:end].long()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.on_exit(self)


def _no_owner(lease: Lease) -> None:
    raise AssertionError(f"lease {lease.request_id} belongs to no engine")
