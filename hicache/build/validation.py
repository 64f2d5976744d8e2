"""Checks settings without a model. Commands run these checks before they load a model, which takes minutes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hicache.config import EngineConfig
from hicache.config.environment import VARIABLES
from hicache.config.secret import cipher_of
from hicache.config.settings import SOCKET
from hicache.console import require_writable
from hicache.device.memory import allocation_region, custom_pool_region
from hicache.errors import ConfigError
from hicache.flow.write_policy import make_write_policy
from hicache.host.memory import require
from hicache.kv_events.sinks import ZmqSink, path_in
from hicache.pages.order import rank_policy
from hicache.storage.urls import opener_of


def require_usable(config: EngineConfig) -> None:
    """Raise if no engine can be built from `config`, whatever its model: `ConfigError`, `OutOfMemory` for a host tier
    that exceeds the free memory, or `StoreError` for a store that has no client."""
    with allocation_region(config.enable_memory_saver), custom_pool_region(device_named(config.device)):
        pass  # entering the regions raises if their packages are not installed
    rank_policy(config.eviction_policy)
    rank_policy(config.host_order, "host_eviction_policy")
    if config.write_policy != "auto":
        make_write_policy(config)
    if isinstance(config.host_bytes, int) and config.host_bytes:
        require(config.host_bytes, "host_bytes")
    for variable in VARIABLES:
        variable.read()
    for store in (config.disk, config.remote):
        if store is not None:
            cipher_of(store)
    if config.disk is not None and not config.disk.path.startswith(SOCKET):
        _require_folder(config.disk.path)
    if config.remote is not None:
        opener_of(config.remote.url)
    if config.kv_events.startswith("file:"):
        require_writable("kv_events", Path(path_in(config.kv_events)))
    elif config.kv_events:
        ZmqSink(config.kv_events, config.kv_events_topic, config.kv_events_replay).close()


def device_named(name: str | torch.device) -> torch.device:
    """Return the device with its index. Raises `ConfigError` unless torch has the device and engines support devices of
    its type."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r}: write cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: this engine runs on cpu and cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            others = f" or an index below {count}" if count else ""
            raise ConfigError(f"device={name!r}: torch sees {count} CUDA devices; use cpu{others}")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _require_folder(path: str) -> None:
    """Raise `ConfigError` unless `path` is a directory or can be created."""
    found = Path(os.path.abspath(path))
    while not os.path.lexists(found):
        found = found.parent
    if not found.is_dir():
        raise ConfigError(f"disk path={path}: {found} is not a directory; choose another path")
    if found != Path(os.path.abspath(path)) and not os.access(found, os.W_OK | os.X_OK):
        raise ConfigError(f"disk path={path}: {found} cannot be written; choose another path")
