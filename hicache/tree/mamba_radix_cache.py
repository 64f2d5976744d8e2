"""The prefix cache of models with recurrent states beside full attention.

A state belongs to exactly the tokens that it has consumed: it is stored at the end of a node that ends there, and a
match ends at the deepest node that has one. It is copied for each request that goes on from it, for the request then
writes it. So a prompt can hit only where a state was left, and where that is the caller decides:

    cache_unfinished_req   a copy of the running state, at the end of `fill_ids`: every chunk's boundary is one
    cache_finished_req     the running state itself, at the end of what was computed
    both, extra buffer     the checkpoint itself, at `mamba_last_track_seqlen`

The same prompt again asks for all but its last token, so the state at its end is too deep. For it to hit, a runner ends
a forward at `checkpoint_len(len(prompt), mamba_cache_chunk_size, page_size)` and there either calls
`cache_unfinished_req(req, chunked=True)`, or, with the extra buffer, `table.checkpoint([req])` and sets
`req.mamba_last_track_seqlen`; then it goes on to the prompt's end. While decoding it does the same every
`mamba_track_interval` tokens: the two states take turns, and the last checkpoint is stored when the request ends. Where
`mamba_branching_seqlen` of a match says so, one more stop there saves the next request the same work.

With pages of more than a token, a state at another length than whole pages cannot be stored; it is freed, never stored
under a shorter key. May import what `request_cache` may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hicache.errors import ConfigError, InvariantError, OutOfStates, ShapeError
from hicache.tree.components import MambaRules, Rules
from hicache.tree.key import TokenSource
from hicache.tree.node import Component, Place, Tier, TreeNode
from hicache.tree.params import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from hicache.tree.request_cache import BasePrefixCache
from hicache.tree.views import CachedRequest, CheckpointRequest, StateRequest, StateTable


def checkpoint_len(prompt_len: int, mamba_cache_chunk_size: int, page_size: int = 1) -> int:
    """Where to leave a state so that the same prompt hits: the last multiple of both sizes strictly below its end.

    0: nowhere.
    """
    unit = math.lcm(mamba_cache_chunk_size, page_size)
    return max(0, prompt_len - 1) // unit * unit


class MambaRadixCache(BasePrefixCache):
    """Prefixes, their slots, and states at some of their ends. Called on the stream that uses the states.

    `full_*` sizes are in tokens, `mamba_*` sizes in states. A lock keeps the prefix and the state at its end.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """ConfigError without states to keep, and for bigrams, whose keys end a token before the state does."""
        table = params.req_to_token_pool
        if not isinstance(table, StateTable):
            raise ConfigError(f"{type(table).__name__} has no states; use HybridReqToTokenPool")
        if params.enable_mamba_extra_buffer and not table.enable_mamba_extra_buffer:
            raise ConfigError("enable_mamba_extra_buffer=True, but the request table was built without it")
        if params.is_eagle:
            raise ConfigError("is_eagle=True: a state has consumed a token more than its key of bigrams; set it False")
        super().__init__(params)
        self.enable_mamba_extra_buffer = params.enable_mamba_extra_buffer
        self.mamba_cache_chunk_size = params.mamba_cache_chunk_size
        self._table, self._pool = table, table.mamba_pool
        self._checkpoint_unit = math.lcm(params.mamba_cache_chunk_size, params.page_size)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """As the base's, up to the deepest state.

        With `cow_mamba`, `req` gets a state of its own that has consumed the match: a copy, a cleared one where it has
        a state and nothing matched, and none where it has none. Raises OutOfStates, which leaves `req` as it is.
        """
        match, node = self._match(params.key)
        if params.cow_mamba and params.req is not None:
            self._copy_state(node, params.req)
        branching_len = match.device_len // self._checkpoint_unit * self._checkpoint_unit
        missing = branching_len if branching_len > node.depth_tokens else None
        return self._result(node)._replace(mamba_branching_seqlen=missing)

    def insert(self, params: InsertParams) -> InsertResult:
        """As the base's, with the state that has consumed the key: the tree's from then on, unless it exists.

        Of what was offered for `prefix_len` tokens the caller stays the owner. ShapeError without a state, and for a
        key that is no whole pages.
        """
        if self.disable:
            return InsertResult(0)
        if params.mamba_value is None or params.mamba_value.numel() != 1:
            raise ShapeError("no prefix can be matched without a state at its end; give one, [1], as mamba_value")
        if not len(params.key) or len(params.key) % self.page_size:
            raise ShapeError(
                f"a state that has consumed {len(params.key)} tokens cannot be stored: they are no whole pages of "
                f"{self.page_size}"
            )
        inserted, _ = self._insert(params)
        gained = self._tree.attach(inserted.node, Place.MAMBA_DEVICE, params.mamba_value.to(self.device))
        prefix_len = sum(duplicate.end - duplicate.start for duplicate in inserted.duplicates)
        return InsertResult(prefix_len, mamba_exist=not gained)

    def mamba_evictable_size(self) -> int:
        return self._tree.evictable(Place.MAMBA_DEVICE)

    def mamba_protected_size(self) -> int:
        return self._tree.protected(Place.MAMBA_DEVICE)

    def total_size(self) -> tuple[int, int]:
        """Tokens and states held."""
        return self._held(Component.FULL), self._held(Component.MAMBA)

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """All states that the tree holds, int64, in no order."""
        return self._flat(Place.MAMBA_DEVICE)

    def supports_mamba(self) -> bool:
        return True

    def available_and_evictable_str(self) -> str:
        states = f"{self._pool.available_size()} states available, {self.mamba_evictable_size()} evictable"
        return f"{super().available_and_evictable_str()}; {states}"

    def _rules(self) -> Sequence[Rules]:
        return (MambaRules(),)

    def _hand_over(self, req: CachedRequest, tokens: TokenSource, num_tokens: int, chunked: bool) -> None:
        assert isinstance(req, StateRequest) and req.mamba_pool_idx is not None, "the request has no state"
        running = req.mamba_pool_idx
        checkpoint_at = self._checkpoint_of(req, num_tokens)
        if checkpoint_at and self._room_for_state():
            self._store(req, tokens, checkpoint_at, chunked, lambda: self._table.take_checkpoint(req))
        if self._may_store(req, num_tokens) and self._room_for_state():
            self._store(req, tokens, num_tokens, chunked, lambda: self._pool.fork_from(running.reshape(1)))

    def _hand_over_last(self, req: CachedRequest, tokens: TokenSource, num_tokens: int) -> None:
        checkpoint_at = self._checkpoint_of(req, num_tokens)
        if checkpoint_at:
            self._store(req, tokens, checkpoint_at, False, lambda: _donated_checkpoint(req))
        # The running state has consumed what is committed; where fewer tokens are known, it is of no known prefix.
        if num_tokens == req.kv_committed_len and self._may_store(req, num_tokens):
            self._store(req, tokens, num_tokens, False, lambda: _donated_state(req))

    def _end(self, req: CachedRequest) -> None:
        held = [req.mamba_pool_idx] if isinstance(req, StateRequest) else []
        if self._table.enable_mamba_extra_buffer and isinstance(req, CheckpointRequest):
            held.append(req.mamba_checkpoint_idx)
        if any(state is not None for state in held):
            self._table.free_mamba_cache(req)

    def _drop(self, victim: TreeNode, place: Place) -> None:
        released = self._tree.drop(victim, place)
        self._slots.take(released)
        for gone in released:
            if gone.place is Place.MAMBA_DEVICE:
                self._pool.free(gone.value)

    def _own_violations(self) -> list[str]:
        found: list[str] = []
        try:
            self._pool.check()
        except InvariantError as error:
            found.extend(error.violations)
        held = self.all_mamba_values_flatten().cpu()
        if held.unique().numel() != held.numel():
            found.append("two nodes hold one state")
        free = held[torch.isin(held, self._pool.free_slots.cpu())]
        if free.numel():
            found.append(f"states {free[:8].tolist()} of the tree are free")
        return found

    def _totals(self) -> str:
        full, states = self.total_size()
        return f"#full_tokens: {full}, #mamba_num: {states}"

    def _copy_state(self, node: TreeNode, req: StateRequest) -> None:
        """Make the request's state one that has consumed the tokens up to `node`."""
        own = req.mamba_pool_idx
        if node.is_root:
            if own is not None:
                for tensor in (*self._pool.mamba_cache.conv, self._pool.mamba_cache.temporal):
                    tensor.index_fill_(1, own.reshape(1), 0)
            return
        state = node.held(Place.MAMBA_DEVICE)
        if own is not None:
            self._pool.copy_from(state, own.reshape(1))
            return
        self._tree.lock(node, Tier.DEVICE)
        try:
            copy = self._pool.fork_from(state) if self._room_for_state() else None
        finally:
            self._tree.unlock(node, Tier.DEVICE)
        if copy is None:
            raise OutOfStates(1, self._pool.available_size())
        req.mamba_pool_idx = copy[0]

    def _room_for_state(self) -> bool:
        """Whether a state is free, after one was evicted where that was needed."""
        return self._pool.available_size() > 0 or self.evict(EvictParams(0, mamba_num=1)).mamba_num_evicted > 0

    def _checkpoint_of(self, req: CachedRequest, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens the checkpoint has consumed; 0 where there is none to store."""
        if not self.enable_mamba_extra_buffer or not isinstance(req, CheckpointRequest):
            return 0
        at = req.mamba_last_track_seqlen or 0
        return at if at <= num_tokens and req.mamba_checkpoint_idx is not None and self._may_store(req, at) else 0

    def _may_store(self, req: CachedRequest, length: int) -> bool:
        """Whether a state that has consumed `length` tokens can be stored behind what the tree has of the request."""
        return length > req.last_node.depth_tokens and length % self.page_size == 0

    def _store(
        self,
        req: CachedRequest,
        tokens: TokenSource,
        length: int,
        chunked: bool,
        take: Callable[[], torch.Tensor | None],
    ) -> None:
        """Give the first `length` tokens to the tree, and the state that `take` makes the tree's, unless it has one."""
        self._advance(req, tokens, length, chunked)
        node = req.last_node
        assert node.depth_tokens == length, "a state may be stored under exactly what it has consumed"
        if not node.holds(Place.MAMBA_DEVICE):
            state = take()
            assert state is not None, "room was made before"
            self._tree.attach(node, Place.MAMBA_DEVICE, state)
        if isinstance(req, CheckpointRequest) and (req.mamba_last_track_seqlen or 0) <= length:
            req.mamba_last_track_seqlen = None  # stored, or of no more use


def _donated_state(req: CachedRequest) -> torch.Tensor:
    """The running state `[1]`, which the request no longer refers to."""
    assert isinstance(req, StateRequest) and req.mamba_pool_idx is not None, "the request has no state"
    state, req.mamba_pool_idx = req.mamba_pool_idx, None
    return state.reshape(1)


def _donated_checkpoint(req: CachedRequest) -> torch.Tensor:
    """The state of the checkpoint `[1]`, which the request no longer refers to."""
    assert isinstance(req, CheckpointRequest) and req.mamba_checkpoint_idx is not None, "the request has no checkpoint"
    state, req.mamba_checkpoint_idx = req.mamba_checkpoint_idx, None
    return state.reshape(1)
