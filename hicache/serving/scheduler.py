"""The reference scheduler: continuous batching over one engine, plain enough to read in one sitting.

    submit -> prefetch -> waiting -> acquire -> prefill, a chunk a step -> decode, all at once -> commit, release

A step polls the engine, admits what fits, runs one chunk of one prompt and then one token for every running request. A
request that finds no slot waits; a running request that finds none makes the youngest give its slots back, which then
waits in front of the queue with what it has generated.

Owns the queue and the leases. Everything runs on the thread that calls `step`. May import numpy, torch, the engine and
what stands below it, and its own package.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache.engine import CacheEngine, CacheRequest, Hit, Lease, Prefetch
from hicache.errors import (
    ConfigError,
    HiCacheError,
    OutOfSlots,
    PrefetchPending,
    PromptTooLong,
    TransferError,
    TryLater,
)
from hicache.serving.request import Finish, Request, Result
from hicache.serving.runner import ModelRunner
from hicache.serving.sampling import choose_tokens

_IDLE_S = 0.0005
_STALLED_S = 60.0
_MAX_RETRIES = 1  # of a request whose prefix failed to load


class Auditor(Protocol):
    """Looks at a request's pages while they are still pinned. Its time does not count as waiting for a first token."""

    def review(self, lease: Lease, tokens: npt.NDArray[np.int64]) -> None:
        """`tokens`: the sequence whose KV was committed. Pages [hit.device, cached_len) came from the host or disk."""
        ...


class _Active:
    """A request inside. `sequence[:length]`: prompt and generated tokens; KV of tokens [0, stored) is in the pool."""

    def __init__(self, request: Request, arrived_s: float, handle: Prefetch) -> None:
        self.request, self.arrived_s, self.handle = request, arrived_s, handle
        self.sequence = np.empty(len(request.tokens) + request.max_new_tokens, dtype=np.int64)
        self.sequence[: len(request.tokens)] = request.tokens
        self.length = len(request.tokens)
        self.stored = 0
        self.lease: Lease | None = None
        self.hit: Hit | None = None
        self.ttft_s = self.stalled_since_s = 0.0
        self.computed_tokens = self.preemptions = self.retries = 0

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.sequence[len(self.request.tokens) : self.length].tolist())

    @property
    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def finish(self) -> Finish | None:
        """Why generation is over, if it is."""
        if len(self.request.tokens) < self.length and int(self.sequence[self.length - 1]) in self.request.eos_ids:
            return "eos"
        return "length" if self.length == len(self.sequence) else None


