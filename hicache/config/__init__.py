"""Settings, each declared once, and the environment. `settings` has their kinds."""

from hicache.config.engine import (
    SECTIONS,
    AdvancedConfig,
    Auto,
    EngineConfig,
    PrefetchMode,
    default_write_policy,
    host_order,
)
from hicache.config.environment import (
    CUSTOM_MEM_POOL,
    VARIABLES,
    Kernels,
    Variable,
    api_key,
    custom_mem_pool,
    debug_checks,
    digests_folder,
    disk_key,
    kernel_choice,
    mamba_ssm_dtype,
    models_folder,
)
from hicache.config.stores import DiskConfig, RemoteConfig

__all__ = [
    "CUSTOM_MEM_POOL",
    "SECTIONS",
    "VARIABLES",
    "AdvancedConfig",
    "Auto",
    "DiskConfig",
    "EngineConfig",
    "Kernels",
    "PrefetchMode",
    "RemoteConfig",
    "Variable",
    "api_key",
    "custom_mem_pool",
    "debug_checks",
    "default_write_policy",
    "digests_folder",
    "disk_key",
    "host_order",
    "kernel_choice",
    "mamba_ssm_dtype",
    "models_folder",
]
