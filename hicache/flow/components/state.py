"""Recurrent states in the engine: two per request, and one at the end of each node at which a match can end.

A state belongs to exactly the tokens that it has consumed. A request has a running state, and may have a checkpoint. A
commit moves the checkpoint to the tree without a copy, or copies the running state at the end of a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from hicache.config import EngineConfig
from hicache.device.base import KVCache
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.errors import OutOfStates, ResourceExhausted
from hicache.flow.components.base import Admission, CacheComponent, EngineParts, HostLink, account_violations
from hicache.flow.lease import Lease
from hicache.flow.page_transfer import Load
from hicache.layout import ModelGeometry
from hicache.pages.components import MambaComponent, TreeComponent
from hicache.pages.table import Rows
from hicache.tiers import MAMBA

_STATES_PER_REQUEST = 2  # states of a request: the running state and the last checkpoint


class RecurrentState(CacheComponent):
    """The component of models with recurrent layers. Each row of the request table has the states of a request."""

    @classmethod
    def tree_component_for(cls, config: EngineConfig, model: ModelGeometry | KVCache) -> TreeComponent | None:
        return MambaComponent() if isinstance(model, ModelGeometry) and model.recurrent_layers else None

    def __init__(self, engine: EngineParts, tree_component: TreeComponent, link: HostLink) -> None:
        super().__init__(engine, tree_component, link)
        assert isinstance(engine.req_to_token, HybridReqToTokenPool)
        self._table, self._pool = engine.req_to_token, engine.req_to_token.mamba_pool
        self._pool.register_layer_transfer_counter(link.counter)
        # States are stored at multiples of this number of tokens: ends of pages at which the model's kernels can return
        # a state.
        self._step = math.lcm(engine.tree.page_size, engine.config.mamba_chunk_tokens)
        self._evicted = engine.metrics.counter(
            "evict.states", "recurrent states that the device evicted before it evicted their pages"
        )
        gauge, total = engine.metrics.gauge, self._pool.size
        gauge("device.total_states", "recurrent states of the device tier", lambda: total)
        gauge("device.used_states", "recurrent states that the cache or a request uses", self._used)

    @property
    def capacity(self) -> int:
        return self._pool.size

    def available(self) -> int:
        return self._pool.available_size()

    def _used(self) -> int:
        return self.capacity - self.available()

    def free(self, value: torch.Tensor) -> None:
        self._pool.free(value)

    def count_eviction(self, rows: Rows) -> None:
        self._evicted.value += len(rows)

    def needed(self, admission: Admission) -> int:
        return _STATES_PER_REQUEST

    def needed_to_join(self, admission: Admission, num_own: int) -> int:
        """Return 0, because a request keeps its states."""
        return 0

    def size_ahead(self, num_slots: int, num_requests: int) -> int:
        """Return one state for each request: a request may take one state for the tree or for a checkpoint."""
        return num_requests

    def shortage(self, needed: int, in_flight: int = 0) -> ResourceExhausted:
        return OutOfStates(needed - self.available(), self.available(), in_flight)

    def prepare_forward(self, lease: Lease, admission: Admission) -> None:
        """Copy the state of the prefix on the device to the running state of the request."""
        if admission.to_load.get(MAMBA) or lease.node.is_root:
            return
        with self._copying():
            self._pool.copy_from(self.resident.value(lease.node.rows[-1:]), _running(lease))

    def begin_load(self, load: Load, lease: Lease, slots: torch.Tensor) -> torch.Tensor:
        """Load into the request's running state, which no other request uses."""
        lease.state_load = load
        return _running(lease)

    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """Return the next of these positions before `end`: the last page boundary of the prompt, the position at which
        the cached prefix branches, the request's branch points, and 1, 2, 4, ... times `mamba_prefill_interval`. So
        another prompt that shares a prefix hits at least half of this prefix."""
        step, interval = self._step, self.config.mamba_prefill_interval
        points = [lease.prompt_len - 1, lease.branching_len, *lease.request.branch_points]
        if interval:
            points.append(interval << (start // interval).bit_length())
        stops = (point // step * step for point in points)
        return min((stop for stop in stops if start < stop < end), default=end)

    def commit_points(self, lease: Lease, num_tokens: int) -> list[int]:
        """Return the length of the checkpoint, and the present length if a page ends there. The running state belongs
        to exactly the present length."""
        points = [num_tokens] if not num_tokens % self.tree.page_size else []
        if lease.mamba_checkpoint_idx is not None and lease.checkpoint_len <= num_tokens:
            points = [lease.checkpoint_len, *points]
        return [point for point in points if point > lease.tree_len]

    def needed_to_hand_over(self, lease: Lease, length: int) -> int:
        return 0 if self._has_checkpoint(lease, length) else 1

    def hand_over(self, lease: Lease, length: int) -> torch.Tensor:
        if self._has_checkpoint(lease, length):
            assert lease.mamba_checkpoint_idx is not None
            state, lease.mamba_checkpoint_idx = lease.mamba_checkpoint_idx.reshape(1), None
            return state
        with self._copying(lease):
            copy = self._pool.fork_from(_running(lease))
        assert copy is not None, "made available before"
        return copy

    def track(self, leases: Sequence[Lease], make_available: Callable[[int], bool]) -> int:
        """Make checkpoints of running states at multiples of `mamba_track_interval`: the running state becomes the
        checkpoint, and the request continues with a copy. Returns the number of requests for which no state was
        available."""
        due, ready = [lease for lease in leases if not lease.length % self.config.mamba_track_interval], list[Lease]()
        for lease in due:
            if lease.mamba_checkpoint_idx is None:
                if not make_available(1):
                    continue
                state = self._pool.alloc(1)
                assert state is not None, "made available before"
                lease.mamba_checkpoint_idx, lease.checkpoint_len = state[0], 0
            ready.append(lease)
        if ready:
            with self._copying(*ready):
                self._table.checkpoint(ready)
        for lease in ready:
            lease.checkpoint_len = lease.length
        return len(due) - len(ready)

    def release(self, lease: Lease) -> None:
        """Free the lease's states. If a load may still write to a state, the states are freed when the load has
        ended."""
        states, load = lease.take_states(), lease.state_load
        if load is not None and not load.done():
            load.orphan_states.setdefault(MAMBA, []).extend(states)
        elif states:
            self.free(torch.cat(states))

    def device_violations(self, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
        held = self.tree.values(MAMBA)
        of_leases = [state for lease in leases for state in (lease.mamba_pool_idx, lease.mamba_checkpoint_idx)]
        owned = [state.reshape(1) for state in of_leases if state is not None]
        owned += [state for load in loads for state in load.orphan_states.get(MAMBA, ())]
        owned += [state for value in self.evicting.values() for state in value.split(1)]
        return account_violations("states", (self.available(), len(held), len(owned)), self._pool.size, [held, *owned])

    @staticmethod
    def _has_checkpoint(lease: Lease, length: int) -> bool:
        return lease.mamba_checkpoint_idx is not None and lease.checkpoint_len == length

    def _copying(self, *leases: Lease) -> AbstractContextManager[None]:
        """Return a context for copies on the device, which wait only for the loads of the states of `leases`."""
        return self.counter.consuming({load_id for lease in leases for load_id in lease.load_ids_of(MAMBA)})


def _running(lease: Lease) -> torch.Tensor:
    """Return the running state `[1]`, which the forward pass advances."""
    assert lease.mamba_pool_idx is not None
    return lease.mamba_pool_idx.reshape(1)
