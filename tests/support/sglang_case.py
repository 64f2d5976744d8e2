"""SGLang's own controller, host pools and storage threads over hicache's storage backend, on the CPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.pool_host import base as host_module
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from disk_case import Clock, TroubledStore
from hicache.integrations import server_store
from hicache.storage import open_store
from hicache.storage.process import stores as opening
from waiting import BOUND_S, eventually

LAYERS, HEADS, HEAD_DIM, SLOTS = 3, 2, 16, 256
LATENT, ROPE = 48, 16


@dataclass(frozen=True)
class Case:
    """The configuration of a server. `extra`: additional settings of the backend."""

    path: Path | str
    layout: str = "page_first"
    v1: bool = True
    mla: bool = False
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 8
    model: str | None = "model"
    tp_rank: int = 0
    tp_size: int = 1
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def extra_config(self) -> dict[str, Any]:
        return {
            "backend_name": "hicache",
            "module_path": "hicache.integrations.sglang.storage",
            "class_name": "HiCacheDisk",
            "interface_v1": int(self.v1),
            "path": str(self.path),
            "budget": "64MB",
            "prefill_tokens_per_s": 0,  # loads wait for the disk, however busy the machine is
            **self.extra,
        }


def device_pool(case: Case) -> Any:
    common = {"size": SLOTS, "page_size": case.page_size, "dtype": case.dtype, "layer_num": LAYERS, "device": "cpu"}
    if case.mla:
        return memory_pool.MLATokenToKVPool(
            **common, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, enable_memory_saver=False
        )
    return memory_pool.MHATokenToKVPool(**common, head_num=HEADS, head_dim=HEAD_DIM, enable_memory_saver=False)


def host_pool(case: Case, device: Any) -> Any:
    """A host pool of SGLang's own size and layout, filled with random bytes."""
    cls = MLATokenToKVPoolHost if case.mla else MHATokenToKVPoolHost
    shape = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": case.page_size, "layout": case.layout}
    with enough_memory():
        of_mla = {"target_layer_num": LAYERS} if case.mla else {}
        info = device._mla_buffer_info() if case.mla else device._mha_buffer_info()
        layers = {"start_layer": 0, "end_layer": LAYERS, "device_capacity_tokens": SLOTS}
        pool = cls(info, **shape, pin_memory=False, **layers, **of_mla)
    pool.kv_buffer.view(torch.uint8).random_()
    return pool


def enough_memory() -> Any:
    """Make SGLang see enough memory: it leaves 10 GB of a machine free, even if its pools are small."""
    return mock.patch.object(host_module, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


clock = Clock()


@contextmanager
def troubled() -> Iterator[list[TroubledStore]]:
    """Within this context all opened stores fail and wait on demand. The tiers of these stores take timeouts and
    retries from `clock`."""
    stores: list[TroubledStore] = []

    def opened(*args: Any, **kwargs: Any) -> TroubledStore:
        stores.append(TroubledStore(open_store(*args, **kwargs)))
        return stores[-1]

    by_clock = functools.partial(server_store.open_tier, clock=clock)
    with mock.patch.object(server_store, "open_tier", by_clock), mock.patch.object(opening, "open_store", opened):
        yield stores


class Server:
    """SGLang's controller with its storage threads. Close the controller with `close`, or use this object as a
    context."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._patches = ExitStack()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        kind = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}.get(case.dtype, "auto")
        set_global_server_args_for_scheduler(
            ServerArgs(model_path="dummy", page_size=case.page_size, kv_cache_dtype=kind)
        )
        device = device_pool(case)
        self.host = host_pool(case, device)
        allocator = TokenToKVPoolAllocator(SLOTS, case.dtype, "cpu", device, need_sort=False)
        try:
            self._pool_page()
            self.controller = cache_controller.HiCacheController(allocator, self.host, **self._settings)
        except BaseException:
            self._patches.close()
            raise

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings of the controller."""
        return {
            "page_size": self.case.page_size,
            "tp_group": dist.group.WORLD,
            "load_cache_event": threading.Event(),
            "io_backend": "direct",
            "storage_backend": "dynamic",
            "prefetch_threshold": 1,
            "model_name": self.case.model,
            "storage_backend_extra_config": self.case.extra_config,
            "enable_storage_metrics": True,
        }

    def _pool_page(self) -> None:
        """Set the rank of this process and the sizes of the server's parallel groups."""
        rank, size = self.case.tp_rank, self.case.tp_size
        ranks = dict.fromkeys(("tp_rank", "attn_tp_rank", "moe_tp_rank"), rank)
        ranks |= dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), size)
        ranks |= {"pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
        self._patches.enter_context(get_parallel().override(**ranks))

    @property
    def backend(self) -> Any:
        """Our backend. If SGLang injects failures, it is the one below the injector."""
        outer = self.controller.storage_backend
        return outer if "_backend" not in vars(outer) else outer._backend

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        eventually(self.threads_live)  # a thread may not have started yet; a thread that has ended never restarts
        self.controller.detach_storage_backend()
        self._patches.close()

    def threads_live(self) -> bool:
        names = ["prefetch_thread", "prefetch_io_aux_thread", "backup_thread"]
        threads = [vars(self.controller).get(name) for name in names]
        return all(thread is not None and thread.is_alive() for thread in threads)

    def pages(self, slots: torch.Tensor) -> list[bytes]:
        """The bytes of host pages."""
        firsts = slots[:: self.case.page_size].tolist()
        return [self.host.get_data_page(first, flat=True).view(torch.uint8).numpy().tobytes() for first in firsts]

    def hashes(self, tokens: list[int]) -> list[str]:
        found: list[str] = []
        for start in range(0, len(tokens), self.case.page_size):
            found.append(get_hash_str(tokens[start : start + self.case.page_size], found[-1] if found else None))
        return found

    def backup(self, tokens: list[int]) -> tuple[list[bytes], int]:
        """Store host pages under these tokens through the backup thread. Returns the bytes of the pages, and how many
        tokens SGLang counts as stored."""
        slots = self.host.alloc(len(tokens))
        number = self.controller.write_storage(slots, tokens, self.hashes(tokens))
        operation = self.controller.ack_backup_queue.get(timeout=BOUND_S)
        assert operation.id == number
        stored = self.pages(slots)
        self.host.free(slots)
        return stored, operation.completed_tokens

    def lose(self, keys: list[str]) -> None:
        """Remove pages from the disk, as an eviction would."""
        found = self.backend._pools["kv"]
        removed = found.tier._do(found.tier._submit_remove, found.keys(keys))
        assert found.tier._wait(removed) == [True] * len(keys)

    def prefetch(self, tokens: list[int], meanwhile: Callable[[], None] = lambda: None) -> list[bytes]:
        """Return the pages that SGLang's prefetch loads into host memory. Call `meanwhile` between look-up and load."""
        controller = self.controller
        controller.prefetch("request", tokens)
        operation = controller.prefetch_hit_queue.get(timeout=BOUND_S)
        if not operation.storage_hit_count:
            return []
        meanwhile()
        operation.host_indices = slots = self.host.alloc(operation.storage_hit_count)
        controller.prefetch_buffer.put(operation)
        completed = 0
        while not (ack := controller.ack_prefetch_queue.get(timeout=BOUND_S)).completed_req:
            completed = max(completed, ack.completed_tokens or 0)
        found = self.pages(slots[:completed])
        self.host.free(slots)
        return found


def tokens(num_pages: int, case: Case, first: int = 1) -> list[int]:
    return list(range(first, first + num_pages * case.page_size))
