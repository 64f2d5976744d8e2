"""Cancels the work for a request when its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from hicache.serving.server.generation import Generation
from hicache.serving.server.replies import client_disconnected, timed_out

T = TypeVar("T")


async def run_unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T], left_s: float, timeout_s: float) -> T:
    """Return the result of `work`. If the client disconnects, or after `left_s` seconds, which are the rest of
    `timeout_s`, cancels `work` and raises `ApiError`. Also raises exceptions that `work` raises.

    The caller must have received the request's body before.
    """
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, disconnected), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise client_disconnected() if disconnected.done() else timed_out(timeout_s)
    finally:
        task.cancel()
        disconnected.cancel()


@contextlib.asynccontextmanager
async def watched(receive: Receive, generation: Generation, fields: dict[str, Any]) -> AsyncIterator[None]:
    """End the generation if the client disconnects within the `with` block. At the end of the block, abort all answers
    that have not finished.

    `fields`: the fields of the request's log line, to which the outcome is added.
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
