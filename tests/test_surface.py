"""The front door: every name of the public surface comes from `hicache`, whatever module it lives in."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import hicache
from hicache import errors
from hicache.storage import base

SURFACE = """
    KVCache MHATokenToKVPool MLATokenToKVPool NSATokenToKVPool DSATokenToKVPool DoubleSparseTokenToKVPool
    AscendTokenToKVPool AscendMLAPagedTokenToKVPool SWAKVPool HybridLinearKVPool MambaPool QuantizedKVCache
    Mamba2StateShape Mamba2CacheParams plan_capacity ReqToTokenPool HybridReqToTokenPool BaseTokenToKVPoolAllocator
    TokenToKVPoolAllocator PagedTokenToKVPoolAllocator SWATokenToKVPoolAllocator alloc_extend_naive alloc_token_slots
    alloc_paged_token_slots_extend alloc_paged_token_slots_decode alloc_req_slots alloc_for_extend alloc_for_decode
    evict_from_tree_cache release_kv_cache write_cache_indices write_req_to_token_pool_triton get_last_loc
    get_last_loc_torch get_last_loc_triton available_and_evictable_str paged_attention_forward contiguous_to_paged
    paged_to_contiguous HiCache LayerTransferCounter CacheEngine CacheRequest Lease EngineConfig DiskConfig
    ModelGeometry BufferSpec PoolLayout build_engine HiCacheError
"""


def test_every_name_is_at_the_front_door() -> None:
    """Each name is an attribute of the package, listed in `__all__`, and documented."""
    for name in SURFACE.split():
        assert name in hicache.__all__, name
        item = vars(hicache)[name]
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
    assert all(vars(hicache)[name].__doc__ for name in kinds)


def test_the_front_door_opens_at_once() -> None:
    """`import hicache` loads neither torch nor numpy; the first public name does, and an unknown name is an
    AttributeError."""
    code = (
        "import sys, hicache\n"
        "print(hicache.__version__, {'torch', 'numpy'} & set(sys.modules))\n"
        "print(hicache.EngineConfig.__module__, 'torch' in sys.modules, 'RadixCache' in dir(hicache))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines() == [f"{hicache.__version__} set()", "hicache.config True True"]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hicache.Nothing  # type: ignore[attr-defined]
