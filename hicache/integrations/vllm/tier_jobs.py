"""What the tier remembers of vLLM's jobs until they end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey


@dataclass(slots=True)
class Load:
    """`ok[i]`: chunk i was read. `span`: tokens [start, end) of the prompt; None: not known. `progress_s`: when the
    disk last brought a part of it, or of a load before it. `left`: chunks whose jobs are not answered yet; when there
    are none, the load ends."""

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
        """As if what was read were the beginning."""
        start, end = self.span or (0, 0)
        return end - (end - start) * self.left // len(self.chunks), end


@dataclass(frozen=True, slots=True)
class Store:
    chunks: tuple[OffloadKey, ...]
    num_bytes: int
    begin_s: float = field(default_factory=time.monotonic)
