"""The engine that a scheduler calls: lookup, prefetch, acquire, extend, commit, release.

The engine creates the transfers (copies, reads and writes between tiers), and starts and stops the parts that own
threads or files. Results of finished copies, reads and writes take effect in `poll()`; results of finished copies also
take effect in `acquire()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch

from hicache.config import PrefetchMode
from hicache.device.base import KVCache
from hicache.device.req_to_token import ReqToTokenPool
from hicache.errors import (
    ConcurrentCall,
    DoubleFree,
    DuplicateRequest,
    ForeignLease,
    HiCacheError,
    InvalidArgument,
    InvalidTokens,
    InvariantError,
    LeaseEnded,
    NotRunning,
    ResourceExhausted,
)
from hicache.flow.admit import Admit
from hicache.flow.commit import Commit
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.copies import Copies
from hicache.flow.cost import CostModel, LoadPolicy, Requests
from hicache.flow.lease import CacheRequest, Hit, Lease, LookupResult, Prefetch
from hicache.flow.page_transfer import Load, PageTransfer, settle
from hicache.flow.prompt import Prompts
from hicache.flow.reads import Prefetcher, look_up
from hicache.flow.stop import flush, store_promised
from hicache.flow.upkeep import Inspection, MemoryTier, check_engine, register_usage, reset
from hicache.flow.writes import writes_of
from hicache.kv_events import EventPublisher
from hicache.metrics import MetricInfo, MetricValue, flattened
from hicache.pages.key import SHARED_TOKENS, Tokens, owned, pack_tokens
from hicache.storage.owner import OwnerProcess
from hicache.stores.tier import StoreTier
from hicache.tiers import SWA
from hicache.transfer.base import TransferBackend
from hicache.transfer.counter import LayerTransferCounter

__all__ = ["CacheEngine", "CacheRequest", "Hit", "Lease", "LookupResult", "MemoryTier", "Prefetch"]

log = logging.getLogger(__name__)

_EXIT_S = 5.0  # maximum time of `abandon`
_POLL_S = 0.001  # time between two checks whether a call has ended
_MODES = get_args(PrefetchMode)
_MAX_COUNT = (1 << 63) - 1
_MAX_RANK = (1 << 31) - 1  # maximum priority and number of uses: up to 2^31, eviction ranks (sums of floats) are exact
MAX_NEXT_TURN_S = 86_400.0  # a day; a next turn after more than a day may still hit pages that were not evicted
# The maximum tokens and seconds of a reported pass, so that a wrong report distorts the estimates only briefly.
_MAX_PASS_TOKENS, _MAX_PASS_S = 1 << 32, 1e6
C = TypeVar("C", bound=CacheComponent)
P = ParamSpec("P")
R = TypeVar("R")


def one_call_at_a_time(verb: Callable[Concatenate[CacheEngine, P], R]) -> Callable[Concatenate[CacheEngine, P], R]:
    """Wrap a method of the engine so that a call during another call of the engine, from any thread, raises
    `ConcurrentCall`. Uses no lock."""
    return _wrapped(verb, must_run=False)


def running(verb: Callable[Concatenate[CacheEngine, P], R]) -> Callable[Concatenate[CacheEngine, P], R]:
    """Wrap a method as `one_call_at_a_time` does. The method raises `NotRunning` unless the engine runs in this
    process."""
    return _wrapped(verb, must_run=True)


def _wrapped(
    verb: Callable[Concatenate[CacheEngine, P], R], *, must_run: bool
) -> Callable[Concatenate[CacheEngine, P], R]:
    @functools.wraps(verb)
    def call(engine: CacheEngine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        turn, thread = engine._turn, threading.get_ident()
        if turn.thread is not None:
            engine._refuse_second()
        try:  # no function call between check and assignment, so the interpreter does not switch threads
            turn.thread = thread
            if must_run and (engine._not_running_reason or engine._owner.pid != os.getpid()):
                engine._require_running()
            return verb(engine, *args, **kwargs)
        except BaseException as error:
            is_refusal = isinstance(error, HiCacheError) and not isinstance(error, (DoubleFree, InvariantError))
            is_finding = isinstance(error, InvariantError) and verb.__name__ == "check"  # `check` changes nothing
            if not (is_refusal or is_finding):
                engine._check_after_error(verb.__name__, error)
            raise
        finally:
            turn.thread = None

    return call


class _Lifecycle(Enum):
    NEW = auto()
    STARTED = auto()
    CLOSED = auto()


class _Turn:
    """The thread that is inside a call of the engine, if any. The exit hook shares this object without keeping the
    engine alive."""

    def __init__(self) -> None:
        self.thread: int | None = None

    def take(self, deadline_s: float) -> bool:
        """Wait until the current call has ended, and then refuse the calls of all other threads forever. Returns False
        if the call has not ended by `deadline_s` of `time.monotonic`."""
        thread = threading.get_ident()
        while True:
            if self.thread is None or self.thread == thread:
                self.thread = thread  # no function call since the check, as in `one_call_at_a_time`
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)


class CacheEngine:
    """One hierarchical cache. Build it with `hicache.build.factory.build_engine`; use it in a `with` statement, or call
    `start` and `close`.

    Any thread may call the engine, one thread at a time. Every method checks its arguments first, and a call that
    raises one of these errors has changed nothing: `InvalidTokens` for tokens that are not a sequence of ids;
    `InvalidArgument` for another argument of a wrong type or out of range; `LeaseEnded` and `ForeignLease` for a lease
    that the engine does not hold; `NotRunning` before `start`, after `close` and in a fork; `ConcurrentCall` while
    another call runs.
    """

    def __init__(self, context: EngineContext, events: EventPublisher | None = None) -> None:
        self._context = context
        self._owner = OwnerProcess("the engine")
        on_host = [component for component in context.components if component.has_host]
        self._hosts = [component.host for component in on_host]
        self._transfers: list[TransferBackend] = [component.transfer for component in on_host]
        self._stores = list(context.stores.values())
        self._events = events
        self._turn = _Turn()  # the thread that is inside a call, if any
        # The reason why calls other than `release`, `cancel` and `close` are refused; empty while the engine runs.
        self._not_running_reason = "the engine is not started; call start()"
        self._is_broken = False  # True if a call raised before its end, and invariants of the engine are violated
        self._lifecycle = _Lifecycle.NEW
        self._finalizer: weakref.finalize[..., object] | None = None
        self._leases = dict[str, Lease]()
        self._prompts = Prompts(context.tree)
        self._cost = CostModel.of(context)
        self._writes = writes_of(context)
        policy = LoadPolicy(self._cost, context.metrics, "restore", "host", "restore_gate_loads")
        self._copies = Copies(context, policy, self._writes)
        self._admit = Admit(context, self._prompts, self._copies)
        self._requests = requests = Requests(self._leases, self._admit.expected)
        self._prefetcher = Prefetcher(context, self._prompts, policy, requests) if context.stores else None
        self._commit = Commit(context, self._copies, self._writes)
        transfers = (self._copies, self._admit.staged, *self._writes, self._prefetcher)
        self._page_transfers: list[PageTransfer] = [transfer for transfer in transfers if transfer is not None]
        register_usage(context, lambda: len(self._leases))

    # For model runners

    @property
    def pool(self) -> KVCache:
        return self._context.pool

    @property
    def req_to_token(self) -> ReqToTokenPool:
        return self._context.req_to_token

    @property
    def counter(self) -> LayerTransferCounter:
        return self._context.full.counter

    def component(self, kind: type[C]) -> C:
        """Return the engine's component of class `kind`, for example a class that was given to `build_engine`. Raises
        `InvalidArgument` if the engine has no such component."""
        for component in self._context.components:
            if isinstance(component, kind):
                return component
        raise InvalidArgument(f"the engine has no {kind.__name__}; give it to build_engine as a component")

    @property
    def allocates_by_chunk(self) -> bool:
        """Return whether the scheduler should reserve slots chunk by chunk (`reserve_tokens`). True for models with
        windows, which have few slots, and under `exclusive`, where taking slots requires copies."""
        return SWA in self._context.by_name or self._context.exclusive is not None

    @property
    def page_size(self) -> int:
        """Tokens of a cache page: the unit of matching, backup and disk."""
        return self._context.tree.page_size

    # Metrics

    def stats(self) -> dict[str, float]:
        """Return each metric as one number: `metrics()` with each histogram replaced by its sum. For tests and logs."""
        return flattened(self.metrics())

    def metrics(self) -> dict[str, MetricValue]:
        """Return all metrics by name, sorted; docs/metrics.md explains each metric. Any thread may call this method at
        any time."""
        return self._context.metrics.snapshot()

    def describe(self) -> dict[str, MetricInfo]:
        """Return type, unit and help text of each metric of `metrics()`."""
        return self._context.metrics.describe()

    # Start and close

    @one_call_at_a_time
    def start(self) -> None:
        """Start the threads. No copy runs before this call. A second call does nothing. Raises `NotRunning` after
        `close` and in a fork."""
        self._owner.require_here()
        if self._lifecycle is not _Lifecycle.NEW:
            self._require_running()
            return
        self._lifecycle = _Lifecycle.STARTED
        self._not_running_reason = ""
        threads = (self._transfers, self._stores, self._events)
        self._finalizer = weakref.finalize(self, abandon, self._owner, self._turn, *threads)
        for part in (*self._transfers, self._events):
            if part is not None:
                part.start()

    @one_call_at_a_time
    def close(self) -> None:
        """Release every lease, finish all copies in flight, write pages to the stores, stop the threads and close the
        stores. The written pages are the pages of the host, and pages of the device that the write policy would copy to
        the host, beginnings of prompts first. In a fork, this method does nothing.

        Waits at most twice the I/O timeout of a store for a store that does not answer. If a store was not closed, a
        later call closes it.
        """
        if not self._owner.is_here:
            return
        finalizer, was_running = self._finalizer, not self._not_running_reason
        was_closed = self._lifecycle is _Lifecycle.CLOSED or (finalizer is not None and not finalizer.alive)
        self._lifecycle = _Lifecycle.CLOSED
        self._not_running_reason = "the engine is closed; build another"
        if was_closed:
            for tier in self._stores:
                tier.close()
            return
        with contextlib.ExitStack() as ending:  # closes every part even if closing another part raised
            if finalizer is not None:
                ending.callback(finalizer.detach)
            for part in (self._events, *reversed(self._hosts), *self._stores, *reversed(self._transfers)):
                if part is not None:
                    ending.callback(part.close)
            self._finish(was_running)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # Before admission

    @running
    def lookup(self, tokens: npt.ArrayLike, namespace: str = "", disk_wait_s: float = 0.05) -> LookupResult:
        """Count the prompt's cached tokens in each tier, without the last token, which is always computed. Changes
        nothing.

        Waits at most `disk_wait_s` seconds for the disk and the remote tier. If one of these tiers has not answered by
        then, `LookupResult.disk_known` is False.
        """
        packed, namespace = valid_tokens(tokens), valid_namespace(namespace)
        wait_s = valid_number("disk_wait_s", disk_wait_s)
        device, usable, located = self._admit.locate(packed[:-1], namespace)
        on_disk, remote, known = 0, 0, True
        if self._prefetcher is not None and located is not None:
            on_disk, remote, known = look_up(located, wait_s)
        keys = located.prompt.keys if located is not None else ()
        missed = self._admit.missed(keys, usable + on_disk + remote, len(packed), ())
        return LookupResult(device, usable - device, on_disk, known, remote, missed)

    @running
    def prefetch(
        self,
        request_id: str,
        tokens: npt.ArrayLike,
        namespace: str = "",
        mode: PrefetchMode | None = None,
        *,
        overlaps: bool = False,
    ) -> Prefetch:
        """Start reading pages of the prompt from the disk and the remote tier to the host. When `ready` of the returned
        handle is True, the request may be admitted.

        `mode` (default: the mode of the configuration): "auto" waits if waiting is estimated to cost all requests
        together less time than computing; "best_effort" never waits; "wait_complete" waits until all reads have ended;
        "timeout" waits for at most `prefetch_timeout_s`.

        A successful `acquire`, or `cancel` of the request, ends the prefetch, and its pages no longer count for
        `prefetch_host_share`. Until then, another call for the request returns the same handle.

        `overlaps`: the caller will call `join`. In mode "auto", pages are then read from the end of the prompt
        backwards, even while the prompt is computed from its beginning. The request waits for no page if computing its
        prompt delays no other request. The commit of the complete prompt ends the reads.
        """
        packed, namespace, request_id = valid_tokens(tokens), valid_namespace(namespace), valid_request_id(request_id)
        mode = self._context.config.prefetch_mode if mode is None else valid_mode(mode)
        if self._prefetcher is not None:
            return self._prefetcher.start(request_id, packed[:-1], namespace, mode, overlaps=overlaps)
        handle = Prefetch(request_id, mode)
        handle.end()
        return handle

    @running
    def expect(self, request_id: str, tokens: npt.ArrayLike, namespace: str = "") -> int:
        """Announce a queued request until its `acquire` or `cancel`. Estimates count the request as delayed while other
        requests are computed, and its prefix in memory is evicted last. Returns the number of tokens of this prefix. A
        second call includes pages that arrived since the first call."""
        return self._admit.expect(valid_request_id(request_id), valid_tokens(tokens), valid_namespace(namespace))

    @running
    def poll(self) -> bool:
        """Apply the results of finished copies, reads and writes. Call this method once a step; it never blocks.
        Returns True while a staged load is in progress, which each further poll advances."""
        if self._commit.had_hints:
            self._commit.expire_hints()
        for transfer in self._page_transfers:
            transfer.poll()
        if self._events is not None:
            self._events.publish()
        return self._admit.staged is not None and self._admit.evict_ahead(self._leases)

    @running
    def observe_prefill(self, num_tokens: int, seconds: float, mean_position: float | None = None) -> None:
        """Report that a forward pass over `num_tokens` prompt tokens took `seconds` of device time, without time that
        requests waited for the device.

        `mean_position`: mean position of these tokens in their sequences, because attention costs more after a long
        prefix; None: the tokens begin a prompt. Report only passes that waited for no load
        (`hicache.serving.prefill_meter`).
        """
        tokens, took_s, position = valid_pass(num_tokens, seconds, mean_position)
        if tokens and took_s:
            self._cost.observe_prefill(tokens, took_s, position)

    # A request's life

    @running
    def acquire(self, request: CacheRequest) -> Lease:
        """Admit a request: lock its cached prefix, take slots for the other tokens, and submit the loads.

        Raises `PromptTooLong` if the request never fits, `DuplicateRequest`, or a `ResourceExhausted` such as
        `OutOfSlots` or `PrefetchPending`. After a `ResourceExhausted`, poll and retry, or cancel the request. Before
        this method raises `ResourceExhausted`, it applies the results of finished copies. If pages must be evicted
        under `write_back` or `exclusive`, this method waits for their copies to the host, see
        `CacheRequest.may_wait`.
        """
        request = valid_request(request)
        if request.request_id in self._leases:
            raise DuplicateRequest(request.request_id)
        prefetcher = self._prefetcher
        try:
            if prefetcher:
                prefetcher.require_ready(request.request_id)
            lease = self._admit.acquire(request, self._requests.num_delayed(request.request_id))
        except ResourceExhausted as error:
            self._admit.refused(error)
            raise
        self._leases[request.request_id], lease.on_exit = lease, self.release
        try:
            self._admit.forget(request.request_id)
            self._admit.count_missed(lease, prefetcher.unread(request.request_id) if prefetcher else ())
            if prefetcher:
                prefetcher.admit(lease)
            else:
                self._prompts.forget(request.request_id)
        except BaseException:
            self._end(lease)
            raise
        return lease

    @running
    def join(self, lease: Lease, num_tokens: int) -> Hit:
        """Load the pages that an overlapped prefetch has read after the first `num_tokens` of the prompt, which are
        computed and committed. Call this method before each pass over the prompt.

        Returns the tokens after `num_tokens` that need no computing any more, by tier. No tokens are returned if no
        page with these tokens has arrived, or if the device has no capacity for them now. The returned tokens are added
        to `lease.hit`. The lease keeps its row and its states; read `lease.slots` again.
        """
        self._held((lease,))
        num_tokens, request_id = valid_count("num_tokens", num_tokens), lease.request_id
        if self._prefetcher is None or not self._prefetcher.is_next_on_host(lease, num_tokens):
            return Hit()
        before = lease.cached_len
        try:
            hit = self._admit.join(lease, num_tokens, self._requests.num_delayed(request_id))
            if hit.tokens:
                self._prefetcher.joined(lease, num_tokens - before, hit.tokens)
        except BaseException:
            self._prefetcher.cancel(request_id)
            self._end(lease)
            raise
        return hit

    @running
    def extend(self, lease: Lease, num_tokens: int) -> torch.Tensor:
        """Take slots for `num_tokens` more tokens of the request. Returns the new slots, int64 on the pool's device.

        Raises `OutOfSlots`, and `PromptTooLong` if the sequence would exceed `max_context_len`. If pages must be
        evicted under `write_back` or `exclusive`, this method waits for their copies to the host.
        """
        self._held((lease,))
        return self._admit.extend(lease, valid_count("num_tokens", num_tokens))

    @running
    def commit(self, lease: Lease, tokens: npt.ArrayLike) -> None:
        """Share the complete pages of `tokens`, the sequence so far, and start the backups of these pages. The KV of
        all `tokens` must be in the lease's slots, or work queued on the device must write it.

        Call this method after every prefill chunk and at the end. A recurrent state has consumed exactly `tokens`; the
        state is kept if `tokens` end at a page boundary. Raises `TransferError` if the prefix failed to load,
        `TokensMismatch` if `tokens` do not begin with the lease's prompt, and `InvalidTokens` if `tokens` exceed the
        lease's slots.
        """
        self._held((lease,))
        packed = valid_tokens(tokens, minimum=0, known_len=lease.tokens.num_tokens)
        self._commit.commit(lease, packed)
        if self._prefetcher and len(packed) >= lease.prompt_len:
            self._prefetcher.end_reads(lease)

    @running
    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """Return the position, at most `end`, at which a pass over the prompt from `start` should end. Call `commit`
        after this pass.

        The position is below `end` in two cases. A pass of a hybrid model ends where a state is worth keeping: at the
        last page boundary of the prompt, or where the cached prefix branches off another prompt. A pass also ends where
        it reaches pages that an overlapped prefetch has read.
        """
        self._held((lease,))
        start, end = valid_interval(start, end)
        for component in self._context.components:
            end = component.next_stop(lease, start, end)
        return end if self._prefetcher is None else self._prefetcher.next_stop(lease, start, end)

    @running
    def track(self, leases: Sequence[Lease]) -> None:
        """Keep recurrent states: a hybrid model copies a state every `mamba_track_interval` tokens, and the next commit
        shares this copy. Call this method after each decode step, before the next `extend`. For other models, this
        method does nothing."""
        self._commit.track(self._held(leases))

    @running
    def begin_forward(self, leases: Sequence[Lease]) -> None:
        """Announce that the next forward pass is for `leases`. The layers of this pass then wait for the loads of these
        leases.

        Call this method before each pass that reads KV, even between two passes of one lease, and read `lease.slots`
        afterwards. `commit` may have replaced slots of the lease by slots of another request, and a pass of other
        leases waits for other loads. If a pass raised any error, release the leases of a hybrid model, because the
        states of these leases may have advanced.
        """
        loads = set[Load]()
        for lease in self._held(leases):
            loads.update(lease.loads)
        for component in self._context.components:
            component.counter.set_consumer([load.load_ids.get(component.name, -1) for load in loads] if loads else ())

    @running
    def backup(self, lease: Lease) -> None:
        """Copy the committed pages of a lease to the host now, even if the write policy does not select them, and wait
        for the copy. Call this method for a request that is preempted and will resume. This method does nothing without
        a host tier, and copies no page for which the host has no capacity."""
        self._held((lease,))
        self._copies.backup_path(lease.node)

    @running
    def load_failed(self, lease: Lease) -> bool:
        """Return whether a load of the lease's prefix failed, so that the request must be released and acquired again.
        Call this method after a pass that raised `TransferError`. The method waits for loads in flight."""
        self._held((lease,))
        return self._copies.error_of(lease) is not None

    @one_call_at_a_time
    def release(self, lease: Lease, *, continues: bool = False) -> None:
        """End the lease of a finished or aborted request: unlock the prefix and free the other slots. A second call
        does nothing. The method also works on a closed engine. `continues`: the request will be admitted again, so its
        hints (`expected_uses`, `session_end`, `next_turn_within_s`) do not take effect yet.

        Raises `ForeignLease`. In a fork, this method does nothing.
        """
        if isinstance(lease, Lease) and (lease.released or self._owner.pid != os.getpid()):
            return
        self._held((lease,))
        self._release(lease, continues=continues)

    @one_call_at_a_time
    def cancel(self, request_id: str) -> None:
        """End the prefetch, the expectation and the lease of an aborted request, if the request has them. In a fork,
        this method does nothing."""
        request_id, lease = valid_request_id(request_id), self._leases.get(request_id)
        if not self._owner.is_here:
            return
        try:
            if not self._is_broken:
                self._forget(request_id)
        finally:
            if lease is not None:
                self._end(lease)

    @running
    def flush(self) -> None:
        """Wait until all copies and writes in flight have ended, and write to each store all pages of the host. Under
        write policies that copy at eviction, write the pages of the device too. The write budget of a store does not
        delay these writes. Pages that a store refused are retried.

        Raises `NotStored` if a store still refuses pages. Raises `InvariantError` if a copy never ends: an exception
        inside an earlier call, such as KeyboardInterrupt, may leave a copy counted as in flight. After an
        `InvariantError`, close the engine.
        """
        error = flush(self._context, self._copies, self._writes, self._settle)
        if self._events is not None:
            self._events.publish()
        if error is not None:
            raise error

    def _settle(self) -> None:
        """Write all pages of the host to the stores, and wait for all transfers to end. Raises `InvariantError` if no
        transfer ends within twice the longest time of a job."""
        for writes in self._writes:
            writes.drain()
        timeout_s = self._context.config.advanced.disk_io_timeout_s
        settle(self._page_transfers, 2 * max(timeout_s, *(tier.timeout_s for tier in self._stores), 0.0))
        for writes in self._writes:
            writes.resume()

    @running
    def reset(self, tiers: Sequence[MemoryTier] = ("device", "host")) -> bool:
        """Drop the cached prompts of `tiers` without copying them anywhere. Stores keep their pages. Returns False if
        some pages remain because requests or copies use them; `flush` ends the copies."""
        return reset(self._context, tiers)

    @property
    def inspect(self) -> Inspection:
        """The parts of the engine, for tests and tools."""
        return Inspection(self._context, self._copies, self._writes, self._prefetcher)

    @one_call_at_a_time
    def check(self) -> None:
        """Raise `InvariantError` with every violation of docs/invariants.md. For tests and idle engines."""
        self._prove()

    def _prove(self) -> None:
        check_engine(self._context, list(self._leases.values()), self._copies.loads, self._page_transfers)

    # Checks at the beginning of each verb

    def _require_running(self) -> None:
        self._owner.require_here()
        if self._not_running_reason:
            raise NotRunning(self._not_running_reason)

    def _refuse_second(self) -> None:
        """Raise ConcurrentCall for a call during another call. In a fork, do nothing, because the other call never ends
        in the fork."""
        if self._owner.is_here:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise ConcurrentCall(f"thread {names.get(self._turn.thread, self._turn.thread)}")

    def _check_after_error(self, verb: str, error: BaseException) -> None:
        """Check all invariants after a call of `verb` ended in an unexpected error, such as KeyboardInterrupt. If an
        invariant is violated, refuse all calls except `release`, `cancel` and `close`."""
        before = self._is_broken, self._not_running_reason
        self._is_broken = True  # in case the check is interrupted too
        reason = f"{error!r} left {verb}() half done; close the engine and build another"
        self._not_running_reason = self._not_running_reason or reason
        try:
            of_host = [component.pages.table for component in self._context.components if component.has_host]
            for table in {self._context.tree.table, *of_host}:
                table.sweep()
            self._prove()
        except Exception:
            log.exception("the engine takes no further calls: %r left %s() half done", error, verb)
        else:
            self._is_broken, self._not_running_reason = before

    def _held(self, leases: object) -> Sequence[Lease]:
        """Return `leases`, one lease or several, as a sequence. Raises `InvalidArgument`, `LeaseEnded` and
        `ForeignLease` unless the engine holds all of them."""
        held = tuple(leases) if isinstance(leases, Iterable) else (leases,)
        for lease in held:
            if not isinstance(lease, Lease):
                raise InvalidArgument(f"a {type(lease).__name__} was given for a lease; give what acquire() returned")
            if lease.released:
                raise LeaseEnded(lease.request_id)
            if self._leases.get(lease.request_id) is not lease:
                raise ForeignLease(lease.request_id)
        return held

    def _finish(self, was_running: bool) -> None:
        """Release every lease and, if the threads run, finish the copies and writes in flight."""
        for lease in list(self._leases.values()):
            self._release(lease)
        if self._admit.staged is not None and not self._is_broken:
            self._admit.staged.end()
        try:
            if was_running:
                store_promised(self._context, self._copies, self._writes, self._settle)
        except InvariantError:
            log.warning("closed while a copy was counted as in flight that never ends; was a call interrupted?")

    def _forget(self, request_id: str) -> None:
        """End the expectation, the kept page keys and the prefetch of a request that no longer waits."""
        self._admit.forget(request_id)
        self._prompts.forget(request_id)
        if self._prefetcher:
            self._prefetcher.cancel(request_id)

    def _release(self, lease: Lease, *, continues: bool = False) -> None:
        try:
            if self._prefetcher and not self._is_broken:
                self._prefetcher.end_reads(lease)
        finally:
            self._end(lease, continues=continues)

    def _end(self, lease: Lease, *, continues: bool = False) -> None:
        """End the lease even if this method raises. If the engine is broken, do not free the slots of the lease."""
        try:
            if self._is_broken:
                lease.released = True
            else:
                self._commit.release(lease, continues=continues)
        finally:
            if lease.released:
                del self._leases[lease.request_id]


def abandon(
    owner: OwnerProcess,
    turn: _Turn,
    transfers: Sequence[TransferBackend],
    stores: Sequence[StoreTier],
    events: EventPublisher | None,
) -> None:
    """Stop the threads of an engine that was not closed, when the engine is garbage collected or when the interpreter
    exits. Otherwise the exit would end these threads inside torch and abort the process. Takes at most `_EXIT_S`. In a
    fork, this function does nothing.

    A daemon thread may be inside a call of the engine. This function waits for the end of that call, and no other call
    begins. If the call does not end in time, the stores are not closed here: the processes of the stores end when this
    process ends.
    """
    if not owner.is_here:
        return
    deadline_s = time.monotonic() + _EXIT_S
    is_alone = turn.take(deadline_s - _EXIT_S / 2)
    for transfer in transfers:
        transfer.abandon(deadline_s)
    for store in stores if is_alone or turn.take(deadline_s) else ():
        store.abandon(max(0.0, deadline_s - time.monotonic()))
    if events is not None:
        events.abandon(deadline_s)


# Checks of the arguments of all methods, made before anything changes. Each function returns the normalized value, or
# raises an error with the given value and the allowed ones.


def valid_tokens(tokens: npt.ArrayLike, minimum: int = 1, known_len: int = 0) -> Tokens:
    """Return at least `minimum` token ids as contiguous int64 `[n]`, without a copy if possible. Raises
    `InvalidTokens`.

    The first `known_len` tokens are not checked, because the caller compares them with valid tokens.
    """
    ids = pack_tokens(tokens)
    if len(ids) < minimum:
        raise InvalidTokens("there are no tokens; give at least one token id")
    fresh = ids[known_len:]
    if len(fresh) and fresh.min() < 0:
        raise InvalidTokens(f"the lowest token id is {fresh.min()}; give ids of at least 0")
    return ids


def valid_namespace(namespace: str) -> str:
    """Return a namespace that can be part of page keys. Raises `InvalidArgument`."""
    if not isinstance(namespace, str):
        raise InvalidArgument(f"namespace={namespace!r} is of type {type(namespace).__name__}; give a str")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"namespace={namespace!a} has no UTF-8 form (position {error.start}); give text without lone surrogates"
        ) from None
    return namespace


def valid_request_id(request_id: str) -> str:
    """Return a request id that is a str. Raises `InvalidArgument`."""
    if not isinstance(request_id, str):
        raise InvalidArgument(f"request_id={request_id!r} is of type {type(request_id).__name__}; give a str")
    return request_id


def valid_mode(mode: PrefetchMode) -> PrefetchMode:
    """Return a known prefetch mode. Raises `InvalidArgument`."""
    if mode not in _MODES:
        raise InvalidArgument(f"mode={mode!r}: choose one of {', '.join(_MODES)}")
    return mode


def valid_number(name: str, value: Any, maximum: float = math.inf) -> float:
    """Return a number from 0 to `maximum`. Raises `InvalidArgument`."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise InvalidArgument(f"{name}={value!r} is of type {type(value).__name__}; give a number")
    if not 0 <= value <= maximum:
        raise InvalidArgument(f"{name}={value} is not from 0 to {maximum:g}")
    return float(value)


