"""The usage examples of the documents that this project started from, with their mistakes corrected, as a user runs
them. Sizes are smaller on the CPU; each correction is named where it is made.

Examples that another file runs:

    0  tiles of copies: kernels/test_tiled_copy.py; CPU copies and layer-wise waits: device/test_pools.py; two streams:
       device/test_cuda_graphs.py; memory saver and Mooncake: device/test_capacity.py; Ascend: device/test_ascend.py;
       alloc_token_slots, alloc_for_extend, alloc_for_decode and the text when memory is out: prefix_cache/test_batch.py
    4  matches, forks, chunks, donated states and its three bugs: prefix_cache/test_mamba_requests.py and
       test_mamba_radix_cache.py

Not run: bodies of classes, which show how something is built rather than used, among them TokenToKVPool and
RadixCache.match of document 2, names that SGLang does not have; and command lines of SGLang's own server.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from cases import refused
from device_case import Layer, Request
from hicache import (
    CacheInitParams,
    CacheRequest,
    EngineConfig,
    EvictParams,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    InsertParams,
    Mamba2CacheParams,
    Mamba2StateShape,
    MambaPool,
    MatchPrefixParams,
    MHATokenToKVPool,
    ModelGeometry,
    PagedTokenToKVPoolAllocator,
    QuantizedKVCache,
    RadixCache,
    RadixKey,
    ReqToTokenPool,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    build_engine,
    kernels,
    plan_capacity,
)
from hicache.config import custom_mem_pool
from hicache.errors import ConfigError, ShapeError
from hicache.kernels.paged_attention import contiguous_to_paged, paged_attention_forward, paged_to_contiguous
from hicache.layout import BufferSpec, PoolLayout
from hicache.plot import MemorySample, plot_memory_usage
from hicache.tensor_cache import HiCache

HEADS, DIM = 2, 16


def kv(tokens: int, device: str, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(tokens, HEADS, DIM, device=device).to(dtype) for _ in range(2))  # type: ignore[return-value]


def test_basic_mha_model(device: str) -> None:
    """Document 0, "Basic MHA model": pool, allocator and request table; allocate, store and read, free."""
    size = 32768 if device == "cuda" else 512
    kv_cache = MHATokenToKVPool(
        size=size, page_size=1, dtype=torch.float16, head_num=HEADS, head_dim=DIM, layer_num=4, device=device,
        enable_memory_saver=False,
    )  # fmt: skip
    allocator = TokenToKVPoolAllocator(
        size=size, dtype=torch.float16, device=device, kvcache=kv_cache, need_sort=True
    )  # fmt: skip
    req_pool = ReqToTokenPool(size=512, max_context_len=256, device=device, enable_memory_saver=False)

    token_indices = allocator.alloc(128)
    req_indices = req_pool.alloc(4)
    assert token_indices is not None and req_indices is not None
    # Corrected: ids begin at 1, for row 0 and slot 0 are the sinks of padding.
    assert req_indices == [1, 2, 3, 4] and token_indices.tolist() == list(range(1, 129))

    # Corrected: a row gets one request's slots, [row, positions], not all rows at once.
    req_pool.write((req_indices[0], slice(0, 128)), token_indices)
    k, v = kv(128, device)
    kv_cache.set_kv_buffer(Layer(2), loc=token_indices, cache_k=k, cache_v=v)
    k_buffer, v_buffer = kv_cache.get_kv_buffer(layer_id=2)
    slots = req_pool.req_to_token[req_indices[0], :128].long()
    assert torch.equal(k_buffer[slots], k) and torch.equal(v_buffer[slots], v)

    allocator.free(token_indices)
    req_pool.free(req_indices)
    assert allocator.available_size() == size and req_pool.available_size() == 512


def test_paged_extend_and_decode(device: str) -> None:
    """Document 0, "Paged": three requests of 0, 10 and 20 tokens grow by 32 each, and then by one."""
    allocator = PagedTokenToKVPoolAllocator(
        size=32768, page_size=16, dtype=torch.float16, device=device, kvcache=None, need_sort=True
    )  # fmt: skip
    prefix_lens, seq_lens = torch.tensor([0, 10, 20]), torch.tensor([32, 42, 52])
    held = [torch.empty(0, dtype=torch.int64, device=device)] + [allocator.alloc(n) for n in (16, 32)]
    prefixes = [slots[:n] for slots, n in zip(held, (0, 10, 20), strict=True) if slots is not None]
    # Corrected: a prefix of 10 tokens ends at offset 9 of its page, one of 20 at offset 3. The example's 159 and 335
    # are at offset 15, the end of a page, which prefixes of whole pages have.
    last_loc = torch.tensor([-1, int(prefixes[1][-1]), int(prefixes[2][-1])])
    assert ((last_loc + 1) % 16 == prefix_lens % 16).all()
    out_indices = allocator.alloc_extend(
        prefix_lens=prefix_lens.to(device),
        prefix_lens_cpu=prefix_lens,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        last_loc=last_loc.to(device),
        extend_num_tokens=96,
    )
    assert out_indices is not None
    rows = [torch.cat((p, new)) for p, new in zip(prefixes, out_indices.split(32), strict=True)]
    for row in rows:
        assert all(s % 16 == i % 16 for i, s in enumerate(row.tolist()))

    # Corrected likewise: 42 tokens end at offset 9 of a page and 52 at offset 3; only 32 fill theirs.
    seq_lens = seq_lens + 1
    last_loc = torch.stack([row[-1] for row in rows])
    decode_indices = allocator.alloc_decode(seq_lens=seq_lens.to(device), seq_lens_cpu=seq_lens, last_loc=last_loc)
    assert decode_indices is not None
    new, old = decode_indices.tolist(), last_loc.tolist()
    assert new[0] % 16 == 0 and new[1:] == [old[1] + 1, old[2] + 1]
    for row, slot in zip(rows, decode_indices.split(1), strict=True):
        allocator.free(torch.cat((row, slot)))
    assert allocator.available_size() == 32768


def test_memory_layout_examples() -> None:
    """Document 0, "Memory layout": tokens get slots 1, 2, 3, 4, and 50 tokens take four pages."""
    token = TokenToKVPoolAllocator(64, torch.float16, "cpu", None, True).alloc(4)
    assert token is not None and token.tolist() == [1, 2, 3, 4]
    allocator = PagedTokenToKVPoolAllocator(128, 16, torch.float16, "cpu", None, True)
    zero, end, none = torch.tensor([0]), torch.tensor([50]), torch.tensor([-1])
    slots = allocator.alloc_extend(zero, zero, end, end, none, 50)
    assert slots is not None
    # Corrected: pages count from 1, page 0 is the sink; and the last page has 2 tokens.
    assert slots.tolist() == list(range(16, 66)) and allocator.available_size() == 64


def test_sliding_windows(device: str) -> None:
    """Document 0, "Paged attention with SWA": two pools behind one, slots translated, the window's part freed early."""
    pool = SWAKVPool(
        size=256, size_swa=64, page_size=16, dtype=torch.float16, head_num=HEADS, head_dim=DIM,
        swa_attention_layer_ids=[0, 1, 3], full_attention_layer_ids=[2], device=device,
    )  # fmt: skip
    allocator = SWATokenToKVPoolAllocator(256, 64, 16, torch.float16, device, pool, True)
    full_loc = allocator.alloc(48)
    assert full_loc is not None and allocator.full_available_size() == 208 and allocator.swa_available_size() == 16
    stored = [kv(48, device) for _ in range(4)]
    for layer_id, (k, v) in enumerate(stored):
        pool.set_kv_buffer(Layer(layer_id), full_loc, k, v)
    swa_loc = pool.translate_loc_from_full_to_swa(full_loc)
    for layer_id, (k, _) in enumerate(stored):
        assert torch.equal(pool.get_key_buffer(layer_id)[full_loc if layer_id == 2 else swa_loc], k)
    allocator.free_swa(full_loc[:32])
    assert allocator.swa_available_size() == 48 and pool.translate_loc_from_full_to_swa(full_loc)[:32].eq(0).all()
    allocator.free(full_loc)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (256, 64)
    allocator.check()


