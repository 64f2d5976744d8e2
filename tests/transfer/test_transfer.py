"""Transfers, in one suite for both backends, and the plans of the CUDA backend."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_keys import compiled_keys
from hicache.kernels import pack, page_copy, upload, zero_copy
from hicache.tiers import MAMBA
from hicache.transfer import cuda
from hicache.transfer.plan import (
    ASSUMED,
    CopyCost,
    Plan,
    Shape,
    choose,
    intervals,
    page_runs,
    tapered,
)
from packed_tier import PackedTier
from transfer_case import LAYOUTS, Tier, TransferFixture
from transfer_case import NUM_LAYERS as LAYERS
from transfer_hooks import Move, StreamGate, at_each_move


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_started_backend_compiles_nothing(name: str) -> None:
    """After the start of a backend, copies of any number of pages compile nothing. The test covers each method, for
    packed and raw pages, and for slots on host or device."""
    layout = LAYOUTS[name]
    with compiled_keys(page_copy, pack, zero_copy, upload) as keys:
        for space in layout.build("cuda"):
            tokens = 1 if space.name == MAMBA else layout.host_page
            packed = PackedTier(space, tokens, 1 << 20, layout.build("cpu")[0]) if layout.is_packed else None
            tier = packed or Tier(space, tokens, 1 << 20)
            tier.backend.start()
            compiled = [*keys]
            assert compiled
            for count in (1, 2, 3, 13, 16, 17, 23):
                pages = 1 + torch.arange(count)
                slots = (pages[:, None] * tokens + torch.arange(tokens)).flatten()
                for at in (slots, slots.cuda(), slots.flip(0).cuda()):
                    for rest in [None, pages + count][: 2 if packed and count <= 13 else 1]:
                        tier.backend.store(at, pages, rest).wait()
                        tier.backend.load(pages, at, tier.counter.begin(), rest).wait()
            assert keys == compiled
            tier.backend.close()
            tier.host.close()


@pytest.mark.gpu
def test_a_replayed_graph_needs_the_last_layer() -> None:
    """A replayed forward calls no getter. After `wait_all()` the forward reads the bytes of a load that was in flight;
    without `wait_all()` it reads the bytes from before the load."""
    with TransferFixture("cuda", 8, 128, 128, 16, 1 << 20) as fixture:
        fixture.pool.register_layer_transfer_counter(fixture.counter)
        slots, pages = torch.arange(16, 16 + 256, device="cuda"), torch.arange(1, 17)
        fixture.warm_up(slots, pages)
        truth = [buffer[slots].clone() for buffer in fixture.buffers]
        seen = [torch.empty_like(kept) for kept in truth]

        def forward() -> None:
            buffers = [buffer for layer in range(LAYERS) for buffer in fixture.pool.get_kv_buffer(layer)]
            for target, buffer in zip(seen, buffers, strict=True):
                torch.index_select(buffer, 0, slots, out=target)

        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        fixture.counter.set_consumer(-1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            forward()
        for waits in (False, True):
            fixture.fill(-9)
            torch.cuda.synchronize()
            gate = StreamGate()
            gate.hold(side)
            with torch.cuda.stream(side):
                load_id, op = fixture.load(pages, slots)
            fixture.counter.set_consumer(load_id)
            if waits:
                fixture.counter.wait_all()
                gate.open()
            graph.replay()
            torch.cuda.current_stream().synchronize()
            gate.open()
            for got, kept in zip(seen, truth, strict=True):
                assert torch.equal(got, kept) if waits else bool((got == -9).all())
            op.wait()


def test_a_load_tells_whether_it_was_held_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load reports that it was delayed by earlier work in the queue, or by steps that were queued later. The time of
    such a load says nothing about the link."""
    monkeypatch.setattr(cuda, "_SUBMIT_S", 60.0)
    with TransferFixture(device, 2, 64, 64, 16, 1 << 16) as fixture:
        slots, pages = torch.arange(16, 16 + 256, device=device), torch.arange(1, 17)
        fixture.warm_up(slots, pages)
        if device == "cuda":
            torch.cuda.synchronize()
        assert fixture.load(pages, slots)[1].is_undelayed
        if device == "cuda":
            torch.cuda.synchronize()
            gate = StreamGate()
            gate.hold(torch.cuda.current_stream())
            op = fixture.load(pages, slots)[1]
            gate.open()
            op.wait()
            assert not op.is_undelayed


