"""Records which blocks of vLLM's GPU cache are evicted, taken and hit while vLLM schedules a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class EvictedChunks:
    """Marks a request, in its `ReqContext`, that exists only for a store of chunks that the GPU evicts. Tiers do not
    count this request as a request of a user."""


class EvictedBlock(NamedTuple):
    """A block that has lost its hash. `num_tokens`: tokens of the prompt up to the block's end. The block contains the
    keys and values of these tokens until the forward pass of the step."""

    block_id: int
    num_tokens: int


@dataclass(slots=True)
class StepBlocks:
    """The evictions, allocations and hits of one step in the GPU's cache. A hash is vLLM's hash of a block with its
    group of layers, and also the `OffloadKey` of the chunk that ends with the block.

    `evicted`: the evicted block of each hash, in the order of eviction. `taken`: ids of the blocks that requests got
    from the pool. `hit`: hashes of the blocks that requests found in the cache.
    """

    evicted: dict[bytes, EvictedBlock] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    hit: set[bytes] = field(default_factory=set)


class EvictionWatch:
    """Replaces the metrics collector of vLLM's `BlockPool`. The pool calls this object for each block, and this object
    passes all calls to the original collector.

    When a request takes a block, the pool calls `on_block_evicted` while the block still has its hash, then
    `on_block_allocated`. `BlockPool.evict_blocks` calls only `on_block_evicted`. `evict_blocks` removes the hashes of
    blocks whose content is not valid, so these blocks are not recorded as evicted.
    """

    def __init__(self, collector: KVCacheMetricsCollector | None) -> None:
        self._collector = collector
        self._step = StepBlocks()
        self._last: tuple[int, bytes | None, int | None] = (-1, None, None)  # id, hash, tokens of the last eviction

    def take(self) -> StepBlocks:
        """Return the blocks that were evicted, taken and hit since the last call."""
        step, self._step = self._step, StepBlocks()
        return step

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        self._last = (block.block_id, block.block_hash, block.block_hash_num_tokens)
        if self._collector is not None:
            self._collector.on_block_evicted(block)

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """Record a block that a request takes. After a preemption, a block may be taken again in the same step. If a
        block is taken twice, only its first hash is recorded, because the tokens of its second hash were not
        computed."""
        step, (block_id, block_hash, num_tokens) = self._step, self._last
        is_first = block_id == block.block_id and block_id not in step.taken
        if is_first and block_hash is not None and num_tokens is not None:
            step.evicted[block_hash] = EvictedBlock(block_id, num_tokens)
        step.taken.add(block.block_id)
        if self._collector is not None:
            self._collector.on_block_allocated(block)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self._step.hit.add(block.block_hash)
        if self._collector is not None:
            self._collector.on_block_accessed(block)

    def reset(self) -> None:
        """Remove the recorded evictions and hits, because the pool has removed all hashes."""
        self._step.evicted.clear()
        self._step.hit.clear()
        self._last = (-1, None, None)
        if self._collector is not None:
            self._collector.reset()
