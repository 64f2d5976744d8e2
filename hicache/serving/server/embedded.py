"""Runs `hicache serve` inside another command, in threads of this process."""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from hicache.errors import ConfigError
from hicache.serving.server.command import ServerContext, prepared, serve

_Stop: TypeAlias = Callable[[], object]


@contextlib.contextmanager
def embedded(flags: argparse.Namespace, say: Callable[[str], object]) -> Iterator[str]:
    """Run a server within the `with` block and yield its URL. If the block raises, the server ends open requests
    instead of completing them. Raises HiCacheError.

    `flags`: parsed flags that `add_server_flags` added. `say`: called with messages on the packaged model.
    """
    with prepared(flags, say) as context:
        listening: concurrent.futures.Future[tuple[str, _Stop]] = concurrent.futures.Future()
        thread = threading.Thread(target=_serve, args=(flags, context, listening), name="hicache-server", daemon=True)
        thread.start()
        url, stop = listening.result()
        try:
            yield url
        except BaseException:
            stop()  # the second call, below, ends open requests: the block that waited for them has ended
            raise
        finally:
            stop()
            thread.join()


def _serve(
    flags: argparse.Namespace, context: ServerContext, listening: concurrent.futures.Future[tuple[str, _Stop]]
) -> None:
    async def until_stopped() -> None:
        signals = asyncio.Queue[int]()
        stop = partial(asyncio.get_running_loop().call_soon_threadsafe, signals.put_nowait, signal.SIGTERM)
        await serve(flags, context, signals, lambda url: listening.set_result((url, stop)))

    try:
        asyncio.run(until_stopped())
    finally:
        if not listening.done():
            listening.set_exception(ConfigError("the server did not start; run 'hicache serve' to see the reason"))
