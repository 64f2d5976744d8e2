"""The page store of one server, beside those of other servers in one directory.

    path/vllm-0.32-4f0c…/    one identity: server, model, dtype, layout, …, sizes of pages, encryption key
    path/sglang-0.5.23-…/    another one

So servers of different identities on one path never see each other's pages, and none is refused. Where the store of its
identity cannot be used, a server goes on without it: as a reader while another process writes to it, with nothing where
its files are damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from hicache.disk import cipher_of
from hicache.errors import ConfigError
from hicache.settings import Choice, FilePath, Size, Text, Whole, as_mapping, from_mapping, settle
from hicache.storage import (
    LmdbPageReader,
    LmdbPageStore,
    PageBuffer,
    PageCipher,
    PageFormat,
    PageStore,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreStats,
)
from hicache.store_config import MAX_STORE_BYTES, DiskConfig, Durability

log = logging.getLogger(__name__)

_FOLDER = re.compile(r"[a-z]+-[0-9.]+-[0-9a-f]{16}")
_IGNORED = {"lost+found"}


@dataclass(frozen=True, kw_only=True)
class ServerStoreConfig:
    """Where a server's pages lie on disk, and how. `path` holds one store for each model, dtype and layout that
    is served with it; `budget` bounds each of them."""

    path: Annotated[str, FilePath("directory of the stores", may_be_empty=False)]
    budget: Annotated[int, Size("maximum size of a store's files, like 100GB", 1 << 20, MAX_STORE_BYTES)] = 8 << 30
    durability: Annotated[Durability, Choice("when a commit reaches the medium", get_args(Durability))] = "relaxed"
    level: Annotated[int, Whole("zstd level, 1 to 22; 0: pages stay uncompressed", maximum=22)] = 1
    key_file: Annotated[str, FilePath("file with the encryption key: 32 bytes, 64 hex digits or base64")] = ""
    salt: Annotated[str, Text("isolates those who share a path: pages of another salt are never served")] = ""
    readers: Annotated[int, Whole("threads that read from the disk", 1, 256, unit="threads")] = 4

    def __post_init__(self) -> None:
        settle(self)


def server_store_config(given: Mapping[str, Any], where: str) -> ServerStoreConfig:
    """The settings in `given`. `ConfigError` names `where` they stand, what is wrong and what is known."""
    config: ServerStoreConfig = from_mapping(ServerStoreConfig, as_mapping(given, where), where)
    return config


class ServerStore:
    """The store of one identity under `config.path`.

    `store`: give it to a `DiskTier`, or call it as its protocol says. `can_write`: False for a reader, and for a store
    with damaged files, which serves nothing.
    """

    @classmethod
    def open(
        cls,
        config: ServerStoreConfig,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        *,
        writes: bool = True,
    ) -> ServerStore:
        """Open or create it. `identity`: everything that decides what the bytes of a page mean, and "server", the name
        and release of the server, like "vllm 0.32". `writes` False: read what another process stores, as soon as it
        does.

        `ConfigError` for a path or a key that cannot be used, `StoreError` for what the store refuses (a budget that is
        too small for these pages).
        """
        cipher = require_usable(config)
        sizes = sorted(format.page_bytes for format in formats)
        named = {**identity, "key": cipher.key_id if cipher else "", "sizes": sizes}
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
        folder = Path(config.path) / f"{str(identity['server']).replace(' ', '-')}-{digest[:16]}"
        if _FOLDER.fullmatch(folder.name) is None:
            raise ConfigError(f"server={identity['server']!r} is not a name and a release, like 'vllm 0.32'")
        store: PageStore
        if writes:
            store = _opened(folder, config, identity, formats, cipher)
        else:
            store = ReadOnlyStore(partial(LmdbPageReader, folder, identity=identity, cipher=cipher))
        return cls(folder, store, config.salt, can_write=not isinstance(store, ReadOnlyStore))

    def __init__(self, path: Path, store: PageStore, salt: str, *, can_write: bool) -> None:
        self.path, self.store, self.can_write = path, store, can_write
        self._salt = hashlib.sha256(b"hicache salt\0" + salt.encode()).digest()

    def keys(self, names: Sequence[bytes]) -> list[bytes]:
        """The store's keys for pages that the server names so. Those of two salts never meet."""
        return [hashlib.sha256(self._salt + name).digest() for name in names]

    def close(self) -> None:
        self.store.close()


