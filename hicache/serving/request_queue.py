"""The scheduler's record of a request, and queues of requests in the order of service (`hicache.serving.order`)."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from hicache.engine import CacheRequest, Hit, Lease, Prefetch
from hicache.errors import CallbackFailed, HiCacheError
from hicache.serving.request import FinishReason, Logprobs, OnToken, Request, RequestOutput, TokenLogprobs

log = logging.getLogger(__name__)


class ScheduledRequest:
    """A request that was submitted and has not ended. Only the scheduler changes it.

        sequence[0, kv_len)         tokens whose KV is in the pool
        sequence[kv_len, length)    tokens to compute: the rest of the prompt, or the last generated token
        sequence[length, end)       tokens to generate

    `arrival`: number of the submission. `lead_s`: seconds of waiting that the request's priority is worth. `rank`:
    changed only by the queue of the request. `expected_len`: number of prompt tokens found in memory by the last
    look-up, which was made after `seen_commits` commits. `num_scored`: number of prompt tokens whose log probabilities
    are complete or not requested; `is_scoring`: whether other prompt tokens still need logits. `is_plain`: whether
    logits are needed only to choose a token. `is_decoding`: whether a token was generated since the last admission.
    `end`: end of the tokens that the next pass computes.
    """

    def __init__(
        self,
        request: Request,
        arrival: int,
        submitted_s: float,
        lead_s: float = 0.0,
        on_token: OnToken | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        self.request = request
        self.on_token = on_token
        self.logprobs = [] if logprobs is None else logprobs
        self.num_scored = len(request.tokens)
        if request.num_logprobs is not None and request.scores_prompt:
            self.logprobs.append(TokenLogprobs(int(request.tokens[0]), None))
            self.num_scored = 1
        self.is_scoring = self.num_scored < len(request.tokens)
        self.arrival = arrival
        self.rank = (submitted_s - lead_s, arrival)
        self.expected_len = self.seen_commits = 0
        self.submitted_s = submitted_s
        self.lead_s = lead_s
        self.deadline_s = None if request.deadline_s is None else submitted_s + request.deadline_s
        self.sequence = np.empty(len(request.tokens) + request.max_new_tokens, dtype=np.int64)
        self.sequence[: len(request.tokens)] = request.tokens
        self.length = len(request.tokens)
        self.kv_len = self.end = 0
        self.lease: Lease | None = None
        self.prefetch: Prefetch | None = None
        self.hit: Hit | None = None
        self.missed: Mapping[str, int] = {}
        self.is_decoding = self.has_ended = False
        self.changes_logits = request.sampling_params.changes_logits
        self.is_plain = not self.changes_logits and request.num_logprobs is None and request.constraint is None
        self.ttft_s = self.stalled_since_s = 0.0
        self.computed_tokens = self.preemptions = self.retries = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_ready(self) -> bool:
        """Return whether the request need not wait for a prefetch."""
        return self.prefetch is None or self.prefetch.ready

    @property
    def is_preemptible(self) -> bool:
        """Return whether later requests may be served before this request, within `max_overtake_s`. True while the
        request waits for pages of its prompt, and waiting was estimated to delay all requests less than computing."""
        return self.prefetch is not None and self.prefetch.is_preemptible and not self.prefetch.ended

    def hold(self, lease: Lease) -> None:
        """Store the lease of an admission. Hits are counted at the first admission."""
        self.lease = lease
        self.kv_len = lease.cached_len
        self.stalled_since_s = 0.0
        if self.hit is None:
            self.hit, self.missed = lease.hit, lease.missed

    def note_loaded(self, hit: Hit) -> None:
        """Record that tokens after the computed tokens were loaded and need no computing."""
        assert self.lease is not None and self.hit is not None
        self.kv_len += hit.tokens
        if self.lease.request.is_counted or not self.request.is_counted:
            self.hit += hit

    def deliver(self, token: int) -> CallbackFailed | None:
        """Pass a token to the request's callback. Returns the error if the callback raised."""
        try:
            if self.on_token is not None:
                self.on_token(token)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of its request
            log.warning("on_token of request %s raised %r", self.request_id, error)
            return CallbackFailed(self.request_id, error)
        return None

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self.sequence[: self.length]

    @property
    def num_logits(self) -> int:
        """Return the number of tokens of [kv_len, end) for which the next pass must return logits."""
        return self.end - self.kv_len if self.is_scoring else 1

    @property
    def cacheable(self) -> npt.NDArray[np.int64]:
        """Return the tokens to look up in the cache. The last of these tokens is always computed."""
        return self.tokens[: self.num_scored] if self.is_scoring else self.tokens

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.sequence[len(self.request.tokens) : self.length].tolist())

    @property
    def num_generated(self) -> int:
        return self.length - len(self.request.tokens)

    @cached_property
    def distinct_prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Return the distinct tokens of the prompt."""
        return np.unique(self.request.tokens)

    @property
    def held_lease(self) -> Lease:
        assert self.lease is not None
        return self.lease

    def has_stalled(self, now_s: float, timeout_s: float) -> bool:
        """Return whether the request has waited longer than `timeout_s` for slots that only a transfer could free."""
        self.stalled_since_s = self.stalled_since_s or now_s
        return now_s - self.stalled_since_s > timeout_s

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return the reason why generation has ended; None if it continues."""
        if self.num_generated and int(self.sequence[self.length - 1]) in self.request.eos_ids:
            return "stop"
        if (constraint := self.request.constraint) is not None and constraint.outcome is not None:
            return constraint.outcome
        return "length" if self.length == len(self.sequence) else None

    def cache_request(self, reserve_tokens: int | None) -> CacheRequest:
        """Return the engine's request for an admission now. Hits and misses of a second or later admission do not count
        as those of a new prompt."""
        request = self.request
        return CacheRequest(
            self.request_id,
            self.tokens,
            request.namespace,
            reserve_tokens=reserve_tokens,
            branch_points=request.branch_points,
            expected_uses=request.expected_uses,
            session_end=request.session_end,
            next_turn_within_s=request.next_turn_within_s,
            max_cached_tokens=self.num_scored - 1 if self.is_scoring else None,
            is_counted=request.is_counted and self.hit is None,
            may_wait=False,
        )

    def output(self, reason: FinishReason, error: HiCacheError | None = None) -> RequestOutput:
        """Return the outcome if the request ends now."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_tokens=len(self.request.tokens),
            tokens=self.generated,
            finish_reason=reason,
            hit=self.hit or Hit(),
            missed=self.missed,
            computed_tokens=self.computed_tokens,
            ttft_s=self.ttft_s,
            preemptions=self.preemptions,
            error=error,
            is_counted=self.request.is_counted and self.hit is not None,
        )


class RequestQueue:
    """Requests in the order of their rank: `rank_s`, then arrival. Only `add`, `update` and `sort` change ranks. `sort`
    takes O(n), a look-up O(log n); adding and removing move pointers."""

    def __init__(self, rank_s: Callable[[ScheduledRequest], float]) -> None:
        self._rank_s = rank_s
        self._requests: list[ScheduledRequest] = []

    def add(self, req: ScheduledRequest) -> None:
        req.rank = (self._rank_s(req), req.arrival)
        bisect.insort(self._requests, req, key=_rank)

    def update(self, req: ScheduledRequest) -> None:
        """Compute the rank of a queued request again."""
        self.discard(req)
        self.add(req)

    def sort(self) -> None:
        """Compute all ranks again."""
        for req in self._requests:
            req.rank = (self._rank_s(req), req.arrival)
        self._requests.sort(key=_rank)

    def discard(self, req: ScheduledRequest) -> None:
        """Remove a request. Does nothing if it is not in the queue."""
        index = bisect.bisect_left(self._requests, req.rank, key=_rank)
        if index < len(self._requests) and self._requests[index] is req:
            del self._requests[index]

    @property
    def last(self) -> ScheduledRequest:
        """Return the request with the highest rank, which is served last."""
        return self._requests[-1]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Iterate over a copy, so that requests may be added and removed during the iteration."""
        return iter(tuple(self._requests))

    def __len__(self) -> int:
        return len(self._requests)


_rank = attrgetter("rank")
