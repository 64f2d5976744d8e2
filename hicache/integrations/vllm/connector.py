"""vLLM's `OffloadingConnector` with hicache's CPU tier and disk. The connector stores chunks when the GPU's cache
evicts them.

    "kv_connector": "HiCacheConnector", "kv_connector_module_path": "hicache.integrations.vllm",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "64GB"}

If a CPU tier stores each chunk when it is computed, many of its chunks are also in the GPU's cache.
`docs/decisions/068-store-what-the-gpu-evicts.md` gives the reasons.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from hicache.errors import ConfigError
from hicache.integrations.vllm.connector_scheduler import HiCacheConnectorScheduler
from hicache.integrations.vllm.offloading_spec import ConnectorSpec, HiCacheOffloadingSpec

log = logging.getLogger(__name__)

_SPEC = {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": "hicache.integrations.vllm"}


def _name_spec(transfer: KVTransferConfig | None) -> None:
    """Write the name of hicache's spec into the configuration, from which vLLM's metrics read the name. Raises
    ConfigError if the configuration names another spec."""
    assert transfer is not None
    extra = transfer.kv_connector_extra_config
    given = extra.get("spec_name", _SPEC["spec_name"])
    if given != _SPEC["spec_name"]:
        raise ConfigError(
            f"spec_name={given}: HiCacheConnector uses {_SPEC['spec_name']}; remove spec_name, or set kv_connector to "
            "OffloadingConnector"
        )
    extra.update(_SPEC)


def reason_for_eager_stores(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadingConfig
) -> str | None:
    """Return why chunks of this cache can be stored only when they are computed; None if they can also be stored when
    the GPU evicts them."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "without --enable-prefix-caching blocks of the GPU have no hashes"
    if config.parallel.dcp_size > 1:
        return "context parallelism divides the tokens of a block"
    if kv_cache_config.needs_kv_cache_zeroing:
        return "vLLM clears blocks with recurrent states, or of several dtypes, before a connector can copy them"
    if {group.tokens_per_block for group in config.groups} != {config.cache.tokens_per_hash}:
        return "vLLM copies blocks of several sizes to each other before a connector can copy them"
    return None


class HiCacheConnector(OffloadingConnector):
    """The connector that vLLM creates in the scheduler's process and in the process of each worker. Raises ConfigError
    for wrong settings, and for a vLLM that lacks private names which the connector uses. If chunks can be stored only
    when they are computed, the connector behaves as vLLM's connector with `HiCacheOffloadingSpec`."""

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        _name_spec(vllm_config.kv_transfer_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # This code replaces the constructor of OffloadingConnector, which always creates vLLM's own scheduler and
        # worker classes.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        _name_spec(vllm_config.kv_transfer_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = config.canonical_layout
        self.connector_scheduler: OffloadingConnectorScheduler | None = None
        self.connector_worker: OffloadingConnectorWorker | None = None
        reason = reason_for_eager_stores(vllm_config, kv_cache_config, config)
        if reason is not None and config.extra_config.get("store") == "leaving":
            raise ConfigError(f"store=leaving: {reason}; set store to auto")
        spec = ConnectorSpec(config) if reason is None else HiCacheOffloadingSpec(config)
        spec.is_fallback = reason is not None
        if role == KVConnectorRole.WORKER:
            self.connector_worker = OffloadingConnectorWorker(spec, vllm_config, kv_cache_config)
        elif isinstance(spec, ConnectorSpec):
            self.connector_scheduler = HiCacheConnectorScheduler(spec, vllm_config, kv_cache_config)
        else:
            log.info("chunks are stored only when they are computed: %s", reason)
            self.connector_scheduler = OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if isinstance(self.connector_scheduler, HiCacheConnectorScheduler):
            self.connector_scheduler.bind_gpu_block_pool(gpu_block_pool)
