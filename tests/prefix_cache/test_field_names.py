"""What code written for the field's caches names and calls: names, the order of parameters, and what calls do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import hicache
from hicache import (
    BaseTokenToKVPoolAllocator,
    CacheInitParams,
    DoubleSparseTokenToKVPool,
    RadixCache,
    ReqToTokenPool,
    TreeNode,
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    available_and_evictable_str,
    evict_from_tree_cache,
    release_kv_cache,
    write_cache_indices,
)
from hicache.errors import ConfigError, ShapeError
from prefix_case import Cache, Request, Toy, full_cache, mamba_cache, matched, swa_cache
from radix_case import insert

BF16 = torch.bfloat16
POOL = "size page_size dtype"
PLACE = "device enable_memory_saver"
LENS = "prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu"

# Callables by path below `hicache`, and their positional parameters in order, `self` left out. Ours may go on.
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
    "KVCache.get_contiguous_buf_infos": "",
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
    "MambaPool.clear": "",
    "MambaPool.available_size": "",
    "Mamba2StateShape.create": "tp_world_size intermediate_size n_groups num_heads head_dim state_size conv_kernel",
    "Mamba2CacheParams": "shape layers",
    "ReqToTokenPool": f"size max_context_len {PLACE}",
    "ReqToTokenPool.write": "indices values",
    "ReqToTokenPool.available_size": "",
    "ReqToTokenPool.clear": "",
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
    "PagedTokenToKVPoolAllocator.backup_state": "",
    "PagedTokenToKVPoolAllocator.restore_state": "state",
    "PagedTokenToKVPoolAllocator.free_group_begin": "",
    "PagedTokenToKVPoolAllocator.free_group_end": "",
    "PagedTokenToKVPoolAllocator.merge_and_sort_free": "",
    "PagedTokenToKVPoolAllocator.get_cpu_copy": "indices",
    "PagedTokenToKVPoolAllocator.load_cpu_copy": "kv_cache_cpu indices",
    "PagedTokenToKVPoolAllocator.get_kvcache": "",
    "PagedTokenToKVPoolAllocator.debug_print": "",
    "SWATokenToKVPoolAllocator": "size size_swa page_size dtype device kvcache need_sort",
    "SWATokenToKVPoolAllocator.free_swa": "free_index",
    "SWATokenToKVPoolAllocator.full_available_size": "",
    "SWATokenToKVPoolAllocator.swa_available_size": "",
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
    "TreeNode": "id",
    "TreeNode.protect_host": "",
    "TreeNode.release_host": "",
    "TreeNode.get_last_hash_value": "",
    "SLRUStrategy": "protected_threshold",
    "get_eviction_strategy": "name",
    "BlockStored": "block_hashes parent_block_hash token_ids block_size medium",
    "BlockRemoved": "block_hashes medium",
    "AllBlocksCleared": "",
}
KEYWORDS = {
    "CacheInitParams": "disable req_to_token_pool token_to_kv_pool_allocator page_size is_eagle eviction_policy "
    "enable_kv_cache_events enable_mamba_extra_buffer chunked_prefill_size sliding_window_size mamba_cache_chunk_size "
    "tp_cache_group enable_metrics pp_rank pp_size disable_finished_insert cache_ttl_seconds",
    "NSATokenToKVPool": "index_head_dim kv_cache_dim",
    "QuantizedKVCache": "kv_dtype",
    "plan_capacity": "mem_fraction_static reserve_ratio",
}
TREE = (
    "match_prefix insert evict inc_lock_ref dec_lock_ref cache_unfinished_req cache_finished_req evictable_size "
    "protected_size total_size all_values_flatten pretty_print reset take_events sanity_check root_node "
    "available_and_evictable_str is_chunk_cache is_tree_cache supports_swa supports_mamba"
)
NODE = (
    "key value children parent lock_ref hit_count priority last_access_time hash_value evicted backuped host_value "
    "host_ref_counter"
)


def parameters(path: str) -> list[str]:
    item: Any = hicache
    for name in path.split("."):
        item = getattr(item, name)
    names = list(inspect.signature(item).parameters)
    return names[1:] if names[:1] == ["self"] else names


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters_stand_where_the_field_has_them(path: str) -> None:
    """Each callable takes the parameters of the field at their positions."""
    expected = SIGNATURES[path].split()
    assert parameters(path)[: len(expected)] == expected


@pytest.mark.parametrize("path", KEYWORDS)
def test_keywords_are_taken(path: str) -> None:
    """Each callable takes the keywords of the field."""
    assert set(KEYWORDS[path].split()) <= set(parameters(path))


@pytest.mark.parametrize("make", [full_cache, swa_cache, mamba_cache])
def test_trees_and_nodes_answer_to_the_names(make: Any) -> None:
    """Every tree says what kind it is, every node has the field's attributes, and climbing ends at the root."""
    cache: Cache = make()
    for name in TREE.split():
        getattr(cache, name)
    assert cache.is_tree_cache() and not cache.is_chunk_cache()
    assert (cache.supports_swa(), cache.supports_mamba()) == (make is swa_cache, make is mamba_cache)
    for name in NODE.split():
        getattr(cache.root_node, name)
    assert not cache.root_node.evicted and TreeNode().evicted


