"""A tier below memory as an engine uses it: the client of a store, with the metrics of the tier.

open_tier    the store runs in a process started for it, or in an operator's process behind unix:/path/of/socket
open_remote  the remote store that runs in the process of another tier's store
open_given   the store is a Python object of the caller, and runs in a thread of this process
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
    "process_state": ("gauge", "state of the store process: 0 store open, 1 opening the store, 2 process lost"),
    "process_failures": ("counter", "times that the store process ended or did not answer in time"),
    "failed_touches": ("counter", "uses of pages that could not be reported to the store"),
    "used_ratio": ("gauge", "file_bytes of all stores that share the budget, divided by budget_bytes"),
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
    "hits": ("hit_pages", "counter", "requested pages that the store returned intact"),
    "misses": ("missed_pages", "counter", "requested pages that the store did not have"),
    "puts": ("put_pages", "counter", "pages written to the store"),
    "put_bytes_raw": ("put_raw_bytes", "counter", "bytes of the pages written to the store, before compression"),
    "put_bytes_stored": ("put_stored_bytes", "counter", "bytes of the pages written to the store, after compression"),
    "evicted": ("evicted_pages", "counter", "pages evicted from the store to keep its budget"),
    "corrupt": ("corrupt_pages", "counter", "pages that the store deleted because their verification failed"),
    "read_errors": ("read_errors", "counter", "reads of the disk or remote server that failed"),
    "write_errors": ("write_errors", "counter", "writes of the disk or remote server that failed"),
    "read_only": ("read_only_flag", "gauge", "1 while the store accepts no pages because a write failed; otherwise 0"),
}
# The metric of each number in `BACKUP_NUMBERS`: pages that the store process copies to a remote store, and pages that
# were read from a remote store.
_BACKUP_METRICS: dict[str, tuple[MetricType, str]] = {
    "queued_pages": ("gauge", "pages that wait to be copied to the remote store"),
    "queued_bytes": ("gauge", "bytes of the pages in backup_queued_pages"),
    "sent_pages": ("counter", "pages copied to the remote store"),
    "sent_bytes": ("counter", "bytes of the pages in backup_sent_pages, after compression"),
    "dropped_pages": (
        "counter",
        "pages that were not copied to the remote store because the queue was full or the store was closed",
    ),
    "failed_pages": ("counter", "pages that the remote store refused or failed to store"),
    "state": ("gauge", "circuit breaker of copies to the remote store: 0 closed, 1 half open, 2 open or not connected"),
    "filled_pages": ("counter", "pages that were read from the remote store and written to the disk store"),
    "unfilled_pages": ("counter", "pages that were read from the remote store but not written to the disk store"),
}
# The help texts name the queue, "reads" or "writes", and its jobs, "read" or "write".
_QUEUE_METRICS: dict[str, tuple[MetricType, str]] = {
    "state": ("gauge", "circuit breaker of {queue}: 0 closed, 1 half open, 2 open"),
    "opens": ("counter", "times that the circuit breaker of {queue} opened"),
    "failures": ("counter", "{job} calls to the store that failed"),
    "refused_jobs": (
        "counter",
        "{job} jobs that were refused without calling the store, because the circuit breaker was open",
    ),
    "stalled_jobs": ("counter", "{job} jobs that were in flight for longer than the tier's I/O timeout"),
    "queued_jobs": ("gauge", "{job} jobs that wait for a thread"),
    "queued_bytes": ("gauge", "bytes of the pages of queued {job} jobs"),
}
assert tuple(_QUEUE_METRICS) == QUEUE_NUMBERS
assert tuple(_BACKUP_METRICS) == BACKUP_NUMBERS


class StoreTier(StoreClient):
    """A store tier, used by the scheduler thread only. No method waits for the medium longer than its argument allows.

    `job_pages`: pages of one job that reads a prefix. `num_readers`: threads that read from the store. `timeout_s`:
    maximum seconds until a job is answered or reported as stalled. `reports_removed`: answers to writes have the keys
    of the pages that the store removed. If several engines share a store process, only one of them gets the key of a
    removed page. If the store is unavailable now, opening it is retried with growing delays; other errors of opening
    are raised.
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
        # The maximum is the number of queued jobs plus the number of jobs that threads work on.
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
        """Finish queued jobs and close the store. Idempotent. Does nothing in a forked process.

        Waits at most `within_s` seconds (default: `close_s` of the limits). Returns False if a thread of the store did
        not end. If False is returned, the path of the store stays locked, and the pages of the thread's job must not be
        reused. A later call tries again. Raises errors of closing the store.
        """
        if not self._owner.is_here:
            return True
        return super().close(self._limits.close_s if within_s is None else within_s)

    def abandon(self, within_s: float) -> None:
        """Close the store. If closing takes longer than `within_s`, kill the store process. No acknowledged write is
        lost. An engine that ends without `close` calls this method."""
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
            "used_ratio": (stats.file_bytes + stats.others_bytes) / max(1, stats.budget_bytes),
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
    """Register the metrics of the tier `name`. `numbers`: returns the value of each metric of the tier.
    `queue_numbers`: returns the value of each metric of the queue "reads" or "writes"."""
    for queue in ("reads", "writes"):
        job = queue.removesuffix("s")
        named, of_queue = f"{name}.{queue}_", {"direction": job}
        families = {f"{named}{metric}": (f"{name}_{metric}", of_queue) for metric in _QUEUE_METRICS}
        families[f"{named}state"] = (f"{name}_breaker_state", of_queue)
        described = {
            f"{named}{metric}": (type_, help.format(queue=queue, job=job))
            for metric, (type_, help) in _QUEUE_METRICS.items()
        }
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
    """Return the tier over the store at `request.url`. If the URL is `unix:/path/of/socket`, the process that an
    operator started runs the store. With `in_process`, a thread of this process runs the store. Otherwise a new process
    runs it. Raises errors of opening the store except StoreUnavailable."""
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
    """Return the tier over the remote store of the process that serves `tier`. If the process was not started with a
    remote store, it opens `request.remote`.

    `request`: the request for `tier`, but with settings for a remote store (`ServiceSettings.of_remote`). Pages that
    are read from the remote store are also stored in the store of `tier`. Close the returned tier before `tier`. While
    the process of `tier` is lost, the returned tier is lost too. Raises the same errors as `open_tier`.
    """
    asked = dataclasses.replace(request, opens_remote=True)
    return StoreTier(JoinedClient(tier), asked, job_pages=job_pages, clock=clock)


def open_given(
    store: PageStore,
    settings: ServiceSettings,
    *,
    owns_store: bool = False,
    job_pages: int = JOB_PAGES,
    clock: Callable[[], float] = time.monotonic,
) -> StoreTier:
    """Return the tier over a store that is an object of this process. A thread of this process runs the store.
    `owns_store`: the tier closes the store."""
    transport = InlineServer(OpenStores(clock=clock, given=store, owns_given=owns_store), clock)
    return StoreTier(transport, StoreRequest("", {}, (), settings=settings), job_pages=job_pages, clock=clock)
