"""A tier below memory from an engine's view: the client of its store, and its metrics.

open_tier    the store runs in a process started for it, or in an operator's process behind unix:/path/of/socket
open_remote  the remote store of the same process as that of another tier
given_tier   the store is a Python object of the caller, and runs in a thread of this process
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial

from hicache.config.settings import SOCKET
from hicache.metrics import Metrics, MetricType
from hicache.storage.base import PageStore
from hicache.storage.owner import OwnerProcess
from hicache.storage.process.client import MAX_SILENCE_S, StoreClient
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.shared_memory import BACKUP_NUMBERS, QUEUE_NUMBERS
from hicache.storage.process.stores import OpenStores, StoreRequest
from hicache.storage.process.transports import InlineServer, JoinedClient, OwnProcess, ServedSocket, Transport
from hicache.tiers import DISK

JOB_PAGES = 8

_PROCESS_METRICS: dict[str, tuple[MetricType, str]] = {
    "process_state": ("gauge", "the store process: 0 open, 1 opening its store, 2 lost"),
    "process_failures": ("counter", "times that the store process ended or did not answer in time"),
    "failed_touches": ("counter", "uses of pages that could not be reported to the store"),
    "used_ratio": ("gauge", "file_bytes divided by budget_bytes"),
    "drive_writes_per_day": ("gauge", "put_stored_bytes per day, divided by drive_bytes; mean since the store opened"),
}
# Maps fields of `StoreStats` to the name of the metric, its type and its help text.
_STORE_METRICS: dict[str, tuple[str, MetricType, str]] = {
    "entries": ("stored_pages", "gauge", "pages in the store: full pages, window pages and recurrent states"),
    "live_bytes": ("live_bytes", "gauge", "bytes of the stored pages after compression"),
    "raw_bytes": ("raw_bytes", "gauge", "bytes of the stored pages before compression"),
    "file_bytes": ("file_bytes", "gauge", "disk space of the store's files"),
    "budget_bytes": ("budget_bytes", "gauge", "maximum disk space of the store's files"),
    "drive_bytes": ("drive_bytes", "gauge", "size of the file system that has the store's files; 0: unknown"),
    "hits": ("hit_pages", "counter", "requested pages that the store returned, verified"),
    "misses": ("missed_pages", "counter", "requested pages that the store did not hold"),
    "puts": ("put_pages", "counter", "pages written to the store"),
    "put_bytes_raw": ("put_raw_bytes", "counter", "bytes of the pages written, before compression"),
    "put_bytes_stored": ("put_stored_bytes", "counter", "bytes of the pages written, after compression"),
    "evicted": ("evicted_pages", "counter", "pages evicted from the store to keep its budget"),
    "corrupt": ("corrupt_pages", "counter", "pages that the store deleted because their verification failed"),
    "read_errors": ("read_errors", "counter", "reads that failed on the medium"),
    "write_errors": ("write_errors", "counter", "writes that failed on the medium"),
    "read_only": ("read_only_flag", "gauge", "1 while the store accepts no pages because a write failed; otherwise 0"),
}
# By number of `BACKUP_NUMBERS`: pages that the store process copies to a remote store, and pages from there.
_BACKUP_METRICS: dict[str, tuple[MetricType, str]] = {
    "queued_pages": ("gauge", "pages that wait for their copy to the remote store"),
    "queued_bytes": ("gauge", "bytes of the pages in backup_queued_pages"),
    "sent_pages": ("counter", "pages copied to the remote store"),
    "sent_bytes": ("counter", "bytes of the pages in backup_sent_pages, after compression"),
    "dropped_pages": (
        "counter",
        "pages not copied to the remote store because the queue was full or the store was closed",
    ),
    "failed_pages": ("counter", "pages that the remote store refused or failed to store"),
    "state": ("gauge", "circuit breaker of copies to the remote store: 0 closed, 1 half open, 2 open or not connected"),
    "filled_pages": ("counter", "pages that were read from the remote store and written to the disk store"),
    "unfilled_pages": ("counter", "pages that were read from the remote store but not written to the disk store"),
}
_QUEUE_METRICS: dict[str, tuple[MetricType, str]] = {
    "state": ("gauge", "circuit breaker of reads or writes: 0 closed, 1 half open, 2 open"),
    "opens": ("counter", "times that the circuit breaker opened"),
    "failures": ("counter", "calls of the store that failed"),
    "refused_jobs": ("counter", "jobs refused without calling the store, because the circuit breaker was open"),
    "stalled_jobs": ("counter", "jobs in flight for longer than the tier's I/O timeout"),
    "queued_jobs": ("gauge", "jobs that wait for a thread"),
    "queued_bytes": ("gauge", "bytes of the pages of queued jobs"),
}
assert tuple(_QUEUE_METRICS) == QUEUE_NUMBERS
assert tuple(_BACKUP_METRICS) == BACKUP_NUMBERS


class StoreTier(StoreClient):
    """A store tier, used by the scheduler thread only. No method waits for the medium longer than its argument allows.

    `job_pages`: pages of one job that reads a prefix. `num_readers`: threads that read from the store. `timeout_s`:
    maximum seconds until a job is answered or reported as stalled. `reports_removed`: replies to writes name each page
    that the store removed; if several engines share a store process, each page is named to one of them. If the store is
    unavailable now, opening it is retried with growing delays; other errors of opening are raised.
    """

    def __init__(
        self,
        transport: Transport,
        request: StoreRequest,
        *,
        job_pages: int = JOB_PAGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = request.settings
        # Number of queued jobs and of jobs that threads work on.
        super().__init__(transport, request, max_jobs=settings.queue_jobs + settings.readers, clock=clock)
        self.name = settings.name
        self.num_readers = settings.readers
        self.job_pages = job_pages
        self.reports_removed = request.reports_removed and not request.url.startswith(SOCKET)
        self.timeout_s = max(settings.limits.io_timeout_s, MAX_SILENCE_S)
        self._owner = OwnerProcess(f"the {self.name} tier")
        self.open()

    def register(self, metrics: Metrics) -> None:
        """Register the metrics of the tier."""
        register_tier(metrics, self.name, self._numbers, self._queue_numbers)

    def close(self, within_s: float | None = None) -> bool:
        """Finish queued jobs and close the store. Idempotent. In a fork it does nothing.

        Waits at most `within_s` seconds (default: `close_s` of the limits). Returns False if a thread of the store did
        not end. Then the store keeps its path locked, the pages of that thread's job must not be reused, and a later
        call tries again. Raises errors of closing the store.
        """
        if not self._owner.is_here:
            return True
        return super().close(self._limits.close_s if within_s is None else within_s)

    def abandon(self, within_s: float) -> None:
        """Close the store; if that takes longer than `within_s`, end its process. No acknowledged write is lost. For an
        engine that ends without `close`."""
        if not self.close(within_s):
            self.end()

    def _queue_numbers(self, name: str) -> dict[str, float]:
        numbers = dict(zip(QUEUE_NUMBERS, self.status.queue(name), strict=True))
        numbers["refused_jobs"] += (self.reads if name == self.reads.name else self.writes).refused
        return {f"{self.name}.{name}_{metric}": value for metric, value in numbers.items()}

    def _numbers(self) -> dict[str, float]:
        stats = self.stats()
        found = {
            "process_state": self.state,
            "process_failures": self.times_lost,
            "failed_touches": self.status.failed_touches,
            "used_ratio": stats.file_bytes / max(1, stats.budget_bytes),
            "drive_writes_per_day": stats.drive_writes_per_day,
            **{name: getattr(stats, field) for field, (name, _, _) in _STORE_METRICS.items()},
        }
        if self.name == DISK.name:
            found |= {f"backup_{name}": n for name, n in zip(BACKUP_NUMBERS, self.status.backup, strict=True)}
        return {f"{self.name}.{metric}": value for metric, value in found.items()}


def register_tier(
    metrics: Metrics,
    name: str,
    numbers: Callable[[], Mapping[str, float]],
    queue_numbers: Callable[[str], Mapping[str, float]],
) -> None:
    """Register the metrics of the tier `name`. `numbers`: its values by name. `queue_numbers`: those of its reads or
    writes."""
    for queue in ("reads", "writes"):
        named, of_queue = f"{name}.{queue}_", {"direction": queue.removesuffix("s")}
        families = {f"{named}{metric}": (f"{name}_{metric}", of_queue) for metric in _QUEUE_METRICS}
        families[f"{named}state"] = (f"{name}_breaker_state", of_queue)
        described = {f"{named}{metric}": about for metric, about in _QUEUE_METRICS.items()}
        metrics.read_from(described, partial(queue_numbers, queue), families)
    described = {f"{name}.{metric}": about for metric, about in _PROCESS_METRICS.items()}
    described |= {f"{name}.{metric}": (type_, help) for metric, type_, help in _STORE_METRICS.values()}
    if name == DISK.name:
        described |= {f"{name}.backup_{metric}": about for metric, about in _BACKUP_METRICS.items()}
    metrics.read_from(described, numbers, {f"{name}.used_ratio": ("tier_used_ratio", {"tier": name})})


def open_tier(
    request: StoreRequest,
    *,
    in_process: bool = False,
    job_pages: int = JOB_PAGES,
    clock: Callable[[], float] = time.monotonic,
) -> StoreTier:
    """Return the tier over the store of `request.url`: in a process started for it; for `unix:/path/of/socket` in the
    process that an operator started; with `in_process` in a thread of this process. Raises errors of opening the store
    except StoreUnavailable."""
    transport: Transport
    if request.url.startswith(SOCKET):
        transport = ServedSocket(request.url.removeprefix(SOCKET))
    elif in_process:
        transport = InlineServer(OpenStores(clock=clock), clock)
    else:
        transport = OwnProcess()
    return StoreTier(transport, request, job_pages=job_pages, clock=clock)


def open_remote(
    tier: StoreTier,
    request: StoreRequest,
    *,
    job_pages: int = JOB_PAGES,
    clock: Callable[[], float] = time.monotonic,
) -> StoreTier:
    """The tier over the remote store of the process that serves `tier`: its own, or that of `request.remote`.

    `request`: as for `tier`, with settings for a remote store (`ServiceSettings.of_remote`). Pages that are read here
    are stored in the store of `tier` as well. Close it before `tier`. While the process of `tier` is lost, this tier is
    lost too. Raises as `open_tier`.
    """
    asked = dataclasses.replace(request, opens_remote=True)
    return StoreTier(JoinedClient(tier), asked, job_pages=job_pages, clock=clock)


def given_tier(
    store: PageStore,
    settings: ServiceSettings,
    *,
    owns_store: bool = False,
    job_pages: int = JOB_PAGES,
    clock: Callable[[], float] = time.monotonic,
) -> StoreTier:
    """Return the tier over a store that is an object of this process, in a thread. `owns_store`: the tier closes the
    store."""
    transport = InlineServer(OpenStores(clock=clock, given=store, owns_given=owns_store), clock)
    return StoreTier(transport, StoreRequest("", {}, (), settings=settings), job_pages=job_pages, clock=clock)