def test_the_error_is_known_when_the_consumers_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that gets the error of a load also finds it at the load's operation, which may not have ended."""
    with TransferFixture("cpu", 1, 24, 24, 16, 1 << 16) as fixture:
        submitted, found = threading.Event(), list[Exception | None]()
        fail = fixture.counter.fail

        def failing(load_id: int, error: Exception) -> None:
            submitted.wait()
            found.append(op.error)
            fail(load_id, error)

        def broken(move: Move) -> None:
            raise RuntimeError("the link is down")

        monkeypatch.setattr(fixture.counter, "fail", failing)
        at_each_move(monkeypatch, broken)
        _, op = fixture.load(torch.arange(1, 3), torch.arange(16, 48))
        submitted.set()
        op.wait()
        assert found == [op.error] and isinstance(op.error, RuntimeError)


# Pages 1 to 60 in a few runs, some of which are adjacent.
PAGES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=8, unique_by=lambda run: run[0]).map(
    lambda runs: [1 + 6 * first + i for first, length in runs for i in range(length)]
)


@given(PAGES, st.integers(1, 20))
def test_runs_cover_pages_in_order(pages: list[int], rows_per_chunk: int) -> None:
    """The runs are exactly the pages, in order. Each run is contiguous and within one pinned chunk, and no run could be
    longer."""
    ids = np.array(pages, dtype=np.int64)
    found = page_runs(ids, rows_per_chunk)
    first, count, position = found.first_pages, found.lengths, found.position
    spelled = [page for f, c in zip(first, count, strict=True) for page in range(f, f + c)]
    assert spelled == pages
    assert [int(p) for p in position] == [0, *np.cumsum(count)[:-1].tolist()][: len(position)]
    for f, c in zip(first, count, strict=True):
        assert f // rows_per_chunk == (f + c - 1) // rows_per_chunk
    for last, pages_of_run, start in zip(first[:-1], count[:-1], first[1:], strict=True):
        assert last + pages_of_run != start or start % rows_per_chunk == 0


LAYERS_32 = Shape(layer_bytes=256 << 10, num_layers=32, num_pages=512, num_runs=1)
BUFFER = 128 << 20


def sizes(plan: Plan) -> list[int]:
    return [end - first for first, end in plan.groups]


