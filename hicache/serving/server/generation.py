"""The answers to one HTTP request during generation. It receives tokens and returns pieces of text."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence

from hicache.engine import Hit
from hicache.errors import HiCacheError, PromptTooLong, ResourceExhausted
from hicache.serving.request import RequestOutput, TokenLogprobs
from hicache.serving.server.engine_thread import EngineThread
from hicache.serving.server.protocol import GenerationBody
from hicache.serving.server.replies import (
    ApiError,
    Delta,
    Usage,
    client_disconnected,
    internal_error,
    invalid,
    joined,
    timed_out,
    unavailable,
)
from hicache.serving.text import StopMatcher, TextDecoder

_MAX_LOGPROBS = 256  # maximum per event, so that other requests can use the event loop between two events

log = logging.getLogger(__name__)


class Choice:
    """One answer to a prompt of `prompt_len` tokens. `text` and `logprobs`: text and log probabilities that `take` has
    not returned yet. `outcome`: name of the outcome in metrics, empty until the answer has ended. `prompt_index`: index
    of the prompt. `is_first`: whether this is the first answer to its prompt."""

    def __init__(self, index: int, body: GenerationBody, prompt_len: int, decoder: TextDecoder, text: str = "") -> None:
        self.index = index
        self.prompt_len = prompt_len
        self._min_tokens = body.min_tokens or 0
        self.prompt_index, rank = divmod(index, body.n or 1)
        self.is_first = not rank
        self._decoder = decoder
        self._stops = StopMatcher(body.stops)
        self._failed = False
        self.text = text
        self._has_no_answer = body.max_tokens == 0
        self.logprobs: deque[TokenLogprobs] = deque()
        self._wants_logprobs = body.num_logprobs is not None
        self.num_tokens = 0
        self.outcome = ""

    @property
    def usage(self) -> Usage:
        """Return the numbers of tokens of the answer so far."""
        return Usage(self.prompt_len, self.num_tokens)

    @property
    def complete(self) -> bool:
        """Return whether the answer ignores further tokens, because a stop string was found or the tokenizer failed to
        decode."""
        return self._stops.found or self._failed

    def push(self, token: int, logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Add a token, and the log probabilities of tokens up to this token. Returns whether the text is complete
        now."""
        if self._has_no_answer:
            self.logprobs += logprobs[:-1]
            return False
        self.logprobs += logprobs
        self.num_tokens += 1
        self._take(lambda: self._decoder.push(token))
        return self.complete

    def take(self) -> Delta:
        """Return text and log probabilities since the last call. If there are many log probabilities, such as for a
        long prompt, the rest is left for later calls."""
        text, self.text = self.text, ""
        logprobs = [self.logprobs.popleft() for _ in range(min(len(self.logprobs), _MAX_LOGPROBS))]
        outcome = "" if self.logprobs else self.outcome
        return Delta(self.index, text, self.usage, outcome or None, logprobs if self._wants_logprobs else None)

    def end(self, reason: str) -> None:
        if not self.complete:
            self._take(self._decoder.finish)
            self.text += self._stops.finish()
        self.outcome = "error" if self._failed else "stop" if self._stops.found else reason

    def _take(self, decode: Callable[[], str]) -> None:
        """Append decoded text. If the model's tokenizer raises, only this request ends."""
        try:
            text = decode()
            self.text += text if self.num_tokens <= self._min_tokens else self._stops.push(text)
        except Exception:
            self._failed = True
            log.exception("a token could not be decoded")


