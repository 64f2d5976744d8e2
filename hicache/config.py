"""Configuration: frozen dataclasses, checked when built, and the only reader of the environment.

`EngineConfig` comes from Python, from a YAML file (`EngineConfig.from_yaml`) or from command-line flags that the same
fields define (`add_flags`, `EngineConfig.from_flags`). Sizes are tokens or bytes and say so in their names.

May import metrics and errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from hicache.errors import ConfigError

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchMode = Literal["best_effort", "wait_complete", "timeout"]
Kernels = Literal["triton", "torch"]
Durability = Literal["relaxed", "commit"]
Filter = Literal["auto", "none", "planes", "channel_planes"]

_WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
_PREFETCH_MODES = ("best_effort", "wait_complete", "timeout")
_DURABILITIES = ("relaxed", "commit")
_FILTERS = ("auto", "none", "planes", "channel_planes")
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def debug_checks() -> bool:
    """Whether pools and allocators verify every call (`HICACHE_DEBUG=1`, or the field's older name for it)."""
    return any(os.environ.get(name, "") not in ("", "0") for name in ("HICACHE_DEBUG", "SGLANG_DEBUG_MEMORY_POOL"))


def kernel_choice(device: torch.device) -> Kernels:
    """Which implementation serves `device`: `HICACHE_KERNELS` forces one, else Triton serves CUDA and torch the
    rest."""
    forced = os.environ.get("HICACHE_KERNELS", "")
    if forced == "triton":
        return "triton"
    if forced == "torch":
        return "torch"
    if forced:
        raise ConfigError(f"HICACHE_KERNELS={forced!r}: set it to 'triton' or 'torch', or leave it unset")
    return "triton" if device.type == "cuda" else "torch"


def mamba_ssm_dtype() -> torch.dtype:
    """The dtype of recurrent states: `HICACHE_MAMBA_SSM_DTYPE`, or the field's older name for it; else float32."""
    for variable in ("HICACHE_MAMBA_SSM_DTYPE", "SGLANG_MAMBA_SSM_DTYPE"):
        name = os.environ.get(variable, "")
        if name and name not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"{variable}={name!r}: set it to float32, bfloat16 or float16, or leave it unset")
        if name:
            return _DTYPES[name]
    return torch.float32


def custom_mem_pool() -> Literal["nvlink"] | None:
    """Where pools take GPU memory from, if not from torch: `HICACHE_CUSTOM_MEM_POOL=nvlink`."""
    name = os.environ.get("HICACHE_CUSTOM_MEM_POOL", "").lower()
    if name == "nvlink":
        return "nvlink"
    if name:
        raise ConfigError(f"HICACHE_CUSTOM_MEM_POOL={name!r}: set it to nvlink, or leave it unset")
    return None


def disk_key_text() -> str:
    """The key of the disk tier as the environment has it, `HICACHE_DISK_KEY`; "" for none. Not to be shown anywhere."""
    return os.environ.get("HICACHE_DISK_KEY", "")


def parse_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name!r}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def parse_bytes(text: str | int) -> int:
    """'512MiB', '2GB', '100000' -> bytes; decimal and binary units."""
    if isinstance(text, int):
        return text
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units[f"{letter}B"] = 1000**power
        units[f"{letter}IB"] = units[letter] = 1024**power
    digits = text.strip().rstrip("BKMGTibkmgt ")
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        return int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is no size in bytes; write it like 512MiB, 2GB or 1000000") from None


