"""Polls the engine while the device computes a pass.

After the scheduler has launched a pass, the host is idle until the pass has ended. If a staged load is in
progress, each poll may start its next step. One pass takes as long as several polls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hicache.engine import CacheEngine

_INTERVAL_S = 0.0002


class PassPolling:
    """Polls the engine during passes. Owned by the scheduler thread."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine, device = engine, engine.pool.device
        self._has_staged_loads = engine.inspect.context.exclusive is not None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Poll the engine after the caller has launched a pass within the `with` block. One poll lets the engine
        prepare capacity for the next pass during this pass. If a staged load is in progress, poll until the pass
        ends.

        Copies that these polls submit wait for work queued on the current stream before the pass, but not for the pass.
        This is safe, because the pass uses neither free slots nor slots of pages that are being evicted, which no
        request holds.
        """
        if not self._has_staged_loads:
            yield
            return
        if self._stream is None:
            yield
            self._engine.poll()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        yield
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            while self._engine.poll() and not end.query():
                time.sleep(_INTERVAL_S)
