"""Builds the tiers below memory: disk and remote, each a store and the threads in front of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from hicache.config import EngineConfig
from hicache.disk import DiskTier, Limits, cipher_of, identity_of, page_filter
from hicache.errors import ConfigError
from hicache.host import HostPagePool
from hicache.layout import PoolLayout
from hicache.metrics import Metrics
from hicache.storage import LmdbPageStore, PageFormat, PageStore, open_store
from hicache.store_config import DiskConfig, Filter, RemoteConfig
from hicache.tree import DISK, FULL, REMOTE, Component, Store

# Of one job, which is one call to a remote store: a client works on many pages at once, and calls in several threads
# beside one another disturb each other. What is there at the deadline of a call counts.
_MAX_REMOTE_JOB_PAGES, _REMOTE_JOB_BYTES = 64, 64 << 20
# One call fills the link to these stores; where a request takes long, as to S3, several calls hide it.
_ONE_READER = re.compile(r"\s*(mooncake|redis|rediss|redis\+unix)://[^,]*", re.IGNORECASE)
_REMOTE_READERS = 4
_MAX_REMOTE_BACKOFF_S = 30.0  # a server that was restarted is to be used again soon

_Layouts = dict[Component, PoolLayout]
_Hosts = dict[Component, HostPagePool]


def build_stores(
    config: EngineConfig,
    given: Mapping[Store, PageStore | None],
    layouts: _Layouts,
    hosts: _Hosts,
    metrics: Metrics,
    *,
    tells_removed: bool,
) -> dict[Store, DiskTier]:
    """The tiers that an engine has, in the order in which reads ask them. `given`: stores of the caller, which closes
    them. `tells_removed`: answers of writes name the pages that the disk lost."""
    stores: dict[Store, DiskTier] = {}
    removed: list[bytes] = []
    disk, remote = given[DISK], given[REMOTE]
    with ExitStack() as opened:  # so that what cannot be built leaves no store open
        if config.disk is not None:
            disk = _store(config, config.disk, layouts, hosts, removed.extend if tells_removed else None)
            opened.callback(disk.close)
        if disk is not None:
            stores[DISK] = _disk(config, disk, config.disk is not None, hosts, metrics, removed)
        if config.remote is not None:
            identity, formats = identity_of(config, layouts), _formats("auto", layouts, hosts)
            cipher = cipher_of(config.remote)
            remote = open_store(config.remote.url, identity=identity, formats=formats, cipher=cipher)
            opened.callback(remote.close)
        if remote is not None:
            stores[REMOTE] = _remote(config, remote, hosts, metrics)
        opened.pop_all()
    return stores


def require_one_each(config: EngineConfig, store: PageStore | None, remote: PageStore | None) -> None:
    """ConfigError where a store of the caller's stands beside one of the settings, or cannot be used."""
    if store is not None and config.disk is not None:
        raise ConfigError(f"the engine is given a store and disk path={config.disk.path}; give one of them")
    if remote is not None and config.remote is not None:
        raise ConfigError("the engine is given a remote store and a remote url; give one of them")
    for given, name in ((store, "disk"), (remote, "remote")):
        if given is not None:
            config.require_store_tier(name)


def _formats(wanted: Filter, layouts: _Layouts, hosts: _Hosts) -> list[PageFormat]:
    """Of the host pages of all components; where two share a size, the first decides."""
    formats: dict[int, PageFormat] = {}
    for name, host in hosts.items():
        kind: Filter = wanted if name == FULL or wanted == "none" else "auto"
        formats.setdefault(
            host.page_bytes, PageFormat(host.page_bytes, page_filter(kind, layouts[name], host.page_tokens))
        )
    return list(formats.values())


def _store(
    config: EngineConfig,
    disk: DiskConfig,
    layouts: _Layouts,
    hosts: _Hosts,
    on_removed: Callable[[Sequence[bytes]], None] | None,
) -> LmdbPageStore:
    return LmdbPageStore(
        disk.path,
        identity=identity_of(config, layouts),
        formats=_formats(disk.filter, layouts, hosts),
        budget_bytes=disk.budget_bytes,
        durability=disk.durability,
        level=disk.level,
        cipher=cipher_of(disk),
        on_removed=on_removed,
    )


def _disk(
    config: EngineConfig,
    store: PageStore,
    owns_store: bool,
    hosts: _Hosts,
    metrics: Metrics,
    removed: list[bytes],
) -> DiskTier:
    advanced = config.advanced
    limits = Limits(
        io_timeout_s=advanced.disk_io_timeout_s,
        reopen_backoff_s=advanced.disk_reopen_backoff_s,
        max_reopen_backoff_s=advanced.disk_max_reopen_backoff_s,
        close_s=advanced.disk_io_timeout_s,
    )
    tier = DiskTier(
        store,
        owns_store=owns_store,
        readers=advanced.disk_reader_threads,
        queue_jobs=advanced.disk_queue_jobs,
        # What may be locked on its way to the store.
        full_bytes=sum(host.page_bytes * host.num_pages for host in hosts.values()) // 2,
        limits=limits,
        removed=removed,
    )
    tier.register(metrics)
    return tier


def num_remote_readers(remote: RemoteConfig) -> int:
    """How many threads read from the store."""
    return remote.reader_threads or (1 if _ONE_READER.fullmatch(remote.url) else _REMOTE_READERS)


def _remote(config: EngineConfig, store: PageStore, hosts: _Hosts, metrics: Metrics) -> DiskTier:
    """`store`: of the caller, where the settings name none."""
    remote, advanced = config.remote or RemoteConfig(url="given:"), config.advanced
    for host in hosts.values():
        store.register_memory(host.arena.data.numpy().reshape(-1).view(np.uint8))
    largest_bytes = max(host.page_bytes for host in hosts.values())
    job_pages = max(1, min(_MAX_REMOTE_JOB_PAGES, _REMOTE_JOB_BYTES // largest_bytes))
    tier = DiskTier(
        store,
        owns_store=config.remote is not None,
        readers=num_remote_readers(remote),
        queue_jobs=advanced.disk_queue_jobs,
        full_bytes=int(remote.backup_share * sum(host.page_bytes * host.num_pages for host in hosts.values())),
        limits=Limits(
            io_timeout_s=remote.io_timeout_s,
            reopen_backoff_s=advanced.disk_reopen_backoff_s,
            max_reopen_backoff_s=_MAX_REMOTE_BACKOFF_S,
            close_s=remote.io_timeout_s,
        ),
        name="remote",
        job_pages=job_pages,
        part_pages=job_pages,
        gives_way=True,
    )
    tier.register(metrics)
    return tier
