"""The page store of one server, next to the stores of other servers in one directory.

    path/vllm-0.32-4f0c…/    one identity: server, model, dtype, layout, …, sizes of pages, encryption key
    path/sglang-0.5.23-…/    another one

Servers of different identities can use the same path: each sees only the pages of its own store. One process reads and
writes a store. Either the server starts this process, which then outlives the server until all pages are written; or an
operator starts it, and it serves the stores of one directory to all servers of the machine. If the store of its
identity is unavailable, a server continues without it and retries.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hicache.config import Auto, DiskConfig
from hicache.config.secret import key_of
from hicache.config.settings import SOCKET, FilePath, Integer, Number, Size, Text, as_mapping, from_mapping, settle
from hicache.config.stores import DURABILITY, KEY_FILE, LEVEL, MAX_STORE_BYTES, Durability
from hicache.errors import ConfigError
from hicache.storage import PageCipher, PageFormat
from hicache.storage.base import is_lasting, opening_error
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.stores import StoreRequest
from hicache.storage.records import identity_with_key
from hicache.storage.store_folder import is_store_name, store_name
from hicache.stores.tier import StoreTier, open_tier

_SERVER = re.compile(r"[a-z]+ [0-9.]+|[a-z]+ [0-9]\S* untested")
_IGNORED = {"lost+found"}
_SERVE = "start `hicache store serve lmdb:///PATH --socket SOCKET` and give each of them path=unix:SOCKET"


@dataclass(frozen=True, kw_only=True)
class ServerStoreConfig:
    """Settings of a server's disk store, and of the prefill speed that loads are compared with.

    `path`: a directory with one store for each model, dtype and layout; `budget` limits all of them together. If `path`
    is the socket of a process that serves a directory, that process's own `budget`, `durability` and `level` apply.
    """

    path: Annotated[
        str,
        FilePath(
            "directory of the stores, or unix:/path/of/socket of a process that serves one",
            may_be_empty=False,
            may_be_socket=True,
        ),
    ]
    budget: Annotated[int, Size("maximum size of the stores' files, like 100GB", 1 << 20, MAX_STORE_BYTES)] = 8 << 30
    durability: Annotated[Durability, DURABILITY] = "relaxed"
    level: Annotated[int, LEVEL] = 1
    key_file: Annotated[str, KEY_FILE] = ""
    salt: Annotated[str, Text("isolates servers that share a path: pages of another salt are never served")] = ""
    readers: Annotated[int, Integer("threads that read from the disk", 1, 256, unit="threads")] = 4
    prefill_tokens_per_s: Annotated[
        float | Auto,
        Number(
            "prefill speed, with which the time of loads is compared; 0: always load",
            unit="tokens/second",
            computed_from="prompts that are timed while serving",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        settle(self)

    @property
    def is_served(self) -> bool:
        """Whether an operator's process serves the stores."""
        return self.path.startswith(SOCKET)


def server_store_config(given: Mapping[str, Any], where: str) -> ServerStoreConfig:
    """Check the settings in `given`. A `ConfigError` names `where` they were given, the wrong setting and the known
    ones."""
    config: ServerStoreConfig = from_mapping(ServerStoreConfig, as_mapping(given, where), where)
    return config


class ServerStore:
    """The store of one identity under `config.path`. `tier`: its client. `path`: its directory, or the socket."""

    @classmethod
    def open(
        cls,
        config: ServerStoreConfig,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        *,
        queue_jobs: int = 1024,
        full_bytes: int = 1 << 30,
        reports_removed: bool = False,
    ) -> ServerStore:
        """Open the store, or create it.

        `identity`: every field that decides the meaning of a page's bytes, and "server", the name and release of the
        server, like "vllm 0.32". `queue_jobs`, `full_bytes`: see `ServiceSettings`. `reports_removed`: see
        `StoreRequest`. Raises `ConfigError` for an unusable path or key, and `StoreError` if the store refuses, for
        example because the budget is too small for these pages.
        """
        cipher = require_usable(config)
        identity = identity_with_key(identity, cipher)
        if _SERVER.fullmatch(str(identity["server"])) is None:
            raise ConfigError(f"server={identity['server']!r} is not a name and a release, like 'vllm 0.32'")
        disk = DiskConfig(
            path=config.path,
            budget_bytes=config.budget,
            durability=config.durability,
            level=config.level,
            key_file=config.key_file,
        )
        request = StoreRequest(
            disk.url,
            identity,
            formats,
            key_of(disk),
            reports_removed=reports_removed,
            settings=ServiceSettings(readers=config.readers, queue_jobs=queue_jobs, full_bytes=full_bytes),
        )
        name = "" if config.is_served else store_name(identity, [format.page_bytes for format in formats])
        return cls(os.path.join(config.path, name), open_tier(request), config.salt)

    def __init__(self, path: str, tier: StoreTier, salt: str) -> None:
        self.path = path
        self.tier = tier
        self._salt = hashlib.sha256(b"hicache salt\0" + salt.encode()).digest()

    def keys(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the store's keys of pages with these names. Keys of different salts never coincide."""
        return [hashlib.sha256(self._salt + name).digest() for name in names]


def require_usable(config: ServerStoreConfig) -> PageCipher | None:
    """Return the cipher of `config`; None: no encryption. Raises `ConfigError` for an unreadable key, and unless
    `config.path` is a socket or a directory that contains only stores, or can be created."""
    key = key_of(DiskConfig(path=config.path, key_file=config.key_file))
    if not config.is_served:
        _require_directory(Path(config.path))
    return PageCipher(key) if key else None


def require_shared(config: ServerStoreConfig) -> None:
    """Raise `ConfigError` if other processes cannot read the pages that one process stores."""
    if not config.is_served:
        raise ConfigError(f"path={config.path} is read by one process alone, and several hold the same pages: {_SERVE}")


def _require_directory(root: Path) -> None:
    remedy = "set path to a new or empty directory"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        others = [name for name in os.listdir(root) if not is_store_name(name) and name not in _IGNORED]
    except OSError as error:
        if is_lasting(opening_error("", error)):
            raise ConfigError(f"path={root} cannot be used: {error.strerror}; {remedy}") from error
        return  # a temporary error: the store reports it and retries
    if others:
        raise ConfigError(f"path={root} holds files of something else ({', '.join(sorted(others)[:3])}); {remedy}")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"path={root} cannot be written; change its permissions, or {remedy}")
