"""The contract of a cache component: the parts that move it between tiers, and its steps in each transfer.

    build     tree_component_for, slot_space
    evict     available, num_evicting, count_eviction, free
    admit     refuse_impossible, needed, needed_to_join, fits_now, shortage, size_of, take, prepare_forward
    restore   first_required, pages_to_load, begin_load, device_ids, fail_load
    commit    next_stop, commit_points, needed_to_hand_over, hand_over, release
    check     device_violations

The transfers (`hicache.flow.admit`, ...) call these methods for every component in the same order, FULL first. To add a
component, write a subclass in a new file, and its counterpart in `hicache.pages.components`.
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
from hicache.flow.packing import Packing
from hicache.flow.page_transfer import Load
from hicache.host.pool import HostPagePool
from hicache.kernels.pack import PackFormat
from hicache.layout import ModelGeometry
from hicache.metrics import Metrics
from hicache.pages.components import TreeComponent
from hicache.pages.key import component_keys
from hicache.pages.node import Match
from hicache.pages.states import TierPages
from hicache.pages.table import Rows
from hicache.pages.tree import RadixTree
from hicache.tiers import Component
from hicache.transfer.base import TransferBackend
from hicache.transfer.counter import LayerTransferCounter


@dataclass(frozen=True)
class HostLink:
    """The transfers of a component between device and host, and its pages on the host. Without a host tier, only
    `space` and `counter` are set. `packing`: the format of packed host pages; None if pages are not packed."""

    space: SlotSpace
    counter: LayerTransferCounter
    host: HostPagePool | None = None
    transfer: TransferBackend | None = None
    pages: TierPages | None = None
    packing: PackFormat | None = None


@dataclass(frozen=True)
class EngineParts:
    """The parts that all components of an engine share. `allocator`: allocates slots and the window slots mapped to
    them."""

    config: EngineConfig
    pool: KVCache
    req_to_token: ReqToTokenPool
    allocator: BaseTokenToKVPoolAllocator
    tree: RadixTree
    metrics: Metrics


@dataclass(frozen=True)
class Admission:
    """The capacity and the loads of one admission, computed before anything changes.

    Intervals of positions: [0, device_len) is on the device, [device_len, length) is to be loaded, [length, end) is to
    be computed. `num_slots`: the number of slots for [device_len, end), in complete device pages; `num_own`: the number
    of slots for [length, end). `to_load`: the pages of the prefix, by component, that the device lacks and the host
    has.
    """

    match: Match
    length: int
    device_len: int
    end: int
    num_slots: int
    num_own: int
    to_load: Mapping[Component, Sequence[int]]


PageTest = Callable[["CacheComponent", int], bool]
"""A test of one page of a prompt, by its index."""


class InMemory(Protocol):
    """The locations of the pages of a prompt. The device has the full pages before `device_end`. See
    `hicache.flow.located`."""

    device_end: int

    def on_device(self, component: CacheComponent, index: int) -> bool: ...

    def on_host(self, component: CacheComponent, index: int) -> bool: ...


class CacheComponent(ABC):
    """One component of one engine. Scheduler thread only. The factory calls `tree_component_for` to find out whether a
    model has the component.

    A method that raises has changed nothing. The exception is `begin_load`: the caller undoes its changes by
    `fail_load`. `free`, `release` and `fail_load` do not raise.

    `tree_component`: the counterpart of the component in the tree. Sizes are in tokens; they are in states if
    `tree_component.at_node_end`.
    """

    @classmethod
    @abstractmethod
    def tree_component_for(cls, config: EngineConfig, model: ModelGeometry | KVCache) -> TreeComponent | None:
        """Return the counterpart of this component in the tree; None if the model does not have this component."""

    @classmethod
    def slot_space(cls, config: EngineConfig, tree_component: TreeComponent, pool: KVCache) -> SlotSpace:
        """Return the slots of the pool that are moved between tiers. A component with its own pool creates these
        slots."""
        return next(space for space in pool.slot_spaces if space.name == tree_component.name)

    def __init__(self, engine: EngineParts, tree_component: TreeComponent, link: HostLink) -> None:
        self.config, self.tree, self.tree_component = engine.config, engine.tree, tree_component
        self.name: Component = tree_component.name
        self.resident = engine.tree.pages[tree_component.name]  # the component's pages on the device
        self.counter, self.has_host = link.counter, link.host is not None
        # The host pool, its pages, and the transfers between host and device; used only if `has_host`.
        self.host, self.transfer = cast(HostPagePool, link.host), cast(TransferBackend, link.transfer)
        self.pages = cast(TierPages, link.pages)
        self.packing = (
            None if link.packing is None else Packing(tree_component.name, engine.metrics, lambda: self.pages.num_raw)
        )
        # Tokens or states in one host page.
        self.page_size = 1 if tree_component.at_node_end else engine.tree.page_size
        # Values that were evicted from the tree and that a copy to the host still reads, by copy, see `take_evicted`.
        self.evicting: dict[object, torch.Tensor] = {}

    def device_ids(self, value: torch.Tensor) -> torch.Tensor:
        """Convert a device value to the slots or states that the transfer moves."""
        return value

    def host_rows(self, rows: Rows) -> Rows:
        """Return the host rows of pages of the tree; `NO_ROW` for a page without a host row."""
        return self.pages.table.find(component_keys(self.name, self.tree.table.keys_of(rows)))

    # Evict

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The tokens or states that fit on the device."""

    @abstractmethod
    def available(self) -> int:
        """Return the tokens or states that are free on the device."""

    @property
    def num_evicting(self) -> int:
        """The tokens or states that will be free on the device when copies to the host have ended."""
        return sum(map(len, self.evicting.values()))

    @abstractmethod
    def free(self, value: torch.Tensor) -> None:
        """Free a device value."""

    def take_evicted(self, value: torch.Tensor) -> torch.Tensor:
        """Take a value that was evicted from the tree and that a copy still reads. Returns one id for each element of
        the value; `free_evicted` frees these ids when the copy has ended."""
        return value

    def free_evicted(self, ids: torch.Tensor) -> None:
        """Free the ids that `take_evicted` returned."""
        self.free(ids)

    def count_eviction(self, rows: Rows) -> None:  # noqa: B027 - most components count nothing
        """Count pages whose device values were evicted."""

    # Admit

    def refuse_impossible(self, request: CacheRequest) -> None:  # noqa: B027
        """Raise PromptTooLong if the request can never fit."""

    @abstractmethod
    def needed(self, admission: Admission) -> int:
        """Return the tokens or states that must be free on the device for an admission."""

    def needed_to_join(self, admission: Admission, num_own: int) -> int:
        """Return the tokens or states that must be free for a request that already has a lease and frees `num_own` of
        its own slots."""
        return self.needed(admission) - self.size_of(num_own)

    def fits_now(self, admission: Admission) -> bool:
        """Return whether the request fits now. Changes nothing."""
        short = self.needed(admission) - self.available()
        if short <= 0:
            return True
        kept = self.tree.to_protect(self.name, admission.match, admission.device_len, admission.length)
        evictable = max(0, self.resident.evictable - kept)
        return short <= self.num_evicting + evictable

    def shortage(self, needed: int, in_flight: int = 0) -> ResourceExhausted:
        """Return the error for a request that needs more tokens or states than are free or evictable. `in_flight`: the
        tokens or states that are being copied."""
        return OutOfSlots(needed, self.available(), self.resident.evictable, in_flight)

    def take(self, slots: torch.Tensor) -> None:  # noqa: B027
        """Allocate the windows or states of new `slots` of a lease. The caller has made `size_of(len(slots))`
        available. Not called for FULL."""

    def size_of(self, num_slots: int) -> int:
        """Return the tokens or states that `take` needs for new slots."""
        return 0

    def size_ahead(self, num_slots: int, num_requests: int) -> int:
        """Return the tokens or states that requests may take with their next `num_slots` slots. This number is evicted
        in advance."""
        return self.size_of(num_slots)

    def prepare_forward(self, lease: Lease, admission: Admission) -> None:  # noqa: B027
        """Prepare the first forward pass of a lease. If the lease has a load, the load was submitted before. Not called
        for FULL."""

    # Restore

    def first_required(self, end: int) -> int:
        """Return the index of the first page that this component needs of a prefix of `end` pages. The component also
        needs all later pages of the prefix."""
        page = self.tree.page_size
        return self.tree_component.first_required(end * page) // page

    def pages_to_load(self, end: int, pages: InMemory) -> Sequence[int]:
        """Return the pages, ascending, that this component needs of a prefix of `end` pages and that the device lacks.
        The host has all these pages."""
        return [index for index in range(self.first_required(end), end) if not pages.on_device(self, index)]

    @abstractmethod
    def begin_load(self, load: Load, lease: Lease, slots: torch.Tensor) -> torch.Tensor:
        """Insert the pages that `load` copies for this component (`pages_to_load`) into the tree after `load.node`, or
        into the lease. Returns the slots or states that the load writes, in the order of the pages.

        `slots`: the slots of the loaded tokens.
        """

    def fail_load(self, load: Load) -> None:  # noqa: B027
        """Remove the pages of a failed load from the tree."""

    # Commit

    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """Return the position, at most `end`, at which a pass from `start` over the prompt should end."""
        return end

    def commit_points(self, lease: Lease, num_tokens: int) -> list[int]:
        """Return the prompt lengths, ascending, at which computed tokens are inserted into the tree. Only called if
        `tree_component.ends_matches`."""
        return [num_tokens // self.tree.page_size * self.tree.page_size]

    def needed_to_hand_over(self, lease: Lease, length: int) -> int:
        """Return the number of tokens or states that must be free before a call of `hand_over`."""
        return 0

    def hand_over(self, lease: Lease, length: int) -> torch.Tensor | None:
        """Return the device value that the tree stores at the end of the first `length` tokens, like a recurrent state.
        None: the component has no value there."""
        return None

    def release(self, lease: Lease) -> None:  # noqa: B027
        """Free the values of this component in a lease that ends."""

    # Check

    @abstractmethod
    def device_violations(self, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
        """Return the violations of the rule: free + held by the tree + owned by leases = capacity. `loads`: the loads
        in flight, and the loads whose pages staged loads read."""


def account_violations(what: str, sums: tuple[int, int, int], total: int, ids: Sequence[torch.Tensor]) -> list[str]:
    """Return the violations of three rules: `sums` (free, in the tree, elsewhere) add up to `total`; no id has two
    owners; no id is 0, which padding uses."""
    found = []
    if sum(sums) != total:
        found.append(f"{what}: {sums[0]} free + {sums[1]} in the tree + {sums[2]} elsewhere is not {total}")
    owned = torch.cat([value.cpu() for value in ids]) if ids else torch.empty(0, dtype=torch.int64)
    if len(owned.unique()) != len(owned):
        found.append(f"{what}: one has two owners")
    if len(owned) and int(owned.min()) < 1:
        found.append(f"{what}: the sink was handed out")
    return found