def require_usable(config: ServerStoreConfig) -> PageCipher | None:
    """The cipher of `config`. `ConfigError` for a key that cannot be read, and unless `config.path` is, or can become,
    a directory of stores alone."""
    root = Path(config.path)
    remedy = "set path to a new or empty directory"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        others = [name for name in os.listdir(root) if not _FOLDER.fullmatch(name) and name not in _IGNORED]
    except OSError as error:
        raise ConfigError(f"path={root} cannot be used: {error.strerror}; {remedy}") from error
    if others:
        raise ConfigError(f"path={root} holds files of something else ({', '.join(sorted(others)[:3])}); {remedy}")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"path={root} cannot be written; change its permissions, or {remedy}")
    return cipher_of(DiskConfig(path=config.path, key_file=config.key_file))


def _opened(
    folder: Path,
    config: ServerStoreConfig,
    identity: Mapping[str, str | int],
    formats: Sequence[PageFormat],
    cipher: PageCipher | None,
) -> PageStore:
    try:
        return LmdbPageStore(
            folder,
            identity=identity,
            formats=formats,
            budget_bytes=config.budget,
            durability=config.durability,
            level=config.level,
            cipher=cipher,
        )
    except StoreLocked as locked:
        log.warning("pages are read and not stored: %s; give each process a path of its own to store", locked)
    except StoreCorrupt as error:
        log.error("serving without the store: %s", error)
        return ReadOnlyStore(None)
    return ReadOnlyStore(partial(LmdbPageReader, folder, identity=identity, cipher=cipher))


class ReadOnlyStore:
    """A `PageStore` that takes nothing: what a reader sees of another process's store, or nothing at all.

    `open_reader`: None for nothing. As long as it raises `StoreError`, since the store may not exist yet, it is called
    again, at most once in `RETRY_S` seconds.
    """

    RETRY_S = 1.0

    def __init__(self, open_reader: Callable[[], LmdbPageReader] | None) -> None:
        self._open_reader = open_reader
        self._reader: LmdbPageReader | None = None
        self._opening = threading.Lock()
        self._retry_at_s = -math.inf

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return () if self._reader is None else self._reader.page_sizes

    def register_memory(self, memory: PageBuffer) -> None:
        """Files are read to any memory."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        reader = self._opened()
        return [False] * len(keys) if reader is None else reader.contains(keys, deadline_s=deadline_s)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        reader = self._opened()
        return [False] * len(keys) if reader is None else reader.get_into(keys, buffers, deadline_s=deadline_s)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The writer's order of eviction is not this process's to change."""

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        return [False] * len(items)

    def reopen(self) -> bool:
        return False

    def delete(self, keys: Sequence[bytes]) -> int:
        return 0

    def stats(self) -> StoreStats:
        return StoreStats(read_only=True) if self._reader is None else self._reader.stats()

    def thread_read_errors(self) -> int:
        return 0 if self._reader is None else self._reader.thread_read_errors()

    def sync(self) -> None:
        """Nothing is written here."""

    def close(self) -> None:
        with self._opening:
            self._open_reader = None
            if self._reader is not None:
                self._reader.close()

    def _opened(self) -> LmdbPageReader | None:
        if self._reader is not None or self._open_reader is None:
            return self._reader
        with self._opening:
            if self._reader is None and self._open_reader is not None and time.monotonic() >= self._retry_at_s:
                try:
                    self._reader = self._open_reader()
                except StoreError as error:
                    log.debug("nothing is read yet: %s", error)
                    self._retry_at_s = time.monotonic() + self.RETRY_S
            return self._reader
