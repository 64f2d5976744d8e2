"""Builds the disk tier and the remote tier, each a client of a store."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hicache.config import EngineConfig, RemoteConfig
from hicache.config.secret import key_of
from hicache.errors import ConfigError
from hicache.flow.components.base import HostLink
from hicache.flow.writes import REMOTE_SHARE
from hicache.host.pool import HostPagePool
from hicache.metrics import Metrics
from hicache.storage import PageBuffer, PageFormat, PageStore
from hicache.storage.process.health import Limits
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.stores import StoreRequest
from hicache.storage.records import NAME_FIELD
from hicache.stores.page_format import identity_of, page_filter
from hicache.stores.tier import JOB_PAGES, StoreTier, open_given, open_tier
from hicache.tiers import DISK, REMOTE, Component, Store

# One job is one call to a remote store. Jobs have many pages, because the store's client transfers many pages at once,
# and concurrent calls slow each other down. If a call exceeds its deadline, the pages that arrived before are used.
_MAX_REMOTE_JOB_PAGES, _REMOTE_JOB_BYTES = 64, 64 << 20
# The scheduler's thread spends the same time on each job, even on a job of small pages.
_MAX_DISK_JOB_PAGES, _DISK_JOB_BYTES = 32, 32 << 20
# One call to a store of this scheme uses the full rate of the link. Several calls hide the latency of stores like S3.
_ONE_READER = "mooncake://"
_REMOTE_READERS = 4
_MAX_REMOTE_BACKOFF_S = 30.0  # short, so that a restarted server is soon used again


class _HostPages:
    """The host pages of all components, as the stores see them. `formats`: one format for each page size; if components
    share a size, the format of the first component. `num_bytes`: bytes of all pages. `largest_bytes`: bytes of the
    largest page."""

    def __init__(self, config: EngineConfig, links: Mapping[Component, HostLink]) -> None:
        self.hosts = [link.host for link in links.values() if link.host is not None]
        layouts = {name: link.space.layout for name, link in links.items()}
        packed = {name: link.packing for name, link in links.items() if link.packing is not None}
        named = {NAME_FIELD: config.model_name} if config.model_name else {}
        self.identity, formats = {**identity_of(config, layouts, packed), **named}, dict[int, PageFormat]()
        for name, host in zip(links, self.hosts, strict=True):
            filter = page_filter(layouts[name], is_packed=name in packed)
            formats.setdefault(host.page_bytes, PageFormat(host.page_bytes, filter))
        self.formats = list(formats.values())
        self.num_bytes = sum(host.page_bytes * host.num_pages for host in self.hosts)
        self.largest_bytes = max(formats)


def build_stores(
    config: EngineConfig,
    given: Mapping[Store, PageStore],
    links: Mapping[Component, HostLink],
    metrics: Metrics,
    *,
    reports_removed: bool,
) -> dict[Store, StoreTier]:
    """Return the store tiers of an engine, in the order in which reads ask them. `given`: stores of the caller, who
    closes them. `reports_removed`: replies to writes name the pages that the disk removed."""
    if config.disk is None and config.remote is None and not given:
        return {}
    pages, stores = _HostPages(config, links), dict[Store, StoreTier]()
    try:
        if config.disk is not None or DISK in given:
            stores[DISK] = _disk(config, given.get(DISK), pages, reports_removed=reports_removed)
        if config.remote is not None or REMOTE in given:
            stores[REMOTE] = _remote(config, given.get(REMOTE), pages)
        for tier in stores.values():
            tier.register(metrics)
            for host in pages.hosts:
                tier.share(host.arena.descriptor, _bytes_of(host))
    except BaseException:
        for tier in stores.values():
            tier.close()
        raise
    return stores


def given_stores(config: EngineConfig, store: PageStore | None, remote: PageStore | None) -> dict[Store, PageStore]:
    """Return the caller's stores. Raises ConfigError if the settings describe the same tier, or if the engine cannot
    use stores."""
    if store is not None and config.disk is not None:
        raise ConfigError(f"the engine is given a store and disk path={config.disk.path}; give one of them")
    if remote is not None and config.remote is not None:
        raise ConfigError("the engine is given a remote store and a remote url; give one of them")
    given = {tier: of_caller for tier, of_caller in ((DISK, store), (REMOTE, remote)) if of_caller is not None}
    for tier in given:
        config.require_store_tier(tier.name)
    return given


def _disk(config: EngineConfig, store: PageStore | None, pages: _HostPages, *, reports_removed: bool) -> StoreTier:
    disk, settings = config.disk, _disk_settings(config, pages)
    if store is not None:
        return open_given(store, settings)
    assert disk is not None
    request = StoreRequest(disk.url, pages.identity, pages.formats, key_of(disk), reports_removed, settings)
    job_pages = min(_MAX_DISK_JOB_PAGES, max(JOB_PAGES, _DISK_JOB_BYTES // pages.largest_bytes))
    return open_tier(request, in_process=disk.transport == "inline", job_pages=job_pages)


def _disk_settings(config: EngineConfig, pages: _HostPages) -> ServiceSettings:
    advanced = config.advanced
    limits = Limits(
        io_timeout_s=advanced.disk_io_timeout_s,
        reopen_backoff_s=advanced.disk_reopen_backoff_s,
        max_reopen_backoff_s=advanced.disk_max_reopen_backoff_s,
        close_s=advanced.disk_io_timeout_s,
    )
    return ServiceSettings(
        readers=advanced.disk_reader_threads,
        queue_jobs=advanced.disk_queue_jobs,
        full_bytes=pages.num_bytes // 2,  # maximum bytes of pages that are locked until the store has written them
        limits=limits,
    )


def num_remote_readers(remote: RemoteConfig) -> int:
    return remote.reader_threads or (1 if remote.url.strip().lower().startswith(_ONE_READER) else _REMOTE_READERS)


def _remote(config: EngineConfig, store: PageStore | None, pages: _HostPages) -> StoreTier:
    remote, advanced = config.remote or RemoteConfig(url="given:"), config.advanced
    job_pages = max(1, min(_MAX_REMOTE_JOB_PAGES, _REMOTE_JOB_BYTES // pages.largest_bytes))
    settings = ServiceSettings(
        name="remote",
        readers=num_remote_readers(remote),
        queue_jobs=advanced.disk_queue_jobs,
        full_bytes=int(REMOTE_SHARE * pages.num_bytes),
        part_bytes=_REMOTE_JOB_BYTES,
        yields_to_reads=True,
        limits=Limits(
            io_timeout_s=remote.io_timeout_s,
            reopen_backoff_s=advanced.disk_reopen_backoff_s,
            max_reopen_backoff_s=_MAX_REMOTE_BACKOFF_S,
            close_s=remote.io_timeout_s,
        ),
    )
    if store is not None:
        for host in pages.hosts:
            store.register_memory(_bytes_of(host))
        return open_given(store, settings, job_pages=job_pages)
    request = StoreRequest(remote.url, pages.identity, pages.formats, key_of(remote), settings=settings)
    return open_tier(request, in_process=remote.transport == "inline", job_pages=job_pages)


def _bytes_of(host: HostPagePool) -> PageBuffer:
    return host.arena.data.numpy().reshape(-1).view(np.uint8)
