"""The usage examples of the documents with which this project began, run as by a user, with their mistakes corrected.
Sizes are smaller on the CPU. A comment names each correction.

Examples that another file runs:

    0  tiles of copies: kernels/test_tiled_copy.py; CPU copies and layer-wise waits: device/test_pools.py; two streams:
       device/test_cuda_graphs.py; memory saver and Mooncake: device/test_capacity.py; Ascend: device/test_ascend.py;
       alloc_token_slots, alloc_for_extend, alloc_for_decode, text when memory is out: prefix_cache/test_batch.py; pages
       that grow (ids count from page 1, a prefix may end within its page): alloc/test_alloc.py; sliding windows:
       alloc/test_swa.py and device/test_swa.py; fp8 stored as bytes: device/test_mha.py
    1  LazyKVCache, statistics and pressure, tokens that fit: device/test_capacity.py
    2  quantised KV (a scale for each token's head): device/test_quantized.py; bytes a token: device/test_pools.py;
       prefix sharing: flow/test_engine.py; the two formats: kernels/test_paged_attention.py; HiCache:
       test_tensor_cache.py; plot_memory_usage: device/test_capacity.py
    4  states cleared, copied and forked: device/test_mamba.py; matches, forks, chunks, states handed over and its three
       bugs: prefix_cache/test_mamba_requests.py and test_mamba_radix_cache.py

Not run: bodies of classes, which show how something is built rather than used, among them TokenToKVPool and
RadixCache.match of document 2, names that SGLang does not have; and command lines of SGLang's own server.
"""

from __future__ import annotations

import pytest
import torch

from cases import refused
from device_case import Layer, Request
from hicache import (
    CacheInitParams,
    EvictParams,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    InsertParams,
    Mamba2CacheParams,
    Mamba2StateShape,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    kernels,
)
from hicache.config.environment import custom_mem_pool
from hicache.errors import ConfigError, ShapeError

HEADS, DIM = 2, 16


def kv(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(tokens, HEADS, DIM, device=device).half() for _ in range(2))  # type: ignore[return-value]


def mamba_params(layers: list[int]) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=8, conv_kernel=4
    )
    return Mamba2CacheParams(shape, layers)


def test_hybrid_mamba_and_attention_model(device: str) -> None:
    """Documents 0 and 3, hybrid model: one call allocates rows and states, and attention layers have their global
    ids."""
    params = mamba_params([1, 3, 5])
    hybrid_req_pool = HybridReqToTokenPool(
        size=16, mamba_size=8, max_context_len=64, device=device, enable_memory_saver=False, cache_params=params
    )
    # Corrected: the request table owns the state pool. With two pools, as in the example, both would allocate the same
    # states.
    hybrid_kv_pool = HybridLinearKVPool(
        size=128, dtype=torch.float16, page_size=1, head_num=HEADS, head_dim=DIM, full_attention_layer_ids=[0, 2, 4],
        enable_kvcache_transpose=False, device=device, mamba_pool=hybrid_req_pool.mamba_pool,
    )  # fmt: skip
    requests = [Request() for _ in range(4)]
    rows = hybrid_req_pool.alloc(need_size=4, reqs=requests)
    assert rows == [r.req_pool_idx for r in requests]
    states = torch.stack([r.mamba_pool_idx for r in requests if r.mamba_pool_idx is not None])
    assert len(set(states.tolist())) == 4 and 0 not in states.tolist()
    assert hybrid_req_pool.get_mamba_indices(torch.tensor(rows, device=device)).tolist() == states.tolist()
    assert hybrid_req_pool.alloc(4, requests) == hybrid_req_pool.alloc(requests) == rows
    refused(ShapeError, lambda: hybrid_req_pool.alloc(3, requests))
    assert hybrid_req_pool.mamba_pool.available_size() == 4

    slots = torch.tensor([5, 9], device=device)
    k, v = kv(2, device)
    hybrid_kv_pool.set_kv_buffer(Layer(4), slots, k, v)
    assert torch.equal(hybrid_kv_pool.get_key_buffer(4)[slots], k)
    with pytest.raises(ValueError, match="layer_id=3"):
        hybrid_kv_pool.get_key_buffer(3)
    for request in requests:
        hybrid_req_pool.free_mamba_cache(request)
        hybrid_req_pool.free(request)
    assert (hybrid_req_pool.available_size(), hybrid_req_pool.mamba_pool.available_size()) == (16, 8)


def test_a_request_from_match_to_release() -> None:
    """Document 1, the six steps of a request; document 0, "Radix cache"; document 2, the least recently used prefix is
    evicted first."""
    pool, allocator = ReqToTokenPool(4, 32, "cpu"), TokenToKVPoolAllocator(32, torch.float16, "cpu", None, True)
    cache = RadixCache(CacheInitParams(False, pool, allocator, page_size=1))
    for token_ids, cached in (([1, 2, 3, 4], 0), ([7, 8, 9], 0), ([1, 2, 3, 5], 3)):
        # Corrected: a key also names its namespace; the result names slots; a match must be locked while it is used.
        match = cache.match_prefix(MatchPrefixParams(RadixKey(token_ids)))
        prefix_len = len(match.device_indices)
        assert prefix_len == cached
        cache.inc_lock_ref(match.last_device_node)
        req_idx = pool.alloc()
        new_kv_indices = allocator.alloc(len(token_ids) - prefix_len)
        assert new_kv_indices is not None
        pool.set_token_loc(req_idx, 0, match.device_indices)
        pool.set_token_loc(req_idx, prefix_len, new_kv_indices)
        all_kv_indices = pool.req_to_token[req_idx, : len(token_ids)].long()
        # Corrected: the tree owns the inserted slots from now on, so they are not freed with the request.
        assert cache.insert(InsertParams(RadixKey(token_ids), all_kv_indices)).prefix_len == prefix_len
        cache.dec_lock_ref(match.last_device_node)
        pool.free(req_idx)
    assert cache.evictable_size() == 8 == 32 - allocator.available_size()
    assert cache.evict(EvictParams(4)).num_tokens_evicted >= 4
    found = [len(cache.match_prefix(MatchPrefixParams(RadixKey(t))).device_indices) for t in ([1, 2, 3, 5], [7, 8, 9])]
    assert found == [4, 0]


def test_names_of_kernels_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents 0 and 3: kernels have SGLang's names, and SGLang's variable chooses the allocator of GPU memory."""
    assert set(kernels.__all__) == {
        "alloc_extend_kernel", "alloc_decode_kernel", "set_mla_kv_buffer_kernel", "get_mla_kv_buffer_kernel",
        "write_req_to_token_pool_triton", "get_last_loc_triton",
    }  # fmt: skip
    for value in ("True", "NVLINK"):
        monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", value)
        assert custom_mem_pool() == "nvlink"
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "BAREX")
    with pytest.raises(ConfigError, match="SGLANG_MOONCAKE_CUSTOM_MEM_POOL"):
        custom_mem_pool()
