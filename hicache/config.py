"""Configuration: frozen dataclasses, checked when built, and the only reader of the environment.

`EngineConfig` comes from Python, from a YAML file (`EngineConfig.from_yaml`) or from command-line flags that the same
fields define (`add_flags`, `EngineConfig.from_flags`). Each field declares its kind, range and help, and everything
that makes a configuration passes through it. Sizes are tokens or bytes and say so in their names.

May import settings, metrics and errors.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import yaml

from hicache.errors import ConfigError
from hicache.settings import (
    Choice,
    FilePath,
    Number,
    Size,
    Text,
    Whole,
    as_mapping,
    from_mapping,
    settings_of,
    settle,
    shown,
)

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchMode = Literal["best_effort", "wait_complete", "timeout"]
Kernels = Literal["triton", "torch"]
Durability = Literal["relaxed", "commit"]
Filter = Literal["auto", "none", "planes", "channel_planes"]

# The request table keeps slots as int32.
_MAX_SLOTS = 1 << 30
_MAX_PAGE_TOKENS = 1 << 20
_MAX_S = 1e9
# A store maps its tables, and a process has 128 TiB of addresses.
MAX_STORE_BYTES = 1 << 46

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


def disk_key() -> bytes:
    """The key of the disk tier as the environment has it, `HICACHE_DISK_KEY`; empty for none. Not to be shown
    anywhere."""
    return os.fsencode(os.environ.get("HICACHE_DISK_KEY", ""))


@dataclass(frozen=True, kw_only=True)
class DiskConfig:
    """The disk tier. `path` is a directory of its own; `budget_bytes` bounds the file from the first write.

    `filter`: how the bytes of a page are ordered before they are packed; "auto" is planes. `key_file` encrypts
    pages, as the environment's HICACHE_DISK_KEY does. A store that fails, or has a job for longer than `hang_s`, is
    left alone for `retry_s`, then for twice as long each time, up to `max_retry_s`.
    """

    path: Annotated[str, FilePath("directory of the store", may_be_empty=False)]
    budget_bytes: Annotated[int, Size("most that its files may take, like 100GB", 1 << 20, MAX_STORE_BYTES)] = 8 << 30
    durability: Annotated[Durability, Choice("of acknowledged pages", get_args(Durability))] = "relaxed"
    level: Annotated[int, Whole("0 stores raw, 1 to 22 are zstd levels", maximum=22)] = 1
    readers: Annotated[int, Whole("reader threads", minimum=1, maximum=256)] = 4
    queue_jobs: Annotated[int, Whole("batches that may wait for a thread", minimum=1)] = 1024
    filter: Annotated[Filter, Choice("order of a page's bytes before packing", get_args(Filter))] = "auto"
    key_file: Annotated[str, FilePath("file with the key that encrypts pages: 32 bytes, 64 hex digits or base64")] = ""
    hang_s: Annotated[float, Number("a job that takes longer stops the use of the disk", 1e-3, _MAX_S)] = 10.0
    retry_s: Annotated[float, Number("how long a disk that failed is left alone at first", 1e-3, _MAX_S)] = 1.0
    max_retry_s: Annotated[float, Number("how long a disk that failed is left alone at most", 1e-3, _MAX_S)] = 300.0

    def __post_init__(self) -> None:
        settle(self, "disk ")
        if self.retry_s > self.max_retry_s:
            raise ConfigError(
                f"disk retry_s={self.retry_s}, max_retry_s={self.max_retry_s}: retry_s at most max_retry_s"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and policies of one engine.

    `device_tokens`: slots of the device tier. `host_bytes`: pinned CPU memory, or `host_ratio` times that of the device
    tier; 0 for no host tier. `page_size`: the device allocator's page, a divisor of `host_page_size`, the unit of
    identity, backup and disk. `window_tokens` is for models with sliding windows, `mamba_size` and what follows it for
    those with recurrent layers.
    """

    device_tokens: Annotated[int, Whole("slots of the device tier", 1, _MAX_SLOTS)]
    host_bytes: Annotated[int, Size("CPU memory of the host tier, like 8GiB; 0: none")] = 0
    host_ratio: Annotated[float, Number("instead of host_bytes: times the memory of the device tier", 0, 1e6)] = 0.0
    page_size: Annotated[int, Whole("tokens of a device page; divides host_page_size", 1, _MAX_PAGE_TOKENS)] = 16
    host_page_size: Annotated[
        int, Whole("tokens of a host page, the unit of matching, backup and disk", 1, _MAX_PAGE_TOKENS)
    ] = 64
    max_requests: Annotated[int, Whole("requests admitted at a time", 1, 1 << 20)] = 64
    max_context_len: Annotated[int, Whole("tokens of the longest sequence", 1, _MAX_SLOTS)] = 131072
    device: Annotated[str, Text("cpu, cuda or cuda:1")] = "cpu"
    dtype: Annotated[str, Choice("of keys and values", tuple(_DTYPES))] = "bfloat16"
    write_policy: Annotated[WritePolicy, Choice("when pages go to the host", get_args(WritePolicy))] = "write_through"
    selective_hits: Annotated[int, Whole("uses before write_through_selective backs a page up", 1)] = 2
    prefetch_mode: Annotated[PrefetchMode, Choice("whether requests wait for the disk", get_args(PrefetchMode))] = (
        "best_effort"
    )
    prefetch_timeout_s: Annotated[float, Number("how long they wait under 'timeout'", 0, _MAX_S)] = 1.0
    transfer_chunk_tokens: Annotated[int, Whole("tokens of a copy to the host", 1, _MAX_SLOTS)] = 8192
    staging_bytes: Annotated[int, Size("device memory between copies and kernels", 1 << 16)] = 256 << 20
    prefill_tokens_per_s: Annotated[
        float, Number("speed of computing; slower loads are not started (0: always load)")
    ] = 0.0
    eviction_policy: Annotated[str, Text("which pages go first: lru, lfu, fifo, mru, filo, priority, slru")] = "lru"
    window_tokens: Annotated[
        int, Whole("slots of sliding-window layers (0: as many as device_tokens)", 0, _MAX_SLOTS)
    ] = 0
    mamba_size: Annotated[int, Whole("recurrent states on the device (0: 4 a request)", 0, _MAX_SLOTS)] = 0
    mamba_chunk_tokens: Annotated[int, Whole("states within a prompt are kept at multiples of this", 1)] = 64
    mamba_track_interval: Annotated[int, Whole("tokens of decoding between two states", 1)] = 256
    host_states: Annotated[
        int, Whole("recurrent states on the host, out of host_bytes (0: a quarter of it)", 0, _MAX_SLOTS)
    ] = 0
    model_id: Annotated[str, Text("name or digest of the weights, part of every page's identity")] = ""
    salt: Annotated[str, Text("pages are shared only under the same salt")] = ""
    disk: DiskConfig | None = None

    def __post_init__(self) -> None:
        settle(self)
        if self.host_page_size % self.page_size:
            raise ConfigError(
                f"page_size={self.page_size} does not divide host_page_size={self.host_page_size}; "
                f"choose a page_size of 1, 2, 4, ... {self.host_page_size}"
            )
        _at_least("device_tokens", self.device_tokens, self.cache_page_size)
        _at_least("max_context_len", self.max_context_len, self.cache_page_size)
        _at_least("transfer_chunk_tokens", self.transfer_chunk_tokens, self.host_page_size)
        if self.host_ratio and self.host_bytes:
            raise ConfigError(f"host_ratio={self.host_ratio} with host_bytes={self.host_bytes}: give one of them")
        if self.mamba_track_interval % self.cache_page_size:
            raise ConfigError(
                f"mamba_track_interval={self.mamba_track_interval} is no multiple of the cache page of "
                f"{self.cache_page_size} tokens: states are kept where a page ends"
            )
        if not isinstance(self.disk, DiskConfig | None):
            raise ConfigError(f"disk={shown(self.disk)} is no DiskConfig")
        if self.disk is not None and not self.has_host:
            raise ConfigError("the disk tier passes through pinned host pages; set host_bytes or host_ratio above 0")
        if self.disk is not None and not self.model_id:
            raise ConfigError("the disk tier needs model_id (a name or digest of the weights) to tell caches apart")

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
        return _DTYPES[self.dtype]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from plain values, `disk` a mapping of its own. `ConfigError` names what is unknown, missing or
        wrong."""
        return cls._of(values, "the configuration")

    @classmethod
    def from_yaml(cls, path: str | Path) -> EngineConfig:
        """Read a YAML mapping of the field names; `disk` is a mapping of its own. Raises as `from_dict` does."""
        return cls._of(_read_yaml(path), f"the configuration {path}")

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
        """One flag a field (`--device-tokens`, `--disk-path`, …); unset flags keep the file's or the default value."""
        parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings")
        for prefix, cls in (("", EngineConfig), ("disk_", DiskConfig)):
            for name, setting in settings_of(cls).items():
                flag = f"--{prefix}{name}".replace("_", "-")
                words = f": {', '.join(setting.words)}" if isinstance(setting, Choice) else ""
                parser.add_argument(flag, dest=f"{prefix}{name}", help=f"{setting.help}{words}", metavar="X")

    @classmethod
    def from_flags(cls, flags: argparse.Namespace, **defaults: Any) -> EngineConfig:
        """Combine `defaults`, then the file of `--config`, then the flags that were given."""
        values: dict[str, Any] = dict(defaults)
        if flags.config is not None:
            values.update(_read_yaml(flags.config))
        given = {name: value for name, value in vars(flags).items() if value is not None}
        values.update({name: given[name] for name in settings_of(cls) if name in given})
        disk = {name: given[f"disk_{name}"] for name in settings_of(DiskConfig) if f"disk_{name}" in given}
        if disk:
            below = values.get("disk")
            values["disk"] = {**as_mapping({} if below is None else below, "disk"), **disk}
        return cls._of(values, "the configuration")

    @classmethod
    def _of(cls, values: object, name: str) -> EngineConfig:
        plain = dict(as_mapping(values, name))
        if plain.get("disk") is not None:
            plain["disk"] = from_mapping(DiskConfig, as_mapping(plain["disk"], "disk"), "disk")
        config: EngineConfig = from_mapping(cls, plain, name)
        return config


def _read_yaml(path: str | Path) -> Mapping[Any, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except Exception as error:  # the parser raises what its parts raise: ValueError, KeyError, RecursionError, …
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    return as_mapping(values, f"the configuration {path}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} is below {least}; raise {name}")