@dataclass(frozen=True, kw_only=True)
class DiskConfig:
    """The disk tier. `path` is a directory of its own; `budget_bytes` bounds the file from the first write.

    `filter`: how the bytes of a page are ordered before they are packed; "auto" is planes. `key_file` encrypts
    pages, as the environment's HICACHE_DISK_KEY does. A store that fails, or has a job for longer than `hang_s`, is
    left alone for `retry_s`, then for twice as long each time, up to `max_retry_s`.
    """

    path: str
    budget_bytes: int = 8 << 30
    durability: Durability = "relaxed"
    level: int = 1
    readers: int = 4
    queue_jobs: int = 1024
    filter: Filter = "auto"
    key_file: str = ""
    hang_s: float = 10.0
    retry_s: float = 1.0
    max_retry_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("disk path is empty; give a directory")
        if self.durability not in _DURABILITIES:
            raise ConfigError(f"durability={self.durability!r}: choose one of {', '.join(_DURABILITIES)}")
        _at_least("disk budget_bytes", self.budget_bytes, 1 << 20)
        _at_least("disk readers", self.readers, 1)
        _at_least("disk queue_jobs", self.queue_jobs, 1)
        if not 0 <= self.level <= 22:
            raise ConfigError(f"disk level={self.level}: 0 stores raw, 1 to 22 are zstd levels")
        if self.filter not in _FILTERS:
            raise ConfigError(f"disk filter={self.filter!r}: choose one of {', '.join(_FILTERS)}")
        if self.hang_s <= 0 or not 0 < self.retry_s <= self.max_retry_s:
            raise ConfigError(
                f"disk hang_s={self.hang_s}, retry_s={self.retry_s}, max_retry_s={self.max_retry_s}: each must be "
                f"above 0, and retry_s at most max_retry_s"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and policies of one engine.

    `device_tokens`: slots of the device tier. `host_bytes`: pinned CPU memory, or `host_ratio` times that of the device
    tier; 0 for no host tier. `page_size`: the device allocator's page, a divisor of `host_page_size`, the unit of
    identity, backup and disk. `window_tokens` is for models with sliding windows, `mamba_size` and what follows it for
    those with recurrent layers.
    """

    device_tokens: int
    host_bytes: int = 0
    host_ratio: float = 0.0
    page_size: int = 16
    host_page_size: int = 64
    max_requests: int = 64
    max_context_len: int = 131072
    device: str = "cpu"
    dtype: str = "bfloat16"
    write_policy: WritePolicy = "write_through"
    selective_hits: int = 2
    prefetch_mode: PrefetchMode = "best_effort"
    prefetch_timeout_s: float = 1.0
    transfer_chunk_tokens: int = 8192
    staging_bytes: int = 256 << 20
    prefill_tokens_per_s: float = 0.0
    eviction_policy: str = "lru"
    window_tokens: int = 0
    mamba_size: int = 0
    mamba_chunk_tokens: int = 64
    mamba_track_interval: int = 256
    host_states: int = 0
    model_id: str = ""
    salt: str = ""
    disk: DiskConfig | None = field(default=None)

    def __post_init__(self) -> None:
        _at_least("page_size", self.page_size, 1)
        _at_least("host_page_size", self.host_page_size, 1)
        if self.host_page_size % self.page_size:
            raise ConfigError(
                f"page_size={self.page_size} does not divide host_page_size={self.host_page_size}; "
                f"choose a page_size of 1, 2, 4, ... {self.host_page_size}"
            )
        _at_least("device_tokens", self.device_tokens, self.cache_page_size)
        _at_least("max_requests", self.max_requests, 1)
        _at_least("max_context_len", self.max_context_len, self.cache_page_size)
        _at_least("host_bytes", self.host_bytes, 0)
        if self.host_ratio < 0 or (self.host_ratio and self.host_bytes):
            raise ConfigError(
                f"host_ratio={self.host_ratio} with host_bytes={self.host_bytes}: give one of them, not below 0"
            )
        _at_least("selective_hits", self.selective_hits, 1)
        _at_least("transfer_chunk_tokens", self.transfer_chunk_tokens, self.host_page_size)
        _at_least("staging_bytes", self.staging_bytes, 1 << 16)
        for name in ("window_tokens", "mamba_size", "host_states"):
            _at_least(name, getattr(self, name), 0)
        _at_least("mamba_chunk_tokens", self.mamba_chunk_tokens, 1)
        _at_least("mamba_track_interval", self.mamba_track_interval, 1)
        if self.mamba_track_interval % self.cache_page_size:
            raise ConfigError(
                f"mamba_track_interval={self.mamba_track_interval} is no multiple of the cache page of "
                f"{self.cache_page_size} tokens: states are kept where a page ends"
            )
        if self.prefetch_timeout_s < 0 or self.prefill_tokens_per_s < 0:
            raise ConfigError("prefetch_timeout_s and prefill_tokens_per_s must not be negative")
        if self.write_policy not in _WRITE_POLICIES:
            raise ConfigError(f"write_policy={self.write_policy!r}: choose one of {', '.join(_WRITE_POLICIES)}")
        if self.prefetch_mode not in _PREFETCH_MODES:
            raise ConfigError(f"prefetch_mode={self.prefetch_mode!r}: choose one of {', '.join(_PREFETCH_MODES)}")
        if self.disk is not None and not self.has_host:
            raise ConfigError("the disk tier passes through pinned host pages; set host_bytes or host_ratio above 0")
        if self.disk is not None and not self.model_id:
            raise ConfigError("the disk tier needs model_id (a name or digest of the weights) to tell caches apart")
        parse_dtype(self.dtype)

    @property
    def cache_page_size(self) -> int:
        """Tokens of a tree page: the host page where there is a host tier, else the device page."""
        return self.host_page_size if self.has_host else self.page_size

    @property
    def has_host(self) -> bool:
        """Whether there is a host tier."""
        return bool(self.host_bytes or self.host_ratio)

    @property
    def torch_dtype(self) -> torch.dtype:
        return parse_dtype(self.dtype)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Build from plain values; unknown keys are named with the known ones."""
        values = dict(values)
        disk = values.pop("disk", None)
        config: EngineConfig = _build(cls, values, disk=None if disk is None else _build(DiskConfig, disk))
        return config

    @classmethod
    def from_yaml(cls, path: str | Path) -> EngineConfig:
        """Read a YAML mapping of the field names; `disk` is a mapping of its own."""
        try:
            values = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"the configuration {path} is no mapping of names to values")
        return cls.from_dict(values)

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
        """One flag a field (`--device-tokens`, `--disk-path`, …); unset flags keep the file's or the default value."""
        parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings")
        for prefix, cls in (("", EngineConfig), ("disk-", DiskConfig)):
            for item in dataclasses.fields(cls):
                if item.name != "disk":
                    flag = f"--{prefix}{item.name.replace('_', '-')}"
                    dest = f"{prefix}{item.name}".replace("-", "_")
                    parser.add_argument(flag, dest=dest, help=_FLAG_HELP[dest], metavar="X")

    @classmethod
    def from_flags(cls, flags: argparse.Namespace, **defaults: Any) -> EngineConfig:
        """Combine `defaults`, then the file of `--config`, then the flags that were given."""
        values: dict[str, Any] = dict(defaults)
        if flags.config is not None:
            loaded = yaml.safe_load(_read(flags.config))
            if not isinstance(loaded, dict):
                raise ConfigError(f"the configuration {flags.config} is no mapping of names to values")
            values.update(loaded)
        given = {name: value for name, value in vars(flags).items() if value is not None}
        values.update({f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})
        disk = {f.name: given[f"disk_{f.name}"] for f in dataclasses.fields(DiskConfig) if f"disk_{f.name}" in given}
        if disk:
            values["disk"] = {**(values.get("disk") or {}), **disk}
        return cls.from_dict(values)


