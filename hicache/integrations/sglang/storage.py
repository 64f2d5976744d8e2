"""SGLang's third tier: a storage backend that uses hicache's page store. SGLang loads this module as a `dynamic`
backend.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage", "class_name": "HiCacheDisk", "interface_v1": 1,
        "path": "/data/pages", "budget": "100GB"}'

A page of a pool is one value in the store. If ranks have different parts of a pool, each rank has a store for its part.
If a pool has equal pages on all ranks, as with latent attention, one rank writes the pages and all ranks read them.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache import hicache_storage

from hicache.config.settings import as_mapping
from hicache.errors import HiCacheError
from hicache.integrations.server_store import ServerStore, require_shared, require_usable, server_store_config
from hicache.integrations.sglang.endpoint import Endpoint
from hicache.integrations.sglang.gate import LoadGate
from hicache.integrations.sglang.host_copies import HostCopies
from hicache.integrations.sglang.host_pages import HostPages, as_bytes, host_pages, page_format
from hicache.integrations.sglang.identity import describe, key_prefix, rank_labels, store_identity
from hicache.integrations.sglang.release import SHARDED, StorageMetrics, require_backend
from hicache.integrations.staging import WaitingTier
from hicache.metrics import Metrics
from hicache.storage import PageBuffer

log = logging.getLogger(__name__)

_WHERE = "SGLang's --hicache-storage-backend-extra-config"
_LOADER_KEYS = {"backend_name", "module_path", "class_name", "interface_v1"}
_KV = "kv"
_MAX_SAMPLES = 4096  # maximum samples of transfers since the last call of get_stats


class Pool(NamedTuple):
    """A host pool of SGLang and the store of its pages."""

    pages: HostPages
    prefix: bytes
    server: ServerStore
    tier: WaitingTier
    writes: bool

    def keys(self, keys: Sequence[str]) -> list[bytes]:
        """Return the store's keys of SGLang's `keys`."""
        return self.server.keys([self.prefix + key.encode() for key in keys])


class HiCacheDisk(hicache_storage.HiCacheStorage):
    """The storage backend. Four threads of SGLang use the backend concurrently. The scheduler thread constructs the
    backend, registers host pools, clears and closes the backend. The prefetch thread looks up pages, the I/O thread
    reads pages, and the backup thread writes pages.

    If the constructor or the registration of a pool raises `ConfigError` or `StoreError`, the server stops with a
    message. Later, a page that cannot be stored or loaded is a miss. If a defect raises another error in one of
    SGLang's threads, SGLang logs the error and computes the tokens.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        require_backend()
        given = as_mapping(storage_config.extra_config or {}, _WHERE)
        settings = {k: v for k, v in given.items() if k not in _LOADER_KEYS}
        self._config = server_store_config(settings, _WHERE)
        require_usable(self._config)
        self._storage_config = storage_config
        self._has_pieces = bool(given.get("interface_v1", 0))
        self._host_pools: dict[str, Any] = {}
        self._pools: dict[str, Pool] = {}
        self._tiers: list[WaitingTier] = []
        self.metrics = Metrics()  # replaced when the stores are opened
        self.gate: LoadGate | None = None  # None until the stores are opened
        self._copies = HostCopies()
        self._endpoint: Endpoint | None = None
        self._sampling = threading.Lock()
        self._samples: dict[str, deque[tuple[int, float]]] = {
            kind: deque(maxlen=_MAX_SAMPLES) for kind in ("prefetch", "backup")
        }

    # Host pools, on the scheduler thread

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._host_pools = {_KV: mem_pool_host}

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        known, self._host_pools[str(host_pool_name)] = self._host_pools.get(str(host_pool_name)), host_pool
        if self._tiers and host_pool is not known:  # the pool was registered after the stores were opened
            self._open()

    def on_host_pools_registered(self) -> None:
        self._open()

    def _open(self) -> None:
        """Open the stores that the registered pools need. Close stores that were open before."""
        pages = {
            name: host_pages(name, pool, pieces=self._has_pieces or name != _KV)
            for name, pool in self._host_pools.items()
        }
        is_mla = self._storage_config.is_mla_model
        groups: dict[bool, list[str]] = {}
        for name, pool in self._host_pools.items():
            groups.setdefault(is_mla and not isinstance(pool, SHARDED), []).append(name)
        self.close()
        anchor = describe(self._host_pools[_KV], pages[_KV])
        pools: dict[str, Pool] = {}
        for shared, names in groups.items():
            formats = {
                format.page_bytes: format
                for format in (page_format(pages[name], self._host_pools[name].dtype) for name in names)
            }
            identity = store_identity(self._storage_config, anchor, shared=shared, devices=self._config.devices)
            writes = self._storage_config.is_storage_writer or not shared
            if not writes:
                require_shared(self._config)
            server = ServerStore.open(self._config, identity, list(formats.values()))
            log.info("pages of %s are stored in %s", ", ".join(names), server.path)
            tier = WaitingTier(server.stores, max(formats))
            self._tiers.append(tier)
            for name in names:
                prefix = key_prefix(name, describe(self._host_pools[name], pages[name]))
                pools[name] = Pool(pages[name], prefix, server, tier, writes)
        self.metrics, kv = Metrics(), pools[_KV]
        stores = kv.server.stores
        stores.register(self.metrics)
        speed, clock = self._config.prefill_tokens_per_s, stores.clock
        self.gate = LoadGate(speed, kv.pages.page_slots, self.metrics, clock, kv.tier, stores.tiers)
        if self._storage_config.enable_storage_metrics and self._endpoint is None:
            self._endpoint = Endpoint(rank_labels(self._storage_config), clock)
        self._pools = pools
        self._copies.watch(self._host_pools[_KV], self.gate.computed)

    def clear(self) -> None:
        """Remove all pages of the disk stores to which this process may write."""
        for pool in {pool.tier: pool for pool in self._pools.values() if pool.writes}.values():
            if not pool.tier.clear():
                log.warning("the pages in %s are not removed yet", pool.server.path)

    def close(self) -> bool:
        """Close the stores. Returns False if a store stays open because its medium does not answer; a later call
        retries."""
        self._pools = {}
        self._copies.end()
        self._tiers = [tier for tier in self._tiers if not self._closed(tier)]
        return not self._tiers

    def _closed(self, tier: WaitingTier) -> bool:
        try:
            return tier.close()
        except (HiCacheError, OSError):
            log.exception("a store could not be closed")
            return True

    def get_stats(self) -> StorageMetrics:
        """Return the number of pages and the GB/s of each read and write since the last call. If SGLang exports
        metrics, it calls this method once per step; then this method also exports all other metrics of hicache."""
        if self._endpoint is not None and self._pools:
            self._endpoint.publish(self.metrics)
        with self._sampling:
            samples = {kind: list(taken) for kind, taken in self._samples.items()}
            for taken in self._samples.values():
                taken.clear()
        return StorageMetrics(
            prefetch_pgs=[num_pages for num_pages, _ in samples["prefetch"]],
            backup_pgs=[num_pages for num_pages, _ in samples["backup"]],
            prefetch_bandwidth=[gb_s for _, gb_s in samples["prefetch"]],
            backup_bandwidth=[gb_s for _, gb_s in samples["backup"]],
        )

    # Which pages are stored, on the prefetch thread

    def exists(self, key: str) -> bool:
        return self._num_stored(_KV, [key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        num_pages = self._num_stored(_KV, keys)
        return num_pages if self._loads(keys, num_pages) else 0

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        policies = hicache_storage.PoolHitPolicy
        num_kv = self._num_stored(_KV, keys)
        hits = {hicache_storage.PoolName.KV: num_kv} if num_kv else {}
        legal = set(range(1, num_kv + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == policies.ALL_PAGES:
                num_pages = self._num_stored(str(transfer.name), keys[:num_kv])
                restorable = set(range(1, num_pages + 1))
            elif transfer.hit_policy == policies.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                restorable = _restorable(self._find(self._pools[str(transfer.name)], keys[:num_kv]), window)
            else:  # this policy does not limit the number of pages that are read
                continue
            if restorable:
                hits[transfer.name] = max(restorable)
            legal &= restorable
        if not self._loads(keys, max(legal, default=0)):
            return hicache_storage.PoolTransferResult(0, {}, [])
        return hicache_storage.PoolTransferResult(max(legal, default=0), hits, sorted(legal))

    def _loads(self, keys: list[str], num_pages: int) -> bool:
        """Return whether to load the stored pages of a prompt."""
        kv = self._pools[_KV]
        held = kv.tier.stores_of(kv.keys(keys[:num_pages]))
        return self.gate is not None and self.gate.decide(keys, held, kv.pages.page_bytes)

    def _num_stored(self, name: str, keys: list[str]) -> int:
        """Return the number of consecutive `keys`, from the first key on, that are stored."""
        pool = self._pools[name]
        return sum(1 for _ in takewhile(bool, self._find(pool, keys)))

    def _find(self, pool: Pool, keys: list[str]) -> list[bool]:
        assert self.gate is not None
        return pool.tier.find(pool.keys(keys), self.gate.answer_s(len(keys)))

    # Reading, on the I/O thread of prefetches

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self._get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return self._get(keys, target_locations)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._load(_KV, keys, host_indices)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._load(str(t.name), t.keys or [], t.host_indices) for t in transfers}

    def _get(self, keys: list[str], targets: list[torch.Tensor] | None) -> list[torch.Tensor | None]:
        pool = self._pools[_KV]
        if targets is None:
            targets = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        if any(target.nbytes not in (pool.pages.page_bytes, 0) for target in targets):
            raise ValueError(f"a target does not take pages of {pool.pages.page_bytes} bytes")

        def received(i: int, page: PageBuffer) -> None:
            if targets[i].nbytes:
                targets[i].copy_(torch.from_numpy(page).view(targets[i].dtype).view(targets[i].shape))

        found = self._read(pool, keys, received)
        return [target if ok else None for target, ok in zip(targets, found, strict=True)]

    def _load(self, name: str, keys: list[str], slots: torch.Tensor | None) -> list[bool]:
        pool = self._pools[name]
        locations = _locations(pool, keys, slots)
        return self._read(pool, keys, lambda i, page: pool.pages.scatter(locations[i], page))

    def _read(self, pool: Pool, keys: list[str], received: Callable[[int, PageBuffer], None]) -> list[bool]:
        """Read pages. Returns for each page whether it was read. The wait for each page of the KV pool is limited to
        the time that computing all requested pages would take."""
        gate, clock = self.gate, pool.server.stores.clock
        assert gate is not None
        begin_s = progress_s = clock()

        def receive(i: int, page: PageBuffer) -> None:
            nonlocal progress_s
            received(i, page)
            progress_s = clock()

        names = pool.keys(keys)
        stores = pool.tier.stores_of(names)  # looked up before the read, which moves pages to the disk
        wait_s = gate.wait_s(len(keys)) if pool is self._pools.get(_KV) else math.inf
        num_read = pool.tier.read(names, pool.pages.page_bytes, receive, wait_s)
        if num_read < len(keys) and clock() - progress_s > wait_s:
            gate.abandon_read()
        gate.read(keys, stores[:num_read], pool.pages.page_bytes, clock() - begin_s)
        self._sample("prefetch", num_read, pool, begin_s)
        return [i < num_read for i in range(len(keys))]

    # Writing, on the backup thread

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self._set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return self._set(keys, values)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._store(_KV, keys, host_indices)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._store(str(t.name), t.keys or [], t.host_indices) for t in transfers}

    def _set(self, keys: list[str], values: list[torch.Tensor]) -> bool:
        pool = self._pools[_KV]
        if any(value.nbytes not in (pool.pages.page_bytes, 0) for value in values) or len(values) != len(keys):
            raise ValueError(f"a page has not the {pool.pages.page_bytes} bytes of the pool's pages")

        def fill(i: int, page: PageBuffer) -> None:
            page[:] = as_bytes(values[i]) if values[i].nbytes else 0

        return all(self._write(pool, keys, fill))

    def _store(self, name: str, keys: list[str], slots: torch.Tensor | None) -> list[bool]:
        pool = self._pools[name]
        locations = _locations(pool, keys, slots)
        return self._write(pool, keys, lambda i, page: pool.pages.gather(locations[i], page))

    def _write(self, pool: Pool, keys: list[str], fill: Callable[[int, PageBuffer], None]) -> list[bool]:
        if pool is self._pools.get(_KV) and self.gate is not None:
            self.gate.offered(keys)
        is_costly = bool(keys) and self.gate is not None and self.gate.are_costly(keys)
        if not pool.writes or not self._config.stores(is_costly=is_costly):
            return [False] * len(keys)
        begin_s = pool.server.stores.clock()
        stored = pool.tier.write(pool.keys(keys), pool.pages.page_bytes, fill, is_costly=is_costly)
        self._sample("backup", sum(stored), pool, begin_s)
        return stored

    def _sample(self, kind: str, num_pages: int, pool: Pool, begin_s: float) -> None:
        seconds = max(pool.server.stores.clock() - begin_s, 1e-9)
        with self._sampling:
            self._samples[kind].append((num_pages, num_pages * pool.pages.page_bytes / seconds / 1e9))


def _locations(pool: Pool, keys: list[str], slots: torch.Tensor | None) -> Sequence[Any]:
    """Return the locations of pages in the pool, one for each of `keys`. `slots`: the slots of these pages, `[keys *
    page_slots]`."""
    if slots is None or slots.numel() != len(keys) * pool.pages.page_slots:
        raise ValueError(f"{len(keys)} pages of {pool.pages.page_slots} slots, but the slots are {slots}")
    return pool.pages.locations(slots)


def _restorable(stored: Sequence[bool], window: int) -> set[int]:
    """Return each prefix length, in pages, at which the last `window` pages of the prefix are stored. `stored`: whether
    each page is stored."""
    lengths, run = set(), 0
    for length, is_stored in enumerate(stored, 1):
        run = run + 1 if is_stored else 0
        if run >= min(length, window):
            lengths.add(length)
    return lengths
