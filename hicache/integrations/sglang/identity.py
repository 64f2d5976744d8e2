"""The identity of stored pages: all properties of model and server that decide the meaning of a page's bytes. SGLang's
keys do not have these properties, because they identify only tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from hicache.errors import ConfigError
from hicache.integrations.server_store import Devices, server_fields
from hicache.integrations.sglang.host_pages import HostPages
from hicache.integrations.sglang.model import model_identity
from hicache.integrations.sglang.release import HEADS, RELEASE, MLATokenToKVPoolHost, get_server_args


def rank_labels(config: Any) -> dict[str, str]:
    """Return the labels of this process's rank, as in SGLang's metrics. `config`: SGLang's `HiCacheStorageConfig`."""
    return {
        "tp_rank": str(config.tp_rank),
        "pp_rank": str(config.pp_rank),
        "attn_cp_rank": str(config.attn_cp_rank),
        "dp_rank": str(config.dp_rank),
    }


def store_identity(
    config: Any, anchor: dict[str, str | int], *, shared: bool, devices: Devices = "same"
) -> dict[str, str | int]:
    """Return the identity of a store. `config`: SGLang's `HiCacheStorageConfig`. `anchor`: the description of the pool
    with the model's KV. `devices`: whether different kinds of GPUs share pages. Raises `ConfigError` without a model
    name, or if the weights cannot be read."""
    if not config.model_name:
        raise ConfigError("SGLang names no model, so pages could be served to another one; set --served-model-name")
    tp = "any" if shared else f"{config.tp_size}/{config.tp_rank}"
    pp, cp = f"{config.pp_size}/{config.pp_rank}", f"{config.attn_cp_size}/{config.attn_cp_rank}"
    parallel = f"tp={tp},pp={pp},cp={cp},dp={config.dp_rank}"
    model, name = model_identity(get_server_args()), str(config.model_name)
    return {
        **server_fields("sglang", RELEASE),
        "model_name" if model["weights"] else "model": name,
        "parallel": parallel,
        "device" if devices == "any" else "platform": device_name(),
        **model,
        **anchor,
    }


def device_name() -> str:
    """Return the name of the GPU; "cpu" without a GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def describe(pool: Any, pages: HostPages) -> dict[str, str | int]:
    """Return the fields that decide the meaning of a pool's bytes, in readable form."""
    found: dict[str, str | int] = {
        "pool": type(pool).__name__,
        # A host pool stores all 8-bit dtypes as plain bytes, so the server's setting is needed to distinguish these
        # dtypes.
        "dtype": f"{pool.dtype}/{get_server_args().kv_cache_dtype}".removeprefix("torch."),
        "layout": pool.layout,
        "order": pages.form,
        "page_tokens": pages.page_slots,
        "page_bytes": pages.page_bytes,
    }
    if isinstance(pool, HEADS):
        found |= {"layers": pool.layer_num, "heads": pool.head_num, "head_dim": pool.head_dim}
    elif isinstance(pool, MLATokenToKVPoolHost):
        found |= {"layers": pool.layer_num, "latent": pool.kv_lora_rank, "rope": pool.qk_rope_head_dim}
    if pool.storage_format_tag:
        found["format"] = pool.storage_format_tag
    return found


def key_prefix(name: str, description: dict[str, str | int]) -> bytes:
    """Return a prefix for the page names of a pool. Pools of one store have different prefixes."""
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    return f"{name}\0{digest}\0".encode()
