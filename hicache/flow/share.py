"""Sharing: what a request computed becomes the tree's, and what it held is given back.

The slots of whole pages go to the tree in chunks; where another request was first, its slots are used and ours freed.
A recurrent state goes with exactly the tokens that it has consumed: a copy of the running one where a page ends, and
the last checkpoint, which needs no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from hicache.errors import InvalidTokens, TokensMismatch, TransferError
from hicache.flow.base import Lease, Load, Parts
from hicache.tree.key import TokenRun, Tokens, bytes_of
from hicache.tree.node import Place, Tier, TreeNode, own


class Loads(Protocol):
    """What sharing asks of the flow that restores."""

    def let_go(self, load: Load) -> None: ...


class Sharing:
    """Commits and ends leases. Owned by the scheduler thread.

    `free_states(n)` makes states free; `consider(node)` is told about every path that grew, `used(node)` about those of
    requests that end.
    """

    def __init__(
        self,
        parts: Parts,
        loads: Loads,
        free_states: Callable[[int], bool],
        consider: Callable[[TreeNode], None],
        used: Callable[[TreeNode], None],
    ) -> None:
        self._parts, self._loads, self._free_states = parts, loads, free_states
        self._consider, self._used = consider, used
        count = parts.metrics.counter
        self._skipped_states = count("share.skipped_states", "states not kept because every other was in use")

    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """See `CacheEngine.next_stop`."""
        if self._parts.states is None:
            return end
        # States are kept where a page ends and the model's kernels can hand one out.
        step = math.lcm(self._parts.tree.page_size, self._parts.config.mamba_chunk_tokens)
        checkpoint = (lease.prompt_len - 1) // step * step
        branching = lease.branching_len // step * step
        return min((at for at in (checkpoint, branching) if start < at < end), default=end)

    def commit(self, lease: Lease, tokens: Tokens) -> None:
        """See `CacheEngine.commit`."""
        _require_sequence(lease, tokens)
        if len(tokens) > lease.tree_len:
            _require_loaded(lease)
        num_tokens, page, states = len(tokens), self._parts.tree.page_size, self._parts.states
        if states is None:
            self._share(lease, tokens, num_tokens // page * page, None)
            return
        if lease.tree_len < lease.checkpoint_len <= num_tokens and lease.mamba_checkpoint_idx is not None:
            checkpoint, lease.mamba_checkpoint_idx = lease.mamba_checkpoint_idx.reshape(1), None
            self._share(lease, tokens, lease.checkpoint_len, checkpoint)
        # The running state has consumed exactly these tokens; it can be kept only where a page ends too.
        if num_tokens % page or num_tokens <= lease.tree_len:
            return
        assert lease.mamba_pool_idx is not None
        if self._free_states(1):
            with states.copying(lease):
                state = states.pool.fork_from(lease.mamba_pool_idx)
            self._share(lease, tokens, num_tokens, state)
        else:
            self._skipped_states.value += 1

    def track(self, leases: list[Lease]) -> None:
        """See `CacheEngine.track`."""
        states, interval = self._parts.states, self._parts.config.mamba_track_interval
        if states is None or not (due := [lease for lease in leases if not lease.length % interval]):
            return
        for lease in due:
            if lease.mamba_checkpoint_idx is None and self._free_states(1):
                spare = states.pool.alloc(1)
                assert spare is not None
                lease.mamba_checkpoint_idx = spare[0]
        able = [lease for lease in due if lease.mamba_checkpoint_idx is not None]
        self._skipped_states.value += len(due) - len(able)
        with states.copying(*able):
            states.table.checkpoint(able)
        for lease in able:
            lease.checkpoint_len = lease.length

    def release(self, lease: Lease) -> None:
        """See `CacheEngine.release`."""
        lease.released = True
        parts = self._parts
        if lease.held_len > lease.tree_len:
            parts.allocator.free_run(lease.held(lease.tree_len, lease.held_len))
        parts.tree.unlock(lease.node, Tier.DEVICE)
        parts.tree.touch(lease.node, Tier.HOST)
        self._used(lease.node)
        self._free_own_states(lease)
        parts.req_to_token.free(lease)
        for load in lease.loads:
            self._loads.let_go(load)

    def _free_own_states(self, lease: Lease) -> None:
        """Free the lease's states; where a load may still write to one, when that has landed."""
        states, load = lease.take_states(), lease.state_load
        if load is not None and not load.op.done():
            load.orphan_states += states
        elif states:
            assert self._parts.states is not None
            self._parts.states.pool.free(torch.cat(states))

    def _share(self, lease: Lease, tokens: Tokens, end: int, state: torch.Tensor | None) -> None:
        """Hand positions [tree_len, end) to the tree, with the state after them, which the tree then owns."""
        parts, start = self._parts, lease.tree_len
        if end <= start:
            return
        slots = own(lease.held(start, end))  # duplicates are written over below
        window_from = None if parts.windows is None else 0
        result = parts.tree.insert(lease.node, tokens[start:end], slots, Tier.DEVICE, lease.namespace, window_from)
        end, offered = start + result.accepted_len, end  # what another request is loading can be shared once it is here
        for twice in result.duplicates:  # another request was first: use its slots, give ours back
            lease.write(start + twice.start, twice.value)
            ours = slots[twice.start : twice.end]
            if twice.adopts_window and parts.windows is not None:
                parts.windows.allocator.move_window(ours, twice.value)
            parts.allocator.free_run(ours)
        if state is not None and (end < offered or not parts.tree.attach(result.node, Place.MAMBA_DEVICE, state)):
            assert parts.states is not None
            parts.states.pool.free(state)
        if parts.windows is not None:
            parts.windows.narrow(parts.tree, result.node)
        parts.tree.move_lock(lease.node, result.node, Tier.DEVICE)
        lease.node, lease.tree_len = result.node, end
        if end > len(lease.tokens):
            lease.tokens = TokenRun(tokens[:end])
        parts.tree.prioritise(result.node, lease.priority)
        self._consider(result.node)


def _require_loaded(lease: Lease) -> None:
    """TransferError where the prefix of the lease failed to load: what was computed on it must not be shared."""
    for load in lease.loads:
        if load.error is None:
            load.op.wait_outcome()
        if load.error is not None:
            raise TransferError(f"{lease.request_id}: its prefix could not be loaded: {load.error}")


def _require_sequence(lease: Lease, tokens: Tokens) -> None:
    """InvalidTokens where a token has no slot yet, TokensMismatch where one is not the lease's."""
    if len(tokens) > lease.length:
        raise InvalidTokens(
            f"{lease.request_id}: {len(tokens)} tokens were committed, the lease has slots for {lease.length}; "
            f"extend it before the forward"
        )
    at = lease.tokens.common_len(tokens, bytes_of(tokens), 0)
    if at < min(len(tokens), len(lease.tokens)):
        raise TokensMismatch(lease.request_id, at, int(tokens[at]), int(lease.tokens.tokens[at]))
