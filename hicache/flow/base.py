"""What the flows share: the parts they move bytes between, and the records of what is under way.

A flow is one movement. It starts when the engine tells it to and ends when the engine lets it land: `ready()` says how
many of its oldest operations have finished, `land(n)` applies exactly `n` of them. That split is what several ranks
agree on. This module holds no movement itself, so every flow may import it; no flow imports another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.config import EngineConfig
from hicache.device.base import KVCache
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.mamba import MambaPool
from hicache.device.req_to_token import ReqToTokenPool
from hicache.disk.workers import DiskTier
from hicache.host.pool import HostPagePool
from hicache.metrics import Metrics
from hicache.transfer.base import TransferBackend, TransferOp
from hicache.transfer.counter import LayerTransferCounter
from hicache.tree.base import Released
from hicache.tree.components import SwaRules
from hicache.tree.core import RadixTree
from hicache.tree.key import TokenRun
from hicache.tree.node import Component, Place, Span, Tier, TreeNode, joined


@dataclass(frozen=True)
class Windows:
    """The window side of a sliding-window model. `host` and `transfer` move window slots, not full ones.

    `page_tokens`: of a tree page.
    """

    allocator: SWATokenToKVPoolAllocator
    rules: SwaRules
    page_tokens: int
    counter: LayerTransferCounter
    host: HostPagePool | None = None
    transfer: TransferBackend | None = None
    component = Component.SWA

    @property
    def most_tokens(self) -> int:
        """Tokens that one request may take slots for at a time, beside the windows of its prefix."""
        page = self.allocator.page_size
        return self.allocator.size_swa // page * page - self.rules.window - self.page_tokens

    def narrow(self, tree: RadixTree, node: TreeNode) -> None:
        """Cut the nodes above where the last window before the end of `node` begins, so that no more is kept for it."""
        reach = list(self.rules.reach(node))
        spare = sum(at.num_tokens for at in reach) - self.rules.window
        if spare >= tree.page_size:
            tree.cut_head(reach[-1], spare // tree.page_size * tree.page_size)

    def device_ids(self, value: torch.Tensor) -> torch.Tensor:
        """The window slots of full slots."""
        return self.allocator.translate_loc_from_full_to_swa(value)


@dataclass(frozen=True)
class States:
    """The recurrent side of a hybrid model. A host page is one state."""

    table: HybridReqToTokenPool
    counter: LayerTransferCounter
    host: HostPagePool | None = None
    transfer: TransferBackend | None = None
    component = Component.MAMBA

    @property
    def pool(self) -> MambaPool:
        return self.table.mamba_pool

    def copying(self, *leases: Lease) -> AbstractContextManager[None]:
        """For copies of states on the device: they wait for what loads the states of `leases`, and for nothing else."""
        return self.counter.consuming({load_id for lease in leases for load_id in lease.load_ids_of(self.component)})

    def device_ids(self, value: torch.Tensor) -> torch.Tensor:
        """States are what the transfer moves."""
        return value


@dataclass(frozen=True)
class Parts:
    """Everything an engine is made of. What is not configured, or the model does not have, is `None`."""

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
    windows: Windows | None = None
    states: States | None = None

    @property
    def sides(self) -> tuple[Windows | States, ...]:
        """The components beside full attention."""
        return tuple(side for side in (self.windows, self.states) if side is not None)

    def give_back(self, released: Sequence[Released]) -> None:
        """Free what left the tree, each where it came from."""
        by_place: dict[Place, list[torch.Tensor]] = {}
        for item in released:
            by_place.setdefault(item.place, []).append(item.value)
        for place, values in by_place.items():
            self._free(place, joined(values))

    def host_of(self, component: Component) -> HostPagePool:
        """The host pool that pages of a component are in."""
        side = next((side for side in self.sides if side.component is component), None)
        host = self.host if side is None else side.host
        assert host is not None
        return host

    def _free(self, place: Place, value: torch.Tensor) -> None:
        if place.tier is Tier.HOST:
            self.host_of(place.component).free(value)
        elif place is Place.FULL_DEVICE:
            self.allocator.free_run(value)
        elif place is Place.SWA_DEVICE:
            assert self.windows is not None
            self.windows.allocator.free_swa(value)
        else:
            assert self.states is not None
            self.states.pool.free(value)


class Flow(Protocol):
    """A movement whose operations end in the order in which they were started."""

    def ready(self) -> int:
        """How many of the oldest operations have finished; never blocks."""
        ...

    def land(self, count: int) -> None:
        """Apply the oldest `count` operations, all of them finished."""
        ...


class JointOp:
    """Copies that belong together, one a component: done when all are, failed when one is."""

    def __init__(self, ops: Sequence[TransferOp]) -> None:
        assert ops
        self._ops = tuple(ops)
        self.num_bytes = sum(op.num_bytes for op in ops)

    @property
    def error(self) -> Exception | None:
        return next((op.error for op in self._ops if op.error is not None), None)

    def done(self) -> bool:
        return all(op.done() for op in self._ops)

    def wait(self) -> None:
        for op in self._ops:
            op.wait()

    def wait_outcome(self) -> None:
        for op in self._ops:
            op.wait_outcome()

    def seconds(self) -> float:
        """Of the longest."""
        return max(op.seconds() for op in self._ops)


@dataclass(frozen=True)
class Hit:
    """Tokens of a request that need not be computed, by the tier that held them when it was admitted."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class CacheRequest:
    """What admission needs to know. `tokens`: int64 ids of the whole prompt; `namespace`: the tenant.

    `reserve_tokens`: tokens behind the cached prefix that get slots at admission, the others by `extend`; None: all.
    `priority`, from 0: under `eviction_policy="priority"`, what the request uses or adds has at least this one from
    then on.
    """

    request_id: str
    tokens: npt.NDArray[np.int64]
    namespace: str = ""
    reserve_tokens: int | None = None
    priority: int = 0


