"""The contract of a cache component: the parts that move it between tiers, and its steps in each movement.

    build     tree_component_for, slot_space
    evict     available, num_leaving, count_eviction, free
    admit     refuse_impossible, needed, needed_to_join, fits_now, shortage, size_of, take, prepare_forward
    restore   first_required, pages_to_load, begin_load, device_ids, fail_load
    commit    next_stop, commit_points, needed_to_donate, donate, release
    check     device_violations

The movements (`hicache.flow.admit`, ...) call these for every component in the same order, FULL first. A component of
one's own is a subclass in a file of its own, and its counterpart in `hicache.pages.components`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.config import EngineConfig
from hicache.device.base import KVCache, SlotSpace
from hicache.device.req_to_token import ReqToTokenPool
from hicache.errors import OutOfSlots, ResourceExhausted
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.movement import Load
from hicache.flow.packing import Packing
from hicache.host.pool import HostPagePool
from hicache.kernels.pack import PackFormat
from hicache.layout import ModelGeometry
from hicache.metrics import Metrics
from hicache.pages.components import TreeComponent
from hicache.pages.states import TierPages
from hicache.pages.table import Rows
from hicache.pages.tree import RadixTree
from hicache.pages.tree_results import Match
from hicache.tiers import Component
from hicache.transfer.base import TransferBackend
from hicache.transfer.counter import LayerTransferCounter


@dataclass(frozen=True)
class HostLink:
    """How the rows of a component move between device and host, and which pages the host has of them. Without a host
    tier: rows and counter alone. `packing`: the format of host pages that are packed."""

    space: SlotSpace
    counter: LayerTransferCounter
    host: HostPagePool | None = None
    transfer: TransferBackend | None = None
    pages: TierPages | None = None
    packing: PackFormat | None = None


@dataclass(frozen=True)
class EngineParts:
    """The parts that all components of an engine share. `allocator`: of slots and the window slots mapped to them."""

    config: EngineConfig
    pool: KVCache
    req_to_token: ReqToTokenPool
    allocator: BaseTokenToKVPoolAllocator
    tree: RadixTree
    metrics: Metrics


@dataclass(frozen=True)
class Admission:
    """The capacity and the loads of one admission. Counted before anything changes.

    Intervals of positions: [0, device_len) is on the device, [device_len, length) is to be loaded, [length, end) is to
    be computed. `num_slots`: of [device_len, end) in whole device pages; `num_own`: of [length, end). `to_load`: the
    pages of the prefix, by component, that the device lacks and the host has.
    """

    match: Match
    length: int
    device_len: int
    end: int
    num_slots: int
    num_own: int
    to_load: Mapping[Component, Sequence[int]]


PageTest = Callable[["CacheComponent", int], bool]
"""Whether page `index` of a prompt is somewhere."""


class InMemory(Protocol):
    """Where the pages of a prompt are: full ones up to `device_end` on the device. See `hicache.flow.located`."""

    device_end: int

    def on_device(self, component: CacheComponent, index: int) -> bool: ...

    def on_host(self, component: CacheComponent, index: int) -> bool: ...


class CacheComponent(ABC):
    """One component of one engine. Scheduler thread only. The factory asks the class whether a model has it.

    A method that raises has changed nothing, except for `begin_load`, which `fail_load` undoes. `free`, `release` and
    `fail_load`, which end something, do not raise.

    `tree_component`: its counterpart in the tree. Sizes are in tokens, or in states where `tree_component.at_node_end`.
    """

    @classmethod
    @abstractmethod
    def tree_component_for(cls, config: EngineConfig, model: ModelGeometry | KVCache) -> TreeComponent | None:
        """Its counterpart in the tree; None where the model does not have this component."""

    @classmethod
    def slot_space(cls, config: EngineConfig, tree_component: TreeComponent, pool: KVCache) -> SlotSpace:
        """The rows that are moved between the tiers: of the pool, or made here for a component with rows of its own."""
        return next(space for space in pool.slot_spaces if space.name == tree_component.name)

    def __init__(self, engine: EngineParts, tree_component: TreeComponent, link: HostLink) -> None:
        self.config, self.tree, self.tree_component = engine.config, engine.tree, tree_component
        self.name: Component = tree_component.name
        self.resident = engine.tree.pages[tree_component.name]  # what the device has of it
        self.counter, self.has_host = link.counter, link.host is not None
        # The host pool, its pages, and the transfers between host and device; used only if `has_host`.
        self.host, self.transfer = cast(HostPagePool, link.host), cast(TransferBackend, link.transfer)
        self.pages = cast(TierPages, link.pages)
        self.packing = (
            None if link.packing is None else Packing(tree_component.name, engine.metrics, lambda: self.pages.num_raw)
        )
        # Elements of a device value that one host page holds.
        self.page_size = 1 if tree_component.at_node_end else engine.tree.page_size
        # Values that have left the tree, by the copy to the host after which they are free, see `leave`.
        self.leaving: dict[object, torch.Tensor] = {}

    def device_ids(self, value: torch.Tensor) -> torch.Tensor:
        """The slots or states that the transfer moves for a device value."""
        return value

    def host_rows(self, rows: Rows) -> Rows:
        """The rows on the host of pages of the tree; `NO_ROW` for a page without one."""
        return self.pages.table.find(self.tree.names.of_component(self.name, self.tree.table.keys_of(rows)))

    # Evict

    @property
    @abstractmethod
    def capacity(self) -> int:
        """All that the device may have of it."""

    @abstractmethod
    def available(self) -> int:
        """Free on the device."""

    @property
    def num_leaving(self) -> int:
        """Tokens or states that will be free on the device when copies to the host have ended."""
        return sum(map(len, self.leaving.values()))

    @abstractmethod
    def free(self, value: torch.Tensor) -> None:
        """Give a device value back."""

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """A device value has left the tree, and a copy reads it: what `free_left` gets when that has ended, an element
        for each of its own."""
        return value

    def free_left(self, ids: torch.Tensor) -> None:
        """Give back what `leave` returned."""
        self.free(ids)

    def count_eviction(self, rows: Rows) -> None:  # noqa: B027 - most count nothing
        """These lost their device values."""

    # Admit

    def refuse_impossible(self, request: CacheRequest) -> None:  # noqa: B027
        """Raise PromptTooLong where the request can never fit."""

    @abstractmethod
    def needed(self, admission: Admission) -> int:
        """The tokens or states that must be free on the device for an admission."""

    def needed_to_join(self, admission: Admission, num_own: int) -> int:
        """The same for a request that was admitted before, and gives back `num_own` slots of its own."""
        return self.needed(admission) - self.size_of(num_own)

    def fits_now(self, admission: Admission) -> bool:
        """Whether the request fits at this moment. Changes nothing."""
        kept = self.tree.to_protect(self.name, admission.match, admission.device_len, admission.length)
        evictable = max(0, self.resident.evictable - kept)
        return self.needed(admission) <= self.available() + self.num_leaving + evictable

    def shortage(self, needed: int, in_flight: int = 0) -> ResourceExhausted:
        """The error of a request that `needed` more than can be made free, while `in_flight` are being copied."""
        return OutOfSlots(needed, self.available(), self.resident.evictable, in_flight)

    def take(self, slots: torch.Tensor) -> None:  # noqa: B027
        """A lease got new `slots` of its own: take what belongs to them. `size_of(len(slots))` is free."""

    def size_of(self, num_slots: int) -> int:
        """The tokens or states that `take` needs for new slots."""
        return 0

    def size_ahead(self, num_slots: int, num_requests: int) -> int:
        """The tokens or states that requests may take with their next `num_slots` slots; evicted ahead."""
        return self.size_of(num_slots)

    def prepare_forward(self, lease: Lease, admission: Admission) -> None:  # noqa: B027
        """The load of the lease was submitted, if there is one: prepare what else its first forward needs."""

    # Restore

    def first_required(self, end: int) -> int:
        """Of a prefix of `end` pages, pages [first_required(end), end) are needed, as its counterpart in the tree says
        of tokens."""
        page = self.tree.page_size
        return self.tree_component.first_required(end * page) // page

    def pages_to_load(self, end: int, pages: InMemory) -> Sequence[int]:
        """Pages, ascending, that a prefix of `end` pages, which memory can serve, lacks on the device."""
        return [index for index in range(self.first_required(end), end) if not pages.on_device(self, index)]

    @abstractmethod
    def begin_load(self, load: Load, lease: Lease, slots: torch.Tensor) -> torch.Tensor:
        """Enter what `load` brings, its `pages` of this component, `pages_to_load`, into the tree behind `load.node`,
        or into the lease; returns the slots or states that it writes to, in that order.

        `slots`: those of the tokens that the load brings, from the first on.
        """

    def fail_load(self, load: Load) -> None:  # noqa: B027
        """The load failed: take what it was to bring off the device."""

    # Commit

    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """Where a pass over the prompt from `start` should end, at most at `end`."""
        return end

    def commit_points(self, lease: Lease, num_tokens: int) -> list[int]:
        """Where `tree_component.ends_matches`: lengths, ascending, at which the tokens computed so far are given to
        the tree."""
        return [num_tokens // self.tree.page_size * self.tree.page_size]

    def needed_to_donate(self, lease: Lease, length: int) -> int:
        """The tokens or states that must be free for `donate`."""
        return 0

    def donate(self, lease: Lease, length: int) -> torch.Tensor | None:
        """A device value that belongs to exactly the first `length` tokens, for the tree; None for none."""
        return None

    def release(self, lease: Lease) -> None:  # noqa: B027
        """The lease ends: free what it holds."""

    # Check

    @abstractmethod
    def device_violations(self, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
        """Where free + held by the tree + owned by leases is not all there is. `loads`: those in flight, and
        those that exchanges read."""


def account_violations(what: str, sums: tuple[int, int, int], total: int, ids: Sequence[torch.Tensor]) -> list[str]:
    """Whether free + in the tree + elsewhere (`sums`) is `total`, and no id is owned twice or the sink."""
    found = []
    if sum(sums) != total:
        found.append(f"{what}: {sums[0]} free + {sums[1]} in the tree + {sums[2]} elsewhere is not {total}")
    owned = torch.cat([value.cpu() for value in ids]) if ids else torch.empty(0, dtype=torch.int64)
    if len(owned.unique()) != len(owned):
        found.append(f"{what}: one has two owners")
    if len(owned) and int(owned.min()) < 1:
        found.append(f"{what}: the sink was handed out")
    return found