def mamba_params(layers: list[int]) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=8, conv_kernel=4
    )
    return Mamba2CacheParams(shape, layers)


def test_hybrid_mamba_and_attention_model(device: str) -> None:
    """Documents 0 and 3, hybrid model: one call takes rows and states; attention layers have their global ids."""
    params = mamba_params([1, 3, 5])
    hybrid_req_pool = HybridReqToTokenPool(
        size=16, mamba_size=8, max_context_len=64, device=device, enable_memory_saver=False, cache_params=params
    )
    # Corrected: the request table owns the state pool. Two, as in the example, would hand out the same states.
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


def test_states_are_cleared_copied_and_forked(device: str) -> None:
    """Document 4, a short request: a zeroed state, the match's state copied in, the end's kept in a fork."""
    pool = MambaPool(8, mamba_params([0, 1]), device)
    assert pool.mamba_cache.conv[0].shape == (2, 9, 48, 3) and pool.mamba_cache.temporal.shape == (2, 9, 4, 8, 8)
    matched, running = pool.alloc(1), pool.alloc(1)
    assert matched is not None and running is not None
    pool.mamba_cache.temporal[:, matched] = 3.0
    assert not pool.mamba_cache.temporal[:, running].any()
    pool.copy_from(matched, running)
    pool.mamba_cache.temporal[:, running] += 1
    # Corrected: the tree gets a state of its own (a fork, or the request's, donated), never one that is then freed.
    kept = pool.fork_from(running)
    assert kept is not None
    pool.free(running)
    again = pool.alloc(5)
    assert again is not None and not pool.mamba_cache.temporal[:, again].any()
    assert pool.mamba_cache.temporal[:, kept].eq(4).all() and pool.mamba_cache.temporal[:, matched].eq(3).all()


