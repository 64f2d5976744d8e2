"""The objects of a caller: its request, the prefetch, and the lease of an admitted request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hicache.config import PrefetchMode
from hicache.flow.movement import Load
from hicache.pages.key import TokenRun
from hicache.pages.node import TreeNode
from hicache.tiers import FULL, Component, own


@dataclass(frozen=True)
class Hit:
    """Tokens of a request that need not be computed, by the tier that held them when it was admitted."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def tokens(self) -> int:
        """Of all tiers."""
        return self.device + self.host + self.disk + self.remote

    @property
    def loaded(self) -> Hit:
        """Without those that were on the device."""
        return Hit(0, self.host, self.disk, self.remote)

    def __add__(self, other: Hit) -> Hit:
        return Hit(
            self.device + other.device, self.host + other.host, self.disk + other.disk, self.remote + other.remote
        )


@dataclass(frozen=True)
class LookupResult:
    """Tokens of a prompt that each tier would serve now: device first, then host, disk and remote, without a gap.

    `disk_known`: whether disk and remote tier answered in time; else they may hold more. `missed`: the other tokens by
    reason, see `docs/metrics.md`; a load that is not worth its time is not compared here.
    """

    device: int
    host: int
    disk: int
    disk_known: bool = True
    remote: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheRequest:
    """A request for admission. `tokens`: int64 ids of the whole prompt; `namespace`: the tenant.

    `reserve_tokens`: tokens behind the cached prefix that get slots at admission, the others by `extend`; None: all.
    `priority`, from 0: under `eviction_policy="priority"`, what the request uses or adds has at least this one from
    then on. `branch_points`: token positions, like the end of a system prompt, after which other prompts may go on
    differently; a hybrid model keeps a recurrent state at the last page boundary of each. `max_cached_tokens`: the most
    tokens that come from the cache; the others are computed, for their logits. None: no limit. `is_counted`: whether it
    counts as a prompt in the metrics of hits; False for one that was admitted before, which finds its own pages.
    `may_wait`: whether `acquire` may wait for copies that make room; where it may not it raises `ExchangePending`, and
    `poll` goes on with them.

    Two hints count under `eviction_policy="auto"`, the default. `priority`: each level doubles the uses that a page
    counts for, up to 32 times. `expected_uses`, from 1, when the lease ends: how often the prompt will be asked
    for again with its answer.

    Two other hints count under every policy, from the end of the lease until the prompt is used again. `session_end`:
    the prompt will not be asked for again. Its pages that no other prompt shares, behind the last branch point, are
    evicted first and not written any more; pages that the request computes are not copied to the host.
    `next_turn_within_s`: a prompt that continues it is expected by then; until it is used, or four times as long, its
    pages are evicted after pages without a hint. At most nine tenths of a tier are kept so; beyond that the oldest hint
    ends."""

    request_id: str
    tokens: npt.NDArray[np.int64]
    namespace: str = ""
    reserve_tokens: int | None = None
    priority: int = 0
    branch_points: tuple[int, ...] = ()
    expected_uses: int | None = None
    session_end: bool = False
    next_turn_within_s: float | None = None
    max_cached_tokens: int | None = None
    is_counted: bool = True
    may_wait: bool = True


class Prefetch:
    """A caller's view of one prefetch. It changes only in `poll()` and `cancel()`, which then call `on_change` with it.

    `ready`: admission need not wait. `ended`: no further page arrives. `overlaps`: the caller computes the prompt while
    its pages arrive, and calls `join`. `is_preemptible`: the request did not wait, because computing it delayed no
    other request; later requests go first while waiting for its pages costs all requests less.
    """

    def __init__(
        self,
        request_id: str,
        mode: PrefetchMode,
        deadline_s: float = 0.0,
        *,
        overlaps: bool = False,
    ) -> None:
        self.request_id, self.mode, self.deadline_s = request_id, mode, deadline_s
        self.overlaps, self.is_preemptible = overlaps, False
        self.found_tokens = self.landed_tokens = 0
        self.waits = mode != "best_effort"
        self.ended = False
        self.on_change: Callable[[Prefetch], None] = _ignore

    @property
    def ready(self) -> bool:
        """Best effort never waits; a timeout waits until its deadline; wait_complete until the end; auto where
        that is estimated to cost less than computing."""
        return not self.waits

    def stop_waiting(self, *, is_preemptible: bool = False) -> None:
        self.waits, self.is_preemptible = False, is_preemptible
        self.on_change(self)

    def end(self) -> None:
        self.ended = True
        self.stop_waiting(is_preemptible=self.is_preemptible)


