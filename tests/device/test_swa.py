"""The pool of full and window layers: the rows of each layer are at the slots of its own slot space."""

from __future__ import annotations

import pytest
import torch

from cases import refused
from device_case import Recorder
from hicache.alloc import SWATokenToKVPoolAllocator
from hicache.device import SWAKVPool
from hicache.errors import ConfigError, ShapeError

SWA, FULL = [1, 2, 7], [0, 5]


def fixture(device: str = "cpu", page: int = 4) -> tuple[SWAKVPool, SWATokenToKVPoolAllocator]:
    pool = SWAKVPool(
        size=16 * page, size_swa=8 * page, page_size=page, dtype=torch.float32, head_num=2, head_dim=4,
        swa_attention_layer_ids=SWA, full_attention_layer_ids=FULL, device=device,
    )  # fmt: skip
    return pool, SWATokenToKVPoolAllocator(16 * page, 8 * page, page, torch.float32, device, pool, True)


def fill(pool: SWAKVPool, loc: torch.Tensor, seed: int = 0) -> dict[int, torch.Tensor]:
    """Store random rows in all layers, in order; returns keys and values `[tokens, 2, heads, dim]` by layer."""
    generator, rows = torch.Generator().manual_seed(seed), {}
    for layer_id in sorted(SWA + FULL):
        rows[layer_id] = torch.randn(loc.numel(), 2, 2, 4, generator=generator).to(loc.device)
        pool.set_kv_buffer(layer_id, loc, rows[layer_id][:, 0], rows[layer_id][:, 1])
    return rows


