"""Transfers, one suite for both backends, and the plans of the CUDA backend."""

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
    """Copies of any number of pages, by whatever method, packed or raw, with slots on either side, find their kernels
    compiled."""
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
    """A captured forward calls no getter when it is replayed: behind `wait_all()` it reads what a load still under way
    brings, and without it what was there before."""
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
    """By work that was queued before it, or by steps that were left for later: its time is not the link's then."""
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
    """A consumer that gets the error of a load finds it at the operation too, which may not have ended yet."""
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


# Pages 1 to 60 in a few runs, of which some follow each other.
PAGES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=8, unique_by=lambda run: run[0]).map(
    lambda runs: [1 + 6 * first + i for first, length in runs for i in range(length)]
)


@given(PAGES, st.integers(1, 20))
def test_runs_cover_pages_in_order(pages: list[int], rows_per_chunk: int) -> None:
    """Runs are exactly the pages, in order, each contiguous and within one pinned chunk, and none can be longer."""
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
    """The runs within any part of a list of pages are the pages of that part, in order, at their positions."""
    ids = np.array(pages, dtype=np.int64)
    start = data.draw(st.integers(0, len(pages)))
    stop = data.draw(st.integers(start, len(pages)))
    found = page_runs(ids, rows_per_chunk).within(start, stop) if start < stop else []
    assert [page + i for page, count, _ in found for i in range(count)] == pages[start:stop]
    assert [at + i for _, count, at in found for i in range(count)] == list(range(stop - start))
    assert all(page // rows_per_chunk == (page + count - 1) // rows_per_chunk for page, count, _ in found)


@pytest.mark.parametrize("buffer_bytes", [BUFFER, (16 << 20) // 3])  # the second: what stores have of 64 MiB
def test_plans_cover_every_layer_once(buffer_bytes: int) -> None:
    """For any shape, the groups of a plan are the layers, in order, each once, and one page of a group fits a buffer
    unless a layer does not."""
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
    """Runs use strided copies, scattered pages batched copies, and small pieces the zero-copy kernel."""
    scattered, few = replace(LAYERS_32, num_runs=512), replace(LAYERS_32, num_pages=1)
    assert choose(ASSUMED.up, LAYERS_32, BUFFER, up=True).method == "strided"
    assert choose(ASSUMED.up, scattered, BUFFER, up=True).method == "batched"
    assert choose(ASSUMED.up, few, BUFFER, up=True).method == "zero_copy"
    narrow = Shape(layer_bytes=512, num_layers=4, num_pages=4096, num_runs=4096)
    assert choose(ASSUMED.up, narrow, BUFFER, up=True).method == "zero_copy"
    # If layers are copied separately, each is a launch, which costs more here than the kernel saves.
    alone = replace(LAYERS_32, num_pages=20, grouped=False)
    assert choose(ASSUMED.up, alone, BUFFER, up=True).method == "strided"
    # Fewer bytes than the host needs to queue 32 steps of a staged copy.
    assert choose(ASSUMED.up, replace(alone, num_pages=10), BUFFER, up=True).method == "zero_copy"


def test_plans_are_unstaged_where_calls_are_few() -> None:
    """The copy engine writes to slots that are a few runs, layer by layer; many runs or small pieces are staged."""
    few = replace(LAYERS_32, slot_runs=1, num_buffers=64, piece_bytes=128 << 10)
    plan = choose(ASSUMED.up, few, BUFFER, up=True)
    assert plan.method == "unstaged" and sizes(plan) == [1] * 32
    assert choose(ASSUMED.up, replace(few, slot_runs=200, num_runs=200), BUFFER, up=True).method == "batched"
    assert choose(ASSUMED.up, replace(few, piece_bytes=64 << 10), BUFFER, up=True).method == "strided"
    small = replace(few, layer_bytes=8 << 10, num_pages=16384)
    assert choose(ASSUMED.up, small, BUFFER, up=True).method == "strided"


@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 60))
def test_tapered_intervals_cover_the_same_pages(total: int, step: int, max_last: int) -> None:
    """Tapering keeps the order of the pages, splits the last chunk only, and leaves at most `max_last` pages of it."""
    chunks = intervals(total, step)
    found = tapered(chunks, max_last)
    assert [page for start, stop in found for page in range(start, stop)] == list(range(total))
    assert found[: len(chunks) - 1] == chunks[:-1] and all(start < stop for start, stop in found)
    assert found[-1][1] - found[-1][0] <= max(1, max_last)
    ends = [stop - start for start, stop in found[len(chunks) - 1 :]]
    assert ends == sorted(ends, reverse=True)


def test_scattered_layers_travel_alone_where_the_host_can_queue_them() -> None:
    """Up, a piece that is wide enough is one layer, though queueing it takes the host an eighth of the time of its
    bytes: a forward waits for whole groups. Down, and where the host is too slow, groups are wider."""
    scattered = replace(LAYERS_32, num_runs=512)
    for buffer_bytes in (64 << 20, 256 << 20):
        assert sizes(choose(ASSUMED.up, scattered, buffer_bytes, up=True)) == [1] * 32
    assert max(sizes(choose(ASSUMED.down, scattered, BUFFER, up=False))) >= 8
    dear = replace(ASSUMED.up, strided=CopyCost(55e9, 1e-6), batched=CopyCost(55e9, 2e-6), zero_copy=CopyCost(1e9))
    assert max(sizes(choose(dear, LAYERS_32, BUFFER, up=True))) == 4  # a forward waits for no more than 1 MiB of a page
    slow = replace(ASSUMED.up, batched=replace(ASSUMED.up.batched, issue_s=2e-6))
    assert max(sizes(choose(slow, scattered, BUFFER, up=True))) == 2


def test_up_starts_with_few_layers() -> None:
    """Up, the first group has only the layers that make a piece of 128 KiB."""
    for layer_bytes, first in ((256 << 10, 1), (128 << 10, 1), (64 << 10, 2), (16 << 10, 8)):
        for num_runs in (1, 512):
            plan = choose(ASSUMED.up, replace(LAYERS_32, layer_bytes=layer_bytes, num_runs=num_runs), BUFFER, up=True)
            assert plan.method == "zero_copy" or sizes(plan)[0] == first, (layer_bytes, num_runs)