class Generation:
    """The answers to one HTTP request. All methods are called on the event loop.

    `choices`: the answers by request id. `ends`: the engine thread, by which requests are ended. `timeout_s`: time
    limit of a request in seconds, for the error message. `is_debug`: whether the usage lists why tokens of the prompt
    were computed.
    """

    def __init__(
        self, choices: dict[str, Choice], ends: EngineThread, timeout_s: float, *, is_debug: bool = False
    ) -> None:
        self._choices = choices
        self._ends = ends
        self._timeout_s = timeout_s
        self._unfinished = dict(choices)
        self._news = asyncio.Event()
        self._error: ApiError | None = None
        self.aborted = False
        self._prompt_tokens = 0
        self._cached = Hit()
        self._missed = Counter[str]() if is_debug else None

    @property
    def usage(self) -> Usage:
        generated = sum(choice.num_tokens for choice in self._choices.values())
        return Usage(self._prompt_tokens, generated, self._cached, self._missed)

    def summary(self) -> dict[str, object]:
        """Return numbers of tokens and the outcomes of the answers, for the log line."""
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt,
            "cached_tokens": self._cached.tokens,
            "completion_tokens": usage.completion,
            "outcome": ",".join(sorted({choice.outcome or "abort" for choice in self._choices.values()})),
        }

    def push(self, request_id: str, token: int, logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Add a token of a request, and the log probabilities of tokens up to this token. Returns False if the text was
        already complete."""
        choice = self._unfinished.get(request_id)
        if choice is None or choice.complete:
            return False
        for other in self._unfinished.values() if len(logprobs) > 1 else ():
            if other is not choice and other.prompt_index == choice.prompt_index:
                # Copy log probabilities of the prompt: only the request of the first answer computes them.
                other.logprobs += logprobs[:-1]
        if choice.push(token, logprobs):
            self._ends.finish(request_id)
        self._news.set()
        return True

    def end(self, output: RequestOutput) -> str:
        """Record the end of a request. Returns its outcome."""
        choice = self._unfinished.pop(output.request_id)
        choice.end(output.finish_reason)
        if choice.is_first:
            self._prompt_tokens += output.prompt_tokens
            self._cached += output.hit
            if self._missed is not None:
                self._missed.update(output.missed)
        if choice.outcome not in ("stop", "length"):
            self._fail(_error_of(output, self._timeout_s))
        self._news.set()
        return choice.outcome

    def fail(self, error: ApiError) -> None:
        """End all answers with an error, because the engine has ended."""
        for choice in self._unfinished.values():
            choice.end("error")
        self._unfinished.clear()
        self._fail(error)
        self._news.set()

    def abort(self) -> None:
        """End all answers that have not ended. Idempotent."""
        self.aborted = True
        for request_id in self._unfinished:
            self._ends.abort(request_id)

    def disconnect(self) -> None:
        """End all answers, because the client has disconnected."""
        self._fail(client_disconnected())
        self._news.set()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield pieces of text as soon as they are generated, until all answers have ended. If the reader is slow, a
        piece has the text of several tokens.

        Only the last delta of a choice has a finish reason. A delta may have no text. Raises `ApiError`.
        """
        finished: set[int] = set()
        while len(finished) < len(self._choices):
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            news = []
            for choice in self._choices.values():
                has_output = choice.text or choice.outcome or choice.logprobs or len(self._choices) == 1
                if choice.index not in finished and has_output:
                    news.append(choice.take())
                    if news[-1].finish_reason:
                        finished.add(choice.index)
            yield news
            if any(choice.logprobs for choice in self._choices.values()):
                self._news.set()
                await asyncio.sleep(0)

    async def collect(self) -> list[Delta]:
        """Return all answers when they are complete. Raises `ApiError`."""
        parts: dict[int, list[Delta]] = {choice.index: [] for choice in self._choices.values()}
        async for news in self.deltas():
            for delta in news:
                parts[delta.index].append(delta)
        return [joined(deltas) for deltas in parts.values()]

    def _fail(self, error: ApiError) -> None:
        """Store an error if it is the first one, and end all answers of the request."""
        if self._error is None:
            self._error = error
            self.abort()


def _error_of(output: RequestOutput, timeout_s: float) -> ApiError:
    error: HiCacheError | None = output.error
    if output.finish_reason == "timeout":
        return timed_out(timeout_s)
    if output.finish_reason == "abort":
        return unavailable("the request was ended, as the server stops", "server_stopping")
    if isinstance(error, PromptTooLong):
        return invalid(str(error), code="context_length_exceeded")
    if isinstance(error, ResourceExhausted):
        return unavailable(str(error), "out_of_resources")
    return internal_error()
