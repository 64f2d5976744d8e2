"""A folder of stores: one for each identity, in a subfolder of its own, and one budget for all of them.

    [0, B)  stores that are closed | stores that others have open | this one

Each store that is open keeps to what the others leave of B. Where that is too little for a page, closed stores are
removed, the one that was used least recently first. Where none is left, those that are open share B evenly: one with
more than its share makes room when it writes, or looks, next.

Owns the names of the subfolders, the time of a store's last use, and the removal of whole stores.
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
from hicache.storage.records import FORMAT, KEY_ID_FIELD, StoreRecord
from hicache.storage.slot_file import slot_lengths

log = logging.getLogger("hicache.storage")

_BLOCK_BYTES = 512  # the unit of st_blocks
_MIN_INDEX_BYTES, _INDEX_BYTES_A_SLOT = 32 << 10, 256
_NAME = re.compile(r"[a-z0-9.-]+-[0-9a-f]{16}")


def store_name(identity: Mapping[str, str | int], page_sizes: Sequence[int]) -> str:
    """The subfolder of the store of an identity: who writes it, and a digest. Those with different encryption keys are
    apart where the identity names the key."""
    named = json.dumps([FORMAT, dict(identity), sorted(page_sizes)], sort_keys=True)
    writer = re.sub(r"[^a-z0-9.]+", "-", str(identity.get("server", "hicache")).lower()[:64])
    return f"{writer.strip('-.') or 'store'}-{hashlib.sha256(named.encode()).hexdigest()[:16]}"


def is_store_name(name: str) -> bool:
    """Whether it is one of `store_name`. A store of another name is somebody's own, and not removed."""
    return _NAME.fullmatch(name) is not None


def name_of(record: StoreRecord) -> str:
    """The subfolder in which whoever has made a store looks for it: an engine names its key only when it opens it."""
    identity = dict(record.identity)
    if "server" not in identity:
        identity.pop(KEY_ID_FIELD, None)
    return store_name(identity, record.page_sizes)


def store_folders(path: str | os.PathLike[str]) -> list[Path]:
    """The directories in `path` that hold a store, by name; none where `path` holds one itself, or cannot be read."""
    try:
        folders = [] if (Path(path) / STORE_FILE).exists() else sorted(Path(path).iterdir())
        return [folder for folder in folders if os.path.isfile(folder / STORE_FILE)]
    except OSError:
        return []


def store_at(path: str | os.PathLike[str]) -> Path:
    """The directory of the store that a path means: its only one, if it is a folder of stores."""
    folders = store_folders(path)
    return folders[0] if len(folders) == 1 else Path(path)


def last_use_s(store: Path) -> float:
    """When an engine opened or closed a store, or wrote to it, in seconds since 1970; 0 if it never did."""
    try:
        return (store / LOCK_FILE).stat().st_mtime
    except OSError:
        return 0.0


def disk_bytes(store: Path) -> int:
    """Disk space of a store's files; of one that is open without its index."""
    return sum(map(_disk_bytes_of, (store / INDEX_FILE, *slots_files(store))))


def _disk_bytes_of(file: Path) -> int:
    """0 where there is none."""
    try:
        return file.stat().st_blocks * _BLOCK_BYTES
    except FileNotFoundError:
        return 0


def _unsealed_bytes(store: Path) -> int:
    """About what the index of a store will take that is open, or was killed: it is in memory."""
    if (store / INDEX_FILE).exists():
        return 0
    num_slots = sum(_disk_bytes_of(slots_file(store, *length)) // length.slot_bytes for length in slot_lengths(store))
    return _MIN_INDEX_BYTES + _INDEX_BYTES_A_SLOT * num_slots


def remove_store(store: Path) -> bool:
    """Remove a store that nobody has open; whether that is done. Raises OSError. Its record goes last: what a kill
    leaves is a store with less pages."""
    try:
        with contextlib.closing(WriterLock(store, wait_s=0.0)):
            left = (*store.glob(f"*{NEW_SUFFIX}"), store / STORE_FILE, store / LOCK_FILE)
            for file in (store / INDEX_FILE, *slots_files(store), *left):
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there is something else
                store.rmdir()
    except StoreError as error:
        log.debug("a store is not removed: %s", error)
        return False
    return True


class StoreBudget:
    """What a store may take of `num_bytes`; the writer's thread. `min_bytes`: with less, no store works. `is_shared`:
    by all stores in the folder of `store`. `removed`: the names of those that were removed. Raises OSError."""

    def __init__(self, store: Path, num_bytes: int, min_bytes: int, *, is_shared: bool) -> None:
        self.num_bytes = num_bytes
        self.removed = list[str]()
        self._store = store
        self._min_bytes = min_bytes
        self._is_shared = is_shared

    def bytes_for(self, wanted_bytes: int) -> int:
        """How much the store may have, which wants so much."""
        if not self._is_shared:
            return self.num_bytes
        self.note_use()
        stores = [one for one in store_folders(self._store.parent) if is_store_name(one.name)]
        others = {one: disk_bytes(one) + _unsealed_bytes(one) for one in stores if one.name != self._store.name}
        for other in sorted(others, key=last_use_s):
            if self.num_bytes - sum(others.values()) >= wanted_bytes:
                break
            if remove_store(other):
                log.info("the store %s is removed: others in its folder need the space", other)
                self.removed.append(other.name)
                del others[other]
        share_bytes = self.num_bytes // (1 + len(others))
        return max(self.num_bytes - sum(others.values()), share_bytes, self._min_bytes)

    def note_use(self) -> None:
        if self._is_shared:
            os.utime(self._store / LOCK_FILE)
