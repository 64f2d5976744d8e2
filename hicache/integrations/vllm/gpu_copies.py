"""Chunks of the CPU tier that the GPU's cache also has. The policy evicts these chunks before other chunks.

The connector flags a chunk after a load, after a hit on the GPU, and after a store of a chunk that was just computed.
The connector clears the flag when the GPU is about to evict the chunk, because the CPU tier then has the only copy. A
flag may be outdated, so the policy checks whether the GPU's cache has the chunk before it evicts the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Protocol, runtime_checkable

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from hicache.integrations.vllm.hints import Hints
from hicache.integrations.vllm.promotions import Promotions
from hicache.pages.misses import MissReasons


class GpuCopies:
    """The flags of chunks that the GPU also has. The policy owns this object; all calls hold vLLM's lock.

    `is_on_gpu`: function that returns whether the GPU's cache has a chunk. The connector sets this function; without
    the connector no chunk is flagged.
    """

    def __init__(self) -> None:
        self.is_on_gpu: Callable[[OffloadKey], bool] = lambda _: False
        self._flagged = set[OffloadKey]()
        self._evictable = dict[OffloadKey, None]()  # flagged chunks that no transfer uses; the newest flag is last
        self.ended = set[OffloadKey]()  # chunks on the GPU whose sessions have ended: they are not stored
        self.evicted: Container[OffloadKey] = ()  # chunks that this step evicts from the GPU, until their stores begin

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._flagged

    def __len__(self) -> int:
        return len(self._flagged)

    def flag(self, key: OffloadKey, *, is_evictable: bool) -> None:
        self._flagged.add(key)
        self.set_evictable(key, is_evictable)

    def set_evictable(self, key: OffloadKey, is_evictable: bool) -> None:
        """Record whether a chunk may be evicted. Chunks without a flag are ignored."""
        self._evictable.pop(key, None)
        if is_evictable and key in self._flagged:
            self._evictable[key] = None

    def clear_flag(self, key: OffloadKey) -> None:
        self._flagged.discard(key)
        self._evictable.pop(key, None)

    def end_session(self, keys: Collection[OffloadKey]) -> None:
        """Record that the session of these chunks has ended. Chunks on the GPU are then not stored, unless a request
        hits them."""
        self.ended.update(key for key in keys if self.is_on_gpu(key) or key in self.evicted)

    def clear(self) -> None:
        self._flagged.clear()
        self._evictable.clear()
        self.ended.clear()

    def choose(self, num: int, protected: Container[OffloadKey]) -> list[OffloadKey]:
        """Return at most `num` evictable chunks that the GPU also has and that are not in `protected`. Chunks with
        newer flags are first, because the GPU keeps these chunks longer. The caller evicts the returned chunks."""
        chosen: list[OffloadKey] = []
        stale: list[OffloadKey] = []
        for key in reversed(self._evictable):
            if len(chosen) == num:
                break
            if not self.is_on_gpu(key):
                stale.append(key)
            elif key not in protected:
                chosen.append(key)
        for key in stale:
            self.clear_flag(key)
        return chosen


@runtime_checkable
class EvictsGpuCopies(Protocol):
    """The interface of hicache's policies for the tier and the connector. `cache_capacity`: number of rows.
    `miss_reasons`: the reason for each chunk that the CPU tier lacks. `evicted_ages_s`: seconds since the last use of
    each evicted chunk; the manager empties this list."""

    cache_capacity: int
    copies: GpuCopies
    miss_reasons: MissReasons
    evicted_ages_s: list[float]

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return the status of a chunk that the CPU tier has or is storing; None for any other chunk."""
        ...

    def num_chunks(self) -> int:
        """Return the number of chunks that the CPU tier has or is storing."""
        ...

    def num_obtainable(self, kept: Iterable[OffloadKey]) -> int:
        """Return the number of rows that are free, or whose chunk may be evicted and is not in `kept`."""
        ...

    def keep(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """Do not evict these chunks, which are in the CPU tier, until the request of `promotions` is scheduled."""
        ...

    def apply_hints(self, hints: Hints, chunks: Sequence[OffloadKey], num_shared: int) -> None:
        """Apply the hints of a request that has finished. `chunks`: the chunks of the request, in the order of its
        prompt; other prompts share the first `num_shared` of them. Chunks that neither the CPU tier nor the GPU has are
        ignored."""
        ...

    def flag_on_gpu(self, keys: Collection[OffloadKey]) -> None:
        """Flag these chunks, because the GPU's cache has them. Chunks that the CPU tier lacks are ignored."""
        ...

    def evicted_from_gpu(self, keys: Sequence[OffloadKey]) -> None:
        """Record that the GPU evicts these chunks; `keys` has the most recently used chunk first. Copies in the CPU
        tier become its most recently used chunks. The eviction on the GPU does not count as a hit in the CPU tier."""
        ...
