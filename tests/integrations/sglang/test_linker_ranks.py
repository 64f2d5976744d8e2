# ruff: noqa: E402
"""Linkers of several ranks over one store."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

sglang = pytest.importorskip("sglang")
if sglang.__version__ != "0.5.23":
    pytest.skip("0.5.17 has no linker interface", allow_module_level=True)

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs

from hicache.integrations.sglang import HiCacheLinker
from hicache.integrations.sglang.linker_store import Ranks
from sglang_case import SLOTS, Case, device_pool, tokens
from store_server import served
from waiting import BOUND_S, eventually

NUM_PAGES = 8


class Rank:
    """One of two, whose model has latent attention. `rows`: of every layer and slot."""

    def __init__(self, rank: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Case(path, mla=True)
        monkeypatch.setattr(Ranks, "of", lambda params: Ranks((rank, 2), (0, 1), (0, 1), ()))
        self.pool = device_pool(case)
        allocator = TokenToKVPoolAllocator(SLOTS, case.dtype, "cpu", self.pool, need_sort=False)
        self.linker = HiCacheLinker(
            ServerArgs(model_path="dummy", page_size=case.page_size),
            CacheInitParams(False, None, allocator, case.page_size),
            components={ComponentType.FULL},
            extra_config={"path": path, "host_bytes": "4MiB", "lookup_wait_s": BOUND_S, "load_wait_s": BOUND_S},
        )
        self.keys = get_storage_hash_str(RadixKey(array("q", tokens(NUM_PAGES, case))), page_size=case.page_size)
        self.slots = torch.arange(case.page_size, (1 + NUM_PAGES) * case.page_size)

    def offload(self) -> list[torch.Tensor]:
        """The rows of a prompt, which are on host and disk then, as far as this rank stores them."""
        for buffer in self.pool.kv_buffer:
            buffer.normal_()
        self.linker.offload([PoolTransfer(PoolName.KV, device_indices=self.slots, keys=self.keys)])
        eventually(lambda: self.linker.num_completed_offloads() and self.linker.is_idle)
        assert self.linker.pop_completed_offload()
        return [buffer[self.slots].clone() for buffer in self.pool.kv_buffer]

    def restore(self) -> list[torch.Tensor]:
        """The rows that the linker brings; none where it finds nothing."""
        if NUM_PAGES not in self.linker.lookup("request", [PoolTransfer(PoolName.KV, keys=self.keys)]):
            return []
        assert self.linker.load("request", [PoolTransfer(PoolName.KV, device_indices=self.slots, keys=self.keys)])
        assert self.linker.finish_layer_wise_loading(self.linker.start_layer_wise_loading())
        return [buffer[self.slots].clone() for buffer in self.pool.kv_buffer]


def test_what_all_ranks_hold_alike_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a served path rank 0 writes it, and rank 1 restores the same bytes and writes nothing. A path that is not
    served has a store for each."""
    (tmp_path / "pages").mkdir()
    with served(tmp_path / "pages", tmp_path / "socket") as path:
        writer, reader = Rank(0, path, monkeypatch), Rank(1, path, monkeypatch)
        reader.offload()
        assert reader.linker.describe()["pages_written"] == 0
        reader.linker.reset()  # its host pages are gone
        assert reader.restore() == []
        stored = writer.offload()
        assert writer.linker.describe()["pages_written"] == NUM_PAGES
        found = eventually(reader.restore)
        assert all(torch.equal(a, b) for a, b in zip(found, stored, strict=True))
        for rank in (writer, reader):
            rank.linker.check()
            rank.linker.close()
    assert len([*(tmp_path / "pages").iterdir()]) == 1
    for rank in (0, 1):
        alone = Rank(rank, str(tmp_path / "own"), monkeypatch)
        alone.offload()
        assert alone.linker.describe()["pages_written"] == NUM_PAGES
        alone.linker.close()
    assert len([*(tmp_path / "own").iterdir()]) == 2
