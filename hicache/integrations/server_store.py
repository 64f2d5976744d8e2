"""The page store of one server, in a directory that may have stores of other servers too.

    path/vllm-4f0c…/      one identity: server, weights, dtype, layout, …, sizes of pages, encryption key
    path/sglang-72b1…/    another identity

Servers of different identities can use the same path, because each server reads only the pages of its own store. One
process reads and writes a store. If the server starts this process, the process ends when the server has ended and all
pages are written. If an operator starts it, the process serves the stores of one directory to all servers of the
machine. While a store is unavailable, its server continues without the store and retries. The same process reads and
writes the remote store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from hicache.config import Auto, DiskConfig
from hicache.config.secret import key_of
from hicache.config.settings import (
    SOCKET,
    Choice,
    FilePath,
    Integer,
    Number,
    Size,
    Text,
    Url,
    as_mapping,
    from_mapping,
    settle,
    short_repr,
)
from hicache.config.stores import DURABILITY, KEY_FILE, LEVEL, MAX_STORE_BYTES, Durability, SharedStoreConfig
from hicache.errors import ConfigError
from hicache.storage import PageCipher, PageFormat
from hicache.storage.base import StoreError, is_lasting, opening_error
from hicache.storage.process.settings import RemoteSettings, ServiceSettings
from hicache.storage.process.stores import NO_REMOTE, StoreRequest
from hicache.storage.records import identity_with_key
from hicache.storage.store_folder import is_store_name, store_name
from hicache.storage.urls import disk_of, opener_of
from hicache.stores.disk_and_remote import Stores
from hicache.stores.tier import StoreTier, open_remote, open_tier
from hicache.tiers import DISK, REMOTE, Store

Devices: TypeAlias = Literal["same", "any"]

_SERVER = re.compile(r"[a-z]+( [0-9]\S* untested)?")
_URL = Url("")
_IGNORED = {"lost+found"}
_CLOSE_S = 2.0
_REMOTE = "mooncake://host:50051, s3://bucket/prefix or dir:///mnt/shared/kv"
_STORES = 'a directory of a local disk, like /var/lib/hicache, or a remote store, like {"url": "dir:///mnt/shared/kv"}'
_SERVE = "start `hicache store serve lmdb:///PATH --socket SOCKET` and give each of them path=unix:SOCKET"


@dataclass(frozen=True, kw_only=True)
class ServerStoreConfig:
    """Settings of the disk store and the remote store of an LLM server, and the prefill speed with which loads are
    compared.

    `path`: a directory with one store for each model, dtype and layout; `budget` limits all of them together. If `path`
    is the socket of an operator's store process, the `budget`, `durability` and `level` of that process apply.
    `remote`: the store that servers of several machines share, as in docs/remote.md.
    """

    path: Annotated[
        str,
        FilePath(
            "directory of the stores, or unix:/path/of/socket of `hicache store serve`; required without `remote`",
            may_be_socket=True,
        ),
    ] = ""
    budget: Annotated[
        int, Size("maximum size of the stores' files, like 100GB", 1 << 20, MAX_STORE_BYTES, is_tier=True)
    ] = 8 << 30
    durability: Annotated[Durability, DURABILITY] = "relaxed"
    level: Annotated[int, LEVEL] = 1
    key_file: Annotated[str, KEY_FILE] = ""
    salt: Annotated[str, Text("text that isolates servers: servers with different salts share no pages")] = ""
    devices: Annotated[
        Devices,
        Choice(
            "same: only servers on the same kind of GPU share pages; any: servers on all kinds of GPU share pages, "
            "although the kinds round differently",
            get_args(Devices),
        ),
    ] = "same"
    readers: Annotated[int, Integer("threads that read from the disk", 1, 256, unit="threads")] = 4
    prefill_tokens_per_s: Annotated[
        float | Auto,
        Number(
            "prefill speed in tokens per second, with which loading is compared with computing; 0: always load",
            unit="tokens/second",
            computed_from="the measured time of prompts while serving",
        ),
    ] = "auto"
    remote: SharedStoreConfig | None = None

    def __post_init__(self) -> None:
        settle(self)
        if not self.path and self.remote is None:
            raise ConfigError(f"missing setting path; give {_STORES}")

    @property
    def is_served(self) -> bool:
        """Return whether an operator's process serves the stores."""
        return self.path.startswith(SOCKET)

    def stores(self, *, is_costly: bool) -> bool:
        """Return whether the server writes the pages of a computed prompt. Without a disk, pages are written to the
        remote store directly after they are computed, when no later request can have used them. So with the backup
        "used", only pages of costly prompts are written."""
        backup = "all" if self.path or self.remote is None else self.remote.backup
        return backup == "all" or (backup == "used" and is_costly)


def server_store_config(given: Mapping[str, Any], where: str) -> ServerStoreConfig:
    """Check the settings in `given`. Raises `ConfigError` with the wrong setting, the known settings, and `where`, the
    source of the settings."""
    settings = dict(as_mapping(given, where))
    if settings.get("remote") is not None:
        settings["remote"] = remote_config(settings["remote"], where)
    if not settings.get("path") and settings.get("remote") is None:
        raise ConfigError(f"{where}: missing setting path; give {_STORES}")
    config: ServerStoreConfig = from_mapping(ServerStoreConfig, settings, where)
    return config


