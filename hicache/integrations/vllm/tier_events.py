"""Reports the chunks that the disk stores or removes as KV events of vLLM, for routers that choose a server by the
content of its cache."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

OWNER = "hicache"


class TierEvents:
    """Creates the KV events of the tier, which owns this object. A chunk that is reported as stored is not reported
    again before it is reported as removed.

    The store reports removed chunks by the keys of the store. So this class records vLLM's name of every reported
    chunk, which takes about 200 bytes per chunk.
    """

    def __init__(self, medium: Medium, locality: Locality) -> None:
        self._medium = medium
        self._locality = locality
        self._chunk_of: dict[bytes, OffloadKey] = {}
        self._events: list[OffloadingEvent] = []
        self._times_lost = 0

    def stored(self, keys: Sequence[bytes], chunks: Sequence[OffloadKey]) -> None:
        """Record that the store has the chunks under these keys."""
        new = {key: chunk for key, chunk in zip(keys, chunks, strict=True) if key not in self._chunk_of}
        self._chunk_of.update(new)
        self._emit(list(new.values()), removed=False)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Record that the store has removed the chunks of these keys."""
        self._emit([self._chunk_of.pop(key) for key in keys if key in self._chunk_of], removed=True)

    def note_losses(self, times_lost: int) -> None:
        """Record how often the store process has ended. If the store process has ended again since the last call,
        report all chunks as removed, because the ended process can no longer report its last removals."""
        if times_lost != self._times_lost:
            self._times_lost = times_lost
            self.removed(list(self._chunk_of))

    def take(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def _emit(self, chunks: list[OffloadKey], *, removed: bool) -> None:
        if chunks:
            self._events.append(
                OffloadingEvent(
                    chunks, self._medium, removed, locality=self._locality, ownership=OWNER, removal_expected=True
                )
            )
