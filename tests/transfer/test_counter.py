"""The layer counter's contract, one suite for CPU and CUDA events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from hicache.errors import TransferError
from hicache.transfer import LayerTransferCounter
from hicache.transfer.counter import NUM_PRODUCERS, CpuLayerEvents, CudaLayerEvents, LayerRoutes


def events(device: str) -> Callable[[int], CpuLayerEvents | CudaLayerEvents]:
    return CudaLayerEvents if device == "cuda" else CpuLayerEvents


def slow_producer(device: str, counter: LayerTransferCounter, load_id: int, data: torch.Tensor) -> Iterator[None]:
    """Fill row `layer` of `data` with layer + 1, late, and record each; beside the consumer, as a load does."""
    if device == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for layer in range(counter.num_layers):
                torch.cuda._sleep(10_000_000)
                data[layer].fill_(layer + 1)
                counter.record(load_id, layer)
        yield
        stream.synchronize()
        return

    def work() -> None:
        for layer in range(counter.num_layers):
            time.sleep(0.01)
            data[layer].fill_(layer + 1)
            counter.record(load_id, layer)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def test_the_consumer_sees_every_layer(device: str) -> None:
    """After `wait_until(layer)` the layer's data has arrived, for each of several loads consumed at once."""
    counter = LayerTransferCounter(4, events(device))
    loads = [(counter.begin(), torch.zeros(4, 1000, device=device)) for _ in range(2)]
    running = [slow_producer(device, counter, load_id, data) for load_id, data in loads]
    for producer in running:
        next(producer)
    counter.set_consumer(tuple(load_id for load_id, _ in loads))
    for layer in range(4):
        counter.wait_until(layer)
        for _, data in loads:
            assert bool((data[layer].clone() == layer + 1).all())
    for producer in running:
        next(producer, None)


def test_waiting_for_the_last_layer_covers_all(device: str) -> None:
    """After `wait_all()` all layers have arrived, for a forward that calls no getter."""
    counter = LayerTransferCounter(4, events(device))
    load_id, data = counter.begin(), torch.zeros(4, 1000, device=device)
    producer = slow_producer(device, counter, load_id, data)
    next(producer)
    counter.set_consumer(load_id)
    counter.wait_all()
    assert data.clone().sum(1).tolist() == [1000.0, 2000.0, 3000.0, 4000.0]
    next(producer, None)


def test_finished_loads_do_not_block(device: str) -> None:
    """Waiting returns at once for -1, for no load, and for loads whose producer carries a later load."""
    counter = LayerTransferCounter(2, events(device))
    counter.wait_until(1)
    for consumer in (-1, ()):
        counter.set_consumer(consumer)
        counter.wait_until(1)
    first = counter.begin()
    for load_id in (first, counter.begin(), counter.begin()):
        for layer in range(2):
            counter.record(load_id, layer)
    if device == "cuda":
        torch.cuda.synchronize()
    assert counter.begin() == 3
    counter.set_consumer(first)  # its producer carries load 3 now, which nobody finishes
    counter.wait_until(1)


def test_a_producer_is_reused_only_when_finished(device: str) -> None:
    """Three loads may be in flight; the fourth needs the first to have recorded its last layer."""
    counter = LayerTransferCounter(2, events(device))
    ids = [counter.begin() for _ in range(3)]
    assert not counter.can_begin()
    counter.record(ids[0], 0)
    assert not counter.can_begin()
    counter.record(ids[0], 1)
    if device == "cuda":
        torch.cuda.synchronize()
    assert counter.can_begin()


def test_a_failed_load_reaches_its_consumer(device: str) -> None:
    """`wait_until` raises the error of the load, and the producer is free again."""
    counter = LayerTransferCounter(2, events(device))
    load_id = counter.begin()
    counter.fail(load_id, TransferError("the link is down"))
    counter.set_consumer(load_id)
    with pytest.raises(TransferError, match="the link is down"):
        counter.wait_until(0)
    assert counter.can_begin()


