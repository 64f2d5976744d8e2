"""The reference scheduler: continuous batching with chunked prefill over one engine.

    submit -> prefetch -> waiting queue -> acquire -> chunked prefill -> batched decode -> commit, release

Each step polls the engine, admits waiting requests in order of arrival, runs one chunk of one prompt, then decodes one
token for every request of the running batch. A request that gets no slots waits; if a running request gets none, the
youngest request is preempted: it commits its pages, releases its slots and returns to the waiting queue with its
generated tokens.
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
    ResourceExhausted,
    TransferError,
)
from hicache.serving.request import FinishReason, Request, RequestOutput
from hicache.serving.runner import Chunk, ModelRunner
from hicache.serving.sampling import choose_tokens

_IDLE_S = 0.0005
_MAX_RETRIES = 1  # per request, after its prefix failed to load


class Auditor(Protocol):
    """Inspects a request's pages while the lease still protects them. Its time is excluded from `ttft_s`."""

    def audit(self, lease: Lease, tokens: npt.NDArray[np.int64]) -> None:
        """`tokens`: the committed sequence. Pages [hit.device, cached_len) of it came from the host or the disk."""
        ...


class _ScheduledRequest:
    """A request in one of the scheduler's queues.

    sequence[0, length)     prompt and generated tokens
    sequence[0, kv_len)     tokens whose KV is in the pool
    """

    def __init__(self, request: Request, arrival_s: float, prefetch: Prefetch) -> None:
        self.request, self.arrival_s, self.prefetch = request, arrival_s, prefetch
        self.sequence = np.empty(len(request.tokens) + request.max_new_tokens, dtype=np.int64)
        self.sequence[: len(request.tokens)] = request.tokens
        self.length = len(request.tokens)
        self.kv_len = 0
        self.lease: Lease | None = None
        self.hit: Hit | None = None
        self.ttft_s = self.stalled_since_s = 0.0
        self.computed_tokens = self.preemptions = self.retries = 0

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self.sequence[: self.length]

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.sequence[len(self.request.tokens) : self.length].tolist())

    @property
    def num_generated(self) -> int:
        return self.length - len(self.request.tokens)

    @property
    def held_lease(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why generation has ended; None if it goes on."""
        if self.num_generated and int(self.sequence[self.length - 1]) in self.request.eos_ids:
            return "stop"
        return "length" if self.length == len(self.sequence) else None


class Scheduler:
    """Serves requests through `runner` over `engine`. All methods are called on one thread.

    `chunk_tokens`: the maximum number of prompt tokens per step. `max_running`: the maximum number of requests that
    hold slots. `stall_timeout_s`: how long a request waits for slots while no other request could free any; then it
    fails. The engine must be started and stays open when the scheduler is dropped.
    """

    def __init__(
        self,
        engine: CacheEngine,
        runner: ModelRunner,
        *,
        chunk_tokens: int = 8192,
        max_running: int = 32,
        stall_timeout_s: float = 60.0,
        auditor: Auditor | None = None,
    ) -> None:
        if chunk_tokens < 1 or max_running < 1:
            raise ConfigError(f"chunk_tokens={chunk_tokens} and max_running={max_running} must be at least 1")
        self._engine, self._runner, self._auditor = engine, runner, auditor
        self._chunk_tokens, self._max_running, self._stall_timeout_s = chunk_tokens, max_running, stall_timeout_s
        self._waiting_queue: deque[_ScheduledRequest] = deque()
        self._prefill_queue: deque[_ScheduledRequest] = deque()
        self._running_batch: list[_ScheduledRequest] = []
        self._finished: list[RequestOutput] = []
        self._audit_s = 0.0

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting_queue) + len(self._prefill_queue) + len(self._running_batch)

    def submit(self, request: Request) -> None:
        """Queue a request and start to prefetch its pages from disk. Raises ConfigError if the id is in use."""
        if any(req.request.request_id == request.request_id for req in self._unfinished()):
            raise ConfigError(f"request_id {request.request_id!r} is in use; give every request an id of its own")
        prefetch = self._engine.prefetch(request.request_id, request.tokens, request.namespace)
        req = _ScheduledRequest(request, self._clock(), prefetch)
        self._waiting_queue.append(req)
        max_len = self._engine.req_to_token.max_context_len
        if len(req.sequence) > max_len:
            self._finish(req, "error", PromptTooLong(len(req.sequence), max_len, "max_context_len"))

    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests that finished in it. Sleeps briefly if there was nothing to run."""
        self._engine.poll()
        self._admit_waiting()
        busy = bool(self._prefill_queue or self._running_batch or self._finished)
        if self._prefill_queue:
            self._prefill_chunk(self._prefill_queue[0])
        if self._running_batch:
            self._decode_batch()
        if not busy and self._waiting_queue:
            time.sleep(_IDLE_S)
        finished, self._finished = self._finished, []
        return finished

    def run(self, requests: Iterable[Request] = ()) -> list[RequestOutput]:
        """Submit `requests` and step until all are finished; outputs in the order in which they finished.

        If anything is raised, all requests are aborted first.
        """
        outputs: list[RequestOutput] = []
        try:
            for request in requests:
                self.submit(request)
            while self.num_unfinished or self._finished:
                outputs.extend(self.step())
        finally:
            self.abort_all()
        return outputs

    def abort(self, request_id: str) -> bool:
        """Finish a request now with reason "abort" and the tokens generated so far. False if the id is unknown."""
        for req in self._unfinished():
            if req.request.request_id == request_id:
                self._finish(req, "abort")
                return True
        return False

    def abort_all(self) -> None:
        for req in self._unfinished():
            self._finish(req, "abort")

    def _unfinished(self) -> list[_ScheduledRequest]:
        return [*self._waiting_queue, *self._prefill_queue, *self._running_batch]

    def _clock(self) -> float:
        """Seconds, without those spent in the auditor."""
        return time.perf_counter() - self._audit_s

    # Admission

    def _admit_waiting(self) -> None:
        """Admit in order of arrival. A request whose prefetch is pending is skipped; one that gets no slots blocks the
        queue."""
        for req in list(self._waiting_queue):
            if len(self._prefill_queue) + len(self._running_batch) >= self._max_running:
                return
            if not req.prefetch.ready:
                continue
            request = CacheRequest(
                req.request.request_id,
                req.tokens,
                req.request.namespace,
                reserve_tokens=self._chunk_tokens if self._engine.has_windows else None,
                branch_points=req.request.branch_points,
            )
            try:
                lease = self._engine.acquire(request)
            except PrefetchPending:
                continue
            except ResourceExhausted as error:
                if self._prefill_queue or self._running_batch:
                    req.stalled_since_s = 0.0
                elif self._is_stalled(req):
                    self._finish(req, "error", error)
                return
            except PromptTooLong as error:
                self._finish(req, "error", error)
                continue
            req.lease, req.kv_len = lease, lease.cached_len
            req.hit = req.hit or lease.hit
            req.stalled_since_s = 0.0
            self._waiting_queue.remove(req)
            self._prefill_queue.append(req)

    def _is_stalled(self, req: _ScheduledRequest) -> bool:
        """Whether a request has waited longer than the timeout while only a transfer could free slots for it."""
        now = self._clock()
        req.stalled_since_s = req.stalled_since_s or now
        return now - req.stalled_since_s > self._stall_timeout_s

    # Forward passes

    def _prefill_chunk(self, req: _ScheduledRequest) -> None:
        """Run the next chunk of a prompt; the last chunk yields the first token."""
        start = req.kv_len
        end = self._engine.next_stop(req.held_lease, start, min(req.length, start + self._chunk_tokens))
        if not self._extend_for_chunk(req, end):
            return
        try:
            logits = self._runner.prefill(req.held_lease, req.sequence, start, end)
            req.kv_len = end
            req.computed_tokens += end - start
            self._engine.commit(req.held_lease, req.sequence[:end])
        except TransferError as error:
            self._retry(req, error)
            return
        if end < req.length:
            return
        token = choose_tokens(logits[None], [req.request.sampling_params], [req.num_generated])[0]
        req.ttft_s = req.ttft_s or self._clock() - req.arrival_s
        self._prefill_queue.remove(req)
        self._running_batch.append(req)
        self._append_token(req, token)

    def _extend_for_chunk(self, req: _ScheduledRequest, end: int) -> bool:
        """Give a prompt slots up to `end`. If none are free, preempt the youngest request, which may be this one, and
        return False: a later step tries again."""
        missing = end - req.held_lease.length
        if missing <= 0:
            return True
        try:
            self._engine.extend(req.held_lease, missing)
        except OutOfSlots as error:
            if len(self._prefill_queue) + len(self._running_batch) > 1:
                self._preempt_youngest()
            elif self._is_stalled(req):
                self._finish(req, "error", error)
            else:
                time.sleep(_IDLE_S)  # pages that are being backed up keep their slots until the copy has finished
            return False
        req.stalled_since_s = 0.0
        return True

    def _decode_batch(self) -> None:
        """Decode one token for every running request that gets a slot."""
        batch = self._extend_running_batch()
        if not batch:
            return
        leases = [req.held_lease for req in batch]
        try:
            logits = self._runner.forward(
                [Chunk(req.held_lease, req.sequence, req.length - 1, req.length) for req in batch]
            )
        except TransferError as error:
            for req in batch:
                self._retry(req, error)
            return
        self._engine.track(leases)
        params = [req.request.sampling_params for req in batch]
        tokens = choose_tokens(logits, params, [req.num_generated for req in batch])
        for req, token in zip(batch, tokens, strict=True):
            req.kv_len = req.length
            self._append_token(req, token)

    def _extend_running_batch(self) -> list[_ScheduledRequest]:
        """Take one slot for each running request, oldest first, preempting the youngest request when none is free."""
        for req in sorted(self._running_batch, key=_arrival):
            while req in self._running_batch:
                try:
                    self._engine.extend(req.held_lease, 1)
                except OutOfSlots:
                    self._preempt_youngest()
                    continue
                break
        return sorted(self._running_batch, key=_arrival)

    def _append_token(self, req: _ScheduledRequest, token: int) -> None:
        req.sequence[req.length] = token
        req.length += 1
        reason = req.finish_reason
        if reason:
            self._finish(req, reason)

    # Preemption, retry, end

    def _preempt_youngest(self) -> None:
        """Return the youngest admitted request to the waiting queue; its whole pages stay in the cache."""
        req = max([*self._prefill_queue, *self._running_batch], key=_arrival)
        self._commit_and_release(req)
        req.preemptions += 1
        self._requeue(req)

    def _retry(self, req: _ScheduledRequest, error: TransferError) -> None:
        """Requeue a request whose prefix failed to load. Its pages left the device, so they are loaded again or
        computed."""
        if req.retries >= _MAX_RETRIES:
            self._finish(req, "error", error)
            return
        req.retries += 1
        self._engine.release(req.held_lease)
        self._requeue(req)

    def _requeue(self, req: _ScheduledRequest) -> None:
        """Put a released request back into the waiting queue, which is in order of arrival."""
        self._remove_from_queues(req)
        req.lease, req.kv_len = None, 0
        req.prefetch = self._engine.prefetch(req.request.request_id, req.tokens, req.request.namespace)
        younger = (i for i, other in enumerate(self._waiting_queue) if other.arrival_s > req.arrival_s)
        self._waiting_queue.insert(next(younger, len(self._waiting_queue)), req)

    def _commit_and_release(self, req: _ScheduledRequest) -> None:
        """Commit all KV in the pool, audit it and release the lease."""
        tokens, lease = req.sequence[: req.kv_len], req.held_lease
        self._engine.commit(lease, tokens)
        if self._auditor is not None and req.kv_len > lease.cached_len:
            start_s = time.perf_counter()
            self._auditor.audit(lease, tokens)
            self._audit_s += time.perf_counter() - start_s
        self._engine.release(lease)

    def _finish(self, req: _ScheduledRequest, reason: FinishReason, error: HiCacheError | None = None) -> None:
        if req.lease is None:
            self._engine.cancel(req.request.request_id)
        elif reason in ("length", "stop"):
            self._commit_and_release(req)
        else:
            self._engine.release(req.lease)
        self._remove_from_queues(req)
        self._finished.append(
            RequestOutput(
                request_id=req.request.request_id,
                prompt_tokens=len(req.request.tokens),
                tokens=req.generated,
                finish_reason=reason,
                hit=req.hit or Hit(),
                computed_tokens=req.computed_tokens,
                ttft_s=req.ttft_s,
                preemptions=req.preemptions,
                error=error,
            )
        )

    def _remove_from_queues(self, req: _ScheduledRequest) -> None:
        queues: tuple[deque[_ScheduledRequest] | list[_ScheduledRequest], ...] = (
            self._waiting_queue,
            self._prefill_queue,
            self._running_batch,
        )
        for queue in queues:
            if req in queue:
                queue.remove(req)


def _arrival(req: _ScheduledRequest) -> float:
    return req.arrival_s
