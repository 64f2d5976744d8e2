"""The linker's settings, `linker_extra_config` of SGLang's `--unified-cache-external-linker-config`. Imports nothing of
SGLang, so that the documentation has the declarations where no server is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hicache.config.settings import Choice, Number, Size, as_mapping, from_mapping
from hicache.eviction.policy import EVICTION_POLICIES
from hicache.integrations.server_store import ServerStoreConfig

_WHERE = "linker_extra_config"
# Its pages have keys and no tokens, by which auto would know what comes back.
_POLICIES = tuple(name for name in EVICTION_POLICIES if name != "auto")


@dataclass(frozen=True, kw_only=True)
class LinkerConfig(ServerStoreConfig):
    """The host tier in front of the store. `host_bytes` are shared among the components as the device tier is."""

    host_bytes: Annotated[int, Size("pinned CPU memory of each rank, like 64GiB", 1)]
    policy: Annotated[str, Choice("which pages leave the host first", _POLICIES)] = "lru"
    load_wait_s: Annotated[
        float, Number("how long a request may wait for pages on disk before it computes them", 0, 3600, unit="seconds")
    ] = 5.0
    lookup_wait_s: Annotated[
        float, Number("how long the scheduler may wait for what the disk holds", 0, 3600, unit="seconds")
    ] = 0.05
    staging_bytes: Annotated[int, Size("device memory of each component for copies", 1 << 16)] = 64 << 20


def linker_config(given: Mapping[str, Any] | None) -> LinkerConfig:
    """The settings in `given`. `ConfigError` says what is wrong and what is known."""
    values = {} if given is None else given
    config: LinkerConfig = from_mapping(LinkerConfig, as_mapping(values, _WHERE), _WHERE)
    return config
