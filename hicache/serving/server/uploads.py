"""The bodies of requests while they arrive: bounded in bytes, each and all together, and in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from hicache.serving.server.replies import client_gone, too_large, too_many_bodies, too_slow

SMALL_BYTES = 64 << 10  # never refused for the bytes of other bodies: the number of connections bounds them
_NUM_LARGEST = 8  # bodies of the largest size that may be under way at a time
_BODY_S = 60.0


class Uploads:
    """Called on the event loop. A body is under way until it is parsed; `max_body_bytes`: of each."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = max_body_bytes
        self._under_way = 0  # bytes

    @contextlib.asynccontextmanager
    async def body(self, request: Request, timeout_s: float) -> AsyncIterator[bytearray]:
        """The body of a request, which is under way inside. Raises `ApiError`."""
        body, timeout_s = bytearray(), min(timeout_s, _BODY_S)
        try:
            try:
                await asyncio.wait_for(self._fill(body, request), timeout_s)
            except TimeoutError:
                raise too_slow(timeout_s) from None
            except ClientDisconnect:
                raise client_gone() from None
            yield body
        finally:
            self._under_way -= len(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        async for chunk in request.stream():
            if len(body) + len(chunk) > self._max_bytes:
                raise too_large(self._max_bytes)
            body += chunk
            self._under_way += len(chunk)
            if len(body) > SMALL_BYTES and self._under_way > _NUM_LARGEST * self._max_bytes:
                raise too_many_bodies()
