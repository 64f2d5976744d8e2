"""Reads of a store on another machine that end in time: one that hangs holds up no reader of the disk before it."""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hicache.integrations.forwarding_store import ForwardingStore
from hicache.storage import PageBuffer, PageStore, StoreError, StoreStats
from hicache.storage.counters import Counters
from hicache.storage.lookup import check_page
from hicache.storage.memory import Scratch

log = logging.getLogger(__name__)

WAIT_S = 2.0
CLOSE_S = 10.0
_BYTES_PER_S, _KEYS_PER_S = 64 << 20, 256  # a call has a second more for so many bytes to read, or keys to look for
_PART_BYTES = 8 << 20  # read at a time, and copied while they are in the caches
_GRACE_S = 1.0  # from the deadline that the store is given until it is waited for no longer


class _Call:
    """What a thread of ours asks the store, part by part. `ask` returns the answer for a part of the keys, and `take`
    gets it, with its number: it may write to the caller's buffers, but not after `ends_within` has returned."""

    def __init__(
        self, num_parts: int, ask: Callable[[int], list[bool]], take: Callable[[int, list[bool]], None]
    ) -> None:
        self._num_parts, self._ask, self._take = num_parts, ask, take
        self._lock = threading.Lock()  # held while `take` runs
        self._ended = threading.Event()
        self._is_awaited = True
        self.answers: list[bool] = []  # for the first keys, those of parts that came in time
        self.error: Exception | None = None
        self.read_errors = 0

    def run(self, store: PageStore) -> None:
        before = store.thread_read_errors()
        try:
            for part in range(self._num_parts):
                answers = self._ask(part)
                with self._lock:
                    if not self._is_awaited:
                        return
                    self._take(part, answers)
                    self.answers += answers
                    self.read_errors = store.thread_read_errors() - before
        except Exception as error:  # the caller's
            log.debug("a read of the remote store raised", exc_info=error)
            self.error = error
        self._ended.set()

    def ends_within(self, seconds: float) -> bool:
        """Whether all is answered; if it is not by then, what comes later is ignored."""
        self._ended.wait(seconds)
        with self._lock:
            self._is_awaited = False
        return self._ended.is_set()


class BoundedReads(ForwardingStore):
    """See `PageStore`; made to stand behind a disk in a `ChainStore`. `contains` and `get_into` ask `store`, which this
    one closes, in threads of their own, with a deadline of `wait_s` and a second for each 64 MiB of buffers, or 256
    keys that are looked for. What it has not answered a second later is a miss, and a read has failed; so have other
    reads until it answers.

    Pages are copied from memory of the thread's: nothing writes to a buffer after its call. `close` waits for `close_s`
    seconds; a store that has a call under way then stays open.
    """

    def __init__(self, store: PageStore, *, wait_s: float = WAIT_S, close_s: float = CLOSE_S) -> None:
        super().__init__(store)
        self._wait_s, self._close_s = wait_s, close_s
        self._counters, self._memory = Counters(), Scratch()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards what follows
        self._num_threads = self._num_given_up = 0
        self._under_way: set[_Call] = set()
        self._overdue: set[_Call] = set()  # of these
        self._closed = False

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        until_s = min(deadline_s, time.monotonic() + self._wait_s + len(keys) / _KEYS_PER_S)
        call = _Call(1, lambda _: self._store.contains(keys, deadline_s=until_s), lambda _, found: None)
        return self._answer(call, len(keys), until_s)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        for buffer in buffers:
            check_page(buffer, self.page_sizes or (len(buffer),), writeable=True)
        if len(keys) != len(buffers):
            raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers")
        until_s = min(deadline_s, time.monotonic() + self._wait_s + sum(map(len, buffers)) / _BYTES_PER_S)
        parts, pages = list(_parts(buffers)), list[PageBuffer]()

        def ask(n: int) -> list[bool]:
            lengths = [len(buffer) for buffer in buffers[parts[n]]]
            pages[:] = np.split(self._memory.take_page(sum(lengths)), np.cumsum(lengths[:-1]))
            return self._store.get_into(keys[parts[n]], pages, deadline_s=until_s)

        def take(n: int, found: list[bool]) -> None:
            for page, buffer, hit in zip(pages, buffers[parts[n]], found, strict=True):
                if hit:
                    np.copyto(buffer, page)

        return self._answer(_Call(len(parts), ask, take), len(keys), until_s)

    def stats(self) -> StoreStats:
        stats = self._store.stats()
        return dataclasses.replace(stats, read_errors=stats.read_errors + self._num_given_up)

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._num_threads):
                self._calls.put(None)
            is_idle = self._changed.wait_for(lambda: not self._under_way, self._close_s)
        if is_idle:
            self._store.close()
        else:
            log.warning("a read of the remote store has not returned; its connections end with this process")

    def _answer(self, call: _Call, num_keys: int, until_s: float) -> list[bool]:
        """What the store answers; misses for what it does not in time."""
        if self._begin(call):
            if call.ends_within(max(0.0, until_s - time.monotonic()) + _GRACE_S):
                self._counters.add(read_errors=call.read_errors)
                if call.error is not None:
                    raise call.error
                return call.answers
            with self._changed:
                if call in self._under_way:
                    if not self._overdue:
                        log.warning("the remote store does not answer; until it does, its pages are misses")
                    self._overdue.add(call)
        with self._changed:
            self._num_given_up += 1
        self._counters.add(read_errors=1)
        return call.answers + [False] * (num_keys - len(call.answers))

    def _begin(self, call: _Call) -> bool:
        """Hand it to a thread, unless another call is overdue."""
        with self._changed:
            if self._closed:
                raise StoreError("the store is closed")
            if self._overdue:
                return False
            self._under_way.add(call)
            if len(self._under_way) > self._num_threads:
                self._num_threads += 1
                threading.Thread(target=self._read_loop, name="hicache-remote-read", daemon=True).start()
        self._calls.put(call)
        return True

    def _read_loop(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run(self._store)
            with self._changed:
                self._under_way.discard(call)
                self._overdue.discard(call)
                self._changed.notify_all()


def _parts(buffers: Sequence[PageBuffer]) -> Iterator[slice]:
    """Runs of buffers of at most `_PART_BYTES`, or one."""
    start = num_bytes = 0
    for n, buffer in enumerate(buffers):
        if n > start and num_bytes + len(buffer) > _PART_BYTES:
            yield slice(start, n)
            start, num_bytes = n, 0
        num_bytes += len(buffer)
    if buffers:
        yield slice(start, len(buffers))