def valid_count(name: str, value: Any, maximum: int = _MAX_COUNT, minimum: int = 0) -> int:
    """Return `value` as an int from `minimum` to `maximum`. Accepts each integer type except bool. Raises
    `InvalidArgument`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name}={value!r} is of type {type(value).__name__}; give a whole number")
    if not minimum <= count <= maximum:
        shown = f"{name}={count}" if abs(count) <= _MAX_COUNT else f"{name}=..., a number of {count.bit_length()} bits,"
        raise InvalidArgument(f"{shown} is not from {minimum} to {maximum}")
    return count


def valid_interval(start: Any, end: Any) -> tuple[int, int]:
    """Return `start` and `end` as ints of at least 0. Raises `InvalidArgument`."""
    if type(start) is int and type(end) is int and 0 <= start <= _MAX_COUNT and 0 <= end <= _MAX_COUNT:
        return start, end
    return valid_count("start", start), valid_count("end", end)


def valid_pass(num_tokens: Any, seconds: Any, mean_position: Any) -> tuple[int, float, float]:
    """Return tokens, seconds and mean position of a pass. Raises `InvalidArgument`."""
    tokens = valid_count("num_tokens", num_tokens, _MAX_PASS_TOKENS)
    position = tokens / 2 if mean_position is None else valid_number("mean_position", mean_position, _MAX_PASS_TOKENS)
    return tokens, valid_number("seconds", seconds, _MAX_PASS_S), position


def valid_request(request: CacheRequest) -> CacheRequest:
    """Return the request with contiguous tokens. Raises `InvalidTokens` and `InvalidArgument`."""
    if not isinstance(request, CacheRequest):
        raise InvalidArgument(f"a {type(request).__name__} was given for a request; give a CacheRequest")
    reserve, uses, points = request.reserve_tokens, request.expected_uses, request.branch_points
    cached, within_s = request.max_cached_tokens, request.next_turn_within_s
    if request.session_end and (uses is not None or within_s is not None):
        raise InvalidArgument("session_end=True excludes expected_uses and next_turn_within_s; give one of them")
    if not isinstance(points, Iterable):
        raise InvalidArgument(f"branch_points={points!r} is of type {type(points).__name__}; give positions")
    tokens = valid_tokens(request.tokens)
    return dataclasses.replace(
        request,
        request_id=valid_request_id(request.request_id),
        tokens=owned(tokens) if len(tokens) >= SHARED_TOKENS else tokens,  # the lease and the prompt share one copy
        namespace=valid_namespace(request.namespace),
        reserve_tokens=None if reserve is None else valid_count("reserve_tokens", reserve),
        priority=valid_count("priority", request.priority, _MAX_RANK),
        branch_points=tuple(map(functools.partial(valid_count, "branch_points"), points)),
        is_counted=bool(request.is_counted),
        may_wait=bool(request.may_wait),
        max_cached_tokens=None if cached is None else valid_count("max_cached_tokens", cached),
        expected_uses=None if uses is None else valid_count("expected_uses", uses, _MAX_RANK, minimum=1),
        session_end=bool(request.session_end),
        next_turn_within_s=None if within_s is None else valid_number("next_turn_within_s", within_s, MAX_NEXT_TURN_S),
    )
