"""Finds the layout of heads in the layers whose KV is in the tensors of vLLM's cache.

An `OffloadingSpec` gets only tensors of bytes, without the layout of heads. This module reads the layout from vLLM's
current configuration, which is available while a worker creates its caches and connectors.
"""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from hicache.errors import ConfigError
from hicache.integrations.vllm.block_shapes import HeadLayout


def head_layouts(config: OffloadingConfig, kv_caches: CanonicalKVCaches) -> list[HeadLayout]:
    """Return the head layout of each tensor. The heads are unknown if vLLM does not report them. Raises ConfigError for
    a layer that is not attention in bfloat16."""
    specs = _layer_specs()
    found = [HeadLayout()] * len(kv_caches.tensors)
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        for name, ref in zip(group.layer_names, refs, strict=False):
            spec = specs.get(name)
            if spec is None or len(refs) != len(group.layer_names):
                continue
            if not isinstance(spec, AttentionSpec) or spec.dtype != torch.bfloat16:
                raise ConfigError(
                    f"kv_packing cannot pack layer {name}, which is not attention in bfloat16; set kv_packing to off"
                )
            channels = spec.state_content_size_bytes // spec.dtype.itemsize
            found[ref.tensor_idx] = HeadLayout(channels, is_token_first=config.kv_cache_layout == "LBNHC")
    return found


def _layer_specs() -> dict[str, KVCacheSpec | None]:
    """Return the cache specification of each layer, by name. A layer without a cache of its own has the value None, or
    no entry."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return {}
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}
