"""vLLM's `OffloadingSpec` with hicache's CPU tier, eviction policies and disk.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "spec_name": "HiCacheOffloadingSpec", "spec_module_path": "hicache.integrations.vllm",
        "cpu_bytes_to_use": "64GB", "disk": {"path": "/nvme/kv", "budget": "500GB"}}

vLLM's `TieringOffloadingSpec` decides which chunks move between the tiers, with hicache's policy and disk. hicache
copies the chunks. `docs/decisions/033-vllm-offloading-spec.md` gives the reasons.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hicache.errors import ConfigError
from hicache.host.arena import CudaRegistry
from hicache.integrations.vllm.admission import chunk_tokens
from hicache.integrations.vllm.computed_tokens import correct_scheduler
from hicache.integrations.vllm.head_layouts import head_layouts
from hicache.integrations.vllm.identity import refuse_pipelines
from hicache.integrations.vllm.manager import HiCacheManager, miss_metrics
from hicache.integrations.vllm.offloading_settings import (
    OF_VLLM,
    POLICIES,
    OffloadingSettings,
    cpu_bytes,
    offloading_settings,
)
from hicache.integrations.vllm.offloading_worker import ChunkRows, HiCacheOffloadingWorker
from hicache.integrations.vllm.region_allocation import without_allocation
from hicache.integrations.vllm.region_files import remove_leftovers, remove_names_once_mapped
from hicache.integrations.vllm.row_links import Link, packed_links, raw_links
from hicache.integrations.vllm.row_packing import RowPacking, format_of, row_packing
from hicache.integrations.vllm.unreported_settings import ModelFiles, set_unreported_settings

log = logging.getLogger(__name__)

_PLUGINS = "hicache.integrations.vllm"


def _for_tiering(given: Mapping[str, Any], **sizes: int) -> dict[str, Any]:
    """Return the settings in the form that `TieringOffloadingSpec` expects. `sizes`: computed values that replace the
    given values."""
    settings = offloading_settings(given)
    disk: list[dict[str, Any]] = []
    if settings.disk is not None:
        disk = [{"type": "HiCacheTier", "module_path": _PLUGINS, **dataclasses.asdict(settings.disk)}]
    others = [dict(tier) for tier in given.get("secondary_tiers", [])]
    return {
        **{key: value for key, value in given.items() if key in OF_VLLM},
        "cpu_bytes_to_use": settings.cpu_bytes_to_use,
        "eviction_policy": POLICIES[settings.eviction_policy],
        "cache_policy_module_path": _PLUGINS,
        "secondary_tiers": disk + others,
        **sizes,
    }


def _packing(settings: OffloadingSettings, config: OffloadingConfig) -> RowPacking | None:
    """Return the packing of the rows, which is the same in all processes; None if rows are not packed. Raises
    ConfigError if the settings request packing but the rows cannot be packed."""
    pack_format = format_of(settings.kv_packing, is_cuda=current_platform.is_cuda())
    if pack_format is None:
        return None
    try:
        return row_packing(pack_format, config, has_other_tiers=bool(config.extra_config.get("secondary_tiers")))
    except ValueError as error:
        if settings.kv_packing != "auto":
            raise ConfigError(
                f"kv_packing={settings.kv_packing} cannot pack these rows: {error}; set kv_packing to auto"
            ) from error
        log.info("chunks are not packed: %s", error)
        return None


class HiCacheOffloadingSpec(TieringOffloadingSpec):
    """The spec for vLLM's `OffloadingConnector`; `HiCacheConnector` uses `ConnectorSpec`. vLLM creates a spec in the
    scheduler's process, for the manager, and in the process of each worker. Raises ConfigError for wrong settings.

    `row_packing`: the packing of rows, which the tiers below the CPU tier need; None if rows have vLLM's own bytes.
    `recurrent_states`, `model_settings`, `model_files`: values that vLLM does not report to a spec, for the identity of
    a store (`unreported_settings`); set only in the scheduler's process. `is_fallback`: HiCacheConnector uses this
    spec, because it cannot store chunks when the GPU evicts them.
    """

    recurrent_states: str = ""
    model_settings: str = ""
    model_files: tuple[ModelFiles, ...] = ()
    is_fallback: bool = False
    _worker: HiCacheOffloadingWorker | None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        definitions: dict[str, OffloadingMetricMetadata] = super().build_metric_definitions(_for_tiering(extra_config))
        return definitions | miss_metrics()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """See `OffloadingSpec`. Only vLLM 0.33 calls this method."""
        keys: tuple[str, ...] = super().config_info_keys(_for_tiering(extra_config))
        return keys

    def __init__(self, config: OffloadingConfig) -> None:
        remove_leftovers()
        refuse_pipelines(config)
        set_unreported_settings()
        self._settings = self._checked(config.extra_config)
        num_bytes = cpu_bytes(self._settings, config.engine_id)
        self.row_packing = _packing(self._settings, config)
        changed: dict[str, Any] = {"extra_config": _for_tiering(config.extra_config, cpu_bytes_to_use=num_bytes)}
        if self.row_packing is not None:  # vLLM computes the size and number of rows from this value
            changed["worker_kv_bytes_per_block"] = self.row_packing.part_bytes // config.cache.blocks_per_chunk
        super().__init__(dataclasses.replace(config, **changed))
        if self.num_chunks < 1:
            raise ConfigError(
                f"cpu_bytes_to_use={num_bytes} is less than a chunk of "
                f"{self.kv_bytes_per_chunk} bytes; raise it to a multiple of that, or lower block_size"
            )

    @staticmethod
    def _checked(given: Mapping[str, Any]) -> OffloadingSettings:
        settings = offloading_settings(given)
        if settings.store == "leaving":
            raise ConfigError(
                "store=leaving: OffloadingConnector stores chunks when they are computed; set kv_connector to "
                "HiCacheConnector and kv_connector_module_path to hicache.integrations.vllm"
            )
        return settings

    def get_manager(self) -> OffloadingManager:
        is_first = self._manager is None
        with without_allocation():
            manager = super().get_manager()
        if is_first:
            assert isinstance(manager, TieringOffloadingManager)
            manager = HiCacheManager.of(manager, chunk_tokens(self.config), self.kv_bytes_per_chunk)
            correct_scheduler()
            assert self._scheduler_mmap is not None
            self._note_mapped(self._scheduler_mmap, self.config.parallel.world_size)  # users 0, 1, … are the workers
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> HiCacheOffloadingWorker:
        """Create the worker. Raises ConfigError if hicache cannot copy from the device, and OutOfMemory if rows cannot
        be pinned."""
        device, num_gpu_blocks = kv_caches.tensors[0].tensor.device, len(kv_caches.tensors[0].tensor)
        if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
            raise ConfigError(f"hicache copies from CUDA devices and CPUs, not {device}; use TieringOffloadingSpec")
        with without_allocation():
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
        self._note_mapped(region, self.config.parallel.rank)
        if self.config.parallel.rank == 0:
            self._compare_sizes(num_gpu_blocks)
        try:
            registry = CudaRegistry(device) if device.type == "cuda" else None
            is_shared = bool(self.secondary_tier_configs) or self.replicated_layout
            rows = ChunkRows(region, self.cpu_page_size_per_worker, registry, is_shared=is_shared)
        except BaseException:
            region.cleanup()
            raise
        try:
            return HiCacheOffloadingWorker(self._links(kv_caches, rows), rows, self.blocks_per_chunk)
        except BaseException:
            rows.close()
            raise

    def _compare_sizes(self, num_gpu_blocks: int) -> None:
        """Log a warning if the CPU tier is not larger than the GPU's cache, because then the GPU has every chunk of the
        CPU tier."""
        num_blocks = self.num_chunks * self.blocks_per_chunk
        if num_blocks <= num_gpu_blocks:
            needed = num_gpu_blocks // self.blocks_per_chunk * self.kv_bytes_per_chunk
            log.warning(
                "the CPU tier adds no hits: it has %d blocks, the GPU's cache has %d, and chunks are stored when "
                "they are computed, so the GPU has the same chunks; set %scpu_bytes_to_use to more than %d",
                num_blocks,
                num_gpu_blocks,
                "kv_connector to HiCacheConnector, or " if self._may_store_evicted else "",
                needed,
            )

    @property
    def _may_store_evicted(self) -> bool:
        """Return whether HiCacheConnector could probably store chunks when the GPU evicts them.
        `reason_for_eager_stores` has the exact conditions, which this spec cannot check completely."""
        config = self.config
        block_tokens = {group.tokens_per_block for group in config.groups}
        has_one_size = block_tokens == {config.cache.tokens_per_hash}
        return not self.is_fallback and has_one_size and config.parallel.dcp_size == 1 and not self.recurrent_states

    def _note_mapped(self, region: SharedOffloadRegion, user: int) -> None:
        """Record that a process of this engine has mapped the region. When all processes have mapped the region, remove
        the names of its files."""
        num_users = self.config.parallel.world_size + 1
        if region.fd is not None and remove_names_once_mapped(region.mmap_path, region.fd, user, num_users):
            region._creator = False

    def _links(self, kv_caches: CanonicalKVCaches, rows: ChunkRows) -> list[list[Link]]:
        """Return the links of each cache group. Raises ConfigError if hicache cannot copy or pack the cache."""
        sizes = {"rows_per_chunk": rows.rows_per_chunk, "staging_bytes": self._settings.staging_bytes}
        if self.row_packing is None:
            return raw_links(kv_caches, rows.host, self.blocks_per_chunk, **sizes)
        heads, tokens = head_layouts(self.config, kv_caches), self.config.groups[0].tokens_per_block
        return packed_links(kv_caches, rows.host, self.blocks_per_chunk, self.row_packing, tokens, heads, **sizes)


class ConnectorSpec(HiCacheOffloadingSpec):
    """The spec under `HiCacheConnector`, which also stores chunks that the GPU evicts.

    `stores_computed`: whether chunks are also stored when they are computed.
    """

    @property
    def stores_computed(self) -> bool:
        if self._settings.store == "auto":
            return bool(self.secondary_tier_configs)
        return self._settings.store == "computed"

    @staticmethod
    def _checked(given: Mapping[str, Any]) -> OffloadingSettings:
        for key in ("offload_prompt_only", "self_describing_kv_events"):
            if given.get(key):
                raise ConfigError(
                    f"{key}=true needs the request of each chunk, which HiCacheConnector does not know when the GPU "
                    f"evicts the chunk; remove {key}, or set kv_connector to OffloadingConnector"
                )
        return offloading_settings(given)

    def _compare_sizes(self, num_gpu_blocks: int) -> None:
        """Do nothing, because a small CPU tier is useful too: it has chunks that the GPU has evicted."""
