"""Converts bodies to prompts outside the event loop: small bodies on a thread, others in a pool of processes.

Parsing and tokenizing a large body takes seconds, mostly under the interpreter's lock. A process of the pool is never
forked from the server, which has threads and a CUDA context. A fork server starts it, and the first large body starts
the fork server.
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
# Packages with slow imports, which the fork server imports first. hicache is not among them: the fork server looks for
# modules in the working directory first, which may have another folder `hicache`. A process that the fork server starts
# has the server's own path.
_PRELOADED = ["fastapi", "jinja2", "pydantic", "tokenizers", "torch", "transformers", "triton"]

log = logging.getLogger(__name__)


class PromptWorkers:
    """Runs the pool of processes; the event loop calls its methods. `load` loads the tokenizer in each process; it is
    pickled.

    If a process ends while it works, all large bodies in the pool fail, and the next large body creates a new pool. The
    system kills a process that spends `max_cpu_s` seconds on one body. All processes end with this object or with the
    server.
    """

    def __init__(self, encoder: PromptEncoder, load: Callable[[], Tokenizer], *, max_cpu_s: float = _MAX_CPU_S) -> None:
        self._encoder = encoder
        self._load = load
        self._max_cpu_s = max_cpu_s
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "hicache-prompts")
        self._server_ended, self._lifeline = multiprocessing.Pipe(duplex=False)
        self._pool: ProcessPoolExecutor | None = None  # created late, because its semaphores start another process
        self._pool_lock = threading.Lock()

    async def prepare(self, kind: str, raw: bytes | bytearray) -> Prepared:
        """Return the prompts of a body, as `PromptEncoder.prepare` does. If the task is cancelled, a body that no
        worker has begun is dropped."""
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
        for number in (signal.SIGINT, signal.SIGTERM):  # the server gets these signals too, and ends this process
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_with_server, args=(server_ended,), daemon=True).start()
        with contextlib.suppress(OSError):  # a container may forbid this call, and the next one
            os.nice(_NICE)
        with contextlib.suppress(OSError):
            # makes the kernel kill this process before the server if memory runs out
            Path("/proc/self/oom_score_adj").write_text("500")
        cls.encoder = PromptEncoder(load(), limits)
        cls.max_cpu_s = max_cpu_s

    @classmethod
    def prepare(cls, kind: str, raw: bytes | bytearray) -> Prepared:
        # the signal of this timer ends the process unless the timer is cleared
        signal.setitimer(signal.ITIMER_PROF, cls.max_cpu_s)
        try:
            return cls.encoder.prepare(kind, raw)
        except ApiError:
            raise
        except Exception as error:
            raise _Defect(described(error)) from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            # returns memory to the system: the largest body leaves 400 MB in glibc's heap
            ctypes.CDLL(None).malloc_trim(0)


def _end_with_server(server_ended: Connection) -> None:
    server_ended.poll(None)
    os._exit(1)
