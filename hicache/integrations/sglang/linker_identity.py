"""What the linker's pages belong to: the model, the layout of its pools, and this rank's share of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache.disk import page_filter
from hicache.integrations.server_store import ServerStore
from hicache.integrations.sglang.linker_config import LinkerConfig
from hicache.integrations.sglang.linker_names import RELEASE, CacheInitParams
from hicache.integrations.sglang.linker_pools import LinkedPool
from hicache.storage import PageFormat

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

    def __str__(self) -> str:
        return ",".join(f"{name}={at}/{of}" for name, (at, of) in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp)))


def open_store(
    config: LinkerConfig, server_args: Any, params: CacheInitParams, ranks: Ranks, pools: Sequence[LinkedPool]
) -> ServerStore:
    """The store of this model, layout and rank under `config.path`."""
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
        "parallel": str(ranks),
    }
    formats: dict[int, PageFormat] = {}  # by size: where two components share one, the first decides
    for pool in pools:
        wanted = PageFormat(pool.page_bytes, page_filter("auto", pool.layout, pool.page_tokens))
        formats.setdefault(pool.page_bytes, wanted)
    return ServerStore.open(config, identity, list(formats.values()))
