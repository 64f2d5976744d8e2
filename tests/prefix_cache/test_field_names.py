"""Names, parameters and behaviour that code written for SGLang's caches uses."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import pytest
import torch

import hicache
from hicache import (
    BaseTokenToKVPoolAllocator,
    CacheInitParams,
    RadixCache,
    ReqToTokenPool,
    alloc_paged_token_slots_extend,
    alloc_token_slots,
)
from hicache.errors import ConfigError
from prefix_case import FakeRunner, matched

BF16 = torch.bfloat16
POOL = "size page_size dtype"
PLACE = "device enable_memory_saver"
LENS = "prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu"

# Callables by path below `hicache`, and their positional parameters in order, without `self`. hicache's may have more.
SIGNATURES = {
    "KVCache": f"{POOL} layer_num {PLACE} start_layer end_layer",
    "KVCache.get_key_buffer": "layer_id",
    "KVCache.get_value_buffer": "layer_id",
    "KVCache.get_kv_buffer": "layer_id",
    "KVCache.set_kv_buffer": "layer loc cache_k cache_v k_scale v_scale",
    "KVCache.get_cpu_copy": "indices",
    "KVCache.load_cpu_copy": "kv_cache_cpu indices",
    "KVCache.move_kv_cache": "tgt_loc src_loc",
    "KVCache.register_layer_transfer_counter": "counter",
    "MHATokenToKVPool": f"{POOL} head_num head_dim layer_num {PLACE} v_head_dim start_layer end_layer "
    "enable_alt_stream enable_kv_cache_copy",
    "MLATokenToKVPool": f"{POOL} kv_lora_rank qk_rope_head_dim layer_num {PLACE} start_layer end_layer",
    "MLATokenToKVPool.set_mla_kv_buffer": "layer loc k_nope k_rope",
    "MLATokenToKVPool.get_mla_kv_buffer": "layer loc dst_dtype",
    "NSATokenToKVPool.get_index_k_with_scale_buffer": "layer_id",
    "NSATokenToKVPool.get_index_k_continuous": "layer_id seq_len page_indices",
    "NSATokenToKVPool.get_index_k_scale_continuous": "layer_id seq_len page_indices",
    "NSATokenToKVPool.set_index_k_scale_buffer": "layer_id loc index_k index_k_scale",
    "DoubleSparseTokenToKVPool": f"{POOL} head_num head_dim layer_num device heavy_channel_num enable_memory_saver "
    "start_layer end_layer",
    "DoubleSparseTokenToKVPool.set_kv_buffer": "layer loc cache_k cache_v cache_label",
    "DoubleSparseTokenToKVPool.get_label_buffer": "layer_id",
    "SWAKVPool": "size size_swa page_size dtype head_num head_dim swa_attention_layer_ids full_attention_layer_ids "
    "device enable_kvcache_transpose token_to_kv_pool_class enable_memory_saver",
    "SWAKVPool.register_mapping": "full_to_swa_index_mapping",
    "SWAKVPool.translate_loc_from_full_to_swa": "loc",
    "HybridLinearKVPool": "size dtype page_size head_num head_dim full_attention_layer_ids device mamba_pool "
    "enable_memory_saver enable_kvcache_transpose use_mla kv_lora_rank qk_rope_head_dim",
    "MambaPool": "size cache_params device spec_state_size speculative_num_draft_tokens",
    "MambaPool.alloc": "need_size",
    "MambaPool.free": "free_index",
    "MambaPool.fork_from": "src_index",
    "MambaPool.copy_from": "src_index dst_index",
    "Mamba2StateShape.create": "tp_world_size intermediate_size n_groups num_heads head_dim state_size conv_kernel",
    "Mamba2CacheParams": "shape layers",
    "ReqToTokenPool": f"size max_context_len {PLACE}",
    "ReqToTokenPool.write": "indices values",
    "HybridReqToTokenPool": f"size mamba_size max_context_len {PLACE} cache_params mamba_spec_state_size "
    "enable_mamba_extra_buffer speculative_num_draft_tokens",
    "HybridReqToTokenPool.get_mamba_indices": "req_indices",
    "HybridReqToTokenPool.mamba2_layer_cache": "layer_id",
    "BaseTokenToKVPoolAllocator": f"{POOL} device kvcache need_sort",
    "TokenToKVPoolAllocator": "size dtype device kvcache need_sort",
    "PagedTokenToKVPoolAllocator": f"{POOL} device kvcache need_sort",
    "PagedTokenToKVPoolAllocator.alloc": "need_size",
    "PagedTokenToKVPoolAllocator.free": "free_index",
    "PagedTokenToKVPoolAllocator.alloc_extend": f"{LENS} last_loc extend_num_tokens",
    "PagedTokenToKVPoolAllocator.alloc_decode": "seq_lens seq_lens_cpu last_loc",
    "PagedTokenToKVPoolAllocator.restore_state": "state",
    "PagedTokenToKVPoolAllocator.get_cpu_copy": "indices",
    "PagedTokenToKVPoolAllocator.load_cpu_copy": "kv_cache_cpu indices",
    "SWATokenToKVPoolAllocator": "size size_swa page_size dtype device kvcache need_sort",
    "SWATokenToKVPoolAllocator.free_swa": "free_index",
    "SWATokenToKVPoolAllocator.translate_loc_from_full_to_swa": "loc",
    "alloc_extend_naive": "prefix_lens seq_lens last_loc free_pages out_indices page_size device",
    "alloc_token_slots": "tree num_tokens backup_state",
    "alloc_paged_token_slots_extend": f"tree {LENS} last_loc extend_num_tokens backup_state",
    "alloc_paged_token_slots_decode": "tree seq_lens seq_lens_cpu last_loc token_per_req",
    "alloc_for_extend": "batch",
    "alloc_for_decode": "batch token_per_req",
    "evict_from_tree_cache": "tree num_tokens",
    "release_kv_cache": "request tree is_insert",
    "write_cache_indices": f"out_cache_loc req_pool_indices req_pool_indices_cpu {LENS} extend_lens extend_lens_cpu "
    "prefix_tensors req_to_token_pool",
    "get_last_loc": "req_to_token req_pool_indices prefix_lens",
    "RadixKey": "token_ids extra_key is_bigram",
    "MatchPrefixParams": "key cow_mamba req",
    "MatchResult": "device_indices last_device_node last_host_node host_hit_length mamba_branching_seqlen",
    "InsertParams": "key value mamba_value prev_prefix_len swa_evicted_seqlen chunked priority",
    "InsertResult": "prefix_len mamba_exist",
    "EvictParams": "num_tokens swa_num_tokens mamba_num",
    "EvictResult": "num_tokens_evicted swa_num_tokens_evicted mamba_num_evicted",
    "RadixCache.create_simulated": "disable mock_allocator page_size enable_kv_cache_events",
    "RadixCache.cache_unfinished_req": "req chunked",
    "RadixCache.cache_finished_req": "req is_insert",
    "MambaRadixCache.evict_mamba": "mamba_num",
    "TreeNode": "id",
    "SLRUStrategy": "protected_threshold",
    "get_eviction_strategy": "name",
    "BlockStored": "block_hashes parent_block_hash token_ids block_size medium",
    "BlockRemoved": "block_hashes medium",
}
WITHOUT_PARAMETERS = """
    KVCache.get_contiguous_buf_infos MambaPool.clear MambaPool.available_size ReqToTokenPool.available_size
    ReqToTokenPool.clear PagedTokenToKVPoolAllocator.backup_state PagedTokenToKVPoolAllocator.free_group_begin
    PagedTokenToKVPoolAllocator.free_group_end PagedTokenToKVPoolAllocator.merge_and_sort_free
    PagedTokenToKVPoolAllocator.get_kvcache PagedTokenToKVPoolAllocator.debug_print
    SWATokenToKVPoolAllocator.full_available_size SWATokenToKVPoolAllocator.swa_available_size TreeNode.protect_host
    TreeNode.release_host TreeNode.get_last_hash_value AllBlocksCleared
