"""Reports chunks that the disk stores or removes as vLLM's KV events, for routers that choose a server by its cache."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

OWNER = "hicache"


class TierEvents:
    """Owned by the tier. A chunk is reported as stored once, until it is reported as removed.

    The store names removed chunks by its own keys, so this class keeps the name of every reported chunk, about 200
    bytes each.
    """

    def __init__(self, medium: Medium, locality: Locality) -> None:
        self._medium = medium
        self._locality = locality
        self._chunk_of: dict[bytes, OffloadKey] = {}
        self._events: list[OffloadingEvent] = []
        self._times_lost = 0

    def stored(self, keys: Sequence[bytes], chunks: Sequence[OffloadKey]) -> None:
        """Note that the store holds the chunks under these keys."""
        new = {key: chunk for key, chunk in zip(keys, chunks, strict=True) if key not in self._chunk_of}
        self._chunk_of.update(new)
        self._emit(list(new.values()), removed=False)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Note that the store has removed the chunks of these keys."""
        self._emit([self._chunk_of.pop(key) for key in keys if key in self._chunk_of], removed=True)

    def note_losses(self, times_lost: int) -> None:
        """Note how often the store's process has ended. After a new end, report all chunks as removed, because the
        process can no longer report its last removals."""
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