def rows_at(pool: SWAKVPool, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
    return torch.stack([buffer[slots] for buffer in pool.get_kv_buffer(layer_id)], 1)


@pytest.mark.parametrize("page", [1, 4])
def test_each_layer_in_its_own_space(device: str, kernels: str, page: int) -> None:
    """Rows of full layers are at the full slots, and rows of window layers at their window slots, and nowhere else."""
    pool, allocator = fixture(device, page)
    allocator.alloc(2 * page)
    loc = allocator.alloc(4 * page)
    assert loc is not None
    allocator.free_swa(loc[:page])
    rows = fill(pool, loc)
    window_slots = allocator.translate_loc_from_full_to_swa(loc)
    for layer_id in FULL + SWA:
        slots, start = (window_slots, page) if layer_id in SWA else (loc, 0)
        assert torch.equal(rows_at(pool, layer_id, slots[start:]), rows[layer_id][start:])
        assert torch.equal(torch.stack(pool.load_kv(layer_id, loc), 1)[start:], rows[layer_id][start:])
        for buffer in pool.get_kv_buffer(layer_id):
            rest = torch.ones(len(buffer), dtype=torch.bool, device=device)
            rest[slots] = False
            assert not buffer[rest].any()
        assert len(pool.get_key_buffer(layer_id)) == (8 if layer_id in SWA else 16) * page + page


def test_one_translation_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward translates its slots once. Another tensor, a changed tensor and a changed mapping are translated
    again."""
    pool, allocator = fixture()
    calls: list[torch.Tensor] = []
    translate = pool.translate_loc_from_full_to_swa

    def counted(loc: torch.Tensor) -> torch.Tensor:
        calls.append(loc)
        return translate(loc)

    monkeypatch.setattr(pool, "translate_loc_from_full_to_swa", counted)
    first, second = allocator.alloc(4), allocator.alloc(4)
    assert first is not None and second is not None
    fill(pool, first)
    assert len(calls) == 1
    fill(pool, first)
    assert len(calls) == 2
    k = torch.randn(4, 2, 4)
    pool.set_kv_buffer(7, second, k, k)
    assert len(calls) == 3
    second.copy_(first)
    pool.set_kv_buffer(7, second, k, k)
    assert len(calls) == 4 and torch.equal(pool.get_key_buffer(7)[translate(first)], k)
    allocator.free_swa(first)
    before = pool.get_key_buffer(7)[4:].clone()
    pool.set_kv_buffer(7, second, -k, k)
    assert len(calls) == 5 and torch.equal(pool.get_key_buffer(7)[4:], before)
    with torch.inference_mode():
        fill(pool, first.clone())
    assert len(calls) == 6


@pytest.mark.gpu
def test_a_captured_forward_translates_in_its_graph() -> None:
    """A replay writes to the slots of the mapping at the time of the replay, even after an eager run."""
    pool, allocator = fixture("cuda")
    loc = allocator.alloc(4)
    other = allocator.alloc(4)
    assert loc is not None and other is not None
    rows = fill(pool, loc)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer_id in sorted(FULL + SWA):
            pool.set_kv_buffer(layer_id, loc, rows[layer_id][:, 0], rows[layer_id][:, 1])
    for pair in rows.values():
        pair.neg_()
    old = loc.clone()
    loc.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    for layer_id in FULL + SWA:
        slots, before = (pool.translate_loc_from_full_to_swa(x) if layer_id in SWA else x for x in (other, old))
        assert torch.equal(rows_at(pool, layer_id, slots), rows[layer_id])
        assert torch.equal(rows_at(pool, layer_id, before), -rows[layer_id])


def test_copies_and_moves_follow_the_peers(device: str) -> None:
    """CPU copies and moves move full rows by full slot, and window rows by window slot, to other mapped slots."""
    pool, allocator = fixture(device)
    source, spare, target = allocator.alloc(4), allocator.alloc(4), allocator.alloc(4)
    assert source is not None and spare is not None and target is not None
    rows = fill(pool, source)
    copy = pool.get_cpu_copy(source)
    assert len(copy) == 5
    pool.load_cpu_copy(copy, target)
    pool.move_kv_cache(spare, source)
    for slots in (source, spare, target):
        window_slots = pool.translate_loc_from_full_to_swa(slots)
        for layer_id in FULL + SWA:
            assert torch.equal(rows_at(pool, layer_id, window_slots if layer_id in SWA else slots), rows[layer_id])
    refused(ShapeError, lambda: pool.load_cpu_copy(copy[:4], target))


def test_two_layouts_over_two_spaces() -> None:
    """Each space has the name of its component, its layers by global id, its slots, and the tensors that they index."""
    pool, _ = fixture()
    full, swa = pool.slot_spaces
    assert (full.name, swa.name) == ("full", "swa")
    assert (full.layout.layers, swa.layout.layers) == (tuple(FULL), tuple(SWA))
    assert (full.num_slots, swa.num_slots) == (68, 36) and full.layout.digest() != swa.layout.digest()
    for space in (full, swa):
        for layer_id in space.layout.layers:
            specs, buffers = space.layout.specs_of(layer_id), space.layer_buffers(layer_id)
            assert [(s.dtype, s.shape) for s in specs] == [(b.dtype, tuple(b.shape[1:])) for b in buffers]
            assert {len(b) for b in buffers} == {space.num_slots}
            assert buffers[0].data_ptr() == pool.get_key_buffer(layer_id).data_ptr()
    assert pool.layers_mapping == {0: (0, False), 5: (1, False), 1: (0, True), 2: (1, True), 7: (2, True)}
    assert pool.mem_usage == (68 * 2 + 36 * 3) * 2 * 8 * 4 / (1 << 30)
    pointers, lengths, page_bytes = pool.get_contiguous_buf_infos()
    assert pointers[:5] == [pool.get_key_buffer(i).data_ptr() for i in (0, 1, 2, 5, 7)]
    assert lengths == [slots * 32 for slots in (68, 36, 36, 68, 36)] * 2 and set(page_bytes) == {4 * 32}


def test_getters_wait_for_their_layer() -> None:
    """Getters wait for the position of their layer among all layers of the pool."""
    pool, _ = fixture()
    counter = Recorder()
    pool.register_layer_transfer_counter(counter)
    pool.get_key_buffer(7)
    pool.get_value_buffer(0)
    pool.get_key_buffer(5)
    pool.layer_buffers(1)
    assert counter.layers == [4, 0, 3]


def test_wrong_input_is_refused() -> None:
    """Transposing, layers of both kinds or of none, unknown ids, and a missing or short mapping are errors."""
    sizes = (16, 8, 4, torch.float32, 2, 4)
    unmapped, zeros = SWAKVPool(*sizes, SWA, FULL, "cpu"), torch.zeros(1, 2, 4)
    refused(
        ConfigError,
        lambda: SWAKVPool(*sizes, SWA, FULL, "cpu", enable_kvcache_transpose=True),
        lambda: SWAKVPool(*sizes, SWA, [0, 1], "cpu"),
        lambda: SWAKVPool(*sizes, SWA, [], "cpu"),
        lambda: SWAKVPool(*sizes, [1, 1], FULL, "cpu"),
        lambda: unmapped.set_kv_buffer(1, torch.tensor([4]), zeros, zeros),
        lambda: unmapped.layout,
    )
    refused(
        ShapeError,
        lambda: unmapped.get_key_buffer(3),
        lambda: unmapped.register_mapping(torch.zeros(19, dtype=torch.int64)),
        lambda: unmapped.register_mapping(torch.zeros(20, 1, dtype=torch.int64)),
    )
