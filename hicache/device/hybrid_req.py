"""The request table of hybrid models: each request has a row and a recurrent state.

    row r of req_to_token           slots of the request's tokens
    mapping[r]                      its running state; 0, the state for padding, if the row is free
    request.mamba_pool_idx          the running state
    request.mamba_checkpoint_idx    with the extra buffer: a second state, the last checkpoint

With the extra buffer, a request has two states, which alternate. `checkpoint` makes the running state the new
checkpoint and copies its bytes to the other state, which becomes the running state. So an old checkpoint is overwritten
only after a newer checkpoint exists. The table owns the mapping and the state pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hicache.device.mamba import Mamba2CacheParams, MambaPool, MambaState
from hicache.device.req_to_token import ReqToTokenPool, TableRequest
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError


class HybridRequest(TableRequest, Protocol):
    """Attributes of a request that the table uses: its row and its states (0-dim tensors on the pool's device).

    `mamba_checkpoint_idx` is used only if the table has the extra buffer.
    """

    mamba_pool_idx: torch.Tensor | None
    mamba_checkpoint_idx: torch.Tensor | None


class HybridReqToTokenPool(ReqToTokenPool):
    """A `ReqToTokenPool` with a `MambaPool` of `mamba_size` states. Scheduler thread only.

    `alloc` allocates a row and zeroed states for each request, or nothing if it cannot serve all requests. A request
    keeps a row and states that it already has. If called with a number, `alloc` allocates rows without states; these
    rows are mapped to state 0 (padding). Rows and states are freed separately: `free` frees the row, and
    `free_mamba_cache` frees the states. States that the request has handed over, by setting its attribute to None, are
    not freed. Only callers with SGLang's interface use `free_mamba_cache` and `take_checkpoint`.
    """

    def __init__(
        self,
        size: int,
        mamba_size: int,
        max_context_len: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        cache_params: Mamba2CacheParams,
        mamba_spec_state_size: int = 0,
        enable_mamba_extra_buffer: bool = False,
        speculative_num_draft_tokens: int | None = None,
    ) -> None:
        super().__init__(size, max_context_len, device, enable_memory_saver)
        self.mamba_pool = MambaPool(
            mamba_size, cache_params, device, mamba_spec_state_size, speculative_num_draft_tokens, enable_memory_saver
        )
        self.enable_mamba_extra_buffer = enable_mamba_extra_buffer
        self.req_index_to_mamba_index_mapping = torch.zeros(size + 1, dtype=torch.int64, device=self.device)
        self._mapping_on_host = self.req_index_to_mamba_index_mapping.numpy() if self.device.type == "cpu" else None

    # The parameter type is narrower than in the base class, because a request of a hybrid model has attributes for its
    # states.
    def _take_for(self, requests: Sequence[HybridRequest]) -> list[int] | None:  # type: ignore[override]
        if not requests:
            return []
        named, requests = requests, list({id(request): request for request in requests}.values())
        running = [request for request in requests if request.mamba_pool_idx is None]
        second = [r for r in requests if self.enable_mamba_extra_buffer and r.mamba_checkpoint_idx is None]
        num_states = len(running) + len(second)
        if num_states > self.mamba_pool.available_size():
            return None
        rows = super()._take_for(requests)
        if rows is None:
            return None
        states = self.mamba_pool.alloc(num_states)
        assert states is not None, "counted above"
        ids = states.unbind(0)
        for request, state in zip(running, ids[: len(running)], strict=True):
            request.mamba_pool_idx = state
        for request, state in zip(second, ids[len(running) :], strict=True):
            request.mamba_checkpoint_idx = state
        self._map(rows, _stack([request.mamba_pool_idx for request in requests]))
        row_of = {id(request): row for request, row in zip(requests, rows, strict=True)}
        return [row_of[id(request)] for request in named]

    def free_mamba_cache(self, request: HybridRequest) -> None:
        """Free the request's states and set its attributes to None. Raises DoubleFree if the request has no states."""
        held = [request.mamba_pool_idx]
        if self.enable_mamba_extra_buffer:
            held.append(request.mamba_checkpoint_idx)
        states = [state for state in held if state is not None]
        if not states:
            raise DoubleFree("the request has no state; it was freed or handed over before, or never had one")
        self.mamba_pool.free(_stack(states))
        request.mamba_pool_idx = None
        if self.enable_mamba_extra_buffer:
            request.mamba_checkpoint_idx = None
        if request.req_pool_idx is not None:
            self._map([request.req_pool_idx], states[0].new_zeros(1))

    def checkpoint(self, requests: Sequence[HybridRequest]) -> None:
        """Make each request's running state its checkpoint. Copy this state to the request's second state, which
        becomes the running state. Does not wait for the device and allocates nothing.

        Each request must have a row and two states, and may occur only once in `requests`. Raises ConfigError without
        the extra buffer.
        """
        self._need_extra_buffer()
        rows = [r.req_pool_idx for r in requests if r.req_pool_idx is not None]
        if len(rows) != len(requests):
            raise ShapeError(f"{len(requests) - len(rows)} of {len(requests)} requests have no row; alloc them first")
        if not rows:
            return
        running = _stack([request.mamba_pool_idx for request in requests])
        other = _stack([request.mamba_checkpoint_idx for request in requests])
        self.mamba_pool.copy_from(running, other)
        for request in requests:
            request.mamba_pool_idx, request.mamba_checkpoint_idx = request.mamba_checkpoint_idx, request.mamba_pool_idx
        self._map(rows, other)

    def take_checkpoint(self, request: HybridRequest) -> torch.Tensor | None:
        """Transfer the state `[1]` of the last checkpoint to the caller and give the request another state. Returns
        None if no state is free."""
        self._need_extra_buffer()
        taken = _stack([request.mamba_checkpoint_idx])
        fresh = self.mamba_pool.alloc(1)
        if fresh is None:
            return None
        request.mamba_checkpoint_idx = fresh[0]
        return taken

    def get_mamba_indices(self, req_indices: torch.Tensor | int) -> torch.Tensor:
        """Return the ids of the running states of table rows, int64 in the shape of `req_indices`. For a single number,
        the result is a 0-dim tensor."""
        return self.req_index_to_mamba_index_mapping[req_indices]

    def mamba2_layer_cache(self, layer_id: int) -> MambaState:
        """Return views of the states of one Mamba layer, given its global id, after waiting until the layer is
        loaded."""
        return self.mamba_pool.mamba2_layer_cache(layer_id)

    def clear(self) -> None:
        """Free all rows and all states."""
        super().clear()
        self.mamba_pool.clear()
        self.req_index_to_mamba_index_mapping.zero_()

    def check(self) -> None:
        """Raise InvariantError with all violations of table, states and mapping."""
        violations = []
        for check in (super().check, self.mamba_pool.check):
            try:
                check()
            except InvariantError as error:
                violations.extend(error.violations)
        mapping = self.req_index_to_mamba_index_mapping.tolist()
        stale = [row for row, state in enumerate(mapping) if state and not self._holds(row)]
        if stale:
            violations.append(f"free rows {stale[:8]} are mapped to states {[mapping[row] for row in stale[:8]]}")
        states = [state for state in mapping if state]
        if len(set(states)) != len(states):
            violations.append("two rows are mapped to one state")
        if violations:
            raise InvariantError("HybridReqToTokenPool", violations)

    def _free(self, rows: list[int]) -> None:
        super()._free(rows)
        if rows:
            self._map(rows, torch.zeros(len(rows), dtype=torch.int64, device=self.device))

    def _map(self, rows: list[int], states: torch.Tensor) -> None:
        if self._mapping_on_host is not None:
            self._mapping_on_host[rows] = states.numpy()
            return
        index = torch.tensor(rows, dtype=torch.int64)
        if self.device.type == "cuda":
            # The tensor is pinned, because a copy from pageable memory would make the host wait.
            index = index.pin_memory().to(self.device, non_blocking=True)
        self.req_index_to_mamba_index_mapping[index] = states

    def _need_extra_buffer(self) -> None:
        if not self.enable_mamba_extra_buffer:
            raise ConfigError("checkpoints need a second state per request; set enable_mamba_extra_buffer=True")


def _stack(states: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Stack ids of states, given as 0-dim tensors, to one tensor `[n]`."""
    held = [state.reshape(()) for state in states if state is not None]
    if len(held) != len(states):
        raise ShapeError(f"{len(states) - len(held)} of {len(states)} requests have no state; alloc them first")
    return torch.stack(held)
