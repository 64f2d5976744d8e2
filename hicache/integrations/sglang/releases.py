"""The installed SGLang: its release, and its names that moved between releases. Importing this raises `ConfigError` for
a release that was never tested."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hicache.integrations.versions import require_version

TESTED = ("0.5.9", "0.5.23")
RELEASE = require_version("SGLang", version("sglang"), TESTED)

# A host pool keeps numbers of 8 bits as plain bytes: `stored_dtype` tells their kinds apart.
# INCOMPLETE: pools that leave a part of a page out of what they give to storage backends.
# HEADS: pools with a number of heads. SHARDED: pools of which every tensor parallel rank holds another part, also in a
# model with latent attention.
if RELEASE == "0.5.9":
    from sglang.srt.mem_cache.memory_pool_host import (
        MHATokenToKVPoolHost,
        MLATokenToKVPoolHost,
        NSATokenToKVPoolHost,
    )
    from sglang.srt.metrics.collector import StorageMetrics

    HEADS: tuple[Any, ...] = (MHATokenToKVPoolHost,)
    SHARDED: tuple[Any, ...] = HEADS
    INCOMPLETE: tuple[Any, ...] = (NSATokenToKVPoolHost,)  # the index keys

    def stored_dtype(pool: Any) -> str:
        return str(pool.device_pool.dtype)
else:
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_server_args

    HEADS = (MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost)
    SHARDED = (*HEADS, MambaPoolHost)
    INCOMPLETE = ()

    def stored_dtype(pool: Any) -> str:
        return f"{pool.dtype}/{get_server_args().kv_cache_dtype}"


__all__ = [
    "HEADS",
    "INCOMPLETE",
    "RELEASE",
    "SHARDED",
    "TESTED",
    "MLATokenToKVPoolHost",
    "StorageMetrics",
    "stored_dtype",
]
