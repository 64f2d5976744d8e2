"""Publishes KV events on a separate thread, so that no step of the scheduler waits for subscribers.

The changes of each step are one batch with the next sequence number. A batch is lost if the queue is full or if the
sink fails to write the batch. No later batch gets the number of a lost batch, so subscribers see a gap. This module
imports the classes of the tree's changes, but no code that copies pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hicache.metrics import Metrics
from hicache.pages.events import EventLog, PageChange

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


@dataclass(frozen=True)
class EventBatch:
    """The changes of the tree in one step of the scheduler. `time_s`: end of the step, in seconds since the epoch."""

    sequence: int
    time_s: float
    changes: Sequence[PageChange]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in the changes, at least 1."""
        return max(1, sum(len(change.keys) for change in self.changes))


class EventSink(Protocol):
    """Writes batches to a file or sockets. Built on the thread that builds the engine; used only by the publisher's
    thread."""

    @property
    def poll_s(self) -> float | None:
        """Maximum seconds that the publisher waits for a batch before it calls `serve`. None: it calls `serve` only
        after each batch."""
        ...

    def send(self, batch: EventBatch) -> None:
        """Write a batch. If this raises any exception, the batch is lost."""
        ...

    def serve(self) -> None:
        """Answer requests of subscribers for a bounded time. No batch is sent during this call."""
        ...

    def close(self) -> None: ...


class EventPublisher:
    """Owns a queue, a thread and a sink. `log`: the event log of the engine's tree.

    The scheduler thread calls `start`, `publish` once a step, and `close`. `publish` holds a lock only while it appends
    a batch. The queue accepts batches of at most `queue_blocks` blocks in total, and always at least one batch. The
    stream begins and ends with `AllBlocksCleared`, which invalidates the events of an earlier engine.
    """

    def __init__(self, log: EventLog, sink: EventSink, queue_blocks: int, metrics: Metrics) -> None:
        self._log = log
        self._sink = sink
        self._queue_blocks = queue_blocks
        self._changed = threading.Condition()
        self._waiting: deque[EventBatch] = deque()
        self._num_blocks = 0
        self._ends = False
        self._next_sequence = 0
        self._thread: threading.Thread | None = None
        self._dropped = metrics.counter(
            "kv_events.dropped_batches", "batches of KV events that were dropped because the queue was full"
        )
        self._failed = metrics.counter(
            "kv_events.failed_batches", "batches of KV events that were not written or replayed"
        )
        self._sent = metrics.counter("kv_events.sent_batches", "batches of KV events that were written")
        metrics.gauge("kv_events.waiting_blocks", "blocks whose events were not written yet", lambda: self._num_blocks)

    def start(self) -> None:
        """Start the thread and begin the stream. Idempotent."""
        if self._thread is None:
            self._log.cleared()
            self.publish()
            self._thread = threading.Thread(target=self._run, name="hicache-kv-events", daemon=True)
            self._thread.start()

    def publish(self) -> None:
        """Queue the tree's changes since the last call, as a batch for the publisher's thread. Does not wait for the
        sink."""
        changes = self._log.take_changes()
        if not changes:
            return
        batch = EventBatch(self._next_sequence, time.time(), changes)
        self._next_sequence += 1
        num_blocks = batch.num_blocks
        with self._changed:
            if self._waiting and self._num_blocks + num_blocks > self._queue_blocks:
                self._drop(batch)
                return
            self._waiting.append(batch)
            self._num_blocks += num_blocks
            self._changed.notify()

    def close(self, within_s: float = _CLOSE_S) -> bool:
        """End the stream, write queued batches and close the sink. Returns True if all of this was finished within
        `within_s` seconds, False after waiting that long.

        Idempotent. The thread is a daemon, so the process can exit even if the thread hangs in its sink.
        """
        if self._thread is None:
            self._sink.close()
            return True
        if not self._ends:
            self.publish()  # publishes changes that closing the engine has made so far
            self._log.cleared()
            self.publish()
        self._end()
        self._thread.join(within_s)
        if self._thread.is_alive():
            log.warning("KV events: the last batches could not be written within %g s", within_s)
        return not self._thread.is_alive()

    def abandon(self, deadline_s: float) -> None:
        """End the thread of an engine that was not closed. `deadline_s`: time of `time.monotonic` until which this call
        waits."""
        self._end()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _end(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()

    def _drop(self, batch: EventBatch) -> None:
        if not self._dropped.value:
            log.warning(
                "KV events: batch %d was dropped, because subscribers are too slow; raise advanced "
                "kv_events_queue_blocks=%d. Further drops are counted (kv_events.dropped_batches)",
                batch.sequence,
                self._queue_blocks,
            )
        self._dropped.value += 1

    # Methods that run on the thread

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None or not self._ends:
                self._work(batch)
        finally:
            self._sink.close()

    def _next(self) -> EventBatch | None:
        """Return the next batch. Returns None if no batch was queued within `poll_s` seconds, or if the stream has
        ended."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._ends, self._sink.poll_s)
            return self._waiting.popleft() if self._waiting else None

    def _work(self, batch: EventBatch | None) -> None:
        try:
            if batch is not None:
                self._sink.send(batch)
                self._sent.value += 1
            self._sink.serve()
        except Exception:  # subscribers see a gap in the sequence numbers
            if not self._failed.value:
                log.exception("KV events: a batch could not be written or replayed. Further failures are only counted")
            self._failed.value += 1
        if batch is not None:
            with self._changed:
                self._num_blocks -= batch.num_blocks
