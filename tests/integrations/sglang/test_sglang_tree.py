"""SGLang's complete cache over hicache's backend: its tree, hybrid controller and host pools. The fixtures in SGLang's
wheel build them. Sidecar pools (sliding windows, Mamba states) use the v2 calls."""

from __future__ import annotations

import json
import unittest
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig, supports_hicache
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

import sglang_on_cpu
from sglang_case import enough_memory

POOLS = {ComponentType.FULL: PoolName.KV, ComponentType.SWA: PoolName.SWA, ComponentType.MAMBA: PoolName.MAMBA}


def _copy_states(src: Any, dst: Any, src_slots: torch.Tensor, dst_slots: torch.Tensor, *_: Any, **__: Any) -> None:
    dst[dst_slots] = src[src_slots]


def _copy_states_up(src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, *_: Any, **__: Any) -> None:
    dst[dst_indices] = src[src_indices, layer_id, 0]


def _copy_states_down(src_layers: Any, src_ptrs: Any, dst: Any, src_indices: Any, dst_indices: Any, **__: Any) -> None:
    for layer, src in enumerate(src_layers):
        dst[dst_indices, layer, 0] = src[src_indices]


@pytest.fixture(autouse=True)
def copies_on_the_cpu() -> Iterator[None]:
    """Replace SGLang's copy kernels, which only run on GPUs: torch copies the same bytes. There is one rank and no
    pinned memory."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with (
        mock.patch.object(torch, "zeros", sglang_on_cpu.unpinned_zeros),
        mock.patch.object(fixtures, "get_device", lambda: "cpu"),
        mock.patch.object(common, "_cuda_host_register", lambda *_: None),
        mock.patch.object(MHATokenToKVPoolHost, "backup_from_device_all_layer", sglang_on_cpu.backup),
        mock.patch.object(MHATokenToKVPoolHost, "load_to_device_per_layer", sglang_on_cpu.load),
        mock.patch.object(MambaPoolHost, "_copy_tensor", staticmethod(_copy_states)),
        mock.patch.object(MambaPoolHost, "_copy_tensor_pf_lf", staticmethod(_copy_states_up)),
        mock.patch.object(MambaPoolHost, "_copy_tensor_all_layers_lf_pf", staticmethod(_copy_states_down)),
        enough_memory(),
        get_parallel().override(**ranks),
    ):
        yield


class Caches(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """A builder of caches with one configuration over hicache's backend."""

    __test__ = False

    def __init__(self, cfg: CacheConfig, path: Path, layout: str) -> None:
        super().__init__("run")
        self.cfg, self.path, self.layout = cfg, path, layout

    def run(self, result: Any = None) -> None:
        """Do nothing. The base class requires this method."""

    def build(self) -> tuple[Any, Any, Any]:
        cache, allocator, requests = fixtures.build_fixture(self.cfg)
        settings = {
            "backend_name": "hicache",
            "module_path": "hicache.integrations.sglang.storage",
            "class_name": "HiCacheDisk",
            "interface_v1": 1,
            "path": str(self.path),
            "budget": "256MB",
            "prefill_tokens_per_s": 0,  # loads wait for the disk, however busy the machine is
            "prefetch_threshold": 1,
        }
        server_args = ServerArgs(
            model_path="dummy",
            served_model_name="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="kernel",
            hicache_mem_layout=self.layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(settings),
            hicache_storage_prefetch_policy="wait_complete",
        )
        server_args._mamba_cache_chunk_size = max(fixtures.FLA_CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(server_args)
        cache.init_hicache(server_args, cache.cache_init_params)
        fixtures.drop_hicache_atexit_pin(cache)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        cache.cache_controller.prefetch_capacity_limit = cache.cache_controller.mem_pool_host.size
        return cache, allocator, requests

    def tokens(self) -> list[int]:
        """Random tokens, more than a window."""
        window = -(-(self.cfg.sliding_window_size or 1) // self.cfg.page_size)
        return self._make_seq(1, window + 3)

    def host_pages(self, cache: Any, leaf: Any) -> dict[ComponentType, list[bytes]]:
        """The bytes of the host pages on the path to `leaf`, by component."""
        found: dict[ComponentType, list[bytes]] = {}
        for component in self.cfg.components:
            pool = cache.cache_controller.mem_pool_host.get_pool(POOLS[component])
            pages = found.setdefault(component, [])
            for node in self._path_chain(cache, leaf):
                slots = fixtures.node_host_value(cache, node, component)
                for slot in [] if slots is None else slots[:: pool.page_size].tolist():
                    pages.append(pool.get_data_page(slot, flat=True).view(torch.uint8).numpy().tobytes())
        return found


def _randomise(allocator: Any, requests: Any, has_mamba: bool) -> None:
    kv = allocator.get_kvcache()
    parts = [vars(kv)[name] for name in ("full_kv_pool", "swa_kv_pool") if name in vars(kv)]
    for pool in parts or [kv]:
        for buffer in [*pool.k_buffer, *pool.v_buffer]:
            buffer.normal_()
    if has_mamba:
        states = requests.mamba_pool.mamba_cache
        for buffer in [states.temporal, *states.conv]:
            buffer.normal_()


CASES = [cfg for cfg in CONFIGS if supports_hicache(cfg)]


@pytest.mark.parametrize("cfg", CASES, ids=lambda cfg: cfg.label)
def test_what_one_cache_backs_up_another_brings_back(tmp_path: Path, cfg: CacheConfig) -> None:
    """A second cache restores every component of the model that the first has backed up, byte by byte. Loading the
    restored pages to the device gives the same keys and values."""
    # SGLang only supports states with the layout page_first.
    layout = "page_first" if cfg.has_mamba or CASES.index(cfg) % 2 else "layer_first"
    caches = Caches(cfg, tmp_path, layout)
    first, allocator, requests = caches.build()
    tokens = caches.tokens()
    caches._insert(first, allocator, requests, tokens)
    _randomise(allocator, requests, cfg.has_mamba)
    leaf = fixtures.match_prefix(first, tokens).last_device_node
    expected = caches._snapshot_full_kv(allocator, first.path_device_indices(leaf))
    caches._backup_node(first, leaf)
    caches._write_path_to_l3(first, leaf)
    caches._flush_l3_backups(first)
    stored = caches.host_pages(first, leaf)
    first.cache_controller.detach_storage_backend()

    second, allocator, requests = caches.build()
    request = CacheRequestHandle("request", 0)
    second.prefetch_from_storage(request, second.root_node_handle(), array("q", tokens), None, None)
    caches._run_prefetch_to_completion(second, request)
    match = fixtures.match_prefix(second, tokens)
    found = caches.host_pages(second, match.last_host_node)
    for component, pages in found.items():
        assert pages and pages == stored[component][-len(pages) :], component
    assert len(found[ComponentType.FULL]) == len(stored[ComponentType.FULL])
    if not cfg.has_mamba:
        caches._load_back_node(second, match.last_host_node)
        loaded = caches._snapshot_full_kv(allocator, second.path_device_indices(match.last_host_node))
        assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))
    second.cache_controller.detach_storage_backend()


