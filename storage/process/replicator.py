"""Copies pages of one identity from the store of this machine to a remote store, after the local store has stored them.

The bytes of a stored value are copied without decoding: the thread reads a value from the local store, and the writer
of the remote store puts the same bytes. So no memory of an engine is pinned, and no engine waits. The remote store has
its own threads, breaker and watchdog (a `StoreService`). The writer of the remote store lets reads of the remote store
run first, and this thread lets reads of the local store run first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hicache.storage.base import StoreError
from hicache.storage.process.io_queue import IoQueue
from hicache.storage.process.jobs import FindDone, FindJob, ReadClass, Stalled, ValueJob, WriteDone
from hicache.storage.process.service import CLOSES_REMOTE, StoreService
from hicache.storage.process.settings import RemoteSettings

log = logging.getLogger(__name__)

_MAX_BATCH_PAGES, _MAX_BATCH_BYTES = 64, 16 << 20  # maximum size of one put; the I/O timeout applies to one put
_MAX_KNOWN_KEYS = 1 << 16
_KNOWN_S = 3600.0  # time for which a page of the remote store counts as present, because the store may remove it
_MAX_YIELD_S, _POLL_S = 0.1, 0.002
_CLOSE_S = 5.0  # time for which `close` waits for queued pages
_OPEN_PAUSE_S, _MAX_OPEN_PAUSE_S = 1.0, 30.0
_IS_OPEN, _IS_NOT_OPEN = 0, 2  # state numbers of a breaker


class Replicator:
    """Owns the queue of keys and the thread that copies their values.

    Any thread may call `wrote`, `used` and `know`; these methods do not block. `open_remote` opens the remote store. If
    `open_remote` raises an error, the thread calls it again with growing delays, and pages wait in the queue.
    `release` closes an opened store. Invariant: each key that was queued is sent, present in the remote store, absent
    from the local store, failed, dropped or still queued.
    """

    def __init__(
        self,
        local: StoreService,
        settings: RemoteSettings,
        open_remote: Callable[[], StoreService],
        release: Callable[[StoreService], None],
    ) -> None:
        self._local = local
        self._settings = settings
        self._open_remote = open_remote
        self._release = release
        self._remote: StoreService | None = None
        self._changed = threading.Condition()
        self._queue = OrderedDict[bytes, int]()  # bytes of the page of each queued key
        self._queued_bytes = 0
        self._copied = _KnownKeys(local.clock)  # keys of pages in the remote store
        self._used = _KnownKeys(local.clock)  # used pages that the local store lacked
        self._copying = list[bytes]()
        self._sent = self._sent_bytes = self._dropped = self._failed = 0
        self._stop_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="hicache-replicator", daemon=True)
        self._thread.start()

    def wrote(self, keys: Sequence[bytes], page_bytes: int, *, is_costly: bool) -> None:
        """Queue pages that the local store has stored, if the settings require copies of these pages."""
        wants_all = is_costly or self._settings.backup == "all"
        with self._changed:
            # The keys in `_copying` are included, because the local store may not have had the page when the thread
            # read it.
            wanted = keys if wants_all else [key for key in keys if key in self._used or key in self._copying]
        self._enqueue(wanted, page_bytes)

    def used(self, keys: Sequence[bytes]) -> None:
        """Queue pages that a request used; any tier may have served them."""
        self._enqueue(keys, max(self._local.page_sizes, default=1))

    def know(self, keys: Iterable[bytes]) -> None:
        """Record that the remote store has these pages, so that they are not copied within an hour."""
        with self._changed:
            self._copied.add(keys)

    @property
    def is_busy(self) -> bool:
        """Return whether keys are queued or being copied."""
        return bool(self._queue or self._copying)

    def look(self) -> None:
        """Announce stalled threads of the remote store. Never blocks."""
        if (remote := self._remote) is not None:
            remote.look()

    def numbers(self) -> tuple[float, ...]:
        """Return the first seven numbers of `BACKUP_NUMBERS`, for the shared status."""
        remote = self._remote
        state = remote.writes.breaker.state if remote is not None else _IS_NOT_OPEN if self.is_busy else _IS_OPEN
        with self._changed:
            queued = len(self._queue) + len(self._copying), self._queued_bytes
            return (*queued, self._sent, self._sent_bytes, self._dropped, self._failed, state)

    def close(self, within_s: float = _CLOSE_S) -> None:
        """Copy queued pages for at most `within_s`, then drop the remaining pages. End the thread unless the remote
        store hangs."""
        with self._changed:
            self._stop_at_s = time.monotonic() + within_s
            self._changed.notify_all()
        self._thread.join(within_s + 1.0)
        with self._changed:
            left = len(self._queue) + len(self._copying)
            self._dropped += left
            self._queue.clear()
        if left:
            log.warning("%d pages were not copied to the remote store before this one was closed", left)
        if (remote := self._remote) is not None:
            # The remote store is closed in a thread, so that a remote store that hangs does not delay closing the local
            # store.
            threading.Thread(target=self._release, args=(remote,), name=CLOSES_REMOTE, daemon=True).start()

    def _enqueue(self, keys: Sequence[bytes], page_bytes: int) -> None:
        with self._changed:
            for key in keys:
                if self._copied.has(key, _KNOWN_S) or key in self._queue:
                    continue
                is_full = len(self._queue) >= self._settings.max_queued_pages
                if is_full or self._queued_bytes + page_bytes > self._settings.max_queued_bytes or self._is_late:
                    self._dropped += 1
                    continue
                self._queue[key] = page_bytes
                self._queued_bytes += page_bytes
            self._changed.notify_all()

    @property
    def _is_late(self) -> bool:
        return self._stop_at_s is not None and time.monotonic() >= self._stop_at_s

    # On the thread

    def _run(self) -> None:
        """Copy queued pages until `close`."""
        while (remote := self._wait_for_remote()) is not None and (keys := self._take()):
            num_failed = len(keys)
            try:
                num_failed = self._copy(keys, remote)
            except Exception:  # the thread must continue with other pages
                log.exception("pages could not be copied to the remote store")
            with self._changed:
                self._failed += num_failed
                self._copying = []

    def _wait_for_remote(self) -> StoreService | None:
        """Wait until keys are queued, then until the remote store is open and its breaker admits writes. Returns None
        if the replicator is closed first."""
        pause_s, until_s = _OPEN_PAUSE_S, 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stop_at_s is not None)
                if not self._queue or self._is_late:
                    return None
                left_s = until_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(min(left_s, _MAX_YIELD_S))
                    continue
            if self._remote is None:
                try:
                    self._remote = self._open_remote()
                except (StoreError, OSError, RuntimeError) as error:  # RuntimeError: the system cannot start a thread
                    log.warning("the remote store is not open: %s; it is tried again in %g s", error, pause_s)
                    until_s, pause_s = time.monotonic() + pause_s, min(2 * pause_s, _MAX_OPEN_PAUSE_S)
            elif not self._remote.writes.refuses():
                return self._remote
            else:
                until_s = time.monotonic() + _MAX_YIELD_S

    def _take(self) -> list[bytes]:
        """Take the oldest queued keys, at most the number and bytes of one put."""
        with self._changed:
            keys, num_bytes = list[bytes](), 0
            while self._queue and len(keys) < _MAX_BATCH_PAGES and num_bytes < _MAX_BATCH_BYTES:
                key, page_bytes = self._queue.popitem(last=False)
                keys.append(key)
                num_bytes += page_bytes
            self._queued_bytes -= num_bytes
            self._copying = keys
            return keys

    def _copy(self, keys: Sequence[bytes], remote: StoreService) -> int:
        """Copy pages that the remote store lacks. Returns the number of pages that failed."""
        find = FindJob(0, (), ReadClass.BACKGROUND_FIND, tuple(keys))
        found = _answer(remote.reads, find)
        present = found.others if isinstance(found, FindDone) and found.answered else (False,) * len(keys)
        self.know(key for key, held in zip(keys, present, strict=True) if held)
        values = dict[bytes, bytes]()
        for key in (key for key, held in zip(keys, present, strict=True) if not held):
            self._yield_to_reads()
            value = self._local.store.get_value(key)
            if value is not None:
                values[key] = value
            else:  # the page may be in an engine's memory, and be written later
                with self._changed:
                    self._used.add([key])
        if not values:
            return 0
        done = _answer(remote.writes, ValueJob(tuple(values), tuple(values.values())))
        ok = done.ok if isinstance(done, WriteDone) else (False,) * len(values)
        sent = [key for key, stored in zip(values, ok, strict=True) if stored]
        with self._changed:
            self._copied.add(sent)
            self._sent += len(sent)
            self._sent_bytes += sum(len(values[key]) for key in sent)
        return len(values) - len(sent)

    def _yield_to_reads(self) -> None:
        """Wait while reads of the local store are queued, but at most `_MAX_YIELD_S`."""
        until_s = time.monotonic() + _MAX_YIELD_S
        while len(self._local.reads) and time.monotonic() < until_s:
            time.sleep(_POLL_S)


class _KnownKeys(OrderedDict[bytes, float]):
    """The last keys that were added, at most `_MAX_KNOWN_KEYS`, each with the time at which it was added."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def has(self, key: bytes, within_s: float) -> bool:
        """Return whether the key was added at most `within_s` seconds ago."""
        return self._clock() - self.get(key, -math.inf) <= within_s

    def add(self, keys: Iterable[bytes]) -> None:
        now_s = self._clock()
        for key in keys:
            self[key] = now_s
            self.move_to_end(key)
        while len(self) > _MAX_KNOWN_KEYS:
            self.popitem(last=False)


def _answer(jobs: IoQueue[Any, Any], job: FindJob | ValueJob) -> object:
    """Run a job of a store and return its answer. Wait for the answer even if the job stalls, because the store uses
    the memory of the job until the answer."""
    answers, is_done = list[object](), threading.Event()

    def reply(outcome: object) -> None:
        if not isinstance(outcome, Stalled):
            answers.append(outcome)
            is_done.set()

    jobs.submit(job, reply)
    is_done.wait()
    return answers[0]
