"""What is done for a client ends when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from hicache.serving.server.generation import Generation
from hicache.serving.server.replies import client_gone, timed_out

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], left_s: float, timeout_s: float) -> T:
    """The result of `work`, which is cancelled where the client goes away, or `left_s` of its `timeout_s` have passed.

    The body was received before. Raises `ApiError` then, and what `work` raises.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise client_gone() if gone.done() else timed_out(timeout_s)
    finally:
        task.cancel()
        gone.cancel()


@contextlib.asynccontextmanager
async def watched(receive: Receive, generation: Generation, fields: dict[str, Any]) -> AsyncIterator[None]:
    """Inside, the generation ends as soon as the client goes away; at the end, whatever is left of it.

    `fields`: where the log finds how it went.
    """

    async def wait_for_disconnect() -> None:
        await _disconnected(receive)
        generation.disconnect()

    watcher = asyncio.create_task(wait_for_disconnect())
    try:
        yield
    finally:
        watcher.cancel()
        generation.abort()
        fields.update(generation.summary())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
