"""Chunks of the CPU tier that the GPU's cache also has. The policy evicts them first, and only if it needs their rows.

The connector sets the flag of a chunk after a load, after a hit on the GPU, and after a store of a chunk that was just
computed. It clears the flag when the chunk is about to be evicted from the GPU, because the CPU tier then has the only
copy. A flag is a hint: it is compared with the GPU's cache before the chunk is evicted.
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
    """The flags. Owned by the policy, called under vLLM's lock.

    `is_on_gpu`: whether the GPU's cache has a chunk; set by the connector. Without a connector no chunk is flagged.
    """

    def __init__(self) -> None:
        self.is_on_gpu: Callable[[OffloadKey], bool] = lambda _: False
        self._flagged = set[OffloadKey]()
        self._evictable = dict[OffloadKey, None]()  # flagged chunks that no transfer uses; the newest flag is last
        self.ended = set[OffloadKey]()  # chunks on the GPU whose sessions have ended: they are not stored

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._flagged

    def __len__(self) -> int:
        return len(self._flagged)

    def flag(self, key: OffloadKey, *, is_evictable: bool) -> None:
        self._flagged.add(key)
        self.set_evictable(key, is_evictable)

    def set_evictable(self, key: OffloadKey, is_evictable: bool) -> None:
        """Note whether a chunk may be evicted. Chunks without a flag are ignored."""
        self._evictable.pop(key, None)
        if is_evictable and key in self._flagged:
            self._evictable[key] = None

    def clear_flag(self, key: OffloadKey) -> None:
        self._flagged.discard(key)
        self._evictable.pop(key, None)

    def end_session(self, keys: Collection[OffloadKey]) -> None:
        """Do not store these chunks of the GPU unless a request hits them."""
        self.ended.update(key for key in keys if self.is_on_gpu(key))

    def clear(self) -> None:
        self._flagged.clear()
        self._evictable.clear()
        self.ended.clear()

    def choose(self, num: int, protected: Container[OffloadKey]) -> list[OffloadKey]:
        """Return at most `num` evictable chunks that the GPU also has, without the chunks in `protected`. The chunk
        with the newest flag is first: the GPU keeps it longest. The caller evicts the chunks."""
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
    """A policy of hicache's, as the tier and the connector use it. `cache_capacity`: number of rows. `miss_reasons`:
    reasons for which the CPU tier lacks chunks. `evicted_ages_s`: seconds since the last use of evicted chunks; the
    manager takes them."""

    cache_capacity: int
    copies: GpuCopies
    miss_reasons: MissReasons
    evicted_ages_s: list[float]

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk, if the CPU tier has it or is storing it."""
        ...

    def num_obtainable(self, kept: Iterable[OffloadKey]) -> int:
        """Rows that are free, or whose chunks may be evicted and are none of `kept`."""
        ...

    def keep(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """Keep these chunks, which are in the CPU tier, until the request that waits for them is scheduled."""
        ...

    def apply_hints(self, hints: Hints, chunks: Sequence[OffloadKey], num_shared: int) -> None:
        """Apply the hints of a request that has finished. `chunks`: the chunks of the request, in the order of its
        prompt; other prompts share the first `num_shared` of them. Chunks that neither the CPU tier nor the GPU has are
        ignored."""
        ...

    def flag_on_gpu(self, keys: Collection[OffloadKey]) -> None:
        """Note that the GPU's cache has these chunks. Chunks that the CPU tier lacks are ignored."""
        ...

    def evicted_from_gpu(self, keys: Sequence[OffloadKey]) -> None:
        """Note that the GPU evicts these chunks, the most recently used first. The CPU tier's copies, if it has them,
        become the most recently used chunks. This counts as no hit."""
        ...