class Lease:
    """A request's hold on the cache: a pinned prefix, a row of the request table and the slots of the rest.

    Made by `acquire`, ended by `release` (or by leaving its `with`). Intervals of positions:

        [0, cached_len)          need no computing since `acquire`, or since the last `join`; their loads: `load_ids`
        [0, tree_len)            slots belong to the tree, pinned through `node`
        [tree_len, length)       slots belong to the lease and hold, or will hold, KV of its own
        [length, held_len)       slots of the last device page that no token uses yet

    `request`: what it was made for. `tokens` are the prompt's, and those behind it whose slots the tree got. `keys`: of
    the prompt's pages, where a host tier needs them.

    `missed`: the tokens of the prompt that had to be computed, by reason (`hicache.flow.misses`). `declines_load`:
    pages on the host up to `branching_len` are not loaded, because computing them was estimated to cost less.

    In a hybrid model it has two states as well: `mamba_pool_idx`, which the forward advances, and
    `mamba_checkpoint_idx`, which holds what that was after `checkpoint_len` tokens (0: nothing). `state_load` brings
    the first of them, where the prefix left it on the host.

    Read `slots` again for each pass, after its `begin_forward`: if another request committed the same tokens first,
    `commit` replaces this lease's slots with the tree's.

    Slots are in the request's row, on the pool's device. If `home`, the allocator's device, is the host and the pool is
    elsewhere, the host has a copy of them.
    """

    def __init__(self, request: CacheRequest, node: TreeNode, req_to_token: torch.Tensor, home: torch.device) -> None:
        self.request, self.request_id, self.namespace = request, request.request_id, request.namespace
        self.prompt_len, self.priority = len(request.tokens), request.priority
        self.tokens = TokenRun(request.tokens)
        self.node = node
        self.keys: list[bytes] = []
        self.req_pool_idx: int | None = None
        self.mamba_pool_idx: torch.Tensor | None = None
        self.mamba_checkpoint_idx: torch.Tensor | None = None
        self._table = req_to_token
        is_copied = home.type == "cpu" and not req_to_token.is_cpu
        self._slots = torch.empty(req_to_token.shape[1], dtype=torch.int64) if is_copied else None
        self.hit = Hit()
        self.cached_len = self.tree_len = self.length = self.held_len = 0
        self.checkpoint_len = self.branching_len = 0
        self.declines_load = False
        self.missed: Mapping[str, int] = {}
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
        return self.load_ids_of(FULL)

    def load_ids_of(self, component: Component) -> tuple[int, ...]:
        return tuple(load.load_ids[component] for load in self.loads if component in load.load_ids)

    @property
    def slots(self) -> torch.Tensor:
        """Slots of positions [0, length), int64 on the pool's device."""
        return self.slots_of(0, self.length)

    def slots_of(self, start: int, end: int) -> torch.Tensor:
        """Slots of positions [start, end), int64 on the pool's device."""
        assert self.req_pool_idx is not None
        row = self._table[self.req_pool_idx]
        if row.is_cpu:  # by one thread, see `hicache.tiers.own`
            return torch.from_numpy(row.numpy()[start:end].astype(np.int64))
        return row[start:end].long()

    def held_slots(self, start: int, end: int) -> torch.Tensor:
        """The same, on the allocator's device."""
        return self.slots_of(start, end) if self._slots is None else own(self._slots[start:end])

    def write(self, start: int, slots: torch.Tensor) -> None:
        """Set the slots of positions [start, start + len(slots))."""
        assert self.req_pool_idx is not None
        end, row = start + len(slots), self._table[self.req_pool_idx]
        if self._slots is not None:
            self._slots.numpy()[start:end] = slots.numpy()
        if row.is_cpu:
            row.numpy()[start:end] = slots.numpy()
        else:
            # A copy from the host goes through pinned memory behind queued work, and does not wait.
            row[start:end] = slots.pin_memory().to(row.device, non_blocking=True) if slots.is_cpu else slots

    def read(self, loads: Sequence[Load]) -> None:
        """Wait for these too, and count as their reader."""
        for load in loads:
            if load not in self.loads:
                load.readers += 1
                self.loads.append(load)

    def take_states(self) -> list[torch.Tensor]:
        """Its states, each `[1]`, which it no longer has."""
        states = [state.reshape(1) for state in (self.mamba_pool_idx, self.mamba_checkpoint_idx) if state is not None]
        self.mamba_pool_idx = self.mamba_checkpoint_idx = None
        return states

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.on_exit(self)


def _ignore(prefetch: Prefetch) -> None:
    """The caller asks for the state itself."""


def _no_owner(lease: Lease) -> None:
    raise AssertionError(f"lease {lease.request_id} belongs to no engine")
