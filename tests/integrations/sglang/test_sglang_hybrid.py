"""SGLang 0.5.17's controller of several host pools over our backend: sidecar pools go through the v2 calls. Its wheel
ships no fixtures of its tree; that of 0.5.23 is driven whole in test_sglang_tree.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_case import RELEASE, Case, Server, device_pool, host_pool, tokens
from waiting import BOUND_S, eventually

if RELEASE != "0.5.17":
    pytest.skip("test_sglang_tree.py drives the whole tree of this release", allow_module_level=True)

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool_host import HostPoolGroup, PoolEntry

WINDOW = 3


class HybridServer(Server):
    """A model of full and windowed attention, whose windows have a host pool of their own."""

    def make_controller(self, allocator: Any) -> Any:
        device = allocator.get_kvcache()
        self.windows = host_pool(self.case, device)
        pools = ((PoolName.SWA, self.windows, False), (PoolName.KV, self.host, True))
        entries = [PoolEntry(name, pool, device, int, is_primary_index_anchor=is_kv) for name, pool, is_kv in pools]
        return HybridCacheController(allocator, HostPoolGroup(entries), **self.settings)

    def window(self, keys: list[str]) -> PoolTransfer:
        """Room for the last pages of a prompt, as SGLang's tree takes it before it knows what is stored."""
        slots = self.windows.alloc(WINDOW * self.case.page_size)
        return PoolTransfer(PoolName.SWA, slots, keys=keys[-WINDOW:], hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def window_pages(self, transfer: PoolTransfer) -> list[bytes]:
        firsts = transfer.host_indices[:: self.case.page_size].tolist()
        return [self.windows.get_data_page(first).view(torch.uint8).numpy().tobytes() for first in firsts]

    def store(self, prompt: list[int]) -> tuple[list[bytes], list[bytes]]:
        """The bytes of its pages and of its window."""
        keys = self.hashes(prompt)
        slots, window = self.host.alloc(len(prompt)), self.window(keys)
        self.controller.write_storage(slots, prompt, keys, extra_pools=[window])
        operation = self.controller.ack_backup_queue.get(timeout=BOUND_S)
        assert operation.completed_tokens == len(prompt)
        return self.pages(slots), self.window_pages(window)

    def load(self, prompt: list[int], lost: Sequence[str] = ()) -> tuple[list[bytes], list[bytes]]:
        """What comes back of both; nothing where SGLang would discard it. `lost`: pages of the window that leave
        the disk between look-up and load."""
        window = self.window(self.hashes(prompt))
        operation = self.controller.prefetch("request", prompt, extra_pools=[window])
        eventually(lambda: self.controller.prefetch_revoke_queue.qsize() + self.controller.prefetch_hit_queue.qsize())
        if not self.controller.prefetch_revoke_queue.empty():
            self.controller.prefetch_revoke_queue.get()
            return [], []
        assert self.controller.prefetch_hit_queue.get() is operation
        if lost:
            self.lose(list(lost), "swa")
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        eventually(lambda: operation.pool_transfers_done)
        hits = operation.pool_storage_result.extra_pool_hit_pages
        assert hits == {PoolName.SWA: WINDOW - len(lost)}
        if lost:
            return [], []
        return self.pages(operation.host_indices[: operation.completed_tokens]), self.window_pages(window)


@pytest.mark.smoke
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_windows_come_back_with_their_prompts(tmp_path: Path, layout: str) -> None:
    """In another server, byte by byte, of the longest prefix that has its window too. SGLang 0.5.17 has no
    use for one that is shorter than a window."""
    case = Case(tmp_path, layout)
    first, short, other = tokens(6, case), tokens(WINDOW, case, first=3000), tokens(4, case, first=5000)
    with HybridServer(case) as server:
        stored = server.store(first)
        assert len(set(stored[1])) == WINDOW
        server.store(short)
    with HybridServer(case) as server:
        assert server.load([*first, *other]) == stored
        assert server.load([*first[: 4 * case.page_size], *other]) == ([], [])
        assert server.load([*short[: 2 * case.page_size], *other]) == ([], [])
        assert server.load(short, server.hashes(short)[1:]) == ([], []) == server.load(short)
        assert not server.backend.failures


def test_pages_of_drafts_are_misses(tmp_path: Path) -> None:
    """SGLang 0.5.17 asks for them beside the model's, and never says what they are: the model's own come back."""
    case = Case(tmp_path)
    drafts = Case(tmp_path, dtype=torch.float32)
    stored: list[bytes] = []
    for _ in ("store", "load"):
        with Server(case) as server:
            pool = device_pool(drafts)
            server.controller.set_draft_kv_pool(pool, host_pool(drafts, pool))
            assert server.prefetch(tokens(6, case)) == stored
            stored, num_tokens = server.backup(tokens(6, case))
            assert num_tokens == 6 * case.page_size
            assert not server.backend.failures
