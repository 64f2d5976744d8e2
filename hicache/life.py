"""The life of an engine: its threads, who may call it and when, and its end; and what is read of it at any time. What
`CacheEngine` is made on: it knows no movement."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from hicache.device.base import KVCache
from hicache.device.req_to_token import ReqToTokenPool
from hicache.errors import ConcurrentCall, DoubleFree, HiCacheError, InvalidArgument, InvariantError, NotRunning
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.kv_events import EventPublisher
from hicache.metrics import MetricInfo, MetricValue, flattened
from hicache.storage.owner import OwnerProcess
from hicache.stores.tier import StoreTier
from hicache.tiers import SWA
from hicache.transfer.base import TransferBackend
from hicache.transfer.counter import LayerTransferCounter

log = logging.getLogger(__name__)

_EXIT_S, _LOOK_S = 5.0, 0.001
E = TypeVar("E", bound="EngineLife")
C = TypeVar("C", bound=CacheComponent)
P = ParamSpec("P")
R = TypeVar("R")


def exclusive(verb: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """A verb of an engine, which is refused while another one is under way, in whichever thread. That takes no lock."""

    @functools.wraps(verb)
    def call(engine: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
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


class EngineLife(ABC):
    """Starts and ends the parts of an engine that have threads or files, and says when it may be called.

    `_turn`: the thread inside a call. `_why_not`: why only what ends something may be called; empty while it runs.
    `_is_broken`: a call left the accounts half done, so nothing may rely on them.
    """

    def __init__(self, context: EngineContext, events: EventPublisher | None) -> None:
        self._context, self._owner = context, OwnerProcess("the engine")
        on_host = [component for component in context.components if component.has_host]
        self._hosts = [component.host for component in on_host]
        self._transfers: list[TransferBackend] = [component.transfer for component in on_host]
        self._stores, self._events = list(context.stores.values()), events
        self._turn = _Turn()
        self._why_not = "the engine is not started; call start()"
        self._is_broken = self._is_started = self._is_closed = False
        self._finalizer: weakref.finalize[..., object] | None = None

    # What a model runner needs

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

    # What it measures

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
        self._is_started, self._why_not = True, ""
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
        self._is_closed, self._why_not = True, "the engine is closed; build another"
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

    def __enter__(self: E) -> E:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def _finish(self, was_running: bool) -> None:
        """Release every lease and, where the threads run, let what is under way end."""

    @abstractmethod
    def _prove(self) -> None:
        """Raise InvariantError unless every account holds."""

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
        """A call of `verb` ended in an error that nobody raised on purpose; that of Ctrl-C is one. Unless every account
        holds, nothing but the end may be called any more."""
        before, self._is_broken = (self._is_broken, self._why_not), True  # the proof may be interrupted too
        self._why_not = self._why_not or f"{error!r} left {verb}() half done; close the engine and build another"
        try:
            self._prove()
        except Exception:
            log.exception("the engine takes no further calls: %r left %s() half done", error, verb)
        else:
            self._is_broken, self._why_not = before


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
