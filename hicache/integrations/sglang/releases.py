"""The installed SGLang: its release, and its names that moved between releases. Importing this raises `ConfigError` for
a release that was never tested."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hicache.integrations.versions import SGLANG as TESTED
from hicache.integrations.versions import require_version

RELEASE = require_version("SGLang", version("sglang"), TESTED)

if RELEASE in TESTED:  # a name that moved is missed only after the release was refused
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_server_args

if RELEASE == "0.5.17":
    from sglang.srt.layers.dp_attention import get_attention_dp_rank, is_dp_attention_enabled
    from sglang.srt.mem_cache.memory_pool_host import HostPoolGroup, MambaPoolHost

    POOLS_FOLLOW = False
    WHOLE_WINDOWS = True  # room for all pages of a window is taken before it is known how long the prefix is

    def pools_of(pool: Any) -> dict[str, Any]:
        """All pools, by name. They are registered one by one too, but only after the first of them is asked for."""
        if isinstance(pool, HostPoolGroup):
            return {str(entry.name): entry.host_pool for entry in pool.entries}
        return {"kv": pool}

    def data_parallel_rank(config: Any) -> int:
        return get_attention_dp_rank() if is_dp_attention_enabled() else 0

    def is_storage_writer(config: Any) -> bool:
        return not config.is_mla_model or config.tp_rank == 0

    def storage_format(pool: Any) -> str | None:
        return None

    def hit_result(hits: dict[Any, int], legal: list[int]) -> Any:
        return PoolTransferResult(max(legal, default=0), hits)
else:
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    POOLS_FOLLOW = True  # each is registered, and then the end of these
    WHOLE_WINDOWS = False

    def pools_of(pool: Any) -> dict[str, Any]:
        return {"kv": pool}

    def data_parallel_rank(config: Any) -> int:
        return int(config.dp_rank)

    def is_storage_writer(config: Any) -> bool:
        return bool(config.is_storage_writer)

    def storage_format(pool: Any) -> str | None:
        tag: str | None = pool.storage_format_tag
        return tag

    def hit_result(hits: dict[Any, int], legal: list[int]) -> Any:
        return PoolTransferResult(max(legal, default=0), hits, legal)


# Pools with a number of heads.
HEADS: tuple[Any, ...] = (MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost)
# Pools of which every tensor parallel rank holds another part, also in a model with latent attention.
SHARDED: tuple[Any, ...] = (*HEADS, MambaPoolHost)


def stored_dtype(pool: Any) -> str:
    """A host pool keeps numbers of 8 bits as plain bytes: the server's setting tells their kinds apart."""
    return f"{pool.dtype}/{get_server_args().kv_cache_dtype}"


__all__ = [
    "HEADS",
    "POOLS_FOLLOW",
    "RELEASE",
    "SHARDED",
    "TESTED",
    "WHOLE_WINDOWS",
    "MLATokenToKVPoolHost",
    "StorageMetrics",
    "data_parallel_rank",
    "get_server_args",
    "hit_result",
    "is_storage_writer",
    "pools_of",
    "storage_format",
    "stored_dtype",
]
