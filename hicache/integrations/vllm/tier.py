"""A secondary tier of vLLM's `TieringOffloadingSpec`, with the page stores below vLLM's CPU tier: a disk and a remote
store.

vLLM calls one method at a time, under a lock. Only `drain_jobs` and `shutdown` may wait. A chunk is a row of the CPU
tier's memory. The memory of the CPU tier is a file in /dev/shm that the store process also maps, so this process copies
nothing. vLLM does not reuse the rows of a job until vLLM has taken the result of the job:

    submitted ... | answered by the store process | result taken by vLLM
    <-- the store process may access the rows --->
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from hicache.flow.cost import CostModel
from hicache.integrations.load_gate import PrefillNote
from hicache.integrations.server_store import ServerStore, server_store_config
from hicache.integrations.vllm.admission import Admission, CpuRows, chunk_tokens
from hicache.integrations.vllm.computed_steps import report_steps
from hicache.integrations.vllm.computed_tokens import correct_scheduler
from hicache.integrations.vllm.gate import LoadGate, Queue
from hicache.integrations.vllm.gpu_evictions import EvictedChunks
from hicache.integrations.vllm.hints import chunks_in_order, hints_of
from hicache.integrations.vllm.identity import identity_of, page_format, refuse_pipelines
from hicache.integrations.vllm.lookups import Lookups
from hicache.integrations.vllm.offloading_spec import HiCacheOffloadingSpec
from hicache.integrations.vllm.prefill_leases import STEP_TOKENS, PrefillLeases
from hicache.integrations.vllm.region_files import remove_leftovers, remove_names
from hicache.integrations.vllm.release import vllm_release, warn_of_untested_vllm
from hicache.integrations.vllm.shared_memory import descriptor_of, name_of
from hicache.integrations.vllm.tier_events import TierEvents
from hicache.integrations.vllm.tier_metrics import (
    TierMetrics,
    dropped_jobs,
    metric_definitions,
    misfit_pages,
    waited_requests,
)
from hicache.integrations.vllm.unreported_settings import ModelFiles
from hicache.metrics import Metrics
from hicache.pages.misses import MissReason, MissReasons
from hicache.pages.table import names_of
from hicache.storage import PageBuffer, StoreError
from hicache.storage.process.health import LIMITS
from hicache.storage.process.jobs import FindDone, LeaseDone, PageRows, ReadDone, ReadJob, WriteDone, WriteJob
from hicache.stores.disk_and_remote import answer_limit_s
from hicache.tiers import DISK, REMOTE
from hicache.tiers import Store as Home

log = logging.getLogger(__name__)

_PART_CHUNKS = 8  # chunks in a part of a load; several threads read parts of one load concurrently
_QUEUE_JOBS = 4096
_HASH_BYTES = 32  # length of a SHA-256
_GROUP_BYTES = 4  # number of the group of layers, after the hash
_KEY_BYTES = _HASH_BYTES + _GROUP_BYTES
_DRAIN_POLL_S, _DRAIN_WARN_S = 0.25, 10.0
# Maximum shares of the rows that queued stores may pin. Queued stores pin the most recently used rows. With a disk, a
# quarter of the rows stays available for new chunks; stores to a remote store alone may pin only a quarter.
_DISK_SHARE, _REMOTE_SHARE = 3 / 4, 1 / 4


@dataclass(slots=True)
class Load:
    """A load. `ok[i]`: chunk i was read. `span`: tokens [start, end) of the prompt; None if they are unknown.
    `progress_s`: for each store, the time at which this load or an earlier load last made progress. `left`: for each
    store, the number of chunks in unanswered jobs. The load ends when no chunk is left."""

    request: str
    chunks: tuple[OffloadKey, ...]
    span: tuple[int, int] | None
    begin_s: float
    ok: list[bool]
    progress_s: dict[Home, float] = field(default_factory=dict)
    left: Counter[Home] = field(default_factory=Counter)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def span_left(self) -> tuple[int, int]:
        """The tokens that are still to be loaded, under the assumption that chunks are read in the order of the
        prompt."""
        start, end = self.span or (0, 0)
        return end - (end - start) * self.left.total() // len(self.chunks), end


@dataclass(frozen=True, slots=True)
class Store:
    """A store of chunks for a request."""

    context: ReqContext
    chunks: tuple[OffloadKey, ...]
    num_bytes: int
    begin_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Deadline:
    """The deadline of a finished request with a hint, stored in its `ReqContext`. `until_s`: the deadline of the
    request's chunks, on the clock of the disk."""

    until_s: float


