"""The installed release of SGLang, and classes imported from it. Importing this module raises `ConfigError` for a
release that was not tested."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hicache.integrations.versions import SGLANG, require_version

RELEASE = require_version("SGLang", version("sglang"), SGLANG)

if RELEASE in SGLANG:  # checked first, so that another release is refused before a missing name raises ImportError
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_server_args

# Pools with heads.
HEADS: tuple[Any, ...] = (MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost)
# Pools of which each tensor parallel rank holds a different part, even if the model has latent attention.
SHARDED: tuple[Any, ...] = (*HEADS, MambaPoolHost)

__all__ = ["HEADS", "RELEASE", "SHARDED", "MLATokenToKVPoolHost", "StorageMetrics", "get_server_args"]
