"""Hybrid models: attention layers under global ids, and a request table that allocates rows and states together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import refused
from device_case import Layer, Recorder, Request
from hicache.device import HybridLinearKVPool, HybridReqToTokenPool, Mamba2CacheParams, Mamba2StateShape, MambaPool
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError
from kernel_case import no_waits

ATTENTION, LINEAR = [3, 7], [0, 1, 2, 4]
SHAPE = Mamba2StateShape.create(1, 16, 1, 2, 8, 4, 4)
F32 = torch.float32


def params() -> Mamba2CacheParams:
    return Mamba2CacheParams(SHAPE, LINEAR)


def hybrid(device: str = "cpu", **extra: int | bool | MambaPool) -> HybridLinearKVPool:
    return HybridLinearKVPool(
        size=16, dtype=F32, page_size=2, head_num=2, head_dim=4, full_attention_layer_ids=ATTENTION, device=device,
        **extra,
    )  # fmt: skip


def table(size: int = 4, states: int = 6, device: str = "cpu", **extra: int | bool) -> HybridReqToTokenPool:
    return HybridReqToTokenPool(
        size=size, mamba_size=states, max_context_len=8, device=device, enable_memory_saver=False,
        cache_params=params(), **extra,
    )  # fmt: skip


def number(state: torch.Tensor | None) -> int:
    assert state is not None and state.dim() == 0 and state.dtype == torch.int64
    return int(state)


def rows(pool: HybridReqToTokenPool, requests: list[Request]) -> list[int]:
    got = pool.alloc(requests)
    assert got is not None
    return got


def test_attention_layers_by_global_id(device: str) -> None:
    """Rows that are stored under global ids are read under them, and are in dense layers of the inner pool. An id
    without attention raises ValueError."""
    pool = hybrid(device)
    loc = torch.tensor([2, 9], device=device)
    stored = {}
    for layer_id in ATTENTION:
        stored[layer_id] = torch.randn(2, 2, 2, 4, device=device)
        pool.set_kv_buffer(Layer(layer_id), loc, *stored[layer_id].unbind(1))
    for dense, layer_id in enumerate(ATTENTION):
        assert torch.equal(torch.stack([b[loc] for b in pool.get_kv_buffer(layer_id)], 1), stored[layer_id])
        assert pool._transfer_full_attention_id(layer_id) == dense
        assert pool.full_kv_pool.get_key_buffer(dense).data_ptr() == pool.get_key_buffer(layer_id).data_ptr()
    pool.load_cpu_copy(pool.get_cpu_copy(loc), loc + 2)
    pool.move_kv_cache(loc + 4, loc)
    for slots in (loc + 2, loc + 4):
        assert torch.equal(pool.get_value_buffer(7)[slots], stored[7][:, 1])
    k = stored[7][:, 0]
    refused(
        ValueError,
        lambda: pool.get_key_buffer(4),
        lambda: pool.get_value_buffer(4),
        lambda: pool.layer_buffers(4),
        lambda: pool.set_kv_buffer(Layer(4), loc, k, k),
        lambda: pool._transfer_full_attention_id(4),
        lambda: pool.load_cpu_copy(pool.get_cpu_copy(loc)[:1], loc),
    )


def test_latent_rows() -> None:
    """With use_mla the rows are latent, and are set and read in two parts. Without use_mla such calls are refused."""
    pool, counter = hybrid(use_mla=True, kv_lora_rank=6, qk_rope_head_dim=2), Recorder()
    loc, nope, rope = torch.tensor([5, 2]), torch.randn(2, 1, 6), torch.randn(2, 1, 2)
    pool.register_layer_transfer_counter(counter)
    pool.set_mla_kv_buffer(7, loc, nope, rope)
    assert torch.equal(pool.get_key_buffer(7)[loc], torch.cat((nope, rope), -1))
    got = pool.get_mla_kv_buffer(7, loc, torch.float64)
    assert torch.equal(got[0], nope.double()) and torch.equal(got[1], rope.double()) and counter.layers == [1, 1]
    refused(
        ConfigError,
        lambda: hybrid().set_mla_kv_buffer(7, loc, nope, rope),
        lambda: hybrid().get_mla_kv_buffer(7, loc),
        lambda: hybrid(use_mla=True, qk_rope_head_dim=2),
        lambda: hybrid(use_mla=True, kv_lora_rank=2),
        lambda: hybrid(enable_kvcache_transpose=True),
    )


def test_layouts_and_layer_map() -> None:
    """The attention layout names global ids. With a state pool its space follows, over other layers or the same ones.
    Spaces have the names of components."""
    pool = hybrid(mamba_pool=MambaPool(5, params(), "cpu"))
    full, mamba = pool.slot_spaces
    assert (full.name, mamba.name) == ("full", "mamba")
    assert full.layout == pool.layout and pool.layout.layers == (3, 7) and full.num_slots == 18
    assert mamba.layout.layers == tuple(LINEAR) and mamba.num_slots == 6
    assert full.layer_buffers(7)[0].data_ptr() == pool.get_key_buffer(7).data_ptr()
    assert [space.name for space in hybrid().slot_spaces] == ["full"]
    both = hybrid(mamba_pool=MambaPool(5, Mamba2CacheParams(SHAPE, [3, 4]), "cpu"))
    assert [space.layout.layers for space in both.slot_spaces] == [(3, 7), (3, 4)]


def test_a_state_brought_along_is_kept() -> None:
    """A cache fills the state of a request before the request gets a row. The request keeps this state with its
    bytes."""
    pool = table()
    state = pool.mamba_pool.alloc(1)
    assert state is not None
    pool.mamba2_layer_cache(4).temporal[state] = 3.0
    request = Request(mamba_pool_idx=state[0])
    row = rows(pool, [request])[0]
    assert int(pool.get_mamba_indices(row)) == int(state) and pool.mamba_pool.available_size() == 5
    assert bool((pool.mamba2_layer_cache(4).temporal[pool.get_mamba_indices(row)] == 3).all())
    assert pool.alloc(2) == [2, 3] and not pool.get_mamba_indices(torch.tensor([2, 3])).any()
    pool.check()


def test_wrong_calls_are_refused() -> None:
    """These raise: checkpoints without the extra buffer, checkpoints of requests without row or state, and unknown
    layers."""
    pool = table()
    refused(ConfigError, lambda: pool.checkpoint([]), lambda: pool.take_checkpoint(Request()))
    pool = table(enable_mamba_extra_buffer=True)
    refused(InvariantError, lambda: pool.alloc([Request(4, torch.tensor(1), torch.tensor(2))]))
    refused(
        ShapeError,
        lambda: pool.checkpoint([Request()]),
        lambda: pool.checkpoint([Request(req_pool_idx=1)]),
        lambda: pool.take_checkpoint(Request(req_pool_idx=1)),
        lambda: pool.mamba2_layer_cache(3),
    )


def test_check_reports_every_violation() -> None:
    """One error lists a free row with a state, a state of two rows, and the violations of table and states."""
    pool = table()
    rows(pool, [Request(), Request()])
    pool.req_index_to_mamba_index_mapping[4] = 1
    pool.mamba_pool.free_slots = pool.mamba_pool.free_slots[1:]
    pool.free_slots.append(1)
    with pytest.raises(InvariantError) as caught:
        pool.check()
    assert len(caught.value.violations) == 4


@pytest.mark.gpu
def test_handing_out_does_not_wait() -> None:
    """Rows, states, checkpoints and frees of a batch never make the host wait for the device."""
    pool = table(device="cuda", enable_mamba_extra_buffer=True)
    warm = Request()
    rows(pool, [warm])
    pool.checkpoint([warm])
    pool.free_mamba_cache(warm)
    pool.free(warm)
    with no_waits():
        requests = [Request(), Request()]
        rows(pool, requests)
        pool.checkpoint(requests)
        for request in requests:
            pool.free_mamba_cache(request)
            pool.free(request)
    pool.check()
    assert pool.available_size() == 4 and pool.mamba_pool.available_size() == 6


@given(
    extra=st.booleans(),
    history=st.lists(st.tuples(st.sampled_from("aarsctn"), st.integers(0, 99)), min_size=30, max_size=60),
)
def test_any_history_conserves_rows_and_states(device: str, extra: bool, history: list[tuple[str, int]]) -> None:
    """After any allocs, frees, checkpoints and handed over states, each row and state has one owner, also if a request
    is named twice. The mapping has this owner, and everything can be freed. Without the extra buffer there are no
    checkpoints."""
    pool = table(3, 8, device=device, enable_mamba_extra_buffer=extra)
    running: list[Request] = []
    handed_over: list[int] = []
    for action, choice in history:
        request = running[choice % len(running)] if running else None
        if action == "a":
            fresh = [Request() for _ in range(choice % 3)]
            named = [*running[:1], *fresh, *fresh[:1]]
            if (got := pool.alloc(named)) is not None:
                assert got == [r.req_pool_idx for r in named]
                running += fresh
            else:  # too few rows or states, so no request gets any
                assert all(set(vars(r).values()) == {None} for r in fresh)
        elif action == "r" and request:
            pool.free_mamba_cache(request)
            refused(DoubleFree, lambda request=request: pool.free_mamba_cache(request))
            pool.free(request)
            running.remove(request)
        elif action == "c" and extra:
            pool.checkpoint(running)
        elif action == "t" and request and extra:
            taken = pool.take_checkpoint(request)
            handed_over += [] if taken is None else taken.tolist()
        elif action == "n" and handed_over:
            pool.mamba_pool.free(torch.tensor([handed_over.pop(choice % len(handed_over))], device=device))
        elif action == "s" and request:
            # A finished request hands over its running state and frees its row.
            handed_over.append(number(request.mamba_pool_idx))
            request.mamba_pool_idx = None
            pool.free(request)
            if extra:  # its checkpoint still has to be freed
                pool.free_mamba_cache(request)
            running.remove(request)
        pool.check()
        own = [x for r in running for x in (r.mamba_pool_idx, *([r.mamba_checkpoint_idx] if extra else []))]
        states = [*map(number, own), *handed_over]
        assert len(set(states)) == len(states) == 8 - pool.mamba_pool.available_size()
        assert pool.available_size() == 3 - len(running)
        of_row = {r.req_pool_idx: number(r.mamba_pool_idx) for r in running}
        assert pool.get_mamba_indices(torch.arange(4, device=device)).tolist() == [of_row.get(i, 0) for i in range(4)]