class Scheduler:
    """Serves requests through `runner` over `engine`.

    `chunk_tokens`: the longest piece of a prompt that runs in one step. `max_running`: requests that hold slots at a
    time. Not thread-safe; a started engine outlives it.
    """

    def __init__(
        self,
        engine: CacheEngine,
        runner: ModelRunner,
        *,
        chunk_tokens: int = 8192,
        max_running: int = 32,
        auditor: Auditor | None = None,
    ) -> None:
        if chunk_tokens < 1 or max_running < 1:
            raise ConfigError(f"chunk_tokens={chunk_tokens} and max_running={max_running} must be at least 1")
        self._engine, self._runner, self._auditor = engine, runner, auditor
        self._chunk_tokens, self._max_running = chunk_tokens, max_running
        self._waiting: deque[_Active] = deque()
        self._prefilling: deque[_Active] = deque()
        self._running: list[_Active] = []
        self._finished: list[Result] = []
        self._audit_s = 0.0

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._running)

    def submit(self, request: Request) -> None:
        """Queue a request and start bringing its pages from disk. Raises ConfigError where the id is in use."""
        if any(active.request.request_id == request.request_id for active in self._all()):
            raise ConfigError(f"request_id {request.request_id!r} is in use; give every request an id of its own")
        handle = self._engine.prefetch(request.request_id, request.tokens, request.namespace)
        active = _Active(request, self._clock(), handle)
        self._waiting.append(active)
        most = self._engine.req_to_token.max_context_len
        if len(active.sequence) > most:
            self._end(active, "failed", PromptTooLong(len(active.sequence), most, "max_context_len"))

    def step(self) -> list[Result]:
        """One round of work; returns the requests that it finished. Sleeps a moment where nothing could be done."""
        self._engine.poll()
        self._admit()
        busy = bool(self._prefilling or self._running or self._finished)
        if self._prefilling:
            self._prefill(self._prefilling[0])
        if self._running:
            self._decode()
        if not busy and self._waiting:
            time.sleep(_IDLE_S)
        finished, self._finished = self._finished, []
        return finished

    def run(self, requests: Iterable[Request] = ()) -> list[Result]:
        """Submit `requests` and step until nothing is left; results in the order in which they finished.

        Whatever is raised on the way, every request is released first.
        """
        results: list[Result] = []
        try:
            for request in requests:
                self.submit(request)
            while self.num_unfinished or self._finished:
                results.extend(self.step())
        finally:
            self.abort_all()
        return results

    def abort(self, request_id: str) -> bool:
        """End a request now: its result says 'aborted' and keeps what was generated. False where there is none."""
        for active in self._all():
            if active.request.request_id == request_id:
                self._end(active, "aborted")
                return True
        return False

    def abort_all(self) -> None:
        for active in self._all():
            self._end(active, "aborted")

    def _all(self) -> list[_Active]:
        return [*self._waiting, *self._prefilling, *self._running]

    def _clock(self) -> float:
        """Seconds, without those that the auditor took."""
        return time.perf_counter() - self._audit_s

    # Admission

    def _admit(self) -> None:
        """Admit in order of arrival. One whose prefetch is under way lets others pass; one that lacks room does not."""
        for active in list(self._waiting):
            if len(self._prefilling) + len(self._running) >= self._max_running:
                return
            if not active.handle.ready:
                continue
            request = CacheRequest(
                active.request.request_id,
                active.sequence[: active.length],
                active.request.namespace,
                self._chunk_tokens if self._engine.has_windows else None,
            )
            try:
                lease = self._engine.acquire(request)
            except PrefetchPending:
                continue
            except TryLater as error:
                self._stalled(active, error)
                return
            except PromptTooLong as error:
                self._end(active, "failed", error)
                continue
            active.lease, active.stored = lease, lease.cached_len
            active.hit = active.hit or lease.hit
            active.stalled_since_s = 0.0
            self._waiting.remove(active)
            self._prefilling.append(active)

    def _stalled(self, active: _Active, error: TryLater) -> None:
        """Nothing but a transfer can make room while no request runs: give up when that takes too long."""
        if self._prefilling or self._running:
            active.stalled_since_s = 0.0
        elif self._waited(active):
            self._end(active, "failed", error)

    def _waited(self, active: _Active) -> bool:
        """Whether a request has waited for a transfer longer than any takes."""
        now = self._clock()
        active.stalled_since_s = active.stalled_since_s or now
        return now - active.stalled_since_s > _STALLED_S

    # Work

    def _prefill(self, active: _Active) -> None:
        """Run the next chunk of a prompt; the last one brings the first token."""
        start = active.stored
        end = self._engine.next_stop(active.held, start, min(active.length, start + self._chunk_tokens))
        if not self._has_slots(active, end):
            return
        try:
            logits = self._runner.prefill(active.held, active.sequence, start, end)
            active.stored = end
            active.computed_tokens += end - start
            self._engine.commit(active.held, active.sequence[:end])
        except TransferError as error:
            self._retry(active, error)
            return
        if end < active.length:
            return
        token = choose_tokens(logits[None], [active.request.sampling], [len(active.generated)])[0]
        active.ttft_s = active.ttft_s or self._clock() - active.arrived_s
        self._prefilling.remove(active)
        self._running.append(active)
        self._append(active, token)

    def _has_slots(self, active: _Active, end: int) -> bool:
        """Whether a prompt has slots up to `end`; where it gets none, a later step tries again, or others give way."""
        if end <= active.held.length:
            return True
        try:
            self._engine.extend(active.held, end - active.held.length)
        except OutOfSlots as error:
            others = [at for at in (*self._prefilling, *self._running) if at is not active]
            if others:
                self._preempt(max([active, *others], key=lambda at: at.arrived_s))
            elif self._waited(active):
                self._end(active, "failed", error)
            else:
                time.sleep(_IDLE_S)  # what is on its way to the host keeps its slots until it is there
            return False
        active.stalled_since_s = 0.0
        return True

    def _decode(self) -> None:
        """One more token for every running request that still has room."""
        batch = self._extend_all()
        if not batch:
            return
        last = [int(active.sequence[active.length - 1]) for active in batch]
        try:
            logits = self._runner.decode([active.held for active in batch], last)
        except TransferError as error:
            for active in batch:
                self._retry(active, error)
            return
        self._engine.track([active.held for active in batch])
        how = [active.request.sampling for active in batch]
        tokens = choose_tokens(logits, how, [len(active.generated) for active in batch])
        for active, token in zip(batch, tokens, strict=True):
            active.stored = active.length
            self._append(active, token)

    def _extend_all(self) -> list[_Active]:
        """Take a slot for each running request, oldest first; the youngest gives way where there is none."""
        batch: list[_Active] = []
        for active in sorted(self._running, key=lambda at: at.arrived_s):
            while active in self._running:
                try:
                    self._engine.extend(active.held, 1)
                except OutOfSlots:
                    self._preempt(max([*self._prefilling, *self._running], key=lambda at: at.arrived_s))
                    continue
                batch.append(active)
                break
        return [active for active in batch if active in self._running]

    def _append(self, active: _Active, token: int) -> None:
        active.sequence[active.length] = token
        active.length += 1
        finish = active.finish
        if finish:
            self._end(active, finish)

    # Endings

    def _preempt(self, active: _Active) -> None:
        """Take a request's slots; it waits in front with its tokens so far, whose whole pages stay in the cache."""
        self._release(active)
        active.preemptions += 1
        self._requeue(active)

    def _retry(self, active: _Active, error: TransferError) -> None:
        """The prefix failed to load. Its pages left the device, so a second try reads them again or computes them."""
        if active.retries >= _MAX_RETRIES:
            self._end(active, "failed", error)
            return
        active.retries += 1
        self._engine.release(active.held)
        self._requeue(active)

    def _requeue(self, active: _Active) -> None:
        self._forget(active)
        active.lease, active.stored = None, 0
        active.handle = self._engine.prefetch(
            active.request.request_id, active.sequence[: active.length], active.request.namespace
        )
        # In order of arrival: of two that gave way, the older is in front.
        at = next(
            (i for i, other in enumerate(self._waiting) if other.arrived_s > active.arrived_s), len(self._waiting)
        )
        self._waiting.insert(at, active)

    def _release(self, active: _Active) -> None:
        """Commit what is stored, have it audited, and let go."""
        tokens, lease = active.sequence[: active.stored], active.held
        self._engine.commit(lease, tokens)
        if self._auditor is not None and active.stored > lease.cached_len:
            start_s = time.perf_counter()
            self._auditor.review(lease, tokens)
            self._audit_s += time.perf_counter() - start_s
        self._engine.release(lease)

    def _end(self, active: _Active, finish: Finish, error: HiCacheError | None = None) -> None:
        if active.lease is None:
            self._engine.cancel(active.request.request_id)
        elif finish in ("length", "eos"):
            self._release(active)
        else:
            self._engine.release(active.lease)
        self._forget(active)
        self._finished.append(
            Result(
                request_id=active.request.request_id,
                prompt_tokens=len(active.request.tokens),
                tokens=active.generated,
                finish=finish,
                hit=active.hit or Hit(),
                computed_tokens=active.computed_tokens,
                ttft_s=active.ttft_s,
                preemptions=active.preemptions,
                error=error,
            )
        )

    def _forget(self, active: _Active) -> None:
        """Take a request out of whichever queue it is in."""
        queues: tuple[deque[_Active] | list[_Active], ...] = (self._waiting, self._prefilling, self._running)
        for queue in queues:
            if active in queue:
                queue.remove(active)
