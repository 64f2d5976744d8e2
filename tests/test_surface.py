"""The public interface: every public name can be imported from `hicache`, whichever module defines it."""

from __future__ import annotations

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


def test_the_surface_is_at_the_front_door() -> None:
    """Each public name, and each error that public calls raise, is in `__all__` and documented."""
    kinds = {
        name
        for module in (errors, base)
        for name, item in vars(module).items()
        if inspect.isclass(item) and issubclass(item, Exception) and item.__module__ == module.__name__
    }
    assert {"TransferError", "StoreLocked"} <= kinds
    for name in {*SURFACE.split(), *kinds}:
        assert name in hicache.__all__, name
        item = getattr(hicache, name)
        if inspect.isclass(item) or inspect.isfunction(item):  # a kernel is neither class nor function
            assert item.__doc__, f"{name} has no docstring"
    assert hicache.DSATokenToKVPool is hicache.NSATokenToKVPool
    with pytest.raises(AttributeError):
        _ = hicache.Nothing  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        from hicache import Nothing  # type: ignore[attr-defined]  # noqa: F401


IMPORTS = """
import os, sys

STORES = {"lmdb", "zstandard", "cryptography"}

def use(names, without):
    for name in names.split():
        assert getattr(hicache, name) is getattr(hicache, name) is vars(hicache)[name]
    loaded = without & {name.split(".")[0] for name in sys.modules if sys.modules[name] is not None}
    assert not loaded, (names, loaded)

import hicache
use("", {"torch", "numpy", "yaml", "triton", *STORES})
assert set(hicache.__all__) < set(dir(hicache))
if not (child := os.fork()):
    use("StoreError", {"torch", "triton"})
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
use("ConfigError EngineConfig", {"torch", "numpy", "triton", *STORES})
use("ModelGeometry RadixKey get_eviction_strategy", {"triton", *STORES})
sys.modules["triton"] = None  # from here on as where it is not installed
use("RadixCache SWARadixCache MambaRadixCache", STORES)
use("MHATokenToKVPool ReqToTokenPool plan_capacity TokenToKVPoolAllocator alloc_token_slots", STORES)
use("paged_attention_forward LayerTransferCounter", STORES)
from hicache import *
assert all(globals()[name] is getattr(hicache, name) for name in hicache.__all__)

import torch
from hicache.kernels import alloc_decode, alloc_extend, page_copy, store_kv
one, out = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
alloc_decode.alloc_decode(one, one, one, out, 4, "torch")
assert out.item() == 4
try:
    alloc_decode.alloc_decode(one, one, one, out, 4, "triton")
except ImportError as error:
    print(hicache.__version__, error)

from hicache.bench import transfer
assert "transformers" not in sys.modules
"""


def test_a_name_loads_what_it_needs(tmp_path: Path) -> None:
    """`import hicache` loads nothing else. A public name loads its module, and loads a store, Triton or torch only if
    it needs one. Without Triton every name can be imported and the torch twins work; a launch raises an error that
    names Triton. The bench of transfers does not load transformers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(hicache.__version__) and "needs Triton" in run.stdout


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
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(tmp_path / "path")}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    found = [line.split(": ", 1)[1] for line in run.stdout.splitlines() if line.startswith("program.py")]
    assert [re.findall(r"\[[\w-]+\]$|hicache[\w.]+CacheEngine", line) for line in found] == [
        ["hicache.engine.CacheEngine"], ["[assignment]"], ["[assignment]"], ["[arg-type]"], ["[attr-defined]"],
    ], run.stdout  # fmt: skip
