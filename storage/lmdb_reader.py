"""Reading a store that another process may be writing: its index in memory, or the sealed one that it left."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from hicache.storage.access_log import AccessLog
from hicache.storage.base import PageBuffer, StoreError, StoreStats
from hicache.storage.check import StoredPages
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.counters import Counters
from hicache.storage.index import Index, io_errors
from hicache.storage.live_index import copy_sealed, live_folder, live_target
from hicache.storage.lookup import Lookup
from hicache.storage.read_write_lock import ReadWriteLock
from hicache.storage.records import IdentityRecord, Settings, identity_with_key, identity_without_key
from hicache.storage.store_files import OpenPages, Sizes, map_bytes, open_slot_files, read_records

log = logging.getLogger("hicache.storage")

_MAX_READERS, _ATTEMPTS = 126, 20


class ReaderFiles:
    """The open files of a store that is read; any thread. Follows the writer when the index is elsewhere.

    Raises `StoreError` and its subclasses when it cannot be opened, or is read after `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = ReadWriteLock(_MAX_READERS)
        self._following = threading.Lock()
        self._open()

    @contextlib.contextmanager
    def reading(self) -> Iterator[OpenPages]:
        """What to read from, as long as the block lasts. OSError when the store cannot be followed."""
        if live_target(self.path) != self._target:
            self._follow()
        with self._lock.shared():
            yield self._pages

    def sizes(self) -> Sizes:
        """Of what is committed now; all 0 if it cannot be read."""
        try:
            with self.reading() as pages:
                return pages.sizes()
        except io_errors as error:
            log.warning("cannot read the store %s: %s", self.path, error)
            return Sizes()

    def close(self) -> None:
        with self._lock.exclusive(close=True):
            self._held.close()

    def _is_target(self, target: str) -> bool:
        return live_target(self.path) == target

    def _follow(self) -> None:
        with self._following, self._lock.exclusive():
            if self._lock.closed or live_target(self.path) == self._target:
                return
            before, held = self.identity, self._held
            try:
                self._open()
                self.identity.require(self.path, before)
            except StoreError as error:
                raise OSError(errno.EIO, str(error)) from error
            finally:
                if self._held is not held:
                    held.close()

    def _open(self) -> None:
        """Open what is there now. A writer may come or go meanwhile."""
        for attempt in range(_ATTEMPTS):
            with contextlib.ExitStack() as held:
                try:
                    target = live_target(self.path)
                    identity, settings = read_records(self.path)
                    files = open_slot_files(self.path, identity, held, writable=False)
                    index = _open_index(self.path, settings, held)
                except io_errors as error:
                    reason: Exception = StoreError(
                        f"cannot open the store {self.path} for reading: {error}; no other store object for it may be "
                        "open in this process"
                    )
                except StoreError as error:
                    reason = error
                else:
                    if live_target(self.path) == target:
                        self._target, self.identity, self.settings = target, identity, settings
                        self._pages = OpenPages(index, files, partial(self._is_target, target))
                        self._held = held.pop_all()
                        return
                    continue
            if live_target(self.path) == target or attempt == _ATTEMPTS - 1:
                raise reason
        raise StoreError(f"the store {self.path} is opened and closed all the time; try again later")


class LmdbPageReader:
    """A store as other processes may read it while one writes: `contains`, `get_into`, `stats`; any thread.

    Sees what was committed and holds up no writer. Reads do not count as uses. `identity` None: that of the store.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        identity: Mapping[str, str | int] | None = None,
        cipher: PageCipher | None = None,
    ) -> None:
        self._counters = Counters()
        self._files = ReaderFiles(Path(path))
        stored, settings = self._files.identity, self._files.settings
        try:
            named = identity or identity_without_key(stored.identity)
            stored.require(self._files.path, IdentityRecord(identity_with_key(named, cipher), stored.page_sizes))
            self._codecs = PageCodecs(settings.formats, stored.namespace, settings.level, cipher)
        except BaseException:
            self._files.close()
            raise
        self._lookup = Lookup(self._files.reading, self._codecs, _DiscardedLog(), self._counters, str(path))

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes that pages may have, in bytes, ascending."""
        return self._files.identity.page_sizes

    @property
    def stored(self) -> StoredPages:
        """The pages as they are stored, for maintenance.py."""
        return StoredPages(self._files.reading, self._lookup.read_value, self._codecs.verify_stored)

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        return self._lookup.contains(keys)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        return self._lookup.get_into(keys, buffers, deadline_s)

    def stats(self) -> StoreStats:
        return self._lookup.stats(self._files.sizes(), self._files.settings.budget_bytes, read_only=True)

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def close(self) -> None:
        self._files.close()


class _DiscardedLog(AccessLog):
    """The access log of a reader: it cannot tell the writer, and a bad page may be rewritten."""

    def add_used(self, keys: Iterable[bytes]) -> None:
        del keys

    def quarantine(self, keys: Iterable[bytes]) -> None:
        del keys


def _open_index(path: Path, settings: Settings, held: contextlib.ExitStack) -> Index:
    """The index of the store's writer, or a copy in memory of the sealed one. What LMDB raises passes on."""
    folder, num_bytes = live_folder(path), map_bytes(settings.budget_bytes)
    if folder is not None:
        return held.enter_context(contextlib.closing(Index(folder, num_bytes, writable=False)))
    copy = os.memfd_create("hicache-index")
    held.callback(os.close, copy)
    name = Path(f"/proc/self/fd/{copy}")
    if not copy_sealed(path, name):
        raise StoreError(
            f"the store {path} has no sealed index: its writer is not visible here, or ended without closing it; open "
            "it for writing once, or run `hicache store verify --repair`"
        )
    return held.enter_context(contextlib.closing(Index(name, num_bytes, writable=False, shared=False)))
