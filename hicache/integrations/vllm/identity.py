"""What decides whether the bytes of a chunk may serve this vLLM: the identity of its store."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.config import OffloadingConfig

from hicache.integrations.vllm.row_packing import RowPacking
from hicache.storage import PageFilter, PageFormat

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # of each file of weights
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


def identity_of(
    config: OffloadingConfig, release: str, row_bytes: int, packing: RowPacking | None = None
) -> dict[str, str | int]:
    """`row_bytes`: of one chunk in vLLM's CPU tier, where the parts of all workers lie side by side.

    vLLM gives the model by name alone. Where the name is a folder, samples of its weights count as well. What vLLM does
    not tell (revision, adapters, a draft model, overrides of the model's configuration) is for the salt.

    How many workers there are is left out where they write the same canonical row, each its heads. vLLM refuses to
    start a worker that cannot do so.
    """
    parallel, is_portable = config.parallel, config.canonical_layout and config.parallel.is_parallelism_agnostic
    geometry = (
        f"world={parallel.world_size},tp={parallel.tp_size},pp={parallel.pp_size},"
        f"pcp={parallel.pcp_size},dcp={parallel.dcp_size}"
    )
    num_parts = parallel.world_size if is_portable and not config.replicated_layout else 1
    layout = {
        "groups": [asdict(group) for group in config.groups],
        "worker_bytes": config.worker_kv_bytes_per_block * num_parts,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
    }
    fields: dict[str, str | int] = {
        "server": f"vllm {release}",
        "model": config.model.name,
        "weights": _weights(Path(config.model.name)),
        "dtype": config.model.dtype,
        "layout": f"{config.kv_cache_layout} {_digest(json.dumps(layout, sort_keys=True).encode())}",
        "page_tokens": _chunk_tokens(config),
        "page_bytes": row_bytes,
        "parallel": "any" if is_portable else geometry,
        "platform": _platform(),
    }
    return fields if packing is None else {**fields, "packing": packing.name}


def page_format(dtype: str, row_bytes: int, *, is_packed: bool = False) -> PageFormat:
    """Of chunks of elements of vLLM's `dtype`; those of one byte, and unknown ones, keep the order of their bytes.
    Packed ones are not compressed."""
    if is_packed:
        return PageFormat(row_bytes, PageFilter("uncompressed"))
    width = _ELEMENT_BYTES.get(dtype, 1)
    return PageFormat(row_bytes, PageFilter("byte_shuffle", width) if width > 1 else PageFilter())


def _chunk_tokens(config: OffloadingConfig) -> str:
    """Tokens of a chunk, for each group of layers; and those of a block hash."""
    chunks = (str(group.tokens_per_block * config.cache.blocks_per_chunk) for group in config.groups)
    return f"{','.join(chunks)} of {config.cache.tokens_per_hash}"


def _platform() -> str:
    """The device; the layout of a block on CPUs depends on their instructions."""
    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    instructions = f"{torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    return f"cpu {platform.machine()} {instructions}"


def _weights(folder: Path) -> str:
    """A digest over configuration and weights of a model in a folder; "" for a name of a hub."""
    if not folder.is_dir():
        return ""
    files = sorted(file for file in folder.iterdir() if file.name == "config.json" or file.suffix in _WEIGHTS)
    return _digest(*(part for file in files for part in _samples(file)))


def _samples(file: Path) -> Iterator[bytes]:
    """Name, size and evenly spaced parts of a file, the first and the last among them."""
    num_bytes = file.stat().st_size
    yield f"{file.name} {num_bytes}".encode()
    last = max(0, num_bytes - _SAMPLE_BYTES)
    with file.open("rb") as opened:
        for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            opened.seek(offset, os.SEEK_SET)
            yield opened.read(_SAMPLE_BYTES)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]