@given(PAGES, st.integers(2, 9), st.data())
def test_runs_of_a_part_are_the_pages_of_that_part(pages: list[int], rows_per_chunk: int, data: st.DataObject) -> None:
    """The runs of any part of a list of pages are the pages of this part, in order, at their positions."""
    ids = np.array(pages, dtype=np.int64)
    start = data.draw(st.integers(0, len(pages)))
    stop = data.draw(st.integers(start, len(pages)))
    found = page_runs(ids, rows_per_chunk).within(start, stop) if start < stop else []
    assert [page + i for page, count, _ in found for i in range(count)] == pages[start:stop]
    assert [at + i for _, count, at in found for i in range(count)] == list(range(stop - start))
    assert all(page // rows_per_chunk == (page + count - 1) // rows_per_chunk for page, count, _ in found)


@pytest.mark.parametrize("buffer_bytes", [BUFFER, (16 << 20) // 3])  # the second is for stores, of 64 MiB in all
def test_plans_cover_every_layer_once(buffer_bytes: int) -> None:
    """For any shape, the groups of a plan are all layers, in order, each once. One page of a group fits in a buffer
    unless a single layer does not."""
    for direction in (ASSUMED.up, ASSUMED.down):
        for layers, layer_bytes in ((1, 64), (5, 1 << 10), (32, 256 << 10), (61, 73728), (80, 64 << 10)):
            for pages, num_runs in ((1, 1), (7, 7), (512, 1), (512, 512)):
                for up in (True, False):
                    shape = Shape(layer_bytes, layers, pages, num_runs, grouped=layers != 5)
                    plan = choose(direction, shape, buffer_bytes, up=up)
                    assert plan.method == "zero_copy" or max(sizes(plan)) <= max(1, buffer_bytes // layer_bytes)
                    covered = [layer for first, end in plan.groups for layer in range(first, end)]
                    assert covered == list(range(layers))
                    if not shape.grouped:
                        assert set(sizes(plan)) == {1}


def test_plans_choose_the_cheapest_method() -> None:
    """Contiguous pages use strided copies, scattered pages use batched copies, and small pieces use the zero-copy
    kernel."""
    scattered, few = replace(LAYERS_32, num_runs=512), replace(LAYERS_32, num_pages=1)
    assert choose(ASSUMED.up, LAYERS_32, BUFFER, up=True).method == "strided"
    assert choose(ASSUMED.up, scattered, BUFFER, up=True).method == "batched"
    assert choose(ASSUMED.up, few, BUFFER, up=True).method == "zero_copy"
    narrow = Shape(layer_bytes=512, num_layers=4, num_pages=4096, num_runs=4096)
    assert choose(ASSUMED.up, narrow, BUFFER, up=True).method == "zero_copy"
    # If layers are copied separately, each is a launch. Here the launches cost more than the kernel saves.
    alone = replace(LAYERS_32, num_pages=20, grouped=False)
    assert choose(ASSUMED.up, alone, BUFFER, up=True).method == "strided"
    # The copy takes less time than the host needs to queue 32 steps of a staged copy.
    assert choose(ASSUMED.up, replace(alone, num_pages=10), BUFFER, up=True).method == "zero_copy"


def test_plans_are_unstaged_where_calls_are_few() -> None:
    """If slots are a few runs, the copy engine writes to them directly, layer by layer. Many runs or small pieces are
    staged."""
    few = replace(LAYERS_32, slot_runs=1, num_buffers=64, piece_bytes=128 << 10)
    plan = choose(ASSUMED.up, few, BUFFER, up=True)
    assert plan.method == "unstaged" and sizes(plan) == [1] * 32
    assert choose(ASSUMED.up, replace(few, slot_runs=200, num_runs=200), BUFFER, up=True).method == "batched"
    assert choose(ASSUMED.up, replace(few, piece_bytes=64 << 10), BUFFER, up=True).method == "strided"
    small = replace(few, layer_bytes=8 << 10, num_pages=16384)
    assert choose(ASSUMED.up, small, BUFFER, up=True).method == "strided"


@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 60))
def test_tapered_intervals_cover_the_same_pages(total: int, step: int, max_last: int) -> None:
    """Tapering keeps the order of the pages, splits only the last chunk, and leaves at most `max_last` pages in its
    last part."""
    chunks = intervals(total, step)
    found = tapered(chunks, max_last)
    assert [page for start, stop in found for page in range(start, stop)] == list(range(total))
    assert found[: len(chunks) - 1] == chunks[:-1] and all(start < stop for start, stop in found)
    assert found[-1][1] - found[-1][0] <= max(1, max_last)
    ends = [stop - start for start, stop in found[len(chunks) - 1 :]]
    assert ends == sorted(ends, reverse=True)


def test_scattered_layers_travel_alone_where_the_host_can_queue_them() -> None:
    """For loads, a wide enough piece is one layer, because a forward waits for complete groups. A wide piece is one
    layer although queuing it takes the host an eighth of its copy time. For stores, and if the host is too slow, groups
    are wider."""
    scattered = replace(LAYERS_32, num_runs=512)
    for buffer_bytes in (64 << 20, 256 << 20):
        assert sizes(choose(ASSUMED.up, scattered, buffer_bytes, up=True)) == [1] * 32
    assert max(sizes(choose(ASSUMED.down, scattered, BUFFER, up=False))) >= 8
    dear = replace(ASSUMED.up, strided=CopyCost(55e9, 1e-6), batched=CopyCost(55e9, 2e-6), zero_copy=CopyCost(1e9))
    assert max(sizes(choose(dear, LAYERS_32, BUFFER, up=True))) == 4  # a forward waits for at most 1 MiB of a page
    slow = replace(ASSUMED.up, batched=replace(ASSUMED.up.batched, issue_s=2e-6))
    assert max(sizes(choose(slow, scattered, BUFFER, up=True))) == 2


def test_up_starts_with_few_layers() -> None:
    """The first group of a load has only the layers that make a piece of 128 KiB."""
    for layer_bytes, first in ((256 << 10, 1), (128 << 10, 1), (64 << 10, 2), (16 << 10, 8)):
        for num_runs in (1, 512):
            plan = choose(ASSUMED.up, replace(LAYERS_32, layer_bytes=layer_bytes, num_runs=num_runs), BUFFER, up=True)
            assert plan.method == "zero_copy" or sizes(plan)[0] == first, (layer_bytes, num_runs)
