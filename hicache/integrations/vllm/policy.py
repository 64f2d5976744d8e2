"""hicache's eviction policies for vLLM's CPU tier: `"eviction_policy": "SLRUPolicy"` and
`"cache_policy_module_path": "hicache.integrations.vllm"`.

vLLM says which chunks a request used when it finishes; of its prompt the first chunk counts as the most recently used:
a suffix is worth nothing without its prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from hicache.eviction.orders import CountedRecord, EvictionOrder
from hicache.eviction.policy import get_eviction_strategy
from hicache.integrations.vllm.promotions import AwaitedChunks, Promotions

_POSITIONS = 1 << 40  # more tokens than a request has: times of two requests never mix


@runtime_checkable
class KeepsAwaited(Protocol):
    """A policy of ours, as the tier uses it. `cache_capacity`: rows in all."""

    cache_capacity: int

    def num_obtainable(self, kept: Iterable[OffloadKey]) -> int:
        """Rows that are free, or whose chunks may be evicted and are none of `kept`."""
        ...

    def keep(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """A request waits, for these chunks too, which are in the CPU tier: they stay until it is scheduled."""
        ...


class Block(CountedRecord):
    """A chunk in the CPU tier. Times are ticks of a request, less the position."""

    __slots__ = ("chunk",)
    key: OffloadKey

    def __init__(self, key: OffloadKey, chunk: ChunkStatus, time: int) -> None:
        super().__init__(key)
        self.chunk = chunk
        self.hit_count = 1
        self.creation_time = self.last_access_time = time


@dataclass(slots=True)
class _RequestTick:
    """When a request was first seen, by the policy `owner`."""

    owner: object
    tick: int


class HiCachePolicy(CachePolicy):
    """Which chunk leaves vLLM's CPU tier, by a strategy of hicache's. Owned by vLLM's manager, under its lock.

    Evictable chunks are in a heap; every event costs O(log n). A use is counted once a request, as vLLM reports it.
    What the disk brought up for a request that waits is not evicted: see `promotions`.
    """

    strategy: ClassVar[str]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._blocks: dict[OffloadKey, Block] = {}
        self._order: EvictionOrder[Block] = EvictionOrder(get_eviction_strategy(self.strategy), lambda block: True)
        self._awaited = AwaitedChunks()
        self._tick = 0
        # Of the store that is being prepared: vLLM 0.32 does not say in `insert` whose chunk it is.
        self._announced: dict[OffloadKey, int] = {}

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        block = self._blocks.get(key)
        return None if block is None else block.chunk

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        announced = self._announced.pop(key, None)
        time = self._time_of(key, req_context) if announced is None else announced
        self._blocks[key] = Block(key, chunk, time)
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        block = self._blocks.pop(key)
        if block in self._order:
            self._order.evict(block)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._use(list(keys), counted=None)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._release()
        self._announced = {key: self._time_of(key, req_context) for key in keys}
        self._awaited.announce(self._announced, req_context)

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """The request is not done; until then what it uses is as recent as the request, suffix before prefix."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block.last_access_time = max(block.last_access_time, self._time_of(key, req_context))
                self._order.hit(block)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self._use(order_request_keys(key_groups, req_context), counted=reused_keys)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        self._release()
        taken: list[Block] = []
        kept: list[Block] = []
        while len(taken) < n and (block := self._order.victim()) is not None:
            self._order.evict(block)
            (kept if block.key in protected else taken).append(block)
        if len(taken) < n:
            kept, taken = kept + taken, []
        for block in kept:
            self._order.insert(block)
        for block in taken:
            del self._blocks[block.key]
        return [(block.key, block.chunk) for block in taken] if len(taken) == n else None

    def clear(self) -> None:
        for block in list(self._order):
            self._order.evict(block)
        self._blocks.clear()
        self._announced.clear()
        self._awaited.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        block = self._blocks[key]
        if block not in self._order and key not in self._awaited:
            self._order.insert(block)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        block = self._blocks[key]
        if block in self._order:
            self._order.lock(block)

    def num_obtainable(self, kept: Iterable[OffloadKey]) -> int:
        """See `KeepsAwaited`."""
        self._release()
        num_kept = sum(self._blocks[key] in self._order for key in kept)
        return self.cache_capacity - len(self._blocks) + len(self._order) - num_kept

    def keep(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """See `KeepsAwaited`."""
        kept = list(chunks)
        self._awaited.add(kept, promotions)
        for key in kept:
            self.mark_non_evictable(key)

    def _release(self) -> None:
        """What nobody waits for any longer may be evicted."""
        for key in self._awaited.take_released():
            if key in self._blocks and self._blocks[key].chunk.ref_cnt == 0:
                self.mark_evictable(key)

    def _use(self, keys: Sequence[OffloadKey], counted: set[OffloadKey] | None) -> None:
        """The chunks, first to last of a prompt, are used now. `counted`: those whose use counts; None: all."""
        self._tick += 1
        for i, key in reversed(list(enumerate(keys))):
            block = self._blocks.get(key)
            if block is not None:
                block.last_access_time = self._tick * _POSITIONS - i
                block.hit_count += counted is None or key in counted
                self._order.hit(block)

    def _time_of(self, key: OffloadKey, req_context: ReqContext | None) -> int:
        """The request's first tick, less the position of the chunk in its prompt."""
        position = None if req_context is None else req_context.get_offload_key_position(key)
        if req_context is None or position is None:
            self._tick += 1
            return self._tick * _POSITIONS
        state = req_context.get_state(_RequestTick)
        if state is None or state.owner is not self:
            self._tick += 1
            state = _RequestTick(self, self._tick)
            req_context.set_state(state)
        return state.tick * _POSITIONS - position


class LRUPolicy(HiCachePolicy):
    """The least recently used goes first."""

    strategy = "lru"


class LFUPolicy(HiCachePolicy):
    """The least often used goes first; of equals, the least recently used."""

    strategy = "lfu"


class SLRUPolicy(HiCachePolicy):
    """What one request alone used goes first; of both segments, the least recently used."""

    strategy = "slru"


class FIFOPolicy(HiCachePolicy):
    """The oldest goes first."""

    strategy = "fifo"


@dataclass(frozen=True, slots=True)
class _Either:
    """What is in one of both. vLLM's policies only ask whether a chunk is protected."""

    protected: set[OffloadKey]
    awaited: AwaitedChunks

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self.protected or key in self.awaited


class ARCPolicy(ARCCachePolicy):
    """vLLM's `arc`, which keeps what a request waits for: see `promotions`."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._awaited = AwaitedChunks()

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        missed = list(keys)
        self._awaited.take_released()
        self._awaited.announce(missed, req_context)
        super().on_store_miss(missed, req_context)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        self._awaited.take_released()
        evicted: list[tuple[OffloadKey, ChunkStatus]] | None = super().evict(n, _Either(protected, self._awaited))
        return evicted

    def clear(self) -> None:
        super().clear()
        self._awaited.clear()

    def num_obtainable(self, kept: Iterable[OffloadKey]) -> int:
        """See `KeepsAwaited`."""
        self._awaited.take_released()
        held = _Either(set(kept), self._awaited)
        chunks = itertools.chain(self.t1.items(), self.t2.items())
        num_held = sum(chunk.ref_cnt != 0 or key in held for key, chunk in chunks)
        return self.cache_capacity - num_held

    def keep(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """See `KeepsAwaited`."""
        self._awaited.add(chunks, promotions)