"""
KEYWORDS = {
    "CacheInitParams": "disable req_to_token_pool token_to_kv_pool_allocator page_size is_eagle eviction_policy "
    "enable_kv_cache_events enable_mamba_extra_buffer chunked_prefill_size sliding_window_size mamba_cache_chunk_size "
    "tp_cache_group enable_metrics pp_rank pp_size disable_finished_insert cache_ttl_seconds",
    "NSATokenToKVPool": "index_head_dim kv_cache_dim",
    "QuantizedKVCache": "kv_dtype",
    "plan_capacity": "mem_fraction_static reserve_ratio",
}


def parameters(path: str) -> list[str]:
    names = list(inspect.signature(attrgetter(path)(hicache)).parameters)
    return names[1:] if names[:1] == ["self"] else names


def test_parameters_are_those_of_the_field() -> None:
    """Each callable takes SGLang's parameters at their positions, or its keywords."""
    expected = {path: names.split() for path, names in SIGNATURES.items()}
    assert {path: parameters(path)[: len(names)] for path, names in expected.items()} == expected
    assert all(callable(attrgetter(path)(hicache)) for path in WITHOUT_PARAMETERS.split())
    assert [path for path, names in KEYWORDS.items() if set(names.split()) - set(parameters(path))] == []


def test_settings_of_schedulers_are_taken_or_refused() -> None:
    """Settings of SGLang's schedulers that no cache uses are accepted at their defaults. Any other value of these
    settings is refused with the name of the setting."""
    common: dict[str, Any] = {
        "disable": False, "req_to_token_pool": None, "token_to_kv_pool_allocator": None, "page_size": 1,
    }  # fmt: skip
    idle: dict[str, Any] = {
        "tp_cache_group": None, "enable_metrics": False, "pp_rank": 0, "pp_size": 1,
        "disable_finished_insert": False, "cache_ttl_seconds": None,
    }  # fmt: skip
    RadixCache(CacheInitParams(**common, **idle))
    other = {"tp_cache_group": object(), "cache_ttl_seconds": 5.0, "pp_size": 2}
    for name in idle:
        with pytest.raises(ConfigError, match=name):
            CacheInitParams(**common, **{name: other.get(name, 1)})


