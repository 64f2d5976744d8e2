"""The reference scheduler: continuous batching with chunked prefill over one engine.

    submit -> prefetch -> waiting queue -> acquire -> running batch -> commit, release

A step admits waiting requests, composes one batch under a token budget and runs one forward pass over this batch. The
batch contains one token of every request that decodes. The rest of the budget is for chunks of prompts, in the order of
`hicache.serving.order`. If a running request gets no slots, the scheduler preempts the last request in this order.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from weakref import ref

from hicache.engine import CacheEngine
from hicache.errors import (
    ConfigError,
    ExchangePending,
    HiCacheError,
    OutOfSlots,
    PrefetchPending,
    PromptTooLong,
    ResourceExhausted,
    TransferBusy,
    TransferError,
)
from hicache.serving.next_tokens import next_tokens, score_prompts
from hicache.serving.order import ServingOrder, is_computed_for_another, is_computed_soon
from hicache.serving.polling import PassPolling
from hicache.serving.prefill_meter import PrefillMeter
from hicache.serving.request import FinishReason, Logprobs, OnToken, Request, RequestOutput, Runner
from hicache.serving.request_queue import RequestQueue, ScheduledRequest
from hicache.serving.runner import Chunk
from hicache.serving.waiting_requests import WaitingRequests

log = logging.getLogger(__name__)

_IDLE_S = 0.0005
_LOOK_UPS = 4  # maximum look-ups of waiting requests' prefixes per step, repeated after commits
_MAX_RETRIES = 1  # retries of a request whose prefix failed to load


class Scheduler:
    """Serves requests through `runner` over `engine`. One thread calls all methods.

    `chunk_tokens`: maximum tokens of one pass. Each request that decodes gets one of these tokens. Prompts share the
    other tokens, but get at least one token. `max_pass_s`: maximum seconds, estimated by the measured prefill speed, of
    a pass with both prompts and decoding requests; 0: no limit. A pass in which no request decodes may take four times
    as long. `max_running`: maximum number of requests that hold slots. `stall_timeout_s`: a request fails after it has
    waited this many seconds for slots while no running request could release slots. `priority_level_s`: seconds of
    waiting that one level of priority is worth. `max_overtake_s`: a request with less left to compute may overtake
    requests submitted up to this many seconds earlier; 0: first come, first served. `clock`: returns the current time
    in seconds.

    The caller must start the engine before, and close it afterwards.
    """

    def __init__(
        self,
        engine: CacheEngine,
        runner: Runner,
        *,
        chunk_tokens: int = 8192,
        max_pass_s: float = 0.0,
        max_running: int = 32,
        stall_timeout_s: float = 60.0,
        priority_level_s: float = 15.0,
        max_overtake_s: float = 15.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if chunk_tokens < 1 or max_running < 1:
            raise ConfigError(f"chunk_tokens={chunk_tokens} and max_running={max_running} must be at least 1")
        self._engine = engine
        self._runner = runner
        self.prefill_meter = PrefillMeter(engine, clock, max_pass_s)
        self._priority_level_s = priority_level_s
        self._pass_polling = PassPolling(engine)
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._stall_timeout_s = stall_timeout_s
        self._unfinished: dict[str, ScheduledRequest] = {}
        order = ServingOrder(max_overtake_s, self.prefill_meter.cost)
        self._waiting = WaitingRequests(order)
        self._running_batch = RequestQueue(order.rank_s)
        # heap of deadlines, which may contain requests that have ended
        self._deadlines: list[tuple[float, int, ref[ScheduledRequest]]] = []
        self._finished: list[RequestOutput] = []
        self._arrivals = itertools.count()
        self._num_commits = 0
        self._clock = clock

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_running(self) -> int:
        """Number of requests that hold slots."""
        return len(self._running_batch)

    def submit(self, request: Request, on_token: OnToken | None = None, logprobs: Logprobs | None = None) -> None:
        """Queue a request and start to prefetch its pages. Raises ConfigError if the id is in use, and InvalidTokens
        for wrong tokens; the request is then not queued.

        `on_token` is called with each token, in order, when it is chosen. `on_token` may submit and abort requests, but
        must not call `step`. If `on_token` raises, its request ends with CallbackFailed. `logprobs`: a list to which
        log probabilities that the request asks for are appended before each call of `on_token`.
        """
        if request.request_id in self._unfinished:
            raise ConfigError(f"request_id {request.request_id!r} is in use; give every request an id of its own")
        lead_s = request.priority * self._priority_level_s
        req = ScheduledRequest(request, next(self._arrivals), self._clock(), lead_s, on_token, logprobs)
        self._enqueue(req)
        self._unfinished[request.request_id] = req
        if req.deadline_s is not None:
            heapq.heappush(self._deadlines, (req.deadline_s, req.arrival, ref(req)))
        if len(req.sequence) > (max_len := self._engine.req_to_token.max_context_len):
            self._finish(req, "error", PromptTooLong(len(req.sequence), max_len, "max_context_len"))

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests that ended since the last step. If there is nothing to do, `step` sleeps
        briefly."""
        self.prefill_meter.report()
        self._engine.poll()
        self._expire()
        self._waiting.update()
        self._look_up_again()
        self._running_batch.sort()
        self._admit_waiting()
        batch = self._compose()
        if batch:
            try:
                self._forward(batch)
            except TransferError as error:
                self._repeat(batch, error)
            except BaseException:
                self._repeat(batch)
                raise
        elif self._unfinished and not self._finished:
            time.sleep(_IDLE_S)
        finished, self._finished = self._finished, []
        return finished

    def run(self, requests: Iterable[Request] = ()) -> list[RequestOutput]:
        """Submit `requests` and step until all are finished. Returns outputs in the order in which requests finished.

        If a step raises an exception, all requests are aborted before `run` raises this exception.
        """
        outputs: list[RequestOutput] = []
        try:
            for request in requests:
                self.submit(request)
            while self._unfinished or self._finished:
                outputs.extend(self.step())
        finally:
            self.abort_all()
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request now with reason "abort" and the tokens generated so far. Returns False if the id is unknown."""
        return self._end(request_id, "abort")

    def finish(self, request_id: str) -> bool:
        """End a request now with reason "stop", because its caller needs no more tokens. Its pages stay in the
        cache."""
        return self._end(request_id, "stop")

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        if (req := self._unfinished.get(request_id)) is not None:
            self._finish(req, reason)
        return req is not None

    def abort_all(self) -> None:
        for request_id in list(self._unfinished):
            self.abort(request_id)

    # Admission

    def _expire(self) -> None:
        """End the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            if (req := heapq.heappop(self._deadlines)[2]()) is not None:
                self._finish(req, "timeout")

    def _look_up_again(self) -> None:
        """Look up the prefixes of waiting requests again if requests have committed pages since, or if a prefetch
        became ready. The request with the oldest look-up is first."""
        for _ in range(_LOOK_UPS):
            if (req := self._waiting.next_to_look_up(self._num_commits)) is None:
                return
            self._look_up(req)
            self._waiting.note_look_up(req)

    def _look_up(self, req: ScheduledRequest) -> None:
        req.expected_len = self._engine.expect(req.request_id, req.cacheable, req.request.namespace)
        req.seen_commits = self._num_commits

    def _admit_waiting(self) -> None:
        """Admit requests whose prefetch is ready, by rank. Skip a request if its staged load is in progress, or if its
        prefix is being computed for another request. Stop at the first request that gets no slots, or that would
        not be computed in the next passes."""
        for req in self._waiting:
            if not is_computed_soon(req, self._running_batch, self._chunk_tokens):
                return
            if is_computed_for_another(req, self._running_batch, self._engine.page_size):
                continue
            while not req.has_ended and req.lease is None:
                try:
                    self._admit(req)
                except (PrefetchPending, ExchangePending):
                    break
                except ResourceExhausted as error:
                    if not isinstance(error, TransferBusy) and self._preempt_below(req):
                        continue
                    if self._running_batch:
                        req.stalled_since_s = 0.0
                    elif req.has_stalled(self._clock(), self._stall_timeout_s):
                        self._finish(req, "error", error)
                    return
                except PromptTooLong as error:
                    self._finish(req, "error", error)

    def _admit(self, req: ScheduledRequest) -> None:
        """Acquire a lease for a request. Raises ResourceExhausted and PromptTooLong."""
        if len(self._running_batch) >= self._max_running:
            raise ResourceExhausted(f"{self._max_running} requests are running; wait, or raise max_running")
        reserve = self._chunk_tokens if self._engine.allocates_by_chunk else None
        req.hold(self._engine.acquire(req.cache_request(reserve)))
        self._waiting.discard(req)
        self._running_batch.add(req)

    # One batch

    def _compose(self) -> list[ScheduledRequest]:
        """Return the requests of the next pass, with slots for their tokens [kv_len, end): first requests that decode,
        then prompts within the budget, both sorted by rank. A preemptible request, and all requests after it, join no
        pass until the device has finished the last pass. By then more of their pages may have been read, and these need
        no computing."""
        batch: dict[ScheduledRequest, None] = {}
        for req in self._running_batch:
            if req.is_decoding:
                self._add(batch, req, req.kv_len + 1)
        budget = self.prefill_meter.budget(max(1, self._chunk_tokens - len(batch)), bool(batch))
        for req in self._running_batch:
            if req.is_preemptible and self.prefill_meter.is_behind:
                break
            if not req.is_decoding:
                self._join(req)
            if req.lease is not None and not req.is_decoding and (share := budget.share_of(req)):
                limit = min(req.length, req.kv_len + share)
                if self._add(batch, req, self._engine.next_stop(req.lease, req.kv_len, limit)):
                    budget.take(req)
        return list(batch)

    def _join(self, req: ScheduledRequest) -> None:
        """Load the pages after the computed tokens of the request that its prefetch has read in the meantime."""
        if req.lease is not None and req.prefetch is not None and req.prefetch.overlaps:
            req.note_loaded(self._engine.join(req.lease, req.kv_len))

    def _add(self, batch: dict[ScheduledRequest, None], req: ScheduledRequest, end: int) -> bool:
        """Add tokens up to `end` of a request to the batch. Returns False if the request gets no slots now.

        If no slots are free, the running request with the highest rank is preempted and removed from the batch; this
        may be `req` itself. If `req` is the only running request, first wait for backups, because a page keeps its
        slots until its backup is complete.
        """
        has_waited = False
        while req.lease is not None and end > req.lease.length:
            try:
                self._engine.extend(req.lease, end - req.lease.length)
            except OutOfSlots as error:
                if len(self._running_batch) > 1 or has_waited:
                    victim = self._running_batch.last
                    batch.pop(victim, None)
                    self._preempt(victim)
                elif req.is_decoding:
                    self._engine.backup(req.lease)
                    has_waited = True
                else:
                    if req.has_stalled(self._clock(), self._stall_timeout_s):
                        self._finish(req, "error", error)
                    return False
        if req.lease is None:
            return False
        req.stalled_since_s, req.end = 0.0, end
        batch[req] = None
        return True

    def _forward(self, batch: Sequence[ScheduledRequest]) -> None:
        """Run one pass over the batch. First record the computed KV of all requests, then call the callbacks with the
        new tokens."""
        chunks = [Chunk(req.held_lease, req.sequence, req.kv_len, req.end, req.num_logits) for req in batch]
        with self._pass_polling.polling(), self.prefill_meter.measure(chunks):
            logits = self._runner.forward(chunks)
        logits = score_prompts(logits, batch)
        self._engine.track([req.held_lease for req in batch if req.is_decoding])
        for req in batch:
            self._record_kv(req)
        for req, token in next_tokens(logits, batch):
            self._append_token(req, token)

    def _record_kv(self, req: ScheduledRequest) -> None:
        """Record that KV of tokens [kv_len, end) is stored. This also commits KV of prompts. KV of generated tokens is
        committed when the request ends or is preempted."""
        start, req.kv_len = req.kv_len, req.end
        if req.is_decoding:
            return
        req.computed_tokens += req.end - start
        try:
            self._engine.commit(req.held_lease, req.sequence[: req.end])
            self._num_commits += 1
        except TransferError as error:
            self._retry(req, error)

    def _append_token(self, req: ScheduledRequest, token: int) -> None:
        """Append a token, call the request's callback, and end the request if it is complete. Callbacks may end any
        request."""
        if req.has_ended:
            return
        req.sequence[req.length] = token
        req.length += 1
        req.is_decoding = True
        req.ttft_s = req.ttft_s or self._clock() - req.submitted_s
        if (error := req.deliver(token)) is not None:
            self._finish(req, "error", error)
        if req.finish_reason:
            self._finish(req, req.finish_reason)

    # Preemption, retry, end

    def _preempt_below(self, req: ScheduledRequest) -> bool:
        """Preempt the running request with the highest rank if the waiting request `req` has a higher priority and a
        lower rank. Returns whether a request was preempted."""
        last = self._running_batch.last if self._running_batch else req
        if before := req.lead_s > last.lead_s and req.rank < last.rank:
            self._preempt(last)
        return before

    def _preempt(self, req: ScheduledRequest) -> None:
        """Return a running request to the waiting queue. The complete pages of the request are backed up to the host,
        because other requests will take its slots."""
        req.preemptions += 1
        self._commit(req)
        self._engine.backup(req.held_lease)
        self._requeue(req)

    def _repeat(self, batch: Sequence[ScheduledRequest], error: TransferError | None = None) -> None:
        """Queue all requests of a pass that raised again. They must start again, because the pass may have advanced
        recurrent states, which cannot be undone. Requests whose prefix failed to load with `error` are retried a
        limited number of times."""
        held = [req for req in batch if req.lease is not None]
        failed = [req for req in held if error and self._engine.load_failed(req.held_lease)] or held
        for req in held:
            if error and req in failed:
                self._retry(req, error)
            else:
                self._requeue(req)

    def _retry(self, req: ScheduledRequest, error: TransferError) -> None:
        """Requeue a request whose prefix failed to load. The pages of this prefix are not on the device any more, so
        they are loaded again or computed."""
        if req.retries >= _MAX_RETRIES:
            self._finish(req, "error", error)
            return
        req.retries += 1
        self._requeue(req)

    def _requeue(self, req: ScheduledRequest) -> None:
        """Release the lease of a running request, and queue the request again without changing its submission time."""
        self._engine.release(req.held_lease, continues=True)
        self._running_batch.discard(req)
        req.lease, req.kv_len, req.is_decoding = None, 0, False
        self._enqueue(req)

    def _enqueue(self, req: ScheduledRequest) -> None:
        self._look_up(req)
        prefetch = self._engine.prefetch(req.request_id, req.cacheable, req.request.namespace, overlaps=True)
        self._waiting.add(req, prefetch)

    def _commit(self, req: ScheduledRequest) -> None:
        """Commit the KV of all computed tokens."""
        tokens, lease = req.sequence[: req.kv_len], req.held_lease
        try:
            self._engine.commit(lease, tokens)
            self._num_commits += 1
        except TransferError as error:
            log.warning("request %s ended while its prefix failed to load: %s", req.request_id, error)

    def _finish(self, req: ScheduledRequest, reason: FinishReason, error: HiCacheError | None = None) -> None:
        """End a request. Does nothing if it has ended."""
        if req.has_ended:
            return
        if reason in ("length", "stop") and req.lease is not None:
            self._commit(req)
        self._engine.cancel(req.request_id)
        self._waiting.discard(req)
        self._running_batch.discard(req)
        del self._unfinished[req.request_id]
        req.lease, req.has_ended = None, True
        self._finished.append(req.output(reason, error))
