"""The environment variables. No other module reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from hicache.errors import ConfigError

if TYPE_CHECKING:
    # imported only for type checking: importing torch takes a second, which the command line does not always need
    import torch

Kernels = Literal["triton", "torch"]


@dataclass(frozen=True)
class Variable:
    """An environment variable. `names`: hicache's name, then SGLang's name with the same meaning; the first variable
    that is not empty counts.

    `words`: the accepted values, ignoring case; empty: any text. `default`: text that describes the behaviour if the
    variable is not set.
    """

    names: tuple[str, ...]
    help: str
    default: str
    words: tuple[str, ...] = ()
    is_secret: bool = False

    def read(self) -> tuple[str, str]:
        """Return the value, and the name of the variable that has it; both are empty if no variable is set. Raises
        `ConfigError` for a wrong value."""
        name = next((name for name in self.names if os.environ.get(name)), "")
        value = os.environ[name] if name else ""
        if value and self.words and value.lower() not in self.words:
            raise ConfigError(f"{name}={value!r}: set it to {' or '.join(self.words)}, or leave it unset")
        return value.lower() if self.words else value, name


DEBUG = Variable(("HICACHE_DEBUG", "SGLANG_DEBUG_MEMORY_POOL"), "1: pools and allocators verify every call", "0")
KERNELS = Variable(
    ("HICACHE_KERNELS",), "implementation of kernels", "triton on CUDA, torch elsewhere", get_args(Kernels)
)
MAMBA_SSM_DTYPE = Variable(
    ("HICACHE_MAMBA_SSM_DTYPE", "SGLANG_MAMBA_SSM_DTYPE"),
    "dtype of recurrent (SSM) states if the model specifies no dtype",
    "float32",
    ("float32", "bfloat16", "float16"),
)
CUSTOM_MEM_POOL = Variable(
    ("HICACHE_CUSTOM_MEM_POOL", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
    "allocator of GPU memory for pools; true is another name of nvlink",
    "torch's allocator",
    ("nvlink", "true"),
)
DISK_KEY = Variable(
    ("HICACHE_DISK_KEY",), "key that encrypts stored pages: 64 hex digits or base64", "no encryption", is_secret=True
)
API_KEY = Variable(
    ("HICACHE_API_KEY",),
    "API keys, separated by commas; clients of `hicache serve` must send one of them",
    "no key is required",
    is_secret=True,
)
CACHE_HOME = Variable(
    ("XDG_CACHE_HOME",),
    "folder of caches; hicache stores unpacked models in its subfolder hicache/models, and digests of weights in "
    "hicache/digests",
    "~/.cache",
)
VARIABLES = (DEBUG, KERNELS, MAMBA_SSM_DTYPE, CUSTOM_MEM_POOL, DISK_KEY, API_KEY, CACHE_HOME)


def debug_checks() -> bool:
    """Return whether pools and allocators verify every call."""
    return DEBUG.read()[0] not in ("", "0")


def kernel_choice(device: torch.device) -> Kernels:
    """Return the implementation of kernels for `device`: `HICACHE_KERNELS` if set, else Triton on CUDA and torch
    elsewhere."""
    forced, _ = KERNELS.read()
    return "triton" if forced == "triton" or (not forced and device.type == "cuda") else "torch"


def mamba_ssm_dtype() -> torch.dtype:
    """Return the dtype of temporal states if the model gives no dtype: `HICACHE_MAMBA_SSM_DTYPE`, or float32."""
    return dtype_named(MAMBA_SSM_DTYPE.read()[0] or MAMBA_SSM_DTYPE.default)


def custom_mem_pool() -> Literal["nvlink"] | None:
    """Return the allocator of GPU memory for pools; None: torch's allocator."""
    return "nvlink" if CUSTOM_MEM_POOL.read()[0] else None


def disk_key() -> bytes:
    """Return the value of `HICACHE_DISK_KEY`; empty if it is not set. The caller must never print the key."""
    return os.fsencode(DISK_KEY.read()[0])


def api_keys() -> tuple[str, ...]:
    """Return the keys of `HICACHE_API_KEY`; no key if it is not set. The caller must never print the keys."""
    return tuple(filter(None, API_KEY.read()[0].split(",")))


def models_folder() -> Path:
    """Return the folder of unpacked models, below `XDG_CACHE_HOME` or the user's `~/.cache`."""
    return _cache_folder() / "models"


def digests_folder() -> Path:
    """Return the folder for digests of weights whose own folder is not writable."""
    return _cache_folder() / "digests"


def _cache_folder() -> Path:
    given = Path(CACHE_HOME.read()[0] or CACHE_HOME.default)
    try:
        return given.expanduser() / "hicache"
    except RuntimeError as error:  # the user of a container may have no home directory
        raise ConfigError(f"{given}: {error}; set XDG_CACHE_HOME to a folder that can be written") from error


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
