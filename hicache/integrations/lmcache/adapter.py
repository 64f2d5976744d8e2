"""The L2 adapter of type `plugin`: LMCache's objects in verified, bounded, compressed stores.

LMCache's store controller and its prefetch controller submit tasks and wait on three descriptors. Here one thread looks
up, several load, and one stores; tasks that wait to be stored at the same time are put together. No method raises after
construction and none waits for the disk, except `delete` and `close`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from hicache.disk.health import LIMITS
from hicache.integrations.lmcache.layouts import ObjectKind, ObjectLayout, name_of
from hicache.integrations.lmcache.stores import KindStore, KindStores
from hicache.integrations.lmcache.threads import Results, Workers
from hicache.integrations.server_store import server_store_config
from hicache.integrations.versions import require_version
from hicache.storage import PageBuffer

log = logging.getLogger(__name__)

TESTED = ("0.5.6",)
_PART_OBJECTS = 8  # of a load that one thread does in one go, in one transaction of the store
_GROUP_BYTES = 256 << 20  # of stores put together: several commits, each compressed during the previous one
_FULL_BYTES = 1 << 30  # of waiting stores: compress less from here on
_DELETE_S = 30.0


@dataclass(frozen=True)
class _Objects:
    """Objects of one kind in a task: their places in it, names and memory, `[num_bytes]` each."""

    kind: ObjectKind
    places: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    memory: list[PageBuffer] = field(default_factory=list)


@dataclass(frozen=True)
class _StoreTask:
    task_id: int
    keys: Sequence[ObjectKey]
    objects: Sequence[MemoryObj]
    num_bytes: int


class _Load:
    """A load whose parts are done by several threads; the last one answers."""

    def __init__(self, keys: Sequence[ObjectKey], num_parts: int) -> None:
        self.keys = keys
        self._lock = threading.Lock()
        self._found: list[int] = []
        self._parts_left = num_parts

    def end_part(self, found: Sequence[int]) -> list[int] | None:
        """Note the places whose bytes are there. The places of all parts after the last one, else None."""
        with self._lock:
            self._found += found
            self._parts_left -= 1
            return None if self._parts_left else sorted(self._found)


class HiCacheL2Adapter(L2AdapterInterface):
    """Takes the settings of `ServerStoreConfig` as `adapter_params`; `ConfigError` names what is wrong with them.

    LMCache owns the memory of objects, and keeps it valid until their task is answered. `l1_memory_desc` is not needed.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        config = server_store_config(adapter_params, "LMCache adapter_params")
        release = require_version("lmcache", importlib.metadata.version("lmcache"), TESTED)
        super().__init__(max_capacity_bytes=config.budget)
        self._budget_bytes = config.budget
        self._stores = KindStores(config, f"lmcache {release}")
        self._task_ids = itertools.count()  # one call of `next` is atomic
        self._stored: Results[L2StoreResult] = Results()
        self._looked_up: Results[Bitmap] = Results()
        self._loaded: Results[Bitmap] = Results()
        self._to_store: deque[_StoreTask] = deque()
        self._finders, self._loaders = Workers("lookup", 1), Workers("load", config.readers)
        self._writers = Workers("store", 1)

    def get_store_event_fd(self) -> int:
        return self._stored.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looked_up.descriptor

    def get_load_event_fd(self) -> int:
        return self._loaded.descriptor

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task_id = next(self._task_ids)
        if self._writers.are_stalled():
            self._stored.put(task_id, L2StoreResult(False, 0))
            return task_id
        self._to_store.append(_StoreTask(task_id, keys, objects, sum(memory.get_size() for memory in objects)))
        self._writers.submit(self._store_waiting)
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    def _store_waiting(self) -> None:
        """The oldest waiting tasks in one go; nothing when an earlier go took them."""
        tasks: list[_StoreTask] = []
        num_bytes = 0
        while self._to_store and (not tasks or num_bytes + self._to_store[0].num_bytes <= _GROUP_BYTES):
            tasks.append(self._to_store.popleft())
            num_bytes += tasks[-1].num_bytes
        if not tasks:
            return
        keys = [key for task in tasks for key in task.keys]
        objects = [memory for task in tasks for memory in task.objects]
        stored: set[int] = set()
        new: list[int] = []
        try:
            for group in _by_kind(keys, objects):
                done, created = self._put(group)
                stored.update(done)
                new += created
        finally:
            start = 0
            for task in tasks:
                complete = stored.issuperset(range(start, start + len(task.keys)))
                start += len(task.keys)
                self._stored.put(task.task_id, L2StoreResult(complete, task.num_bytes if complete else 0))
        if new:
            self._notify_keys_stored([keys[place] for place in new], [objects[place].get_size() for place in new])

    def _put(self, group: _Objects) -> tuple[list[int], list[int]]:
        """The places of objects that are stored now, and of those among them that were not before."""
        store = self._stores.opened_for(group.kind)
        if store is None:
            return [], []
        waiting_bytes = sum(task.num_bytes for task in list(self._to_store))
        before = store.contains(group.names)
        after = store.write(group.names, group.memory, min(1.0, waiting_bytes / _FULL_BYTES))
        stored = [place for place, done in zip(group.places, after, strict=True) if done]
        was_there = {place for place, held in zip(group.places, before, strict=True) if held}
        return stored, [place for place in stored if place not in was_there]

    # Lookup and lock

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """A lock is a use: what a lookup found is evicted last. Eviction in between makes the load a miss."""
        task_id = next(self._task_ids)
        if self._finders.are_stalled():
            self._looked_up.put(task_id, Bitmap(len(keys)))
        else:
            self._finders.submit(partial(self._look_up, task_id, keys, group_layout_descs))
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looked_up.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is held."""

    def _look_up(self, task_id: int, keys: Sequence[ObjectKey], layouts: Mapping[int, MemoryLayoutDesc]) -> None:
        found = Bitmap(len(keys))
        try:
            wanted: dict[tuple[str, int], list[int]] = {}
            for place, key in enumerate(keys):
                wanted.setdefault((key.model_name, key.object_group_id), []).append(place)
            for (model, group_id), places in wanted.items():
                layout = layouts.get(group_id)
                described = ObjectLayout("", "") if layout is None else ObjectLayout.of_description(layout)
                names = [name_of(keys[place]) for place in places]
                for store in self._stores.matching(model, described):
                    held = store.contains(names)
                    found.batched_set([place for place, present in zip(places, held, strict=True) if present])
        finally:
            self._looked_up.put(task_id, found)

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task_id = next(self._task_ids)
        parts = [slice(start, start + _PART_OBJECTS) for start in range(0, len(keys), _PART_OBJECTS)]
        if not parts or self._loaders.are_stalled():
            self._loaded.put(task_id, Bitmap(len(keys)))
            return task_id
        load = _Load(keys, len(parts))
        for part in parts:
            self._loaders.submit(partial(self._load, task_id, load, part, objects[part]))
        return task_id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    def _load(self, task_id: int, load: _Load, part: slice, objects: Sequence[MemoryObj]) -> None:
        found: list[int] = []
        try:
            for group in _by_kind(load.keys[part], objects):
                store = self._stores.known(group.kind)
                if store is not None:
                    got = store.read(group.names, group.memory)
                    found += [part.start + i for i, ok in zip(group.places, got, strict=True) if ok]
        finally:
            places = load.end_part(found)
            if places is not None:
                bitmap = Bitmap(len(load.keys))
                bitmap.batched_set(places)
                self._loaded.put(task_id, bitmap)
                if places:
                    self._notify_keys_accessed([load.keys[place] for place in places])

    # The rest

    def delete(self, keys: list[ObjectKey]) -> None:
        """Returns when the objects are gone, or after 30 s; then they go later."""
        done = threading.Event()

        def work() -> None:
            try:
                self._delete(keys)
            finally:
                done.set()

        self._writers.submit(work)
        if not done.wait(_DELETE_S):
            log.warning("the disk takes longer than %g s to delete; the objects go later", _DELETE_S)

    def _delete(self, keys: Sequence[ObjectKey]) -> None:
        for model in dict.fromkeys(key.model_name for key in keys):
            of_model = [key for key in keys if key.model_name == model]
            names = [name_of(key) for key in of_model]
            for kind, store in self._stores.of_model(model):
                gone = [key for key, held in zip(of_model, store.delete(names), strict=True) if held]
                if gone:
                    self._notify_keys_deleted(gone, [kind.num_bytes] * len(gone))

    def get_usage(self) -> AdapterUsage:
        """Disk space of the stores, another process's too; by salt, of what this process stored, before compression."""
        stores = self._stores.opened
        return AdapterUsage(
            total_bytes_used=sum(store.stats().file_bytes for store in stores),
            total_capacity_bytes=self._budget_bytes * max(1, len(stores)),
            bytes_by_cache_salt=super().get_usage().bytes_by_cache_salt,
        )

    def report_status(self) -> dict[str, Any]:
        stores = self._stores.opened
        workers = (self._finders, self._loaders, self._writers)
        stalled = any(threads.are_stalled() for threads in workers)
        return {
            "is_healthy": not stalled and all(store.is_healthy for store in stores),
            "type": "HiCacheL2Adapter",
            "unexpected_errors": sum(threads.failures for threads in workers),
            "waiting_store_tasks": len(self._to_store),
            "stores": [_status(store) for store in stores],
        }

    def close(self) -> None:
        """Finish what is queued, then close the stores. A thread that does not return from the disk keeps them open."""
        deadline_s = time.monotonic() + LIMITS.close_s
        ended = [threads.close(deadline_s) for threads in (self._finders, self._loaders, self._writers)]
        if all(ended):
            self._stores.close()
        else:
            log.warning("the adapter closes without its stores: the disk is stalled")
        for results in (self._stored, self._looked_up, self._loaded):
            results.close()


def _by_kind(keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[_Objects]:
    """The objects in groups of one kind, each in the order given."""
    groups: dict[ObjectKind, _Objects] = {}
    for place, (key, memory) in enumerate(zip(keys, objects, strict=True)):
        kind = ObjectKind.of(key, memory)
        group = groups.setdefault(kind, _Objects(kind))
        group.places.append(place)
        group.names.append(name_of(key))
        group.memory.append(np.frombuffer(memory.byte_array, dtype=np.uint8))
    return list(groups.values())


def _status(store: KindStore) -> dict[str, Any]:
    stats = store.stats()
    return {"path": str(store.path), "can_write": store.can_write, **dataclasses.asdict(stats)}
