"""The bodies of requests while they arrive: bounded in bytes, each and all together, and in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from hicache.serving.server.replies import client_gone, too_large, too_many_bodies, too_slow

_FREE_BYTES = 64 << 10  # of each: the number of connections bounds them
_NUM_LARGEST = 8  # bodies of the largest size that are held at a time
_BODY_S = 60.0


class Uploads:
    """Called on the event loop. Bodies that are read, or not parsed yet, are at most `max_body_bytes` each, and
    together eight times as much beside the first 64 KiB of each."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = max_body_bytes
        self._left = _NUM_LARGEST * max_body_bytes

    @contextlib.asynccontextmanager
    async def body(self, request: Request, timeout_s: float) -> AsyncIterator[bytearray]:
        """The body of a request, which counts as held inside. Raises `ApiError`."""
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
            self._left += _counted(len(body))

    async def _fill(self, body: bytearray, request: Request) -> None:
        async for chunk in request.stream():
            if len(body) + len(chunk) > self._max_bytes:
                raise too_large(self._max_bytes)
            self._left += _counted(len(body)) - _counted(len(body) + len(chunk))
            body += chunk
            if self._left < 0:
                raise too_many_bodies()


def _counted(num_bytes: int) -> int:
    return max(0, num_bytes - _FREE_BYTES)
