"""The features of SGLang that hicache's storage backend uses. `probes` checks these features. This module imports
nothing of SGLang."""

from __future__ import annotations

from hicache.integrations.probes import Call, Features

_CACHE = "sglang.srt.mem_cache"
_STORAGE = f"{_CACHE}.hicache_storage"
_POOL = ("page_size", "layout", "dtype", "storage_format_tag", "get_page_buffer_meta", "get_dummy_flat_data_page")
_HEADS = (*_POOL, "layer_num", "head_num", "head_dim", "backup_from_device_all_layer")

USED = Features(
    names={
        _STORAGE: ("HiCacheStorage", "PoolHitPolicy", "PoolName", "PoolTransferResult"),
        f"{_STORAGE}:HiCacheStorageConfig": (
            *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dp_rank", "model_name"),
            *("is_mla_model", "enable_storage_metrics", "extra_config", "is_storage_writer"),
        ),
        f"{_STORAGE}:HiCacheStorage": (
            *("register_mem_pool_host", "register_mem_host_pool_v2", "on_host_pools_registered", "clear", "get_stats"),
            *("exists", "batch_exists", "batch_exists_v2", "get", "batch_get", "batch_get_v1", "batch_get_v2"),
            *("set", "batch_set", "batch_set_v1", "batch_set_v2"),
        ),
        f"{_STORAGE}:PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES"),
        f"{_STORAGE}:PoolName": ("KV",),
        f"{_STORAGE}:PoolTransfer": ("name", "keys", "host_indices", "hit_policy"),
        f"{_CACHE}.pool_host.mamba:MambaPoolHost": _POOL,
        f"{_CACHE}.pool_host.mha:MHATokenToKVPoolHost": _HEADS,
        f"{_CACHE}.pool_host.mha:MHATokenToKOnlyPoolHost": _HEADS,
        f"{_CACHE}.pool_host.mla:MLATokenToKVPoolHost": (*_POOL, "layer_num", "kv_lora_rank", "qk_rope_head_dim"),
        "sglang.srt.runtime_context": ("get_server_args",),
        "sglang.srt.server_args:ServerArgs": (
            *("model_path", "revision", "download_dir", "weight_version", "quantization", "kv_cache_dtype"),
            "hicache_write_policy",
        ),
    },
    calls={
        f"{_STORAGE}:PoolTransferResult": Call(3),
        "sglang.srt.observability.metrics_collector:StorageMetrics": Call(
            keywords=("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")
        ),
    },
)
