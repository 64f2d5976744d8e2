"""Polls the engine while the device computes a pass.

After the scheduler has launched a pass, the host is idle until the pass has ended. If pages are exchanged between
device and host, each poll makes one step of the exchange. One pass takes as long as several polls.
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
        self._exchanges = engine.inspect.context.exclusive is not None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Poll the engine when the pass that the caller launches within the `with` block has been launched. The engine
        is polled once, so that capacity for the next pass is prepared during this one. While pages are exchanged, it is
        polled until the pass ends.

        Copies that these polls submit wait for work queued on the current stream before the pass, but not for the pass.
        This is safe: the pass does not write to slots of pages that are being evicted, because no request holds them,
        and it does not use free slots.
        """
        if not self._exchanges:
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
