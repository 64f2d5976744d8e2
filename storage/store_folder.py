"""A folder of stores: one subfolder for each identity, and one budget of B bytes for all of them.

    [0, B)  closed stores | stores that other processes have open | this store

An open store may use all bytes of B that no other store uses. If an open store needs more bytes for a page, closed
stores are removed, the least recently used first. If no closed store is left, the open stores share B evenly. A store
with more than its share evicts pages at its next write or its next check of the budget.

This module owns the names of the subfolders, the time of a store's last use, and the removal of stores.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hicache.storage.base import StoreError
from hicache.storage.directory import INDEX_FILE, LOCK_FILE, NEW_SUFFIX, STORE_FILE, WriterLock, slots_file, slots_files
from hicache.storage.records import FORMAT, KEY_ID_FIELD, StoreRecord, decisive
from hicache.storage.slot_file import slot_lengths

log = logging.getLogger("hicache.storage")

_BLOCK_BYTES = 512  # the unit of st_blocks
_MIN_INDEX_BYTES, _INDEX_BYTES_A_SLOT = 32 << 10, 256
_NAME = re.compile(r"[a-z0-9.-]+-[0-9a-f]{16}")


def store_name(identity: Mapping[str, str | int], page_sizes: Sequence[int]) -> str:
    """Return the name of the subfolder for an identity: the name of the server that writes the pages, and a digest of
    the identity. Stores with different encryption keys have different names if the identity names the key."""
    named = json.dumps([FORMAT, decisive(identity), sorted(page_sizes)], sort_keys=True)
    writer = re.sub(r"[^a-z0-9.]+", "-", str(identity.get("server", "hicache")).lower()[:64])
    return f"{writer.strip('-.') or 'store'}-{hashlib.sha256(named.encode()).hexdigest()[:16]}"


def is_store_name(name: str) -> bool:
    """Return whether `name` has the form of the names that `store_name` returns. Users created stores with other names;
    hicache never removes such a store."""
    return _NAME.fullmatch(name) is not None


def name_of(record: StoreRecord) -> str:
    """Return the name of the subfolder in which the creator of a store looks for the store. If a server's plug-in
    created the store ("server" in the identity), the name depends on the encryption key. The name of a store that an
    engine created does not depend on the key."""
    identity = dict(record.identity)
    if "server" not in identity:
        identity.pop(KEY_ID_FIELD, None)
    return store_name(identity, record.page_sizes)


def store_folders(path: str | os.PathLike[str]) -> list[Path]:
    """Return the subfolders of `path` that have a store, sorted. Returns no subfolder if `path` itself has a store or
    cannot be read."""
    try:
        folders = [] if (Path(path) / STORE_FILE).exists() else sorted(Path(path).iterdir())
        return [folder for folder in folders if os.path.isfile(folder / STORE_FILE)]
    except OSError:
        return []


def store_at(path: str | os.PathLike[str]) -> Path:
    """Return the directory of the store at `path`. If `path` is a folder with a single store, return the subfolder of
    this store; otherwise return `path`."""
    folders = store_folders(path)
    return folders[0] if len(folders) == 1 else Path(path)


def last_use_s(store: Path) -> float:
    """Return the time at which a store was last opened, closed or written, in seconds since 1970; 0 if never."""
    try:
        return (store / LOCK_FILE).stat().st_mtime
    except OSError:
        return 0.0


def disk_bytes(store: Path) -> int:
    """Return the disk space of a store's files in bytes. The index of an open store is not included."""
    return sum(map(_disk_bytes_of, (store / INDEX_FILE, *slots_files(store))))


def _disk_bytes_of(file: Path) -> int:
    """Return the disk space of a file in bytes; 0 if it does not exist."""
    try:
        return file.stat().st_blocks * _BLOCK_BYTES
    except FileNotFoundError:
        return 0


def _unsealed_bytes(store: Path) -> int:
    """Return the approximate size in bytes of the index if it is not in a file, because a process has the store open or
    was killed. Returns 0 if the index is in a file."""
    if (store / INDEX_FILE).exists():
        return 0
    num_slots = sum(_disk_bytes_of(slots_file(store, *length)) // length.slot_bytes for length in slot_lengths(store))
    return _MIN_INDEX_BYTES + _INDEX_BYTES_A_SLOT * num_slots


def remove_store(store: Path) -> bool:
    """Remove a store unless a process has the store open. Returns whether the store was removed. Raises OSError. The
    record is deleted after the pages, so a kill leaves a valid store with fewer pages."""
    try:
        with contextlib.closing(WriterLock(store, wait_s=0.0)):
            left = (*store.glob(f"*{NEW_SUFFIX}"), store / STORE_FILE, store / LOCK_FILE)
            for file in (store / INDEX_FILE, *slots_files(store), *left):
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # raised if the folder has other files
                store.rmdir()
    except StoreError as error:
        log.debug("a store is not removed: %s", error)
        return False
    return True


class StoreBudget:
    """The share of one store in a budget of `num_bytes`. Only the writer thread uses this object. `min_bytes`: the
    smallest share with which a store works. `is_shared`: all stores in the folder of `store` share the budget.
    `others_bytes`: bytes of the other stores that share the budget, after the last `bytes_for`. `removed`: names of the
    stores that were removed. Raises OSError."""

    def __init__(self, store: Path, num_bytes: int, min_bytes: int, *, is_shared: bool) -> None:
        self.num_bytes = num_bytes
        self.others_bytes = 0
        self.removed = list[str]()
        self._store = store
        self._min_bytes = min_bytes
        self._is_shared = is_shared

    def bytes_for(self, needed_bytes: int) -> int:
        """Return the number of bytes that the store may use, given that it needs `needed_bytes`. If the budget is
        shared, this call removes closed stores until `needed_bytes` are available."""
        if not self._is_shared:
            return self.num_bytes
        self.note_use()
        stores = [one for one in store_folders(self._store.parent) if is_store_name(one.name)]
        others = {one: disk_bytes(one) + _unsealed_bytes(one) for one in stores if one.name != self._store.name}
        for other in sorted(others, key=last_use_s):
            if self.num_bytes - sum(others.values()) >= needed_bytes:
                break
            if remove_store(other):
                log.info("the store %s is removed: other stores in its folder need the space", other)
                self.removed.append(other.name)
                del others[other]
        self.others_bytes = sum(others.values())
        share_bytes = self.num_bytes // (1 + len(others))
        return max(self.num_bytes - self.others_bytes, share_bytes, self._min_bytes)

    def note_use(self) -> None:
        if self._is_shared:
            os.utime(self._store / LOCK_FILE)
