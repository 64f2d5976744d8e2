"""The L2 adapter of type `plugin`: LMCache's objects in verified, bounded, compressed stores.

LMCache's store controller and its prefetch controller submit tasks and wait on three descriptors. One thread here hands
them to the processes of the stores, and copies between LMCache's memory and staging pages that these share. No method
raises after construction and none waits for the disk, except `delete` and `close`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from hicache.integrations.lmcache.layouts import ObjectKind, name_of
from hicache.integrations.lmcache.stores import KindStores
from hicache.integrations.lmcache.tasks import Background, Results
from hicache.integrations.server_store import server_store_config
from hicache.integrations.versions import LMCACHE, require_version
from hicache.storage import PageBuffer
from hicache.storage.process.health import LIMITS

log = logging.getLogger(__name__)

_DELETE_S = 30.0


class HiCacheL2Adapter(L2AdapterInterface):
    """Takes the settings of `ServerStoreConfig` as `adapter_params`; `ConfigError` names what is wrong with them.

    LMCache owns the memory of objects, and keeps it valid until their task is answered. `l1_memory_desc` is not needed.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        config = server_store_config(adapter_params, "LMCache adapter_params")
        release = require_version("lmcache", importlib.metadata.version("lmcache"), LMCACHE)
        super().__init__(max_capacity_bytes=config.budget)
        self._budget_bytes = config.budget
        self._stores = KindStores(config, f"lmcache {release}")
        self._task_ids = itertools.count()  # one call of `next` is atomic
        self._stored: Results[L2StoreResult] = Results()
        self._looked_up: Results[Bitmap] = Results()
        self._loaded: Results[Bitmap] = Results()
        self._background = Background()
        self._num_storing = 0
        self._closed = False

    def get_store_event_fd(self) -> int:
        return self._stored.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looked_up.descriptor

    def get_load_event_fd(self) -> int:
        return self._loaded.descriptor

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task_id = next(self._task_ids)
        self._background.start(self._store(task_id, keys, objects))
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    async def _store(self, task_id: int, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> None:
        self._num_storing += 1
        sizes = [memory.get_size() for memory in objects]
        outcomes = await self._background.each(self._store_object, keys, objects)
        self._num_storing -= 1
        complete = None not in outcomes
        self._stored.put(task_id, L2StoreResult(complete, sum(sizes) if complete else 0))
        new = [place for place, is_new in enumerate(outcomes) if is_new]
        if new:
            self._notify_keys_stored([keys[place] for place in new], [sizes[place] for place in new])

    async def _store_object(self, key: ObjectKey, memory: MemoryObj) -> bool | None:
        """Whether it was not stored before; None where it is not stored now."""
        store, name = self._stores.opened_for(ObjectKind.of(key, memory)), name_of(key)
        if store is None:
            return None
        [was_there] = await store.find([name], will_load=False)
        return not was_there if await store.write(name, _bytes_of(memory)) else None

    # Lookup and lock

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """A lock is a use: what a lookup found is evicted last. Eviction in between makes the load a miss."""
        task_id = next(self._task_ids)
        self._background.start(self._look_up(task_id, keys, group_layout_descs))
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looked_up.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is held."""

    async def _look_up(self, task_id: int, keys: Sequence[ObjectKey], layouts: Mapping[int, MemoryLayoutDesc]) -> None:
        wanted: dict[tuple[str, int], list[int]] = {}
        for place, key in enumerate(keys):
            wanted.setdefault((key.model_name, key.object_group_id), []).append(place)
        found = Bitmap(len(keys))
        try:
            for (model, group_id), places in wanted.items():
                names = [name_of(keys[place]) for place in places]
                for store in self._stores.matching(model, layouts.get(group_id)):
                    held = await store.find(names, will_load=True)
                    found.batched_set([place for place, present in zip(places, held, strict=True) if present])
        finally:
            self._looked_up.put(task_id, found)

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task_id = next(self._task_ids)
        self._background.start(self._load(task_id, keys, objects))
        return task_id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    async def _load(self, task_id: int, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> None:
        outcomes = await self._background.each(self._load_object, keys, objects)
        found = [place for place, is_loaded in enumerate(outcomes) if is_loaded]
        bitmap = Bitmap(len(keys))
        bitmap.batched_set(found)
        self._loaded.put(task_id, bitmap)
        if found:
            self._notify_keys_accessed([keys[place] for place in found])

    async def _load_object(self, key: ObjectKey, memory: MemoryObj) -> bool:
        store = self._stores.known(ObjectKind.of(key, memory))
        return store is not None and await store.read(name_of(key), _bytes_of(memory))

    # The rest

    def delete(self, keys: list[ObjectKey]) -> None:
        """Returns when the objects are gone, or after 30 s; then they go later."""
        try:
            self._background.start(self._delete(keys)).result(_DELETE_S)
        except concurrent.futures.TimeoutError:
            log.warning("the disk takes longer than %g s to delete; the objects go later", _DELETE_S)

    async def _delete(self, keys: Sequence[ObjectKey]) -> None:
        for model in dict.fromkeys(key.model_name for key in keys):
            of_model = [key for key in keys if key.model_name == model]
            names = [name_of(key) for key in of_model]
            for kind, store in self._stores.of_model(model):
                gone = [key for key, ok in zip(of_model, await store.delete(names), strict=True) if ok]
                if gone:
                    self._notify_keys_deleted(gone, [kind.num_bytes] * len(gone))

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Requests used these objects in LMCache's memory: here too they are evicted last. Called by 0.5.7."""
        self._notify_keys_accessed(keys)
        self._background.start(self._touch(keys))

    async def _touch(self, keys: Sequence[ObjectKey]) -> None:
        for model in dict.fromkeys(key.model_name for key in keys):
            names = [name_of(key) for key in keys if key.model_name == model]
            for _, store in self._stores.of_model(model):
                await store.find(names, will_load=True)

    def get_memory_tags(self) -> api.MemoryTags:
        """Called by LMCache 0.5.7."""
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL)

    def get_usage(self) -> AdapterUsage:
        """Disk space of the stores, another server's too; by salt, of what this process stored, before compression."""
        stores = self._stores.opened
        return AdapterUsage(
            total_bytes_used=sum(store.tier.stats().file_bytes for store in stores),
            total_capacity_bytes=self._budget_bytes,
            bytes_by_cache_salt=super().get_usage().bytes_by_cache_salt,
        )

    def report_status(self) -> dict[str, Any]:
        stores = self._stores.opened
        return {
            "is_healthy": all(store.tier.is_healthy for store in stores),
            "type": "HiCacheL2Adapter",
            "unexpected_errors": self._background.failures,
            "waiting_store_tasks": self._num_storing,
            "stores": [{"path": store.path, **dataclasses.asdict(store.tier.stats())} for store in stores],
        }

    def close(self) -> None:
        """Finish what is queued, then close the stores."""
        if not self._closed:
            self._closed = True
            self._background.close(self._stores.close, LIMITS.close_s)
            for results in (self._stored, self._looked_up, self._loaded):
                results.close()


def _bytes_of(memory: MemoryObj) -> PageBuffer:
    return np.frombuffer(memory.byte_array, dtype=np.uint8)
