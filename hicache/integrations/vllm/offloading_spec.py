"""vLLM's `OffloadingSpec` with hicache's CPU tier, eviction policies and disk.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "spec_name": "HiCacheOffloadingSpec", "spec_module_path": "hicache.integrations.vllm",
        "cpu_bytes_to_use": "64GB", "disk": {"path": "/nvme/kv", "budget": "500GB"}}

The bookkeeping between the tiers is that of vLLM's `TieringOffloadingSpec`, with our policy and our disk in it; the
copies are ours. `docs/decisions/033-vllm-offloading-spec.md` has the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hicache.config.settings import Choice, Size, from_mapping, settle
from hicache.errors import ConfigError
from hicache.host import CudaRegistry
from hicache.integrations.load_gate import GatedStoreConfig, gated_store_config
from hicache.integrations.vllm.offloading_worker import ChunkRows, HiCacheOffloadingWorker

_WHERE = "kv_connector_extra_config of HiCacheOffloadingSpec"
_PLUGINS = "hicache.integrations.vllm"
_POLICIES = {"lru": "LRUPolicy", "lfu": "LFUPolicy", "fifo": "FIFOPolicy", "slru": "SLRUPolicy", "arc": "ARCPolicy"}
# What vLLM reads itself, in one of the tested releases.
_OF_VLLM = {
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "secondary_tiers",
    "backpressure",
    "tier_poll_interval_s",
    "sync_load_budget_bytes",
}


@dataclass(frozen=True, kw_only=True)
class OffloadingSettings:
    """What the user gives beside vLLM's own keys. `disk`: as for the tier alone; None for no disk."""

    cpu_bytes_to_use: Annotated[int, Size("CPU memory of all workers, like 64GB", 1 << 12)]
    disk: GatedStoreConfig | None = None
    eviction_policy: Annotated[str, Choice("what leaves the CPU tier first", tuple(_POLICIES))] = "lru"
    staging_bytes: Annotated[int, Size("GPU memory between copy engine and kernels", 1 << 16)] = 128 << 20

    def __post_init__(self) -> None:
        settle(self)


def offloading_settings(given: Mapping[str, Any]) -> OffloadingSettings:
    """The settings in `kv_connector_extra_config`. ConfigError names what is wrong, and what is known."""
    if given.get("canonical_layout"):
        raise ConfigError(f"{_WHERE}: canonical_layout is not supported; remove it, or use TieringOffloadingSpec")
    own = {key: value for key, value in given.items() if key not in {*_OF_VLLM, "canonical_layout"}}
    if own.get("disk") is not None:
        own["disk"] = gated_store_config(own["disk"], f"disk in {_WHERE}")
    settings: OffloadingSettings = from_mapping(OffloadingSettings, own, _WHERE)
    return settings


def _for_tiering(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same as `TieringOffloadingSpec` wants it."""
    settings = offloading_settings(given)
    disk: list[dict[str, Any]] = []
    if settings.disk is not None:
        disk = [{"type": "HiCacheTier", "module_path": _PLUGINS, **dataclasses.asdict(settings.disk)}]
    others = [dict(tier) for tier in given.get("secondary_tiers", [])]
    return {
        **{key: value for key, value in given.items() if key in _OF_VLLM},
        "cpu_bytes_to_use": settings.cpu_bytes_to_use,
        "eviction_policy": _POLICIES[settings.eviction_policy],
        "cache_policy_module_path": _PLUGINS,
        "secondary_tiers": disk + others,
    }


class HiCacheOffloadingSpec(TieringOffloadingSpec):
    """Built by vLLM in the scheduler's process, for the manager, and in each worker's. ConfigError for bad settings."""

    _worker: HiCacheOffloadingWorker | None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        definitions: dict[str, OffloadingMetricMetadata] = super().build_metric_definitions(_for_tiering(extra_config))
        return definitions

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Called by vLLM 0.33."""
        keys: tuple[str, ...] = super().config_info_keys(_for_tiering(extra_config))
        return keys

    def __init__(self, config: OffloadingConfig) -> None:
        self._settings = offloading_settings(config.extra_config)
        super().__init__(dataclasses.replace(config, extra_config=_for_tiering(config.extra_config)))
        if self.num_chunks < 1:
            raise ConfigError(
                f"cpu_bytes_to_use={self._settings.cpu_bytes_to_use} holds no chunk of "
                f"{self.kv_bytes_per_chunk} bytes; raise it to a multiple of that, or lower block_size"
            )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> HiCacheOffloadingWorker:
        """ConfigError for devices that hicache does not copy from, OutOfMemory for rows that cannot be pinned."""
        device = kv_caches.tensors[0].tensor.device
        if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
            raise ConfigError(f"hicache copies from CUDA devices and CPUs, not {device}; use TieringOffloadingSpec")
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            registry = CudaRegistry(device) if device.type == "cuda" else None
            is_shared = bool(self.secondary_tier_configs) or self.replicated_layout
            rows = ChunkRows(region, self.cpu_page_size_per_worker, registry, is_shared=is_shared)
        except BaseException:
            region.cleanup()
            raise
        try:
            return HiCacheOffloadingWorker(
                kv_caches, rows, self.blocks_per_chunk, staging_bytes=self._settings.staging_bytes
            )
        except BaseException:
            rows.close()
            raise