_FLAG_HELP = {
    "device_tokens": "slots of the device tier",
    "host_bytes": "CPU memory of the host tier, like 8GiB; 0: none",
    "host_ratio": "instead of host_bytes: times the memory of the device tier",
    "page_size": "tokens of a device page; divides host_page_size",
    "host_page_size": "tokens of a host page, the unit of matching, backup and disk",
    "max_requests": "requests admitted at a time",
    "max_context_len": "tokens of the longest sequence",
    "device": "cpu, cuda or cuda:1",
    "dtype": f"of keys and values: {', '.join(_DTYPES)}",
    "write_policy": f"when pages go to the host: {', '.join(_WRITE_POLICIES)}",
    "selective_hits": "uses before write_through_selective backs a page up",
    "prefetch_mode": f"whether requests wait for the disk: {', '.join(_PREFETCH_MODES)}",
    "prefetch_timeout_s": "how long they wait under 'timeout'",
    "transfer_chunk_tokens": "tokens of a copy to the host",
    "staging_bytes": "device memory between copies and kernels",
    "prefill_tokens_per_s": "speed of computing; slower loads are not started (0: always load)",
    "eviction_policy": "which pages go first: lru, lfu, fifo, mru, filo, priority, slru",
    "window_tokens": "slots of sliding-window layers (0: as many as device_tokens)",
    "mamba_size": "recurrent states on the device (0: 4 a request)",
    "mamba_chunk_tokens": "states within a prompt are kept at multiples of this",
    "mamba_track_interval": "tokens of decoding between two states",
    "host_states": "recurrent states on the host, out of host_bytes (0: a quarter of it)",
    "model_id": "name or digest of the weights, part of every page's identity",
    "salt": "pages are shared only under the same salt",
    "disk_path": "directory of the store",
    "disk_budget_bytes": "most that its file may take, like 100GB",
    "disk_durability": f"of acknowledged pages: {', '.join(_DURABILITIES)}",
    "disk_level": "zstd level, 0 stores raw",
    "disk_readers": "reader threads",
    "disk_queue_jobs": "batches that may wait for a thread",
    "disk_filter": f"order of a page's bytes before packing: {', '.join(_FILTERS)}",
    "disk_key_file": "file with the key that encrypts pages: 32 bytes, 64 hex digits or base64",
    "disk_hang_s": "a job that takes longer stops the use of the disk",
    "disk_retry_s": "how long a disk that failed is left alone at first",
    "disk_max_retry_s": "how long at most",
}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} is below {least}; raise {name}")


def _build(cls: Any, values: dict[str, Any], **extra: Any) -> Any:
    """Convert text to the field's type and build; every message names the field."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in values and n not in extra]
    if missing:
        raise ConfigError(f"missing setting {', '.join(missing)}")
    return cls(**{name: _convert(name, known[name].type, value) for name, value in values.items()}, **extra)


def _convert(name: str, kind: Any, value: Any) -> Any:
    try:
        if name.endswith("_bytes"):
            return parse_bytes(value)
        if kind == "int":
            return int(value)
        if kind == "float":
            return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={value!r}: {error}") from None
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} must be text")
    return value
