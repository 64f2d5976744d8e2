"""The installed SGLang: its release, and names of it. Importing this raises `ConfigError` for a release that was never
tested."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hicache.integrations.versions import SGLANG, require_version

RELEASE = require_version("SGLang", version("sglang"), SGLANG)

if RELEASE in SGLANG:  # a name that moved is missed only after the release was refused
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_server_args

# Pools with a number of heads.
HEADS: tuple[Any, ...] = (MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost)
# Pools of which every tensor parallel rank holds another part, also in a model with latent attention.
SHARDED: tuple[Any, ...] = (*HEADS, MambaPoolHost)

__all__ = ["HEADS", "RELEASE", "SHARDED", "MLATokenToKVPoolHost", "StorageMetrics", "get_server_args"]
