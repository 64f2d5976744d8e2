"""The linker's settings, `linker_extra_config` of SGLang's `--unified-cache-external-linker-config`, and its store.

What its pages belong to is the store's identity: the model, the layout of its pools, and this rank's share of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from hicache.config.settings import Choice, Number, Size, as_mapping, from_mapping
from hicache.eviction.policy import ORDERS
from hicache.integrations.server_store import ServerStore, ServerStoreConfig
from hicache.integrations.sglang.linker_pools import RELEASE, CacheInitParams, LinkedPool
from hicache.storage import PageFormat
from hicache.stores import page_filter

PAGE_FORMAT_VERSION = 1
_WHERE = "linker_extra_config"
# Its pages have keys and no tokens, by which auto would know what comes back.
_POLICIES = tuple(name for name in ORDERS if name != "auto")


@dataclass(frozen=True, kw_only=True)
class LinkerConfig(ServerStoreConfig):
    """The host tier in front of the store. `host_bytes` are shared among the components as the device tier is."""

    host_bytes: Annotated[int, Size("pinned CPU memory of each rank, like 64GiB", 1)]
    policy: Annotated[str, Choice("which pages leave the host first", _POLICIES)] = "lru"
    load_wait_s: Annotated[
        float, Number("how long a request may wait for pages on disk before it computes them", 0, 3600, unit="seconds")
    ] = 5.0
    lookup_wait_s: Annotated[
        float, Number("how long the scheduler may wait for what the disk holds", 0, 3600, unit="seconds")
    ] = 0.05
    staging_bytes: Annotated[int, Size("device memory of each component for copies", 1 << 16)] = 64 << 20


def linker_config(given: Mapping[str, Any] | None) -> LinkerConfig:
    """The settings in `given`. `ConfigError` says what is wrong and what is known."""
    values = {} if given is None else given
    config: LinkerConfig = from_mapping(LinkerConfig, as_mapping(values, _WHERE), _WHERE)
    return config


@dataclass(frozen=True)
class Ranks:
    """This rank among those that serve one model, and the groups whose ranks take every decision together."""

    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    groups: tuple[torch.distributed.ProcessGroup, ...]

    @classmethod
    def of(cls, params: CacheInitParams) -> Ranks:
        """Rank and size of each kind, and the groups over which SGLang's tree reduces."""
        pp, cp = (params.pp_rank, params.pp_size), (params.attn_cp_rank, params.attn_cp_size)
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls((0, 1), pp, cp, ())
        attention = [params.attn_cp_cache_group, params.attn_tp_cache_group]
        groups = [group for group in attention if group is not None and torch.distributed.get_world_size(group) > 1]
        if not groups and params.tp_cache_group is not None:
            groups = [params.tp_cache_group]
        tp = params.attn_tp_cache_group or params.tp_cache_group
        return cls((torch.distributed.get_rank(tp), torch.distributed.get_world_size(tp)), pp, cp, tuple(groups))

    def agree(self, ok: bool) -> bool:
        """Whether it is so on all ranks. Every rank must ask."""
        agreed = torch.tensor([int(ok)], dtype=torch.int32)
        for group in self.groups:
            if torch.distributed.get_world_size(group) > 1:
                torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(agreed.item())

    def named(self, *, shared: bool) -> str:
        """What a store's pages belong to; `shared`: to all tensor parallel ranks."""
        tp = ("any",) if shared else self.tp
        kinds = (("tp", tp), ("pp", self.pp), ("cp", self.cp))
        return ",".join(f"{name}={'/'.join(map(str, rank))}" for name, rank in kinds)


def open_store(
    config: LinkerConfig,
    server_args: Any,
    params: CacheInitParams,
    parallel: str,
    pools: Sequence[LinkedPool],
) -> ServerStore:
    """The store of this model, layout and rank, or ranks (`parallel`), under `config.path`."""
    # Both kinds of fp8 lie in buffers of plain bytes, which the layout cannot tell apart.
    dtype = str(params.token_to_kv_pool_allocator.get_kvcache().dtype).removeprefix("torch.")
    identity: dict[str, str | int] = {
        "server": f"sglang {RELEASE}",
        "interface": "linker",
        "format": PAGE_FORMAT_VERSION,
        "model": str(server_args.model_path),
        "revision": str(server_args.revision),
        "weights": str(server_args.weight_version),
        "quantization": str(server_args.quantization),
        "dtype": dtype,
        "layout": ",".join(f"{pool.name}={pool.page_tokens}x{pool.layout.digest().hex()}" for pool in pools),
        "parallel": parallel,
    }
    formats: dict[int, PageFormat] = {}  # by size: where two components share one, the first decides
    for pool in pools:
        wanted = PageFormat(pool.page_bytes, page_filter("auto", pool.layout, pool.page_tokens))
        formats.setdefault(pool.page_bytes, wanted)
    full_bytes = config.host_bytes // 2  # so much that waits for the writer makes it compress less
    return ServerStore.open(config, identity, list(formats.values()), full_bytes=full_bytes)
