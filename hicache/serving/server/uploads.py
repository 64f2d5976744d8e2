"""Receives the bodies of requests. Limits the bytes of each body, the bytes of all bodies together, and the time to
receive a body."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from hicache.serving.server.replies import client_disconnected, too_large, too_many_bodies, too_slow

SMALL_BYTES = 64 << 10  # bodies up to this size are accepted even if all bodies together have reached their limit
_NUM_LARGEST = 8  # maximum number of bodies of maximum size in memory
_BODY_S = 60.0


class Uploads:
    """Receives bodies, and counts their bytes until they are parsed. Only the event loop uses it. `max_body_bytes`:
    maximum bytes of each body."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = max_body_bytes
        self._pending_bytes = 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request, timeout_s: float) -> AsyncIterator[bytearray]:
        """Receive the body of a request. The bytes of the body count until the end of the `with` block. Raises
        `ApiError`."""
        body, timeout_s = bytearray(), min(timeout_s, _BODY_S)
        try:
            try:
                await asyncio.wait_for(self._fill(body, request), timeout_s)
            except TimeoutError:
                raise too_slow(timeout_s) from None
            except ClientDisconnect:
                raise client_disconnected() from None
            yield body
        finally:
            self._pending_bytes -= len(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        async for chunk in request.stream():
            if len(body) + len(chunk) > self._max_bytes:
                raise too_large(self._max_bytes)
            body += chunk
            self._pending_bytes += len(chunk)
            if len(body) > SMALL_BYTES and self._pending_bytes > _NUM_LARGEST * self._max_bytes:
                raise too_many_bodies()
