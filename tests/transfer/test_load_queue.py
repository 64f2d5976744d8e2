"""Loads that are queued in steps: their order, the layers that each call queues, and the callbacks of the layer
counter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hicache.errors import TransferError
from hicache.transfer import LayerTransferCounter
from hicache.transfer.counter import CpuLayerEvents, CudaLayerEvents
from hicache.transfer.load_queue import LoadQueue

LAYERS = 6
Log = list[tuple[int, int]]  # load id and layer, in the order of queuing


def steps(load_id: int, group: int, log: Log) -> Iterator[int]:
    """A load of `LAYERS` layers in groups, as a backend queues it."""
    for first in range(0, LAYERS, group):
        if first:
            yield first
        log.extend((load_id, layer) for layer in range(first, min(first + group, LAYERS)))


@given(
    st.lists(st.integers(1, LAYERS), min_size=1, max_size=4),
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(1, LAYERS + 2))), max_size=12),
    st.booleans(),
)
@example([2], [(0, 2), (0, 2)], True)
def test_layers_are_queued_in_order_and_no_later_than_asked_for(
    groups: list[int], calls: list[tuple[int, int] | None], by_time: bool
) -> None:
    """After any calls, the queued layers are a prefix of all layers in submission order and include the requested ones.
    Each call queues more layers if any are left. One call can queue all loads, by number or by time."""
    log: Log = []
    queue = LoadQueue()
    for load_id, group in enumerate(groups):
        queue.put(load_id, steps(load_id, group, log))
    everything = [(load_id, layer) for load_id in range(len(groups)) for layer in range(LAYERS)]
    for call in calls:
        before = len(log)
        if call is None:
            queue.queue_some(0.0)
            assert len(log) > before or log == everything
        else:
            load_id, num_layers = call
            queue.queue_layers(load_id, num_layers)
            requested = [(at, layer) for at, layer in everything if (at, layer) < (load_id, num_layers)]
            group = groups[min(load_id, len(groups) - 1)]
            assert log[: len(requested)] == requested and len(log) < max(before + 1, len(requested) + group)
        assert log == everything[: len(log)]
    if by_time:
        queue.queue_some(1e9)
    else:
        queue.queue_layers(len(groups), 1)
    assert log == everything
    queue.queue_some(1.0)
    assert log == everything and queue.clear() == []


def test_what_is_cleared_is_never_queued() -> None:
    """`clear` returns the loads that are not completely queued, also if it is called within a step of one of them. The
    steps of these loads end. Loads that are put later stay."""
    log: Log = []
    queue = LoadQueue()
    cleared: list[list[int]] = []

    def clears() -> Iterator[int]:
        log.append((1, 0))
        cleared.append(queue.clear())
        queue.put(3, steps(3, 2, log))
        if len(cleared) > 1:
            yield 1

    queue.put(0, steps(0, LAYERS, log))
    queue.put(1, clears())
    queue.put(2, steps(2, 1, log))
    queue.queue_layers(1, 1)
    queue.queue_layers(2, LAYERS)
    assert cleared == [[1, 2]] and log[LAYERS:] == [(1, 0)]
    queue.queue_layers(3, LAYERS)
    assert log[LAYERS + 1 :] == [(3, layer) for layer in range(LAYERS)]


def test_waiting_for_a_layer_has_it_queued_first(device: str) -> None:
    """`wait_until` has its layer queued before it waits, unless the last layer is already recorded. Consumers of other
    loads have no layer queued. If a load fails while it is queued, `wait_until` raises."""
    counter = LayerTransferCounter(LAYERS, CudaLayerEvents if device == "cuda" else CpuLayerEvents)
    data, asked = torch.zeros(LAYERS, 1000, device=device), list[int]()
    queued = 0

    def queue(layer: int) -> None:
        nonlocal queued
        asked.append(layer)
        while queued <= layer:
            data[queued].fill_(queued + 1)
            counter.record(load_id, queued)
            queued += 1

    load_id, failing = counter.begin(), counter.begin()
    counter.queue_on_demand(load_id, queue)
    counter.queue_on_demand(failing, lambda layer: counter.fail(failing, TransferError(f"not layer {layer}")))
    counter.set_consumer(-1)
    counter.wait_until(0)
    assert asked == []
    counter.set_consumer(load_id)
    for layer in (0, 2, 2, LAYERS - 1, 3, LAYERS - 1):
        counter.wait_until(layer)
        assert bool((data[layer].clone() == layer + 1).all())
    assert asked == [0, 2, 2, LAYERS - 1]
    counter.set_consumer((load_id, failing))
    for layer in (1, 2):
        with pytest.raises(TransferError, match="not layer 1"):
            counter.wait_until(layer)
