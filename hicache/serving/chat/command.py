"""`hicache chat`: answers questions about files in a terminal or through a pipe. With `--url` it does not import
torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import openai
from rich.console import Console
from rich.text import Text

from hicache.config import EngineConfig
from hicache.config.environment import api_keys
from hicache.console import new_console, printable, read_text
from hicache.errors import ConfigError, HiCacheError, NoServer
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.loopback import is_loopback
from hicache.serving.packaged_model import CHAT_FIELDS, NAME

_TIMEOUT_S = 600.0  # maximum time until the next part of an answer, long enough to compute a long prompt
# minimum tokens of a prompt whose time is used as the prefill speed; for shorter prompts, most of the time is not
# prefill
_MIN_TIMED_TOKENS = 512


@dataclass
class Conversation:
    """A conversation with a server. `server`: address of the server, for messages. `documents`: text before the first
    question."""

    client: openai.OpenAI
    server: str
    max_tokens: int
    documents: str = ""
    _messages: list[Any] = field(default_factory=list)
    _tokens_per_s: float | None = None  # prefill speed, from the first prompt

    def ask(self, question: str, on_text: Callable[[str], object]) -> str:
        """Ask a question, and pass the answer to `on_text` part by part. Returns a line about the tiers that had the
        prompt. Raises HiCacheError."""
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
        """Return the text of an answer, the seconds until its first token, and the usage that the server reports."""
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
        """Return a line with the tiers that had the prompt's tokens, and the time that the cache saved."""
        sources = [f"{tokens:,} from {tier}" for tier, tokens in cached.items() if tokens]
        computed = f"{prompt_tokens - sum(cached.values()):,} computed"
        line = f"{prompt_tokens:,} prompt tokens: {', '.join([*sources, computed])}; first token {first_token_s:.2f} s"
        if self._tokens_per_s is None and not sources and prompt_tokens >= _MIN_TIMED_TOKENS:
            self._tokens_per_s = prompt_tokens / first_token_s
        elif self._tokens_per_s is not None and sources:
            line += f", without the cache about {prompt_tokens / self._tokens_per_s:.2f} s"
        return line


def documents_of(files: Sequence[Path]) -> str:
    """Return the texts of the files, each below the name of its file. Raises ConfigError if a file is empty or not
    text."""
    texts = {file: read_text(file).strip() for file in files}
    if empty := [str(file) for file, text in texts.items() if not text]:
        raise ConfigError(f"{empty[0]} is empty; give a file with text")
    return "\n\n".join(f"{file.name}:\n{text}" for file, text in texts.items())


def _as_own(error: openai.APIError, server: str) -> HiCacheError:
    """Convert an error of the client library into a HiCacheError that names a remedy."""
    if isinstance(error, openai.APIConnectionError):
        return NoServer(server, str(error.__cause__ or error))
    # Drop the status that the client library puts before the server's message.
    server_message = (
        error.body["message"] if isinstance(error.body, dict) and "message" in error.body else error.message
    )
    if error.code == "context_length_exceeded":
        return ConfigError(f"{server_message}; give fewer or shorter files, or begin a new chat")
    if isinstance(error, openai.AuthenticationError):
        return ConfigError(f"{server} wants another key; give --api-key, or set HICACHE_API_KEY")
    return ConfigError(f"{server}: {server_message}")


def run(flags: argparse.Namespace) -> int:
    """Chat until the end of the input. Returns 0. Answers are written to stdout, notes to stderr. Raises
    HiCacheError."""
    documents, notes = documents_of(flags.files), new_console(sys.stderr)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    piped = "" if interactive or sys.stdin is None else sys.stdin.read().strip()
    if not interactive and not piped:
        raise ConfigError("there is no question; write one on the standard input, or chat in a terminal")
    with _server(flags, notes) as server:
        first_key = (flags.api_key or ",".join(api_keys()) or "none").partition(",")[0]
        conversation = Conversation(_client(server, first_key), server, flags.max_tokens, documents)
        for question in _typed(notes) if interactive else [piped]:
            _answer(conversation, question, notes)
    return 0


def _client(server: str, key: str) -> openai.OpenAI:
    """Return the client of a server. Raises ConfigError if the environment names an unusable proxy."""
    try:
        through = openai.DefaultHttpxClient(trust_env=False) if is_loopback(server) else None
        return openai.OpenAI(
            base_url=f"{server}/v1", api_key=key, max_retries=0, timeout=_TIMEOUT_S, http_client=through
        )
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"a proxy of the environment cannot be used: {error}; correct http_proxy, https_proxy or all_proxy, or "
            "name the server in no_proxy"
        ) from error


@contextlib.contextmanager
def _server(flags: argparse.Namespace, notes: Console) -> Iterator[str]:
    """Yield the address of a server: the one given by --url, or otherwise one that this function starts in this
    process."""
    if flags.url is None:
        server = importlib.import_module("hicache.serving.server.embedded")
        with server.embedded(flags, lambda line: _note(notes, line)) as url:
            yield url.removesuffix("/v1")
    elif flags.model is not None or EngineConfig.sources_of(flags):
        raise ConfigError("the server at --url has a model and settings of its own; leave --url or the others out")
    else:
        client = MetricsClient(flags.url)
        client.read()  # raises unless the server is hicache
        yield client.server


def _typed(notes: Console) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # this import gives input() a history of lines
    _note(notes, "Ctrl-D ends the chat")
    with contextlib.suppress(EOFError):
        while True:
            if question := input("> ").strip():
                yield question
    print()


def _answer(conversation: Conversation, question: str, notes: Console) -> None:
    """Print the answer while the server generates it, and then a line about the tiers that had the prompt. Raises
    HiCacheError.

    A thread asks the server. So Ctrl-C, which raises KeyboardInterrupt in the main thread, never interrupts the client
    library: pydantic replaces this exception by its own while it builds a schema. The thread of an interrupted answer
    ends when its connection ends.
    """
    out, shown = new_console(), False
    parts: SimpleQueue[str | Future[str]] = SimpleQueue()  # the future is last, and has the result of `ask`
    asking = threading.Thread(target=_ask, args=(conversation, question, parts), name="hicache-chat", daemon=True)
    waiting = notes.status("computing the prompt")
    try:
        waiting.start()
        asking.start()
        while isinstance(part := parts.get(), str):
            if part:
                waiting.stop()
                lines, shown = map(printable, part.expandtabs(4).split("\n")), True
                out.print("\n".join(lines), end="", markup=False, highlight=False, soft_wrap=True)
        line = part.result()
    finally:
        waiting.stop()  # also after an interrupt of `start`, which has hidden the cursor
        if shown:
            out.print()
    _note(notes, line)


def _ask(conversation: Conversation, question: str, parts: SimpleQueue[str | Future[str]]) -> None:
    """Ask the question, and pass on the parts of the answer and then the result or error."""
    done: Future[str] = Future()
    try:
        done.set_result(conversation.ask(question, parts.put))
    except BaseException as error:  # noqa: BLE001 - `result()` raises it in the thread that prints
        done.set_exception(error)
    parts.put(done)


def _note(notes: Console, line: str) -> None:
    notes.print(Text(line, style="dim"), soft_wrap=True)
