"""The linker's store. What its pages belong to is the store's identity: the model, the layout of its pools, and this
rank's share of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache.integrations.server_store import ServerStore
from hicache.integrations.sglang.linker_pools import RELEASE, CacheInitParams, LinkedPool
from hicache.integrations.sglang.linker_settings import LinkerConfig
from hicache.integrations.sglang.model import model_identity
from hicache.storage import PageFormat
from hicache.stores.page_format import page_filter

PAGE_FORMAT_VERSION = 1


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
        **model_identity(server_args),
        "dtype": dtype,
        "layout": ",".join(f"{pool.name}={pool.page_tokens}x{pool.layout.digest().hex()}" for pool in pools),
        "parallel": parallel,
    }
    formats: dict[int, PageFormat] = {}  # by size: where two components share one, the first decides
    for pool in pools:
        wanted = PageFormat(pool.page_bytes, page_filter(pool.layout))
        formats.setdefault(pool.page_bytes, wanted)
    full_bytes = config.host_bytes // 2  # so much that waits for the writer makes it compress less
    return ServerStore.open(config, identity, list(formats.values()), full_bytes=full_bytes)
