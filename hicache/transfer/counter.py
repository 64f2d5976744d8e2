"""Which layer of a load has arrived: what lets a forward pass start before its prefix is on the device.

A load takes a producer, one of a small ring, and records an event after each layer. A batch names the loads it depends
on, and the pool's getters call `wait_until(layer)`, which makes the consumer wait for that layer of those loads: on
CUDA the current stream (never the host), on the CPU the calling thread. A load must be submitted before the forward
that consumes it; an event that was never recorded counts as done. A replayed CUDA graph calls no getter: call
`wait_all()` before the replay.

May import torch and errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from hicache.errors import TransferError

NUM_PRODUCERS = 3


class LayerEvents(Protocol):
    """The events of one producer, one a layer."""

    def begin(self) -> None:
        """A new load takes this producer; from here to its last layer it is not finished."""
        ...

    def record(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Layer (dense index) has arrived, in the order of `stream` (None: the current one), or of this thread."""
        ...

    def fail(self, error: Exception) -> None:
        """The load ended early; consumers get `error`."""
        ...

    def wait(self, layer: int) -> None:
        """Order the current stream, or hold the current thread, behind the layer. Raises what `fail` was given."""
        ...

    def finished(self) -> bool: ...


class CudaLayerEvents:
    """One CUDA event a layer, used again by later loads of the same producer."""

    def __init__(self, num_layers: int) -> None:
        self._events = [torch.cuda.Event() for _ in range(num_layers)]
        self._submitted = True
        self._error: Exception | None = None

    def begin(self) -> None:
        self._submitted, self._error = False, None

    def record(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        self._events[layer].record(stream)
        self._submitted = layer == len(self._events) - 1

    def fail(self, error: Exception) -> None:
        self._error, self._submitted = error, True

    def wait(self, layer: int) -> None:
        if self._error is not None:
            raise TransferError(f"the load this batch depends on failed: {self._error}") from self._error
        torch.cuda.current_stream().wait_event(self._events[layer])

    def finished(self) -> bool:
        return self._submitted and self._events[-1].query()


class CpuLayerEvents:
    """The same contract with a condition: `record` runs on the copying thread, `wait` on the consumer's."""

    def __init__(self, num_layers: int) -> None:
        self._condition = threading.Condition()
        self._num_layers = self._recorded = num_layers
        self._error: Exception | None = None

    def begin(self) -> None:
        with self._condition:
            self._recorded, self._error = 0, None

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
            self._condition.wait_for(lambda: self._recorded > layer or self._error is not None)
            if self._error is not None:
                raise TransferError(f"the load this batch depends on failed: {self._error}") from self._error

    def finished(self) -> bool:
        return self._recorded == self._num_layers or self._error is not None


class LayerTransferCounter:
    """A ring of producers and the loads the present batch consumes.

    Load ids count up from 0 and are never used twice, so an id whose producer moved on reads as finished. `begin` and
    `set_consumer` are the scheduler thread's; `record` and `fail` the copying side's; `wait_until` the forward's.
    """

    def __init__(
        self, num_layers: int, make_events: Callable[[int], LayerEvents], producers: int = NUM_PRODUCERS
    ) -> None:
        self.num_layers = num_layers
        self._ring = [make_events(num_layers) for _ in range(producers)]
        self._owner = [-1] * producers
        self._next = 0
        self._consumed: tuple[LayerEvents, ...] = ()
        # Of loads whose bytes never came: kept when their producers carry others, until nobody reads them any more.
        self._failures: dict[int, Exception] = {}
        self._failed: Exception | None = None

    def can_begin(self) -> bool:
        """Whether a producer is free for another load."""
        return self._ring[self._next % len(self._ring)].finished()

    def begin(self) -> int:
        """Take a producer; returns the load id. Ask `can_begin` first."""
        slot = self._next % len(self._ring)
        assert self._ring[slot].finished(), "began a load without a free producer"
        self._owner[slot] = self._next
        self._ring[slot].begin()
        self._next += 1
        return self._owner[slot]

    def record(self, load_id: int, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Layer (dense index) of a load has arrived; see `LayerEvents.record`."""
        self._events(load_id).record(layer, stream)

    def fail(self, load_id: int, error: Exception) -> None:
        """A load ended early: whoever consumes it is told, until `forget`."""
        self._failures[load_id] = error
        self._events(load_id).fail(error)

    def forget(self, load_id: int) -> None:
        """Nobody will consume this load again."""
        self._failures.pop(load_id, None)

    def set_consumer(self, load_ids: int | Iterable[int]) -> None:
        """The loads that the coming forward depends on; none of them, or -1: nothing to wait for."""
        ids = (load_ids,) if isinstance(load_ids, int) else tuple(load_ids)
        live = [i for i in ids if i >= 0 and self._owner[i % len(self._ring)] == i]
        self._consumed = tuple(self._events(i) for i in live)
        self._failed = next((self._failures[i] for i in ids if i in self._failures), None)

    @contextmanager
    def consuming(self, load_ids: Iterable[int]) -> Iterator[None]:
        """`set_consumer` for the duration: for what is queued beside the coming forward and depends on other loads."""
        before = self._consumed, self._failed
        self.set_consumer(load_ids)
        try:
            yield
        finally:
            self._consumed, self._failed = before

    def wait_until(self, layer: int) -> None:
        """Order the consumer behind `layer` (dense index) of every consumed load. TransferError where one failed."""
        if self._failed is not None:
            raise TransferError(f"the load this batch depends on failed: {self._failed}") from self._failed
        for events in self._consumed:
            events.wait(layer)

    def wait_all(self) -> None:
        """Order the consumer behind the last layer, hence all of them: for forwards that call no getter."""
        self.wait_until(self.num_layers - 1)

    def _events(self, load_id: int) -> LayerEvents:
        slot = load_id % len(self._ring)
        assert self._owner[slot] == load_id, f"load {load_id} gave its producer up"
        return self._ring[slot]


class LayerRoutes:
    """For pools whose layers arrive by several transfers: leads each layer to the counter that knows of it.

    `routes[position]`: the counter of a layer of the pool, and the layer's dense index there.
    """

    def __init__(self, routes: Sequence[tuple[LayerTransferCounter, int]]) -> None:
        self._routes = tuple(routes)

    def wait_until(self, threshold: int) -> None:
        counter, layer = self._routes[threshold]
        counter.wait_until(layer)
