"""A conversation with `hicache serve`: questions one after another, with streamed answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from hicache.console import read_text
from hicache.errors import ConfigError, HiCacheError, NoServer
from hicache.serving.packaged_model import CHAT_FIELDS, NAME

_MIN_TIMED_TOKENS = 512  # of a prompt used to measure the prefill speed; shorter ones take mostly other time


@dataclass
class Conversation:
    """A conversation. `server`: its address, for messages. `documents`: text before the first question."""

    client: openai.OpenAI
    server: str
    max_tokens: int
    documents: str = ""
    _messages: list[Any] = field(default_factory=list)
    _tokens_per_s: float | None = None  # of the first prompt

    def ask(self, question: str, on_text: Callable[[str], object]) -> str:
        """Ask a question, and pass the answer to `on_text` part by part. Returns a line about its prompt. Raises
        HiCacheError."""
        if self.documents and not self._messages:
            question = f"{self.documents}\n\nQuestion: {question}"
        self._messages.append({"role": "user", "content": question})
        try:
            text, first_token_s, usage = self._answer(on_text)
        except openai.APIError as error:
            raise _as_own(error, self.server) from error
        if usage is None:
            raise NoServer(self.server, "the answer has no end")
        self._messages.append({"role": "assistant", "content": text})
        cached = usage.prompt_tokens_details.model_extra["cached_tokens_details"]
        return self._line(usage.prompt_tokens, cached, first_token_s)

    def _answer(self, on_text: Callable[[str], object]) -> tuple[str, float, Any]:
        """The text of an answer, the seconds until its first token, and the usage that the server reports."""
        begin_s, first_token_s, text, usage = time.perf_counter(), 0.0, "", None
        model = self.client.models.list().data[0].id
        more: Any = {"stream_options": {"include_usage": True}, **(CHAT_FIELDS if model == NAME else {})}
        create, max_tokens = self.client.chat.completions.create, self.max_tokens
        with create(model=model, messages=self._messages, max_tokens=max_tokens, stream=True, **more) as events:
            for event in events:
                first_token_s = first_token_s or time.perf_counter() - begin_s
                usage = event.usage or usage
                for choice in event.choices:
                    text += (part := choice.delta.content or "")
                    on_text(part)
        return text, first_token_s, usage

    def _line(self, prompt_tokens: int, cached: Mapping[str, int], first_token_s: float) -> str:
        """A line with the tiers that the prompt's tokens came from, and the time that this saved."""
        sources = [f"{tokens:,} from {tier}" for tier, tokens in cached.items() if tokens]
        computed = f"{prompt_tokens - sum(cached.values()):,} computed"
        line = f"{prompt_tokens:,} prompt tokens: {', '.join([*sources, computed])}; first token {first_token_s:.2f} s"
        if self._tokens_per_s is None and not sources and prompt_tokens >= _MIN_TIMED_TOKENS:
            self._tokens_per_s = prompt_tokens / first_token_s
        elif self._tokens_per_s is not None and sources:
            line += f", without the cache about {prompt_tokens / self._tokens_per_s:.2f} s"
        return line


def documents_of(files: Sequence[Path]) -> str:
    """The texts of the files, each below its name. Raises ConfigError if a file is empty or not text."""
    texts = {file: read_text(file).strip() for file in files}
    if empty := [str(file) for file, text in texts.items() if not text]:
        raise ConfigError(f"{empty[0]} is empty; give a file with text")
    return "\n\n".join(f"{file.name}:\n{text}" for file, text in texts.items())


def _as_own(error: openai.APIError, server: str) -> HiCacheError:
    """The client library's error as a hicache error with a remedy."""
    if isinstance(error, openai.APIConnectionError):
        return NoServer(server, str(error.__cause__ or error))
    # Without the status that the client library puts before the server's message.
    told = error.body["message"] if isinstance(error.body, dict) and "message" in error.body else error.message
    if error.code == "context_length_exceeded":
        return ConfigError(f"{told}; give fewer or shorter files, or begin a new chat")
    if isinstance(error, openai.AuthenticationError):
        return ConfigError(f"{server} wants another key; give --api-key, or set HICACHE_API_KEY")
    return ConfigError(f"{server}: {told}")
