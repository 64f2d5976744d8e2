"""Transfers and the layer counter: one suite for both backends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.config import EngineConfig
from hicache.device import MHATokenToKVPool
from hicache.errors import TransferError
from hicache.factory import build_transfer
from hicache.host import HostPagePool
from hicache.transfer import LayerTransferCounter, TransferBackend
from hicache.transfer.counter import CpuLayerEvents, CudaLayerEvents
from hicache.transfer.plan import down_group, runs, spans, up_group

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = 5


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


class Rig:
    """A pool, a host pool and the backend between them."""

    def __init__(self, device: torch.device, heads: int, dim: int, v_dim: int, page: int, staging: int) -> None:
        size, host_page = 512, 16
        config = EngineConfig(
            device_tokens=size, host_bytes=1, host_page_size=host_page, page_size=page, device=str(device),
            staging_bytes=staging, transfer_chunk_tokens=64,
        )  # fmt: skip
        self.pool = MHATokenToKVPool(size, page, torch.bfloat16, heads, dim, LAYERS, device, False, v_head_dim=v_dim)
        page_bytes = self.pool.layout.page_bytes(host_page)
        self.host = HostPagePool(self.pool.layout, host_page, 33 * page_bytes, pin=device.type == "cuda")
        backend, self.counter = build_transfer(config, self.pool, self.host)
        assert backend is not None
        self.backend: TransferBackend = backend
        self.backend.start()
        self.buffers = [b for layer in range(LAYERS) for b in self.pool.layer_buffers(layer)]

    def close(self) -> None:
        self.backend.close()
        self.host.close()


@pytest.mark.parametrize(("heads", "dim", "v_dim"), [(2, 64, 64), (1, 24, 40), (8, 128, 128)])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("staging", [1 << 16, 64 << 20])
def test_bytes_come_back(
    device: torch.device, heads: int, dim: int, v_dim: int, page: int, scattered: bool, staging: int
) -> None:
    """Stored bytes are in host-page order, and a load puts them at other slots, touching nothing else."""
    rig, rng = Rig(device, heads, dim, v_dim, page, staging), np.random.default_rng(3)
    try:
        for buffer in rig.buffers:
            buffer.normal_()
        count = 13
        order = rng.permutation(32) if scattered else np.arange(32)
        pages = torch.from_numpy(order[:count] + 1)
        blocks = rng.permutation(512 // page) + 1
        slots = torch.from_numpy((blocks[:, None] * page + np.arange(page)).reshape(-1)).to(device)
        source, target = slots[: count * 16], slots[256 : 256 + count * 16]
        truth = [b[source].clone() for b in rig.buffers]
        stored = rig.backend.store(source, pages)
        stored.wait()
        assert stored.error is None and stored.done() and stored.seconds() > 0
        for at, page_id in enumerate(pages.tolist()):
            rows = [b[at * 16 : (at + 1) * 16] for b in truth]
            expected = torch.cat([r.cpu().reshape(-1).view(torch.uint8) for r in rows])
            assert torch.equal(rig.host.bytes_of[page_id], expected)
        for buffer in rig.buffers:
            buffer.fill_(-9)
        load = rig.backend.load(pages, target, rig.counter.begin())
        load.wait()
        assert load.num_bytes == stored.num_bytes == count * rig.host.page_bytes
        for buffer, kept in zip(rig.buffers, truth, strict=True):
            assert torch.equal(buffer[target], kept)
            buffer[target] = -9
            assert bool((buffer == -9).all())
    finally:
        rig.close()


def test_a_forward_reads_layers_as_they_arrive(device: torch.device) -> None:
    """Getters wait for their own layer of a load that was submitted before, whatever was in the slots."""
    rig = Rig(device, 8, 128, 128, 16, 1 << 20)
    try:
        rig.pool.register_layer_transfer_counter(rig.counter)
        for buffer in rig.buffers:
            buffer.normal_()
        slots = torch.arange(16, 16 + 256, device=device)
        pages = torch.arange(1, 17)
        rig.backend.store(slots, pages).wait()
        truth = [b[slots].clone() for b in rig.buffers]
        for _ in range(8):
            for buffer in rig.buffers:
                buffer.fill_(-9)
            load_id = rig.counter.begin()
            op = rig.backend.load(pages, slots, load_id)
            rig.counter.set_consumer((load_id,))
            for layer in range(LAYERS):
                for kept, got in zip(truth[2 * layer : 2 * layer + 2], rig.pool.get_kv_buffer(layer), strict=True):
                    assert torch.equal(got[slots], kept)
            op.wait()
    finally:
        rig.close()


def test_a_store_waits_for_what_was_queued_before(device: torch.device) -> None:
    """A store submitted right after a slow forward copies what that forward wrote."""
    rig = Rig(device, 8, 128, 128, 16, 1 << 20)
    try:
        slots, pages = torch.arange(16, 16 + 256, device=device), torch.arange(1, 17)
        for value in range(1, 6):
            if device.type == "cuda":
                torch.cuda._sleep(20_000_000)
            for buffer in rig.buffers:
                buffer.fill_(value)
            rig.backend.store(slots, pages).wait()
            held = rig.host.bytes_of[pages].view(torch.bfloat16)
            assert bool((held == value).all())
    finally:
        rig.close()


def events(device: torch.device) -> Callable[[int], CpuLayerEvents | CudaLayerEvents]:
    return CudaLayerEvents if device.type == "cuda" else CpuLayerEvents


def slow_producer(
    device: torch.device, counter: LayerTransferCounter, load_id: int, data: torch.Tensor
) -> Iterator[None]:
    """Fill row `layer` of `data` with layer + 1, late, and record each; beside the consumer, as a load does."""
    if device.type == "cuda":
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


def test_the_consumer_sees_every_layer(device: torch.device) -> None:
    """Behind `wait_until(layer)` the layer's data is there, for each of several loads consumed at once."""
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


