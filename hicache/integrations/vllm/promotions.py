"""Chunks that are loaded from the disk for a waiting request. The tier records these chunks, and the policy does not
evict them.

In each step vLLM looks up all chunks of a waiting request, and takes a row of the CPU tier for each chunk that is only
on the disk. vLLM schedules the request when all chunks are in the CPU tier. So loading a later chunk must not evict an
earlier chunk of the request, also if the earlier chunk was in the CPU tier before:

    on the disk      | row taken | read | hit in every step ... | request scheduled, rows pinned
                     <------------- not evicted -------------->

If too few rows are free for a request, the request takes no row while it waits. Otherwise two requests could wait for
each other's rows forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

# Maximum reads of a chunk for one request. A policy of vLLM may evict the chunk after each read and before the request
# uses the chunk. After `MAX_READS` reads, the tokens of the chunk are computed.
MAX_READS = 2


@dataclass(slots=True, eq=False)
class Promotions:
    """The loads of one request, stored in its `ReqContext`. The tier writes this object and the policy reads it, both
    under vLLM's lock. `reads`: number of reads of each chunk. `waits`: the request has not been scheduled yet.
    """

    reads: dict[OffloadKey, int] = field(default_factory=dict)
    waits: bool = True

    def offer(self, chunk: OffloadKey) -> bool:
        """Return whether the chunk may be read for the request."""
        return self.reads.setdefault(chunk, 0) < MAX_READS

    def read(self, chunks: Iterable[OffloadKey]) -> None:
        for chunk in chunks:
            self.reads[chunk] = self.reads.get(chunk, 0) + 1


class AwaitedChunks:
    """The chunks that must not be evicted because requests wait for them. The policy owns this object."""

    def __init__(self) -> None:
        self._requests_of: dict[OffloadKey, set[Promotions]] = {}
        self._chunks_of: dict[Promotions, set[OffloadKey]] = {}

    def __len__(self) -> int:
        """Return the number of chunks that were added and not released."""
        return len(self._requests_of)

    def __contains__(self, chunk: OffloadKey) -> bool:
        return any(promotions.waits for promotions in self._requests_of.get(chunk, ()))

    def announce(self, chunks: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Record that vLLM will take rows for these chunks. Chunks for which the request waits are protected from
        eviction."""
        promotions = req_context.get_state(Promotions)
        if promotions is not None:
            self.add([chunk for chunk in chunks if chunk in promotions.reads], promotions)

    def add(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """Protect these chunks from eviction while the request of `promotions` waits."""
        for chunk in chunks if promotions.waits else ():
            self._requests_of.setdefault(chunk, set()).add(promotions)
            self._chunks_of.setdefault(promotions, set()).add(chunk)

    def take_released(self) -> list[OffloadKey]:
        """Remove the requests that no longer wait. Returns the chunks for which no request waits any more."""
        released: list[OffloadKey] = []
        for promotions in [promotions for promotions in self._chunks_of if not promotions.waits]:
            for chunk in self._chunks_of.pop(promotions):
                self._requests_of[chunk].discard(promotions)
                if not self._requests_of[chunk]:
                    del self._requests_of[chunk]
                    released.append(chunk)
        return released

    def clear(self) -> None:
        self._requests_of.clear()
        self._chunks_of.clear()
