"""What the bytes of a page mean: everything that SGLang's keys leave out, which name tokens alone."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from hicache.errors import ConfigError
from hicache.integrations.sglang.host_pages import HostPages
from hicache.integrations.sglang.model import model_identity
from hicache.integrations.sglang.releases import (
    HEADS,
    RELEASE,
    MLATokenToKVPoolHost,
    data_parallel_rank,
    get_server_args,
    is_storage_writer,
    storage_format,
    stored_dtype,
)


class Parallel(NamedTuple):
    """Where this process stands among those that serve one model. `writes_shared`: whether it stores what all tensor
    parallel ranks hold alike."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    writes_shared: bool

    def named(self, *, shared: bool) -> str:
        tp = "any" if shared else f"{self.tp_size}/{self.tp_rank}"
        return f"tp={tp},pp={self.pp_size}/{self.pp_rank},cp={self.cp_size}/{self.cp_rank},dp={self.dp_rank}"

    def labels(self) -> dict[str, str]:
        """Of this process, as SGLang names its ranks in metrics."""
        ranks = {
            "tp_rank": self.tp_rank,
            "pp_rank": self.pp_rank,
            "attn_cp_rank": self.cp_rank,
            "dp_rank": self.dp_rank,
        }
        return {name: str(rank) for name, rank in ranks.items()}


def parallel_of(config: Any) -> Parallel:
    """Of SGLang's `HiCacheStorageConfig`."""
    tp, pp = (config.tp_rank, config.tp_size), (config.pp_rank, config.pp_size)
    cp = (config.attn_cp_rank, config.attn_cp_size)
    return Parallel(*tp, *pp, *cp, data_parallel_rank(config), is_storage_writer(config))


def store_identity(config: Any, anchor: dict[str, str | int], *, shared: bool) -> dict[str, str | int]:
    """Of a store. `anchor`: the description of the pool that holds the model's attention state. `ConfigError` without
    a model, or where its weights cannot be read."""
    if not config.model_name:
        raise ConfigError("SGLang names no model, so pages could be served to another one; set --served-model-name")
    parallel = parallel_of(config).named(shared=shared)
    server = {"server": f"sglang {RELEASE}", "model": str(config.model_name), "parallel": parallel}
    return {**server, **model_identity(get_server_args()), **anchor}


def describe(pool: Any, pages: HostPages) -> dict[str, str | int]:
    """What decides the meaning of this pool's bytes, readable."""
    found: dict[str, str | int] = {
        "pool": type(pool).__name__,
        "dtype": stored_dtype(pool).removeprefix("torch."),
        "layout": pool.layout,
        "order": pages.form,
        "page_tokens": pages.page_slots,
        "page_bytes": pages.page_bytes,
    }
    if isinstance(pool, HEADS):
        found |= {"layers": pool.layer_num, "heads": pool.head_num, "head_dim": pool.head_dim}
    elif isinstance(pool, MLATokenToKVPoolHost):
        found |= {"layers": pool.layer_num, "latent": pool.kv_lora_rank, "rope": pool.qk_rope_head_dim}
    if tag := storage_format(pool):
        found["format"] = tag
    return found


def key_prefix(name: str, description: dict[str, str | int]) -> bytes:
    """What precedes SGLang's key in the name of a page: pools of one store never meet."""
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    return f"{name}\0{digest}\0".encode()