def test_texts_for_messages() -> None:
    """A tree says what is available and evictable of each kind; the function of batches asks the tree."""
    plain = full_cache()
    plain.token_to_kv_pool_allocator.alloc(4)
    insert(plain, [1, 2, 3, 4])
    for text in (plain.available_and_evictable_str(), available_and_evictable_str(plain)):
        assert text == "60 tokens available, 4 evictable"
    assert (
        swa_cache(64, 48).available_and_evictable_str()
        == "48 tokens available (full 64, window 48), 0 evictable (window 0)"
    )
    states = "12 states available, 0 evictable"
    assert mamba_cache(64, 12).available_and_evictable_str() == f"64 tokens available, 0 evictable; {states}"
    assert "0 evictable" in RadixCache.create_simulated().available_and_evictable_str()


def test_without_a_tree_nothing_is_evicted() -> None:
    """`evict_from_tree_cache(None, n)` does nothing."""
    evict_from_tree_cache(None, 4)


def test_settings_of_schedulers_are_taken_or_refused() -> None:
    """What a scheduler passes and no cache acts on is taken at its default; any other value is refused by name."""
    common: dict[str, Any] = {
        "disable": False, "req_to_token_pool": None, "token_to_kv_pool_allocator": None, "page_size": 1,
    }  # fmt: skip
    idle: dict[str, Any] = {
        "tp_cache_group": None, "enable_metrics": False, "pp_rank": 0, "pp_size": 1,
        "disable_finished_insert": False, "cache_ttl_seconds": None,
    }  # fmt: skip
    RadixCache(CacheInitParams(**common, **idle))
    other = {"tp_cache_group": object(), "cache_ttl_seconds": 5.0, "pp_size": 2}
    for name, default in idle.items():
        with pytest.raises(ConfigError, match=f"{name}=.* no effect .* leave it at {default!r}"):
            CacheInitParams(**common, **{name: other.get(name, 1)})


def test_indices_of_a_batch_by_position() -> None:
    """`write_cache_indices` takes the field's eleven arguments in their order, lengths on the host as CPU tensors too,
    and lengths that disagree are named."""
    table = ReqToTokenPool(4, 8, "cpu", False)
    rows, prefix, seq = torch.tensor([2, 1]), torch.tensor([2, 0]), torch.tensor([3, 2])
    tensors = [torch.tensor([7, 8]), torch.empty(0, dtype=torch.int64)]
    slots = torch.tensor([9, 10, 11])
    write_cache_indices(slots, rows, rows, prefix, prefix, seq, seq, seq - prefix, seq - prefix, tensors, table)
    assert table.req_to_token[1, :2].tolist() == [10, 11] and table.req_to_token[2, :3].tolist() == [7, 8, 9]
    with pytest.raises(ShapeError, match="do not add up"):
        write_cache_indices(slots, rows, [2, 1], prefix, [2, 0], seq, [3, 2], seq, [3, 2], tensors, table)


class Stack(BaseTokenToKVPoolAllocator):
    """An allocator of one's own: the three methods that the field asks for, over a list."""

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
    """`clear`, `alloc` and `free` are enough to serve requests with; what only pages can do is not implemented."""
    stack = Stack(16, 1, BF16, "cpu", None, False)
    cache = RadixCache(CacheInitParams(False, ReqToTokenPool(4, 32, "cpu", False), stack, 1))
    toy = Toy(cache)
    for tokens in (list(range(10)), list(range(20, 32))):
        req = toy_request(toy, tokens)
        assert len(tokens) == cache.total_size() and not stack.available_size() + cache.total_size() - 16
        assert matched(cache, tokens) == len(tokens) and req.req_pool_idx is None
    cache.sanity_check()
    for name in ("alloc_extend", "alloc_decode"):
        with pytest.raises(NotImplementedError, match="Stack has no pages"):
            getattr(stack, name)()
    with pytest.raises(NotImplementedError, match="Stack has no pages"):
        lens = torch.tensor([1])
        alloc_paged_token_slots_extend(cache, lens - 1, lens - 1, lens, lens, lens - 2, 1)
    assert alloc_token_slots(cache, 16).numel() == 16 and cache.total_size() == 0


def toy_request(toy: Toy, tokens: list[int]) -> Any:
    """A request that is admitted, computed and released."""
    req = Request(tokens)
    toy.admit(req)
    toy.extend(req, len(tokens))
    release_kv_cache(req, toy.cache)
    return req


def test_labels_stand_fifth() -> None:
    """The pool of double sparse attention takes the label as its fifth positional argument."""
    pool = DoubleSparseTokenToKVPool(32, 4, torch.float16, 2, 16, 1, "cpu", 4, False)
    k, v, label = (torch.full((2, 2, n), float(n), dtype=torch.float16) for n in (16, 16, 4))
    loc = torch.tensor([1, 33])
    pool.set_kv_buffer(0, loc, k, v, label)
    assert torch.equal(pool.get_label_buffer(0)[loc], label) and torch.equal(pool.get_key_buffer(0)[loc], k)
