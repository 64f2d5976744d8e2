"""What the engine does while the device computes a pass.

A pass was launched, and the host has nothing to do for it. Where pages are exchanged between device and host, step by
step, each poll makes one, and a pass is as long as many of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hicache.engine import CacheEngine

_LOOK_S = 0.0002


class BesidePasses:
    """Owned by the scheduler thread."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine, device = engine, engine.pool.device
        self._exchanges = engine.inspect.context.exclusive is not None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def polling(self) -> Iterator[None]:
        """The block launches a pass. It is polled once behind it, so that room for the next pass is made beside this
        one, and while pages are exchanged until it ends.

        Copies that a poll submits wait for what the current stream had before the pass, not for the pass: it neither
        writes to slots of pages that leave the device, which no request holds, nor knows those that are free.
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
                time.sleep(_LOOK_S)
