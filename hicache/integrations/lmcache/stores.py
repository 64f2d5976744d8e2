"""The stores of one LMCache server: one for each model, layout and size of its objects, opened when it is first needed.

LMCache says what objects look like with the first of them, so no store can be opened before. Those that an earlier
process left under the path are known from the start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hicache.disk.health import LIMITS, Breaker
from hicache.errors import HiCacheError
from hicache.integrations.lmcache.layouts import ObjectKind, ObjectLayout
from hicache.integrations.server_store import ServerStore, ServerStoreConfig, require_usable
from hicache.storage import PageBuffer, StoreError, StoreStats, describe, store_folders

log = logging.getLogger(__name__)

_MAX_STORES = 64  # a serializer whose every output has a size of its own would open stores without end


class KindStore:
    """The store of one kind of objects, left alone for a while after it failed. Never raises; any thread reads, one
    thread writes and deletes."""

    def __init__(self, opened: ServerStore) -> None:
        self._opened, self._store = opened, opened.store
        self._reads = Breaker("reads", LIMITS, time.monotonic)
        self._writes = Breaker("writes", LIMITS, time.monotonic)

    @property
    def path(self) -> Path:
        return self._opened.path

    @property
    def can_write(self) -> bool:
        return self._opened.can_write

    @property
    def is_healthy(self) -> bool:
        return not (self._reads.state or self._writes.state)

    def stats(self) -> StoreStats:
        return self._store.stats()

    def contains(self, names: Sequence[bytes]) -> list[bool]:
        """What is present counts as used: it is about to be loaded, and is evicted last."""
        if self._reads.refuses():
            return [False] * len(names)
        keys = self._opened.keys(names)
        held = self._ask(lambda: self._store.contains(keys), len(keys))
        self._store.touch([key for key, present in zip(keys, held, strict=True) if present])
        return held

    def read(self, names: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        """Which buffers hold verified bytes now."""
        missing = [False] * len(names)
        token = self._reads.admit()
        if token is None:
            return missing
        errors_before = self._store.thread_read_errors()
        found = self._ask(lambda: self._store.get_into(self._opened.keys(names), buffers), len(names))
        if self._store.thread_read_errors() > errors_before:
            self._reads.failed(token, "the store cannot be read")
        else:
            self._reads.succeeded(token)
        return found

    def write(self, names: Sequence[bytes], objects: Sequence[PageBuffer], lag: float) -> list[bool]:
        """Which objects are in the store now."""
        token = self._writes.admit() if self.can_write else None
        if token is None or (token.is_probe and not self._reopen()):
            if token is not None:
                self._writes.failed(token, "the store still takes no writes")
            return [False] * len(names)
        items = list(zip(self._opened.keys(names), objects, strict=True))
        errors_before = self._store.stats().write_errors
        stored = self._ask(lambda: self._store.put(items, lag=lag), len(items))
        stats = self._store.stats()
        if all(stored) or not (stats.read_only or stats.write_errors > errors_before):  # a full store does not fail
            self._writes.succeeded(token)
        elif stats.read_only:
            self._writes.failed(token, "the store is read-only; free space on its disk", at_once=True)
        else:
            self._writes.failed(token, "the store did not take objects")
        return stored

    def delete(self, names: Sequence[bytes]) -> list[bool]:
        """Which objects were there."""
        keys = self._opened.keys(names)
        held = self._ask(lambda: self._store.contains(keys), len(keys))
        present = [key for key, there in zip(keys, held, strict=True) if there]
        return held if present and self._ask(lambda: [self._store.delete(present) > 0], 1)[0] else [False] * len(keys)

    def close(self) -> None:
        self._opened.close()

    def _reopen(self) -> bool:
        return self._ask(lambda: [self._store.reopen()], 1)[0]

    def _ask(self, call: Callable[[], list[bool]], count: int) -> list[bool]:
        """The store's answer; no success where it raised."""
        try:
            return call()
        except (HiCacheError, OSError) as error:
            log.warning("the store %s: %s", self.path, error)
            return [False] * count


class KindStores:
    """Any thread. `server`: name and release for the identity of new stores.

    `ConfigError` at once for a path or a key that cannot be used; a store that cannot be opened later is logged once,
    and its objects are neither stored nor found.
    """

    def __init__(self, config: ServerStoreConfig, server: str) -> None:
        cipher = require_usable(config)
        key_id = cipher.key_id if cipher else ""
        self._config, self._server = config, server
        self._opening = threading.Lock()
        # None: not opened yet, or it could not be opened (then it is in `_unusable`).
        self._stores: dict[ObjectKind, KindStore | None] = {}
        self._unusable: set[ObjectKind] = set()
        for folder in store_folders(config.path):
            try:
                found = describe(folder)
            except StoreError as error:
                log.warning("a store is left out: %s", error)
                continue
            if found.identity.get("server") == server and found.key_id == key_id:
                self._stores[ObjectKind.of_identity(found.identity)] = None

    @property
    def opened(self) -> list[KindStore]:
        return [store for store in list(self._stores.values()) if store is not None]

    def known(self, kind: ObjectKind) -> KindStore | None:
        """The store of this kind, if there is one."""
        return self.opened_for(kind) if kind in self._stores else None

    def opened_for(self, kind: ObjectKind) -> KindStore | None:
        """The store of this kind, made if there is none; None where it cannot be opened."""
        with self._opening:
            if self._stores.get(kind) is None and kind not in self._unusable:
                self._stores[kind] = self._open(kind)
            return self._stores.get(kind)

    def matching(self, model: str, layout: ObjectLayout) -> list[KindStore]:
        """The stores that may hold objects that a lookup asks for: those of this layout and those of serialized
        objects; all of the model, where LMCache did not say what the layout is."""
        return [
            store
            for kind, store in self.of_model(model)
            if not layout.dtype or kind.layout == layout or kind.layout.is_serialized
        ]

    def of_model(self, model: str) -> list[tuple[ObjectKind, KindStore]]:
        kinds = [kind for kind in list(self._stores) if kind.model == model]
        return [(kind, store) for kind in kinds if (store := self.known(kind)) is not None]

    def close(self) -> None:
        for store in self.opened:
            store.close()

    def _open(self, kind: ObjectKind) -> KindStore | None:
        try:
            if len(self.opened) >= _MAX_STORES:
                raise HiCacheError(f"{_MAX_STORES} stores are open; do objects have a size each? choose another serde")
            return KindStore(ServerStore.open(self._config, kind.identity(self._server), [kind.page_format()]))
        except (HiCacheError, OSError) as error:
            log.error("objects of %s are not stored: %s", kind, error)
            self._unusable.add(kind)
            return None
