"""SGLang's prefix caches as a peer: loads them from a wheel or a source folder that the user names.

Their memory pools and trees run as they are; what these import beyond themselves (servers, metrics, attention kernels)
is replaced by stubs, so that neither a GPU nor SGLang's dependencies are needed. Nothing of SGLang is part of hicache.
"""

from __future__ import annotations

import itertools
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hicache.bench.common import BenchUnavailable

_CACHES = "sglang.srt.mem_cache"
# The modules that run as they are; every other one of `sglang` is a stub.
_REAL = {
    f"{_CACHES}.{name}"
    for name in (
        "allocator", "base_prefix_cache", "cache_init_params", "evict_policy", "mamba_radix_cache", "memory_pool",
        "radix_cache", "swa_memory_pool", "swa_radix_cache",
    )
}  # fmt: skip


class _Stub:
    """Stands for any class, function, decorator or context manager: whatever is asked of it is one again, and false."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> _Stub:
        return self

    def __getattr__(self, name: str) -> _Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> _Stub:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __bool__(self) -> bool:
        return False


# What the caches read of stubbed modules and need as something particular.
_PARTICULAR: dict[str, Any] = {
    "CHUNK_SIZE": 64,
    "TorchMemorySaverAdapter": SimpleNamespace(create=lambda enable: _Stub()),
    "get_global_server_args": lambda: SimpleNamespace(mamba_cache_chunk_size=64),
    "get_tensor_model_parallel_rank": lambda: 0,
    "maybe_init_custom_mem_pool": lambda device: (False, None, None),
    "convert_to_bigram_key": lambda tokens: list(itertools.pairwise(tokens)),
}


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class where a module may inherit from it, and one stub for what is called.
        return _PARTICULAR.get(name, type(name, (_Stub,), {}) if name[0].isupper() else _Stub())


class _Finder(MetaPathFinder, Loader):
    """Finds every module below `sglang`: the real ones by `read`, the others as stubs."""

    def __init__(self, read: Callable[[str], str]) -> None:
        self._read = read

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] != "sglang":
            return None
        return ModuleSpec(name, self, is_package=name not in _REAL)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name) if spec.name in _REAL else _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in _REAL:
            module.__file__ = _path_of(module.__name__)
            exec(compile(self.get_source(module.__name__), module.__file__, "exec"), vars(module))

    def get_source(self, name: str) -> str:
        """Triton reads the source of kernels by this."""
        return self._read(_path_of(name))


def _path_of(name: str) -> str:
    return name.replace(".", "/") + ".py"


def _reader(source: Path) -> Callable[[str], str]:
    if source.is_file():
        archive = zipfile.ZipFile(source)
        return lambda path: archive.read(path).decode()
    return lambda path: (source / path).read_text(encoding="utf-8")


class SGLang:
    """What the modules of SGLang's caches define, as attributes."""

    def __init__(self, source: Path) -> None:
        """`source`: a wheel, or a folder that holds `sglang/`. BenchUnavailable where it holds no caches."""
        if "sglang" in sys.modules:
            raise BenchUnavailable("sglang is imported already; the peer is loaded once per process")
        finder = _Finder(_reader(source))
        sys.meta_path.insert(0, finder)
        try:
            modules = {name.rsplit(".", 1)[1]: __import__(name, fromlist=["*"]) for name in sorted(_REAL)}
        except (KeyError, OSError, ImportError, AttributeError) as error:
            for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
                del sys.modules[name]
            raise BenchUnavailable(f"the caches of SGLang cannot be loaded from {source}: {error!r}") from error
        finally:
            sys.meta_path.remove(finder)
        for module in modules.values():
            for name, item in vars(module).items():
                if not name.startswith("__"):
                    setattr(self, name, item)
