"""Copies of stores, and stores with another encryption key. These functions need no engine.

A copy has the slots of a store, but not its index. A store whose process was killed has no index either: opening such a
store rebuilds the index. So a store can be copied while a process has it open. Slots that this process wrote during the
copy fail verification, and are dropped from the copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import PageCipher
from hicache.storage.directory import PRIVATE_FOLDER_MODE, STORE_FILE, open_private, slots_files
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.maintenance import VerifyReport, list_pages, open_existing, verify
from hicache.storage.records import KEY_ID_FIELD, identity_with_key
from hicache.storage.store_files import read_record
from hicache.storage.store_folder import name_of, remove_store

_BATCH_BYTES, _CHUNK_BYTES = 64 << 20, 8 << 20
Step = Callable[[int, int], None]


def copy_store(store: Path, target: Path, step: Step) -> VerifyReport:
    """Copy a store to the directory `target`/NAME, and verify the copy. A process may have the store open. An engine
    with the disk path `target` finds the copy. Pages that fail verification are deleted from the copy and listed in the
    report. `step` is called with the number of bytes copied so far and the number of all bytes. Raises StoreError if
    the directory exists, and OSError."""
    record = read_record(store)
    copy = target / name_of(record)
    if copy.exists():
        raise StoreError(f"{copy} exists; remove it, or choose another directory for the copy")
    copy.mkdir(parents=True, mode=PRIVATE_FOLDER_MODE)
    try:
        files = slots_files(store)
        total_bytes, num_bytes = sum(file.stat().st_size for file in files), 0
        for file in files:
            num_bytes += _copy_data(file, copy / file.name)
            step(min(num_bytes, total_bytes), total_bytes)
        with open(copy / STORE_FILE, "wb", opener=open_private) as written:  # written last: it makes the copy a store
            written.write(record.pack())
        with contextlib.closing(open_existing(copy)) as opened:
            return verify(opened, repair=True)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise


def _copy_data(source: Path, target: Path) -> int:
    """Copy a file without its holes; return its length."""
    with open(source, "rb") as read, open(target, "wb", opener=open_private) as written:
        length = os.fstat(read.fileno()).st_size
        os.ftruncate(written.fileno(), length)
        begin = 0
        while begin < length:
            try:
                begin = os.lseek(read.fileno(), begin, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # the file has no data after `begin`
                    raise
                break
            end = os.lseek(read.fileno(), begin, os.SEEK_HOLE)
            while begin < end:
                data = os.pread(read.fileno(), min(_CHUNK_BYTES, end - begin), begin)
                if not data:  # the store has truncated the file
                    return length
                begin += os.pwrite(written.fileno(), data, begin)
    return length


def rekey_store(path: Path, old: PageCipher | None, new: PageCipher, step: Step) -> tuple[Path, int, int]:
    """Encrypt every page of a store with another encryption key; no process may have the store open. `step` is called
    with the number of pages copied so far and the number of all pages. Returns the directory of the store, the number
    of its pages, and the number of pages that could not be read and were left out.

    The pages are written to a second store in the same folder, which then replaces the first store. The second store
    needs free space of the size of the first store. If the process is killed, the pages of the first store are
    unchanged, and at most one directory NAME.new or NAME.old is left.
    """
    record = read_record(path)
    if record.key_id == new.key_id:
        raise StoreError(f"the store {path} has this key already; give another one")
    identity = {name: value for name, value in record.identity.items() if name != KEY_ID_FIELD}
    made, before = path.with_name(f"{path.name}.new"), path.with_name(f"{path.name}.old")
    if before.exists():
        raise StoreError(f"{before} was left by an interrupted rekey; remove it")
    to = path
    if path.name == name_of(record):
        to = path.with_name(name_of(replace(record, identity=identity_with_key(identity, new))))
    if to != path and to.exists():
        raise StoreError(f"{to} has pages with the new key already; remove one of the two stores")
    shutil.rmtree(made, ignore_errors=True)
    settings = {**vars(record), "identity": identity}
    with (
        contextlib.closing(open_existing(path, cipher=old)) as source,
        contextlib.closing(LmdbPageStore(made, cipher=new, **settings)) as target,
    ):
        num_lost = _copy_pages(source, target, step)
        target.note, num_pages = source.note, target.stats().entries
    path.rename(before)
    made.rename(to)
    remove_store(before)
    return to, num_pages, num_lost


def _copy_pages(source: LmdbPageStore, target: LmdbPageStore, step: Step) -> int:
    """Copy all pages in their use order. Return the number of pages that could not be read. Raises StoreError if a page
    cannot be written."""
    entries, num_lost, begin = list(list_pages(source)), 0, 0
    while begin < len(entries):
        end, num_bytes = begin, 0
        while end < len(entries) and (end == begin or num_bytes + entries[end].page_bytes <= _BATCH_BYTES):
            num_bytes += entries[end].page_bytes
            end += 1
        batch = entries[begin:end][::-1]  # a store takes the first page of a call for the most recently used one
        pages = [np.empty(entry.page_bytes, np.uint8) for entry in batch]
        keys = [entry.key for entry in batch]
        found = source.get_into(keys, pages)
        _put(target, [(key, page) for key, page, is_found in zip(keys, pages, found, strict=True) if is_found])
        num_lost += found.count(False)
        step(begin := end, len(entries))
    return num_lost


def _put(target: LmdbPageStore, items: Sequence[tuple[bytes, PageBuffer]]) -> None:
    if not all(target.put(items)):
        raise StoreError("the new store cannot be written; free disk space and try again")
