"""Connects HTTP requests and the engine thread. It keeps the open requests, and passes each generated token to its
request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hicache.engine import MemoryTier
from hicache.metrics import MetricInfo
from hicache.replay.recorder import TraceRecorder
from hicache.serving.constrained import JsonConstraint
from hicache.serving.models import Tokenizer
from hicache.serving.request import Request
from hicache.serving.sampling import PLAIN, SamplingParams
from hicache.serving.server.engine_thread import EngineThread, Event, RequestEnded, TokenChosen
from hicache.serving.server.generation import Choice, Generation
from hicache.serving.server.prometheus import ServerMetrics
from hicache.serving.server.prompts import Prompt
from hicache.serving.server.protocol import GenerationBody
from hicache.serving.server.replies import ApiError, internal_error, invalid, overloaded, timed_out, unavailable

_MAX_PROMPT_LOGPROBS = 1 << 20  # maximum per request; this many take 100 MiB
_MIN_S = 1e-3
_CONTEXT_TOKENS = 32  # number of last prompt tokens that are context for decoding the answer
_SEED_MASK = (1 << 64) - 1  # converts negative seeds to two's complement


@dataclass(frozen=True)
class ServedModel:
    """The served model. `names`: names by which clients may request the model. Answers have the first name if the
    client gave no name. `max_len`: maximum tokens of a prompt and its answer together. `sampling`: default parameters.
    Token ids are below `vocab_size`."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    vocab_size: int
    max_len: int
    eos_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = PLAIN


@dataclass(frozen=True)
class Limits:
    """Limits of requests. `max_open`: maximum number of answers that run or wait. `timeout_s`: maximum seconds of a
    request, from its arrival to its last token."""

    max_open: int
    timeout_s: float


@dataclass
class _OpenRequest:
    """An answer to a prompt. Times are of `time.perf_counter`. `others`: further answers to the same prompt. They are
    submitted when the first token of this answer arrives, because the prompt is in the cache then."""

    generation: Generation
    arrival_s: float
    last_token_s: float = 0.0
    others: Sequence[Request] = ()


