"""The responses of the server: OpenAI's objects as JSON, and error bodies, which have the same form for every
status."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from hicache.engine import Hit
from hicache.serving.request import TokenLogprobs
from hicache.serving.server.logprobs import LogprobsReply, TokenTexts
from hicache.serving.server.protocol import ChatBody, GenerationBody

CLOSE = {"Connection": "close"}
DONE = b"data: [DONE]\n\n"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class ApiError(Exception):
    """An error response. `message` must not contain text of a prompt."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.headers = dict(headers or {})
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code)).model_dump()
        super().__init__(status, message)  # unpickling passes these arguments to the constructor

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(
    message: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
) -> ApiError:
    return ApiError(400, message, param=param, code=code, headers=headers)


def wrong_key() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        408, f"the request took longer than {seconds:g} seconds", kind="timeout_error", code="request_timeout"
    )


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large", headers=CLOSE)


def too_slow(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"the body took longer than {seconds:g} seconds to arrive",
        kind="timeout_error",
        code="request_timeout",
        headers=CLOSE,
    )


def too_many_bodies() -> ApiError:
    return ApiError(
        429,
        "too many large bodies are under way; try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1", **CLOSE},
    )


def crowded() -> ApiError:
    return ApiError(
        503,
        "all connections are in use; try again later",
        kind="server_error",
        code="too_many_connections",
        headers={"Retry-After": "1", **CLOSE},
    )


def overloaded(limit: int) -> ApiError:
    return ApiError(
        429,
        f"{limit} requests are running or waiting; try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


def client_disconnected() -> ApiError:
    """Return an error with nginx's status 499. It only appears in the log and the metrics, because the client has
    disconnected."""
    return ApiError(499, "the client has closed the connection", kind="client_error", code="client_disconnected")


def internal_error() -> ApiError:
    return ApiError(500, "the server failed to answer", kind="server_error", code="internal_error")


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code)


@dataclass(frozen=True)
class Usage:
    """The numbers of tokens of one HTTP request, summed over its prompts. `cached`: number of prompt tokens found in
    each tier; None if not known yet."""

    prompt: int
    completion: int
    cached: Hit | None = None
    missed: Mapping[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        counts = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if self.cached is None:
            return counts
        details: dict[str, Any] = {
            "cached_tokens": self.cached.tokens,
            "cached_tokens_details": asdict(self.cached),
        }
        if self.missed is not None:
            details["missed_tokens_details"] = dict(self.missed)
        return {**counts, "prompt_tokens_details": details}


@dataclass(frozen=True)
class Delta:
    """A piece of text of choice `index`. `usage`: the usage of the choice so far. `finish_reason` is set in the last
    piece. `logprobs`: log probabilities of the tokens since the last piece; None: not requested."""

    index: int
    text: str
    usage: Usage
    finish_reason: str | None = None
    logprobs: Sequence[TokenLogprobs] | None = None


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join all pieces of one choice."""
    logprobs = None if deltas[-1].logprobs is None else [entry for delta in deltas for entry in delta.logprobs or ()]
    return replace(deltas[-1], text="".join(delta.text for delta in deltas), logprobs=logprobs)


class Reply:
    """Formats the answer to one request, which is a completion or a chat. The answer is one JSON object or a stream of
    events."""

    def __init__(self, body: GenerationBody, reply_id: str, model: str, texts: TokenTexts) -> None:
        self.reply_id = reply_id
        self._is_chat = isinstance(body, ChatBody)
        self._texts = texts
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs: dict[int, LogprobsReply] = {}
        self._with_usage = body.wants_usage
        self._always_with_usage = body.wants_usage_always
        self._begun: set[int] = set()
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}

    def complete(self, texts: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": delta.index,
                **self._complete_text(delta.text),
                "logprobs": self._logprobs_of(delta),
                "finish_reason": delta.finish_reason,
            }
            for delta in texts
        ]
        name = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": name, "choices": choices, "usage": usage.as_json()}

    def event(self, delta: Delta) -> bytes:
        """Return the events of a piece. For a chat, the first event of each choice contains the role."""
        if not self._is_chat:
            return self._event({"text": delta.text}, delta)
        event = self._event({"delta": {"content": delta.text}}, delta)
        if delta.index in self._begun:
            return event
        self._begun.add(delta.index)
        return self._event({"delta": {"role": "assistant", "content": ""}}, Delta(delta.index, "", delta.usage)) + event

    def usage_event(self, usage: Usage) -> bytes:
        """Return the last event of a stream, which contains the usage. Returns b"" if the client did not request the
        usage."""
        return self._data([], usage.as_json()) if self._with_usage else b""

    def _complete_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        shape = self._logprobs.setdefault(delta.index, LogprobsReply(self._texts, as_ids=self._as_ids))
        return shape.of_chat(delta.logprobs) if self._is_chat else shape.of_completion(delta.logprobs)

    def _event(self, content: Mapping[str, Any], delta: Delta) -> bytes:
        choice = {"index": delta.index, **content, "logprobs": self._logprobs_of(delta)}
        choice["finish_reason"] = delta.finish_reason
        return self._data([choice], delta.usage.as_json() if self._always_with_usage else None)

    def _data(self, choices: list[Any], usage: Mapping[str, Any] | None) -> bytes:
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        value: dict[str, Any] = {**self._head, "object": name, "choices": choices}
        if self._with_usage or usage is not None:
            value["usage"] = usage
        return event_of(value)


def event_of(value: Mapping[str, Any]) -> bytes:
    """Format a server-sent event."""
    return b"data: %s\n\n" % json.dumps(value, separators=(",", ":")).encode()
