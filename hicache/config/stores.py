"""Settings of the disk tier and the remote tier."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal, get_args
from urllib.parse import quote

from hicache.config.settings import (
    SOCKET,
    Choice,
    FilePath,
    Integer,
    Number,
    Size,
    Url,
    settle,
    short_repr,
)
from hicache.errors import ConfigError

Durability = Literal["relaxed", "commit"]
Backup = Literal["all", "none"]
Copies = Literal["used", "all", "none"]
Transport = Literal["process", "inline"]
Auto = Literal["auto"]

MAX_S = 1e9
# A store maps its tables into the address space of its process, which has 128 TiB.
MAX_STORE_BYTES = 1 << 46

# Settings that stores of engines and stores of servers share.
DURABILITY = Choice(
    "relaxed: a power failure may undo the last commits; commit: every commit is durable", get_args(Durability)
)
LEVEL = Integer("zstd level, 1 to 22; 0: pages stay uncompressed", maximum=22)
TRANSPORT = Choice(
    "process: the store runs in its own process; inline: the store runs in threads of the engine's process",
    get_args(Transport),
    has_flag=False,
)
KEY_FILE = FilePath(
    "file with the encryption key: 32 bytes, 64 hex digits or base64; empty: the key is in the environment variable "
    "HICACHE_DISK_KEY, or pages are not encrypted"
)


@dataclass(frozen=True, kw_only=True)
class DiskConfig:
    """The settings of the disk tier.

    `path`: a directory with one store for each model, dtype and layout; or unix:/path/of/socket of a store that
    `hicache store serve` serves to several engines with its own settings. `budget_bytes`: limit of the files of all
    stores in `path`, from the first write on.
    """

    path: Annotated[
        str,
        FilePath("directory that has one store for each model", may_be_empty=False, may_be_socket=True),
    ]
    budget_bytes: Annotated[
        int, Size("maximum size of all files under disk.path, like 100GB", 1 << 20, MAX_STORE_BYTES, is_tier=True)
    ] = 8 << 30
    write_budget: Annotated[
        int | Auto,
        Size(
            "maximum mean number of bytes written per second, like 40MB; a burst may write the budget of 30 seconds",
            1,
            computed_from="half of the measured write rate of the store",
        ),
    ] = "auto"
    durability: Annotated[Durability, DURABILITY] = "relaxed"
    level: Annotated[int, LEVEL] = 1
    key_file: Annotated[str, KEY_FILE] = ""
    transport: Annotated[Transport, TRANSPORT] = "process"

    def __post_init__(self) -> None:
        settle(self, "disk ")

    @property
    def write_bytes_per_s(self) -> float:
        """The write budget in bytes per second; 0: the budget is half of the measured rate."""
        return 0 if self.write_budget == "auto" else self.write_budget

    @property
    def url(self) -> str:
        """The URL for `hicache.storage.open_store`, or unix:/path/of/socket."""
        if self.path.startswith(SOCKET):
            return self.path
        quoted = quote(os.fsencode(os.path.abspath(self.path)))
        return f"lmdb://{quoted}?budget={self.budget_bytes}&durability={self.durability}&level={self.level}"


@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """The remote tier: a store that engines on several machines share (docs/remote.md). Pages are backed up to the disk
    and to the remote tier. A prefetch reads from the remote tier the pages that the disk does not have."""

    url: Annotated[str, Url("URL of the remote store, like mooncake://host:50051 or s3://bucket/prefix")]
    backup: Annotated[
        Backup,
        Choice(
            "all: pages are written to the remote store; none: the engine only reads the remote store, for ranks whose "
            "KV another rank writes",
            get_args(Backup),
            has_flag=False,
        ),
    ] = "all"
    reader_threads: Annotated[
        int,
        Integer(
            "threads that read from the remote store; 0: auto",
            0,
            256,
            unit="threads",
            computed_from="the url",
            auto=0,
            has_flag=False,
        ),
    ] = 0
    io_timeout_s: Annotated[
        float,
        Number(
            "maximum duration of an operation; after this time the remote store counts as stalled",
            1e-3,
            MAX_S,
            unit="seconds",
            has_flag=False,
        ),
    ] = 2.0
    key_file: Annotated[str, KEY_FILE] = ""
    transport: Annotated[Transport, TRANSPORT] = "process"

    def __post_init__(self) -> None:
        settle(self, "remote ")
        if not self.url:
            raise ConfigError("remote url is empty; give the store, like mooncake://host:50051")

    def __repr__(self) -> str:
        return f"RemoteConfig(url={short_repr(self.url.split('://')[0])}, backup={self.backup!r})"


@dataclass(frozen=True, kw_only=True)
class SharedStoreConfig:
    """The remote store below the shared store of a machine. The store process copies pages from the disk to the remote
    store, and writes pages that it reads from the remote store to the disk."""

    url: Annotated[
        str, Url("URL of the remote store, like mooncake://host:50051, s3://bucket/prefix or dir:///mnt/shared/kv")
    ]
    backup: Annotated[
        Copies,
        Choice(
            "pages that are copied to the remote store: used: pages that a request used again, and pages of prompts "
            "that take longer than a second to compute; all: every page; none: no page",
            get_args(Copies),
        ),
    ] = "used"

    def __post_init__(self) -> None:
        settle(self, "remote ")
        if not self.url:
            raise ConfigError("remote url is empty; give the store, like dir:///mnt/shared/kv")

    def __repr__(self) -> str:
        return f"SharedStoreConfig(url={short_repr(self.url.split('://')[0])}, backup={self.backup!r})"
