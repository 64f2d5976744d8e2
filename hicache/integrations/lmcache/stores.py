"""The stores of one LMCache server: one for each model, layout and size of its objects, opened when it is first needed.

LMCache says what objects look like with the first of them, so no store can be opened before. Those that an earlier
process left under the path are known from the start.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hicache.errors import HiCacheError
from hicache.integrations.lmcache.layouts import ObjectKind, ObjectLayout
from hicache.integrations.server_store import ServerStore, ServerStoreConfig, require_usable
from hicache.integrations.staging import LOOK_S, StagedJob, StagedTier
from hicache.storage import PageBuffer, StoreError, store_folders
from hicache.storage.store_files import read_record

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

log = logging.getLogger(__name__)

_STAGED_BYTES = 64 << 20  # of reads and of writes, of each store, or a few objects
_MAX_STAGED, _MIN_WRITES = 64, 3
_NEVER = threading.Event()  # no read is cancelled

_MAX_STORES = 64  # a serializer whose every output has a size of its own would open stores without end


class KindStore:
    """The store of one kind of objects. On the background thread, but `stats`; what fails is a miss."""

    def __init__(self, opened: ServerStore, kind: ObjectKind) -> None:
        self.path, self.tier, self._keys_of = opened.path, opened.tier, opened.keys
        count = min(_MAX_STAGED, _STAGED_BYTES // kind.num_bytes)
        num_reads, num_writes = max(self.tier.num_readers + 1, count), max(_MIN_WRITES, count)
        self._staged = StagedTier(self.tier, kind.num_bytes, num_reads, num_writes)
        self._reading, self._writing = asyncio.Semaphore(num_reads), asyncio.Semaphore(num_writes)
        self._awaited: dict[StagedJob, asyncio.Future[list[bool]]] = {}
        self._polling: asyncio.Task[None] | None = None

    async def find(self, names: Sequence[bytes], *, will_load: bool) -> list[bool]:
        """Which objects are held. `will_load`: those count as used, and are evicted last."""
        keys = self._keys_of(names)
        held = await self._answer(self._staged.find(keys))
        if will_load:
            self.tier.used([key for key, present in zip(keys, held, strict=True) if present])
        return held

    async def read(self, name: bytes, target: PageBuffer) -> bool:
        """Whether `target` holds the verified bytes now; nothing writes to it later."""
        async with self._reading:
            job = self._staged.begin(self._staged.for_reads, 1, len(target))
            if job is None:  # late jobs have all staging pages
                return False
            [is_read] = await self._answer(self._staged.read(job, self._keys_of([name]), _NEVER))
            if is_read:
                np.copyto(target, job.pages[0])
            self._staged.release(job)
            return is_read

    async def write(self, name: bytes, source: PageBuffer) -> bool:
        """Whether the object is in the store now; nothing reads `source` later."""
        async with self._writing:
            job = self._staged.begin(self._staged.for_writes, 1, len(source))
            if job is None:
                return False
            np.copyto(job.pages[0], source)
            [is_stored] = await self._answer(self._staged.write(job, self._keys_of([name])))
            self._staged.release(job)
            return is_stored

    async def delete(self, names: Sequence[bytes]) -> list[bool]:
        """Which objects were there, and are gone."""
        return await self._answer(self._staged.remove(self._keys_of(names)))

    def close(self) -> None:
        self._staged.close()

    async def _answer(self, job: StagedJob) -> list[bool]:
        """Of a submitted job."""
        answered = self._awaited[job] = asyncio.get_running_loop().create_future()
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        return await answered

    async def _poll(self) -> None:
        """Take answers as long as there is somebody to wait for one."""
        while self._awaited:
            for job in self._staged.poll():
                answered = self._awaited.pop(job, None)
                if answered is not None and not answered.done():
                    answered.set_result(job.ok)
            if self._awaited:
                await _readable(self.tier.fileno())
        self._polling = None


async def _readable(descriptor: int) -> None:
    """Until it can be read, or it is time to look for a process that says nothing."""
    if descriptor < 0:  # no connection, so all jobs have an answer
        await asyncio.sleep(0)
        return
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, is_readable.set)
    try:
        await asyncio.wait_for(is_readable.wait(), LOOK_S)
    except TimeoutError:
        log.debug("a store process says nothing")
    finally:
        loop.remove_reader(descriptor)


class KindStores:
    """On the background thread, but `opened`. `server`: name and release for the identity of new stores.

    `ConfigError` at once for a path or a key that cannot be used; a store that cannot be opened later is logged once,
    and its objects are neither stored nor found.
    """

    def __init__(self, config: ServerStoreConfig, server: str) -> None:
        cipher = require_usable(config)
        key_id = cipher.key_id if cipher else ""
        self._config, self._server = config, server
        # None: not opened yet, or it could not be opened (then it is in `_unusable`).
        self._stores: dict[ObjectKind, KindStore | None] = {}
        self._unusable: set[ObjectKind] = set()
        for folder in () if config.is_served else store_folders(config.path):
            try:
                record = read_record(folder)
            except StoreError as error:
                log.warning("a store is left out: %s", error)
                continue
            if record.identity.get("server") == server and record.key_id == key_id:
                self._stores[ObjectKind.of_identity(record.identity)] = None

    @property
    def opened(self) -> list[KindStore]:
        return [store for store in list(self._stores.values()) if store is not None]

    def known(self, kind: ObjectKind) -> KindStore | None:
        """The store of this kind, if there is one."""
        return self.opened_for(kind) if kind in self._stores else None

    def opened_for(self, kind: ObjectKind) -> KindStore | None:
        """The store of this kind, made if there is none; None where it cannot be opened."""
        if self._stores.get(kind) is None and kind not in self._unusable:
            self._stores[kind] = self._open(kind)
        return self._stores.get(kind)

    def matching(self, model: str, description: MemoryLayoutDesc | None) -> list[KindStore]:
        """The stores that may hold objects that a lookup asks for: those of this layout and those of serialized
        objects; all of the model, where LMCache did not say what the layout is."""
        layout = None if description is None else ObjectLayout.of_description(description)
        if self._config.is_served and description is not None:  # other servers may have made it
            self.opened_for(ObjectKind.of_description(model, description))
        return [
            store
            for kind, store in self.of_model(model)
            if layout is None or kind.layout == layout or kind.layout.is_serialized
        ]

    def of_model(self, model: str) -> list[tuple[ObjectKind, KindStore]]:
        kinds = [kind for kind in list(self._stores) if kind.model == model]
        return [(kind, store) for kind in kinds if (store := self.known(kind)) is not None]

    def close(self) -> None:
        for store in self.opened:
            try:
                store.close()
            except (HiCacheError, OSError):
                log.exception("the store %s could not be closed", store.path)

    def _open(self, kind: ObjectKind) -> KindStore | None:
        try:
            if len(self.opened) >= _MAX_STORES:
                raise HiCacheError(f"{_MAX_STORES} stores are open; do objects have a size each? choose another serde")
            return KindStore(ServerStore.open(self._config, kind.identity(self._server), [kind.page_format()]), kind)
        except (HiCacheError, OSError) as error:
            log.error("objects of %s are not stored: %s", kind, error)
            self._unusable.add(kind)
            return None
