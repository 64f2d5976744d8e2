"""Converts bodies to prompts outside of the event loop: small bodies on a thread, large bodies in a pool of processes.

Parsing and tokenizing a large body takes seconds, mostly under the interpreter's lock. The server has threads and a
CUDA context, so it must not fork. A fork server starts the processes of the pool, and the first large body starts this
fork server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from hicache.process.logs import described
from hicache.serving.models import Tokenizer
from hicache.serving.server.prompts import Prepared, PromptEncoder, PromptLimits
from hicache.serving.server.replies import ApiError, internal_error
from hicache.serving.server.uploads import SMALL_BYTES
from hicache.storage.memory import usable_cpus

_NUM_THREADS = 2
_MAX_CPU_S = 60.0  # limit for one body; tokenizing the largest body takes 10 s on a slow core
_NICE = 5  # lower priority, so that running streams are not delayed
# Packages with slow imports, which the fork server imports when it starts. hicache is not in this list, because the
# fork server searches the working directory first, which may contain another folder `hicache`. The processes of the
# pool search the same path as the server.
_PRELOADED = ["fastapi", "jinja2", "pydantic", "tokenizers", "torch", "transformers", "triton"]

log = logging.getLogger(__name__)


class PromptWorkers:
    """Runs the pool of processes. The event loop calls its methods. `load`: a function that loads the tokenizer in each
    process; it must support pickle.

    If a process ends during its work, all bodies in the pool fail, and the next large body creates a new pool. The
    system kills a process that uses `max_cpu_s` seconds of CPU time for one body. All processes end when `close` is
    called or when the server ends.
    """

    def __init__(self, encoder: PromptEncoder, load: Callable[[], Tokenizer], *, max_cpu_s: float = _MAX_CPU_S) -> None:
        self._encoder = encoder
        self._load = load
        self._max_cpu_s = max_cpu_s
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "hicache-prompts")
        self._server_ended, self._lifeline = multiprocessing.Pipe(duplex=False)
        self._pool: ProcessPoolExecutor | None = None  # created late: its semaphores start another process
        self._pool_lock = threading.Lock()

    async def prepare(self, kind: str, raw: bytes | bytearray) -> Prepared:
        """Return the prompts of a body, as `PromptEncoder.prepare` does. If the task is cancelled before a worker has
        begun, the body is dropped."""
        loop = asyncio.get_running_loop()
        if len(raw) <= SMALL_BYTES:
            return await loop.run_in_executor(self._threads, self._encoder.prepare, kind, raw)
        try:
            # Runs on a thread, because starting the fork server takes seconds.
            return await asyncio.wrap_future(await loop.run_in_executor(None, self._submit, kind, raw))
        except BrokenProcessPool:
            log.error("a process ended while it tokenized request bodies")
        except _Defect as defect:
            log.error("a request body could not be tokenized", extra={"fields": defect.args[0]})
        raise internal_error()

    def close(self) -> None:
        """End the processes immediately, and the threads."""
        self._lifeline.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(cancel_futures=True)

    def _submit(self, kind: str, raw: bytes | bytearray) -> concurrent.futures.Future[Prepared]:
        with self._pool_lock:
            if self._pool is not None:
                with contextlib.suppress(BrokenProcessPool):
                    return self._pool.submit(_Worker.prepare, kind, raw)
            self._pool = self._new_pool()
            return self._pool.submit(_Worker.prepare, kind, raw)

    def _new_pool(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        num_processes = max(2, min(8, len(usable_cpus()) // 2))
        given = self._load, self._encoder.limits, self._max_cpu_s, self._server_ended
        return ProcessPoolExecutor(num_processes, context, _Worker.start, given)


class _Defect(Exception):
    """A defect in a process of the pool. Its argument contains the fields of the log line that the server writes."""


class _Worker:
    """A process of the pool."""

    encoder: PromptEncoder
    max_cpu_s: float

    @classmethod
    def start(
        cls, load: Callable[[], Tokenizer], limits: PromptLimits, max_cpu_s: float, server_ended: Connection
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # the server also gets these signals, and ends this process
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_with_server, args=(server_ended,), daemon=True).start()
        with contextlib.suppress(OSError):  # a container may forbid this call, and the next one
            os.nice(_NICE)
        with contextlib.suppress(OSError):
            # If memory runs out, the kernel kills this process before the server.
            Path("/proc/self/oom_score_adj").write_text("500")
        cls.encoder = PromptEncoder(load(), limits)
        cls.max_cpu_s = max_cpu_s

    @classmethod
    def prepare(cls, kind: str, raw: bytes | bytearray) -> Prepared:
        # The signal of this timer ends the process, unless the timer is cleared below.
        signal.setitimer(signal.ITIMER_PROF, cls.max_cpu_s)
        try:
            return cls.encoder.prepare(kind, raw)
        except ApiError:
            raise
        except Exception as error:
            raise _Defect(described(error)) from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            # Return memory to the system, because the largest body leaves 400 MB in glibc's heap.
            ctypes.CDLL(None).malloc_trim(0)


def _end_with_server(server_ended: Connection) -> None:
    server_ended.poll(None)
    os._exit(1)
