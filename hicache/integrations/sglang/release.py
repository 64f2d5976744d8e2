"""The installed release of SGLang, and classes imported from SGLang. Importing this module raises `ConfigError` if
SGLang lacks a feature that the backend uses."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hicache.integrations.sglang.features import USED
from hicache.integrations.versions import SGLANG, release_name, require_features, require_overrides, warn_untested

_VERSION = version("sglang")
# The release in the identity of a store, for example "0.5.23"; see `release_name`.
RELEASE = release_name(_VERSION, SGLANG)
require_features("SGLang", _VERSION, SGLANG, (USED,))

if RELEASE:  # the check runs before these imports, which would raise ImportError for a missing name
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_server_args

# Pools whose pages have attention heads.
HEADS: tuple[Any, ...] = (MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost)
# Pools whose data differs between tensor parallel ranks, even if the model has latent attention.
SHARDED: tuple[Any, ...] = (*HEADS, MambaPoolHost)

__all__ = [
    "HEADS",
    "RELEASE",
    "SHARDED",
    "MLATokenToKVPoolHost",
    "StorageMetrics",
    "get_server_args",
    "require_backend",
]


def require_backend() -> None:
    """Raise `ConfigError` if SGLang would call a method of the backend with other arguments. Log one warning if this
    release of SGLang was not tested."""
    require_overrides("SGLang", _VERSION, SGLANG, (USED,), __name__.removesuffix("release"))
    warn_untested("SGLang", _VERSION, SGLANG)
