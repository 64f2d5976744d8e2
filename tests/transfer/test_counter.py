"""The contract of the layer counter, in one suite for CPU and CUDA events."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from hicache.errors import TransferError
from hicache.transfer import LayerTransferCounter, counter
from hicache.transfer.counter import NUM_PRODUCERS, CpuLayerEvents, CudaLayerEvents, LayerRoutes
from transfer_hooks import StreamGate
from waiting import eventually


def make_counter(device: str, num_layers: int, producers: int = NUM_PRODUCERS) -> LayerTransferCounter:
    return LayerTransferCounter(num_layers, CudaLayerEvents if device == "cuda" else CpuLayerEvents, producers)


def record(device: str, counter: LayerTransferCounter, load_id: int) -> None:
    """Record every layer of a load."""
    for layer in range(counter.num_layers):
        counter.record(load_id, layer)
    if device == "cuda":
        torch.cuda.synchronize()


def test_finished_loads_do_not_block(device: str) -> None:
    """A wait returns at once for -1, without a load, for a load whose producer has a later load, and for a layer of a
    load that the batch does not consume."""
    counter = make_counter(device, 2)
    counter.wait_until(1)
    for consumer in (-1, ()):
        counter.set_consumer(consumer)
        counter.wait_until(1)
    for load_id in range(NUM_PRODUCERS):
        assert counter.begin() == load_id
        record(device, counter, load_id)
    assert counter.begin() == NUM_PRODUCERS
    for finished in (0, 1):  # the producer of load 0 now has a load that never finishes
        counter.set_consumer(finished)
        counter.wait_all()


def test_a_producer_is_reused_only_when_finished(device: str) -> None:
    """Three loads may be in flight. The fourth may begin when the first has recorded its last layer, or has failed."""
    counter = make_counter(device, 2)
    ids = [counter.begin() for _ in range(3)]
    assert not counter.can_begin()
    counter.record(ids[0], 0)
    assert not counter.can_begin()
    with pytest.raises(AssertionError):
        counter.begin()
    record(device, counter, ids[0])
    assert counter.can_begin() and counter.begin() == 3 and not counter.can_begin()
    counter.fail(ids[1], TransferError("the link is down"))
    assert counter.can_begin()


def test_a_failure_reaches_its_consumers_only(device: str) -> None:
    """One of two loads fails. A batch that consumes both gets the error at any layer, however many loads have begun
    since, until `forget`. A batch that consumes only the other load gets no error, and the next load of the same
    producer succeeds."""
    counter = make_counter(device, 2)
    good, bad = counter.begin(), counter.begin()
    counter.record(bad, 0)
    record(device, counter, good)
    counter.set_consumer(bad)
    counter.fail(bad, TransferError("the link is down"))
    with pytest.raises(TransferError, match="the link is down"):
        counter.wait_until(0)  # the consumer was set before the failure
    for _ in range(NUM_PRODUCERS + 1):
        counter.set_consumer({good, bad})
        for layer in range(2):
            with pytest.raises(TransferError, match="the link is down"):
                counter.wait_until(layer)
        counter.set_consumer(good)
        counter.wait_all()
        assert counter.can_begin()
        load_id = counter.begin()  # the last load but one takes the producer of the failed load
        record(device, counter, load_id)
        counter.set_consumer(load_id)
        counter.wait_all()
    counter.forget(bad)  # no batch consumes the failed load any more
    counter.set_consumer(bad)
    counter.wait_all()


def test_concurrent_work_has_its_own_loads(device: str) -> None:
    """Within `consuming`, waits are for the given loads; afterwards waits are for the loads of the forward again."""
    counter = make_counter(device, 1)
    good, bad = counter.begin(), counter.begin()
    counter.fail(bad, TransferError("the link is down"))
    record(device, counter, good)
    counter.set_consumer(bad)
    with counter.consuming([good]):
        counter.wait_all()
    with pytest.raises(TransferError):
        counter.wait_all()


def test_each_layer_is_routed_to_its_own_counter() -> None:
    """The layers of a pool arrive by two transfers. A wait for a layer uses its index in its own transfer."""
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


def test_time_that_a_consumer_stands_still_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exposed time of a consumer is how long it waits for its layer, and 0 if it arrives after the layer. If the
    producer of a load has begun another load, the exposed time of the first is unknown."""
    clock, readings = iter((10.0, 12.5)), list[float]()

    def reading() -> float:
        readings.append(next(clock))
        return readings[-1]

    monkeypatch.setattr(counter, "time", SimpleNamespace(perf_counter=reading))
    loads = make_counter("cpu", 2, producers=1)
    load_id = loads.begin()
    loads.record(load_id, 0)
    loads.set_consumer(load_id)
    loads.wait_until(0)
    assert loads.exposed_s(load_id) == 0.0 and readings == []
    consumer = threading.Thread(target=loads.wait_all)
    consumer.start()
    eventually(lambda: readings)  # the consumer waits now
    loads.record(load_id, 1)
    consumer.join()
    assert loads.exposed_s(load_id) == 2.5
    loads.begin()
    assert loads.exposed_s(load_id) is None


@pytest.mark.gpu
def test_time_that_a_stream_stands_still_is_exposed() -> None:
    """On CUDA the exposed time is measured by the device's clock, for one of several loads."""
    loads, stream, exposed = make_counter("cuda", 4, producers=1), torch.cuda.Stream(), list[float | None]()
    other_stream = torch.cuda.Stream()
    with torch.cuda.stream(other_stream):
        torch.cuda._sleep(1)  # create kernel and stream before anything is held
    torch.cuda.synchronize()
    for comes_first in (True, True, True, True, False):
        load_id, gate = loads.begin(), StreamGate()
        if comes_first:
            gate.hold(stream)
        for layer in range(4):
            loads.record(load_id, layer, stream)
        if not comes_first:
            stream.synchronize()
        loads.set_consumer(load_id)
        loads.wait_all()
        # Wait until the stream is at the layer, and let it wait there for a while.
        reached = loads._ring[0]._reached  # type: ignore[union-attr]
        eventually(lambda reached=reached: all(event.query() for event in reached.values()))
        with torch.cuda.stream(other_stream):
            torch.cuda._sleep(1_000_000)
        other_stream.synchronize()
        gate.open()
        torch.cuda.synchronize()
        exposed.append(loads.exposed_s(load_id))
    assert exposed[1:4] == [None] * 3 and exposed[4] == 0.0
    assert exposed[0] is not None and exposed[0] > 0
