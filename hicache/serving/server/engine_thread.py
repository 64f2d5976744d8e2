"""The thread that owns engine, scheduler and runner, and the messages between this thread and the event loop."""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from hicache.engine import CacheEngine, Hit, MemoryTier
from hicache.errors import HiCacheError, NotStored
from hicache.metrics import MetricValue
from hicache.serving.request import Logprobs, Request, RequestOutput, TokenLogprobs
from hicache.serving.scheduler import Scheduler

_IDLE_S = 0.05  # time between two polls without open requests, for copies that are still in flight
_METRICS_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenChosen:
    """A chosen token of a request. `time_s`: time of the choice by `time.perf_counter`. `logprobs`: the log
    probabilities that the request asks for and that no earlier event has, up to this token."""

    request_id: str
    token: int
    time_s: float
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class RequestEnded:
    """The end of a request. `saved_s` is the result of `PrefillMeter.saved_s` for the request's hits."""

    output: RequestOutput
    saved_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return self.output.request_id


Event = TokenChosen | RequestEnded


class _State(Enum):
    RUNNING = auto()
    STOPPING = auto()
    FAILED = auto()


class EngineThread:
    """Starts `engine`, runs `scheduler`, and closes the engine when the thread ends.

    Any thread may call its methods and properties. Callers of `submit` must limit the number of open requests.
    `warm_up`: called on the thread before the first step.
    """

    def __init__(self, engine: CacheEngine, scheduler: Scheduler, warm_up: Callable[[], None]) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._warm_up = warm_up
        self._deliver: Callable[[Sequence[Event]], None] = _nowhere
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._events: list[Event] = []
        self._metrics: Mapping[str, MetricValue] = {}
        self._next_metrics_s = 0.0
        self._num_running = 0
        self._state = _State.RUNNING
        self._thread = threading.Thread(target=self._run, name="hicache-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.failed

    @property
    def failed(self) -> bool:
        """Return whether a step or the engine's final check raised."""
        return self._state is _State.FAILED

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def metrics(self) -> Mapping[str, MetricValue]:
        """Return a result of `engine.metrics()` that is at most a second old, or as old as the current step if this
        step takes longer."""
        return self._metrics

    def start(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Start the engine and the thread. `deliver`: called on the thread with the events of each step in order, and
        with an empty list when the thread ends."""
        self._deliver = deliver
        self._engine.start()
        self._publish()
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._commands.put(partial(self._submit, request))

    def abort(self, request_id: str) -> None:
        """End the request before the next step. Does nothing if the request has ended."""
        self._commands.put(partial(self._scheduler.abort, request_id))

    def finish(self, request_id: str) -> None:
        """End a request whose text is complete. The pages of the request stay in the cache."""
        self._commands.put(partial(self._scheduler.finish, request_id))

    def reset(self, tiers: Sequence[MemoryTier]) -> concurrent.futures.Future[bool]:
        """Reset the cache between two steps, as `CacheEngine.reset` does. If no request is open, the thread first waits
        for all copies."""
        done: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._commands.put(partial(self._reset, tiers, done))
        return done

    def stop(self) -> None:
        """Abort the open requests, write all pages to disk, and close the engine."""
        self._commands.put(self._stop)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            try:
                self._warm_up()
                while self._state is _State.RUNNING:
                    self._take_commands()
                    self._step()
                self._engine.check()
            finally:
                self._engine.close()
        except Exception:
            self._state = _State.FAILED
            log.exception("the engine failed")
        self._num_running = 0
        self._deliver(())

    def _take_commands(self) -> None:
        """Wait for a command if no request is open, then run all queued commands."""
        try:
            wait_s = 0.0 if self._scheduler.num_unfinished else _IDLE_S
            self._commands.get(block=bool(wait_s), timeout=wait_s or None)()
            while self._state is _State.RUNNING:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _stop(self) -> None:
        self._state = _State.STOPPING
        self._scheduler.abort_all()

    def _reset(self, tiers: Sequence[MemoryTier], done: concurrent.futures.Future[bool]) -> None:
        if not self._scheduler.num_unfinished:
            try:
                self._engine.flush()
            except NotStored as error:
                log.warning("the tiers are reset although pages are not stored: %s", error)
        if done.set_running_or_notify_cancel():
            done.set_result(self._engine.reset(tiers))

    def _submit(self, request: Request) -> None:
        request_id, logprobs = request.request_id, Logprobs()

        def on_token(token: int) -> None:
            self._events.append(TokenChosen(request_id, token, time.perf_counter(), tuple(logprobs)))
            logprobs.clear()

        try:
            self._scheduler.submit(request, on_token, logprobs)
        except HiCacheError as error:
            output = RequestOutput(request_id, len(request.tokens), (), "error", Hit(), 0, 0.0, error=error)
            self._events.append(RequestEnded(output))

    def _step(self) -> None:
        ended = self._scheduler.step()
        meter = self._scheduler.prefill_meter
        self._events += [RequestEnded(output, meter.saved_s(output.hit)) for output in ended]
        self._publish()
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _publish(self) -> None:
        self._num_running = self._scheduler.num_running
        now_s = time.monotonic()
        if now_s >= self._next_metrics_s:
            self._metrics = self._engine.metrics()
            self._next_metrics_s = now_s + _METRICS_S


def _nowhere(events: Sequence[Event]) -> None:
    """Do nothing. This is `deliver` before the thread starts, when there are no events."""