def test_waiting_for_the_last_layer_covers_all(device: torch.device) -> None:
    """A forward that calls no getter is right behind `wait_all()`."""
    counter = LayerTransferCounter(4, events(device))
    load_id, data = counter.begin(), torch.zeros(4, 1000, device=device)
    producer = slow_producer(device, counter, load_id, data)
    next(producer)
    counter.set_consumer(load_id)
    counter.wait_all()
    assert data.clone().sum(1).tolist() == [1000.0, 2000.0, 3000.0, 4000.0]
    next(producer, None)


def test_nothing_to_wait_for(device: torch.device) -> None:
    """-1, no load at all, and loads whose producer moved on return at once."""
    counter = LayerTransferCounter(2, events(device))
    counter.wait_until(1)
    for consumer in (-1, ()):
        counter.set_consumer(consumer)
        counter.wait_until(1)
    first = counter.begin()
    for load_id in (first, counter.begin(), counter.begin()):
        for layer in range(2):
            counter.record(load_id, layer)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert counter.begin() == 3
    counter.set_consumer(first)  # its producer carries load 3 now, which nobody finishes
    counter.wait_until(1)


def test_a_producer_is_reused_only_when_finished(device: torch.device) -> None:
    """Three loads may be in flight; the fourth needs the first to have recorded its last layer."""
    counter = LayerTransferCounter(2, events(device))
    ids = [counter.begin() for _ in range(3)]
    assert not counter.can_begin()
    counter.record(ids[0], 0)
    assert not counter.can_begin()
    counter.record(ids[0], 1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert counter.can_begin()


def test_a_failed_load_reaches_its_consumer(device: torch.device) -> None:
    """`wait_until` raises what the load failed of, and the producer is free again."""
    counter = LayerTransferCounter(2, events(device))
    load_id = counter.begin()
    counter.fail(load_id, TransferError("the link is down"))
    counter.set_consumer(load_id)
    with pytest.raises(TransferError, match="the link is down"):
        counter.wait_until(0)
    assert counter.can_begin()


@given(st.lists(st.integers(1, 60), unique=True, max_size=40), st.integers(1, 20))
def test_runs_cover_pages_in_order(pages: list[int], rows_per_chunk: int) -> None:
    """Runs spell out exactly the pages, in order, each contiguous and within one pinned chunk, and none can be
    longer."""
    ids = np.array(pages, dtype=np.int64)
    first, count, position = runs(ids, rows_per_chunk)
    spelled = [page for f, c in zip(first, count, strict=True) for page in range(f, f + c)]
    assert spelled == pages
    assert [int(p) for p in position] == [0, *np.cumsum(count)[:-1].tolist()][: len(position)]
    for f, c in zip(first, count, strict=True):
        assert f // rows_per_chunk == (f + c - 1) // rows_per_chunk
    for end, start in zip(first[:-1] + count[:-1], first[1:], strict=True):
        assert end != start or start % rows_per_chunk == 0


def test_groups_make_pieces_wide_enough() -> None:
    """Groups reach 64 KiB where the model has the layers for it, and up moves single layers as soon as they are
    that wide."""
    assert up_group(256 << 10, 32) == 1 and up_group(64 << 10, 32) == 1
    assert up_group(16 << 10, 32) == 4 and up_group(1 << 10, 32) == 32
    assert down_group(256 << 10, 32) == 4 and down_group(64 << 10, 32) == 8
    assert down_group(4 << 10, 32) == 16 and down_group(4 << 10, 5) == 5
    assert spans(10, 4) == [(0, 4), (4, 8), (8, 10)] and spans(0, 4) == []
