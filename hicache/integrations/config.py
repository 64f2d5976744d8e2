"""The settings of a store under a server, as a user writes them in the server's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from hicache.settings import Choice, FilePath, Size, Text, Whole, as_mapping, from_mapping, settle
from hicache.store_config import MAX_STORE_BYTES, Durability


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