@pytest.mark.smoke
def test_prefixes_are_legal_where_every_pool_has_its_pages(tmp_path: Path) -> None:
    """A prefix may only end where every pool has the pages that it needs. A window needs only its last pages; a pool
    that every page needs ends the prefix at its first missing page."""
    cfg = next(cfg for cfg in CONFIGS if cfg.has_swa and cfg.page_size == 4)
    cache, _, _ = Caches(cfg, tmp_path, "page_first").build()
    backend = cache.cache_controller.storage_backend
    keys = [f"{n:064x}" for n in range(8)]

    def store(name: PoolName, pages: list[int]) -> None:
        for page in pages:
            slots = torch.arange(cfg.page_size)
            transfer = PoolTransfer(name=name, host_indices=slots, keys=[keys[page]])
            assert backend.batch_set_v2([transfer]) == {name: [True]}

    store(PoolName.KV, [0, 1, 2, 3, 4, 5, 7])
    store(PoolName.SWA, [0, 2, 3, 5])
    for policy, window, expected in (
        (PoolHitPolicy.TRAILING_PAGES, 1, [1, 3, 4, 6]),
        (PoolHitPolicy.TRAILING_PAGES, 2, [1, 4]),
        (PoolHitPolicy.ALL_PAGES, 1, [1]),
    ):
        transfer = PoolTransfer(name=PoolName.SWA, keys=keys[:window], hit_policy=policy)
        result = backend.batch_exists_v2(keys, [transfer])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (expected[-1], expected)
        assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: expected[-1]}
    assert backend.batch_exists_v2(keys).restorable_prefix_pages == [1, 2, 3, 4, 5, 6]
    slots = torch.arange(2 * cfg.page_size)
    transfer = PoolTransfer(name=PoolName.SWA, host_indices=slots, keys=keys[:2])
    assert backend.batch_get_v2([transfer]) == {PoolName.SWA: [True, False]}
    cache.cache_controller.detach_storage_backend()
