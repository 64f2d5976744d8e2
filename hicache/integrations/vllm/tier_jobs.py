"""The tier's records of vLLM's jobs in flight."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey


@dataclass(slots=True)
class Load:
    """A load. `ok[i]`: chunk i was read. `span`: tokens [start, end) of the prompt; None: unknown. `progress_s`: when
    this load or one before it last made progress. `left`: chunks in unanswered jobs; the load ends when there are
    none."""

    request: str
    chunks: tuple[OffloadKey, ...]
    span: tuple[int, int] | None
    begin_s: float
    progress_s: float
    ok: list[bool]
    left: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def span_left(self) -> tuple[int, int]:
        """The tokens that are still to be loaded, as if chunks were read from the beginning on."""
        start, end = self.span or (0, 0)
        return end - (end - start) * self.left // len(self.chunks), end


@dataclass(frozen=True, slots=True)
class Store:
    chunks: tuple[OffloadKey, ...]
    num_bytes: int
    begin_s: float = field(default_factory=time.monotonic)
