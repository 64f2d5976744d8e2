"""The features of vLLM that hicache's plug-ins use, in addition to the names that the plug-ins' modules import.

`probes` checks these features. This module imports nothing of vLLM. The plug-ins use a private name of vLLM only if no
interface of vLLM serves the same purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hicache.integrations.probes import Call, Features

_OFFLOAD = "vllm.v1.kv_offload"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_SCHEDULER = f"{_CONNECTOR}.offloading.scheduler"

_POLICY = Features(
    names={
        f"{_OFFLOAD}.base": ("OffloadKey", "ReqContext"),
        f"{_OFFLOAD}.cpu.policies.base": ("ChunkStatus", "order_request_keys"),
        f"{_OFFLOAD}.cpu.policies.base:CachePolicy": (
            *("get", "insert", "remove", "touch", "evict", "clear", "cache_capacity", "mark_evictable"),
            *("mark_non_evictable", "on_request_finished", "on_store_miss"),
        ),
        f"{_OFFLOAD}.cpu.policies.base:ChunkStatus": ("ref_cnt", "is_ready"),
        f"{_OFFLOAD}.base:ReqContext": ("req_id", "get_state", "set_state", "get_offload_key_position"),
    },
)
_TIER = Features(
    names={
        f"{_OFFLOAD}.base": ("get_offload_group_idx",),
        f"{_OFFLOAD}.base:ReqContext": ("_offload_key_positions", "kv_transfer_params"),
        f"{_OFFLOAD}.base:LookupResult": ("HIT", "MISS", "RETRY"),
        f"{_OFFLOAD}.base:Medium": ("STORAGE",),
        f"{_OFFLOAD}.base:Locality": ("LOCAL",),
        f"{_OFFLOAD}.base:ScheduleEndContext": ("new_req_ids",),
        f"{_OFFLOAD}.base:OffloadingSpec": ("config", "kv_events_config", "get_manager"),
        f"{_OFFLOAD}.config:OffloadingConfig": (
            *("groups", "cache", "parallel", "model", "kv_cache_layout", "canonical_layout", "replicated_layout"),
            *("worker_kv_bytes_per_block", "extra_config", "engine_id"),
        ),
        f"{_OFFLOAD}.tiering.base:TransferJob": ("job_id", "keys", "chunk_ids", "req_context"),
        f"{_OFFLOAD}.tiering.base:SecondaryTierManager": (
            *("block_size_bytes", "locality", "lookup", "submit_store", "submit_load", "get_finished_jobs", "touch"),
            *("on_new_request", "on_request_finished", "on_schedule_end", "drain_jobs", "shutdown", "take_events"),
            *("get_stats", "build_metric_definitions"),
        ),
        f"{_OFFLOAD}.tiering.manager:TieringOffloadingManager": ("secondary_tiers",),
        "vllm.v1.core.sched.scheduler:Scheduler": (
            *("_preempt_request", "update_from_output", "kv_cache_manager", "connector", "requests"),
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            *("num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"),
        ),
        "vllm.v1.core.sched.output:NewRequestData": ("req_id", "num_computed_tokens"),
        "vllm.v1.core.sched.output:CachedRequestData": ("req_ids", "num_computed_tokens"),
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_id", "block_hash", "block_hash_num_tokens"),
        f"{_SCHEDULER}:OffloadingConnectorScheduler": ("_calc_num_offloadable_tokens", "manager"),
        f"{_SCHEDULER}:RequestOffloadState": ("req",),
        f"{_CONNECTOR}.offloading_connector:OffloadingConnector": ("connector_scheduler",),
        f"{_CONNECTOR}.multi_connector:MultiConnector": ("sub_connectors",),
    },
    calls={
        f"{_OFFLOAD}.tiering.base:JobResult": Call(
            1, ("success", "successful_keys", "transfer_time", "transfer_bytes")
        ),
        f"{_OFFLOAD}.tiering.base:SecondaryTierManager": Call(4),
        f"{_OFFLOAD}.base:RequestOffloadingContext": Call(),
        f"{_OFFLOAD}.base:OffloadingEvent": Call(3, ("locality", "ownership", "removal_expected")),
        f"{_SCHEDULER}:OffloadingConnectorScheduler._calc_num_offloadable_tokens": Call(3),
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": Call(3),
    },
)
_SPEC = Features(
    names={
        f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec": (
            *("get_manager", "get_worker", "build_metric_definitions", "num_chunks", "kv_bytes_per_chunk"),
            *("blocks_per_chunk", "secondary_tier_configs", "cpu_page_size_per_worker", "replicated_layout"),
            *("_manager", "_worker", "_scheduler_mmap"),
        ),
        f"{_OFFLOAD}.tiering.manager:TieringOffloadingManager": (
            *("primary_tier", "secondary_tiers", "on_new_request", "lookup", "prepare_load", "prepare_store"),
            *("complete_store", "on_schedule_end", "on_request_finished", "get_stats"),
        ),
        f"{_OFFLOAD}.cpu.manager:CPUOffloadingManager": ("_policy",),
        f"{_OFFLOAD}.cpu.shared_offload_region": ("_get_populate_write_fn",),
        f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion": (
            *("base_tensor", "num_chunks", "rank", "fd", "mmap_path", "mmap_obj", "cleanup", "_creator"),
        ),
        f"{_OFFLOAD}.base:OffloadingWorker": ("submit_store", "submit_load", "get_finished", "wait", "shutdown"),
        f"{_OFFLOAD}.base:CanonicalKVCaches": ("tensors", "group_data_refs"),
        f"{_OFFLOAD}.base:GPULoadStoreSpec": ("block_ids", "group_sizes", "block_indices"),
        "vllm.config:VllmConfig": ("model_config", "attention_config", "speculative_config", "load_config"),
        "vllm.config:ModelConfig": ("revision", "code_revision", "quantization", "hf_config"),
    },
    calls={
        f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion": Call(
            keywords=("engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size")
        ),
        f"{_OFFLOAD}.base:TransferResult": Call(4),
    },
)
_SCHEDULES = Features(
    names={
        f"{_SCHEDULER}:OffloadingConnectorScheduler": (
            *("_update_req_states", "_build_store_jobs", "_generate_job_id", "_req_status", "_jobs", "_job_counter"),
            *("_block_id_to_pending_jobs", "_current_batch_jobs_to_flush", "_current_batch_allocated_block_ids"),
            *("_connector_stats", "request_finished", "update_connector_output", "reset_cache"),
        ),
        f"{_SCHEDULER}:RequestOffloadState": (
            *("group_states", "transfer_jobs", "finished_signaled", "max_offload_tokens", "advance_stored_idx"),
            "update_offload_keys",
        ),
        f"{_SCHEDULER}:RequestGroupState": ("offload_keys", "num_hit_chunks"),
        "vllm.v1.core.block_pool:BlockPool": (
            *("metrics_collector", "free_block_queue", "cached_block_hash_to_block", "num_gpu_blocks"),
        ),
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": ("iter_blocks_after",),
        "vllm.v1.core.block_pool:BlockHashToBlockMap": ("get_one_block",),
        f"{_CONNECTOR}.offloading_connector:OffloadingConnector": (
            *("connector_scheduler", "connector_worker", "bind_gpu_block_pool"),
        ),
    },
    calls={
        f"{_SCHEDULER}:RequestOffloadState": Call(4),
        f"{_SCHEDULER}:TransferJobStatus": Call(
            keywords=("req_id", "pending_count", "keys", "is_store", "fenced_block_ids")
        ),
        f"{_OFFLOAD}.base:GPULoadStoreSpec": Call(1, ("group_sizes", "block_indices")),
        f"{_CONNECTOR}.offloading.common:TransferJob": Call(3),
        f"{_CONNECTOR}.base:KVConnectorBase_V1.__init__": Call(4),
        f"{_CONNECTOR}.offloading.config:build_offloading_config": Call(2),
    },
)
# The features that each plug-in, by its public name, uses.
PLUG_INS: Mapping[str, tuple[Features, ...]] = MappingProxyType(
    {
        "HiCacheTier": (_TIER,),
        "HiCacheOffloadingSpec": (_POLICY, _TIER, _SPEC),
        "HiCacheConnector": (_POLICY, _TIER, _SPEC, _SCHEDULES),
        **{f"{name}Policy": (_POLICY,) for name in ("LRU", "LFU", "FIFO", "SLRU", "ARC")},
    }
)
