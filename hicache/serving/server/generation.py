"""One HTTP request's prompts while they are generated: tokens in, pieces of text out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from hicache.errors import HiCacheError, PromptTooLong, ResourceExhausted
from hicache.serving.request import RequestOutput
from hicache.serving.server.engine_thread import EngineThread
from hicache.serving.server.replies import (
    ApiError,
    Delta,
    Usage,
    client_gone,
    internal_error,
    invalid,
    timed_out,
    unavailable,
)
from hicache.serving.text import StopMatcher, TextDecoder

log = logging.getLogger(__name__)


class Choice:
    """One continuation of a prompt of `prompt_len` tokens. `text`: what was not taken yet. `outcome`: as metrics name
    it, once it has ended. `min_tokens`: so many have no stop string. `is_first`: of those of its prompt."""

    def __init__(
        self,
        index: int,
        prompt_len: int,
        decoder: TextDecoder,
        stops: Sequence[str],
        min_tokens: int = 0,
        *,
        is_first: bool = True,
    ) -> None:
        self.index, self.prompt_len, self._min_tokens, self.is_first = index, prompt_len, min_tokens, is_first
        self._decoder, self._stops = decoder, StopMatcher(stops)
        self._failed = False
        self.text = ""
        self.num_tokens = 0
        self.outcome = ""

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(self.prompt_len, self.num_tokens)

    @property
    def complete(self) -> bool:
        """Whether later tokens are ignored: a stop string was found, or the tokenizer failed to decode."""
        return self._stops.found or self._failed

    def push(self, token: int) -> bool:
        """Returns whether the text is complete now."""
        self.num_tokens += 1
        self._take(lambda: self._decoder.push(token))
        return self.complete

    def end(self, reason: str) -> None:
        if not self.complete:
            self._take(self._decoder.finish)
            self.text += self._stops.finish()
        self.outcome = "error" if self._failed else "stop" if self._stops.found else reason

    def _take(self, decode: Callable[[], str]) -> None:
        """A tokenizer is the model's: what it raises ends its request, and no other."""
        try:
            text = decode()
            self.text += text if self.num_tokens <= self._min_tokens else self._stops.push(text)
        except Exception:
            self._failed = True
            log.exception("a token could not be decoded")


class Generation:
    """The answers to one HTTP request. All methods are called on the event loop.

    `choices`: by request id. `ends`: where its requests run. `timeout_s`: for the message.
    """

    def __init__(self, choices: dict[str, Choice], ends: EngineThread, timeout_s: float) -> None:
        self._choices, self._ends, self._timeout_s = choices, ends, timeout_s
        self._unfinished = dict(choices)
        self._news = asyncio.Event()
        self._error: ApiError | None = None
        self.aborted = False
        self._prompt_tokens = self._cached_tokens = 0

    @property
    def usage(self) -> Usage:
        generated = sum(choice.num_tokens for choice in self._choices.values())
        return Usage(self._prompt_tokens, generated, self._cached_tokens)

    def summary(self) -> dict[str, object]:
        """How it went, for the log."""
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.completion,
            "outcome": ",".join(sorted({choice.outcome or "abort" for choice in self._choices.values()})),
        }

    def push(self, request_id: str, token: int) -> bool:
        """Take a token; False if it comes after the end of the text."""
        choice = self._unfinished.get(request_id)
        if choice is None or choice.complete:
            return False
        if choice.push(token):
            self._ends.finish(request_id)
        self._news.set()
        return True

    def end(self, output: RequestOutput) -> str:
        """Take the end of a request; returns its outcome."""
        choice = self._unfinished.pop(output.request_id)
        choice.end(output.finish_reason)
        if choice.is_first:
            self._prompt_tokens += output.prompt_tokens
            self._cached_tokens += output.cached_len
        if choice.outcome not in ("stop", "length"):
            self._fail(_error_of(output, self._timeout_s))
        self._news.set()
        return choice.outcome

    def fail(self, error: ApiError) -> None:
        """The engine has ended: nothing more will come."""
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
        """The client is gone."""
        self._fail(client_gone())
        self._news.set()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Text as it comes, of several tokens at a time where the reader is slow, until all prompts have ended.

        A choice's last delta has a finish reason; some deltas have no text yet. Raises `ApiError`.
        """
        told: set[int] = set()
        while len(told) < len(self._choices):
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            news = []
            for choice in self._choices.values():
                if choice.index in told or (not choice.text and not choice.outcome and len(self._choices) > 1):
                    continue
                text, choice.text = choice.text, ""
                news.append(Delta(choice.index, text, choice.usage, choice.outcome or None))
                if choice.outcome:
                    told.add(choice.index)
            yield news

    async def whole(self) -> list[Delta]:
        """All choices, complete. Raises `ApiError`."""
        texts: dict[int, list[str]] = {choice.index: [] for choice in self._choices.values()}
        async for news in self.deltas():
            for delta in news:
                texts[delta.index].append(delta.text)
        return [
            Delta(choice.index, "".join(texts[choice.index]), choice.usage, choice.outcome)
            for choice in self._choices.values()
        ]

    def _fail(self, error: ApiError) -> None:
        """Keep the first error, and end the other prompts of the request."""
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