def remote_config(given: object, where: str) -> SharedStoreConfig:
    """Check the settings of a remote store. Raises `ConfigError` with the wrong setting, its value and a value that
    works."""
    if isinstance(given, str):
        raise ConfigError(f'{where}: remote={short_repr(given)} is not a mapping; give {{"url": {json.dumps(given)}}}')
    config: SharedStoreConfig = from_mapping(
        SharedStoreConfig, as_mapping(given, f"{where}: remote"), f"{where}: remote"
    )
    try:
        opener_of(config.url)
        is_disk = disk_of(config.url) is not None
    except StoreError as error:
        raise ConfigError(f"{where}: remote url={_shown(config.url)}: {error}; give {_REMOTE}") from error
    if is_disk:
        raise ConfigError(
            f"{where}: remote url={_shown(config.url)} is a disk of this machine; set path to it, and give as remote "
            f"{_REMOTE}"
        )
    return config


class ServerStore:
    """The stores of one identity: the disk store under `config.path`, and the remote store.

    `stores`: the clients of both stores. `path`: the directory or the socket of the disk store; without a disk store,
    the URL of the remote store.
    """

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
        """Open the stores. Create the stores that do not exist.

        `identity`: every field that decides the meaning of a page's bytes; "server", the name of the server, like
        "vllm"; "weights", the digest of the model's weights, "" if they cannot be read; and `RECORDED_FIELDS`.
        `queue_jobs`, `full_bytes`: see `ServiceSettings`. `reports_removed`: see `StoreRequest`.

        Raises `ConfigError` if the path or the key is unusable, and if a remote store has neither a digest of the
        weights nor a salt. Raises `StoreError` if a store refuses a setting, for example a budget that is too small.
        """
        cipher = require_usable(config)
        identity = identity_with_key(identity, cipher)
        if _SERVER.fullmatch(str(identity["server"])) is None:
            raise ConfigError(f"server={identity['server']!r} is not the name of a server, like 'vllm'")
        if config.remote is not None and not identity.get("weights") and not config.salt:
            raise ConfigError(
                "salt is empty, and the files of the model are not on this machine: with a remote store, pages of "
                "other weights could be served; set salt to a name of these weights, like 'llama-3.1-8b at 0e9e39f'"
            )
        key = key_of(DiskConfig(path=config.path or "/", key_file=config.key_file))
        remote = NO_REMOTE if config.remote is None else RemoteSettings(config.remote.url, config.remote.backup)
        sizes: dict[str, Any] = {"queue_jobs": queue_jobs, "full_bytes": full_bytes}

        def of_remote(url: str, **about: Any) -> StoreRequest:
            settings = ServiceSettings.of_remote(remote.url, **sizes)
            return StoreRequest(url, identity, formats, key, settings=settings, **about)

        if not config.path:
            return cls(remote.url.partition("?")[0], {REMOTE: open_tier(of_remote(remote.url))}, config.salt)
        disk = DiskConfig(
            path=config.path,
            budget_bytes=config.budget,
            durability=config.durability,
            level=config.level,
            key_file=config.key_file,
        )
        settings = ServiceSettings(readers=config.readers, **sizes)
        request = StoreRequest(disk.url, identity, formats, key, reports_removed, settings, remote)
        name = "" if config.is_served else store_name(identity, [format.page_bytes for format in formats])
        tiers = {DISK: open_tier(request)}
        if config.remote is not None or tiers[DISK].has_remote:
            try:
                clock = tiers[DISK].clock
                tiers[REMOTE] = open_remote(tiers[DISK], of_remote(disk.url, remote=remote), clock=clock)
            except BaseException:
                tiers[DISK].abandon(_CLOSE_S)
                raise
        return cls(os.path.join(config.path, name), tiers, config.salt)

    def __init__(self, path: str, tiers: Mapping[Store, StoreTier], salt: str) -> None:
        self.path = path
        self.stores = Stores(tiers)
        self._salt = hashlib.sha256(b"hicache salt\0" + salt.encode()).digest()

    def keys(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the store's keys of pages with these names. Keys of different salts never coincide."""
        return [hashlib.sha256(self._salt + name).digest() for name in names]


def server_fields(name: str, release: str) -> dict[str, str | int]:
    """Return the fields of an identity that name the server. Tested releases share pages, because tests compare the
    tokens that these releases generate. A release that was not tested shares its pages with no other release."""
    return {"server": f"{name} {release}"} if release.endswith(" untested") else {"server": name, "release": release}


def require_usable(config: ServerStoreConfig) -> PageCipher | None:
    """Return the cipher of `config`; None without encryption. Raises `ConfigError` for an unreadable key. `config.path`
    must be a socket, a directory that contains only stores, or a directory that can be created; otherwise raises
    `ConfigError` too."""
    key = key_of(DiskConfig(path=config.path or "/", key_file=config.key_file))
    if config.path and not config.is_served:
        _require_directory(Path(config.path))
    return PageCipher(key) if key else None


def require_shared(config: ServerStoreConfig) -> None:
    """Raise `ConfigError` if other processes cannot read the pages that one process stores."""
    if config.path and not config.is_served:
        raise ConfigError(f"path={config.path} is read by one process only, and several need its pages: {_SERVE}")


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
        raise ConfigError(f"path={root} has files that are no stores ({', '.join(sorted(others)[:3])}); {remedy}")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"path={root} cannot be written; change its permissions, or {remedy}")


def _shown(url: str) -> str:
    """Return the URL for a message, without a password."""
    return short_repr(_URL.shown(url))