class Frontend:
    """Tracks the open requests. The event loop calls all methods. `engine_described`: the result of
    `CacheEngine.describe()`. `recorder`: records every request."""

    def __init__(
        self,
        model: ServedModel,
        limits: Limits,
        thread: EngineThread,
        engine_described: Mapping[str, MetricInfo],
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.model = model
        self.limits = limits
        self._thread = thread
        self._recorder = recorder
        self._open: dict[str, _OpenRequest] = {}
        self._num_prepared = 0
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.metrics = ServerMetrics(
            model_name=model.names[0],
            num_running=lambda: thread.num_running,
            num_queued=lambda: max(0, len(self._open) - thread.num_running),
            engine_metrics=lambda: thread.metrics,
            engine_described=engine_described,
        )

    def require_serving(self) -> None:
        """Raise an `ApiError` of status 503 if the server is stopping or the engine has failed."""
        if self._stopping:
            raise _stopping()
        if not self._thread.alive:
            raise unavailable("the engine has failed; the server has to be started again", "engine_failed")

    def require_capacity(self, num_answers: int) -> None:
        """Raise `ApiError` if the server is not serving, or if `num_answers` more answers would exceed `max_open`."""
        self.require_serving()
        if len(self._open) + self._num_prepared + num_answers > self.limits.max_open:
            raise overloaded(self.limits.max_open)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request as open while its prompts are tokenized within the `with` block. Raises `ApiError` if too
        many requests are open."""
        self.require_capacity(1)
        self._num_prepared += 1
        try:
            yield
        finally:
            self._num_prepared -= 1

    def left_s(self, arrival_s: float) -> float:
        """Return the seconds until the timeout of a request that arrived at `arrival_s` of `time.perf_counter`. The
        result is always above 0."""
        return max(_MIN_S, self.limits.timeout_s - (time.perf_counter() - arrival_s))

    def start(
        self,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        reply_id: str,
        arrival_s: float,
        constraint: JsonConstraint | None = None,
        *,
        is_debug: bool = False,
    ) -> Generation:
        """Submit all prompts of a request, or raise and submit none. `constraint`: restricts each answer. `is_debug`:
        see `Generation`. Raises `ApiError`."""
        num_each = body.n or 1
        self.require_capacity(len(prompts) * num_each)
        self._require_possible(body, prompts)
        requests = [
            dataclasses.replace(
                self._request(body, prompt, f"{reply_id}-{i * num_each + j}", j, self.left_s(arrival_s)),
                constraint=None if constraint is None else constraint.copy(),
            )
            for i, prompt in enumerate(prompts)
            for j in range(num_each)
        ]
        choices = {
            request.request_id: self._choice(body, index, request, prompts[index // num_each].text)
            for index, request in enumerate(requests)
        }
        generation = Generation(choices, self._thread, self.limits.timeout_s, is_debug=is_debug)
        for request in requests:
            self._open[request.request_id] = _OpenRequest(generation, arrival_s)
        for first in range(0, len(requests), num_each):
            request, *others = requests[first : first + num_each]
            self._open[request.request_id].others = others
            self._submit(request)
        self._idle.clear()
        return generation

    async def reset(self, tiers: Sequence[MemoryTier]) -> bool:
        """Reset the cache as `EngineThread.reset` does. Raises `ApiError`."""
        self.require_serving()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._thread.reset(tiers)), self.limits.timeout_s)
        except TimeoutError:
            raise timed_out(self.limits.timeout_s) from None

    def deliver(self, events: Sequence[Event]) -> None:
        """Pass each event to its request. An empty list of events means that the engine thread has ended."""
        for event in events:
            open_request = self._open.get(event.request_id)
            if open_request is None:
                continue
            if isinstance(event, TokenChosen):
                self._on_token(open_request, event)
            else:
                self._on_end(open_request, event)
        if not events:
            error = _stopping() if self._stopping else internal_error()
            for open_request in self._open.values():
                open_request.generation.fail(error)
                self.metrics.requests.labels("error").inc()
            self._open.clear()
        if not self._open:
            self._idle.set()

    def begin_stop(self) -> None:
        """Refuse new requests from now on."""
        self._stopping = True

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def _require_possible(self, body: GenerationBody, prompts: Sequence[Prompt]) -> None:
        """Raise `ApiError` for token ids outside the vocabulary, for too many log probabilities, and for a `min_tokens`
        above the maximum of generated tokens."""
        vocab_size = self.model.vocab_size
        for name, ids in (("logit_bias", body.bias), ("stop_token_ids", body.stop_token_ids or ())):
            if max(ids, default=0) >= vocab_size:
                raise invalid(f"a token id is not below the size of the vocabulary, {vocab_size}", name)
        if body.echoes and body.num_logprobs is not None:
            num = sum(len(prompt.tokens) for prompt in prompts) * (body.num_logprobs + 1) * (body.n or 1)
            if num > _MAX_PROMPT_LOGPROBS:
                raise invalid(
                    f"{num} log probabilities of prompts were requested, at most {_MAX_PROMPT_LOGPROBS} are "
                    "returned; request fewer for each token, or send fewer or shorter prompts",
                    "logprobs",
                )
        if any((body.min_tokens or 0) > prompt.max_new_tokens for prompt in prompts):
            raise invalid("min_tokens is above the number of tokens that may be generated", "min_tokens")

    def _submit(self, request: Request) -> None:
        self._thread.submit(request)
        if self._recorder is not None and request.is_counted:
            self._recorder.arrived(request.request_id, request.tokens, request.namespace)

    def _submit_others(self, open_request: _OpenRequest) -> None:
        """Submit the second and later answers to a prompt (`n` > 1). Their deadline counts from the request's arrival.
        If the generation was aborted before, they are aborted immediately."""
        left_s = self.left_s(open_request.arrival_s)
        others, open_request.others = open_request.others, ()
        for request in others:
            self._submit(dataclasses.replace(request, deadline_s=left_s))
            if open_request.generation.aborted:
                self._thread.abort(request.request_id)

    def _request(self, body: GenerationBody, prompt: Prompt, request_id: str, number: int, left_s: float) -> Request:
        """Return the scheduler's request for one answer to the prompt. `number`: number of the answer, from 0."""
        seed = (secrets.randbits(64) if body.seed is None else body.seed) + number & _SEED_MASK
        sampling = dataclasses.replace(self.model.sampling, **body.sampling, seed=seed)
        eos_ids = frozenset() if body.ignore_eos else self.model.eos_ids
        return Request(
            request_id,
            prompt.tokens,
            prompt.max_new_tokens,
            sampling,
            namespace=body.cache_salt or "",
            eos_ids=eos_ids.union(body.stop_token_ids or ()),
            branch_points=() if body.session_end else (prompt.shared_len,),
            expected_uses=body.expected_reuse,
            session_end=bool(body.session_end),
            next_turn_within_s=body.next_turn_within_s,
            priority=-(body.priority or 0),
            deadline_s=left_s,
            num_logprobs=body.num_logprobs,
            scores_prompt=body.echoes and number == 0,
            is_counted=number == 0,
        )

    def _choice(self, body: GenerationBody, index: int, request: Request, text: str) -> Choice:
        end = request.tokens[-_CONTEXT_TOKENS:].tolist()
        decoder = self.model.tokenizer.decoder(end, skip_special=body.skip_special_tokens is not False)
        return Choice(index, body, len(request.tokens), decoder, text)

    def _on_token(self, open_request: _OpenRequest, event: TokenChosen) -> None:
        if open_request.others:
            self._submit_others(open_request)
        if not open_request.generation.push(event.request_id, event.token, event.logprobs):
            return
        metrics, last_s = self.metrics, open_request.last_token_s
        if last_s:
            metrics.inter_token_s.observe(event.time_s - last_s)
        else:
            metrics.ttft_s.observe(event.time_s - open_request.arrival_s)
        open_request.last_token_s = event.time_s
        metrics.generated_tokens.inc()

    def _on_end(self, open_request: _OpenRequest, ended: RequestEnded) -> None:
        output = ended.output
        del self._open[output.request_id]
        if self._recorder is not None:
            self._recorder.ended(output.request_id, len(output.tokens) if output.is_counted else None)
        outcome = open_request.generation.end(output)
        if open_request.others:
            self._submit_others(open_request)
        metrics = self.metrics
        metrics.requests.labels(outcome).inc()
        metrics.request_s.observe(time.perf_counter() - open_request.arrival_s)
        if not output.is_counted:
            return
        metrics.prompt_tokens.inc(output.prompt_tokens)
        for tier, num_tokens in dataclasses.asdict(output.hit).items():
            metrics.cached_tokens.labels(tier).inc(num_tokens)
        for tier, seconds in ended.saved_s.items():
            metrics.saved_s.labels(tier).inc(seconds)


def _stopping() -> ApiError:
    return unavailable("the server stops", "server_stopping")
