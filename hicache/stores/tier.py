"""A tier below memory as an engine sees it: the client of its store, and what it counts.

open_tier    the store runs in a process that is started for it, or in the process behind unix:/path/of/socket
given_tier   the store is a Python object of the caller's, served by a thread of this process
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hicache.metrics import Metrics, MetricType
from hicache.owner import OwnerProcess
from hicache.storage.base import PageBuffer, PageStore, StoreError, StoreStats
from hicache.storage.process.client import MAX_SILENCE_S, StoreClient
from hicache.storage.process.jobs import FindDone
from hicache.storage.process.service import ServiceSettings
from hicache.storage.process.status import QUEUE_NUMBERS
from hicache.storage.process.stores import GivenStore, OpenStores, StoreRequest
from hicache.storage.process.transports import InlineServer, OwnProcess, ServedSocket, Transport

JOB_PAGES = 8
SOCKET = "unix:"

_TIER_METRICS: dict[str, tuple[MetricType, str]] = {
    "process_state": ("gauge", "the store process: 0 open, 1 opening its store, 2 lost"),
    "process_failures": ("counter", "times that the store process ended, or said nothing for too long"),
    "failed_touches": ("counter", "uses that the store was not told of"),
    "stored_pages": ("gauge", "pages in the store: of tokens, windows and states"),
    "live_bytes": ("gauge", "their bytes as stored"),
    "raw_bytes": ("gauge", "their bytes before compression"),
    "file_bytes": ("gauge", "disk space of the store's files"),
    "budget_bytes": ("gauge", "what the files may take"),
    "used_ratio": ("gauge", "file_bytes over budget_bytes"),
    "hit_pages": ("counter", "pages that the store was asked for and gave back verified"),
    "missed_pages": ("counter", "pages that the store was asked for and did not hold"),
    "put_pages": ("counter", "pages written to the store"),
    "put_raw_bytes": ("counter", "their bytes before compression"),
    "put_stored_bytes": ("counter", "their bytes as stored"),
    "evicted_pages": ("counter", "pages evicted from the store to keep its budget"),
    "corrupt_pages": ("counter", "pages that did not verify and were deleted"),
    "read_errors": ("counter", "reads that the medium failed"),
    "write_errors": ("counter", "writes that the medium failed"),
    "read_only_flag": ("gauge", "1 while the store takes no pages, after a write failed"),
}
_QUEUE_METRICS: dict[str, tuple[MetricType, str]] = {
    "state": ("gauge", "the breaker of reads or writes: 0 closed, 1 half open, 2 open"),
    "opens": ("counter", "times that the breaker opened"),
    "failures": ("counter", "calls that the store failed"),
    "refused_jobs": ("counter", "jobs for which the store was not asked, because the breaker was open"),
    "stalled_jobs": ("counter", "jobs under way for longer than the tier's I/O timeout"),
    "queued_jobs": ("gauge", "jobs that wait for a thread"),
    "queued_bytes": ("gauge", "bytes of their pages"),
}
assert tuple(_QUEUE_METRICS) == QUEUE_NUMBERS


class StoreTier:
    """Owned by the scheduler thread; no method waits for the medium longer than its argument says.

    `reads` and `writes` take jobs and return their outcomes. `job_pages`: pages of one job that reads a prefix.
    `num_readers`: threads that read from the store. `patience_s`: until a job is answered, or announced as stalled, at
    most. `clock`: seconds, those of the jobs' deadlines. `tolerates`: errors
    of opening that are kept in `refused`, after which the store is tried again with growing delays; others are raised.
    """

    def __init__(
        self,
        transport: Transport,
        request: StoreRequest,
        *,
        job_pages: int = JOB_PAGES,
        clock: Callable[[], float] = time.monotonic,
        tolerates: tuple[type[StoreError], ...] = (),
    ) -> None:
        settings = request.settings
        self.name, self.num_readers, self.job_pages, self.clock = settings.name, settings.readers, job_pages, clock
        self._limits = settings.limits
        self.patience_s = max(settings.limits.io_timeout_s, MAX_SILENCE_S)
        # Those that wait there, and those that the threads work on.
        max_jobs = settings.queue_jobs + settings.readers
        self.client = StoreClient(transport, request, max_jobs=max_jobs, clock=clock)
        self.reads, self.writes = self.client.reads, self.client.writes
        self._owner = OwnerProcess(f"the {self.name} tier")
        self.refused = self.client.open(tolerates)

    @property
    def in_process(self) -> bool:
        """Whether a thread of this process serves the store, so that pages may lie anywhere."""
        return self.client.in_process

    def share(self, descriptor: int, memory: PageBuffer) -> None:
        """Pages of jobs lie in `memory`; see `StoreClient.share`. Threads of this process need not be told."""
        if not self.in_process:
            self.client.share(descriptor, memory)

    @property
    def is_healthy(self) -> bool:
        """Whether the store is open, and neither reads nor writes are stopped."""
        closed = all(self.client.queue_numbers(queue)[0] == 0 for queue in (self.reads.name, self.writes.name))
        return self.client.is_open and closed

    def wait(self, seconds: float) -> None:
        """Until there may be something for `poll`, for so long at most; see `StoreClient.wait`."""
        self.client.wait(seconds)

    def stats(self) -> StoreStats:
        return self.client.stats()

    def register(self, metrics: Metrics) -> None:
        """Enter what the tier and its store count."""
        register_tier(metrics, self.name, self._numbers, self._queue_numbers)

    def find(self, keys: Sequence[bytes], wait_s: float, others: Sequence[bytes] = ()) -> FindDone | None:
        """See `StoreClient.find`."""
        return self.client.find(keys, wait_s, others)

    def used(self, keys: Sequence[bytes]) -> None:
        """A request used these pages, in the order of its prompt, whichever tier served them."""
        if keys:
            self.client.used(keys)

    def close(self, within_s: float | None = None) -> bool:
        """Finish what is queued and close the store. Idempotent. In a fork it does nothing.

        Waits at most `within_s` (default: `close_s` of the limits). False: a thread of the store did not return. The
        store then keeps its path, and nobody else may use the pages of the thread's job; a later call tries again.
        Raises what closing the store raises.
        """
        if not self._owner.is_here:
            return True
        return self.client.close(self._limits.close_s if within_s is None else within_s)

    def abandon(self, within_s: float) -> None:
        """Close the store, or end its process without that: nothing that was acknowledged is lost. For an engine that
        ends without a close."""
        if not self.close(within_s):
            self.client.end()

    def _queue_numbers(self, queue: str) -> dict[str, float]:
        """Of `_QUEUE_METRICS`."""
        numbers = dict(zip(QUEUE_NUMBERS, self.client.queue_numbers(queue), strict=True))
        numbers["refused_jobs"] += (self.reads if queue == self.reads.name else self.writes).refused
        return {f"{self.name}.{queue}_{name}": value for name, value in numbers.items()}

    def _numbers(self) -> dict[str, float]:
        """Of `_TIER_METRICS`."""
        stats = self.stats()
        found = {
            "process_state": self.client.state,
            "process_failures": self.client.times_lost,
            "failed_touches": self.client.status.failed_touches,
            "stored_pages": stats.entries,
            "live_bytes": stats.live_bytes,
            "raw_bytes": stats.raw_bytes,
            "file_bytes": stats.file_bytes,
            "budget_bytes": stats.budget_bytes,
            "used_ratio": stats.file_bytes / max(1, stats.budget_bytes),
            "hit_pages": stats.hits,
            "missed_pages": stats.misses,
            "put_pages": stats.puts,
            "put_raw_bytes": stats.put_bytes_raw,
            "put_stored_bytes": stats.put_bytes_stored,
            "evicted_pages": stats.evicted,
            "corrupt_pages": stats.corrupt,
            "read_errors": stats.read_errors,
            "write_errors": stats.write_errors,
            "read_only_flag": stats.read_only,
        }
        return {f"{self.name}.{metric}": value for metric, value in found.items()}


def register_tier(
    metrics: Metrics,
    name: str,
    numbers: Callable[[], Mapping[str, float]],
    queue_numbers: Callable[[str], Mapping[str, float]],
) -> None:
    """Enter what a tier of this name counts: `numbers`, and those of its reads and writes."""
    for queue in ("reads", "writes"):
        named, labels = f"{name}.{queue}_", {"direction": queue.removesuffix("s")}
        families = {f"{named}{metric}": (f"{name}_{metric}", labels) for metric in _QUEUE_METRICS}
        families[f"{named}state"] = (f"{name}_breaker_state", labels)
        described = {f"{named}{metric}": about for metric, about in _QUEUE_METRICS.items()}
        metrics.read_from(described, partial(queue_numbers, queue), families)
    described = {f"{name}.{metric}": about for metric, about in _TIER_METRICS.items()}
    metrics.read_from(described, numbers, {f"{name}.used_ratio": ("tier_used_ratio", {"tier": name})})


def open_tier(
    request: StoreRequest,
    *,
    in_process: bool = False,
    job_pages: int = JOB_PAGES,
    clock: Callable[[], float] = time.monotonic,
    tolerates: tuple[type[StoreError], ...] = (),
) -> StoreTier:
    """The tier over the store of `request.url`: in a process of its own, or, for `unix:/path/of/socket`, in the
    process that an operator started there. `in_process`: in a thread of this process. Raises what opening the store
    raises."""
    transport: Transport
    if request.url.startswith(SOCKET):
        transport = ServedSocket(request.url.removeprefix(SOCKET))
    elif in_process:
        transport = InlineServer(OpenStores(clock=clock), clock)
    else:
        transport = OwnProcess()
    return StoreTier(transport, request, job_pages=job_pages, clock=clock, tolerates=tolerates)


def given_tier(
    store: PageStore,
    settings: ServiceSettings,
    *,
    owns_store: bool = False,
    job_pages: int = JOB_PAGES,
    clock: Callable[[], float] = time.monotonic,
) -> StoreTier:
    """The tier over a store that is an object of this process, in a thread of it. `owns_store`: closed with the
    tier."""
    given = GivenStore(store, owns_store=owns_store, clock=clock)
    transport = InlineServer(given, clock)
    return StoreTier(transport, StoreRequest("", {}, (), settings=settings), job_pages=job_pages, clock=clock)
