"""The front door: every name of the public surface comes from `hicache`, whatever module it lives in."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hicache
from hicache import errors
from hicache.storage import base

ROOT = Path(__file__).resolve().parent.parent
SURFACE = """
    KVCache MHATokenToKVPool MLATokenToKVPool NSATokenToKVPool DSATokenToKVPool DoubleSparseTokenToKVPool
    AscendTokenToKVPool AscendMLAPagedTokenToKVPool SWAKVPool HybridLinearKVPool MambaPool QuantizedKVCache
    Mamba2StateShape Mamba2CacheParams plan_capacity ReqToTokenPool HybridReqToTokenPool BaseTokenToKVPoolAllocator
    TokenToKVPoolAllocator PagedTokenToKVPoolAllocator SWATokenToKVPoolAllocator alloc_extend_naive alloc_token_slots
    alloc_paged_token_slots_extend alloc_paged_token_slots_decode alloc_req_slots alloc_for_extend alloc_for_decode
    evict_from_tree_cache release_kv_cache write_cache_indices write_req_to_token_pool_triton get_last_loc
    get_last_loc_torch get_last_loc_triton available_and_evictable_str paged_attention_forward contiguous_to_paged
    paged_to_contiguous HiCache LayerTransferCounter CacheEngine CacheRequest Lease EngineConfig DiskConfig
    ModelGeometry LatentGeometry StateGeometry BufferSpec PoolLayout build_engine HiCacheError
"""


def test_every_name_is_at_the_front_door() -> None:
    """Each name is an attribute of the package, listed in `__all__`, and documented."""
    for name in SURFACE.split():
        assert name in hicache.__all__, name
        item = getattr(hicache, name)
        if inspect.isclass(item) or inspect.isfunction(item):  # a kernel is neither
            assert item.__doc__, f"{name} has no docstring"
    assert hicache.DSATokenToKVPool is hicache.NSATokenToKVPool


def test_every_error_is_at_the_front_door() -> None:
    """What public calls raise can be caught by a name of the package: all errors of the engine and of its stores."""
    kinds = {
        name
        for module in (errors, base)
        for name, item in vars(module).items()
        if inspect.isclass(item) and issubclass(item, Exception) and item.__module__ == module.__name__
    }
    assert {"TransferError", "StoreLocked"} <= kinds <= set(hicache.__all__)
    assert all(getattr(hicache, name).__doc__ for name in kinds)


# What using a name may not load. Every public name belongs to one group.
STORES = {"lmdb", "zstandard", "cryptography"}
LOADS_NOT = {
    "ConfigError EngineConfig": {"torch", "numpy", "triton", *STORES},
    "StoreError": {"torch", "triton"},
    "ModelGeometry RadixKey get_eviction_strategy": {"triton", *STORES},
    "RadixCache SWARadixCache MambaRadixCache": STORES,
    "MHATokenToKVPool ReqToTokenPool plan_capacity TokenToKVPoolAllocator alloc_token_slots paged_attention_forward "
    "LayerTransferCounter": STORES,
}


@pytest.mark.parametrize("names", LOADS_NOT)
def test_a_name_loads_what_it_needs(names: str) -> None:
    """`import hicache` loads nothing else; a public name loads its module, and neither a store nor Triton nor torch
    where it has no use for them; what was loaded once is the same object."""
    code = (
        "import sys, hicache\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}))\n"
        f"for name in {names.split()}:\n"
        "    assert getattr(hicache, name) is getattr(hicache, name) is vars(hicache)[name]\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    before, after = (set(ast.literal_eval(line)) for line in run.stdout.splitlines())
    assert not before & {"torch", "numpy", "yaml", "triton", *STORES}
    assert "hicache" in after and not after & LOADS_NOT[names]


def test_names_are_listed_before_they_are_loaded() -> None:
    """`dir` and `__all__` name the whole surface, `import *` brings it, and an unknown name is an AttributeError."""
    code = (
        "import sys, hicache\n"
        "assert set(hicache.__all__) < set(dir(hicache)) and 'torch' not in sys.modules\n"
        "from hicache import *\n"
        "assert all(globals()[name] is getattr(hicache, name) for name in hicache.__all__)\n"
        "print(hicache.__version__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == f"{hicache.__version__}\n"
    with pytest.raises(AttributeError, match="module 'hicache' has no attribute 'Nothing'"):
        _ = hicache.Nothing  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from hicache import Nothing  # type: ignore[attr-defined]  # noqa: F401


PROGRAM = """
import hicache
from hicache import CacheRequest, EngineConfig, ModelGeometry, build_engine

def serve(engine: hicache.CacheEngine, request: CacheRequest) -> int:
    with engine.acquire(request) as lease:
        return lease.cached_len

engine = build_engine(EngineConfig(device_tokens=64), ModelGeometry(1, 1, 8))
reveal_type(engine)
cache: hicache.RadixCache = 3
wrong: str = serve(engine, "no request")
hicache.Nothing
"""


@pytest.mark.long
def test_type_checkers_see_the_names(tmp_path: Path) -> None:
    """mypy in strict mode knows the types behind the public names, and finds wrong uses of them."""
    pytest.importorskip("mypy")
    package = tmp_path / "path" / "hicache"
    package.mkdir(parents=True)
    for part in (*(ROOT / "hicache").iterdir(), ROOT / "kernels", ROOT / "storage"):
        (package / part.name).symlink_to(part)
    (tmp_path / "program.py").write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "program.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(tmp_path / "path")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    found = [line.split(": ", 1)[1] for line in run.stdout.splitlines() if line.startswith("program.py")]
    assert [re.sub(r" +\[.*", "", line) for line in found] == [
        'note: Revealed type is "hicache.engine.CacheEngine"',
        'error: Incompatible types in assignment (expression has type "int", variable has type "RadixCache")',
        'error: Incompatible types in assignment (expression has type "int", variable has type "str")',
        'error: Argument 2 to "serve" has incompatible type "str"; expected "CacheRequest"',
        'error: Module has no attribute "Nothing"',
    ], run.stdout
