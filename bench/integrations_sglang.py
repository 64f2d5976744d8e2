"""SGLang's zero-copy storage calls over our backend, beside the page store with the same pages.

    sglang.store, .load    `batch_set_v1` and `batch_get_v1` of 64 pages of 1 MiB of SGLang's host pool, page_first; the
                           ceiling is `put` and `get_into` of a page store, with as many threads

Pages are synthetic KV: 64 tokens of 4 layers. SGLang 0.5.23, on the CPU, where the tests' stand-ins replace packages
that cannot be loaded. A helper of the integrations bench.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from hicache.bench.common import BenchUnavailable, Report, in_turns, repository
from hicache.bench.disk import synthetic_kv
from hicache.bench.integrations_store import READERS, WARMUP, BareStore, require_round_trip
from hicache.storage import PageBuffer

TARGET = 0.9
_LAYERS, _HEADS, _HEAD_DIM, _PAGE_TOKENS = 4, 8, 128, 64
_PAGE_BYTES = 2 * _LAYERS * _HEADS * _HEAD_DIM * 2 * _PAGE_TOKENS
_NUM_PAGES = 64


def measure_sglang(report: Report, folder: Path, samples: int) -> None:
    sys.path.append(str(repository("tests/support, the stand-ins for SGLang's kernels,") / "tests" / "support"))
    import sglang_on_cpu

    sglang_on_cpu.prepare()
    pool = _host_pool()
    slots = torch.arange(2 * _NUM_PAGES * _PAGE_TOKENS, dtype=torch.int64)
    stored, loaded = slots[: slots.numel() // 2], slots[slots.numel() // 2 :]
    content = _content(pool, stored)
    into = [np.zeros(_PAGE_BYTES, dtype=np.uint8) for _ in content]
    with (
        closing(_backend(folder / "ours", pool)) as backend,
        closing(BareStore(folder / "store", _PAGE_BYTES)) as store,
    ):
        rounds: dict[str, Callable[[int], dict[str, float]]] = {
            "ours": lambda turn: _backend_round(backend, pool, stored, loaded, content, turn),
            "store": lambda turn: store.round([key.encode() for key in _keys(turn)], content, into),
        }
        seconds = in_turns(rounds, samples=samples, warmup=WARMUP)
    for to in ("store", "load"):
        ours, beside = seconds["ours", to], seconds["store", to]
        report.rate(f"sglang.{to}", _NUM_PAGES * _PAGE_BYTES, ours, beside=beside, target=TARGET)


def _host_pool() -> Any:
    """SGLang's own, of twice the pages, half of them filled with synthetic KV."""
    try:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host import base
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    except ImportError as error:
        raise BenchUnavailable(f"sglang: {error}; this part knows release 0.5.23") from error
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=_PAGE_TOKENS))
    num_slots = _NUM_PAGES * _PAGE_TOKENS
    shape = {"page_size": _PAGE_TOKENS, "device": "cpu", "layer_num": _LAYERS, "dtype": torch.bfloat16}
    device = MHATokenToKVPool(num_slots, **shape, head_num=_HEADS, head_dim=_HEAD_DIM, enable_memory_saver=False)
    with mock.patch.object(base, "host_memory_budget_bytes", return_value=64 << 30):
        pool = MHATokenToKVPoolHost(
            device._mha_buffer_info(),
            host_to_device_ratio=2.5,
            host_size=0,
            page_size=_PAGE_TOKENS,
            layout="page_first",
            pin_memory=False,
            start_layer=0,
            end_layer=_LAYERS,
            device_capacity_tokens=num_slots,
        )
    flat = pool.kv_buffer.view(-1).view(torch.uint8).numpy()
    rng = np.random.default_rng(0)
    patterns = [synthetic_kv(rng, _PAGE_BYTES) for _ in range(8)]
    for n, start in enumerate(range(0, flat.size - _PAGE_BYTES + 1, _PAGE_BYTES)):
        flat[start : start + _PAGE_BYTES] = np.roll(patterns[n % 8], 2048 * n)
    return pool


def _backend(path: Path, pool: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    extra = {
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage",
        "class_name": "HiCacheDisk",
        "interface_v1": 1,
        "path": str(path),
        "budget": "8GB",
        "readers": READERS,
    }
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config=extra,
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def _content(pool: Any, slots: torch.Tensor) -> list[PageBuffer]:
    """The pages at `slots` as a store has them: uint8 `[page_bytes]`."""
    firsts = slots[::_PAGE_TOKENS].tolist()
    return [pool.get_data_page(first, flat=True).view(torch.uint8).numpy().copy() for first in firsts]


def _keys(turn: int) -> list[str]:
    return [hashlib.sha256(f"{turn} {n}".encode()).hexdigest() for n in range(_NUM_PAGES)]


def _backend_round(
    backend: Any, pool: Any, stored: torch.Tensor, loaded: torch.Tensor, content: list[PageBuffer], turn: int
) -> dict[str, float]:
    keys = _keys(turn)
    begin_s = time.perf_counter()
    set_ok = backend.batch_set_v1(keys, stored)
    set_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    get_ok = backend.batch_get_v1(keys, loaded)
    get_s = time.perf_counter() - begin_s
    require_round_trip(set_ok + get_ok, content, _content(pool, loaded))
    return {"store": set_s, "load": get_s}
