"""The prefix cache of models with full attention and recurrent states.

A state belongs to exactly the tokens that it has consumed. It is stored at the node that ends with the last of these
tokens, and a match ends at the deepest node that has a state. A request that continues from a state gets a copy,
because computing overwrites a state. A prompt can only hit at lengths at which the caller has stored states:

    cache_unfinished_req   stores a copy of the running state at the end of `fill_ids`: every chunk ends with a state
    cache_finished_req     stores the running state itself, at the end of the computed tokens
    both, extra buffer     store the checkpoint itself, at `mamba_last_track_seqlen`

A request matches all but the last token of its prompt, so a repeated prompt cannot use the state at the prompt's end.
For a repeated prompt to hit, the runner ends a forward pass at `checkpoint_len(len(prompt), mamba_cache_chunk_size,
page_size)`. After this pass it calls `cache_unfinished_req(req, chunked=True)`. With the extra buffer it calls
`table.checkpoint([req])` instead and sets `req.mamba_last_track_seqlen`. While decoding, the runner repeats this every
`mamba_track_interval` tokens. With the extra buffer, the two states of a request take turns as running state and
checkpoint. The last checkpoint is stored when the request ends. If a match returns `mamba_branching_seqlen`, the runner
can end a pass at this length; the stored state gives the next request a longer match.

With pages of more than one token, a state is stored only at the end of a full page. A state within a page is freed, and
never stored under a shorter key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.errors import ConfigError, InvariantError, OutOfStates, ShapeError
from hicache.pages.components import MambaComponent, TreeComponent
from hicache.pages.node import Released
from hicache.pages.node import TreeNode as Node
from hicache.prefix_cache.base import BasePrefixCache
from hicache.prefix_cache.params import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from hicache.prefix_cache.protocols import CachedRequest
from hicache.prefix_cache.radix_key import TokenSource
from hicache.prefix_cache.slots import free_states
from hicache.tiers import FULL, MAMBA, joined


def checkpoint_len(prompt_len: int, mamba_cache_chunk_size: int, page_size: int = 1) -> int:
    """Return the length, in tokens, at which to store a state so that the same prompt hits later. Returns 0 if there is
    no such length.

    The length is the largest common multiple of both sizes that is below `prompt_len`.
    """
    unit = math.lcm(mamba_cache_chunk_size, page_size)
    return max(0, prompt_len - 1) // unit * unit


class MambaRadixCache(BasePrefixCache):
    """Prefixes with their slots, and recurrent states at some nodes. Call its methods on the CUDA stream that uses the
    states.

    `full_*` sizes are in tokens, `mamba_*` sizes in states. A lock covers the prefix and the state at its end.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """Raise ConfigError for a table without states. Also raise it for bigrams: a key of bigrams has one element
        fewer than the number of tokens that the state has consumed."""
        table = params.req_to_token_pool
        if not isinstance(table, HybridReqToTokenPool):
            raise ConfigError(f"{type(table).__name__} has no states; use HybridReqToTokenPool")
        if params.enable_mamba_extra_buffer and not table.enable_mamba_extra_buffer:
            raise ConfigError(
                "enable_mamba_extra_buffer=True, but the request table was built without it; set both to the same value"
            )
        if params.is_eagle:
            raise ConfigError(
                "is_eagle=True does not work with recurrent states, which have consumed one token more than a key of "
                "bigrams; set it to False"
            )
        super().__init__(params)
        self.enable_mamba_extra_buffer = params.enable_mamba_extra_buffer
        self.mamba_cache_chunk_size = params.mamba_cache_chunk_size
        self._table = table
        self._pool = table.mamba_pool
        self._checkpoint_unit = math.lcm(params.mamba_cache_chunk_size, params.page_size)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the longest prefix that ends with a state.

        With `cow_mamba`, `req` gets a copy of that state. If no prefix matched, a state that `req` already has is
        cleared. Raises OutOfStates, and leaves `req` unchanged, if no state is free or evictable.
        """
        match, node = self._match(params.key)
        if params.cow_mamba and params.req is not None:
            self._copy_state(node, params.req)
        branching_len = match.full_len // self._checkpoint_unit * self._checkpoint_unit
        missing = branching_len if branching_len > node.depth_tokens else None
        return self._result(node)._replace(mamba_branching_seqlen=missing)

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert a key with the state that has consumed the key's tokens. The tree then owns this state, unless it
        already had a state at the key's end.

        The caller keeps the slots offered for the first `prefix_len` tokens. Raises ShapeError if no state is given, or
        if the key does not consist of full pages.
        """
        if self.disable:
            return InsertResult(0)
        if params.mamba_value is None or params.mamba_value.numel() != 1:
            raise ShapeError("a prefix without a state at its end cannot be matched; give a state [1] as mamba_value")
        if not len(params.key) or len(params.key) % self.page_size:
            raise ShapeError(
                f"a state that has consumed {len(params.key)} tokens cannot be stored; give a multiple of "
                f"page_size={self.page_size} tokens"
            )
        inserted, _ = self._insert(params, end_values={MAMBA: params.mamba_value.to(self.device)})
        return InsertResult(len(inserted.existing), mamba_exist=MAMBA not in inserted.attached)

    def evict_mamba(self, mamba_num: int) -> int:
        """Evict up to `mamba_num` unlocked states, the least recently used first. Returns the number of evicted
        states."""
        return self.evict(EvictParams(0, mamba_num=mamba_num)).mamba_num_evicted

    def mamba_evictable_size(self) -> int:
        return self._tree.evictable(MAMBA)

    def mamba_protected_size(self) -> int:
        return self._tree.protected(MAMBA)

    def total_size(self) -> tuple[int, int]:
        """Return the numbers of tokens and of states in the tree."""
        return self._size_of(FULL), self._size_of(MAMBA)

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """Return all states in the tree, int64 `[states]`, unordered."""
        return self._flat(MAMBA)

    def supports_mamba(self) -> bool:
        return True

    def available_and_evictable_str(self) -> str:
        states = f"{self._pool.available_size()} states available, {self.mamba_evictable_size()} evictable"
        return f"{super().available_and_evictable_str()}; {states}"

    def _new_components(self) -> Sequence[TreeComponent]:
        return (MambaComponent(),)

    def _insert_unfinished(self, req: CachedRequest, tokens: TokenSource, num_tokens: int, chunked: bool) -> None:
        assert req.mamba_pool_idx is not None, "the request has no state"
        running = req.mamba_pool_idx
        checkpoint_at = self._checkpoint_of(req, num_tokens)
        if checkpoint_at and self._has_free_state():
            self._store(req, tokens, checkpoint_at, chunked, lambda: self._table.take_checkpoint(req))
        if self._may_store(req, num_tokens) and self._has_free_state():
            self._store(req, tokens, num_tokens, chunked, lambda: self._pool.fork_from(running.reshape(1)))

    def _insert_finished(self, req: CachedRequest, tokens: TokenSource, num_tokens: int) -> None:
        checkpoint_at = self._checkpoint_of(req, num_tokens)
        if checkpoint_at:
            self._store(req, tokens, checkpoint_at, False, lambda: _checkpoint_to_hand_over(req))
        # The running state has consumed `kv_committed_len` tokens. If fewer token ids are known, the state has no key.
        if num_tokens == req.kv_committed_len and self._may_store(req, num_tokens):
            self._store(req, tokens, num_tokens, False, lambda: _state_to_hand_over(req))

    def _free_states_of(self, req: CachedRequest) -> None:
        free_states(self._table, req)

    def _free(self, released: list[Released]) -> None:
        super()._free(released)
        states = [each.value for each in released if each.component == MAMBA]
        if states:
            self._pool.free(joined(states))

    def _own_violations(self) -> list[str]:
        found: list[str] = []
        try:
            self._pool.check()
        except InvariantError as error:
            found.extend(error.violations)
        held = self.all_mamba_values_flatten().cpu()
        if held.unique().numel() != held.numel():
            found.append("two nodes have the same state")
        free = held[torch.isin(held, self._pool.free_slots.cpu())]
        if free.numel():
            found.append(f"states {free[:8].tolist()} of the tree are free")
        return found

    def _totals(self) -> str:
        full, states = self.total_size()
        return f"#full_tokens: {full}, #mamba_num: {states}"

    def _copy_state(self, node: Node, req: CachedRequest) -> None:
        """Copy the state at `node` to the request; at the root, clear the request's state."""
        own = req.mamba_pool_idx
        if node.is_root:
            if own is not None:
                for tensor in (*self._pool.mamba_cache.conv, self._pool.mamba_cache.temporal):
                    tensor.index_fill_(1, own.reshape(1), 0)
            return
        state = self._tree.pages[MAMBA].value(node.rows[-1:])
        if own is not None:
            self._pool.copy_from(state, own.reshape(1))
            return
        self._tree.lock(node)
        try:
            copy = self._pool.fork_from(state) if self._has_free_state() else None
        finally:
            self._tree.unlock(node)
        if copy is None:
            raise OutOfStates(1, self._pool.available_size())
        req.mamba_pool_idx = copy[0]

    def _has_free_state(self) -> bool:
        """Return whether a state is free, after evicting a state if none was free."""
        return self._pool.available_size() > 0 or self.evict_mamba(1) > 0

    def _checkpoint_of(self, req: CachedRequest, num_tokens: int) -> int:
        """Return the number of tokens that the checkpoint has consumed; 0 if there is no checkpoint to store."""
        if not self.enable_mamba_extra_buffer:
            return 0
        length = req.mamba_last_track_seqlen or 0
        stored = length <= num_tokens and req.mamba_checkpoint_idx is not None and self._may_store(req, length)
        return length if stored else 0

    def _may_store(self, req: CachedRequest, length: int) -> bool:
        """Return whether a state after `length` tokens can be stored: `length` is the end of a page, and is beyond the
        request's prefix in the tree."""
        return length > req.last_node.depth_tokens and length % self.page_size == 0

    def _store(
        self,
        req: CachedRequest,
        tokens: TokenSource,
        length: int,
        chunked: bool,
        take: Callable[[], torch.Tensor | None],
    ) -> None:
        """Insert the first `length` tokens. If the tree has no state at their end, also store the state that `take`
        returns."""
        self._insert_pages(req, tokens, length, chunked)
        node = req.last_node
        assert node.depth_tokens == length, "a state is stored exactly at the end of the tokens that it has consumed"
        if req.last_node.mamba_value is None:
            state = take()
            assert state is not None, "the caller has checked that a state is free"
            self._tree.attach(node, MAMBA, state)
        if self.enable_mamba_extra_buffer and (req.mamba_last_track_seqlen or 0) <= length:
            req.mamba_last_track_seqlen = None  # stored now, or not needed since a longer prefix is stored


def _state_to_hand_over(req: CachedRequest) -> torch.Tensor:
    """Take the running state from the request, int64 `[1]`."""
    assert req.mamba_pool_idx is not None, "the request has no state"
    state, req.mamba_pool_idx = req.mamba_pool_idx, None
    return state.reshape(1)


def _checkpoint_to_hand_over(req: CachedRequest) -> torch.Tensor:
    """Take the state of the checkpoint from the request, int64 `[1]`."""
    assert req.mamba_checkpoint_idx is not None, "the request has no checkpoint"
    state, req.mamba_checkpoint_idx = req.mamba_checkpoint_idx, None
    return state.reshape(1)
