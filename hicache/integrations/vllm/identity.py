"""The identity of a store: the fields that decide whether this vLLM may load the bytes of a chunk."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.config import OffloadingConfig

from hicache.errors import ConfigError
from hicache.integrations.server_store import Devices, server_fields
from hicache.integrations.vllm.row_packing import RowPacking
from hicache.integrations.vllm.unreported_settings import ModelFiles
from hicache.integrations.weights import weights_digest
from hicache.storage import PageFilter, PageFormat

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


def identity_of(
    config: OffloadingConfig,
    release: str,
    row_bytes: int,
    packing: RowPacking | None = None,
    unreported: Mapping[str, str] = MappingProxyType({}),
    devices: Devices = "same",
    models: Sequence[ModelFiles] = (),
) -> dict[str, str | int]:
    """Return the identity of chunks. `row_bytes`: bytes of a chunk in vLLM's CPU tier, including the parts of all
    workers.

    `unreported`: settings that vLLM does not pass to a spec, by the name of their field; "" means no setting
    (`unreported_settings`). `devices`: whether different kinds of GPUs share chunks. `models`: the files of the model
    and of its draft models; by default the files that the model's name means.

    vLLM reports only the model's name. If the model's files are on this machine, the digest of their bytes identifies
    the model. The name, which may be a path, and the release of vLLM are then only recorded. The user must express the
    weights behind the name of an adapter in the salt, and, without `unreported` and `models`, all settings of the
    model.

    The identity does not include the number of workers if each worker writes its own heads into one canonical row. vLLM
    refuses to start a worker that cannot write this row.
    """
    parallel, is_portable = config.parallel, config.canonical_layout and config.parallel.is_parallelism_agnostic
    geometry = f"world={parallel.world_size},tp={parallel.tp_size},pcp={parallel.pcp_size},dcp={parallel.dcp_size}"
    num_parts = parallel.world_size if is_portable and not config.replicated_layout else 1
    layout = {
        # Only some fields of a group are used, because a later release of vLLM may add fields.
        "groups": [[group.tokens_per_block, group.layer_names, group.group_id] for group in config.groups],
        "worker_bytes": config.worker_kv_bytes_per_block * num_parts,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
    }
    layout_digest = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()
    target, *drafts = models or (ModelFiles(config.model.name),)
    weights = weights_digest(*target)
    fields: dict[str, str | int] = {
        **server_fields("vllm", release),
        "model_name" if weights else "model": config.model.name,
        "weights": weights,
        "dtype": config.model.dtype,
        "layout": f"{config.kv_cache_layout} {layout_digest[:32]}",
        "page_tokens": _chunk_tokens(config),
        "page_bytes": row_bytes,
        "parallel": "any" if is_portable else geometry,
        # On CPUs, the instruction set decides the layout of a block.
        "device" if devices == "any" and not current_platform.is_cpu() else "platform": _platform(),
    }
    if packing is not None:
        fields["packing"] = packing.name
    if target.download_dir and not weights:
        fields["download_dir"] = target.download_dir
    if drafts:
        fields["draft_weights"] = ",".join(weights_digest(*draft) for draft in drafts)
    for name, text in unreported.items():
        if text:
            fields[name] = hashlib.sha256(text.encode()).hexdigest()[:32]
    return fields


def refuse_pipelines(config: OffloadingConfig) -> None:
    """Raise ConfigError for several pipeline stages, because vLLM with pipeline stages is not tested with hicache."""
    if config.parallel.pp_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={config.parallel.pp_size} is not supported: each stage has other layers; use "
            "tensor_parallel_size alone, or vLLM's own OffloadingSpec"
        )


def page_format(dtype: str, row_bytes: int, *, is_packed: bool = False) -> PageFormat:
    """Return the format of chunks with elements of vLLM's `dtype`. If elements have one byte or an unknown dtype, bytes
    are not reordered. Packed chunks are not compressed."""
    if is_packed:
        return PageFormat(row_bytes, PageFilter("uncompressed"))
    width = _ELEMENT_BYTES.get(dtype, 1)
    return PageFormat(row_bytes, PageFilter("byte_shuffle", width) if width > 1 else PageFilter())


def _chunk_tokens(config: OffloadingConfig) -> str:
    """Return the tokens of a chunk for each group of layers, and the tokens of a block hash, as text."""
    chunks = (str(group.tokens_per_block * config.cache.blocks_per_chunk) for group in config.groups)
    return f"{','.join(chunks)} of {config.cache.tokens_per_hash}"


def _platform() -> str:
    """Return the name of the device. The name of a CPU includes its instruction sets, because they decide the layout of
    a block."""
    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    instructions = f"{torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    return f"cpu {platform.machine()} {instructions}"
