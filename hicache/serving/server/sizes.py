"""Determines the engine settings of a server. Settings without a flag are computed for the model and the machine."""

from __future__ import annotations

import argparse
import bisect
import dataclasses
from typing import TYPE_CHECKING, Literal

import torch

from hicache.build.sizing import device_bytes, mamba_size, row_bytes, window_tokens
from hicache.build.validation import require_usable
from hicache.config import EngineConfig
from hicache.config.flags import naming_flags
from hicache.console import rounded
from hicache.errors import OutOfMemory
from hicache.host.memory import RESERVE_BYTES, available_bytes
from hicache.layout import ModelGeometry

if TYPE_CHECKING:
    # not imported at run time, because the planner uses this module without transformers
    from hicache.serving.models import LoadedModel

CUDA_SHARE = 0.8  # share of the GPU memory that the weights leave free; activations use the rest
_CPU_SHARE = 0.25
_CPU_BYTES = 512 << 20  # size of the device tier on a CPU, unless the longest context needs more
MAX_TOKENS = 1 << 30  # limit of the request table
MAX_CONTEXT = 131072  # default limit of --max-context-len


def first_config(flags: argparse.Namespace) -> EngineConfig:
    """Return the settings with placeholders for sizes that depend on the model. The server calls this function before
    it loads the model, so that wrong settings raise early."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig.from_flags(flags, device_tokens=1 << 20, device=device, model_id="not loaded yet")
    with naming_flags(EngineConfig.sources_of(flags)):
        require_usable(config)
    return config


def model_dtype(config: EngineConfig) -> torch.dtype | Literal["auto"]:
    """Return the dtype of the weights, which is the dtype of the flags. If the flags give no dtype, or an 8-bit dtype,
    which applies only to the pool, returns "auto" for the dtype of the checkpoint."""
    if config.dtype == "auto" or config.torch_dtype.itemsize == 1:
        return "auto"
    return config.torch_dtype


def engine_config(
    flags: argparse.Namespace, loaded: LoadedModel, geometry: ModelGeometry, basis: EngineConfig
) -> EngineConfig:
    """Return the engine's configuration for the model. `basis` is the result of `first_config(flags)`."""
    given = EngineConfig.sources_of(flags)
    context_len = basis.max_context_len
    if "max_context_len" not in given:
        context_len = max(basis.cache_page_size, min(loaded.max_context_len, MAX_CONTEXT))
    defaults: dict[str, object] = {
        "device_tokens": MAX_TOKENS,
        "device": basis.device,
        "max_context_len": context_len,
        "max_requests": flags.max_running,
        "prefill_chunk_tokens": flags.chunk_tokens,
        "model_id": loaded.model_id,
        "model_name": (flags.served_model_name or [loaded.name])[0],
    }
    config = EngineConfig.from_flags(flags, **defaults)
    if "device_tokens" in given:
        return config
    dtype = str(geometry.dtype or torch.bfloat16).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    sized = dataclasses.replace(config, dtype=dtype)
    return dataclasses.replace(config, device_tokens=_device_tokens(geometry, sized, context_len))


def max_len(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return the maximum tokens of a prompt and its answer together: the minimum of the limits of the model, the
    request table and the device tier."""
    capacity = config.device_tokens // config.page_size * config.page_size
    return min(loaded.max_context_len, config.max_context_len, capacity)


def _device_tokens(geometry: ModelGeometry, config: EngineConfig, context_len: int) -> int:
    """Return the number of tokens that fit in the device's memory. In `config`, sizes that depend on this number are
    placeholders. Raises OutOfMemory if the memory is too small for one page."""
    if config.device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(torch.device(config.device))
        num_tokens = largest_device_tokens(config, geometry, int(free * CUDA_SHARE))
    else:
        free = max(0, available_bytes() - RESERVE_BYTES)
        page = config.cache_page_size
        enough = max(-(-context_len // page) * page, largest_device_tokens(config, geometry, _CPU_BYTES))
        num_tokens = largest_device_tokens(config, geometry, int(free * _CPU_SHARE), enough)
    if not num_tokens:
        rows = row_bytes(geometry, config.torch_dtype)
        raise OutOfMemory(
            f"{rounded(free)} are free on {config.device}, too little for a page of {config.cache_page_size} tokens of "
            f"{rounded(rows.full + rows.window)} and {rounded(rows.state)} for each state of {config.max_requests} "
            "requests; "
            "lower --max-running or choose a smaller model"
        )
    return num_tokens


def largest_device_tokens(config: EngineConfig, model: ModelGeometry, budget: int, most: int = MAX_TOKENS) -> int:
    """Return the number of slots of the largest device tier, in complete cache pages, whose pools take at most `budget`
    bytes; 0 if the pools of one page take more. `config`: the settings of the pools, of which `device_tokens` is
    ignored."""
    page, rows = config.cache_page_size, row_bytes(model, config.torch_dtype)

    def fits(num_pages: int) -> bool:
        sized = dataclasses.replace(config, device_tokens=num_pages * page)
        if model.window_layers:
            sized = dataclasses.replace(sized, window_tokens=window_tokens(sized, model.window, rows))
        if rows.state:
            sized = dataclasses.replace(sized, mamba_size=mamba_size(sized, rows))
        return device_bytes(sized, rows) <= budget

    bound = max(0, min(most, budget // rows.full)) // page  # more pages cannot fit
    return page * bisect.bisect_left(range(1, bound + 1), True, key=lambda num_pages: not fits(num_pages))
