"""A decode step captured in a CUDA graph and replayed stores what the same step does eagerly."""

from __future__ import annotations

import pytest
import torch

from hicache.alloc import PagedTokenToKVPoolAllocator
from hicache.device import MHATokenToKVPool
from kernel_case import no_waits

pytestmark = pytest.mark.gpu

LAYERS, HEADS, DIM, PAGE, MAX_BATCH = 3, 2, 16, 16, 8


class DecodeStep:
    """Static inputs of a step over `MAX_BATCH` requests, and the step, which stores keys and values of every layer at
    `slots`.

    A hidden row stands for the model. Each layer stores a different function of it, for keys and for values.
    """

    def __init__(self, pool: MHATokenToKVPool, scale: torch.Tensor | None) -> None:
        self.pool, self.scale = pool, scale
        self.hidden = torch.zeros(MAX_BATCH, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.slots = torch.zeros(MAX_BATCH, dtype=torch.int64, device="cuda")

    def run(self) -> None:
        for layer in range(LAYERS):
            k, v = self.hidden * (layer + 1), self.hidden - layer
            self.pool.set_kv_buffer(layer, self.slots, k, v, self.scale, self.scale)

    def capture(self) -> torch.cuda.CUDAGraph:
        warmup = torch.cuda.Stream()
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            self.run()
        torch.cuda.current_stream().wait_stream(warmup)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def load(self, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the inputs of a real batch. The remaining entries write to slot 0."""
        n = len(slots)
        self.hidden[:n].copy_(hidden)
        self.slots.zero_()
        self.slots[:n].copy_(slots)


def pool_of(dtype: torch.dtype, alt_stream: bool) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        256, PAGE, dtype, HEADS, DIM, LAYERS, "cuda", False, enable_alt_stream=alt_stream
    )  # fmt: skip


def stored(pool: MHATokenToKVPool) -> list[torch.Tensor]:
    """All rows except the sink's."""
    return [buffer[PAGE:].clone() for layer in range(LAYERS) for buffer in pool.layer_buffers(layer)]


@pytest.mark.parametrize("alt_stream", [True, False])
@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float8_e4m3fn, True)])
def test_replays_equal_eager_steps(alt_stream: bool, dtype: torch.dtype, scaled: bool) -> None:
    """Over growing sequences in shrinking, padded batches, every replay leaves each layer equal to that of the eager
    step."""
    scale = torch.tensor([0.5], device="cuda") if scaled else None
    replayed, eager = DecodeStep(pool_of(dtype, alt_stream), scale), DecodeStep(pool_of(dtype, alt_stream), scale)
    graph = replayed.capture()
    for step in (replayed, eager):
        for buffer in (*step.pool.k_buffer, *step.pool.v_buffer):
            buffer.zero_()
    allocator = PagedTokenToKVPoolAllocator(256, PAGE, dtype, "cuda", None, True)
    generator = torch.Generator("cuda").manual_seed(5)
    lens = torch.tensor([1, 15, 16, 17, 31, 32, 5, 2])
    none = torch.zeros_like(lens)
    first = allocator.alloc_extend(none.cuda(), none, lens.cuda(), lens, none.cuda() - 1, int(lens.sum()))
    assert first is not None
    last = first[lens.cumsum(0).cuda() - 1]
    used: set[int] = set()
    for running in (8, 8, 7, 5, 5, 1, 3):
        after = lens[:running] + 1
        slots = allocator.alloc_decode(after.cuda(), after, last[:running])
        assert slots is not None
        hidden = torch.randn(running, HEADS, DIM, device="cuda", generator=generator).to(torch.bfloat16)
        for step in (replayed, eager):
            step.load(hidden, slots)
        graph.replay()
        eager.run()
        torch.cuda.synchronize()
        lens[:running] = after
        last[:running] = slots
        used |= set(slots.tolist())
        for got, expected in zip(stored(replayed.pool), stored(eager.pool), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        # The replayed and the eager pool have the expected values at the slots of this step.
        keys = replayed.pool.get_key_buffer(2).float()[slots]
        wide = (hidden * 3).float() / (0.5 if scaled else 1.0)
        assert torch.equal(keys, wide.to(dtype).float())
    touched = replayed.pool.layer_buffers(1)[0].view(torch.uint8).flatten(1).any(1).nonzero().flatten().tolist()
    assert {slot for slot in touched if slot >= PAGE} <= used and not {slot for slot in touched if 0 < slot < PAGE}


def test_a_replay_waits_for_nothing() -> None:
    """Loading the inputs from the allocator's slots and replaying does not make the host wait."""
    step = DecodeStep(pool_of(torch.bfloat16, True), None)
    graph = step.capture()
    allocator = PagedTokenToKVPoolAllocator(256, PAGE, torch.bfloat16, "cuda", None, True)
    lens, last = torch.ones(4, dtype=torch.int64), torch.full((4,), -1, device="cuda")
    on_device = lens.cuda()
    hidden = torch.ones(4, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    allocator.alloc_decode(on_device, lens, last)
    with no_waits():
        slots = allocator.alloc_decode(on_device, lens, last)
        assert slots is not None
        step.load(hidden, slots)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(step.pool.get_value_buffer(0)[slots], hidden)
