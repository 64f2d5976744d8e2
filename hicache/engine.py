"""The facade a scheduler talks to: match, prefetch, acquire, extend, commit, release.

It builds the movements in their order, and starts and ends the parts that have threads or files. Results land in
`poll()`, and of copies in `acquire()`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

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
    InvariantError,
    LeaseEnded,
    NotRunning,
    ResourceExhausted,
)
from hicache.flow.admit import Admit
from hicache.flow.backup import Backup, DeviceEviction
from hicache.flow.commit import Commit
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel, LoadPolicy, Requests
from hicache.flow.lease import CacheRequest, Hit, Lease, LookupResult, Prefetch
from hicache.flow.movement import Movement, land, settle
from hicache.flow.persist import persists_of
from hicache.flow.prompt import Prompts
from hicache.flow.reads import Prefetcher, look_up
from hicache.flow.restore import Restore
from hicache.flow.stop import flush, store_promised
from hicache.flow.upkeep import Inspection, MemoryTier, check_engine, register_usage, reset
from hicache.flow.validation import (
    valid_count,
    valid_leases,
    valid_mode,
    valid_namespace,
    valid_number,
    valid_pass,
    valid_request,
    valid_request_id,
    valid_tokens,
)
from hicache.kv_events import EventPublisher
from hicache.metrics import MetricInfo, MetricValue, flattened
from hicache.storage.owner import OwnerProcess
from hicache.stores.tier import StoreTier
from hicache.tiers import SWA
from hicache.transfer.base import TransferBackend
from hicache.transfer.counter import LayerTransferCounter

__all__ = ["CacheEngine", "CacheRequest", "Hit", "Lease", "LookupResult", "MemoryTier", "Prefetch"]

log = logging.getLogger(__name__)

_EXIT_S = 5.0
_LOOK_S = 0.001
C = TypeVar("C", bound=CacheComponent)
P = ParamSpec("P")
R = TypeVar("R")


def exclusive(verb: Callable[Concatenate[CacheEngine, P], R]) -> Callable[Concatenate[CacheEngine, P], R]:
    """A verb of an engine, which is refused while another one is under way, in whichever thread. That takes no lock."""

    @functools.wraps(verb)
    def call(engine: CacheEngine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        thread = threading.get_ident()
        if engine._turn.thread is not None:
            engine._refuse_second()
        try:  # from the look to the note nothing is called, so no other thread comes in between
            engine._turn.thread = thread
            return verb(engine, *args, **kwargs)
        except BaseException as error:
            is_refusal = isinstance(error, HiCacheError) and not isinstance(error, (DoubleFree, InvariantError))
            is_finding = isinstance(error, InvariantError) and verb.__name__ == "check"  # no call has left it behind
            if not (is_refusal or is_finding):
                engine._doubt(verb.__name__, error)
            raise
        finally:
            engine._turn.thread = None

    return call


class _Turn:
    """Which `thread` is inside a call of an engine, if any is. The hook at the exit shares it, without the engine."""

    def __init__(self) -> None:
        self.thread: int | None = None

    def take(self, deadline_s: float) -> bool:
        """Be inside for good, so that calls of other threads are refused, once the one under way has ended; False: it
        has not, until `deadline_s` of `time.monotonic`."""
        thread = threading.get_ident()
        while True:
            if self.thread is None or self.thread == thread:
                self.thread = thread  # as in `exclusive`
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_LOOK_S)


class CacheEngine:
    """One hierarchical cache. Build it with `hicache.build.factory.build_engine`; use it in a `with`, or `start` and
    `close` it.

    Every verb checks its arguments first, and a call that raises has changed nothing: `InvalidTokens` for tokens that
    are no run of ids, `InvalidArgument` for what else is of the wrong kind or out of range, `LeaseEnded` and
    `ForeignLease` for a lease that the engine does not hold, `NotRunning` before `start`, after `close` and in a fork,
    `ConcurrentCall` while another thread is inside a call: any thread may call, one at a time.

    `_turn`: the thread inside a call. `_why_not`: why only what ends something may be called; empty while it runs.
    `_is_broken`: a call left the accounts half done, so nothing may rely on them.
    """

    def __init__(self, context: EngineContext, events: EventPublisher | None = None) -> None:
        self._context = context
        self._owner = OwnerProcess("the engine")
        on_host = [component for component in context.components if component.has_host]
        self._hosts = [component.host for component in on_host]
        self._transfers: list[TransferBackend] = [component.transfer for component in on_host]
        self._stores = list(context.stores.values())
        self._events = events
        self._turn = _Turn()
        self._why_not = "the engine is not started; call start()"
        self._is_broken = False
        self._is_started = False
        self._is_closed = False
        self._finalizer: weakref.finalize[..., object] | None = None
        self._leases = dict[str, Lease]()
        self._prompts = Prompts(context.tree)
        self._cost = CostModel.of(context)
        self._persists = persists_of(context)
        self._backup = Backup(context, self._persists) if context.has_host else None
        policy = LoadPolicy(self._cost, context.metrics, "restore", "host", "restore_gate_loads")
        self._restore = Restore(context, policy)
        eviction = DeviceEviction(context, self._backup)
        self._admit = Admit(context, self._prompts, self._restore, eviction, self._backup)
        self._requests = requests = Requests(self._leases, self._admit.expected)
        self._prefetcher = Prefetcher(context, self._prompts, policy, requests) if context.stores else None
        self._commit = Commit(context, self._restore, eviction, self._backup, self._persists)
        movements = (self._backup, self._restore, self._admit.exchange, *self._persists, self._prefetcher)
        self._movements: list[Movement] = [movement for movement in movements if movement is not None]
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
        """The engine's component of that class, like one that was given to `build_engine`. Raises `InvalidArgument`."""
        for component in self._context.components:
            if isinstance(component, kind):
                return component
        raise InvalidArgument(f"the engine has no {kind.__name__}; give it to build_engine as a component")

    @property
    def takes_chunks(self) -> bool:
        """Whether slots are better taken chunk by chunk (`reserve_tokens`): windows have few, `exclusive` copies."""
        return SWA in self._context.by_name or self._context.exclusive is not None

    @property
    def page_size(self) -> int:
        """Tokens of a cache page: the unit of matching, backup and disk."""
        return self._context.tree.page_size

    # Metrics

    def stats(self) -> dict[str, float]:
        """Each metric as one number: `metrics()` with the sums of histograms. For tests, logs and quick looks."""
        return flattened(self.metrics())

    def metrics(self) -> dict[str, MetricValue]:
        """Everything the engine measures, by name, sorted; docs/metrics.md explains each. Any thread, any time."""
        return self._context.metrics.snapshot()

    def describe(self) -> dict[str, MetricInfo]:
        """Type, unit and help text of each of `metrics()`."""
        return self._context.metrics.describe()

    # From its start to its end

    @exclusive
    def start(self) -> None:
        """Start the threads. Nothing moves before. Idempotent; NotRunning once the engine was closed, and in a fork."""
        self._owner.require_here()
        if self._is_closed or self._is_started:
            self._require_running()
            return
        self._is_started = True
        self._why_not = ""
        threads = (self._transfers, self._stores, self._events)
        self._finalizer = weakref.finalize(self, abandon, self._owner, self._turn, *threads)
        for part in (*self._transfers, self._events):
            if part is not None:
                part.start()

    @exclusive
    def close(self) -> None:
        """Release every lease, finish what is under way, take to the stores what the write policy promised and the
        device alone has, beginnings of prompts first, stop the threads, close the store. In a fork: nothing.

        Waits for each store that hangs no longer than twice its I/O timeout: what is left then, a later call finishes.
        """
        if not self._owner.is_here:
            return
        finalizer, was_running = self._finalizer, not self._why_not
        was_closed = self._is_closed or (finalizer is not None and not finalizer.alive)
        self._is_closed = True
        self._why_not = "the engine is closed; build another"
        if was_closed:
            for tier in self._stores:
                tier.close()
            return
        with contextlib.ExitStack() as ending:  # each part is closed, whatever becomes of those before it
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

    @exclusive
    def lookup(self, tokens: npt.ArrayLike, namespace: str = "", disk_wait_s: float = 0.05) -> LookupResult:
        """Tokens each tier holds of the prompt, of those that need not be computed. No side effect.

        Waits at most `disk_wait_s` for disk and remote tier, which `LookupResult.disk_known` tells of.
        """
        self._require_running()
        packed, namespace = valid_tokens(tokens), valid_namespace(namespace)
        wait_s = valid_number("disk_wait_s", disk_wait_s)
        device, usable, located = self._admit.locate(packed[:-1], namespace)
        on_disk, remote, known = 0, 0, True
        if self._prefetcher is not None and located is not None:
            on_disk, remote, known = look_up(located, wait_s)
        return LookupResult(device, usable - device, on_disk, known, remote)

    @exclusive
    def prefetch(
        self,
        request_id: str,
        tokens: npt.ArrayLike,
        namespace: str = "",
        mode: PrefetchMode | None = None,
        *,
        overlaps: bool = False,
    ) -> Prefetch:
        """Start bringing pages of the prompt from disk and remote tier to the host; `.ready` says when admission need
        not wait.

        `mode` (default: the configuration's): auto waits where that is estimated to cost all requests less time than
        computing, best_effort never, wait_complete until the end, timeout for `prefetch_timeout_s`.
        `acquire`, where it succeeds, or `cancel` of the request ends it, and what it holds of `prefetch_host_share`.
        Until it has ended, another call for the request returns the same handle. `overlaps`: the caller calls `join`.
        In mode auto, pages are then read from the end of the prompt on, also while the prompt is computed from its
        beginning; the request waits for none of them if computing it delays no other request. The commit of the
        complete prompt ends the reads.
        """
        self._require_running()
        packed, namespace, request_id = valid_tokens(tokens), valid_namespace(namespace), valid_request_id(request_id)
        mode = self._context.config.prefetch_mode if mode is None else valid_mode(mode)
        if self._prefetcher is not None:
            return self._prefetcher.start(request_id, packed[:-1], namespace, mode, overlaps=overlaps)
        handle = Prefetch(request_id, mode)
        handle.end()
        return handle

    @exclusive
    def expect(self, request_id: str, tokens: npt.ArrayLike, namespace: str = "") -> int:
        """A queued request of these tokens will come, until `acquire` or `cancel`: computing for others delays it, and
        what memory holds of its prefix, this many tokens, is evicted last. Again, it includes what came since."""
        self._require_running()
        return self._admit.expect(valid_request_id(request_id), valid_tokens(tokens), valid_namespace(namespace))

    @exclusive
    def poll(self) -> bool:
        """Land what has finished. Call it once a step; it never blocks. True: each poll makes a step of an exchange."""
        self._require_running()
        self._commit.hints.expire()
        land(self._movements)
        if self._events is not None:
            self._events.publish()
        return self._admit.make_room(self._leases)

    @exclusive
    def observe_prefill(self, num_tokens: int, seconds: float, mean_position: float | None = None) -> None:
        """A pass over `num_tokens` of prompts took `seconds`: of the device, and not of requests that waited for it.

        `mean_position`: of these tokens in their sequences, since attention costs more behind a long prefix; None: they
        begin a prompt. Report passes that waited for no load (`hicache.serving.prefill_meter`).
        """
        self._require_running()
        tokens, took_s, position = valid_pass(num_tokens, seconds, mean_position)
        if tokens and took_s:
            self._cost.observe_prefill(tokens, took_s, position)

    # A request's life

    @exclusive
    def acquire(self, request: CacheRequest) -> Lease:
        """Admit a request: its held prefix is pinned, slots for the rest are taken, loads are submitted.

        Raises a `ResourceExhausted` like `OutOfSlots` or `PrefetchPending` (poll and try again, or cancel), before
        which finished copies have landed, `PromptTooLong` (never fits) and `DuplicateRequest`.
        """
        self._require_running()
        request = valid_request(request)
        if request.request_id in self._leases:
            raise DuplicateRequest(request.request_id)
        lease = self._admitted(request)
        try:
            self._admit.forget(request.request_id)
            if self._prefetcher:
                self._prefetcher.admit(lease)
            else:
                self._prompts.forget(request.request_id)
        except BaseException:
            self._end(lease)
            raise
        return lease

    def _admitted(self, request: CacheRequest, *, joins: bool = False) -> Lease:
        try:
            if self._prefetcher:
                self._prefetcher.require_ready(request.request_id)
            lease = self._admit.acquire(request, self._requests.num_delayed_by(request.request_id), joins=joins)
        except ResourceExhausted as error:
            self._admit.refused(error)
            raise
        self._leases[request.request_id], lease.on_exit = lease, self.release
        return lease

    @exclusive
    def join(self, lease: Lease, num_tokens: int) -> Lease:
        """Before a pass over a prompt of which `num_tokens` are computed and committed: what an overlapped prefetch
        has brought behind them is loaded. Returns the lease from now on, in place of `lease`; `lease` itself where
        nothing has come there.

        Raises `ResourceExhausted` where what has come finds no room now: the lease has ended, and the request is to be
        admitted anew.
        """
        self._held([lease])
        num_tokens, request_id = valid_count("num_tokens", num_tokens), lease.request_id
        if self._prefetcher is None or not self._prefetcher.overlap.is_next_on_host(lease, num_tokens):
            return lease
        try:
            if not self._admit.gains(lease.request, num_tokens, self._requests.num_delayed_by(request_id)):
                return lease
            lease.drop_hints()  # its request goes on
            self._end(lease)
            joined = self._admitted(lease.request, joins=True)
            lease.successor = joined
            self._prefetcher.joined(lease, num_tokens, joined)
        except BaseException:
            self._prefetcher.cancel(request_id)
            raise
        finally:
            self._admit.forget(request_id)
        return joined

    @exclusive
    def extend(self, lease: Lease, num_tokens: int) -> torch.Tensor:
        """Slots for `num_tokens` more tokens of the request, int64 on the pool's device.

        Raises `OutOfSlots`, and `PromptTooLong` beyond `max_context_len`.
        """
        self._held([lease])
        return self._admit.extend(lease, valid_count("num_tokens", num_tokens))

    @exclusive
    def commit(self, lease: Lease, tokens: npt.ArrayLike) -> None:
        """KV of all `tokens`, the sequence so far, is stored (or queued to be): share its whole pages, start backups.

        Call it after every chunk of prefill and at the end. A recurrent state has consumed exactly `tokens`; it is kept
        where they are whole pages. Raises `TransferError` when the prefix failed to load, `TokensMismatch` where they
        do not begin with the lease's prompt, and `InvalidTokens` where there are more than it has slots for.
        """
        self._held([lease])
        packed = valid_tokens(tokens, minimum=0, known_len=len(lease.tokens))
        self._commit.commit(lease, packed)
        if self._prefetcher and len(packed) >= lease.prompt_len:
            self._prefetcher.end_reads(lease)

    @exclusive
    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """Where a pass over the prompt from `start` should end, at most at `end`.

        Before it for hybrid models, at the last point below the prompt's end, and at the branching point of a cached
        prefix, where a state is worth keeping; and where the pass meets what a prefetch that `overlaps` brings. Commit
        there.
        """
        self._held([lease])
        start, end = valid_count("start", start), valid_count("end", end)
        stop = self._commit.next_stop(lease, start, end)
        return stop if self._prefetcher is None else self._prefetcher.overlap.next_stop(lease, start, stop)

    @exclusive
    def track(self, leases: Sequence[Lease]) -> None:
        """After each step of decoding, before the next `extend`: hybrid models keep a state every
        `mamba_track_interval` tokens, which the next commit shares. Others: nothing."""
        self._commit.track(self._held(leases))

    @exclusive
    def begin_forward(self, leases: Sequence[Lease]) -> None:
        """The coming forward pass is for `leases`: its layers wait for their loads.

        Call it before each pass that reads, also between two of one lease, and read `lease.slots` behind it: `commit`
        may have put another request's slots in place of the lease's, and passes of others name other loads. After a
        pass that raised, whatever it was, release the leases of a hybrid model: their states may have advanced.
        """
        held = self._held(leases)
        for component in self._context.components:
            load_ids = {load_id for lease in held for load_id in lease.load_ids_of(component.name)}
            component.counter.set_consumer(load_ids)

    @exclusive
    def backup(self, lease: Lease) -> None:
        """Copy what was committed to the host now, whatever the write policy says, and wait: for a request that is
        released to make room and will be back. Nothing happens without a host tier, or where the host is full."""
        self._held([lease])
        if self._backup:
            self._backup.backup_path(lease.node)

    @exclusive
    def load_failed(self, lease: Lease) -> bool:
        """Whether a load of the lease's prefix failed, so that it has to be released and acquired anew. After a pass
        that raised `TransferError`; waits for the outcome of loads in flight."""
        self._held([lease])
        return self._restore.error_of(lease) is not None

    @exclusive
    def release(self, lease: Lease) -> None:
        """End the lease, finished or aborted: unpin the prefix, free the rest. Idempotent; works on a closed engine.

        Raises `ForeignLease`. In a fork it does nothing.
        """
        (lease,) = valid_leases([lease])
        if lease.released or not self._owner.is_here:
            return
        if self._leases.get(lease.request_id) is not lease:
            raise ForeignLease(lease.request_id)
        self._release(lease)

    @exclusive
    def cancel(self, request_id: str) -> None:
        """The request is gone: end its prefetch, its expectation and its lease, whichever there are. As `release`."""
        request_id, lease = valid_request_id(request_id), self._leases.get(request_id)
        if not self._owner.is_here:
            return
        try:
            if not self._is_broken:
                self._forget(request_id)
        finally:
            if lease is not None:
                self._end(lease)

    @exclusive
    def flush(self) -> None:
        """Wait until everything under way has landed, and each store, whatever its budget, has all that the host has,
        and under write policies that copy at eviction all that the device has. Pages that a store refused are retried.

        Raises `NotStored` if a store still refuses pages, and `InvariantError` if something never lands: an exception
        inside an earlier call, like that of Ctrl-C, may leave it counted as under way. Close the engine then.
        """
        self._require_running()
        error = flush(self._context, self._backup, self._persists, self._settle)
        if self._events is not None:
            self._events.publish()
        if error is not None:
            raise error

    def _settle(self) -> None:
        """Land all that is to move. InvariantError if nothing lands for twice the time that any job may take."""
        for persist in self._persists:
            persist.drain(anew=False)
        timeout_s = self._context.config.advanced.disk_io_timeout_s
        settle(self._movements, 2 * max(timeout_s, *(tier.patience_s for tier in self._stores), 0.0))

    @exclusive
    def reset(self, tiers: Sequence[MemoryTier] = ("device", "host")) -> bool:
        """Drop what these tiers hold of prompts, without copying it anywhere. False: something is left, for requests
        or copies use it; `flush` ends the copies. Stores keep what they have."""
        self._require_running()
        return reset(self._context, tiers)

    @property
    def inspect(self) -> Inspection:
        """What the engine is made of, for tests and tools."""
        return Inspection(self._context, self._backup, self._restore, self._persists, self._prefetcher)

    @exclusive
    def check(self) -> None:
        """Raise `InvariantError` with everything that is not as `docs/invariants.md` says. For idle moments and
        tests."""
        self._prove()

    def _prove(self) -> None:
        check_engine(self._context, list(self._leases.values()), self._restore.in_flight(), self._movements)

    # What every verb asks first

    def _require_running(self) -> None:
        self._owner.require_here()
        if self._why_not:
            raise NotRunning(self._why_not)

    def _refuse_second(self) -> None:
        """A call begins while another is under way: ConcurrentCall, but in a fork, where that one never ends."""
        if self._owner.is_here:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise ConcurrentCall(f"thread {names.get(self._turn.thread, self._turn.thread)}")

    def _doubt(self, verb: str, error: BaseException) -> None:
        """A call of `verb` ended in an error that no code raised on purpose, like that of Ctrl-C. Unless every account
        holds, nothing but the end may be called any more."""
        before, self._is_broken = (self._is_broken, self._why_not), True  # the proof may be interrupted too
        self._why_not = self._why_not or f"{error!r} left {verb}() half done; close the engine and build another"
        try:
            of_host = [component.pages.table for component in self._context.components if component.has_host]
            for table in {self._context.tree.table, *of_host}:
                table.sweep()
            self._prove()
        except Exception:
            log.exception("the engine takes no further calls: %r left %s() half done", error, verb)
        else:
            self._is_broken, self._why_not = before

    def _held(self, leases: object) -> Sequence[Lease]:
        self._require_running()
        held = valid_leases(leases)
        for lease in held:
            if lease.released:
                raise LeaseEnded(lease.request_id)
            if self._leases.get(lease.request_id) is not lease:
                raise ForeignLease(lease.request_id)
        return held

    def _finish(self, was_running: bool) -> None:
        """Release every lease and, where the threads run, let what is under way end."""
        for lease in list(self._leases.values()):
            self._release(lease)
        if self._admit.exchange is not None and not self._is_broken:
            self._admit.exchange.end()
        try:
            if was_running:
                store_promised(self._context, self._backup, self._persists, self._settle)
        except InvariantError:
            log.warning("closed while something was counted as under way that never ends; was a call interrupted?")

    def _forget(self, request_id: str) -> None:
        """The request waits no more."""
        self._admit.forget(request_id)
        self._prompts.forget(request_id)
        if self._prefetcher:
            self._prefetcher.cancel(request_id)

    def _release(self, lease: Lease) -> None:
        try:
            if self._prefetcher and not self._is_broken:
                self._prefetcher.end_reads(lease)
        finally:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        """The lease is over, whatever raises on the way; of accounts that do not hold nothing is freed."""
        try:
            if self._is_broken:
                lease.released = True
            else:
                self._commit.release(lease)
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
    """Stop the threads of an engine that was not closed: at the interpreter's exit, which would otherwise end them
    inside torch and abort the process, or when the engine is collected. Takes at most `_EXIT_S`. Nothing in a fork.

    A daemon thread may be inside a call: that ends first, at the latest with the copies that it waits for, and no other
    begins. Where it does not end its stores are left to it: their processes see the end of this one.
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