def test_request_table() -> None:
    """Document 0: rows written whole; document 1: a row, the slots of its tokens, read back; document 3: chunks of one
    prompt keep their row."""
    pool = ReqToTokenPool(size=4, max_context_len=32, device="cpu")
    indices = pool.alloc(4)
    # Corrected: rows count from 1, row 0 is the sink of padding.
    assert indices == [1, 2, 3, 4] and pool.alloc() == -1 and pool.alloc(1) is None
    token_locations = torch.arange(128).view(4, 32)
    pool.write(indices, token_locations)
    assert torch.equal(pool.req_to_token[1:].long(), token_locations)
    pool.free(indices)
    assert sorted(pool.free_slots) == indices

    token_to_kv_pool = TokenToKVPoolAllocator(64, torch.float16, "cpu", None, True)
    req_idx = pool.alloc()
    kv_indices = token_to_kv_pool.alloc(10)
    assert kv_indices is not None
    pool.set_token_loc(req_idx, 0, kv_indices)
    seq_len = int(pool.req_lens[req_idx])
    assert seq_len == 10 and pool.req_to_token[req_idx, :seq_len].tolist() == kv_indices.tolist()
    pool.free(req_idx)

    requests = [Request(), Request()]
    first = pool.alloc(reqs=requests)
    again = pool.alloc([*requests, Request()])
    assert first is not None and again is not None and again[:2] == first and again[2] not in first
    for request in requests:
        pool.free(request)
        assert request.req_pool_idx is None


def test_a_request_from_match_to_release() -> None:
    """Document 1, the six steps of a request; document 0, "Radix cache"; document 2, the prefix used least recently is
    evicted first."""
    pool, allocator = ReqToTokenPool(4, 32, "cpu"), TokenToKVPoolAllocator(32, torch.float16, "cpu", None, True)
    cache = RadixCache(CacheInitParams(False, pool, allocator, page_size=1))
    for token_ids, cached in (([1, 2, 3, 4], 0), ([7, 8, 9], 0), ([1, 2, 3, 5], 3)):
        # Corrected: a key names its namespace too; the result names slots; a match must be locked while it is used.
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
        # Corrected: what was inserted is the tree's from now on, and is not freed with the request.
        assert cache.insert(InsertParams(RadixKey(token_ids), all_kv_indices)).prefix_len == prefix_len
        cache.dec_lock_ref(match.last_device_node)
        pool.free(req_idx)
    assert cache.evictable_size() == 8 == 32 - allocator.available_size()
    assert cache.evict(EvictParams(4)).num_tokens_evicted >= 4
    found = [len(cache.match_prefix(MatchPrefixParams(RadixKey(t))).device_indices) for t in ([1, 2, 3, 5], [7, 8, 9])]
    assert found == [4, 0]


