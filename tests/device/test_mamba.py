"""The pool of recurrent states: states are allocated zeroed, copied completely, and freed once."""

from __future__ import annotations

import functools

import pytest
import torch

from cases import refused
from device_case import Recorder
from hicache.device import Mamba2CacheParams, Mamba2StateShape, MambaPool, SpeculativeMambaState
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError
from kernel_case import no_waits

LAYERS = [1, 4, 6]
SHAPE = Mamba2StateShape.create(
    tp_world_size=2, intermediate_size=16, n_groups=2, num_heads=4, head_dim=4, state_size=5, conv_kernel=4
)


def pool_of(size: int = 6, device: str = "cpu", **extra: int) -> MambaPool:
    return MambaPool(size, Mamba2CacheParams(SHAPE, LAYERS), device, **extra)


def fill(pool: MambaPool, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for x in (*pool.mamba_cache.conv, pool.mamba_cache.temporal):
        x.copy_(torch.randn(x.shape, generator=generator))


def must(slots: torch.Tensor | None) -> torch.Tensor:
    assert slots is not None
    return slots


def state(pool: MambaPool, slot: int) -> list[torch.Tensor]:
    return [buffer[slot].clone().cpu() for layer_id in LAYERS for buffer in pool.layer_buffers(layer_id)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("tp", "groups", "conv", "temporal"),
    [(1, 8, 64 + 2 * 8 * 5, 4), (2, 8, 32 + 2 * 4 * 5, 2), (4, 2, 16 + 2 * 5, 1), (4, 1, 16 + 2 * 5, 1)],
)
def test_shapes_split_over_ranks(tp: int, groups: int, conv: int, temporal: int) -> None:
    """Channels and heads are split over ranks. Each rank keeps a copy of a group that several ranks share. The window
    is one shorter than the kernel."""
    shape = Mamba2StateShape.create(tp, 64, groups, 4, 16, 5, 4)
    assert shape.conv == ((conv, 3),) and shape.temporal == (temporal, 16, 5)


def test_shapes_that_do_not_split_are_refused() -> None:
    """Heads, groups, channels and kernels that do not fit the ranks raise, and so does a model without layers."""
    refused(
        ConfigError,
        lambda: Mamba2StateShape.create(3, 66, 3, 4, 16, 5, 4),
        lambda: Mamba2StateShape.create(3, 64, 3, 6, 16, 5, 4),
        lambda: Mamba2StateShape.create(2, 64, 3, 4, 16, 5, 4),
        lambda: Mamba2StateShape.create(2, 64, 2, 4, 16, 5, 1),
        lambda: Mamba2CacheParams(SHAPE, []),
        lambda: Mamba2CacheParams(SHAPE, [1, 1]),
        lambda: Mamba2CacheParams(SHAPE, [-1, 1]),
    )


def test_dtypes_come_from_argument_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are float32 unless the environment, under either name, or an argument says otherwise. Convolutions are
    bfloat16."""
    params = Mamba2CacheParams(SHAPE, LAYERS)
    assert (params.temporal_dtype, params.conv_dtype) == (torch.float32, torch.bfloat16)
    assert params.layout.page_bytes(1) == 3 * (18 * 3 * 2 + 2 * 4 * 5 * 4)
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
    assert Mamba2CacheParams(SHAPE, LAYERS).temporal_dtype == torch.bfloat16
    monkeypatch.setenv("HICACHE_MAMBA_SSM_DTYPE", "float16")
    assert pool_of().mamba_cache.temporal.dtype == torch.float16
    assert Mamba2CacheParams(SHAPE, LAYERS, torch.float32).temporal_dtype == torch.float32
    monkeypatch.setenv("HICACHE_MAMBA_SSM_DTYPE", "int8")
    refused(ConfigError, lambda: Mamba2CacheParams(SHAPE, LAYERS))


def test_states_are_zeroed_and_whole(device: str, kernels: str) -> None:
    """States 1..size are allocated once each, zeroed in every layer and tensor. If too few are free, the result is None
    and nothing changes."""
    pool = pool_of(device=device)
    fill(pool)
    before = {slot: state(pool, slot) for slot in range(7)}
    first = must(pool.alloc(4))
    assert first.dtype == torch.int64 and pool.available_size() == 2 and pool.alloc(3) is None
    assert all(not x.any() for slot in first.tolist() for x in state(pool, slot))
    assert all(equal(state(pool, slot), before[slot]) for slot in {*range(7)} - {*first.tolist()})
    second = must(pool.alloc(2))
    assert sorted(first.tolist() + second.tolist()) == [1, 2, 3, 4, 5, 6] and pool.alloc(1) is None
    assert must(pool.alloc(0)).numel() == 0 and equal(state(pool, 0), before[0])
    pool.check()
    pool.free(first[1])
    pool.free(second)
    assert pool.available_size() == 3
    pool.check()
    pool.clear()
    assert pool.available_size() == 6
    pool.check()


def test_forks_and_copies_are_whole_states(device: str, kernels: str) -> None:
    """A fork is a new state with equal bytes, which later writes to its source do not change. A copy is too."""
    pool = pool_of(device=device)
    slots = must(pool.alloc(3))
    fill(pool)
    a, b, c = slots.tolist()
    old = {slot: state(pool, slot) for slot in (a, b, c)}
    forked = must(pool.fork_from(slots[:2]))
    (f, g) = forked.tolist()
    assert equal(state(pool, f), old[a]) and equal(state(pool, g), old[b])
    assert pool.fork_from(slots[:2]) is None and pool.available_size() == 1
    pool.copy_from(slots[2], slots[0])
    assert equal(state(pool, a), old[c]) and equal(state(pool, f), old[a])
    pool.copy_from(torch.tensor([b, c, b], device=device), torch.tensor([g, 0, 0], device=device))
    assert equal(state(pool, g), old[b])
    pool.check()


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [None, 3])
def test_nothing_waits_for_the_device(drafts: int | None) -> None:
    """Allocating, freeing, forking and copying states never makes the host wait for the device."""
    pool = MambaPool(6, Mamba2CacheParams(SHAPE, LAYERS), "cuda", speculative_num_draft_tokens=drafts)
    pool.free(must(pool.fork_from(must(pool.alloc(1)))))
    with no_waits():
        slots = must(pool.alloc(2))
        forked = must(pool.fork_from(slots))
        pool.copy_from(slots, forked)
        pool.free(forked)
        pool.free(slots[0])
    pool.check()
    assert pool.available_size() == 4


def test_bad_calls_raise_and_change_nothing() -> None:
    """Freeing a state twice, foreign states, and copies that read states that they write raise. Nothing changes."""
    pool = pool_of()
    slots = must(pool.alloc(3))
    fill(pool)
    before = [state(pool, slot) for slot in range(7)]
    pool.free(slots[2:])
    foreign = (slots[2:], torch.tensor([0]), torch.tensor([7]), torch.tensor([-1]), slots, slots[[0, 0]])
    crossing = (([1, 2], [2, 1]), ([1, 1], [2, 2]), ([1, 2], [3, 1]))
    refused(DoubleFree, *(functools.partial(pool.free, bad) for bad in foreign))
    refused(InvariantError, *(functools.partial(pool.copy_from, *map(torch.tensor, pair)) for pair in crossing))
    refused(
        ShapeError,
        lambda: pool.copy_from(slots[:2], slots[2:]),
        lambda: pool.alloc(-1),
        lambda: pool.mamba2_layer_cache(2),
        lambda: pool.layer_buffers(2),
    )
    refused(
        ConfigError,
        lambda: pool_of(0),
        lambda: pool_of(spec_state_size=-1),
        lambda: pool_of(speculative_num_draft_tokens=-1),
    )
    assert pool.available_size() == 4 and all(equal(state(pool, slot), old) for slot, old in enumerate(before))
    pool.free(torch.empty(0, dtype=torch.int64))
    pool.copy_from(slots[:2], torch.tensor([0, 0]))
    pool.check()


def test_check_reports_every_violation() -> None:
    """`check` reports a state that is free twice, out of range, both free and allocated, or lost."""
    pool = pool_of()
    must(pool.alloc(2))
    for wrong in ([3, 3, 4, 5, 6], [3, 4, 5, 7], [0, 4, 5, 6], [1, 4, 5, 6], [4, 5, 6]):
        pool.free_slots = torch.tensor(wrong)
        refused(InvariantError, pool.check)


def test_views_of_a_layer_are_the_pool() -> None:
    """`mamba2_layer_cache` gives views by global layer id and waits for the layer by its dense index. Copies wait for
    all layers."""
    pool, counter = pool_of(), Recorder()
    pool.register_layer_transfer_counter(counter)
    cache = pool.mamba2_layer_cache(4)
    cache.temporal[3] = 5.0
    cache.conv[0][2] = 7.0
    assert bool((pool.mamba_cache.temporal[1, 3] == 5).all()) and bool((pool.mamba_cache.conv[0][1, 2] == 7).all())
    assert not pool.mamba_cache.temporal[[0, 2]].any() and counter.layers == [1]
    slots = must(pool.alloc(2))
    pool.copy_from(slots[:1], slots[1:])
    assert counter.layers == [1, 0, 1, 2]


@pytest.mark.parametrize(("states", "expected"), [(0, 6), (2, 2)])
def test_draft_buffers(states: int, expected: int) -> None:
    """Speculation adds a state and a window for each draft token, for the given number of requests or for all."""
    pool = pool_of(spec_state_size=states, speculative_num_draft_tokens=3)
    cache = pool.mamba_cache
    assert isinstance(cache, SpeculativeMambaState)
    assert cache.intermediate_ssm.shape == (3, expected + 1, 3, *SHAPE.temporal)
    assert [x.shape for x in cache.intermediate_conv_window] == [(3, expected + 1, 3, *SHAPE.conv[0])]
    layer = pool.mamba2_layer_cache(6)
    assert isinstance(layer, SpeculativeMambaState)
    layer.intermediate_ssm[1, 2] = 4.0
    assert bool((cache.intermediate_ssm[2, 1, 2] == 4).all())
    assert pool.mem_usage > pool_of().mem_usage


def test_layout_tells_what_is_stored() -> None:
    """The layout has one row for each request, and the names, order, dtypes and shapes of the tensors. A page is one
    state."""
    pool = pool_of()
    (space,) = pool.slot_spaces
    assert space.layout.layers == tuple(LAYERS) and space.num_slots == 7
    for layer_id in LAYERS:
        specs, buffers = space.layout.specs_of(layer_id), space.layer_buffers(layer_id)
        assert [s.name for s in specs] == ["conv0", "temporal"] and all(s.per == "request" for s in specs)
        assert [(s.dtype, s.shape) for s in specs] == [(b.dtype, tuple(b.shape[1:])) for b in buffers]
    assert pool.mem_usage == 7 * pool.cache_params.layout.page_bytes(1) / (1 << 30)


def test_cpu_copies_come_back(device: str) -> None:
    """A copy on the CPU that is written to other states gives the same bytes in all layers."""
    pool = pool_of(device=device)
    slots = must(pool.alloc(4))
    fill(pool)
    a, b, c, d = slots.tolist()
    expected = state(pool, a), state(pool, b)
    copy = pool.get_cpu_copy(slots[:2])
    pool.load_cpu_copy(copy, slots[2:])
    assert equal(state(pool, c), expected[0]) and equal(state(pool, d), expected[1])
    refused(ShapeError, lambda: pool.load_cpu_copy(copy, slots[0]))
