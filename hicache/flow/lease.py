"""The objects of a caller: its request, the prefetch, and the lease of an admitted request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hicache.config import PrefetchMode
from hicache.flow.page_transfer import Load
from hicache.pages.key import TokenRun
from hicache.pages.node import TreeNode
from hicache.tiers import FULL, Component, own


@dataclass(frozen=True)
class Hit:
    """Tokens of a request that need no computing, by the tier that had them at its admission."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def tokens(self) -> int:
        """The tokens of all tiers."""
        return self.device + self.host + self.disk + self.remote

    @property
    def loaded(self) -> Hit:
        """The hit without the tokens that were on the device."""
        return Hit(0, self.host, self.disk, self.remote)

    def __add__(self, other: Hit) -> Hit:
        return Hit(
            self.device + other.device, self.host + other.host, self.disk + other.disk, self.remote + other.remote
        )


@dataclass(frozen=True)
class LookupResult:
    """Tokens of a prompt that each tier would serve now: device, then host, disk and remote, without a gap.

    `disk_known`: whether disk and remote store answered in time; if False, the stores may have more pages of the
    prompt. `missed`: the other tokens by reason, see `docs/metrics.md`. Loads that the load gate would decline count as
    hits.
    """

    device: int
    host: int
    disk: int
    disk_known: bool = True
    remote: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheRequest:
    """A request for admission. `tokens`: int64 ids of the complete prompt; `namespace`: the tenant.

    `reserve_tokens`: the number of tokens after the cached prefix that get slots at admission; `extend` allocates slots
    for later tokens. None: all tokens get slots. `priority`, from 0: under `eviction_policy="priority"`, all pages of
    the request have at least this priority from its admission on. `branch_points`: token positions after which other
    prompts may differ, for example the end of a system prompt; a hybrid model keeps a recurrent state at the last page
    boundary before each branch point. `max_cached_tokens`: the most tokens that are taken from the cache; None: no
    limit. `is_counted`: whether the metrics of hits count the prompt; False for a preempted request, which finds its
    own pages. `may_wait` applies only to `exclusive`: whether `acquire` may wait for copies of evicted pages; if
    False, `acquire` raises `ExchangePending`, and `poll` continues the staged load. Under `write_back`, `acquire`
    always waits for copies of pages that it evicts, and raises `ExchangePending` if pages of the prompt are being
    copied.

    Two hints take effect under `eviction_policy="auto"`, the default. `priority`: each level doubles the counted uses
    of a page, for at most 32 levels. `expected_uses`, from 1: how often the prompt will be requested again with its
    answer, counted from the end of the lease.

    Two other hints take effect under every policy, from the end of the lease until the prompt is used again.
    `session_end`: the prompt will not be requested again. The prompt's pages after the last branch point that no other
    prompt shares are evicted first and no longer written to stores. Pages that the request computes are not copied to
    the host. `next_turn_within_s`: a prompt that continues this prompt is expected within this time. For four times as
    long, the pages of the prompt are evicted after pages without a hint. This hint protects at most nine tenths of a
    tier; if more pages have it, the oldest hint ends."""

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
    """The caller's view of one prefetch. Only `poll()` and `cancel()` change the handle, and then call `on_change` with
    the handle.

    `ready`: the request may be admitted. `ended`: no further page arrives. `overlaps`: the caller computes the prompt
    while its pages arrive, and calls `join`. `is_preemptible`: the request was admitted without waiting, because
    computing it delayed no other request. While waiting for the pages of a preemptible request delays all requests less
    than computing its prompt, later requests are served first.
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
        self.found_tokens = self.read_tokens = 0
        self.waits = mode != "best_effort"
        self.ended = False
        self.on_change: Callable[[Prefetch], None] | None = None

    @property
    def ready(self) -> bool:
        """Return whether the request may be admitted. `best_effort` never waits, `timeout` waits until its deadline,
        `wait_complete` until the last page, `auto` as long as waiting is estimated to take less time than computing."""
        return not self.waits

    def stop_waiting(self, *, is_preemptible: bool = False) -> None:
        self.waits, self.is_preemptible = False, is_preemptible
        if self.on_change is not None:
            self.on_change(self)

    def end(self) -> None:
        self.ended, self.waits = True, False
        if self.on_change is not None:
            self.on_change(self)


class Lease:
    """The resources of an admitted request: a locked prefix, a row of the request table and the slots of its other
    tokens.

    `acquire` makes a lease; `release`, or the end of its `with` block, ends the lease. Intervals of positions:

        [0, cached_len)          need no computing; loaded at `acquire` or the last `join`, see `load_ids`
        [0, tree_len)            slots belong to the tree and are locked by `node`
        [tree_len, length)       slots belong to the lease, for KV that the request computes
        [length, held_len)       slots of the last device page that no token uses yet

    `request`: the request that was admitted. `tokens`: the prompt, and generated tokens whose slots are in the tree.
    `keys`: page keys of the prompt, if there is a host tier.

    `missed`: the tokens of the prompt that had to be computed, by reason (`hicache.flow.misses`). `declines_load`:
    pages on the host up to `branching_len` are not loaded, because computing them was estimated to cost less.

    In a hybrid model, a lease also has two states: the running state `mamba_pool_idx`, which the forward pass advances,
    and the checkpoint `mamba_checkpoint_idx`, a copy of the running state after `checkpoint_len` tokens (0: no
    checkpoint). If the state of the prefix is on the host, `state_load` is the load of this state into the running
    state.

    Read `slots` again for each pass, after the pass's `begin_forward`: if another request committed the same tokens
    first, `commit` replaces this lease's slots with slots of the tree.

    The row of the request has the slots, on the pool's device. If the pool is on a GPU and `home`, the allocator's
    device, is the CPU, the lease also has a copy of the slots on the CPU.
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
        self._host_table = req_to_token.numpy() if req_to_token.is_cpu else None  # copied by one thread, see `own`
        is_copied = home.type == "cpu" and self._host_table is None
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
        """The ids of the loads of full pages for which the forward pass of this request must wait, layer by layer."""
        return self.load_ids_of(FULL)

    def load_ids_of(self, component: Component) -> tuple[int, ...]:
        return tuple(load.load_ids[component] for load in self.loads if component in load.load_ids)

    @property
    def slots(self) -> torch.Tensor:
        """Slots of positions [0, length), int64 on the pool's device."""
        return self.slots_of(0, self.length)

    def slots_of(self, start: int, end: int) -> torch.Tensor:
        """Return the slots of positions [start, end), int64 on the pool's device."""
        assert self.req_pool_idx is not None
        if self._host_table is not None:
            return torch.from_numpy(self._host_table[self.req_pool_idx, start:end].astype(np.int64))
        return self._table[self.req_pool_idx, start:end].long()

    def held_slots(self, start: int, end: int) -> torch.Tensor:
        """Return the slots of positions [start, end), on the allocator's device."""
        return self.slots_of(start, end) if self._slots is None else own(self._slots[start:end])

    def write(self, start: int, slots: torch.Tensor) -> None:
        """Set the slots of positions [start, start + len(slots))."""
        assert self.req_pool_idx is not None
        end = start + len(slots)
        if self._slots is not None:
            self._slots.numpy()[start:end] = slots.numpy()
        if self._host_table is not None:
            self._host_table[self.req_pool_idx, start:end] = slots.numpy()
        else:
            # The copy from pinned host memory is queued after earlier work and does not wait.
            row = self._table[self.req_pool_idx]
            row[start:end] = slots.pin_memory().to(row.device, non_blocking=True) if slots.is_cpu else slots

    def read(self, loads: Sequence[Load]) -> None:
        """Record this lease as a reader of these loads, so that its forward pass waits for them."""
        for load in loads:
            if load not in self.loads:
                load.readers += 1
                self.loads.append(load)

    def take_states(self) -> list[torch.Tensor]:
        """Remove the states from the lease and return them, each `[1]`."""
        states = [state.reshape(1) for state in (self.mamba_pool_idx, self.mamba_checkpoint_idx) if state is not None]
        self.mamba_pool_idx = self.mamba_checkpoint_idx = None
        return states

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.on_exit(self)


def _no_owner(lease: Lease) -> None:
    raise AssertionError(f"lease {lease.request_id} belongs to no engine")
