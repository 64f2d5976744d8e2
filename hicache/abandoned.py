"""Ends the threads of an engine that was not closed. Ranks beside the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hicache.disk import DiskTier
from hicache.kv_events import EventPublisher
from hicache.transfer.base import TransferBackend

_EXIT_S = 5.0


def abandon(transfers: Sequence[TransferBackend], stores: Sequence[DiskTier], events: EventPublisher | None) -> None:
    """Stop the threads of an engine that was not closed: at the interpreter's exit, which would otherwise end them
    inside torch and abort the process, or when the engine is collected. Takes at most `_EXIT_S`."""
    deadline_s = time.monotonic() + _EXIT_S
    for transfer in transfers:
        transfer.abandon(deadline_s)
    for store in stores:
        store.close(max(0.0, deadline_s - time.monotonic()))
    if events is not None:
        events.abandon(deadline_s)
