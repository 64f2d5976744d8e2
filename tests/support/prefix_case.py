"""Helpers of the tests of the prefix caches: requests, caches over real pools, and a runner that computes toy states.

The toy attention state of a token is a number that represents its complete prefix, in a table by slot, and in another
by window slot. The toy recurrent state, in a real pool, is a number computed by a recurrence over the consumed tokens,
and their count. So states from a cache can be compared with states computed without a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hicache import (
    CacheInitParams,
    HybridReqToTokenPool,
    InsertParams,
    Mamba2CacheParams,
    Mamba2StateShape,
    MambaRadixCache,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    RadixKey,
    ReqToTokenPool,
    SWARadixCache,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    TreeNode,
    alloc_for_decode,
    alloc_for_extend,
    release_kv_cache,
)

Cache = RadixCache | SWARadixCache | MambaRadixCache

_MODULUS = 65521  # a prime: every state below it is exact in float32
STATE = Mamba2CacheParams(
    Mamba2StateShape(conv=((2, 1),), temporal=(1, 1, 2)), layers=[1, 3], temporal_dtype=torch.float32
)


@dataclass(eq=False)
class Request:
    """A request with the attributes that a scheduler gives it."""

    origin_input_ids: list[int]
    extra_key: str | None = None
    priority: int | None = None
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    last_node: TreeNode = field(default_factory=TreeNode)
    cache_protected_len: int = 0
    req_pool_idx: int | None = None
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    swa_evicted_seqlen: int = 0
    mamba_pool_idx: torch.Tensor | None = None
    mamba_checkpoint_idx: torch.Tensor | None = None
    mamba_last_track_seqlen: int | None = None
    branching_len: int | None = None

    @property
    def tokens(self) -> list[int]:
        return self.origin_input_ids + self.output_ids


@dataclass
class Batch:
    """A batch, the argument of `alloc_for_extend` and `alloc_for_decode`."""

    reqs: list[Request]
    tree_cache: Cache
    prefix_lens: list[int]
    seq_lens_cpu: torch.Tensor

    @property
    def req_to_token_pool(self) -> ReqToTokenPool:
        table: ReqToTokenPool = self.tree_cache.req_to_token_pool
        return table

    @property
    def seq_lens(self) -> torch.Tensor:
        return self.seq_lens_cpu.to(self.tree_cache.device)

    @property
    def req_pool_indices(self) -> torch.Tensor:
        return torch.tensor([req.req_pool_idx for req in self.reqs], device=self.tree_cache.device)

    @property
    def extend_lens(self) -> list[int]:
        return [s - p for p, s in zip(self.prefix_lens, self.seq_lens_cpu.tolist(), strict=True)]

    @property
    def extend_num_tokens(self) -> int:
        return sum(self.extend_lens)


def full_cache(
    num_tokens: int = 64, page_size: int = 1, rows: int = 8, columns: int = 512, device: str = "cpu", **more: object
) -> RadixCache:
    """A RadixCache over real pools of `num_tokens` tokens."""
    allocator = _plain(num_tokens, page_size, device)
    return RadixCache(_params(ReqToTokenPool(rows, columns, device, False), allocator, page_size, more))


def swa_cache(
    num_tokens: int = 64, num_swa: int = 48, window: int = 4, page_size: int = 1, columns: int = 512, **more: object
) -> SWARadixCache:
    allocator = SWATokenToKVPoolAllocator(num_tokens, num_swa, page_size, torch.bfloat16, "cpu", None, True)
    table = ReqToTokenPool(8, columns, "cpu", False)
    return SWARadixCache(_params(table, allocator, page_size, {"sliding_window_size": window, **more}))


def mamba_cache(
    num_tokens: int = 64,
    num_states: int = 12,
    page_size: int = 1,
    extra_buffer: bool = False,
    columns: int = 512,
    chunk: int = 4,
    **more: object,
) -> MambaRadixCache:
    table = HybridReqToTokenPool(
        size=8,
        mamba_size=num_states,
        max_context_len=columns,
        device="cpu",
        enable_memory_saver=False,
        cache_params=STATE,
        enable_mamba_extra_buffer=extra_buffer,
    )
    settings = {"enable_mamba_extra_buffer": extra_buffer, "mamba_cache_chunk_size": chunk, **more}
    return MambaRadixCache(_params(table, _plain(num_tokens, page_size, "cpu"), page_size, settings))


def _plain(num_tokens: int, page_size: int, device: str) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
    if page_size == 1:
        return TokenToKVPoolAllocator(num_tokens, torch.bfloat16, device, None, True)
    return PagedTokenToKVPoolAllocator(num_tokens, page_size, torch.bfloat16, device, None, True)


def _params(table: object, allocator: object, page_size: int, more: dict[str, object]) -> CacheInitParams:
    disable = bool(more.pop("disable", False))
    return CacheInitParams(disable, table, allocator, page_size, **more)  # type: ignore[arg-type]


def key(tokens: list[int], extra_key: str | None = None) -> MatchPrefixParams:
    return MatchPrefixParams(RadixKey(tokens, extra_key))


def free(cache: Cache) -> tuple[int, ...]:
    """The number of free slots, and of free window slots or states if the cache has them."""
    allocator = cache.token_to_kv_pool_allocator
    if isinstance(cache, SWARadixCache):
        return allocator.full_available_size(), allocator.swa_available_size()
    if isinstance(cache, MambaRadixCache):
        return allocator.available_size(), cache.req_to_token_pool.mamba_pool.available_size()
    return (allocator.available_size(),)


def insert(cache: Cache, tokens: list[int], extra_key: str | None = None, **more: Any) -> int:
    """Insert tokens without a request; returns how many tokens the cache already held."""
    return cache.insert(InsertParams(RadixKey(tokens, extra_key), **more)).prefix_len


def node_of(cache: Cache, tokens: list[int], extra_key: str | None = None) -> TreeNode:
    """The node at which the match of `tokens` ends."""
    return cache.match_prefix(key(tokens, extra_key)).last_device_node


def nodes_of(cache: Cache) -> list[tuple[TreeNode, list[int]]]:
    """Every node of the tree, parents first, with all tokens from the root to the end of the node."""
    found: list[tuple[TreeNode, list[int]]] = [(cache.root_node, [])]
    for node, path in found:
        found.extend((child, path + list(child.key or ())) for child in node.children.values())
    return found[1:]


def matched(cache: Cache, tokens: list[int], extra_key: str | None = None) -> int:
    """The number of `tokens` that the cache matches now."""
    return len(cache.match_prefix(key(tokens, extra_key)).device_indices)


def recurrence(tokens: list[int]) -> tuple[int, int]:
    """The toy state of a prefix, computed without a cache: a number, and the count of its tokens."""
    number = 0
    for token in tokens:
        number = (number * 31 + token + 1) % _MODULUS
    return number, len(tokens)


def prefixes(tokens: list[int], extra_key: str | None = None) -> list[int]:
    """The toy attention state of each token, the first token first: a number that represents its prefix."""
    at = hash(extra_key)
    return [at := hash((at, token)) for token in tokens]


class FakeRunner:
    """A runner of requests on one cache. The runner writes the states that a model would write, and compares the states
    that a model would read."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.allocator = cache.token_to_kv_pool_allocator
        self.full: dict[int, int] = {}  # by slot: the number of the prefix whose last token is there
        self.window: dict[int, int] = {}
        self.is_swa, self.is_mamba = isinstance(cache, SWARadixCache), isinstance(cache, MambaRadixCache)

    def admit(self, req: Request, limit: int | None = None) -> int:
        """Match all tokens but the last, and lock them; returns the length of the hit. May raise OutOfStates."""
        asked = req.tokens[: len(req.tokens) - 1 if limit is None else limit]
        params = MatchPrefixParams(RadixKey(asked, req.extra_key), cow_mamba=self.is_mamba, req=req)
        result = self.cache.match_prefix(params)
        req.prefix_indices, req.last_node = result.device_indices, result.last_device_node
        req.cache_protected_len, req.branching_len = len(req.prefix_indices), result.mamba_branching_seqlen
        self.cache.inc_lock_ref(req.last_node)
        req.kv_committed_len = req.kv_allocated_len = len(req.prefix_indices)
        self.check_readable(req, len(req.prefix_indices))
        return len(req.prefix_indices)

    def prefill(self, req: Request, chunk: int = 1 << 20) -> int:
        """Admit a request, and compute its prompt in chunks, each of which the cache keeps. Returns the length of the
        hit."""
        hit_len, end = self.admit(req), len(req.tokens)
        while req.kv_committed_len < end:
            here = min(req.kv_committed_len + chunk, end)
            self.extend(req, here)
            self.cache.cache_unfinished_req(req, chunked=here < end)
            self.check_readable(req, here)
            self.cache.sanity_check()
        return hit_len

    def serve(self, tokens: list[int], chunk: int = 1 << 20, new: int = 0, **more: Any) -> int:
        """Serve a request from its start to its end, with `new` decoded tokens; returns the length of its hit."""
        req = Request(tokens, **more)
        hit_len = self.prefill(req, chunk)
        for token in range(new):
            self.decode(req, token)
        release_kv_cache(req, self.cache)
        self.cache.sanity_check()
        return hit_len

    def checkpoint(self, req: Request) -> None:
        """Checkpoint the state at the end of a forward, as a runner with the extra buffer does."""
        self.cache.req_to_token_pool.checkpoint([req])
        req.mamba_last_track_seqlen = req.kv_committed_len
        req.prefix_indices = self.row(req, 0, req.kv_committed_len)

    def refuse(self, req: Request) -> None:
        """Undo `admit` for a request that got no row."""
        self.cache.dec_lock_ref(req.last_node)

    def extend(self, req: Request, end: int) -> None:
        """Compute tokens up to `end`. May raise OutOfSlots, OutOfRows, OutOfStates."""
        start = len(req.prefix_indices)
        alloc_for_extend(Batch([req], self.cache, [start], torch.tensor([end])))
        req.fill_ids = req.tokens[:end]
        self._compute(req, start, end)

    def decode(self, req: Request, token: int) -> None:
        """Append one token, and compute the last token that has not been computed. May raise OutOfSlots."""
        start = req.kv_committed_len
        alloc_for_decode(Batch([req], self.cache, [start], torch.tensor([start])), 1)
        if start == len(req.tokens):
            req.output_ids.append(token)
        req.fill_ids = req.tokens[: start + 1]
        self._compute(req, start, start + 1)

    def leave_window(self, req: Request) -> None:
        """Free the window slots that no later token of the request reads, in complete pages."""
        page = self.cache.page_size
        assert isinstance(self.cache, SWARadixCache)
        end = max(0, req.kv_committed_len - self.cache.sliding_window_size) // page * page
        start = max(req.swa_evicted_seqlen, req.cache_protected_len)
        if end > start:
            self.allocator.free_swa(self.row(req, start, end))
            req.swa_evicted_seqlen = end

    def row(self, req: Request, start: int, end: int) -> torch.Tensor:
        slots: torch.Tensor = self.cache.req_to_token_pool.req_to_token[req.req_pool_idx, start:end].to(torch.int64)
        return slots

    def check_readable(self, req: Request, end: int) -> None:
        """Assert that a model would read, after `end` tokens, the states that are computed without a cache."""
        slots = req.prefix_indices[:end] if req.req_pool_idx is None else self.row(req, 0, end)
        assert len(slots) == end
        want = prefixes(req.tokens[:end], req.extra_key)
        assert [self.full[slot] for slot in slots.tolist()] == want
        if isinstance(self.cache, SWARadixCache):
            first = max(0, end - self.cache.sliding_window_size)
            window_slots = self.allocator.translate_loc_from_full_to_swa(slots[first:]).tolist()
            assert all(window_slots) and [self.window[slot] for slot in window_slots] == want[first:]
        if self.is_mamba and req.mamba_pool_idx is not None:
            assert self.state(req.mamba_pool_idx) == recurrence(req.tokens[:end])

    def state(self, index: torch.Tensor) -> tuple[int, int]:
        """A state by id. Checks that all its tensors have the same numbers."""
        cache = self.cache.req_to_token_pool.mamba_pool.mamba_cache
        temporal = cache.temporal[:, int(index)].reshape(len(STATE.layers), 2)
        conv = cache.conv[0][:, int(index)].reshape(len(STATE.layers), 2)
        assert torch.equal(temporal[0], temporal[1]) and torch.equal(conv, temporal.remainder(128).to(conv.dtype))
        return int(temporal[0, 0]), int(temporal[0, 1])

    def _compute(self, req: Request, start: int, end: int) -> None:
        self.check_readable(req, start)
        slots, want = self.row(req, 0, end).tolist(), prefixes(req.tokens[:end], req.extra_key)
        for position in range(start, end):
            self.full[slots[position]] = want[position]
        if self.is_swa:
            window_slots = self.allocator.translate_loc_from_full_to_swa(
                torch.tensor(slots[start:end], dtype=torch.int64)
            )
            self.window.update(zip(window_slots.tolist(), want[start:end], strict=True))
        if self.is_mamba:
            assert req.mamba_pool_idx is not None
            number, count = self.state(req.mamba_pool_idx)
            for token in req.tokens[start:end]:
                number, count = (number * 31 + token + 1) % _MODULUS, count + 1
            value = torch.tensor([number, count], dtype=torch.float32)
            states = self.cache.req_to_token_pool.mamba_pool.mamba_cache
            states.temporal[:, int(req.mamba_pool_idx)] = value.view(1, 1, 2)
            states.conv[0][:, int(req.mamba_pool_idx)] = value.remainder(128).view(2, 1).to(torch.bfloat16)
        req.kv_committed_len = req.kv_allocated_len = end