class HiCacheTier(SecondaryTierManager):
    """Stores vLLM's chunks in a page store on disk: with checksums, compressed, within a budget, and encrypted if a key
    is given. The store process copies chunks to a remote store, which servers of several machines share. If computing
    chunks takes less time than loading them, they are not loaded (`gate`).

    Invariants: each job gets one result, after the store process has stopped using the rows of the job. After
    construction, no method raises.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        """`primary_kv_view`: bytes `[num_chunks, row_bytes]`. `settings`: see `ServerStoreConfig`.

        Raises `ConfigError` for wrong settings, and `StoreError` for a budget that is too small or memory that cannot
        be shared.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        _prepare(offloading_spec)
        self.locality = Locality.LOCAL
        config = server_store_config(settings, f"vLLM secondary tier {tier_type}")
        rows = np.asarray(primary_kv_view).view(np.uint8)
        row_bytes = rows.shape[1]
        pinned_share = _DISK_SHARE if config.path else _REMOTE_SHARE
        self._max_waiting_bytes = max(row_bytes, int(pinned_share * rows.nbytes))
        self._descriptor: int | None = _descriptor_of(rows, offloading_spec)
        is_hicache_spec = isinstance(offloading_spec, HiCacheOffloadingSpec)
        self._packing = offloading_spec.row_packing if is_hicache_spec else None
        unreported, models = dict[str, str](), tuple[ModelFiles, ...]()
        if is_hicache_spec:
            unreported = {"states": offloading_spec.recurrent_states, "settings": offloading_spec.model_settings}
            models = offloading_spec.model_files
        # Pages of a remote store do not belong to this server, so no events report them.
        has_events = bool(config.path) and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = TierEvents(self.medium, self.locality) if has_events else None
        self._server = ServerStore.open(
            config,
            identity_of(
                offloading_spec.config, vllm_release(), row_bytes, self._packing, unreported, config.devices, models
            ),
            [page_format(offloading_spec.config.model.dtype, row_bytes, is_packed=self._packing is not None)],
            queue_jobs=_QUEUE_JOBS,
            full_bytes=self._max_waiting_bytes,
            reports_removed=has_events,
        )
        self._below, self._backend = self._server.stores, self._server.stores.tier
        self._config = config
        self._clock = self._below.clock
        self._below.share(self._descriptor, rows.reshape(-1))
        self._lookups = Lookups(self._below, self._server.keys, self._poll, self._answer_s)
        self._contexts: dict[str, ReqContext] = {}  # contexts of requests that may look up chunks
        self._rows: PageBuffer | None = rows
        self.metrics = Metrics()
        self.dropped_jobs = dropped_jobs(self.metrics)
        self.misfit_pages = misfit_pages(self.metrics)
        self._below.register(self.metrics)
        num_readers = {store: tier.num_readers for store, tier in self._below.tiers.items()}
        cost = CostModel(config.prefill_tokens_per_s, num_readers, self.metrics, self._clock)
        self.gate = LoadGate(cost, self._clock, self.metrics, job_bytes=_PART_CHUNKS * row_bytes)
        self._note = PrefillNote(cost.prefill, self._backend)
        tokens, cpu_rows = chunk_tokens(offloading_spec.config), CpuRows(offloading_spec)
        self._admission = Admission(
            self.gate, self._lookups, self._are_remote, cpu_rows, self._queue, tokens, row_bytes
        )
        self._leases = PrefillLeases(self._below, cost, self.gate.num_delayed, waited_requests(self.metrics))
        self._waiting_requests = set[str]()  # requests that wait for a prefill of another node
        self._reported = TierMetrics(self.metrics, self._server.path, self._clock)
        self.miss_reasons = MissReasons()  # reasons for chunks whose stores or loads failed
        self._loads: dict[int, Load] = {}
        self._stores: dict[int, Store] = {}
        self._results: list[JobResult] = []
        self._waiting_bytes = 0
        self._refused_hash = False
        self._last_progress_s = self._clock()  # time at which a job was last submitted or made progress
        log.info("pages of vLLM's secondary tier %s are in %s", tier_type, self._server.path)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if req_context.get_state(EvictedChunks) is None:
            hints_of(req_context)  # warns of wrong hints when the request arrives
            self.gate.add_request(req_context.req_id, req_context._offload_key_positions)
            self._contexts[req_context.req_id] = req_context
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look up a chunk. The store is asked at the end of the step. Returns RETRY until the store has answered, and
        while the gate has chosen to load the chunk but the CPU tier has no free row."""
        if len(key) != _KEY_BYTES and not self._are_sha256([key]):
            return LookupResult.MISS
        if self._waits_for_node(req_context.req_id):
            return LookupResult.RETRY
        held = self._lookups.lookup(key, req_context.req_id)
        if held is False:
            return LookupResult.RETRY if self._begin_prefill(key, req_context) else LookupResult.MISS
        loads = self._admission.admits(key, req_context)
        if loads is False:
            return LookupResult.MISS
        if held is None or loads is None:
            return LookupResult.RETRY
        return LookupResult.HIT if self._admission.promotions(req_context).offer(key) else LookupResult.MISS

    def miss_reason(self, chunk: OffloadKey, req_context: ReqContext) -> MissReason | None:
        """See `ExplainsMisses`."""
        candidate = self.gate.candidate(req_context.req_id)
        if candidate is None or candidate.loads is None or not self._lookups.may_be_held(chunk):
            return None
        return MissReason.NO_ROWS if candidate.lacks_rows else MissReason.GATE

    def on_computed(self, spans: Sequence[tuple[int, int]]) -> None:
        """See `TimesPrefill`."""
        self.gate.on_computed(spans)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        if not hints_of(req_context).session_end:
            self._below.used(self._server.keys(tuple(keys)))

    def note_used(self, chunks: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """See `ExplainsMisses`. Reports the uses only if there is a remote store, because only copies to the remote
        store depend on them."""
        if len(self._below.tiers) > 1:
            self.touch(chunks, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Submit a store job. The job fails immediately if it would pin too many rows, or if the page store refuses it.
        Chunks that do not fit their packed row stay in CPU memory, and the job stores only the other chunks. Chunks of
        the last request of a session are not stored."""
        chunks, pages = tuple(job_metadata.keys), self._pages(job_metadata)
        chunks, pages = self._packed_chunks(chunks, pages)
        is_costly = self._is_costly(job_metadata.req_context)
        is_wanted = self._config.stores(is_costly=is_costly) and not hints_of(job_metadata.req_context).session_end
        if not chunks or not is_wanted:
            self._results.append(JobResult(job_metadata.job_id, success=True, transfer_bytes=0))
            return
        store = Store(job_metadata.req_context, chunks, len(pages) * self.block_size_bytes)
        fits = not self._stores or self._waiting_bytes + store.num_bytes <= self._max_waiting_bytes
        job = WriteJob(job_metadata.job_id, tuple(self._server.keys(chunks)), pages, is_costly=is_costly)
        if fits and self._are_sha256(chunks) and self._backend.writes.submit(job):
            self._stores[job_metadata.job_id], self._last_progress_s = store, self._clock()
            self._waiting_bytes += store.num_bytes
            return
        self.dropped_jobs.value += 1
        self.miss_reasons.note(names_of(chunks), MissReason.FAILED)
        if not fits:
            log.debug("store job %d dropped: %d bytes wait for the disk", job_metadata.job_id, self._waiting_bytes)
        self._results.append(JobResult(job_metadata.job_id, success=False, transfer_bytes=0))

    def submit_load(self, job_metadata: TransferJob) -> None:
        chunks, context, now_s = tuple(job_metadata.keys), job_metadata.req_context, self._clock()
        span, ok = self._admission.span(chunks, context), [False] * len(chunks)
        load = self._loads[job_metadata.job_id] = Load(context.req_id, chunks, span, now_s, ok)
        self._last_progress_s = now_s
        self._admission.promotions(context).read(chunks)
        keys, pages = self._server.keys(chunks), self._pages(job_metadata)
        start = 0
        while start < len(keys):
            store, end = self._below.store_of(keys[start]), self._below.end_of_part(keys, start, _PART_CHUNKS)
            job = ReadJob(job_metadata.job_id, start, tuple(keys[start:end]), pages[start:end], load.cancelled)
            if self._below.read(job):
                load.left[store] += end - start
                load.progress_s[store] = now_s
            start = end
        if not load.left:
            self._finish_load(job_metadata.job_id, load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll()
        results, self._results = self._results, []
        return results

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._reported.take()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [] if self._events is None else self._events.take()

    def on_request_finished(self, req_context: ReqContext) -> None:
        hints = hints_of(req_context)
        if hints.keep_s:
            deadline = _Deadline(self._clock() + hints.keep_s)
            req_context.set_state(deadline)  # stores in flight read it when they end
            self._backend.keep_until(self._server.keys(chunks_in_order(req_context)), deadline.until_s)
        self._contexts.pop(req_context.req_id, None)
        self._leases.forget(req_context.req_id)
        self._waiting_requests.discard(req_context.req_id)
        self._lookups.forget(req_context.req_id)
        self.gate.forget(req_context.req_id)
        self._admission.waits_no_longer(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request in context.new_req_ids:
            self._admission.waits_no_longer(request)
        self.gate.on_step(context.new_req_ids)
        self._note.step()
        self._cancel_stalled_loads()
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended, even if the disk is stalled, because the rows of a job must not be reused
        before the job ends."""
        begin_s, warned = time.monotonic(), False
        self._poll()
        while self._loads or self._stores:
            if not warned and time.monotonic() - begin_s > _DRAIN_WARN_S:
                warned = True
                log.warning("%d jobs are not finished by the stores yet", len(self._loads) + len(self._stores))
            self._below.wait(_DRAIN_POLL_S)
            self._poll()

    def shutdown(self) -> None:
        """Finish stores in flight, close the store and release the rows. Idempotent."""
        for load in self._loads.values():
            load.cancelled.set()
        try:
            if not self._below.close():
                log.warning("vLLM's secondary tier closes without its store, whose medium is stalled")
        except (StoreError, OSError):
            log.exception("the store of vLLM's secondary tier was not closed")
        self._poll()
        self._rows = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _queue(self) -> Queue:
        is_responsive = self._clock() - self._last_progress_s <= LIMITS.io_timeout_s
        releases_rows = is_responsive and bool(self._loads or self._stores)
        return Queue(*self._pending(DISK), releases_rows, *self._pending(REMOTE))

    def _pending(self, store: Home) -> tuple[int, float | None]:
        """Return the bytes that loads still have to read from a store, and the time at which one of these loads last
        made progress; None without loads."""
        loads = [load for load in self._loads.values() if load.left[store]]
        num_bytes = sum(load.left[store] for load in loads) * self.block_size_bytes
        return num_bytes, max((load.progress_s[store] for load in loads), default=None)

    def _waits_for_node(self, request: str) -> bool:
        """Return whether the request waits for another node that computes the request's prompt. After the wait, the
        chunks of the request are looked up again."""
        if request not in self._waiting_requests:
            return False
        if self._leases.is_waiting(request):
            return True
        self._waiting_requests.discard(request)
        self._lookups.forget(request)
        self.gate.forget_candidate(request)
        return False

    def _begin_prefill(self, missing: OffloadKey, context: ReqContext) -> bool:
        """Request the leases of the prompt, because the stores lack a chunk. Returns whether the request waits for
        another node that computes the chunk."""
        span = self._admission.span([missing], context)
        if REMOTE not in self._below.tiers or span is None:
            return False
        group, end = get_offload_group_idx(missing), max(context._offload_key_positions.values())
        if end - span[0] <= STEP_TOKENS:
            return False
        steps = [
            (chunk_end, chunk)
            for chunk, chunk_end in context._offload_key_positions.items()
            if chunk_end > span[0]
            and get_offload_group_idx(chunk) == group
            and (chunk_end % STEP_TOKENS < span[1] - span[0] or chunk_end == end)
        ]
        keys = self._server.keys([chunk for _, chunk in steps])
        ends = [chunk_end for chunk_end, _ in steps]
        if not self._leases.begin(context.req_id, list(zip(ends, keys, strict=True)), span[0], end):
            return False
        self._waiting_requests.add(context.req_id)
        return True

    def _answer_s(self, request: str, chunk: OffloadKey) -> float:
        """Return the seconds that a request waits until the remote store has looked up its chunks from `chunk` on."""
        context = self._contexts.get(request)
        span = None if context is None else self._admission.span([chunk], context)
        if context is None or span is None:
            return answer_limit_s(math.inf)
        end = max(context._offload_key_positions.values())
        return answer_limit_s(self.gate.cost.longest_wait_s(span[0], end))

    def _are_remote(self, chunks: Sequence[OffloadKey]) -> list[bool]:
        """Return for each chunk whether it would be read from the remote store; [] without a remote store."""
        if REMOTE not in self._below.tiers:
            return []
        return [self._below.store_of(key) is REMOTE for key in self._server.keys(chunks)]

    def _is_costly(self, context: ReqContext) -> bool:
        return self.gate.cost.is_costly(max(context._offload_key_positions.values(), default=0))

    def _cancel_stalled_loads(self) -> None:
        """Cancel stalled loads. vLLM then computes the chunks that were not read."""
        abandoned = False
        for load in self._loads.values():
            if load.span is None or load.cancelled.is_set():
                continue
            waits_for = [(store, load.progress_s[store]) for store, num_left in load.left.items() if num_left]
            start, end = load.span_left
            if any(self.gate.abandon_if_stalled(load.request, start, end, at_s, store) for store, at_s in waits_for):
                load.cancelled.set()
                abandoned = True
        if abandoned:
            self._below.notify_cancelled()

    def _pages(self, job: TransferJob) -> PageRows:
        assert self._rows is not None, "the tier is shut down"
        return PageRows(self._rows, job.chunk_ids.tolist())

    def _packed_chunks(
        self, chunks: tuple[OffloadKey, ...], pages: PageRows
    ) -> tuple[tuple[OffloadKey, ...], PageRows]:
        """Return the chunks whose rows contain all bytes of the chunk, and these rows."""
        if self._packing is None:
            return chunks, pages
        assert self._rows is not None, "the tier is shut down"
        are_packed = self._packing.are_packed(self._rows, pages.rows)
        self.misfit_pages.value += are_packed.count(False)
        ids = [row for row, is_packed in zip(pages.rows, are_packed, strict=True) if is_packed]
        return tuple(itertools.compress(chunks, are_packed)), PageRows(self._rows, ids)

    def _are_sha256(self, chunks: Sequence[OffloadKey]) -> bool:
        """Return whether the names of the chunks contain SHA-256 hashes, so that a name means the same chunk in every
        process. If not, log an error with the remedy once."""
        if all(len(chunk) == _KEY_BYTES for chunk in chunks):
            return True
        if not self._refused_hash:
            self._refused_hash = True
            log.error(
                "nothing is stored or served: block hashes of %d bytes are not SHA-256, so different blocks may have "
                "equal hashes, and the hash of a block differs between processes; start vLLM with "
                "--prefix-caching-hash-algo sha256",
                len(chunks[0]) - _GROUP_BYTES,
            )
        return False

    def _poll(self) -> None:
        """Process the answers of the stores."""
        for store, read in self._below.poll():
            if isinstance(read, FindDone):
                if not self._leases.found(read):
                    self._lookups.answered(read)
            elif isinstance(read, LeaseDone):
                self._leases.answered(read)
            elif isinstance(read, ReadDone):
                self._read(store, read)
        outcomes = self._backend.writes.poll()
        if self._events is not None:
            self._events.note_losses(self._backend.times_lost)
        for written in outcomes:
            if isinstance(written, WriteDone):
                self._written(written)

    def _read(self, store: Home, done: ReadDone) -> None:
        load = self._loads[done.ticket]
        load.ok[done.batch : done.batch + len(done.ok)] = done.ok
        load.left[store] -= len(done.ok)
        self._last_progress_s = self._clock()
        for job_id, other in self._loads.items():
            if job_id >= done.ticket:  # later loads wait for this load
                other.progress_s[store] = self._last_progress_s
        self.gate.on_read(sum(done.ok) * self.block_size_bytes, done.seconds, store)
        if not load.left.total():
            self._finish_load(done.ticket, load)

    def _finish_load(self, job_id: int, load: Load) -> None:
        del self._loads[job_id]
        if all(other.request != load.request for other in self._loads.values()):
            self.gate.on_loaded(load.request)
        read = [chunk for chunk, ok in zip(load.chunks, load.ok, strict=True) if ok]
        failed = [chunk for chunk, ok in zip(load.chunks, load.ok, strict=True) if not ok]
        self._lookups.mark(failed, held=False)
        self.miss_reasons.note(names_of(failed), MissReason.FAILED)
        self._results.append(
            JobResult(
                job_id,
                success=len(read) == len(load.chunks),
                successful_keys=read or None,
                transfer_time=self._clock() - load.begin_s,
                transfer_bytes=len(read) * self.block_size_bytes,
            )
        )

    def _written(self, done: WriteDone) -> None:
        store, self._last_progress_s = self._stores.pop(done.ticket), self._clock()
        self._waiting_bytes -= store.num_bytes
        written = [chunk for chunk, ok in zip(store.chunks, done.ok, strict=True) if ok]
        self._lookups.mark(written, held=True)
        self.miss_reasons.note(names_of(written), MissReason.NEVER_STORED)
        self.miss_reasons.note(names_of([*{*store.chunks} - {*written}]), MissReason.FAILED)
        deadline = store.context.get_state(_Deadline)
        if deadline is not None:
            self._backend.keep_until(self._server.keys(written), deadline.until_s)
        if self._events is not None:
            self._events.removed(done.removed)
            self._events.stored(self._server.keys(written), written)
        self._results.append(
            JobResult(
                done.ticket,
                success=all(done.ok),
                transfer_time=time.monotonic() - store.begin_s,
                transfer_bytes=sum(done.ok) * self.block_size_bytes,
            )
        )


def _prepare(spec: OffloadingSpec) -> None:
    """Prepare vLLM for a tier. Raises ConfigError for settings of vLLM under which hicache does not work."""
    remove_leftovers()
    warn_of_untested_vllm()
    correct_scheduler()
    report_steps()
    refuse_pipelines(spec.config)


def _descriptor_of(rows: PageBuffer, spec: OffloadingSpec) -> int:
    """Return a descriptor of the file that contains `rows`. The name of the file is removed here unless the spec
    removes it, because all workers have mapped the file when vLLM starts the scheduler. Raises StoreError if a store
    process could not map the file."""
    descriptor = descriptor_of(rows.reshape(-1))
    if descriptor is None:
        raise StoreError("a store process cannot map vLLM's CPU tier: it is not one open file of this process")
    if not isinstance(spec, HiCacheOffloadingSpec):
        remove_names(name_of(rows.reshape(-1)))
    return descriptor
