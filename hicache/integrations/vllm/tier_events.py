"""What the disk takes and loses of the chunks, as vLLM's own KV events: for routers that choose a server by what it
holds."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

OWNER = "hicache"


class TierEvents:
    """Owned by the tier. A chunk is told as stored once, until it was told as removed.

    The store names what it loses by its own keys, so this keeps the name of every chunk that it told, some 200 bytes.
    """

    def __init__(self, medium: Medium, locality: Locality) -> None:
        self._medium = medium
        self._locality = locality
        self._chunk_of: dict[bytes, OffloadKey] = {}
        self._events: list[OffloadingEvent] = []
        self._times_lost = 0

    def stored(self, keys: Sequence[bytes], chunks: Sequence[OffloadKey]) -> None:
        """The store holds the chunks, by these keys."""
        new = {key: chunk for key, chunk in zip(keys, chunks, strict=True) if key not in self._chunk_of}
        self._chunk_of.update(new)
        self._tell(list(new.values()), removed=False)

    def removed(self, keys: Sequence[bytes]) -> None:
        """The store has lost these."""
        self._tell([self._chunk_of.pop(key) for key in keys if key in self._chunk_of], removed=True)

    def note_losses(self, times_lost: int) -> None:
        """So often has the store's process ended: what it had lost at last, nobody tells any more."""
        if times_lost != self._times_lost:
            self._times_lost = times_lost
            self.removed(list(self._chunk_of))

    def take(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def _tell(self, chunks: list[OffloadKey], *, removed: bool) -> None:
        if chunks:
            self._events.append(
                OffloadingEvent(
                    chunks, self._medium, removed, locality=self._locality, ownership=OWNER, removal_expected=True
                )
            )