class Stack(BaseTokenToKVPoolAllocator):
    """A custom allocator with the three methods that SGLang requires, over a list."""

    def clear(self) -> None:
        self.stack = list(range(self.size, 0, -1))

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > len(self.stack):
            return None
        return torch.tensor([self.stack.pop() for _ in range(need_size)], dtype=torch.int64)

    def free(self, free_index: torch.Tensor) -> None:
        self.stack += free_index.tolist()

    def available_size(self) -> int:
        return len(self.stack)


def test_an_allocator_of_ones_own() -> None:
    """`clear`, `alloc` and `free` are enough for serving requests. Operations that need pages are not implemented."""
    stack = Stack(16, 1, BF16, "cpu", None, False)
    cache = RadixCache(CacheInitParams(False, ReqToTokenPool(4, 32, "cpu", False), stack, 1))
    runner = FakeRunner(cache)
    for tokens in (list(range(10)), list(range(20, 32))):
        runner.serve(tokens)
        assert len(tokens) == cache.total_size() == 16 - stack.available_size()
        assert matched(cache, tokens) == len(tokens)
    cache.sanity_check()
    for name in ("alloc_extend", "alloc_decode"):
        with pytest.raises(NotImplementedError):
            getattr(stack, name)()
    with pytest.raises(NotImplementedError):
        lens = torch.tensor([1])
        alloc_paged_token_slots_extend(cache, lens - 1, lens - 1, lens, lens, lens - 2, 1)
    assert alloc_token_slots(cache, 16).numel() == 16 and cache.total_size() == 0
