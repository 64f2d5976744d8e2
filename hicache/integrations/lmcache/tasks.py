"""Work in the background, and the finished tasks that LMCache's controllers wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

log = logging.getLogger(__name__)
R = TypeVar("R")


class Background:
    """One thread that waits for store processes: coroutines run there. Any thread may `start` them.

    `failures`: coroutines that raised, which is logged once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hicache-lmcache", daemon=True)
        self._thread.start()
        self.failures = 0

    def start(self, work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        return asyncio.run_coroutine_threadsafe(self._watched(work), self._loop)

    async def each(self, work: Callable[..., Coroutine[Any, Any, R]], *of: Iterable[Any]) -> list[R | None]:
        """The results of all at the same time, in their order; None of those that raised."""
        return list(await asyncio.gather(*(self._watched(each) for each in map(work, *of))))

    def close(self, last: Callable[[], None], within_s: float) -> None:
        """Finish what was started, until `within_s`, then call `last` and end. Once."""

        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                _, late = await asyncio.wait(others, timeout=within_s)
                for task in late:
                    task.cancel()
            last()

        asyncio.run_coroutine_threadsafe(finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _watched(self, work: Coroutine[Any, Any, R]) -> R | None:
        try:
            return await work
        except Exception:  # the server's other work goes on
            if not self.failures:
                log.exception("an unexpected error; further ones are counted in report_status")
            self.failures += 1
            return None


class Results(Generic[R]):
    """Finished tasks of one kind, each taken once, and the descriptor that becomes readable with each. Any thread."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._finished: dict[int, R] = {}
        self._closed = False

    @property
    def descriptor(self) -> int:
        return int(self._notifier.fileno())

    def put(self, task_id: int, result: R) -> None:
        with self._lock:
            self._finished[task_id] = result
            if not self._closed:
                self._notifier.notify()

    def take(self, task_id: int) -> R | None:
        with self._lock:
            return self._finished.pop(task_id, None)

    def take_all(self) -> dict[int, R]:
        with self._lock:
            taken, self._finished = self._finished, {}
            return taken

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()
