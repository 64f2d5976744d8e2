"""Settings, each declared once. The module `settings` defines the kinds of settings, and `environment` the environment
variables."""

from hicache.config.engine import SECTIONS, AdvancedConfig, EngineConfig, PrefetchMode, default_write_policy, host_order
from hicache.config.stores import Auto, DiskConfig, RemoteConfig

__all__ = [
    "SECTIONS",
    "AdvancedConfig",
    "Auto",
    "DiskConfig",
    "EngineConfig",
    "PrefetchMode",
    "RemoteConfig",
    "default_write_policy",
    "host_order",
]
