"""Chunks on their way from the disk to a request that waits for them: what the tier tells the policy.

In each step vLLM looks up all chunks of a waiting request and takes a row of the CPU tier for each that only the disk
holds. It schedules the request when all are in, so a later chunk may not take the row of an earlier one, nor of one
that the CPU tier had before:

    held by the disk | row taken | read | hit in every step ... | request scheduled, rows pinned
                     <------------- not evicted -------------->

A request that finds too few rows takes none while it waits for more: two that wait for rows of each other would wait
for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

# How often a chunk is read for one request. Policies that do not know of waiting requests may evict it between its
# reading and its use, each time; after so many its tokens are computed.
MAX_READS = 2


@dataclass(slots=True, eq=False)
class Promotions:
    """What the disk was found to hold for one request, in its `ReqContext`. Written by the tier, read by the policy,
    both under vLLM's lock. `reads`: how often each chunk was read; `waits`: the request was not scheduled yet.
    """

    reads: dict[OffloadKey, int] = field(default_factory=dict)
    waits: bool = True

    def offer(self, chunk: OffloadKey) -> bool:
        """Whether the request may have the chunk read."""
        return self.reads.setdefault(chunk, 0) < MAX_READS

    def read(self, chunks: Iterable[OffloadKey]) -> None:
        for chunk in chunks:
            self.reads[chunk] = self.reads.get(chunk, 0) + 1


class AwaitedChunks:
    """The chunks that may not be evicted, because requests wait for them. Owned by the policy."""

    def __init__(self) -> None:
        self._requests_of: dict[OffloadKey, set[Promotions]] = {}
        self._chunks_of: dict[Promotions, set[OffloadKey]] = {}

    def __len__(self) -> int:
        """Chunks that were announced and not released."""
        return len(self._requests_of)

    def __contains__(self, chunk: OffloadKey) -> bool:
        return any(promotions.waits for promotions in self._requests_of.get(chunk, ()))

    def announce(self, chunks: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Rows are about to be taken for the chunks, for a request that waits for them or not."""
        promotions = req_context.get_state(Promotions)
        if promotions is not None:
            self.add([chunk for chunk in chunks if chunk in promotions.reads], promotions)

    def add(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """A request waits for these, too."""
        for chunk in chunks if promotions.waits else ():
            self._requests_of.setdefault(chunk, set()).add(promotions)
            self._chunks_of.setdefault(promotions, set()).add(chunk)

    def take_released(self) -> list[OffloadKey]:
        """Forget the requests that do not wait any longer; the chunks that nobody waits for now."""
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
