"""SGLang's Python code on a machine without GPU, with stand-ins for packages whose compiled parts cannot be loaded
there.

Each stand-in answers any attribute with an empty class. No page passes through a stand-in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_zeros = torch.zeros
STAND_INS = {"torchvision", "gguf", "sgl_kernel", "datasets", "xgrammar"}


class _Anything(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let pydantic accept a stand-in as the type of a field."""
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _StandIn(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a stand-in has no code to run."""


def prepare() -> None:
    """Install the stand-ins. Call this before importing anything of SGLang."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The folder of SGLang's environment keeps the extensions that SGLang compiles at first use.
    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix, "torch_extensions"))
    # Transformers looks for these packages when it is imported, and must not find a stand-in for one.
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer, image_utils  # noqa: F401
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    # transformers exports this class only with torchvision, but its module works without torchvision.
    sys.modules["transformers"].AutoImageProcessor = AutoImageProcessor

    sys.meta_path.insert(0, _Finder())


def copy_with_torch() -> None:
    """Replace SGLang's copies between device and host, which only run on GPUs: torch copies the same bytes, from memory
    that is not pinned. Also make SGLang see enough memory: it leaves 10 GB of a machine free, even if its pools are
    small."""
    from sglang.srt.mem_cache.pool_host import base, common
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    torch.zeros = unpinned_zeros
    common._cuda_host_register = common._cuda_host_unregister = lambda *_: None
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    MHATokenToKVPoolHost.backup_from_device_all_layer = backup
    MHATokenToKVPoolHost.load_to_device_per_layer = load


def unpinned_zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return _zeros(*args, **kwargs)


def _rows(host: Any, layer: int, side: int, slots: Any) -> tuple[Any, tuple[Any, ...]]:
    """The host buffer and the index of one layer's rows of K or V."""
    if host.layout == "layer_first":
        return host.kv_buffer, (side, layer, slots)
    if host.layout == "page_first":
        return host.kv_buffer, (side, slots, layer)
    return host.kv_buffer, (side, slots // host.page_size, layer, slots % host.page_size)


def backup(host: Any, pool: Any, host_slots: Any, slots: Any, *_: Any, **__: Any) -> None:
    for layer in range(host.layer_num):
        for side, device in enumerate((host.device_k_buffers[layer], host.device_v_buffers[layer])):
            buffer, index = _rows(host, layer, side, host_slots)
            buffer[index] = device[slots]


def load(host: Any, pool: Any, host_slots: Any, slots: Any, layer: int, *_: Any, **__: Any) -> None:
    for side, device in enumerate((host.device_k_buffers[layer], host.device_v_buffers[layer])):
        buffer, index = _rows(host, layer, side, host_slots)
        device[slots] = buffer[index]