def test_paged_attention(device: str) -> None:
    """Document 1, `paged_attention_forward`: over scattered pages it equals attention over the tokens in order."""
    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.float32, device, None, True)
    pool = MHATokenToKVPool(64, 4, torch.float32, HEADS, DIM, 1, device, False)
    pages = allocator.alloc_pages(3)
    assert pages is not None and allocator.available_size() == 52 and allocator.alloc_pages(14) is None
    pages = pages.flip(0)
    indices = allocator.pages_to_tokens(pages)[:10]
    k, v = kv(10, device, torch.float32)
    pool.store_kv(0, indices, k, v)
    assert all(torch.equal(*pair) for pair in zip(pool.load_kv(0, indices), (k, v), strict=True))
    query = torch.randn(1, 1, HEADS, DIM, device=device)
    out = paged_attention_forward(
        query, *pool.get_kv_buffer(0), pages[None], torch.tensor([10], device=device), page_size=4
    )
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(-3, -2) for x in (query[0], k, v)))
    torch.testing.assert_close(out[0], plain.transpose(-3, -2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantized_store(device: str, kv_dtype: str) -> None:
    """Documents 1 and 2, quantised KV: half the bytes, close values, and no write rescales an earlier one."""
    pool = QuantizedKVCache(32, 1, torch.bfloat16, HEADS, 128, 2, device, False, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    full = MHATokenToKVPool(32, 1, torch.bfloat16, HEADS, 128, 2, device, False)
    assert pool.mem_usage < 0.55 * full.mem_usage
    quiet, loud = (torch.randn(2, HEADS, 128, device=device).to(torch.bfloat16) * scale for scale in (1e-2, 1e2))
    slots = torch.tensor([3, 8], device=device)
    pool.set_kv_buffer(1, slots, quiet, quiet)
    before = pool.get_key_buffer(1)[slots].clone()
    # Corrected: with one scale for a whole layer, as in the examples, these would turn the quiet ones into zeros.
    pool.set_kv_buffer(1, slots + 10, loud, loud)
    assert torch.equal(pool.get_key_buffer(1)[slots], before)
    error = (before.float() - quiet.float()).abs().amax() / quiet.float().abs().amax()
    assert error < (0.01 if kv_dtype == "int8" else 0.07)


def test_sizes_and_capacity() -> None:
    """Document 2: 32 layers of 8 heads of 128 in fp16 are 128 KiB a token; documents 1 and 2, tokens that fit."""
    layers = tuple(range(32))
    rows = [BufferSpec(name, torch.float16, (8, 128), "token", layers) for name in ("k", "v")]
    layout = PoolLayout(tuple(rows), 1)
    assert layout.token_bytes == 131072
    # Corrected: capacity is tokens; the example sizes the pool by bytes and takes them for tokens.
    by_fraction = plan_capacity(80_000_000_000, 15_000_000_000, layout, mem_fraction_static=0.85)
    assert by_fraction == (68_000_000_000 - 15_000_000_000) // 131072 - 1
    by_reserve = plan_capacity(80_000_000_000, 15_000_000_000, layout, reserve_ratio=0.1)
    assert by_reserve == int(65_000_000_000 * 0.9) // 131072 - 1


def test_layers_on_demand() -> None:
    """Document 1, `LazyKVCache`: a layer takes memory when it is first used."""
    pool = MHATokenToKVPool(64, 1, torch.float16, HEADS, DIM, 4, "cpu", False, lazy=True)
    assert pool.mem_usage == 0
    k, v = kv(1, "cpu")
    pool.set_kv_buffer(2, torch.tensor([5]), k, v)
    assert pool.mem_usage * (1 << 30) == 65 * HEADS * DIM * 2 * 2
    assert torch.equal(pool.get_key_buffer(2)[5], k[0])


def test_statistics_and_pressure() -> None:
    """Document 1, statistics and pressure: used tokens and free pages, and "critical" above 0.95."""
    allocator = PagedTokenToKVPoolAllocator(100 * 16, 16, torch.float16, "cpu", None, True)
    assert allocator.check_memory_pressure() == "low"
    for pages, level in ((71, "medium"), (15, "high"), (10, "critical")):
        assert allocator.alloc(pages * 16) is not None
        assert allocator.check_memory_pressure() == level
    # Corrected: a method of the pool. Free pages are counted from both lists, of which the example's `len` knows one.
    stats = allocator.get_stats()
    assert stats["total_tokens"] == 1600 and stats["used_tokens"] == 1536 and stats["utilization"] == 0.96
    assert stats["num_pages"] == 100 and stats["free_pages"] == 4


def test_two_prompts_share_a_prefix() -> None:
    """Documents 1 and 2, "prefix sharing": the second prompt computes only what differs, and all is released."""
    hello, goodbye = np.array([1054, 284, 2823, 25, 15496]), np.array([1054, 284, 2823, 25, 7197, 29474])
    config = EngineConfig(
        device_tokens=32, host_bytes=0, page_size=1, max_requests=2, max_context_len=16, dtype="float16"
    )
    with build_engine(config, ModelGeometry(layer_num=2, head_num=HEADS, head_dim=DIM)) as engine:
        stored = [kv(5, "cpu") for _ in range(2)]
        with engine.acquire(CacheRequest("one", hello)) as lease:
            assert lease.cached_len == 0
            for layer, (k, v) in enumerate(stored):
                engine.pool.set_kv_buffer(layer, lease.slots, k, v)
            engine.commit(lease, hello)
        with engine.acquire(CacheRequest("two", goodbye)) as lease:
            # Corrected: nodes share slots; the example's `insert` gives every node the slots of the whole prefix.
            assert lease.cached_len == 4 and lease.slots.unique().numel() == 6
            for layer, (k, _) in enumerate(stored):
                assert torch.equal(engine.pool.get_key_buffer(layer)[lease.slots[:4]], k[:4])
        engine.check()


def test_formats_convert_both_ways() -> None:
    """Document 2, contiguous and paged formats: token 25 is in page 1 at offset 9, and back again."""
    contiguous = torch.randn(40, 3, 2, HEADS, DIM)
    page_table = torch.tensor([4, 0, 2])
    paged = contiguous_to_paged(contiguous, page_table, page_size=16, num_pages=5)
    assert torch.equal(paged[page_table[25 // 16], 25 % 16], contiguous[25])
    assert torch.equal(paged_to_contiguous(paged, page_table, 40), contiguous)


def test_hierarchical_tensor_cache(device: str, tmp_path: Path) -> None:
    """Document 2, `HiCache`: hot, warm and cold tensors, each found and brought back to the device."""
    # Corrected: nothing is pickled, a hit leaves no second copy in memory behind, and all tiers are bounded.
    with HiCache(2, 2, tmp_path / "l3", device=device, l2_bytes=8 << 20, disk_bytes=64 << 20) as cache:
        tensors = {f"prompt {i}": torch.stack(kv(10, device, torch.bfloat16)) for i in range(6)}
        for key, tensor in tensors.items():
            cache.put(key, tensor)
        assert cache.get("never seen") is None
        for key, tensor in tensors.items():
            found = cache.get(key)
            assert found is not None and found.device.type == device and torch.equal(found, tensor)
        stats = cache.stats()
        assert (stats.l1_tensors, stats.l2_tensors, stats.misses) == (2, 2, 1) and stats.l3_hits > 0
        cache.check()


def test_fewer_heads_are_less_memory() -> None:
    """Document 2, MQA: grouped and single KV heads are head counts of the same pool, 4 and 32 times smaller."""
    sizes = [MHATokenToKVPool(8, 1, torch.float16, n, DIM, 2, "cpu", False).mem_usage for n in (32, 8, 1)]
    assert sizes[0] == 4 * sizes[1] == 32 * sizes[2]


def test_fp8_is_stored_as_bytes() -> None:
    """Documents 0 and 3, fp8: stored as uint8, read as fp8."""
    pool = MHATokenToKVPool(8, 1, torch.float8_e5m2, HEADS, DIM, 1, "cpu", False)
    k, v = kv(1, "cpu")
    pool.set_kv_buffer(0, torch.tensor([3]), k, v)
    assert pool.store_dtype == torch.uint8 and pool.get_key_buffer(0).dtype == torch.float8_e5m2
    assert torch.equal(pool.get_key_buffer(0).float()[3], k[0].to(torch.float8_e5m2).float())


def test_names_of_kernels_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents 0 and 3: kernels have SGLang's names, and its variable names the allocator of GPU memory."""
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


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the plot extra")
def test_plot_of_memory_over_time() -> None:
    """Document 2, `plot_memory_usage`: used and free over time, one line each."""
    # Corrected: a sample names its tiers, and the caller shows the figure.
    history = [MemorySample(float(t), {"device": t << 30}, {"device": (8 - t) << 30}) for t in range(4)]
    figure = plot_memory_usage(history)
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[0, 1, 2, 3], [8, 7, 6, 5]]