@dataclass(frozen=True)
class LoadPlan:
    """What a load brings for one prefix that ends with `node`.

    `pages`: nodes whose full pages are to come; `windows`: nodes whose window pages are, to the peers of their slots;
    `state`: whether the state at the end of `node` is.
    """

    node: TreeNode
    pages: tuple[TreeNode, ...]
    windows: tuple[TreeNode, ...]
    state: bool

    @property
    def is_empty(self) -> bool:
        return not (self.pages or self.windows or self.state)


class Load:
    """A load under way. `pages` and `windows` follow the nodes whose full and window pages it brings.

    `users`: leases and later loads that read what it brings. A failed load's slots stay out of use until the last is
    gone: `orphans`. `stands_on`: loads under way that bring what this one continues; it fails with them.
    `reading`: the host pages it reads, `load_ids`: its number in the layer counter, each by component.
    `orphan_states`: those of a lease that was released before the load had written to one of them.
    """

    def __init__(self, plan: LoadPlan, stands_on: Sequence[Load]) -> None:
        self.node, self.stands_on = plan.node, tuple(stands_on)
        self.pages = Span(list(plan.pages), Component.FULL, Tier.DEVICE)
        self.windows = Span(list(plan.windows), Component.SWA, Tier.DEVICE)
        self.load_ids: dict[Component, int] = {}
        self.reading: dict[Component, torch.Tensor] = {}
        self.ops: list[TransferOp] = []
        self.users = 0
        self.landed = self.abandoned = False
        self._cause: Exception | None = None
        self.orphans: list[torch.Tensor] = []
        self.orphan_states: list[torch.Tensor] = []

    @cached_property
    def op(self) -> JointOp:
        return JointOp(self.ops)

    @property
    def error(self) -> Exception | None:
        """Why it failed; of a load that failed with another, why that did. Final after `wait_outcome`."""
        below = (load.error for load in self.stands_on)
        return self._cause or self.op.error or next((error for error in below if error is not None), None)

    def land(self) -> None:
        """It has ended, and so has all that it stands on."""
        self._cause, self.stands_on, self.landed = self.error, (), True

    def brings(self, node: TreeNode) -> bool:
        return node in self.pages.nodes or node in self.windows.nodes

    def leave(self) -> None:
        self.pages.leave()
        self.windows.leave()