def test_a_batch_waits_for_its_own_loads_only(device: str) -> None:
    """A batch that consumes one load does not wait for another that never arrives."""
    counter = LayerTransferCounter(2, events(device))
    first, other = counter.begin(), counter.begin()
    counter.record(first, 0)
    counter.record(first, 1)
    counter.set_consumer(first)
    waited = threading.Thread(target=counter.wait_all, daemon=True)
    waited.start()
    waited.join(60)
    assert not waited.is_alive()
    counter.fail(other, TransferError("never came"))


def test_a_failure_reaches_its_consumers_only(device: str) -> None:
    """Of two loads one fails: a batch that consumes both gets the error at any layer, a batch that consumes the other
    does not, and the next load of the same producer succeeds."""
    counter = LayerTransferCounter(2, events(device))
    good, bad = counter.begin(), counter.begin()
    counter.record(good, 0)
    counter.record(good, 1)
    counter.record(bad, 0)
    counter.fail(bad, TransferError("the link is down"))
    counter.set_consumer({good, bad})
    for layer in range(2):
        with pytest.raises(TransferError, match="the link is down"):
            counter.wait_until(layer)
    counter.set_consumer(good)
    counter.wait_all()
    if device == "cuda":
        torch.cuda.synchronize()
    for _ in range(NUM_PRODUCERS):  # the last of them takes the producer of the failed load
        assert counter.can_begin()
        load_id = counter.begin()
        counter.record(load_id, 0)
        counter.record(load_id, 1)
        if device == "cuda":
            torch.cuda.synchronize()
        counter.set_consumer(load_id)
        counter.wait_all()


def test_a_failure_outlives_its_producer(device: str) -> None:
    """A batch that consumes a failed load gets its error however many loads began since."""
    counter = LayerTransferCounter(1, events(device))
    bad = counter.begin()
    counter.fail(bad, TransferError("the link is down"))
    for _ in range(NUM_PRODUCERS):
        counter.record(counter.begin(), 0)
        if device == "cuda":
            torch.cuda.synchronize()
    counter.set_consumer(bad)
    with pytest.raises(TransferError, match="the link is down"):
        counter.wait_all()
    counter.forget(bad)  # no batch reads it any more
    counter.set_consumer(bad)
    counter.wait_all()


def test_each_layer_is_routed_to_its_own_counter() -> None:
    """A pool whose layers arrive by two transfers waits for each layer at its index in its own transfer."""
    asked: list[tuple[str, int]] = []

    class Named(LayerTransferCounter):
        def __init__(self, name: str) -> None:
            super().__init__(4, CpuLayerEvents)
            self.name = name

        def wait_until(self, layer: int) -> None:
            asked.append((self.name, layer))

    full, window = Named("full"), Named("window")
    routes = LayerRoutes([(full, 0), (window, 0), (window, 1), (full, 1)])
    for position in (0, 1, 3, 2):
        routes.wait_until(position)
    assert asked == [("full", 0), ("window", 0), ("full", 1), ("window", 1)]


def test_time_that_a_consumer_stands_still_is_exposed(device: str) -> None:
    """A consumer that comes before its layers is exposed, at most for the load's time, and one that comes after them is
    not. Once its producer has begun another load, nothing is known of a load."""
    counter, data = LayerTransferCounter(4, events(device), producers=1), torch.zeros(4, 1000, device=device)
    waited = arrived = False
    for attempt in range(1000):
        load_id, comes_first, begin_s = counter.begin(), attempt % 8 < 4, time.perf_counter()
        producer = slow_producer(device, counter, load_id, data)
        next(producer)
        if not comes_first:
            next(producer, None)
        counter.set_consumer(load_id)
        counter.wait_all()
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        next(producer, None)
        exposed_s = counter.exposed_s(load_id)
        if exposed_s is not None:  # one load in a few is timed
            assert 0 <= exposed_s <= time.perf_counter() - begin_s
            waited |= comes_first and exposed_s > 0
            arrived |= not comes_first
            assert comes_first or exposed_s == 0
        if waited and arrived:
            break
    assert waited and arrived
    counter.begin()
    assert counter.exposed_s(load_id) is None
