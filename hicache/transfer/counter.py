"""Tracks which layers of a load have arrived, so that a forward pass can start before its complete prefix is loaded.

A load records an event after each layer. The pool's getters call `wait_until(layer)`, which waits for this layer of all
loads on which the batch depends. On CUDA the current stream waits, never the host; on the CPU the calling thread waits.
A load must be submitted before the forward pass that consumes the load, because an event that was never recorded counts
as done. If a load is queued in steps, `wait_until` first queues the steps up to the layer (`queue_on_demand`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import torch

from hicache.errors import TransferError

NUM_PRODUCERS = 3
# one load of every 4 is timed, because timing needs one more event for each layer for which a pass waits
_TIMED_LOADS = 4


class CudaLayerEvents:
    """A producer: the events of one load at a time, one CUDA event per layer. Later loads use the events again.

    `_reached`: for a timed load, by layer, an event recorded when the consuming stream started to wait for the layer.
    """

    def __init__(self, num_layers: int) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(num_layers)]
        self._reached: dict[int, torch.cuda.Event] = {}
        self._num_loads = 0
        self._submitted = True
        self._error: Exception | None = None

    def begin(self) -> None:
        """Start a new load on this producer, which is finished when the load's last layer has arrived."""
        self._submitted = False
        self._error = None
        self._reached = {}
        self._num_loads += 1

    def record(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Record that a layer (dense index) has arrived when the work queued on `stream` (None: the current stream) has
        ended."""
        self._events[layer].record(stream)
        self._submitted = layer == len(self._events) - 1

    def fail(self, error: Exception) -> None:
        """End the load with `error`; `wait` then raises a TransferError with `error` as its cause."""
        self._error = error
        self._submitted = True

    def wait(self, layer: int) -> None:
        """Make the current stream wait for the layer. Raises TransferError if the load failed."""
        if self._error is not None:
            raise _failed_load(self._error) from self._error
        stream, event = torch.cuda.current_stream(), self._events[layer]
        if self._is_timed and layer not in self._reached and not event.query():
            reached = torch.cuda.Event(enable_timing=True)
            reached.record(stream)
            self._reached[layer] = reached
        stream.wait_event(event)

    @property
    def exposed_s(self) -> float | None:
        """Return the seconds for which the consuming stream waited for the load, once it has finished; None if the load
        was not timed."""
        if not self._is_timed:
            return None
        # The load has finished, so the stream does not wait for layers that it has not reached yet.
        reached = {layer: event for layer, event in self._reached.copy().items() if event.query()}
        waits_ms = [float(event.elapsed_time(self._events[layer])) for layer, event in reached.items()]
        return sum(max(0.0, wait_ms) for wait_ms in waits_ms) / 1e3

    @property
    def _is_timed(self) -> bool:
        return self._num_loads % _TIMED_LOADS == 1

    def finished(self) -> bool:
        return self._submitted and self._events[-1].query()


class CpuLayerEvents:
    """Like `CudaLayerEvents`, with a condition: the copying thread calls `record`, and `wait` blocks the consumer's
    thread."""

    def __init__(self, num_layers: int) -> None:
        self._condition = threading.Condition()
        self._num_layers = self._recorded = num_layers
        self._error: Exception | None = None
        self.exposed_s = 0.0

    def begin(self) -> None:
        with self._condition:
            self._recorded = 0
            self._error = None
            self.exposed_s = 0.0

    def record(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        with self._condition:
            self._recorded = layer + 1
            self._condition.notify_all()

    def fail(self, error: Exception) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def wait(self, layer: int) -> None:
        with self._condition:
            if self._recorded <= layer and self._error is None:
                begin_s = time.perf_counter()
                self._condition.wait_for(lambda: self._recorded > layer or self._error is not None)
                self.exposed_s += time.perf_counter() - begin_s
            if self._error is not None:
                raise _failed_load(self._error) from self._error

    def finished(self) -> bool:
        return self._recorded == self._num_layers or self._error is not None


class LayerSink(Protocol):
    """Receives the reports of a transfer backend about its loads; `LayerTransferCounter` documents the methods."""

    def queue_on_demand(self, load_id: int, queue: Callable[[int], None]) -> None: ...

    def record(self, load_id: int, layer: int, stream: torch.cuda.Stream | None = None) -> None: ...

    def fail(self, load_id: int, error: Exception) -> None: ...


LayerEvents: TypeAlias = CudaLayerEvents | CpuLayerEvents


def _failed_load(error: Exception) -> TransferError:
    return TransferError(f"the load this batch depends on failed: {error}")


class LayerTransferCounter:
    """Tracks the loads in flight in a ring of producers, and the loads that the current batch consumes.

    Load ids count up from 0 and are never reused, so a load whose producer has a later load by now counts as finished.
    The scheduler thread calls `begin` and `set_consumer`, the copying side calls `record` and `fail`, and the forward
    pass calls `wait_until`.
    """

    def __init__(
        self, num_layers: int, make_events: Callable[[int], LayerEvents], producers: int = NUM_PRODUCERS
    ) -> None:
        self.num_layers = num_layers
        self._ring = [make_events(num_layers) for _ in range(producers)]
        self._owner = [-1] * producers
        self._next = 0
        self._consumed: tuple[tuple[int, LayerEvents], ...] = ()
        self._queues: dict[int, Callable[[int], None]] = {}  # by load id, for loads whose last layer is not queued yet
        # Errors of failed loads until `forget`, kept even if the producers of these loads have other loads by then.
        self._failures: dict[int, Exception] = {}
        self._failed: Exception | None = None

    def can_begin(self) -> bool:
        """Return whether a producer is free for another load."""
        return self._ring[self._next % len(self._ring)].finished()

    def begin(self) -> int:
        """Assign a producer to a new load and return the load id. Call this method only after `can_begin` returned
        True."""
        slot = self._next % len(self._ring)
        assert self._ring[slot].finished(), "began a load without a free producer"
        self._owner[slot] = self._next
        self._ring[slot].begin()
        self._next += 1
        return self._owner[slot]

    def queue_on_demand(self, load_id: int, queue: Callable[[int], None]) -> None:
        """Make `wait_until` call `queue(layer)` until the load's last layer is recorded or the load fails.
        `queue(layer)` records at least the layers up to `layer`, or fails the load."""
        self._queues[load_id] = queue

    def record(self, load_id: int, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Record that a layer (dense index) of a load has arrived; see `CudaLayerEvents.record`."""
        self._events(load_id).record(layer, stream)
        if layer == self.num_layers - 1:
            self._queues.pop(load_id, None)

    def fail(self, load_id: int, error: Exception) -> None:
        """End a load with an error. Until `forget`, `wait_until` raises for the consumers of the load."""
        self._failures[load_id] = error
        self._queues.pop(load_id, None)
        self._events(load_id).fail(error)

    def exposed_s(self, load_id: int) -> float | None:
        """Return the seconds for which consumers waited for a finished load; None if the load was not timed, or its
        producer has another load by now."""
        slot = load_id % len(self._ring)
        return self._ring[slot].exposed_s if self._owner[slot] == load_id else None

    def forget(self, load_id: int) -> None:
        """Drop the error of a load that no batch will consume again."""
        self._failures.pop(load_id, None)

    def set_consumer(self, load_ids: int | Iterable[int]) -> None:
        """Set the loads on which the next forward pass depends. Without ids, or with -1, the pass waits for no load."""
        ids = (load_ids,) if isinstance(load_ids, int) else tuple(load_ids)
        consumed, self._failed = list[tuple[int, LayerEvents]](), None
        for load_id in ids:
            slot = load_id % len(self._ring)
            if load_id >= 0 and self._owner[slot] == load_id:
                consumed.append((load_id, self._ring[slot]))
            self._failed = self._failed or self._failures.get(load_id)
        self._consumed = tuple(consumed)

    @contextmanager
    def consuming(self, load_ids: Iterable[int]) -> Iterator[None]:
        """Apply `set_consumer` within a `with` block, for work that depends on other loads than the forward pass."""
        before = self._consumed, self._failed
        self.set_consumer(load_ids)
        try:
            yield
        finally:
            self._consumed, self._failed = before

    def wait_until(self, layer: int) -> None:
        """Make the consumer wait for `layer` (dense index) of every consumed load. Raises TransferError if one of these
        loads failed."""
        if self._failed is not None:
            raise _failed_load(self._failed) from self._failed
        for load_id, events in self._consumed:
            queue = self._queues.get(load_id)
            if queue is not None:
                queue(layer)
            events.wait(layer)

    def wait_all(self) -> None:
        """Make the consumer wait for the last layer of its loads, and therefore for all layers. Forward passes that
        call no getter need this method."""
        self.wait_until(self.num_layers - 1)

    def _events(self, load_id: int) -> LayerEvents:
        slot = load_id % len(self._ring)
        assert self._owner[slot] == load_id, f"load {load_id} no longer has a producer"
        return self._ring[slot]


class LayerRoutes:
    """The counter of each layer, for pools whose layers are loaded by several transfers.

    `routes[position]`: the counter of a layer of the pool, and the layer's dense index in that counter.
    """

    def __init__(self, routes: Sequence[tuple[LayerTransferCounter, int]]) -> None:
        self._routes = tuple(routes)

    def wait_until(self, threshold: int) -> None:
        counter, layer = self._routes[threshold]
        counter.wait_until(layer)