class Lease:
    """A request's hold on the cache: a pinned prefix, a row of the request table and the slots of the rest.

    Made by `acquire`, ended by `release` (or by leaving its `with`). Intervals of positions:

        [0, cached_len)          needed no computing when the lease was made; its loads are `load_ids`
        [0, tree_len)            slots belong to the tree, pinned through `node`
        [tree_len, length)       slots belong to the lease and hold, or will hold, KV of its own
        [length, held_len)       slots of the last device page that no token uses yet

    `tokens` are the prompt's, and those behind it whose slots the tree got.

    In a hybrid model it has two states as well: `mamba_pool_idx`, which the forward advances, and
    `mamba_checkpoint_idx`, which holds what that was after `checkpoint_len` tokens (0: nothing). `state_load` brings
    the first of them, where the prefix left it on the host.

    Read `slots` anew for each pass, behind its `begin_forward`: where another request committed the same tokens first,
    `commit` puts its slots in place of ours.

    Slots are noted in the request's row, on the pool's device, and on the host too, where they were chosen there
    (`home`, the allocator's device).
    """

    def __init__(self, request: CacheRequest, node: TreeNode, req_to_token: torch.Tensor, home: torch.device) -> None:
        self.request_id, self.namespace = request.request_id, request.namespace
        self.prompt_len, self.priority = len(request.tokens), request.priority
        self.tokens = TokenRun(request.tokens)
        self.node = node
        self.req_pool_idx: int | None = None
        self.mamba_pool_idx: torch.Tensor | None = None
        self.mamba_checkpoint_idx: torch.Tensor | None = None
        self._table = req_to_token
        self._slots = torch.empty(req_to_token.shape[1], dtype=torch.int64) if home.type == "cpu" else None
        self.hit = Hit()
        self.cached_len = self.tree_len = self.length = self.held_len = 0
        self.checkpoint_len = self.branching_len = 0
        self.loads: list[Load] = []
        self.state_load: Load | None = None
        self.released = False
        self.on_exit: Callable[[Lease], None] = _no_owner

    @property
    def row(self) -> int:
        """The row of the request table."""
        assert self.req_pool_idx is not None
        return self.req_pool_idx

    @property
    def load_ids(self) -> tuple[int, ...]:
        """The loads of full pages that the forward of this request must wait for, layer by layer."""
        return self.load_ids_of(Component.FULL)

    def load_ids_of(self, component: Component) -> tuple[int, ...]:
        return tuple(load.load_ids[component] for load in self.loads if component in load.load_ids)

    @property
    def slots(self) -> torch.Tensor:
        """Slots of positions [0, length), int64 on the pool's device."""
        return self.slots_of(0, self.length)

    def write(self, start: int, slots: torch.Tensor) -> None:
        """Note the slots of positions [start, start + len(slots))."""
        end, row = start + len(slots), self._table[self.row]
        if self._slots is not None:
            self._slots.numpy()[start:end] = slots.numpy()  # by one thread, see `hicache.tree.node.own`
        if row.device.type == "cpu":
            row.numpy()[start:end] = slots.numpy()
        else:
            row[start:end] = on_device(slots, row.device)

    def join(self, loads: Sequence[Load]) -> None:
        """Wait for these too, and count as their reader."""
        for load in loads:
            if load not in self.loads:
                load.users += 1
                self.loads.append(load)

    def slots_of(self, start: int, end: int) -> torch.Tensor:
        """Slots of positions [start, end), int64 on the pool's device."""
        return self._table[self.row, start:end].long()

    def held(self, start: int, end: int) -> torch.Tensor:
        """The same, where the tree and the allocator keep theirs. May be a view: whoever keeps it copies it."""
        return self.slots_of(start, end) if self._slots is None else self._slots[start:end]

    def take_states(self) -> list[torch.Tensor]:
        """Its states, each `[1]`, which it no longer has."""
        states = [state.reshape(1) for state in (self.mamba_pool_idx, self.mamba_checkpoint_idx) if state is not None]
        self.mamba_pool_idx = self.mamba_checkpoint_idx = None
        return states

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.on_exit(self)


def on_device(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`ids` there, int64. From the host through pinned memory, behind what is queued: nothing waits."""
    if ids.device.type == device.type:
        return ids
    return ids.pin_memory().to(device, non_blocking=True)


def _no_owner(lease: Lease) -> None:
    raise AssertionError(f"lease {lease.request_id} belongs to no engine")
