"""Settings of `HiCacheConnector` and `HiCacheOffloadingSpec` in addition to vLLM's own keys. This module imports
nothing of vLLM, so the documentation can be built without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

from hicache.config.engine import Free, KvPacking
from hicache.config.settings import Choice, Packing, Size, as_mapping, from_mapping, settle
from hicache.errors import ConfigError
from hicache.host.memory import available_bytes, free_bytes
from hicache.integrations.server_store import ServerStoreConfig, server_store_config
from hicache.integrations.vllm.region_files import agreed_bytes, shared_bytes

StoreTime: TypeAlias = Literal["auto", "computed", "leaving"]

_MIN_BYTES = 1 << 12
_WHERE = "kv_connector_extra_config of HiCacheOffloadingSpec"
# The class that vLLM loads for each name that users give.
POLICIES = {"lru": "LRUPolicy", "lfu": "LFUPolicy", "fifo": "FIFOPolicy", "slru": "SLRUPolicy", "arc": "ARCPolicy"}
# Keys that vLLM reads itself, in one of the tested releases.
OF_VLLM = {
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
    """The settings that users give in addition to vLLM's own keys. `disk`: the settings of `HiCacheTier`, which include
    the remote store; None without a disk and a remote store."""

    cpu_bytes_to_use: Annotated[
        int | Free,
        Size(
            "total CPU memory of all workers, like 64GB; free: seven eighths of the free memory",
            _MIN_BYTES,
            keyword="free",
            is_tier=True,
        ),
    ]
    disk: ServerStoreConfig | None = None
    eviction_policy: Annotated[str, Choice("eviction order of the CPU tier", tuple(POLICIES))] = "lru"
    kv_packing: Annotated[
        KvPacking,
        Packing(
            "lossless packing of bfloat16 chunks in the CPU tier and on disk, which saves a quarter of their bytes; 3 "
            "or 4: bits per exponent; auto: 4 on CUDA if all tensors of the cache can be packed, otherwise off",
            get_args(KvPacking),
        ),
    ] = "auto"
    staging_bytes: Annotated[
        int, Size("GPU memory that buffers copied chunks between copy engine and kernels", 1 << 16)
    ] = 128 << 20
    store: Annotated[
        StoreTime,
        Choice(
            "when HiCacheConnector stores a chunk in the CPU tier: computed: when it has been computed, and at its "
            "eviction from the GPU if the CPU tier has evicted it; leaving: only at its eviction from the GPU; auto: "
            "computed with a disk or other secondary tiers, otherwise leaving",
            get_args(StoreTime),
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        settle(self)


def cpu_bytes(settings: OffloadingSettings, engine_id: str) -> int:
    """Return the bytes of the CPU tier. All processes of the engine get the same number. Raises `OutOfMemory` if the
    setting is "free" and too little memory is free."""

    def free() -> int:
        return free_bytes("cpu_bytes_to_use", min(available_bytes(), shared_bytes()), _MIN_BYTES)

    given = settings.cpu_bytes_to_use
    return agreed_bytes(engine_id, free) if given == "free" else given


def offloading_settings(given: Mapping[str, Any]) -> OffloadingSettings:
    """Check the settings in `kv_connector_extra_config`. Raises ConfigError with the wrong setting and the known
    settings."""
    if given.get("canonical_layout"):
        raise ConfigError(f"{_WHERE}: canonical_layout is not supported; remove it, or use TieringOffloadingSpec")
    own = {key: value for key, value in given.items() if key not in {*OF_VLLM, "canonical_layout"}}
    remote = own.pop("remote", None)
    if own.get("disk") is not None or remote is not None:
        disk = as_mapping(own.get("disk") or {}, f"disk in {_WHERE}")
        own["disk"] = server_store_config(
            {**disk, "remote": remote} if remote is not None else disk, f"disk in {_WHERE}"
        )
    settings: OffloadingSettings = from_mapping(OffloadingSettings, own, _WHERE)
    return settings
